"""Tolerances: fixed limits for float64 and float32; in lower precision a limit from torch's own error."""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Dtype -> largest allowed error, relative to the largest reference value."""
SMALLEST_SCALE = 0.1
"""Smallest value to which errors are relative, for sums of products around 1. Results below it are sums whose products cancel."""
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Dtype -> margin of a near tie: two backends may rank scores that are closer than this in either order."""
Size = TypeVar("Size", float, Tensor)
"""One number for a whole result, or a tensor with one for each row."""


def allowed(scale: Size, dtype: torch.dtype, torch_error: Size) -> Size:
    """Return the largest allowed error of a result in `dtype` whose largest value is `scale`.

    For float64 and float32 it is `LIMITS` times `scale`. For lower precision it is twice `torch_error`, the error of torch's MATH SDPA with an
    explicit mask in that dtype, plus 2^-8 of `scale`.
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
    """Return `max_error` divided by the largest finite |expected|, which counts as at least `SMALLEST_SCALE`."""
    return max_error(actual, expected) / max(largest(expected), SMALLEST_SCALE)


def allowed_error(expected: Tensor, dtype: torch.dtype, torch_error: float = 0.0, *, product: float = 1.0) -> float:
    """Return `allowed` for the largest finite |expected|, which counts as at least `SMALLEST_SCALE` times `product`.

    `product` is the size of the largest products that the results are sums of, where it is known; below 1 it counts as 1.
    """
    return allowed(max(largest(expected), SMALLEST_SCALE * max(product, 1.0)), dtype, torch_error)


class Comparable(NamedTuple):
    """How many rows of a choice of blocks two backends can be compared on."""

    decided: int = 0
    """Rows in which scores decide: one free candidate was chosen and another one was not."""
    near_ties: int = 0
    """Those decided rows that are near ties, and so are not compared."""

    @property
    def are_enough(self) -> bool:
        """Return True if at most a tenth of the decided rows, or two, are near ties."""
        return self.near_ties <= max(2, self.decided // 10)


def near_tie_margin(row_maximum: Tensor, dtype: torch.dtype) -> Tensor:
    """Return for each row the margin below which a choice between two scores is a near tie."""
    if dtype in NEAR_TIE:
        return torch.full_like(row_maximum, NEAR_TIE[dtype])
    return row_maximum * 2**-9
