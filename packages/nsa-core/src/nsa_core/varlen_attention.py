"""Dense causal attention over packed sequences by torch's varlen kernel. Importing this module loads torch's compiler, which takes seconds."""

import inspect
from typing import Any, cast

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True if `varlen_attn` supports GQA (from torch 2.13); if not, keys and values are repeated."""


def varlen_causal_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Return causal attention `(total, H, D)` inside each packed sequence; no padded batch is made."""
    options: dict[str, Any] = {"window_size": (-1, 0)}
    if VARLEN_HAS_GQA:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    else:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return cast(Tensor, varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options))
