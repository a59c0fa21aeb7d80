"""SIGKILL `nsa-train run --resume auto` at random times and compare its end with an uninterrupted run. Prints JSON.

`killed_run_script.py DIR COUNT WORLD RECIPE [table.key=value ...]`: WORLD processes, all killed at once. They are forks, so
torch is loaded once.
"""

import csv
import hashlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

# the imports of a starting run
import matplotlib.pyplot  # noqa: F401
import torch
import torch.utils.tensorboard

import nsa_train.loop.run  # noqa: F401
from nsa_train.checkpoint import open_checkpoint
from nsa_train.checkpoint.layout import FILES, LATEST
from nsa_train.checkpoint.store import latest_valid
from nsa_train.cli import run_command
from nsa_train.errors import TrainError
from nsa_train.model.decoder import build_model
from nsa_train.settings.recipe import load_config
from nsa_train.telemetry import recorder


def start(words: list[str], world: int, log: Path) -> list[int]:
    """Start the ranks of a run, as torchrun would, and return their process ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [_fork(words, rank, world, port, log) for rank in range(world)]


def _fork(words: list[str], rank: int, world: int, port: int, log: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        # stdout and stderr go to the log
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if world > 1:
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
        code = run_command(words)
        sys.stdout.flush()
    finally:
        os._exit(code)


def wait(children: list[int], log: Path, *, kill_after: float | None = None) -> bool:
    """Return whether the run finished; kill its processes after so many seconds."""
    codes, deadline = [], time.monotonic() + (kill_after or 600)
    for child in children:
        while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                for other in children[len(codes) :]:
                    os.kill(other, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.002)
        codes.append(os.waitstatus_to_exitcode(found[1]))
    if kill_after is None or -signal.SIGKILL not in codes:
        if any(codes):
            sys.exit(f"the run ended with {codes}:\n{log.read_text()[-3000:]}")
        return True
    return False


def end_of(out: Path) -> dict[str, Any]:
    """Return the results of a run that must not depend on its interruptions."""
    with (out / "training.csv").open(newline="") as file:
        losses = [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in csv.DictReader(file)]
    digests = {
        name: hashlib.sha256((out / "checkpoints" / LATEST / name).read_bytes()).hexdigest() for name in FILES if name != "state.json"
    }
    state = json.loads((out / "checkpoints" / LATEST / "state.json").read_text())
    return {"losses": losses, "validation": (out / "val.csv").read_text(), **digests, **state}


def main(folder: Path, count: int, world: int, recipe: str, *overrides: str) -> dict[str, Any]:
    """Kill `count` starts of a run; whenever it gets to its end, begin it again elsewhere."""
    generator, log = random.Random(0), folder / "log"
    run = ["run", recipe, *(word for override in overrides for word in ("--set", override))]
    straight = folder / "straight"
    began = time.monotonic()
    wait(start([*run, "--out", str(straight)], world, log), log)
    longest = 0.8 * (time.monotonic() - began)
    expected, problems, killed, resumed, number = end_of(straight), [], 0, 0, 0
    while killed < count:
        out = folder / f"killed-{number}"
        is_over = wait(start([*run, "--out", str(out), "--resume", "auto"], world, log), log, kill_after=generator.uniform(0.05, longest))
        killed += not is_over
        problems += _torn(out / "checkpoints", killed)
        resumed += latest_valid(out / "checkpoints") is not None
        if is_over:
            problems += _differences(end_of(out), expected)
            number += 1
    out = folder / f"killed-{number}"
    wait(start([*run, "--out", str(out), "--resume", "auto"], world, log), log)
    problems += _differences(end_of(out), expected)
    return {"problems": problems, "killed": killed, "resumed": resumed, "runs": number + 1}


def _torn(root: Path, number: int) -> list[str]:
    try:
        if os.path.lexists(root / LATEST):
            open_checkpoint(root / LATEST)
    except (TrainError, OSError) as error:
        return [f"after kill {number}: {error}"]
    return []


def _differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [f"{name}: {found[name]!r:.300}, not {expected[name]!r:.300}" for name in expected if found[name] != expected[name]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    # most of the time is spent in steps and saves, which the kills should hit
    recorder.SAMPLE_TOKENS = 8
    # load the modules of the first model and optimizer here, not in every fork
    torch.optim.AdamW(build_model(load_config(sys.argv[4])).parameters())
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])))
