"""The answers of every arm by length and depth: table, files, heat maps. Imports no torch at the top."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict
from rich.table import Table
from rich.text import Text

from nsa_bench.ablate.run import TrialFolder, is_of_another_recipe
from nsa_bench.ablate.table import DAMAGED
from nsa_bench.errors import BenchError, OptionError, require_matplotlib
from nsa_bench.needle.plan import Arm, NeedlePlan, load_plan
from nsa_bench.needle.run import read_cells, train_and_evaluate
from nsa_bench.results import Output, facts_of
from nsa_train.settings.config import listed
from nsa_train.telemetry.records import load_json, read_rows


def run_needle(
    name: str,
    out: Path | None,
    overrides: Sequence[str],
    *,
    arms: Sequence[str],
    minutes: float | None,
    png_file: Path | None,
    output: Output,
) -> bool:
    """Train and evaluate the unfinished parts of a plan, print the table, write the files; return whether it is finished.

    `arms`: those to train and evaluate; all if none is named. The table and the files have the results of every arm; one that is not named and
    was begun with another recipe is left out. The JSON and CSV files are written after each stage and each length too, so that an interrupted
    call leaves what it has.

    Raises:
        OptionError: if the plan or options are invalid, before anything is written.
    """
    if minutes is not None and not minutes > 0:
        raise OptionError(f"--minutes={minutes:g} leaves no time; use 9, for instance")
    plan, root = load_plan(name, out, overrides)
    known = [arm.name for arm in plan.arms]
    if unknown := [arm for arm in arms if arm not in known]:
        raise OptionError(f"--arm={unknown[0]!r} is none of the arms of {plan.name!r}; use one of {listed(known)}")
    chosen = [arm for arm in plan.arms if not arms or arm.name in arms]
    output.check_files(png_file, inputs={Path(name): "the plan"})
    require_matplotlib(png_file)

    others = [arm for arm in plan.arms if arm not in chosen and any(is_of_another_recipe(TrialFolder(root, stage)) for stage in arm.stages)]
    for arm in others:
        output.say(f"{arm.name} is left out: its runs in {root} were begun with another recipe")
    shown = [arm for arm in plan.arms if arm not in others]

    def write() -> list[dict[str, Any]]:
        results = [arm_result(plan, arm, root) for arm in shown]
        output.write(to_json(plan, results, output.environment), to_rows(plan, results))
        return results

    for arm in shown:
        # a damaged record is refused before anything is trained
        arm_result(plan, arm, root)
    is_whole = train_and_evaluate(
        plan,
        root,
        arms=chosen,
        minutes=minutes,
        say=output.say,
        after_each=lambda: output.keep(write),
        facts=lambda: facts_of(output.environment),
    )
    results = write()
    output.show(needle_table(plan, results))
    if png_file is not None and any(result["cells"] for result in results):
        draw(plan, results, png_file)
    return is_whole


def arm_result(plan: NeedlePlan, arm: Arm, out: Path) -> dict[str, Any]:
    """Return an arm's stages that are finished, its cells, and for each length the seconds and where and when it was evaluated."""
    contents = list(read_cells(plan, arm, out))
    return {
        "arm": arm.name,
        "stages": [found for stage in arm.stages if (found := _stage(out, stage)) is not None],
        "seconds": {str(content["length"]): round(content["seconds"], 2) for content in contents},
        # files of older versions do not say it
        "ran_on": {str(content["length"]): content.get("ran_on") for content in contents},
        "cells": [cell for content in contents for cell in content["cells"]],
    }


def _stage(out: Path, stage: Any) -> dict[str, Any] | None:
    """Return the figures of a stage; None if it is not finished.

    Raises:
        BenchError: if one of its files is damaged.
    """
    folder = TrialFolder(out, stage)
    if not folder.run.metrics.is_file() or not folder.judged.is_file():
        return None
    try:
        return _figures(folder, stage)
    except DAMAGED as error:
        raise BenchError(
            f"the finished stage {folder.run.root.name!r} has a damaged record ({type(error).__name__}: {error}); "
            f"delete {folder.run.root}, and the stage runs again"
        ) from None


