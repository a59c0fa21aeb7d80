"""Kernels of Eq. 5 for a few rows of each sequence over stores: three launches, each split so that the whole GPU works.

1. `split_kernel` divides the compressed keys, and in most steps the window, into splits. Each split writes a partial output with its maximum and
   sum. Splits of the compressed branch also write each head's weights summed by block, relative to the maximum when they were computed.
2. `choose_kernel` normalises these sums, adds up a group's heads and chooses blocks, once for each row and KV head. Meanwhile its other programs
   merge the partial outputs of the compressed branch and of the window, and add both branches, times their gates.
3. `attend_kernel` divides the chosen blocks into splits. The last split of a row to finish merges their partial outputs and adds the result,
   times its gate, to the sum of the other two branches. For some numbers of rows (`op.LATE_ROWS`) this launch also reads and merges the window.

A tile of keys has SLICES parts, one for each warp: every warp has its own softmax, and warps exchange data only when a split ends.

The number of splits does not depend on lengths, so that one CUDA graph serves all of them. Keys are in rows, pages or a ring, also as FP8 numbers
with a scale for each token and KV head. The kernels read nothing after a sequence's last token, and nothing outside the stores, whatever a row's
position is.

With PDL (programmatic dependent launch), a launch starts when the last programs of the previous launch end; `attend_kernel` starts while
`choose_kernel` runs. Programs read the results of the previous launch only after `gdc_wait`. Every program calls it, so that a launch ends after
the previous one. When `attend_kernel` starts, `split_kernel` has ended, and `append` before it, so it need not wait for the window's keys.
`split_kernel` does not let the next launch start earlier, because waiting programs would take the slots of programs that read.
With STARTS_EARLY, `split_kernel` itself starts while `append` runs, and reads keys of earlier steps: see `launch.MOST_EARLY_PAIRS`.
"""

import triton
import triton.language as tl

from nsa_kernels_triton.cached_launch import CachedLaunch
from nsa_kernels_triton.choice.kernels import blocks_at, chosen_words
from nsa_kernels_triton.tiles import cast, dot, exponential, find_sequence, load_columns, visible_keys, wide


@triton.jit
def _rows_of_step(sequence, cu_seqlens_ptr, start_ptr, count_ptr, num_queries, RAGGED: tl.constexpr):
    """Return a sequence's first row of q, its number of valid rows, and the position of the first row."""
    start = tl.load(start_ptr + sequence)
    if RAGGED:
        first = tl.load(cu_seqlens_ptr + sequence)
        return first.to(tl.int64), tl.load(cu_seqlens_ptr + sequence + 1) - first, start
    count = num_queries
    if count_ptr is not None:
        count = tl.load(count_ptr + sequence)
    return wide(sequence) * num_queries, count, start


