"""Convert blocks of documents to blocks of tokens: batched tokenizing, the held-out part of a streamed corpus, synthetic ids."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nsa_train.data.lanes import Entry
from nsa_train.data.order import generator
from nsa_train.data.packing import IGNORED, DrawnRows, Row
from nsa_train.data.sources.base import Bad, Blocks, Document, documents_of, first_skipped
from nsa_train.data.sources.split import limit_of, rank_of
from nsa_train.data.tokenizer import Ids, Tokenizer
from nsa_train.errors import DataError
from nsa_train.settings.data_table import DataTable

BATCH_DOCUMENTS = 32
BATCH_BYTES = 2**18
"""Maximum number of documents, and of their bytes, in one call of the tokenizer."""
SCAN_DOCUMENTS = 20_000
"""Maximum documents of a streamed corpus that are read to find the held-out ones. If more tokens are requested, the maximum grows in proportion."""


class TextTokenBlocks:
    """The blocks of a source, tokenized a few documents at a time; documents of a rank below `limit` are held out."""

    def __init__(self, blocks: Blocks, tokenizer: Tokenizer, limit: int) -> None:
        self._blocks, self._tokenizer, self._limit = blocks, tokenizer, limit

    def __len__(self) -> int:
        return len(self._blocks)

    def entries(self, block: int, start: int, epoch: int) -> Iterator[Entry]:
        """Yield the records of `block` from number `start` on, the same in every epoch."""
        waiting: list[tuple[int, bytes | Bad | None]] = []
        size = 0
        for index, record in enumerate(self._blocks.read(block, start), start):
            if isinstance(record, Bad):
                waiting.append((index, record))
            elif rank_of(record.text) < self._limit:
                waiting.append((index, None))
            else:
                waiting.append((index, record.text))
                size += len(record.text)
            if len(waiting) == BATCH_DOCUMENTS or size >= BATCH_BYTES:
                yield from self._tokenized(waiting)
                waiting, size = [], 0
        yield from self._tokenized(waiting)

    def _tokenized(self, waiting: list[tuple[int, bytes | Bad | None]]) -> Iterator[Entry]:
        ids = iter(self._tokenizer.encode_batch([value for _, value in waiting if isinstance(value, bytes)]))
        for index, value in waiting:
            yield Entry(index, next(ids)) if isinstance(value, bytes) else Entry(index, None, value)


class HeldOut(NamedTuple):
    """The validation documents of a streamed corpus, and the rank below which all documents are held out."""

    documents: list[Document]
    limit: int
    scanned: int
    first_bad: Bad | None
    num_fixed: int
    """Number of the first of `documents`, which do not depend on `most_tokens`"""


def scan_held_out(parts: Sequence[Blocks], data: DataTable, *, tokens: int, most_tokens: int) -> HeldOut:
    """Read the parts in turn, in a seeded order of blocks, until enough is held out to fill the larger of `tokens` and `most_tokens`.

    The limit depends only on the documents that are read for `tokens`.

    Raises:
        DataError: at a bad record that must not be skipped, or if no two different documents are found.
    """
    share = limit_of([0, 2**32])
    within: dict[bytes, None] = {}
    lowest: tuple[int, bytes] = (2**32, b"")
    highest = -1
    size = scanned = 0
    first_bad: list[Bad] = []

    def note(bad: Bad) -> None:
        if not first_bad:
            first_bad.append(bad)

    records = documents_of(_by_turns(parts, data.shuffle_seed), data.on_bad_record, note)
    # a token of BPE holds about four bytes
    token_bytes = 1 if data.tokenizer == "byte" else 4
    for record in records:
        scanned += 1
        rank = rank_of(record.text)
        lowest, highest = min(lowest, (rank, record.text)), max(highest, rank)
        if rank < share and record.text not in within:
            within[record.text] = None
            size += len(record.text)
        # something must remain for training, even if a large first document is held out
        if scanned >= SCAN_DOCUMENTS or (size >= tokens * token_bytes and highest > lowest[0]):
            break
    if highest <= lowest[0]:
        raise DataError(
            f"data: fewer than two different documents can be read (one is held out{first_skipped(first_bad)}); name files with more text"
        )
    limit = limit_of([lowest[0], highest])
    texts = [text for text in within if rank_of(text) < limit] or [lowest[1]]
    skipped = first_bad[0] if first_bad else None
    more = _more(records, limit, texts, wanted=most_tokens * token_bytes, documents=SCAN_DOCUMENTS * most_tokens // tokens - scanned)
    return HeldOut([Document("held out", text) for text in (*texts, *more)], limit, scanned, skipped, len(texts))


def _more(records: Iterator[Document], limit: int, texts: Sequence[bytes], *, wanted: int, documents: int) -> list[bytes]:
    """Return texts of a rank below `limit` that are not among `texts`, from the next `documents`, until all hold `wanted` bytes."""
    found = dict.fromkeys(texts)
    size = sum(map(len, texts))
    while size < wanted and documents > 0 and (record := next(records, None)) is not None:
        documents -= 1
        if rank_of(record.text) < limit and record.text not in found:
            found[record.text] = None
            size += len(record.text)
    return [*found][len(texts) :]


def _by_turns(parts: Sequence[Blocks], seed: int) -> Iterator[Document | Bad]:
    orders = [generator(seed, 0, f"validation {number}").permutation(len(part)) for number, part in enumerate(parts)]
    for turn in range(max(map(len, parts))):
        for part, order in zip(parts, orders, strict=True):
            if turn < len(order):
                yield from part.read(int(order[turn]))


class SyntheticBlocks:
    """Seeded uniform random ids below `num_ids`, a document of exactly one row per block. Nothing can be learned from them."""

    def __init__(self, tokenizer: Tokenizer, *, num_ids: int, seq_len: int, seed: int) -> None:
        self._tokenizer, self._num_ids, self._seq_len, self._seed = tokenizer, num_ids, seq_len, seed

    def __len__(self) -> int:
        return 2**40

    def entries(self, block: int, start: int, epoch: int) -> Iterator[Entry]:
        """Yield the one document of `block`."""
        if start == 0:
            yield Entry(0, self.document(f"train {block}"))

    def held_out(self, rows: int) -> DrawnRows:
        """Return `rows` rows that are not training rows."""

        def draw(number: int) -> Row:
            ids = self.document(f"val {number}")
            return Row(ids, np.append(ids[1:], np.int32(IGNORED)), [self._seq_len], 1)

        return DrawnRows(draw, count=rows, seq_len=self._seq_len, pad=self._tokenizer.pad)

    def document(self, name: str) -> Ids:
        """Return the ids of the document `name`."""
        ids = generator(self._seed, 0, name).integers(0, self._num_ids, self._seq_len, np.int32)
        ids[-1] = self._tokenizer.separator
        return ids
