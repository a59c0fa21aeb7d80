"""Each rule of `watch` detects its anomaly and accepts a healthy run; its files and its signals."""

import json
import math
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa_train.cli import run_command
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.anomalies import BOOT_STALL_S, Finding, RankWatch
from nsa_train.telemetry.records import pid_namespace
from nsa_train.telemetry.watch import Clocks, Watcher, request_stack_dump, watch

HEALTHY_GATES = {"gate_entropy_mean": 0.9, "gate_max_gate": 0.5, "gate_collapse_frac": 0.0, "gate_branch_shares": {"cmp": 0.5, "win": 0.5}}


def _steps(count: int, *, seconds: float = 1.0, start: float = 0.0, **fields: Any) -> list[dict[str, Any]]:
    common = {"msg": "step_end", "toks_per_s": 1000.0, "grad_norm": 1.0, "loss": 2.0, "rank": 0, **fields}
    return [{"ts": start + seconds * index, "step": index, **common} for index in range(1, count + 1)]


def _watched(events: list[dict[str, Any]]) -> RankWatch:
    rank = RankWatch(0)
    for event in events:
        rank.observe(event)
    return rank


def _kinds(events: list[dict[str, Any]], now: float | None = None) -> list[str]:
    """Return what is found at the time `now`, by the clock of the events, where the last one was read as it was written."""
    return [finding.kind for finding in _watched(events).findings(0.0 if now is None else now - events[-1]["ts"])]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "directory", "holes"])
