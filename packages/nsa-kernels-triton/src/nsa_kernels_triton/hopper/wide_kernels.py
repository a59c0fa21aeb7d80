"""Backward of attention over chosen blocks for compute capability 9.0 and wide heads: a producer warpgroup, two consumer warpgroups.

One consumer warpgroup holds dV and computes the first columns of partial dQ; the other holds dK and computes the remaining columns. Both compute
the weights and their gradients instead of exchanging them, so that neither waits for the other.
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
from nsa_kernels_triton.hopper.selected_kernels import add_or_store, gather, load_item, store_parts, weights_of
from nsa_kernels_triton.hopper.tiles import barrier, dscores_of, invalidate, load_tile, lowerings, start_next


@gluon.jit
def _multiply_values(
    k1_smem, k2_smem, v_smem, q1_smem, q2_smem, dout_smem, shift_smem, delta_smem, gate_smem, own_smem, entry_smem, ds_smem, dq_smem,
    full, empty, dq_ptr, dv_ptr, dv_partial_ptr, key_row0, last_key, group, partial_index, num_rows, is_masked, scale, factor,
    lowering,
    G: gl.constexpr, HG: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    SLOTS_TOTAL: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, EXTREME: gl.constexpr,
):  # fmt: skip
    """Write the first K1 columns of partial dQ of every tile, and add or store dV of the block."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, V1, 16])
    dtype: gl.constexpr = q1_smem.dtype
    keys = key_row0 + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    dv = gl.zeros([KEYS, V1], gl.float32, ACC)
    num_tiles = gl.cdiv(num_rows, ROWS)
    zeros = gl.zeros([KEYS, ROWS], gl.float32, SCORES)
    scores = start_next(0, num_tiles, k1_smem, k2_smem, q1_smem, q2_smem, full, zeros, K2, STAGES, False)
    for tile in range(num_tiles):
        stage = tile % STAGES
        dout = dout_smem.index(stage)
        weights, dweights = weights_of(
            scores,
            zeros,
            dout,
            v_smem,
            shift_smem.index(stage),
            gate_smem.index(stage),
            own_smem.index(stage),
            keys,
            is_masked,
            factor,
            GATED,
            EXTREME,
            SCORES,
        )
        dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, ACC, 2)), dout, dv, is_async=True)
        delta = delta_smem.index(stage).load(gl.SliceLayout(0, SCORES))
        dweights = warpgroup_mma_wait(1, deps=[dweights])
        ds_smem.store(dscores_of(weights, dweights, delta[None, :], lowering, EXTREME, dtype))
        fence_async_shared()
        barrier()
        dq = warpgroup_mma(k1_smem.permute((1, 0)), ds_smem, gl.zeros([K1, ROWS], gl.float32, SCORES), use_acc=False, is_async=True)
        dv, dq = warpgroup_mma_wait(0, deps=[dv, dq])
        scores = start_next(tile + 1, num_tiles, k1_smem, k2_smem, q1_smem, q2_smem, full, zeros, K2, STAGES, False)
        dq_smem.permute((1, 0)).store((dq * scale).to(dtype))
        barrier()
        store_parts(dq_ptr, dq_smem, entry_smem.index(stage), tile, num_rows, G, HG, D_K, 0, K1, SLOTS_TOTAL, ROWS)
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    warpgroup_mma_wait(0, deps=[scores])
    add_or_store(dv_ptr, dv_partial_ptr, key_row0, last_key, group, partial_index, dv, G, D_V, 0, V1, KEYS, ACC)


