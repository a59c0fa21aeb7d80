"""Draw curves.png from the CSV tables and the heartbeat of a run's directory."""

import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attrs import field, frozen

from nsa_train.__about__ import __version__
from nsa_train.errors import ConfigError
from nsa_train.files import MOST_RECORDS, refusal
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.records import read_events, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BRANCH_COLOURS = {"cmp": "#3b6fb6", "slc": "#d9782d", "win": "#4a9a6a"}
BRANCH_NAMES = {"cmp": "compressed", "slc": "selected", "win": "window"}
INK = "#24292f"
COLUMNS = 3
ACCENT = "#b6403b"
FALL_SHARE, LEAST_STEPS = 0.05, 20
"""In a run of at least LEAST_STEPS steps, the axis of the loss ends at the highest loss after the first FALL_SHARE of the steps."""
MEMORY = ("gpu_mem_alloc_gib", "gpu_mem_reserved_gib")


class Start(NamedTuple):
    """One start of a run."""

    boot: Mapping[str, Any]
    """Its `boot` event."""
    reached: int
    """The step that the previous start had reached."""

    @property
    def resumed_at(self) -> int | None:
        """The step from whose checkpoint it resumes; -1 from the beginning, None for a new run."""
        return self.boot.get("resumed_at")


@frozen
class History:
    """The records of a run, as columns by name."""

    training: dict[str, list[float]]
    validation: dict[str, list[float]]
    progress: list[dict[str, Any]]
    """Heartbeat events of logged steps; the dense twin has none."""
    memory: list[dict[str, Any]] = field(factory=list)
    """The memory fields of every step's event, if there is a GPU."""
    newest: dict[str, Any] = field(factory=dict)
    """The last event of rank 0."""
    starts: list[Start] = field(factory=list)
    """Every start of rank 0, the first one included."""
    resumed: list[int] = field(factory=list)
    """The steps after which the run was resumed, without those that a later resume from an earlier step undid."""

    @property
    def mark(self) -> str:
        """Return the name of the picture of these records, by this version: it differs if anything in it may."""
        drawn = (self.training, self.validation, self.progress, self.memory, self.resumed)
        return f"nsa-train {__version__}, records {sha256(repr(drawn).encode()).hexdigest()}"


def read_history(paths: RunDirectory) -> History:
    """Return the records of a run.

    Raises:
        ConfigError: if the directory holds none.
    """
    for path in (paths.training, paths.heartbeat):
        if problem := refusal(path, MOST_RECORDS):
            raise ConfigError(f"{path} cannot be read ({problem}); bring it back from a copy, and run `nsa-train report DIR`")
    missing = [path.name for path in (paths.training, paths.heartbeat) if not path.is_file()]
    if len(missing) == 1:
        raise ConfigError(
            f"DIR={str(paths.root)!r} has no {missing[0]} (the curves come from it); bring it back from a copy, and run `nsa-train report DIR`"
        )
    if missing:
        raise ConfigError(
            f"DIR={str(paths.root)!r} is no run (it lacks {' and '.join(missing)}); use the directory that `nsa-train run` printed"
        )
    training = _read_columns(paths.training)
    if not training:
        raise ConfigError(
            f"{paths.training} has no row that can be read: no step was taken yet, or they are lost; there is nothing to draw"
        )
    progress, memory, newest = dict[int, dict[str, Any]](), dict[int, dict[str, Any]](), dict[str, Any]()
    starts, resumed = list[Start](), list[int]()
    for event in read_events(paths.heartbeat):
        if event["msg"] == "boot":
            starts.append(Start(event, reached=newest.get("step", 0)))
            # steps that a resume undid are not part of the run
            at = max(event.get("resumed_at") or 0, 0)
            progress = {step: was for step, was in progress.items() if step <= at}
            memory = {step: was for step, was in memory.items() if step <= at}
            resumed = [*(step for step in resumed if step < at), *([at] if at else [])]
        newest = event
        if event["msg"] == "progress":
            progress[event["step"]] = event
        elif event["msg"] == "step_end" and event.get(MEMORY[0]) is not None:
            memory[event["step"]] = {name: event.get(name) for name in ("step", *MEMORY)}
    logged, held = ([events[step] for step in sorted(events)] for events in (progress, memory))
    return History(training, _read_columns(paths.validation), logged, held, newest, starts, resumed)


