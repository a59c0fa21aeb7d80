"""Forward, dK and dV of attention over an interval of keys for compute capability 9.0: four warps load, two times four compute.

A program has the multiprocessor to itself. Forward shares out a tile's rows, which read the same keys; dK and dV share out a
tile's keys, by which the same rows pass.
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

from nsa_kernels_triton.hopper.tiles import (
    LN2,
    LOG2E,
    barrier,
    find_sequence,
    load_keys,
    load_tile,
    mask_of,
    place_of,
    query_rows,
    start_scores,
    store_tile,
    visible_keys,
)


@gluon.jit
def _load_rows(
    q_ptr, dout_ptr, lse_ptr, delta_ptr, gate_ptr, q1_smem, q2_smem, dout_smem, lse_smem, delta_smem, gate_smem, full, empty, row_from, row_end,
    H: gl.constexpr, HG: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    GATED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the rows row_from .. row_end - 1 of a group; rows beyond are zeros."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for tile in range(gl.cdiv(row_end - row_from, ROWS)):
        stage = tile % STAGES
        row = row_from + tile * ROWS
        rows = row + gl.arange(0, ROWS, LINE)
        exists = rows < row_end
        heads = (rows // HG).to(gl.int64) * H + rows % HG
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        load_tile(q_ptr, q1_smem.index(stage), row, row_end, H, HG, D_K, 0, K1, ROWS)
        if K2 > 0:
            load_tile(q_ptr, q2_smem.index(stage), row, row_end, H, HG, D_K, K1, K2, ROWS)
        load_tile(dout_ptr, dout_smem.index(stage), row, row_end, H, HG, D_V, 0, V1, ROWS)
        async_copy.async_copy_global_to_shared(lse_smem.index(stage), lse_ptr + heads, mask=exists)
        async_copy.async_copy_global_to_shared(delta_smem.index(stage), delta_ptr + heads, mask=exists)
        if GATED:
            async_copy.async_copy_global_to_shared(gate_smem.index(stage), gate_ptr + heads * 3, mask=exists)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _seen_rows(
    key0, last_key, position, num_valid, row_from, row_end,
    HG: gl.constexpr, IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Return of the rows row_from .. row_end - 1 those that see some of the keys key0 .. last_key, and those that see all: their ends."""
    end = position + num_valid
    if IS_WINDOW:
        first = key0
        full = last_key
        full_end = key0 + WINDOW
        end = gl.minimum(end, last_key + WINDOW)
    else:
        first = key0 * STRIDE + SIZE - 1
        full = last_key * STRIDE + SIZE - 1
        full_end = end
    row_first = gl.minimum(gl.maximum((first - position) * HG, row_from), row_end)
    row_last = gl.maximum(gl.minimum((end - position) * HG, row_end), row_first)
    return row_first, row_last, (full - position) * HG, gl.minimum((full_end - position) * HG, row_last)


