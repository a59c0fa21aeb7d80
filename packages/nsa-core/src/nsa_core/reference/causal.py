"""Dense causal attention. No other file uses torch's `is_causal=True`; a check of the repository makes sure of that.

torch aligns that mask to the top left. With fewer queries than keys it would hide all but the first keys, so `causal_attention` refuses unequal
lengths.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa_core.backends.base import Keys, Operation, Queries
from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError
from nsa_core.reference.containment import ORDINARY, is_within, rows_within
from nsa_core.reference.sdpa import COMPUTE

MODERATE = 2.0**10
"""Limit of queries and keys up to which the float32 exponent score - lse is far from overflow, at any head dimension."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Return dense causal attention `(B, S, H, D_v)` of q `(B, S, H, D_k)`, k `(B, S, G, D_k)`, v `(B, S, G, D_v)`.

    torch's kernels compute it. On a CPU, outside torch.compile, the reference backend computes the rows that see huge numbers, because torch's
    kernels let such numbers reach the outputs and gradients of earlier rows.

    Raises:
        InputError: if q and k differ in length; a step over a cache needs an explicit mask.
    """
    if q.shape[1] != k.shape[1]:
        raise InputError(
            f"q has {q.shape[1]} rows, k has {k.shape[1]} (the causal mask is aligned to the top left, so they must be equal); "
            f"use an explicit mask for a step over a cache"
        )
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if factor <= 0:
        # torch's fused CPU kernel also multiplies the -inf of hidden scores by the factor
        q, factor = q * factor, 1.0
    moderate_q = MODERATE / max(1.0, abs(factor))
    can_read = q.device.type == "cpu" and not torch.compiler.is_compiling()
    if not can_read or (is_within(q, moderate_q) and is_within(k, MODERATE) and is_within(v, ORDINARY)):
        return _causal(q, k, v, factor)
    keys = rows_within(k, MODERATE) & rows_within(v, ORDINARY)
    only_moderate = keys.int().cummin(1).values.bool().repeat_interleave(q.shape[2] // k.shape[2], 2)
    rows = (rows_within(q, moderate_q) & only_moderate).unsqueeze(-1)
    usual_k, usual_v = (torch.where(keys.unsqueeze(-1), x, 0) for x in (k, v))
    usual = _causal(torch.where(rows, q, 0), usual_k, usual_v, factor)
    window, length = BlockGeometry(window_size=q.shape[1]), q.shape[1]
    rest = COMPUTE[Operation.WIN](Queries(q, length), Keys(k, v, length), geometry=window, scale=factor).out
    return torch.where(rows, usual, rest.to(usual.dtype))


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cuda" and q.dtype == torch.float32 and q.shape[1] != k.shape[1]:
        # the only float32 kernel that stores no (S, S) scores does not support GQA
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
