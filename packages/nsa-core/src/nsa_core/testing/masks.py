"""Explicit masks of the branches, and torch's MATH attention under them: the yardstick of low precision."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nsa_core.config import BlockGeometry


def window_mask(length: int, geometry: BlockGeometry) -> Tensor:
    """Return bool `(S, S)`: query t sees t - w < s <= t."""
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    return (distance >= 0) & (distance < geometry.window_size)


def compressed_mask(length: int, num_blocks: int, geometry: BlockGeometry) -> Tensor:
    """Return bool `(S, C)`: query t sees block i iff its last token i*d + l - 1 <= t."""
    ends = torch.arange(num_blocks) * geometry.compression_stride + geometry.compression_block_size - 1
    return ends <= torch.arange(length).unsqueeze(1)


def selected_mask(block_indices: Tensor, geometry: BlockGeometry) -> Tensor:
    """Return bool `(B, G, S, S)`: query t sees the tokens s <= t of its chosen blocks."""
    length = block_indices.shape[1]
    blocks = torch.arange(length) // geometry.selection_block_size
    chosen = (block_indices.cpu().unsqueeze(-1) == blocks).any(3).transpose(1, 2)
    return chosen & torch.ones(length, length, dtype=torch.bool).tril()


def math_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Return torch's MATH attention `(B, S, H, D_v)` under a mask broadcastable to (B, G, S, T); empty rows give 0."""
    groups = q.shape[2] // k.shape[2]
    mask = mask.to(q.device).expand(q.shape[0], k.shape[2], q.shape[1], k.shape[1]).repeat_interleave(groups, 1)
    sees = mask.any(-1, keepdim=True)
    heads = q.transpose(1, 2)
    keys, values = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        # an all-False row would be NaN: let it see everything, then drop it
        out = scaled_dot_product_attention(heads, keys, values, attn_mask=mask | ~sees, scale=scale)
    return torch.where(sees, out, 0).transpose(1, 2)
