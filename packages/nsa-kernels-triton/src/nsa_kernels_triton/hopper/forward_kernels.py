"""Forward of attention over an interval of keys for compute capability 9.0: a producer warpgroup, two or three consumer warpgroups.

A program has the multiprocessor to itself. Each consumer warpgroup has 64 rows of a tile, and all of them read the same keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa_kernels_triton.cached_launch import CachedLaunch
from nsa_kernels_triton.hopper.tiles import (
    LN2,
    barrier,
    bits_of,
    float_of,
    layout_of,
    load_keys,
    load_tile,
    locate_tile,
    start_scores,
    store_tile,
    visible_keys,
)
from nsa_kernels_triton.tiles import EXTREME

SAFE_SUM = gl.constexpr(2.0**64)
"""Limit of a sum of weights: below it, float32 also holds the product of the sum and a value of this size."""


@gluon.jit
def tile_of(
    item, sequences,
    HG: gl.constexpr, IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, CACHED: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Return the group and rows of tile number `item`, and the keys start .. end - 1 that any of them sees.

    `sequences` are the kernel's arguments from cu_seqlens_ptr to search_steps without num_items. Tiles with the most keys come first. Every
    row sees the keys middle .. tail + KEYS - 2. A tile beyond the last sequence has no rows.
    """
    (
        cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
        num_sequences, num_queries, num_keys, num_tiles, num_columns, search_steps,
    ) = sequences  # fmt: skip
    is_tile, group, tile, q_row0, num_rows, num_valid, position, key_row0 = locate_tile(
        item, 0, cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
        num_sequences, num_queries, num_keys, num_tiles, num_columns, search_steps, PACKED, CACHED,
    )  # fmt: skip
    row0 = tile * ROWS
    t_first = position + row0 // HG
    t_last = position + gl.minimum((row0 + ROWS - 1) // HG, num_valid - 1)
    start, full_end = visible_keys(t_first, IS_WINDOW, SIZE, STRIDE, WINDOW)
    middle, end = visible_keys(t_last, IS_WINDOW, SIZE, STRIDE, WINDOW)
    if PACKED:
        num_rows = gl.where(is_tile, num_rows, 0)
    end = gl.where(is_tile & (t_last >= t_first), end, start)
    return group, q_row0, key_row0, row0, num_rows, num_valid, position, start, end, middle, full_end - KEYS + 1


@gluon.jit
def _wanted_tile(
    item, sequences, overflows_ptr, num_items, early, HG: gl.constexpr, IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr,
    WINDOW: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    REDO: gl.constexpr, SHARED: gl.constexpr, NUM_INITIAL: gl.constexpr, NUM_LOCAL: gl.constexpr,
):  # fmt: skip
    """Return the results of `tile_of`, and how many keys are left out after the first NUM_INITIAL blocks.

    REDO: a tile that need not be computed again gets no rows and no keys.
    """
    group, q_row0, key_row0, row0, num_rows, num_valid, position, start, end, middle, tail = tile_of(
        item, sequences, HG, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, ROWS, KEYS
    )
    left_out = 0
    if SHARED:
        t_first = position + row0 // HG
        left_out = gl.where(t_first >= early, gl.maximum(t_first // KEYS + 1 - NUM_LOCAL - NUM_INITIAL, 0) * KEYS, 0)
    if REDO:
        overflows = gl.load(overflows_ptr + item)
        for part in gl.static_range(1, PARTS):
            overflows = gl.maximum(overflows, gl.load(overflows_ptr + part * num_items + item))
        num_rows = gl.where(overflows > 0, num_rows, 0)
        end = gl.where(overflows > 0, end, start)
    return group, q_row0, key_row0, row0, num_rows, num_valid, position, start, end, middle, tail, left_out


@gluon.jit
def _key_of(index, left_out, NUM_INITIAL: gl.constexpr, KEYS: gl.constexpr, SHARED: gl.constexpr):
    """Return the key at position `index` among the keys that are not left out."""
    key = index
    if SHARED:
        key = index + gl.where(index < NUM_INITIAL * KEYS, 0, left_out)
    return key


@gluon.jit
def _load(
    q_ptr, k_ptr, v_ptr, buffers, sequences, overflows_ptr, num_items, early,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    PARTS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    SHARED: gl.constexpr, NUM_INITIAL: gl.constexpr, NUM_LOCAL: gl.constexpr,
):  # fmt: skip
    """Load rows and keys of the program's tiles; then load rows and keys of the tiles that must be computed again."""
    loaded = _load_tiles(
        q_ptr, k_ptr, v_ptr, buffers, sequences, overflows_ptr, num_items, early, gl.to_tensor(0), gl.to_tensor(0),
        H, G, D_K, K1, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES,
        False, SHARED, NUM_INITIAL, NUM_LOCAL,
    )  # fmt: skip
    first_number, num_again = _tiles_of_second_pass(buffers[12], overflows_ptr, num_items, PARTS)
    _load_tiles(
        q_ptr, k_ptr, v_ptr, buffers, sequences, overflows_ptr, num_again, early, first_number, loaded,
        H, G, D_K, K1, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES,
        True, SHARED, NUM_INITIAL, NUM_LOCAL,
    )  # fmt: skip


@gluon.jit
def _tiles_of_second_pass(passed, overflows_ptr, num_items, PARTS: gl.constexpr):
    """Wait until every part has finished its tiles; return their number, and the number of items of a second pass: all items or 0."""
    mbarrier.wait(passed.index(0), 0)
    first_number = gl.cdiv(num_items - gl.program_id(0), gl.num_programs(0))
    return first_number, _any_overflow(overflows_ptr, num_items, PARTS) * num_items


@gluon.jit
def _any_overflow(overflows_ptr, num_items, PARTS: gl.constexpr):
    """Return 1 if one of the program's tiles must be computed again, else 0."""
    BLOCK: gl.constexpr = 128
    found = 0
    for first in range(gl.program_id(0), num_items, BLOCK * gl.num_programs(0)):
        items = first + gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0])) * gl.num_programs(0)
        for part in gl.static_range(PARTS):
            overflows = gl.load(overflows_ptr + part * num_items + items, mask=items < num_items, other=0)
            found = gl.maximum(found, gl.max(overflows, 0))
    return found


