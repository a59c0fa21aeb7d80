"""SIGKILL at any moment leaves a whole `latest`, loses at most `save_every` steps, and does not change the result."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
KILLS, KILLS_OF_A_RELEASE = 5, 200
COMMANDS = 2
"""Kills of `nsa-train run` itself; 200 by `python killed_run_script.py DIR 200 1 RECIPE train.save_every=3`."""
SAVE_EVERY = 2


def _killed(folder: Path, mode: str, count: int) -> dict[str, Any]:
    return _printed("kill_script.py", folder, mode, count, 0)


def _printed(script: str, *words: object) -> dict[str, Any]:
    command = [sys.executable, HERE / script, *map(str, words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _check_anywhere(folder: Path, mode: str, count: int) -> None:
    found = _killed(folder, mode, count)
    assert found["torn"] == []
    assert (found["killed"], found["left"]) == (count, ["latest", "step-38", "step-40"])
    if mode == "anywhere":
        assert found["most_lost"] <= SAVE_EVERY


def _check_every_call(folder: Path, stride: int) -> None:
    found = _killed(folder, "every-call", stride)
    assert found["torn"] == []
    # a save makes about forty system calls; with fewer, the script missed some
    assert all(calls >= 30 for calls in found["calls"].values())


def test_a_run_killed_anywhere_ends_as_the_straight_run(tmp_path: Path) -> None:
    _check_anywhere(tmp_path, "anywhere", KILLS)


def test_a_save_killed_at_its_calls_is_whole_or_absent(tmp_path: Path) -> None:
    _check_every_call(tmp_path, 5)


def _check_command(folder: Path, recipe: Path, count: int, world: int, *overrides: str) -> None:
    sets = ["train.steps=30", "train.save_every=3", "train.eval_every=6", *overrides]
    found = _printed("killed_run_script.py", folder, count, world, recipe, *sets)
    assert found["problems"] == []
    assert found["killed"] == count


def test_a_killed_command_ends_as_the_one_left_alone(tmp_path: Path, tiny_recipe: Path) -> None:
    _check_command(tmp_path, tiny_recipe, COMMANDS, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world", "precision", "count"), [("single", 1, "fp32", 20), ("ddp", 2, "bf16", 10), ("fsdp", 2, "fp32", 10)]
)
def test_a_command_killed_many_times_ends_as_the_one_left_alone(
    tmp_path: Path, tiny_recipe: Path, strategy: str, world: int, precision: str, count: int
) -> None:
    sets = [f"train.strategy={strategy}", f"train.precision={precision}", f"train.async_save={str(precision == 'bf16').lower()}"]
    _check_command(tmp_path, tiny_recipe, count, world, *sets)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["anywhere", "anywhere-async"])
def test_a_run_killed_200_times_ends_as_the_straight_run(tmp_path: Path, mode: str) -> None:
    _check_anywhere(tmp_path, mode, KILLS_OF_A_RELEASE)


@pytest.mark.slow
def test_a_save_killed_at_every_call_is_whole_or_absent(tmp_path: Path) -> None:
    _check_every_call(tmp_path, 1)
