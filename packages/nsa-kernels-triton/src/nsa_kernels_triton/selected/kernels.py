"""Forward and backward over the lists of `index_kernels`: one program per work item writes partial results per (query, slot); then they are merged.

The rows of an item are its queries times the heads of their group. No sum uses atomics, and every sum has a fixed order.
"""

import triton
import triton.language as tl

from nsa_kernels_triton.cached_launch import CachedLaunch
from nsa_kernels_triton.tiles import (
    cast,
    coarser,
    cut,
    divisor_of,
    dot,
    exponential,
    is_lowerable,
    load_columns,
    log_sum,
    lower_alone,
    lowered_by,
    power_of_two,
    store_columns,
    wide,
)


@triton.jit
def _is_in_piece(piece, in_piece, SELECTION_SIZE: tl.constexpr, PIECES: tl.constexpr, PIECE_SIZE: tl.constexpr):
    """Return which keys of a tile belong to the piece: a block's last piece may be shorter."""
    return in_piece < tl.minimum(PIECE_SIZE, SELECTION_SIZE - piece % PIECES * PIECE_SIZE)


@triton.jit
def _load_item(
    items_ptr, entries_ptr, rows_ptr, key_rows_ptr, first_row, num_rows, num_pieces,
    SLOTS_TOTAL: tl.constexpr, SELECTION_SIZE: tl.constexpr, PIECES: tl.constexpr, PIECE_SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return an item's group, first entry, end, index of its split-K partial, key rows, and which of the key rows some query may see."""
    target = items_ptr + tl.program_id(0) * 4
    index = tl.load(target)
    start = tl.load(target + 1)
    end = tl.load(target + 2)
    # the last query sees the most keys; rows of a store after those may hold anything
    last = first_row + tl.load(entries_ptr + end - 1) // SLOTS_TOTAL
    last_key = tl.load(rows_ptr + num_rows + last)
    in_piece = tl.arange(0, KEYS)
    piece = index % num_pieces
    key_rows = tl.load(key_rows_ptr + piece) + in_piece
    key_mask = _is_in_piece(piece, in_piece, SELECTION_SIZE, PIECES, PIECE_SIZE) & (key_rows <= last_key)
    return index // num_pieces, start, end, tl.load(target + 3), key_rows, key_mask


@CachedLaunch
@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, items_ptr, num_items_ptr, entries_ptr, rows_ptr, key_rows_ptr,
    first_row, num_rows, num_pieces, factor, coarse_factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    SLOTS_TOTAL: tl.constexpr, SELECTION_SIZE: tl.constexpr, PIECES: tl.constexpr, PIECE_SIZE: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Write partial out (rows, G, slots, H/G, D_v) and lse of the rows of one item; grid (bound on items,)."""
    HG: tl.constexpr = H // G
    if tl.program_id(0) >= tl.load(num_items_ptr):
        return
    group, start, end, _partial_index, key_rows, key_mask = _load_item(
        items_ptr, entries_ptr, rows_ptr, key_rows_ptr, first_row, num_rows, num_pieces,
        SLOTS_TOTAL, SELECTION_SIZE, PIECES, PIECE_SIZE, KEYS,
    )  # fmt: skip
    keys = key_rows.to(tl.int64) * G + group
    k1 = load_columns(k_ptr, keys * D_K, key_mask, 0, K1, D_K, True)
    v1 = load_columns(v_ptr, keys * D_V, key_mask, 0, V1, D_V, True)
    k2 = k1
    v2 = v1
    if K2 > 0:
        k2 = load_columns(k_ptr, keys * D_K, key_mask, K1, K2, D_K, True)
    if V2 > 0:
        v2 = load_columns(v_ptr, keys * D_V, key_mask, V1, V2, D_V, True)
    # masked keys get a row after every query, so that no query sees them
    seen_keys = tl.where(key_mask, key_rows, 0x7FFFFFFF)
    # the first query sees the fewest keys
    first_own_key = tl.load(rows_ptr + num_rows + first_row + tl.load(entries_ptr + start) // SLOTS_TOTAL)
    is_masked = first_own_key < tl.max(seen_keys, 0)
    # offsets within a chunk fit 32 bits
    q_ptr += (wide(first_row) * H + group * HG) * D_K
    out_ptr += group * (SLOTS_TOTAL * HG * D_V)
    lse_ptr += group * (SLOTS_TOTAL * HG)
    num_item_rows = (end - start) * HG
    rows = tl.arange(0, BLOCK_ROWS)
    # loaded one tile ahead, because the loads of q wait for it
    next_entry = tl.load(entries_ptr + start + rows // HG, mask=rows < num_item_rows, other=0)
    for row in tl.range(0, num_item_rows, BLOCK_ROWS):
        rows = row + tl.arange(0, BLOCK_ROWS)
        exists = rows < num_item_rows
        entry = next_entry
        following = rows + BLOCK_ROWS
        next_entry = tl.load(entries_ptr + start + following // HG, mask=following < num_item_rows, other=0)
        local = entry // SLOTS_TOTAL
        heads = (local * H + rows % HG) * D_K
        q1 = load_columns(q_ptr, heads, exists, 0, K1, D_K, True)
        scores = dot(q1, tl.trans(k1), tl.zeros([BLOCK_ROWS, KEYS], tl.float32))
        if K2 > 0:
            q2 = load_columns(q_ptr, heads, exists, K1, K2, D_K, True)
            scores = dot(q2, tl.trans(k2), scores)
        if is_masked:
            own_key = tl.load(rows_ptr + num_rows + first_row + local, mask=exists, other=0)
            scores = tl.where(seen_keys[None, :] <= own_key[:, None], scores, float("-inf"))
        row_max = tl.max(scores, 1)
        # rows that do not exist may see nothing
        row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
        row_factor = coarser(row_max * factor, factor, coarse_factor)
        weights = exponential(tl.fma(scores, row_factor[:, None], -(row_max * row_factor)[:, None]), EXACT)
        row_sum = tl.sum(weights, 1)
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)
        inverse = 1.0 / divisor_of(row_sum, row_max, row_factor, v1.dtype, EXACT)
        weights = cast(weights, v1.dtype)
        target = (local * (G * SLOTS_TOTAL) + entry % SLOTS_TOTAL) * HG + rows % HG
        acc1 = dot(weights, v1, tl.zeros([BLOCK_ROWS, V1], tl.float32))
        store_columns(out_ptr, target * D_V, exists, acc1 * inverse[:, None], 0, V1, D_V)
        if V2 > 0:
            acc2 = dot(weights, v2, tl.zeros([BLOCK_ROWS, V2], tl.float32))
            store_columns(out_ptr, target * D_V, exists, acc2 * inverse[:, None], V1, V2, D_V)
        tl.store(lse_ptr + target, log_sum(row_max * factor, row_sum, EXACT), mask=exists)


@CachedLaunch
@triton.jit
def merge_kernel(
    parts_ptr, part_lse_ptr, present_ptr, out_ptr, exact_ptr, lse_ptr, cmp_ptr, win_ptr, gates_ptr, total_ptr, rows_ptr,
    first_row, last_row, first_position,
    H: tl.constexpr, G: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr, SLOTS_TOTAL: tl.constexpr, COMBINE: tl.constexpr,
    SHARED: tl.constexpr, KEEPS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the partial outputs of (query, head) rows by their lse. COMBINE: also write Eq. 5's gated sum of the branches.

    SHARED: `out_ptr` and `lse_ptr` hold one more partial output of every row. Otherwise they hold the final outputs of rows at positions below
    `first_position`; without `out_ptr` there are no such rows. KEEPS: merged outputs are stored in `out_ptr`. Without
    `cmp_ptr` the sum has two branches.
    """
    HG: tl.constexpr = H // G
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    local = rows // H
    exists = local < last_row - first_row
    group = rows % H // HG
    source = (local * G + group) * SLOTS_TOTAL
    head = rows % HG
    target = wide(first_row) * H + rows
    position = tl.load(rows_ptr + first_row + local, mask=exists, other=-1)
    counts = exists & (position >= 0)
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    if SHARED:
        largest = tl.load(lse_ptr + target, mask=counts, other=float("-inf"))
    own = largest
    for slot in tl.range(0, SLOTS_TOTAL):
        is_present = tl.load(present_ptr + source + slot, mask=exists, other=0) == 1
        lse = tl.load(part_lse_ptr + (source + slot) * HG + head, mask=is_present, other=float("-inf"))
        largest = tl.maximum(largest, lse, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
    if SHARED:
        total = tl.exp(own - shift)
        acc = load_columns(out_ptr, target * D_V, counts, 0, WIDTH, D_V, True).to(tl.float32) * total[:, None]
        # all reads come before the writes of these elements below
        tl.debug_barrier()
    for slot in tl.range(0, SLOTS_TOTAL):
        is_present = tl.load(present_ptr + source + slot, mask=exists, other=0) == 1
        weight = tl.exp(tl.load(part_lse_ptr + (source + slot) * HG + head, mask=is_present, other=float("-inf")) - shift)
        part = load_columns(parts_ptr, ((source + slot) * HG + head) * D_V, is_present, 0, WIDTH, D_V, True)
        acc += part.to(tl.float32) * weight[:, None]
        total += weight
    # a row whose lse is NaN does see keys
    sees_any = largest != float("-inf")
    acc *= tl.where(sees_any, 1.0 / tl.where(sees_any, total, 1.0), 0.0)[:, None]
    merged = exists
    if out_ptr is not None and not SHARED:
        is_done = (position >= 0) & (position < first_position)
        if exact_ptr is not None:
            done = load_columns(exact_ptr, target * D_V, is_done, 0, WIDTH, D_V, True)
        else:
            done = load_columns(out_ptr, target * D_V, is_done, 0, WIDTH, D_V, True)
        acc = tl.where(is_done[:, None], done.to(tl.float32), acc)
        merged = exists & (is_done == 0)
    if KEEPS:
        store_columns(out_ptr, target * D_V, merged, acc, 0, WIDTH, D_V)
        if exact_ptr is not None:
            store_columns(exact_ptr, target * D_V, merged, acc, 0, WIDTH, D_V)
    tl.store(lse_ptr + target, tl.where(sees_any, shift + tl.log(tl.where(sees_any, total, 1.0)), float("-inf")), mask=merged)
    if COMBINE:
        # an invalid row is 0 for any gates, NaN included
        gate_slc = tl.load(gates_ptr + target * 3 + 1, mask=counts, other=0.0).to(tl.float32)
        gate_win = tl.load(gates_ptr + target * 3 + 2, mask=counts, other=0.0).to(tl.float32)
        acc *= gate_slc[:, None]
        if cmp_ptr is not None:
            gate_cmp = tl.load(gates_ptr + target * 3, mask=counts, other=0.0).to(tl.float32)
            acc += load_columns(cmp_ptr, target * D_V, counts, 0, WIDTH, D_V, True).to(tl.float32) * gate_cmp[:, None]
        acc += load_columns(win_ptr, target * D_V, counts, 0, WIDTH, D_V, True).to(tl.float32) * gate_win[:, None]
        store_columns(total_ptr, target * D_V, exists, acc, 0, WIDTH, D_V)


@triton.jit
def _add_or_store(
    sum_ptr, partial_ptr, keys, key_mask, partial_index, values, FIRST: tl.constexpr, WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr
):
    """Add the gradients of a list's first item to the running sum; store those of a later item as a split-K partial."""
    columns = FIRST + tl.arange(0, WIDTH)
    mask = key_mask[:, None] & (columns < NUM_COLUMNS)[None, :]
    if partial_index < 0:
        target = sum_ptr + keys[:, None] * NUM_COLUMNS + columns[None, :]
        tl.store(target, tl.load(target, mask=mask, other=0.0) + values, mask=mask)
    else:
        # store the whole tile, because the gradient of a key that none of the item's queries sees is 0
        numbers = partial_index.to(tl.int64) * values.shape[0] + tl.arange(0, values.shape[0])
        tl.store(partial_ptr + numbers[:, None] * NUM_COLUMNS + columns[None, :], values, mask=(columns < NUM_COLUMNS)[None, :])


@CachedLaunch
@triton.jit
def lower_kernel(
    q_ptr, k_ptr, shift_ptr, extremes_ptr, indices_ptr, rows_ptr, num_rows, factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, NUM_SELECTED: tl.constexpr,
    SELECTION_SIZE: tl.constexpr, PIECES: tl.constexpr, PIECE_SIZE: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Lower the shifts of rows if they have a single weight (`lower_alone`); each program takes some of the rows of q, groups and HEADS heads.

    A block that a row chose twice counts twice here, so the shift of such a row may stay.
    """
    if tl.load(extremes_ptr) == 0:
        return
    HG: tl.constexpr = H // G
    TILES: tl.constexpr = (HG + HEADS - 1) // HEADS
    in_piece = tl.arange(0, KEYS)
    for number in tl.range(tl.program_id(0), num_rows * G * TILES, tl.num_programs(0)):
        row, group = number // (G * TILES), number // TILES % G
        in_group = number % TILES * HEADS + tl.arange(0, HEADS)
        exists = in_group < HG
        heads = wide(row) * H + group * HG + in_group
        shift = tl.load(shift_ptr + heads, mask=exists, other=float("inf"))
        if tl.max(is_lowerable(shift).to(tl.int32), 0) != 0:
            position = tl.load(rows_ptr + row)
            key_row0 = wide(tl.load(rows_ptr + num_rows + row)) - position
            q1 = load_columns(q_ptr, heads * D_K, exists, 0, K1, D_K, True)
            q2 = q1
            if K2 > 0:
                q2 = load_columns(q_ptr, heads * D_K, exists, K1, K2, D_K, True)
            total = tl.zeros([HEADS], tl.float32)
            largest = tl.zeros([HEADS], tl.float32)
            for part in tl.range(0, NUM_SELECTED * PIECES):
                block = tl.load(indices_ptr + (wide(row) * G + group) * NUM_SELECTED + part // PIECES)
                keys = block * SELECTION_SIZE + part % PIECES * PIECE_SIZE + in_piece
                # a product of a huge index could wrap
                last_key = tl.where((block >= 0) & (block <= position // SELECTION_SIZE), position, -1)
                is_key = _is_in_piece(part % PIECES, in_piece, SELECTION_SIZE, PIECES, PIECE_SIZE) & (keys >= 0) & (keys <= last_key)
                offsets = ((key_row0 + keys) * G + group) * D_K
                scores = dot(q1, tl.trans(load_columns(k_ptr, offsets, is_key, 0, K1, D_K, True)), tl.zeros([HEADS, KEYS], tl.float32))
                if K2 > 0:
                    scores = dot(q2, tl.trans(load_columns(k_ptr, offsets, is_key, K1, K2, D_K, True)), scores)
                weights = tl.where(is_key[None, :], exponential(scores * factor - shift[:, None], EXACT), 0.0)
                total += tl.sum(weights, 1)
                largest = tl.maximum(largest, tl.max(weights, 1))
            lower_alone(shift_ptr + heads, shift, total, largest, exists)


@CachedLaunch
@triton.jit
def backward_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, extremes_ptr, gates_ptr, dq_parts_ptr, dk_ptr, dv_ptr, dk_partial_ptr, dv_partial_ptr,
    items_ptr, num_items_ptr, entries_ptr, rows_ptr, key_rows_ptr, first_row, num_rows, num_pieces, scale, factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    SLOTS_TOTAL: tl.constexpr, SELECTION_SIZE: tl.constexpr, PIECES: tl.constexpr, PIECE_SIZE: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr, GATE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Write partial dQ (rows, G, slots, H/G, D_k) and dK, dV of one item's keys; grid (bound on items,).

    For float16, partial dQ is still multiplied by the power of two of `tiles.lowered_by`.
    """
    HG: tl.constexpr = H // G
    if tl.program_id(0) >= tl.load(num_items_ptr):
        return
    group, start, end, partial_index, key_rows, key_mask = _load_item(
        items_ptr, entries_ptr, rows_ptr, key_rows_ptr, first_row, num_rows, num_pieces,
        SLOTS_TOTAL, SELECTION_SIZE, PIECES, PIECE_SIZE, KEYS,
    )  # fmt: skip
    keys = key_rows.to(tl.int64) * G + group
    k1 = load_columns(k_ptr, keys * D_K, key_mask, 0, K1, D_K, True)
    v1 = load_columns(v_ptr, keys * D_V, key_mask, 0, V1, D_V, True)
    k2 = k1
    v2 = v1
    dk1 = tl.zeros([KEYS, K1], tl.float32)
    dv1 = tl.zeros([KEYS, V1], tl.float32)
    dk2 = tl.zeros([KEYS, K2 if K2 > 0 else 16], tl.float32)
    dv2 = tl.zeros([KEYS, V2 if V2 > 0 else 16], tl.float32)
    if K2 > 0:
        k2 = load_columns(k_ptr, keys * D_K, key_mask, K1, K2, D_K, True)
    if V2 > 0:
        v2 = load_columns(v_ptr, keys * D_V, key_mask, V1, V2, D_V, True)
    lowering = 1.0
    dk_scale = scale
    if q_ptr.dtype.element_ty == tl.float16:
        lowering = power_of_two(-lowered_by(extremes_ptr))
        dk_scale *= power_of_two(lowered_by(extremes_ptr))
    # offsets within a chunk fit 32 bits
    head0 = wide(first_row) * H + group * HG
    q_ptr += head0 * D_K
    dout_ptr += head0 * D_V
    shift_ptr += head0
    delta_ptr += head0
    if GATE >= 0:
        gates_ptr += head0 * 3
    dq_parts_ptr += group * (SLOTS_TOTAL * HG * D_K)
    num_item_rows = (end - start) * HG
    rows = tl.arange(0, BLOCK_ROWS)
    next_entry = tl.load(entries_ptr + start + rows // HG, mask=rows < num_item_rows, other=0)
    for row in tl.range(0, num_item_rows, BLOCK_ROWS):
        rows = row + tl.arange(0, BLOCK_ROWS)
        exists = rows < num_item_rows
        entry = next_entry
        following = rows + BLOCK_ROWS
        next_entry = tl.load(entries_ptr + start + following // HG, mask=following < num_item_rows, other=0)
        local = entry // SLOTS_TOTAL
        own_key = tl.load(rows_ptr + num_rows + first_row + local, mask=exists, other=-1)
        heads = local * H + rows % HG
        q1 = load_columns(q_ptr, heads * D_K, exists, 0, K1, D_K, True)
        scores = dot(q1, tl.trans(k1), tl.zeros([BLOCK_ROWS, KEYS], tl.float32))
        q2 = q1
        if K2 > 0:
            q2 = load_columns(q_ptr, heads * D_K, exists, K1, K2, D_K, True)
            scores = dot(q2, tl.trans(k2), scores)
        shift = tl.load(shift_ptr + heads, mask=exists, other=float("inf"))
        delta = tl.load(delta_ptr + heads, mask=exists, other=0.0)
        # a row whose shift is infinite sees nothing, for any scores
        own_key = tl.where(shift == float("inf"), -1, own_key)
        is_visible = (key_rows[None, :] <= own_key[:, None]) & key_mask[None, :]
        # a weight above 1 comes from rounding, which is large for huge scores
        weights = tl.where(is_visible, cut(exponential(scores * factor - shift[:, None], EXACT), 1.0), 0.0)
        if GATE >= 0:
            weights *= tl.load(gates_ptr + heads * 3 + GATE, mask=exists, other=0.0).to(tl.float32)[:, None]
        dout1 = load_columns(dout_ptr, heads * D_V, exists, 0, V1, D_V, True)
        dweights = dot(dout1, tl.trans(v1), tl.zeros([BLOCK_ROWS, KEYS], tl.float32))
        dout2 = dout1
        if V2 > 0:
            dout2 = load_columns(dout_ptr, heads * D_V, exists, V1, V2, D_V, True)
            dweights = dot(dout2, tl.trans(v2), dweights)
        # huge values may make the product with dO infinite
        dscores = tl.where(is_visible, weights * (dweights - delta[:, None]), 0.0)
        if q1.dtype == tl.float16:
            dscores *= lowering
        dscores = cast(dscores, q1.dtype)
        weights = cast(weights, dout1.dtype)
        target = (local * (G * SLOTS_TOTAL) + entry % SLOTS_TOTAL) * HG + rows % HG
        dv1 = dot(tl.trans(weights), dout1, dv1)
        if V2 > 0:
            dv2 = dot(tl.trans(weights), dout2, dv2)
        dk1 = dot(tl.trans(dscores), q1, dk1)
        dq1 = dot(dscores, k1, tl.zeros([BLOCK_ROWS, K1], tl.float32))
        # scaled before it is rounded, because unscaled sums may leave the range of float16
        store_columns(dq_parts_ptr, target * D_K, exists, dq1 * scale, 0, K1, D_K)
        if K2 > 0:
            dq2 = dot(dscores, k2, tl.zeros([BLOCK_ROWS, K2], tl.float32))
            store_columns(dq_parts_ptr, target * D_K, exists, dq2 * scale, K1, K2, D_K)
            dk2 = dot(tl.trans(dscores), q2, dk2)
    _add_or_store(dk_ptr, dk_partial_ptr, keys, key_mask, partial_index, dk1 * dk_scale, 0, K1, D_K)
    _add_or_store(dv_ptr, dv_partial_ptr, keys, key_mask, partial_index, dv1, 0, V1, D_V)
    if K2 > 0:
        _add_or_store(dk_ptr, dk_partial_ptr, keys, key_mask, partial_index, dk2 * dk_scale, K1, K2, D_K)
    if V2 > 0:
        _add_or_store(dv_ptr, dv_partial_ptr, keys, key_mask, partial_index, dv2, V1, V2, D_V)


@triton.jit
def _add_partials(sum_ptr, partial_ptr, in_piece, keys, key_mask, first, last, D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr):
    """Add the split-K partials first .. last - 1 of one list, in their order."""
    columns = tl.arange(0, WIDTH)
    mask = key_mask[:, None] & (columns < D)[None, :]
    target = sum_ptr + keys[:, None] * D + columns[None, :]
    acc = tl.load(target, mask=mask, other=0.0)
    for number in tl.range(first, last, loop_unroll_factor=8):
        acc += tl.load(partial_ptr + (wide(number) * KEYS + in_piece)[:, None] * D + columns[None, :], mask=mask, other=0.0)
    tl.store(target, acc, mask=mask)


@CachedLaunch
@triton.jit
def add_partials_kernel(
    dk_ptr, dv_ptr, dk_partial_ptr, dv_partial_ptr, ends_ptr, entries_ptr, rows_ptr, key_rows_ptr, first_row, num_rows, num_pieces, num_lists,
    G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, SLOTS_TOTAL: tl.constexpr,
    SELECTION_SIZE: tl.constexpr, PIECES: tl.constexpr, PIECE_SIZE: tl.constexpr, KEYS: tl.constexpr,
    LISTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Add the split-K partials of dK and dV to the sums, in their order; grid (cdiv(lists, LISTS), parts of a piece, 2)."""
    for number in tl.range(0, LISTS):
        index = tl.program_id(0) * LISTS + number
        exists = index < num_lists
        last = tl.load(ends_ptr + 2 * num_lists + index, mask=exists, other=0)
        first = tl.load(ends_ptr + 2 * num_lists + index - 1, mask=exists & (index > 0), other=0)
        if last > first:
            piece = index % num_pieces
            in_piece = tl.program_id(1) * PART + tl.arange(0, PART)
            key_rows = tl.load(key_rows_ptr + piece) + in_piece
            keys = key_rows.to(tl.int64) * G + index // num_pieces
            # the last query sees the most keys; rows of a store after those may hold anything
            last_entry = tl.load(entries_ptr + tl.load(ends_ptr + index) - 1)
            last_key = tl.load(rows_ptr + num_rows + first_row + last_entry // SLOTS_TOTAL)
            key_mask = _is_in_piece(piece, in_piece, SELECTION_SIZE, PIECES, PIECE_SIZE) & (key_rows <= last_key)
            if tl.program_id(2) == 0:
                _add_partials(dk_ptr, dk_partial_ptr, in_piece, keys, key_mask, first, last, D_K, WIDTH_K, KEYS)
            else:
                _add_partials(dv_ptr, dv_partial_ptr, in_piece, keys, key_mask, first, last, D_V, WIDTH_V, KEYS)


@CachedLaunch
@triton.jit
def merge_dq_kernel(
    parts_ptr, present_ptr, dq_ptr, extremes_ptr, first_row, last_row,
    G: tl.constexpr, WIDTH: tl.constexpr, SLOTS_TOTAL: tl.constexpr, ADD: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Write dQ, the sum of partial results, of rows (query, group), which are WIDTH = H/G D_k wide, COLUMNS at a time. ADD: add it to dQ."""
    PARTS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    rows = (tl.program_id(0) // PARTS).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    exists = rows < (last_row - first_row) * G
    is_column = (columns < WIDTH)[None, :]
    source = rows * SLOTS_TOTAL
    acc = tl.zeros([BLOCK_ROWS, COLUMNS], tl.float32)
    for slot in tl.range(0, SLOTS_TOTAL):
        is_present = tl.load(present_ptr + source + slot, mask=exists, other=0) == 1
        offsets = ((source + slot) * WIDTH)[:, None] + columns[None, :]
        acc += tl.load(parts_ptr + offsets, mask=is_present[:, None] & is_column, other=0.0).to(tl.float32)
    if dq_ptr.dtype.element_ty == tl.float16:
        acc *= power_of_two(lowered_by(extremes_ptr))
    target = dq_ptr + ((wide(first_row) * G + rows) * WIDTH)[:, None] + columns[None, :]
    mask = exists[:, None] & is_column
    if ADD:
        acc += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, cast(acc, dq_ptr.dtype.element_ty), mask=mask)
