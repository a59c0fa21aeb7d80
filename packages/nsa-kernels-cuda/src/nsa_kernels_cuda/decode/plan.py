"""Compute the cluster size of a step, and the shared memory of a CTA, from plain numbers."""

from typing import NamedTuple

import torch
from attrs import frozen

from nsa_core.blocks import max_tokens, num_selection_blocks
from nsa_core.config import BlockGeometry
from nsa_kernels_cuda.cluster_launch import SHARED_BYTES

KERNELS = {torch.bfloat16: "decode_bfloat16", torch.float16: "decode_float16"}
"""Beginning of the kernels' names for each dtype. The largest D_v follows in the name, then PLACED for kernels of `decode_placed.cu`."""
PLACED = "_placed"
"""Ending of the names of kernels that support several or ragged rows, stores in pages and FP8 stores."""
FP8 = torch.float8_e4m3fn
WIDTHS = (128, 256)
"""Largest D_v that each kernel supports, because its threads hold the outputs in registers."""
NUM_WARPS = 8
WARP_SIZE = 32
ROWS = 16
"""Heads of a tile: the rows of a tensor-core product."""
KEYS = 16
"""Keys of a tile. So at most this many compressed keys may begin in one selection block."""
MOST_STAGES = 4
CLUSTERS = ((4, 16), (16, 8), (32, 4), (64, 2))
"""Maximum number of pairs of a row and a KV head -> CTAs of a cluster; 1 for more pairs. Up to 64 pairs take at most 128 CTAs."""
MOST_RANKS = 16


class Sizes(NamedTuple):
    """The numbers on which the launch of a step depends."""

    num_pairs: int
    """Number of pairs of a row and a KV head."""
    group_size: int
    """Heads of a group, H / G."""
    head_dim_qk: int
    head_dim_v: int
    num_blocks: int
    """Maximum selection blocks of a sequence."""
    geometry: BlockGeometry

    @property
    def log_columns(self) -> int:
        """Return log2 of the number of columns of a tile that the compressed keys of one selection block take."""
        return (self.geometry.selection_block_size // self.geometry.compression_stride - 1).bit_length()


@frozen(kw_only=True)
class Plan:
    """Sizes of the launch of a step."""

    num_ranks: int
    """CTAs of a cluster."""
    num_stages: int
    """Tiles in each warp's ring buffer."""
    num_win_warps: int
    """Warps of a CTA that attend to the window; the others attend to chosen blocks."""
    shared_bytes: int

    @classmethod
    def of(cls, sizes: Sizes) -> "Plan | None":
        """Return the plan for `sizes`; None if it does not fit shared memory. It does not depend on lengths."""
        num_ranks = next((num_ranks for most_pairs, num_ranks in CLUSTERS if sizes.num_pairs <= most_pairs), 1)
        geometry = sizes.geometry
        selected = geometry.num_selected_blocks * geometry.selection_block_size
        share = round(NUM_WARPS * geometry.window_size / (geometry.window_size + selected))
        num_win_warps = min(max(share, 1), NUM_WARPS - 1)
        while num_ranks <= MOST_RANKS:
            for num_stages in range(MOST_STAGES, 0, -1):
                shared_bytes = shared_bytes_of(sizes, num_ranks, num_stages)
                if shared_bytes <= SHARED_BYTES:
                    return cls(num_ranks=num_ranks, num_stages=num_stages, num_win_warps=num_win_warps, shared_bytes=shared_bytes)
            # with more CTAs, each has a smaller share of the scores
            num_ranks *= 2
        return None


def num_blocks_of(num_compressed: int, geometry: BlockGeometry) -> int:
    """Return the number of selection blocks with scores for sequences of up to `num_compressed` compressed blocks."""
    return max(1, num_selection_blocks(max_tokens(num_compressed, geometry), geometry))


def shared_bytes_of(sizes: Sizes, num_ranks: int, num_stages: int) -> int:
    """Return the bytes of `Memory` in decode.cu."""
    heads, padded_heads = sizes.group_size, _cdiv(sizes.group_size, ROWS) * ROWS
    k_pitch, v_pitch = 2 * sizes.head_dim_qk + 16, 2 * sizes.head_dim_v + 16
    stage = max(KEYS * (k_pitch + v_pitch), ROWS * (sizes.head_dim_v + 8) * 4)
    blocks_per_tile = KEYS >> sizes.log_columns
    tiles_per_rank = _cdiv(_cdiv(sizes.num_blocks, blocks_per_tile), num_ranks)
    record_size = (_cdiv(heads * (blocks_per_tile + 2), blocks_per_tile) | 1) * blocks_per_tile
    num_outs, num_records = heads * sizes.head_dim_v, (tiles_per_rank + 1) * record_size
    parts = (
        padded_heads * k_pitch,
        NUM_WARPS * num_stages * stage,
        (num_outs + max(2 * num_outs, NUM_WARPS * ROWS * (KEYS + 1))) * 4,
        3 * heads * 8,
        heads * 8,
        heads * 3 * 4,
        NUM_WARPS * ROWS * 8,
        max(num_records, num_ranks * 3 * heads) * 4,
        128 * 8,
        WARP_SIZE * 4,
        _cdiv(sizes.num_blocks, 128) * 128 * 4,
        sizes.geometry.num_selected_blocks * 4,
    )
    return sum(_cdiv(part, 16) * 16 for part in parts)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
