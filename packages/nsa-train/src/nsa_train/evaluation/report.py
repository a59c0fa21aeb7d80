"""Write eval.json, eval.csv, eval.png and the tables of an evaluation. Imports no torch."""

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from nsa_train.evaluation.options import Figure, Mode, TaskName
from nsa_train.files import written_whole
from nsa_train.host.environment import missing_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

JSON_FILE, CSV_FILE, PICTURE = "eval.json", "eval.csv", "eval.png"


def write_files(out: Path, content: dict[str, Any], figures: Sequence[Figure], say: Callable[[str], None]) -> list[Path]:
    """Write eval.json with `content` and `figures`, eval.csv and eval.png below `out`, and return their paths.

    Existing files are replaced. Without the extra `report` no picture is drawn, and `say` gets the reason.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows = [figure_object(figure) for figure in figures]
    with written_whole(out / JSON_FILE) as aside:
        aside.write_text(json.dumps({**content, "figures": rows}, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    with written_whole(out / CSV_FILE) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=Figure._fields)
        writer.writeheader()
        writer.writerows(rows)
    if reason := missing_report():
        say(f"{PICTURE} is not drawn: {reason}")
        return [out / JSON_FILE, out / CSV_FILE]
    draw(figures, out / PICTURE)
    return [out / JSON_FILE, out / CSV_FILE, out / PICTURE]


def figure_object(figure: Figure) -> dict[str, Any]:
    """Return the fields of a figure by name; a value that is not finite is None."""
    return figure._asdict() | {"value": figure.value if math.isfinite(figure.value) else None}


def tables(figures: Sequence[Figure]) -> Iterator[Table]:
    """Yield the tables to print: the figures of loss-by-layer, then those of the other tasks."""
    by_layer = [one for one in figures if one.task == TaskName.LOSS_BY_LAYER]
    if by_layer:
        yield layers_table(by_layer)
    if others := [one for one in figures if one.task != TaskName.LOSS_BY_LAYER]:
        yield figures_table(others)


def layers_table(figures: Sequence[Figure]) -> Table:
    """Return a line for all layers, with the loss of the model, then one for each: the change of the loss when it alone is in a mode."""
    loss = {(one.mode, one.layer): one.value for one in figures}
    trained = loss[Mode.TRAINED, None]
    modes = dict.fromkeys(str(one.mode) for one in figures if one.mode != Mode.TRAINED)
    table = Table(title="loss-by-layer")
    for title in ("layer", "nats per token", *modes):
        table.add_column(title, justify="right")
    for layer in dict.fromkeys(one.layer for one in figures):
        changes = (f"{loss[mode, layer] - trained:+.4f}" for mode in modes)
        table.add_row(*(("all", f"{trained:.4f}") if layer is None else (str(layer), "")), *changes)
    return table


def figures_table(figures: Sequence[Figure]) -> Table:
    """Return a line for each task, mode, measure and length: the mean over depths, layers and KV heads, or over the tokens of all buckets."""
    table = Table(title="evaluation")
    for title in ("task", "selected branch", "measure", "length", "mean", "least", "most"):
        table.add_column(title, justify="left" if title in ("task", "selected branch", "measure") else "right")
    lines: dict[tuple[str, str | None, str, int | None], list[Figure]] = {}
    for one in figures:
        lines.setdefault((one.task, one.mode, one.measure, one.length), []).append(one)
    for (task, mode, measure, length), own in lines.items():
        mean = sum(one.value * one.samples for one in own) / sum(one.samples for one in own)
        bounds = (min(one.value for one in own), max(one.value for one in own)) if len(own) > 1 else ()
        table.add_row(task, mode or "", measure, f"{length:,}" if length else "", *(f"{value:.3f}" for value in (mean, *bounds)))
    return table


def draw(figures: Sequence[Figure], path: Path) -> None:
    """Draw a panel for each task, and for passkey one for each mode."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    panels = [
        (draw_panel, own) for task, draw_panel in PANELS.items() for own in _by_panel(task, [one for one in figures if one.task == task])
    ]
    canvas = Canvas(figsize=(4.6 * len(panels), 4), dpi=110, layout="constrained")
    for axes, (draw_panel, own) in zip(canvas.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw_panel(axes, own)
    backend: Any = FigureCanvasAgg(canvas)
    with written_whole(path) as aside:
        backend.print_figure(aside, format="png")


def _by_panel(task: TaskName, figures: list[Figure]) -> list[list[Figure]]:
    if task is not TaskName.PASSKEY:
        return [figures] if figures else []
    return [[one for one in figures if one.mode == mode] for mode in dict.fromkeys(one.mode for one in figures)]


def _draw_passkey(axes: "Axes", figures: Sequence[Figure]) -> None:
    lengths, depths = (sorted({getattr(one, name) for one in figures}) for name in ("length", "depth"))
    found = {(one.length, one.depth): one.value for one in figures}
    axes.imshow([[found[length, depth] for length in lengths] for depth in depths], vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            axes.text(column, row, f"{found[length, depth]:.0%}", ha="center", va="center", color="white")
    axes.set(title=f"passkey, {figures[0].mode}", xlabel="tokens", ylabel="depth")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.2f}" for depth in depths])


def _draw_recall(axes: "Axes", figures: Sequence[Figure]) -> None:
    for mode in dict.fromkeys(one.mode for one in figures):
        own = [one for one in figures if one.mode == mode]
        axes.plot([one.layer or 0 for one in own], [one.value for one in own], "o", label=mode)
    axes.set(title="block recall", xlabel="layer; a dot for each KV head", ylabel="share of dense attention", ylim=(0, 1.02))
    axes.legend()


def _draw_layers(axes: "Axes", figures: Sequence[Figure]) -> None:
    [trained] = (one for one in figures if one.mode == Mode.TRAINED)
    axes.axhline(trained.value, color="gray", label=Mode.TRAINED)
    for mode in dict.fromkeys(one.mode for one in figures if one is not trained):
        own = [one for one in figures if one.mode == mode and one.layer is not None]
        axes.plot([one.layer or 0 for one in own], [one.value for one in own], "o", label=mode)
    axes.set(title="loss by layer", xlabel="the only layer in that mode", ylabel="nats per token")
    axes.legend()


def _draw_lines(
    axes: "Axes",
    figures: Sequence[Figure],
    *,
    measure: str = "",
    x_of: Callable[[Figure], int] = lambda one: one.length or 0,
    **labels: Any,
) -> None:
    """Draw a line for each mode, or measure without one, of the figures whose measure ends with `measure`."""
    lines: dict[str, list[Figure]] = {}
    for one in figures:
        if one.measure.endswith(measure):
            lines.setdefault(one.mode or one.measure, []).append(one)
    for label, own in lines.items():
        axes.plot([x_of(one) for one in own], [one.value for one in own], marker=".", label=label)
    axes.legend()
    axes.set(**labels)


PANELS: dict[TaskName, Callable[["Axes", Sequence[Figure]], None]] = {
    TaskName.LOSS_BY_POSITION: partial(
        _draw_lines,
        measure="loss",
        x_of=lambda one: (one.first or 0) + 1,
        title="loss by position",
        xlabel="first position of the bucket, plus 1",
        ylabel="nats per token",
        xscale="log",
    ),
    TaskName.LOSS_BY_LAYER: _draw_layers,
    TaskName.PASSKEY: _draw_passkey,
    TaskName.MQAR: partial(_draw_lines, title="mqar", xlabel="tokens", ylabel="share of pairs recalled", ylim=(0, 1.02)),
    TaskName.COPY: partial(_draw_lines, measure="loss", title="copy", xlabel="tokens", ylabel="nats per token"),
    TaskName.BLOCK_RECALL: _draw_recall,
}
"""Task -> the function that draws its panel."""
