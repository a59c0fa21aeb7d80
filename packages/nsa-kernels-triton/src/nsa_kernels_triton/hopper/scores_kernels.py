"""Importance of blocks for compute capability 9.0: a producer warpgroup, four consumer warpgroups with rows of q in registers.

Exponentials take as long as the matrix products. So there are many warps with few registers each: some multiply while others sum. Sums need
few exchanges, because in the result of a product one thread holds all strides of a block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma_wait

from nsa_kernels_triton.cached_launch import CachedLaunch
from nsa_kernels_triton.hopper.tiles import (
    barrier,
    bits_of,
    cut,
    exchange_lanes,
    float_of,
    hand_over,
    layout_of,
    locate_tile,
    mask_of,
    shift_of,
    start_scores,
    visible_keys,
)
from nsa_kernels_triton.tiles import EXTREME_SHIFT


@gluon.jit
def _tile_of(
    item, cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_tiles, num_columns, first_row, last_row, first_tile, search_steps,
    SIZE: gl.constexpr, STRIDE: gl.constexpr, SELECTION_SIZE: gl.constexpr, NUM_SELECTED: gl.constexpr, NUM_LOCAL: gl.constexpr,
    PACKED: gl.constexpr, CACHED: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """Return tile number `item`: group, first row of q and of k, queries, position of query 0, visible keys, blocks to score.

    Tiles with the most keys come first. No block is scored if every query chooses all of its blocks.
    """
    is_tile, group, tile, q_row0, _num_rows, num_valid, position, key_row0 = locate_tile(
        item, first_tile, cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
        num_sequences, num_queries, num_keys, num_tiles, num_columns, search_steps, PACKED, CACHED,
    )  # fmt: skip
    query0 = tile * QUERIES
    last_query = gl.minimum(query0 + QUERIES, num_valid) - 1
    own_last = (position + last_query) // SELECTION_SIZE
    has_choice = is_tile & (last_query >= query0) & (own_last >= NUM_SELECTED)
    has_choice = has_choice & (q_row0 + query0 < last_row) & (q_row0 + last_query >= first_row)
    _first, end = visible_keys(position + last_query, False, SIZE, STRIDE, 1)
    return group, q_row0, key_row0, query0, last_query, position, end, gl.where(has_choice, own_last - NUM_LOCAL + 1, 0)


@gluon.jit
def _load_rows(
    ptr, smem, query0, last_query,
    H: gl.constexpr, HG: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Start copying WIDTH columns of ROWS rows: the heads of a group, HEADS to a query. Elements that do not exist are zero."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, TILE))
    queries = query0 + rows // HEADS
    offsets = (queries.to(gl.int64) * H + rows % HEADS) * D
    exists = (queries <= last_query) & (rows % HEADS < HG)
    mask = mask_of(exists, columns, D - FIRST, WIDTH)
    async_copy.async_copy_global_to_shared(smem, ptr + FIRST + offsets[:, None] + columns[None, :], mask=mask)


@gluon.jit
def _key_order(columns, PADDED_STRIDES: gl.constexpr):
    """Return which stride of a tile's blocks each column of the scores holds. A thread holds whole blocks; blocks alternate over four threads.

    Thread c of the four holds the columns 8 j + 2 c and 8 j + 2 c + 1.
    """
    number = columns // 8 * 2 + columns % 2
    return (number // PADDED_STRIDES * 4 + columns // 2 % 4) * PADDED_STRIDES + number % PADDED_STRIDES


@gluon.jit
def _load_strides(
    ptr, smem, block, end,
    G: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr,
    STRIDES: gl.constexpr, PADDED_STRIDES: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Start copying WIDTH columns of the keys of blocks, in the order of `_key_order`. Elements that do not exist are zero."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    rows = gl.arange(0, KEYS, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, TILE))
    in_order = _key_order(rows, PADDED_STRIDES)
    stride = in_order % PADDED_STRIDES
    keys = (block + in_order // PADDED_STRIDES) * STRIDES + stride
    exists = (stride < STRIDES) & (keys < end)
    offsets = keys.to(gl.int64) * (G * D)
    mask = mask_of(exists, columns, D - FIRST, WIDTH)
    async_copy.async_copy_global_to_shared(smem, ptr + FIRST + offsets[:, None] + columns[None, :], mask=mask)


@gluon.jit
def _load(
    q_ptr, k_ptr, q1_smem, q2_smem, k1_smem, k2_smem, q_full, q_empty, k_full, k_empty,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, first_row, last_row, first_tile, search_steps,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
    SIZE: gl.constexpr, STRIDE: gl.constexpr, STRIDES: gl.constexpr, PADDED_STRIDES: gl.constexpr,
    SELECTION_SIZE: gl.constexpr, NUM_SELECTED: gl.constexpr, NUM_LOCAL: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    HEADS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the rows of the program's tiles, and fill the ring buffer with their keys; keys from `end` on are zeros."""
    HG: gl.constexpr = H // G
    BLOCKS: gl.constexpr = KEYS // PADDED_STRIDES
    loaded = 0
    number = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        group, q_row0, key_row0, query0, last_query, _position, end, num_blocks = _tile_of(
            item, cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
            num_sequences, num_queries, num_keys, num_tiles, num_columns, first_row, last_row, first_tile, search_steps,
            SIZE, STRIDE, SELECTION_SIZE, NUM_SELECTED, NUM_LOCAL, PACKED, CACHED, ROWS // HEADS,
        )  # fmt: skip
        if num_blocks > 0:
            q_tile = q_ptr + (q_row0 * H + group * HG) * D_K
            mbarrier.wait(q_empty.index(0), (number & 1) ^ 1)
            for part in gl.static_range(4):
                first = query0 + part * (ROWS // 4 // HEADS)
                _load_rows(q_tile, q1_smem.index(part), first, last_query, H, HG, HEADS, D_K, 0, K1, ROWS // 4)
                if K2 > 0:
                    _load_rows(q_tile, q2_smem.index(part), first, last_query, H, HG, HEADS, D_K, K1, K2, ROWS // 4)
            async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)
            async_copy.commit_group()
            number += 1
            k_tile = k_ptr + (key_row0 * G + group) * D_K
            for block in range(0, num_blocks, BLOCKS):
                stage = loaded % STAGES
                mbarrier.wait(k_empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
                _load_strides(k_tile, k1_smem.index(stage), block, end, G, D_K, 0, K1, STRIDES, PADDED_STRIDES, KEYS)
                if K2 > 0:
                    _load_strides(k_tile, k2_smem.index(stage), block, end, G, D_K, K1, K2, STRIDES, PADDED_STRIDES, KEYS)
                async_copy.commit_group()
                if block > 0:
                    hand_over(k_full.index((loaded - 1) % STAGES), 1)
                loaded += 1
            hand_over(k_full.index((loaded - 1) % STAGES), 0)


@gluon.jit
def _sum_heads(values):
    """Sum over the eight rows of (queries, 8, W), which are in every fourth lane of a warp; return (queries, 8, max(4, W / 8)).

    In each exchange a lane passes on half of its columns and keeps the others. In the end row r holds the sums of the columns
    r W / 8 to (r + 1) W / 8 - 1. The last four columns are in four lanes and stay together, so with fewer than 32 columns several rows
    hold the same four.
    """
    for step in gl.static_range(3):
        if values.shape[2] > 4:
            halves = values.reshape([values.shape[0], 8, 2, values.shape[2] // 2]).permute((0, 1, 3, 2))
            lower, upper = gl.split(halves)
            row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout_of(lower))))
            is_upper = (row // (4 >> step) % 2 == 1)[None, :][:, :, None]
            kept = gl.where(is_upper, upper, lower)
            passed = gl.where(is_upper, lower, upper)
        else:
            kept = values
            passed = values
        values = kept + exchange_lanes(passed, 16 >> step)
    return values


@gluon.jit
def _store(
    scores, shift, ends, reached, block, tail, scores_ptr, first_query, q_row0, last_query, first_row, last_row, group, num_blocks, factor,
    G: gl.constexpr, STRIDES: gl.constexpr, PADDED_STRIDES: gl.constexpr, REACH: gl.constexpr,
    PART: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Write the importance of a tile's blocks.

    `reached` is the share that the previous tile adds to this tile's first block; return the share for the next tile. Every query sees all
    keys of a tile that starts at block `tail` or before. `tail` is negative if strides are padded, or if some row's scores are extreme.
    """
    BLOCKS: gl.constexpr = KEYS // PADDED_STRIDES
    exponents = scores * factor - shift[:, None]
    if block > tail:
        columns = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        in_order = _key_order(columns, PADDED_STRIDES)
        stride = in_order % PADDED_STRIDES
        keys = (block + in_order // PADDED_STRIDES) * STRIDES + stride
        if tail < 0:
            # limit the weights of extreme rows to 1
            exponents = cut(exponents, gl.where(gl.abs(shift) < EXTREME_SHIFT, float("inf"), 0.0)[:, None])
        exponents = gl.where((stride < STRIDES)[None, :] & (keys[None, :] < ends[:, None]), exponents, float("-inf"))
    # after the masks, so that the assembler can interleave these exponentials with the sums of weights
    weights = gl.exp2(exponents)
    # a thread holds two of the 16 heads of a query, eight apart
    shares = gl.sum(weights.reshape([PART // 16, 2, 8, KEYS]), 1)
    shares = shares.reshape([PART // 16, 8, BLOCKS // 4, PADDED_STRIDES // 2, 4, 2]).permute((0, 1, 2, 4, 3, 5))
    shares = shares.reshape([PART // 16, 8, BLOCKS, PADDED_STRIDES])
    LAST: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout_of(shares))))
    strides = gl.arange(0, PADDED_STRIDES, LAST)
    # -0, because the compiler drops an addition of -0. It is built from bits, because a literal -0 would become 0
    nothing = float_of(bits_of(gl.zeros_like(shares)) + -(2**31))
    own_weight = gl.where(strides < STRIDES, gl.minimum(REACH, STRIDES - strides), 0).to(gl.float32)[None, :][:, None, :][:, :, None, :]
    whole = gl.sum(gl.where(own_weight == REACH, shares, nothing), 3)
    sums = whole * REACH + gl.sum(gl.where(own_weight < REACH, shares * own_weight, nothing), 3)
    if REACH > 1:
        next_weight = gl.where(strides < STRIDES, gl.maximum(0, strides + REACH - STRIDES), 0)
        next_weight = next_weight.to(gl.float32)[None, :][:, None, :][:, :, None, :]
        reaching = gl.where(next_weight > 0, shares * next_weight, nothing)
        sums = gl.join(sums, gl.sum(reaching, 3)).permute((0, 1, 3, 2)).reshape([PART // 16, 8, WIDTH])
    # rows that hold the same four columns
    SHARERS: gl.constexpr = max(1, 32 // WIDTH)
    sums = gl.convert_layout(_sum_heads(sums).reshape([PART // 16, 8 * COLUMNS]), SUMS)
    column = gl.arange(0, 8 * COLUMNS, gl.SliceLayout(0, SUMS))
    # slots: the blocks in order, then the share that each block adds to the next one
    slot = column // (SHARERS * COLUMNS) * COLUMNS + column % COLUMNS
    if REACH > 1:
        # add the share from the previous block. Slot 0 gathers the last block's share, which belongs to the next tile's first block
        source = gl.where(slot == 0, 2 * BLOCKS - 1, (BLOCKS + slot - 1) % (2 * BLOCKS))
        source = source // COLUMNS * (SHARERS * COLUMNS) + source % COLUMNS
        reaching = gl.gather(sums, source[None, :] + gl.zeros([PART // 16, 8 * COLUMNS], gl.int32, SUMS), 1)
        sums = sums + gl.where((slot == 0)[None, :], reached, reaching)
        reached = reaching
    queries = first_query + gl.arange(0, PART // 16, gl.SliceLayout(1, SUMS))
    rows = q_row0 + queries
    blocks = block + slot
    keeps = (queries <= last_query) & (rows >= first_row) & (rows < last_row)
    is_score = (column // COLUMNS % SHARERS == 0) & (slot < BLOCKS) & (blocks < num_blocks)
    gl.store(
        scores_ptr + (((rows - first_row) * G + group) * num_blocks)[:, None] + blocks[None, :],
        sums,
        mask=keeps[:, None] & is_score[None, :],
    )
    return reached


@gluon.jit
def _score(
    part: gl.constexpr, lse_ptr, scores_ptr, q1_smem, q2_smem, k1_smem, k2_smem, q_full, q_empty, k_full, k_empty, turns, num_blocks, factor,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, first_row, last_row, first_tile, search_steps,
    H: gl.constexpr, G: gl.constexpr, K2: gl.constexpr,
    SIZE: gl.constexpr, STRIDE: gl.constexpr, STRIDES: gl.constexpr, PADDED_STRIDES: gl.constexpr, REACH: gl.constexpr,
    SELECTION_SIZE: gl.constexpr, NUM_SELECTED: gl.constexpr, NUM_LOCAL: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    HEADS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write the importance of blocks for one quarter of the rows of the program's tiles."""
    HG: gl.constexpr = H // G
    PART: gl.constexpr = ROWS // 4
    BLOCKS: gl.constexpr = KEYS // PADDED_STRIDES
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    # the sums of a query, and how many of them `_sum_heads` leaves in each of a warp's eight rows
    WIDTH: gl.constexpr = BLOCKS * (2 if REACH > 1 else 1)
    COLUMNS: gl.constexpr = max(4, WIDTH // 8)
    SUMS: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 4], [1, 32], [4, 1], [1, 0])
    gl.static_assert(STAGES > 1)
    used = gl.to_tensor(0)
    number = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        group, q_row0, _key_row0, query0, last_query, position, _end, scored_blocks = _tile_of(
            item, cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
            num_sequences, num_queries, num_keys, num_tiles, num_columns, first_row, last_row, first_tile, search_steps,
            SIZE, STRIDE, SELECTION_SIZE, NUM_SELECTED, NUM_LOCAL, PACKED, CACHED, ROWS // HEADS,
        )  # fmt: skip
        if scored_blocks > 0:
            first_query = query0 + part * (PART // HEADS)
            rows = gl.arange(0, PART, OF_ROWS)
            queries = first_query + rows // HEADS
            exists = (queries <= last_query) & (rows % HEADS < HG)
            heads = (q_row0 + queries) * H + group * HG + rows % HEADS
            lse = gl.load(lse_ptr + heads, mask=exists, other=float("-inf"))
            shift = shift_of(lse, False)
            size = gl.abs(shift)
            extreme = gl.max(((size >= EXTREME_SHIFT) & (size < float("inf"))).to(gl.int32), 0)
            _first, ends = visible_keys(gl.where(exists, position + queries, -1), False, SIZE, STRIDE, 1)
            # the first query, and so every query, sees all keys of tiles that start at block `tail` or before
            _first, full_end = visible_keys(position + query0, False, SIZE, STRIDE, 1)
            tail = full_end // STRIDES - BLOCKS if STRIDES == PADDED_STRIDES else -1
            tail = gl.where(extreme != 0, -1, tail)
            zeros = gl.zeros([PART, KEYS], gl.float32, SCORES)
            num_key_tiles = gl.cdiv(scored_blocks, BLOCKS)
            mbarrier.wait(q_full.index(0), number & 1)
            number += 1
            q1 = q1_smem.index(part).load(LEFT)
            q2 = q1
            if K2 > 0:
                q2 = q2_smem.index(part).load(LEFT)
            mbarrier.arrive(q_empty.index(0), count=1)
            reached = gl.zeros([PART // 16, 8 * COLUMNS], gl.float32, SUMS)
            for tile in range(num_key_tiles):
                key_tile = (used + tile).to(gl.uint32)
                stage = (key_tile % STAGES).to(gl.int32)
                mbarrier.wait(k_full.index(stage), (key_tile // STAGES & 1).to(gl.int32))
                # the quarters start their products in turn: if they start together, they wait longer
                mbarrier.wait(turns.index(part), (key_tile & 1).to(gl.int32) ^ (1 if part == 0 else 0))
                scores = start_scores(q1, q2, k1_smem.index(stage), k2_smem.index(stage), zeros, K2)
                mbarrier.arrive(turns.index((part + 1) % 4), count=1)
                scores = warpgroup_mma_wait(0, deps=[scores])
                mbarrier.arrive(k_empty.index(stage), count=1)
                block = tile * BLOCKS
                reached = _store(
                    scores, shift, ends, reached, block, tail, scores_ptr,
                    first_query, q_row0, last_query, first_row, last_row, group, num_blocks, factor,
                    G, STRIDES, PADDED_STRIDES, REACH, PART, KEYS, WIDTH, COLUMNS, SCORES, SUMS,
                )  # fmt: skip
            used += num_key_tiles


@CachedLaunch
@gluon.jit
def scores_kernel(
    q_ptr, k_ptr, lse_ptr, scores_ptr,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_blocks, num_tiles, num_columns, num_items,
    first_row, last_row, first_tile, search_steps, factor,
    H: gl.constexpr, G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr,
    SIZE: gl.constexpr, STRIDE: gl.constexpr, STRIDES: gl.constexpr, PADDED_STRIDES: gl.constexpr, REACH: gl.constexpr,
    SELECTION_SIZE: gl.constexpr, NUM_SELECTED: gl.constexpr, NUM_LOCAL: gl.constexpr, PACKED: gl.constexpr, CACHED: gl.constexpr,
    HEADS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr, PART_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write the whole importance (rows, G, num_blocks), with HEADS = 16; a program takes every num_programs-th tile of rows.

    A tile's rows are divided among four consumer warpgroups, which read the same keys.
    """
    PART: gl.constexpr = ROWS // 4
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    FIRST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, K1], dtype)
    SECOND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, max(K2, 16)], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q1_smem = gl.allocate_shared_memory(dtype, [4, PART, K1], FIRST)
    k1_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, K1], FIRST)
    q2_smem = q1_smem
    k2_smem = k1_smem
    if K2 > 0:
        q2_smem = gl.allocate_shared_memory(dtype, [4, PART, K2], SECOND)
        k2_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, K2], SECOND)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    # rows: every producer thread arrives once its copies have landed. Keys: `hand_over` arrives once for all threads. Each quarter arrives
    # once it has read them
    mbarrier.init(q_full.index(0), count=128)
    mbarrier.init(q_empty.index(0), count=4)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=4)
    for part in gl.static_range(4):
        mbarrier.init(turns.index(part), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (
                _score,
                (
                    0, lse_ptr, scores_ptr, q1_smem, q2_smem, k1_smem, k2_smem, q_full, q_empty, k_full, k_empty, turns, num_blocks, factor,
                    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
                    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, first_row, last_row, first_tile, search_steps,
                    H, G, K2, SIZE, STRIDE, STRIDES, PADDED_STRIDES, REACH, SELECTION_SIZE, NUM_SELECTED, NUM_LOCAL, PACKED, CACHED,
                    HEADS, ROWS, KEYS, STAGES,
                ),
            ),
            (
                _score,
                (
                    1, lse_ptr, scores_ptr, q1_smem, q2_smem, k1_smem, k2_smem, q_full, q_empty, k_full, k_empty, turns, num_blocks, factor,
                    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
                    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, first_row, last_row, first_tile, search_steps,
                    H, G, K2, SIZE, STRIDE, STRIDES, PADDED_STRIDES, REACH, SELECTION_SIZE, NUM_SELECTED, NUM_LOCAL, PACKED, CACHED,
                    HEADS, ROWS, KEYS, STAGES,
                ),
            ),
            (
                _score,
                (
                    2, lse_ptr, scores_ptr, q1_smem, q2_smem, k1_smem, k2_smem, q_full, q_empty, k_full, k_empty, turns, num_blocks, factor,
                    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
                    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, first_row, last_row, first_tile, search_steps,
                    H, G, K2, SIZE, STRIDE, STRIDES, PADDED_STRIDES, REACH, SELECTION_SIZE, NUM_SELECTED, NUM_LOCAL, PACKED, CACHED,
                    HEADS, ROWS, KEYS, STAGES,
                ),
            ),
            (
                _score,
                (
                    3, lse_ptr, scores_ptr, q1_smem, q2_smem, k1_smem, k2_smem, q_full, q_empty, k_full, k_empty, turns, num_blocks, factor,
                    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
                    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, first_row, last_row, first_tile, search_steps,
                    H, G, K2, SIZE, STRIDE, STRIDES, PADDED_STRIDES, REACH, SELECTION_SIZE, NUM_SELECTED, NUM_LOCAL, PACKED, CACHED,
                    HEADS, ROWS, KEYS, STAGES,
                ),
            ),
            (
                _load,
                (
                    q_ptr, k_ptr, q1_smem, q2_smem, k1_smem, k2_smem, q_full, q_empty, k_full, k_empty,
                    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
                    num_sequences, num_queries, num_keys, num_tiles, num_columns, num_items, first_row, last_row, first_tile, search_steps,
                    H, G, D_K, K1, K2, SIZE, STRIDE, STRIDES, PADDED_STRIDES, SELECTION_SIZE, NUM_SELECTED, NUM_LOCAL, PACKED, CACHED,
                    HEADS, ROWS, KEYS, STAGES,
                ),
            ),
        ],
        [4, 4, 4, 4],
        [PART_REGISTERS, PART_REGISTERS, PART_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
