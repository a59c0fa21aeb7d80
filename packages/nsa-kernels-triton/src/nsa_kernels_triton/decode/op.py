"""The whole operation for a step over a cache: how it is cut, and the three launches."""

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core import blocks
from nsa_core.backends.base import Keys, Operation, Queries
from nsa_core.backends.ops import attention_op
from nsa_core.config import BlockGeometry
from nsa_kernels_triton.decode import kernels
from nsa_kernels_triton.device import OLDEST, capability_of, num_multiprocessors, shared_memory_bytes
from nsa_kernels_triton.launch import cdiv, next_power_of_2
from nsa_kernels_triton.numerics import is_exact, score_factor
from nsa_kernels_triton.streams import on_its_device
from nsa_kernels_triton.tile_table import padded, parts_of

PROGRAMS_PER_MULTIPROCESSOR = 1
"""Programs of a launch that are aimed at. With 2 or 4, a step on an H200 took 7 to 41 % longer (P and L, 8k and 64k, batch 1 and 16)."""
MOST_SPLITS = 64
TILE_KEYS = 64
"""Keys of a tile, in all launches, where shared memory holds them."""
LEAST_KEYS = 16
"""Fewest that a product takes."""
NUM_STAGES = 2
"""Tiles that a program holds or loads at a time."""
MOST_ROWS = 32
"""Rows (queries times heads) of a tile, at most."""
CHOICE_WARPS = 8
"""Warps of a program of the second launch, which looks at all blocks."""
SUMMED_WEIGHTS = 4096
"""Numbers that a program of the second launch holds at a time to add up a group's heads."""


class Splits(NamedTuple):
    """The parts that the keys of each branch are cut into."""

    cmp: int
    win: int
    slc: int

    @classmethod
    def of(cls, num_programs: int, num_multiprocessors: int, geometry: BlockGeometry) -> "Splits":
        """Return the splits of a step in which each takes `num_programs` programs: a number of sequences, KV heads and rows, not of keys."""
        wanted = max(1, cdiv(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors, num_programs))
        window = cdiv(geometry.window_size, TILE_KEYS)
        return cls(min(wanted, MOST_SPLITS), min(cdiv(wanted, 4), window), min(wanted, geometry.num_selected_blocks))

    @property
    def total(self) -> int:
        """Return the splits of all branches."""
        return sum(self)


def tile_keys(q: Tensor, head_dim_v: int) -> int:
    """Return the keys of a tile: as many as shared memory holds in every stage, beside a tile of q."""
    capability = capability_of(q)
    limit = shared_memory_bytes(OLDEST if capability is None else capability)
    width = padded(q.shape[3])
    found = TILE_KEYS
    # a tenth is left for what threads exchange
    while found > LEAST_KEYS and (NUM_STAGES * found * (width + padded(head_dim_v)) + MOST_ROWS * width) * q.element_size() > 0.9 * limit:
        found //= 2
    return found


class Extent(NamedTuple):
    """The size of a store of keys and values."""

    rows: int
    """Rows of a page, or of a sequence where there are none."""
    pages: int
    table_width: int
    """Entries of a sequence's page table."""
    end: int
    """The position behind the last that the store can hold of a sequence, counted from `Keys.first`; a ring holds any."""

    @classmethod
    def of(cls, keys: Keys) -> "Extent":
        """Return the size of `keys`."""
        pages, rows = keys.k.shape[:2]
        if keys.page_table is None:
            return cls(rows, pages, 0, 2**31 - 1 if keys.ring else rows)
        width = keys.page_table.shape[1]
        return cls(rows, pages, width, width * rows)


