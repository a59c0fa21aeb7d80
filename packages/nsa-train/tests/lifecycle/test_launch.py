"""`nsa-train run` starts torchrun where several processes are asked for, passes signals on and returns one exit code."""

import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nsa_train.checkpoint.claim import claimed_by_another
from nsa_train.cli import run_command
from nsa_train.errors import ConfigError
from nsa_train.lifecycle.launch import Meeting, must_launch, num_processes
from nsa_train.lifecycle.outcomes import FOLDER, LAUNCHER, STARTER, STOP, has_lost_launcher, joint_code, note_worker, reported, worker_pids
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.anomalies import RankWatch
from nsa_train.telemetry.watch import is_gone, watch

TIMEOUT_S = 120


def _command(recipe: Path, out: Path, *words: str) -> list[str]:
    sets = ("train.log_every=1000", "train.eval_every=1000", "train.batch_size=4", "train.samples=false")
    return [sys.executable, "-m", "nsa_train", "run", str(recipe), "--out", str(out), *(w for s in sets for w in ("--set", s)), *words]


@contextmanager
def _started(*words: str, recipe: Path, out: Path) -> Iterator["subprocess.Popen[str]"]:
    # a shell starts background processes with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(_command(recipe, out, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for(run: RunDirectory, step: int, *, rank: int = 1) -> int:
    """Wait until `rank` has ended `step` and return its process id."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for beat in _beats(run, rank):
            if beat["msg"] == "step_end" and beat["step"] >= step:
                return int(beat["pid"])
        time.sleep(0.05)
    raise AssertionError(f"no step {step} in {run.root}")


def _last_step(run: RunDirectory) -> int:
    """Return the last step, which both ranks ended."""
    [step] = {[beat["step"] for beat in _beats(run, rank) if beat["msg"] == "step_end"][-1] for rank in (0, 1)}
    return int(step)


def _beats(run: RunDirectory, rank: int) -> list[dict[str, Any]]:
    path = run.heartbeat_of(rank)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


ENDLESS = ("--nproc", "2", "--set", "train.strategy=ddp", "--set", "train.steps=100000", "--set", "train.save_every=1000")
SHORT = ("--set", "train.steps=100000")


def test_sigterm_to_the_launcher_saves_on_all_ranks_and_exits_75(tiny_recipe: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with _started(*ENDLESS, recipe=tiny_recipe, out=run.root) as process:
        pid = _wait_for(run, 3)
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75, err
    assert pid != process.pid
    last = [[beat for beat in _beats(run, rank) if beat["msg"] == "step_end"][-1]["step"] for rank in (0, 1)]
    assert last[0] == last[1]
    assert (run.checkpoints / "latest").readlink().name == f"step-{last[0]}"
    # rank 0 prints the message for all
    assert err.count("stopped by SIGTERM or SIGHUP after step") == 1
    assert "Traceback" not in err
    assert out.count("parameters with nsa") == 1
    for rank in (0, 1):
        assert "test" not in run.stackdump(rank).read_text()
        assert "trainer.py" in run.stackdump(rank).read_text()


@pytest.mark.parametrize(("number", "code"), [pytest.param(signal.SIGHUP, 75, marks=pytest.mark.slow), (signal.SIGINT, 130)])
def test_a_closed_terminal_and_ctrl_c_save_too(tiny_recipe: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    run = RunDirectory(tmp_path / "run")
    with _started(*ENDLESS, recipe=tiny_recipe, out=run.root) as process:
        _wait_for(run, 3)
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, err
    assert "Traceback" not in err
    step = _last_step(run)
    assert (run.checkpoints / "latest").readlink().name == f"step-{step}"
    said = [line for line in err.splitlines() if line.startswith("nsa-train: ")]
    first = ["nsa-train: Ctrl-C: the run is saved after the step under way; a second Ctrl-C ends it at once, without saving"]
    cause = "interrupted by Ctrl-C" if number == signal.SIGINT else "stopped by SIGTERM or SIGHUP"
    command = shlex.join(["nsa-train", *_command(tiny_recipe, run.root)[3:], *ENDLESS[2:], "--set", "train.nproc_per_node=2"])
    assert said == [
        *(first if number == signal.SIGINT else []),
        f"nsa-train: {cause} after step {step}, which is saved; go on with --resume",
        f"nsa-train: go on with: {command} --resume auto",
    ]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_ranks_at_once_and_starts_none_anew(tiny_recipe: Path, tmp_path: Path) -> None:
    """Also one that hangs: it was stopped, as is a rank that waits for one that has gone."""
    run = RunDirectory(tmp_path / "run")
    with _started(*ENDLESS, "--max-restarts", "1", recipe=tiny_recipe, out=run.root) as process:
        held, other = _wait_for(run, 3, rank=1), _wait_for(run, 3, rank=0)
        os.kill(held, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGINT)
        while "saved after the step under way" not in process.stderr.readline():
            pass
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert "second Ctrl-C: ended at once, nothing was saved since the newest checkpoint" in err
    assert not (run.checkpoints / "latest").exists()
    assert len([beat for beat in _beats(run, 0) if beat["msg"] == "boot"]) == 1
    assert [beat["reason"] for beat in _beats(run, 0) if beat["msg"] == "halt"] == ["interrupted by a second Ctrl-C"]
    assert [pid for pid in (held, other) if not is_gone(RankWatch(rank=0, pid=pid))] == []


AGENT = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("is_ours", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["our launcher", "torchrun"])
def test_ranks_whose_launcher_was_killed_save_and_end(tiny_recipe: Path, tmp_path: Path, is_ours: bool) -> None:
    run = RunDirectory(tmp_path / "run")
    words = _command(tiny_recipe, run.root, *(ENDLESS if is_ours else ENDLESS[2:]))
    log = tmp_path / "err"
    with log.open("w") as err, subprocess.Popen(words if is_ours else [*AGENT, *words[1:]], stdout=err, stderr=err) as launcher:
        pids = [_wait_for(run, 3, rank=rank) for rank in (0, 1)]
        claim = claimed_by_another(run.checkpoints)
        launcher.kill()
    assert claim is not None
    assert f"belongs to another process that still runs: pid {pids[0]} on host {platform.node()} " in claim
    assert f"end that one (kill {pids[0]}, which saves)" in claim
    deadline = time.monotonic() + 30
    while (left := [pid for pid in pids if not is_gone(RankWatch(rank=0, pid=pid))]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    step = _last_step(run)
    assert (run.checkpoints / "latest").readlink().name == f"step-{step}"
    assert list(run.checkpoints.glob(".*")) == []
    for rank in (0, 1):
        last = _beats(run, rank)[-1]
        assert (last["msg"], last["code"], last["step"]) == ("halt", 75, step)
    [said] = [line for line in log.read_text().splitlines() if line.startswith("nsa-train: ")]
    assert said.startswith(f"nsa-train: stopped by the end of the launcher after step {step}, which is saved; go on with: ")
    assert said.endswith(" --resume")
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(("strategy", "killed"), [pytest.param("ddp", 1, marks=pytest.mark.slow), ("fsdp", 0)])
def test_the_peers_of_a_rank_that_died_say_so_in_a_line(tiny_recipe: Path, tmp_path: Path, strategy: str, killed: int) -> None:
    run, peer = RunDirectory(tmp_path / "run"), 1 - killed
    words = [word.replace("train.strategy=ddp", f"train.strategy={strategy}") for word in ENDLESS]
    with _started(*words, recipe=tiny_recipe, out=run.root) as process:
        pid = _wait_for(run, 3, rank=killed)
        os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    [line, launchers] = [line for line in err.splitlines() if line.startswith("nsa-train: ")]
    assert launchers == f"nsa-train: rank {killed} (process {pid}) {_ended_by('SIGKILL')}"
    assert line.startswith(f"nsa-train: rank {peer}: lost contact with another rank (")
    assert line.endswith("); its message, or the launcher's, says why; go on with --resume")
    last = _beats(run, peer)[-1]
    assert (last["msg"], last["code"]) == ("halt", 1)
    assert last["reason"] == line.removeprefix("nsa-train: ")


def _ended_by(name: str) -> str:
    return f"was ended by {name}, and the run with it (it needs all ranks); go on with --resume auto"


def test_a_signal_to_one_rank_alone_before_the_first_step_is_told(tiny_recipe: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with _started(*ENDLESS, recipe=tiny_recipe, out=run.root) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + TIMEOUT_S
        while len(pids := children.read_text().split()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(int(pids[1]), signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, err
    [line] = [line for line in err.splitlines() if line.startswith("nsa-train: ")]
    assert line == f"nsa-train: rank 1 (process {pids[1]}) {_ended_by('SIGTERM')}"
    assert not run.root.exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_killed_rank_is_started_again_from_the_newest_checkpoint(tiny_recipe: Path, tmp_path: Path, strategy: str) -> None:
    """`watch --halt` looks on, and leaves the run alone between the death and the new start."""
    run = RunDirectory(tmp_path / "run")
    ranks = 1 if strategy == "single" else 2
    sets = (f"train.strategy={strategy}", "train.steps=60", "train.save_every=5")
    words = ("--nproc", str(ranks), "--max-restarts", "1", *(word for override in sets for word in ("--set", override)))
    said: list[str] = []
    with _started(*words, recipe=tiny_recipe, out=run.root) as process:
        pid = _wait_for(run, 12, rank=ranks - 1)
        arguments = {"is_halting": True, "is_once": False, "interval_s": 0.1, "say": said.append}
        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(watch, run, **arguments)
            os.kill(pid, signal.SIGKILL)
            out, err = process.communicate(timeout=TIMEOUT_S)
            assert seen.result(TIMEOUT_S) == 0, said
    assert process.returncode == 0, err
    assert "resume: from step-" in out
    assert said[-1] == "watch: nothing is wrong; the run ended at step 60"
    assert not run.halt.exists()
    assert [beat["restarts_left"] for beat in _beats(run, 0) if beat["msg"] == "boot"] == [1, 0]
    steps = [line.split(",")[0] for line in run.training.read_text().splitlines()]
    assert steps == ["step", *map(str, range(1, 61))]


@pytest.mark.slow
def test_a_configuration_error_of_the_workers_is_the_launchers(tiny_recipe: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    words = ("--nproc", "2", "--set", "train.strategy=ddp", "--set", "nsa.backends.win=nosuch")
    done = subprocess.run(_command(tiny_recipe, run.root, *words), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    assert done.stderr.count("nsa.backends.win='nosuch'") == 1
    assert "Traceback" not in done.stderr
    assert not run.root.exists()


@pytest.mark.slow
def test_torchrun_itself_may_start_the_ranks(tiny_recipe: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    words = _command(tiny_recipe, run.root, "--set", "train.strategy=fsdp")[1:]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in run.heartbeats} == {"heartbeat_rank0.jsonl", "heartbeat_rank1.jsonl"}


@pytest.mark.slow
def test_two_hosts_meet_and_train_as_one(tiny_recipe: Path, tmp_path: Path) -> None:
    """Both hosts are this one; each is started with the same command, as the runbook says."""
    run = RunDirectory(tmp_path / "run")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    words = ("--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}", "--set", "train.strategy=fsdp")
    with _started(*words, recipe=tiny_recipe, out=run.root) as first, _started(*words, recipe=tiny_recipe, out=run.root) as second:
        outputs = [host.communicate(timeout=TIMEOUT_S) for host in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert {path.name for path in run.heartbeats} == {"heartbeat_rank0.jsonl", "heartbeat_rank1.jsonl"}
    assert sum(out.count("parameters with nsa") for out, _ in outputs) == 1


def test_a_worker_knows_when_its_launcher_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it ended before the worker was up, and where another program stands between the two."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    # it is a zombie until its status is collected
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setenv(STARTER, str(ended.pid))
    assert has_lost_launcher()
    ended.wait()
    monkeypatch.delenv(STARTER)
    monkeypatch.setenv(LAUNCHER, str(ended.pid))
    assert not has_lost_launcher(), "whoever is no worker may outlive its parent"
    monkeypatch.setenv(STARTER, str(ended.pid))
    assert has_lost_launcher(), "but not the one that started it to end with it"
    monkeypatch.setenv(STARTER, str(os.getpid()))
    assert not has_lost_launcher()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert has_lost_launcher()
    monkeypatch.setenv(LAUNCHER, str(os.getpid()))
    assert not has_lost_launcher()
    monkeypatch.delenv(LAUNCHER)
    assert not has_lost_launcher()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert has_lost_launcher()


def test_a_worker_without_a_launcher_ends_before_it_trains(tiny_recipe: Path, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", FOLDER: str(tmp_path), LAUNCHER: str(ended.pid)}
    words = _command(tiny_recipe, tmp_path / "run")
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env={**os.environ, **place})
    # the signal may come before the command does
    assert done.returncode in (0, -signal.SIGTERM)
    assert done.stderr == ""
    assert not (tmp_path / "run").exists()


def test_one_process_needs_no_launch(tiny_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    single, two = tiny_config(), tiny_config("train.strategy=ddp", "train.nproc_per_node=2")
    assert (num_processes(single), num_processes(two)) == (1, 2)
    assert not must_launch(single, Meeting())
    assert must_launch(two, Meeting())
    # one per GPU, or one where there is none
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert num_processes(tiny_config("train.strategy=fsdp")) == 4
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not must_launch(two, Meeting())


def test_several_hosts_must_say_where_they_meet(tiny_config: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"--nnodes=2 needs a rendezvous; use --rdzv-endpoint HOST:29400"):
        must_launch(tiny_config("train.strategy=ddp"), Meeting(nnodes="2"))
    assert Meeting(nnodes="2", rdzv_endpoint="a:29400", max_restarts=3).torchrun_words() == [
        *("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:29400", "--rdzv-id", "nsa-train", "--max-restarts", "3"),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": "abc", "rdzv_endpoint": "a:29400"}, r"--nnodes='abc' is neither a number of hosts nor MIN:MAX"),
        ({"nnodes": "2:1", "rdzv_endpoint": "a:29400"}, r"--nnodes='2:1' is neither a number of hosts nor MIN:MAX"),
        ({"nnodes": "2", "rdzv_endpoint": "a"}, r"--rdzv-endpoint='a' is not HOST:PORT .*; use HOST:29400"),
        ({"nnodes": "2", "rdzv_endpoint": "a:65536"}, r"--rdzv-endpoint='a:65536' is not HOST:PORT \(a port from 0 to 65,535\)"),
        ({"max_restarts": 10**30}, r"--max-restarts=1000000000000000000000000000000 is not an integer from 0 to 1,000; use 3"),
    ],
)
def test_hosts_that_cannot_meet_are_refused(tiny_config: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        must_launch(tiny_config("train.strategy=ddp"), Meeting(**options))


@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_one_process_on_several_hosts_is_refused_before_they_meet(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], nnodes: str
) -> None:
    words = ["run", str(tiny_recipe), "--out", str(tmp_path / "out"), "--nnodes", nnodes, "--rdzv-endpoint", "localhost:1"]
    assert run_command(words) == 2
    assert "train.strategy='single' is one process, and 2 are asked for" in capsys.readouterr().err


def test_a_worker_reports_a_deliberate_end_as_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reported(75, is_own=True) == 75
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert note_worker()
    assert worker_pids(tmp_path) == [os.getpid()]
    (tmp_path / STOP).touch()
    assert not note_worker(), "the launcher was told to stop before it could signal this process"
    assert joint_code(tmp_path) == 0
    for code, seen in ((1, 1), (0, 0), (2, 0), (3, 0), (4, 0), (75, 0)):
        assert reported(code, is_own=True) == seen
        assert joint_code(tmp_path) == code
    # the echo of another rank's error is not this rank's code
    assert reported(1, is_own=False) == 1
    assert joint_code(tmp_path) == 75
