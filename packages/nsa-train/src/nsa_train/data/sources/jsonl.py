"""Source `jsonl`: a record per line, its text in field "text". Lines are found by offset, so that any block can be read at once."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nsa_train.data.sources.base import TEXT_FIELD, Bad, Document, Reading, Record, decoded_problem, unreadable

LINES_PER_BLOCK = 64
BYTES_PER_BLOCK = 2**18
"""A block ends after so many lines, or with the line that reaches so many bytes. Blocks are what is shuffled of files too
large for memory."""
_CHUNK = 2**24
_NEWLINE = 10


class _Span(NamedTuple):
    """The lines of one block."""

    path: Path
    start: int
    """Offset of the first line, in bytes"""
    stop: int
    first_line: int
    """From 1"""


class JsonlBlocks:
    """Local JSONL files, in blocks of a few lines."""

    def __init__(self, paths: list[Path], reading: Reading) -> None:
        self._reading = reading
        self._spans = [span for path in paths for span in _spans_of(path)]
        self.size_bytes = sum(span.stop - span.start for span in self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def read(self, block: int, start: int = 0) -> Iterator[Record]:
        """Yield the records of `block` from line number `start` of it on."""
        span = self._spans[block]
        self._reading.shard = f"{span.path} line {span.first_line}"
        if span.stop == 0:
            yield from [Bad(f"data.path: {span.path}", "is empty (it holds no line)")][start:]
            return
        try:
            with span.path.open("rb") as file:
                file.seek(span.start)
                lines = file.read(span.stop - span.start).split(b"\n")
        except OSError as error:
            raise unreadable(span.path, error) from None
        if lines[-1] == b"":
            lines.pop()
        for number, line in enumerate(lines[start:], span.first_line + start):
            yield record_of_line(span.path, number, line)


def record_of_line(path: Path, number: int, line: bytes) -> Record:
    """Return the record that `line`, the `number`th of `path`, spells."""
    where = f"data.path: {path} line {number}"
    line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    problem = decoded_problem(line) or ("" if line.strip() else "is blank (each line holds one JSON object)")
    if problem:
        return Bad(where, problem)
    try:
        value = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        return Bad(where, f"is not JSON ({error.msg} at column {error.colno})")
    # a number of too many digits ends in a ValueError, one that is nested too deeply ends in a RecursionError
    except (ValueError, RecursionError) as error:
        return Bad(where, f"is not JSON ({error})")
    if not isinstance(value, dict):
        return Bad(where, f"holds a {type(value).__name__} (each line holds one JSON object)")
    if TEXT_FIELD not in value:
        return Bad(where, f"has no field {TEXT_FIELD!r} (it has {_few(value)})")
    return _document(where, path, number, value[TEXT_FIELD])


def _document(where: str, path: Path, number: int, text: object) -> Record:
    if not isinstance(text, str):
        return Bad(where, f"has a {type(text).__name__} in field {TEXT_FIELD!r} (it must hold a string)")
    try:
        return Document(f"{path}:{number}", text.encode("utf-8"))
    except UnicodeEncodeError as error:
        return Bad(where, f"cannot be written as UTF-8 (a lone surrogate at character {error.start} of field {TEXT_FIELD!r})")


def _few(value: dict[str, object]) -> str:
    names = [repr(name[:40]) for name in itertools.islice(value, 5)]
    return ", ".join(names) + (", ..." if len(value) > len(names) else "") or "none"


def _spans_of(path: Path) -> Iterator[_Span]:
    """Yield the blocks of `path`; an empty file is one block that stops at 0."""
    start = lines = 0
    first_line = 1
    position = 0
    for read, ends in _line_ends(path):
        position = read
        at = 0
        while at < len(ends):
            # the line that is the last one allowed, or that reaches the size
            last = min(at + LINES_PER_BLOCK - lines - 1, int(np.searchsorted(ends, start + BYTES_PER_BLOCK)))
            if last >= len(ends):
                lines += len(ends) - at
                break
            lines += last + 1 - at
            yield _Span(path, start, int(ends[last]), first_line)
            start, first_line, lines, at = int(ends[last]), first_line + lines, 0, last + 1
    if start < position or position == 0:
        yield _Span(path, start, position, first_line)


def _line_ends(path: Path) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield how much of `path` was read, and where the lines end that were found since."""
    position = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE) + 1 + position
                position += len(chunk)
                yield position, ends
    except OSError as error:
        raise unreadable(path, error) from None
