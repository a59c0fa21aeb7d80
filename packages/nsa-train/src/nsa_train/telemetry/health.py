"""Gate, selection, read and route figures of all NSA layers, and the bands within which a run counts as healthy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from nsa_core import NativeSparseAttention
from nsa_core.telemetry import LayerTelemetry

BRANCHES = ("cmp", "slc", "win")
SUMMED = frozenset({"reads_pred", "reads_act_total", "rows"})
"""Counts, which layers add up; of the others the mean is taken, but for the extremes."""

BANDS = (("gate_entropy_mean", ">", 0.5, " nats"), ("gate_max_gate", "<", 0.9, ""), ("gate_collapse_frac", "<", 0.5, ""))
"""Figure, sign, limit, unit: where a run counts as healthy."""


@contextmanager
def watched(layers: Sequence[NativeSparseAttention]) -> Iterator[list[LayerTelemetry]]:
    """Attach telemetry to `layers` while the block runs; it describes each layer's last forward pass in it."""
    collected = [LayerTelemetry() for _ in layers]
    for layer, telemetry in zip(layers, collected, strict=True):
        layer.telemetry = telemetry
    try:
        yield collected
    finally:
        for layer in layers:
            layer.telemetry = None


def combine(collected: Sequence[LayerTelemetry]) -> dict[str, float]:
    """Return one figure per name for all layers: the sum of counts, the least of `_min`, the most of `k_max`, else the mean."""
    summaries = [telemetry.summary() for telemetry in collected]
    return {name: _combined(name, [summary[name] for summary in summaries]) for name in (summaries[0] if summaries else ())}


def routes_of(collected: Sequence[LayerTelemetry]) -> dict[str, str]:
    """Return operation -> backend that ran; layers that differ are listed, `a|b`."""
    names: dict[str, set[str]] = {}
    for telemetry in collected:
        for operation, backend in telemetry.routes.items():
            names.setdefault(operation, set()).add(backend)
    return {operation: "|".join(sorted(backends)) for operation, backends in names.items()}


def heartbeat_fields(figures: dict[str, float]) -> dict[str, Any]:
    """Return `figures` under the heartbeat's names: the shares of the branches become one field."""
    shares = {branch: figures[f"gate_share_{branch}"] for branch in BRANCHES if f"gate_share_{branch}" in figures}
    rest = {name: value for name, value in figures.items() if not name.startswith("gate_share_")}
    return {**rest, "gate_branch_shares": shares} if shares else rest


class Check(NamedTuple):
    """One health rule, judged."""

    name: str
    found: str
    band: str
    is_healthy: bool


def judge(figures: dict[str, float]) -> list[Check]:
    """Return the health rules that `figures` (names of the heartbeat) allow to judge."""
    checks = []
    for name, sign, limit, unit in BANDS:
        found = figures.get(name)
        if found is not None:
            is_healthy = found > limit if sign == ">" else found < limit
            checks.append(Check(name, f"{found:.3f}", f"{sign} {limit}{unit}", is_healthy))
    predicted, actual = figures.get("reads_pred"), figures.get("reads_act_total")
    if predicted is not None and actual is not None:
        checks.append(Check("reads_act_total", f"{actual:.0f}", f"= reads_pred, {predicted:.0f}", predicted == actual))
    return checks


def _combined(name: str, values: list[float]) -> float:
    if name in SUMMED:
        return int(sum(values))
    if name == "k_max":
        return int(max(values))
    return min(values) if name.endswith("_min") else sum(values) / len(values)
