"""Tolerances: fixed limits for float64 and float32, torch's own error in lower precision."""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest error relative to the largest reference value."""
SMALLEST_SCALE = 0.1
"""Errors of results below this are taken relative to it: such results are sums of products around 1 that cancel."""
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Two backends may rank scores that are closer than this in either order."""
Size = TypeVar("Size", float, Tensor)
"""One size, or one for each row."""


def allowed(scale: Size, dtype: torch.dtype, torch_error: Size) -> Size:
    """Return the largest allowed error of a result in `dtype` with largest value `scale`.

    float64 and float32: `LIMITS` times the largest value. Below: twice the error of torch's MATH SDPA with an explicit
    mask in that dtype (`torch_error`), plus 2^-8 of the largest value.
    """
    return LIMITS[dtype] * scale if dtype in LIMITS else 2 * torch_error + 2**-8 * scale


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Return max |actual - expected| in float64; infinite if either has a NaN or an unequal infinity."""
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().double(), expected.detach().double().to(actual.device)
    same = actual == expected
    error = torch.where(same, 0.0, (actual - expected).abs())
    return float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0


def largest(x: Tensor) -> float:
    """Return the largest finite |x|, 0 for an empty tensor."""
    finite = x.detach().double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return `max_error` over the largest finite |expected|, which counts as at least `SMALLEST_SCALE`."""
    return max_error(actual, expected) / max(largest(expected), SMALLEST_SCALE)


def allowed_error(expected: Tensor, dtype: torch.dtype, torch_error: float = 0.0) -> float:
    """Return `allowed` for the largest finite |expected|, which counts as at least `SMALLEST_SCALE`."""
    return allowed(max(largest(expected), SMALLEST_SCALE), dtype, torch_error)


class Comparable(NamedTuple):
    """Counts of the rows of a choice that are compared between two backends."""

    decided: int = 0
    """Rows in which scores decide: a free candidate was chosen and another one was not."""
    near_ties: int = 0
    """Decided rows that are near ties and not compared."""

    @property
    def are_enough(self) -> bool:
        """Return True if at most a tenth of the decided rows, or two, are near ties."""
        return self.near_ties <= max(2, self.decided // 10)


def near_tie_margin(row_maximum: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the margin below which a choice between two scores is a near tie, per row."""
    if dtype in NEAR_TIE:
        return torch.full_like(row_maximum, NEAR_TIE[dtype])
    return row_maximum * 2**-9
