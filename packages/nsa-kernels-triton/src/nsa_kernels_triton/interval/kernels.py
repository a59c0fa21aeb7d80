"""Forward, dQ and dK/dV of attention over an interval of keys (Eq. 7, 8 and the sliding window).

A row is one (query, head of the group), with number query * HG + head. So the rows of a tile share their group's keys for any HG. A tile of rows
reads from the first key of its first query to the last key of its last query. Only the tiles of keys at the two ends are masked.
"""

import triton
import triton.language as tl

from nsa_kernels_triton.cached_launch import CachedLaunch
from nsa_kernels_triton.tiles import (
    HUGE,
    WIDEST_REFINED,
    cast,
    coarser,
    divisor_of,
    dot,
    exponential,
    find_sequence,
    is_lowerable,
    load_columns,
    log_sum,
    lower_alone,
    lowered_by,
    power_of_two,
    program_position,
    query_rows,
    refined_delta,
    restrained,
    shift_of,
    store_columns,
    visible_keys,
    wide,
)

# how a tile is masked
NONE = tl.constexpr(0)
LAST_END = tl.constexpr(1)
BOTH_ENDS = tl.constexpr(2)


@triton.jit
def _load_tile(ptr, rows, mask, D: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, MASKED: tl.constexpr):
    """Return both parts of a tile of keys or values."""
    first = load_columns(ptr, rows * D, mask, 0, FIRST, D, MASKED)
    second = first
    if SECOND > 0:
        second = load_columns(ptr, rows * D, mask, FIRST, SECOND, D, MASKED)
    return first, second


@triton.jit
def _products(a1, a2, b1, b2, SECOND: tl.constexpr):
    """Return a @ b^T of operands in two parts."""
    products = dot(a1, tl.trans(b1), tl.zeros([a1.shape[0], b1.shape[0]], tl.float32))
    if SECOND > 0:
        products = dot(a2, tl.trans(b2), products)
    return products


