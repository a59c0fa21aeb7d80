"""Lists of the queries that chose each block, for one chunk of query rows at a time."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError
from nsa_kernels_triton.launch import Sequences, cdiv, next_power_of_2
from nsa_kernels_triton.selected import index_kernels

CHUNK_BYTES = 3 * 2**29
"""Maximum bytes of the partial results of one chunk of queries.

The number of rows of a chunk is a power of two. So at n = 16 and H = 64, heads of 96 and 192 columns use all of it, and heads of 64 and 128
columns use 1 GiB.
"""
MAX_CHUNK_ROWS = 8192
WORD_ROWS: int = index_kernels.WORD_ROWS.value
MIN_CHUNK_ROWS = WORD_ROWS
COUNTED_WORDS = 1024
"""Words whose bits one program counts."""
CUT_ITEMS = 1024
"""Maximum number of items that one program makes from lists."""
LISTED_BYTES = 2**25
"""Maximum bytes of the tables and lists that one launch builds for several chunks."""
FORWARD_ITEM_ROWS = 2048
"""Maximum rows (queries times heads of a group) of one work item. A block that every query chose has many items.

With small items all multiprocessors finish a launch at about the same time.
"""
BACKWARD_ITEM_ROWS = 4096
"""The same for the backward pass. It is larger: each item after a list's first has its own partial dK and dV, which must be added."""


class Pieces(NamedTuple):
    """The pieces of a selection block, each of which fits a tile of keys."""

    block_size: int
    per_block: int
    size: int
    """Keys of a piece; a block's last piece may be shorter."""
    keys: int
    """Keys of the tile that holds a piece: the next power of two, at least 16."""


