"""`nsa-bench needle`: training, evaluation, files; finished parts are kept, and stopped ones continue."""

import csv
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nsa_bench.ablate import run as running
from nsa_bench.ablate.run import TrialFolder, prepare
from nsa_bench.cli import run_command
from nsa_bench.errors import BenchError, OptionError
from nsa_bench.needle import evaluate
from nsa_bench.needle.plan import load_plan
from nsa_bench.needle.run import minutes_until, read_cells, train_and_evaluate
from nsa_bench.needle.table import needle_table
from nsa_train.lifecycle.outcomes import handled
from nsa_train.run_dir import RunDirectory


def ignore() -> None:
    """Do nothing after a stage."""


def test_a_plan_is_trained_evaluated_and_written(
    plan_file: Path, capsys: pytest.CaptureFixture[str], written: list[dict[str, Any]]
) -> None:
    out = plan_file.parent
    plan_file.write_text(plan_file.read_text().replace('[arms.dense]\nmodel.attention = "dense"\n', ""))
    files = ["--json", str(out / "a.json"), "--csv", str(out / "a.csv"), "--png", str(out / "a.png"), "--commit", "abc"]
    words = ["needle", str(plan_file), "--out", str(out / "out"), *files]
    assert run_command(words) == 0
    content = json.loads((out / "a.json").read_text())
    assert content["environment"]["commit"] == "abc"
    assert content["seeds"] == {"weights": 0, "training_rows": 0, "evaluation": 5}
    assert content["task"] == {"symbols": 8, "tokens": 2, "chance": 1 / 64, "chance_of_a_pair": 1 / 5}
    # after each of two stages, before the first length, after each of two lengths, and at the end
    progress = [(len(arm["stages"]), len(arm["cells"])) for [arm] in (content["arms"] for content in written)]
    assert progress == [(1, 0), (2, 0), (2, 0), (2, 9), (2, 18), (2, 18)]
    [arm] = content["arms"]
    assert [(stage["seq_len"], stage["steps"]) for stage in arm["stages"]] == [(40, 2), (56, 1)]
    # the second stage begins with what the first has learned
    first, second = (RunDirectory(out / "out/runs" / f"nsa_stage={number}_seed=0") for number in (1, 2))
    assert f'init_from = "{first.root}"' in second.config.read_text()
    cells = {(cell["mode"], cell["length"], cell["depth"]): cell for cell in arm["cells"]}
    assert set(cells) == {(mode, length, depth) for mode in ("trained", "closed", "shuffled") for length in (64, 80) for depth in range(3)}
    assert all(0 <= cell["right"] <= cell["samples"] == 2 and 0 <= cell["found"] <= 2 for cell in cells.values())
    rows = list(csv.DictReader((out / "a.csv").read_text().splitlines()))
    assert len(rows) == len(cells)
    assert (rows[0]["arm"], rows[0]["commit"], rows[0]["seed"]) == ("nsa", "abc", "5")
    assert (out / "a.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    # finished parts are not repeated, except cells whose settings changed
    assert run_command(words) == 0
    assert json.loads((out / "a.json").read_text())["arms"] == content["arms"]
    said = capsys.readouterr().err
    assert "2 of 2 trials are finished already" in said
    assert "tokens, trained" not in said
    assert run_command([*words, "--set", "grid.samples=3"]) == 0
    assert json.loads((out / "a.json").read_text())["arms"][0]["cells"][0]["samples"] == 3


def test_after_the_minutes_no_other_arm_begins(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command_of(folder: TrialFolder) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(60)"]

    monkeypatch.setattr(running, "command_of", command_of)
    plan, out = load_plan(str(plan_file), plan_file.parent / "out")
    said: list[str] = []
    assert not train_and_evaluate(plan, out, arms=plan.arms, minutes=0.01, say=said.append, after_each=ignore, facts=dict)
    assert [line for line in said if line.startswith("started")] == ["started nsa_stage=1_seed=0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_during_an_evaluation_leaves_its_length_to_the_next_call(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    plan, out = load_plan(str(plan_file), plan_file.parent / "out")
    for stage in plan.arms[0].stages:
        TrialFolder(out, stage).run.root.mkdir(parents=True)
        TrialFolder(out, stage).judged.touch()

    def cells(self: Any, length: int) -> list[Any]:
        os.kill(os.getpid(), number)
        time.sleep(60)
        raise AssertionError(f"the signal did not end the evaluation of {length} tokens")

    monkeypatch.setattr(evaluate.Evaluation, "__init__", lambda *_: None)
    monkeypatch.setattr(evaluate.Evaluation, "cells", cells)
    monkeypatch.setattr("nsa_bench.needle.run.prepare", lambda stages, root: [TrialFolder(root, stage) for stage in stages])
    said: list[str] = []
    # a failure of this test must not end the process of all tests
    with handled({one: lambda *_: pytest.fail(f"{number.name} was left to the system") for one in (signal.SIGTERM, signal.SIGHUP)}):
        assert not train_and_evaluate(plan, out, arms=plan.arms, minutes=None, say=said.append, after_each=ignore, facts=dict)
    assert said[-1] == "stopped: the length that was being evaluated is left for the next call"
    assert not list(read_cells(plan, plan.arms[0], out))


def test_no_stage_begins_after_one_that_failed_and_other_arms_do(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command_of(folder: TrialFolder) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('it cannot be')"]

    monkeypatch.setattr(running, "command_of", command_of)
    plan, out = load_plan(str(plan_file), plan_file.parent / "out")
    said: list[str] = []
    assert not train_and_evaluate(plan, out, arms=plan.arms, minutes=None, say=said.append, after_each=ignore, facts=dict)
    began = [line.split()[1] for line in said if line.startswith("started")]
    assert began == [line.split()[1] for line in said if line.startswith("FAILED")] == [arm.stages[0].name for arm in plan.arms]
    assert said[-1].endswith(": it cannot be")


def test_an_arm_may_be_trained_alone(plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(running, "command_of", lambda folder: [sys.executable, "-c", "import sys; sys.exit('it cannot be')"])
    words = ["needle", str(plan_file), "--out", str(plan_file.parent / "out")]
    assert run_command([*words, "--arm", "dens"]) == 2
    assert "--arm='dens' is none of the arms of 'plan'; use one of nsa, dense" in " ".join(capsys.readouterr().err.split())
    assert not (plan_file.parent / "out").exists()
    assert run_command([*words, "--arm", "dense"]) == 1
    said = capsys.readouterr().err
    assert "FAILED dense_stage=1" in said
    assert "nsa_stage" not in said


def test_a_directory_may_move_and_an_arm_of_another_recipe_is_left_out(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepared(out: Path, *overrides: str) -> list[TrialFolder]:
        return [folder for arm in load_plan(str(plan_file), out, overrides)[0].arms for folder in prepare(arm.stages, out)]

    first, second = plan_file.parent / "first", plan_file.parent / "second"
    for folder in prepared(first, "train.lr=2e-3"):
        folder.run.root.mkdir(parents=True)
    first.rename(second)
    prepared(second, "train.lr=2e-3")
    with pytest.raises(OptionError, match="holds the run 'nsa_stage=1_seed=0' of another recipe"):
        prepared(second)
    for folder in prepared(first)[:2]:
        shutil.rmtree(second / "runs" / folder.run.root.name)
    monkeypatch.setattr(running, "command_of", lambda folder: [sys.executable, "-c", "import sys; sys.exit('it cannot be')"])
    words = ["needle", str(plan_file), "--out", str(second), "--arm", "nsa", "--json", str(plan_file.parent / "a.json")]
    assert run_command(words) == 1
    assert "dense is left out: its runs in" in capsys.readouterr().err
    assert [arm["arm"] for arm in json.loads((plan_file.parent / "a.json").read_text())["arms"]] == ["nsa"]


def test_a_deadline_is_over_when_its_minutes_are() -> None:
    assert minutes_until(None) is None
    assert minutes_until(time.monotonic() + 300) == pytest.approx(5, abs=0.5)
    assert minutes_until(time.monotonic() - 1e-6) == 0


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_minutes_that_leave_no_time_are_refused(plan_file: Path, minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["needle", str(plan_file), "--out", str(plan_file.parent / "out"), f"--minutes={minutes}"]) == 2
    assert "leaves no time; use 9, for instance" in capsys.readouterr().err
    assert not (plan_file.parent / "out").exists()


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("nsa.backends.slc='flash_attn'", "nsa.backends.slc='flash_attn' "),
        ("train.init_from='/nowhere'", "train.init_from='/nowhere' "),
    ],
)
def test_a_stage_that_cannot_run_is_refused_before_anything_is_written(
    plan_file: Path, capsys: pytest.CaptureFixture[str], setting: str, reason: str
) -> None:
    words = ["needle", str(plan_file), "--out", str(plan_file.parent / "out"), "--arm", "nsa", "--json", str(plan_file.parent / "a.json")]
    before = sorted(plan_file.parent.iterdir())
    assert run_command([*words, "--set", setting]) == 2
    said = capsys.readouterr().err
    assert f"nsa-bench: nsa, stage=1: {reason}" in said
    # the weights that the second stage begins with are not trained yet, which is no fault
    assert ("stage=2" in said, sorted(plan_file.parent.iterdir())) == ("init_from" not in setting, before)


def test_results_never_replace_the_plan(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = plan_file.read_text()
    assert run_command(["needle", str(plan_file), "--out", str(plan_file.parent / "out"), "--json", str(plan_file)]) == 2
    assert "is the plan (it would be lost); name another file for results" in capsys.readouterr().err
    assert plan_file.read_text() == before


def test_the_table_has_the_mean_of_all_depths_and_the_worst_one(plan_file: Path) -> None:
    plan, _ = load_plan(str(plan_file), plan_file.parent / "out")
    rights = {64: (2, 2, 2), 80: (2, 1, 0)}
    cells = [
        {"mode": "trained", "length": length, "depth": depth, "right": right, "samples": 2}
        for length, found in rights.items()
        for depth, right in enumerate(found)
    ]
    table = needle_table(plan, [{"arm": "nsa", "cells": cells[:3] + cells[4:5]}, {"arm": "dense", "cells": cells}])
    assert [[str(cell) for cell in column.cells] for column in table.columns] == [
        ["nsa", "dense"],
        ["trained"] * 2,
        ["100.0"] * 2,
        ["50.0", "50.0 (0)"],
    ]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"length": 64, "settings": {}}',
        '{"length": 64, "settings": {}, "seconds": 1, "cells": 3}',
        '{"length": 64, "settings": {}, "seconds": 1, "cells": [{"mode": "trained"}]}',
    ],
)
def test_a_damaged_file_of_cells_is_named(plan_file: Path, content: str) -> None:
    plan, out = load_plan(str(plan_file), plan_file.parent / "out")
    arm = plan.arms[0]
    path = TrialFolder(out, arm.stages[-1]).run.root / "cells" / "64.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(BenchError, match=r"cells/64.json is damaged \(.*\); delete it, and the length is evaluated again"):
        list(read_cells(plan, arm, out))


@pytest.mark.parametrize("metrics", ["{}", "[]", "damaged"])
def test_a_damaged_record_of_a_finished_stage_is_refused_before_anything_is_trained(
    plan_file: Path, metrics: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = load_plan(str(plan_file), plan_file.parent / "out")
    folder = TrialFolder(out, plan.arms[0].stages[0])
    folder.run.root.mkdir(parents=True)
    folder.run.metrics.write_text(metrics)
    folder.judged.write_text('{"by_position": []}')
    assert run_command(["needle", str(plan_file), "--out", str(out)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"the finished stage {folder.run.root.name!r} has a damaged record (" in said
    assert "the stage runs again" in said
    assert "started" not in said
    assert list(out.rglob("config.toml")) == []
