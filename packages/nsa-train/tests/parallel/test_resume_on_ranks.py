"""A run of two ranks that was halted and resumed equals the uninterrupted run, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXACT = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json")


@pytest.fixture(scope="module")
def found(ranks: Callable[..., Any]) -> tuple[Path, list[Any]]:
    """The folder of the runs, and the findings of each rank."""
    folder: Path
    folder, findings = ranks("resumed")
    return folder, findings


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_halted_and_resumed_run_is_the_straight_run(found: tuple[Path, list[Any]], strategy: str, precision: str) -> None:
    folder, findings = found
    name = f"{strategy}-{precision}"
    for seen in (findings[0][name], findings[1][name]):
        assert seen["ended"]["code"] == 3
        assert 3 <= seen["ended"]["steps"] <= 4
        assert seen["broken"] == seen["straight"]
        assert len(seen["straight"]) == 6
    for file in EXACT:
        ours, theirs = (folder / f"{run}-{name}" / "checkpoints" / "step-6" / file for run in ("broken", "straight"))
        assert ours.read_bytes() == theirs.read_bytes(), file
