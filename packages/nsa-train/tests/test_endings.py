"""How a run that ends before its last step leaves its records, and which of two requests to stop counts."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_train.cli import run_command
from nsa_train.errors import GuardError
from nsa_train.parallel.world import World
from nsa_train.run_dir import RunDirectory
from nsa_train.stopping import Stop, StopRequests
from nsa_train.telemetry.recorder import Recorder
from nsa_train.trainer import Trainer


def _raising(error: Exception) -> Callable[..., None]:
    def step(self: Trainer, number: int) -> None:
        raise error

    return step


def test_what_a_guard_stopped_has_its_anomaly_written_down(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "_step", _raising(GuardError("enough")))
    code, run = train()
    assert code == 4
    assert run.anomaly_type.read_text() == "guard\n"


def test_what_an_error_stopped_has_none(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "_step", _raising(OSError("the disk went away")))
    code, run = train()
    assert code == 1
    assert not run.anomaly_type.exists()


@pytest.mark.parametrize("lost", [["training.csv"], ["training.csv", "val.csv", "heartbeat_rank0.jsonl", "env.json", "config.toml"]])
def test_a_finished_run_whose_records_were_deleted_says_so_and_has_not_failed(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: list[str]
) -> None:
    original = Trainer._write_samples

    def deleting(self: Trainer, name: str) -> None:
        original(self, name)
        for record in lost if name == "after.txt" else ():
            (tmp_path / "run" / record).unlink()

    monkeypatch.setattr(Trainer, "_write_samples", deleting)
    monkeypatch.setattr("nsa_train.telemetry.samples.SAMPLE_TOKENS", 8)
    assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    [line] = [line for line in said.out.splitlines() if line.startswith("report: ")]
    assert f"not drawn: DIR='{tmp_path}/run' has no training.csv " in line
    assert said.out.splitlines()[-1].endswith(f"see {tmp_path}/run")
    run = RunDirectory(tmp_path / "run")
    assert json.loads(run.heartbeat.read_text().splitlines()[-1])["msg"] == "finish"
    assert run.metrics.is_file()
    assert run_command(["report", str(run.root)]) == 2
    assert "has no training.csv (the curves come from it)" in capsys.readouterr().err


def test_a_run_resumed_to_record_its_end_needs_no_rows(
    tiny_run: RunDirectory, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(Path(shutil.copytree(tiny_run.root, tmp_path / "run", symlinks=True)))
    monkeypatch.setattr("nsa_train.telemetry.samples.SAMPLE_TOKENS", 8)
    run.metrics.unlink()
    run.training.unlink()
    assert run_command(["run", str(tiny_recipe), "--out", str(run.root), "--resume"]) == 0
    assert f"report: not drawn: {run.training} has no row that can be read" in capsys.readouterr().out


def _heard(stops: StopRequests, wanted: Stop) -> bool:
    deadline = time.monotonic() + 10
    while stops.heard() is not wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return stops.heard() is wanted


@pytest.mark.parametrize("is_halt_first", [True, False])
def test_sigterm_counts_above_halt(tmp_path: Path, is_halt_first: bool) -> None:
    """The scheduler that sends it reads the exit code; whoever wrote .HALT reads the directory."""
    paths = RunDirectory(tmp_path)
    requests = [(paths.halt.touch, Stop.HALT), (lambda: os.kill(os.getpid(), signal.SIGTERM), Stop.TERMINATE)]
    with StopRequests(paths, World(device=torch.device("cpu"))) as stops:
        for ask, wanted in requests if is_halt_first else requests[::-1]:
            ask()
            assert _heard(stops, wanted if is_halt_first else Stop.TERMINATE)
        assert stops.heard(look=True) is Stop.TERMINATE


def test_each_phase_of_a_step_has_its_range(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def phase(self: Recorder, name: str) -> Any:
        names.append(name)
        return nullcontext()

    monkeypatch.setattr(Recorder, "phase", phase)
    code, _ = train("train.steps=2", "train.accumulate=2")
    assert code == 0
    assert names == ["fetch", *["forward", "backward"] * 2, "update"] * 2
