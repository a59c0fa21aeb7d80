"""Forward and backward of attention over chosen blocks for compute capability 9.0: producer warps gather rows while consumer warps compute.

A program has one producer and one consumer warpgroup; two or three programs share a multiprocessor. The producer warps gather
an item's rows of q (in the backward pass also of dO) into a ring buffer of tiles; `selected.index_kernels` describes items. In the backward pass
the consumer warps hold the block's dK and dV. All matrices are transposed, (keys, rows), so that the weights, the result of one product, are
the first operand of the next. In the forward pass the columns of v are permuted as they are loaded, so that a thread stores 16 bytes at a time.
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
    dscores_of,
    hand_over,
    invalidate,
    load_tile,
    lowerings,
    mask_of,
    opaque,
    power_near_one,
    reciprocal,
    restrained,
    start_next,
    start_scores,
)
from nsa_kernels_triton.tiles import EXTREME


@gluon.jit
def load_item(number, items_ptr, entries_ptr, own_ptr, key_rows_ptr, num_pieces, SLOTS_TOTAL: gl.constexpr, KEYS: gl.constexpr):
    """Return the group of item `number`, first entry, end, index of its split-K partial, first and last key row, and whether it is masked."""
    item = items_ptr + number * 4
    index = gl.load(item)
    start = gl.load(item + 1)
    end = gl.load(item + 2)
    key_row0 = gl.load(key_rows_ptr + index % num_pieces)
    # the item's last query sees the most keys; rows of a store after those may hold anything
    last_key = gl.load(own_ptr + gl.load(entries_ptr + end - 1) // SLOTS_TOTAL)
    is_masked = gl.load(own_ptr + gl.load(entries_ptr + start) // SLOTS_TOTAL) < key_row0 + KEYS - 1
    return index // num_pieces, start, end, gl.load(item + 3), key_row0, last_key, is_masked


@gluon.constexpr_function
def tile_of(width, lane_columns):
    """Return the layout of a tile of rows, with `lane_columns` lanes per row. Tiles of different widths then share their row indices."""
    return gl.BlockedLayout([1, width // lane_columns], [32 // lane_columns, lane_columns], [4, 1], [1, 0])


@gluon.jit
def _start_of(tile, entries_ptr, num_rows, HG: gl.constexpr, ROWS: gl.constexpr, IS_RELATIVE: gl.constexpr):
    """Return a pointer to entries, the number of the tile's first row counted from it, and the number of rows from there on.

    IS_RELATIVE: if tiles start at a query's first head, the pointer is to its entry. Then the compiler knows the distances between a thread's rows.
    """
    row = tile * ROWS
    if IS_RELATIVE and ROWS % HG == 0:
        query = tile * (ROWS // HG)
        if HG % 16 != 0:
            # the loop would keep an address for each of a thread's rows. With 16 heads these addresses have constant distances
            query = opaque(query)
        return entries_ptr + query, gl.to_tensor(0), num_rows - row
    return entries_ptr, row, num_rows


@gluon.jit
def _load_entries(entries_ptr, tile, num_rows, HG: gl.constexpr, ROWS: gl.constexpr, IS_RELATIVE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the list's entries of a tile's rows."""
    entries_ptr, row, end = _start_of(tile, entries_ptr, num_rows, HG, ROWS, IS_RELATIVE)
    rows = row + gl.arange(0, ROWS, LAYOUT)
    return gl.load(entries_ptr + rows // HG, mask=rows < end, other=0)


@gluon.jit
def _local(entry, SLOTS_TOTAL: gl.constexpr):
    """Return the rows within the chunk of entries, which are at least 0; an unsigned division takes fewer instructions."""
    return (entry.to(gl.uint32) // SLOTS_TOTAL).to(gl.int32)


@gluon.jit
def _gather_tile(
    ptr, entry, smem, row, end,
    H: gl.constexpr, HG: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr, SLOTS_TOTAL: gl.constexpr,
    ROWS: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Start copying the columns FIRST .. FIRST + WIDTH - 1 of a tile's rows, whose entries are given. Elements that do not exist are zero."""
    TILE: gl.constexpr = tile_of(WIDTH, LANES)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, TILE))
    heads = _local(gl.convert_layout(entry, gl.SliceLayout(1, TILE)), SLOTS_TOTAL) * H + rows % HG
    mask = mask_of(rows < end, columns, D - FIRST, WIDTH)
    async_copy.async_copy_global_to_shared(smem, ptr + FIRST + heads[:, None] * D + columns[None, :], mask=mask)


@gluon.jit
def gather(
    q_ptr, dout_ptr, shift_ptr, delta_ptr, gate_ptr, entries_ptr, own_ptr,
    q1_smem, q2_smem, dout_smem, shift_smem, delta_smem, gate_smem, own_smem, entry_smem, full, empty, start, num_rows,
    H: gl.constexpr, HG: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    SLOTS_TOTAL: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, FENCED: gl.constexpr,
):  # fmt: skip
    """Fill the ring buffer with the tiles of an item. Rows beyond the last are zeros. FENCED: a fence precedes the signal that a tile is full."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    LANES: gl.constexpr = K1 // 8
    OF_TILE: gl.constexpr = gl.SliceLayout(1, tile_of(K1, LANES))
    # with two parts of q the producer warps would lack registers: the kernel would be 10 % slower
    IS_RELATIVE: gl.constexpr = K2 == 0
    entries_ptr += start
    entry = _load_entries(entries_ptr, gl.to_tensor(0), num_rows, HG, ROWS, IS_RELATIVE, LINE)
    entry_t = _load_entries(entries_ptr, gl.to_tensor(0), num_rows, HG, ROWS, IS_RELATIVE, OF_TILE)
    for tile in range(gl.cdiv(num_rows, ROWS)):
        stage = tile % STAGES
        # the next tile's entries are loaded while this one waits for a stage
        next_entry = _load_entries(entries_ptr, tile + 1, num_rows, HG, ROWS, IS_RELATIVE, LINE)
        next_entry_t = _load_entries(entries_ptr, tile + 1, num_rows, HG, ROWS, IS_RELATIVE, OF_TILE)
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        tile_ptr, row, end = _start_of(tile, entries_ptr, num_rows, HG, ROWS, IS_RELATIVE)
        _gather_tile(q_ptr, entry_t, q1_smem.index(stage), row, end, H, HG, D_K, 0, K1, SLOTS_TOTAL, ROWS, LANES)
        if K2 > 0:
            _gather_tile(q_ptr, entry_t, q2_smem.index(stage), row, end, H, HG, D_K, K1, K2, SLOTS_TOTAL, ROWS, LANES)
        _gather_tile(dout_ptr, entry_t, dout_smem.index(stage), row, end, H, HG, D_V, 0, V1, SLOTS_TOTAL, ROWS, LANES)
        rows = row + gl.arange(0, ROWS, LINE)
        exists = rows < end
        local = _local(entry, SLOTS_TOTAL)
        heads = local * H + rows % HG
        async_copy.async_copy_global_to_shared(shift_smem.index(stage), shift_ptr + heads, mask=exists)
        async_copy.async_copy_global_to_shared(delta_smem.index(stage), delta_ptr + heads, mask=exists)
        if GATED:
            async_copy.async_copy_global_to_shared(gate_smem.index(stage), gate_ptr + heads * 3, mask=exists)
        async_copy.async_copy_global_to_shared(own_smem.index(stage), own_ptr + local, mask=exists)
        async_copy.async_copy_global_to_shared(entry_smem.index(stage), tile_ptr + rows // HG, mask=exists)
        if FENCED:
            # two stages would deadlock: tile t + 1 is announced after tile t + 2 is filled; tile t is freed after tile t + 1's products start
            gl.static_assert(STAGES > 2)
            async_copy.commit_group()
            if tile > 0:
                hand_over(full.index((tile - 1) % STAGES), 1)
        else:
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        entry = next_entry
        entry_t = next_entry_t
    if FENCED:
        hand_over(full.index((gl.cdiv(num_rows, ROWS) - 1) % STAGES), 0)


@gluon.jit
def weights_of(
    scores, zeros, dout, v_smem, shift_smem, gate_smem, own_smem, keys, is_masked, factor,
    GATED: gl.constexpr, EXTREME: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Return a tile's weights, times the gates, and their gradients, whose product is still in flight. EXTREME: as `tiles.restrained`."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(0, SCORES)
    scores = warpgroup_mma_wait(0, deps=[scores])
    dweights = warpgroup_mma(v_smem, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
    weights = gl.exp2(scores * factor - shift_smem.load(OF_ROWS)[None, :])
    if is_masked:
        weights = gl.where(keys[:, None] <= own_smem.load(OF_ROWS)[None, :], weights, 0.0)
    if EXTREME:
        weights = restrained(weights, shift_smem.load(OF_ROWS)[None, :])
    if GATED:
        weights = weights * gate_smem.load(OF_ROWS)[None, :]
    return weights, dweights


@gluon.jit
def _multiply(
    k_smem, v_smem, q_smem, dout_smem, shift_smem, delta_smem, gate_smem, own_smem, entry_smem, ds_smem,
    full, empty, dq_ptr, dk_ptr, dv_ptr, dk_partial_ptr, dv_partial_ptr, key_row0, last_key, group, partial_index, num_rows, is_masked, scale, factor,
    lowering, dk_scale,
    G: gl.constexpr, HG: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    SLOTS_TOTAL: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, EXTREME: gl.constexpr,
):  # fmt: skip
    """Write partial dQ of every tile, and add or store dK and dV of the block."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    ACC_K: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K1, 16])
    ACC_V: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, V1, 16])
    dtype: gl.constexpr = q_smem.dtype
    keys = key_row0 + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    dk = gl.zeros([KEYS, K1], gl.float32, ACC_K)
    dv = gl.zeros([KEYS, V1], gl.float32, ACC_V)
    num_tiles = gl.cdiv(num_rows, ROWS)
    zeros = gl.zeros([KEYS, ROWS], gl.float32, SCORES)
    scores = start_next(0, num_tiles, k_smem, k_smem, q_smem, q_smem, full, zeros, 0, STAGES, True)
    for tile in range(num_tiles):
        stage = tile % STAGES
        q = q_smem.index(stage)
        dout = dout_smem.index(stage)
        weights, dweights = weights_of(
            scores, zeros, dout, v_smem, shift_smem.index(stage), gate_smem.index(stage), own_smem.index(stage),
            keys, is_masked, factor, GATED, EXTREME, SCORES,
        )  # fmt: skip
        dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, ACC_V, 2)), dout, dv, is_async=True)
        delta = delta_smem.index(stage).load(gl.SliceLayout(0, SCORES))
        dweights = warpgroup_mma_wait(1, deps=[dweights])
        dscores = dscores_of(weights, dweights, delta[None, :], lowering, EXTREME, dtype)
        ds_smem.store(dscores)
        dk = warpgroup_mma(gl.convert_layout(dscores, gl.DotOperandLayout(0, ACC_K, 2)), q, dk, is_async=True)
        fence_async_shared()
        barrier()
        dq = warpgroup_mma(k_smem.permute((1, 0)), ds_smem, gl.zeros([K1, ROWS], gl.float32, SCORES), use_acc=False, is_async=True)
        dv, dk, dq = warpgroup_mma_wait(0, deps=[dv, dk, dq])
        # the next tile's scores are computed while this tile's results are stored
        scores = start_next(tile + 1, num_tiles, k_smem, k_smem, q_smem, q_smem, full, zeros, 0, STAGES, True)
        barrier()
        # partial dQ reuses the shared memory of the tile of q, which is no longer needed
        q.permute((1, 0)).store((dq * scale).to(dtype))
        barrier()
        store_parts(dq_ptr, q, entry_smem.index(stage), tile, num_rows, G, HG, D_K, 0, K1, SLOTS_TOTAL, ROWS)
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    warpgroup_mma_wait(0, deps=[scores])
    add_or_store(dk_ptr, dk_partial_ptr, key_row0, last_key, group, partial_index, dk * dk_scale, G, D_K, 0, K1, KEYS, ACC_K)
    add_or_store(dv_ptr, dv_partial_ptr, key_row0, last_key, group, partial_index, dv, G, D_V, 0, V1, KEYS, ACC_V)


