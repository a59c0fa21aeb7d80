"""Run and evaluate a plan, stage after stage, length after length; finished parts are kept. Imports no torch at the top."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from nsa_bench.ablate.plan import Trial
from nsa_bench.ablate.run import TrialFolder, check_trials, prepare, run_trials
from nsa_bench.errors import BenchError
from nsa_bench.launching import stopped_by_signals
from nsa_bench.needle.plan import Arm, Cell, NeedlePlan
from nsa_train.files import written_whole
from nsa_train.settings.config import listed
from nsa_train.telemetry.records import load_json

Say = Callable[[str], None]
CELL_KEYS = {"length", "settings", "seconds", "cells"}
"""The keys that every file of cells has."""


def minutes_until(end: float | None) -> float | None:
    """Return the minutes until `end`, a time of the monotonic clock in seconds, at least 0; None if there is no end."""
    return None if end is None else max(0.0, (end - time.monotonic()) / 60)


def train_and_evaluate(
    plan: NeedlePlan,
    out: Path,
    *,
    arms: Sequence[Arm],
    minutes: float | None,
    say: Say,
    after_each: Callable[[], object],
    facts: Callable[[], dict[str, Any]],
) -> bool:
    """Train the unfinished stages of a plan's `arms`, then evaluate the grid; return whether all results exist.

    `after_each` is called when a stage has ended and when a length has been evaluated. `facts` returns machine, versions and commit, which
    the file of a length records.
    After `minutes`, at Ctrl-C, SIGTERM and SIGHUP a stage saves and ends. An evaluation ends after a length when the minutes are over, and
    at once at a signal. The next call continues. An arm whose stage fails is not trained further; its log says why.

    Raises:
        OptionError: if a stage breaks a rule that `nsa-train preflight` checks, or a run below `out` was begun with another recipe.
    """
    check_trials((stage for arm in arms for stage in _stages_to_check(arm, out)), out)
    folders = {arm: prepare(arm.stages, out) for arm in arms}
    end = None if minutes is None else time.monotonic() + 60 * minutes
    try:
        with stopped_by_signals():
            for arm in arms:
                # each stage begins with the weights of the previous one
                if not run_trials(
                    folders[arm], side_by_side=1, minutes=minutes_until(end), say=say, after_each=after_each, need_previous=True
                ):
                    return False
                if not all(folder.judged.is_file() for folder in folders[arm]):
                    continue
                for left in _evaluated(plan, arm, out, say, facts):
                    after_each()
                    if left and minutes_until(end) == 0:
                        say(f"the minutes are over: {arm.name} has {left} lengths left for the next call")
                        return False
    except KeyboardInterrupt:
        say("stopped: the length that was being evaluated is left for the next call")
        return False
    return all(len(list(read_cells(plan, arm, out))) == len(plan.grid.lengths) for arm in arms)


def _stages_to_check(arm: Arm, out: Path) -> Iterator[Trial]:
    """Yield the stages of `arm`, without initial weights where the stage that trains them is not finished."""
    is_finished = True
    for stage in arm.stages:
        known = stage.config.train if is_finished else evolve(stage.config.train, init_from=None)
        yield Trial(stage.variant, stage.seed, evolve(stage.config, train=known))
        is_finished = TrialFolder(out, stage).judged.is_file()


def read_cells(plan: NeedlePlan, arm: Arm, out: Path) -> Iterator[dict[str, Any]]:
    """Return the finished lengths of an arm, evaluated as `plan` says: tables of `length`, `settings`, `seconds`, `ran_on` and `cells`.

    Raises:
        BenchError: for a damaged file.
    """
    for length in plan.grid.lengths:
        path = _cells_file(out, arm, length)
        if path.is_file() and (content := _cells_of(path))["settings"] == _settings(plan, length):
            yield content


def _cells_of(path: Path) -> dict[str, Any]:
    try:
        content = load_json(path)
        problem = f"no {listed(sorted(missing))}" if (missing := CELL_KEYS - content.keys()) else ""
        if not problem:
            # made only to be checked
            _ = [Cell(**cell) for cell in content["cells"]], dict(content.get("ran_on") or {})
    except (AttributeError, OSError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise BenchError(f"{path} is damaged ({problem}); delete it, and the length is evaluated again")
    return content


def _cells_file(out: Path, arm: Arm, length: int) -> Path:
    """Return the file of one length, in the directory of the run whose model answers."""
    return TrialFolder(out, arm.stages[-1]).run.root / "cells" / f"{length}.json"


def _settings(plan: NeedlePlan, length: int) -> dict[str, Any]:
    """Return the settings on which the answers depend, besides the weights."""
    grid = plan.grid
    # a shuffled choice is drawn per batch, and chunks change the order of sums
    return {
        "slots": plan.needle_slots(length),
        "distractors": plan.distractors(length),
        **{name: getattr(grid, name) for name in ("samples", "seed", "batch_tokens", "chunk")},
    }


def _evaluated(plan: NeedlePlan, arm: Arm, out: Path, say: Say, facts: Callable[[], dict[str, Any]]) -> Iterator[int]:
    """Evaluate the lengths that have no cells yet, and yield how many are left: once before the first, and after each."""
    known = {content["length"] for content in read_cells(plan, arm, out)}
    left = [length for length in plan.grid.lengths if length not in known]
    if not left:
        return
    yield len(left)
    from nsa_bench.needle.evaluate import Evaluation

    evaluation = Evaluation(plan, arm.config, TrialFolder(out, arm.stages[-1]).run)
    for number, length in enumerate(left, 1):
        began = time.monotonic()
        cells = [cell._asdict() for cell in evaluation.cells(length)]
        seconds = time.monotonic() - began
        content = {"length": length, "settings": _settings(plan, length), "seconds": seconds, "ran_on": facts(), "cells": cells}
        path = _cells_file(out, arm, length)
        path.parent.mkdir(exist_ok=True)
        with written_whole(path) as aside:
            aside.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
        by_mode = {mode: [cell for cell in cells if cell["mode"] == mode] for mode in dict.fromkeys(cell["mode"] for cell in cells)}
        shares = (f"{mode} {sum(c['right'] for c in own) / sum(c['samples'] for c in own):.0%}" for mode, own in by_mode.items())
        say(f"{arm.name}: {length} tokens, {', '.join(shares)}, {content['seconds']:.1f} s")
        yield len(left) - number
