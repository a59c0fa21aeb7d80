"""`nsa-bench select`: the choice of blocks by every installed backend, dense and packed."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from nsa_bench import measurement, selecting
from nsa_bench.cli import run_command
from nsa_bench.options import SelectOptions

pytestmark = pytest.mark.usefixtures("once")
WORDS = ["select", "--device", "cpu", "--shapes", "4/2/16/8", "--geometry", "8/4/16/4/24", "--sequences", "3"]
CHOOSER = """
from nsa_core import BranchBackend, Capability, Operation
from nsa_core.plugins import hookimpl
from nsa_core.reference.choose import choose

class Chooser:
    name, operation, capability = "chooser", Operation.CHOOSE, Capability()
    def reasons_against(self, request): return ()
    def preference(self, request): return 5
    def __call__(self, scores, factor, positions, num_kv_heads, *, geometry):
        return {body}

@hookimpl
def nsa_branch_backends():
    return [Chooser()]
"""
RIGHT = "choose(scores, factor, positions, num_kv_heads, geometry=geometry)"


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time every call once."""
    monkeypatch.setattr(measurement, "MIN_COUNT", 1)
    monkeypatch.setattr(measurement, "MAX_COUNT", 1)


def rows_of(tmp_path: Path, words: list[str], code: int = 0) -> list[dict[str, Any]]:
    file = tmp_path / "s.json"
    assert run_command([*words, "--json", str(file)]) == code
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def test_dense_and_packed_rows_are_timed(tmp_path: Path) -> None:
    rows = [row for row in rows_of(tmp_path, [*WORDS, "--lengths", "100,200"]) if row["backend"] == "sdpa"]
    assert [(row["part"], row["layout"], row["seq_len"], row["num_sequences"]) for row in rows] == [
        (part, layout, length, 1 if layout == "dense" else 3)
        for length in (100, 200)
        for part, layout in (("select", "dense"), ("choose", "dense"), ("select", "varlen"))
    ]
    assert all(row["median_ms"] > 0 and row["reason"] == "" and row["rows"] == row["seq_len"] for row in rows)


@pytest.mark.parametrize("kind", ["incapable", "policy"])
def test_a_backend_that_does_not_serve_is_no_failure(install: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    refusing = CHOOSER.replace("return ()", f"return (Reason.{kind}('it rains'),)").replace("Operation\n", "Operation, Reason\n", 1)
    install("chooser", refusing.format(body=RIGHT))
    (row,) = [row for row in rows_of(tmp_path, [*WORDS, "--lengths", "60"]) if row["backend"] == "chooser"]
    assert row["median_ms"] is None
    assert "it rains" in row["reason"]
    assert f"choose by chooser: {kind}: it rains" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("body", "code"), [(RIGHT, 0), (RIGHT + ".flip(-1)", 1)])
def test_the_choice_alone_is_compared_before_it_is_timed(install: Any, tmp_path: Path, body: str, code: int) -> None:
    install("chooser", CHOOSER.format(body=body))
    rows = [row for row in rows_of(tmp_path, [*WORDS, "--lengths", "200"], code) if row["backend"] == "chooser"]
    assert [row["part"] for row in rows] == ["choose"]
    assert (rows[0]["median_ms"] is None) == bool(code)
    assert rows[0]["reason"].startswith("wrong: ") == bool(code)


def test_few_scores_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(selecting, "MOST_SCORES", 2 * 13 * 10)
    rows = rows_of(tmp_path, [*WORDS, "--lengths", "200", "--backend", "sdpa"])
    assert [row["rows"] for row in rows if row["part"] == "choose"] == [10]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "0"], "--lengths has '0'"),
        (["--sequences", "0"], "--sequences=0 is too small"),
        (["--sequences", "30", "--lengths", "64"], "cannot hold --sequences=30"),
        (["--backend", "absent"], "--backend='absent' is not installed"),
    ],
)
def test_options_that_cannot_be_are_exit_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["select", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_every_option_and_column_is_on_the_reference_page() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/reference/nsa-bench.md").read_text(encoding="utf-8")
    case, _ = selecting.make_select_cases(SelectOptions(device="cpu", shapes="4/2/16/8", lengths="64"))
    row = selecting.to_row(selecting.SelectResult(case=case, part="select", backend="sdpa", rows=64), {})
    names = [f"--{field.name}" for field in attrs.fields(SelectOptions)]
    assert [name for name in (*names, *row) if f"`{name}" not in page] == []
