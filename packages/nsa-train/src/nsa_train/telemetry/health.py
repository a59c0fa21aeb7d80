"""Summaries of gate, selection and read figures, and the bands of a healthy run. Imports no torch."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nsa_core.config import BRANCHES, COLLAPSE_ENTROPY

SUMMED = frozenset({"reads_pred", "reads_act_total", "rows"})
"""Counts, which are summed over layers; the other figures are averaged, except the extremes."""
NUMBER_OF = {"gate": "num_gates", "contribution": "num_outputs", "overlap": "num_followers"}
"""First word of a mean's name -> the figure with the number of its elements; for all other means that figure is `rows`."""

MOST_MAX_GATE, MOST_COLLAPSED = 0.9, 0.5
BANDS = (
    ("gate_entropy_mean", ">", 0.5, " nats"),
    ("gate_max_gate", "<", MOST_MAX_GATE, ""),
    ("gate_collapse_frac", "<", MOST_COLLAPSED, ""),
)
"""Figure, sign, limit, unit of each health band."""
COLLAPSED_MEAN = 2 * COLLAPSE_ENTROPY
"""Mean entropy of gates below which a run's gates have collapsed; COLLAPSE_ENTROPY is the limit for one token."""
THROUGHPUT_BAND = 0.1
"""Maximum drop of the throughput of the last steps below the run's median; a higher throughput is no fault."""
LAST_SHARE = 0.1
"""The throughput of this share of the steps, at the end of the run, is compared with the throughput of all steps."""


def merged(passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures that one pass over the elements of all `passes` of a layer would have."""
    return {name: _merged(name, passes) for name in (passes[0] if passes else ()) if name not in NUMBER_OF.values()}


def combine(summaries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return one figure per name for all layers that have it: the sum of counts, the minimum of `_min`, the maximum of `k_max`, else the mean.

    Gate figures use only layers with several branches, if there are any: a single branch holds every gate.
    """
    several = [summary for summary in summaries if sum(name.startswith("gate_share_") for name in summary) > 1] or summaries
    found: dict[str, list[float]] = {}
    for summary in summaries:
        for name, value in summary.items():
            if summary in several or not name.startswith("gate_"):
                found.setdefault(name, []).append(value)
    return {name: _combined(name, values) for name, values in found.items()}


def heartbeat_fields(figures: dict[str, float]) -> dict[str, Any]:
    """Return `figures` under the heartbeat's names: the shares of the branches become one field."""
    shares = {branch: figures[f"gate_share_{branch}"] for branch in BRANCHES if f"gate_share_{branch}" in figures}
    rest = {name: value for name, value in figures.items() if not name.startswith("gate_share_")}
    return {**rest, "gate_branch_shares": shares} if shares else rest


def has_one_branch(event: Mapping[str, Any]) -> bool:
    """Return whether only one branch exists: it holds every gate, which is no fault."""
    return len(event.get("gate_branch_shares") or (1, 2)) < 2


def has_collapsed(event: Mapping[str, Any]) -> bool:
    """Return whether the gates of a logged step have collapsed; a figure that it lacks counts as healthy."""
    largest, share = event.get("gate_max_gate"), event.get("gate_collapse_frac")
    return (
        event["gate_entropy_mean"] < COLLAPSED_MEAN
        or (largest is not None and largest > MOST_MAX_GATE)
        or (share is not None and share > MOST_COLLAPSED)
    )


class Check(NamedTuple):
    """One checked health rule."""

    name: str
    found: str
    band: str
    is_healthy: bool


def steadiness(speeds: Sequence[float]) -> float | None:
    """Return the median of the last tenth of `speeds` (tokens per second of each step) over the median of all; None without a speed above 0."""
    known = [speed for speed in speeds if speed > 0]
    if not known:
        return None
    return statistics.median(known[-max(1, int(LAST_SHARE * len(known))) :]) / statistics.median(known)


def judge(figures: Mapping[str, Any]) -> list[Check]:
    """Return the health rules that can be checked from `figures` (names of the heartbeat).

    Bands of gates are left out if only one branch exists: it holds every gate, which is no fault.
    """
    checks = []
    for name, sign, limit, unit in () if has_one_branch(figures) else BANDS:
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
    # not max(), which turns NaN into 0; rounding may leave it below 0
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
