"""SIGTERM, SIGUSR1 and Ctrl-C end a command with the documented code and a line, wherever it is."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa_train import cli
from nsa_train.__main__ import main
from nsa_train.cli import run_command
from nsa_train.errors import LostContactError
from nsa_train.lifecycle.outcomes import FOLDER, STOP, ending_by_signals, joint_code, reported
from nsa_train.loop.trainer import Trainer
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.recorder import Recorder

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
WORDS = {
    signal.SIGTERM: "stopped by SIGTERM before the first step or after the last",
    signal.SIGHUP: "stopped by SIGHUP before the first step or after the last",
    signal.SIGINT: "interrupted by Ctrl-C before the first step or after the last",
}
CODES = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}


@pytest.fixture(autouse=True)
def _foreground() -> Iterator[None]:
    """A shell starts background processes with SIGINT ignored; here it is not ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _swallowing(*args: Any, **kwargs: Any) -> None:
    """A library that catches every exception."""
    try:
        os.kill(os.getpid(), _swallowing.number)
    except Exception:  # noqa: BLE001 - as such a library does
        raise AssertionError("the signal was taken for an error") from None
    raise AssertionError("the command went on")


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("place", ["nsa_train.cli.load_config", "nsa_train.loop.run.check_start", "nsa_train.loop.trainer.open_dataset"])
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
    assert line.startswith(f"nsa-train: {WORDS[number]}; nothing was lost; start again with")
    if place != "nsa_train.cli.load_config":
        assert line.endswith(f" with: nsa-train run {tiny_recipe} --out {tmp_path}/run --resume auto")
    assert [signal.getsignal(one) for one in SIGNALS] == before
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize(("is_stop_of_all", "code", "left"), [(True, 0, ["code-1"]), (False, 128 + signal.SIGTERM, [])])
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
    monkeypatch.setattr("nsa_train.loop.run.check_start", _swallowing)
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


@pytest.mark.parametrize(("number", "code", "cause"), [(signal.SIGINT, 130, "interrupted by Ctrl-C"), (signal.SIGTERM, 75, "stopped by")])
def test_a_signal_in_the_loop_saves_and_says_the_whole_command_to_go_on(
    number: signal.Signals,
    code: int,
    cause: str,
    tiny_recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The printed command contains the given options and works unchanged, for any characters in names."""
    monkeypatch.setattr("nsa_train.telemetry.recorder.SAMPLE_TOKENS", 8)
    monkeypatch.setattr("nsa_train.telemetry.recorder.write_report", lambda paths: None)
    original, calls = Trainer._backward, 0

    def signalled(self: Trainer, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), number)
        return original(self, *args)

    monkeypatch.setattr(Trainer, "_backward", signalled)
    run = RunDirectory(tmp_path / "a run's")
    words = ["run", str(tiny_recipe), "--set", "train.lr=2e-3", "--out", str(run.root), "--set", 'nsa.branches=["slc", "win"]']
    assert run_command(words) == code
    *said, line = capsys.readouterr().err.splitlines()
    assert said == (["nsa-train: " + FIRST] if number == signal.SIGINT else [])
    text, _, command = line.removeprefix("nsa-train: ").partition(" with: ")
    step = int((run.checkpoints / "latest").readlink().name.removeprefix("step-"))
    assert step in (2, 3)
    assert text.startswith(cause)
    assert text.endswith(f"after step {step}, which is saved; go on")
    last = json.loads(run.heartbeat.read_text().splitlines()[-1])
    assert (last["msg"], last["code"]) == ("halt", code)
    program, *again = shlex.split(command)
    sets = ["--set", "train.lr=2e-3", "--set", 'nsa.branches=["slc", "win"]']
    assert [program, *again] == ["nsa-train", "run", str(tiny_recipe), "--out", str(run.root), *sets, "--resume"]
    assert run_command(again) == 0
    assert f"resume: from step-{step}\n" in capsys.readouterr().out


FIRST = "Ctrl-C: the run is saved after the step under way; a second Ctrl-C ends it at once, without saving"
SECOND = "second Ctrl-C: ended at once, nothing was saved since the newest checkpoint; go on with --resume"


def test_a_second_ctrl_c_ends_the_process_at_once(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the main thread is busy, as in a compiler."""
    ended: list[int] = []
    original = Trainer._backward

    def hanging(self: Trainer, *args: Any) -> Any:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            # the two are told apart by when they come
            time.sleep(0.3)
        assert ended == [130]
        return original(self, *args)

    monkeypatch.setattr("nsa_train.lifecycle.stopping.os._exit", ended.append)
    monkeypatch.setattr(Trainer, "_backward", hanging)
    _, run = train()
    assert capsys.readouterr().err.splitlines()[:2] == [f"nsa-train: {FIRST}", f"nsa-train: {SECOND}"]
    halts = [json.loads(line) for line in run.heartbeat.read_text().splitlines() if '"halt"' in line]
    assert [(halt["code"], halt["reason"]) for halt in halts[:1]] == [(130, "interrupted by a second Ctrl-C")]


@pytest.mark.parametrize(("log_every", "is_told"), [(10, True), (1, False)], ids=["compiled", "logged"])
def test_a_stop_that_waits_for_the_compiler_says_so_at_once(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log_every: int, is_told: bool
) -> None:
    """Steps that are logged are not compiled: the second is the first one that is."""
    monkeypatch.setattr("nsa_train.model.decoder.Decoder.compile_parts", lambda self: None)
    original, calls, errors = Trainer._backward, 0, []

    def compiling(self: Trainer, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
            errors.append(capsys.readouterr().err)
        return original(self, *args)

    monkeypatch.setattr(Trainer, "_backward", compiling)
    code, run = train("train.compile=true", f"train.log_every={log_every}")
    assert code == 75
    assert (run.checkpoints / "latest").readlink().name == "step-2"
    told = (
        "nsa-train: stopped by SIGTERM or SIGHUP: step 2 is being compiled, the first one that is, which may take minutes; the run is "
        f"saved after it; kill -KILL {os.getpid()} ends it at once, without saving\n"
    )
    assert errors == [told if is_told else ""]


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
    """A shell starts background processes with SIGINT ignored."""
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


@pytest.mark.parametrize(
    ("module", "words", "number", "line"),
    [
        ("platform", ["preflight", "demo"], signal.SIGINT, ""),
        ("cyclopts", ["preflight", "demo"], signal.SIGINT, ""),
        ("torch", ["preflight", "demo"], signal.SIGINT, ""),
        *(
            ("torch", ["run", "demo"], number, f"nsa-train: {WORDS[number]}; nothing was lost; start again with --resume auto\n")
            for number in CODES
        ),
    ],
)
def test_a_signal_while_modules_load_prints_no_traceback(
    module: str, words: list[str], number: signal.Signals, line: str, signalled_while_loading: Callable[..., tuple[int, str]]
) -> None:
    assert signalled_while_loading(module, ["-m", "nsa_train", *words], number) == (CODES[number], line)


def test_a_handler_of_the_program_that_calls_the_command_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_train.cli.main", lambda: None)

    def own(*_: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGINT, own)
    try:
        main()
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
