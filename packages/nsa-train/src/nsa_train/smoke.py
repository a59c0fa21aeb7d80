"""The smoke rules: check the records of a run for signs that something is wrong. `nsa-bench smoke` prints the verdicts."""

import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attrs import frozen

from nsa_train.checkpoint.layout import step_folders
from nsa_train.errors import ConfigError, TrainError
from nsa_train.files import MOST_JSON, parse_json, read_regular
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.recipe import read_toml
from nsa_train.telemetry.anomalies import RankWatch
from nsa_train.telemetry.health import judge, steadiness
from nsa_train.telemetry.records import Cause, damaged_records, read_events, read_json, read_rows, standing_skips
from nsa_train.telemetry.watch import ON_REQUEST, has_died, is_here

FETCH_SHARE = 0.05
"""Largest share of a step that waiting for data may take, at its 95th percentile."""
WINDOW_SHARE = 0.1
"""Share of the steps at the start and at the end whose losses are compared."""
STEADY_SHARE = 0.5
"""Share of the run's median throughput that its last tenth must keep; other programs on a machine move it by less."""
FINITE_CAUSES = (Cause.SPIKE, Cause.OVERFLOW)
"""Causes of skipped steps that do not count as a fault, because the run's numbers are sound."""
HEALTH_RULES = ("gate_entropy_mean", "gate_max_gate", "gate_collapse_frac", "k_mean", "reads_act_total", "fallbacks_total")
"""The figures of the last logged step that are checked, as `nsa_train.telemetry.health` names them."""
COMPARED = {"toks_per_s_median": 1, "mfu": 1, "val_loss": -1, "last_loss": -1, "peak_memory_mib": -1}
"""Figures of metrics.json that are compared with a baseline: 1 if more is better, -1 if less is better."""
MOST_TOKENS = 512
"""Maximum tokens of a sequence for which blocks are chosen twice."""


Found = tuple[bool | None, str]
"""True if a rule holds, None if it does not apply; and a text about it."""


@frozen(kw_only=True)
class Verdict:
    """One rule: `is_passed` is None if it does not apply, and `found` then says why."""

    rule: str
    is_passed: bool | None
    found: str


@frozen(kw_only=True)
class Records:
    """The records of a run."""

    paths: RunDirectory
    settings: dict[str, Any]
    steps: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    progress: list[dict[str, Any]]
    skips: list[dict[str, Any]]
    """Events of skipped steps."""
    newest: RankWatch
    """The state of rank 0 after the events of its newest start."""
    metrics: dict[str, Any]
    damaged: tuple[str, ...] = ()
    """Records that cannot be read and are left out, a line per file."""


def read_records(folder: Path) -> Records:
    """Return the records of the run in `folder`.

    Raises:
        ConfigError: if they are not there.
    """
    paths = RunDirectory(folder)
    if not paths.training.is_file() or not paths.config.is_file():
        raise ConfigError(
            f"RUN_DIR={str(folder)!r} is no run (it lacks training.csv or config.toml); use the directory that nsa-train printed"
        )
    events = list(read_events(paths.heartbeat))
    newest = RankWatch(0)
    for event in events:
        newest = RankWatch(0) if event["msg"] == "boot" else newest
        newest.observe(event)
    return Records(
        paths=paths,
        settings=read_toml(paths.config),
        steps=list(read_rows(paths.training)),
        evaluations=list(read_rows(paths.validation)),
        progress=[event for event in events if event["msg"] == "progress"],
        skips=standing_skips(events),
        newest=newest,
        metrics=read_json(paths.metrics),
        damaged=tuple(damaged_records(paths)),
    )


class Judgement(NamedTuple):
    """The records of a run, and the verdict of every rule on them."""

    records: Records
    verdicts: list[Verdict]

    @property
    def has_failed(self) -> bool:
        """Return True if a rule does not hold."""
        return any(verdict.is_passed is False for verdict in self.verdicts)