def test_a_heartbeat_that_is_no_regular_file_is_named(tmp_path: Path, put_irregular, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    put_irregular(kind, tmp_path / "heartbeat_rank1.jsonl")
    assert run_command(["watch", str(tmp_path), "--once"]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path / 'heartbeat_rank1.jsonl'} cannot be read ({put_irregular.kinds[kind]}, and only a regular file" in told
    assert told.count("\n") == 1


def test_a_heartbeat_whose_line_has_no_end_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "heartbeat_rank0.jsonl").open("wb") as file:
        file.truncate(2**31)
    assert run_command(["watch", str(tmp_path), "--once"]) == 2
    assert "the line at byte 0 is longer than 16 MiB" in capsys.readouterr().err


def test_a_healthy_run_has_no_anomaly() -> None:
    assert _kinds([{"msg": "progress", "step": 0, "ts": 0.0, "fallbacks_total": 0, **HEALTHY_GATES}, *_steps(50)]) == []


@pytest.mark.parametrize(("seconds", "silence", "found"), [(1, 9, []), (1, 60, ["stall"]), (60, 500, []), (60, 700, ["stall"])])
def test_a_stall_is_measured_in_steps_of_the_run(seconds: float, silence: float, found: list[str]) -> None:
    """Not in a fixed 180 s: that is long for quick steps and short for slow ones."""
    events = _steps(20, seconds=seconds)
    assert _kinds(events, now=events[-1]["ts"] + silence) == found


def test_a_logged_step_counts_once_and_steps_between_logs_count_each() -> None:
    twice = [copy for event in _steps(20) for copy in ({**event, "msg": "progress", "ts": event["ts"] - 0.001}, event)]
    assert _watched(twice).step_ema_s == pytest.approx(1, abs=0.01)
    every_tenth = [{**event, "msg": "progress"} for event in _steps(100, seconds=2) if event["step"] % 10 == 0]
    assert _watched(every_tenth).step_ema_s == pytest.approx(2)
    assert _kinds(every_tenth, now=every_tenth[-1]["ts"] + 30) == ["stall"]
    zero = [{**event, "msg": "progress", "grad_norm": 0.0} for event in _steps(3)]
    assert _kinds(zero) == ["zero_gradients"]


def test_the_mean_of_step_times_follows_the_run() -> None:
    slow = _steps(60, seconds=10)
    quick = [{**event, "step": event["step"] + 60} for event in _steps(60, seconds=0.5, start=slow[-1]["ts"])]
    assert _kinds([*slow, *quick], now=quick[-1]["ts"] + 20) == ["stall"]
    assert _kinds(slow, now=slow[-1]["ts"] + 20) == []


def test_evaluation_and_saving_are_no_stall() -> None:
    events = _steps(10)
    begun = [*events, {"msg": "save_begin", "step": 10, "ts": 10.5}]
    assert _kinds(begun, now=10.5 + 120) == []
    assert _kinds(begun, now=10.5 + 601) == ["stall"]
    # a pause once seen is expected again
    paused = [*events, {"msg": "val", "step": 10, "ts": 50.0}, *_steps(5, start=50.0)]
    assert _watched(paused).step_ema_s == pytest.approx(1)
    assert _kinds(paused, now=55 + 100) == []
    assert _kinds(paused, now=55 + 121) == ["stall"]


def test_the_first_step_may_take_long() -> None:
    boot = [{"msg": "boot", "step": 0, "ts": 0.0}]
    assert _kinds(boot, now=BOOT_STALL_S - 1) == []
    assert _kinds(boot, now=BOOT_STALL_S + 1) == ["stall"]


@pytest.mark.parametrize("last", ["finish", "halt"])
def test_a_run_that_ended_does_not_stall(last: str) -> None:
    events = [*_steps(5), {"msg": last, "step": 5, "ts": 6.0}]
    assert _kinds(events, now=1e6) == []


@pytest.mark.parametrize(
    "gates", [{"gate_entropy_mean": 0.19}, {"gate_max_gate": 0.91}, {"gate_collapse_frac": 0.51}], ids=["entropy", "largest", "share"]
)
def test_gates_collapse_when_it_is_seen_three_times(gates: dict[str, float]) -> None:
    sick = [{"msg": "progress", "step": step, "ts": float(step), **HEALTHY_GATES, **gates} for step in range(3)]
    assert _kinds(sick) == ["gate_collapse"]
    assert _kinds(sick[:2]) == []
    assert _kinds([sick[0], sick[1], {**sick[1], **HEALTHY_GATES}, sick[2]]) == []


def test_a_single_branch_holds_every_gate_and_is_no_fault() -> None:
    alone = {"gate_entropy_mean": 0.0, "gate_max_gate": 1.0, "gate_collapse_frac": 1.0, "gate_branch_shares": {"win": 1.0}}
    assert _kinds([{"msg": "progress", "step": step, "ts": float(step), **alone} for step in range(5)]) == []


def test_zero_gradients_are_seen() -> None:
    assert _kinds([*_steps(5), *_steps(3, start=5, grad_norm=0.0)]) == ["zero_gradients"]
    assert _kinds([*_steps(5), *_steps(2, start=5, grad_norm=0.0)]) == []


def _then(before: list[dict[str, Any]], count: int, **fields: Any) -> list[dict[str, Any]]:
    """Return the events `before` and `count` steps more, of the same pace where `fields` do not say another."""
    last = before[-1]
    more = _steps(count, **{"seconds": last["ts"] - before[-2]["ts"], "start": last["ts"], **fields})
    return [*before, *({**event, "step": event["step"] + last["step"]} for event in more)]


@pytest.mark.parametrize(("seconds", "at_once", "in_the_end"), [(1, 60, 300), (0.05, 1200, 6000), (60, 5, 20)])
def test_throughput_that_falls_and_stays_low_is_a_flatline(seconds: float, at_once: int, in_the_end: int) -> None:
    """It must last five minutes and 20 steps: a minute of noise ends no run of days."""
    before = _steps(2 * in_the_end, seconds=seconds)
    assert _kinds(_then(before, at_once, toks_per_s=100.0)) == []
    assert _kinds(_then(before, in_the_end, toks_per_s=400.0)) == ["flatline"]
    assert _kinds(_then(before, in_the_end, toks_per_s=600.0)) == []


def test_three_steps_without_throughput_are_a_flatline() -> None:
    assert _kinds(_then(_steps(20), 3, toks_per_s=0.0)) == ["flatline"]
    assert _kinds(_then(_steps(20), 2, toks_per_s=0.0)) == []


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_flatline(seed: int) -> None:
    """Steps whose speed varies by a factor of e either way, two thirds of the time."""
    draw = random.Random(seed)
    noisy = [{**event, "toks_per_s": 1000 * math.exp(draw.gauss(0, 1))} for event in _steps(2000)]
    rank = RankWatch(0)
    for event in noisy:
        rank.observe(event)
        assert rank.findings(0.0) == []


def test_steps_of_short_rows_are_no_flatline() -> None:
    """Without packing a step may have a fraction of the tokens, which a GPU does not take in a fraction of the time."""
    full = _steps(50, seconds=10, tokens=64)
    assert _kinds(_then(full, 30, toks_per_s=100.0, tokens=16)) == []
    assert _kinds(_then(full, 30, toks_per_s=100.0, tokens=64)) == ["flatline"]
    assert _watched(_then(_steps(50, seconds=10, tokens=16, toks_per_s=100.0), 30, tokens=64)).steadiness() == pytest.approx(10)


def test_fallbacks_that_rise_are_seen() -> None:
    def progress(*totals: int) -> list[dict[str, Any]]:
        return [{"msg": "progress", "step": step, "ts": float(step), "fallbacks_total": total} for step, total in enumerate(totals)]

    assert _kinds(progress(0, 0, 4)) == ["rising_fallbacks"]
    assert _kinds(progress(4, 4, 4)) == []


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def _write(run: RunDirectory, events: list[dict[str, Any]], rank: int = 0) -> None:
    with run.heartbeat_of(rank).open("a") as file:
        file.writelines(json.dumps({"pid": 2**22 + 1, "host": platform.node(), **event, "rank": rank}) + "\n" for event in events)


class _Machine:
    """The watcher's machine: time passes while it sleeps, and due events happen."""

    def __init__(self, *, wall: float = 0.0) -> None:
        self.monotonic, self.wall = 0.0, wall
        self.due: list[tuple[float, Callable[[], None]]] = []

    def sleep(self, seconds: float) -> None:
        self.monotonic, self.wall = self.monotonic + seconds, self.wall + seconds
        happens = [action for at, action in self.due if at <= self.monotonic]
        self.due = [(at, action) for at, action in self.due if at > self.monotonic]
        for action in happens:
            action()

    def jump(self, seconds: float) -> None:
        """Set this machine's wall clock."""
        self.wall += seconds


def _watching(run: RunDirectory, machine: _Machine, *, is_once: bool = False, interval_s: float = 5.0) -> tuple[int, list[str]]:
    """Return exit code and lines of `watch DIR --halt` on `machine`."""
    lines: list[str] = []
    clocks = Clocks(monotonic=lambda: machine.monotonic, wall=lambda: machine.wall, sleep=machine.sleep)
    code = watch(run, is_halting=True, is_once=is_once, interval_s=interval_s, say=lines.append, clocks=clocks)
    return code, lines


class _Run:
    """A rank of a step a second, whose clock may differ from the watcher's: 20 steps before watching begins, then those that a test adds."""

    def __init__(self, run: RunDirectory, machine: _Machine, *, ahead_s: float = 0.0, rank: int = 0, has_uptime: bool = True) -> None:
        self.run, self.machine, self.ahead_s, self.rank, self.has_uptime = run, machine, ahead_s, rank, has_uptime
        self.step = 0
        for second in range(-19, 1):
            self._beat(second, "step_end", wall=machine.wall + second)

    def steps(self, until: int) -> "_Run":
        """Take a step each second up to `until`."""
        for second in range(1, until + 1):
            self.machine.due.append((second, lambda second=second: self._beat(second, "step_end")))
        return self

    def ends(self, at: int) -> None:
        """Take a step each second, the last one at `at`."""
        self.steps(at).machine.due.append((at, lambda: self._beat(at, "finish")))

    def _beat(self, second: int, msg: str, wall: float | None = None) -> None:
        self.step += msg == "step_end"
        uptime = {"uptime_s": float(second + 20)} if self.has_uptime else {}
        event = {"ts": (self.machine.wall if wall is None else wall) + self.ahead_s, **uptime, "step": self.step, "msg": msg}
        _write(self.run, [{"toks_per_s": 1000.0, "grad_norm": 1.0, **event}], rank=self.rank)


NOW, HOUR = 1.8e9, 3600.0
CLOCKS = [0.0, HOUR, -HOUR, 24 * HOUR]
"""Lead of the run's clock over the watcher's."""


@pytest.mark.parametrize("is_once", [False, True])
@pytest.mark.parametrize("ahead_s", CLOCKS)
def test_a_healthy_run_is_left_alone_whatever_the_clocks_say(run: RunDirectory, ahead_s: float, is_once: bool) -> None:
    machine = _Machine(wall=NOW)
    _Run(run, machine, ahead_s=ahead_s).ends(40)
    code, lines = _watching(run, machine, is_once=is_once)
    assert (code, run.halt.exists(), run.anomaly_type.exists()) == (0, False, False)
    assert lines[-1].startswith("watch: nothing is wrong")
    assert machine.monotonic == ((1 if ahead_s else 0) if is_once else 40)


@pytest.mark.parametrize("is_once", [False, True])
@pytest.mark.parametrize("ahead_s", CLOCKS)
def test_a_stall_is_found_whatever_the_clocks_say(run: RunDirectory, ahead_s: float, is_once: bool) -> None:
    machine = _Machine(wall=NOW)
    _Run(run, machine, ahead_s=ahead_s)
    # the last step lies a minute back
    machine.sleep(60)
    code, lines = _watching(run, machine, is_once=is_once)
    assert code == 4
    assert 10 < machine.monotonic - 60 <= 15
    assert lines[-3].startswith("watch: stall at step 20, rank 0: silent for 1")
    assert run.halt.read_text().startswith("stall at step 20")
    assert run.anomaly_type.read_text() == "stall\n"


def test_a_finding_is_told_by_the_exit_code_where_nothing_can_be_written(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDirectory, "write_anomalies", refused)
    monkeypatch.setattr("nsa_train.telemetry.watch.written_whole", refused)
    machine = _Machine(wall=NOW)
    _Run(run, machine)
    code, lines = _watching(run, machine)
    assert code == 4
    assert lines[-2].startswith(f"watch: {run.anomaly_type} is not written: [Errno 28]")
    assert lines[-1].startswith(f"watch: {run.halt} is not written, so the run goes on: [Errno 28]")


def test_silence_that_clocks_alone_claim_is_said_and_one_below_nothing_is_unknown(run: RunDirectory) -> None:
    machine = _Machine(wall=NOW)
    _Run(run, machine, ahead_s=-HOUR).ends(20)
    _Run(run, machine, ahead_s=HOUR, rank=1).ends(20)
    _, lines = _watching(run, machine)
    counts = "; a stall counts after 10 s of watching without an event"
    assert lines[:-1] == [
        f"watch: rank 0: silent for 3600 s by its timestamps, which prove nothing where clocks differ or were set{counts}",
        f"watch: rank 1: its last event is 3600 s ahead of this machine's clock: how long it has been silent is unknown{counts}",
    ]


@pytest.mark.parametrize("has_uptime", [True, False])
@pytest.mark.parametrize("jump_s", [HOUR, -HOUR, 24 * HOUR])
def test_a_clock_that_is_set_while_a_run_is_watched_neither_stalls_it_nor_hides_a_stall(
    run: RunDirectory, jump_s: float, has_uptime: bool
) -> None:
    """The run's clock and the watcher's are one here. Records without `uptime_s` lengthen the patience for a while, not for hours."""
    machine = _Machine(wall=NOW)
    machine.due.append((7.5, lambda: machine.jump(jump_s)))
    _Run(run, machine, has_uptime=has_uptime).steps(40)
    code, lines = _watching(run, machine)
    assert (code, lines[0].partition(":")[2][:28]) == (4, " stall at step 60, rank 0: s")
    assert 50 <= machine.monotonic <= (55 if has_uptime or jump_s < 0 else 100)


def test_ranks_with_clocks_of_their_own_are_judged_each(run: RunDirectory) -> None:
    machine = _Machine(wall=NOW)
    for rank, ahead_s in enumerate((HOUR, -HOUR, 0.0)):
        _Run(run, machine, ahead_s=ahead_s, rank=rank).steps(12 if rank == 1 else 60)
    code, lines = _watching(run, machine)
    assert code == 4
    assert [line.split(": ")[1] for line in lines if "stall at" in line] == ["stall at step 32, rank 1"]
    assert machine.monotonic <= 30


def test_one_look_is_enough_where_nothing_is_in_doubt(run: RunDirectory) -> None:
    machine = _Machine(wall=NOW)
    _Run(run, machine)
    assert _watching(run, machine, is_once=True) == (0, ["watch: nothing is wrong; the run goes on at step 20"])
    assert machine.monotonic == 0


def test_a_watcher_that_was_stopped_with_its_run_does_not_take_that_for_silence(run: RunDirectory) -> None:
    """A container that was paused, a virtual machine: a quarter of an hour passes between two looks."""
    machine = _Machine(wall=NOW)
    _Run(run, machine).ends(950)
    # all of it after the look at 6 s
    machine.due = [(6.5, lambda: machine.sleep(900)), *((at, action) for at, action in machine.due if at <= 6 or at > 909)]
    assert _watching(run, machine, interval_s=2.0)[0] == 0


@pytest.mark.skipif(pid_namespace() is None, reason="needs Linux, which says where a pid names a process")
@pytest.mark.parametrize(("namespace", "found_after"), [(pid_namespace(), 10), ("of another container", BOOT_STALL_S + 5)])
def test_a_run_that_died_is_found_soon_where_its_process_can_be_seen(run: RunDirectory, namespace: str, found_after: float) -> None:
    """It died before its first step, for which patience is half an hour."""
    _write(run, [{"ts": NOW, "step": 0, "msg": "boot", "pid": DEAD, "pid_namespace": namespace}])
    machine = _Machine(wall=NOW)
    code, lines = _watching(run, machine)
    assert (code, machine.monotonic) == (4, found_after)
    assert (f"process {DEAD} is gone" in lines[0]) == (found_after == 10)


def test_an_end_that_was_written_just_before_the_process_went_is_no_death(run: RunDirectory) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        _write(run, [{"ts": NOW, "step": 0, "msg": "boot", "pid": process.pid, "pid_namespace": pid_namespace()}])
        machine = _Machine(wall=NOW)

        def end() -> None:
            process.kill()
            process.wait()
            _write(run, [{"ts": NOW, "step": 9, "msg": "finish", "pid": process.pid}])

        machine.due.append((30, end))
        assert _watching(run, machine)[0] == 0


def test_without_halt_a_stall_is_written_down_and_nothing_more(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command line, with this machine's clocks."""
    monkeypatch.setattr("nsa_train.telemetry.anomalies.LEAST_STALL_S", 0.5)
    _write(run, _steps(20, seconds=0.01))
    assert run_command(["watch", str(run.root), "--interval", "0.1", "--once"]) == 4
    assert run.anomaly_type.read_text() == "stall\n"
    assert not run.halt.exists()
    assert "stall at step 20, rank 0: silent for 1 s" in capsys.readouterr().out


def _looked(run: RunDirectory, *, silence_s: float) -> list[Finding]:
    """Return what the second of two looks finds, `silence_s` apart."""
    watcher = Watcher(run)
    assert watcher.poll(0.0) == []
    return watcher.poll(silence_s)


def test_ranks_that_a_smaller_start_left_behind_are_not_missed(run: RunDirectory) -> None:
    """A run of two ranks was killed and resumed on one: the second heartbeat ends in the past."""
    _write(run, [{"ts": 0.0, "step": 0, "msg": "boot", "world_size": 2}, *_steps(10)])
    _write(run, [{"ts": 0.0, "step": 0, "msg": "boot", "world_size": 2}, *_steps(10)], rank=1)
    assert [finding.rank for finding in _looked(run, silence_s=11.0)] == [0, 1]
    again = [{"ts": 490.0, "step": 5, "msg": "boot", "world_size": 1}, *_steps(10, start=490.0)]
    _write(run, again)
    watcher = Watcher(run)
    assert watcher.poll(0.0) == []
    assert not watcher.has_ended
    _write(run, [{"ts": 502.0, "step": 10, "msg": "finish"}])
    assert watcher.poll(20.0) == []
    assert watcher.has_ended


DEAD, ALIVE = 2**22 + 1, os.getpid()
GRACE_S = 20 * 60.0


def _start(pid: int, *, restarts_left: int, at: float = 0.0, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a start of two ranks and ten steps of a second."""
    boot = {"ts": at, "step": 0, "msg": "boot", "world_size": 2, "pid": pid, "restarts_left": restarts_left, **fields}
    return [boot, *({**event, "pid": pid} for event in _steps(10, start=at))]


def test_ranks_between_a_death_and_their_new_start_are_not_halted(run: RunDirectory) -> None:
    """Rank 1 was killed. Torchrun is still ending rank 0, which waits for it and is silent too."""
    _write(run, _start(ALIVE, restarts_left=1))
    _write(run, _start(DEAD, restarts_left=1), rank=1)
    watcher = Watcher(run)
    assert watcher.poll(0.0) == []
    assert watcher.poll(10.0 + GRACE_S) == []
    assert [finding.rank for finding in watcher.poll(11.0 + GRACE_S)] == [0, 1]
    watcher = Watcher(run)
    assert watcher.poll(0.0) == []
    _write(run, _start(ALIVE, restarts_left=0, at=500.0))
    # rank 1 starts a little later
    assert watcher.poll(500.0) == []
    _write(run, _start(ALIVE, restarts_left=0, at=505.0), rank=1)
    assert watcher.poll(505.0) == []
    assert [finding.kind for finding in watcher.poll(550.0)] == ["stall", "stall"]


def test_a_rank_that_hangs_stalls_also_where_starts_are_left(run: RunDirectory) -> None:
    for rank in (0, 1):
        _write(run, _start(ALIVE, restarts_left=1), rank=rank)
    assert [finding.kind for finding in _looked(run, silence_s=11.0)] == ["stall", "stall"]


def test_a_death_without_a_start_left_is_a_stall(run: RunDirectory) -> None:
    for rank in (0, 1):
        _write(run, _start(DEAD, restarts_left=0), rank=rank)
    assert [finding.kind for finding in _looked(run, silence_s=11.0)] == ["stall", "stall"]


def test_a_silent_rank_of_another_host_may_have_died(run: RunDirectory) -> None:
    _write(run, _start(ALIVE, restarts_left=1))
    _write(run, _start(DEAD, restarts_left=1, host="elsewhere"), rank=1)
    watcher = Watcher(run)
    assert watcher.poll(0.0) == []
    assert watcher.poll(100.0) == []
    assert [finding.rank for finding in watcher.poll(11.0 + GRACE_S)] == [0, 1]


@pytest.mark.parametrize(("code", "restarts_left", "has_ended"), [(1, 1, False), (1, 0, True), (4, 1, True), (75, 1, True)])
def test_a_run_that_torchrun_starts_again_has_not_ended(run: RunDirectory, code: int, restarts_left: int, has_ended: bool) -> None:
    for rank in (0, 1):
        _write(run, _start(ALIVE, restarts_left=restarts_left), rank=rank)
        _write(run, [{"ts": 11.0, "step": 10, "msg": "halt", "code": code, "reason": "lost contact", "pid": DEAD}], rank=rank)
    watcher = Watcher(run)
    assert watcher.poll(0.0) == []
    assert watcher.poll(500.0) == []
    assert watcher.has_ended == has_ended
    if not has_ended:
        assert [finding.kind for finding in watcher.poll(2000.0)] == ["stall", "stall"]
        code, lines = _watching(run, _Machine(wall=500.0), is_once=True)
        assert (code, lines[-1]) == (0, "watch: nothing is wrong; the run waits to be started again at step 10")
        assert not run.halt.exists()


def test_a_dead_process_whose_end_nobody_asked_for_is_gone(run: RunDirectory) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        for rank in (0, 1):
            _write(run, _start(process.pid, restarts_left=1), rank=rank)
        assert [finding.kind for finding in _looked(run, silence_s=100.0)] == ["stall", "stall"]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert _looked(run, silence_s=100.0) == []


def test_watch_ends_with_the_run(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    _write(run, [*_steps(10), {"ts": 11.0, "step": 10, "msg": "finish"}])
    assert run_command(["watch", str(run.root), "--halt"]) == 0
    assert "ended at step 10" in capsys.readouterr().out
    assert not run.anomaly_type.exists()
    assert not run.halt.exists()


def test_a_run_that_its_guards_stopped_is_told(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    _write(run, [*_steps(10), {"ts": 11.0, "step": 10, "msg": "halt", "code": 4, "reason": "too many steps skipped"}])
    assert run_command(["watch", str(run.root)]) == 4
    assert capsys.readouterr().out == "watch: rank 0 stopped with exit code 4: too many steps skipped\n"


@pytest.mark.parametrize("code", [3, 75, 130])
def test_a_run_that_was_ended_on_request_is_no_anomaly(run: RunDirectory, capsys: pytest.CaptureFixture[str], code: int) -> None:
    _write(run, [*_steps(10), {"ts": 11.0, "step": 10, "msg": "halt", "code": code, "reason": "asked for"}])
    assert run_command(["watch", str(run.root)]) == 0
    assert f"exit code {code}: asked for" in capsys.readouterr().out


@pytest.mark.parametrize("code", [1, 2])
def test_a_run_that_an_error_ended_is_told_and_is_not_well(run: RunDirectory, capsys: pytest.CaptureFixture[str], code: int) -> None:
    _write(run, [*_steps(10), {"ts": 11.0, "step": 10, "msg": "halt", "code": code, "reason": "the disk is full"}])
    assert run_command(["watch", str(run.root)]) == 1
    assert capsys.readouterr().out == f"watch: rank 0 stopped with exit code {code}: the disk is full\n"


def test_a_heartbeat_without_an_event_is_waited_for(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.heartbeat.touch()
    assert run_command(["watch", str(run.root), "--once"]) == 0
    assert capsys.readouterr().out == "watch: nothing is wrong; no rank has written an event yet\n"
    assert not Watcher(run).has_ended


def test_events_that_are_none_are_passed_over(run: RunDirectory) -> None:
    bad = [{"rank": "x"}, {"ts": "now"}, {"step": None}, {"toks_per_s": "fast"}, {"world_size": "two"}, {"gate_branch_shares": 3}]
    with run.heartbeat.open("w") as file:
        file.writelines(json.dumps({**_steps(1)[0], **fields}) + "\n" for fields in bad)
    _write(run, _steps(10))
    watcher = Watcher(run)
    assert watcher.poll(10.0) == []
    assert watcher.ranks[run.heartbeat].step == 10


def test_what_left_its_health_band_is_told_and_no_anomaly(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    sick = {**HEALTHY_GATES, "gate_entropy_mean": 0.4, "k_mean": 2.0, "k_mean_expected": 2.5, "fallbacks_total": 3}
    speeds = _then(_steps(50, seconds=10), 30, toks_per_s=800.0)
    _write(run, [*speeds, {"msg": "progress", "step": 80, "ts": 800.0, **sick}, {"msg": "finish", "step": 80, "ts": 801.0}])
    assert run_command(["watch", str(run.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["gate_entropy_mean", "k_mean", "fallbacks_total", "toks_per_s"]
    assert lines[-1].startswith("watch: nothing is wrong")


def test_a_resumed_process_starts_anew(run: RunDirectory) -> None:
    _write(run, _steps(10, grad_norm=0.0))
    _write(run, [{"msg": "boot", "step": 5, "ts": 1000.0}])
    assert Watcher(run).poll(1001.0) == []


def test_records_are_read_on_where_they_were_left(run: RunDirectory) -> None:
    _write(run, _steps(10))
    watcher = Watcher(run)
    assert watcher.poll(0.0) == []
    with run.heartbeat.open("a") as file:
        file.write('{"ts": 11, "step": 11, "msg": "step')
    assert watcher.poll(9.0) == []
    with run.heartbeat.open("a") as file:
        file.write('_end", "grad_norm": 1.0}\nno json\n[]\n')
    assert watcher.poll(12.0) == []
    assert watcher.ranks[run.heartbeat].step == 11
    assert [finding.kind for finding in watcher.poll(100.0)] == ["stall"]


def test_rising_fallbacks_are_read_from_their_table(run: RunDirectory) -> None:
    _write(run, _steps(10))
    run.fallbacks.write_text("step,cmp,select,slc,win,nsa,total\n1,0,0,0,0,0,0\n2,0,0,3,0,0,3\n")
    assert [finding.kind for finding in Watcher(run).poll(10.0)] == ["rising_fallbacks"]


def test_fallbacks_that_rose_and_stayed_between_two_looks_are_seen(run: RunDirectory) -> None:
    def logged(step: int, total: int) -> dict[str, Any]:
        return {"msg": "progress", "step": step, "ts": float(step), "fallbacks_total": total}

    _write(run, [logged(1, 0)])
    watcher = Watcher(run)
    assert watcher.poll(1.0) == []
    _write(run, [logged(2, 3), logged(3, 3)])
    assert [finding.detail for finding in watcher.poll(3.0)] == ["fallbacks rose from 0 to 3; see fallback_counters.csv and env.json"]
    assert watcher.poll(3.5) == []
    _write(run, [logged(4, 3)])
    assert watcher.poll(4.0) == []


def test_a_table_that_rose_and_stayed_between_two_looks_is_seen(run: RunDirectory) -> None:
    _write(run, _steps(10))
    run.fallbacks.write_text("step,cmp,select,slc,win,nsa,total\n1,0,0,0,0,0,0\n")
    watcher = Watcher(run)
    assert watcher.poll(10.0) == []
    with run.fallbacks.open("a") as file:
        file.write("2,0,0,3,0,0,3\n3,0,0,3,0,0,3\n")
    assert [(finding.kind, finding.step) for finding in watcher.poll(10.0)] == [("rising_fallbacks", 3)]
    assert watcher.poll(10.0) == []


def test_a_directory_without_heartbeats_is_no_run(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["watch", str(run.root)]) == 2
    assert "is no run" in capsys.readouterr().err
    assert run_command(["watch", str(run.root), "--interval", "0"]) == 2


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = f"""
import pathlib, signal, time
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path({str(tmp_path / "dumped")!r}).touch())
print("ready", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc, which says who handles a signal")
def test_a_stalled_process_is_asked_for_its_stacks(run: RunDirectory, listener: subprocess.Popen[str]) -> None:
    _write(run, [{**event, "pid": listener.pid} for event in _steps(10)])
    assert _watching(run, _Machine())[0] == 4
    deadline = time.monotonic() + 10
    while not (run.root / "dumped").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (run.root / "dumped").exists()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc, which says who handles a signal")
def test_a_process_that_would_die_of_the_signal_is_left_alone(run: RunDirectory) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert "does not handle SIGUSR1" in request_stack_dump(RankWatch(0, pid=process.pid))
        assert "runs on elsewhere" in request_stack_dump(RankWatch(0, pid=process.pid, host="elsewhere"))
        there = RankWatch(0, pid=process.pid, host=platform.node(), pid_namespace="of another container")
        assert "or in another container" in request_stack_dump(there)
        assert process.poll() is None
    assert "is gone" in request_stack_dump(RankWatch(0, pid=process.pid, host=platform.node()))
