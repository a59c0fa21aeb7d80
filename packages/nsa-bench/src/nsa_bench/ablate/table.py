"""The results of an ablation: figures of each trial, of each variant over its seeds, table, files, curves. Imports no torch."""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
from attrs import frozen
from rich.table import Table
from rich.text import Text

from nsa_bench.ablate.plan import Plan, Trial, Variant, load_plan
from nsa_bench.ablate.run import TrialFolder, check_trials, prepare, run_trials, visible_gpus
from nsa_bench.errors import BenchError, OptionError, require_matplotlib
from nsa_bench.results import Output, facts_of
from nsa_train.telemetry.records import load_json, read_rows

AVERAGED = ("val_loss", "best_val_loss", "right", "toks_per_s")
"""The figures of trials whose means are in the table."""
SEVERAL = "several"
"""A fact that differs among trials: they ran on several machines, with several versions or at several commits."""
DAMAGED = (OSError, ArithmeticError, LookupError, TypeError, ValueError)
"""Errors that reading figures raises if a file lacks some of them or holds something else."""
COLOURS = ("#24292f", "#3b6fb6", "#d9782d", "#4a9a6a", "#b6403b", "#8a63b8", "#7a7a2a", "#2a8a8a")
LINES = ("-", "--", ":", "-.")
NAMES_IN_A_ROW = 4


def run_ablation(
    name: str,
    out: Path | None,
    overrides: Sequence[str],
    *,
    side_by_side: int,
    minutes: float | None,
    earlier: Sequence[Path],
    png_file: Path | None,
    output: Output,
) -> bool:
    """Run the unfinished trials of a plan, print the table, write the files; return whether all trials are finished.

    The JSON and CSV files are written after each trial too, so that an interrupted call leaves what it has.
    Trials in `earlier`, JSON files of earlier calls, count as finished.

    Raises:
        OptionError: for an invalid plan or option, before anything is written.
    """
    if side_by_side < 1:
        raise OptionError(f"--side-by-side={side_by_side} runs nothing; use 1 or more")
    if minutes is not None and not minutes > 0:
        raise OptionError(f"--minutes={minutes:g} leaves no time; use 9, for instance")
    plan = load_plan(name, overrides)
    known = {(result.variant, result.seed): result for path in earlier for result in read_earlier(plan, path)}
    trials = [trial for trial in plan.trials if (trial.variant, trial.seed) not in known]
    output.check_files(png_file, inputs={Path(name): "the plan"})
    require_matplotlib(png_file)
    root = out or Path("ablations") / plan.name
    check_trials(trials, root)
    folders = prepare(trials, root)
    if known:
        output.say(f"{len(known)} of {len(plan.trials)} trials come from earlier results")

    def write() -> list[TrialResult]:
        results = [*known.values(), *(result_of(folder, output.commit) for folder in folders if folder.judged.is_file())]
        if results:
            output.write(to_json(plan, results, output.environment), to_rows(plan, results))
        return results

    for folder in folders:
        if folder.judged.is_file():
            # a damaged record is refused before further trials run
            result_of(folder, output.commit)
    gpus = visible_gpus() if side_by_side > 1 else ()
    run_trials(folders, side_by_side=side_by_side, minutes=minutes, say=output.say, after_each=lambda: output.keep(write), gpus=gpus)
    results = write()
    output.show(ablation_table(plan, results))
    if results and png_file is not None:
        draw(plan, results, png_file)
    return len(results) == len(plan.trials)


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
    """Share of the held-out labels that are the model's most likely token."""
    toks_per_s: float
    """Median over the steps."""
    curve: list[tuple[int, float]]
    """(step, loss on held-out rows)"""
    by_position: list[dict[str, Any]]
    """The fields of `nsa_train.evaluation.positions.Bucket`."""
    ran_on: dict[str, Any]
    """Time, machine, versions and commit of its starts, as in `common_facts`: another machine may write the file."""
    settings: dict[str, Any] | None = None
    """`Trial.settings`; None if an older version wrote the file."""


class Mean(NamedTuple):
    """A mean over seeds."""

    mean: float
    error: float | None
    """Standard error of the mean; None for a single seed."""
    num_seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean | None":
        """Return the mean of `values`; None if there is none."""
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
    """Difference of val_loss to the baseline's at the same point of the grid, seed by seed; None for the baseline itself."""
    is_best: bool
    """True if no other point of the grid has a lower mean val_loss for this arm."""


