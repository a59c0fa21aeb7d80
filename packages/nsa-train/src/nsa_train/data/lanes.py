"""Lanes: row i of every micro-batch comes from lane i, for any number of ranks and workers.

A lane is only a position in an order that the seed determines. The lanes are divided among ranks and workers. The state of a lane is a few
numbers, so that a run continues exactly where it stopped, also with another number of ranks or workers.

`RowLane` is for a corpus in memory, in which any row can be computed directly. `BlockLane` is for a streamed corpus: it reads blocks of
documents, one after another, and packs the documents into rows itself.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from nsa_train.data.order import EpochItem, SeededOrder, Turns
from nsa_train.data.packing import IGNORED, PackedRows, Row
from nsa_train.data.position import NUM_FIRST_TOKENS
from nsa_train.data.sources.base import Bad
from nsa_train.data.tokenizer import Ids
from nsa_train.errors import DataError


class RowSequence(Protocol):
    """An endless sequence of rows in memory, of which any can be computed."""

    def at(self, number: int) -> Row:
        """Return row `number` >= 0."""

    def epoch(self, number: int) -> int:
        """Return how many full passes over the corpus come before row `number`."""


class Consumed:
    """A summary of a lane's rows so far: a hash of the tokens, the first tokens, the numbers of documents that ended and of records skipped."""

    def __init__(self) -> None:
        self.digest = ""
        self.first: list[int] = []
        self.documents = self.bad_records = 0

    def add(self, row: Row) -> None:
        """Count `row`."""
        if not self.digest:
            self.first = row.input_ids[:NUM_FIRST_TOKENS].tolist()
        self.digest = hashlib.sha256(bytes.fromhex(self.digest) + row.input_ids.astype("<i4", copy=False).tobytes()).hexdigest()
        self.documents += row.ended

    def state(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return {"hash": self.digest, "first_tokens": self.first, "documents": self.documents, "bad_records": self.bad_records}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.digest, self.first = state["hash"], list(state["first_tokens"])
        self.documents, self.bad_records = state["documents"], state["bad_records"]


class RowLane(Consumed):
    """Rows number, number + count, ... of a corpus in memory."""

    def __init__(self, rows: RowSequence, *, number: int, count: int) -> None:
        """Lane `number` of `count`."""
        super().__init__()
        self._rows, self._number, self._count = rows, number, count
        self._taken = 0

    def next_row(self) -> Row:
        """Return the next row."""
        row = self._rows.at(self._taken * self._count + self._number)
        self._taken += 1
        self.add(row)
        return row

    def state(self) -> dict[str, Any]:
        """Return the position of the next row, and the data consumed up to it, as plain values for JSON."""
        epoch = self._rows.epoch(self._taken * self._count + self._number)
        return {"row": self._taken, "epoch": epoch, **super().state()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue at `state`."""
        self._taken = state["row"]
        super().load(state)


class Entry(NamedTuple):
    """A record of a block: its ids with the separator; None if it is held out, or bad."""

    number: int
    ids: Ids | None
    bad: Bad | None = None


class TokenBlocks(Protocol):
    """Blocks of tokenized documents."""

    def __len__(self) -> int:
        """Return the number of blocks."""

    def entries(self, block: int, start: int, epoch: int) -> Iterator[Entry]:
        """Yield the records of `block` from number `start` on; `epoch`: how many passes over all blocks came before."""


class BlockSequence:
    """The endless order of the blocks of one corpus or of several, mixed by weight."""

    def __init__(self, parts: list[TokenBlocks], weights: list[int], seed: int) -> None:
        self.parts = parts
        self._orders = [SeededOrder(len(part), seed, f"blocks {number}") for number, part in enumerate(parts)]
        self._turns = Turns(weights, seed)
        # a lane may read only one part, and reach the part's only document once in many epochs
        self.most_empty = 64 * sum(len(part) for part in parts) * max(weights)
        """Blocks without a document that a lane skips before it gives up."""
        self._losses: dict[tuple[int, int], int] = {}

    def entries(self, number: int, start: int) -> Iterator[Entry]:
        """Yield the entries of block `number` of the order, from record `start` of it on."""
        part, located = self.locate(number)
        return self.parts[part].entries(located.item, start, located.epoch)

    def locate(self, number: int) -> tuple[int, EpochItem]:
        """Return the part and the block of it that is block `number` of the order."""
        part, turn = self._turns.at(number)
        return part, self._orders[part].at(turn)

    def is_first_loss(self, located: tuple[int, EpochItem], record: int) -> bool:
        """Return True for the first lane of this process that finds `record` of the block at `located` lost, and then False."""
        part, (_, block) = located
        is_first = self._losses.get((part, block), -1) < record
        if is_first:
            self._losses[part, block] = record
        return is_first

    def epoch(self, number: int) -> int:
        """Return how many full passes over the current part come before block `number`."""
        part, turn = self._turns.at(number)
        return turn // self._orders[part].count


class BlockLane(Consumed):
    """Blocks number, number + count, ... of the order; their documents one after another, cut every `seq_len` tokens."""

    def __init__(self, blocks: BlockSequence, *, number: int, count: int, seq_len: int, policy: str) -> None:
        """Lane `number` of `count`; `policy` "fail" raises at a bad record, "skip" counts it."""
        super().__init__()
        self._blocks, self._number, self._count = blocks, number, count
        self._seq_len, self._policy = seq_len, policy
        self._block = self._record = self._offset = 0
        self._entries: Iterator[Entry] | None = None
        self._document: Ids | None = None

    def next_row(self) -> Row:
        """Return the next row.

        Raises:
            DataError: at a record that cannot be read, unless the policy is to skip it, or if nothing is left to read.
        """
        input_ids, labels = np.empty(self._seq_len, np.int32), np.full(self._seq_len, IGNORED, np.int32)
        at, lengths, ended = 0, list[int](), 0
        while at < self._seq_len:
            document = self._current()
            piece = document[self._offset : self._offset + self._seq_len - at]
            following = document[self._offset + 1 : self._offset + 1 + len(piece)]
            input_ids[at : at + len(piece)] = piece
            labels[at : at + len(following)] = following
            lengths.append(len(piece))
            at += len(piece)
            self._offset += len(piece)
            if self._offset == len(document):
                self._record, self._offset, self._document = self._record + 1, 0, None
                ended += 1
        row = Row(input_ids, labels, lengths, ended)
        self.add(row)
        return row

    def state(self) -> dict[str, Any]:
        """Return the position of the next row, and the data consumed up to it, as plain values for JSON."""
        epoch = self._blocks.epoch(self._block * self._count + self._number)
        return {"block": self._block, "record": self._record, "offset": self._offset, "epoch": epoch, **super().state()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue at `state`."""
        self._block, self._record, self._offset = state["block"], state["record"], state["offset"]
        self._entries = self._document = None
        super().load(state)

    def _current(self) -> Ids:
        """Return the document at the position, after skipping held-out and bad records."""
        if self._document is None:
            self._document = self._next_document()
            if self._offset >= len(self._document):
                # a position from a checkpoint may be past the end of the document; a row would then wait forever for its next token
                raise DataError(
                    f"data: the position of row {self._number} is token {self._offset} of record {self._record} of block {self._block}, "
                    f"which has {len(self._document)} (the file changed, or the checkpoint is damaged); resume with the files of that run"
                )
        return self._document

    def _next_document(self) -> Ids:
        empty = 0
        reason = ""
        while empty <= self._blocks.most_empty:
            number = self._block * self._count + self._number
            if self._entries is None:
                self._entries = self._blocks.entries(number, self._record)
            located: tuple[int, EpochItem] | None = None
            for entry in self._entries:
                self._record = entry.number
                if entry.ids is not None:
                    return entry.ids
                self._record += 1
                if entry.bad:
                    located = located or self._blocks.locate(number)
                    self._refuse(entry.bad, located)
                    reason = f"; the last: {entry.bad.where} {entry.bad.why}"
            self._block, self._record, self._entries = self._block + 1, 0, None
            empty += 1
        raise DataError(f"data: no block holds a document for training (all are held out or bad{reason}); name more files")

    def _refuse(self, bad: Bad, located: tuple[int, EpochItem]) -> None:
        if self._policy == "fail":
            raise DataError(str(bad))
        # every block is read once per epoch, so only bad records of the first epoch are counted
        is_counted = self._blocks.is_first_loss(located, self._record) if bad.is_loss else bad.is_passing or located[1].epoch == 0
        if is_counted:
            self.bad_records += bad.lost


Lane = RowLane | BlockLane
"""An endless sequence of rows with a position."""


class ShuffledRows:
    """The rows of a packed corpus, each once per epoch, in a seeded order."""

    def __init__(self, rows: PackedRows, seed: int) -> None:
        self._rows, self._order = rows, SeededOrder(len(rows), seed, "rows")

    def at(self, number: int) -> Row:
        """Return row `number`."""
        return self._rows[self._order.at(number).item]

    def epoch(self, number: int) -> int:
        """Return the epoch of row `number`."""
        return self._order.at(number).epoch


class MixedRows:
    """Rows of several corpora by weight."""

    def __init__(self, parts: list[RowSequence], weights: list[int], seed: int) -> None:
        self._parts, self._turns = parts, Turns(weights, seed)

    def at(self, number: int) -> Row:
        """Return row `number`."""
        part, turn = self._turns.at(number)
        return self._parts[part].at(turn)

    def epoch(self, number: int) -> int:
        """Return the epoch of the corpus whose turn row `number` is."""
        part, turn = self._turns.at(number)
        return self._parts[part].epoch(turn)