@on_its_device
def _decode(
    queries: Queries, cmp: Keys, slc: Keys, win: Keys, gates: Tensor, *, geometry: BlockGeometry, scale: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    q, gates = queries.q.contiguous(), gates.contiguous()
    cmp, slc, win = (_contiguous(keys) for keys in (cmp, slc, win))
    (batch, length, num_heads, head_dim_qk), (num_groups, head_dim_v) = q.shape, cmp.v.shape[2:]
    is_ragged = queries.cu_seqlens is not None
    num_rows = batch * length
    out = q.new_empty(batch, length, num_heads, head_dim_v)
    indices = q.new_empty(batch, length, num_groups, geometry.num_selected_blocks, dtype=torch.int32)
    if is_ragged:
        # rows after the last sequence belong to no program
        indices.fill_(-1)
    if not out.numel():
        return out, indices
    assert queries.start is not None
    num_sequences, group_size = queries.start.shape[0], num_heads // num_groups
    # rows of one sequence and group
    most_rows = queries.max_count * group_size
    block_rows = max(16, min(MOST_ROWS, next_power_of_2(most_rows)))
    row_tiles, head_rows = cdiv(most_rows, block_rows), max(16, min(MOST_ROWS, next_power_of_2(group_size)))
    head_tiles = cdiv(group_size, head_rows)
    splits = Splits.of(num_sequences * num_groups * row_tiles, num_multiprocessors(q), geometry)
    strides = geometry.selection_block_size // geometry.compression_stride
    padded_strides = next_power_of_2(strides)
    keys = tile_keys(q, head_dim_v)
    tile_blocks = max(keys // padded_strides, 1)
    num_blocks = max(1, blocks.num_selection_blocks(blocks.max_tokens(cmp.max_count, geometry), geometry))
    num_tiles = cdiv(num_blocks, tile_blocks)
    searched = next_power_of_2(num_blocks)

    def scratch(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    rows_of_heads = num_rows * num_heads
    outs, maxima, sums = (
        scratch(splits.total, rows_of_heads, head_dim_v),
        scratch(splits.total, rows_of_heads),
        scratch(splits.total, rows_of_heads),
    )
    weights, tops = scratch(rows_of_heads, 2, num_blocks), scratch(rows_of_heads, num_tiles)
    parts_qk, parts_v = parts_of(head_dim_qk), parts_of(head_dim_v)
    sizes = {
        "H": num_heads, "G": num_groups, "D_K": head_dim_qk, "K1": parts_qk.first, "K2": parts_qk.second,
        "D_V": head_dim_v, "V1": parts_v.first, "V2": parts_v.second,
        "REACH": geometry.compression_block_size // geometry.compression_stride,
        "SELECTION_SIZE": geometry.selection_block_size, "NUM_SELECTED": geometry.num_selected_blocks,
        "RAGGED": is_ragged, "EXACT": is_exact(q), "CMP_SPLITS": splits.cmp,
    }  # fmt: skip
    # a weight is 2 to the power of a difference of two rounded numbers, as `maxima` and `tops` have them
    options = {"num_warps": 4, "num_stages": NUM_STAGES, "enable_fp_fusion": False}
    factor = score_factor(q, scale)
    in_cmp, in_win = Extent.of(cmp), Extent.of(win)
    kernels.split_kernel[(num_sequences * num_groups, splits.cmp + splits.win, row_tiles)](
        q, cmp.k, cmp.v, win.k, win.v, win.k_scale, win.v_scale, cmp.page_table, win.page_table, win.first,
        queries.cu_seqlens, queries.start, queries.count, outs, maxima, sums, weights, tops,
        length, rows_of_heads, in_cmp.rows, in_win.rows, in_cmp.pages, in_win.pages, in_cmp.table_width, in_win.table_width, in_cmp.end, in_win.end,
        num_blocks, num_tiles, factor,
        SIZE=geometry.compression_block_size, STRIDE=geometry.compression_stride, STRIDES=strides, PADDED_STRIDES=padded_strides,
        WINDOW=geometry.window_size, RING=win.ring, WIN_SPLITS=splits.win, BLOCK_ROWS=block_rows, BLOCK_BLOCKS=tile_blocks, **sizes, **options,
    )  # fmt: skip
    slots = cdiv(geometry.num_selected_blocks, splits.slc)
    kernels.selected_kernel[(num_sequences * num_groups, queries.max_count * head_tiles, splits.slc)](
        q, slc.k, slc.v, slc.k_scale, slc.v_scale, slc.page_table, queries.cu_seqlens, queries.start, queries.count,
        outs, maxima, sums, weights, tops, indices,
        length, rows_of_heads, *Extent.of(slc), num_blocks, num_tiles, factor,
        NUM_INITIAL=geometry.num_initial_blocks, NUM_LOCAL=geometry.num_local_blocks, SPLITS=next_power_of_2(splits.cmp),
        FIRST_SPLIT=splits.cmp + splits.win, SLOTS=slots, PADDED_SLOTS=next_power_of_2(slots), HEAD_TILES=head_tiles,
        SUMMED_HEADS=max(1, min(next_power_of_2(group_size), SUMMED_WEIGHTS // searched)), BLOCK_ROWS=head_rows,
        BLOCK_KEYS=max(LEAST_KEYS, min(keys, next_power_of_2(geometry.selection_block_size))), BLOCK_BLOCKS=searched, TILE_BLOCKS=tile_blocks,
        **sizes, **options | {"num_warps": CHOICE_WARPS},
    )  # fmt: skip
    most_splits = max(splits)
    kernels.combine_kernel[(rows_of_heads,)](
        outs, maxima, sums, gates, queries.cu_seqlens, queries.count, out,
        length, num_sequences, rows_of_heads, num_sequences.bit_length(),
        H=num_heads, D_V=head_dim_v, WIDTH=next_power_of_2(head_dim_v), RAGGED=is_ragged, EXACT=is_exact(q),
        CMP_SPLITS=splits.cmp, WIN_SPLITS=splits.win, SLC_SPLITS=splits.slc, SPLITS=next_power_of_2(most_splits),
        BLOCK_SPLITS=min(8, next_power_of_2(most_splits)), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out, indices


def _contiguous(keys: Keys) -> Keys:
    return keys._replace(k=keys.k.contiguous(), v=keys.v.contiguous())


decode = attention_op("nsa_triton::decode", _decode, operation=Operation.NSA)
"""The gated sum of the three branches `(B, S, H, D_v)` (Eq. 5), and the choice, for a few rows of each sequence over stores; no gradient."""
