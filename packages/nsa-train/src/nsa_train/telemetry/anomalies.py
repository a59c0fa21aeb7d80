"""Rules over heartbeats that detect anomalies of a run from outside."""

import math
import statistics
from collections import deque
from itertools import islice
from typing import Any

from attrs import field, frozen, mutable

from nsa_train.lifecycle.outcomes import DELIBERATE
from nsa_train.telemetry.health import has_collapsed, has_one_branch
from nsa_train.telemetry.records import seconds_between

KINDS = STALL, ZERO_GRADIENTS, GATE_COLLAPSE, FLATLINE, RISING_FALLBACKS = (
    *("stall", "zero_gradients", "gate_collapse", "flatline", "rising_fallbacks"),
)
"""The words of `.anomaly_type`, the most serious first."""

EMA_WEIGHT = 0.1
"""Weight of the newest step in the mean of step times."""
STEP_EVENTS = ("step_end", "progress")
STALL_STEPS = 10
"""Silence that counts as a stall, as a multiple of the mean step time."""
STALL_PAUSES = 3
"""Silence that counts as a stall, as a multiple of the longest pause so far (for evaluation or saving)."""
LEAST_STALL_S = 5.0
"""Minimum patience in seconds, which is also the patience with a rank whose process is gone."""
AHEAD_S = 1.0
"""Seconds by which timestamps may be ahead of the watcher's clock before that is reported."""
BEGUN_STALL_S = 600.0
"""Patience after an event that announces work longer than a step."""
BOOT_STALL_S = 1800.0
"""Patience before the first step, in which data are opened and graphs compiled."""
RESTART_GRACE_S = 1200.0
"""Additional patience with all ranks once one of them died and torchrun may restart them.

Torchrun ends the others (30 s), the hosts meet (10 minutes at most), the data are opened (`data.timeout_s`).
"""
STREAK = 3
"""Number of times in a row that gates must be collapsed, or gradients zero."""
RECENT_S, RECENT = 300.0, 20
"""Time span, and minimum number, of the newest steps whose median throughput is compared.

In a run of days, another job, a slow disk or a reduced clock for a minute is noise.
"""
EARLIER = 10_000
"""Maximum number of earlier steps with which they are compared."""
FLAT_SHARE = 0.5
"""Share of the earlier median below which throughput is flat."""
LEAST_TOKS_PER_S = 1.0


@frozen
class Finding:
    """One anomaly of one rank."""

    kind: str
    rank: int
    step: int
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}, rank {self.rank}: {self.detail}"


