"""Gate, selection, read and route figures of all NSA layers, and the bands within which a run counts as healthy."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_core import BlockGeometry, NativeSparseAttention
from nsa_core.telemetry import LayerTelemetry

BRANCHES = ("cmp", "slc", "win")
SUMMED = frozenset({"reads_pred", "reads_act_total", "rows"})
"""Counts, which layers add up; of the others the mean is taken, but for the extremes."""
NUMBER_OF = {"gate": "num_gates", "contribution": "num_outputs", "overlap": "num_followers"}
"""First word of a mean -> how many elements it was taken of; of the others `rows` is."""

BANDS = (("gate_entropy_mean", ">", 0.5, " nats"), ("gate_max_gate", "<", 0.9, ""), ("gate_collapse_frac", "<", 0.5, ""))
"""Figure, sign, limit, unit: where a run counts as healthy."""
THROUGHPUT_BAND = 0.1
"""How far the last steps' throughput may lie below the run's median; above it, it is no fault."""
LAST_SHARE = 0.1
"""Of the steps: those whose throughput is compared with that of all."""


class RunTelemetry(LayerTelemetry):
    """LayerTelemetry of several passes, the micro-batches of a step.

    It also says what k_mean must be, the mean of min(n, own + 1) over the same queries, and of how many elements each mean is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passes: list[dict[str, Tensor]] = []

    def end_pass(self) -> None:
        """Keep the figures of the pass; until then, what is computed again replaces them."""
        self._passes.append(self._figures)
        self._figures = {}

    def passes(self) -> list[dict[str, float]]:
        """Return the figures of each pass; waits for the device."""
        return [{name: float(value) for name, value in one.items()} for one in (*self._passes, self._figures) if one]

    @torch.no_grad()
    def record_gates(self, gates: Tensor, has_compressed: Tensor, branches: tuple[str, ...]) -> None:
        """Note gates `(B, S, H, 3)`; `has_compressed` `(B, S)` says which tokens see a compressed block."""
        super().record_gates(gates, has_compressed, branches)
        self._figures["num_gates"] = has_compressed.sum()

    @torch.no_grad()
    def record_branch(self, branch: str, out: Tensor, positions: Tensor) -> None:
        """Note a branch's output before its gate."""
        super().record_branch(branch, out, positions)
        self._figures["num_outputs"] = (positions >= 0).sum()

    @torch.no_grad()
    def record_selection(self, block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> None:
        """Note the chosen blocks `(B, S, G, n)` of queries at `positions` `(B, S)`."""
        super().record_selection(block_indices, positions, geometry)
        is_query = positions >= 0
        expected = (positions // geometry.selection_block_size + 1).clamp(max=geometry.num_selected_blocks)
        self._figures["num_followers"] = ((positions[:, 1:] == positions[:, :-1] + 1) & (positions[:, 1:] > 0)).sum()
        self._figures["k_mean_expected"] = torch.where(is_query, expected, 0).sum(dtype=torch.float64) / is_query.sum()


@contextmanager
def watched(layers: Sequence[NativeSparseAttention]) -> Iterator[list[RunTelemetry]]:
    """Attach telemetry to `layers` while the block runs; each forward pass ends with `end_pass`, which the last one may leave out."""
    collected = [RunTelemetry() for _ in layers]
    for layer, telemetry in zip(layers, collected, strict=True):
        layer.telemetry = telemetry
    try:
        yield collected
    finally:
        for layer in layers:
            layer.telemetry = None


def _alone(item: Any) -> list[Any]:
    return [item]


def of_layers(collected: Sequence[RunTelemetry], gather: Callable[[Any], list[Any]] = _alone) -> list[dict[str, float]]:
    """Return the figures of each layer over all its passes. A collective, where `gather` returns what each rank passed."""
    ranks = gather([telemetry.passes() for telemetry in collected])
    return [merged([one for passes in layer for one in passes]) for layer in zip(*ranks, strict=True)]


def merged(passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of several passes of a layer as those of one over all their elements."""
    return {name: _merged(name, passes) for name in (passes[0] if passes else ()) if name not in NUMBER_OF.values()}


def combine(summaries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return one figure per name for all layers: the sum of counts, the least of `_min`, the most of `k_max`, else the mean."""
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


def steadiness(speeds: Sequence[float]) -> float | None:
    """Return the median of the last tenth of `speeds`, tokens per second of each step, over that of all; None without a speed above 0."""
    known = [speed for speed in speeds if speed > 0]
    if not known:
        return None
    return statistics.median(known[-max(1, int(LAST_SHARE * len(known))) :]) / statistics.median(known)


def judge(figures: Mapping[str, Any]) -> list[Check]:
    """Return the health rules that `figures` (names of the heartbeat) allow to judge.

    Bands of gates are left out where one branch alone exists: it holds every gate, and is no fault.
    """
    checks = []
    is_alone = len(figures.get("gate_branch_shares") or (1, 2)) < 2
    for name, sign, limit, unit in () if is_alone else BANDS:
        found = figures.get(name)
        if found is not None:
            is_healthy = found > limit if sign == ">" else found < limit
            checks.append(Check(name, f"{found:.3f}", f"{sign} {limit}{unit}", is_healthy))
    for name, equal, text in (
        ("k_mean", "k_mean_expected", "the mean of min(n, own + 1)"),
        ("reads_act_total", "reads_pred", "reads_pred"),
    ):
        found, wanted = figures.get(name), figures.get(equal)
        if found is not None and wanted is not None:
            # records keep six digits
            checks.append(Check(name, f"{found:.6g}", f"= {text}, {wanted:.6g}", math.isclose(found, wanted, rel_tol=1e-5)))
    if (found := figures.get("fallbacks_total")) is not None:
        checks.append(Check("fallbacks_total", f"{found:.0f}", "= 0", found == 0))
    if (found := figures.get("toks_per_s_of_median")) is not None:
        least = 1 - THROUGHPUT_BAND
        checks.append(Check("toks_per_s", f"{100 * found:.0f} % of the run's median", f"at least {100 * least:.0f} %", found >= least))
    return checks


def _merged(name: str, passes: Sequence[Mapping[str, float]]) -> float:
    values = [one[name] for one in passes]
    if name in SUMMED:
        return sum(values)
    if name == "k_max":
        return max(values)
    if name.endswith("_min"):
        return min((value for value in values if not math.isnan(value)), default=math.nan)
    numbers = [one[NUMBER_OF.get(name.partition("_")[0], "rows")] for one in passes]
    if not name.startswith("gate_std_"):
        return _mean(values, numbers)
    # the spread about the mean of all passes
    means = [one[name.replace("_std_", "_mean_")] for one in passes]
    squares = [value**2 + mean**2 for value, mean in zip(values, means, strict=True)]
    variance = _mean(squares, numbers) - _mean(means, numbers) ** 2
    # not max(), which takes 0 for NaN; rounding may leave it below 0
    return math.sqrt(abs(variance))


def _mean(values: Sequence[float], numbers: Sequence[float]) -> float:
    """Return the mean of means `values` over so many elements each; NaN where there is none."""
    total = sum(numbers)
    return sum(value * number for value, number in zip(values, numbers, strict=True) if number) / total if total else math.nan


def _combined(name: str, values: list[float]) -> float:
    if name in SUMMED:
        return int(sum(values))
    if name == "k_max":
        return int(max(values))
    return min(values) if name.endswith("_min") else sum(values) / len(values)
