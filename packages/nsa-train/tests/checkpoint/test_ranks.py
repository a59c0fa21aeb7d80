"""An interrupted run equals an uninterrupted one bit for bit; ranks agree; a checkpoint loads at any world size."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("exact_script.py")
WORLDS = (1, 2, 4)


def _results(folder: Path, *cases: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, SCRIPT, folder, *cases], check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _check_resume(results: dict[str, Any]) -> None:
    for case, found in results.items():
        assert found["straight"] == found["resumed"], case
        [_, _, world, _] = case.split(":")
        assert len(found["straight"]) == int(world)
        assert all(len(rank["losses"]) == 3 and rank["drawn"] == 6 for rank in found["straight"])


def _check_reshape(results: dict[str, Any]) -> None:
    for case, found in results.items():
        before, after = found["saved"], found["loaded"]
        assert [before[0][part] for part in ("weights", "optimizer")] == [after[0][part] for part in ("weights", "optimizer")], case
        shared = min(len(before), len(after))
        assert [rank["rng"] for rank in before[:shared]] == [rank["rng"] for rank in after[:shared]], case
        # new ranks draw other numbers than existing ranks, and than at a fresh start
        assert len({rank["rng"] for rank in after} | {rank["rng_before"] for rank in after}) == 2 * len(after), case


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the fast cases, which share one process that loads torch."""
    resumes = ["resume:single:1:bf16", "resume:ddp:2:fp32", "resume:fsdp:2:bf16"]
    reshapes = ["reshape:fsdp:2:4", "reshape:fsdp:4:1", "reshape:ddp:2:1"]
    return _results(tmp_path_factory.mktemp("ranks"), *resumes, *reshapes, "failure:2")


def _of(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    return {case: result for case, result in found.items() if case.startswith(kind)}


def test_a_resumed_run_is_the_straight_run(found: dict[str, Any]) -> None:
    _check_resume(_of("resume", found))


def test_another_world_size_gets_the_same_bits(found: dict[str, Any]) -> None:
    _check_reshape(_of("reshape", found))


def test_all_ranks_hear_of_a_failed_save_and_of_damage(found: dict[str, Any]) -> None:
    [heard, same] = found["failure:2"]["heard"]
    assert heard == same
    [write, damage] = heard
    assert "step-2 was not written" in write
    assert "state.json is damaged" in damage


@pytest.mark.slow
def test_a_resumed_run_is_the_straight_run_under_every_strategy(tmp_path: Path) -> None:
    several = (f"resume:{name}:2:{precision}" for name in ("ddp", "fsdp") for precision in ("fp32", "bf16"))
    _check_resume(_results(tmp_path, "resume:single:1:fp32", *several))


@pytest.mark.slow
def test_every_pair_of_world_sizes_gets_the_same_bits(tmp_path: Path) -> None:
    _check_reshape(_results(tmp_path, *(f"reshape:{name}:{a}:{b}" for name in ("ddp", "fsdp") for a in WORLDS for b in WORLDS)))
