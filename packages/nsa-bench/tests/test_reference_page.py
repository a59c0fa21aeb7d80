"""docs/reference/nsa-bench.md names every command, option and column."""

import re
from pathlib import Path

import attrs
import pytest
import torch

from nsa_bench.cases import OURS, SHAPES, Case
from nsa_bench.cli import app
from nsa_bench.measurement import Direction, Measurement, to_row
from nsa_bench.options import AttentionOptions

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/nsa-bench.md"


@pytest.fixture
def page():
    return PAGE.read_text(encoding="utf-8")


def test_every_command_is_listed(page):
    assert [command for command in app if not command.startswith("-") and f"| `nsa-bench {command}` |" not in page] == []


def test_every_option_is_listed(page):
    options = [f"--{field.name}" for field in attrs.fields(AttentionOptions) if field.name != "backward"]
    assert [option for option in (*options, "--no-backward", "--backend", "--commit", "--json", "--csv") if option not in page] == []


def test_every_option_of_each_command_is_listed(page):
    options = {
        name
        for command in app
        if not command.startswith("-")
        for argument in app[command].assemble_argument_collection()
        for name in argument.names
        # an option such as --peers, which is on by default, is listed as --no-peers
        if name.startswith("--") and not (name == argument.name and argument.field_info.default is True)
    }
    assert {"--seq-len", "--no-peers"} < options
    assert sorted(option for option in options if not re.search(rf"{option}(?![\w-])", page)) == []


def test_every_column_is_listed(page):
    case = Case(shape=SHAPES["M"], seq_len=10, dtype=torch.float32)
    row = to_row(Measurement(case=case, operation="nsa", direction=Direction.FORWARD, implementation="sdpa"), {})
    listed = {name for line in page.splitlines() if line.startswith("| `") for name in re.findall(r"`([\w-]+)`", line)}
    assert set(row) - listed == set()
    assert [name for name in OURS if f"`{name}`" not in page] == []


def test_the_shapes_are_the_codes(page):
    for shape in SHAPES.values():
        numbers = f"{shape.num_heads} | {shape.num_kv_heads} | {shape.head_dim_qk} | {shape.head_dim_v} |"
        assert re.search(rf"^\| {shape.name}\b.*\| {re.escape(numbers)}$", page, re.MULTILINE), shape.name
