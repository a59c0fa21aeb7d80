"""The command `nsa-bench ablate`: trials, table, files, curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsa_bench.ablations.plan import Plan, load_plan
from nsa_bench.ablations.results import Mean, TrialResult, read_results, summarize, to_json, to_rows
from nsa_bench.ablations.running import prepare, run_trials
from nsa_bench.errors import OptionError
from nsa_bench.results import write_csv, write_json

COLOURS = ("#24292f", "#3b6fb6", "#d9782d", "#4a9a6a", "#b6403b", "#8a63b8", "#7a7a2a", "#2a8a8a")


def bench_ablation(
    plan_name: str,
    out: Path | None,
    overrides: Sequence[str],
    *,
    side_by_side: int,
    minutes: float | None,
    commit: str | None,
    json_file: Path | None,
    csv_file: Path | None,
    png_file: Path | None,
    screen: Console,
    progress: Console,
) -> bool:
    """Run the trials of a plan that are not finished, print the table, write the files; return whether all trials are finished.

    Raises:
        OptionError: for what is wrong with the plan or the options, before anything is written.
    """
    if side_by_side < 1:
        raise OptionError(f"--side-by-side={side_by_side} runs nothing; use 1 or more")
    if minutes is not None and not minutes > 0:
        raise OptionError(f"--minutes={minutes:g} leaves no time; use 9, for instance")
    plan = load_plan(plan_name, overrides)
    places = prepare(plan, out or Path("ablations") / plan.name)

    def say(line: str) -> None:
        progress.print(line, markup=False, highlight=False, soft_wrap=True)

    run_trials(places, side_by_side=side_by_side, minutes=minutes, say=say)
    results = read_results(places)
    screen.print(ablation_table(plan, results))
    if results:
        from nsa_bench.environment import describe_environment

        environment = describe_environment()
        environment["commit"] = commit or environment["commit"]
        if json_file is not None:
            write_json(json_file, to_json(plan, results, environment))
        if csv_file is not None:
            write_csv(csv_file, to_rows(plan, results, environment))
        if png_file is not None:
            draw(plan, results, png_file)
    return len(results) == len(places)


def ablation_table(plan: Plan, results: Sequence[TrialResult]) -> Table:
    """Return a line for each variant; means are over seeds, with their standard error."""
    table = Table(title=f"{plan.name}: loss on held-out rows, nats per token; {len(results)} of {len(plan.trials)} trials")
    for title in ("variant", "weights", "tokens", "seeds", "loss at the end", "lowest loss", f"against {plan.baseline}", "right", "toks/s"):
        if not title.endswith("None"):
            table.add_column(title, justify="left" if title == "variant" else "right", no_wrap=title != "variant")
    summaries = summarize(plan, results)
    has_grid = any(summary.variant.point for summary in summaries)
    for summary in summaries:
        best = summary.is_best and has_grid
        cells: list[Text | str] = [
            Text(f"{summary.variant}{' *' if best else ''}", style="bold" if best else ""),
            "" if summary.parameters is None else f"{summary.parameters:,}",
            "" if summary.tokens is None else f"{summary.tokens:,}",
            str(summary.val_loss.num_seeds if summary.val_loss else 0),
            _shown(summary.val_loss, "{:.4f}"),
            _shown(summary.best_val_loss, "{:.4f}"),
        ]
        if plan.baseline is not None:
            cells.append(_shown(summary.difference, "{:+.4f}"))
        table.add_row(*cells, _shown(summary.right, "{:.3f}"), _shown(summary.toks_per_s, "{:,.0f}", with_error=False))
    if has_grid:
        table.caption = "* the best point of the grid for its arm"
    return table


def _shown(mean: Mean | None, form: str, *, with_error: bool = True) -> str:
    if mean is None:
        return ""
    error = f" ± {form.replace('+', '').format(mean.error)}" if with_error and mean.error is not None else ""
    return form.format(mean.mean) + error


def draw(plan: Plan, results: Sequence[TrialResult], path: Path) -> None:
    """Draw the held-out loss by tokens, and at the end by position, of each arm at its best point of the grid."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [summary.variant for summary in summarize(plan, results) if summary.is_best]
    figure = Figure(figsize=(12, 4.5), dpi=110, layout="constrained")
    by_tokens, by_position = figure.subplots(1, 2)
    for place, variant in enumerate(shown):
        found = [result for result in results if result.variant == variant]
        style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "label": str(variant), "lw": 1.3}
        _draw_band(by_tokens, *_curve(found), style)
        _draw_band(by_position, *_positions(found), style)
    by_tokens.set(xlabel="tokens", ylabel="nats per token, held out", title=plan.name)
    by_position.set(xlabel="position in the sequence", ylabel="nats per token, held out", title="at the end, by position", xscale="log")
    by_tokens.legend(frameon=False)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(path)


def _draw_band(axis: Any, places: Sequence[float], means: Sequence[Mean], style: dict[str, Any]) -> None:
    axis.plot(places, [mean.mean for mean in means], **style)
    low, high = ([mean.mean + sign * (mean.error or 0.0) for mean in means] for sign in (-1, 1))
    axis.fill_between(places, low, high, color=style["color"], alpha=0.2, lw=0)


def _curve(found: Sequence[TrialResult]) -> tuple[list[float], list[Mean]]:
    """Return tokens and mean loss of the evaluations that all of `found` have."""
    curves = [dict(result.curve) for result in found]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    per_step = found[0].tokens / found[0].steps
    return [step * per_step for step in steps], _means([[curve[step] for curve in curves] for step in steps])


def _positions(found: Sequence[TrialResult]) -> tuple[list[float], list[Mean]]:
    """Return the middle of each bucket of positions and the mean loss there."""
    losses = [{(bucket["first"], bucket["last"]): bucket["loss"] for bucket in result.by_position} for result in found]
    buckets = [bucket for bucket in losses[0] if all(bucket in loss for loss in losses)]
    return [(first + last) / 2 + 1 for first, last in buckets], _means([[loss[bucket] for loss in losses] for bucket in buckets])


def _means(columns: Sequence[Sequence[float]]) -> list[Mean]:
    return [mean for column in columns if (mean := Mean.of(column)) is not None]
