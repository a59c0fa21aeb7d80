"""The parts of every source: blocks of records. A record is a document or a failure to read one."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from nsa_core.errors import type_of
from nsa_train.errors import DataError

TEXT_FIELD = "text"
"""The field of a JSONL record, and the column of a Parquet file, that holds the text."""

_NEWLINE = b"\n"
T = TypeVar("T")


class Document(NamedTuple):
    """One document: its name, for messages, and its text as UTF-8."""

    name: str
    text: bytes


class Bad(NamedTuple):
    """A record that could not be read: where (file, and line or row), why, and how many records are lost with it."""

    where: str
    why: str
    lost: int = 1
    is_passing: bool = False
    """True for a transient failure: a retry may succeed"""
    is_loss: bool = False
    """True if the record was lost because its file changed, or could no longer be read, during the run. It counts once, when the loss is found"""
    is_end: bool = False
    """True if the rest of the block is lost with it: each reader of a shared block reaches the end at its own record"""
    advice: str = "fix or remove it"

    def __str__(self) -> str:
        records = f" ({self.lost} records)" if self.lost > 1 else ""
        return f"{self.where}{records} {self.why}; {self.advice}, or use --set data.on_bad_record=skip"


Record = Document | Bad


class Reading:
    """The shard that each thread is reading, which a message about a wait names, and the file names that were left out."""

    def __init__(self) -> None:
        self.dropped: list[tuple[Path, Path]] = []
        """Names that were left out, each with the name of the same file that was kept"""
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

    def describe_dropped(self) -> str:
        """Return a sentence on the file names that were left out; empty if none was."""
        if not self.dropped:
            return ""
        count, (path, kept) = len(self.dropped), self.dropped[0]
        names = "1 file name is" if count == 1 else f"{count:,} file names are"
        return f"{names} dropped (links to files that are there already; each file is read once an epoch); the first: {path} is {kept}"


class Blocks(Protocol):
    """A corpus in blocks that can be read in any order, each from any record on; reading again gives the same records."""

    size_bytes: int
    """Size of the text, as far as it is known without reading it."""

    def __len__(self) -> int:
        """Return the number of blocks."""

    def read(self, block: int, start: int = 0) -> Iterator[Record]:
        """Yield the records of `block` from number `start` on."""


class StripedBlocks:
    """Blocks that are split into parts: for each of `blocks`, one part has records 0, turns, 2 turns, ..., the next 1, turns + 1, ...

    This is for a corpus with fewer blocks than readers; every part skips the records of the others.
    """

    def __init__(self, blocks: Blocks, turns: int) -> None:
        self._blocks, self._turns = blocks, turns
        self.size_bytes = blocks.size_bytes

    def __len__(self) -> int:
        return len(self._blocks) * self._turns

    def read(self, block: int, start: int = 0) -> Iterator[Record]:
        """Yield the records of part `block` from number `start` of it on."""
        turn, number = divmod(block, len(self._blocks))
        for index, record in enumerate(self._blocks.read(number, start * self._turns + turn)):
            if index % self._turns == 0 or (isinstance(record, Bad) and record.is_end):
                yield record


def document_of(name: str, where: str, text: object, *, of: str = "") -> Record:
    """Return the document `name` of a text field's value; a bad record if the value is not a string, or UTF-8 cannot encode it."""
    if not isinstance(text, str):
        return Bad(where, f"has {type_of(text)} in field {TEXT_FIELD!r} (it must hold a string)")
    try:
        return Document(name, text.encode("utf-8"))
    except UnicodeEncodeError as error:
        return Bad(where, f"cannot be written as UTF-8 (a lone surrogate at character {error.start}{of})")


def documents_of(records: Iterable[Record], policy: str, note: Callable[[Bad], object]) -> Iterator[Document]:
    """Yield the documents among `records`, and pass the bad records to `note`.

    Raises:
        DataError: at a bad record, if `policy` (the value of `data.on_bad_record`) is "fail".
    """
    for record in records:
        if isinstance(record, Document):
            yield record
        elif policy == "fail":
            raise DataError(str(record))
        else:
            note(record)


def first_skipped(bad: Sequence[Bad]) -> str:
    """Return the end of a message that names the first of the skipped records `bad`; empty if there is none."""
    return f"; the first that was skipped: {bad[0].where} {bad[0].why}" if bad else ""


def decoded_problem(text: bytes, *, is_file: bool = False) -> str | None:
    """Return why `text` is not UTF-8, with the byte, and the line of a file; None if it is."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = f", line {text.count(_NEWLINE, 0, error.start) + 1}" if is_file else ""
        return f"is not UTF-8 (byte 0x{text[error.start]:02x} at offset {error.start}{line})"
    return None


class LateError(DataError):
    """Raised if data of `shard` did not come within `seconds`; `option` sets that limit."""

    def __init__(self, seconds: float, shard: str, *, option: str = "data.timeout_s") -> None:
        super().__init__(
            f"data: nothing came within {seconds:g} s (reading {shard}); look at that shard, or wait longer with a larger {option}"
        )
        self.seconds, self.shard = seconds, shard


def within(seconds: float, work: Callable[[], T], reading: Reading) -> T:
    """Return the result of `work`, which runs in a thread; the thread is abandoned when the time is over.

    Raises:
        LateError: after `seconds`, naming the shard that was being read.
    """
    found: Future[T] = Future()

    def attempt() -> None:
        try:
            found.set_result(work())
        # any error is raised again below, in the caller's thread
        except BaseException as error:  # noqa: BLE001
            found.set_exception(error)

    thread = threading.Thread(target=attempt, name="nsa-data-open", daemon=True)
    thread.start()
    if not wait([found], seconds).done:
        raise LateError(seconds, reading.of(thread))
    return found.result()
