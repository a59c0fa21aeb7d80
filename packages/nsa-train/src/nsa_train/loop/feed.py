"""Fetch the micro-batches of a step; a request to stop can end the wait."""

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from nsa_train.data.packing import Batch
from nsa_train.data.stream import TrainingStream

POLL_S = 0.05
"""Seconds between two checks for a request to stop, during a wait for data."""


@frozen(eq=False)
class Fetched:
    """The micro-batches of one optimizer step, on the host."""

    batches: list[Batch]
    seconds: float
    """Seconds spent waiting for them."""

    @property
    def num_targets(self) -> int:
        """Number of labels of the step on this rank."""
        return sum(batch.num_targets for batch in self.batches)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step on this rank."""
        return sum(batch.input_ids.numel() for batch in self.batches)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence of the step on this rank."""
        return tuple(length for batch in self.batches for length in batch.lengths.tolist())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of the step on this rank, as `Batch.longest`."""
        return max(batch.longest for batch in self.batches)

    def describe(self, index: int) -> str:
        """Return a text that identifies micro-batch `index`: its hash, its size, its first tokens."""
        ids = self.batches[index].input_ids.flatten()
        digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:12]
        return f"micro-batch {index} (sha256 of its ids {digest}, {len(ids)} tokens from {ids[:8].tolist()})"


class Feed:
    """Takes micro-batches from a stream, `accumulate` at a time.

    `position` is the position of the first micro-batch whose step has not begun, so that the data of an abandoned step are not lost.
    """

    def __init__(self, stream: TrainingStream, accumulate: int) -> None:
        """Read nothing yet."""
        self._stream, self._accumulate = stream, accumulate
        self.position: Mapping[str, Any] = stream.state_dict()

    def fetch(self, is_stopped: Callable[[], bool]) -> Fetched | None:
        """Return the micro-batches of the next step; None if `is_stopped()` becomes true during the wait."""
        started = time.perf_counter()
        batches: list[Batch] = []
        while len(batches) < self._accumulate:
            if self._stream.ready(POLL_S):
                batches.append(next(self._stream))
            elif is_stopped():
                return None
        return Fetched(batches, time.perf_counter() - started)

    def accept(self) -> None:
        """Move `position` past the fetched micro-batches, because their step begins."""
        self.position = self._stream.state_dict()
