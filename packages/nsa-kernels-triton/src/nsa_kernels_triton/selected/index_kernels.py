"""From the choice of every query to the queries of every block: a table of marks, its counts, and lists in ascending order.

A *piece* is a block of the choice, or one of PIECES parts of a large one. Pieces of all sequences share one numbering
of `num_pieces`; list group * num_pieces + piece holds the queries that chose it, so that a group's queries stay in the
cache. All of it covers one chunk of query rows.
"""

import triton
import triton.language as tl

from nsa_kernels_triton.tiles import find_sequence


@triton.jit
def describe_rows_kernel(
    rows_ptr, cu_seqlens_ptr, query_start_ptr, query_count_ptr, num_rows, num_sequences, num_queries, num_keys, search_steps,
    SELECTION_SIZE: tl.constexpr, PIECES: tl.constexpr, PACKED: tl.constexpr, CACHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write of every row of q, int32 (3, rows): its position (-1: does not count), its token's key row, its sequence's first piece."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    if PACKED:
        sequence = tl.minimum(find_sequence(row, cu_seqlens_ptr, num_sequences, search_steps), num_sequences - 1)
        start = tl.load(cu_seqlens_ptr + sequence)
        position = row - start
        key_row = row
        # distinct for every sequence, empty ones included: its blocks are at most length // size + 1
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
    tl.store(rows_ptr + row, position, mask=exists)
    tl.store(rows_ptr + num_rows + row, key_row, mask=exists)
    tl.store(rows_ptr + 2 * num_rows + row, piece, mask=exists)


@triton.jit
def mark_kernel(
    indices_ptr, rows_ptr, marks_ptr, key_rows_ptr, first_row, num_rows, num_pieces, chunk_rows, first_position,
    G: tl.constexpr, NUM_SELECTED: tl.constexpr, SLOTS: tl.constexpr, SELECTION_SIZE: tl.constexpr,
    PIECES: tl.constexpr, PIECE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write slot + 1 at (group, piece, row - first_row) of every piece that a row chose, and the piece's first key row.

    The slot is the piece's place in the row's choice. Rows whose position is below `first_position` are left out. Grid (tiles of rows, G).
    """
    group = tl.program_id(1)
    local = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = first_row + local
    exists = (row < num_rows) & (local < chunk_rows)
    position = tl.load(rows_ptr + row, mask=exists, other=-1)
    position = tl.where(position >= first_position, position, -1)
    key_row = tl.load(rows_ptr + num_rows + row, mask=exists, other=0)
    base = tl.load(rows_ptr + 2 * num_rows + row, mask=exists, other=0)
    slots = tl.arange(0, SLOTS)
    source = (row.to(tl.int64) * G + group) * NUM_SELECTED
    block = tl.load(indices_ptr + source[:, None] + slots[None, :], mask=exists[:, None] & (slots < NUM_SELECTED)[None, :], other=-1)
    for part in tl.static_range(PIECES):
        start = block * SELECTION_SIZE + part * PIECE_SIZE
        # what lies outside 0 .. own counts as absent
        is_present = (block >= 0) & (block <= position[:, None] // SELECTION_SIZE) & (start <= position[:, None])
        piece = base[:, None] + block * PIECES + part
        target = (group.to(tl.int64) * num_pieces + piece) * chunk_rows + local[:, None]
        tl.store(marks_ptr + target, slots[None, :] * PIECES + (part + 1), mask=is_present)
        tl.store(key_rows_ptr + piece, (key_row - position)[:, None] + start, mask=is_present)


@triton.jit
def count_kernel(marks_ptr, counts_ptr, num_lists, chunk_rows, ITEM_QUERIES: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Write int32 (3, lists): the queries of each list, the work items that they make, and the items beyond the first."""
    lists = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = lists < num_lists
    source = marks_ptr + lists.to(tl.int64)[:, None] * chunk_rows + tl.arange(0, STEP)[None, :]
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, chunk_rows, STEP):
        count += tl.sum((tl.load(source + start, mask=exists[:, None], other=0) > 0).to(tl.int32), 1)
    items = tl.cdiv(count, ITEM_QUERIES)
    tl.store(counts_ptr + lists, count, mask=exists)
    tl.store(counts_ptr + num_lists + lists, items, mask=exists)
    tl.store(counts_ptr + 2 * num_lists + lists, tl.maximum(items - 1, 0), mask=exists)


@triton.jit
def list_kernel(
    marks_ptr, ends_ptr, entries_ptr, items_ptr, present_ptr, num_pieces, chunk_rows,
    G: tl.constexpr, SLOTS_TOTAL: tl.constexpr, ITEM_QUERIES: tl.constexpr, ITEM_SLOTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the queries of one list in ascending order, and its work items; grid (lists,).

    An entry is (row - first_row) * SLOTS_TOTAL + slot. An item is int32 (4,): list, first entry, last entry + 1, and where
    its dK, dV go: -1 for the list's first item, else a place of their own.
    """
    index = tl.program_id(0)
    num_lists = tl.num_programs(0)
    end = tl.load(ends_ptr + index)
    item_end = tl.load(ends_ptr + num_lists + index)
    place = tl.load(ends_ptr + index - 1, mask=index > 0, other=0)
    item = tl.load(ends_ptr + num_lists + index - 1, mask=index > 0, other=0)
    extra = tl.load(ends_ptr + 2 * num_lists + index - 1, mask=index > 0, other=0)
    if end == place:
        return
    numbers = tl.arange(0, ITEM_SLOTS)
    is_item = item + numbers < item_end
    target = items_ptr + (item + numbers) * 4
    tl.store(target, index, mask=is_item)
    tl.store(target + 1, place + numbers * ITEM_QUERIES, mask=is_item)
    tl.store(target + 2, tl.minimum(place + (numbers + 1) * ITEM_QUERIES, end), mask=is_item)
    tl.store(target + 3, tl.where(numbers == 0, -1, extra + numbers - 1), mask=is_item)
    steps = tl.arange(0, STEP)
    for start in tl.range(0, chunk_rows, STEP):
        mark = tl.load(marks_ptr + index.to(tl.int64) * chunk_rows + start + steps).to(tl.int32)
        is_member = mark > 0
        rank = tl.cumsum(is_member.to(tl.int32), 0) - 1
        tl.store(entries_ptr + place + rank, (start + steps) * SLOTS_TOTAL + mark - 1, mask=is_member)
        tl.store(present_ptr + ((start + steps) * G + index // num_pieces) * SLOTS_TOTAL + mark - 1, 1, mask=is_member)
        place += tl.sum(is_member.to(tl.int32), 0)
