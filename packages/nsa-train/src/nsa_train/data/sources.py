"""Where documents come from, and which of them are held out. Everything is deterministic and sorted by name.

A document belongs to the validation split by a hash of its *content*, so that equal files never stand on both sides. A
single text file is cut by position instead: its last tenth is held out.
"""

import glob
import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

from nsa_train.config import DataTable
from nsa_train.errors import DataError

VALIDATION_PERCENT = 5
"""Share of documents held out, by hash."""
SINGLE_FILE_VALIDATION_PERCENT = 10
"""Share of a single file held out: its end."""
STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders of the standard library that are not part of the corpus: tests, and what others installed."""


class Document(NamedTuple):
    """One document: its name, for messages, and its bytes."""

    name: str
    text: bytes


class Corpus(NamedTuple):
    """The two splits, disjoint."""

    train: list[Document]
    val: list[Document]


def read_corpus(data: DataTable) -> Corpus:
    """Return the documents that table `data` names, split.

    Raises:
        DataError: naming the file that is missing, empty or unreadable.
    """
    if data.source == "stdlib":
        return split_by_content(read_stdlib())
    assert data.path is not None, "DataTable refuses source 'text' without a path"
    documents = read_text(data.path)
    return split_by_position(documents[0]) if len(documents) == 1 else split_by_content(documents)


def read_stdlib() -> list[Document]:
    """Return the standard library's *.py sources without its tests, named by their path below it.

    Files without content, such as many `__init__.py`, are no documents.

    Raises:
        DataError: when this Python comes without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if not STDLIB_SKIPPED.intersection(path.relative_to(root).parts)]
    documents = [Document(path.relative_to(root).as_posix(), _read(path)) for path in paths]
    documents = [document for document in documents if document.text]
    if len(documents) < 2:
        raise DataError(
            f"{root} holds {len(documents)} *.py files (data.source='stdlib' needs this Python's own sources); "
            "use --set data.source=text --set data.path=FILE"
        )
    return documents


def read_text(pattern: str) -> list[Document]:
    """Return the documents of a file or of every file that a glob matches.

    Raises:
        DataError: when nothing matches, or a file is empty or unreadable.
    """
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))] or [Path(pattern)]
    documents = [Document(str(path), _read(path)) for path in paths if len(paths) == 1 or not path.is_dir()]
    empty = [document.name for document in documents if not document.text]
    if empty or not documents:
        names = ", ".join(empty) or pattern
        raise DataError(f"data.path: {names} is empty (a document holds at least one byte); remove it or name another file")
    return documents


def split_by_content(documents: list[Document]) -> Corpus:
    """Return `documents` split by a hash of their bytes; each side gets at least one distinct document.

    Raises:
        DataError: when all documents are equal, so that nothing could be held out.
    """
    ranks = {document.text: int(hashlib.sha256(document.text).hexdigest()[:8], 16) for document in documents}
    if len(ranks) < 2:
        raise DataError(
            f"data.path: {documents[0].name} and the {len(documents) - 1} other files are equal (train and validation must "
            "differ); name one of them alone, or files that differ"
        )
    limit = 2**32 * VALIDATION_PERCENT // 100
    ordered = sorted(ranks.values())
    # the smallest hash is always held out and the largest never, however few the documents
    limit = min(max(limit, ordered[0] + 1), ordered[-1])
    held_out = [ranks[document.text] < limit for document in documents]
    return Corpus(
        train=[document for document, out in zip(documents, held_out, strict=True) if not out],
        val=[document for document, out in zip(documents, held_out, strict=True) if out],
    )


def split_by_position(document: Document) -> Corpus:
    """Return the first nine tenths of `document` for training, the rest held out.

    Raises:
        DataError: when it is too short to be cut.
    """
    cut = len(document.text) * (100 - SINGLE_FILE_VALIDATION_PERCENT) // 100
    if cut == 0:
        raise DataError(f"data.path: {document.name} holds 1 byte (it is cut into train and validation); name a longer file")
    return Corpus(
        train=[Document(f"{document.name}[:{cut}]", document.text[:cut])],
        val=[Document(f"{document.name}[{cut}:]", document.text[cut:])],
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"data.path: {path} cannot be read ({error.strerror}); name a readable file or a glob") from None