def figure_of(history: History) -> "Figure":
    """Return a figure of loss, gradient norm and throughput, and if recorded of memory, gates and selection."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawings: list[Callable[[Any, History], None]] = [_draw_loss, _draw_gradients, _draw_throughput]
    if history.memory:
        drawings.append(_draw_memory)
    if any(event.get("gate_branch_shares") for event in history.progress):
        drawings += [_draw_shares, _draw_entropy, _draw_selection]
    rows = -(-len(drawings) // COLUMNS)
    height = 3.6 * rows
    figure = Figure(figsize=(13, height), dpi=110)
    # margins and titles are placed by hand: matplotlib measures every label once more for each
    figure.subplots_adjust(left=0.05, right=0.95, bottom=0.55 / height, top=1 - 0.7 / height, wspace=0.42, hspace=0.38)
    with rc_context({"axes.titley": 1.0, "axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False}):
        for number, draw in enumerate(drawings):
            axis = figure.add_subplot(rows, COLUMNS, number + 1)
            for count, step in enumerate(history.resumed):
                # only one line has a label, in the legend of the loss
                name = "resumed" if count == number == 0 else "_"
                axis.axvline(step, color=INK, lw=0.9, ls="--", alpha=0.6, label=name)
            axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
            axis.yaxis.set_major_locator(MaxNLocator(nbins=6))
            draw(axis, history)
            axis.set_xlabel("optimizer step", color=INK)
            axis.xaxis.set_label_coords(0.5, -0.12)
            axis.spines["right"].set_visible(False)
    if any(mark == 1 for mark in history.training.get("data_synthetic", [])):
        figure.suptitle("synthetic data: random ids, for throughput alone", color=ACCENT)
    return figure


def _draw_loss(axis: Any, history: History) -> None:
    steps, losses = history.training["step"], history.training["loss"]
    _draw_line(axis, steps, losses, color=BRANCH_COLOURS["cmp"], lw=0.8, label="training")
    tested = list(zip(history.validation.get("step", []), history.validation.get("val_loss", []), strict=True))
    if tested:
        # nothing was measured between two evaluations: points, not a line
        axis.plot(*zip(*tested, strict=True), "o", color=ACCENT, ms=5, label="held out")
    title = "Loss, nats per token"
    points = [(step, loss) for step, loss in (*zip(steps, losses, strict=True), *tested) if math.isfinite(loss)]
    start = steps[int(FALL_SHARE * len(steps))] if len(steps) >= LEAST_STEPS else 0
    shown = [loss for step, loss in points if step >= start]
    highest = max(loss for _, loss in points) if points else 0.0
    if shown and highest > max(shown):
        margin = 0.08 * (max(shown) - min(shown)) or 0.1
        axis.set_ylim(min(*shown, *(loss for _, loss in points)) - margin, max(shown) + margin)
        title += f" (up to {highest:.3g} before step {start:.0f})"
    axis.set_title(title)
    _name_lines(axis)


def _draw_gradients(axis: Any, history: History) -> None:
    from matplotlib.ticker import AutoLocator, LogLocator, NullFormatter

    _draw_line(axis, history.training["step"], history.training["grad_norm"], color=BRANCH_COLOURS["slc"], lw=0.8)
    if norms := [norm for norm in history.training["grad_norm"] if 0 < norm < math.inf]:
        spread = max(norms) / min(norms)
        axis.set_yscale("log")
        # few decades contain too few powers of ten for axis labels
        axis.yaxis.set_major_locator(AutoLocator() if spread < 10 else LogLocator(subs=(1, 2, 5) if spread < 1000 else (1,)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_title("Gradient norm (line), learning rate (dotted)")
    rates = axis.twinx()
    _draw_line(rates, history.training["step"], history.training["lr"], color=INK, lw=1.2, ls=":")
    rates.grid(visible=False)


def _draw_throughput(axis: Any, history: History) -> None:
    _draw_line(axis, history.training["step"], history.training["toks_per_s"], color=BRANCH_COLOURS["win"], lw=0.8)
    axis.set_ylim(bottom=0)
    axis.set_title("Throughput, tokens per second")
    shares = history.training.get("mfu", [])
    if any(not math.isnan(share) for share in shares):
        percent = axis.twinx()
        _draw_line(percent, history.training["step"], [100 * share for share in shares], color=INK, lw=1.0, ls=":")
        percent.set_ylim(bottom=0)
        percent.grid(visible=False)
        axis.set_title("Throughput, tokens per second (line), MFU in % (dotted)")


def _draw_memory(axis: Any, history: History) -> None:
    lines = zip(MEMORY, (BRANCH_COLOURS["cmp"], BRANCH_COLOURS["slc"]), ("allocated", "reserved"), strict=True)
    _draw_fields(axis, history.memory, *lines, title="GPU memory, GiB")


def _draw_shares(axis: Any, history: History) -> None:
    shares = [{**event["gate_branch_shares"], "step": event["step"]} for event in history.progress if event.get("gate_branch_shares")]
    lines = ((branch, colour, BRANCH_NAMES[branch]) for branch, colour in BRANCH_COLOURS.items())
    _draw_fields(axis, shares, *lines, title="Share of each branch's gate", highest=1)


def _draw_entropy(axis: Any, history: History) -> None:
    # drawn before the limits are fixed, so that the line is in the picture even if all gates are far below it
    axis.axhline(0.5, color=INK, lw=0.8, ls=":")
    _draw_fields(
        axis,
        history.progress,
        ("gate_entropy_mean", BRANCH_COLOURS["cmp"], "entropy, mean (nats)"),
        ("gate_entropy_min", BRANCH_COLOURS["slc"], "entropy, least"),
        ("gate_collapse_frac", ACCENT, "collapsed share of tokens"),
        title="Gate health (dotted: least healthy mean)",
    )


def _draw_selection(axis: Any, history: History) -> None:
    chosen = ("free_block_share_mean", BRANCH_COLOURS["slc"], "blocks chosen freely")
    shared = ("overlap_with_previous_query", BRANCH_COLOURS["cmp"], "shared with the query before")
    _draw_fields(axis, history.progress, chosen, shared, title="Selection, share of a query's blocks", highest=1)


def _name_lines(axis: Any) -> None:
    # a run without a branch has none of its figures
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False)


def _draw_line(axis: Any, steps: Sequence[float], figures: Sequence[float], **style: Any) -> None:
    """Draw a line through `figures`, with points where no two neighbours are finite: a line of one point cannot be seen."""
    is_seen = any(math.isfinite(one) and math.isfinite(following) for one, following in pairwise(figures))
    axis.plot(steps, figures, marker="" if is_seen else "o", **style)


def _draw_fields(axis: Any, events: list[dict[str, Any]], *lines: tuple[str, str, str], title: str, highest: float | None = None) -> None:
    """Draw the known fields of `events`, from 0 up; each of `lines` has a field's name, colour and label."""
    for name, colour, label in lines:
        known = [(event["step"], event[name]) for event in events if event.get(name) is not None]
        if known:
            _draw_line(axis, *zip(*known, strict=True), color=colour, label=label)
    _name_lines(axis)
    axis.set_ylim(0, highest)
    axis.set_title(title)


def _read_columns(path: Path) -> dict[str, list[float]]:
    rows = list(read_rows(path))
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
