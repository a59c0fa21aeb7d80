"""The training stream: a seeded index decides the order, torchdata.nodes fetches ahead, and every position has a state.

The shuffle is a permutation of row indices drawn from (seed, epoch), so a position is two integers and a stopped run can
go on exactly where it was.
"""

import hashlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torchdata.nodes import BaseNode, Batcher, Loader, Mapper, Prefetcher

from nsa_train.data.packing import Batch, PackedRows, collate


class ShuffledIndices(BaseNode[int]):
    """Endless indices 0 .. count - 1, each once per epoch, in an order drawn from (seed, epoch)."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__()
        self.count, self.seed = count, seed
        self.is_stopped = False

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Start over, or at the position that `initial_state` (from `get_state`) describes."""
        super().reset(initial_state)
        self.epoch = initial_state["epoch"] if initial_state else 0
        self.position = initial_state["position"] if initial_state else 0
        self._order = self._draw()

    def next(self) -> int:
        """Return the next index; after the last of an epoch, the first of the next."""
        if self.is_stopped:
            raise StopIteration
        if self.position == self.count:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._draw()
        self.position += 1
        return self._order[self.position - 1]

    def get_state(self) -> dict[str, Any]:
        """Return the position: epoch, and indices given out in it."""
        return {"epoch": self.epoch, "position": self.position}

    def stop(self) -> None:
        """End the stream: the next index is not given out."""
        self.is_stopped = True

    def _draw(self) -> list[int]:
        # hashed: neighbouring seeds must not repeat each other's epochs, and torch reads no more than 32 bits
        digest = hashlib.sha256(f"{self.seed} {self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
        order: list[int] = torch.randperm(self.count, generator=generator).tolist()
        return order


class BatchStream:
    """Endless batches of `batch_size` rows in seeded order, `prefetch` of them made ready ahead by a thread.

    Use as a context manager: leaving it ends the thread.
    """

    def __init__(self, rows: PackedRows, *, batch_size: int, seed: int, prefetch: int) -> None:
        self._indices = ShuffledIndices(len(rows), seed)
        batches = Batcher(Mapper(self._indices, rows.__getitem__), batch_size)
        self._loader: Loader[Batch] = Loader(Prefetcher(Mapper(batches, collate), prefetch_factor=prefetch))
        self._iterator: Iterator[Batch] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._indices.stop()
        # the thread ends once what it made ready was taken
        for _ in self._iterator or ():
            pass

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return next(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the position that `state` describes."""
        self._loader.load_state_dict(state)
        self._iterator = None


def validation_batches(rows: PackedRows, *, batch_size: int, most: int) -> list[Batch]:
    """Return at most `most` batches of rows spread evenly over `rows`: the same ones at every call."""
    count = min(len(rows), batch_size * most)
    chosen = [index * len(rows) // count for index in range(count)]
    return [collate([rows[index] for index in chosen[at : at + batch_size]]) for at in range(0, count, batch_size)]
