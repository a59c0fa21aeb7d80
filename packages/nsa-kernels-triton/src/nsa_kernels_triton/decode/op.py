"""The whole operation for a step over a cache: its splits and grids, and the three launches."""

from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nsa_core import blocks
from nsa_core.backends.base import Keys, Operation, Queries
from nsa_core.backends.ops import attention_op
from nsa_core.config import BlockGeometry
from nsa_kernels_triton.decode import kernels
from nsa_kernels_triton.device import OLDEST, capability_of, num_multiprocessors, shared_memory_bytes
from nsa_kernels_triton.launch import cdiv, has_pdl, next_power_of_2, starts_early
from nsa_kernels_triton.numerics import score_factor
from nsa_kernels_triton.streams import on_its_device
from nsa_kernels_triton.tile_table import padded, parts_of

Operands = TypeVar("Operands", Queries, Keys)
PROGRAMS_PER_MULTIPROCESSOR = 2
"""Target number of a launch's programs per multiprocessor. Shared memory holds the tiles of this many, so that all programs run at once."""
MOST_SPLITS = 32
"""Maximum splits of the compressed keys: the next launch merges them."""
LEAST_ALONE = 8
"""With at least this many programs per tile of rows, some may take only the window; with fewer, each takes a share of both."""
WINDOW_SHARE = 5
"""If some programs take only the window, at most one in this many programs of a row does."""
LATE_ROWS = range(8, 129)
"""For these numbers of rows (queries times KV heads), the third launch reads the window, while the second one chooses."""
MOST_LATE_SPLITS = 2
"""Maximum splits of a window in the third launch."""
MOST_SLC_SPLITS = 16
"""Maximum splits of the chosen blocks: the last program to finish merges them, one after another."""
LEAST_TILES = 2
"""Minimum tiles of chosen blocks per program: each program adds one more partial output to merge."""
SLICES = 4
"""Parts of a tile of keys, one for each warp."""
SLICE_KEYS = 16
"""Keys of a part: the smallest K of a tensor-core product in 16 bits."""
BLOCK_ROWS = 16
"""Rows (queries times heads) of a tile: the smallest M of a tensor-core product, so that the accumulators of a step take the fewest registers."""
MOST_IN_FLIGHT = 3
"""Maximum number of a program's tiles in flight."""
CHOICE_WARPS = 8
CHOOSERS = 4
"""Maximum programs that add up a group's heads for one row, each for a part of the blocks; a power of two. The last to arrive chooses."""
LEAST_CHOOSER_BLOCKS = 256
"""Minimum blocks for each of these programs, if there are several."""
SUMMED_WEIGHTS = 8192
"""Elements that a program of `choose_kernel` holds at a time: of the weights that it adds over heads, or of the output that it merges."""
LEAST_MERGED_HEADS = 2
"""Minimum heads of a program that merges splits."""


