"""Starts a scenario on several ranks of this machine, over gloo."""

import fcntl
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa_train.run_dir import RunDirectory

SCENARIOS = Path(__file__).parent / "scenarios.py"
GROUPS = (
    (1, ("agree", "taught")),
    (2, ("agree", "taught", "spoiled", "overflown", "stopped", "resumed")),
    # of the slow tier
    (2, ("spoiled_more", "resumed_more")),
)
"""World sizes, and the scenarios that run in the same processes."""
TIMEOUT_S = 240


@pytest.fixture(scope="session")
def ranks(
    request: pytest.FixtureRequest, tiny_recipe: Path, tiny_run: RunDirectory, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, list[Any]]]:
    """A function from a scenario and a world size to its folder and the findings of each rank.

    The scenarios of a group run one after another in the same processes, which take longer to start than to run. The processes
    of pytest-xdist share one such run: the first that needs it starts it, and others wait.
    """
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        shared = shared.parent

    @functools.cache
    def run_all(group: int) -> Path:
        folder = shared / f"ranks-{group}"
        done = folder / "done"
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                if folder.exists():
                    pytest.fail(f"the {GROUPS[group][0]} rank(s) of an earlier test failed; see what it says")
                folder.mkdir()
                start(*GROUPS[group], folder)
                done.touch()
        return folder

    def start(world_size: int, scenarios: tuple[str, ...], folder: Path) -> None:
        port = _free_port()
        command = [sys.executable, str(SCENARIOS), str(tiny_recipe), str(tiny_run.root), str(folder), *scenarios]
        workers = [subprocess.Popen(command, env=_environment(rank, world_size, port)) for rank in range(world_size)]
        try:
            codes = [worker.wait(TIMEOUT_S) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        assert codes == [0] * world_size

    def run(scenario: str, *, world_size: int = 2) -> tuple[Path, list[Any]]:
        [group] = [index for index, (size, scenarios) in enumerate(GROUPS) if size == world_size and scenario in scenarios]
        folder = run_all(group) / scenario
        return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]

    return run


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    if world_size == 1:
        return {**os.environ, "OMP_NUM_THREADS": "1"}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in place.items()}}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port
