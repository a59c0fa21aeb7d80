"""The console of a command. Its reader may be gone, and its encoding may lack characters."""

import io
import json
import math
import os
import select
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TextIO


class Answer(NamedTuple):
    """The results of a command with `--json`, which prints them as one object."""

    code: int
    """The exit code."""
    content: Mapping[str, Any]


def warn(line: str) -> None:
    """Print `line` to stderr; the line is lost if stderr is closed."""
    # stderr may be missing
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"nsa-train: {line}\n")


def as_object(command: str, code: int, errors: list[str], content: Mapping[str, Any]) -> str:
    """Return the object of a command with `--json` as one line; a figure that is not finite becomes null."""
    return json.dumps({"command": command, "exit_code": code, "errors": errors, **_spelled(content)}, allow_nan=False)


def _spelled(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _spelled(item) for name, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, list | tuple) else value


def is_unread(stream: TextIO | None) -> bool:
    """Return whether `stream` goes to a pipe or a terminal whose other end is closed; None, a stream that was never open, does not."""
    # a stream in memory has no file descriptor
    with suppress(io.UnsupportedOperation):
        if stream is None:
            return False
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    return False


def discard(stream: TextIO) -> None:
    """Discard all further output to `stream`; otherwise a flush at the end of the process would fail."""
    with suppress(io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
