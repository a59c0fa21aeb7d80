"""Importance of selection blocks (Eq. 9, 10) and the choice among them (Eq. 11).

A buffer holds the importance for one chunk of queries. Block j has a = l'/d strides; u_r is the weight of stride r, summed over heads. The
strides add A[j] = sum_r min(b, a - r) u_r to the importance of block j, and B[j] = sum_r max(0, r + b - a) u_r to that of block j + 1, with
b = l/d. The buffer holds A[j] and B[j - 1] separately; their sum is the importance of block j. The kernel for 9.0 writes the sum.
"""

import triton
import triton.language as tl

from nsa_kernels_triton.cached_launch import CachedLaunch
from nsa_kernels_triton.tiles import (
    count_bits,
    cut,
    dot,
    exponential,
    find_sequence,
    load_columns,
    program_position,
    query_rows,
    shift_of,
    visible_keys,
    wide,
)


@CachedLaunch
@triton.jit
def scores_kernel(
    q_ptr, k_ptr, lse_ptr, scores_ptr,
    cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_blocks, next_scores, first_row, last_row, first_tile, num_tiles, num_columns,
    search_steps, factor,
    H: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, STRIDES: tl.constexpr, PADDED_STRIDES: tl.constexpr, REACH: tl.constexpr,
    SELECTION_SIZE: tl.constexpr, NUM_SELECTED: tl.constexpr, NUM_LOCAL: tl.constexpr,
    PACKED: tl.constexpr, CACHED: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, FIRST_HEAD: tl.constexpr, FIRST_STRIDE: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the importance of the free candidates of one tile of queries; grid (tiles * columns * G,).

    The buffer is (row - first_row, G, num_blocks), for rows of q first_row .. last_row - 1 (over all sequences). A second buffer, `next_scores`
    elements later, holds the shares that blocks add to their next block. A group has HEADS rows in a tile, a power of two, so that a reshape
    prepares the sum over heads. If a tile is too small for all heads, or for a block's strides, a launch takes HEADS heads from FIRST_HEAD
    on and PADDED_STRIDES strides from FIRST_STRIDE on. All launches except the first add to the values in the buffers.
    """
    HG: tl.constexpr = H // G
    BLOCK_ROWS: tl.constexpr = BLOCK_QUERIES * HEADS
    BLOCK_KEYS: tl.constexpr = BLOCK_BLOCKS * PADDED_STRIDES
    ADDS: tl.constexpr = FIRST_HEAD + FIRST_STRIDE > 0
    tile, sequence, group = program_position(num_tiles, num_columns)
    tile = first_tile + num_tiles - 1 - tile
    if PACKED:
        sequence = find_sequence(tile, cu_tiles_ptr, num_sequences, search_steps)
        if sequence >= num_sequences:
            return
        tile -= tl.load(cu_tiles_ptr + sequence)
    q_row0, _num_rows, num_valid, position = query_rows(
        sequence, cu_seqlens_ptr, query_start_ptr, query_count_ptr, num_queries, PACKED, CACHED
    )
    k_row0 = tl.load(cu_keys_ptr + sequence).to(tl.int64) if PACKED else sequence.to(tl.int64) * num_keys
    query0 = tile * BLOCK_QUERIES
    last_query = tl.minimum(query0 + BLOCK_QUERIES, num_valid) - 1
    if (q_row0 + query0 >= last_row) | (q_row0 + last_query < first_row) | (last_query < query0):
        return
    t_last = position + last_query
    own_last = t_last // SELECTION_SIZE
    # every query chooses all of its candidates, so no score is read
    if own_last < NUM_SELECTED:
        return
    rows = tl.arange(0, BLOCK_ROWS)
    queries = query0 + rows // HEADS
    in_group = FIRST_HEAD + rows % HEADS
    exists = (queries <= last_query) & (in_group < HG)
    heads = (q_row0 + queries) * H + group * HG + in_group
    q1 = load_columns(q_ptr, heads * D_K, exists, 0, K1, D_K, True)
    q2 = q1
    if K2 > 0:
        q2 = load_columns(q_ptr, heads * D_K, exists, K1, K2, D_K, True)
    shift = shift_of(tl.load(lse_ptr + heads, mask=exists, other=float("-inf")).to(tl.float32), EXACT)
    _first, end = visible_keys(tl.where(exists, position + queries, -1), False, SIZE, STRIDE, 1)
    _first, last_end = visible_keys(t_last, False, SIZE, STRIDE, 1)

    # A tile's rows are the strides of BLOCK_BLOCKS blocks. In the result of a matrix product one thread holds rows r, r + 8 and r + 64. The
    # order of the rows makes these strides of one block, so sums over them need no exchange between threads.
    HIGH: tl.constexpr = max(BLOCK_KEYS // 64, 1)
    WARPS: tl.constexpr = BLOCK_KEYS // HIGH // 16
    row = tl.arange(0, BLOCK_KEYS)
    in_order = ((row // 16 % WARPS * 8 + row % 8) * HIGH + row // (16 * WARPS)) * 2 + row // 8 % 2
    stride = FIRST_STRIDE + in_order % PADDED_STRIDES
    in_tile = in_order // PADDED_STRIDES * STRIDES + stride
    # a free candidate of a query holds no key that ends after the query, if enough local blocks lie between
    SEES_ALL: tl.constexpr = SIZE - STRIDE - 1 <= (NUM_LOCAL - 1) * SELECTION_SIZE
    # the same thread holds two neighbouring heads of a group, and those 8, 16, ... further
    LOW_HEADS: tl.constexpr = min(HEADS, 2)
    LANES: tl.constexpr = min(HEADS // LOW_HEADS, 4)
    HIGH_HEADS: tl.constexpr = HEADS // (LOW_HEADS * LANES)
    k_ptr += (k_row0 * G + group) * D_K
    in_block = tl.arange(0, BLOCK_BLOCKS)
    strides = FIRST_STRIDE + tl.arange(0, PADDED_STRIDES)
    own_weight = tl.where(strides < STRIDES, tl.minimum(REACH, STRIDES - strides), 0).to(tl.float32)
    next_weight = tl.where(strides < STRIDES, tl.maximum(0, strides + REACH - STRIDES), 0).to(tl.float32)
    columns_q = tl.arange(0, BLOCK_QUERIES)
    row_q = q_row0 + query0 + columns_q
    keeps = (query0 + columns_q <= last_query) & (row_q >= first_row) & (row_q < last_row)
    target = ((row_q - first_row) * G + group) * num_blocks
    for block in tl.range(0, own_last - NUM_LOCAL + 1, BLOCK_BLOCKS):
        keys = block * STRIDES + in_tile
        key_mask = (stride < STRIDES) & (keys < last_end)
        tile_ptr = k_ptr + wide(block * STRIDES) * (G * D_K)
        k1 = load_columns(tile_ptr, in_tile * (G * D_K), key_mask, 0, K1, D_K, True)
        products = dot(k1, tl.trans(q1), tl.zeros([BLOCK_KEYS, BLOCK_ROWS], tl.float32))
        if K2 > 0:
            k2 = load_columns(tile_ptr, in_tile * (G * D_K), key_mask, K1, K2, D_K, True)
            products = dot(k2, tl.trans(q2), products)
        # `shift_of` lowers extreme shifts of a group's heads by different amounts; the cut makes each head's largest weight 1 again
        weights = cut(exponential(products * factor - shift[None, :], EXACT), 1.0)
        if not SEES_ALL:
            weights = tl.where((stride < STRIDES)[:, None] & (keys[:, None] < end[None, :]), weights, 0.0)
        shares = tl.reshape(weights, (HIGH, WARPS, 2, 8, BLOCK_QUERIES, HIGH_HEADS, LANES, LOW_HEADS))
        shares = tl.permute(tl.sum(tl.sum(shares, 7), 5), (1, 3, 0, 2, 4, 5))
        shares = tl.reshape(shares, (BLOCK_BLOCKS, PADDED_STRIDES, BLOCK_QUERIES, LANES))
        blocks = block + in_block
        mask = keeps[None, :] & (blocks < num_blocks)[:, None]
        own = tl.sum(tl.sum(shares * own_weight[None, :, None, None], 1), 2)
        own_ptr = scores_ptr + target[None, :] + blocks[:, None]
        if ADDS:
            own += tl.load(own_ptr, mask=mask, other=0.0)
        tl.store(own_ptr, own, mask=mask)
        if REACH > 1:
            mask = keeps[None, :] & (blocks + 1 < num_blocks)[:, None]
            reaching = tl.sum(tl.sum(shares * next_weight[None, :, None, None], 1), 2)
            next_ptr = scores_ptr + next_scores + target[None, :] + (blocks + 1)[:, None]
            if ADDS:
                reaching += tl.load(next_ptr, mask=mask, other=0.0)
            tl.store(next_ptr, reaching, mask=mask)


@CachedLaunch
@triton.jit
def choose_kernel(
    scores_ptr, positions_ptr, indices_ptr, first_row, num_queries, num_blocks, next_scores,
    G: tl.constexpr, SELECTION_SIZE: tl.constexpr, NUM_SELECTED: tl.constexpr, NUM_INITIAL: tl.constexpr, NUM_LOCAL: tl.constexpr,
    REACHES: tl.constexpr, SLOTS: tl.constexpr, BLOCK_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the ascending choice of one row of q and one group, -1 after the last; grid (rows * G,).

    Each chosen block sets its bit in a word for 32 blocks, and every slot looks up its block there. The alternative, a scan over all blocks
    with a store for each, would be most of the work.
    """
    row = first_row + (tl.program_id(0) // G).to(tl.int64)
    group = tl.program_id(0) % G
    target = indices_ptr + (row * G + group) * NUM_SELECTED
    # without positions, every batch entry holds one sequence, and the position is the row's index in it
    t = (row % num_queries).to(tl.int32) if positions_ptr is None else tl.load(positions_ptr + row)
    own = tl.where(t >= 0, t // SELECTION_SIZE, -1)
    slots = tl.arange(0, SLOTS)
    if own < NUM_SELECTED:
        tl.store(target + slots, tl.where(slots <= own, slots, -1), mask=slots < NUM_SELECTED)
        return
    blocks = tl.arange(0, BLOCK_BLOCKS)
    is_free = (blocks >= NUM_INITIAL) & (blocks <= own - NUM_LOCAL)
    source = scores_ptr + ((row - first_row) * G + group) * num_blocks
    # loads take four elements at a time, because a row has a multiple of 16. Elements after the last score are not used
    mask = blocks // 4 <= own // 4
    scores = tl.load(source + blocks, mask=mask, other=0.0)
    if REACHES:
        scores += tl.where(blocks > 0, tl.load(source + next_scores + blocks, mask=mask, other=0.0), 0.0)
    words, ends = chosen_words(scores, is_free, NUM_SELECTED - NUM_INITIAL - NUM_LOCAL, BLOCK_BLOCKS)
    SOME: tl.constexpr = min(SLOTS, 32)
    for first_slot in range(0, NUM_SELECTED, SOME):
        some = first_slot + tl.arange(0, SOME)
        tl.store(target + some, blocks_at(some, words, ends, own, NUM_SELECTED, NUM_INITIAL, NUM_LOCAL), mask=some < NUM_SELECTED)


@triton.jit
def chosen_words(scores, is_free, wanted, BLOCK_BLOCKS: tl.constexpr):
    """Return the `wanted` free blocks with the highest scores as bits of words for 32 blocks, and how many are chosen up to each word's end.

    The lowest chosen score is found bit by bit. This works because scores are sums of exponentials: the bits of floats >= 0, read as
    integers, have the order of the floats. Ties go to the lower block; NaN is highest. At least `wanted` blocks must be free.
    """
    blocks = tl.arange(0, BLOCK_BLOCKS)
    # NaN is highest, whatever its sign
    bits = tl.where(is_free, scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    # most scores are within a few powers of two of the highest, so its exponent and the three below are tried first
    exponent = tl.max(bits, 0) >> 23
    found = _num_from(bits, exponent << 23)
    lowest = tl.maximum(exponent - 3, 0)
    while (found < wanted) & (exponent > lowest):
        exponent -= 1
        found = _num_from(bits, exponent << 23)
    threshold = tl.where(found < wanted, 0, exponent << 23)
    step = tl.where(found < wanted, 30, tl.where(found == wanted, -1, 22))
    # find the highest threshold with at least `wanted` scores at or above it; stop early at one with exactly that many
    while step >= 0:
        candidate = threshold | (1 << step)
        found = _num_from(bits, candidate)
        threshold = tl.where(found >= wanted, candidate, threshold)
        step = tl.where(found == wanted, -1, step - 1)
    if found != wanted:
        # too many scores are equal to the threshold: drop those of the highest blocks
        room = wanted - tl.sum((bits > threshold).to(tl.int32), 0)
        last_tie = 0
        step = BLOCK_BLOCKS // 2
        while step > 0:
            num_before = tl.sum(((bits == threshold) & (blocks < last_tie + step)).to(tl.int32), 0)
            last_tie += tl.where(num_before < room, step, 0)
            step = step // 2
        bits = tl.where((bits == threshold) & (blocks > last_tie), -1, bits)
    WORD: tl.constexpr = min(BLOCK_BLOCKS, 32)
    WORDS: tl.constexpr = BLOCK_BLOCKS // WORD
    words = tl.sum(tl.reshape(tl.where(bits >= threshold, 1 << (blocks % WORD), 0), (WORDS, WORD)), 1)
    return words, tl.cumsum(count_bits(words), 0)


@triton.jit
def blocks_at(slots, words, ends, own, NUM_SELECTED: tl.constexpr, NUM_INITIAL: tl.constexpr, NUM_LOCAL: tl.constexpr):
    """Return the blocks at `slots` of the ascending choice of a row: initial blocks, those of `chosen_words`, and local blocks up to `own`."""
    # chosen block k (from 0) is in the first word whose end is above k. If earlier words have b set bits, it is set bit number k - b of that word
    WORDS: tl.constexpr = words.shape[0]
    rank = slots - NUM_INITIAL
    is_passed = ends[None, :] <= rank[:, None]
    word_index = tl.sum(is_passed.to(tl.int32), 1)
    left = rank - tl.max(tl.where(is_passed, ends[None, :], 0), 1)
    word = tl.sum(tl.where(tl.arange(0, WORDS)[None, :] == word_index[:, None], words[None, :], 0), 1)
    while tl.max(tl.where(word != 0, left, 0), 0) > 0:
        word = tl.where(left > 0, word & (word - 1), word)
        left -= 1
    # the exponent of a power of two
    lowest_bit = (word & -word).to(tl.uint32, bitcast=True).to(tl.float32)
    # a word has 32 blocks; with fewer blocks in all there is only one word
    free = word_index * 32 + (lowest_bit.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(slots < NUM_INITIAL, slots, tl.where(slots < NUM_SELECTED - NUM_LOCAL, free, own + 1 - NUM_SELECTED + slots))


@triton.jit
def _num_from(bits, lowest):
    """Return how many of `bits` are at least `lowest`, which is at least 0."""
    # a negative difference has its highest bit set: to test this takes two instructions, fewer than to compare and count
    return bits.shape[0] - tl.sum(((bits - lowest).to(tl.uint32, bitcast=True) >> 31).to(tl.int32), 0)
