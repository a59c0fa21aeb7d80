"""Eq. 5 for a few rows of each sequence over stores: three launches, each cut so that the whole GPU reads.

1. `split_kernel` cuts the compressed keys, and those of the window, into splits. Each gives a partial output with its maximum and
   sum, and those of the compressed keys each head's weights summed by block, relative to the maximum when they were computed.
2. `selected_kernel` normalises these sums, adds up a group's heads, chooses blocks, and attends to its share of them.
3. `combine_kernel` merges the splits of every branch and adds the branches up, times their gates.

The number of splits does not depend on lengths, so that one CUDA graph serves all of them. Keys lie in rows, pages or a ring, also as FP8 numbers
with a scale for each token and KV head. Nothing behind a sequence's last token is read, and nothing outside the stores, wherever a row stands.
"""

import triton
import triton.language as tl

from nsa_kernels_triton.cached_launch import CachedLaunch
from nsa_kernels_triton.choice.kernels import blocks_at, chosen_words
from nsa_kernels_triton.tiles import cast, dot, exponential, find_sequence, load_columns, store_columns, visible_keys, wide


@triton.jit
def _rows_of_step(sequence, cu_seqlens_ptr, start_ptr, count_ptr, num_queries, RAGGED: tl.constexpr):
    """Return a sequence's first row of q, the rows that count, and the position of the first."""
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
    if table_ptr is not None:
        page = tl.load(table_ptr + wide(sequence) * table_width + positions // num_rows, mask=mask, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        return page.to(tl.int64) * num_rows + positions % num_rows
    if RING:
        return wide(sequence) * num_rows + positions % num_rows
    if first_ptr is not None:
        positions -= tl.load(first_ptr + sequence)
    return wide(sequence) * num_rows + positions


@triton.jit
def _start(
    q_ptr, heads, exists,
    D_K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Return a tile of q in its parts, and the softmax before the first key: acc1, acc2, row_max, row_sum. A second part of 0 is the first."""
    q1 = load_columns(q_ptr, heads * D_K, exists, 0, K1, D_K, True)
    q2 = q1
    if K2 > 0:
        q2 = load_columns(q_ptr, heads * D_K, exists, K1, K2, D_K, True)
    acc1 = tl.zeros([BLOCK_ROWS, V1], tl.float32)
    acc2 = acc1
    if V2 > 0:
        acc2 = tl.zeros([BLOCK_ROWS, V2], tl.float32)
    return q1, q2, acc1, acc2, tl.full([BLOCK_ROWS], float("-inf"), tl.float32), tl.zeros([BLOCK_ROWS], tl.float32)


@triton.jit
def _fold(
    q1, q2, acc1, acc2, row_max, row_sum, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, key_rows, is_key, is_visible, group, factor,
    G: tl.constexpr, D_K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, D_V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the running softmax; return acc1, acc2, row_max, row_sum and the tile's weights (rows, keys)."""
    dtype: tl.constexpr = q1.dtype
    k_rows, v_rows = (key_rows * G + group) * D_K, (key_rows * G + group) * D_V
    k1 = load_columns(k_ptr, k_rows, is_key, 0, K1, D_K, True).to(dtype)
    scores = dot(q1, tl.trans(k1), tl.zeros([q1.shape[0], k1.shape[0]], tl.float32))
    if K2 > 0:
        scores = dot(q2, tl.trans(load_columns(k_ptr, k_rows, is_key, K1, K2, D_K, True).to(dtype)), scores)
    if k_scale_ptr is not None:
        scores *= tl.load(k_scale_ptr + key_rows * G + group, mask=is_key, other=0.0)[None, :]
    scores = tl.where(is_visible, scores * factor, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exponential(scores - shift[:, None], EXACT)
    kept = exponential(row_max - shift, EXACT)
    row_sum = row_sum * kept + tl.sum(weights, 1)
    shares = weights
    if v_scale_ptr is not None:
        shares *= tl.load(v_scale_ptr + key_rows * G + group, mask=is_key, other=0.0)[None, :]
    shares = cast(shares, dtype)
    acc1 = dot(shares, load_columns(v_ptr, v_rows, is_key, 0, V1, D_V, True).to(dtype), acc1 * kept[:, None])
    if V2 > 0:
        acc2 = dot(shares, load_columns(v_ptr, v_rows, is_key, V1, V2, D_V, True).to(dtype), acc2 * kept[:, None])
    return acc1, acc2, new_max, row_sum, weights


@triton.jit
def _store_partial(
    outs_ptr, maxima_ptr, sums_ptr, heads, exists, acc1, acc2, row_max, row_sum,
    D_V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
):  # fmt: skip
    """Write a split's results for rows at `heads`. A row that sees nothing is known by its sum of 0; its output is not written."""
    tl.store(maxima_ptr + heads, row_max, mask=exists)
    tl.store(sums_ptr + heads, row_sum, mask=exists)
    sees = exists & (row_sum > 0)
    store_columns(outs_ptr, heads * D_V, sees, acc1, 0, V1, D_V)
    if V2 > 0:
        store_columns(outs_ptr, heads * D_V, sees, acc2, V1, V2, D_V)


@CachedLaunch
@triton.jit
def split_kernel(
    q_ptr, k_cmp_ptr, v_cmp_ptr, k_win_ptr, v_win_ptr, k_scale_ptr, v_scale_ptr, cmp_table_ptr, win_table_ptr, win_first_ptr,
    cu_seqlens_ptr, start_ptr, count_ptr, outs_ptr, maxima_ptr, sums_ptr, blocks_ptr, tops_ptr,
    num_queries, num_heads_of_rows, cmp_rows, win_rows, cmp_pages, win_pages, cmp_table_width, win_table_width, cmp_end, win_end,
    num_blocks, num_tiles, factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    D_V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, STRIDES: tl.constexpr, PADDED_STRIDES: tl.constexpr, REACH: tl.constexpr,
    SELECTION_SIZE: tl.constexpr, NUM_SELECTED: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, RAGGED: tl.constexpr,
    EXACT: tl.constexpr, CMP_SPLITS: tl.constexpr, WIN_SPLITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the partial results of one split of the compressed keys or of the window; grid (N * G, CMP_SPLITS + WIN_SPLITS, tiles of rows).

    A sequence's rows are its queries times a group's heads. Weights summed by block go to `blocks_ptr`, float32 (rows of q * H, 2,
    num_blocks): first what a block gets of its own strides, then what reaches over from its last ones into the next block. The maximum that
    they are relative to goes to `tops_ptr`, (rows of q * H, num_tiles), for each tile of BLOCK_BLOCKS blocks.
    """
    HG: tl.constexpr = H // G
    sequence, group = tl.program_id(0) // G, tl.program_id(0) % G
    split = tl.program_id(1)
    first_row, count, start = _rows_of_step(sequence, cu_seqlens_ptr, start_ptr, count_ptr, num_queries, RAGGED)
    row0 = tl.program_id(2) * BLOCK_ROWS
    if row0 >= count * HG:
        return
    rows = row0 + tl.arange(0, BLOCK_ROWS)
    queries = rows // HG
    exists = queries < count
    heads = (first_row + queries) * H + group * HG + rows % HG
    t = tl.where(exists, start + queries, -1)
    t_first = start + row0 // HG
    t_last = start + tl.minimum((row0 + BLOCK_ROWS - 1) // HG, count - 1)
    q1, q2, acc1, acc2, row_max, row_sum = _start(q_ptr, heads, exists, D_K, K1, K2, V1, V2, BLOCK_ROWS)
    BLOCK_KEYS: tl.constexpr = BLOCK_BLOCKS * PADDED_STRIDES
    column = tl.arange(0, BLOCK_KEYS)
    if split < CMP_SPLITS:
        _first, end = visible_keys(t, False, SIZE, STRIDE, 1)
        _first, last_end = visible_keys(t_last, False, SIZE, STRIDE, 1)
        last_end = tl.minimum(last_end, cmp_end)
        tiles = tl.cdiv(last_end, BLOCK_BLOCKS * STRIDES)
        share = tl.cdiv(tiles, CMP_SPLITS)
        chooses = t_last // SELECTION_SIZE >= NUM_SELECTED
        stride = column % PADDED_STRIDES
        in_tile = column // PADDED_STRIDES * STRIDES + stride
        strides = tl.arange(0, PADDED_STRIDES)
        own_weight = tl.where(strides < STRIDES, tl.minimum(REACH, STRIDES - strides), 0).to(tl.float32)
        next_weight = tl.where(strides < STRIDES, tl.maximum(0, strides + REACH - STRIDES), 0).to(tl.float32)
        in_blocks = tl.arange(0, BLOCK_BLOCKS)
        for tile in tl.range(split * share, tl.minimum((split + 1) * share, tiles)):
            keys = tile * (BLOCK_BLOCKS * STRIDES) + in_tile
            is_key = (stride < STRIDES) & (keys < last_end)
            key_rows = _store_rows(sequence, keys, is_key, cmp_table_ptr, None, cmp_rows, cmp_pages, cmp_table_width, False)
            is_visible = is_key[None, :] & (keys[None, :] < end[:, None])
            acc1, acc2, row_max, row_sum, weights = _fold(
                q1, q2, acc1, acc2, row_max, row_sum, k_cmp_ptr, v_cmp_ptr, None, None, key_rows, is_key, is_visible, group, factor,
                G, D_K, K1, K2, D_V, V1, V2, EXACT,
            )  # fmt: skip
            if chooses:
                by_block = tl.reshape(weights, (BLOCK_ROWS, BLOCK_BLOCKS, PADDED_STRIDES))
                blocks = tile * BLOCK_BLOCKS + in_blocks
                mask = exists[:, None] & (blocks < num_blocks)[None, :]
                target = blocks_ptr + (heads * (2 * num_blocks))[:, None] + blocks[None, :]
                tl.store(target, tl.sum(by_block * own_weight[None, None, :], 2), mask=mask)
                if REACH > 1:
                    tl.store(target + num_blocks, tl.sum(by_block * next_weight[None, None, :], 2), mask=mask)
                tl.store(tops_ptr + heads * num_tiles + tile, row_max, mask=exists)
    else:
        first, _end = visible_keys(t_first, True, SIZE, STRIDE, WINDOW)
        last_held = win_end - 1
        if win_first_ptr is not None:
            first_held = tl.load(win_first_ptr + sequence)
            first = tl.maximum(first, first_held)
            last_held += first_held
        tiles = tl.cdiv(t_last + 1 - first, BLOCK_KEYS)
        share = tl.cdiv(tiles, WIN_SPLITS)
        number = split - CMP_SPLITS
        for tile in tl.range(number * share, tl.minimum((number + 1) * share, tiles)):
            keys = first + tile * BLOCK_KEYS + column
            is_key = keys <= tl.minimum(t_last, last_held)
            key_rows = _store_rows(sequence, keys, is_key, win_table_ptr, win_first_ptr, win_rows, win_pages, win_table_width, RING)
            is_visible = is_key[None, :] & (keys[None, :] <= t[:, None]) & (keys[None, :] > t[:, None] - WINDOW)
            acc1, acc2, row_max, row_sum, _weights = _fold(
                q1, q2, acc1, acc2, row_max, row_sum, k_win_ptr, v_win_ptr, k_scale_ptr, v_scale_ptr, key_rows, is_key, is_visible, group,
                factor, G, D_K, K1, K2, D_V, V1, V2, EXACT,
            )  # fmt: skip
    place = wide(split) * num_heads_of_rows
    _store_partial(
        outs_ptr + place * D_V, maxima_ptr + place, sums_ptr + place, heads, exists, acc1, acc2, row_max, row_sum, D_V, V1, V2
    )  # fmt: skip


@triton.jit
def _importance(
    maxima_ptr, sums_ptr, blocks_ptr, tops_ptr, row, group, is_free, num_heads_of_rows, num_blocks, num_tiles,
    H: tl.constexpr, HG: tl.constexpr, REACH: tl.constexpr, EXACT: tl.constexpr, CMP_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
    SUMMED_HEADS: tl.constexpr, BLOCK_BLOCKS: tl.constexpr, TILE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the importance of the free blocks of one query (Eq. 9, 10): its heads' weights by block, normalised, and summed over a group."""
    blocks = tl.arange(0, BLOCK_BLOCKS)
    splits = tl.arange(0, SPLITS)
    importance = tl.zeros([BLOCK_BLOCKS], tl.float32)
    for first in range(0, HG, SUMMED_HEADS):
        in_group = first + tl.arange(0, SUMMED_HEADS)
        is_head = in_group < HG
        heads = row * H + group * HG + in_group
        mask = is_head[:, None] & (splits < CMP_SPLITS)[None, :]
        place = splits.to(tl.int64)[None, :] * num_heads_of_rows + heads[:, None]
        maxima = tl.load(maxima_ptr + place, mask=mask, other=float("-inf"))
        sums = tl.load(sums_ptr + place, mask=mask, other=0.0)
        largest = tl.max(maxima, 1)
        total = tl.sum(tl.where(sums > 0, sums * exponential(maxima - largest[:, None], EXACT), 0.0), 1)
        inverse = tl.where(is_head, 1.0 / total, 0.0)
        mask = is_head[:, None] & is_free[None, :]
        source = blocks_ptr + (heads * (2 * num_blocks))[:, None] + blocks[None, :]
        tops = tops_ptr + (heads * num_tiles)[:, None]
        top = tl.load(tops + (blocks // TILE_BLOCKS)[None, :], mask=mask, other=float("-inf"))
        share = tl.load(source, mask=mask, other=0.0) * exponential(top - largest[:, None], EXACT)
        if REACH > 1:
            mask = mask & (blocks > 0)[None, :]
            top = tl.load(tops + (tl.maximum(blocks - 1, 0) // TILE_BLOCKS)[None, :], mask=mask, other=float("-inf"))
            reaching = tl.load(source + num_blocks - 1, mask=mask, other=0.0)
            share += reaching * exponential(top - largest[:, None], EXACT)
        importance += tl.sum(tl.where(is_head[:, None], share * inverse[:, None], 0.0), 0)
    return importance


@CachedLaunch
@triton.jit
def selected_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, cu_seqlens_ptr, start_ptr, count_ptr,
    outs_ptr, maxima_ptr, sums_ptr, blocks_ptr, tops_ptr, indices_ptr,
    num_queries, num_heads_of_rows, num_rows, num_pages, table_width, slc_end, num_blocks, num_tiles, factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    D_V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, REACH: tl.constexpr,
    SELECTION_SIZE: tl.constexpr, NUM_SELECTED: tl.constexpr, NUM_INITIAL: tl.constexpr, NUM_LOCAL: tl.constexpr,
    RAGGED: tl.constexpr, EXACT: tl.constexpr, CMP_SPLITS: tl.constexpr, SPLITS: tl.constexpr, FIRST_SPLIT: tl.constexpr,
    SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr, HEAD_TILES: tl.constexpr, SUMMED_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_BLOCKS: tl.constexpr, TILE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Choose the blocks of one query and group, and attend to SLOTS of them; grid (N * G, queries * HEAD_TILES, splits).

    Every program of a query makes the same choice, so that none waits for another. A row that does not count chooses nothing.
    """
    HG: tl.constexpr = H // G
    sequence, group = tl.program_id(0) // G, tl.program_id(0) % G
    query, head_tile = tl.program_id(1) // HEAD_TILES, tl.program_id(1) % HEAD_TILES
    split = tl.program_id(2)
    first_row, count, start = _rows_of_step(sequence, cu_seqlens_ptr, start_ptr, count_ptr, num_queries, RAGGED)
    row = first_row + query
    slots = split * SLOTS + tl.arange(0, PADDED_SLOTS)
    is_slot = (tl.arange(0, PADDED_SLOTS) < SLOTS) & (slots < NUM_SELECTED)
    target = indices_ptr + (row * G + group) * NUM_SELECTED + slots
    if query >= count:
        # ragged rows belong to the next sequence
        if not RAGGED:
            tl.store(target, tl.full([PADDED_SLOTS], -1, tl.int32), mask=is_slot & (head_tile == 0))
        return
    t = start + query
    own = t // SELECTION_SIZE
    chosen = tl.where(slots <= own, slots, -1)
    if own >= NUM_SELECTED:
        all_blocks = tl.arange(0, BLOCK_BLOCKS)
        is_free = (all_blocks >= NUM_INITIAL) & (all_blocks <= own - NUM_LOCAL) & (all_blocks < num_blocks)
        importance = _importance(
            maxima_ptr, sums_ptr, blocks_ptr, tops_ptr, row, group, is_free, num_heads_of_rows, num_blocks, num_tiles,
            H, HG, REACH, EXACT, CMP_SPLITS, SPLITS, SUMMED_HEADS, BLOCK_BLOCKS, TILE_BLOCKS,
        )  # fmt: skip
        words, ends = chosen_words(importance, is_free, NUM_SELECTED - NUM_INITIAL - NUM_LOCAL, BLOCK_BLOCKS)
        chosen = blocks_at(slots, words, ends, own, NUM_SELECTED, NUM_INITIAL, NUM_LOCAL)
    chosen = tl.where(is_slot, chosen, -1)
    tl.store(target, chosen, mask=is_slot & (head_tile == 0))

    rows = tl.arange(0, BLOCK_ROWS)
    in_group = head_tile * BLOCK_ROWS + rows
    exists = in_group < HG
    heads = row * H + group * HG + in_group
    q1, q2, acc1, acc2, row_max, row_sum = _start(q_ptr, heads, exists, D_K, K1, K2, V1, V2, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_KEYS)
    PARTS: tl.constexpr = (SELECTION_SIZE + BLOCK_KEYS - 1) // BLOCK_KEYS
    for part in tl.range(0, SLOTS * PARTS):
        block = tl.sum(tl.where(tl.arange(0, PADDED_SLOTS) == part // PARTS, chosen, 0), 0)
        in_block = part % PARTS * BLOCK_KEYS + column
        keys = block * SELECTION_SIZE + in_block
        is_key = (block >= 0) & (in_block < SELECTION_SIZE) & (keys <= tl.minimum(t, slc_end - 1))
        key_rows = _store_rows(sequence, tl.maximum(keys, 0), is_key, table_ptr, None, num_rows, num_pages, table_width, False)
        acc1, acc2, row_max, row_sum, _weights = _fold(
            q1, q2, acc1, acc2, row_max, row_sum, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, key_rows, is_key, is_key[None, :], group, factor,
            G, D_K, K1, K2, D_V, V1, V2, EXACT,
        )  # fmt: skip
    place = (FIRST_SPLIT + wide(split)) * num_heads_of_rows
    _store_partial(
        outs_ptr + place * D_V, maxima_ptr + place, sums_ptr + place, heads, exists, acc1, acc2, row_max, row_sum, D_V, V1, V2
    )  # fmt: skip


@CachedLaunch
@triton.jit
def combine_kernel(
    outs_ptr, maxima_ptr, sums_ptr, gates_ptr, cu_seqlens_ptr, count_ptr, out_ptr,
    num_queries, num_sequences, num_heads_of_rows, search_steps,
    H: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr, EXACT: tl.constexpr,
    CMP_SPLITS: tl.constexpr, WIN_SPLITS: tl.constexpr, SLC_SPLITS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Write the gated sum of the branches for one head of one row; grid (rows of q * H,). Rows that do not count get 0."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(0) // H
    columns = tl.arange(0, WIDTH)
    is_column = columns < D_V
    if RAGGED:
        counts = find_sequence(row, cu_seqlens_ptr, num_sequences, search_steps) < num_sequences
    else:
        counts = True
        if count_ptr is not None:
            counts = row % num_queries < tl.load(count_ptr + row // num_queries)
    total = tl.zeros([WIDTH], tl.float32)
    if counts:
        # the order of the gates: cmp, slc, win; that of the splits: cmp, win, slc
        total += _branch(
            outs_ptr, maxima_ptr, sums_ptr, gates_ptr + 3 * head, head, 0, num_heads_of_rows, D_V, WIDTH, EXACT, CMP_SPLITS, SPLITS, BLOCK_SPLITS
        )  # fmt: skip
        total += _branch(
            outs_ptr, maxima_ptr, sums_ptr, gates_ptr + 3 * head + 1, head, CMP_SPLITS + WIN_SPLITS, num_heads_of_rows,
            D_V, WIDTH, EXACT, SLC_SPLITS, SPLITS, BLOCK_SPLITS,
        )  # fmt: skip
        total += _branch(
            outs_ptr, maxima_ptr, sums_ptr, gates_ptr + 3 * head + 2, head, CMP_SPLITS, num_heads_of_rows,
            D_V, WIDTH, EXACT, WIN_SPLITS, SPLITS, BLOCK_SPLITS,
        )  # fmt: skip
    tl.store(out_ptr + head * D_V + columns, cast(total, out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _branch(
    outs_ptr, maxima_ptr, sums_ptr, gate_ptr, head, first_split, num_heads_of_rows,
    D_V: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the output of one branch times its gate, merged from splits first_split .. first_split + NUM_SPLITS - 1."""
    splits = tl.arange(0, SPLITS)
    place = (first_split + splits).to(tl.int64) * num_heads_of_rows + head
    sums = tl.load(sums_ptr + place, mask=splits < NUM_SPLITS, other=0.0)
    maxima = tl.load(maxima_ptr + place, mask=(splits < NUM_SPLITS) & (sums > 0), other=float("-inf"))
    largest = tl.max(maxima, 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.where(sums > 0, sums * exponential(maxima - shift, EXACT), 0.0), 0)
    columns = tl.arange(0, WIDTH)
    merged = tl.zeros([WIDTH], tl.float32)
    for first in range(0, NUM_SPLITS, BLOCK_SPLITS):
        some = first + tl.arange(0, BLOCK_SPLITS)
        places = (first_split + some).to(tl.int64) * num_heads_of_rows + head
        has_some = tl.load(sums_ptr + places, mask=some < NUM_SPLITS, other=0.0) > 0
        weights = exponential(tl.load(maxima_ptr + places, mask=has_some, other=float("-inf")) - shift, EXACT)
        mask = has_some[:, None] & (columns < D_V)[None, :]
        outs = tl.load(outs_ptr + (places * D_V)[:, None] + columns[None, :], mask=mask, other=0.0)
        merged += tl.sum(outs * weights[:, None], 0)
    gate = tl.load(gate_ptr).to(tl.float32)
    return tl.where(total > 0, gate * (merged / total), 0.0)
