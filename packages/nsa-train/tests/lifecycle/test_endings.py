"""The records of a run that ends before its last step, and which of two requests to stop counts."""

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_train.cli import run_command
from nsa_train.errors import GuardError
from nsa_train.lifecycle.stopping import POLL_S, Stop, StopRequests
from nsa_train.loop.trainer import Trainer
from nsa_train.parallel.world import World
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry import recorder
from nsa_train.telemetry.recorder import Recorder
from nsa_train.telemetry.records import CsvTable
from nsa_train.telemetry.report import write_report
from nsa_train.telemetry.tensorboard import Board


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


@pytest.mark.parametrize(
    ("step", "kept"), [(2, "there is no checkpoint yet"), (4, "step-3 is still there")], ids=["before the first save", "after it"]
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_record_that_cannot_be_written_ends_the_run_and_says_where_it_goes_on(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, step: int, kept: str
) -> None:
    append = CsvTable.append

    def full(self: CsvTable, row: dict[str, Any]) -> None:
        if row["step"] == step:
            raise OSError(number, os.strerror(number))
        append(self, row)

    monkeypatch.setattr(CsvTable, "append", full)
    code, run = train()
    assert code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nsa-train: the run in {run.root} broke off ([Errno {number}] {os.strerror(number)}; ")
    assert line.endswith(f" MiB are free); {kept}; fix that and go on with --resume")


def test_a_resume_draws_the_report_that_the_last_step_left_no_room_for(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(paths: RunDirectory) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recorder, "write_report", full)
    code, run = train()
    assert (code, run.report.exists()) == (1, False)
    assert "fix that and go on with --resume" in capsys.readouterr().err
    monkeypatch.setattr(recorder, "write_report", write_report)
    assert run_command(["resume", str(run.root)]) == 0
    assert "done: " in capsys.readouterr().out
    assert (run.report.exists(), run.metrics.exists()) == (True, True)


@pytest.mark.parametrize("last", [4, 60], ids=["early", "late"])
def test_a_disk_that_is_full_for_tensorboard_alone_is_told_in_one_line(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last: int
) -> None:
    """A separate thread writes its events, and its traceback would come before our message."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    write, hook, count = RecordWriter.write, threading.excepthook, 0

    def full(self: RecordWriter, data: bytes) -> None:
        nonlocal count
        count += 1
        if count >= last:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", full)
    code, run = train()
    assert code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nsa-train: the run in {run.root} broke off ([Errno {errno.ENOSPC}] ")
    assert threading.excepthook == hook


def test_another_threads_failure_is_printed_while_tensorboard_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    board = Board(tmp_path)
    thread = threading.Thread(target=open, args=(tmp_path / "absent",))
    thread.start()
    thread.join()
    board.close()
    assert [type(failure.exc_value) for failure in seen] == [FileNotFoundError]


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
    monkeypatch.setattr("nsa_train.telemetry.recorder.SAMPLE_TOKENS", 8)
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
    monkeypatch.setattr("nsa_train.telemetry.recorder.SAMPLE_TOKENS", 8)
    run.metrics.unlink()
    run.training.unlink()
    assert run_command(["run", str(tiny_recipe), "--out", str(run.root), "--resume"]) == 0
    assert f"report: not drawn: {run.training} has no row that can be read" in capsys.readouterr().out


def _heard(stops: StopRequests, wanted: Stop) -> bool:
    deadline = time.monotonic() + 10
    while stops.heard() is not wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return stops.heard() is wanted


class _LostFile(type(Path())):
    """A file on a server that no longer answers."""

    def exists(self, **options: Any) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")


class _LostRunDirectory(RunDirectory):
    @property
    def halt(self) -> Path:
        return _LostFile(super().halt)


class _LostStore:
    """A store whose host is gone, or that returns invalid data."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("broken pipe")

    def check(self, keys: list[str]) -> bool:
        return False


def test_a_stack_dump_that_cannot_be_written_leaves_sigterm_heard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = RunDirectory(tmp_path)
    paths.stackdump(0).mkdir()
    with StopRequests(paths, World(device=torch.device("cpu"))) as stops:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert _heard(stops, Stop.TERMINATE)
    assert capsys.readouterr().err == f"nsa-train: no stack dump: [Errno 21] Is a directory: '{paths.stackdump(0)}'\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is full")
def test_a_stack_dump_that_a_full_disk_swallows_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = RunDirectory(tmp_path)
    paths.stackdump(0).symlink_to("/dev/full")
    with StopRequests(paths, World(device=torch.device("cpu"))) as stops:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert _heard(stops, Stop.TERMINATE)
    assert capsys.readouterr().err == f"nsa-train: no stack dump: [Errno 28] No space left on device: '{paths.stackdump(0)}'\n"


def test_a_halt_that_cannot_be_looked_up_leaves_sigterm_heard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StopRequests(_LostRunDirectory(tmp_path), World(device=torch.device("cpu"))) as stops:
        assert stops.heard(look=True) is Stop.NO
        time.sleep(3 * POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        assert _heard(stops, Stop.TERMINATE)
    assert capsys.readouterr().err == "nsa-train: .HALT cannot be looked for: [Errno 116] Stale file handle\n"


def test_a_request_that_cannot_be_shared_is_heard_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StopRequests(RunDirectory(tmp_path), World(device=torch.device("cpu"), store=_LostStore())) as stops:
        RunDirectory(tmp_path).halt.touch()
        assert _heard(stops, Stop.HALT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert _heard(stops, Stop.TERMINATE)
    assert capsys.readouterr().err == "nsa-train: the other ranks hear of the stop at the next step (broken pipe)\n"


def test_sighup_counts_as_sigterm(tmp_path: Path) -> None:
    with StopRequests(RunDirectory(tmp_path), World(device=torch.device("cpu"))) as stops:
        os.kill(os.getpid(), signal.SIGHUP)
        assert _heard(stops, Stop.TERMINATE)


def test_nohup_is_obeyed(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests(RunDirectory(tmp_path), World(device=torch.device("cpu"))):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


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
