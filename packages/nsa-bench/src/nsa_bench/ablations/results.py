"""What the trials of a plan came to: figures of each, and of each variant over its seeds. Imports no torch."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
from attrs import frozen

from nsa_bench.ablations.plan import Plan, Variant
from nsa_bench.ablations.running import Place
from nsa_train.telemetry.records import load_json, read_rows


@frozen(kw_only=True)
class TrialResult:
    """The figures of one finished trial."""

    variant: Variant
    seed: int
    steps: int
    tokens: int
    parameters: int
    val_loss: float
    """On held-out rows after the last step, in nats per token."""
    best_val_loss: float
    right: float
    """Share of the held-out labels that are the model's likeliest token."""
    toks_per_s: float
    """Median over the steps."""
    curve: list[tuple[int, float]]
    """(step, loss on held-out rows)"""
    by_position: list[dict[str, Any]]
    """As `held_out.Bucket`."""


class Mean(NamedTuple):
    """A mean over seeds."""

    mean: float
    error: float | None
    """Standard error of the mean; None of a single seed."""
    num_seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean | None":
        """Return the mean of `values`; None where there is none."""
        if not values:
            return None
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.fmean(values), error, len(values))


@frozen(kw_only=True)
class Summary:
    """One line of the table."""

    variant: Variant
    parameters: int | None
    tokens: int | None
    val_loss: Mean | None
    best_val_loss: Mean | None
    right: Mean | None
    toks_per_s: Mean | None
    difference: Mean | None
    """Of val_loss to the baseline's at the same point of the grid, seed by seed; None of the baseline itself."""
    is_best: bool
    """Whether no other point of the grid has a lower mean val_loss for this arm."""


def read_results(places: Sequence[Place]) -> list[TrialResult]:
    """Return the figures of the trials that are finished."""
    return [_result(place) for place in places if place.judged.is_file()]


def _result(place: Place) -> TrialResult:
    metrics, curve = load_json(place.run.metrics), [(int(row["step"]), row["val_loss"]) for row in read_rows(place.run.validation)]
    by_position = load_json(place.judged)["by_position"]
    targets = sum(bucket["targets"] for bucket in by_position)
    return TrialResult(
        variant=place.trial.variant,
        seed=place.trial.seed,
        steps=metrics["steps"],
        tokens=metrics["tokens"],
        parameters=metrics["parameters"],
        val_loss=curve[-1][1],
        best_val_loss=min(loss for _, loss in curve),
        right=sum(bucket["targets"] * bucket["right"] for bucket in by_position) / targets,
        toks_per_s=statistics.median(row["toks_per_s"] for row in read_rows(place.run.training)),
        curve=curve,
        by_position=by_position,
    )


def summarize(plan: Plan, results: Sequence[TrialResult]) -> list[Summary]:
    """Return a line for each variant of `plan`, also where none of its trials is finished."""
    of = {variant: [result for result in results if result.variant == variant] for variant in plan.variants}
    means = {variant: Mean.of([one.val_loss for one in found]) for variant, found in of.items()}

    def is_best(variant: Variant) -> bool:
        rivals = [mean.mean for other, mean in means.items() if other.arm == variant.arm and mean is not None]
        mine = means[variant]
        return mine is not None and mine.mean == min(rivals)

    def mean(found: Sequence[TrialResult], figure: Callable[[TrialResult], float]) -> Mean | None:
        return Mean.of([figure(one) for one in found])

    return [
        Summary(
            variant=variant,
            parameters=found[0].parameters if found else None,
            tokens=found[0].tokens if found else None,
            val_loss=means[variant],
            best_val_loss=mean(found, lambda one: one.best_val_loss),
            right=mean(found, lambda one: one.right),
            toks_per_s=mean(found, lambda one: one.toks_per_s),
            difference=_difference(found, of.get(Variant(plan.baseline or "", variant.point), []), variant.arm == plan.baseline),
            is_best=is_best(variant),
        )
        for variant, found in of.items()
    ]


def _difference(found: Sequence[TrialResult], baseline: Sequence[TrialResult], is_baseline: bool) -> Mean | None:
    """Return the mean difference over the seeds that both have: what a seed does to both alike falls out."""
    by_seed = {one.seed: one.val_loss for one in baseline}
    return None if is_baseline else Mean.of([one.val_loss - by_seed[one.seed] for one in found if one.seed in by_seed])


def to_json(plan: Plan, results: Sequence[TrialResult], environment: dict[str, Any]) -> dict[str, Any]:
    """Return everything as the result file holds it."""
    return {
        "plan": plan.name,
        "baseline": plan.baseline,
        "environment": environment,
        "num_trials": len(plan.trials),
        "num_finished": len(results),
        "variants": [_summary_row(summary) for summary in summarize(plan, results)],
        "trials": [{**attrs.asdict(result), "variant": str(result.variant)} for result in results],
    }


def to_rows(plan: Plan, results: Sequence[TrialResult], environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each variant, for CSV."""
    common = {name: environment[name] for name in ("time", "cpu", "gpu", "torch", "triton", "commit")}
    return [{**_summary_row(summary), **common} for summary in summarize(plan, results)]


def _summary_row(summary: Summary) -> dict[str, Any]:
    row: dict[str, Any] = {"variant": str(summary.variant), "arm": summary.variant.arm, **dict(summary.variant.point)}
    for name, value in attrs.asdict(summary, recurse=False).items():
        if isinstance(value, Mean) or name in ("val_loss", "best_val_loss", "right", "toks_per_s", "difference"):
            row[name], row[f"{name}_error"] = (value.mean, value.error) if value else (None, None)
        elif name != "variant":
            row[name] = value
    row["seeds"] = summary.val_loss.num_seeds if summary.val_loss else 0
    return row
