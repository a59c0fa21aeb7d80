"""Local files: names and globs to files, the state of each file at the start of a run, and the base class of their blocks."""

import errno
import glob
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nsa_train.data.sources.base import Bad, Reading
from nsa_train.errors import DataError
from nsa_train.files import IrregularFileError, open_regular

Hashes = NDArray[np.uint32]
"""(blocks,): the hash of each block; 0 if it is unknown"""
MOST_DROPPED = 10_000
"""Maximum names of one pattern for files that it has already matched; more names, if also above ten times the files, mean circular links."""
_PIECE = 2**20


class BlockHashes:
    """The hashes of the blocks of one corpus."""

    def __init__(self, count: int) -> None:
        self.found: Hashes = np.zeros(count, np.uint32)
        """The hashes of the blocks that this process has read"""
        self.expected: Hashes = np.zeros(count, np.uint32)
        """The hashes of the blocks that the run had read at the checkpoint from which it resumes"""

    def add(self, block: int, value: int, where: str) -> None:
        """Record `value` of `block`; `where` names it in messages.

        Raises:
            DataError: if the run of the checkpoint read other bytes there.
        """
        if self.expected[block] not in (0, value):
            raise changed(where)
        self.found[block] = value


def hash_of(content: Iterable[bytes | memoryview], crc: int = 0) -> int:
    """Return the CRC-32 of `content`, or 1 if that is 0; `crc` is the CRC-32 of the bytes before it.

    It detects an edit as reliably as 32 bits of any other hash, and is the fastest.
    """
    for piece in content:
        crc = zlib.crc32(piece, crc)
    return crc or 1


def changed(where: str) -> DataError:
    """Return the error for a block whose bytes differ from those at the checkpoint."""
    return DataError(
        f"{where} changed after the run of the checkpoint read it (a run goes on in the data that it began with); "
        "put the file back as it was, or start a new run in another --out"
    )


class LostError(Exception):
    """Raised if bytes of a file can no longer be read; the message says why, and follows the name of the record or block in a sentence."""

    def bad(self, where: str) -> Bad:
        """Return a bad record for the lost record `where`."""
        return Bad(where, str(self), is_loss=True, advice="put the file back as it was and start again")


