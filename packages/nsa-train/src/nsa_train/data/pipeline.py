"""The pipeline of one rank, made of torchdata's nodes: a thread prefetches each group of lanes, then one batch joins their rows.

A node's state is the position of the first batch that was not returned yet; prefetched items do not count.
"""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchdata.nodes import BaseNode

from nsa_train.data.lanes import Lane
from nsa_train.data.packing import Batch, Row, collate
from nsa_train.data.sources.base import LateError, Reading

_POLL_S = 0.05


class LaneGroup(BaseNode[list[Row]]):
    """The next row of each of a few lanes. State: lane number -> position."""

    def __init__(self, lanes: dict[int, Lane]) -> None:
        super().__init__()
        self._lanes = lanes

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Continue at `initial_state`, which must name each lane; without one, lanes stay where they are."""
        super().reset(initial_state)
        for number, lane in self._lanes.items():
            if initial_state is not None:
                lane.load(initial_state[str(number)])

    def next(self) -> list[Row]:
        """Return a row per lane."""
        return [lane.next_row() for lane in self._lanes.values()]

    def get_state(self) -> dict[str, Any]:
        """Return the position of each lane."""
        return {str(number): lane.state() for number, lane in self._lanes.items()}


class _Ready(NamedTuple):
    """An item of the thread: rows with the state after them, or the error that ended it."""

    rows: list[Row]
    state: dict[str, Any]
    error: BaseException | None = None


class ReadAhead(BaseNode[list[Row]]):
    """Prefetch the items of `source` in a thread, at most `ahead` of them. The thread ends with `stop`."""

    def __init__(self, source: LaneGroup, *, ahead: int, timeout_s: float, reading: Reading) -> None:
        super().__init__()
        self._source, self._ahead, self._timeout_s, self._reading = source, ahead, timeout_s, reading
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._queue: queue.Queue[_Ready] = queue.Queue(ahead)
        self._next: _Ready | None = None
        self._waited_since: float | None = None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Drop the prefetched items and start again at `initial_state`."""
        super().reset(initial_state)
        self.stop()
        self._source.reset(initial_state)
        self._state: dict[str, Any] = self._source.state_dict()
        self._stop, self._queue, self._next = threading.Event(), queue.Queue(self._ahead), None
        self._waited_since = None
        self._thread = threading.Thread(target=self._fill, args=(self._stop, self._queue), name="nsa-data", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the next item for at most a limit; return whether it is present or overdue."""
        if self._next is None:
            self._waited_since = self._waited_since or time.monotonic()
            try:
                self._next = self._queue.get(timeout=max(seconds, 1e-4))
            except queue.Empty:
                return self._left() <= 0
            self._waited_since = None
        return True

    def _left(self) -> float:
        """Return the seconds until the next item is overdue; several short waits for it count together."""
        return self._timeout_s - (0 if self._waited_since is None else time.monotonic() - self._waited_since)

    def require(self) -> None:
        """Wait for the next item.

        Raises:
            DataError: if none comes within the time limit; the shard that is being read is named.
        """
        # starts the thread
        self.state_dict()
        self.wait(self._left())
        if self._next is None:
            # a caller that waits again gets the full time
            self._waited_since = None
            raise LateError(self._timeout_s, self._reading.of(self._thread))
        if self._next.error is not None:
            # a second call ends in the same way
            raise self._next.error

    def next(self) -> list[Row]:
        """Return the next item, waiting for it as `require` does."""
        self.require()
        assert self._next is not None, "require has filled it"
        self._state, rows, self._next = self._next.state, self._next.rows, None
        return rows

    def get_state(self) -> dict[str, Any]:
        """Return the state after the last item that was returned."""
        return self._state

    def stop(self) -> None:
        """End the thread; a thread that hangs in a read is abandoned, and ends with the process."""
        self._stop.set()
        # space for the thread's last item
        while not self._queue.empty():
            self._queue.get_nowait()
        deadline = time.monotonic() + 2
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(_POLL_S)
        self._thread = None

    def _fill(self, stop: threading.Event, ready: "queue.Queue[_Ready]") -> None:
        while not stop.is_set():
            try:
                item = _Ready(self._source.next(), self._source.get_state())
            # any error is raised again in the trainer's thread, which would otherwise wait forever
            except BaseException as error:  # noqa: BLE001
                item = _Ready([], {}, error)
            while not stop.is_set():
                try:
                    ready.put(item, timeout=_POLL_S)
                    break
                except queue.Full:
                    continue
            if item.error is not None:
                return


class Batches(BaseNode[Batch]):
    """One batch of the rows of all groups, in the order of their lanes. State: lane number -> position."""

    def __init__(self, groups: Sequence[LaneGroup] | Sequence[ReadAhead]) -> None:
        super().__init__()
        self._groups = groups

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Continue at `initial_state`."""
        super().reset(initial_state)
        for group in self._groups:
            group.reset(initial_state)

    def next(self) -> Batch:
        """Return the next batch."""
        # wait for all groups before taking from any, so that an error leaves all at the same position
        for group in self._groups:
            if isinstance(group, ReadAhead):
                group.require()
        return collate([row for group in self._groups for row in next(group)])

    def get_state(self) -> dict[str, Any]:
        """Return the position of every lane."""
        return {number: state for group in self._groups for number, state in group.state_dict().items()}