@gluon.jit
def store_parts(
    ptr, smem, entry_smem, tile, num_rows,
    G: gl.constexpr, HG: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr, SLOTS_TOTAL: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Write the existing columns among FIRST .. FIRST + WIDTH - 1 of a tile's partial results to (rows, G, slots, H/G, D)."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    entry = entry_smem.load(gl.SliceLayout(1, TILE))
    rows = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    target = (entry // SLOTS_TOTAL * (G * SLOTS_TOTAL) + entry % SLOTS_TOTAL) * HG + rows % HG
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, TILE))
    mask = mask_of(rows < num_rows, columns, D - FIRST, WIDTH)
    gl.store(ptr + FIRST + target[:, None] * D + columns[None, :], smem.load(TILE), mask=mask)


@gluon.jit
def add_or_store(
    sum_ptr, partial_ptr, key_row0, last_key, group, partial_index, values,
    G: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Add the gradients of a list's first item to the running sum; store those of a later item as a split-K partial."""
    in_piece = gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
    if partial_index < 0:
        mask = mask_of(key_row0 + in_piece <= last_key, columns, D - FIRST, WIDTH)
        keys = (key_row0 + in_piece).to(gl.int64) * G + group
        target = sum_ptr + FIRST + keys[:, None] * D + columns[None, :]
        gl.store(target, gl.load(target, mask=mask, other=0.0) + values, mask=mask)
    else:
        # store the whole tile, because the gradient of a key that none of the item's queries sees is 0
        numbers = partial_index.to(gl.int64) * KEYS + in_piece
        target = partial_ptr + FIRST + numbers[:, None] * D + columns[None, :]
        gl.store(target, values, mask=mask_of(in_piece >= 0, columns, D - FIRST, WIDTH))


@gluon.jit
def _compute_item(
    item, work,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    SLOTS_TOTAL: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, EXTREME: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
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

    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, K1], dtype)
    V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, V1], dtype)
    DS_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(dtype, [KEYS, K1], K_SHARED)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, K1], K_SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [KEYS, V1], V_SHARED)
    dout_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, V1], V_SHARED)
    ds_smem = gl.allocate_shared_memory(dtype, [KEYS, ROWS], DS_SHARED)
    shift_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    gate_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], FLAT)
    own_smem = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], FLAT)
    entry_smem = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        # `hand_over` arrives once for all producer threads
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)

    num_keys = last_key + 1 - key_row0
    kv_head0 = key_row0.to(gl.int64) * G + group
    load_tile(k_ptr + kv_head0 * D_K, k_smem, 0, num_keys, G, 1, D_K, 0, K1, KEYS)
    load_tile(v_ptr + kv_head0 * D_V, v_smem, 0, num_keys, G, 1, D_V, 0, V1, KEYS)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()

    # offsets within a chunk fit 32 bits
    head0 = first_row.to(gl.int64) * H + group * HG
    num_item_rows = (end - start) * HG
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    k_smem, v_smem, q_smem, dout_smem, shift_smem, delta_smem, gate_smem, own_smem, entry_smem, ds_smem,
                    full, empty, dq_parts_ptr + group * (SLOTS_TOTAL * HG * D_K), dk_ptr, dv_ptr, dk_partial_ptr, dv_partial_ptr,
                    key_row0, last_key, group, partial_index, num_item_rows, is_masked, scale, factor, lowering, dk_scale,
                    G, HG, D_K, K1, D_V, V1, SLOTS_TOTAL, GATED, ROWS, KEYS, STAGES, EXTREME,
                ),
            ),
            (
                gather,
                (
                    q_ptr + head0 * D_K, dout_ptr + head0 * D_V, shift_ptr + head0, delta_ptr + head0, gate_ptr + head0 * 3, entries_ptr, own_ptr,
                    q_smem, q_smem, dout_smem, shift_smem, delta_smem, gate_smem, own_smem, entry_smem, full, empty, start, num_item_rows,
                    H, HG, D_K, K1, K2, D_V, V1, SLOTS_TOTAL, GATED, ROWS, STAGES, True,
                ),
            ),
        ],
        [4],
        [LOADER_REGISTERS],
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
    LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write partial dQ (rows, G, slots, H/G, D_k), and dK, dV of one item's keys, for K2 = 0; grid (bound on items,).

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
                GATED, ROWS, KEYS, STAGES, EXTREME, LOADER_REGISTERS,
            )  # fmt: skip
    else:
        _compute_item(
            gl.program_id(0), work, H, G, D_K, K1, K2, D_V, V1, SLOTS_TOTAL,
            GATED, ROWS, KEYS, STAGES, EXTREME, LOADER_REGISTERS,
        )  # fmt: skip