@gluon.jit
def _multiply_keys(
    k1_smem, k2_smem, v_smem, q1_smem, q2_smem, dout_smem, shift_smem, delta_smem, gate_smem, own_smem, entry_smem, ds_smem, dq_smem,
    full, empty, dq_ptr, dk_ptr, dk_partial_ptr, key_row0, last_key, group, partial_index, num_rows, is_masked, scale, factor,
    lowering, dk_scale,
    G: gl.constexpr, HG: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
    SLOTS_TOTAL: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, EXTREME: gl.constexpr,
):  # fmt: skip
    """Write the last K2 columns of partial dQ of every tile, and add or store dK of the block."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    ACC_1: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K1, 16])
    ACC_2: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K2, 16])
    dtype: gl.constexpr = q1_smem.dtype
    keys = key_row0 + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    dk1 = gl.zeros([KEYS, K1], gl.float32, ACC_1)
    dk2 = gl.zeros([KEYS, K2], gl.float32, ACC_2)
    num_tiles = gl.cdiv(num_rows, ROWS)
    zeros = gl.zeros([KEYS, ROWS], gl.float32, SCORES)
    scores = start_next(0, num_tiles, k1_smem, k2_smem, q1_smem, q2_smem, full, zeros, K2, STAGES, False)
    for tile in range(num_tiles):
        stage = tile % STAGES
        weights, dweights = weights_of(
            scores, zeros, dout_smem.index(stage), v_smem, shift_smem.index(stage), gate_smem.index(stage), own_smem.index(stage),
            keys, is_masked, factor, GATED, EXTREME, SCORES,
        )  # fmt: skip
        delta = delta_smem.index(stage).load(gl.SliceLayout(0, SCORES))
        dweights = warpgroup_mma_wait(0, deps=[dweights])
        dscores = dscores_of(weights, dweights, delta[None, :], lowering, EXTREME, dtype)
        dk1 = warpgroup_mma(gl.convert_layout(dscores, gl.DotOperandLayout(0, ACC_1, 2)), q1_smem.index(stage), dk1, is_async=True)
        dk2 = warpgroup_mma(gl.convert_layout(dscores, gl.DotOperandLayout(0, ACC_2, 2)), q2_smem.index(stage), dk2, is_async=True)
        ds_smem.store(dscores)
        fence_async_shared()
        barrier()
        dq = warpgroup_mma(k2_smem.permute((1, 0)), ds_smem, gl.zeros([K2, ROWS], gl.float32, SCORES), use_acc=False, is_async=True)
        dk1, dk2, dq = warpgroup_mma_wait(0, deps=[dk1, dk2, dq])
        scores = start_next(tile + 1, num_tiles, k1_smem, k2_smem, q1_smem, q2_smem, full, zeros, K2, STAGES, False)
        dq_smem.permute((1, 0)).store((dq * scale).to(dtype))
        barrier()
        store_parts(dq_ptr, dq_smem, entry_smem.index(stage), tile, num_rows, G, HG, D_K, K1, K2, SLOTS_TOTAL, ROWS)
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    warpgroup_mma_wait(0, deps=[scores])
    add_or_store(dk_ptr, dk_partial_ptr, key_row0, last_key, group, partial_index, dk1 * dk_scale, G, D_K, 0, K1, KEYS, ACC_1)
    add_or_store(dk_ptr, dk_partial_ptr, key_row0, last_key, group, partial_index, dk2 * dk_scale, G, D_K, K1, K2, KEYS, ACC_2)


@gluon.jit
def _compute_item(
    item, work,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    SLOTS_TOTAL: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, EXTREME: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr, PART_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write partial dQ, dK and dV of one item."""
    (
        q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, gate_ptr, dq_parts_ptr, dk_ptr, dv_ptr, dk_partial_ptr, dv_partial_ptr,
        items_ptr, entries_ptr, own_ptr, key_rows_ptr, first_row, num_pieces, scale, factor, lowering, dk_scale,
    ) = work  # fmt: skip
    HG: gl.constexpr = H // G
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    group, start, end, partial_index, key_row0, last_key, is_masked = load_item(
        item, items_ptr, entries_ptr, own_ptr, key_rows_ptr, num_pieces, SLOTS_TOTAL, KEYS
    )

    FIRST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, K1], dtype)
    SECOND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, K2], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, V1], dtype)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k1_smem = gl.allocate_shared_memory(dtype, [KEYS, K1], FIRST)
    k2_smem = gl.allocate_shared_memory(dtype, [KEYS, K2], SECOND)
    v_smem = gl.allocate_shared_memory(dtype, [KEYS, V1], VALUES)
    q1_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, K1], FIRST)
    q2_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, K2], SECOND)
    dout_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, V1], VALUES)
    ds_smem = gl.allocate_shared_memory(dtype, [2, KEYS, ROWS], WEIGHTS)
    dq1_smem = gl.allocate_shared_memory(dtype, [ROWS, K1], FIRST)
    dq2_smem = gl.allocate_shared_memory(dtype, [ROWS, K2], SECOND)
    shift_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    gate_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    own_smem = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], FLAT)
    entry_smem = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        # every producer thread arrives once its copies have landed, and each half once it has read them
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=2)

    num_keys = last_key + 1 - key_row0
    kv_head0 = key_row0.to(gl.int64) * G + group
    load_tile(k_ptr + kv_head0 * D_K, k1_smem, 0, num_keys, G, 1, D_K, 0, K1, KEYS)
    load_tile(k_ptr + kv_head0 * D_K, k2_smem, 0, num_keys, G, 1, D_K, K1, K2, KEYS)
    load_tile(v_ptr + kv_head0 * D_V, v_smem, 0, num_keys, G, 1, D_V, 0, V1, KEYS)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()

    # offsets within a chunk fit 32 bits
    head0 = first_row.to(gl.int64) * H + group * HG
    num_item_rows = (end - start) * HG
    dq_ptr = dq_parts_ptr + group * (SLOTS_TOTAL * HG * D_K)
    gl.warp_specialize(
        [
            (
                _multiply_keys,
                (
                    k1_smem, k2_smem, v_smem, q1_smem, q2_smem, dout_smem, shift_smem, delta_smem, gate_smem, own_smem, entry_smem,
                    ds_smem.index(0), dq2_smem, full, empty, dq_ptr, dk_ptr, dk_partial_ptr,
                    key_row0, last_key, group, partial_index, num_item_rows, is_masked, scale, factor, lowering, dk_scale,
                    G, HG, D_K, K1, K2, SLOTS_TOTAL, GATED, ROWS, KEYS, STAGES, EXTREME,
                ),
            ),
            (
                _multiply_values,
                (
                    k1_smem, k2_smem, v_smem, q1_smem, q2_smem, dout_smem, shift_smem, delta_smem, gate_smem, own_smem, entry_smem,
                    ds_smem.index(1), dq1_smem, full, empty, dq_ptr, dv_ptr, dv_partial_ptr,
                    key_row0, last_key, group, partial_index, num_item_rows, is_masked, scale, factor, lowering,
                    G, HG, D_K, K1, K2, D_V, V1, SLOTS_TOTAL, GATED, ROWS, KEYS, STAGES, EXTREME,
                ),
            ),
            (
                gather,
                (
                    q_ptr + head0 * D_K, dout_ptr + head0 * D_V, shift_ptr + head0, delta_ptr + head0, gate_ptr + head0 * 3, entries_ptr, own_ptr,
                    q1_smem, q2_smem, dout_smem, shift_smem, delta_smem, gate_smem, own_smem, entry_smem, full, empty, start, num_item_rows,
                    H, HG, D_K, K1, K2, D_V, V1, SLOTS_TOTAL, GATED, ROWS, STAGES, False,
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
def backward_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, extremes_ptr, gate_ptr, dq_parts_ptr, dk_ptr, dv_ptr, dk_partial_ptr, dv_partial_ptr,
    items_ptr, num_items_ptr, entries_ptr, rows_ptr, key_rows_ptr, first_row, num_rows, num_pieces, scale, factor,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    SLOTS_TOTAL: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, EXTREME: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr, PART_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write the results of `selected_kernels.backward_kernel` for heads of q with two parts; grid (bound on items,).

    EXTREME: see `launch._launch_both`; any number of programs share the items.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    num_items = gl.load(num_items_ptr)
    if (gl.program_id(0) >= num_items) | (gl.load(extremes_ptr) != EXTREME):
        return
    own_ptr = rows_ptr + num_rows + first_row
    lowering, dk_scale = lowerings(extremes_ptr, scale, dtype)
    work = (
        q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, gate_ptr, dq_parts_ptr, dk_ptr, dv_ptr, dk_partial_ptr, dv_partial_ptr,
        items_ptr, entries_ptr, own_ptr, key_rows_ptr, first_row, num_pieces, scale, factor, lowering, dk_scale,
    )  # fmt: skip
    if EXTREME:
        for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
            _compute_item(
                item, work, H, G, D_K, K1, K2, D_V, V1, SLOTS_TOTAL,
                GATED, ROWS, KEYS, STAGES, EXTREME, LOADER_REGISTERS, PART_REGISTERS,
            )  # fmt: skip
    else:
        _compute_item(
            gl.program_id(0), work, H, G, D_K, K1, K2, D_V, V1, SLOTS_TOTAL,
            GATED, ROWS, KEYS, STAGES, EXTREME, LOADER_REGISTERS, PART_REGISTERS,
        )  # fmt: skip
