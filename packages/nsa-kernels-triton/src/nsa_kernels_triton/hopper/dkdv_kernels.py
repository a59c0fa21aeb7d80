"""dK and dV of attention over an interval of keys for compute capability 9.0: a producer warpgroup, two consumer warpgroups.

A program has the multiprocessor to itself. Each consumer warpgroup has half of a tile's keys, and both read the same rows.
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
    barrier,
    dscores_of,
    find_sequence,
    invalidate,
    load_tile,
    lowerings,
    mask_of,
    position_of,
    query_rows,
    restrained,
    start_next,
    start_scores,
    visible_keys,
)


@gluon.jit
def _load_rows(
    q_ptr, dout_ptr, shift_ptr, delta_ptr, gate_ptr, q1_smem, q2_smem, dout_smem, shift_smem, delta_smem, gate_smem, full, empty, row_from, row_end,
    H: gl.constexpr, HG: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    GATED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring buffer with the rows row_from .. row_end - 1 of a group; rows beyond are zeros."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for tile in range(gl.cdiv(row_end - row_from, ROWS)):
        stage = tile % STAGES
        row = row_from + tile * ROWS
        end = row_end
        skipped = 0
        if ROWS % HG == 0 and K2 == 0:
            # a tile starts at a query's first head, so only one number changes from tile to tile; slower at D_k = 192, 64k tokens
            skipped = (row // HG).to(gl.int64) * H
            end = row_end - row
            row = 0
        rows = row + gl.arange(0, ROWS, LINE)
        heads = skipped + (rows // HG).to(gl.int64) * H + rows % HG
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        load_tile(q_ptr + skipped * D_K, q1_smem.index(stage), row, end, H, HG, D_K, 0, K1, ROWS)
        if K2 > 0:
            load_tile(q_ptr, q2_smem.index(stage), row, end, H, HG, D_K, K1, K2, ROWS)
        load_tile(dout_ptr + skipped * D_V, dout_smem.index(stage), row, end, H, HG, D_V, 0, V1, ROWS)
        async_copy.async_copy_global_to_shared(shift_smem.index(stage), shift_ptr + heads, mask=rows < end)
        async_copy.async_copy_global_to_shared(delta_smem.index(stage), delta_ptr + heads, mask=rows < end)
        if GATED:
            async_copy.async_copy_global_to_shared(gate_smem.index(stage), gate_ptr + heads * 3, mask=rows < end)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _seen_rows(
    key0, last_key, position, num_valid, row_from, row_end,
    HG: gl.constexpr, IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Return the range of the rows that see some of the keys key0 .. last_key, and of those that see all, within row_from .. row_end - 1."""
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
    scores, shift_smem, gate_smem, row, is_masked, row_last, position, keys, factor,
    HG: gl.constexpr, GATED: gl.constexpr, IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
    ROWS: gl.constexpr, EXTREME: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Return the weights (keys, rows), times the gates, of a tile of rows that starts with `row`; EXTREME: as `tiles.restrained`."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(0, SCORES)
    weights = gl.exp2(scores * factor - shift_smem.load(OF_ROWS)[None, :])
    if is_masked:
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
        t = gl.where(rows < row_last, position + rows // HG, -1)
        first, end = visible_keys(t, IS_WINDOW, SIZE, STRIDE, WINDOW)
        weights = gl.where((keys[:, None] >= first[None, :]) & (keys[:, None] < end[None, :]), weights, 0.0)
    if EXTREME:
        weights = restrained(weights, shift_smem.load(OF_ROWS)[None, :])
    if GATED:
        weights = weights * gate_smem.load(OF_ROWS)[None, :]
    return weights


@gluon.jit
def _multiply(
    half: gl.constexpr, smem, work_item, scale, factor, lowering,
    G: gl.constexpr, HG: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    GATED: gl.constexpr, IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, EXTREME: gl.constexpr,
):  # fmt: skip
    """Write the part of dK and dV that comes from the rows, for one half of the keys.

    With a tile of 32 rows of 128 columns, or 64 of 64, registers are left for dS of one tile while the next tile's scores are computed. The
    product that adds to dK then overlaps with these scores. Tiles of more rows are only for keys whose columns are in one part.
    """
    k1_smem, k2_smem, v_smem, q1_smem, q2_smem, dout_smem, shift_smem, delta_smem, gate_smem, full, empty = smem
    dk_ptr, dv_ptr, key_row0, key0, num_keys, group, position, num_valid, row_from, row_end = work_item
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
    OVERLAPS: gl.constexpr = ROWS * K1 <= 32 * 128
    dtype: gl.constexpr = q1_smem.dtype
    k1 = k1_smem.index(half)
    k2 = k2_smem.index(half)
    v = v_smem.index(half)
    if OVERLAPS and K2 == 0:
        # with few rows in a tile, a product would read mostly keys from shared memory; registers have room for one part of them
        k1 = k1.load(gl.DotOperandLayout(0, SCORES, 2))
    key0 = key0 + half * HALF
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
    # skip tiles of rows that only the other half sees
    num_tiles = gl.cdiv(row_end - row_from, ROWS)
    first_tile = (row_first - row_from) // ROWS
    end_tile = gl.maximum(gl.cdiv(row_last - row_from, ROWS), first_tile)
    if num_keys <= key0:
        end_tile = first_tile
    for tile in range(first_tile):
        mbarrier.wait(full.index(tile % STAGES), (tile // STAGES) & 1)
        mbarrier.arrive(empty.index(tile % STAGES), count=1)
    if not OVERLAPS:
        gl.static_assert(K2 == 0)
        gl.static_assert(STAGES > 1)
        scores = start_next(first_tile, end_tile, k1, k1, q1_smem, q1_smem, full, zeros, 0, STAGES, False)
        for tile in range(first_tile, end_tile):
            stage = tile % STAGES
            scores = warpgroup_mma_wait(0, deps=[scores])
            dweights = warpgroup_mma(v, dout_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            row = row_from + tile * ROWS
            weights = _seen_weights(
                scores, shift_smem.index(stage), gate_smem.index(stage), row, (row < middle) | (row + ROWS > full_end), row_last, position, keys,
                factor, HG, GATED, IS_WINDOW, SIZE, STRIDE, WINDOW, ROWS, EXTREME, SCORES,
            )  # fmt: skip
            dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_V), dout_smem.index(stage), dv, is_async=True)
            dweights = warpgroup_mma_wait(1, deps=[dweights])
            dscores = dscores_of(weights, dweights, delta_smem.index(stage).load(OF_ROWS)[None, :], lowering, EXTREME, dtype)
            dk1 = warpgroup_mma(gl.convert_layout(dscores, LEFT_K1), q1_smem.index(stage), dk1, is_async=True)
            # the next tile's scores are computed after this one's products
            scores = start_next(tile + 1, end_tile, k1, k1, q1_smem, q1_smem, full, zeros, 0, STAGES, False)
            dk1, dv = warpgroup_mma_wait(1, deps=[dk1, dv])
            mbarrier.arrive(empty.index(stage), count=1)
        warpgroup_mma_wait(0, deps=[scores])
    elif end_tile > first_tile:
        stage = first_tile % STAGES
        mbarrier.wait(full.index(stage), (first_tile // STAGES) & 1)
        fence_async_shared()
        scores = start_scores(k1, k2, q1_smem.index(stage), q2_smem.index(stage), zeros, K2)
        dweights = warpgroup_mma(v, dout_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores, dweights = warpgroup_mma_wait(0, deps=[scores, dweights])
        row = row_from + first_tile * ROWS
        weights = _seen_weights(
            scores, shift_smem.index(stage), gate_smem.index(stage), row, (row < middle) | (row + ROWS > full_end), row_last, position, keys,
            factor, HG, GATED, IS_WINDOW, SIZE, STRIDE, WINDOW, ROWS, EXTREME, SCORES,
        )  # fmt: skip
        dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_V), dout_smem.index(stage), dv, is_async=True)
        dscores = dscores_of(weights, dweights, delta_smem.index(stage).load(OF_ROWS)[None, :], lowering, EXTREME, dtype)
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
                scores, shift_smem.index(stage), gate_smem.index(stage), row, (row < middle) | (row + ROWS > full_end), row_last, position, keys,
                factor, HG, GATED, IS_WINDOW, SIZE, STRIDE, WINDOW, ROWS, EXTREME, SCORES,
            )  # fmt: skip
            dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT_V), dout_smem.index(stage), dv, is_async=True)
            dscores = dscores_of(weights, dweights, delta_smem.index(stage).load(OF_ROWS)[None, :], lowering, EXTREME, dtype)
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
    """Write the existing columns among FIRST .. FIRST + WIDTH - 1 of the gradients of a tile of keys."""
    in_tile = gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
    rows = ((key_row0 + key0 + in_tile) * G + group) * D
    mask = mask_of(key0 + in_tile < num_keys, columns, D - FIRST, WIDTH)
    gl.store(ptr + FIRST + rows[:, None] + columns[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _locate_item(item, sequences, PACKED: gl.constexpr):
    """Return an item's tile (its number in the sequence), split, sequence and group, and whether the tile exists."""
    cu_tiles_ptr, num_sequences, num_tiles, num_splits, num_columns, search_steps = sequences
    tile, sequence, group = position_of(item, num_tiles * num_splits, num_columns)
    # late splits first: their queries see every key, those of early splits only some
    split = num_splits - 1 - tile // num_tiles
    tile = tile % num_tiles
    if PACKED:
        sequence = find_sequence(tile, cu_tiles_ptr, num_sequences, search_steps)
        tile -= gl.load(cu_tiles_ptr + gl.minimum(sequence, num_sequences - 1))
    return tile, split, sequence, group, sequence < num_sequences


@gluon.jit
def _compute_tile(
    tile, split, sequence, group, work,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, CACHED: gl.constexpr, GATED: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, EXTREME: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr, PART_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dK and dV of one tile."""
    (
        q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, gate_ptr, dk_ptr, dv_ptr, cu_seqlens_ptr, cu_keys_ptr, query_start_ptr, query_count_ptr,
        num_queries, num_keys, num_key_rows, split_queries, scale, factor, lowering,
    ) = work  # fmt: skip
    HG: gl.constexpr = H // G
    HALF: gl.constexpr = KEYS // 2
    dtype: gl.constexpr = q_ptr.dtype.element_ty
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
    shift_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    gate_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        # every producer thread arrives once its copies have landed, and each half once it has read them
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=2)

    # keys that no query sees count as zeros: the end of a store, and surplus blocks, may be NaN
    _first, seen = visible_keys(position + num_valid - 1, IS_WINDOW, SIZE, STRIDE, WINDOW)
    num_seen = gl.minimum(num_keys, seen)
    kv_head0 = key_row0 * G + group
    for half in gl.static_range(2):
        load_tile(k_ptr + kv_head0 * D_K, k1_smem.index(half), key0 + half * HALF, num_seen, G, 1, D_K, 0, K1, HALF)
        if K2 > 0:
            load_tile(k_ptr + kv_head0 * D_K, k2_smem.index(half), key0 + half * HALF, num_seen, G, 1, D_K, K1, K2, HALF)
        load_tile(v_ptr + kv_head0 * D_V, v_smem.index(half), key0 + half * HALF, num_seen, G, 1, D_V, 0, V1, HALF)
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
    smem = (k1_smem, k2_smem, v_smem, q1_smem, q2_smem, dout_smem, shift_smem, delta_smem, gate_smem, full, empty)
    key_row0 = key_row0 + split.to(gl.int64) * num_key_rows
    work_item = (dk_ptr, dv_ptr, key_row0, key0, num_keys, group, position, num_valid, row_from, row_end)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    0, smem, work_item, scale, factor, lowering,
                    G, HG, D_K, K1, K2, D_V, V1, GATED, IS_WINDOW, SIZE, STRIDE, WINDOW, ROWS, KEYS, STAGES, EXTREME,
                ),
            ),
            (
                _multiply,
                (
                    1, smem, work_item, scale, factor, lowering,
                    G, HG, D_K, K1, K2, D_V, V1, GATED, IS_WINDOW, SIZE, STRIDE, WINDOW, ROWS, KEYS, STAGES, EXTREME,
                ),
            ),
            (
                _load_rows,
                (
                    q_ptr + head0 * D_K, dout_ptr + head0 * D_V, shift_ptr + head0, delta_ptr + head0, gate_ptr + head0 * 3,
                    q1_smem, q2_smem, dout_smem, shift_smem, delta_smem, gate_smem, full, empty, row_from, row_end,
                    H, HG, D_K, K1, K2, D_V, V1, GATED, ROWS, STAGES,
                ),
            ),
        ],
        [4, 4],
        [PART_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
    if EXTREME:
        invalidate(full, empty, STAGES)


@CachedLaunch
@gluon.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, extremes_ptr, gate_ptr, dk_ptr, dv_ptr,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_key_rows, num_tiles, num_splits, num_columns, split_queries, search_steps, scale, factor,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, CACHED: gl.constexpr, GATED: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, EXTREME: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr, PART_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dK and dV as `interval.kernels.dkdv_kernel` does; grid (tiles * splits * columns * G,).

    A tile's keys are divided between two consumer warpgroups, which read the same rows. EXTREME: see `launch._launch_both`; any
    number of programs share the tiles.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    if gl.load(extremes_ptr) != EXTREME:
        return
    lowering, scale = lowerings(extremes_ptr, scale, dtype)
    sequences = (cu_tiles_ptr, num_sequences, num_tiles, num_splits, num_columns, search_steps)
    work = (
        q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, gate_ptr, dk_ptr, dv_ptr, cu_seqlens_ptr, cu_keys_ptr, query_start_ptr, query_count_ptr,
        num_queries, num_keys, num_key_rows, split_queries, scale, factor, lowering,
    )  # fmt: skip
    if EXTREME:
        for item in range(gl.program_id(0), num_tiles * num_splits * num_columns * G, gl.num_programs(0)):
            tile, split, sequence, group, exists = _locate_item(item, sequences, PACKED)
            if exists:
                _compute_tile(
                    tile, split, sequence, group, work, H, G, D_K, K1, K2, D_V, V1, IS_WINDOW, SIZE, STRIDE, WINDOW,
                    PACKED, CACHED, GATED, ROWS, KEYS, STAGES, EXTREME, LOADER_REGISTERS, PART_REGISTERS,
                )  # fmt: skip
    else:
        tile, split, sequence, group, exists = _locate_item(gl.program_id(0), sequences, PACKED)
        if PACKED and not exists:
            return
        _compute_tile(
            tile, split, sequence, group, work, H, G, D_K, K1, K2, D_V, V1, IS_WINDOW, SIZE, STRIDE, WINDOW,
            PACKED, CACHED, GATED, ROWS, KEYS, STAGES, EXTREME, LOADER_REGISTERS, PART_REGISTERS,
        )  # fmt: skip