def read_earlier(plan: Plan, path: Path) -> list[TrialResult]:
    """Return the trials of a JSON file that an earlier call wrote, perhaps on another machine.

    Raises:
        OptionError: for a file that holds no results of this plan, or trials that the plan does not have or has with other settings.
    """
    try:
        content = load_json(path)
        found = {(figures["variant"], figures.get("seed")): figures for figures in map(dict, content["trials"])}
        name, ran_on = content["plan"], facts_of(dict(content.get("environment") or {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"--earlier={str(path)!r} holds no results of an ablation ({type(error).__name__}); name a file of --json"
        ) from None
    trials: dict[tuple[Any, Any], Trial] = {(str(trial.variant), trial.seed): trial for trial in plan.trials}
    results = []
    for (variant, seed), figures in found.items():
        trial = trials.get((variant, seed))
        # early stopping ends a trial before train.steps, which the settings have
        is_other_length = figures.get("settings") is None and trial is not None and figures.get("steps") != trial.config.train.steps
        if name != plan.name or trial is None or is_other_length:
            raise OptionError(
                f"--earlier={str(path)!r} has the trial {variant!r}, seed {seed}, {figures.get('steps')} steps of plan {name!r} "
                f"(plan {plan.name!r} has no such trial); name a file of this plan"
            )
        try:
            # a file without `ran_on` holds trials of one machine, which wrote it
            result = _checked({"ran_on": ran_on, **figures, "variant": trial.variant})
        except DAMAGED:
            raise OptionError(
                f"--earlier={str(path)!r} lacks figures of {variant!r} (another version wrote it); run the trial again"
            ) from None
        if differing := _differing(result.settings, trial.settings):
            raise OptionError(
                f"--earlier={str(path)!r} has the trial {variant!r}, seed {seed}, with other settings ({differing}); "
                "name a file of the same settings, or change the plan"
            )
        results.append(result)
    return results


def _differing(earlier: dict[str, Any] | None, planned: dict[str, Any]) -> str:
    """Return, as text, the settings of an earlier trial that differ from the plan; "" if there are none.

    Files of older versions have no settings; then nothing is compared.
    """
    if earlier is None:
        return ""

    def reported(settings: dict[str, Any], name: str) -> str:
        return repr(settings[name]) if name in settings else "the default"

    names = [name for name in sorted(earlier | planned) if earlier.get(name) != planned.get(name)]
    return ", ".join(f"{name}: {reported(earlier, name)} there, {reported(planned, name)} here" for name in names)


def _checked(figures: dict[str, Any]) -> TrialResult:
    """Return the result of `figures`, which a file holds.

    Raises:
        One of DAMAGED: if they are not all there, or not the numbers that the table needs.
    """
    curve = [(int(step), float(loss)) for step, loss in figures["curve"]]
    settings = figures.get("settings")
    kept = {"curve": curve, "ran_on": dict(figures["ran_on"]), "settings": None if settings is None else dict(settings)}
    result = TrialResult(**{**figures, **kept})
    buckets = [bucket[name] for bucket in result.by_position for name in ("first", "last", "targets", "loss", "right")]
    numbers = (result.steps, result.tokens, result.parameters, *(getattr(result, name) for name in AVERAGED), *buckets)
    if not (curve and result.by_position and all(math.isfinite(number) for number in (*numbers, *(loss for _, loss in curve)))):
        raise ValueError("a figure is missing or not finite")
    return result


def result_of(folder: TrialFolder, commit: str | None) -> TrialResult:
    """Return the figures of a finished trial. `commit` is the option of that name, for a run outside a checkout.

    Raises:
        BenchError: if one of its files is damaged.
    """
    try:
        return _checked(_figures(folder, commit))
    except DAMAGED as error:
        raise BenchError(
            f"the finished trial {folder.trial.name!r} has a damaged record ({type(error).__name__}: {error}); "
            f"delete {folder.run.root}, and the trial runs again"
        ) from None


def _figures(folder: TrialFolder, commit: str | None) -> dict[str, Any]:
    environment = load_json(folder.run.environment)
    metrics, curve = load_json(folder.run.metrics), [(int(row["step"]), row["val_loss"]) for row in read_rows(folder.run.validation)]
    losses = [loss for _, loss in curve]
    by_position = load_json(folder.judged)["by_position"]
    targets = sum(bucket["targets"] for bucket in by_position)
    starts = [environment, *(environment.get("resumed") or [])]
    return {
        "variant": folder.trial.variant,
        "seed": folder.trial.seed,
        "settings": folder.trial.settings,
        **{name: metrics[name] for name in ("steps", "tokens", "parameters")},
        "val_loss": losses[-1],
        "best_val_loss": min(losses),
        "right": sum(bucket["targets"] * bucket["right"] for bucket in by_position) / targets,
        "toks_per_s": statistics.median(row["toks_per_s"] for row in read_rows(folder.run.training)),
        "curve": curve,
        "by_position": by_position,
        "ran_on": common_facts(facts_of(start | {"commit": start.get("commit") or commit}) for start in starts),
    }


def summarize(plan: Plan, results: Sequence[TrialResult]) -> list[Summary]:
    """Return a line for each variant of `plan`, even if none of its trials is finished."""
    found = {variant: [result for result in results if result.variant == variant] for variant in plan.variants}
    means = {variant: {name: Mean.of([getattr(one, name) for one in own]) for name in AVERAGED} for variant, own in found.items()}
    for variant, own in found.items():
        facts = common_facts(one.ran_on for one in own)
        if SEVERAL in (facts["gpu"], facts["cpu"]):
            # speeds of different machines have no mean
            means[variant]["toks_per_s"] = None
    best = {
        arm: min((own["val_loss"].mean for variant, own in means.items() if variant.arm == arm and own["val_loss"]), default=math.inf)
        for arm in {variant.arm for variant in found}
    }
    return [
        Summary(
            variant=variant,
            parameters=own[0].parameters if own else None,
            tokens=own[0].tokens if own else None,
            **means[variant],
            difference=None
            if variant.arm == plan.baseline
            else _difference(own, found.get(Variant(plan.baseline or "", variant.point), [])),
            is_best=(loss := means[variant]["val_loss"]) is not None and loss.mean == best[variant.arm],
        )
        for variant, own in found.items()
    ]


def _difference(found: Sequence[TrialResult], baseline: Sequence[TrialResult]) -> Mean | None:
    """Return the mean difference over common seeds, which cancels effects of a seed on both."""
    by_seed = {one.seed: one.val_loss for one in baseline}
    return Mean.of([one.val_loss - by_seed[one.seed] for one in found if one.seed in by_seed])


def to_json(plan: Plan, results: Sequence[TrialResult], environment: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the JSON file."""
    return {
        "plan": plan.name,
        "baseline": plan.baseline,
        "environment": environment,
        "num_trials": len(plan.trials),
        "num_finished": len(results),
        "variants": [_summary_row(summary) for summary in summarize(plan, results)],
        "trials": [{**attrs.asdict(result), "variant": str(result.variant)} for result in results],
    }


def to_rows(plan: Plan, results: Sequence[TrialResult]) -> list[dict[str, Any]]:
    """Return a row for each variant, for CSV, with the facts of the machines that trained it."""
    return [
        {**_summary_row(summary), **common_facts(one.ran_on for one in results if one.variant == summary.variant)}
        for summary in summarize(plan, results)
    ]


def common_facts(ran_on: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts that all of `ran_on` share, SEVERAL for those that differ, and the latest time; None for what is unknown."""
    of_trials = list(ran_on)

    def shared(name: str) -> Any:
        values = {one.get(name) for one in of_trials}
        return SEVERAL if len(values) > 1 else next(iter(values), None)

    times = [one["time"] for one in of_trials if one.get("time")]
    return {name: shared(name) for name in facts_of({})} | {"time": max(times, default=None)}


def _summary_row(summary: Summary) -> dict[str, Any]:
    # JSON has no infinity
    point = {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in summary.variant.point}
    row: dict[str, Any] = {"variant": str(summary.variant), "arm": summary.variant.arm, **point}
    for name, value in attrs.asdict(summary, recurse=False).items():
        if name in (*AVERAGED, "difference"):
            row[name], row[f"{name}_error"] = (value.mean, value.error) if value else (None, None)
        elif name != "variant":
            row[name] = value
    row["seeds"] = summary.val_loss.num_seeds if summary.val_loss else 0
    return row


def ablation_table(plan: Plan, results: Sequence[TrialResult]) -> Table:
    """Return a line for each variant; means are over seeds, with their standard error."""
    table = Table(title=Text(f"{plan.name}: loss on held-out rows, nats per token; {len(results)} of {len(plan.trials)} trials"))
    for title in ("variant", "weights", "tokens", "seeds", "loss at the end", "lowest loss", f"against {plan.baseline}", "right", "toks/s"):
        if plan.baseline is not None or not title.startswith("against "):
            # on a narrow screen figures break at spaces, and names keep some width
            is_name = title == "variant"
            table.add_column(title, justify="left" if is_name else "right", min_width=11 if is_name else None, overflow="fold")
    summaries = summarize(plan, results)
    has_grid = any(summary.variant.point for summary in summaries)
    for summary in summaries:
        best = summary.is_best and has_grid
        cells: list[Text | str] = [
            Text(f"{summary.variant}{' *' if best else ''}", style="bold" if best else ""),
            _counted(summary.parameters),
            _counted(summary.tokens),
            str(summary.val_loss.num_seeds if summary.val_loss else 0),
            _shown(summary.val_loss, "{:.4f}"),
            _shown(summary.best_val_loss, "{:.4f}"),
        ]
        if plan.baseline is not None:
            cells.append(_shown(summary.difference, "{:+.4f}"))
        table.add_row(*cells, _shown(summary.right, "{:.3f}"), _shown(summary.toks_per_s, "{:,.0f}", with_error=False))
    facts = common_facts(one.ran_on for one in results)
    differing = [name for name in ("gpu", "cpu", "commit") if facts[name] == SEVERAL]
    notes = ["* the best point of the grid for its arm"] if has_grid else []
    notes += [f"the trials differ in {', '.join(differing)}: see ran_on in the JSON file"] if differing else []
    table.caption = Text("\n".join(notes)) if notes else None
    return table


def _counted(number: int | None) -> str:
    """Return a count in the few characters that a table on a screen has room for."""
    if number is None:
        return ""
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:,.1f}M"


def _shown(mean: Mean | None, form: str, *, with_error: bool = True) -> str:
    if mean is None:
        return ""
    error = f" ± {form.replace('+', '').format(mean.error)}" if with_error and mean.error is not None else ""
    return form.format(mean.mean) + error


def draw(plan: Plan, results: Sequence[TrialResult], path: Path) -> None:
    """Draw the held-out loss by tokens, and at the end by position, of each arm at its best point of the grid.

    If there is a baseline, the curve by position is the mean difference to the baseline at its best point, over the same seeds; else it is the loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [summary.variant for summary in summarize(plan, results) if summary.is_best]
    rows_of_names = math.ceil(len(shown) / NAMES_IN_A_ROW)
    figure = Figure(figsize=(12, 4.5 + 0.25 * rows_of_names), dpi=110, layout="constrained")
    by_tokens, by_position = figure.subplots(1, 2)
    baseline = {one.seed: one for one in results if one.variant in shown and one.variant.arm == plan.baseline}
    for index, variant in enumerate(shown):
        found = [result for result in results if result.variant == variant]
        turn, colour = divmod(index, len(COLOURS))
        style: dict[str, Any] = {"color": COLOURS[colour], "ls": LINES[turn % len(LINES)], "lw": 1.3}
        per_step = found[0].tokens / found[0].steps
        # leave out the loss before training, because it would flatten the rest of the curve
        _draw_band(
            by_tokens,
            [{step * per_step: loss for step, loss in result.curve if step} for result in found],
            {**style, "label": str(variant)},
        )
        curves = [_at_middles(result) for result in found]
        if baseline:
            pairs = [(curve, _at_middles(baseline[one.seed])) for one, curve in zip(found, curves, strict=True) if one.seed in baseline]
            curves = [{middle: loss - theirs[middle] for middle, loss in curve.items() if middle in theirs} for curve, theirs in pairs]
        if curves:
            _draw_band(by_position, curves, style)
    by_tokens.set(xlabel="tokens", ylabel="nats per token, held out", title=plan.name)
    title = f"at the end, by position: difference to {plan.baseline}" if baseline else "at the end, by position"
    by_position.set(xlabel="position in the sequence", ylabel="nats per token, held out", title=title, xscale="log")
    figure.legend(frameon=False, loc="outside lower center", ncols=NAMES_IN_A_ROW)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(path)


def _at_middles(result: TrialResult) -> dict[float, float]:
    """Return the final loss by position, at the middle of each bucket."""
    return {(bucket["first"] + bucket["last"]) / 2 + 1: bucket["loss"] for bucket in result.by_position}


def _draw_band(axis: Any, curves: Sequence[dict[float, float]], style: dict[str, Any]) -> None:
    """Draw the mean loss and its standard error at the points that all of `curves` have."""
    common = [point for point in curves[0] if all(point in curve for curve in curves)]
    means = [mean for point in common if (mean := Mean.of([curve[point] for curve in curves])) is not None]
    low, high = ([mean.mean + sign * (mean.error or 0.0) for mean in means] for sign in (-1, 1))
    if len(common) > 1:
        axis.plot(common, [mean.mean for mean in means], **style)
        axis.fill_between(common, low, high, color=style["color"], alpha=0.2, lw=0)
    else:
        # a line through one point, and its band, have no extent
        axis.plot(common, [mean.mean for mean in means], marker="o", **style)
        axis.vlines(common, low, high, color=style["color"], alpha=0.5)
