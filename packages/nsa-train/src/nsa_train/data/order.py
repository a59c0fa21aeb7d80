"""Seeded orders that any process can compute at any position: epoch by epoch, and of several parts by weight."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LISTED = 2**22
"""Orders of at most this many numbers are drawn and kept in memory; each number of a longer order is computed when it is needed."""
_ROUNDS = 6


class EpochItem(NamedTuple):
    """The epoch and the item at a position of an endless order."""

    epoch: int
    item: int


class SeededOrder:
    """Endless numbers 0 .. count - 1, each once per epoch, in an order drawn from (seed, epoch); any position in O(1)."""

    def __init__(self, count: int, seed: int, name: str = "") -> None:
        """`name` keeps orders of one seed apart."""
        self.count, self._seed, self._name = count, seed, name
        # always replaced and read as one tuple, so that several threads may share it
        self._drawn: tuple[int, NDArray[np.int64]] | None = None

    def at(self, position: int) -> EpochItem:
        """Return epoch and item at `position` >= 0."""
        epoch, offset = divmod(position, self.count)
        if self.count > _LISTED:
            return EpochItem(epoch, self._permuted(epoch, offset))
        drawn = self._drawn
        if drawn is None or drawn[0] != epoch:
            drawn = self._drawn = (epoch, generator(self._seed, epoch, self._name).permutation(self.count))
        return EpochItem(epoch, int(drawn[1][offset]))

    def _permuted(self, epoch: int, offset: int) -> int:
        """Return `offset` mapped by a keyed Feistel network, walked until it falls below `count`."""
        half = ((self.count - 1).bit_length() + 1) // 2
        mask = (1 << half) - 1
        keys = [int(key) | 1 for key in generator(self._seed, epoch, self._name).integers(0, 2**62, _ROUNDS)]
        value = offset
        while True:
            left, right = value >> half, value & mask
            for key in keys:
                mixed = (right * key + (key >> 17)) & (2**64 - 1)
                left, right = right, left ^ ((mixed ^ (mixed >> 29)) * 0x9E3779B97F4A7C15 >> 31 & mask)
            value = left << half | right
            if value < self.count:
                return value


class Turns:
    """The turns of an endless mix: part i gets weights[i] of every sum(weights) turns, in a seeded order."""

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        """Every weight is an integer >= 1."""
        parts = np.repeat(np.arange(len(weights)), weights)
        self._parts: list[int] = generator(seed, 0, "turns").permutation(parts).tolist()
        self._weights = list(weights)
        self._before, counts = list[int](), [0] * len(weights)
        for part in self._parts:
            self._before.append(counts[part])
            counts[part] += 1

    def at(self, position: int) -> tuple[int, int]:
        """Return the part whose turn is `position`, and how many turns it had before."""
        full, turn = divmod(position, len(self._parts))
        part = self._parts[turn]
        return part, full * self._weights[part] + self._before[turn]


def generator(seed: int, epoch: int, name: str = "") -> np.random.Generator:
    """Return a generator seeded by a hash of (seed, epoch, name). Without the hash, neighbouring seeds could repeat each other's epochs."""
    digest = hashlib.sha256(f"{seed} {epoch} {name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
