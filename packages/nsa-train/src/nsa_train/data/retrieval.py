"""Associative recall on plain ids: key-value pairs are hidden in noise, and the end asks for some of them. `data.source = "needle"`.

Ids 0 .. symbols - 1 spell keys, symbols .. 2 symbols - 1 values, 2 symbols .. 3 symbols - 1 are noise. A row of `length` ids:

    noise, key value, noise, key value, noise, ...  |  noise, key value, key value, ...
    haystack: `pairs` pairs at random slots            tail: `queries` of them once more, in a random order

Only the values in the tail have labels, so that the loss measures recall: it is log(symbols) nats per token without knowledge
of the pairs. Keys and values are new in every row. Pairs that no query asks for are distractors.

With `data.needle_copy` a row has no pairs: a span of random ids is at its beginning and again at its end. Each id of the
second occurrence except the first is a label. From such rows models learn to copy, which recall needs, in far
fewer tokens than from pairs.
"""

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from nsa_train.data.order import generator
from nsa_train.data.packing import IGNORED, DrawnRows, Row
from nsa_train.settings.data_table import LEAST_SPAN, DataTable


@frozen(kw_only=True)
class Retrieval:
    """The task; `DataTable` checks its numbers."""

    length: int
    """Ids of a row."""
    pairs: int
    """Pairs in the haystack."""
    queries: int
    """Number of pairs that the tail asks for; at most `pairs`."""
    symbols: int
    """Ids of each alphabet."""
    tokens: int
    """Ids of a key, and of a value."""
    copies: bool = False
    """True: rows repeat a span and have no pairs."""

    @classmethod
    def of(cls, data: DataTable, length: int) -> "Retrieval":
        """Return the task of rows of `length` ids that `data` describes."""
        return cls(
            length=length,
            pairs=data.needle_pairs,
            queries=data.needle_queries,
            symbols=data.needle_symbols,
            tokens=data.needle_tokens,
            copies=data.needle_copy,
        )

    @property
    def pair_ids(self) -> int:
        """Ids of a key with its value."""
        return 2 * self.tokens

    @property
    def tail(self) -> int:
        """Number of ids after the haystack: twice as many as the queries take, so that the positions of the queries vary."""
        return 2 * self.queries * self.pair_ids

    @property
    def slots(self) -> int:
        """Number of slots of the haystack, each of which can hold a pair."""
        return (self.length - self.tail) // self.pair_ids

    def draw(self, random: np.random.Generator, slots: Sequence[int] | NDArray[np.int64] | None = None) -> Row:
        """Return a row of `length` ids and labels, int32; `slots`: positions of the pairs; the tail asks for the first `queries` of them."""
        symbols, tokens, size = self.symbols, self.tokens, self.pair_ids
        ids = random.integers(2 * symbols, 3 * symbols, self.length, np.int32)
        labels = np.full(self.length, IGNORED, np.int32)
        pairs = np.empty((self.pairs, size), np.int32)
        pairs[:, :tokens] = self._keys(random)
        pairs[:, tokens:] = random.integers(symbols, 2 * symbols, (self.pairs, tokens), np.int32)
        chosen = random.permutation(self.slots)[: self.pairs] if slots is None else np.asarray(slots)
        in_pair = np.arange(size)
        ids[chosen[:, None] * size + in_pair] = pairs
        asked = pairs[random.permutation(self.queries)]
        starts = self.length - self.tail + np.sort(random.permutation(2 * self.queries)[: self.queries]) * size
        ids[starts[:, None] + in_pair] = asked
        # the id before each of a value's
        labels[starts[:, None] + np.arange(tokens - 1, size - 1)] = asked[:, tokens:]
        return Row(ids, labels, [self.length], 1)

    def draw_copy(self, random: np.random.Generator) -> Row:
        """Return a row of `length` ids and labels, int32, whose last ids repeat its first: LEAST_SPAN of them to half of the row."""
        ids = random.integers(0, 3 * self.symbols, self.length, np.int32)
        labels = np.full(self.length, IGNORED, np.int32)
        span = int(random.integers(LEAST_SPAN, self.length // 2, endpoint=True))
        ids[-span:] = ids[:span]
        labels[-span:-1] = ids[1:span]
        return Row(ids, labels, [self.length], 1)

    def _keys(self, random: np.random.Generator) -> NDArray[np.int32]:
        """Return `pairs` different keys `(pairs, tokens)`."""
        count = self.symbols**self.tokens
        if count >= 2**63:
            # more than int64 holds: the ids of a key are drawn one by one
            rows: dict[tuple[int, ...], None] = {}
            while len(rows) < self.pairs:
                rows |= dict.fromkeys(map(tuple, random.integers(0, self.symbols, (self.pairs, self.tokens)).tolist()))
            return np.array([*rows][: self.pairs], np.int32)
        # a permutation of all keys would be gigabytes for a few long ones
        numbers = random.permutation(count)[: self.pairs] if count <= 2**20 else _distinct(random, count, self.pairs)
        digits = [numbers // self.symbols**power % self.symbols for power in range(self.tokens)]
        return np.stack(digits, 1).astype(np.int32)


def _distinct(random: np.random.Generator, count: int, wanted: int) -> NDArray[np.int64]:
    found: dict[int, None] = {}
    while len(found) < wanted:
        found |= dict.fromkeys(random.integers(0, count, wanted).tolist())
    return np.array([*found][:wanted])


def retrieval_rows(task: Retrieval, *, side: str, seed: int, pad: int, count: int = 2**40) -> DrawnRows:
    """Return rows of one side, "train" or "val", each drawn from (seed, side, number)."""

    def draw(number: int) -> Row:
        random = generator(seed, 0, f"needle {side} {number}")
        return task.draw_copy(random) if task.copies else task.draw(random)

    return DrawnRows(draw, count=count, seq_len=task.length, pad=pad)
