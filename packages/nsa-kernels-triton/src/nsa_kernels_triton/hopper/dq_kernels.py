"""dQ of attention over an interval of keys for compute capability 9.0: a producer warpgroup, two or three consumer warpgroups.

The consumer warpgroups read the same keys.
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
from nsa_kernels_triton.hopper.forward_kernels import tile_of
from nsa_kernels_triton.hopper.tiles import (
    barrier,
    dscores_of,
    load_keys,
    load_tile,
    lowerings,
    mask_of,
    restrained,
    start_scores,
    store_tile,
    visible_keys,
)
from nsa_kernels_triton.tiles import WIDEST_REFINED


@gluon.jit
def _load(
    q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, buffers, sequences, num_items,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    PARTS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, ROW_STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch the rows of the program's tiles, and fill the ring buffers with their keys and values; those beyond `end` are zeros."""
    (
        q1_smem, q2_smem, dout1_smem, dout2_smem, shift_smem, delta_smem, k1_smem, k2_smem, v1_smem, v2_smem,
        rows_full, rows_empty, k_full, k_empty, v_full, v_empty,
    ) = buffers  # fmt: skip
    HG: gl.constexpr = H // G
    PART: gl.constexpr = ROWS // PARTS
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    loaded = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        group, q_row0, key_row0, row0, num_rows, _valid, _position, start, end, _middle, _tail = tile_of(
            item, sequences, HG, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, ROWS, KEYS
        )
        number = item // gl.num_programs(0)
        row_stage = number % ROW_STAGES
        head0 = q_row0 * H + group * HG
        row_end = num_rows * HG
        mbarrier.wait(rows_empty.index(row_stage), ((number // ROW_STAGES) & 1) ^ 1)
        for part in gl.static_range(PARTS):
            row = row0 + part * PART
            load_tile(q_ptr + head0 * D_K, q1_smem.index(PARTS * row_stage + part), row, row_end, H, HG, D_K, 0, K1, PART)
            if K2 > 0:
                load_tile(q_ptr + head0 * D_K, q2_smem.index(PARTS * row_stage + part), row, row_end, H, HG, D_K, K1, K2, PART)
            load_tile(dout_ptr + head0 * D_V, dout1_smem.index(PARTS * row_stage + part), row, row_end, H, HG, D_V, 0, V1, PART)
            if V2 > 0:
                load_tile(dout_ptr + head0 * D_V, dout2_smem.index(PARTS * row_stage + part), row, row_end, H, HG, D_V, V1, V2, PART)
            rows = row + gl.arange(0, PART, LINE)
            heads = head0 + (rows // HG).to(gl.int64) * H + rows % HG
            exists = rows < row_end
            async_copy.async_copy_global_to_shared(shift_smem.index(PARTS * row_stage + part), shift_ptr + heads, mask=exists)
            async_copy.async_copy_global_to_shared(delta_smem.index(PARTS * row_stage + part), delta_ptr + heads, mask=exists)
        async_copy.mbarrier_arrive(rows_full.index(row_stage), increment_count=False)
        kv_head0 = key_row0 * G + group
        for key in range(start, end, KEYS):
            load_keys(
                k_ptr + kv_head0 * D_K, v_ptr + kv_head0 * D_V, key, end, loaded,
                k1_smem, k2_smem, v1_smem, v2_smem, k_full, k_empty, v_full, v_empty, G, D_K, K1, K2, D_V, V1, V2, KEYS, STAGES,
            )  # fmt: skip
            loaded += 1


@gluon.jit
def _dscores(
    scores, dweights, shift, delta, first, end, key, is_masked, factor, lowering,
    SCORES: gl.constexpr, IS_WINDOW: gl.constexpr, KEYS: gl.constexpr, EXTREME: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Return dS of a tile of keys that starts with `key`. EXTREME: a shift may have any size, and weights are limited as in `tiles.restrained`."""
    weights = gl.exp2(scores * factor - shift[:, None])
    if EXTREME:
        weights = restrained(weights, shift[:, None])
    if is_masked:
        keys = key + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        is_visible = keys[None, :] < end[:, None]
        if IS_WINDOW:
            is_visible = is_visible & (keys[None, :] >= first[:, None])
        weights = gl.where(is_visible, weights, 0.0)
        if EXTREME:
            # huge values may make the product with dO infinite
            dweights = gl.where(is_visible, dweights, 0.0)
        # as `tiles.refined_delta`, without a gradient of lse. Below WIDEST_REFINED the sum of all weights differs from 1 by at most 2^-12, so
        # a product with 1 + lack replaces the division by it
        lack = 1 - gl.sum(weights, 1)
        has_all = lack < 2**-12
        if EXTREME:
            has_all = has_all & (gl.abs(shift) < WIDEST_REFINED)
        mean = gl.sum(weights * dweights, 1)
        delta = gl.where(has_all, mean * lack + mean, delta)
    return dscores_of(weights, dweights, delta[:, None], lowering, EXTREME, dtype)


@gluon.jit
def _multiply(
    part: gl.constexpr, buffers, sequences, num_items, gate_ptr, dq_ptr, scale, factor, lowering,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, V2: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr, EXTREME: gl.constexpr,
):  # fmt: skip
    """Write dQ of one part of the rows of the program's tiles.

    With two parts, the product with k overlaps with the next keys' scores. Three parts have no registers for that, but one computes while
    another waits.
    """
    (
        q1_smem, q2_smem, dout1_smem, dout2_smem, shift_smem, delta_smem, k1_smem, k2_smem, v1_smem, v2_smem,
        rows_full, rows_empty, k_full, k_empty, v_full, v_empty,
    ) = buffers  # fmt: skip
    HG: gl.constexpr = H // G
    PART: gl.constexpr = ROWS // PARTS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    ACC1: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K1, 16])
    ACC2: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, max(K2, 16), 16])
    LEFT1: gl.constexpr = gl.DotOperandLayout(0, ACC1, 2)
    LEFT2: gl.constexpr = gl.DotOperandLayout(0, ACC2, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    PENDING: gl.constexpr = 2 if K2 > 0 else 1
    dtype: gl.constexpr = q1_smem.dtype
    used = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        group, q_row0, _key_row0, row0, num_rows, num_valid, position, start, last_end, middle, tail = tile_of(
            item, sequences, HG, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, ROWS, KEYS
        )
        number = item // gl.num_programs(0)
        row_stage = number % ROW_STAGES
        q1 = q1_smem.index(PARTS * row_stage + part)
        q2 = q2_smem.index(PARTS * row_stage + part)
        dout1 = dout1_smem.index(PARTS * row_stage + part)
        dout2 = dout2_smem.index(PARTS * row_stage + part)
        row0 += part * PART
        rows = row0 + gl.arange(0, PART, OF_ROWS)
        t = gl.where(rows // HG < num_valid, position + rows // HG, -1)
        first, end = visible_keys(t, IS_WINDOW, SIZE, STRIDE, WINDOW)
        head0 = q_row0 * H + group * HG
        mbarrier.wait(rows_full.index(row_stage), (number // ROW_STAGES) & 1)
        shift = gl.where(t < 0, float("inf"), shift_smem.index(PARTS * row_stage + part).load(OF_ROWS))
        delta = delta_smem.index(PARTS * row_stage + part).load(OF_ROWS)
        dq1 = gl.zeros([PART, K1], gl.float32, ACC1)
        dq2 = dq1
        if K2 > 0:
            dq2 = gl.zeros([PART, K2], gl.float32, ACC2)
        zeros = gl.zeros([PART, KEYS], gl.float32, SCORES)
        num_key_tiles = gl.cdiv(last_end - start, KEYS)
        if PARTS == 3:
            gl.static_assert(K2 == 0)
            for tile in range(used, used + num_key_tiles):
                stage = tile % STAGES
                mbarrier.wait(k_full.index(stage), (tile // STAGES) & 1)
                mbarrier.wait(v_full.index(stage), (tile // STAGES) & 1)
                fence_async_shared()
                scores = start_scores(q1, q2, k1_smem.index(stage), k2_smem.index(stage), zeros, K2)
                dweights = start_scores(dout1, dout2, v1_smem.index(stage), v2_smem.index(stage), zeros, V2)
                scores, dweights = warpgroup_mma_wait(0, deps=[scores, dweights])
                mbarrier.arrive(v_empty.index(stage), count=1)
                key = start + (tile - used) * KEYS
                dscores = _dscores(
                    scores, dweights, shift, delta, first, end, key, (key < middle) | (key >= tail), factor, lowering,
                    SCORES, IS_WINDOW, KEYS, EXTREME, dtype,
                )  # fmt: skip
                dq1 = warpgroup_mma(gl.convert_layout(dscores, LEFT1), k1_smem.index(stage), dq1, is_async=True)
                dq1 = warpgroup_mma_wait(0, deps=[dq1])
                mbarrier.arrive(k_empty.index(stage), count=1)
            used += num_key_tiles
        elif num_key_tiles > 0:
            stage = used % STAGES
            mbarrier.wait(k_full.index(stage), (used // STAGES) & 1)
            mbarrier.wait(v_full.index(stage), (used // STAGES) & 1)
            fence_async_shared()
            scores = start_scores(q1, q2, k1_smem.index(stage), k2_smem.index(stage), zeros, K2)
            dweights = start_scores(dout1, dout2, v1_smem.index(stage), v2_smem.index(stage), zeros, V2)
            scores, dweights = warpgroup_mma_wait(0, deps=[scores, dweights])
            mbarrier.arrive(v_empty.index(stage), count=1)
            dscores = _dscores(
                scores, dweights, shift, delta, first, end, start, (start < middle) | (start >= tail), factor, lowering,
                SCORES, IS_WINDOW, KEYS, EXTREME, dtype,
            )  # fmt: skip
            for tile in range(1, num_key_tiles):
                before = (used + tile - 1) % STAGES
                stage = (used + tile) % STAGES
                phase = ((used + tile) // STAGES) & 1
                mbarrier.wait(k_full.index(stage), phase)
                mbarrier.wait(v_full.index(stage), phase)
                fence_async_shared()
                scores = start_scores(q1, q2, k1_smem.index(stage), k2_smem.index(stage), zeros, K2)
                dweights = start_scores(dout1, dout2, v1_smem.index(stage), v2_smem.index(stage), zeros, V2)
                dq1 = warpgroup_mma(gl.convert_layout(dscores, LEFT1), k1_smem.index(before), dq1, is_async=True)
                if K2 > 0:
                    dq2 = warpgroup_mma(gl.convert_layout(dscores, LEFT2), k2_smem.index(before), dq2, is_async=True)
                scores, dweights = warpgroup_mma_wait(PENDING, deps=[scores, dweights])
                mbarrier.arrive(v_empty.index(stage), count=1)
                key = start + tile * KEYS
                dscores = _dscores(
                    scores, dweights, shift, delta, first, end, key, (key < middle) | (key >= tail), factor, lowering,
                    SCORES, IS_WINDOW, KEYS, EXTREME, dtype,
                )  # fmt: skip
                if K2 > 0:
                    dq1, dq2 = warpgroup_mma_wait(0, deps=[dq1, dq2])
                else:
                    dq1 = warpgroup_mma_wait(0, deps=[dq1])
                mbarrier.arrive(k_empty.index(before), count=1)
            used += num_key_tiles
            before = (used - 1) % STAGES
            dq1 = warpgroup_mma(gl.convert_layout(dscores, LEFT1), k1_smem.index(before), dq1, is_async=True)
            if K2 > 0:
                dq2 = warpgroup_mma(gl.convert_layout(dscores, LEFT2), k2_smem.index(before), dq2, is_async=True)
                dq1, dq2 = warpgroup_mma_wait(0, deps=[dq1, dq2])
            else:
                dq1 = warpgroup_mma_wait(0, deps=[dq1])
            mbarrier.arrive(k_empty.index(before), count=1)
        share = gl.full([PART], 1.0, gl.float32, OF_ROWS) * scale
        if GATED:
            heads = head0 + (rows // HG).to(gl.int64) * H + rows % HG
            share *= gl.load(gate_ptr + heads * 3, mask=t >= 0, other=0.0)
        # the epilogue reuses q's shared memory
        barrier()
        _store_scaled(dq_ptr + head0 * D_K, q1, row0, num_rows * HG, dq1, share, t, H, HG, D_K, 0, K1, PART, ACC1, ADD)
        if K2 > 0:
            _store_scaled(dq_ptr + head0 * D_K, q2, row0, num_rows * HG, dq2, share, t, H, HG, D_K, K1, K2, PART, ACC2, ADD)
        barrier()
        store_tile(dq_ptr + head0 * D_K, q1, row0, num_rows * HG, H, HG, D_K, 0, K1, PART)
        if K2 > 0:
            store_tile(dq_ptr + head0 * D_K, q2, row0, num_rows * HG, H, HG, D_K, K1, K2, PART)
        barrier()
        mbarrier.arrive(rows_empty.index(row_stage), count=1)


@gluon.jit
def _store_scaled(
    dq_ptr, smem, row0, row_end, values, share, t,
    H: gl.constexpr, HG: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr,
    ACC: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Store `values`, times a factor of their row, in shared memory. ADD: add the values of dQ first."""
    share = gl.convert_layout(share, gl.SliceLayout(1, ACC))
    # an invalid row (t = -1) may hold NaN
    counts = gl.convert_layout(t, gl.SliceLayout(1, ACC)) >= 0
    values = gl.where(counts[:, None], values * share[:, None], 0.0)
    if ADD:
        rows = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
        columns = gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
        offsets = ((rows // HG).to(gl.int64) * H + rows % HG) * D
        mask = mask_of(rows < row_end, columns, D - FIRST, WIDTH)
        values += gl.load(dq_ptr + FIRST + offsets[:, None] + columns[None, :], mask=mask, other=0.0).to(gl.float32)
    smem.store(values.to(smem.dtype))


@CachedLaunch
@gluon.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, extremes_ptr, gate_ptr, dq_ptr,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, search_steps, scale, factor,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr,
    IS_WINDOW: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr, EXTREME: gl.constexpr, LOADER_REGISTERS: gl.constexpr, PART_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dQ as `interval.kernels.dq_kernel` does, if lse has no gradient. A program takes every num_programs-th tile.

    Three parts of rows are only for heads whose columns are in one part. EXTREME: see `launch._launch_both`.
    """
    PART: gl.constexpr = ROWS // PARTS
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    if gl.load(extremes_ptr) != EXTREME:
        return
    lowering, scale = lowerings(extremes_ptr, scale, dtype)
    K1_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, K1], dtype)
    K2_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, max(K2, 16)], dtype)
    V1_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, V1], dtype)
    V2_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, max(V2, 16)], dtype)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q1_smem = gl.allocate_shared_memory(dtype, [PARTS * ROW_STAGES, PART, K1], K1_SHARED)
    k1_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, K1], K1_SHARED)
    q2_smem = q1_smem
    k2_smem = k1_smem
    if K2 > 0:
        q2_smem = gl.allocate_shared_memory(dtype, [PARTS * ROW_STAGES, PART, K2], K2_SHARED)
        k2_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, K2], K2_SHARED)
    dout1_smem = gl.allocate_shared_memory(dtype, [PARTS * ROW_STAGES, PART, V1], V1_SHARED)
    v1_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, V1], V1_SHARED)
    dout2_smem = dout1_smem
    v2_smem = v1_smem
    if V2 > 0:
        dout2_smem = gl.allocate_shared_memory(dtype, [PARTS * ROW_STAGES, PART, V2], V2_SHARED)
        v2_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, V2], V2_SHARED)
    shift_smem = gl.allocate_shared_memory(gl.float32, [PARTS * ROW_STAGES, PART], FLAT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [PARTS * ROW_STAGES, PART], FLAT)
    rows_full = gl.allocate_shared_memory(gl.int64, [ROW_STAGES, 1], BARRIER)
    rows_empty = gl.allocate_shared_memory(gl.int64, [ROW_STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    # every producer thread arrives once its copies have landed, and each part once it has read them
    for row_stage in gl.static_range(ROW_STAGES):
        mbarrier.init(rows_full.index(row_stage), count=128)
        mbarrier.init(rows_empty.index(row_stage), count=PARTS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=128)
        mbarrier.init(v_full.index(stage), count=128)
        mbarrier.init(k_empty.index(stage), count=PARTS)
        mbarrier.init(v_empty.index(stage), count=PARTS)
    fence_async_shared()
    barrier()
    buffers = (
        q1_smem, q2_smem, dout1_smem, dout2_smem, shift_smem, delta_smem, k1_smem, k2_smem, v1_smem, v2_smem,
        rows_full, rows_empty, k_full, k_empty, v_full, v_empty,
    )  # fmt: skip
    sequences = (
        cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
        num_sequences, num_queries, num_keys, num_tiles, num_columns, search_steps,
    )  # fmt: skip
    if PARTS == 3:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        0, buffers, sequences, num_items, gate_ptr, dq_ptr, scale, factor, lowering,
                        H, G, D_K, K1, K2, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, GATED, ADD, PARTS, ROWS, KEYS, STAGES, ROW_STAGES,
                        EXTREME,
                    ),
                ),
                (
                    _multiply,
                    (
                        1, buffers, sequences, num_items, gate_ptr, dq_ptr, scale, factor, lowering,
                        H, G, D_K, K1, K2, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, GATED, ADD, PARTS, ROWS, KEYS, STAGES, ROW_STAGES,
                        EXTREME,
                    ),
                ),
                (
                    _multiply,
                    (
                        2, buffers, sequences, num_items, gate_ptr, dq_ptr, scale, factor, lowering,
                        H, G, D_K, K1, K2, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, GATED, ADD, PARTS, ROWS, KEYS, STAGES, ROW_STAGES,
                        EXTREME,
                    ),
                ),
                (
                    _load,
                    (
                        q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, buffers, sequences, num_items,
                        H, G, D_K, K1, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES, ROW_STAGES,
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
                    _multiply,
                    (
                        0, buffers, sequences, num_items, gate_ptr, dq_ptr, scale, factor, lowering,
                        H, G, D_K, K1, K2, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, GATED, ADD, PARTS, ROWS, KEYS, STAGES, ROW_STAGES,
                        EXTREME,
                    ),
                ),
                (
                    _multiply,
                    (
                        1, buffers, sequences, num_items, gate_ptr, dq_ptr, scale, factor, lowering,
                        H, G, D_K, K1, K2, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, GATED, ADD, PARTS, ROWS, KEYS, STAGES, ROW_STAGES,
                        EXTREME,
                    ),
                ),
                (
                    _load,
                    (
                        q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, buffers, sequences, num_items,
                        H, G, D_K, K1, K2, D_V, V1, V2, IS_WINDOW, SIZE, STRIDE, WINDOW, PACKED, CACHED, PARTS, ROWS, KEYS, STAGES, ROW_STAGES,
                    ),
                ),
            ],
            [4, 4],
            [PART_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
