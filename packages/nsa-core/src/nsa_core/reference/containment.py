"""What keeps huge numbers, infinities and NaN to the rows that see them: a weight of 0 hides nothing that is not finite.

Numbers are read on a CPU alone, where reading waits for nothing; elsewhere every tensor counts as one that may hold anything.
"""

import torch
from torch import Tensor

ORDINARY = 2.0**40
"""Sums of products of three numbers up to this are finite in float32, so that a weight of 0 hides them."""

EXPONENT = 2.0**10
"""Up to this lse a float32 exponent score - lse errs by less than 1e-4; far beyond, it overflows."""


def is_within(x: Tensor, limit: float) -> bool:
    """Return True where no |number| of x passes `limit`, and none is NaN; waits for the device."""
    if not x.numel():
        return True
    low, high = torch.aminmax(x.detach())
    return -limit <= float(low) and float(high) <= limit


def rows_within(x: Tensor, limit: float) -> Tensor:
    """Return bool `(...)`: the rows of x `(..., D)` in which no |number| passes `limit`, and none is NaN."""
    return x.abs().amax(-1) <= limit


def are_ordinary(*tensors: Tensor | None) -> bool:
    """Return True where no number passes `ORDINARY`; False where that cannot be read without waiting for the device."""
    return all(x is None or (x.device.type == "cpu" and is_within(x, ORDINARY)) for x in tensors)


def only(rows: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return `tensors` `(..., D)` with zeros outside `rows` `(...)`."""
    return [torch.where(rows.unsqueeze(-1), x, 0) for x in tensors]


def rows_with_gradient(dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Return bool `(...)`: the rows of dout `(..., D)` and dlse `(...)` that are not all 0."""
    acts = dout.abs().amax(-1) != 0
    return acts if dlse is None else acts | (dlse != 0)


def fusable_rows(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return bool `(X, G, R, M)`, the rows that the fused operator may take, and the keys and values for it.

    It adds a bias to hidden scores and multiplies hidden values by 0, which hides nothing huge. It may take a row whose q
    is ordinary, and all that it sees; for the rest it gets zeros. So a row is computed in one way, whatever its future is.
    """
    return _contained(q, keys, values, visible, ORDINARY)


def finite_rows(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return bool `(X, G, R, M)`, the rows in which q and all that they see is finite, and keys and values with zeros for the rest."""
    return _contained(q, keys, values, visible, torch.finfo(q.dtype).max)


def _contained(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    inside = rows_within(keys, limit) & rows_within(values, limit)
    sees_outside = (visible & ~inside.unsqueeze(-2)).any(-1, keepdim=True)
    keys, values = only(inside, keys, values)
    return rows_within(q, limit) & ~sees_outside, keys, values
