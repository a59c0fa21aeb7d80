"""What a command prints to: streams whose reader may be gone, and that cannot spell every character."""

import io
import os
import select
import sys
from contextlib import suppress
from typing import TextIO


def settle_streams() -> None:
    """Let stdout print a question mark for what its encoding lacks; stderr spells it out by itself."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def warn(line: str) -> None:
    """Print `line` to stderr; where nobody reads that, it is lost."""
    # there may be none
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"nsa-train: {line}\n")


def is_unread(stream: TextIO) -> bool:
    """Return whether `stream` goes to a pipe or a terminal whose other end is closed."""
    # a stream in memory has no descriptor
    with suppress(io.UnsupportedOperation):
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    return False


def discard(stream: TextIO) -> None:
    """Let what is still printed to `stream` go nowhere; a flush at the end of the process would fail otherwise."""
    with suppress(io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