@gluon.jit
def _seen_weights(
    scores, lse_smem, row, is_masked, row_last, position, keys, factor,
    HG: gl.constexpr, IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
    ROWS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Return the weights (keys, rows) of a tile of rows that starts with `row`."""
    lse = lse_smem.load(gl.SliceLayout(0, SCORES))
    shift = gl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    weights = gl.exp2(scores * factor - shift[None, :])
    if is_masked:
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
        t = gl.where(rows < row_last, position + rows // HG, -1)
        first, end = visible_keys(t, IS_WINDOW, SIZE, STRIDE, WINDOW)
        weights = gl.where((keys[:, None] >= first[None, :]) & (keys[:, None] < end[None, :]), weights, 0.0)
    return weights


@gluon.jit
def _multiply(
    half: gl.constexpr, k1_smem, k2_smem, v_smem, q1_smem, q2_smem, dout_smem, lse_smem, delta_smem, gate_smem, full, empty,
    dk_ptr, dv_ptr, key_row0, key0, num_keys, group, position, num_valid, row_from, row_end, scale, factor,
    G: gl.constexpr, HG: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    GATED: gl.constexpr, IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write dK and dV that the rows give to one half of the keys. The product into dK overlaps with the next tile's scores."""
    HALF: gl.constexpr = KEYS // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    ACC_K1: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K1, 16])
    ACC_K2: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, max(K2, 16), 16])
    ACC_V: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, V1, 16])
    LEFT_K1: gl.constexpr = gl.DotOperandLayout(0, ACC_K1, 2)
    LEFT_K2: gl.constexpr = gl.DotOperandLayout(0, ACC_K2, 2)
    LEFT_V: gl.constexpr = gl.DotOperandLayout(0, ACC_V, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(0, SCORES)
    PENDING: gl.constexpr = 2 if K2 > 0 else 1
    dtype: gl.constexpr = q1_smem.dtype
    k1 = k1_smem.index(half)
    k2 = k2_smem.index(half)
    v = v_smem.index(half)
    if K2 == 0:
        # with few rows in a tile, the keys would be most of what its product reads; registers are left for one part
        k1 = k1.load(gl.DotOperandLayout(0, SCORES, 2))
    key0 += half * HALF
    keys = key0 + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    dk1 = gl.zeros([HALF, K1], gl.float32, ACC_K1)
    dk2 = dk1
    if K2 > 0:
        dk2 = gl.zeros([HALF, K2], gl.float32, ACC_K2)
    dv = gl.zeros([HALF, V1], gl.float32, ACC_V)
    zeros = gl.zeros([HALF, ROWS], gl.float32, SCORES)
    row_first, row_last, middle, full_end = _seen_rows(
        key0, gl.minimum(key0 + HALF, num_keys) - 1, position, num_valid, row_from, row_end, HG, IS_WINDOW, SIZE, STRIDE, WINDOW
    )
    if num_keys < key0 + HALF:
        middle = row_end
    # the other half may see rows that this one does not: their tiles pass by
    num_tiles = gl.cdiv(row_end - row_from, ROWS)
    first_tile = (row_first - row_from) // ROWS
    end_tile = gl.maximum(gl.cdiv(row_last - row_from, ROWS), first_tile)
    if num_keys <= key0:
        end_tile = first_tile
    for tile in range(first_tile):
        mbarrier.wait(full.index(tile % STAGES), (tile // STAGES) & 1)
        mbarrier.arrive(empty.index(tile % STAGES), count=1)
    if end_tile > first_tile:
        stage = first_tile % STAGES
        mbarrier.wait(full.index(stage), (first_tile // STAGES) & 1)
        fence_async_shared()
        scores = start_scores(k1, k2, q1_smem.index(stage), q2_smem.index(stage), zeros, K2)
        dweights = warpgroup_mma(v, dout_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores, dweights = warpgroup_mma_wait(0, deps=[scores, dweights])
        row = row_from + first_tile * ROWS
        weights = _seen_weights(
            scores, lse_smem.index(stage), row, (row < middle) | (row + ROWS > full_end), row_last, position, keys, factor,
            HG, IS_WINDOW, SIZE, STRIDE, WINDOW, ROWS, SCORES,
        )  # fmt: skip
        if GATED:
            weights = weights * gate_smem.index(stage).load(OF_ROWS)[None, :]
        dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_V), dout_smem.index(stage), dv, is_async=True)
        dscores = (weights * (dweights - delta_smem.index(stage).load(OF_ROWS)[None, :])).to(dtype)
        dv = warpgroup_mma_wait(0, deps=[dv])
        for tile in range(first_tile + 1, end_tile):
            before = (tile - 1) % STAGES
            stage = tile % STAGES
            mbarrier.wait(full.index(stage), (tile // STAGES) & 1)
            fence_async_shared()
            scores = start_scores(k1, k2, q1_smem.index(stage), q2_smem.index(stage), zeros, K2)
            dweights = warpgroup_mma(v, dout_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            dk1 = warpgroup_mma(gl.convert_layout(dscores, LEFT_K1), q1_smem.index(before), dk1, is_async=True)
            if K2 > 0:
                dk2 = warpgroup_mma(gl.convert_layout(dscores, LEFT_K2), q2_smem.index(before), dk2, is_async=True)
            scores, dweights = warpgroup_mma_wait(PENDING, deps=[scores, dweights])
            row = row_from + tile * ROWS
            weights = _seen_weights(
                scores, lse_smem.index(stage), row, (row < middle) | (row + ROWS > full_end), row_last, position, keys, factor,
                HG, IS_WINDOW, SIZE, STRIDE, WINDOW, ROWS, SCORES,
            )  # fmt: skip
            if GATED:
                weights = weights * gate_smem.index(stage).load(OF_ROWS)[None, :]
            dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_V), dout_smem.index(stage), dv, is_async=True)
            dscores = (weights * (dweights - delta_smem.index(stage).load(OF_ROWS)[None, :])).to(dtype)
            if K2 > 0:
                dk1, dk2, dv = warpgroup_mma_wait(0, deps=[dk1, dk2, dv])
            else:
                dk1, dv = warpgroup_mma_wait(0, deps=[dk1, dv])
            mbarrier.arrive(empty.index(before), count=1)
        before = (end_tile - 1) % STAGES
        dk1 = warpgroup_mma(gl.convert_layout(dscores, LEFT_K1), q1_smem.index(before), dk1, is_async=True)
        if K2 > 0:
            dk2 = warpgroup_mma(gl.convert_layout(dscores, LEFT_K2), q2_smem.index(before), dk2, is_async=True)
            dk1, dk2 = warpgroup_mma_wait(0, deps=[dk1, dk2])
        else:
            dk1 = warpgroup_mma_wait(0, deps=[dk1])
        mbarrier.arrive(empty.index(before), count=1)
    for tile in range(end_tile, num_tiles):
        mbarrier.wait(full.index(tile % STAGES), (tile // STAGES) & 1)
        mbarrier.arrive(empty.index(tile % STAGES), count=1)
    _store(dk_ptr, key_row0, key0, num_keys, group, dk1 * scale, G, D_K, 0, K1, HALF, ACC_K1)
    if K2 > 0:
        _store(dk_ptr, key_row0, key0, num_keys, group, dk2 * scale, G, D_K, K1, K2, HALF, ACC_K2)
    _store(dv_ptr, key_row0, key0, num_keys, group, dv, G, D_V, 0, V1, HALF, ACC_V)


@gluon.jit
def _store(
    ptr, key_row0, key0, num_keys, group, values,
    G: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Write the columns FIRST .. FIRST + WIDTH - 1, as far as there are any, of the gradients of a tile of keys."""
    in_tile = gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
    rows = ((key_row0 + key0 + in_tile) * G + group) * D
    mask = mask_of(key0 + in_tile < num_keys, columns, D - FIRST, WIDTH)
    gl.store(ptr + FIRST + rows[:, None] + columns[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, gate_ptr, dk_ptr, dv_ptr,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_key_rows, num_tiles, split_queries, search_steps, scale, factor,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, CACHED: gl.constexpr, GATED: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, LOADER_REGISTERS: gl.constexpr, HALF_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dK and dV as `interval.kernels.dkdv_kernel` does; grid (tiles * splits, sequences or 1, G).

    A tile's keys are shared out to two times four computing warps, by which the same rows pass.
    """
    HG: gl.constexpr = H // G
    HALF: gl.constexpr = KEYS // 2
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile = gl.program_id(0) % num_tiles
    # late splits first: they meet every key, the early ones only some
    split = gl.num_programs(0) // num_tiles - 1 - gl.program_id(0) // num_tiles
    sequence = gl.program_id(1)
    group = gl.program_id(2)
    if PACKED:
        sequence = find_sequence(tile, cu_tiles_ptr, num_sequences, search_steps)
        if sequence >= num_sequences:
            return
        tile -= gl.load(cu_tiles_ptr + sequence)
    q_row0, _num_rows, num_valid, position = query_rows(
        sequence, cu_seqlens_ptr, query_start_ptr, query_count_ptr, num_queries, PACKED, CACHED
    )
    key_row0 = sequence.to(gl.int64) * num_keys
    if PACKED:
        key_row0 = gl.load(cu_keys_ptr + sequence).to(gl.int64)
        num_keys = (gl.load(cu_keys_ptr + sequence + 1) - key_row0).to(gl.int32)
    key0 = tile * KEYS

    K1_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, K1], dtype)
    K2_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, max(K2, 16)], dtype)
    V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, V1], dtype)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k1_smem = gl.allocate_shared_memory(dtype, [2, HALF, K1], K1_SHARED)
    q1_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, K1], K1_SHARED)
    k2_smem = k1_smem
    q2_smem = q1_smem
    if K2 > 0:
        k2_smem = gl.allocate_shared_memory(dtype, [2, HALF, K2], K2_SHARED)
        q2_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, K2], K2_SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [2, HALF, V1], V_SHARED)
    dout_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, V1], V_SHARED)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    gate_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        # every loading thread arrives once its copies have landed, and each half once it has read them
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=2)

    # keys that no query sees count as zeros: the end of a store, and surplus blocks, may be NaN
    _first, seen = visible_keys(position + num_valid - 1, IS_WINDOW, SIZE, STRIDE, WINDOW)
    num_seen = gl.minimum(num_keys, seen)
    key_place = key_row0 * G + group
    for half in gl.static_range(2):
        load_tile(k_ptr + key_place * D_K, k1_smem.index(half), key0 + half * HALF, num_seen, G, 1, D_K, 0, K1, HALF)
        if K2 > 0:
            load_tile(k_ptr + key_place * D_K, k2_smem.index(half), key0 + half * HALF, num_seen, G, 1, D_K, K1, K2, HALF)
        load_tile(v_ptr + key_place * D_V, v_smem.index(half), key0 + half * HALF, num_seen, G, 1, D_V, 0, V1, HALF)
    async_copy.commit_group()

    row_from = split * split_queries * HG
    row_from, row_end, _middle, _full_end = _seen_rows(
        key0, gl.minimum(key0 + KEYS, num_keys) - 1, position, num_valid, row_from, row_from + split_queries * HG,
        HG, IS_WINDOW, SIZE, STRIDE, WINDOW,
    )  # fmt: skip
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    head0 = q_row0 * H + group * HG
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    0, k1_smem, k2_smem, v_smem, q1_smem, q2_smem, dout_smem, lse_smem, delta_smem, gate_smem, full, empty,
                    dk_ptr, dv_ptr, key_row0 + split.to(gl.int64) * num_key_rows, key0, num_keys, group,
                    position, num_valid, row_from, row_end, scale, factor,
                    G, HG, D_K, K1, K2, D_V, V1, GATED, IS_WINDOW, SIZE, STRIDE, WINDOW, ROWS, KEYS, STAGES,
                ),
            ),
            (
                _multiply,
                (
                    1, k1_smem, k2_smem, v_smem, q1_smem, q2_smem, dout_smem, lse_smem, delta_smem, gate_smem, full, empty,
                    dk_ptr, dv_ptr, key_row0 + split.to(gl.int64) * num_key_rows, key0, num_keys, group,
                    position, num_valid, row_from, row_end, scale, factor,
                    G, HG, D_K, K1, K2, D_V, V1, GATED, IS_WINDOW, SIZE, STRIDE, WINDOW, ROWS, KEYS, STAGES,
                ),
            ),
            (
                _load_rows,
                (
                    q_ptr + head0 * D_K, dout_ptr + head0 * D_V, lse_ptr + head0, delta_ptr + head0, gate_ptr + head0 * 3,
                    q1_smem, q2_smem, dout_smem, lse_smem, delta_smem, gate_smem, full, empty, row_from, row_end,
                    H, HG, D_K, K1, K2, D_V, V1, GATED, ROWS, STAGES,
                ),
            ),
        ],
        [4, 4],
        [HALF_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def tile_of(
    item, cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_tiles, num_columns, search_steps,
    HG: gl.constexpr, IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, CACHED: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Return of tile number `item`: its group, rows and the keys start .. end - 1 that any of them sees.

    The longest rows come first. Every row sees the keys middle .. tail + KEYS - 2; a tile beyond the last sequence has no rows.
    """
    is_tile, group, tile, q_row0, num_rows, num_valid, position, key_row0 = place_of(
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
def _load(
    q_ptr, k_ptr, v_ptr, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, search_steps,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch the rows of the program's tiles, and fill the rings with their keys and values; those beyond `end` are zeros."""
    HG: gl.constexpr = H // G
    HALF: gl.constexpr = ROWS // 2
    loaded = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        group, q_row0, key_row0, row0, num_rows, _valid, _position, start, end, _middle, _tail = tile_of(
            item, cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
            num_sequences, num_queries, num_keys, num_tiles, num_columns, search_steps,
            HG, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, ROWS, KEYS,
        )  # fmt: skip
        number = item // gl.num_programs(0)
        place = number % 2
        q_tile = q_ptr + (q_row0 * H + group * HG) * D_K
        mbarrier.wait(q_empty.index(place), ((number // 2) & 1) ^ 1)
        for half in gl.static_range(2):
            load_tile(q_tile, q1_smem.index(2 * place + half), row0 + half * HALF, num_rows * HG, H, HG, D_K, 0, K1, HALF)
            if K2 > 0:
                load_tile(q_tile, q2_smem.index(2 * place + half), row0 + half * HALF, num_rows * HG, H, HG, D_K, K1, K2, HALF)
        async_copy.mbarrier_arrive(q_full.index(place), increment_count=False)
        k_tile = k_ptr + (key_row0 * G + group) * D_K
        v_tile = v_ptr + (key_row0 * G + group) * D_V
        for key in range(start, end, KEYS):
            load_keys(
                k_tile, v_tile, key, end, loaded, k1_smem, k2_smem, v1_smem, v2_smem, k_full, k_empty, v_full, v_empty,
                G, D_K, K1, K2, D_V, V1, V2, KEYS, STAGES,
            )  # fmt: skip
            loaded += 1


@gluon.jit
def _weights(
    scores, row_max, first, end, key, is_masked, factor, SCORES: gl.constexpr, IS_WINDOW: gl.constexpr, KEYS: gl.constexpr
):  # fmt: skip
    """Return the weights of a tile of keys, the new maxima, and what the sums so far are to be multiplied by."""
    if is_masked:
        keys = key + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        is_visible = keys[None, :] < end[:, None]
        if IS_WINDOW:
            is_visible = is_visible & (keys[None, :] >= first[:, None])
        scores = gl.where(is_visible, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    # a row that has seen nothing yet: exp2(-inf - 0) is 0, exp2(-inf + inf) would be NaN
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    return gl.exp2(scores * factor - shift[:, None]), new_max, gl.exp2(row_max - shift)


@gluon.jit
def _attend(
    half: gl.constexpr, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, out_ptr, lse_ptr, factor,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, search_steps,
    H: gl.constexpr, G: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write out and lse of one half of the rows of the program's tiles. The product with v overlaps with the next keys' softmax."""
    HG: gl.constexpr = H // G
    HALF: gl.constexpr = ROWS // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    ACC1: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, V1, 16])
    ACC2: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, max(V2, 16), 16])
    LEFT1: gl.constexpr = gl.DotOperandLayout(0, ACC1, 2)
    LEFT2: gl.constexpr = gl.DotOperandLayout(0, ACC2, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    PENDING: gl.constexpr = 2 if V2 > 0 else 1
    dtype: gl.constexpr = q1_smem.dtype
    used = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        group, q_row0, _key_row0, row0, num_rows, num_valid, position, start, last_end, middle, tail = tile_of(
            item, cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
            num_sequences, num_queries, num_keys, num_tiles, num_columns, search_steps,
            HG, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, ROWS, KEYS,
        )  # fmt: skip
        number = item // gl.num_programs(0)
        place = number % 2
        q1 = q1_smem.index(2 * place + half)
        q2 = q2_smem.index(2 * place + half)
        row0 += half * HALF
        rows = row0 + gl.arange(0, HALF, OF_ROWS)
        t = gl.where(rows // HG < num_valid, position + rows // HG, -1)
        first, end = visible_keys(t, IS_WINDOW, SIZE, STRIDE, WINDOW)
        row_max = gl.full([HALF], float("-inf"), gl.float32, OF_ROWS)
        row_sum = gl.zeros([HALF], gl.float32, OF_ROWS)
        acc1 = gl.zeros([HALF, V1], gl.float32, ACC1)
        acc2 = acc1
        if V2 > 0:
            acc2 = gl.zeros([HALF, V2], gl.float32, ACC2)
        zeros = gl.zeros([HALF, KEYS], gl.float32, SCORES)
        num_key_tiles = gl.cdiv(last_end - start, KEYS)
        mbarrier.wait(q_full.index(place), (number // 2) & 1)
        if num_key_tiles > 0:
            left1 = q1
            left2 = q2
            if K2 > V2:
                # with values of one part registers are left, and the tiles of keys are narrow
                left1 = q1.load(gl.DotOperandLayout(0, SCORES, 2))
                left2 = q2.load(gl.DotOperandLayout(0, SCORES, 2))
            stage = used % STAGES
            mbarrier.wait(k_full.index(stage), (used // STAGES) & 1)
            fence_async_shared()
            scores = start_scores(left1, left2, k1_smem.index(stage), k2_smem.index(stage), zeros, K2)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            weights, row_max, rescale = _weights(
                scores, row_max, first, end, start, (start < middle) | (start >= tail), factor, SCORES, IS_WINDOW, KEYS
            )
            row_sum = gl.sum(weights, 1)
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
                key = start + tile * KEYS
                weights, row_max, rescale = _weights(
                    scores, row_max, first, end, key, (key < middle) | (key >= tail), factor, SCORES, IS_WINDOW, KEYS
                )
                row_sum = row_sum * rescale + gl.sum(weights, 1)
                if V2 > 0:
                    acc1, acc2 = warpgroup_mma_wait(0, deps=[acc1, acc2])
                else:
                    acc1 = warpgroup_mma_wait(0, deps=[acc1])
                mbarrier.arrive(v_empty.index(before), count=1)
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
        head0 = q_row0 * H + group * HG
        sees_any = first < end
        # what a row holds that sees nothing may be NaN
        inverse = gl.where(sees_any, 1.0 / row_sum, 0.0)
        heads = head0 + (rows // HG).to(gl.int64) * H + rows % HG
        lse = (row_max + gl.log2(gl.where(sees_any, row_sum, 1.0))) * LN2
        gl.store(lse_ptr + heads, gl.where(sees_any, lse, float("-inf")), mask=rows // HG < num_rows)
        # outputs leave through the rows' own place
        barrier()
        out1_smem = _finish(q1, acc1, inverse, V1, HALF, ACC1)
        out2_smem = out1_smem
        if V2 > 0:
            out2_smem = _finish(q2, acc2, inverse, V2, HALF, ACC2)
        barrier()
        store_tile(out_ptr + head0 * D_V, out1_smem, row0, num_rows * HG, H, HG, D_V, 0, V1, HALF)
        if V2 > 0:
            store_tile(out_ptr + head0 * D_V, out2_smem, row0, num_rows * HG, H, HG, D_V, V1, V2, HALF)
        barrier()
        mbarrier.arrive(q_empty.index(place), count=1)


@gluon.jit
def _finish(smem, acc, inverse, WIDTH: gl.constexpr, ROWS: gl.constexpr, ACC: gl.constexpr):
    """Put WIDTH columns of outputs, `acc` times their rows' `inverse`, into the memory of `smem`, and return their tile."""
    dtype: gl.constexpr = smem.dtype
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, ACC))[:, None]
    out_smem = smem._reinterpret(dtype, [ROWS, WIDTH], gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype))
    out_smem.store(gl.where(inverse == 0, 0.0, acc * inverse).to(dtype))
    return out_smem


@gluon.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, search_steps, factor,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, LOADER_REGISTERS: gl.constexpr, HALF_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write out and lse as `interval.kernels.forward_kernel` does; a program takes every num_programs-th of the tiles.

    A tile's rows are shared out to two times four computing warps, which read the same keys; the next tile's rows and keys
    arrive while they finish.
    """
    HALF: gl.constexpr = ROWS // 2
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    Q1_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, K1], dtype)
    Q2_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, max(K2, 16)], dtype)
    V1_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, V1], dtype)
    V2_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, max(V2, 16)], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # two tiles of two halves
    q1_smem = gl.allocate_shared_memory(dtype, [4, HALF, K1], Q1_SHARED)
    k1_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, K1], Q1_SHARED)
    q2_smem = q1_smem
    k2_smem = k1_smem
    if K2 > 0:
        q2_smem = gl.allocate_shared_memory(dtype, [4, HALF, K2], Q2_SHARED)
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
    # every loading thread arrives once its copies have landed, and each half once it has read them
    for place in gl.static_range(2):
        mbarrier.init(q_full.index(place), count=128)
        mbarrier.init(q_empty.index(place), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=128)
        mbarrier.init(v_full.index(stage), count=128)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    0, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, out_ptr, lse_ptr, factor,
                    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
                    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, search_steps,
                    H, G, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, ROWS, KEYS, STAGES,
                ),
            ),
            (
                _attend,
                (
                    1, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, out_ptr, lse_ptr, factor,
                    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
                    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, search_steps,
                    H, G, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, ROWS, KEYS, STAGES,
                ),
            ),
            (
                _load,
                (
                    q_ptr, k_ptr, v_ptr, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
                    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, search_steps,
                    H, G, D_K, K1, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, ROWS, KEYS, STAGES,
                ),
            ),
        ],
        [4, 4],
        [HALF_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
