"""SIGKILL a saving run repeatedly, and check the remaining files. Prints JSON: `kill_script.py DIR MODE COUNT SEED`.

MODE `anywhere` (`anywhere-async`: saving in the background): after a random time, until COUNT processes were killed; then
the run may finish. MODE `every-call`: at each system call of a save, one after another (COUNT is the
stride), without randomness.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from toy_run import ToyRun, in_child, on_ranks

from nsa_train.checkpoint import CheckpointWriter, open_checkpoint
from nsa_train.checkpoint.layout import LATEST
from nsa_train.checkpoint.snapshot import Snapshot
from nsa_train.checkpoint.store import latest_valid
from nsa_train.errors import TrainError

SAVE_EVERY = 2
EVENTS = ("open", "os.", "shutil.", "ctypes.call", "fcntl.", "pathlib.")


def train(root: Path, last: int, *, is_async: bool = False) -> dict[str, Any]:
    """Continue from the latest checkpoint, if there is one, to step `last`, with saves; report the end."""
    run, found = ToyRun(seed=1), latest_valid(root)
    if found is not None:
        run.go_on(found)
    with CheckpointWriter(root, keep_last=2, is_async=is_async) as writer:
        for step in range(run.drawn + 1, last + 1):
            run.step()
            _note(root, step)
            if step % SAVE_EVERY == 0 or step == last:
                writer.save(step, run.snapshot())
    return {"drawn": run.drawn, **run.digests()}


def anywhere(folder: Path, count: int, seed: int, *, is_async: bool = False) -> dict[str, Any]:
    """Kill `count` processes of one run at random times; whenever the run finishes, start it again."""
    generator, last, root = random.Random(seed), 40, folder / "killed"
    [straight] = on_ranks(1, lambda: train(folder / "straight", last))
    torn, lost, killed, ended = [], [], 0, 0
    while killed < count:
        is_killed = _dies(lambda: train(root, last, is_async=is_async), generator.uniform(0.02, 0.2))
        at, steps = _check(root, torn, killed)
        lost.append(steps - at)
        killed += is_killed
        if not is_killed:
            ended += 1
            torn += _another_end(root, last, straight)
            shutil.rmtree(root)
            _note(root, 0)
    torn += _another_end(root, last, straight)
    names = sorted(path.name for path in root.iterdir())
    return {"torn": torn, "killed": killed, "most_lost": max(lost), "ended": ended + 1, "left": names}


def _another_end(root: Path, last: int, straight: dict[str, Any]) -> list[str]:
    [after] = on_ranks(1, lambda: train(root, last))
    return [] if after == straight else [f"ended with {after}, not {straight}"]


def every_call(folder: Path, stride: int, seed: int) -> dict[str, Any]:
    """Kill a save at each of its system calls; steps 2 and 4 are there, 6 (new) or 4 (once more) is being saved."""
    torn, calls = [], {}
    good = folder / "good"
    on_ranks(1, lambda: train(good, 4))
    for step in (6, 4):
        run = ToyRun(seed=step)
        run.step()
        snapshot = run.snapshot()
        for call in range(seed % stride + 1, 10_000, stride):
            root = folder / f"{step}-{call}"
            shutil.copytree(good, root, symlinks=True)
            if not _dies(lambda root=root, snapshot=snapshot, step=step, call=call: _save_until(root, snapshot, step, call), None):
                break
            at, _ = _check(root, torn, f"step {step}, call {call}")
            if at not in (4, step):
                torn.append(f"step {step}, call {call}: resumes at {at}")
            CheckpointWriter(root).close()
            torn += [f"step {step}, call {call}: debris {path.name}" for path in root.iterdir() if path.name.startswith(".")]
            shutil.rmtree(root)
        calls[step] = call
    return {"torn": torn, "calls": calls}


def _save_until(root: Path, snapshot: Snapshot, step: int, call: int) -> None:
    writer, left = CheckpointWriter(root, keep_last=2), call

    def count(event: str, _: object) -> None:
        nonlocal left
        if event.startswith(EVENTS):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    writer.save(step, snapshot)


def _dies(job: Callable[[], Any], after: float | None) -> bool:
    """Run `job` in a new process, kill it `after` so many seconds (None: it kills itself); False if it ended before."""
    child = os.fork()
    if child == 0:
        in_child(job)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL):
        sys.exit(f"a run ended with {code}")
    return code != 0


def _check(root: Path, torn: list[str], where: object) -> tuple[int, int]:
    """Return the step that a resume starts from and the last step that was trained; note a torn `latest`."""
    if os.path.lexists(root / LATEST):
        try:
            open_checkpoint(root / LATEST)
        except (TrainError, OSError) as error:
            torn.append(f"{where}: {error}")
    found, note = latest_valid(root), root.parent / f"{root.name}.step"
    return (found.step if found else 0), (int(note.read_text() or 0) if note.exists() else 0)


def _note(root: Path, step: int) -> None:
    (root.parent / f"{root.name}.step").write_text(str(step))


if __name__ == "__main__":
    _, directory, mode, number, number_of_seed = sys.argv
    modes = {"anywhere": anywhere, "anywhere-async": partial(anywhere, is_async=True), "every-call": every_call}
    print(json.dumps(modes[mode](Path(directory), int(number), int(number_of_seed))))
