"""The fastest dense causal attention that a device offers; never torch's default choice, which on Hopper is half as fast."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_core.reference.causal import causal_attention

FASTEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LARGEST_VARLEN_DIM = 256


def fast_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention `(B, S, H, D_v)` of q `(B, S, H, D_k)`, k `(B, S, G, D_k)`, v `(B, S, G, D_v)`."""
    if q.device.type != "cuda":
        return causal_attention(q, k, v)
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return causal_attention(q, k, v)


def has_varlen_attention(q: Tensor, v: Tensor) -> bool:
    """Return True where `varlen_attention.varlen_causal_attention` can serve packed q `(total, H, D_k)` and v `(total, G, D_v)`."""
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return q.device.type == "cuda" and is_half and q.shape[-1] == v.shape[-1] <= LARGEST_VARLEN_DIM