def pieces_of(geometry: BlockGeometry, block_keys: int) -> Pieces:
    """Return the pieces of a selection block for tiles of at most `block_keys` keys."""
    block_size = geometry.selection_block_size
    size = min(block_size, block_keys)
    return Pieces(block_size, -(-block_size // size), size, max(16, next_power_of_2(size)))


class Index(NamedTuple):
    """The tensors and sizes that all kernels of a call share."""

    block_indices: Tensor
    rows: Tensor
    """int32 (3, B * S): for each row of q its position, the key row of its own token, and the first piece of its sequence."""
    key_rows: Tensor
    """int32 (num_pieces,): the first key row of each piece that a row may have chosen."""
    pieces: Pieces
    num_pieces: int
    """Number of pieces of all sequences."""
    num_groups: int
    slots: int
    """Number of pieces that a query may choose."""
    chunk_rows: int
    """Rows of q in a chunk, a power of two."""
    item_queries: int
    first_position: int
    """Position of the first query that the lists hold; another kernel serves earlier queries."""
    is_cached: bool
    sequence_rows: int
    """Rows of each sequence, if all have the same number and start with their first token; else 0."""
    left_out: tuple[int, int]
    """Number of initial blocks and number of local blocks that another kernel attends to."""
    bits: Tensor | None
    """int64 (B * S, G): the bits of the blocks that each query before the first position chose."""

    @property
    def item_slots(self) -> int:
        """Return an upper bound on the number of items of one list, a power of two."""
        return next_power_of_2(cdiv(self.chunk_rows, self.item_queries))

    @property
    def num_rows(self) -> int:
        """Return B * S."""
        return self.rows.shape[1]

    @property
    def num_entries(self) -> int:
        """Return an upper bound on the number of entries of a chunk's lists."""
        return self.chunk_rows * self.num_groups * self.slots

    @property
    def words(self) -> int:
        """Return the number of words that hold the bits of one list."""
        return self.chunk_rows // WORD_ROWS

    def pieces_until(self, last_row: int) -> int:
        """Return an upper bound on the number of pieces that rows before `last_row` see: a multiple of 16, to which Triton specialises kernels."""
        found = self.num_pieces
        if self.sequence_rows:
            sequence, position = divmod(last_row - 1, self.sequence_rows)
            blocks = sequence * cdiv(self.sequence_rows, self.pieces.block_size) + position // self.pieces.block_size + 1
            found = min(found, blocks * self.pieces.per_block)
        return 16 * cdiv(found, 16)


class Chunk(NamedTuple):
    """The lists of one chunk of query rows."""

    first_row: int
    last_row: int
    num_pieces: int
    """Number of pieces with a list, which are the pieces that some row may see."""
    ends: Tensor
    """int32 (3, lists), running totals: entries, items, items beyond the first of their list."""
    entries: Tensor
    items: Tensor
    """int32 (bound on items, 4); see `index_kernels.cut_kernel`."""
    num_items: Tensor
    """int32 (1,): number of items that exist."""
    present: Tensor
    """int8 (rows, G, slots): 1 if the partial result of a slot is written, for rows before `last_row`."""


def index_of(
    block_indices: Tensor,
    sequences: Sequences,
    num_keys: int,
    geometry: BlockGeometry,
    block_keys: int,
    num_heads: int,
    columns: int,
    itemsize: int,
    item_rows: int,
    first_position: int,
    left_out: tuple[int, int] = (0, 0),
) -> Index:
    """Return the index of the queries from `first_position` on.

    The pass has partial results of `columns` numbers of `itemsize` bytes per (query, head, slot). A work item has at most `item_rows` rows. If
    blocks are left out, the queries before `first_position` must choose only blocks below 64, and none twice.

    Raises:
        InputError: if the partial results of a chunk of queries have 2^31 numbers or more.
    """
    batch, num_queries, num_groups, num_selected = block_indices.shape
    pieces = pieces_of(geometry, block_keys)
    total = batch * num_queries
    slots = num_selected * pieces.per_block
    affordable = max(MIN_CHUNK_ROWS, CHUNK_BYTES // (slots * num_heads * columns * itemsize))
    chunk_rows = min(MAX_CHUNK_ROWS, 1 << (affordable.bit_length() - 1), max(MIN_CHUNK_ROWS, next_power_of_2(total)))
    if chunk_rows * slots * num_heads * columns >= 2**31:
        raise InputError(
            f"num_selected_blocks={num_selected} with {num_heads} heads of {columns} (the offsets of partial results, of {chunk_rows} queries at a "
            "time, exceed 32 bits); choose fewer blocks, or use the backend 'sdpa'"
        )
    rows = block_indices.new_empty(3, total)
    block_indices = block_indices.contiguous()
    has_bits = any(left_out)
    bits = torch.empty(total, num_groups, dtype=torch.int64, device=rows.device) if has_bits else None
    width = next_power_of_2(num_selected)
    block = max(1, 4096 // width) if has_bits else 256
    per_sequence = -(-num_keys // geometry.selection_block_size)
    blocks = num_keys // geometry.selection_block_size + sequences.num_sequences if sequences.is_packed else batch * per_sequence
    num_pieces = blocks * pieces.per_block
    key_rows = block_indices.new_empty(num_pieces)
    index_kernels.describe_rows_kernel[(cdiv(total, block) * (num_groups if has_bits else 1),)](
        rows, key_rows, block_indices, bits, sequences.cu_seqlens, sequences.start, sequences.count,
        total, sequences.num_sequences, num_queries, num_keys, sequences.search_steps, first_position,
        G=num_groups, NUM_SELECTED=num_selected, SLOTS=width,
        SELECTION_SIZE=geometry.selection_block_size, PIECES=pieces.per_block, PIECE_SIZE=pieces.size,
        PACKED=sequences.is_packed, CACHED=sequences.is_cached, BLOCK=block,
    )  # fmt: skip
    item_queries = max(1, item_rows // (num_heads // num_groups))
    sequence_rows = 0 if sequences.is_packed or sequences.is_cached else num_queries
    return Index(
        block_indices, rows, key_rows, pieces, num_pieces, num_groups, slots, chunk_rows, item_queries, first_position,
        sequences.is_cached, sequence_rows, left_out, bits,
    )  # fmt: skip


def chunks(index: Index, geometry: BlockGeometry) -> Iterator[Chunk]:
    """Yield the lists of each chunk of rows, in order; the lists of several chunks are built at once."""
    # bytes of the marks, ranks, counts and ends of the lists, of the entries, and of `present`
    list_bytes = 4 * index.num_groups * index.num_pieces * (2 * index.words + 6) + 5 * index.num_entries
    rows = index.chunk_rows * max(1, LISTED_BYTES // list_bytes)
    for first in range(0, index.num_rows, rows):
        yield from _listed(index, geometry, first, min(first + rows, index.num_rows))


def _listed(index: Index, geometry: BlockGeometry, first_row: int, last_row: int) -> list[Chunk]:
    """Return the chunks of the rows first_row .. last_row - 1."""
    num_selected, device, chunk_rows, words = index.block_indices.shape[3], index.rows.device, index.chunk_rows, index.words
    num_chunks = cdiv(last_row - first_row, chunk_rows)
    num_pieces = index.pieces_until(last_row)
    num_lists = index.num_groups * num_pieces
    num_items = min(num_lists, index.num_entries) + index.num_entries // index.item_queries
    choice = {
        "G": index.num_groups,
        "NUM_SELECTED": num_selected,
        "SLOTS": next_power_of_2(num_selected),
        "PIECES": index.pieces.per_block,
        "WORDS": words,
        # a thread holds the slots of one row, at most 32
        "num_warps": min(16, max(1, next_power_of_2(num_selected) // 32)),
    }

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(num_chunks, *sizes, dtype=dtype, device=device)

    num_words = cdiv(min(last_row - first_row, chunk_rows), WORD_ROWS)
    grid = (num_words * index.num_groups * num_chunks,)
    marks = torch.zeros(num_chunks, num_lists, words, dtype=torch.int32, device=device)
    present = empty(chunk_rows, index.num_groups, index.slots, dtype=torch.int8)
    index_kernels.mark_kernel[grid](
        index.block_indices, index.rows, marks, index.key_rows, present, first_row, index.num_rows, num_pieces, num_words,
        index.first_position, **choice, SELECTION_SIZE=geometry.selection_block_size, PIECE_SIZE=index.pieces.size,
        NUM_INITIAL=index.left_out[0], NUM_LOCAL=index.left_out[1], CACHED=index.is_cached,
    )  # fmt: skip
    ranks = torch.empty_like(marks)
    counts = empty(3, num_lists)
    block = max(1, COUNTED_WORDS // words)
    index_kernels.count_kernel[(cdiv(num_lists, block) * num_chunks,)](
        marks, ranks, counts, num_lists, ITEM_QUERIES=index.item_queries, WORDS=words, BLOCK=block, num_warps=1
    )
    ends = counts.cumsum(2, dtype=torch.int32)
    entries = empty(index.num_entries)
    index_kernels.list_kernel[grid](
        index.block_indices, index.rows, marks, ranks, ends, entries, present, first_row, index.num_rows, num_pieces, num_words, **choice
    )
    items = empty(num_items, 4)
    block = max(1, CUT_ITEMS // index.item_slots)
    index_kernels.cut_kernel[(cdiv(num_lists, block) * num_chunks,)](
        ends, items, num_lists, num_items, ITEM_QUERIES=index.item_queries, ITEM_SLOTS=index.item_slots, BLOCK=block, num_warps=1
    )
    # one call per tensor for all chunks, because each call of torch takes host time
    of_chunks = zip(*(x.unbind() for x in (ends, entries, items, ends[:, 1, -1:], present)), strict=True)
    firsts = range(first_row, last_row, chunk_rows)
    return [Chunk(first, min(first + chunk_rows, last_row), num_pieces, *each) for first, each in zip(firsts, of_chunks, strict=True)]
