"""Kernels that write a step's rows into the stores of a cache, and phi of the blocks that they complete (Eq. 7).

`append_kernel` writes rows, and blocks of `mean` and `conv`. For `mlp` it writes the mean of each block and partial sums of the hidden
layer; these are split over tokens and columns, so that the whole GPU reads the weights. Then `down_kernel` computes the blocks. Nothing waits
for the host: grids depend only on the number of rows of a step, and programs of blocks that are not complete return at once.
"""

import triton
import triton.language as tl

from nsa_kernels_triton.cached_launch import CachedLaunch
from nsa_kernels_triton.tiles import INTERPRETING, cast, dot, wide

LARGEST_FP8 = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal float32, so that a row of zeros has a scale above 0."""


@triton.jit
def _rounded_to_fp8(x):
    """Return x (|x| <= LARGEST_FP8) rounded to the nearest float8_e4m3fn number, ties to even. The interpreter's own cast truncates."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits >> 23) & 0xFF) - 127, -6)
    # adding 1.5 * 2^(20 + exponent + 3) rounds to a multiple of 2^(exponent - 3)
    anchor = ((exponent + 147) << 23 | 0x400000).to(tl.float32, bitcast=True)
    return (x + anchor) - anchor


@triton.jit
def _num_complete(tokens, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Return the number of compressed blocks of a sequence of `tokens` tokens."""
    return tl.where(tokens >= SIZE, (tokens - SIZE) // STRIDE + 1, 0)


@triton.jit
def _slot(sequence, position, may, table_ptr, num_rows, num_pages, table_width):
    """Return the row, int64, of a store that holds `position`, and whether such a row exists. Only elements where `may` is true are looked up.

    The last page of a paged store belongs to no sequence.
    """
    page = wide(sequence)
    if table_ptr is not None:
        page = tl.load(table_ptr + page * table_width + position // num_rows, mask=may, other=-1).to(tl.int64)
        may = may & (page >= 0) & (page < num_pages - 1)
    return page * num_rows + position % num_rows, may


@triton.jit
def _write(
    store_ptr, scale_ptr, table_ptr, new_ptr, sequence, row, num_new, start, count, num_rows, num_pages, table_width,
    G: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Write one row of all KV heads if it is valid and has a slot. A ring buffer keeps only the last rows. Without `new_ptr`, write nothing."""
    if new_ptr is not None:
        size = num_rows
        if table_ptr is not None:
            size = num_rows * table_width
        if not RING:
            count = tl.minimum(count, size - start)
        position = start + row
        if RING:
            position = position % size
        slot, has_slot = _slot(sequence, position, (row < count) & (row >= count - size), table_ptr, num_rows, num_pages, table_width)
        if has_slot:
            groups, columns = tl.arange(0, GROUPS), tl.arange(0, WIDTH)
            mask = (groups < G)[:, None] & (columns < D)[None, :]
            offsets = groups[:, None] * D + columns[None, :]
            x = tl.load(new_ptr + (wide(sequence) * num_new + row) * (G * D) + offsets, mask=mask, other=0.0)
            if scale_ptr is not None:
                x = x.to(tl.float32)
                scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), tl.full([GROUPS], LARGEST_FP8, tl.float32)), SMALLEST_SCALE)
                # a row with NaN gets the scale NaN, as in the reference
                scale = tl.where(tl.sum((x != x).to(tl.int32), 1) > 0, float("nan"), scale)
                tl.store(scale_ptr + slot * G + groups, scale, mask=groups < G)
                x = tl.div_rn(x, tl.broadcast_to(scale[:, None], (GROUPS, WIDTH)))
                # NaN stays
                x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST_FP8), LARGEST_FP8), x)
                if INTERPRETING:
                    x = tl.where(x == x, _rounded_to_fp8(x), x)
            tl.store(store_ptr + slot * (G * D) + offsets, cast(x, store_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tokens(
    raw_ptr, new_ptr, sequence, positions, is_token, start, group, num_new, ring_rows, columns, is_column, G: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Return columns (tokens, columns) of the tokens at `positions`: those before `start` from the ring, the others from the step's rows."""
    is_old = positions < start
    old = ((wide(sequence) * ring_rows + positions % ring_rows) * G + group) * D
    new = ((wide(sequence) * num_new + positions - start) * G + group) * D
    from_ring = tl.load(raw_ptr + old[:, None] + columns[None, :], mask=(is_token & is_old)[:, None] & is_column[None, :], other=0.0)
    fresh = tl.load(
        new_ptr + new[:, None] + columns[None, :], mask=(is_token & (positions >= start))[:, None] & is_column[None, :], other=0.0
    )
    return tl.where(is_old[:, None], from_ring.to(fresh.dtype), fresh)


@triton.jit
def _pooled(
    raw_ptr, new_ptr, taps_ptr, sequence, block, start, group, num_new, ring_rows, FIRST: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return columns FIRST .. END - 1 of one block, rounded to the tokens' dtype: their mean, or their sum weighted by `taps_ptr` (G, D, SIZE)."""
    tokens, columns = tl.arange(0, TOKENS), FIRST + tl.arange(0, WIDTH)
    is_token, is_column = tokens < SIZE, columns < END
    x = _tokens(raw_ptr, new_ptr, sequence, block * STRIDE + tokens, is_token, start, group, num_new, ring_rows, columns, is_column, G, D)
    values = x.to(tl.float32)
    if taps_ptr is None:
        found = tl.sum(values, 0) / SIZE
    else:
        taps = taps_ptr + ((group * D + columns) * SIZE)[None, :] + tokens[:, None]
        weights = cast(tl.load(taps, mask=is_token[:, None] & is_column[None, :], other=0.0), x.dtype)
        found = tl.sum(values * weights.to(tl.float32), 0)
    return cast(found, x.dtype)


@triton.jit
def _rotated(first, second, columns, is_column, positions, frequencies_ptr, factor):
    """Return both halves of blocks (..., columns) in float32, rotated (RoPE) at the position of a block's last token."""
    angles = positions.to(tl.float32)[:, None] * tl.load(frequencies_ptr + columns, mask=is_column, other=0.0)[None, :]
    cos, sin = tl.cos(angles) * factor, tl.sin(angles) * factor
    first, second = first.to(tl.float32), second.to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _pool(
    raw_ptr, new_ptr, taps_ptr, target_ptr, means_ptr, table_ptr, frequencies_ptr, item, sequence, number, group, start, count,
    num_new, ring_rows, num_rows, num_pages, table_width, factor,
    G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write phi of the `number`-th block that the step completes, for one KV head. With `means_ptr` (items, D), write only the block's mean to it."""
    done = _num_complete(start, SIZE, STRIDE)
    block = done + number
    size = num_rows
    if table_ptr is not None:
        size = num_rows * table_width
    is_complete = block < tl.minimum(_num_complete(start + count, SIZE, STRIDE), size)
    if is_complete:
        first = _pooled(
            raw_ptr, new_ptr, taps_ptr, sequence, block, start, group, num_new, ring_rows, 0, HALF, WIDTH, G, D, SIZE, STRIDE, TOKENS
        )  # fmt: skip
        second = _pooled(
            raw_ptr, new_ptr, taps_ptr, sequence, block, start, group, num_new, ring_rows, HALF, D, WIDTH, G, D, SIZE, STRIDE, TOKENS
        )  # fmt: skip
        columns = tl.arange(0, WIDTH)
        if means_ptr is not None:
            tl.store(means_ptr + wide(item) * D + columns, first.to(tl.float32), mask=columns < HALF)
            tl.store(means_ptr + wide(item) * D + HALF + columns, second.to(tl.float32), mask=columns < D - HALF)
        else:
            slot, has_slot = _slot(sequence, block, is_complete, table_ptr, num_rows, num_pages, table_width)
            dtype: tl.constexpr = target_ptr.dtype.element_ty
            target = target_ptr + (slot * G + group) * D + columns
            if frequencies_ptr is not None:
                last = tl.full([1], STRIDE, tl.int32) * block + (SIZE - 1)
                turned, turned_second = _rotated(first[None, :], second[None, :], columns, columns < HALF, last, frequencies_ptr, factor)
                tl.store(target, cast(tl.sum(turned, 0), dtype), mask=columns < tl.where(has_slot, HALF, 0))
                tl.store(target + HALF, cast(tl.sum(turned_second, 0), dtype), mask=columns < tl.where(has_slot, D - HALF, 0))
            else:
                tl.store(target, cast(first, dtype), mask=columns < tl.where(has_slot, HALF, 0))
                tl.store(target + HALF, cast(second, dtype), mask=columns < tl.where(has_slot, D - HALF, 0))


@triton.jit
def _block_of_items(items, num_items, start_ptr, count_ptr, numbers, num_rows, G: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Return sequence, KV head, start, block, and whether the block is complete. An item is a triple (sequence, block of `numbers`, KV head)."""
    is_item = items < num_items
    sequences = items // (G * numbers)
    starts = tl.load(start_ptr + sequences, mask=is_item, other=0)
    counts = tl.load(count_ptr + sequences, mask=is_item, other=0)
    blocks = _num_complete(starts, SIZE, STRIDE) + items // G % numbers
    # Triton 3.6 mistakes a sum with `items % G` for a multiple of G, and emits misaligned vector loads
    groups = tl.multiple_of(items % G, 1)
    return sequences, groups, starts, blocks, is_item & (blocks < tl.minimum(_num_complete(starts + counts, SIZE, STRIDE), num_rows))


@triton.jit
def _up(
    raw_ptr, new_ptr, table_ptr, position_ptr, up_ptr, partials_ptr, item_tile, column_tile, token_split, start_ptr, count_ptr,
    num_items, numbers, num_new, ring_rows, num_rows, table_width,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, SPLIT_TOKENS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write partial sums of the hidden layer, float32 (splits, items, D): the part of SPLIT_TOKENS tokens, for some columns and a tile of blocks."""
    items = item_tile * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
    size = num_rows
    if table_ptr is not None:
        size = num_rows * table_width
    sequences, groups, starts, blocks, is_complete = _block_of_items(items, num_items, start_ptr, count_ptr, numbers, size, G, SIZE, STRIDE)
    if tl.max(is_complete.to(tl.int32), 0) > 0:
        inner, columns = tl.arange(0, WIDTH), column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        is_inner, is_column = inner < D, columns < D
        hidden = tl.zeros([BLOCK_ITEMS, BLOCK_COLUMNS], tl.float32)
        first = token_split * SPLIT_TOKENS
        for token in range(first, tl.minimum(first + SPLIT_TOKENS, SIZE)):
            positions = blocks * STRIDE + token
            x = _tokens(raw_ptr, new_ptr, sequences, positions, is_complete, starts, groups, num_new, ring_rows, inner, is_inner, G, D)
            embedding = tl.load(position_ptr + token * D + inner, mask=is_inner, other=0.0)
            x = cast(x.to(tl.float32) + embedding.to(tl.float32)[None, :], x.dtype)
            weights = up_ptr + (columns * (SIZE * D))[:, None] + (token * D + inner)[None, :]
            weights = tl.load(weights, mask=is_column[:, None] & is_inner[None, :], other=0.0)
            hidden = dot(x, tl.trans(weights), hidden)
        target = partials_ptr + (wide(token_split) * num_items + items)[:, None] * D + columns[None, :]
        tl.store(target, hidden, mask=is_complete[:, None] & is_column[None, :])


@CachedLaunch
@triton.jit
def append_kernel(
    start_ptr, count_ptr,
    a_k_ptr, a_v_ptr, a_k_scale_ptr, a_v_scale_ptr, a_table_ptr, a_new_k_ptr, a_new_v_ptr,
    b_k_ptr, b_v_ptr, b_k_scale_ptr, b_v_scale_ptr, b_table_ptr, b_new_k_ptr, b_new_v_ptr,
    c_k_ptr, c_v_ptr, c_k_scale_ptr, c_v_scale_ptr, c_table_ptr, c_new_k_ptr, c_new_v_ptr,
    raw_k_ptr, raw_v_ptr, raw_new_k_ptr, raw_new_v_ptr, cmp_k_ptr, cmp_v_ptr, cmp_table_ptr, k_taps_ptr, v_taps_ptr, frequencies_ptr,
    k_means_ptr, v_means_ptr, k_position_ptr, v_position_ptr, k_up_ptr, v_up_ptr, k_partials_ptr, v_partials_ptr,
    num_new, num_sequences, numbers, item_tiles, a_rows, a_pages, a_width, b_rows, b_pages, b_width, c_rows, c_pages, c_width,
    ring_rows, cmp_rows, cmp_pages, cmp_width, factor,
    G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, GROUPS: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr,
    HALF_K: tl.constexpr, HALF_V: tl.constexpr, HALF_WIDTH_K: tl.constexpr, HALF_WIDTH_V: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr, RING_A: tl.constexpr, RING_B: tl.constexpr, RING_C: tl.constexpr,
    WRITTEN: tl.constexpr, SPLIT_TOKENS: tl.constexpr, TOKEN_SPLITS: tl.constexpr, TILES_K: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, PDL: tl.constexpr, LETS_START: tl.constexpr,
):  # fmt: skip
    """Write the rows of WRITTEN stores (of a, b and c), and the blocks that the rows of "raw" complete. A store without v passes None for it.

    Grid: a program for each sequence, row and store's k or v; then one for each sequence, block and KV head of k and of v; then, for `mlp`,
    one for each tile of blocks, tile of columns and split of tokens of k and of v.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    if LETS_START:
        # after the wait, because the launch that starts now may read the results of all launches before this one
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    PARTS: tl.constexpr = max(2 * WRITTEN, 1)
    num_written = num_sequences * num_new * (2 * WRITTEN)
    if program < num_written:
        row, part = program // PARTS, program % PARTS
        # in descending order, so that two writes to one slot would show if programs run one by one
        sequence, row = row // num_new, num_new - 1 - row % num_new
        start, count = tl.load(start_ptr + sequence), tl.load(count_ptr + sequence)
        if part == 0:
            _write(
                a_k_ptr, a_k_scale_ptr, a_table_ptr, a_new_k_ptr, sequence, row, num_new, start, count, a_rows, a_pages, a_width,
                G, D_K, GROUPS, WIDTH_K, RING_A,
            )  # fmt: skip
        if part == 1:
            _write(
                a_v_ptr, a_v_scale_ptr, a_table_ptr, a_new_v_ptr, sequence, row, num_new, start, count, a_rows, a_pages, a_width,
                G, D_V, GROUPS, WIDTH_V, RING_A,
            )  # fmt: skip
        if part == 2:
            _write(
                b_k_ptr, b_k_scale_ptr, b_table_ptr, b_new_k_ptr, sequence, row, num_new, start, count, b_rows, b_pages, b_width,
                G, D_K, GROUPS, WIDTH_K, RING_B,
            )  # fmt: skip
        if part == 3:
            _write(
                b_v_ptr, b_v_scale_ptr, b_table_ptr, b_new_v_ptr, sequence, row, num_new, start, count, b_rows, b_pages, b_width,
                G, D_V, GROUPS, WIDTH_V, RING_B,
            )  # fmt: skip
        if part == 4:
            _write(
                c_k_ptr, c_k_scale_ptr, c_table_ptr, c_new_k_ptr, sequence, row, num_new, start, count, c_rows, c_pages, c_width,
                G, D_K, GROUPS, WIDTH_K, RING_C,
            )  # fmt: skip
        if part == 5:
            _write(
                c_v_ptr, c_v_scale_ptr, c_table_ptr, c_new_v_ptr, sequence, row, num_new, start, count, c_rows, c_pages, c_width,
                G, D_V, GROUPS, WIDTH_V, RING_C,
            )  # fmt: skip
    elif raw_k_ptr is not None:
        num_items = num_sequences * numbers * G
        item = program - num_written
        if item < 2 * num_items:
            is_value, item = item // num_items, item % num_items
            sequence, number, group = item // (numbers * G), item // G % numbers, item % G
            start, count = tl.load(start_ptr + sequence), tl.load(count_ptr + sequence)
            if is_value == 0:
                _pool(
                    raw_k_ptr, raw_new_k_ptr, k_taps_ptr, cmp_k_ptr, k_means_ptr, cmp_table_ptr, frequencies_ptr, item, sequence, number, group,
                    start, count, num_new, ring_rows, cmp_rows, cmp_pages, cmp_width, factor,
                    G, D_K, HALF_K, HALF_WIDTH_K, SIZE, STRIDE, TOKENS,
                )  # fmt: skip
            elif raw_v_ptr is not None:
                _pool(
                    raw_v_ptr, raw_new_v_ptr, v_taps_ptr, cmp_v_ptr, v_means_ptr, cmp_table_ptr, None, item, sequence, number, group,
                    start, count, num_new, ring_rows, cmp_rows, cmp_pages, cmp_width, factor,
                    G, D_V, HALF_V, HALF_WIDTH_V, SIZE, STRIDE, TOKENS,
                )  # fmt: skip
        elif k_up_ptr is not None:
            part = item - 2 * num_items
            token_split, part = part % TOKEN_SPLITS, part // TOKEN_SPLITS
            item_tile, column_tile = part % item_tiles, part // item_tiles
            if column_tile < TILES_K:
                _up(
                    raw_k_ptr, raw_new_k_ptr, cmp_table_ptr, k_position_ptr, k_up_ptr, k_partials_ptr, item_tile, column_tile, token_split,
                    start_ptr, count_ptr, num_items, numbers, num_new, ring_rows, cmp_rows, cmp_width,
                    G, D_K, WIDTH_K, SIZE, STRIDE, SPLIT_TOKENS, BLOCK_ITEMS, BLOCK_COLUMNS,
                )  # fmt: skip
            elif v_up_ptr is not None:
                _up(
                    raw_v_ptr, raw_new_v_ptr, cmp_table_ptr, v_position_ptr, v_up_ptr, v_partials_ptr, item_tile, column_tile - TILES_K,
                    token_split, start_ptr, count_ptr, num_items, numbers, num_new, ring_rows, cmp_rows, cmp_width,
                    G, D_V, WIDTH_V, SIZE, STRIDE, SPLIT_TOKENS, BLOCK_ITEMS, BLOCK_COLUMNS,
                )  # fmt: skip


@triton.jit
def _activated(
    partials_ptr, bias_ptr, items, num_items, is_complete, dtype: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):
    """Return SiLU of the hidden layer (items, WIDTH) in `dtype`, with values above its range clamped."""
    inner = tl.arange(0, WIDTH)
    mask = is_complete[:, None] & (inner < D)[None, :]
    hidden = tl.zeros([items.shape[0], WIDTH], tl.float32)
    for split in range(SPLITS):
        hidden += tl.load(partials_ptr + (wide(split) * num_items + items)[:, None] * D + inner[None, :], mask=mask, other=0.0)
    hidden += tl.load(bias_ptr + inner, mask=inner < D, other=0.0).to(tl.float32)[None, :]
    hidden = cast(hidden, dtype).to(tl.float32)
    largest: tl.constexpr = 65504.0 if dtype == tl.float16 else (3.3895313892515355e38 if dtype == tl.bfloat16 else 3.4028234663852886e38)
    hidden = tl.minimum(tl.maximum(hidden, -largest), largest)
    return cast(hidden / (1 + tl.exp(-hidden)), dtype)


@triton.jit
def _down_columns(active, weight_ptr, bias_ptr, means_ptr, items, is_complete, columns, is_column, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return some columns of blocks in the hidden layer's dtype: Linear(D, D) of the hidden layer, plus the mean."""
    inner = tl.arange(0, WIDTH)
    weights = tl.load(weight_ptr + (columns * D)[:, None] + inner[None, :], mask=is_column[:, None] & (inner < D)[None, :], other=0.0)
    found = dot(active, tl.trans(weights), tl.zeros([active.shape[0], weights.shape[0]], tl.float32))
    found += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    mask = is_complete[:, None] & is_column[None, :]
    means = tl.load(means_ptr + items.to(tl.int64)[:, None] * D + columns[None, :], mask=mask, other=0.0)
    return cast(cast(found, active.dtype).to(tl.float32) + means, active.dtype)


@triton.jit
def _down(
    partials_ptr, up_bias_ptr, weight_ptr, bias_ptr, means_ptr, target_ptr, table_ptr, frequencies_ptr, start_ptr, count_ptr, item_tile,
    column_tile, num_items, numbers, num_rows, num_pages, table_width, factor,
    G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_ITEMS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write some columns of a tile of blocks, and the columns that RoPE pairs with them."""
    items = item_tile * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
    size = num_rows
    if table_ptr is not None:
        size = num_rows * table_width
    sequences, groups, _starts, blocks, is_complete = _block_of_items(
        items, num_items, start_ptr, count_ptr, numbers, size, G, SIZE, STRIDE
    )
    if tl.max(is_complete.to(tl.int32), 0) > 0:
        dtype: tl.constexpr = target_ptr.dtype.element_ty
        active = _activated(partials_ptr, up_bias_ptr, items, num_items, is_complete, dtype, D, WIDTH, SPLITS)
        columns = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        has_first, has_second = columns < HALF, columns < D - HALF
        first = _down_columns(active, weight_ptr, bias_ptr, means_ptr, items, is_complete, columns, has_first, D, WIDTH)
        second = _down_columns(active, weight_ptr, bias_ptr, means_ptr, items, is_complete, HALF + columns, has_second, D, WIDTH)
        if frequencies_ptr is not None:
            first, second = _rotated(first, second, columns, has_first, blocks * STRIDE + (SIZE - 1), frequencies_ptr, factor)
        slots, has_slot = _slot(sequences, blocks, is_complete, table_ptr, num_rows, num_pages, table_width)
        target = target_ptr + ((slots * G + groups) * D)[:, None] + columns[None, :]
        tl.store(target, cast(first, dtype), mask=has_slot[:, None] & has_first[None, :])
        tl.store(target + HALF, cast(second, dtype), mask=has_slot[:, None] & has_second[None, :])


@CachedLaunch
@triton.jit
def down_kernel(
    start_ptr, count_ptr, k_partials_ptr, v_partials_ptr, k_up_bias_ptr, v_up_bias_ptr, k_down_ptr, v_down_ptr, k_down_bias_ptr, v_down_bias_ptr,
    k_means_ptr, v_means_ptr, cmp_k_ptr, cmp_v_ptr, cmp_table_ptr, frequencies_ptr, num_items, numbers, cmp_rows, cmp_pages, cmp_width, factor,
    G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, HALF_K: tl.constexpr, HALF_V: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, TOKEN_SPLITS: tl.constexpr, TILES_K: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, PDL: tl.constexpr, LETS_START: tl.constexpr,
):  # fmt: skip
    """Write the blocks of phi `mlp`; grid (tiles of blocks, tiles of columns of half of k, then of v)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    if LETS_START:
        tl.extra.cuda.gdc_launch_dependents()
    item_tile, column_tile = tl.program_id(0), tl.program_id(1)
    if column_tile < TILES_K:
        _down(
            k_partials_ptr, k_up_bias_ptr, k_down_ptr, k_down_bias_ptr, k_means_ptr, cmp_k_ptr, cmp_table_ptr, frequencies_ptr,
            start_ptr, count_ptr, item_tile, column_tile, num_items, numbers, cmp_rows, cmp_pages, cmp_width, factor,
            G, D_K, HALF_K, WIDTH_K, SIZE, STRIDE, TOKEN_SPLITS, BLOCK_ITEMS, BLOCK_COLUMNS,
        )  # fmt: skip
    elif v_partials_ptr is not None:
        _down(
            v_partials_ptr, v_up_bias_ptr, v_down_ptr, v_down_bias_ptr, v_means_ptr, cmp_v_ptr, cmp_table_ptr, None,
            start_ptr, count_ptr, item_tile, column_tile - TILES_K, num_items, numbers, cmp_rows, cmp_pages, cmp_width, factor,
            G, D_V, HALF_V, WIDTH_V, SIZE, STRIDE, TOKEN_SPLITS, BLOCK_ITEMS, BLOCK_COLUMNS,
        )  # fmt: skip
