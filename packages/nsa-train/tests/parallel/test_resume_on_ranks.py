"""A run of two ranks that was halted and resumed equals the uninterrupted run, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest

EXACT = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json")


@pytest.mark.parametrize(
    ("scenario", "strategy", "precision"),
    [
        ("resumed", "ddp", "fp32"),
        ("resumed", "fsdp", "bf16"),
        pytest.param("resumed_more", "ddp", "bf16", marks=pytest.mark.slow),
        pytest.param("resumed_more", "fsdp", "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_halted_and_resumed_run_is_the_straight_run(ranks: Callable[..., Any], scenario: str, strategy: str, precision: str) -> None:
    folder, findings = ranks(scenario)
    name = f"{strategy}-{precision}"
    for seen in (findings[0][name], findings[1][name]):
        assert seen["ended"]["code"] == 3
        assert 3 <= seen["ended"]["steps"] <= 4
        assert seen["broken"] == seen["straight"]
        assert len(seen["straight"]) == 6
    for file in EXACT:
        ours, theirs = (folder / f"{run}-{name}" / "checkpoints" / "step-6" / file for run in ("broken", "straight"))
        assert ours.read_bytes() == theirs.read_bytes(), file