class Splits(NamedTuple):
    """The number of splits of each branch's keys."""

    cmp: int
    win: int
    """Splits of the window in the first launch, or 0."""
    late_win: int
    """Splits of the window in the third launch, or 0."""
    slc: int
    win_from: int
    """Number of the first program of a tile that takes a split of the window: `cmp` if the window has its own programs, else 0."""

    @classmethod
    def of(cls, num_multiprocessors: int, num_tiles: int, num_rows: int, geometry: BlockGeometry) -> "Splits":
        """Return the splits of a step with `num_tiles` tiles of rows in the compressed branch, and `num_rows` in the others.

        Both numbers depend on sequences, KV heads and rows, not on keys. If the GPU can run a program for each tile at once, all programs
        of a launch run at once, so that none waits for another.
        """
        programs = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors
        cmp, wanted = max(1, programs // num_tiles), max(1, programs // num_rows)
        win, late_win, is_alone = min(cdiv(geometry.window_size, SLICES * SLICE_KEYS), wanted), 0, False
        if num_rows in LATE_ROWS:
            win, late_win = 0, min(MOST_LATE_SPLITS, win, max(1, wanted // 2))
        else:
            # the window is short compared with the compressed keys of a long sequence
            short_win = min(win, max(1, wanted // WINDOW_SHARE))
            left = (programs - short_win * num_rows) // num_tiles
            # a tile of several rows and few heads has a window for each row; their programs may leave too few for the compressed keys
            is_alone = cmp >= LEAST_ALONE and 2 * left > cmp
            if is_alone:
                cmp, win = left, short_win
        cmp = min(cmp, MOST_SPLITS)
        slots, of_block = geometry.num_selected_blocks, cdiv(geometry.selection_block_size, SLICES * SLICE_KEYS)
        tiles = max(LEAST_TILES, cdiv(slots * of_block, min(max(1, wanted - late_win), MOST_SLC_SPLITS)))
        return cls(cmp, win, late_win, cdiv(slots, max(1, tiles // of_block)), cmp if is_alone else 0)


class StepSizes(NamedTuple):
    """The numbers that decide a step's splits and grids. Two steps with equal sizes differ only in their tensors."""

    capability: tuple[int, int] | None
    num_multiprocessors: int
    has_pdl: bool
    starts_early: bool
    """True if the first launch may start, and read results of earlier steps, while `append` runs."""
    most_slices: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """(B, S, H, D_k) of q."""
    num_groups: int
    head_dim_v: int
    num_sequences: int
    max_count: int
    """Rows of the longest sequence, at most."""
    is_ragged: bool
    most_blocks: int
    """Compressed blocks of the longest sequence, at most."""
    most_tokens: int
    """Tokens that the store of the selected branch holds of a sequence, at most."""
    cmp: tuple[torch.dtype, bool]
    """The dtype of a store, and whether it has pages."""
    slc: tuple[torch.dtype, bool]
    win: tuple[torch.dtype, bool]
    is_ring: bool
    geometry: BlockGeometry

    @classmethod
    def of(cls, queries: Queries, cmp: Keys, slc: Keys, win: Keys, geometry: BlockGeometry) -> "StepSizes":
        """Return the sizes of a step over the stores as they were given."""
        q, (num_groups, head_dim_v) = queries.q, cmp.v.shape[2:]
        assert queries.start is not None
        # the launch after `append` would write a copy of the queries, of keys or of a window's tail
        has_copies = win.first is not None or not (_is_contiguous(queries) and _is_contiguous(cmp) and _is_contiguous(win))
        is_early = queries.follows_append and not has_copies and starts_early(q, q.shape[0] * q.shape[1], num_groups)
        return cls(
            capability_of(q), num_multiprocessors(q), has_pdl(q), is_early, SLICES,
            q.dtype, q.shape, num_groups, head_dim_v,
            queries.start.shape[0], queries.max_count, queries.cu_seqlens is not None, cmp.max_count, Extent.of(slc).end,
            (cmp.k.dtype, cmp.page_table is not None), (slc.k.dtype, slc.page_table is not None),
            (win.k.dtype, win.page_table is not None), win.ring, geometry,
        )  # fmt: skip


class Tiles(NamedTuple):
    """The tiles of keys of a launch."""

    slices: int
    """Parts of a tile, one for each warp."""
    stages: int
    """Pipeline stages of the loop over tiles: one more than the tiles in flight. With pages, twice as many are in flight: first rows are
    looked up, then keys are loaded."""

    @classmethod
    def of(cls, sizes: StepSizes, keys: tuple[torch.dtype, bool], slice_keys: int, most: int) -> "Tiles":
        """Return tiles of at most `most` parts of `slice_keys` keys. So many are in flight that two programs fit on a multiprocessor.

        `keys`: the dtype of their store, and whether it has pages.
        """
        limit = int(0.9 * shared_memory_bytes(OLDEST if sizes.capability is None else sizes.capability))
        slice_elements = slice_keys * (padded(sizes.shape[3]) + padded(sizes.head_dim_v))
        slices, itemsize = most, sizes.dtype.itemsize
        while slices > 1 and slices * slice_elements * itemsize > limit:
            slices //= 2
        if itemsize > 2:
            # without tensor cores a tile is in registers, and exchanges between threads take as much shared memory as a tile
            return cls(slices, 1)
        dtype, is_paged = keys
        tile_bytes = slices * slice_elements * dtype.itemsize
        in_flight = min(MOST_IN_FLIGHT, max(1, limit // (PROGRAMS_PER_MULTIPROCESSOR * tile_bytes)))
        return cls(slices, (2 if is_paged else 1) * in_flight + 1)


class Extent(NamedTuple):
    """The size of a store of keys and values."""

    rows: int
    """Rows of a page, or of a sequence without pages."""
    pages: int
    table_width: int
    """Entries of a sequence's page table."""
    end: int
    """Number of positions of a sequence, counted from `Keys.first`, that the store can hold. A ring buffer holds any position."""

    @classmethod
    def of(cls, keys: Keys) -> "Extent":
        """Return the size of `keys`."""
        pages, rows = keys.k.shape[:2]
        width = 0 if keys.page_table is None else keys.page_table.shape[1]
        size = rows if keys.page_table is None else width * rows
        return cls(rows, pages, width, 2**31 - 1 if keys.ring else size)


class Launch(NamedTuple):
    """The grid of a launch and its constants."""

    grid: tuple[int, ...]
    constants: dict[str, Any]


class Cut(NamedTuple):
    """A step's launches, and the sizes of the buffers that they share."""

    num_slots: int
    """Number of partial outputs of a row and head."""
    head_tiles: int
    num_blocks: int
    """Number of selection blocks for which the buffer of sums has room."""
    num_tops: int
    num_positions: int
    """Number of compressed keys that may be read."""
    num_summed: int
    """Elements of importance, for each row and group, that several programs pass to the one that chooses; 0 if one program adds them up."""
    split: Launch
    choose: Launch
    attend: Launch


@lru_cache(maxsize=1024)
def cut_of(sizes: StepSizes) -> Cut:
    """Return the launches of a step of `sizes`; the result is cached, because the steps of a cache have the same size."""
    geometry, num_groups, head_dim_v = sizes.geometry, sizes.num_groups, sizes.head_dim_v
    batch, length, num_heads, head_dim_qk = sizes.shape
    num_rows, group_size = batch * length, num_heads // num_groups
    row_tiles, head_tiles = cdiv(sizes.max_count * group_size, BLOCK_ROWS), cdiv(group_size, BLOCK_ROWS)
    num_pairs, num_queries = sizes.num_sequences * num_groups, sizes.max_count * head_tiles
    splits = Splits.of(sizes.num_multiprocessors, num_pairs * row_tiles, num_pairs * num_queries, geometry)
    strides = geometry.selection_block_size // geometry.compression_stride
    padded_strides = next_power_of_2(strides)
    slice_blocks = cdiv(SLICE_KEYS, padded_strides)
    # a row of sums is read four elements at a time
    most_tokens = min(blocks.max_tokens(sizes.most_blocks, geometry), sizes.most_tokens)
    num_blocks = cdiv(max(1, blocks.num_selection_blocks(most_tokens, geometry)), 16) * 16
    tiles = Tiles.of(sizes, sizes.cmp, slice_blocks * padded_strides, sizes.most_slices)
    num_tops = cdiv(num_blocks, tiles.slices * slice_blocks) * tiles.slices
    parts_qk, parts_v, width = parts_of(head_dim_qk), parts_of(head_dim_v), next_power_of_2(head_dim_v)
    both = {
        "H": num_heads, "G": num_groups, "D_V": head_dim_v, "SELECTION_SIZE": geometry.selection_block_size,
        "NUM_SELECTED": geometry.num_selected_blocks, "RAGGED": sizes.is_ragged, "EXACT": sizes.dtype == torch.float32, "PDL": sizes.has_pdl,
        **({"launch_pdl": True} if sizes.has_pdl else {}),
    }  # fmt: skip
    # without fused multiply-add: a weight is 2 to the power of the difference of two rounded numbers, as `maxima` and `tops` hold them
    attends = {
        "D_K": head_dim_qk, "K1": parts_qk.first, "K2": parts_qk.second, "V1": parts_v.first, "V2": parts_v.second,
        "BLOCK_ROWS": BLOCK_ROWS, "enable_fp_fusion": False,
    }  # fmt: skip
    reach = geometry.compression_block_size // geometry.compression_stride
    slc_tiles = Tiles.of(sizes, sizes.slc, SLICE_KEYS, sizes.most_slices)
    # a program has as many warps as its tiles have slices
    win_tiles = Tiles.of(sizes, sizes.win, SLICE_KEYS, slc_tiles.slices if splits.late_win else tiles.slices)
    window = {"WINDOW": geometry.window_size, "RING": sizes.is_ring, "WIN_SLICES": win_tiles.slices, "WIN_STAGES": win_tiles.stages}
    split = dict(
        SIZE=geometry.compression_block_size, STRIDE=geometry.compression_stride, STRIDES=strides, PADDED_STRIDES=padded_strides, REACH=reach,
        CMP_SPLITS=splits.cmp, WIN_SPLITS=splits.win, WIN_FROM=splits.win_from, HEAD_TILES=head_tiles, SLICES=tiles.slices,
        SLICE_BLOCKS=slice_blocks, SLICE_KEYS=SLICE_KEYS, num_warps=tiles.slices, STAGES=tiles.stages, STARTS_EARLY=sizes.starts_early,
        **window, **both, **attends,
    )  # fmt: skip
    choosers = max(1, min(CHOOSERS, next_power_of_2(num_blocks) // LEAST_CHOOSER_BLOCKS))
    padded_tops = next_power_of_2(cdiv(num_tops, choosers))
    # so many merging programs that they and the choosing ones run at once, one per multiprocessor
    most_parts = max(1, sizes.num_multiprocessors // (num_rows * num_groups) - choosers)
    merged_heads = min(max(LEAST_MERGED_HEADS, next_power_of_2(cdiv(group_size, most_parts))), max(1, SUMMED_WEIGHTS // width))
    parts = choosers + cdiv(group_size, merged_heads)
    choose = dict(
        WIDTH=width, REACH=reach, NUM_INITIAL=geometry.num_initial_blocks, NUM_LOCAL=geometry.num_local_blocks, CMP_SPLITS=splits.cmp,
        PADDED_SPLITS=next_power_of_2(splits.cmp), WIN_SPLITS=splits.win, HEAD_TILES=head_tiles, MERGED_HEADS=merged_heads, PARTS=parts,
        SUMMED_HEADS=max(1, min(next_power_of_2(group_size), SUMMED_WEIGHTS // (padded_tops * slice_blocks))),
        TOPS=padded_tops, SLICE_BLOCKS=slice_blocks, SLOTS=next_power_of_2(geometry.num_selected_blocks), CHOOSERS=choosers,
        num_warps=CHOICE_WARPS, enable_fp_fusion=False, **both,
    )  # fmt: skip
    slots = cdiv(geometry.num_selected_blocks, splits.slc)
    attend = dict(
        WIDTH=width, FIRST_SLOT=splits.cmp + splits.win + 1, WIN_SPLITS=splits.late_win, SLC_SPLITS=splits.slc, SLOTS=slots,
        PADDED_SLOTS=next_power_of_2(slots), HEAD_TILES=head_tiles, SLICES=slc_tiles.slices, SLICE_KEYS=SLICE_KEYS, STAGES=slc_tiles.stages,
        num_warps=slc_tiles.slices, **window, **both, **attends,
    )  # fmt: skip
    return Cut(
        splits.cmp + splits.win + 1 + splits.late_win + splits.slc, head_tiles, num_blocks, num_tops, num_blocks * strides,
        choosers * padded_tops * slice_blocks if choosers > 1 else 0,
        Launch((num_pairs, max(splits.cmp, splits.win_from + splits.win), max(row_tiles, num_queries if splits.win else 1)), split),
        # one axis, because CUDA limits the others to 65,535
        Launch((num_rows * num_groups * parts,), choose),
        Launch((num_pairs, num_queries, splits.late_win + splits.slc), attend),
    )  # fmt: skip


@on_its_device
def _decode(
    queries: Queries, cmp: Keys, slc: Keys, win: Keys, gates: Tensor, *, geometry: BlockGeometry, scale: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    gates, sizes = gates.contiguous(), StepSizes.of(queries, cmp, slc, win, geometry)
    queries, cmp, slc, win = _contiguous(queries), _contiguous(cmp), _contiguous(slc), _contiguous(win)
    q = queries.q
    (batch, length, num_heads, _), (num_groups, head_dim_v) = q.shape, cmp.v.shape[2:]
    out = q.new_empty(batch, length, num_heads, head_dim_v)
    indices = q.new_empty(batch, length, num_groups, geometry.num_selected_blocks, dtype=torch.int32)
    if not out.numel():
        return out, indices
    assert queries.start is not None
    cut, num_sequences = cut_of(sizes), queries.start.shape[0]
    rows_of_heads, num_slots, num_blocks, num_tops = batch * length * num_heads, cut.num_slots, cut.num_blocks, cut.num_tops

    def scratch(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    outs, maxima, sums = scratch(num_slots, rows_of_heads, head_dim_v), scratch(num_slots, rows_of_heads), scratch(num_slots, rows_of_heads)
    weights, tops = scratch(rows_of_heads, 2, num_blocks), scratch(rows_of_heads, num_tops)
    counters = q.new_empty(batch * length, num_groups, cut.head_tiles, dtype=torch.int32)
    importance, arrivals = None, None
    if cut.num_summed:
        importance, arrivals = scratch(batch * length, num_groups, cut.num_summed), counters.new_empty(batch * length, num_groups)
    factor = score_factor(q, scale)
    in_cmp, in_slc, in_win = Extent.of(cmp), Extent.of(slc), Extent.of(win)
    of_win = (win.k, win.v, win.k_scale, win.v_scale, win.page_table, win.first)
    kernels.split_kernel[cut.split.grid](
        q, cmp.k, cmp.v, cmp.page_table, *of_win,
        queries.cu_seqlens, queries.start, queries.count, outs, maxima, sums, weights, tops, arrivals,
        length, rows_of_heads, in_cmp.rows, in_cmp.pages, in_cmp.table_width, min(in_cmp.end, cut.num_positions), *in_win,
        num_blocks, num_tops, factor, **cut.split.constants,
    )  # fmt: skip
    kernels.choose_kernel[cut.choose.grid](
        gates, outs, maxima, sums, weights, tops, importance, arrivals, indices, counters, out, queries.cu_seqlens, queries.start, queries.count,
        length, num_sequences, num_sequences.bit_length() + 1, rows_of_heads, num_blocks, num_tops, **cut.choose.constants,
    )  # fmt: skip
    kernels.attend_kernel[cut.attend.grid](
        q, slc.k, slc.v, slc.k_scale, slc.v_scale, slc.page_table, *of_win, queries.cu_seqlens, queries.start, queries.count,
        indices, gates, outs, maxima, sums, counters, out, length, rows_of_heads, *in_slc, *in_win, factor, **cut.attend.constants,
    )  # fmt: skip
    return out, indices


def _is_contiguous(operands: Queries | Keys) -> bool:
    return all(x.is_contiguous() for x in operands if isinstance(x, Tensor))


def _contiguous(operands: Operands) -> Operands:
    if _is_contiguous(operands):
        return operands
    tensors: dict[str, Any] = {name: x.contiguous() for name, x in operands._asdict().items() if isinstance(x, Tensor)}
    return operands._replace(**tensors)


decode = attention_op("nsa_triton::decode", _decode, operation=Operation.NSA)
"""Gated sum of the three branches `(B, S, H, D_v)` (Eq. 5), and the choice, for a few rows of each sequence over stores; no gradient."""
