"""Read and write files safely in a directory that others can write to: only small regular files are read, and writes are atomic.

Opening a named pipe would wait forever, and reading a device or a sparse file would fill the memory.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

MOST_RECIPE = 64 * 2**10
"""Bytes of a recipe and of a config.toml."""
MOST_MANIFEST = 2**20
MOST_STATE = 128 * 2**20
"""Bytes of a checkpoint's state.json: 65,536 lanes take 40 MiB."""
MOST_JSON = 16 * 2**20
"""Bytes of env.json, to which every resume adds, and of metrics.json."""
MOST_TOKENIZER = 128 * 2**20
"""Bytes of a tokenizer.json, and of vocab.bpe and encoder.json; the largest that are in use take 35 MB."""
MOST_PICTURE = 16 * 2**20
"""Bytes of curves.png."""
MOST_SAMPLE = 2**20
"""Bytes of a text of samples/."""
MOST_RECORDS = 4 * 2**30
"""Bytes of a file that grows with every step: a heartbeat or a CSV table. Its lines are read one by one."""
MOST_LINE = 16 * 2**20
"""Bytes of one line of such a file; reading ends at a longer one."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a write for which there is no room; Python's own message has no file name."""
ASIDE = ".aside-"
"""Prefix of the name of a file that is being written; the file remains if the writer was killed."""
MOST_NAME = 200
"""Bytes of a file's own name that the name of its temporary file keeps; a system limits a name to 255."""
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class IrregularFileError(ValueError):
    """Raised if a path leads to something other than a regular file, or to a file that is too large; the message says which, without the path."""


@contextmanager
def open_regular(path: Path, most: int | None) -> Iterator[BufferedReader]:
    """Open the regular file `path` of at most `most` bytes (None: any size) for reading, and yield it; links are followed.

    Raises:
        IrregularFileError: at once, if it is something else; no device is opened.
        OSError: if it does not exist or cannot be read.
    """
    # checked before opening: a socket cannot be opened, and opening a device may have effects
    _require_regular(path.stat(), most)
    # the file may have been replaced since; without O_NONBLOCK, opening a pipe would wait
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _require_regular(os.fstat(file.fileno()), most)
        yield file


def broken_link(path: Path) -> Path | None:
    """Return the first of `path` and the folders above it that is a link to nothing; None if there is none."""
    return next((folder for folder in (path, *path.absolute().parents) if folder.is_symlink() and not folder.exists()), None)


def nearest_existing(path: Path) -> Path:
    """Return `path` if it exists, else the nearest existing directory above it."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def read_regular(path: Path, most: int) -> bytes:
    """Return the content of the regular file `path`, at most `most` bytes.

    Raises:
        IrregularFileError: if it is something else, or larger.
        OSError: if it does not exist or cannot be read.
    """
    with open_regular(path, most) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise IrregularFileError(_refused("is larger than it says", most))
    return content


def refusal(path: Path, most: int) -> str:
    """Return why `path` cannot be read; empty if it can, or if it does not exist."""
    try:
        with open_regular(path, most):
            return ""
    except FileNotFoundError:
        return ""
    except (IrregularFileError, OSError) as error:
        return str(error)


def as_text(content: bytes, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return `content` decoded, with every line end as a newline, as in a file opened as text.

    Raises:
        UnicodeDecodeError: if it is not of that encoding.
    """
    return TextIOWrapper(BytesIO(content), encoding=encoding, errors=errors).read()


def parse_json(content: bytes) -> Any:
    """Return the value of a UTF-8 JSON text.

    Raises:
        ValueError: if it is not JSON, or nests too deep.
    """
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write a file to; it is renamed to `path` if the block ends without an error.

    An existing `path` is replaced and never opened, so that no pipe blocks and no link is followed. Each process has a temporary file of its
    own, so that of two writers the last one wins. An error of the disk names `path`.
    """
    # the end of the name, because it decides the format of a picture
    kept = os.fsencode(path.name)[-MOST_NAME:].decode(errors="ignore")
    aside = path.with_name(f"{ASIDE}{os.getpid()}-{kept}")
    aside.unlink(missing_ok=True)
    try:
        with naming(path, aside):
            yield aside
            aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path, aside: Path) -> Iterator[None]:
    """Let an error of the disk in the block that names `aside`, or no file, name `path`, the file that was asked for.

    Raises:
        OSError: also for the error of a library in Rust (safetensors, tokenizers), whose text holds the system's number.
    """
    try:
        yield
    except Exception as error:
        text, name = re.search(r"\(os error (\d+)\)", str(error)), getattr(error, "filename", None)
        number = int(text[1]) if text else getattr(error, "errno", None)
        if number and (text or str(name).startswith(str(aside)) or (name is None and number in FULL)):
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def _require_regular(found: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise IrregularFileError(_refused(f"is {_KINDS.get(stat.S_IFMT(found.st_mode), 'no regular file')}", most))
    if most is not None and found.st_size > most:
        raise IrregularFileError(_refused(f"has {found.st_size:,} bytes", most))


def _refused(what: str, most: int | None) -> str:
    if most is None:
        return f"it {what}, and only a regular file is read"
    unit, size = next((unit, size) for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1)) if most >= size)
    return f"it {what}, and only a regular file of at most {most // size} {unit} is read"
