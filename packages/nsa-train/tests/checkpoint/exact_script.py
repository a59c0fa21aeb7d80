"""Compare interrupted with uninterrupted runs, and world sizes with each other. Prints JSON: `exact_script.py DIR CASE ...`.

CASE is `resume:STRATEGY:WORLD:PRECISION`, `reshape:STRATEGY:SAVED:LOADED`, or `failure:WORLD`.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from toy_run import ToyRun, on_ranks

from nsa_train.checkpoint import CheckpointWriter, resume_point
from nsa_train.errors import TrainError

SAVED_AT, LAST = 3, 6


def resume(root: Path, strategy: str, world: str, precision: str) -> dict[str, Any]:
    """Return losses and digests of an uninterrupted run and of one stopped in the middle, per rank."""

    def straight() -> dict[str, Any]:
        run = ToyRun(strategy=strategy, precision=precision, seed=1)
        with CheckpointWriter(root, is_async=True) as writer:
            for step in range(1, LAST + 1):
                run.step()
                if step == SAVED_AT:
                    writer.save(step, run.snapshot())
        return {"losses": run.losses[SAVED_AT:], "drawn": run.drawn, **run.digests()}

    def interrupted() -> dict[str, Any]:
        run = ToyRun(strategy=strategy, precision=precision, seed=2)
        run.step()
        run.losses.clear()
        run.go_on(resume_point(root))
        for _ in range(SAVED_AT, LAST):
            run.step()
        return {"losses": run.losses, "drawn": run.drawn, **run.digests()}

    return {"straight": on_ranks(int(world), straight), "resumed": on_ranks(int(world), interrupted)}


def reshape(root: Path, strategy: str, saved: str, loaded: str) -> dict[str, Any]:
    """Return digests before a save by `saved` ranks and after a load by `loaded` ranks."""

    def save() -> dict[str, str]:
        run = ToyRun(strategy=strategy if int(saved) > 1 else "single", seed=1)
        run.step()
        with CheckpointWriter(root) as writer:
            writer.save(1, run.snapshot())
        return run.digests()

    def load() -> dict[str, str]:
        run = ToyRun(strategy=strategy if int(loaded) > 1 else "single", seed=2)
        drawn_before = run.digests()["rng"]
        run.go_on(resume_point(root))
        found = {**run.digests(), "rng_before": drawn_before}
        # the state can be trained on, not only read back
        run.step()
        return found

    return {"saved": on_ranks(int(saved), save), "loaded": on_ranks(int(loaded), load)}


def failure(root: Path, world: str) -> dict[str, Any]:
    """Return the error of each rank when rank 0 could not write, and when every checkpoint was damaged."""

    def job() -> list[str]:
        heard = []
        run = ToyRun(strategy="ddp")
        with CheckpointWriter(root / "good") as writer:
            writer.save(1, run.snapshot())
        writer = CheckpointWriter(root / "gone")
        if dist.get_rank() == 0:
            shutil.rmtree(root / "gone")
            (root / "gone").write_text("not a directory")
        for attempt in (lambda: writer.save(2, run.snapshot()), lambda: resume_point(root / "good")):
            try:
                attempt()
            except TrainError as error:
                heard.append(str(error))
            if dist.get_rank() == 0:
                (root / "good/step-1/state.json").write_text("{}")
            dist.barrier()
        return heard

    return {"heard": on_ranks(int(world), job)}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = {}
    for number, case in enumerate(sys.argv[2:]):
        kind, *words = case.split(":")
        root = folder / str(number)
        root.mkdir()
        results[case] = {"resume": resume, "reshape": reshape, "failure": failure}[kind](root, *words)
    print(json.dumps(results))
