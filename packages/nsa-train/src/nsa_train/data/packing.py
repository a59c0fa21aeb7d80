"""Pack documents into rows of `seq_len` tokens, and rows into one batch.

All documents, each followed by the separator, form one stream, which is cut every `seq_len` tokens: a long document continues
in the next row, nothing is truncated, and only the last row is padded. If a document ends inside a row, the row
holds several sequences, and `cu_seqlens` keeps attention inside each. The label of a token is the next token of its
document, even if that token is in the next row; a separator and padding have no label.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from attrs import evolve, frozen
from numpy.typing import NDArray
from torch import Tensor

from nsa_train.data.order import generator
from nsa_train.data.sources.base import Document
from nsa_train.data.tokenizer import Ids, Tokenizer

IGNORED = -100
"""The label of a token that has no next token in its document."""
SMALLEST = 16
"""Tokens of the smallest bucket; each next one is twice as long, the last is `seq_len`."""


class Row(NamedTuple):
    """One row of a batch."""

    input_ids: Ids
    """(T,)"""
    labels: Ids
    """(T,) IGNORED where there is none"""
    lengths: list[int]
    """Tokens of each sequence in the row; they sum to T. Padding counts as a separate sequence."""
    ended: int = 0
    """Number of documents that end in this row."""


@frozen(kw_only=True, eq=False)
class Batch:
    """Rows packed one after another. N sequences, `total` = rows * T tokens."""

    input_ids: Tensor
    """(1, total) int64"""
    labels: Tensor
    """(1, total) int64, IGNORED where there is none"""
    loss_mask: Tensor
    """(1, total) bool: True if there is a label"""
    lengths: Tensor
    """(N,) int32"""
    cu_seqlens: Tensor
    """(N + 1,) int32"""
    max_seqlen: int
    """Host bound of `lengths`: T"""
    longest: int
    """Tokens of the longest sequence of this batch up to its last label, known on the host; tokens after it train nothing"""
    num_targets: int
    """Labels that are not IGNORED, known on the host"""

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with the tensors that a model reads on `device`; `loss_mask` and `lengths` stay on the host."""
        names = ("input_ids", "labels", "cu_seqlens")
        return evolve(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


class PackedRows:
    """The rows of a list of documents, by index; documents are in an order shuffled by `seed` (None: as given)."""

    def __init__(self, documents: Sequence[Document], tokenizer: Tokenizer, seq_len: int, seed: int | None = None) -> None:
        order = range(len(documents)) if seed is None else generator(seed, 0, "documents").permutation(len(documents)).tolist()
        parts = tokenizer.encode_batch([documents[index].text for index in order])
        self.stream: Ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
        """(num_tokens,): every document and its separator."""
        self.ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        """(num_documents,): where each document's separator ends, in tokens of the stream."""
        self.seq_len = seq_len
        self.pad = tokenizer.pad

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all rows, padding left out."""
        return len(self.stream)

    def __len__(self) -> int:
        return -(-len(self.stream) // self.seq_len)

    def __getitem__(self, index: int) -> Row:
        start = index * self.seq_len
        stop = min(start + self.seq_len, len(self.stream))
        first, last = np.searchsorted(self.ends, (start, stop), side="right").tolist()
        cuts = self.ends[first:last].tolist()
        edges = [start, *cuts] if cuts and cuts[-1] == stop else [start, *cuts, stop]
        return self._row(start, stop, [after - before for before, after in pairwise(edges)], cuts, self.seq_len)

    def piece(self, start: int, stop: int, size: int) -> Row:
        """Return tokens `start` .. `stop` - 1 of the stream, which are of one document, alone in a row of `size` tokens."""
        ends_here = bool(self.ends[np.searchsorted(self.ends, start, side="right")] == stop) if stop > start else False
        return self._row(start, stop, [stop - start] if stop > start else [], [stop] if ends_here else [], size)

    def _row(self, start: int, stop: int, lengths: list[int], cuts: list[int], size: int) -> Row:
        count, padding = stop - start, size - (stop - start)
        input_ids = np.full(size, self.pad, np.int32)
        input_ids[:count] = self.stream[start:stop]
        labels = np.full(size, IGNORED, np.int32)
        following = self.stream[start + 1 : stop + 1]
        labels[: len(following)] = following
        labels[[cut - 1 - start for cut in cuts]] = IGNORED
        return Row(input_ids, labels, [*lengths, padding] if padding else lengths, len(cuts))


class DrawnRows:
    """Rows that are not stored: `draw` makes each from its number on request. They replace `PackedRows` in a validation split."""

    def __init__(self, draw: Callable[[int], Row], *, count: int, seq_len: int, pad: int) -> None:
        self.at, self._count = draw, count
        self.seq_len, self.pad = seq_len, pad

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all rows."""
        return self._count * self.seq_len

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Row:
        return self.at(number)

    def epoch(self, number: int) -> int:
        """Return 0, because no row is repeated."""
        return 0


def collate(rows: Sequence[Row]) -> Batch:
    """Return `rows` packed into one batch of `cu_seqlens` sequences."""
    # numpy, because for each of these small operations torch would wake a thread per core and release the GIL
    lengths = np.array([length for row in rows for length in row.lengths], np.int32)
    labels = _joined([row.labels for row in rows])
    loss_mask = labels != IGNORED
    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    # tokens from the start of each label's own sequence up to it
    reach = np.arange(1, len(loss_mask[0]) + 1) - np.repeat(cu_seqlens[:-1], lengths)
    return Batch(
        input_ids=torch.from_numpy(_joined([row.input_ids for row in rows])),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(loss_mask),
        lengths=torch.from_numpy(lengths),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=len(rows[0].input_ids),
        longest=int((reach * loss_mask[0]).max()),
        num_targets=int(np.count_nonzero(loss_mask)),
    )


def _joined(parts: list[Ids]) -> NDArray[np.int64]:
    return np.concatenate(parts, dtype=np.int64)[None]


class BucketedRows:
    """The pieces of a corpus, each once per epoch, `batch_size` of one length bucket after another; batches in a seeded order.

    Pieces that are left over in a bucket go to the next longer one; the last batch of an epoch is filled with rows of padding.
    """

    def __init__(self, rows: PackedRows, *, batch_size: int, seed: int) -> None:
        """Cut the documents of `rows` into pieces of at most its `seq_len` tokens."""
        self._rows, self._batch_size, self._seed = rows, batch_size, seed
        self._pieces = _pieces_of(rows)
        lengths = self._pieces[:, 1] - self._pieces[:, 0]
        self._buckets = buckets_up_to(rows.seq_len)
        self._bucket_of = np.searchsorted(self._buckets, lengths)
        self._drawn: tuple[int, list[tuple[int, list[int]]]] = (0, self._draw(0))
        self.batches_per_epoch = len(self._drawn[1])

    def at(self, number: int) -> Row:
        """Return row `number`: the `number % batch_size`th of its batch."""
        turn, slot = divmod(number, self._batch_size)
        epoch, batch = divmod(turn, self.batches_per_epoch)
        drawn = self._drawn
        if drawn[0] != epoch:
            drawn = self._drawn = (epoch, self._draw(epoch))
        size, pieces = drawn[1][batch]
        start, stop = self._pieces[pieces[slot]].tolist() if slot < len(pieces) else (0, 0)
        return self._rows.piece(start, stop, size)

    def epoch(self, number: int) -> int:
        """Return the epoch of row `number`."""
        return number // self._batch_size // self.batches_per_epoch

    def _draw(self, epoch: int) -> list[tuple[int, list[int]]]:
        """Return the batches of `epoch`: the length that they are padded to, and their pieces."""
        draw = generator(self._seed, epoch, "buckets")
        batches: list[tuple[int, list[int]]] = []
        left: list[int] = []
        for number, size in enumerate(self._buckets.tolist()):
            members = [*left, *draw.permutation(np.flatnonzero(self._bucket_of == number)).tolist()]
            whole = len(members) - len(members) % self._batch_size
            batches += [(size, members[at : at + self._batch_size]) for at in range(0, whole, self._batch_size)]
            left = members[whole:]
        if left:
            batches.append((int(self._buckets[self._bucket_of[left].max()]), left))
        return [batches[index] for index in draw.permutation(len(batches)).tolist()]


def buckets_up_to(seq_len: int) -> NDArray[np.int64]:
    """Return the lengths that batches are padded to: 16, 32, ... and `seq_len`."""
    sizes = [SMALLEST << step for step in range(seq_len.bit_length()) if SMALLEST << step < seq_len]
    return np.array([*sizes, seq_len], np.int64)


def _pieces_of(rows: PackedRows) -> NDArray[np.int64]:
    """Return (start, stop) in the stream of every piece."""
    starts = np.concatenate([np.zeros(1, np.int64), rows.ends[:-1]])
    pieces = [
        (at, min(at + rows.seq_len, stop))
        for start, stop in zip(starts.tolist(), rows.ends.tolist(), strict=True)
        for at in range(start, stop, rows.seq_len)
    ]
    return np.array(pieces, np.int64).reshape(-1, 2)
