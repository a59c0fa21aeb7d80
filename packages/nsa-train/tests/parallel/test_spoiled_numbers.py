"""NaN and Inf on one rank, in loss, gradient or activation: the weights stay finite, all ranks agree, the batch is named."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found(ranks: Callable[..., Any]) -> list[Any]:
    """What each rank found."""
    _, findings = ranks("spoiled")
    return findings


@pytest.mark.parametrize(("strategy", "bad"), [("ddp", "nan"), ("fsdp", "inf")])
@pytest.mark.parametrize("where", ["loss", "gradient", "activation"])
def test_one_spoiled_rank_reaches_no_weight_on_any(found: list[Any], strategy: str, where: str, bad: str) -> None:
    first, second = (findings[f"{strategy}-{where}-{bad}"] for findings in found)
    assert first == second
    assert first["is_finite"]
    assert (first["steps"], first["skipped"]) == (4, 1)
    [line] = first["skips"]
    assert line.startswith("step 0003 | skipped, the weights stay as they were: ")
    assert "rank 1, micro-batch 0 (sha256 of its ids " in line
    assert "tokens from [" in line
    if where == "gradient":
        # only the sum of all ranks shows it: every batch of the step is named
        assert "grad_norm=" in line
        assert "rank 0, micro-batch 0" in line
    else:
        assert "the loss of rank 1, micro-batch 0 is not finite" in line
        assert "rank 0, micro-batch" not in line