@triton.jit
def _store_rows(sequence, positions, mask, table_ptr, first_ptr, num_rows, num_pages, table_width, RING: tl.constexpr):
    """Return the rows, int64, of a store (pages or sequences, num_rows, G, D) that hold a sequence's `positions`, where `mask`."""
    if RING:
        size = num_rows
        if table_ptr is not None:
            size = num_rows * table_width
        positions = positions % size
    elif first_ptr is not None:
        positions -= tl.load(first_ptr + sequence)
    if table_ptr is not None:
        page = tl.load(table_ptr + wide(sequence) * table_width + positions // num_rows, mask=mask, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        return page.to(tl.int64) * num_rows + positions % num_rows
    return wide(sequence) * num_rows + positions


@triton.jit
def _load_keys(base_ptr, rows, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr):
    """Return columns FIRST .. FIRST + WIDTH - 1 of the rows at element offsets `rows` (slices, keys); 0 beyond NUM_COLUMNS and where masked.

    They are read from L2, because `attend_kernel` reads keys of this step before it waits.
    """
    columns = FIRST + tl.arange(0, WIDTH)
    ptrs = base_ptr + rows[:, :, None] + columns[None, None, :]
    if FIRST + WIDTH > NUM_COLUMNS:
        return tl.load(ptrs, mask=mask[:, :, None] & (columns < NUM_COLUMNS)[None, None, :], other=0.0, cache_modifier=".cg")
    return tl.load(ptrs, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")


@triton.jit
def _load_queries(q_ptr, heads, exists, D_K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, SLICES: tl.constexpr):
    """Return the two parts of a tile of q, repeated for every slice: (slices, rows, K1) and (slices, rows, K2). If K2 is 0, both are the first."""
    q1 = load_columns(q_ptr, heads * D_K, exists, 0, K1, D_K, True)
    q1 = tl.broadcast_to(q1[None, :, :], (SLICES, q1.shape[0], K1))
    q2 = q1
    if K2 > 0:
        q2 = load_columns(q_ptr, heads * D_K, exists, K1, K2, D_K, True)
        q2 = tl.broadcast_to(q2[None, :, :], (SLICES, q2.shape[0], K2))
    return q1, q2


@triton.jit
def _start(ROWS: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, SLICES: tl.constexpr):
    """Return the state of the online softmax before the first key: acc1, acc2, row_max, row_sum. If V2 is 0, acc2 is acc1."""
    acc1 = tl.zeros([SLICES, ROWS, V1], tl.float32)
    acc2 = acc1
    if V2 > 0:
        acc2 = tl.zeros([SLICES, ROWS, V2], tl.float32)
    return acc1, acc2, tl.full([SLICES, ROWS], float("-inf"), tl.float32), tl.zeros([SLICES, ROWS], tl.float32)


@triton.jit
def _fold(
    q1, q2, acc1, acc2, row_max, row_sum, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, key_rows, is_key, is_visible, group, factor,
    G: tl.constexpr, D_K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, D_V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys (slices, keys) to the running softmaxes; return acc1, acc2, row_max, row_sum and the weights (slices, rows, keys)."""
    dtype: tl.constexpr = q1.dtype
    k_rows, v_rows = (key_rows * G + group) * D_K, (key_rows * G + group) * D_V
    k1 = _load_keys(k_ptr, k_rows, is_key, 0, K1, D_K).to(dtype)
    scores = dot(q1, tl.permute(k1, (0, 2, 1)), tl.zeros([q1.shape[0], q1.shape[1], k1.shape[1]], tl.float32))
    if K2 > 0:
        scores = dot(q2, tl.permute(_load_keys(k_ptr, k_rows, is_key, K1, K2, D_K).to(dtype), (0, 2, 1)), scores)
    if k_scale_ptr is not None:
        scores *= tl.load(k_scale_ptr + key_rows * G + group, mask=is_key, other=0.0)[:, None, :]
    scores = tl.where(is_visible, scores * factor, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 2))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exponential(scores - shift[:, :, None], EXACT)
    kept = exponential(row_max - shift, EXACT)
    row_sum = row_sum * kept + tl.sum(weights, 2)
    shares = weights
    if v_scale_ptr is not None:
        shares *= tl.load(v_scale_ptr + key_rows * G + group, mask=is_key, other=0.0)[:, None, :]
    shares = cast(shares, dtype)
    acc1 = dot(shares, _load_keys(v_ptr, v_rows, is_key, 0, V1, D_V).to(dtype), acc1 * kept[:, :, None])
    if V2 > 0:
        acc2 = dot(shares, _load_keys(v_ptr, v_rows, is_key, V1, V2, D_V).to(dtype), acc2 * kept[:, :, None])
    return acc1, acc2, new_max, row_sum, weights


@triton.jit
def _sum_of_slices(x):
    """Return x (slices, rows, columns) summed over its 1, 2 or 4 slices. It adds halves: a reduction over warps takes more instructions."""
    if x.shape[0] == 4:
        first, second = tl.split(tl.permute(tl.reshape(x, (2, 2, x.shape[1], x.shape[2])), (1, 2, 3, 0)))
        x = first + second
    if x.shape[0] == 2:
        first, second = tl.split(tl.permute(x, (1, 2, 0)))
        return first + second
    return tl.sum(x, 0)


@triton.jit
def _store_partial(
    outs_ptr, maxima_ptr, sums_ptr, slot, num_heads_of_rows, heads, exists, acc1, acc2, row_max, row_sum,
    D_V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Merge the slices of a split and write the partial result to `slot`. A row that sees nothing has sum 0, maximum -inf and output 0."""
    largest = tl.max(row_max, 0)
    kept = exponential(row_max - tl.where(largest == float("-inf"), 0.0, largest)[None, :], EXACT)
    offset = wide(slot) * num_heads_of_rows + heads
    tl.store(maxima_ptr + offset, largest, mask=exists)
    tl.store(sums_ptr + offset, tl.sum(row_sum * kept, 0), mask=exists)
    columns = tl.arange(0, V1)
    target = outs_ptr + (offset * D_V)[:, None]
    tl.store(target + columns[None, :], _sum_of_slices(acc1 * kept[:, :, None]), mask=exists[:, None] & (columns < D_V)[None, :])
    if V2 > 0:
        columns = V1 + tl.arange(0, V2)
        tl.store(target + columns[None, :], _sum_of_slices(acc2 * kept[:, :, None]), mask=exists[:, None] & (columns < D_V)[None, :])


@triton.jit
def _window_split(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, first_ptr, outs_ptr, maxima_ptr, sums_ptr,
    sequence, group, row, start, query, head_tile, split, num_heads_of_rows, num_rows, num_pages, table_width, end_of_store, factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    D_V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, EXACT: tl.constexpr,
    SPLITS: tl.constexpr, FIRST_SLOT: tl.constexpr, BLOCK_ROWS: tl.constexpr, SLICES: tl.constexpr, SLICE_KEYS: tl.constexpr, STAGES: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Write the partial result of one split of the window of one row of q, at position start + query, for a tile of a group's heads."""
    HG: tl.constexpr = H // G
    t = start + query
    in_group = head_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = in_group < HG
    heads = row * H + group * HG + in_group
    slices = tl.arange(0, SLICES)
    q1, q2 = _load_queries(q_ptr, heads, exists, D_K, K1, K2, SLICES)
    first, _end = visible_keys(t, True, 1, 1, WINDOW)
    last = tl.minimum(t, end_of_store - 1)
    if first_ptr is not None:
        first_held = tl.load(first_ptr + sequence)
        first = tl.maximum(first, first_held)
        last = tl.minimum(t, end_of_store - 1 + first_held)
    tiles = tl.cdiv(t + 1 - first, SLICES * SLICE_KEYS)
    share = tl.cdiv(tiles, SPLITS)
    if STARTS_EARLY and first + (split + 1) * share * (SLICES * SLICE_KEYS) > start:
        tl.extra.cuda.gdc_wait()
    in_tile = (slices * SLICE_KEYS)[:, None] + tl.arange(0, SLICE_KEYS)[None, :]
    acc1, acc2, row_max, row_sum = _start(BLOCK_ROWS, V1, V2, SLICES)
    for tile in tl.range(split * share, tl.minimum((split + 1) * share, tiles), num_stages=STAGES):
        keys = first + tile * (SLICES * SLICE_KEYS) + in_tile
        is_key = keys <= last
        key_rows = _store_rows(sequence, keys, is_key, table_ptr, first_ptr, num_rows, num_pages, table_width, RING)
        acc1, acc2, row_max, row_sum, _weights = _fold(
            q1, q2, acc1, acc2, row_max, row_sum, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, key_rows, is_key, is_key[:, None, :], group, factor,
            G, D_K, K1, K2, D_V, V1, V2, EXACT,
        )  # fmt: skip
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    _store_partial(
        outs_ptr, maxima_ptr, sums_ptr, FIRST_SLOT + split, num_heads_of_rows, heads, exists, acc1, acc2, row_max, row_sum, D_V, V1, V2, EXACT
    )  # fmt: skip


@CachedLaunch
@triton.jit
def split_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, k_win_ptr, v_win_ptr, k_win_scale_ptr, v_win_scale_ptr, win_table_ptr, win_first_ptr,
    cu_seqlens_ptr, start_ptr, count_ptr, outs_ptr, maxima_ptr, sums_ptr, blocks_ptr, tops_ptr, arrivals_ptr,
    num_queries, num_heads_of_rows, num_rows, num_pages, table_width, end_of_store, win_rows, win_pages, win_table_width, win_end,
    num_blocks, num_tops, factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    D_V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, STRIDES: tl.constexpr, PADDED_STRIDES: tl.constexpr, REACH: tl.constexpr,
    SELECTION_SIZE: tl.constexpr, NUM_SELECTED: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, RAGGED: tl.constexpr, EXACT: tl.constexpr,
    CMP_SPLITS: tl.constexpr, WIN_SPLITS: tl.constexpr, WIN_FROM: tl.constexpr, HEAD_TILES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    SLICES: tl.constexpr, SLICE_BLOCKS: tl.constexpr, WIN_SLICES: tl.constexpr, SLICE_KEYS: tl.constexpr,
    STAGES: tl.constexpr, WIN_STAGES: tl.constexpr, PDL: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Write the partial results of one split of the compressed keys, or of one query's window, or of both.

    Grid (N * G, splits, tiles). The compressed keys have a tile for BLOCK_ROWS rows (a sequence's queries times a group's heads), the window for
    each query and tile of heads; `tiles` is the larger number. The first split of the window has number WIN_FROM. If that is CMP_SPLITS,
    the splits of the window have their own programs; if it is 0, a program takes one split of each kind.

    Weights summed by block go to `blocks_ptr`, float32 (rows of q * H, 2, num_blocks): first the share from a block's own strides, then the share
    from the previous block. The weights of SLICE_BLOCKS blocks are relative to one maximum, which goes to `tops_ptr`, (rows of q * H, num_tops).
    `arrivals_ptr`, (rows of q, G), is set to 0 unless it is None.

    With STARTS_EARLY (and PDL), a program that reads no key of this step waits for `append` only before it writes. Before the wait,
    `append` may still use the memory that the program writes.
    """
    if PDL and not STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    HG: tl.constexpr = H // G
    sequence, group = tl.program_id(0) // G, tl.program_id(0) % G
    split = tl.program_id(1)
    first_row, count, start = _rows_of_step(sequence, cu_seqlens_ptr, start_ptr, count_ptr, num_queries, RAGGED)
    if (split >= WIN_FROM) & (split < WIN_FROM + WIN_SPLITS):
        query, head_tile = tl.program_id(2) // HEAD_TILES, tl.program_id(2) % HEAD_TILES
        if query < count:
            _window_split(
                q_ptr, k_win_ptr, v_win_ptr, k_win_scale_ptr, v_win_scale_ptr, win_table_ptr, win_first_ptr, outs_ptr, maxima_ptr, sums_ptr,
                sequence, group, first_row + query, start, query, head_tile, split - WIN_FROM, num_heads_of_rows,
                win_rows, win_pages, win_table_width, win_end, factor,
                H, G, D_K, K1, K2, D_V, V1, V2, WINDOW, RING, EXACT, WIN_SPLITS, CMP_SPLITS, BLOCK_ROWS, WIN_SLICES, SLICE_KEYS, WIN_STAGES,
                STARTS_EARLY,
            )  # fmt: skip
    if split >= CMP_SPLITS:
        if STARTS_EARLY:
            tl.extra.cuda.gdc_wait()
        return
    row0 = tl.program_id(2) * BLOCK_ROWS
    if row0 >= count * HG:
        if STARTS_EARLY:
            tl.extra.cuda.gdc_wait()
        return
    rows = row0 + tl.arange(0, BLOCK_ROWS)
    queries = rows // HG
    exists = queries < count
    heads = (first_row + queries) * H + group * HG + rows % HG
    t = tl.where(exists, start + queries, -1)
    t_last = start + tl.minimum((row0 + BLOCK_ROWS - 1) // HG, count - 1)
    _first, end = visible_keys(t, False, SIZE, STRIDE, 1)
    _first, last_end = visible_keys(t_last, False, SIZE, STRIDE, 1)
    last_end = tl.minimum(last_end, end_of_store)
    TILE_BLOCKS: tl.constexpr = SLICES * SLICE_BLOCKS
    tiles = tl.cdiv(last_end, TILE_BLOCKS * STRIDES)
    share = tl.cdiv(tiles, CMP_SPLITS)
    chooses = t_last // SELECTION_SIZE >= NUM_SELECTED
    if STARTS_EARLY:
        _first, old_end = visible_keys(start - 1, False, SIZE, STRIDE, 1)
        if tl.minimum((split + 1) * share * (TILE_BLOCKS * STRIDES), last_end) > old_end:
            tl.extra.cuda.gdc_wait()
    slices = tl.arange(0, SLICES)
    column = tl.arange(0, SLICE_BLOCKS * PADDED_STRIDES)
    stride = column % PADDED_STRIDES
    in_tile = (slices * (SLICE_BLOCKS * STRIDES))[:, None] + (column // PADDED_STRIDES * STRIDES + stride)[None, :]
    strides = tl.arange(0, PADDED_STRIDES)
    own_weight = tl.where(strides < STRIDES, tl.minimum(REACH, STRIDES - strides), 0).to(tl.float32)
    next_weight = tl.where(strides < STRIDES, tl.maximum(0, strides + REACH - STRIDES), 0).to(tl.float32)
    in_blocks = (slices * SLICE_BLOCKS)[:, None] + tl.arange(0, SLICE_BLOCKS)[None, :]
    q1, q2 = _load_queries(q_ptr, heads, exists, D_K, K1, K2, SLICES)
    acc1, acc2, row_max, row_sum = _start(BLOCK_ROWS, V1, V2, SLICES)
    for tile in tl.range(split * share, tl.minimum((split + 1) * share, tiles), num_stages=STAGES):
        keys = tile * (TILE_BLOCKS * STRIDES) + in_tile
        is_key = (stride < STRIDES)[None, :] & (keys < last_end)
        key_rows = _store_rows(sequence, keys, is_key, table_ptr, None, num_rows, num_pages, table_width, False)
        is_visible = is_key[:, None, :] & (keys[:, None, :] < end[None, :, None])
        acc1, acc2, row_max, row_sum, weights = _fold(
            q1, q2, acc1, acc2, row_max, row_sum, k_ptr, v_ptr, None, None, key_rows, is_key, is_visible, group, factor,
            G, D_K, K1, K2, D_V, V1, V2, EXACT,
        )  # fmt: skip
        if chooses:
            # the pipeline issues the loads of the first tiles before the loop, so these loads do not wait
            if STARTS_EARLY and tile == split * share:
                tl.extra.cuda.gdc_wait()
            by_block = tl.reshape(weights, (SLICES, BLOCK_ROWS, SLICE_BLOCKS, PADDED_STRIDES))
            blocks = tile * TILE_BLOCKS + in_blocks[:, None, :]
            target = blocks_ptr + (heads * (2 * num_blocks))[None, :, None] + blocks
            tl.store(target, tl.sum(by_block * own_weight, 3), mask=exists[None, :, None] & (blocks < num_blocks))
            if REACH > 1:
                reaching = tl.sum(by_block * next_weight, 3)
                tl.store(target + num_blocks + 1, reaching, mask=exists[None, :, None] & (blocks + 1 < num_blocks))
            tl.store(tops_ptr + (heads * num_tops)[None, :] + (tile * SLICES + slices)[:, None], row_max, mask=exists[None, :])
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    if arrivals_ptr is not None and split == 0:
        tl.store(arrivals_ptr + (first_row + queries) * G + group, 0, mask=exists & (rows % HG == 0))
    _store_partial(
        outs_ptr, maxima_ptr, sums_ptr, split, num_heads_of_rows, heads, exists, acc1, acc2, row_max, row_sum, D_V, V1, V2, EXACT
    )  # fmt: skip


@triton.jit
def _importance(
    maxima_ptr, sums_ptr, blocks_ptr, tops_ptr, row, group, first_top, last_free, num_heads_of_rows, num_blocks, num_tops,
    H: tl.constexpr, HG: tl.constexpr, REACH: tl.constexpr, EXACT: tl.constexpr, CMP_SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
    SUMMED_HEADS: tl.constexpr, TOPS: tl.constexpr, SLICE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the importance of one query's blocks from first_top * SLICE_BLOCKS on (Eq. 9, 10), float32 (TOPS * SLICE_BLOCKS,).

    Importance is the sum over the group's heads of their normalised weights by block. For blocks after `last_free` the result is arbitrary.
    """
    splits, tops = tl.arange(0, PADDED_SPLITS), first_top + tl.arange(0, TOPS)
    in_slice = tl.arange(0, SLICE_BLOCKS)
    blocks = (tops * SLICE_BLOCKS)[:, None] + in_slice[None, :]
    importance = tl.zeros([TOPS, SLICE_BLOCKS], tl.float32)
    for first in range(0, HG, SUMMED_HEADS):
        in_group = first + tl.arange(0, SUMMED_HEADS)
        is_head = in_group < HG
        heads = row * H + group * HG + in_group
        # all loads are issued before the computation
        source = blocks_ptr + (heads * (2 * num_blocks))[:, None, None] + blocks[None, :, :]
        top_ptr = tops_ptr + (heads * num_tops)[:, None] + tops[None, :]
        has_top = is_head[:, None] & (tops * SLICE_BLOCKS <= last_free)[None, :]
        # all blocks of a slice are read together. Blocks after the last free one were written as well, but are not used
        share = tl.load(source, mask=has_top[:, :, None], other=0.0)
        top = tl.load(top_ptr, mask=has_top, other=float("-inf"))
        reaching, before = share, top
        if REACH > 1:
            reaching = tl.load(source + num_blocks, mask=has_top[:, :, None], other=0.0)
            before = tl.load(top_ptr - 1, mask=has_top & (tops > 0)[None, :], other=float("-inf"))
        offset = splits.to(tl.int64)[None, :] * num_heads_of_rows + heads[:, None]
        is_split = is_head[:, None] & (splits < CMP_SPLITS)[None, :]
        maxima = tl.load(maxima_ptr + offset, mask=is_split, other=float("-inf"))
        sums = tl.load(sums_ptr + offset, mask=is_split, other=0.0)
        largest = tl.max(maxima, 1)
        total = tl.sum(tl.where(sums > 0, sums * exponential(maxima - largest[:, None], EXACT), 0.0), 1)
        inverse = tl.where(is_head, 1.0 / total, 0.0)[:, None]
        largest = tl.where(is_head, largest, 0.0)[:, None]
        scale = exponential(top - largest, EXACT) * inverse
        share *= scale[:, :, None]
        if REACH > 1:
            # the first block has no previous block, so its share was never written
            reaching = tl.where((blocks > 0)[None, :, :], reaching, 0.0)
            scale_before = exponential(before - largest, EXACT) * inverse
            share += reaching * tl.where((in_slice == 0)[None, None, :], scale_before[:, :, None], scale[:, :, None])
        importance += tl.sum(share, 0)
    # Triton 3.6 reduces wrongly over a layout in which some lanes in the middle hold copies, and the sum over heads may have such a layout.
    # The gather changes it: its result has the layout of its indices
    return tl.gather(tl.reshape(importance, (TOPS * SLICE_BLOCKS,)), tl.arange(0, TOPS * SLICE_BLOCKS), 0)


@triton.jit
def _store_choice(
    importance, target, slots, own, num_blocks, NUM_SELECTED: tl.constexpr, NUM_INITIAL: tl.constexpr, NUM_LOCAL: tl.constexpr,
):  # fmt: skip
    """Write the ascending choice of a row with own block `own`, by the importance of blocks 0, 1, ...; `target` holds the addresses of `slots`."""
    BLOCKS: tl.constexpr = importance.shape[0]
    blocks = tl.arange(0, BLOCKS)
    is_free = (blocks >= NUM_INITIAL) & (blocks <= own - NUM_LOCAL) & (blocks < num_blocks)
    words, ends = chosen_words(importance, is_free, NUM_SELECTED - NUM_INITIAL - NUM_LOCAL, BLOCKS)
    tl.store(target, blocks_at(slots, words, ends, own, NUM_SELECTED, NUM_INITIAL, NUM_LOCAL), mask=slots < NUM_SELECTED)


@CachedLaunch
@triton.jit
def choose_kernel(
    gates_ptr, outs_ptr, maxima_ptr, sums_ptr, blocks_ptr, tops_ptr, importance_ptr, arrivals_ptr,
    indices_ptr, counters_ptr, out_ptr, cu_seqlens_ptr, start_ptr, count_ptr,
    num_queries, num_sequences, search_steps, num_heads_of_rows, num_blocks, num_tops,
    H: tl.constexpr, G: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr, REACH: tl.constexpr,
    SELECTION_SIZE: tl.constexpr, NUM_SELECTED: tl.constexpr, NUM_INITIAL: tl.constexpr, NUM_LOCAL: tl.constexpr,
    RAGGED: tl.constexpr, EXACT: tl.constexpr, CMP_SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
    WIN_SPLITS: tl.constexpr, HEAD_TILES: tl.constexpr,
    SUMMED_HEADS: tl.constexpr, MERGED_HEADS: tl.constexpr, PARTS: tl.constexpr, TOPS: tl.constexpr, SLICE_BLOCKS: tl.constexpr, SLOTS: tl.constexpr,
    CHOOSERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the blocks of one row of q and one group, or merge two branches of MERGED_HEADS heads; grid (rows * G * PARTS,).

    The first CHOOSERS of the PARTS programs of a row and group choose. If there are several, each adds up the heads for TOPS * SLICE_BLOCKS
    blocks and writes the sums to `importance_ptr`, (rows, G, CHOOSERS * TOPS * SLICE_BLOCKS). They count arrivals in `arrivals_ptr`, (rows, G), and
    the last to arrive chooses. The other programs merge: they write the compressed branch plus the window, each times its gate, to the slot
    of `outs_ptr` after the slots of these two branches. An invalid row chooses nothing, and its output is 0. The counters of
    `attend_kernel` are set to 0.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HG: tl.constexpr = H // G
    part, number = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    group, index = number % G, number // G
    row = wide(index)
    if RAGGED:
        sequence = find_sequence(index, cu_seqlens_ptr, num_sequences, search_steps)
        counts = sequence < num_sequences
        sequence = tl.minimum(sequence, num_sequences - 1)
        query = index - tl.load(cu_seqlens_ptr + sequence)
    else:
        sequence, query = index // num_queries, index % num_queries
        count = num_queries
        if count_ptr is not None:
            count = tl.load(count_ptr + sequence)
        counts = query < count
    t = tl.load(start_ptr + sequence) + query
    if PDL:
        tl.extra.cuda.gdc_wait()
    if part >= CHOOSERS:
        if counts:
            in_group = (part - CHOOSERS) * MERGED_HEADS + tl.arange(0, MERGED_HEADS)
            heads, exists = row * H + group * HG + in_group, in_group < HG
            # the order of the gates: cmp, slc, win
            gates = gates_ptr + 3 * heads
            both = _gated(
                outs_ptr, maxima_ptr, sums_ptr, gates, heads, exists, num_heads_of_rows, 0, CMP_SPLITS, D_V, WIDTH, EXACT
            )  # fmt: skip
            both += _gated(
                outs_ptr, maxima_ptr, sums_ptr, gates + 2, heads, exists, num_heads_of_rows, CMP_SPLITS, WIN_SPLITS, D_V, WIDTH, EXACT
            )  # fmt: skip
            target = outs_ptr + (((CMP_SPLITS + WIN_SPLITS) * wide(num_heads_of_rows) + heads) * D_V)[:, None]
            columns = tl.arange(0, WIDTH)
            tl.store(target + columns[None, :], both, mask=exists[:, None] & (columns < D_V)[None, :])
        return
    BLOCKS: tl.constexpr = TOPS * SLICE_BLOCKS
    slots = tl.arange(0, SLOTS)
    target = indices_ptr + (row * G + group) * NUM_SELECTED + slots
    own = tl.where(counts, t // SELECTION_SIZE, -1)
    if own < NUM_SELECTED:
        tl.store(target, tl.where(slots <= own, slots, -1), mask=slots < NUM_SELECTED)
    else:
        first_top, last_free = 0, tl.minimum(own - NUM_LOCAL, num_blocks - 1)
        if CHOOSERS > 1:
            first_top = part * TOPS
        importance = _importance(
            maxima_ptr, sums_ptr, blocks_ptr, tops_ptr, row, group, first_top, last_free, num_heads_of_rows,
            num_blocks, num_tops, H, HG, REACH, EXACT, CMP_SPLITS, PADDED_SPLITS, SUMMED_HEADS, TOPS, SLICE_BLOCKS,
        )  # fmt: skip
        if CHOOSERS == 1:
            _store_choice(importance, target, slots, own, num_blocks, NUM_SELECTED, NUM_INITIAL, NUM_LOCAL)
        # programs whose blocks all come after the last free block have nothing to add up
        elif part * BLOCKS <= last_free:
            source = importance_ptr + (row * G + group) * (CHOOSERS * BLOCKS)
            tl.store(source + part * BLOCKS + tl.arange(0, BLOCKS), importance)
            # every warp's sums are written before the program counts as arrived
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals_ptr + row * G + group, 1, sem="acq_rel", scope="gpu")
            if arrived == last_free // BLOCKS:
                blocks = tl.arange(0, CHOOSERS * BLOCKS)
                whole = tl.load(source + blocks, mask=blocks <= last_free, other=0.0, cache_modifier=".cg")
                _store_choice(whole, target, slots, own, num_blocks, NUM_SELECTED, NUM_INITIAL, NUM_LOCAL)
    for head_tile in range(HEAD_TILES):
        tl.store(counters_ptr + (row * G + group) * HEAD_TILES + head_tile, 0)
    if not counts:
        columns = tl.arange(0, WIDTH)
        for in_group in range(HG):
            target_out = out_ptr + (row * H + group * HG + in_group) * D_V + columns
            tl.store(target_out, tl.zeros([WIDTH], out_ptr.dtype.element_ty), mask=columns < D_V)


@CachedLaunch
@triton.jit
def attend_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
    k_win_ptr, v_win_ptr, k_win_scale_ptr, v_win_scale_ptr, win_table_ptr, win_first_ptr, cu_seqlens_ptr, start_ptr, count_ptr,
    indices_ptr, gates_ptr, outs_ptr, maxima_ptr, sums_ptr, counters_ptr, out_ptr,
    num_queries, num_heads_of_rows, num_rows, num_pages, table_width, end_of_store, win_rows, win_pages, win_table_width, win_end, factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    D_V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, WIDTH: tl.constexpr,
    SELECTION_SIZE: tl.constexpr, NUM_SELECTED: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, RAGGED: tl.constexpr, EXACT: tl.constexpr,
    FIRST_SLOT: tl.constexpr, WIN_SPLITS: tl.constexpr, SLC_SPLITS: tl.constexpr, SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr,
    HEAD_TILES: tl.constexpr, BLOCK_ROWS: tl.constexpr, SLICES: tl.constexpr, WIN_SLICES: tl.constexpr, SLICE_KEYS: tl.constexpr,
    STAGES: tl.constexpr, WIN_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend to SLOTS blocks that one query chose, or to one split of its window; the last program of a query writes the output.

    Grid (N * G, queries * HEAD_TILES, WIN_SPLITS + SLC_SPLITS). Partial outputs go to the slots from FIRST_SLOT on, those of the window first;
    slot FIRST_SLOT - 1 holds the sum of the other branches. `choose_kernel` has written the output of invalid rows. Partial outputs are always
    added in the same order, whichever program is last.

    WIN_SPLITS is 0 if `split_kernel` reads the window. Otherwise the programs of the window run while `choose_kernel` runs: `append` ended
    before `split_kernel` did, so they wait only before they count as arrived.
    """
    HG: tl.constexpr = H // G
    sequence, group = tl.program_id(0) // G, tl.program_id(0) % G
    query, head_tile = tl.program_id(1) // HEAD_TILES, tl.program_id(1) % HEAD_TILES
    split = tl.program_id(2)
    first_row, count, start = _rows_of_step(sequence, cu_seqlens_ptr, start_ptr, count_ptr, num_queries, RAGGED)
    if query >= count:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    t = start + query
    row = first_row + query
    in_group = head_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = in_group < HG
    heads = row * H + group * HG + in_group
    if split < WIN_SPLITS:
        _window_split(
            q_ptr, k_win_ptr, v_win_ptr, k_win_scale_ptr, v_win_scale_ptr, win_table_ptr, win_first_ptr, outs_ptr, maxima_ptr, sums_ptr,
            sequence, group, row, start, query, head_tile, split, num_heads_of_rows, win_rows, win_pages, win_table_width, win_end, factor,
            H, G, D_K, K1, K2, D_V, V1, V2, WINDOW, RING, EXACT, WIN_SPLITS, FIRST_SLOT, BLOCK_ROWS, WIN_SLICES, SLICE_KEYS, WIN_STAGES, False,
        )  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_wait()
    else:
        slices = tl.arange(0, SLICES)
        q1, q2 = _load_queries(q_ptr, heads, exists, D_K, K1, K2, SLICES)
        if PDL:
            tl.extra.cuda.gdc_wait()
        slots = (split - WIN_SPLITS) * SLOTS + tl.arange(0, PADDED_SLOTS)
        is_slot = (tl.arange(0, PADDED_SLOTS) < SLOTS) & (slots < NUM_SELECTED)
        chosen = tl.load(indices_ptr + (row * G + group) * NUM_SELECTED + slots, mask=is_slot, other=-1)
        in_part = (slices * SLICE_KEYS)[:, None] + tl.arange(0, SLICE_KEYS)[None, :]
        PARTS: tl.constexpr = (SELECTION_SIZE + SLICES * SLICE_KEYS - 1) // (SLICES * SLICE_KEYS)
        acc1, acc2, row_max, row_sum = _start(BLOCK_ROWS, V1, V2, SLICES)
        for part in tl.range(0, SLOTS * PARTS, num_stages=STAGES):
            block = tl.sum(tl.where(tl.arange(0, PADDED_SLOTS) == part // PARTS, chosen, 0), 0)
            in_block = part % PARTS * (SLICES * SLICE_KEYS) + in_part
            keys = block * SELECTION_SIZE + in_block
            # no scalar in a mask, because Triton 3.9's interpreter turns it into a number
            is_key = (in_block < tl.where(block >= 0, SELECTION_SIZE, 0)) & (keys <= tl.minimum(t, end_of_store - 1))
            key_rows = _store_rows(sequence, tl.maximum(keys, 0), is_key, table_ptr, None, num_rows, num_pages, table_width, False)
            acc1, acc2, row_max, row_sum, _weights = _fold(
                q1, q2, acc1, acc2, row_max, row_sum, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, key_rows, is_key, is_key[:, None, :], group, factor,
                G, D_K, K1, K2, D_V, V1, V2, EXACT,
            )  # fmt: skip
        _store_partial(
            outs_ptr, maxima_ptr, sums_ptr, FIRST_SLOT + split, num_heads_of_rows, heads, exists, acc1, acc2, row_max, row_sum, D_V, V1, V2, EXACT
        )  # fmt: skip
    # every warp's partial output is written before the program counts as arrived
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_ptr + (row * G + group) * HEAD_TILES + head_tile, 1, sem="acq_rel", scope="gpu")
    if arrived == WIN_SPLITS + SLC_SPLITS - 1:
        columns = tl.arange(0, WIDTH)
        mask = exists[:, None] & (columns < D_V)[None, :]
        others = outs_ptr + (((FIRST_SLOT - 1) * wide(num_heads_of_rows) + heads) * D_V)[:, None]
        total = tl.load(others + columns[None, :], mask=mask, other=0.0)
        # the order of the gates: cmp, slc, win
        gates = gates_ptr + 3 * heads
        if WIN_SPLITS > 0:
            total += _gated(
                outs_ptr, maxima_ptr, sums_ptr, gates + 2, heads, exists, num_heads_of_rows, FIRST_SLOT, WIN_SPLITS, D_V, WIDTH, EXACT
            )  # fmt: skip
        total += _gated(
            outs_ptr, maxima_ptr, sums_ptr, gates + 1, heads, exists, num_heads_of_rows, FIRST_SLOT + WIN_SPLITS, SLC_SPLITS, D_V, WIDTH, EXACT
        )  # fmt: skip
        tl.store(out_ptr + (heads * D_V)[:, None] + columns[None, :], cast(total, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated(
    outs_ptr, maxima_ptr, sums_ptr, gate_ptr, heads, exists, num_heads_of_rows,
    FIRST: tl.constexpr, SPLITS: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return the output of one branch, merged from splits FIRST .. FIRST + SPLITS - 1, times its gate (heads, WIDTH); 0 if a row sees no key.

    Splits are added one after another, so that no sum goes over threads. They are read from L2, because other multiprocessors wrote them.
    """
    columns = tl.arange(0, WIDTH)
    mask = exists[:, None] & (columns < D_V)[None, :]
    largest = tl.full([heads.shape[0]], float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        slot = (FIRST + split) * wide(num_heads_of_rows) + heads
        largest = tl.maximum(largest, tl.load(maxima_ptr + slot, mask=exists, other=float("-inf"), cache_modifier=".cg"))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros([heads.shape[0]], tl.float32)
    merged = tl.zeros([heads.shape[0], WIDTH], tl.float32)
    for split in tl.static_range(SPLITS):
        slot = (FIRST + split) * wide(num_heads_of_rows) + heads
        maxima = tl.load(maxima_ptr + slot, mask=exists, other=float("-inf"), cache_modifier=".cg")
        kept = exponential(maxima - shift, EXACT)
        total += tl.where(maxima > float("-inf"), tl.load(sums_ptr + slot, mask=exists, other=0.0, cache_modifier=".cg") * kept, 0.0)
        out = tl.load(outs_ptr + (slot * D_V)[:, None] + columns[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        merged += out * kept[:, None]
    gate = tl.load(gate_ptr, mask=exists, other=0.0).to(tl.float32)
    return merged * tl.where(total > 0, gate / total, 0.0)[:, None]