@mutable
class RankWatch:
    """The state of one rank, from its events: `observe` takes them in order, `findings` returns anomalies."""

    rank: int
    pid: int | None = None
    host: str | None = None
    pid_namespace: str | None = None
    """The pid namespace of `pid`; None if the records lack it."""
    world_size: int | None = None
    """Number of ranks of this start; None if its `boot` event lacks it."""
    restarts_left: int = 0
    """How often torchrun may restart the ranks after this start."""
    step: int = 0
    has_ended: bool = False
    """True if the rank reported its end, and is not restarted."""
    has_failed: bool = False
    """True if the rank ended with an error after which torchrun restarts it."""
    last: dict[str, Any] = field(factory=dict)
    """The last event."""
    heard_s: float = 0.0
    """When the last event was read, in seconds of watching."""
    age_s: float | None = None
    """Age of the last event by its timestamp when watching began, below 0 if the timestamp is ahead; None for an event that came later."""
    lived_s: float = 0.0
    """Seconds from the first to the last event, by the run's own clock."""
    logged: dict[str, Any] = field(factory=dict)
    """The last event of a logged step."""
    stepped_s: float | None = None
    """When the newest step ended, as `lived_s`; None after a pause, which must not count as a step."""
    step_ema_s: float | None = None
    longest_pause_s: float = 0.0
    fullest: int = 0
    """Most tokens of a step."""
    gate_streak: int = 0
    zero_streak: int = 0
    fallbacks: deque[float] = field(factory=lambda: deque(maxlen=2))
    """Counts up to each of the newest two logged steps."""
    seen_fallbacks: float | None = None
    """Count up to the last poll, after which more than two logged steps may follow; None before the first poll."""
    recent: deque[tuple[float, float]] = field(factory=deque)
    """When each of the newest steps ended, as `lived_s`, and its tokens per second."""
    earlier: deque[float] = field(factory=lambda: deque(maxlen=EARLIER))

    def observe(self, event: dict[str, Any], *, heard_s: float = 0.0, age_s: float | None = None) -> None:
        """Process one event of the heartbeat, read after `heard_s` of watching; `age_s` as in the field."""
        step = event.get("step", self.step)
        elapsed_s = seconds_between(self.last, event) if self.last else 0.0
        if event.get("uptime_s") is None:
            # if the clock was set, the difference looks like a long pause
            elapsed_s = min(elapsed_s, BEGUN_STALL_S)
        self.lived_s += elapsed_s
        # a logged step has two equivalent events
        if event.get("msg") in STEP_EVENTS and step != self.step:
            self._note_step(event, step)
        elif event.get("msg") not in STEP_EVENTS:
            self.longest_pause_s, self.stepped_s = max(self.longest_pause_s, elapsed_s), None
        self.pid, self.step = event.get("pid", self.pid), step
        self.host, self.world_size = event.get("host", self.host), event.get("world_size", self.world_size)
        self.pid_namespace = event.get("pid_namespace", self.pid_namespace)
        self.restarts_left = event.get("restarts_left", self.restarts_left)
        is_halt = event.get("msg") == "halt"
        self.has_failed = is_halt and self.restarts_left > 0 and event.get("code") not in DELIBERATE
        self.has_ended = event.get("msg") == "finish" or (is_halt and not self.has_failed)
        if event.get("msg") == "progress":
            self.logged = event
        if event.get("gate_entropy_mean") is not None and not has_one_branch(event):
            self.gate_streak = self.gate_streak + 1 if has_collapsed(event) else 0
        if event.get("fallbacks_total") is not None:
            self.fallbacks.append(event["fallbacks_total"])
        self.last, self.heard_s, self.age_s = event, heard_s, age_s

    def findings(self, now: float, *, grace_s: float = 0.0, is_gone: bool = False) -> list[Finding]:
        """Return the anomalies after `now` seconds of watching.

        A stall is reported `grace_s` later; sooner if the process `is_gone` and will not be restarted.
        """
        if self.has_ended or not self.last:
            return []
        found = {
            STALL: self._stall(now, grace_s, is_gone=is_gone),
            ZERO_GRADIENTS: f"the gradient norm was 0 in {self.zero_streak} steps in a row" if self.zero_streak >= STREAK else None,
            GATE_COLLAPSE: f"one branch took over in {self.gate_streak} logged steps in a row" if self.gate_streak >= STREAK else None,
            FLATLINE: self._flatline(),
            RISING_FALLBACKS: rising(list(self.fallbacks), seen=self.seen_fallbacks),
        }
        return [Finding(kind, self.rank, self.step, detail) for kind, detail in found.items() if detail is not None]

    def polled(self) -> None:
        """Record that the findings were read, so that later ones count as new."""
        self.seen_fallbacks = self.fallbacks[-1] if self.fallbacks else self.seen_fallbacks

    def steadiness(self) -> float | None:
        """Return the median throughput of the last steps divided by the median of earlier steps; None if there are too few steps."""
        if len(self.recent) < RECENT or len(self.earlier) < RECENT:
            return None
        return self._recent_median() / max(statistics.median(self.earlier), LEAST_TOKS_PER_S)

    def silence_s(self, now: float) -> float:
        """Return how long this rank has certainly been silent after `now` seconds of watching: the time since its last event was read."""
        return now - self.heard_s

    def doubt(self, grace_s: float = 0.0) -> str | None:
        """Return why the clocks do not show whether this rank was silent before watching began; None if they do.

        Timestamps prove nothing: the run's clock and the watcher's may differ, and may be set.
        """
        patience = self.patience_s() + grace_s
        if self.has_ended or self.age_s is None or -AHEAD_S <= self.age_s <= patience:
            return None
        if self.age_s > 0:
            said = f"silent for {self.age_s:.0f} s by its timestamps, which prove nothing where clocks differ or were set"
        else:
            said = f"its last event is {-self.age_s:.0f} s ahead of this machine's clock: how long it has been silent is unknown"
        return f"rank {self.rank}: {said}; a stall counts after {patience:.0f} s of watching without an event"

    def patience_s(self) -> float:
        """Return how long this rank may be silent, by the mean of its step times and by its current work."""
        msg = str(self.last.get("msg"))
        if self.step_ema_s is None:
            return BOOT_STALL_S
        patience = max(LEAST_STALL_S, STALL_STEPS * self.step_ema_s, STALL_PAUSES * self.longest_pause_s)
        return max(patience, BEGUN_STALL_S) if msg.endswith("_begin") else patience

    def _note_step(self, event: dict[str, Any], step: int) -> None:
        speed, tokens = event.get("toks_per_s"), event.get("tokens") or 0
        if self.stepped_s is not None:
            took = (self.lived_s - self.stepped_s) / max(1, step - self.step)
            self.step_ema_s = took if self.step_ema_s is None else self.step_ema_s + EMA_WEIGHT * (took - self.step_ema_s)
        self.stepped_s = self.lived_s
        self.zero_streak = self.zero_streak + 1 if event.get("grad_norm") == 0 else 0
        # without packing, a step of short rows has a low throughput
        is_full, self.fullest = tokens >= self.fullest, max(tokens, self.fullest)
        if speed is not None and is_full:
            self.recent.append((self.lived_s, speed))
            # the remaining steps still span RECENT_S
            while len(self.recent) > RECENT and self.recent[-1][0] - self.recent[1][0] >= RECENT_S:
                self.earlier.append(self.recent.popleft()[1])

    def _stall(self, now: float, grace_s: float, *, is_gone: bool) -> str | None:
        # a grace means that torchrun may start it again
        is_dead = is_gone and not grace_s
        silence, patience = self.silence_s(now), LEAST_STALL_S if is_dead else self.patience_s() + grace_s
        if silence <= patience:
            return None
        pace = "no step yet" if self.step_ema_s is None else f"steps take {self.step_ema_s:.3g} s"
        pace = f"process {self.pid} is gone" if is_dead else pace
        return f"silent for {silence:.0f} s after {self.last.get('msg')!r} ({pace}; patience {patience:.0f} s)"

    def _flatline(self) -> str | None:
        newest = [speed for _, speed in islice(reversed(self.recent), STREAK)]
        if len(newest) == STREAK and max(newest) < LEAST_TOKS_PER_S:
            return f"throughput is {statistics.median(newest):.3g} tokens per second"
        share = self.steadiness()
        if share is None or share >= FLAT_SHARE:
            return None
        return f"throughput fell from {statistics.median(self.earlier):.0f} to {self._recent_median():.0f} tokens per second"

    def _recent_median(self) -> float:
        return statistics.median(speed for _, speed in self.recent)


def rising(totals: list[float], *, seen: float | None = None) -> str | None:
    """Return by how much the last of `totals`, counts of fallbacks, rose; None if it is not above `seen` (by default the previous count)."""
    known = [total for total in totals if not math.isnan(total)]
    if seen is not None:
        known = [seen, *known[-1:]]
    if len(known) < 2 or known[-1] <= known[-2]:
        return None
    return f"fallbacks rose from {known[-2]:.0f} to {known[-1]:.0f}; see fallback_counters.csv and env.json"
