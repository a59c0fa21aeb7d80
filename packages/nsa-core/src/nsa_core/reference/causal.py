"""Dense causal attention, and the one place where `is_causal=True` stands.

torch aligns that mask to the top left, so with fewer queries than keys it would hide all but the first keys. Hence the
helper refuses unequal lengths, and a check of the repository keeps the flag here.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa_core.errors import InputError


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Return dense causal attention `(B, S, H, D_v)` of q `(B, S, H, D_k)`, k `(B, S, G, D_k)`, v `(B, S, G, D_v)`.

    Raises:
        InputError: when q and k differ in length; a step over a cache needs an explicit mask.
    """
    if q.shape[1] != k.shape[1]:
        raise InputError(
            f"q has {q.shape[1]} rows, k has {k.shape[1]} (the causal mask is aligned to the top left, so they must be equal); "
            f"use an explicit mask for a step over a cache"
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
