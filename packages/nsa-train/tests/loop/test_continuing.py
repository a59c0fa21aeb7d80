"""A continued run with unusual records, keys and checkpoints, and its messages."""

import errno
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa_train.checkpoint.manifest import write_manifest
from nsa_train.cli import run_command
from nsa_train.errors import TrainError
from nsa_train.loop.trainer import Trainer
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.recipe import load_config
from nsa_train.telemetry.records import TRAINING_COLUMNS

Start = Callable[..., int]


@pytest.fixture
def run(tiny_run: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy of a run that finished at step 5, saved at 3 and 5."""
    return RunDirectory(Path(shutil.copytree(tiny_run.root, tmp_path / "run", symlinks=True)))


@pytest.fixture
def start(tiny_recipe: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A function that starts the recipe in the directory of `run` with words, and returns the exit code."""
    monkeypatch.setattr("nsa_train.telemetry.recorder.write_report", lambda paths: None)
    return lambda *words: run_command(["run", str(tiny_recipe), "--out", str(run.root), *words])


def _content(run: RunDirectory) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}


def _steps(path: Path) -> list[int]:
    return [int(line.partition(",")[0]) for line in path.read_text().splitlines()[1:]]


@pytest.mark.timeout(60)
def test_a_senseless_checkpoint_is_passed_over_and_no_pipe_is_waited_for(
    start: Start, run: RunDirectory, put_irregular, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.checkpoints / "step-5" / "state.json"
    state = json.loads(path.read_text())
    state["data"]["lanes"]["1"]["row"] = -5
    path.write_text(json.dumps(state))
    write_manifest(path.parent, 5)
    for record in (run.config, run.environment, run.validation, run.samples / "after.txt"):
        put_irregular("pipe", record)
    assert start("--resume") == 0
    said = capsys.readouterr().out
    assert f"resume: {path} is damaged: data.lanes[1].row=-5 is not an integer from 0 to " in said
    assert "resume: from step-3" in said
    assert _steps(run.training) == [1, 2, 3, 4, 5]
    assert all(record.is_file() for record in (run.config, run.environment, run.validation, run.samples / "after.txt"))
    put_irregular("pipe", run.heartbeat)
    assert start("--resume", "--set", "train.steps=6") == 2
    assert f"{run.heartbeat} cannot be continued (it is a named pipe (FIFO), " in capsys.readouterr().err


def test_damaged_records_block_no_resume_and_are_named(start: Start, run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run.training.read_bytes().splitlines(keepends=True)
    run.training.write_bytes(b"".join([*lines[:2], b"\0" * 40 + b"\n", *lines[2:]]))
    with run.training.open("a") as file:
        file.write("5" + "," * (len(TRAINING_COLUMNS) - 1) + "\n")
    run.validation.write_bytes(run.validation.read_bytes() + b"\xff\n")
    run.fallbacks.write_text(run.fallbacks.read_text() + "5,,,,,,\n4,x,0,0,0,0,0\n")
    run.environment.write_text(run.environment.read_text()[:100])
    run.config.write_text("[mod")
    run.metrics.write_text("{")
    with run.heartbeat.open("a") as file:
        file.write('{"msg": "boot"}\n{"msg": "data", "step": 1, "rank": "x"}\n')
    beats = len(run.heartbeat.read_text().splitlines())
    assert start("--resume", "--set", "train.steps=7") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume: ") and "from step" not in line]
    left_out = [line.removeprefix(f"resume: {run.root}/") for line in said]
    assert left_out[:4] == [
        "training.csv: line 3 cannot be read, and is left out",
        "val.csv: line 5 cannot be read, and is left out",
        "fallback_counters.csv: line 7 cannot be read, and is left out",
        f"heartbeat_rank0.jsonl: lines {beats - 1}, {beats} cannot be read, and are left out",
    ]
    assert [line.partition(" ")[0] for line in left_out[4:]] == ["env.json", "metrics.json", "config.toml"]
    # a row of empty fields is one
    assert _steps(run.training) == [1, 2, 3, 4, 5, 5, 6, 7]
    assert _steps(run.validation) == [0, 3, 5, 6, 7]
    assert json.loads(run.metrics.read_text())["steps"] == 7
    assert "torch" in json.loads(run.environment.read_text())


def test_the_figures_of_the_end_before_are_gone_while_a_run_goes_on(
    start: Start, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: Trainer, step: int) -> None:
        assert not run.metrics.exists()
        raise OSError("the machine went away")

    monkeypatch.setattr(Trainer, "_step", killed)
    assert start("--resume", "--set", "train.steps=8") == 1
    assert not run.metrics.exists()
    assert run_command(["report", str(run.root)]) == 0
    assert "did not reach its last step" in run.report.read_text()


def test_a_run_that_has_its_last_step_says_so_and_is_left_alone(
    start: Start, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _content(run)
    assert start("--resume") == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "resume: step-5 is the last step of train.steps=5: there is nothing to do; to go on use --set train.steps=6 or more"
    )
    assert start("--resume", "--set", "train.steps=2") == 0
    assert "resume: step-5 is beyond train.steps=2: there is nothing to do" in capsys.readouterr().out
    assert _content(run) == before


def test_a_run_whose_end_was_not_recorded_records_it(start: Start, run: RunDirectory) -> None:
    run.metrics.unlink()
    assert start("--resume") == 0
    assert json.loads(run.metrics.read_text())["steps"] == 5


def test_a_new_start_of_torchruns_finishes_what_failed_after_the_last_step(
    start: Start, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(paths: RunDirectory) -> None:
        raise OSError("the disk went away")

    monkeypatch.setattr("nsa_train.telemetry.recorder.write_report", fail)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert start("--set", "train.steps=6") == 1
    # else a new start would find nothing to do
    assert not run.metrics.exists()
    assert start("--set", "train.steps=6") == 1
    monkeypatch.undo()
    assert start("--resume", "--set", "train.steps=6") == 0
    assert run.metrics.exists() and run.report.exists()


def test_a_run_that_stopped_early_takes_no_step_more(start: Start, run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run.root)
    words = [word for key in ("early_stop_patience=1", "eval_every=1", "lr=1e-12", "steps=30") for word in ("--set", f"train.{key}")]
    assert start(*words) == 0
    before, last = _content(run), _steps(run.training)[-1]
    assert last < 30
    for _ in range(2):
        assert start("--resume", *words) == 0
        assert f"resume: step-{last} was stopped early (no better validation loss" in capsys.readouterr().out
        assert _content(run) == before
    # as after a kill between the last save and the metrics
    run.metrics.unlink()
    assert start("--resume", *words) == 0
    assert run.metrics.exists()
    assert _steps(run.training)[-1] == last
    assert start("--resume", *words, "--set", "train.early_stop_patience=0", "--set", f"train.steps={last + 1}") == 0
    assert _steps(run.training)[-1] == last + 1


def test_another_seed_changes_nothing_and_that_is_said(start: Start, run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("--resume", "--set", "train.steps=6", "--set", "train.seed=7") == 0
    out = capsys.readouterr().out
    assert "resume: train.seed=7 changes nothing: the generators of step-5 go on, seeded with 0\n" in out
    assert start("--resume", "--set", "train.steps=7", "--set", "train.seed=7") == 0
    assert "train.seed" not in capsys.readouterr().out


@pytest.mark.parametrize("how", [["--resume"], ["--resume", "3"], ["--resume", "--dry-run"], ["--resume", "--set", "train.strategy=ddp"]])
@pytest.mark.parametrize("name", ["absent", "absent/deep", "empty", "claimed", "foreign", "run/checkpoints/step-3"])
def test_a_resume_of_no_run_is_refused_and_makes_nothing(
    tiny_recipe: Path, run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: list[str], name: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "claimed" / "checkpoints").mkdir(parents=True)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / name), *how, "--set", "train.steps=9"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    if name.startswith("run/"):
        assert "is inside the run" in line
    else:
        assert ("does not exist: no run to resume" if "absent" in name else "holds no run to resume") in line
        assert line.endswith("name the run's directory, or use --resume auto, which starts one")
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_resume_auto_starts_a_run_and_then_goes_on_with_it(start: Start, run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run.root)
    words = ["--set", "train.steps=2", "--set", "train.save_every=0", "--resume", "auto"]
    assert start(*words, "--dry-run") == 0
    assert f"out: {run.root} is free" in capsys.readouterr().out
    assert not run.root.exists()
    assert start(*words) == 0
    assert "resume: " not in capsys.readouterr().out
    assert _steps(run.training) == [1, 2]
    assert start("--set", "train.steps=4", "--resume=auto") == 0
    assert "resume: from step-2\n" in capsys.readouterr().out
    assert _steps(run.training) == [1, 2, 3, 4]


def test_resume_auto_mixes_with_nothing_else(start: Start, run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run.root)
    run.root.mkdir()
    (run.root / "notes.txt").touch()
    assert start("--resume", "auto") == 2
    assert "is not empty (a run never mixes with another)" in capsys.readouterr().err


def test_resume_auto_goes_on_with_random_ids_where_the_data_are_gone(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsa_train.telemetry.recorder.write_report", lambda paths: None)
    words = [
        "run",
        str(tiny_recipe),
        "--out",
        str(tmp_path / "r"),
        "--set",
        "data.path=absent.txt",
        "--synthetic-on-fail",
        "--resume",
        "auto",
    ]
    assert run_command([*words, "--set", "train.steps=2"]) == 0
    assert run_command([*words, "--set", "train.steps=3"]) == 0
    assert "resume: from step-2\n" in capsys.readouterr().out
    assert _steps(tmp_path / "r-synthetic" / "training.csv") == [1, 2, 3]


def test_a_restart_of_torchruns_starts_a_run_that_never_began(start: Start, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(run.root)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert start("--set", "train.steps=2") == 0
    assert _steps(run.training) == [1, 2]


def test_resume_goes_on_by_the_runs_own_config(
    run: RunDirectory, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe may be gone; `--set` changes single values."""
    shutil.rmtree(run.root)
    assert start("--set", "train.steps=3", "--set", "nsa.window_size=4", "--set", "train.lr=5e-3") == 0
    capsys.readouterr()
    monkeypatch.chdir(run.root.parent)
    assert run_command(["resume", run.root.name, "--set", "train.steps=5"]) == 0
    assert "resume: from step-3\n" in capsys.readouterr().out
    assert _steps(run.training) == [1, 2, 3, 4, 5]
    config = load_config(str(run.config))
    assert (config.nsa.window_size, config.train.lr, config.train.steps) == (4, 5e-3, 5)
    # and once more, by what it wrote itself
    assert run_command(["resume", str(run.root)]) == 0
    assert "there is nothing to do" in capsys.readouterr().out
    assert run_command(["resume", str(run.root), "--dry-run", "--set", "train.steps=9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "resume: from step-5"


@pytest.mark.parametrize("name", ["absent", "empty", "recipes", "run/checkpoints", "run/checkpoints/step-3", "run/config.toml"])
def test_resume_wants_the_directory_of_a_run(run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "recipes").mkdir()
    shutil.copy(run.config, tmp_path / "recipes" / "config.toml")
    before = _content(run)
    assert run_command(["resume", str(tmp_path / name)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nsa-train: DIR='{tmp_path}/{name}' ")
    assert line.endswith("; name the directory that `nsa-train run` printed")
    assert _content(run) == before


def test_resume_hands_the_meeting_of_several_processes_on(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The workers get the run's own recipe, and the command to go on names what it does not hold."""
    seen: list[Any] = []

    def launch(words: list[str], **how: Any) -> int:
        seen.append((words, how["num_processes"], how["meeting"].max_restarts))
        return 75

    monkeypatch.setattr("nsa_train.loop.starting.launch", launch)
    sets = ["--set", "train.strategy=ddp", "--set", "train.nproc_per_node=2"]
    assert run_command(["resume", str(run.root), *sets[:2], "--nproc", "2", "--max-restarts", "3"]) == 75
    assert seen == [(["run", str(run.config), "--out", str(run.root), *sets, "--max-restarts", "3", "--resume"], 2, 3)]
    command = shlex.join(["nsa-train", "resume", str(run.root), *sets, "--max-restarts", "3"])
    assert capsys.readouterr().err == f"nsa-train: go on with: {command}\n"


def test_the_runs_config_is_never_half_written(start: Start, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full leaves the one before, by which the run goes on."""
    before, write = run.config.read_text(), Path.write_text

    def full(self: Path, text: str, **how: Any) -> int:
        if "config.toml" not in self.name:
            return write(self, text, **how)
        write(self, text[:10], **how)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert start("--resume", "--set", "train.steps=6") == 1
    assert run.config.read_text() == before


def test_a_dry_run_of_a_resume_judges_the_resume(start: Start, run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    before = _content(run)
    assert start("--resume", "--dry-run", "--set", "train.steps=9") == 0
    printed = capsys.readouterr()
    assert f"out: {run.root} goes on" in printed.out
    assert printed.out.splitlines()[-1] == "resume: from step-5"
    assert printed.err == ""
    assert start("--resume", "3", "--dry-run", "--set", "model.n_layers=1") == 2
    assert "model.n_layers=1 is not what step-3 was saved with" in capsys.readouterr().err
    assert start("--dry-run") == 2
    assert "is not empty" in capsys.readouterr().err
    assert run_command(["run", "demo", "--resume", "--dry-run"]) == 2
    assert "use --out DIR" in capsys.readouterr().err
    assert _content(run) == before


def test_a_dry_run_switches_to_synthetic_data_as_the_run_would(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(tiny_recipe), "--set", "data.path=absent.txt", "--out", str(tmp_path / "new"), "--dry-run"]
    assert run_command(words) == 2
    capsys.readouterr()
    assert run_command([*words, "--synthetic-on-fail"]) == 0
    printed = capsys.readouterr()
    assert "SYNTHETIC IDS instead of data.source='text'" in printed.err
    assert f"out: {tmp_path}/new-synthetic is free" in printed.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["run", "--print-config"], ["preflight"], ["loader-check"]])
def test_a_key_that_is_set_twice_is_said(command: list[str], tiny_recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "train.steps=7", "--set", "train.seed=1", "--set", " train . steps=9"]
    assert run_command([command[0], str(tiny_recipe), *words, *command[1:]]) == 0
    printed = capsys.readouterr()
    assert printed.err == "nsa-train: --set train.steps is given 2 times; the last one counts: train . steps=9\n"
    if command[0] == "run":
        assert "steps = 9\n" in printed.out
        assert "seed = 1\n" in printed.out


def test_fewer_than_no_restarts_are_refused(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--dry-run"]):
        assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "run"), "--max-restarts", "-1", *words]) == 2
        assert "--max-restarts=-1 is not an integer from 0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_that_went_back_starts_again_from_its_own_newest_step(
    start: Start, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resumed_at(*words: str) -> str:
        start("--resume", "3", *words)
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume: from step-")]
        return line

    def break_off(_self: Trainer) -> None:
        raise TrainError("it broke off")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", break_off)
        assert resumed_at() == "resume: from step-3"
    # the variables that torchrun sets for restarted processes
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert resumed_at("--set", "train.steps=4") == "resume: from step-3"
    assert resumed_at("--set", "train.steps=6") == "resume: from step-4"


@pytest.mark.parametrize("is_dangling", [True, False], ids=["dangling", "missing"])
def test_without_latest_the_newest_whole_checkpoint_is_read(
    is_dangling: bool, run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.checkpoints / "latest").unlink()
    if is_dangling:
        (run.checkpoints / "latest").symlink_to("step-9")
    weights = run.checkpoints / "step-5" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for number, words in enumerate((["sample", str(run.root), "--prompt", "1", "--tokens", "2"], ["ckpt", "export", str(run.checkpoints)])):
        assert run_command([*words, *([str(tmp_path / "weights")] if number else [])]) == 0
        first, second, *_ = capsys.readouterr().err.splitlines()
        assert first == f"nsa-train: {run.checkpoints}/latest names no checkpoint; step-3 is taken"
        assert "step-5/model.safetensors" in second


def test_of_two_runs_that_start_in_the_same_moment_one_exits_2(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both have looked at the directory, and found it free, before one of them claims it."""
    from nsa_train.checkpoint import CheckpointWriter
    from nsa_train.loop import run as running

    check, writers = running.check_start, []

    def beaten(*args: Any, **options: Any) -> None:
        check(*args, **options)
        writers.append(CheckpointWriter(tmp_path / "run" / "checkpoints"))

    monkeypatch.setattr(running, "check_start", beaten)
    assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "run")]) == 2
    assert "belongs to another process that still runs" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]
    writers[0].close()
