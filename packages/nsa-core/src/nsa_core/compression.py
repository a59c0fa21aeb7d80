"""phi maps each block of tokens to one compressed key or value (Eq. 7). All three kinds are initialised to the block mean."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_core import blocks
from nsa_core.config import BlockGeometry, Compressor
from nsa_core.varlen import cu_blocks_from_cu_seqlens, sequence_ids


class BlockWindows(NamedTuple):
    """The tokens of every compressed block."""

    tokens: Tensor
    """(B, C, l, G, D)."""
    last_positions: Tensor
    """int64 (C,): position of each block's last token in its own sequence."""


def block_windows(x: Tensor, geometry: BlockGeometry, cu_seqlens: Tensor | None = None) -> BlockWindows:
    """Return the compressed blocks of x `(B, S, G, D)` as tokens; an incomplete block at the end does not count.

    Packed (B = 1): the blocks of all sequences follow one another, and C = S // d, which is always enough. Rows after the last block
    repeat some tokens and must be ignored.
    """
    size, stride = geometry.compression_block_size, geometry.compression_stride
    if cu_seqlens is not None:
        return _packed_windows(x, geometry, cu_seqlens)
    count = blocks.num_compressed_blocks(x.shape[1], geometry)
    last_positions = torch.arange(size - 1, size - 1 + count * stride, stride, device=x.device)
    if not count:
        # a slice of x, so that x still gets a gradient of zeros: DDP waits for every parameter
        return BlockWindows(x[:, :0].unsqueeze(2).expand(-1, -1, size, *x.shape[2:]), last_positions)
    return BlockWindows(x.unfold(1, size, stride).movedim(-1, 2), last_positions)


def _packed_windows(x: Tensor, geometry: BlockGeometry, cu_seqlens: Tensor) -> BlockWindows:
    size, stride = geometry.compression_block_size, geometry.compression_stride
    total = x.shape[1]
    count = total // stride
    cu_blocks = cu_blocks_from_cu_seqlens(cu_seqlens, geometry)
    sequence = sequence_ids(cu_blocks, count)
    starts = (torch.arange(count, device=x.device) - cu_blocks.long()[sequence]) * stride
    offsets = torch.arange(size, device=x.device)
    index = (cu_seqlens.long()[sequence] + starts).unsqueeze(1) + offsets
    return BlockWindows(x[:, index.clamp(max=max(total - 1, 0))], starts + size - 1)


class MeanCompressor(nn.Module):
    """phi = mean of the block's tokens; no parameters."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return `(B, C, G, D)` of tokens `(B, C, l, G, D)`."""
        return tokens.mean(2)


class ConvCompressor(nn.Module):
    """phi = depthwise convolution of width l and stride d over the G * D channels, initialised to the mean."""

    def __init__(self, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        """Build one filter of `block_size` taps per channel."""
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_kv_heads * head_dim, 1, block_size), 1 / block_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return `(B, C, G, D)` of tokens `(B, C, l, G, D)`."""
        # with tensor parallelism the weight is a DTensor: each rank holds the filters of its heads
        to_local = getattr(self.weight, "to_local", None)
        weight = self.weight if to_local is None else to_local()
        taps = weight.view(*tokens.shape[-2:], -1).to(tokens.dtype)
        return torch.einsum("bclgd,gdl->bcgd", tokens, taps)


class MLPCompressor(nn.Module):
    """phi = mean of the block's tokens + MLP(tokens + position), the same for all KV heads (section 3.3.1).

    position is a learned table `(l, D)`. The MLP is flatten, Linear(l * D, D), SiLU, Linear(D, D); its last layer starts at zero.
    """

    def __init__(self, head_dim: int, block_size: int) -> None:
        """Build for blocks of `block_size` tokens of `head_dim`."""
        super().__init__()
        self.position = nn.Parameter(nn.init.normal_(torch.empty(block_size, head_dim), std=0.02))
        self.up = nn.Linear(block_size * head_dim, head_dim)
        self.down = nn.Linear(head_dim, head_dim)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return `(B, C, G, D)` of tokens `(B, C, l, G, D)`."""
        per_head = tokens.transpose(2, 3)
        flat = (per_head + self.position).flatten(-2)
        hidden = self.up(flat)
        # if a block overflows, a gradient of 0 would become 0 * inf = NaN without the clamp, also for its tokens in the past
        limit = torch.finfo(hidden.dtype).max
        correction: Tensor = self.down(nn.functional.silu(hidden.clamp(-limit, limit)))
        return correction + per_head.mean(-2)


def build_compressor(kind: Compressor, num_kv_heads: int, head_dim: int, geometry: BlockGeometry) -> nn.Module:
    """Return a module that computes phi, of the given `kind`; the layer builds one for K and one for V."""
    if kind == "mean":
        return MeanCompressor()
    if kind == "conv":
        return ConvCompressor(num_kv_heads, head_dim, geometry.compression_block_size)
    return MLPCompressor(head_dim, geometry.compression_block_size)