def judge_run(folder: Path, *, baseline: Path | None = None, tolerance: float = 5.0) -> Judgement:
    """Return the judgement of the run in `folder`, whose metrics may be worse than `baseline`, a metrics.json, by `tolerance` per cent.

    Raises:
        ConfigError: if `folder` is no run, or the baseline or the tolerance cannot be used.
    """
    if not 0 <= tolerance < math.inf:
        raise ConfigError(f"--tolerance={tolerance} is not a finite percentage >= 0; use 5")
    records = read_records(folder)
    # a baseline that cannot be used is refused before a model is loaded
    compared = [] if baseline is None else check_baseline(records, baseline, tolerance)
    return Judgement(records, [*check_run(records), *compared])


def check_run(records: Records) -> list[Verdict]:
    """Return the verdict of every rule on `records`."""
    rules = {"ending": _ending, "no NaN": _numbers, "loss improves": _improvement, "throughput": _throughput, "fetch": _fetch}
    found: list[tuple[str, Found]] = [("records", (None, line)) for line in records.damaged]
    found += [(name, rule(records)) for name, rule in rules.items()]
    found += [*_health(records), ("selection repeats", _selection(records))]
    return [Verdict(rule=rule, is_passed=is_passed, found=text) for rule, (is_passed, text) in found]


def check_baseline(records: Records, baseline: Path, tolerance: float) -> list[Verdict]:
    """Compare the run's metrics with those of `baseline`, a metrics.json, and return verdicts: worse by at most `tolerance` per cent.

    Raises:
        ConfigError: if the file cannot be read, or shares no figure with this run.
    """
    try:
        content = parse_json(read_regular(baseline, MOST_JSON))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{baseline} cannot be read as metrics.json ({error}); use the metrics.json of a run") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{baseline} is not a table of figures; use the metrics.json of a run")
    # a file of `nsa-bench smoke --json` contains them
    inner = content.get("metrics", content)
    before = inner if isinstance(inner, Mapping) else content
    pairs = {name: (records.metrics.get(name), before.get(name)) for name in COMPARED}
    verdicts = [_compared(name, now, then, tolerance) for name, (now, then) in pairs.items() if _is_number(now) and _is_number(then)]
    if not verdicts:
        raise ConfigError(f"--compare-baseline={str(baseline)!r} shares no figure with this run's metrics.json; use that of another run")
    return verdicts


def _ending(records: Records) -> Found:
    newest = records.newest
    if newest.last.get("msg") == "finish":
        return True, "the last step was taken"
    if newest.last.get("msg") == "halt":
        code = newest.last.get("code")
        return code in ON_REQUEST, f"stopped with exit code {code}: {newest.last.get('reason')}"
    silence_s = time.time() - newest.last["ts"] if newest.last else 0.0
    if not has_died(newest, silence_s):
        return None, f"not judged: the run goes on at step {newest.step}"
    if newest.has_failed or is_here(newest):
        return False, f"broke off after step {newest.step}: its process is gone"
    return False, f"records no end after step {newest.step}: silent for {silence_s:.0f} s by its timestamps, its process not seen from here"


def _numbers(records: Records) -> Found:
    bad = [int(row["step"]) for row in records.steps if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]))]
    bad += [int(row["step"]) for row in records.evaluations if not math.isfinite(row["val_loss"])]
    # a step that was skipped has no row
    bad += [skip["step"] for skip in records.skips if skip.get("cause") not in FINITE_CAUSES]
    if bad:
        return False, f"not finite at step {min(bad)}, {len(bad)} in all"
    return bool(records.steps), f"losses and gradients of {len(records.steps)} steps are finite"


def _improvement(records: Records) -> Found:
    if records.settings.get("data", {}).get("source") == "synthetic":
        return None, "synthetic ids: there is nothing to learn"
    if len(records.evaluations) >= 2:
        first, last, which = records.evaluations[0]["val_loss"], records.evaluations[-1]["val_loss"], "held out"
    elif records.steps:
        size = max(1, int(WINDOW_SHARE * len(records.steps)))
        losses = [row["loss"] for row in records.steps]
        first, last, which = statistics.mean(losses[:size]), statistics.mean(losses[-size:]), "training"
    else:
        return False, "no step was taken"
    return last < first, f"{which}: {first:.3f} -> {last:.3f} nats per token"


