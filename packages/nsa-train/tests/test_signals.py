"""SIGTERM, SIGUSR1 and Ctrl-C end a command with the documented code and a line, wherever it is."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa_train import cli
from nsa_train.cli import run_command
from nsa_train.errors import LostContactError
from nsa_train.parallel.outcomes import FOLDER, STOP, joint_code, reported
from nsa_train.run_dir import RunDirectory
from nsa_train.signals import ending_by_signals
from nsa_train.telemetry.recorder import Recorder
from nsa_train.trainer import Trainer

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
WORDS = {
    signal.SIGTERM: "stopped by SIGTERM before the first step or after the last",
    signal.SIGHUP: "stopped by SIGHUP before the first step or after the last",
    signal.SIGINT: "interrupted by Ctrl-C; go on with --resume",
}
CODES = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}


@pytest.fixture(autouse=True)
def _foreground() -> Iterator[None]:
    """A shell lets what it starts in the background ignore SIGINT: here, nobody does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _swallowing(*args: Any, **kwargs: Any) -> None:
    """A library that lets no exception through."""
    try:
        os.kill(os.getpid(), _swallowing.number)
    except Exception:  # noqa: BLE001 - as such a library does
        raise AssertionError("the signal was taken for an error") from None
    raise AssertionError("the command went on")


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("place", ["nsa_train.cli.load_config", "nsa_train.running.check_start", "nsa_train.trainer.open_dataset"])
def test_a_signal_before_the_loop_ends_the_run_with_its_code(
    number: signal.Signals,
    place: str,
    tiny_recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    _swallowing.number = number
    monkeypatch.setattr(place, _swallowing)
    assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "run")]) == CODES[number]
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nsa-train: {WORDS[number]}")
    assert [signal.getsignal(one) for one in SIGNALS] == before
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize(("is_stop_of_all", "code", "left"), [(True, 0, ["code-1"]), (False, 1, [])])
def test_sigterm_to_one_rank_alone_is_no_end_of_the_run(
    is_stop_of_all: bool, code: int, left: list[str], tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun sends it where another rank failed, and must see a failure to end the others."""
    outcomes = tmp_path / "outcomes"
    outcomes.mkdir()
    if is_stop_of_all:
        (outcomes / STOP).touch()
    monkeypatch.setenv(FOLDER, str(outcomes))
    monkeypatch.setenv("LOCAL_RANK", "1")
    _swallowing.number = signal.SIGTERM
    monkeypatch.setattr("nsa_train.running.check_start", _swallowing)
    assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "run")]) == code
    assert [path.name for path in outcomes.glob("code-*")] == left
    assert joint_code(outcomes) == (75 if is_stop_of_all else 0)


def test_a_stack_dump_is_written_before_the_loop_too(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    load = cli.load_config

    def dumping(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return load(*args)

    monkeypatch.setattr(cli, "load_config", dumping)
    assert run_command(["run", str(tiny_recipe), "--print-config"]) == 0
    assert "in dumping" in capfd.readouterr().err


def test_ctrl_c_in_the_loop_exits_130_and_is_recorded(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Trainer._backward

    def interrupted(self: Trainer, *args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(Trainer, "_backward", interrupted)
    code, run = train()
    assert code == 130
    assert capsys.readouterr().err.splitlines() == [
        "nsa-train: interrupted by Ctrl-C; go on with --resume, from the newest checkpoint (SIGTERM would have saved first)"
    ]
    last = json.loads(run.heartbeat.read_text().splitlines()[-1])
    assert (last["msg"], last["code"]) == ("halt", 130)
    assert last["reason"].startswith("interrupted by Ctrl-C")


def test_an_error_on_its_way_out_says_more_than_the_sigterm_that_follows(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torchrun sends it to the peers of a rank that died."""

    def lose(self: Trainer, step: int) -> None:
        raise LostContactError("rank 0: lost contact with another rank")

    monkeypatch.setattr(Trainer, "_step", lose)
    monkeypatch.setattr(Recorder, "halted", lambda self, reason, **fields: os.kill(os.getpid(), signal.SIGTERM))
    code, _ = train()
    assert code == 1
    assert capsys.readouterr().err == "nsa-train: rank 0: lost contact with another rank\n"


def test_sigterm_keeps_no_error_from_being_recorded(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    halted = Recorder.halted

    def hit(self: Recorder, *args: Any, **fields: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        halted(self, *args, **fields)

    def lose(self: Trainer, step: int) -> None:
        raise LostContactError("rank 0: lost contact with another rank")

    monkeypatch.setattr(Trainer, "_step", lose)
    monkeypatch.setattr(Recorder, "halted", hit)
    code, run = train()
    last = json.loads(run.heartbeat.read_text().splitlines()[-1])
    assert (code, last["msg"], last["code"]) == (1, "halt", 1)


LAST_WORDS = """
import os, signal, sys
from nsa_train import cli
said = cli.warn
cli.warn = lambda line: (os.kill(os.getpid(), signal.SIGTERM), said(line))
cli.main(["run", "nowhere.toml"])
"""
FIRST_MOMENT = """
import os, signal
from nsa_train import cli
cli.run_command = lambda tokens: os.kill(os.getpid(), signal.SIGTERM)
cli.main(["run", "nowhere.toml"])
"""


@pytest.mark.parametrize(("program", "code", "words"), [(LAST_WORDS, 2, "nsa-train: "), (FIRST_MOMENT, -signal.SIGTERM, "")])
def test_sigterm_ends_a_process_before_its_command_and_not_its_last_words(program: str, code: int, words: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(words)
    assert bool(done.stderr) == bool(words)


def test_ctrl_c_ends_every_command_in_a_line(
    tiny_run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsa_train.telemetry.report.write_report", lambda paths: os.kill(os.getpid(), signal.SIGINT))
    assert run_command(["report", str(tiny_run.root)]) == 130
    assert capsys.readouterr().err == "nsa-train: interrupted by Ctrl-C\n"


def test_ctrl_c_is_no_failure_that_torchrun_answers_with_a_new_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert reported(130, is_own=True) == 0
    assert joint_code(tmp_path) == 130


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """A shell starts what runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending_by_signals():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc, which says what a process has loaded")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_process_is_ended_while_it_imports_torch(tiny_recipe: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    words = [sys.executable, "-m", "nsa_train", "run", str(tiny_recipe), "--out", str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert [line[: len("nsa-train: ")] for line in err.splitlines()] == ["nsa-train: "]
    assert not (tmp_path / "run").exists()
