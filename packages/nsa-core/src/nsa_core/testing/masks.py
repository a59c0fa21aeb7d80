"""Explicit masks of the branches, and torch's MATH attention under them: the reference for low-precision errors."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nsa_core import blocks
from nsa_core.backends.base import Operation
from nsa_core.config import BlockGeometry
from nsa_core.testing.inputs import Shape


def window_mask(length: int, geometry: BlockGeometry, positions: Tensor | None = None) -> Tensor:
    """Return bool `(S, T)`: query t sees keys s with t - w < s <= t. The queries are at `positions`; None: at 0 .. length - 1."""
    t = torch.arange(length) if positions is None else positions
    distance = t.unsqueeze(1) - torch.arange(length, device=t.device)
    return (distance >= 0) & (distance < geometry.window_size)


def compressed_mask(length: int, num_blocks: int, geometry: BlockGeometry, positions: Tensor | None = None) -> Tensor:
    """Return bool `(S, C)`: query t sees block i iff its last token i*d + l - 1 <= t. The queries are at `positions`; None: at 0 .. length - 1."""
    t = torch.arange(length) if positions is None else positions
    ends = torch.arange(num_blocks, device=t.device) * geometry.compression_stride + geometry.compression_block_size - 1
    return ends <= t.unsqueeze(1)


def math_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Return torch's MATH attention `(B, S, H, D_v)` with a mask that broadcasts to (B, G, S, T); rows that see nothing give 0."""
    groups = q.shape[2] // k.shape[2]
    mask = mask.to(q.device).expand(q.shape[0], k.shape[2], q.shape[1], k.shape[1]).repeat_interleave(groups, 1)
    sees = mask.any(-1, keepdim=True)
    heads = q.transpose(1, 2)
    keys, values = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        # a row that sees nothing would give NaN, so it sees everything here, and is set to 0 below
        out = scaled_dot_product_attention(heads, keys, values, attn_mask=mask | ~sees, scale=scale)
    return torch.where(sees, out, 0).transpose(1, 2)


def branch_attention(
    operation: Operation, tensors: tuple[Tensor, ...], block_indices: Tensor, shape: Shape, scale: float | None = None
) -> Tensor:
    """Return the output of a branch, or the gated sum of all branches, by `math_attention`; packed sequences have a block-diagonal mask."""
    if operation is Operation.NSA:
        q, *pairs, gates = tensors
        branches = (Operation.CMP, Operation.SLC, Operation.WIN)
        outs = [branch_attention(name, (q, *pairs[2 * i : 2 * i + 2]), block_indices, shape, scale) for i, name in enumerate(branches)]
        return torch.stack([out * gates[..., column, None] for column, out in enumerate(outs)]).sum(0)
    q, k, v = tensors
    if operation is Operation.CMP:
        k, v = k[:, : shape.num_blocks], v[:, : shape.num_blocks]
        if not shape.num_blocks:
            return (q.sum() + k.sum() + v.sum()) * 0 + q.new_zeros(*q.shape[:-1], v.shape[-1])
    return math_attention(q, k, v, _branch_mask(operation, block_indices, shape), scale)


def _branch_mask(operation: Operation, block_indices: Tensor, shape: Shape) -> Tensor:
    lengths = (shape.num_queries,) if shape.lengths is None else shape.lengths
    geometry = shape.geometry
    if operation is Operation.CMP:
        parts = [compressed_mask(n, blocks.num_compressed_blocks(n, geometry), geometry) for n in lengths]
        diagonal: Tensor = torch.block_diag(*(part.float() for part in parts))
        return diagonal.bool()
    ids = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
    same = ids.unsqueeze(1) == ids
    if operation is Operation.WIN:
        return window_mask(shape.total, geometry) & same
    positions = torch.cat([torch.arange(length) for length in lengths])
    block = positions // geometry.selection_block_size
    chosen = (block_indices.cpu().unsqueeze(-1) == block).any(3).transpose(1, 2)
    return chosen & same & (positions <= positions.unsqueeze(1))
