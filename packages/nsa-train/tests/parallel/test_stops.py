"""SIGTERM and .HALT in every phase, on one of two ranks: both save the same step and end with the documented code."""

from collections.abc import Callable
from typing import Any

import pytest

CODES = {"term": 75, "halt": 3}


@pytest.fixture(scope="module")
def found(ranks: Callable[..., Any]) -> list[Any]:
    """How each rank ended."""
    _, findings = ranks("stopped")
    return findings


@pytest.mark.parametrize("phase", ["forward", "save", "eval", "data"])
@pytest.mark.parametrize("request_", CODES)
def test_a_request_on_one_rank_stops_all_after_the_same_saved_step(found: list[Any], request_: str, phase: str) -> None:
    first, second = (findings[f"{request_}-{phase}"] for findings in found)
    assert first == second
    assert first["code"] == CODES[request_]
    assert first["saved"] == f"step-{first['steps']}"
    # .HALT is checked at the next step boundary, a signal is received at once
    assert first["steps"] in (3, 4)
    assert f"after step {first['steps']}, which is saved" in first["message"]
    assert "--resume" in first["message"]
