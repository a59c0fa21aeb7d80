"""The output of `nsa-train run` on the pages, compared with the program's."""

import doctest
import re
from pathlib import Path

import pytest

from nsa_train.cli import run_command
from nsa_train.model.decoder import count_parameters
from nsa_train.settings.recipe import load_config
from nsa_train.telemetry.progress import StepFigures

DOCS = Path(__file__).resolve().parent.parent / "docs"
STEP = StepFigures(step=20, loss=5.7, lr=1e-3, toks_per_s=1000, grad_norm=1.5, fetch_ms=3)


def shown(page):
    """Return the one block of text of a page."""
    [text] = re.findall(r"^```text\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return text


def shape(line):
    """Return a line with `#` for each figure, also for an omitted one."""
    return re.sub(r"\d[\d.]*(e-\d+)?|\.\.\.", "#", re.sub(r"\d+\.\d*\.\.\.", "#", line))


@pytest.mark.parametrize("page", ["tutorials/first-model.md", "runbooks/single-gpu.md"])
def test_a_step_on_a_page_has_the_figures_of_a_step(page):
    lines = [line for line in shown(page).splitlines() if " | loss " in line]
    assert [shape(line) for line in lines] == [shape(str(STEP))]


def test_the_tutorial_names_the_size_of_the_demo():
    counts = count_parameters(load_config("demo"))
    assert f"; {counts.nsa:,} parameters with nsa, {counts.dense:,} with dense\n" in shown("tutorials/first-model.md")


@pytest.mark.slow
def test_the_demo_prints_what_the_tutorial_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sets = ["train.steps=1", "train.warmup_steps=0", "train.eval_every=1", "train.save_every=1"]
    assert run_command(["run", "demo", "--out", "runs/first", *(word for key in sets for word in ("--set", key))]) == 0
    printed = capsys.readouterr().out.splitlines(keepends=True)
    expected = shown("tutorials/first-model.md")
    assert doctest.OutputChecker().check_output(expected, "".join(printed[: expected.count("\n")]), doctest.ELLIPSIS)
