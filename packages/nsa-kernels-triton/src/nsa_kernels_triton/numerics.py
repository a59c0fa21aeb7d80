"""Numerics of the kernels: base 2 or e, factors of scores, extreme scores, and results that are kept in float32."""

import math

import torch
from torch import Tensor

from nsa_core.backends.base import Keys, Queries
from nsa_core.config import BlockGeometry

LOG2E = 1.4426950408889634
WIDEST_EXACT = 32
"""Largest head dimension for which outputs that the backward pass reads, and partial results, are stored in float32.

The sum dO . O over so few columns does not average out the rounding of O. A row of 32 float32 numbers is as large as one of 64 in bfloat16.
"""


def is_exact(q: Tensor) -> bool:
    """Return True if exponentials use base e (float32), not base 2. Base 2 saves a multiplication, but rounds large scores once more."""
    return q.dtype == torch.float32


def score_factor(q: Tensor, scale: float) -> float:
    """Return the factor by which kernels multiply products: the scale, times log2(e) if they compute in base 2."""
    return scale if is_exact(q) else scale * LOG2E


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return q and scale that give the same scores, with a scale that is above 0. One below float32's smallest normal number counts as 0.

    The forward kernels need it: they find the largest product of a row before they multiply by the scale, and hide products as -inf.
    """
    if abs(scale) < torch.finfo(torch.float32).tiny:
        return q * 0, 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


def coarse_factor(q: Tensor, scale: float) -> float:
    """Return the power of two nearest to `score_factor`, for `scale` > 0. A multiplication by it is exact, however large the score."""
    return 2.0 ** round(math.log2(score_factor(q, scale)))


def no_extremes(q: Tensor, *branches: int) -> Tensor:
    """Return zeros, int32 (*branches, 4), in which `row_deltas` notes the extremes of each branch for its backward pass.

    The first number is a flag: 1 if the shift of some row is at least `tiles.WIDEST_REFINED` or not finite, or if values or dO reach
    `tiles.HUGE`; else 0. If it is 1, the kernels limit weights (`tiles.restrained`), because lse may not normalise them exactly. They also mask
    products of dO with values that the row does not see, because these products may be infinite.

    The other three are for float16. They are the bits of float32 numbers that bound dS: the largest squared norm of a row of dO (times its
    squared gate, if that is above 1), the largest squared norm of a row of values, and the largest |dlse|.
    """
    return torch.zeros(*branches, 4, dtype=torch.int32, device=q.device)


def exact_out(q: Tensor, v: Tensor) -> Tensor | None:
    """Return a float32 buffer for the outputs, which the backward pass reads instead of the rounded ones; None if it needs none."""
    if is_exact(q) or v.shape[3] > WIDEST_EXACT:
        return None
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32)


def exact_out_of(queries: Queries, keys: Keys, *_choice: Tensor, geometry: BlockGeometry) -> list[Tensor | None]:
    """Return uninitialised buffers for what the backward pass of one branch reads in addition to out and lse."""
    return [exact_out(queries.q, keys.v)]


def partial_dtype(q: Tensor, head_dim: int) -> torch.dtype:
    """Return the dtype of partial results of `head_dim` columns."""
    return torch.float32 if head_dim <= WIDEST_EXACT else q.dtype