def _throughput(records: Records) -> Found:
    speeds = [row["toks_per_s"] for row in records.steps]
    share = steadiness(speeds)
    if share is None:
        return False, "no step was taken"
    median = f"median {statistics.median(speeds):,.0f} tokens per second"
    return share >= STEADY_SHARE, f"{median}, {100 * share:.0f} % of it at the end (at least {100 * STEADY_SHARE:.0f} %)"


def _fetch(records: Records) -> Found:
    rows = [row for row in records.steps if not math.isnan(row.get("step_ms", math.nan))]
    if not rows:
        return None, "steps have no time"
    waits = sorted(row["fetch_ms"] for row in rows)
    p95, step = waits[int(0.95 * (len(waits) - 1))], statistics.median(row["step_ms"] for row in rows)
    return p95 < FETCH_SHARE * step, f"p95 {p95:.2f} ms of steps of {step:.1f} ms"


def _health(records: Records) -> list[tuple[str, Found]]:
    if records.settings.get("model", {}).get("attention") == "dense":
        return [("gates", (None, "the dense twin has none"))]
    if not records.progress:
        return [("gates", (False, "no step was logged"))]
    last = records.progress[-1]
    judged: dict[str, Found] = {check.name: (check.is_healthy, f"{check.found} (healthy: {check.band})") for check in judge(last)}
    return [(rule, judged.get(rule) or _unjudged(rule, last)) for rule in HEALTH_RULES]


def _selection(records: Records) -> Found:
    """Find whether the newest checkpoint of the run chooses the same blocks twice for the same tokens."""
    if records.settings.get("model", {}).get("attention") == "dense":
        return None, "the dense twin chooses none"
    if not step_folders(records.paths.checkpoints):
        return None, "the run holds no checkpoint to choose with"
    # only this rule runs a model; the others need no torch
    import torch

    from nsa_train.checkpoint import load_model, open_checkpoint
    from nsa_train.host.routing import refused_backends, uses_of_sample
    from nsa_train.telemetry.layers import chosen_blocks

    try:
        checkpoint = open_checkpoint(records.paths.root)
        if refused := refused_backends(checkpoint.config, uses_of_sample(checkpoint.config), advice="judge it where it can"):
            return None, f"not judged: {next(iter(refused.values()))}"
        model = load_model(checkpoint)
    except TrainError as error:
        return False, str(error)
    length = min(checkpoint.config.train.seq_len, MOST_TOKENS)
    ids = torch.randint(0, len(model.embedding.weight), (2, length), generator=torch.Generator().manual_seed(0))
    first, second = chosen_blocks(model, ids), chosen_blocks(model, ids)
    if not first:
        return None, "no layer has the selected branch"
    differing = sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return not differing, f"{len(first) - differing} of {len(first)} layers chose the same blocks twice"


def _unjudged(rule: str, last: dict[str, Any]) -> Found:
    """Return what is found of a health rule whose figure `last`, a logged step, lacks; NSA records gates in each."""
    reason = f"the last logged step, {last['step']}, has no such figure"
    is_gate = rule.startswith("gate_")
    if is_gate and rule not in last:
        return False, reason
    if is_gate:
        # null: there was nothing to average
        is_empty = last[rule] is None
        reason = f"no token of step {last['step']} sees a compressed block" if is_empty else "a single branch holds every gate"
    return None, f"not judged: {reason}"


def _compared(name: str, now: Any, before: Any, tolerance: float) -> Verdict:
    change = 100 * (now - before) / before if before else 0.0
    found = f"{before:.6g} -> {now:.6g} ({change:+.1f} %, tolerance {tolerance:g} %)"
    return Verdict(rule=f"baseline {name}", is_passed=COMPARED[name] * change >= -tolerance, found=found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
