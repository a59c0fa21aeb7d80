"""curves.png, drawn from the CSV tables and the heartbeat of a run's directory."""

import csv
import json
from pathlib import Path
from typing import Any

from attrs import frozen

from nsa_train.errors import ConfigError
from nsa_train.run_dir import RunDirectory

BRANCH_COLOURS = {"cmp": "#3b6fb6", "slc": "#d9782d", "win": "#4a9a6a"}
BRANCH_NAMES = {"cmp": "compressed", "slc": "selected", "win": "window"}
INK = "#24292f"
ACCENT = "#b6403b"


@frozen
class History:
    """What a run recorded, as columns by name."""

    training: dict[str, list[float]]
    validation: dict[str, list[float]]
    progress: list[dict[str, Any]]
    """Heartbeat events of logged steps."""


def read_history(paths: RunDirectory) -> History:
    """Return the records of a run.

    Raises:
        ConfigError: when the directory holds none.
    """
    if not paths.training.is_file() or not paths.heartbeat.is_file():
        raise ConfigError(
            f"DIR={str(paths.root)!r} is no run ({paths.training.name} and {paths.heartbeat.name} are missing); "
            "use the directory that `nsa-train run` printed"
        )
    events = [json.loads(line) for line in paths.heartbeat.read_text(encoding="utf-8").splitlines()]
    progress = [event for event in events if event["msg"] == "progress"]
    return History(_read_columns(paths.training), _read_columns(paths.validation), progress)


def draw_curves(history: History, path: Path) -> None:
    """Draw loss, gradient norm and throughput, and where there is NSA, gates and selection, to the PNG `path`."""
    from matplotlib.figure import Figure

    has_gates = any("gate_branch_shares" in event for event in history.progress)
    rows = 2 if has_gates else 1
    figure = Figure(figsize=(13, 3.6 * rows), dpi=110, layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False)
    _draw_loss(axes[0][0], history)
    _draw_gradients(axes[0][1], history)
    _draw_throughput(axes[0][2], history)
    if has_gates:
        _draw_shares(axes[1][0], history.progress)
        _draw_entropy(axes[1][1], history.progress)
        _draw_selection(axes[1][2], history.progress)
    for axis in axes.flat:
        axis.set_xlabel("optimizer step", color=INK)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_loss(axis: Any, history: History) -> None:
    axis.plot(history.training["step"], history.training["loss"], color=BRANCH_COLOURS["cmp"], lw=0.8, label="training")
    axis.plot(history.validation["step"], history.validation["val_loss"], "o-", color=ACCENT, ms=4, label="held out")
    axis.set_title("Loss, nats per token")
    axis.legend(frameon=False)


def _draw_gradients(axis: Any, history: History) -> None:
    axis.plot(history.training["step"], history.training["grad_norm"], color=BRANCH_COLOURS["slc"], lw=0.8)
    axis.set_yscale("log")
    axis.set_title("Gradient norm (line), learning rate (dotted)")
    rates = axis.twinx()
    rates.plot(history.training["step"], history.training["lr"], ":", color=INK, lw=1.2)
    rates.spines[["top"]].set_visible(False)


def _draw_throughput(axis: Any, history: History) -> None:
    axis.plot(history.training["step"], history.training["toks_per_s"], color=BRANCH_COLOURS["win"], lw=0.8)
    axis.set_ylim(bottom=0)
    axis.set_title("Throughput, tokens per second")


def _draw_shares(axis: Any, progress: list[dict[str, Any]]) -> None:
    for branch, colour in BRANCH_COLOURS.items():
        points = [(event["step"], event["gate_branch_shares"].get(branch)) for event in progress]
        if any(share is not None for _, share in points):
            steps, shares = zip(*((step, share) for step, share in points if share is not None), strict=True)
            axis.plot(steps, shares, color=colour, label=BRANCH_NAMES[branch])
    axis.set_ylim(0, 1)
    axis.set_title("Share of each branch's gate")
    axis.legend(frameon=False)


def _draw_entropy(axis: Any, progress: list[dict[str, Any]]) -> None:
    _draw_field(axis, progress, "gate_entropy_mean", BRANCH_COLOURS["cmp"], "entropy, mean (nats)")
    _draw_field(axis, progress, "gate_entropy_min", BRANCH_COLOURS["slc"], "entropy, least")
    _draw_field(axis, progress, "gate_collapse_frac", ACCENT, "collapsed share of tokens")
    axis.axhline(0.5, color=INK, lw=0.8, ls=":")
    axis.set_ylim(bottom=0)
    axis.set_title("Gate health (dotted: least healthy mean)")
    axis.legend(frameon=False)


def _draw_selection(axis: Any, progress: list[dict[str, Any]]) -> None:
    _draw_field(axis, progress, "free_block_share_mean", BRANCH_COLOURS["slc"], "blocks chosen freely")
    _draw_field(axis, progress, "overlap_with_previous_query", BRANCH_COLOURS["cmp"], "shared with the query before")
    axis.set_ylim(0, 1)
    axis.set_title("Selection, share of a query's blocks")
    axis.legend(frameon=False)


def _draw_field(axis: Any, progress: list[dict[str, Any]], name: str, colour: str, label: str) -> None:
    points = [(event["step"], event[name]) for event in progress if event.get(name) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), color=colour, label=label)


def _read_columns(path: Path) -> dict[str, list[float]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns: dict[str, list[float]] = {name: [] for name in reader.fieldnames or ()}
        for row in reader:
            for name, value in row.items():
                columns[name].append(float(value) if value else float("nan"))
    return columns
