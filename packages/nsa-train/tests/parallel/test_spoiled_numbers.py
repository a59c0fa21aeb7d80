"""NaN and Inf on one rank, in loss, gradient or activation: the weights stay finite, all ranks agree, the batch is named."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("scenario", "case"),
    [
        ("spoiled", "ddp-loss-nan-fp32"),
        ("spoiled", "ddp-gradient-nan-fp32"),
        ("spoiled", "fsdp-gradient-inf-fp32"),
        ("spoiled", "fsdp-activation-inf-fp32"),
        ("spoiled", "ddp-gradient-inf-fp16"),
        ("spoiled", "fsdp-loss-nan-fp16"),
        pytest.param("spoiled_more", "ddp-activation-nan-fp32", marks=pytest.mark.slow),
        pytest.param("spoiled_more", "fsdp-loss-inf-fp32", marks=pytest.mark.slow),
        pytest.param("spoiled_more", "ddp-loss-inf-fp16", marks=pytest.mark.slow),
        pytest.param("spoiled_more", "ddp-activation-inf-fp16", marks=pytest.mark.slow),
        pytest.param("spoiled_more", "fsdp-gradient-nan-fp16", marks=pytest.mark.slow),
        pytest.param("spoiled_more", "fsdp-activation-nan-fp16", marks=pytest.mark.slow),
    ],
)
def test_one_spoiled_rank_reaches_no_weight_on_any(ranks: Callable[..., Any], scenario: str, case: str) -> None:
    _, found = ranks(scenario)
    _, where, _, precision = case.split("-")
    first, second = (findings[case] for findings in found)
    assert first == second
    assert first["is_finite"]
    # a gradient alone may have run over in float16: that lowers the scale, and does not count
    is_overflow = precision == "fp16" and where == "gradient"
    assert (first["steps"], first["skipped"]) == (4, 0 if is_overflow else 1)
    assert first["scale"] == (None if precision == "fp32" else 2.0**15 if is_overflow else 2.0**16)
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


@pytest.mark.parametrize("moment", ["", "exp_avg_sq"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_state_that_ran_over_on_one_rank_is_saved_by_none(ranks: Callable[..., Any], strategy: str, moment: str) -> None:
    _, findings = ranks("overflown")
    first, second = (found[f"{strategy}-{moment}"] for found in findings)
    assert first == second
    assert (first["code"], first["steps"], first["saved"]) == (4, 4, "step-3")
    what = f"the optimizer's moments are not finite in norm.weight/{moment}" if moment else "the weights are not finite in norm.weight"
    assert f"step 4: {what} (an update ran over); they are not saved, step-3 is the newest" in first["message"]
