"""The whole operation for a step over a cache: how it is cut, and the three launches."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_core import blocks
from nsa_core.backends.base import Keys, Operation, Queries
from nsa_core.backends.ops import attention_op
from nsa_core.config import BlockGeometry
from nsa_kernels_triton.decode import kernels
from nsa_kernels_triton.device import OLDEST, capability_of, num_multiprocessors, shared_memory_bytes
from nsa_kernels_triton.launch import cdiv, has_pdl, next_power_of_2
from nsa_kernels_triton.numerics import is_exact, score_factor
from nsa_kernels_triton.streams import on_its_device
from nsa_kernels_triton.tile_table import padded, parts_of

PROGRAMS_PER_MULTIPROCESSOR = 2
"""Programs of a launch that are aimed at: as many as shared memory holds tiles for, all at once."""
MOST_SPLITS = 32
"""Splits of the compressed keys: the next launch merges them."""
MOST_SLC_SPLITS = 16
"""Splits of the chosen blocks: the last one merges them, one after another."""
LEAST_TILES = 2
"""Fewest tiles of chosen blocks that a program takes where programs abound: each adds a partial output."""
SLICES = 4
"""Parts of a tile of keys, one for each warp."""
SLICE_KEYS = 16
"""Keys of a part: the smallest K of a tensor-core product in 16 bits."""
BLOCK_ROWS = 16
"""Rows (queries times heads) of a tile: the smallest M of a tensor-core product, so that the accumulators of a step take the fewest registers."""
MOST_IN_FLIGHT = 3
"""Tiles of a program that arrive at a time, at most."""
CHOICE_WARPS = 8
SUMMED_WEIGHTS = 8192
"""Numbers of a kind that a program of `choose_kernel` holds at a time to add up a group's heads, or splits."""