class LocalFile(NamedTuple):
    """A file in the state in which the run found it. It is read as long as it does not change."""

    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: tuple[int, int]

    @classmethod
    def found(cls, path: Path) -> "LocalFile":
        """Return the present state of `path`.

        Raises:
            DataError: if it is no longer there.
        """
        try:
            return cls._of(path, path.stat())
        except OSError as error:
            raise unreadable(path, error) from None

    @classmethod
    def _of(cls, path: Path, now: os.stat_result) -> "LocalFile":
        return cls(path, now.st_size, now.st_mtime_ns, now.st_ctime_ns, (now.st_dev, now.st_ino))

    def require_same(self, now: os.stat_result | None = None) -> None:
        """Check that the file has not changed; `now`: the status of the open file, if the caller has it.

        Raises:
            LostError: if it changed, or is gone.
        """
        try:
            current = self._of(self.path, now or self.path.stat())
        except OSError as error:
            raise _lost(error) from None
        if change := self._change(current):
            raise LostError(f"is lost: the file changed after it was opened, {change} (a run reads a file as it was at the start)")

    def pieces(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes `start` .. `stop` - 1, a few at a time.

        Raises:
            LostError: if the file is gone or cannot be read; after the last byte, if it has changed.
        """
        left = stop - start
        try:
            with open_regular(self.path, None) as file:
                file.seek(start)
                while left > 0 and (piece := file.read(min(left, _PIECE))):
                    left -= len(piece)
                    yield piece
                now = os.fstat(file.fileno())
        except (OSError, IrregularFileError) as error:
            raise _lost(error) from None
        # after reading, so that changes before and during the read are found
        self.require_same(now)
        if left > 0:
            raise LostError(f"cannot be read (the file ends {left} bytes early)")

    def _change(self, now: "LocalFile") -> str:
        if now.size != self.size:
            return f"its size was {self.size:,} bytes and is {now.size:,}"
        if now.mtime_ns != self.mtime_ns:
            return f"it was modified at {_time(now.mtime_ns)} ({_time(self.mtime_ns)} before)"
        # either one alone proves nothing: some network file systems renumber files, and a chmod or a new hard link changes ctime
        if now.inode != self.inode and now.ctime_ns != self.ctime_ns:
            return "another file has its name now"
        return ""


class FileBlocks:
    """Blocks of local files."""

    hashes: BlockHashes | None = None
    """None until they are kept"""
    num_bytes: int
    """Size of all blocks, as they are stored"""
    is_salvaging: bool = False
    """True: if a file has changed, those of its blocks whose bytes are known to be the same are still read"""

    def __len__(self) -> int:
        raise NotImplementedError

    def keep_hashes(self, *, is_salvaging: bool) -> None:
        """Record the hashes of the blocks that are read from now on."""
        self.hashes, self.is_salvaging = BlockHashes(len(self)), is_salvaging

    @property
    def kept(self) -> BlockHashes:
        """The hashes; only for blocks that keep them."""
        assert self.hashes is not None, "a streamed corpus keeps hashes"
        return self.hashes

    def where(self, block: int) -> str:
        """Return words that name the file of `block` and its part."""
        raise NotImplementedError

    def content(self, block: int) -> Iterator[bytes]:
        """Yield the bytes of `block`.

        Raises:
            LostError: if they can no longer be read.
        """
        raise NotImplementedError

    def record_hash(self, block: int) -> None:
        """Record the hash of `block`, once in a process; after that, size and time of the file show whether it changed.

        Raises:
            DataError: if the run that is resumed had read other bytes there.
            LostError: if they can no longer be read.
        """
        if self.hashes is not None and not self.hashes.found[block]:
            self.hashes.add(block, hash_of(self.content(block)), self.where(block))

    def whole(self, block: int) -> bytes:
        """Return the bytes of `block`, and record their hash.

        Raises:
            DataError: if the run that is resumed had read other bytes there.
            LostError: if they can no longer be read.
        """
        pieces, lost = list[bytes](), None
        try:
            pieces.extend(self.content(block))
        except LostError as error:
            lost = error
        if self.hashes is not None:
            value, known = hash_of(pieces), int(self.hashes.found[block])
            if self.is_salvaging and known == value:
                lost = None
            elif known not in (0, value):
                lost = lost or LostError("is lost: its block holds other bytes than before (a run reads a file as it was at the start)")
            if not lost:
                self.hashes.add(block, value, self.where(block))
        if lost:
            raise lost
        return b"".join(pieces)


def files_of(patterns: Iterable[str], reading: Reading) -> list[Path]:
    """Return the files that names and globs match, sorted within each pattern, every file once, however many names it has.

    `reading` gets the names that are dropped: links, also hard ones, to a file that is already in the list.

    Raises:
        DataError: if a pattern matches nothing, or a name is not a readable regular file.
    """
    kept: dict[object, Path] = {}
    for pattern in patterns:
        reading.shard = pattern
        names = _names_of(pattern)
        files = {path: identity for path, identity in names.items() if len(names) == 1 or not path.is_dir()}
        if not files:
            raise DataError(f"data.path: {pattern!r} matches {len(names)} folders and no file; name files, such as '{pattern}/*'")
        own: dict[object, Path] = {}
        # of the names that lead to a file, keep the one with the fewest folders
        for path, identity in sorted(files.items(), key=lambda item: (not item[0].is_file(), len(item[0].parts))):
            own.setdefault(identity, path)
        for path, identity in files.items():
            if path == own[identity]:
                _require_regular(path)
                kept.setdefault(identity, path)
        reading.dropped += [(path, kept[identity]) for path, identity in files.items() if path != kept[identity]]
    return list(kept.values())


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error that names `path` and the system's message."""
    return DataError(f"data.path: {path} cannot be read ({error.strerror or error}); name a readable file or a glob")


def _names_of(pattern: str) -> dict[Path, object]:
    """Return name -> identity of the files that `pattern` matches, sorted by name; names of one file have equal identities."""
    found: dict[str, object] = {}
    identities: set[object] = set()
    for name in glob.iglob(pattern, recursive=True):
        found[name] = _identity(name)
        identities.add(found[name])
        # only two links to their own folder make 2**40 names
        if len(found) - len(identities) > max(MOST_DROPPED, 10 * len(identities)):
            raise DataError(
                f"data.path: {pattern!r} matches {len(found):,} names of {len(identities):,} files, and more (folders hold links to folders "
                "above them); remove those links, or use a glob without '**'"
            )
    if any(isinstance(identity, Place) for identity in found.values()):
        # the same entry of the same folder, by a name with fewer links
        shorter: dict[object, object] = {_place_of(name): identity for name, identity in found.items() if not isinstance(identity, Place)}
        found = {name: shorter.get(identity, identity) for name, identity in found.items()}
    return {Path(name): found[name] for name in sorted(found)} or {Path(pattern): pattern}


class Place(NamedTuple):
    """An entry of a folder: the identity of a name with more links than the system follows."""

    folder: object
    entry: str


def _place_of(name: str) -> Place:
    return Place(_identity(str(Path(name).parent)), Path(name).name)


def _identity(name: str) -> object:
    try:
        status = Path(name).stat()
    except OSError as error:
        return _place_of(name) if error.errno == errno.ELOOP and Path(name).parent != Path(name) else name
    except ValueError:
        return name
    return status.st_dev, status.st_ino


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


def _lost(error: OSError | IrregularFileError) -> LostError:
    return LostError(f"cannot be read ({getattr(error, 'strerror', None) or error})")


def _time(stamp_ns: int) -> str:
    try:
        return datetime.fromtimestamp(stamp_ns / 1e9).astimezone().isoformat(" ", "milliseconds")
    # a year out of range
    except (OSError, OverflowError, ValueError):
        return f"{stamp_ns} ns after 1970"
