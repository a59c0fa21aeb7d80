"""Invert the choice: list the queries of every block in ascending order, by a table of bits and their ranks.

A *piece* is a selection block, or one of PIECES parts of a large block. The pieces of all sequences are numbered from 0 to num_pieces - 1.
List group * num_pieces + piece holds the queries that chose the piece. The lists of a group are neighbours, so that the group's queries
stay in the cache. A list covers one chunk of query rows. A launch builds the lists of several chunks, of WORDS * WORD_ROWS rows each; in every
tensor the chunks follow one another.
"""

import triton
import triton.language as tl

from nsa_kernels_triton.cached_launch import CachedLaunch
from nsa_kernels_triton.tiles import count_bits, find_sequence, program_position

WORD_ROWS = tl.constexpr(32)
"""Number of queries whose bits for one piece share a word."""


@CachedLaunch
@triton.jit
def describe_rows_kernel(
    rows_ptr, key_rows_ptr, indices_ptr, bits_ptr, cu_seqlens_ptr, query_start_ptr, query_count_ptr,
    num_rows, num_sequences, num_queries, num_keys, search_steps, first_position,
    G: tl.constexpr, NUM_SELECTED: tl.constexpr, SLOTS: tl.constexpr,
    SELECTION_SIZE: tl.constexpr, PIECES: tl.constexpr, PIECE_SIZE: tl.constexpr, PACKED: tl.constexpr, CACHED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write int32 (3, rows): for each row of q its position (-1: invalid), its token's key row, and its sequence's first piece.

    Without a cache every token has a row, and the row of a piece's first token writes the piece's first key row. With `bits_ptr`, int64
    (rows, G), also write the bits of the blocks that rows before `first_position` chose; these blocks must be below 64, and none may be chosen
    twice. Grid: (cdiv(rows, BLOCK) * G,) with `bits_ptr`, else (cdiv(rows, BLOCK),).
    """
    number, group, _ = program_position(tl.cdiv(num_rows, BLOCK), G)
    row = number * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    if PACKED:
        sequence = tl.minimum(find_sequence(row, cu_seqlens_ptr, num_sequences, search_steps), num_sequences - 1)
        start = tl.load(cu_seqlens_ptr + sequence)
        position = row - start
        key_row = row
        # every sequence gets its own pieces, even an empty one, because it has at most length // size + 1 blocks
        piece = (start // SELECTION_SIZE + sequence) * PIECES
    else:
        sequence = row // num_queries
        position = row % num_queries
        if CACHED:
            count = num_queries
            if query_count_ptr is not None:
                count = tl.load(query_count_ptr + sequence, mask=exists, other=0)
            position = tl.where(position < count, position + tl.load(query_start_ptr + sequence, mask=exists, other=0), -1)
        key_row = sequence * num_keys + position
        piece = sequence * tl.cdiv(num_keys, SELECTION_SIZE) * PIECES
    # compare with a vector, because Triton 3.9's interpreter refuses a comparison with a number in the mask of a store
    is_first = row < tl.where(group == 0, num_rows, 0)
    tl.store(rows_ptr + row, position, mask=is_first)
    tl.store(rows_ptr + num_rows + row, key_row, mask=is_first)
    tl.store(rows_ptr + 2 * num_rows + row, piece, mask=is_first)
    if not CACHED:
        in_block = position % SELECTION_SIZE
        piece += position // SELECTION_SIZE * PIECES + in_block // PIECE_SIZE
        tl.store(key_rows_ptr + piece, key_row, mask=is_first & (in_block % PIECE_SIZE == 0))
    if bits_ptr is not None:
        is_early = exists & (position >= 0) & (position < first_position)
        slots = tl.arange(0, SLOTS)[None, :]
        offset = row.to(tl.int64) * G + group
        block = tl.load(indices_ptr + offset[:, None] * NUM_SELECTED + slots, mask=is_early[:, None] & (slots < NUM_SELECTED), other=-1)
        is_bit = (block >= 0) & (block < 64)
        bits = tl.where(is_bit, tl.full([BLOCK, SLOTS], 1, tl.int64) << tl.where(is_bit, block, 0).to(tl.int64), 0)
        tl.store(bits_ptr + offset, tl.sum(bits, 1), mask=is_early)


@CachedLaunch
@triton.jit
def mark_kernel(
    indices_ptr, rows_ptr, marks_ptr, key_rows_ptr, present_ptr, first_row, num_rows, num_pieces, num_words, first_position,
    G: tl.constexpr, NUM_SELECTED: tl.constexpr, SLOTS: tl.constexpr, SELECTION_SIZE: tl.constexpr,
    PIECES: tl.constexpr, PIECE_SIZE: tl.constexpr, WORDS: tl.constexpr, NUM_INITIAL: tl.constexpr, NUM_LOCAL: tl.constexpr,
    CACHED: tl.constexpr,
):  # fmt: skip
    """Set the bit (group, piece, row - first row) of every piece that a row chose; grid (words with rows * G * chunks,).

    Also write which slots (row - first row, G, slots) of the choice count. These do not count: rows at positions below `first_position`, blocks
    outside 0 .. own, the second slot of a block that is chosen twice, the first NUM_INITIAL blocks, and the last NUM_LOCAL blocks up to the
    row's own. With a cache, also write the first key row of each piece that counts.
    """
    word, group, chunk = program_position(num_words, G)
    first_row += chunk * (WORDS * WORD_ROWS)
    chunk = chunk.to(tl.int64)
    marks_ptr += chunk * (G * num_pieces * WORDS)
    present_ptr += chunk * (WORDS * WORD_ROWS * G * NUM_SELECTED * PIECES)
    # a tile's rows are the bits of one word
    bits = tl.arange(0, WORD_ROWS)
    local = word * WORD_ROWS + bits
    row = first_row + local
    exists = row < num_rows
    position = tl.load(rows_ptr + row, mask=exists, other=-1)
    position = tl.where(position >= first_position, position, -1)
    piece0 = tl.load(rows_ptr + 2 * num_rows + row, mask=exists, other=0)
    slots = tl.arange(0, SLOTS)
    in_choice = (slots < NUM_SELECTED)[None, :]
    source = (row.to(tl.int64) * G + group) * NUM_SELECTED
    block = tl.load(indices_ptr + source[:, None] + slots[None, :], mask=exists[:, None] & in_choice, other=-1)
    # position -1 needs no case of its own: the division gives 0, and no piece starts early enough
    is_block = (block >= NUM_INITIAL) & (block <= position[:, None] // SELECTION_SIZE - NUM_LOCAL)
    for slot in tl.range(0, NUM_SELECTED - 1):
        earlier = tl.load(indices_ptr + source + slot, mask=exists, other=-1)
        is_block = is_block & ((block != earlier[:, None]) | (slots <= slot)[None, :])
    bit = tl.full([WORD_ROWS, SLOTS], 1, tl.int32) << bits[:, None]
    if CACHED:
        first_key_row = tl.load(rows_ptr + num_rows + row, mask=exists, other=0) - position
    for part in tl.static_range(PIECES):
        start = block * SELECTION_SIZE + part * PIECE_SIZE
        is_present = is_block & (start <= position[:, None])
        piece = piece0[:, None] + block * PIECES + part
        offset = (group.to(tl.int64) * num_pieces + piece) * WORDS + word
        tl.atomic_or(marks_ptr + offset, bit, mask=is_present, sem="relaxed")
        if CACHED:
            tl.store(key_rows_ptr + piece, first_key_row[:, None] + start, mask=is_present)
        target = present_ptr + (local * G + group)[:, None] * (NUM_SELECTED * PIECES) + slots[None, :] * PIECES + part
        tl.store(target, is_present.to(tl.int8), mask=in_choice)


@CachedLaunch
@triton.jit
def count_kernel(
    marks_ptr, ranks_ptr, counts_ptr, num_lists, ITEM_QUERIES: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write how many bits of its list come before each word; and int32 (3, lists): for each list its queries, items, and items after the first.

    Grid (cdiv(lists, BLOCK) * chunks,).
    """
    blocks = tl.cdiv(num_lists, BLOCK)
    number = tl.program_id(0) % blocks
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    marks_ptr += chunk * num_lists * WORDS
    ranks_ptr += chunk * num_lists * WORDS
    counts_ptr += chunk * num_lists * 3
    lists = number * BLOCK + tl.arange(0, BLOCK)
    exists = lists < num_lists
    offsets = lists.to(tl.int64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    bits = count_bits(tl.load(marks_ptr + offsets, mask=exists[:, None], other=0))
    tl.store(ranks_ptr + offsets, tl.cumsum(bits, 1) - bits, mask=exists[:, None])
    count = tl.sum(bits, 1)
    items = tl.cdiv(count, ITEM_QUERIES)
    tl.store(counts_ptr + lists, count, mask=exists)
    tl.store(counts_ptr + num_lists + lists, items, mask=exists)
    tl.store(counts_ptr + 2 * num_lists + lists, tl.maximum(items - 1, 0), mask=exists)


@CachedLaunch
@triton.jit
def list_kernel(
    indices_ptr, rows_ptr, marks_ptr, ranks_ptr, ends_ptr, entries_ptr, present_ptr, first_row, num_rows, num_pieces, num_words,
    G: tl.constexpr, NUM_SELECTED: tl.constexpr, SLOTS: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Write the queries of the lists in ascending order; grid (words with rows * G * chunks,).

    An entry is (row - first row) * slots + slot, where the slot is the piece's index in the row's choice.
    """
    SLOTS_TOTAL: tl.constexpr = NUM_SELECTED * PIECES
    word, group, chunk = program_position(num_words, G)
    first_row += chunk * (WORDS * WORD_ROWS)
    chunk = chunk.to(tl.int64)
    marks_ptr += chunk * (G * num_pieces * WORDS)
    ranks_ptr += chunk * (G * num_pieces * WORDS)
    ends_ptr += chunk * (G * num_pieces * 3)
    entries_ptr += chunk * (WORDS * WORD_ROWS * G * SLOTS_TOTAL)
    present_ptr += chunk * (WORDS * WORD_ROWS * G * SLOTS_TOTAL)
    bits = tl.arange(0, WORD_ROWS)
    local = word * WORD_ROWS + bits
    row = first_row + local
    exists = row < num_rows
    piece0 = tl.load(rows_ptr + 2 * num_rows + row, mask=exists, other=0)
    slots = tl.arange(0, SLOTS)[None, :]
    in_choice = exists[:, None] & (slots < NUM_SELECTED)
    block = tl.load(indices_ptr + ((row.to(tl.int64) * G + group) * NUM_SELECTED)[:, None] + slots, mask=in_choice, other=-1)
    below = ((tl.full([WORD_ROWS], 1, tl.int32) << bits) - 1)[:, None]
    for part in tl.static_range(PIECES):
        slot = (local * G + group)[:, None] * SLOTS_TOTAL + slots * PIECES + part
        is_present = tl.load(present_ptr + slot, mask=in_choice, other=0) == 1
        index = group * num_pieces + piece0[:, None] + block * PIECES + part
        offset = index.to(tl.int64) * WORDS + word
        before = count_bits(tl.load(marks_ptr + offset, mask=is_present, other=0) & below)
        rank = tl.load(ranks_ptr + offset, mask=is_present, other=0) + before
        start = tl.load(ends_ptr + index - 1, mask=is_present & (index > 0), other=0)
        tl.store(entries_ptr + start + rank, local[:, None] * SLOTS_TOTAL + slots * PIECES + part, mask=is_present)


@CachedLaunch
@triton.jit
def cut_kernel(ends_ptr, items_ptr, num_lists, num_items, ITEM_QUERIES: tl.constexpr, ITEM_SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the work items of the lists, at most `num_items` of a chunk; grid (cdiv(lists, BLOCK) * chunks,).

    An item is int32 (4,): list, first entry, last entry + 1, and the index of its split-K partial of dK and dV. The index is -1 for the list's
    first item, whose gradients are added to the sum directly.
    """
    blocks = tl.cdiv(num_lists, BLOCK)
    number = tl.program_id(0) % blocks
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    ends_ptr += chunk * num_lists * 3
    items_ptr += chunk * num_items * 4
    lists = number * BLOCK + tl.arange(0, BLOCK)
    exists = lists < num_lists
    has_previous = exists & (lists > 0)
    end = tl.load(ends_ptr + lists, mask=exists, other=0)[:, None]
    start = tl.load(ends_ptr + lists - 1, mask=has_previous, other=0)[:, None]
    item_end = tl.load(ends_ptr + num_lists + lists, mask=exists, other=0)[:, None]
    item = tl.load(ends_ptr + num_lists + lists - 1, mask=has_previous, other=0)[:, None]
    first_partial = tl.load(ends_ptr + 2 * num_lists + lists - 1, mask=has_previous, other=0)[:, None]
    numbers = tl.arange(0, ITEM_SLOTS)[None, :]
    is_item = item + numbers < item_end
    target = items_ptr + (item + numbers) * 4
    tl.store(target, lists[:, None], mask=is_item)
    tl.store(target + 1, start + numbers * ITEM_QUERIES, mask=is_item)
    tl.store(target + 2, tl.minimum(start + (numbers + 1) * ITEM_QUERIES, end), mask=is_item)
    tl.store(target + 3, tl.where(numbers == 0, -1, first_partial + numbers - 1), mask=is_item)