class Splits(NamedTuple):
    """The parts that the keys of each branch are cut into."""

    cmp: int
    win: int
    slc: int

    @classmethod
    def of(cls, num_multiprocessors: int, num_tiles: int, num_rows: int, geometry: BlockGeometry) -> "Splits":
        """Return the splits of a step of `num_tiles` tiles of rows of the compressed branch, and `num_rows` of the others.

        Both are numbers of sequences, KV heads and rows, not of keys.
        """
        programs = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors
        cmp, wanted = min(max(1, programs // num_tiles), MOST_SPLITS), max(1, programs // num_rows)
        # the window is short beside the compressed keys of a long sequence, and runs beside them
        win = min(cdiv(geometry.window_size, SLICES * SLICE_KEYS), max(1, wanted // 8))
        slots, of_block = geometry.num_selected_blocks, cdiv(geometry.selection_block_size, SLICES * SLICE_KEYS)
        tiles = max(LEAST_TILES, cdiv(slots * of_block, min(wanted, MOST_SLC_SPLITS)))
        return cls(cmp, win, cdiv(slots, max(1, tiles // of_block)))


class Tiles(NamedTuple):
    """How a launch cuts keys."""

    slices: int
    """Parts of a tile, one for each warp."""
    in_flight: int
    """Tiles that arrive at a time; 0: none while another is computed with."""

    @classmethod
    def of(cls, q: Tensor, keys: Keys, slice_keys: int, most: int | None = None) -> "Tiles":
        """Return tiles of `most` parts of `slice_keys`, or of fewer, and as many in flight as leave room for two programs on a multiprocessor."""
        capability = capability_of(q)
        limit = int(0.9 * shared_memory_bytes(OLDEST if capability is None else capability))
        slice_elements = slice_keys * (padded(keys.k.shape[3]) + padded(keys.v.shape[3]))
        slices = SLICES if most is None else most
        while slices > 1 and slices * slice_elements * q.element_size() > limit:
            slices //= 2
        if q.element_size() > 2:
            # without matrix units a tile lies in registers, and what threads exchange takes as much
            return cls(slices, 0)
        tile_bytes = slices * slice_elements * keys.k.element_size()
        return cls(slices, min(MOST_IN_FLIGHT, max(1, limit // (PROGRAMS_PER_MULTIPROCESSOR * tile_bytes))))

    def num_stages(self, keys: Keys) -> int:
        """Return the stages of a loop over `keys`: the rows of pages are looked up as long before a tile as that arrives before it is used."""
        return (1 if keys.page_table is None else 2) * self.in_flight + 1


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
    if not out.numel():
        return out, indices
    assert queries.start is not None
    num_sequences, group_size = queries.start.shape[0], num_heads // num_groups
    row_tiles, head_tiles = cdiv(queries.max_count * group_size, BLOCK_ROWS), cdiv(group_size, BLOCK_ROWS)
    num_pairs, num_queries = num_sequences * num_groups, queries.max_count * head_tiles
    splits = Splits.of(num_multiprocessors(q), num_pairs * row_tiles, num_pairs * num_queries, geometry)
    strides = geometry.selection_block_size // geometry.compression_stride
    padded_strides = next_power_of_2(strides)
    slice_blocks = cdiv(SLICE_KEYS, padded_strides)
    # rows of sums are read four at a time
    num_blocks = cdiv(max(1, blocks.num_selection_blocks(blocks.max_tokens(cmp.max_count, geometry), geometry)), 16) * 16
    tiles = Tiles.of(q, cmp, slice_blocks * padded_strides)
    num_tops = cdiv(num_blocks, tiles.slices * slice_blocks) * tiles.slices
    rows_of_heads, cmp_slot = num_rows * num_heads, splits.cmp if splits.cmp > 1 else 0
    num_slots = cmp_slot + 1 + splits.win + splits.slc

    def scratch(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    outs, maxima, sums = scratch(num_slots, rows_of_heads, head_dim_v), scratch(num_slots, rows_of_heads), scratch(num_slots, rows_of_heads)
    weights, tops = scratch(rows_of_heads, 2, num_blocks), scratch(rows_of_heads, num_tops)
    counters = q.new_empty(num_rows, num_groups, head_tiles, dtype=torch.int32)
    parts_qk, parts_v, width = parts_of(head_dim_qk), parts_of(head_dim_v), next_power_of_2(head_dim_v)
    is_dependent = has_pdl(q)
    both = {
        "H": num_heads, "G": num_groups, "D_V": head_dim_v, "SELECTION_SIZE": geometry.selection_block_size,
        "NUM_SELECTED": geometry.num_selected_blocks, "RAGGED": is_ragged, "EXACT": is_exact(q), "PDL": is_dependent,
        **({"launch_pdl": True} if is_dependent else {}),
    }  # fmt: skip
    # without fusion: a weight is 2 to the power of a difference of two rounded numbers, as `maxima` and `tops` have them
    attends = {
        "D_K": head_dim_qk, "K1": parts_qk.first, "K2": parts_qk.second, "V1": parts_v.first, "V2": parts_v.second,
        "BLOCK_ROWS": BLOCK_ROWS, "enable_fp_fusion": False,
    }  # fmt: skip
    reach = geometry.compression_block_size // geometry.compression_stride
    factor = score_factor(q, scale)
    in_cmp, in_slc, in_win = Extent.of(cmp), Extent.of(slc), Extent.of(win)
    # a program has as many warps as its tiles have slices
    win_tiles = Tiles.of(q, win, SLICE_KEYS, most=tiles.slices)
    kernels.split_kernel[(num_pairs, splits.cmp + splits.win, max(row_tiles, num_queries))](
        q, cmp.k, cmp.v, cmp.page_table, win.k, win.v, win.k_scale, win.v_scale, win.page_table, win.first,
        queries.cu_seqlens, queries.start, queries.count, outs, maxima, sums, weights, tops,
        length, rows_of_heads, in_cmp.rows, in_cmp.pages, in_cmp.table_width, min(in_cmp.end, num_blocks * strides), *in_win,
        num_blocks, num_tops, factor,
        SIZE=geometry.compression_block_size, STRIDE=geometry.compression_stride, STRIDES=strides, PADDED_STRIDES=padded_strides, REACH=reach,
        WINDOW=geometry.window_size, RING=win.ring, CMP_SPLITS=splits.cmp, WIN_SPLITS=splits.win, WIN_SLOT=cmp_slot + 1, HEAD_TILES=head_tiles,
        SLICES=tiles.slices, SLICE_BLOCKS=slice_blocks, WIN_SLICES=win_tiles.slices, SLICE_KEYS=SLICE_KEYS, num_warps=tiles.slices,
        STAGES=tiles.num_stages(cmp), WIN_STAGES=win_tiles.num_stages(win), **both, **attends,
    )  # fmt: skip
    padded_splits, padded_tops = next_power_of_2(splits.cmp), next_power_of_2(num_tops)
    merged_heads = max(1, min(next_power_of_2(group_size), SUMMED_WEIGHTS // (padded_splits * width)))
    parts = 1 + (cdiv(group_size, merged_heads) if splits.cmp > 1 else 0)
    # one axis: the others end at 65,535
    kernels.choose_kernel[(num_rows * num_groups * parts,)](
        outs, maxima, sums, weights, tops, indices, counters, out, queries.cu_seqlens, queries.start, queries.count,
        length, num_sequences, num_sequences.bit_length() + 1, rows_of_heads, num_blocks, num_tops,
        WIDTH=width, REACH=reach, NUM_INITIAL=geometry.num_initial_blocks, NUM_LOCAL=geometry.num_local_blocks, CMP_SPLITS=splits.cmp,
        PADDED_SPLITS=padded_splits, HEAD_TILES=head_tiles, MERGED_HEADS=merged_heads, PARTS=parts,
        SUMMED_HEADS=max(1, min(next_power_of_2(group_size), SUMMED_WEIGHTS // (padded_tops * slice_blocks))),
        TOPS=padded_tops, SLICE_BLOCKS=slice_blocks, SLOTS=next_power_of_2(geometry.num_selected_blocks),
        num_warps=CHOICE_WARPS, enable_fp_fusion=False, **both,
    )  # fmt: skip
    tiles = Tiles.of(q, slc, SLICE_KEYS)
    slots = cdiv(geometry.num_selected_blocks, splits.slc)
    kernels.attend_kernel[(num_pairs, num_queries, splits.slc)](
        q, slc.k, slc.v, slc.k_scale, slc.v_scale, slc.page_table, queries.cu_seqlens, queries.start, queries.count,
        indices, gates, outs, maxima, sums, counters, out, length, rows_of_heads, *in_slc, factor,
        WIDTH=width, CMP_SLOT=cmp_slot, WIN_SPLITS=splits.win, SPLITS=splits.slc, SLOTS=slots, PADDED_SLOTS=next_power_of_2(slots),
        HEAD_TILES=head_tiles, SLICES=tiles.slices, SLICE_KEYS=SLICE_KEYS, num_warps=tiles.slices, STAGES=tiles.num_stages(slc), **both, **attends,
    )  # fmt: skip
    return out, indices


def _contiguous(keys: Keys) -> Keys:
    tensors: dict[str, Any] = {name: x.contiguous() for name, x in keys._asdict().items() if isinstance(x, Tensor)}
    return keys._replace(**tensors)


decode = attention_op("nsa_triton::decode", _decode, operation=Operation.NSA)
"""The gated sum of the three branches `(B, S, H, D_v)` (Eq. 5), and the choice, for a few rows of each sequence over stores; no gradient."""