@gluon.jit
def _load_tiles(
    q_ptr, k_ptr, v_ptr, buffers, sequences, overflows_ptr, num_items, early, first_number, loaded,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    PARTS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, REDO: gl.constexpr,
    SHARED: gl.constexpr, NUM_INITIAL: gl.constexpr, NUM_LOCAL: gl.constexpr,
):  # fmt: skip
    """Load the rows of the program's tiles, and fill the ring buffers with their keys and values; keys from `end` on are zeros.

    `first_number` tiles of rows and `loaded` tiles of keys were loaded before; return the total number of loaded tiles of keys.
    """
    q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = buffers
    HG: gl.constexpr = H // G
    PART: gl.constexpr = ROWS // PARTS
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        group, q_row0, key_row0, row0, num_rows, _valid, _position, start, end, _middle, _tail, left_out = _wanted_tile(
            item, sequences, overflows_ptr, num_items, early, HG, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS,
            REDO, SHARED, NUM_INITIAL, NUM_LOCAL,
        )  # fmt: skip
        number = first_number + item // gl.num_programs(0)
        q_stage = number % 2
        q_tile = q_ptr + (q_row0 * H + group * HG) * D_K
        mbarrier.wait(q_empty.index(q_stage), ((number // 2) & 1) ^ 1)
        for part in gl.static_range(PARTS):
            load_tile(q_tile, q1_smem.index(PARTS * q_stage + part), row0 + part * PART, num_rows * HG, H, HG, D_K, 0, K1, PART)
            if K2 > 0:
                load_tile(q_tile, q2_smem.index(PARTS * q_stage + part), row0 + part * PART, num_rows * HG, H, HG, D_K, K1, K2, PART)
        async_copy.mbarrier_arrive(q_full.index(q_stage), increment_count=False)
        k_tile = k_ptr + (key_row0 * G + group) * D_K
        v_tile = v_ptr + (key_row0 * G + group) * D_V
        for key_index in range(start, end - left_out, KEYS):
            key = _key_of(key_index, left_out, NUM_INITIAL, KEYS, SHARED)
            load_keys(
                k_tile, v_tile, key, end, loaded, k1_smem, k2_smem, v1_smem, v2_smem, k_full, k_empty, v_full, v_empty,
                G, D_K, K1, K2, D_V, V1, V2, KEYS, STAGES,
            )  # fmt: skip
            loaded += 1
    return loaded


@gluon.jit
def _chosen(key, own, word, is_early, KEYS: gl.constexpr, NUM_INITIAL: gl.constexpr, NUM_LOCAL: gl.constexpr):
    """Return which rows chose the block that starts at `key`. Early rows have a bit for each block; later rows see only forced blocks here."""
    block = key // KEYS
    is_forced = (block < NUM_INITIAL) | (block > own - NUM_LOCAL)
    return gl.where(is_early, (word >> (block % 64)) % 2 != 0, is_forced)


@gluon.jit
def _weights(
    scores, shift, peak, first, end, chosen, key, is_masked, is_first, factor,
    SCORES: gl.constexpr, IS_WINDOW: gl.constexpr, KEYS: gl.constexpr, OPTIMISTIC: gl.constexpr, REDO: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Return the weights of a tile of keys, the rows' new shifts and peaks, and the factor for the sums so far.

    The shift of a row, its maximum so far, is subtracted from its scores before they become weights. OPTIMISTIC: the shift is the
    maximum of the first tile in which the row sees a key, and the sums so far need no factor; `is_first` is true if this may be that tile
    for some row. REDO: scores and shifts are not multiplied by the factor, only their difference is, because the rounding of a score could
    change a weight too much. Otherwise the peak of a row is its maximum without the factor; the shift is peak * factor, rounded.
    """
    if is_masked:
        keys = key + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        is_visible = keys[None, :] < end[:, None]
        if IS_WINDOW:
            is_visible = is_visible & (keys[None, :] >= first[:, None])
        scores = gl.where(is_visible, scores, float("-inf"))
    found = shift
    if OPTIMISTIC:
        if is_first:
            found = gl.where(shift == float("-inf"), _maxima(scores, chosen, SHARED) * factor, shift)
    elif REDO:
        found = gl.maximum(shift, _maxima(scores, chosen, SHARED))
    else:
        peak = gl.maximum(peak, _maxima(scores, chosen, SHARED))
        found = peak * factor
    # a row that has seen no key yet gets shift 0: exp2(-inf - 0) is 0, but exp2(-inf + inf) would be NaN
    lowered = gl.where(found == float("-inf"), 0.0, found)
    rescale = gl.exp2((shift - lowered) * (factor if REDO else 1.0))
    if SHARED:
        lowered = gl.where(chosen, lowered, float("inf"))
    if REDO:
        return gl.exp2((scores - lowered[:, None]) * factor), found, peak, rescale
    return gl.exp2(scores * factor - lowered[:, None]), found, peak, rescale


@gluon.jit
def _maxima(scores, chosen, SHARED: gl.constexpr):
    """Return the rows' largest scores, -inf for rows that did not choose the tile."""
    maxima = gl.max(scores, 1)
    if SHARED:
        maxima = gl.where(chosen, maxima, float("-inf"))
    return maxima


@gluon.jit
def _thread_sums(weights, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Return (ROWS, 4): for each of a row's four threads, the sum over its columns. Thread c holds columns 8 j + 2 c and 8 j + 2 c + 1."""
    return gl.sum(gl.sum(weights.reshape([ROWS, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def _thread_tops(weights, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Return (ROWS, 4), the bits of the largest weight of the same columns, as integers: one instruction compares three of them."""
    return gl.max(gl.max(bits_of(weights).reshape([ROWS, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def _attend(
    part: gl.constexpr, buffers, sequences, overflows_ptr, num_items, early, out_ptr, lse_ptr, chosen_ptr, factor,
    H: gl.constexpr, G: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    PARTS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, OPTIMISTIC: gl.constexpr,
    SHARED: gl.constexpr, NUM_INITIAL: gl.constexpr, NUM_LOCAL: gl.constexpr,
):  # fmt: skip
    """Write out and lse of one part of the rows of the program's tiles."""
    used = _attend_to_tiles(
        part, buffers, sequences, overflows_ptr, num_items, early, out_ptr, lse_ptr, chosen_ptr, factor, gl.to_tensor(0), gl.to_tensor(0),
        H, G, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES,
        OPTIMISTIC, False, SHARED, NUM_INITIAL, NUM_LOCAL,
    )  # fmt: skip
    mbarrier.arrive(buffers[12].index(0), count=1)
    first_number, num_again = _tiles_of_second_pass(buffers[12], overflows_ptr, num_items, PARTS)
    _attend_to_tiles(
        part, buffers, sequences, overflows_ptr, num_again, early, out_ptr, lse_ptr, chosen_ptr, factor, first_number, used,
        H, G, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES,
        False, True, SHARED, NUM_INITIAL, NUM_LOCAL,
    )  # fmt: skip


@gluon.jit
def _attend_to_tiles(
    part: gl.constexpr, buffers, sequences, overflows_ptr, num_items, early, out_ptr, lse_ptr, chosen_ptr, factor, first_number, used,
    H: gl.constexpr, G: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    PARTS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, OPTIMISTIC: gl.constexpr, REDO: gl.constexpr,
    SHARED: gl.constexpr, NUM_INITIAL: gl.constexpr, NUM_LOCAL: gl.constexpr,
):  # fmt: skip
    """Write out and lse of one part of the rows of the program's tiles. The product with v overlaps with the next keys' softmax.

    Without REDO, also write flags for tiles in which a sum of weights or a shift became too large. With REDO, write only the rows where
    that happened. `first_number` tiles of rows and `used` tiles of keys were read before; return the total number of tiles of keys.
    """
    q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = buffers
    HG: gl.constexpr = H // G
    PART: gl.constexpr = ROWS // PARTS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    ACC1: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, V1, 16])
    ACC2: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, max(V2, 16), 16])
    LEFT1: gl.constexpr = gl.DotOperandLayout(0, ACC1, 2)
    LEFT2: gl.constexpr = gl.DotOperandLayout(0, ACC2, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    PENDING: gl.constexpr = 2 if V2 > 0 else 1
    dtype: gl.constexpr = q1_smem.dtype
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        group, q_row0, _key_row0, row0, num_rows, num_valid, position, start, last_end, middle, tail, left_out = _wanted_tile(
            item, sequences, overflows_ptr, num_items, early, HG, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS,
            REDO, SHARED, NUM_INITIAL, NUM_LOCAL,
        )  # fmt: skip
        is_early = position + row0 // HG < early
        number = first_number + item // gl.num_programs(0)
        q_stage = number % 2
        q1 = q1_smem.index(PARTS * q_stage + part)
        q2 = q2_smem.index(PARTS * q_stage + part)
        row0 += part * PART
        rows = row0 + gl.arange(0, PART, OF_ROWS)
        t = gl.where(rows // HG < num_valid, position + rows // HG, -1)
        first, end = visible_keys(t, IS_WINDOW, SIZE, STRIDE, WINDOW)
        own = t // KEYS
        word = own
        if SHARED:
            word = gl.load(chosen_ptr + (q_row0 + rows // HG) * G + group, mask=(t >= 0) & is_early, other=0)
        chosen = t >= 0
        shift = gl.full([PART], float("-inf"), gl.float32, OF_ROWS)
        peak = shift
        row_sum = gl.zeros([PART], gl.float32, OF_ROWS)
        divisor = row_sum
        acc1 = gl.zeros([PART, V1], gl.float32, ACC1)
        acc2 = acc1
        if V2 > 0:
            acc2 = gl.zeros([PART, V2], gl.float32, ACC2)
        zeros = gl.zeros([PART, KEYS], gl.float32, SCORES)
        num_key_tiles = gl.cdiv(last_end - left_out - start, KEYS)
        mbarrier.wait(q_full.index(q_stage), (number // 2) & 1)
        if num_key_tiles > 0:
            left1 = q1
            left2 = q2
            if K2 > V2:
                # if values have one part, registers have room for q, and tiles of keys are narrow
                left1 = q1.load(gl.DotOperandLayout(0, SCORES, 2))
                left2 = q2.load(gl.DotOperandLayout(0, SCORES, 2))
            stage = used % STAGES
            mbarrier.wait(k_full.index(stage), (used // STAGES) & 1)
            fence_async_shared()
            scores = start_scores(left1, left2, k1_smem.index(stage), k2_smem.index(stage), zeros, K2)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            key = _key_of(start, left_out, NUM_INITIAL, KEYS, SHARED)
            if SHARED:
                chosen = _chosen(key, own, word, is_early, KEYS, NUM_INITIAL, NUM_LOCAL)
            weights, shift, peak, rescale = _weights(
                scores, shift, peak, first, end, chosen, key, (key < middle) | (key >= tail), True, factor,
                SCORES, IS_WINDOW, KEYS, OPTIMISTIC, REDO, SHARED,
            )  # fmt: skip
            sums = _thread_sums(weights, PART, KEYS)
            if OPTIMISTIC:
                tops = _thread_tops(weights, PART, KEYS)
            left = gl.convert_layout(weights.to(dtype), LEFT1)
            for tile in range(1, num_key_tiles):
                before = (used + tile - 1) % STAGES
                stage = (used + tile) % STAGES
                mbarrier.wait(k_full.index(stage), ((used + tile) // STAGES) & 1)
                mbarrier.wait(v_full.index(before), ((used + tile - 1) // STAGES) & 1)
                fence_async_shared()
                scores = start_scores(left1, left2, k1_smem.index(stage), k2_smem.index(stage), zeros, K2)
                acc1 = warpgroup_mma(left, v1_smem.index(before), acc1, is_async=True)
                if V2 > 0:
                    acc2 = warpgroup_mma(gl.convert_layout(left, LEFT2), v2_smem.index(before), acc2, is_async=True)
                scores = warpgroup_mma_wait(PENDING, deps=[scores])
                mbarrier.arrive(k_empty.index(stage), count=1)
                key = _key_of(start + tile * KEYS, left_out, NUM_INITIAL, KEYS, SHARED)
                is_first = key <= middle
                if SHARED:
                    # if no block is chosen by all rows, any block may be a row's first
                    is_first = NUM_INITIAL == 0
                    chosen = _chosen(key, own, word, is_early, KEYS, NUM_INITIAL, NUM_LOCAL)
                weights, shift, peak, rescale = _weights(
                    scores, shift, peak, first, end, chosen, key, (key < middle) | (key >= tail), is_first, factor,
                    SCORES, IS_WINDOW, KEYS, OPTIMISTIC, REDO, SHARED,
                )  # fmt: skip
                if OPTIMISTIC:
                    tops = gl.maximum(tops, _thread_tops(weights, PART, KEYS))
                else:
                    sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, layout_of(sums)))[:, None]
                sums = sums + _thread_sums(weights, PART, KEYS)
                if V2 > 0:
                    acc1, acc2 = warpgroup_mma_wait(0, deps=[acc1, acc2])
                else:
                    acc1 = warpgroup_mma_wait(0, deps=[acc1])
                mbarrier.arrive(v_empty.index(before), count=1)
                if not OPTIMISTIC:
                    acc1 = acc1 * gl.convert_layout(rescale, gl.SliceLayout(1, ACC1))[:, None]
                    if V2 > 0:
                        acc2 = acc2 * gl.convert_layout(rescale, gl.SliceLayout(1, ACC2))[:, None]
                left = gl.convert_layout(weights.to(dtype), LEFT1)
            used += num_key_tiles
            before = (used - 1) % STAGES
            mbarrier.wait(v_full.index(before), ((used - 1) // STAGES) & 1)
            fence_async_shared()
            acc1 = warpgroup_mma(left, v1_smem.index(before), acc1, is_async=True)
            if V2 > 0:
                acc2 = warpgroup_mma(gl.convert_layout(left, LEFT2), v2_smem.index(before), acc2, is_async=True)
                acc1, acc2 = warpgroup_mma_wait(0, deps=[acc1, acc2])
            else:
                acc1 = warpgroup_mma_wait(0, deps=[acc1])
            mbarrier.arrive(v_empty.index(before), count=1)
            row_sum = gl.convert_layout(gl.sum(sums, 1), OF_ROWS)
            divisor = row_sum
            if not REDO:
                # in the divisor the largest weight is rounded to `dtype`: if it outweighs all others, the output is then its value. With
                # running maxima this weight differs from 1 only by the rounding of the shift, since the product is not rounded
                top = float_of(gl.convert_layout(gl.max(tops, 1), OF_ROWS)) if OPTIMISTIC else gl.exp2(gl.fma(peak, factor, -shift))
                divisor = row_sum + (top.to(dtype).to(gl.float32) - top)
        head0 = q_row0 * H + group * HG
        sees_any = first < end
        if SHARED:
            # extreme scores may all get weight 0, because the shift was rounded up
            sees_any = sees_any & ((row_sum != 0) | ((gl.abs(shift) >= EXTREME) & (shift != float("-inf"))))
        # a row that sees nothing may hold NaN
        inverse = gl.where(sees_any, 1.0 / divisor, 0.0)
        heads = head0 + (rows // HG).to(gl.int64) * H + rows % HG
        if REDO:
            shift = shift * factor
        # rounded once
        lse = gl.where(sees_any, shift * LN2 + gl.log2(gl.where(sees_any, row_sum, 1.0)) * LN2, float("-inf"))
        wanted = rows // HG < num_rows
        if not REDO:
            # `== 0` also catches NaN. Only rows marked here are written again, so that a row never depends on the other rows of its tile
            is_wrong = sees_any & (((row_sum < SAFE_SUM) & (gl.abs(shift) < EXTREME)) == 0)
            lse = gl.where(is_wrong, float("inf"), lse)
            flag = overflows_ptr + part * num_items + item
            gl.store(flag, 0)
        if REDO:
            wanted = gl.load(lse_ptr + heads, mask=wanted, other=0.0) == float("inf")
        # the epilogue reuses q's shared memory
        barrier()
        gl.store(lse_ptr + heads, lse, mask=wanted)
        if not REDO:
            # after the barrier, so that this overwrites the 0
            gl.store(flag + gl.zeros([PART], gl.int32, OF_ROWS), is_wrong.to(gl.int32), mask=is_wrong)
        out1_smem = _finish(q1, acc1, inverse, V1, PART, ACC1)
        out2_smem = out1_smem
        if V2 > 0:
            out2_smem = _finish(q2, acc2, inverse, V2, PART, ACC2)
        barrier()
        some = wanted if REDO else None
        store_tile(out_ptr + head0 * D_V, out1_smem, row0, num_rows * HG, H, HG, D_V, 0, V1, PART, some)
        if V2 > 0:
            store_tile(out_ptr + head0 * D_V, out2_smem, row0, num_rows * HG, H, HG, D_V, V1, V2, PART, some)
        barrier()
        mbarrier.arrive(q_empty.index(q_stage), count=1)
    return used


@gluon.jit
def _finish(smem, acc, inverse, WIDTH: gl.constexpr, ROWS: gl.constexpr, ACC: gl.constexpr):
    """Store WIDTH columns of outputs, `acc` times the `inverse` of their row, in the memory of `smem`; return their tile."""
    dtype: gl.constexpr = smem.dtype
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, ACC))[:, None]
    out_smem = smem._reinterpret(dtype, [ROWS, WIDTH], gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype))
    out_smem.store(gl.where(inverse == 0, 0.0, acc * inverse).to(dtype))
    return out_smem


@CachedLaunch
@gluon.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, overflows_ptr, chosen_ptr,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, search_steps, early, factor,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    PARTS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    OPTIMISTIC: gl.constexpr, SHARED: gl.constexpr, NUM_INITIAL: gl.constexpr, NUM_LOCAL: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr, PART_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write out and lse of attention to an interval, as `interval.kernels.forward_kernel` does, or to SHARED blocks.

    A program takes every num_programs-th tile of rows. A tile's rows are divided among PARTS consumer warpgroups, which read the same keys.
    The next tile's rows and keys are loaded while the warpgroups finish a tile.

    Softmax with running maxima spends a third of its instructions on the maxima and on rescaling. OPTIMISTIC: a row keeps the maximum of its
    first keys. This is right as long as no later score is far above it: the sum of weights must stay below `SAFE_SUM`, and no
    score may be EXTREME. A row that breaks this rule gets the lse +inf, and sets the flag of its part of the tile in `overflows_ptr`, int32
    (PARTS, num_items), to 1. After its last tile a program computes the flagged tiles again, with running maxima. It writes only the rows
    whose lse is +inf, so that a row never depends on the others.

    SHARED: tiles of keys are selection blocks. Rows at positions below `early` see all blocks that they chose, given as bits of int64
    (rows, G) at `chosen_ptr`. Later rows see the first NUM_INITIAL blocks, and the last NUM_LOCAL up to their own.
    """
    PART: gl.constexpr = ROWS // PARTS
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    Q1_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, K1], dtype)
    Q2_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, max(K2, 16)], dtype)
    V1_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, V1], dtype)
    V2_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, max(V2, 16)], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # two tiles of rows: one is computed while the next is loaded
    q1_smem = gl.allocate_shared_memory(dtype, [2 * PARTS, PART, K1], Q1_SHARED)
    k1_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, K1], Q1_SHARED)
    q2_smem = q1_smem
    k2_smem = k1_smem
    if K2 > 0:
        q2_smem = gl.allocate_shared_memory(dtype, [2 * PARTS, PART, K2], Q2_SHARED)
        k2_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, K2], Q2_SHARED)
    v1_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, V1], V1_SHARED)
    v2_smem = v1_smem
    if V2 > 0:
        v2_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, V2], V2_SHARED)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    passed = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mbarrier.init(passed.index(0), count=PARTS)
    # every producer thread arrives once its copies have landed, and each part once it has read them
    for q_stage in gl.static_range(2):
        mbarrier.init(q_full.index(q_stage), count=128)
        mbarrier.init(q_empty.index(q_stage), count=PARTS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=128)
        mbarrier.init(v_full.index(stage), count=128)
        mbarrier.init(k_empty.index(stage), count=PARTS)
        mbarrier.init(v_empty.index(stage), count=PARTS)
    fence_async_shared()
    barrier()
    buffers = (q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, passed)
    sequences = (
        cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
        num_sequences, num_queries, num_keys, num_tiles, num_columns, search_steps,
    )  # fmt: skip
    if PARTS == 3:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        0, buffers, sequences, overflows_ptr, num_items, early, out_ptr, lse_ptr, chosen_ptr, factor,
                        H, G, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES,
                        OPTIMISTIC, SHARED, NUM_INITIAL, NUM_LOCAL,
                    ),
                ),
                (
                    _attend,
                    (
                        1, buffers, sequences, overflows_ptr, num_items, early, out_ptr, lse_ptr, chosen_ptr, factor,
                        H, G, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES,
                        OPTIMISTIC, SHARED, NUM_INITIAL, NUM_LOCAL,
                    ),
                ),
                (
                    _attend,
                    (
                        2, buffers, sequences, overflows_ptr, num_items, early, out_ptr, lse_ptr, chosen_ptr, factor,
                        H, G, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES,
                        OPTIMISTIC, SHARED, NUM_INITIAL, NUM_LOCAL,
                    ),
                ),
                (
                    _load,
                    (
                        q_ptr, k_ptr, v_ptr, buffers, sequences, overflows_ptr, num_items, early,
                        H, G, D_K, K1, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES,
                        SHARED, NUM_INITIAL, NUM_LOCAL,
                    ),
                ),
            ],
            [4, 4, 4],
            [PART_REGISTERS, PART_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        0, buffers, sequences, overflows_ptr, num_items, early, out_ptr, lse_ptr, chosen_ptr, factor,
                        H, G, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES,
                        OPTIMISTIC, SHARED, NUM_INITIAL, NUM_LOCAL,
                    ),
                ),
                (
                    _attend,
                    (
                        1, buffers, sequences, overflows_ptr, num_items, early, out_ptr, lse_ptr, chosen_ptr, factor,
                        H, G, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES,
                        OPTIMISTIC, SHARED, NUM_INITIAL, NUM_LOCAL,
                    ),
                ),
                (
                    _load,
                    (
                        q_ptr, k_ptr, v_ptr, buffers, sequences, overflows_ptr, num_items, early,
                        H, G, D_K, K1, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES,
                        SHARED, NUM_INITIAL, NUM_LOCAL,
                    ),
                ),
            ],
            [4, 4],
            [PART_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
