"""Source `jsonl`: one record per line, with its text in field "text". Lines are found by offset, so that any block can be read directly."""

import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nsa_core.errors import type_of
from nsa_train.data.sources.base import TEXT_FIELD, Bad, Reading, Record, decoded_problem, document_of
from nsa_train.data.sources.files import FileBlocks, LocalFile, LostError, hash_of, unreadable

LINES_PER_BLOCK = 64
BYTES_PER_BLOCK = 2**18
"""Maximum lines of a block, and bytes at which a block ends with the current line. For files too large for memory, blocks are shuffled."""
MOST_TOGETHER = 2**30
"""Maximum bytes of a streamed block, which is read whole; only one very long line makes a longer one."""
_CHUNK = 2**24
_NEWLINE = 10


class _Span(NamedTuple):
    """The lines of one block."""

    file: LocalFile
    start: int
    """Offset of the first line, in bytes"""
    stop: int
    first_line: int
    """From 1"""
    lines: int
    hash: int


class JsonlBlocks(FileBlocks):
    """Local JSONL files, in blocks of a few lines."""

    def __init__(self, paths: list[Path], reading: Reading) -> None:
        self._reading = reading
        # the state of a file is recorded before its lines are counted, so that every later write is detected
        self._spans = [span for path in paths for span in _spans_of(LocalFile.found(path))]
        self.size_bytes = self.num_bytes = sum(span.stop - span.start for span in self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def keep_hashes(self, *, is_salvaging: bool) -> None:
        """Keep the hashes of all blocks, which were computed when the lines were counted."""
        super().keep_hashes(is_salvaging=is_salvaging)
        for block, span in enumerate(self._spans):
            self.kept.found[block] = span.hash

    def where(self, block: int) -> str:
        """Return file and lines of `block`."""
        span = self._spans[block]
        return f"data.path: {span.file.path} lines {span.first_line} to {span.first_line + span.lines - 1}"

    def content(self, block: int) -> Iterator[bytes]:
        """Yield the bytes of the lines of `block`."""
        span = self._spans[block]
        return span.file.pieces(span.start, span.stop)

    def read(self, block: int, start: int = 0) -> Iterator[Record]:
        """Yield the records of `block` from line number `start` of it on; a bad one for each line of a file that changed."""
        span = self._spans[block]
        path = span.file.path
        self._reading.shard = f"{path} line {span.first_line}"
        if span.stop == 0:
            yield from [Bad(f"data.path: {path}", "is empty (it holds no line)")][start:]
            return
        numbers = range(span.first_line + start, span.first_line + span.lines)
        # only a streamed corpus keeps hashes; a corpus in memory is at most as large as its user said
        if self.hashes is not None and span.stop - span.start > MOST_TOGETHER:
            yield from (_too_long(span, number) for number in numbers)
            return
        try:
            lines = self.whole(block).removesuffix(b"\n").split(b"\n")
            if len(lines) != span.lines:
                raise LostError(
                    f"is lost: its block has {len(lines)} lines and had {span.lines} (a run reads a file as it was at the start)"
                )
        except LostError as error:
            yield from (error.bad(f"data.path: {path} line {number}") for number in numbers)
            return
        for number, line in zip(numbers, lines[start:], strict=True):
            yield record_of_line(path, number, line)


def record_of_line(path: Path, number: int, line: bytes) -> Record:
    """Return the record in `line`, the `number`th line of `path`."""
    where = f"data.path: {path} line {number}"
    line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    problem = decoded_problem(line) or ("" if line.strip() else "is blank (each line holds one JSON object)")
    if problem:
        return Bad(where, problem)
    try:
        value = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        return Bad(where, f"is not JSON ({error.msg.removesuffix(' at')} at column {error.colno})")
    # a number of too many digits ends in a ValueError, one that is nested too deeply ends in a RecursionError
    except (ValueError, RecursionError) as error:
        return Bad(where, f"is not JSON ({error})")
    if not isinstance(value, dict):
        return Bad(where, f"holds {type_of(value)} (each line holds one JSON object)")
    if TEXT_FIELD not in value:
        return Bad(where, f"has no field {TEXT_FIELD!r} (it has {_few(value)})")
    return document_of(f"{path}:{number}", where, value[TEXT_FIELD], of=f" of field {TEXT_FIELD!r}")


def _too_long(span: _Span, number: int) -> Bad:
    """Return the bad record for line `number` of a block that is too large to be read."""
    size = f"{span.stop - span.start:,} bytes"
    which = (
        f"has {size}"
        if span.lines == 1
        else f"is read with lines {span.first_line} to {span.first_line + span.lines - 1}, which have {size}"
    )
    rule = f"the rule: at most {MOST_TOGETHER:,}, because lines of a streamed file are read whole"
    return Bad(f"data.path: {span.file.path} line {number}", f"{which} ({rule})", advice="cut the longest line into several records")


def _few(value: dict[str, object]) -> str:
    names = [repr(name[:40]) for name in itertools.islice(value, 5)]
    return ", ".join(names) + (", ..." if len(value) > len(names) else "") or "none"


def _spans_of(file: LocalFile) -> Iterator[_Span]:
    """Yield the blocks of `file`; an empty one is one block that stops at 0."""
    start = lines = position = last_end = crc = 0
    first_line = 1
    for chunk, ends in _line_ends(file.path):
        # `done`: how many bytes of the chunk belong to whole blocks
        at = done = 0
        while at < len(ends):
            # the line that is the last one allowed, or that reaches the size
            last = min(at + LINES_PER_BLOCK - lines - 1, int(np.searchsorted(ends, start + BYTES_PER_BLOCK)))
            if last >= len(ends):
                lines += len(ends) - at
                break
            lines, stop = lines + last + 1 - at, int(ends[last])
            yield _Span(file, start, stop, first_line, lines, hash_of([chunk[done : stop - position]], crc))
            done, first_line, lines, start, crc, at = stop - position, first_line + lines, 0, stop, 0, last + 1
        crc = zlib.crc32(chunk[done:], crc)
        position += len(chunk)
        last_end = int(ends[-1]) if len(ends) else last_end
    if start < position or position == 0:
        # the last line may lack its newline
        yield _Span(file, start, position, first_line, lines + (position > last_end), hash_of([], crc))


def _line_ends(path: Path) -> Iterator[tuple[memoryview, NDArray[np.int64]]]:
    """Yield `path` in chunks, with the offsets in the file at which their lines end."""
    position = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield memoryview(chunk), np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE) + 1 + position
                position += len(chunk)
    except OSError as error:
        raise unreadable(path, error) from None