def _figures(folder: TrialFolder, stage: Any) -> dict[str, Any]:
    metrics, buckets = load_json(folder.run.metrics), load_json(folder.judged)["by_position"]
    targets = sum(bucket["targets"] for bucket in buckets)
    *_, last = read_rows(folder.run.validation)
    return {
        "seq_len": stage.config.train.seq_len,
        **{name: metrics[name] for name in ("steps", "tokens", "parameters", "seconds")},
        "val_loss": last["val_loss"],
        "right": sum(bucket["targets"] * bucket["right"] for bucket in buckets) / targets,
    }


def to_json(plan: NeedlePlan, arms: Sequence[dict[str, Any]], environment: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the JSON file."""
    task, config = plan.task, plan.arms[0].config
    return {
        "plan": plan.name,
        "environment": environment,
        "grid": asdict(plan.grid),
        "task": {"symbols": task.symbols, "tokens": task.tokens, **chances(plan)},
        "seeds": {"weights": config.train.seed, "training_rows": config.data.shuffle_seed, "evaluation": plan.grid.seed},
        "arms": list(arms),
    }


def to_rows(plan: NeedlePlan, arms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each cell, for CSV, with the facts of the machine that evaluated it."""

    def facts(arm: dict[str, Any], length: int) -> dict[str, Any]:
        return facts_of(arm["ran_on"][str(length)] or {})

    return [{"arm": arm["arm"], **cell, "seed": plan.grid.seed, **facts(arm, cell["length"])} for arm in arms for cell in arm["cells"]]


def chances(plan: NeedlePlan) -> dict[str, float]:
    """Return the share of right answers of a model that knows nothing, and of one that answers with the value of any pair of the haystack.

    The second share is for the haystacks with the fewest pairs.
    """
    task, grid = plan.task, plan.grid
    return {"chance": float(task.symbols**-task.tokens), "chance_of_a_pair": 1 / (grid.depths + min(grid.distractors))}


def needle_table(plan: NeedlePlan, arms: Sequence[dict[str, Any]]) -> Table:
    """Return a line for each arm and mode: right answers for each length over all depths and, if it differs, at the worst depth."""
    grid = plan.grid
    table = Table(title=Text(f"{plan.name}: right answers, per cent; {grid.depths} depths x {grid.samples} samples a length"))
    table.add_column("arm")
    table.add_column("selected branch", no_wrap=True)
    for length in grid.lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    for arm, mode, cells in _by_mode(arms):
        table.add_row(Text(arm), mode, *(_shown([cell for cell in cells if cell["length"] == length]) for length in grid.lengths))
    guess = chances(plan)
    table.caption = f"in brackets: the worst depth; by chance {guess['chance']:.2%}, with any pair's value {guess['chance_of_a_pair']:.2%}"
    return table


def _by_mode(arms: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    for arm in arms:
        for mode in dict.fromkeys(cell["mode"] for cell in arm["cells"]):
            yield arm["arm"], mode, [cell for cell in arm["cells"] if cell["mode"] == mode]


def _shown(cells: Sequence[dict[str, Any]]) -> str:
    if not cells:
        return ""
    shares = [100 * cell["right"] / cell["samples"] for cell in cells]
    mean = sum(shares) / len(shares)
    return f"{mean:.1f}" if min(shares) == max(shares) else f"{mean:.1f} ({min(shares):.0f})"


def draw(plan: NeedlePlan, arms: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a heat map for each arm and mode: lengths across, depths down, 0 to 100 per cent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    maps, grid = list(_by_mode(arms)), plan.grid
    figure = Figure(figsize=(4.6 * len(maps), 4), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for axis, (arm, mode, cells) in zip(axes, maps, strict=True):
        found = {(cell["length"], cell["depth"]): 100 * cell["right"] / cell["samples"] for cell in cells}
        shares = [[found.get((length, depth), float("nan")) for length in grid.lengths] for depth in range(grid.depths)]
        image = axis.imshow(shares, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        axis.set(title=f"{arm}, {mode}", xlabel="tokens", ylabel="depth, 0 is the first")
        axis.set_xticks(range(len(grid.lengths)), [f"{length:,}" for length in grid.lengths], rotation=60, fontsize=8)
        axis.set_yticks(range(grid.depths))
    figure.colorbar(image, ax=axes, label="right answers, per cent")
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(path)
