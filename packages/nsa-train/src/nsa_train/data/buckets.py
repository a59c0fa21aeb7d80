"""Unpacked batches: one document, or a piece of one, per row; the rows of a batch are of similar length, and padded to it."""

import numpy as np
from numpy.typing import NDArray

from nsa_train.data.order import generator
from nsa_train.data.packing import PackedRows, Row

SMALLEST = 16
"""Tokens of the smallest bucket; each next one is twice as long, the last is `seq_len`."""


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
        turn, place = divmod(number, self._batch_size)
        epoch, batch = divmod(turn, self.batches_per_epoch)
        drawn = self._drawn
        if drawn[0] != epoch:
            drawn = self._drawn = (epoch, self._draw(epoch))
        size, pieces = drawn[1][batch]
        start, stop = self._pieces[pieces[place]].tolist() if place < len(pieces) else (0, 0)
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
