"""A second CUDA stream, on which an op launches independent work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from nsa_core.backends.base import Queries

P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(body: Callable[P, R]) -> Callable[P, R]:
    """Wrap the body of an op so that its launches go to the device of its queries, which is made current."""

    @wraps(body)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # in a backward pass the queries come after the gradients and results of the forward pass
        queries = args[0] if isinstance(args[0], Queries) else args[2]
        assert isinstance(queries, Queries)
        first = queries.q
        if not first.is_cuda:
            return body(*args, **kwargs)
        with torch.cuda.device(first.device):
            try:
                return body(*args, **kwargs)
            except BaseException:
                # the second stream may still use memory that is freed here. The fork comes first, because a capture may only join its own forks
                with fork_stream(first):
                    pass
                join_stream(first)
                raise

    return run


@contextmanager
def fork_stream(x: Tensor) -> Iterator[None]:
    """Launch on a second stream of x's device, concurrently with launches on the current stream until `join_stream`.

    The second stream first waits for all earlier work of the current one. The caller must keep the tensors that these launches read and write
    until `join_stream`. Memory that is allocated inside belongs to the second stream, and nothing else reads it.
    """
    if not x.is_cuda:
        yield
        return
    current = torch.cuda.current_stream()
    second = second_stream(current)
    second.wait_stream(current)
    with torch.cuda.stream(second):
        yield


def join_stream(x: Tensor) -> None:
    """Make the current stream wait for the second one. Call it only after `fork_stream`: a CUDA graph can only join streams that it forked."""
    if x.is_cuda:
        current = torch.cuda.current_stream()
        current.wait_stream(second_stream(current))


_SECOND_STREAMS: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


def second_stream(current: torch.cuda.Stream) -> torch.cuda.Stream:
    """Return the second stream of `current`, which is always the same one, from torch's pool of 32 streams.

    If a program has so many streams that two share a second stream, they wait for each other. Results stay right.
    """
    # if two threads ask at the same time, both get the stream that was stored first
    return _SECOND_STREAMS.get(current) or _SECOND_STREAMS.setdefault(current, torch.cuda.Stream(current.device))