@gluon.jit
def _load_shuffled_values(ptr, smem, num_keys, G: gl.constexpr, D_V: gl.constexpr, FIRST: gl.constexpr, KEYS: gl.constexpr):
    """Start copying 64 columns of values from FIRST on, in an order that gives each thread eight neighbouring columns of the product's result.

    Of each 32 columns, column 8 j + 2 c + e comes from column 8 c + 2 j + e. Elements that do not exist are zero.
    """
    TILE: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    rows = gl.arange(0, KEYS, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, 64, gl.SliceLayout(0, TILE))
    pairs = columns // 32 * 32 + columns // 2 % 4 * 8 + columns // 8 % 4 * 2
    # the mask is computed for each pair, because the compiler must see that both columns of a pair have the same mask
    mask = mask_of(rows < num_keys, pairs, D_V - FIRST, 64)
    async_copy.async_copy_global_to_shared(smem, ptr + FIRST + (rows * (G * D_V))[:, None] + (pairs + columns % 2)[None, :], mask=mask)


@gluon.constexpr_function
def _of_pieces(num_rows):
    """Return the layout of 64 columns in their own order: a thread holds eight neighbours of a row, and of the row eight below."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [num_rows, 64]
    )


@gluon.jit
def _store_unshuffled(ptr, target, acc, inverse, exists, dtype: gl.constexpr, D_V: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Write 64 columns of a tile's outputs from FIRST on to the rows `target`, 16 bytes a thread, without an exchange between threads."""
    PIECES: gl.constexpr = _of_pieces(ROWS)
    out = (acc * inverse[:, None]).to(dtype).reshape([ROWS, 2, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, 64])
    columns = gl.arange(0, 64, gl.SliceLayout(0, PIECES))
    mask = mask_of(exists, columns, D_V - FIRST, 64)
    gl.store(ptr + FIRST + target[:, None] * D_V + columns[None, :], gl.convert_layout(out, PIECES), mask=mask)


