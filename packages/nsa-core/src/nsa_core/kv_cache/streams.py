"""Side streams of a captured step: independent work runs concurrently when the graph is replayed.

Only a capture of a cache with `step_graphs` forks. The host limits the speed of an eager step at batch 1, and events would slow it more. Memory
that a fork allocates belongs to its side stream, which may reuse it once the last reference to it is gone. A later fork of the same side
stream first waits for the forking stream, so it does not overwrite what that stream read before. The caller therefore keeps every tensor
that crosses streams until `join`, and forks only from one stream.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

NUM_SIDE_STREAMS = 3
"""Number of side streams that a step may fork; each has a cuBLAS workspace. `step_graphs` captures on one more, number `NUM_SIDE_STREAMS`."""
_SIDE_STREAMS: dict[tuple[torch.cuda.Stream, int], torch.cuda.Stream] = {}


def is_captured(device: torch.device) -> bool:
    """Return True if a CUDA graph captures the current stream of `device`."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def fork(device: torch.device | None, number: int, body: Callable[[], T]) -> T:
    """Run `body` and return its result. In a capture on `device`, it runs on side stream `number`, after the current stream's work so far.

    Without a capture, or with device None, it runs on the current stream. The current stream may read the result after `join`; side stream
    `number` may read it in a later `fork`.
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
    """Let the current stream of a capture wait for its side streams 0 .. count - 1. Each must have been forked before, or the capture fails."""
    if device is None or torch.compiler.is_compiling() or not is_captured(device):
        return
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        for number in range(count):
            current.wait_stream(side_stream(current, number))


@contextmanager
def joining_on_error(device: torch.device) -> Iterator[None]:
    """Join all side streams if the body raises an error; a capture that ends with open forks would replace that error by its own."""
    try:
        yield
    except BaseException:
        for number in range(NUM_SIDE_STREAMS):
            fork(device, number, lambda: None)
        join(device, NUM_SIDE_STREAMS)
        raise


def side_stream(current: torch.cuda.Stream, number: int) -> torch.cuda.Stream:
    """Return side stream `number` of `current`, always the same stream, from torch's pool of 32.

    If a program has so many streams that two side streams are the same one, their work runs in order, and results stay correct.
    """
    # if two threads ask first at the same time, both get the stored stream
    key = current, number
    return _SIDE_STREAMS.get(key) or _SIDE_STREAMS.setdefault(key, torch.cuda.Stream(current.device))
