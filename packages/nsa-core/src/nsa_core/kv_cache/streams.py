"""Side streams of a captured step: work that does not depend on each other runs concurrently when the graph is replayed.

Only a capture of a cache with `step_graphs` forks: an eager step at batch 1 waits for its host, and events would add to that. Memory that
a fork allocates belongs to its side stream, which may reuse it as soon as the last reference to it goes. A later fork of the same stream
waits for the stream that forks, so what was read there before the fork is not overwritten. The caller therefore keeps every tensor that
crosses streams until `join`, and forks only from one stream.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

NUM_SIDE_STREAMS = 3
"""Side streams that a step may fork, each with a workspace of cuBLAS. Number `NUM_SIDE_STREAMS` of a stream captures (`step_graphs`)."""
_SIDE_STREAMS: dict[tuple[torch.cuda.Stream, int], torch.cuda.Stream] = {}


def is_captured(device: torch.device) -> bool:
    """Return True if a CUDA graph captures the current stream of `device`."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def fork(device: torch.device | None, number: int, body: Callable[[], T]) -> T:
    """Return what `body` returns; in a capture on `device`, run it on side stream `number`, after the current stream's work so far.

    With device None it runs on the current stream. The current stream may read the result after `join`, and side stream `number` in a
    later `fork`.
    """
    if device is None or torch.compiler.is_compiling() or not is_captured(device):
        return body()
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        side = side_stream(current, number)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            return body()


def join(device: torch.device | None, count: int) -> None:
    """Let the current stream of a capture wait for its side streams 0 .. count - 1. Each was forked before: a capture takes no other join."""
    if device is None or torch.compiler.is_compiling() or not is_captured(device):
        return
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        for number in range(count):
            current.wait_stream(side_stream(current, number))


@contextmanager
def joining_on_error(device: torch.device) -> Iterator[None]:
    """Join all side streams where the body raises: a capture that ends with forks that are not joined would hide the error."""
    try:
        yield
    except BaseException:
        for number in range(NUM_SIDE_STREAMS):
            fork(device, number, lambda: None)
        join(device, NUM_SIDE_STREAMS)
        raise


def side_stream(current: torch.cuda.Stream, number: int) -> torch.cuda.Stream:
    """Return side stream `number` of `current`, always the same: one of torch's pool of 32.

    If a program has so many streams that two of these are one, their work is ordered, and results stay right.
    """
    # two threads that come first both get the stored stream
    key = current, number
    return _SIDE_STREAMS.get(key) or _SIDE_STREAMS.setdefault(key, torch.cuda.Stream(current.device))