@triton.jit
def _forward_step(
    acc1, acc2, row_max, row_sum, q1, q2, k_ptr, v_ptr, k_row0, num_keys, group, start, first, end, last_end, factor, coarse_factor,
    G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, EXACT: tl.constexpr, RING: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Fold the keys start .. start + BLOCK_KEYS - 1 into the running softmax; `row_max` is the largest product, without the factor.

    RING: key p is in row p % num_keys of its sequence.
    """
    keys = start + tl.arange(0, BLOCK_KEYS)
    key_mask = keys < last_end
    rows = (k_row0 + (keys % num_keys if RING else keys)) * G + group
    k1, k2 = _load_tile(k_ptr, rows, key_mask, D_K, K1, K2, MASK != NONE)
    products = _products(q1, q2, k1, k2, K2)
    if MASK != NONE:
        is_visible = keys[None, :] < end[:, None]
        if MASK == BOTH_ENDS:
            is_visible = is_visible & (keys[None, :] >= first[:, None])
        products = tl.where(is_visible, products, float("-inf"))
    # factor > 0, so the largest product makes the largest score
    new_max = tl.maximum(row_max, tl.max(products, 1))
    # a row that has seen nothing yet has shift 0
    largest = tl.where(new_max == float("-inf"), 0.0, new_max)
    row_factor = coarser(largest * factor, factor, coarse_factor)
    weights = exponential(tl.fma(products, row_factor[:, None], -(largest * row_factor)[:, None]), EXACT)
    rescale = tl.where(row_max == float("-inf"), 0.0, exponential((row_max - largest) * row_factor, EXACT))
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    v1, v2 = _load_tile(v_ptr, rows, key_mask, D_V, V1, V2, MASK != NONE)
    acc1 = dot(cast(weights, v1.dtype), v1, acc1 * rescale[:, None])
    if V2 > 0:
        acc2 = dot(cast(weights, v2.dtype), v2, acc2 * rescale[:, None])
    return acc1, acc2, new_max, row_sum


@triton.jit
def _key_loops(
    t_first, t_last, BLOCK_KEYS: tl.constexpr, IS_WINDOW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr
):
    """Return start, middle, tail, end. Queries t_first .. t_last see keys start .. end - 1; all of them see the whole tiles of middle .. tail - 1."""
    start, full_end = visible_keys(t_first, IS_WINDOW, SIZE, STRIDE, WINDOW)
    full_start, end = visible_keys(t_last, IS_WINDOW, SIZE, STRIDE, WINDOW)
    if t_last < t_first:
        end = start
    middle = tl.minimum(start + tl.cdiv(full_start - start, BLOCK_KEYS) * BLOCK_KEYS, end)
    tail = middle + tl.maximum(tl.minimum(full_end, end) - middle, 0) // BLOCK_KEYS * BLOCK_KEYS
    return start, middle, tail, end


@CachedLaunch
@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, exact_ptr, lse_ptr,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_tiles, num_columns, search_steps, factor, coarse_factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    IS_WINDOW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    PACKED: tl.constexpr, CACHED: tl.constexpr, RING: tl.constexpr, EXACT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Write out and lse of one tile of rows; tiles with the most keys come first.

    The grid is (tiles * columns * G,). A column is one sequence; packed sequences are one column together.
    """
    HG: tl.constexpr = H // G
    tile, sequence, group = program_position(num_tiles, num_columns)
    tile = num_tiles - 1 - tile
    if PACKED:
        sequence = find_sequence(tile, cu_tiles_ptr, num_sequences, search_steps)
        if sequence >= num_sequences:
            return
        tile -= tl.load(cu_tiles_ptr + sequence)
    q_row0, num_rows, num_valid, position = query_rows(
        sequence, cu_seqlens_ptr, query_start_ptr, query_count_ptr, num_queries, PACKED, CACHED
    )
    k_row0 = tl.load(cu_keys_ptr + sequence).to(tl.int64) if PACKED else sequence.to(tl.int64) * num_keys
    row0 = tile * BLOCK_ROWS
    rows = row0 + tl.arange(0, BLOCK_ROWS)
    queries = rows // HG
    exists = queries < num_rows
    t = tl.where(queries < num_valid, position + queries, -1)
    heads = (q_row0 + queries) * H + group * HG + rows % HG
    q1 = load_columns(q_ptr, heads * D_K, exists, 0, K1, D_K, True)
    q2 = q1
    if K2 > 0:
        q2 = load_columns(q_ptr, heads * D_K, exists, K1, K2, D_K, True)

    first, end = visible_keys(t, IS_WINDOW, SIZE, STRIDE, WINDOW)
    t_first = position + row0 // HG
    t_last = position + tl.minimum((row0 + BLOCK_ROWS - 1) // HG, num_valid - 1)
    start, middle, tail, last_end = _key_loops(t_first, t_last, BLOCK_KEYS, IS_WINDOW, SIZE, STRIDE, WINDOW)
    acc1 = tl.zeros([BLOCK_ROWS, V1], tl.float32)
    acc2 = tl.zeros([BLOCK_ROWS, V2 if V2 > 0 else 16], tl.float32)
    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    if IS_WINDOW:
        for key in tl.range(start, middle, BLOCK_KEYS):
            acc1, acc2, row_max, row_sum = _forward_step(
                acc1, acc2, row_max, row_sum, q1, q2, k_ptr, v_ptr, k_row0, num_keys, group, key, first, end, last_end, factor, coarse_factor,
                G, D_K, D_V, K1, K2, V1, V2, BLOCK_KEYS, EXACT, RING, BOTH_ENDS,
            )  # fmt: skip
    for key in tl.range(middle, tail, BLOCK_KEYS):
        acc1, acc2, row_max, row_sum = _forward_step(
            acc1, acc2, row_max, row_sum, q1, q2, k_ptr, v_ptr, k_row0, num_keys, group, key, first, end, last_end, factor, coarse_factor,
            G, D_K, D_V, K1, K2, V1, V2, BLOCK_KEYS, EXACT, RING, NONE,
        )  # fmt: skip
    for key in tl.range(tail, last_end, BLOCK_KEYS):
        acc1, acc2, row_max, row_sum = _forward_step(
            acc1, acc2, row_max, row_sum, q1, q2, k_ptr, v_ptr, k_row0, num_keys, group, key, first, end, last_end, factor, coarse_factor,
            G, D_K, D_V, K1, K2, V1, V2, BLOCK_KEYS, EXACT, RING, LAST_END,
        )  # fmt: skip
    sees_any = first < end
    largest = tl.where(sees_any, row_max, 0.0)
    row_factor = coarser(largest * factor, factor, coarse_factor)
    inverse = 1.0 / tl.where(sees_any, divisor_of(row_sum, largest, row_factor, v_ptr.dtype.element_ty, EXACT), 1.0)
    # a row that sees nothing may hold NaN
    acc1 = tl.where(sees_any[:, None], acc1 * inverse[:, None], 0.0)
    store_columns(out_ptr, heads * D_V, exists, acc1, 0, V1, D_V)
    if exact_ptr is not None:
        store_columns(exact_ptr, heads * D_V, exists, acc1, 0, V1, D_V)
    if V2 > 0:
        acc2 = tl.where(sees_any[:, None], acc2 * inverse[:, None], 0.0)
        store_columns(out_ptr, heads * D_V, exists, acc2, V1, V2, D_V)
        if exact_ptr is not None:
            store_columns(exact_ptr, heads * D_V, exists, acc2, V1, V2, D_V)
    lse = log_sum(row_max * factor, tl.where(sees_any, row_sum, 1.0), EXACT)
    tl.store(lse_ptr + heads, tl.where(sees_any, lse, float("-inf")), mask=exists)


@CachedLaunch
@triton.jit
def lower_kernel(
    q_ptr, k_ptr, shift_ptr, extremes_ptr, cu_seqlens_ptr, cu_keys_ptr, query_start_ptr, query_count_ptr,
    num_rows, num_sequences, num_queries, num_keys, search_steps, factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    IS_WINDOW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    PACKED: tl.constexpr, CACHED: tl.constexpr, EXACT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Lower the shifts of rows with a single weight (`lower_alone`); each program takes some of the tiles of `num_rows` rows of q times heads.

    A tile may hold rows of several sequences; it reads from the first to the last key that one of them sees.
    """
    if tl.load(extremes_ptr) == 0:
        return
    HG: tl.constexpr = H // G
    for number in tl.range(tl.program_id(0), tl.cdiv(num_rows * HG, BLOCK_ROWS) * G, tl.num_programs(0)):
        rows = number // G * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        group = number % G
        query = rows // HG
        exists = query < num_rows
        if PACKED:
            sequence = find_sequence(query, cu_seqlens_ptr, num_sequences, search_steps)
            exists = exists & (sequence < num_sequences)
            sequence = tl.minimum(sequence, num_sequences - 1)
            t = query - tl.load(cu_seqlens_ptr + sequence)
            k_row0 = tl.load(cu_keys_ptr + sequence)
        else:
            sequence = tl.minimum(query // num_queries, num_sequences - 1)
            t = query % num_queries
            k_row0 = sequence * num_keys
            if CACHED:
                if query_count_ptr is not None:
                    exists = exists & (t < tl.load(query_count_ptr + sequence))
                t += tl.load(query_start_ptr + sequence)
        heads = wide(query) * H + group * HG + rows % HG
        shift = tl.load(shift_ptr + heads, mask=exists, other=float("inf"))
        if tl.max(is_lowerable(shift).to(tl.int32), 0) != 0:
            q1, q2 = _load_tile(q_ptr, heads, exists, D_K, K1, K2, True)
            first, end = visible_keys(tl.where(exists, t, -1), IS_WINDOW, SIZE, STRIDE, WINDOW)
            sees_any = first < end
            first += k_row0
            end = tl.where(sees_any, end + k_row0, 0)
            last_end = tl.max(end, 0)
            total = tl.zeros([BLOCK_ROWS], tl.float32)
            largest = tl.zeros([BLOCK_ROWS], tl.float32)
            for key in tl.range(tl.min(tl.where(sees_any, first, last_end), 0), last_end, BLOCK_KEYS):
                keys = key + tl.arange(0, BLOCK_KEYS)
                k1, k2 = _load_tile(k_ptr, wide(keys) * G + group, keys < last_end, D_K, K1, K2, True)
                is_visible = (keys[None, :] >= first[:, None]) & (keys[None, :] < end[:, None])
                scores = _products(q1, q2, k1, k2, K2)
                weights = tl.where(is_visible, exponential(scores * factor - shift[:, None], EXACT), 0.0)
                total += tl.sum(weights, 1)
                largest = tl.maximum(largest, tl.max(weights, 1))
            lower_alone(shift_ptr + heads, shift, total, largest, exists)


@triton.jit
def _dq_step(
    acc1, acc2, q1, q2, dout1, dout2, shift, delta, dlse, k_ptr, v_ptr, k_row0, group, start, first, end, last_end, factor, ends_from, lowering,
    G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, EXACT: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add dS @ k of the keys start .. start + BLOCK_KEYS - 1, with dS times `lowering`. The caller multiplies the sum by the scale.

    A masked tile may hold extreme rows. From key `ends_from` on, some row sees only a part of the tile.
    """
    keys = start + tl.arange(0, BLOCK_KEYS)
    key_mask = keys < last_end
    rows = (k_row0 + keys) * G + group
    k1, k2 = _load_tile(k_ptr, rows, key_mask, D_K, K1, K2, MASK != NONE)
    v1, v2 = _load_tile(v_ptr, rows, key_mask, D_V, V1, V2, MASK != NONE)
    scores = _products(q1, q2, k1, k2, K2)
    dweights = _products(dout1, dout2, v1, v2, V2)
    weights = exponential(scores * factor - shift[:, None], EXACT)
    if MASK != NONE:
        is_visible = keys[None, :] < end[:, None]
        if MASK == BOTH_ENDS:
            is_visible = is_visible & (keys[None, :] >= first[:, None])
        weights = tl.where(is_visible, restrained(weights, shift[:, None]), 0.0)
        # huge values may make the product with dO infinite
        dweights = tl.where(is_visible, dweights, 0.0)
        delta = refined_delta(weights, dweights, delta, dlse, shift, start >= ends_from, EXACT)
    dscores = weights * (dweights - delta[:, None])
    if k1.dtype == tl.float16:
        dscores *= lowering
    dscores = cast(dscores, k1.dtype)
    acc1 = dot(dscores, k1, acc1)
    if K2 > 0:
        acc2 = dot(dscores, k2, acc2)
    return acc1, acc2


@CachedLaunch
@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, extremes_ptr, dlse_ptr, gates_ptr, dq_ptr,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_tiles, num_columns, search_steps, scale, factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    IS_WINDOW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    PACKED: tl.constexpr, CACHED: tl.constexpr, EXACT: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Write dQ of one tile of rows; same grid as the forward kernel.

    GATE >= 0: the branch's output was scaled by gates[..., GATE]. ADD: dQ is added to the values there.
    """
    HG: tl.constexpr = H // G
    tile, sequence, group = program_position(num_tiles, num_columns)
    tile = num_tiles - 1 - tile
    is_extreme = tl.load(extremes_ptr) != 0
    lowering = 1.0
    if q_ptr.dtype.element_ty == tl.float16:
        lowering = power_of_two(-lowered_by(extremes_ptr))
        scale *= power_of_two(lowered_by(extremes_ptr))
    if PACKED:
        sequence = find_sequence(tile, cu_tiles_ptr, num_sequences, search_steps)
        if sequence >= num_sequences:
            return
        tile -= tl.load(cu_tiles_ptr + sequence)
    q_row0, num_rows, num_valid, position = query_rows(
        sequence, cu_seqlens_ptr, query_start_ptr, query_count_ptr, num_queries, PACKED, CACHED
    )
    k_row0 = tl.load(cu_keys_ptr + sequence).to(tl.int64) if PACKED else sequence.to(tl.int64) * num_keys
    row0 = tile * BLOCK_ROWS
    rows = row0 + tl.arange(0, BLOCK_ROWS)
    queries = rows // HG
    exists = queries < num_rows
    t = tl.where(queries < num_valid, position + queries, -1)
    heads = (q_row0 + queries) * H + group * HG + rows % HG
    q1 = load_columns(q_ptr, heads * D_K, exists, 0, K1, D_K, True)
    q2 = q1
    if K2 > 0:
        q2 = load_columns(q_ptr, heads * D_K, exists, K1, K2, D_K, True)
    dout1 = load_columns(dout_ptr, heads * D_V, exists, 0, V1, D_V, True)
    dout2 = dout1
    if V2 > 0:
        dout2 = load_columns(dout_ptr, heads * D_V, exists, V1, V2, D_V, True)
    shift = tl.load(shift_ptr + heads, mask=exists & (t >= 0), other=float("inf"))
    delta = tl.load(delta_ptr + heads, mask=exists, other=0.0)
    dlse = tl.zeros_like(delta)
    if dlse_ptr is not None:
        dlse = tl.load(dlse_ptr + heads, mask=exists, other=0.0).to(tl.float32)
    gate = tl.full([BLOCK_ROWS], 1.0, tl.float32)
    if GATE >= 0:
        gate = tl.load(gates_ptr + heads * 3 + GATE, mask=exists & (t >= 0), other=0.0).to(tl.float32)

    first, end = visible_keys(t, IS_WINDOW, SIZE, STRIDE, WINDOW)
    t_first = position + row0 // HG
    t_last = position + tl.minimum((row0 + BLOCK_ROWS - 1) // HG, num_valid - 1)
    start, middle, tail, last_end = _key_loops(t_first, t_last, BLOCK_KEYS, IS_WINDOW, SIZE, STRIDE, WINDOW)
    acc1 = tl.zeros([BLOCK_ROWS, K1], tl.float32)
    acc2 = tl.zeros([BLOCK_ROWS, K2 if K2 > 0 else 16], tl.float32)
    if IS_WINDOW:
        for key in tl.range(start, middle, BLOCK_KEYS):
            acc1, acc2 = _dq_step(
                acc1, acc2, q1, q2, dout1, dout2, shift, delta, dlse, k_ptr, v_ptr, k_row0, group, key, first, end, last_end,
                factor, start, lowering, G, D_K, D_V, K1, K2, V1, V2, BLOCK_KEYS, EXACT, BOTH_ENDS,
            )  # fmt: skip
    # if a row is extreme, the masked loop computes every tile
    unmasked_end = tl.where(is_extreme, middle, tail)
    for key in tl.range(middle, unmasked_end, BLOCK_KEYS):
        acc1, acc2 = _dq_step(
            acc1, acc2, q1, q2, dout1, dout2, shift, delta, dlse, k_ptr, v_ptr, k_row0, group, key, first, end, last_end,
            factor, tail, lowering, G, D_K, D_V, K1, K2, V1, V2, BLOCK_KEYS, EXACT, NONE,
        )  # fmt: skip
    for key in tl.range(unmasked_end, last_end, BLOCK_KEYS):
        acc1, acc2 = _dq_step(
            acc1, acc2, q1, q2, dout1, dout2, shift, delta, dlse, k_ptr, v_ptr, k_row0, group, key, first, end, last_end,
            factor, tail, lowering, G, D_K, D_V, K1, K2, V1, V2, BLOCK_KEYS, EXACT, LAST_END,
        )  # fmt: skip
    # an invalid row may hold NaN
    counts = (t >= 0)[:, None]
    acc1 = tl.where(counts, acc1 * (scale * gate)[:, None], 0.0)
    if ADD:
        acc1 += load_columns(dq_ptr, heads * D_K, exists, 0, K1, D_K, True).to(tl.float32)
    store_columns(dq_ptr, heads * D_K, exists, acc1, 0, K1, D_K)
    if K2 > 0:
        acc2 = tl.where(counts, acc2 * (scale * gate)[:, None], 0.0)
        if ADD:
            acc2 += load_columns(dq_ptr, heads * D_K, exists, K1, K2, D_K, True).to(tl.float32)
        store_columns(dq_ptr, heads * D_K, exists, acc2, K1, K2, D_K)


@triton.jit
def _dkdv_step(
    dk1, dk2, dv1, dv2, k1, k2, v1, v2, q_ptr, dout_ptr, shift_ptr, delta_ptr, gates_ptr, position, row, last_row,
    keys, factor, lowering, H: tl.constexpr, HG: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    IS_WINDOW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    GATE: tl.constexpr, BLOCK_ROWS: tl.constexpr, EXACT: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add the contribution of rows row .. row + BLOCK_ROWS - 1 to dK and dV of `keys`; everything is transposed: (keys, rows).

    q, dO, shift, delta and gates point to the first head of the group in the sequence's first row.
    """
    rows = row + tl.arange(0, BLOCK_ROWS)
    exists = rows < last_row
    if BLOCK_ROWS % HG == 0:
        # a tile starts at a query's first head, so only one number changes from tile to tile
        lanes = tl.arange(0, BLOCK_ROWS)
        heads = lanes // HG * H + lanes % HG
        skipped = wide(row // HG) * H
        q_ptr += skipped * D_K
        dout_ptr += skipped * D_V
        shift_ptr += skipped
        delta_ptr += skipped
        if GATE >= 0:
            gates_ptr += skipped * 3
    else:
        heads = (rows // HG).to(tl.int64) * H + rows % HG
    q1 = load_columns(q_ptr, heads * D_K, exists, 0, K1, D_K, MASK != NONE)
    scores = dot(k1, tl.trans(q1), tl.zeros([k1.shape[0], BLOCK_ROWS], tl.float32))
    q2 = q1
    if K2 > 0:
        q2 = load_columns(q_ptr, heads * D_K, exists, K1, K2, D_K, MASK != NONE)
        scores = dot(k2, tl.trans(q2), scores)
    shift = tl.load(shift_ptr + heads, mask=exists, other=float("inf"))
    delta = tl.load(delta_ptr + heads, mask=exists, other=0.0)
    weights = exponential(scores * factor - shift[None, :], EXACT)
    if MASK != NONE:
        first, end = visible_keys(tl.where(exists, position + rows // HG, -1), IS_WINDOW, SIZE, STRIDE, WINDOW)
        is_visible = (keys[:, None] >= first[None, :]) & (keys[:, None] < end[None, :])
        # a masked tile may hold extreme rows
        weights = tl.where(is_visible, restrained(weights, shift[None, :]), 0.0)
    dout1 = load_columns(dout_ptr, heads * D_V, exists, 0, V1, D_V, MASK != NONE)
    dweights = dot(v1, tl.trans(dout1), tl.zeros([k1.shape[0], BLOCK_ROWS], tl.float32))
    dout2 = dout1
    if V2 > 0:
        dout2 = load_columns(dout_ptr, heads * D_V, exists, V1, V2, D_V, MASK != NONE)
        dweights = dot(v2, tl.trans(dout2), dweights)
    if GATE >= 0:
        weights *= tl.load(gates_ptr + heads * 3 + GATE, mask=exists, other=0.0).to(tl.float32)[None, :]
    dv1 = dot(cast(weights, dout1.dtype), dout1, dv1)
    if V2 > 0:
        dv2 = dot(cast(weights, dout1.dtype), dout2, dv2)
    dscores = weights * (dweights - delta[None, :])
    if MASK != NONE:
        # the end of a store may be NaN, and huge values may make the product with dO infinite
        dscores = tl.where(is_visible, dscores, 0.0)
    if q1.dtype == tl.float16:
        dscores *= lowering
    dscores = cast(dscores, q1.dtype)
    dk1 = dot(dscores, q1, dk1)
    if K2 > 0:
        dk2 = dot(dscores, q2, dk2)
    return dk1, dk2, dv1, dv2


@CachedLaunch
@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, extremes_ptr, gates_ptr, dk_ptr, dv_ptr,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_key_rows, num_tiles, num_splits, num_columns, split_queries, search_steps, scale, factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    IS_WINDOW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    PACKED: tl.constexpr, CACHED: tl.constexpr, EXACT: tl.constexpr, GATE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Write the parts of dK and dV of one tile of keys that come from the queries of one split; grid (tiles * splits * columns * G,).

    Splits begin at the sequence's start and have `split_queries` queries each. Split s writes to row s * num_key_rows + key row, so that the
    splits can be summed in a fixed order. A split without a query writes zeros.
    """
    HG: tl.constexpr = H // G
    tile, sequence, group = program_position(num_tiles * num_splits, num_columns)
    # late splits first: their queries see every key, those of early splits only some
    split = num_splits - 1 - tile // num_tiles
    tile = tile % num_tiles
    if PACKED:
        sequence = find_sequence(tile, cu_tiles_ptr, num_sequences, search_steps)
        if sequence >= num_sequences:
            return
        tile -= tl.load(cu_tiles_ptr + sequence)
    q_row0, _num_rows, num_valid, position = query_rows(
        sequence, cu_seqlens_ptr, query_start_ptr, query_count_ptr, num_queries, PACKED, CACHED
    )
    k_row0 = sequence.to(tl.int64) * num_keys
    if PACKED:
        k_row0 = tl.load(cu_keys_ptr + sequence).to(tl.int64)
        num_keys = (tl.load(cu_keys_ptr + sequence + 1) - k_row0).to(tl.int32)
    key0 = tile * BLOCK_KEYS
    keys = key0 + tl.arange(0, BLOCK_KEYS)
    key_mask = keys < num_keys
    rows = (k_row0 + keys) * G + group
    k1 = load_columns(k_ptr, rows * D_K, key_mask, 0, K1, D_K, True)
    v1 = load_columns(v_ptr, rows * D_V, key_mask, 0, V1, D_V, True)
    k2 = k1
    v2 = v1
    if K2 > 0:
        k2 = load_columns(k_ptr, rows * D_K, key_mask, K1, K2, D_K, True)
    if V2 > 0:
        v2 = load_columns(v_ptr, rows * D_V, key_mask, V1, V2, D_V, True)

    # queries t that see some of the keys: t_from .. t_end - 1; all of them: t_full .. t_full_end - 1
    last_key = tl.minimum(key0 + BLOCK_KEYS, num_keys) - 1
    t_end = position + num_valid
    if IS_WINDOW:
        t_from = key0
        t_full = last_key
        t_full_end = key0 + WINDOW
        t_end = tl.minimum(t_end, last_key + WINDOW)
    else:
        t_from = key0 * STRIDE + SIZE - 1
        t_full = last_key * STRIDE + SIZE - 1
        t_full_end = t_end
    t_from = tl.maximum(t_from, position + split * split_queries)
    t_end = tl.minimum(t_end, position + (split + 1) * split_queries)
    row_from = (t_from - position) * HG
    row_end = tl.maximum((t_end - position) * HG, row_from)
    row_full = tl.minimum(tl.maximum((t_full - position) * HG, row_from), row_end)
    middle = tl.minimum(row_from + tl.cdiv(row_full - row_from, BLOCK_ROWS) * BLOCK_ROWS, row_end)
    row_full_end = tl.minimum((t_full_end - position) * HG, row_end)
    tail = middle + tl.maximum(row_full_end - middle, 0) // BLOCK_ROWS * BLOCK_ROWS

    dk1 = tl.zeros([BLOCK_KEYS, K1], tl.float32)
    dk2 = tl.zeros([BLOCK_KEYS, K2 if K2 > 0 else 16], tl.float32)
    dv1 = tl.zeros([BLOCK_KEYS, V1], tl.float32)
    dv2 = tl.zeros([BLOCK_KEYS, V2 if V2 > 0 else 16], tl.float32)
    # if a row is extreme, the masked loop computes every tile
    tail = tl.where(tl.load(extremes_ptr) != 0, middle, tail)
    lowering = 1.0
    if q_ptr.dtype.element_ty == tl.float16:
        lowering = power_of_two(-lowered_by(extremes_ptr))
        scale *= power_of_two(lowered_by(extremes_ptr))
    head0 = q_row0 * H + group * HG
    q_ptr += head0 * D_K
    dout_ptr += head0 * D_V
    shift_ptr += head0
    delta_ptr += head0
    if GATE >= 0:
        gates_ptr += head0 * 3
    for row in tl.range(row_from, middle, BLOCK_ROWS):
        dk1, dk2, dv1, dv2 = _dkdv_step(
            dk1, dk2, dv1, dv2, k1, k2, v1, v2, q_ptr, dout_ptr, shift_ptr, delta_ptr, gates_ptr, position, row, row_end,
            keys, factor, lowering, H, HG, D_K, D_V, K1, K2, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, GATE, BLOCK_ROWS, EXACT, BOTH_ENDS,
        )  # fmt: skip
    for row in tl.range(middle, tail, BLOCK_ROWS):
        dk1, dk2, dv1, dv2 = _dkdv_step(
            dk1, dk2, dv1, dv2, k1, k2, v1, v2, q_ptr, dout_ptr, shift_ptr, delta_ptr, gates_ptr, position, row, row_end,
            keys, factor, lowering, H, HG, D_K, D_V, K1, K2, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, GATE, BLOCK_ROWS, EXACT, NONE,
        )  # fmt: skip
    for row in tl.range(tail, row_end, BLOCK_ROWS):
        dk1, dk2, dv1, dv2 = _dkdv_step(
            dk1, dk2, dv1, dv2, k1, k2, v1, v2, q_ptr, dout_ptr, shift_ptr, delta_ptr, gates_ptr, position, row, row_end,
            keys, factor, lowering, H, HG, D_K, D_V, K1, K2, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, GATE, BLOCK_ROWS, EXACT, BOTH_ENDS,
        )  # fmt: skip
    rows += split.to(tl.int64) * num_key_rows * G
    store_columns(dk_ptr, rows * D_K, key_mask, dk1 * scale, 0, K1, D_K)
    store_columns(dv_ptr, rows * D_V, key_mask, dv1, 0, V1, D_V)
    if K2 > 0:
        store_columns(dk_ptr, rows * D_K, key_mask, dk2 * scale, K1, K2, D_K)
    if V2 > 0:
        store_columns(dv_ptr, rows * D_V, key_mask, dv2, V1, V2, D_V)


@CachedLaunch
@triton.jit
def delta_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, v_ptr, delta_ptr, shift_ptr, extremes_ptr, num_rows, num_values, num_value_programs,
    D_V: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Write, for each (query, head), delta = dO . O - dlse, which the softmax's gradient subtracts, and `shift_of` lse, both in float32.

    A row whose dO and dlse are 0 counts as one that sees nothing. The extremes go to `extremes_ptr`, int32 (4,). The first
    `num_value_programs` programs find the extremes of the values: others hide the time in which they wait for memory.
    """
    HALF: tl.constexpr = dout_ptr.dtype.element_ty == tl.float16
    if tl.program_id(0) < num_value_programs:
        _note_values(_load_values(v_ptr, num_values, D_V, WIDTH, BLOCK_ROWS), extremes_ptr, HALF)
        return
    rows = (tl.program_id(0) - num_value_programs).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = rows < num_rows
    dout = load_columns(dout_ptr, rows * D_V, exists, 0, WIDTH, D_V, True).to(tl.float32)
    dlse = tl.zeros([BLOCK_ROWS], tl.float32)
    if dlse_ptr is not None:
        dlse = tl.load(dlse_ptr + rows, mask=exists, other=0.0).to(tl.float32)
    _store_delta(out_ptr, lse_ptr, dout, dlse, delta_ptr, shift_ptr, extremes_ptr, rows, exists, D_V, WIDTH, EXACT)
    if HALF:
        note_largest(extremes_ptr + 1, tl.sum(dout * dout, 1))
        note_largest(extremes_ptr + 3, tl.abs(dlse))


@CachedLaunch
@triton.jit
def branch_deltas_kernel(
    dout_ptr, cmp_ptr, slc_ptr, win_ptr, cmp_lse_ptr, slc_lse_ptr, win_lse_ptr, v_cmp_ptr, v_slc_ptr, v_win_ptr, gates_ptr,
    deltas_ptr, shifts_ptr, extremes_ptr, dgates_ptr, num_rows, num_cmp, num_slc, num_win, num_value_programs,
    D_V: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Write dO . O of the three branches twice: as delta, float32 (3, rows), and as the gradient of the gates, (rows, 3).

    Also write the shifts of the scores, float32 (3, rows), and the extremes, int32 (3, 4), as `delta_kernel` does. Without `cmp_ptr` the
    gradient of its gates is 0, and nothing else is written for it.
    """
    HALF: tl.constexpr = dout_ptr.dtype.element_ty == tl.float16
    if tl.program_id(0) < num_value_programs:
        # loaded before any of them is waited for
        v_slc = _load_values(v_slc_ptr, num_slc, D_V, WIDTH, BLOCK_ROWS)
        v_win = _load_values(v_win_ptr, num_win, D_V, WIDTH, BLOCK_ROWS)
        if cmp_ptr is not None:
            _note_values(_load_values(v_cmp_ptr, num_cmp, D_V, WIDTH, BLOCK_ROWS), extremes_ptr, HALF)
        _note_values(v_slc, extremes_ptr + 4, HALF)
        _note_values(v_win, extremes_ptr + 8, HALF)
        return
    rows = (tl.program_id(0) - num_value_programs).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = rows < num_rows
    dout = load_columns(dout_ptr, rows * D_V, exists, 0, WIDTH, D_V, True).to(tl.float32)
    if cmp_ptr is None:
        tl.store(dgates_ptr + 3 * rows, tl.zeros([BLOCK_ROWS], dgates_ptr.dtype.element_ty), mask=exists)
    else:
        _store_branch(
            cmp_ptr, cmp_lse_ptr, dout, gates_ptr, deltas_ptr, shifts_ptr, extremes_ptr, dgates_ptr, rows, exists, D_V, WIDTH, EXACT, HALF
        )  # fmt: skip
    deltas_ptr += num_rows
    shifts_ptr += num_rows
    _store_branch(
        slc_ptr, slc_lse_ptr, dout, gates_ptr + 1, deltas_ptr, shifts_ptr, extremes_ptr + 4, dgates_ptr + 1, rows, exists, D_V, WIDTH, EXACT, HALF
    )  # fmt: skip
    deltas_ptr += num_rows
    shifts_ptr += num_rows
    _store_branch(
        win_ptr, win_lse_ptr, dout, gates_ptr + 2, deltas_ptr, shifts_ptr, extremes_ptr + 8, dgates_ptr + 2, rows, exists, D_V, WIDTH, EXACT, HALF
    )  # fmt: skip


@triton.jit
def _store_branch(
    out_ptr, lse_ptr, dout, gate_ptr, delta_ptr, shift_ptr, extremes_ptr, dgate_ptr, rows, exists,
    D_V: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write the results of `branch_deltas_kernel` for one branch."""
    delta = _store_delta(out_ptr, lse_ptr, dout, 0.0, delta_ptr, shift_ptr, extremes_ptr, rows, exists, D_V, WIDTH, EXACT)
    tl.store(dgate_ptr + 3 * rows, cast(delta, dgate_ptr.dtype.element_ty), mask=exists)
    if HALF:
        gate = tl.load(gate_ptr + 3 * rows, mask=exists, other=0.0).to(tl.float32)
        note_largest(extremes_ptr + 1, tl.sum(dout * dout, 1) * tl.maximum(gate * gate, 1.0))


@triton.jit
def _store_delta(
    out_ptr, lse_ptr, dout, dlse, delta_ptr, shift_ptr, extremes_ptr, rows, exists,
    D_V: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write delta and the shift of the scores; set the flag of the extremes if some shift is WIDEST_REFINED or more, or dO HUGE. Return delta."""
    # a sum, because a maximum could hide NaN
    size = tl.sum(tl.abs(dout), 1)
    has_gradient = (size != 0) | (dlse != 0)
    out = load_columns(out_ptr, rows * D_V, exists, 0, WIDTH, D_V, True).to(tl.float32)
    delta = tl.where(has_gradient, tl.sum(out * dout, 1) - dlse, 0.0)
    tl.store(delta_ptr + rows, delta, mask=exists)
    lse = tl.load(lse_ptr + rows, mask=exists, other=float("-inf"))
    shift = shift_of(lse, EXACT)
    tl.store(shift_ptr + rows, tl.where(has_gradient, shift, float("inf")), mask=exists)
    # `== 0` also catches NaN
    _mark(extremes_ptr, (lse != float("-inf")) & ((tl.abs(shift) < WIDEST_REFINED) == 0) | ((size < HUGE) == 0))
    return delta


@triton.jit
def _load_values(v_ptr, num_rows, D_V: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return the program's rows of values in float32."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return load_columns(v_ptr, rows * D_V, rows < num_rows, 0, WIDTH, D_V, True).to(tl.float32)


@triton.jit
def _note_values(v, extremes_ptr, HALF: tl.constexpr):
    """Record the extremes of rows of values: whether a number is HUGE, or, for float16, the largest squared norm."""
    if HALF:
        note_largest(extremes_ptr + 2, tl.sum(v * v, 1))
    else:
        _mark(extremes_ptr, tl.max(tl.abs(v), 1) >= HUGE)


@triton.jit
def _mark(extremes_ptr, is_extreme):
    """Set the flag of the extremes if some row is extreme. Each such row stores it: a reduction would take time even if no row is extreme."""
    tl.store(extremes_ptr + tl.zeros_like(is_extreme.to(tl.int32)), tl.full(is_extreme.shape, 1, tl.int32), mask=is_extreme)


@triton.jit
def note_largest(extreme_ptr, numbers):
    """Raise the int32 at a pointer to the bits of the largest of `numbers` (all at least 0); infinities and NaN do not count."""
    bits = tl.where(numbers < float("inf"), numbers, 0.0).to(tl.int32, bitcast=True)
    largest = tl.max(bits, 0)
    # most programs need not write
    tl.atomic_max(extreme_ptr, largest, mask=largest > tl.load(extreme_ptr), sem="relaxed")


@CachedLaunch
@triton.jit
def add_splits_kernel(dk_splits_ptr, dv_splits_ptr, dk_ptr, dv_ptr, num_k, num_v, splits, BLOCK: tl.constexpr):
    """Write the sums of `splits` rows, which have num_k and num_v numbers, added in order; grid (blocks of the longer rows, 2)."""
    if tl.program_id(1) == 0:
        _add_splits(dk_splits_ptr, dk_ptr, num_k, splits, BLOCK)
    else:
        _add_splits(dv_splits_ptr, dv_ptr, num_v, splits, BLOCK)


@triton.jit
def _add_splits(splits_ptr, sum_ptr, num_columns, splits, BLOCK: tl.constexpr):
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < num_columns
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.range(0, splits):
        total += tl.load(splits_ptr + wide(split) * num_columns + columns, mask=exists, other=0.0)
    tl.store(sum_ptr + columns, cast(total, sum_ptr.dtype.element_ty), mask=exists)
