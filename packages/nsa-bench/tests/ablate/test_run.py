"""`nsa-bench ablate`: concurrent trials, and finished, stopped and failed ones."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa_bench.ablate import run as running
from nsa_bench.ablate.plan import load_plan
from nsa_bench.ablate.run import TrialFolder, prepare, run_trials
from nsa_bench.ablate.table import read_earlier
from nsa_bench.cli import run_command
from nsa_bench.errors import OptionError
from nsa_train.checkpoint.claim import claimed_by_another

FINISHES = "import sys; open(sys.argv[1], 'w').write('{}')"
FAILS = "import sys; sys.exit('it cannot be')"
SAVES = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); time.sleep(60)"


def ignore() -> None:
    """Do nothing after a trial."""


@pytest.fixture
def folders(plan_file: Path) -> list[TrialFolder]:
    return prepare(load_plan(str(plan_file)).trials, plan_file.parent / "out")


@pytest.fixture
def runs_as(monkeypatch: pytest.MonkeyPatch):
    """A function that replaces a trial by a program, by its index; all others finish at once."""

    def replace(programs: dict[str, str]) -> None:
        def command_of(folder: TrialFolder) -> list[str]:
            folder.run.root.mkdir(parents=True, exist_ok=True)
            return [sys.executable, "-c", programs.get(folder.trial.name, FINISHES), str(folder.judged)]

        monkeypatch.setattr(running, "command_of", command_of)

    return replace


def test_a_plan_is_trained_compared_and_written(plan_file: Path, capsys: pytest.CaptureFixture[str], written: list[dict[str, Any]]) -> None:
    out = plan_file.parent
    files = ["--json", str(out / "a.json"), "--csv", str(out / "a.csv"), "--png", str(out / "a.png"), "--commit", "abc"]
    words = ["ablate", str(plan_file), "--out", str(out / "out"), "--side-by-side", "2", "--set", "train.batch_size=4", *files]
    plan_file.write_text(plan_file.read_text().replace("seeds = [3, 4]", "seeds = [3]").replace("[1e-3, 1e-2]", "[1e-2]"))
    assert run_command(words) == 0
    content = json.loads((out / "a.json").read_text())
    assert (content["num_finished"], content["environment"]["commit"]) == (2, "abc")
    # after each trial and at the end; both may have ended before the first is noticed
    assert [content["num_finished"] for content in written][1:] == [2, 2]
    dense, nsa = content["trials"]
    assert (dense["variant"], nsa["variant"]) == ("dense, lr=0.01", "nsa, lr=0.01")
    assert dense["tokens"] == nsa["tokens"] == 2 * 4 * 40
    assert [step for step, _ in dense["curve"]] == [0, 1, 2]
    assert dense["parameters"] < nsa["parameters"]
    assert content["variants"][1]["difference"] == pytest.approx(nsa["val_loss"] - dense["val_loss"])
    assert [row["arm"] for row in csv.DictReader((out / "a.csv").read_text().splitlines())] == ["dense", "nsa"]
    assert (out / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "2 of 2 trials" in capsys.readouterr().out
    # on another machine, trials in a result file are finished too
    elsewhere = ["ablate", str(plan_file), "--out", str(out / "elsewhere"), "--json", str(out / "b.json"), "--earlier", str(out / "a.json")]
    elsewhere += ["--set", "train.batch_size=4"]
    assert run_command(elsewhere) == 0
    assert json.loads((out / "b.json").read_text())["trials"] == content["trials"]
    # but not those of other settings, on whatever device
    assert run_command([*elsewhere[:-2], "--set", "train.weight_decay=0.5"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "with other settings (train.batch_size: 4 there, 2 here, train.weight_decay: the default there, 0.5 here)" in said
    assert run_command([*elsewhere, "--set", "train.device=cpu"]) == 0
    # each trial names where it ran; those of an older file are its writer's
    assert {trial["ran_on"]["torch"] for trial in content["trials"]} == {content["environment"]["torch"]}
    old = {**content, "environment": content["environment"] | {"gpu": "Other GPU"}}
    old["trials"] = [{name: value for name, value in trial.items() if name not in ("ran_on", "settings")} for trial in content["trials"]]
    (out / "a.json").write_text(json.dumps(old))
    assert run_command(elsewhere) == 0
    merged = json.loads((out / "b.json").read_text())
    assert [trial["ran_on"]["gpu"] for trial in merged["trials"]] == ["Other GPU"] * 2
    assert merged["environment"]["gpu"] == content["environment"]["gpu"]
    assert not list((out / "elsewhere/runs").iterdir())
    # a trial that continued on another machine names no GPU
    environment = out / "out/runs/nsa_lr=0.01_seed=3/env.json"
    first = json.loads(environment.read_text())
    environment.write_text(json.dumps(first | {"resumed": [{**first, "step": 1, "gpu": "Other GPU", "time": "2100-01-01"}]}))
    assert run_command(words) == 0
    resumed = json.loads((out / "a.json").read_text())["trials"][1]["ran_on"]
    assert (resumed["gpu"], resumed["time"], resumed["torch"]) == ("several", "2100-01-01", first["torch"])
    # finished trials are not run again
    began = time.monotonic()
    assert run_command(words) == 0
    assert "2 of 2 trials are finished already" in capsys.readouterr().err
    assert time.monotonic() - began < 5


def test_trials_run_side_by_side_and_once(folders: list[TrialFolder], runs_as) -> None:
    runs_as({})
    said: list[str] = []
    finished: list[int] = []

    def count() -> None:
        finished.append(sum(folder.judged.is_file() for folder in folders))

    assert run_trials(folders, side_by_side=3, minutes=None, say=said.append, after_each=count)
    assert len(finished) == 8
    assert finished == sorted(finished)
    assert [line for line in said[:4] if line.startswith("started")] == [f"started {folder.trial.name}" for folder in folders[:3]]
    assert sorted(line.split()[1] for line in said if line.startswith("finished")) == sorted(folder.trial.name for folder in folders)
    again: list[str] = []
    assert run_trials(folders, side_by_side=3, minutes=None, say=again.append, after_each=ignore)
    assert again == ["8 of 8 trials are finished already"]


def test_trials_are_spread_over_gpus(folders: list[TrialFolder], runs_as) -> None:
    shows = "import os, sys; open(sys.argv[1], 'w').write(os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))"
    runs_as({folder.trial.name: shows for folder in folders})
    said: list[str] = []
    assert run_trials(folders[:4], side_by_side=4, minutes=None, say=said.append, after_each=ignore, gpus=["2", "GPU-ab"])
    assert [folder.judged.read_text() for folder in folders[:4]] == ["2", "GPU-ab", "2", "GPU-ab"]
    assert said[0].endswith(" on GPU 2")
    # a single GPU needs no choice
    assert run_trials(folders[4:6], side_by_side=2, minutes=None, say=said.append, after_each=ignore, gpus=["7"])
    assert [folder.judged.read_text() for folder in folders[4:6]] == 2 * [os.environ.get("CUDA_VISIBLE_DEVICES", "all")]


@pytest.mark.parametrize(("named", "gpus"), [(None, ["0", "1"]), ("3, 5,7", ["3", "5"]), ("GPU-ab,GPU-cd", ["GPU-ab", "GPU-cd"])])
def test_gpus_are_named_as_cuda_visible_devices_does(named: str | None, gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert running.visible_gpus() == gpus


def test_a_trial_that_fails_stops_no_other_and_is_tried_again(folders: list[TrialFolder], runs_as) -> None:
    runs_as({folders[1].trial.name: FAILS})
    said: list[str] = []
    assert run_trials(folders, side_by_side=1, minutes=None, say=said.append, after_each=ignore)
    [failure] = [line for line in said if line.startswith("FAILED")]
    assert failure == f"FAILED {folders[1].trial.name} (exit code 1; {folders[1].log}): it cannot be"
    assert [folder.judged.is_file() for folder in folders] == [True, False] + 6 * [True]
    runs_as({})
    assert run_trials(folders, side_by_side=1, minutes=None, say=said.append, after_each=ignore)
    assert all(folder.judged.is_file() for folder in folders)


def test_a_failure_is_not_told_by_the_message_of_an_earlier_call(folders: list[TrialFolder], runs_as) -> None:
    said: list[str] = []
    for program in ("import sys; sys.exit('nsa-train: the disk is full')", "import os; os.kill(os.getpid(), 9)"):
        runs_as({folders[0].trial.name: program})
        run_trials(folders[:1], side_by_side=1, minutes=None, say=said.append, after_each=ignore)
    assert [line.partition("): ")[2] for line in said if line.startswith("FAILED")] == ["nsa-train: the disk is full", "it said nothing"]


def test_after_the_minutes_trials_are_saved_and_left_for_the_next_call(folders: list[TrialFolder], runs_as) -> None:
    runs_as({folders[2].trial.name: SAVES})
    said: list[str] = []
    assert not run_trials(folders, side_by_side=2, minutes=0.03, say=said.append, after_each=ignore)
    # on a busy machine it may not have installed its handler yet, and another trial may have been running
    name = folders[2].trial.name
    assert {f"saved {name}", f"stopped {name} before it had anything to save"} & set(said)
    assert any("0.03 minutes are over" in line for line in said)


def wait_until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait until `holds()` is true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_trial_saves_and_ends_with_its_ablation(plan_file: Path, number: signal.Signals) -> None:
    plan_file.write_text(
        plan_file.read_text().replace("train.steps = 2", "train.steps = 4000").replace('eval_every" = 1', 'eval_every" = 4000')
    )
    out = plan_file.parent / "out"
    run = TrialFolder(out, load_plan(str(plan_file)).trials[0]).run
    with subprocess.Popen(
        [sys.executable, "-m", "nsa_bench", "ablate", str(plan_file), "--out", str(out)], start_new_session=True
    ) as ablation:
        wait_until(lambda: run.training.exists() and len(run.training.read_text().splitlines()) > 3)
        ablation.send_signal(number)
        ablation.wait(60)
    wait_until(lambda: claimed_by_another(run.checkpoints) is None)
    assert list(run.checkpoints.glob("step-*"))


def test_every_trial_is_checked_before_the_first_starts(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file.write_text(plan_file.read_text().replace("[arms.nsa]", "[arms.nsa]\nmodel.vocab_size = 5"))
    assert run_command(["ablate", str(plan_file), "--out", str(plan_file.parent / "out")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "nsa, lr=0.001: model.vocab_size=5 is below" in said
    assert "dense" not in said
    assert not (plan_file.parent / "out").exists()


def test_every_seed_that_reads_other_files_is_checked(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file.write_text(plan_file.read_text().replace("[arms.nsa]", '[arms.nsa]\ntrain.init_from = "none-{seed}"'))
    assert run_command(["ablate", str(plan_file), "--out", str(plan_file.parent / "out")]) == 2
    said = capsys.readouterr().err
    assert all(said.count(f"nsa, lr=0.001: train.init_from='none-{seed}'") == 1 for seed in (3, 4)), said
    assert not (plan_file.parent / "out").exists()


def test_seeds_of_equal_recipes_are_checked_once(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def fail(folder: TrialFolder, *, opens_data: bool) -> list[str]:
        checked.append(folder.trial.variant.arm)
        return ["a rule is broken"]

    monkeypatch.setattr(running, "_failed", fail)
    plan_file.write_text(plan_file.read_text().replace("[arms.nsa]", '[arms.nsa]\ntrain.init_from = "none-{seed}"'))
    with pytest.raises(OptionError) as refused:
        running.check_trials(load_plan(str(plan_file)).trials, plan_file.parent / "out")
    assert sorted(checked) == ["dense", "dense", "nsa", "nsa", "nsa", "nsa"]
    # a rule that several seeds break is one line
    assert str(refused.value).count("nsa, lr=0.001: a rule is broken") == 1


def test_a_failure_is_told_by_the_runs_own_last_message(folders: list[TrialFolder]) -> None:
    folders[0].log.write_text("step 0001\nnsa-train: belongs to another process\nstep 0002 of that process\n")
    assert running._ended(folders[0], 2).endswith("): nsa-train: belongs to another process")


@pytest.mark.parametrize(
    ("code", "word"), [(0, "finished"), (75, "saved"), (130, "saved"), (-15, "stopped"), (1, "FAILED"), (-9, "FAILED")]
)
def test_the_end_of_a_trial_is_said_by_its_exit_code(folders: list[TrialFolder], code: int, word: str) -> None:
    folders[0].log.write_text("")
    (folders[0].run.checkpoints / "step-3").mkdir(parents=True)
    assert running._ended(folders[0], code).startswith(f"{word} {folders[0].trial.name}")


def test_a_trained_trial_that_is_stopped_while_it_is_evaluated_goes_on_from_its_checkpoint(folders: list[TrialFolder]) -> None:
    for step in (1000, 400):
        (folders[0].run.checkpoints / f"step-{step}").mkdir(parents=True)
    assert running._ended(folders[0], -15) == f"stopped {folders[0].trial.name}; it goes on from step 1000"


@pytest.mark.parametrize("code", [75, 130, -15])
def test_a_trial_that_stops_without_a_checkpoint_is_not_called_saved(folders: list[TrialFolder], code: int) -> None:
    folders[0].run.checkpoints.mkdir(parents=True)
    assert running._ended(folders[0], code) == f"stopped {folders[0].trial.name} before it had anything to save"


def test_a_directory_of_another_plan_is_refused_before_anything_is_written(plan_file: Path, folders: list[TrialFolder]) -> None:
    folders[0].run.root.mkdir()
    before = {path: path.read_bytes() for path in plan_file.parent.rglob("*.toml")}
    with pytest.raises(OptionError, match="holds the run 'dense_lr=0.001_seed=3' of another recipe"):
        prepare(load_plan(str(plan_file), ["train.steps=3"]).trials, plan_file.parent / "out")
    assert {path: path.read_bytes() for path in plan_file.parent.rglob("*.toml")} == before


def test_only_an_unfinished_trial_of_another_recipe_may_be_deleted_and_begun_again(plan_file: Path, folders: list[TrialFolder]) -> None:
    finished, failed = folders[:2]
    for folder in (finished, failed):
        folder.run.root.mkdir()
    finished.judged.write_text("{}")
    changed = load_plan(str(plan_file), ["train.steps=3"]).trials
    with pytest.raises(OptionError) as caught:
        prepare(changed, finished.root)
    lines = str(caught.value).splitlines()
    assert [line.partition("; ")[2] for line in lines] == [
        "name another directory",
        f"name another directory, or delete {failed.run.root} to begin it again",
    ]
    failed.run.root.rmdir()
    with pytest.raises(OptionError) as caught:
        prepare(changed, finished.root)
    assert str(caught.value) == lines[0]


def test_a_recipe_may_be_spelled_otherwise(plan_file: Path, folders: list[TrialFolder]) -> None:
    folders[0].run.root.mkdir()
    folders[0].recipe.write_text("# of an earlier version\n" + folders[0].recipe.read_text().replace(" = ", "="))
    again = prepare(load_plan(str(plan_file)).trials, plan_file.parent / "out")
    assert [folder.trial.name for folder in again] == [folder.trial.name for folder in folders]
    folders[0].recipe.write_text("lr = = 1")
    with pytest.raises(OptionError, match="another recipe"):
        prepare(load_plan(str(plan_file)).trials, plan_file.parent / "out")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--side-by-side", "0"], "--side-by-side=0 runs nothing; use 1 or more"),
        (["--minutes", "0"], "--minutes=0 leaves no time; use 9, for instance"),
        (["--minutes", "nan"], "--minutes=nan leaves no time"),
        (["--set", "train.lrr=3"], "train.lrr is unknown"),
        (["--set", "train.lr=3"], "--set train.lr=3 is not read (section grid of plan.toml sets it); change it there"),
        (["--set", "model.attention='nsa'"], "--set model.attention='nsa' is not read (section arms.dense of plan.toml sets it)"),
        (["--json", "{plan}"], "plan.toml' is the plan (it would be lost); name another file for results"),
        (["--json", "{folder}/a", "--png", "{folder}/./a"], "/a' is the file of other results (it would be lost); name another file"),
        (["--png", "/nowhere/a.png"], "No such file or directory: '/nowhere/a.png'; give a path that can be written"),
    ],
)
def test_bad_options_are_refused(plan_file: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    before = plan_file.read_text()
    words = [word.format(plan=plan_file, folder=plan_file.parent) for word in words]
    assert run_command(["ablate", str(plan_file), "--out", str(plan_file.parent / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert plan_file.read_text() == before
    assert not (plan_file.parent / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no results of an ablation (FileNotFoundError)"),
        ("{", "holds no results of an ablation (JSONDecodeError)"),
        ('{"plan": "p", "trials": [3]}', "holds no results of an ablation (TypeError)"),
        (
            '{"plan": "other", "trials": [{"variant": "nsa", "seed": 3, "steps": 2}]}',
            "has the trial 'nsa', seed 3, 2 steps of plan 'other'",
        ),
        ("[" * 20_000, "holds no results of an ablation (ValueError)"),
        ('{"plan": "plan", "trials": [{"variant": ["nsa"], "seed": 3, "steps": 2}]}', "holds no results of an ablation (TypeError)"),
        ('{"plan": "plan", "environment": 3, "trials": []}', "holds no results of an ablation (TypeError)"),
    ],
)
def test_earlier_results_of_something_else_are_refused_before_anything_is_written(
    plan_file: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = plan_file.parent / "earlier.json", plan_file.parent / "out"
    if content is not None:
        file.write_text(content)
    assert run_command(["ablate", str(plan_file), "--out", str(out), "--earlier", str(file)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


FIGURES = {
    "variant": "nsa, lr=0.01",
    "seed": 3,
    "steps": 2,
    "tokens": 100,
    "parameters": 7,
    "val_loss": 1.0,
    "best_val_loss": 1.0,
    "right": 0.5,
    "toks_per_s": 10.0,
    "curve": [[2, 1.0]],
    "by_position": [{"first": 0, "last": 0, "targets": 2, "loss": 1.0, "right": 0.5}],
    "ran_on": {},
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("val_loss", None),
        ("val_loss", "1.0"),
        ("right", math.nan),
        ("tokens", "many"),
        ("curve", []),
        ("curve", [[2, None]]),
        ("by_position", []),
        ("by_position", [{"first": 0}]),
        ("ran_on", 3),
        ("settings", 3),
        ("settings", ["train.lr"]),
    ],
)
def test_earlier_figures_that_the_table_cannot_use_are_refused_before_anything_is_written(plan_file: Path, name: str, value: Any) -> None:
    plan, file = load_plan(str(plan_file)), plan_file.parent / "earlier.json"
    file.write_text(json.dumps({"plan": "plan", "environment": {}, "trials": [FIGURES]}))
    assert [result.val_loss for result in read_earlier(plan, file)] == [1.0]
    file.write_text(json.dumps({"plan": "plan", "environment": {}, "trials": [FIGURES | {name: value}]}))
    with pytest.raises(OptionError, match="lacks figures of 'nsa, lr=0.01' .*; run the trial again"):
        read_earlier(plan, file)


def test_an_earlier_trial_that_stopped_early_counts_if_its_settings_are_the_plans(plan_file: Path) -> None:
    plan, file = load_plan(str(plan_file)), plan_file.parent / "earlier.json"
    [trial] = [trial for trial in plan.trials if (str(trial.variant), trial.seed) == (FIGURES["variant"], FIGURES["seed"])]
    stopped = FIGURES | {"steps": 1, "settings": trial.settings}
    file.write_text(json.dumps({"plan": "plan", "environment": {}, "trials": [stopped]}))
    assert [result.steps for result in read_earlier(plan, file)] == [1]
    for wrong in ({"settings": None}, {"settings": trial.settings | {"train.steps": 1}}):
        file.write_text(json.dumps({"plan": "plan", "environment": {}, "trials": [stopped | wrong]}))
        with pytest.raises(OptionError, match="has no such trial|with other settings"):
            read_earlier(plan, file)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"by_position": 3}', '{"by_position": []}'])
def test_a_damaged_record_of_a_finished_trial_is_refused_before_others_run(
    plan_file: Path, folders: list[TrialFolder], content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders[1]
    folder.run.root.mkdir(parents=True)
    folder.run.environment.write_text("{}")
    folder.run.metrics.write_text('{"steps": 2, "tokens": 100, "parameters": 7}')
    folder.judged.write_text(content)
    assert run_command(["ablate", str(plan_file), "--out", str(folder.root)]) == 1
    said = capsys.readouterr().err
    assert f"the finished trial {folder.trial.name!r} has a damaged record (" in said
    assert f"delete {folder.run.root}, and the trial runs again" in said
    assert "started" not in said
