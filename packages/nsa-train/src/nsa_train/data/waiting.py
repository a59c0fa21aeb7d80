"""Work with a time limit, whose end names the shard that was being read."""

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from nsa_train.data.sources import Reading
from nsa_train.errors import DataError

T = TypeVar("T")


class _Done(NamedTuple):
    value: object
    error: BaseException | None


class LateError(DataError):
    """Data of `shard` did not come within `seconds`; `option` is what sets that limit."""

    def __init__(self, seconds: float, shard: str, *, option: str = "data.timeout_s") -> None:
        super().__init__(
            f"data: nothing came within {seconds:g} s (reading {shard}); look at that shard, or wait longer with a larger {option}"
        )
        self.seconds, self.shard = seconds, shard


def within(seconds: float, work: Callable[[], T], reading: Reading) -> T:
    """Return what `work` returns; it runs in a thread, which is left behind when the time is up.

    Raises:
        LateError: after `seconds`, naming what was being read.
    """
    done: queue.Queue[_Done] = queue.Queue()

    def attempt() -> None:
        try:
            done.put(_Done(work(), None))
        # whatever it is, it is raised again below, in the caller's thread
        except BaseException as error:  # noqa: BLE001
            done.put(_Done(None, error))

    thread = threading.Thread(target=attempt, name="nsa-data-open", daemon=True)
    thread.start()
    try:
        value, error = done.get(timeout=seconds)
    except queue.Empty:
        raise LateError(seconds, reading.of(thread)) from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
