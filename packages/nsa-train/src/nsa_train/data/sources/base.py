"""What every source is made of: blocks of records, a record being a document or what could not be read."""

import glob
import stat
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from nsa_train.errors import DataError

TEXT_FIELD = "text"
"""The field of a JSONL record, and the column of a Parquet file, that holds the text."""

_NEWLINE = b"\n"


class Document(NamedTuple):
    """One document: its name, for messages, and its text as UTF-8."""

    name: str
    text: bytes


class Bad(NamedTuple):
    """What could not be read: where (file, and line or row), why, and how many records are lost with it."""

    where: str
    why: str
    lost: int = 1
    is_passing: bool = False
    """Of the way to it, not of the record: read again, it may be whole"""

    def __str__(self) -> str:
        records = f" ({self.lost} records)" if self.lost > 1 else ""
        return f"{self.where}{records} {self.why}; mend or remove it, or use --set data.on_bad_record=skip"


Record = Document | Bad


class Reading:
    """The shard that each thread is reading right now: what a message about a wait names."""

    def __init__(self) -> None:
        self._shards: dict[int | None, str] = {}
        self._last = "nothing yet"

    @property
    def shard(self) -> str:
        """The shard that was begun last, by any thread."""
        return self._last

    @shard.setter
    def shard(self, name: str) -> None:
        self._shards[threading.get_ident()] = self._last = name

    def of(self, thread: threading.Thread | None) -> str:
        """Return the shard that `thread` began last."""
        return self._shards.get(thread.ident if thread else None, self._last)


class Blocks(Protocol):
    """A corpus in blocks that can be read in any order, each from any record on; reading again gives the same records."""

    size_bytes: int
    """Size of the text, as far as it is known without reading it."""

    def __len__(self) -> int:
        """Return the number of blocks."""

    def read(self, block: int, start: int = 0) -> Iterator[Record]:
        """Yield the records of `block` from number `start` on."""


class StripedBlocks:
    """Blocks that are read by turns: of each of `blocks`, one part has records 0, turns, 2 turns, ..., the next 1, turns + 1, ...

    For a corpus with fewer blocks than readers; every part reads over the records of the others.
    """

    def __init__(self, blocks: Blocks, turns: int) -> None:
        self._blocks, self._turns = blocks, turns
        self.size_bytes = blocks.size_bytes

    def __len__(self) -> int:
        return len(self._blocks) * self._turns

    def read(self, block: int, start: int = 0) -> Iterator[Record]:
        """Yield the records of part `block` from number `start` of it on."""
        turn, number = divmod(block, len(self._blocks))
        yield from islice(self._blocks.read(number, start * self._turns + turn), None, None, self._turns)


def files_of(patterns: Iterable[str]) -> list[Path]:
    """Return the files that names and globs stand for, sorted within each, every file once.

    Raises:
        DataError: when a pattern matches nothing, or a name is no readable regular file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        names = sorted(glob.glob(pattern, recursive=True))
        paths = [Path(name) for name in names] or [Path(pattern)]
        files = paths if len(paths) == 1 else [path for path in paths if not path.is_dir()]
        if not files:
            raise DataError(f"data.path: {pattern!r} matches {len(paths)} folders and no file; name files, such as '{pattern}/*'")
        for path in files:
            _require_regular(path)
            found[path] = None
    return list(found)


def decoded_problem(text: bytes, *, is_file: bool = False) -> str | None:
    """Return what stands against `text` as UTF-8, with the byte, and of a file the line; None if nothing does."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = f", line {text.count(_NEWLINE, 0, error.start) + 1}" if is_file else ""
        return f"is not UTF-8 (byte 0x{text[error.start]:02x} at offset {error.start}{line})"
    return None


def read_bytes(path: Path) -> bytes:
    """Return the content of `path`.

    Raises:
        DataError: when it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error that names `path` and what the system says of it."""
    return DataError(f"data.path: {path} cannot be read ({error.strerror or error}); name a readable file or a glob")


def _require_regular(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            path.open("rb").close()
            return
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:
        raise DataError(f"data.path: {str(path)!r} cannot be read ({error}); name a readable file or a glob") from None
    kind = "Is a directory" if stat.S_ISDIR(mode) else "not a regular file"
    raise DataError(f"data.path: {path} cannot be read ({kind}); name a readable file or a glob")
