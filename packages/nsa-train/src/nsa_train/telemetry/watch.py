"""`nsa-train watch DIR`: follow the heartbeats of a run until it ends or something is wrong."""

import math
import os
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nsa_train.errors import INTERRUPTED, ConfigError, GuardError, HaltedError, TerminatedError, TrainError
from nsa_train.files import IrregularFileError, written_whole
from nsa_train.host.environment import proc_fields
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.anomalies import KINDS, RESTART_GRACE_S, RISING_FALLBACKS, Finding, RankWatch, rising
from nsa_train.telemetry.health import Check, judge
from nsa_train.telemetry.records import as_event, lines_from, pid_namespace, read_rows

FAILED_CODE, ANOMALY_CODE = TrainError.exit_code, GuardError.exit_code
"""Exit codes: the run ended by an error; something is wrong, or its own guards stopped the run."""
ON_REQUEST = (HaltedError.exit_code, TerminatedError.exit_code, INTERRUPTED)
"""Exit codes of a run that a person or a scheduler ended."""


RECHECK_S = 1.0
"""Seconds between polls of `--once`, until there is no doubt about the clocks."""
LONGEST_GAP = 2
"""Maximum time between two polls that counts as watched, in intervals. In a longer gap the watcher itself was stopped, perhaps with the run."""


