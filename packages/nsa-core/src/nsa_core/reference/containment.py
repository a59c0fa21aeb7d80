"""Keep huge numbers, infinities and NaN in the rows that see them. A weight of 0 alone does not: 0 times NaN or infinity is NaN.

Numbers are read only on a CPU, where reading does not wait. On other devices every tensor is treated as if it could hold any number.
"""

import torch
from torch import Tensor

ORDINARY = 2.0**40
"""Limit of an *ordinary* number. Sums of products of three ordinary numbers are finite in float32, so that a weight of 0 hides them."""

EXPONENT = 2.0**10
"""Largest |lse| for the fused backward operator. Up to it, the error of a float32 exponent score - lse is below 1e-4; far beyond, it overflows."""


def is_within(x: Tensor, limit: float) -> bool:
    """Return True if every |number| of x is at most `limit` and none is NaN; waits for the device."""
    if not x.numel():
        return True
    x = x.detach()
    if x.is_contiguous() and x.dtype in (torch.float32, torch.float64):
        # the sum of squares takes a quarter of the time of aminmax, and is nearly always enough
        flat = x.view(-1)
        if float(torch.dot(flat, flat)) <= limit * limit:
            return True
    low, high = torch.aminmax(x)
    return -limit <= float(low) and float(high) <= limit


def rows_within(x: Tensor, limit: float) -> Tensor:
    """Return bool `(...)`: the rows of x `(..., D)` in which every |number| is at most `limit` and none is NaN."""
    return x.abs().amax(-1) <= limit


def are_ordinary(*tensors: Tensor | None) -> bool:
    """Return True if all numbers are ordinary; False if they are not, or if reading them would wait for the device."""
    return all(x is None or (x.device.type == "cpu" and is_within(x, ORDINARY)) for x in tensors)


def only(rows: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return `tensors` `(..., D)` with zeros outside `rows` `(...)`."""
    return [torch.where(rows.unsqueeze(-1), x, 0) for x in tensors]


def rows_with_gradient(dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Return bool `(...)`: the rows of dout `(..., D)` and dlse `(...)` that are not all 0."""
    acts = dout.abs().amax(-1) != 0
    return acts if dlse is None else acts | (dlse != 0)


def fusable_rows(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return bool `(X, G, R, M)`, the rows that the fused operator may compute, and the keys and values to pass to it.

    The operator adds a bias to hidden scores and multiplies hidden values by 0, which does not hide huge numbers. It may compute a row if q, and
    all keys and values that the row sees, are ordinary. Keys and values that are not ordinary are passed as zeros. So later tokens never
    change how a row is computed.
    """
    inside = rows_within(keys, ORDINARY) & rows_within(values, ORDINARY)
    keys, values = only(inside, keys, values)
    return rows_within(q, ORDINARY) & ~_sees(visible, ~inside), keys, values


def finite(x: Tensor) -> Tensor:
    """Return x `(..., D)` with zeros in the rows that hold an infinity or NaN."""
    return only(is_finite(x), x)[0]


def is_finite(x: Tensor) -> Tensor:
    """Return bool `(...)`: the rows of x `(..., D)` without infinity and NaN."""
    return rows_within(x, torch.finfo(x.dtype).max)


def sees_no_number(values: Tensor, visible: Tensor) -> Tensor:
    """Return bool `(X, G, R, 1)`: the rows that see a row of `values` `(X, G, K, D)` with an infinity or NaN; `visible` is a tile's mask."""
    return _sees(visible, ~is_finite(values))


def _sees(visible: Tensor, keys: Tensor) -> Tensor:
    return (visible & keys.unsqueeze(-2)).any(-1, keepdim=True)