@gluon.jit
def _gather_queries(
    q_ptr, k_ptr, v_ptr, entries_ptr, own_ptr, q1_smem, q2_smem, k1_smem, k2_smem, v_smem, own_smem, entry_smem, full, empty, keys_full,
    start, num_rows, num_keys,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr,
    SLOTS_TOTAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the keys and values of an item, and fill the ring buffer with its tiles of queries. Rows beyond the last are zeros."""
    HG: gl.constexpr = H // G
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    load_tile(k_ptr, k1_smem, 0, num_keys, G, 1, D_K, 0, K1, KEYS)
    if K2 > 0:
        load_tile(k_ptr, k2_smem, 0, num_keys, G, 1, D_K, K1, K2, KEYS)
    for part in gl.static_range((D_V + 63) // 64):
        _load_shuffled_values(v_ptr, v_smem.index(part), num_keys, G, D_V, part * 64, KEYS)
    async_copy.mbarrier_arrive(keys_full.index(0), increment_count=False)
    LANES: gl.constexpr = K1 // 8
    OF_TILE: gl.constexpr = gl.SliceLayout(1, tile_of(K1, LANES))
    entries_ptr += start
    entry = _load_entries(entries_ptr, gl.to_tensor(0), num_rows, HG, ROWS, True, LINE)
    entry_t = _load_entries(entries_ptr, gl.to_tensor(0), num_rows, HG, ROWS, True, OF_TILE)
    for tile in range(gl.cdiv(num_rows, ROWS)):
        stage = tile % STAGES
        # the next tile's entries are loaded while this one waits for a stage
        next_entry = _load_entries(entries_ptr, tile + 1, num_rows, HG, ROWS, True, LINE)
        next_entry_t = _load_entries(entries_ptr, tile + 1, num_rows, HG, ROWS, True, OF_TILE)
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        tile_ptr, row, end = _start_of(tile, entries_ptr, num_rows, HG, ROWS, True)
        _gather_tile(q_ptr, entry_t, q1_smem.index(stage), row, end, H, HG, D_K, 0, K1, SLOTS_TOTAL, ROWS, LANES)
        if K2 > 0:
            _gather_tile(q_ptr, entry_t, q2_smem.index(stage), row, end, H, HG, D_K, K1, K2, SLOTS_TOTAL, ROWS, LANES)
        rows = row + gl.arange(0, ROWS, LINE)
        async_copy.async_copy_global_to_shared(own_smem.index(stage), own_ptr + _local(entry, SLOTS_TOTAL), mask=rows < end)
        async_copy.async_copy_global_to_shared(entry_smem.index(stage), tile_ptr + rows // HG, mask=rows < end)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        entry = next_entry
        entry_t = next_entry_t


@gluon.jit
def _attend(
    k1_smem, k2_smem, v_smem, q1_smem, q2_smem, own_smem, entry_smem, full, empty, keys_full,
    out_ptr, lse_ptr, key_row0, last_key, num_rows, is_masked, factor, coarse_factor,
    G: gl.constexpr, HG: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr,
    SLOTS_TOTAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write partial out and lse of every tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    PIECES: gl.constexpr = _of_pieces(ROWS)
    dtype: gl.constexpr = q1_smem.dtype
    keys = key_row0 + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    num_tiles = gl.cdiv(num_rows, ROWS)
    mbarrier.wait(keys_full.index(0), 0)
    mbarrier.wait(full.index(0), 0)
    fence_async_shared()
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = start_scores(q1_smem.index(0), q2_smem.index(0), k1_smem, k2_smem, scores, K2)
    for tile in range(num_tiles):
        stage = tile % STAGES
        own = own_smem.index(stage).load(OF_ROWS)
        entry = entry_smem.index(stage).load(OF_ROWS)
        entry_t = entry_smem.index(stage).load(gl.SliceLayout(1, PIECES))
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(empty.index(stage), count=1)
        visible = scores
        if is_masked:
            visible = gl.where((keys[None, :] <= own[:, None]) & (keys <= last_key)[None, :], scores, float("-inf"))
        row_max = gl.max(visible, 1)
        # as `tiles.coarser`. Both shifts are computed before it is known which one is used, because the exponentials wait for the result
        shift = row_max * factor
        is_usual = gl.abs(shift) < EXTREME
        row_factor = gl.where(is_usual, factor, coarse_factor)
        # rows that do not exist see nothing
        row_max = gl.where(row_max == float("-inf"), 0.0, row_max)
        shift = gl.where(is_usual, shift, row_max * coarse_factor)
        weights = gl.exp2(visible * row_factor[:, None] - shift[:, None])
        row_sum = gl.sum(weights, 1)
        left = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, ACC, 2))
        acc1 = warpgroup_mma(left, v_smem.index(0), gl.zeros([ROWS, 64], gl.float32, ACC), use_acc=False, is_async=True)
        acc2 = acc1
        acc3 = acc1
        if D_V > 64:
            acc2 = warpgroup_mma(left, v_smem.index(1), gl.zeros([ROWS, 64], gl.float32, ACC), use_acc=False, is_async=True)
        if D_V > 128:
            acc3 = warpgroup_mma(left, v_smem.index(2), gl.zeros([ROWS, 64], gl.float32, ACC), use_acc=False, is_async=True)
        total = gl.where(row_sum > 0, row_sum, 1.0)
        # as `tiles.divisor_of`; here, so that the row's shift need not stay in registers
        largest = power_near_one(gl.fma(row_max, row_factor, -shift))
        divisor = total + (largest.to(dtype).to(gl.float32) - largest)
        inverse = gl.convert_layout(reciprocal(divisor), gl.SliceLayout(1, ACC))
        # the next tile's scores are computed while this tile's results are stored. After the last tile they come from an old stage and are discarded
        following = (tile + 1) % STAGES
        mbarrier.wait(full.index(following), ((tile + 1) // STAGES) & 1, pred=tile + 1 < num_tiles)
        fence_async_shared()
        scores = start_scores(q1_smem.index(following), q2_smem.index(following), k1_smem, k2_smem, scores, K2)
        rows = tile * ROWS + gl.arange(0, ROWS, OF_ROWS)
        target = (entry // SLOTS_TOTAL * (G * SLOTS_TOTAL) + entry % SLOTS_TOTAL) * HG + rows % HG
        gl.store(lse_ptr + target, row_max * factor * LN2 + gl.log2(total) * LN2, mask=rows < num_rows)
        rows_t = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, PIECES))
        target_t = (entry_t // SLOTS_TOTAL * (G * SLOTS_TOTAL) + entry_t % SLOTS_TOTAL) * HG + rows_t % HG
        if D_V > 128:
            acc1, acc2, acc3 = warpgroup_mma_wait(1, deps=[acc1, acc2, acc3])
        elif D_V > 64:
            acc1, acc2 = warpgroup_mma_wait(1, deps=[acc1, acc2])
        else:
            acc1 = warpgroup_mma_wait(1, deps=[acc1])
        _store_unshuffled(out_ptr, target_t, acc1, inverse, rows_t < num_rows, dtype, D_V, 0, ROWS)
        if D_V > 64:
            _store_unshuffled(out_ptr, target_t, acc2, inverse, rows_t < num_rows, dtype, D_V, 64, ROWS)
        if D_V > 128:
            _store_unshuffled(out_ptr, target_t, acc3, inverse, rows_t < num_rows, dtype, D_V, 128, ROWS)
    warpgroup_mma_wait(0, deps=[scores])


@CachedLaunch
@gluon.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_lse_ptr, items_ptr, num_items_ptr, entries_ptr, rows_ptr, key_rows_ptr,
    first_row, num_rows, num_pieces, factor, coarse_factor,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr,
    SLOTS_TOTAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write partial out (rows, G, slots, H/G, D_v) and lse of the rows of one item; grid (bound on items,)."""
    HG: gl.constexpr = H // G
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    if gl.program_id(0) >= gl.load(num_items_ptr):
        return
    own_ptr = rows_ptr + num_rows + first_row
    group, start, end, _partial_index, key_row0, last_key, is_masked = load_item(
        gl.program_id(0), items_ptr, entries_ptr, own_ptr, key_rows_ptr, num_pieces, SLOTS_TOTAL, KEYS
    )
    K1_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, K1], dtype)
    K2_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, max(K2, 16)], dtype)
    V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 64], dtype)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k1_smem = gl.allocate_shared_memory(dtype, [KEYS, K1], K1_SHARED)
    q1_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, K1], K1_SHARED)
    k2_smem = k1_smem
    q2_smem = q1_smem
    if K2 > 0:
        k2_smem = gl.allocate_shared_memory(dtype, [KEYS, K2], K2_SHARED)
        q2_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, K2], K2_SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [(D_V + 63) // 64, KEYS, 64], V_SHARED)
    own_smem = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], FLAT)
    entry_smem = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=1)
    keys_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mbarrier.init(keys_full.index(0), count=128)
    num_keys = last_key + 1 - key_row0
    kv_head0 = key_row0.to(gl.int64) * G + group
    barrier()
    head0 = first_row.to(gl.int64) * H + group * HG
    num_item_rows = (end - start) * HG
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    k1_smem, k2_smem, v_smem, q1_smem, q2_smem, own_smem, entry_smem, full, empty, keys_full,
                    out_ptr + group * (SLOTS_TOTAL * HG * D_V), part_lse_ptr + group * (SLOTS_TOTAL * HG),
                    key_row0, last_key, num_item_rows, is_masked, factor, coarse_factor,
                    G, HG, K2, D_V, SLOTS_TOTAL, ROWS, KEYS, STAGES,
                ),
            ),
            (
                _gather_queries,
                (
                    q_ptr + head0 * D_K, k_ptr + kv_head0 * D_K, v_ptr + kv_head0 * D_V, entries_ptr, own_ptr,
                    q1_smem, q2_smem, k1_smem, k2_smem, v_smem, own_smem, entry_smem, full, empty, keys_full, start, num_item_rows, num_keys,
                    H, G, D_K, K1, K2, D_V, SLOTS_TOTAL, ROWS, KEYS, STAGES,
                ),
            ),
        ],
        [4],
        [LOADER_REGISTERS],
    )  # fmt: skip