class Clocks(NamedTuple):
    """The clocks of `watch`."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


THIS_MACHINE = Clocks()


class Watcher:
    """Follows the heartbeat files of a run, each from the position of the last poll."""

    def __init__(self, paths: RunDirectory, *, wall: Callable[[], float] = time.time) -> None:
        """Start at the beginning of the records in `paths`; `wall` returns this machine's time, in seconds since the epoch.

        Raises:
            ConfigError: if the directory holds no heartbeat.
        """
        if not paths.heartbeats:
            raise ConfigError(
                f"DIR={str(paths.root)!r} is no run (it holds no heartbeat_rank*.jsonl); use the directory that `nsa-train run` printed"
            )
        self.paths = paths
        self.ranks: dict[Path, RankWatch] = {}
        self._wall = wall
        self._has_polled = False
        self._offsets: dict[Path, int] = {}
        self._seen_fallbacks: float | None = None

    def poll(self, now: float) -> list[Finding]:
        """Read new events and return the anomalies after `now` seconds of watching, the most serious first.

        A rank counts as silent as long as polls find no new event of it. Wall clocks do not decide about a stall.
        """
        # before the records are read, so that a process that has ended has written all its events
        gone = {rank.rank for rank in self.members if rank.pid_namespace is not None and is_gone(rank)}
        for path in self.paths.heartbeats:
            for event in self._new_events(path):
                # another process continues the run, at its own pace
                if path not in self.ranks or event.get("msg") == "boot":
                    self.ranks[path] = RankWatch(event.get("rank") or 0)
                self.ranks[path].observe(event, heard_s=now, age_s=None if self._has_polled else self._wall() - event["ts"])
        self._has_polled = True
        grace_s = self._grace_s(now)
        found = [finding for rank in self.members for finding in rank.findings(now, grace_s=grace_s, is_gone=rank.rank in gone)]
        for rank in self.members:
            rank.polled()
        in_table = self._rising_in_table()
        if not self.has_ended and not any(finding.kind == RISING_FALLBACKS for finding in found):
            found += in_table
        return sorted(found, key=lambda finding: (KINDS.index(finding.kind), finding.rank))

    def doubts(self, now: float) -> list[str]:
        """Return a line for each rank for which neither the clocks nor watching have shown yet whether it lives."""
        grace_s = self._grace_s(now)
        return [doubt for rank in self.members if (doubt := rank.doubt(grace_s)) is not None]

    def unhealthy(self) -> list[Check]:
        """Return the health bands that the last logged step of a rank is outside of; this is not an anomaly."""
        logged = [{**rank.logged, "toks_per_s_of_median": rank.steadiness()} for rank in self.members if rank.logged]
        return [check for figures in logged for check in judge(figures) if not check.is_healthy]

    @property
    def members(self) -> list[RankWatch]:
        """Return the ranks of the newest start; an earlier start with more ranks left silent heartbeats."""
        size = next((rank.world_size for rank in self.ranks.values() if rank.rank == 0), None)
        return [rank for rank in self.ranks.values() if size is None or rank.rank < size]

    @property
    def has_ended(self) -> bool:
        """Return True if every rank reported its end."""
        return bool(self.members) and all(rank.has_ended for rank in self.members)

    def awaits_restart(self, now: float) -> bool:
        """Return True if a rank died, or may have died on another host, and torchrun has a start left for all of them."""
        return any(rank.restarts_left > 0 and has_died(rank, rank.silence_s(now)) for rank in self.members if not rank.has_ended)

    def _grace_s(self, now: float) -> float:
        return RESTART_GRACE_S if self.awaits_restart(now) else 0.0

    def _new_events(self, path: Path) -> list[dict[str, Any]]:
        lines = []
        try:
            # an unfinished line of a killed process is not an event
            for line, following in lines_from(path, self._offsets.get(path, 0)):
                lines.append(line)
                self._offsets[path] = following
        except IrregularFileError as error:
            raise ConfigError(f"{path} cannot be read ({error}); move it away, or watch the run from a copy of its directory") from None
        return [event for event in map(as_event, lines) if event is not None]

    def _rising_in_table(self) -> list[Finding]:
        rows = list(read_rows(self.paths.fallbacks))[-2:]
        totals = [row["total"] for row in rows]
        detail = rising(totals, seen=self._seen_fallbacks)
        self._seen_fallbacks = next((total for total in reversed(totals) if not math.isnan(total)), None)
        return [] if detail is None else [Finding(RISING_FALLBACKS, 0, int(rows[-1]["step"]), detail)]


def watch(
    paths: RunDirectory,
    *,
    is_halting: bool,
    is_once: bool,
    interval_s: float,
    say: Callable[[str], None],
    show: Callable[[Watcher, list[Finding]], None] = lambda watcher, found: None,
    clocks: Clocks = THIS_MACHINE,
) -> int:
    """Watch a run until it ends (return 0; after an error 1) or something is wrong (return 4).

    If something is wrong, write `.anomaly_type`, and `.HALT` if `is_halting`, and request a stack dump of a stalled rank. `is_once`: poll once,
    and again only while the clocks do not show whether a rank lives. `show` gets the watcher and the findings of the last poll.
    """
    watcher = Watcher(paths, wall=clocks.wall)
    pause_s = min(interval_s, RECHECK_S) if is_once else interval_s
    polled_at, watched_s, is_first = clocks.monotonic(), 0.0, True
    while True:
        found = watcher.poll(watched_s)
        if found:
            show(watcher, found)
            return _act(watcher, found, is_halting=is_halting, say=say)
        doubts = watcher.doubts(watched_s)
        for doubt in doubts if is_first else ():
            say(f"watch: {doubt}")
        if watcher.has_ended or (is_once and not doubts):
            show(watcher, [])
            return _conclude(watcher, watched_s, say)
        clocks.sleep(pause_s)
        before, polled_at, is_first = polled_at, clocks.monotonic(), False
        watched_s += min(polled_at - before, LONGEST_GAP * pause_s)


def content(watcher: Watcher, found: list[Finding]) -> dict[str, Any]:
    """Return the object that `watch --once --json` prints: the state of the run, and the anomalies `found`."""
    members = watcher.members
    return {
        "step": max((rank.step for rank in members), default=None),
        "num_ranks": len(members),
        "has_ended": watcher.has_ended,
        "anomalies": [{"kind": one.kind, "rank": one.rank, "step": one.step, "detail": one.detail} for one in found],
        "unhealthy": [{"figure": check.name, "found": check.found, "healthy": check.band} for check in watcher.unhealthy()],
        "halts": [
            {"rank": rank.rank, "exit_code": rank.last.get("code"), "reason": rank.last.get("reason")}
            for rank in members
            if rank.last.get("msg") == "halt"
        ],
    }


def request_stack_dump(rank: RankWatch) -> str:
    """Send SIGUSR1 to the process of `rank` if it is here and handles the signal, which would kill it otherwise; return a message about it."""
    if rank.pid is None or not is_here(rank):
        return f"no stack dump: its process runs on {rank.host or 'another host'}, or in another container"
    caught = int(proc_fields(f"/proc/{rank.pid}/status").get("SigCgt", "0"), 16)
    if not caught >> (signal.SIGUSR1 - 1) & 1:
        return f"no stack dump: process {rank.pid} is gone, or does not handle SIGUSR1"
    os.kill(rank.pid, signal.SIGUSR1)
    return f"asked process {rank.pid} for a stack dump, stackdump_*.txt"


def _conclude(watcher: Watcher, now: float, say: Callable[[str], None]) -> int:
    """Report the state of a run without anomalies, and return 4 if its own guards stopped it, 1 if an error did."""
    for check in watcher.unhealthy():
        say(f"watch: {check.name} is {check.found} (healthy: {check.band})")
    halts = [(rank.rank, rank.last) for rank in watcher.members if rank.last.get("msg") == "halt"]
    for number, event in halts:
        say(f"watch: rank {number} stopped with exit code {event.get('code')}: {event.get('reason')}")
    failures = [event.get("code") for _, event in halts if event.get("code") not in ON_REQUEST]
    if ANOMALY_CODE in failures:
        return ANOMALY_CODE
    if watcher.has_ended and failures:
        return FAILED_CODE
    if not watcher.members:
        say("watch: nothing is wrong; no rank has written an event yet")
        return 0
    state = "ended" if watcher.has_ended else "waits to be started again" if watcher.awaits_restart(now) else "goes on"
    say(f"watch: nothing is wrong; the run {state} at step {max(rank.step for rank in watcher.members)}")
    return 0


def _act(watcher: Watcher, found: list[Finding], *, is_halting: bool, say: Callable[[str], None]) -> int:
    for finding in found:
        say(f"watch: {finding}")
    for rank in watcher.members:
        if any((finding.kind, finding.rank) == (KINDS[0], rank.rank) for finding in found):
            say(f"watch: {request_stack_dump(rank)}")
    try:
        watcher.paths.write_anomalies(dict.fromkeys(finding.kind for finding in found))
    except OSError as error:
        say(f"watch: {watcher.paths.anomaly_type} is not written: {error}")
    if is_halting:
        try:
            with written_whole(watcher.paths.halt) as aside:
                aside.write_text(f"{found[0]}\n", encoding="utf-8")
            say(f"watch: wrote {watcher.paths.halt}; all ranks save and stop at the same step")
        except OSError as error:
            say(f"watch: {watcher.paths.halt} is not written, so the run goes on: {error}")
    return ANOMALY_CODE


def has_died(rank: RankWatch, silence_s: float) -> bool:
    """Return whether `rank` failed, or its process is gone; if the process is not visible from here, whether `silence_s` is too long."""
    if rank.has_failed:
        return True
    if rank.pid is None or not is_here(rank):
        return silence_s > rank.patience_s()
    return is_gone(rank)


def is_here(rank: RankWatch) -> bool:
    """Return whether the pid of `rank` is valid here: on this host, since its last boot, in this container."""
    if rank.pid_namespace is not None:
        return rank.pid_namespace == pid_namespace()
    return rank.host is None or rank.host == platform.node()


def is_gone(rank: RankWatch) -> bool:
    """Return whether the process of `rank` ran here and has ended."""
    if rank.pid is None or not is_here(rank):
        return False
    try:
        os.kill(rank.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    # a zombie: its parent has not collected its status
    return proc_fields(f"/proc/{rank.pid}/status").get("State", "").startswith("Z")
