"""Sources `stdlib` and `text`: every file is one document and one block."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from nsa_train.data.sources.base import Bad, Document, Reading, Record, decoded_problem
from nsa_train.data.sources.files import FileBlocks, LocalFile, LostError
from nsa_train.errors import DataError

STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders of the standard library that are not part of the corpus: tests, and packages that others installed."""


class WholeFiles(FileBlocks):
    """Files, each of which is one block."""

    def __init__(self, paths: list[Path], reading: Reading) -> None:
        self.paths, self._reading = paths, reading
        self._files = [LocalFile.found(path) for path in paths]
        self.size_bytes = self.num_bytes = sum(file.size for file in self._files)

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, block: int) -> str:
        """Return the file of `block`."""
        return f"data.path: {self.paths[block]}"

    def content(self, block: int) -> Iterator[bytes]:
        """Yield the bytes of file `block`."""
        file = self._files[block]
        return file.pieces(0, file.size)


class _Texts(WholeFiles):
    """Files, each of which is one document, or none."""

    def read(self, block: int, start: int = 0) -> Iterator[Record]:
        """Yield the one record of file `block`, unless `start` is after it."""
        if start:
            return
        self._reading.shard = str(self.paths[block])
        try:
            record = self._record(block, self.whole(block))
        except LostError as error:
            record = error.bad(self.where(block))
        if record is not None:
            yield record

    def _record(self, block: int, text: bytes) -> Record | None:
        raise NotImplementedError


class TextBlocks(_Texts):
    """Local text files."""

    def _record(self, block: int, text: bytes) -> Record:
        problem = decoded_problem(text, is_file=True) if text else "is empty (a document holds at least one byte)"
        return Bad(self.where(block), problem) if problem else Document(str(self.paths[block]), text)


class StdlibBlocks(_Texts):
    """The standard library's *.py sources without its tests, named by their path below it.

    Files without content, such as many `__init__.py`, and files that are not UTF-8 are not documents.
    """

    def __init__(self, reading: Reading) -> None:
        """Find the files.

        Raises:
            DataError: if this Python comes without sources.
        """
        self.root = Path(sysconfig.get_path("stdlib"))
        found = [path for path in sorted(self.root.rglob("*.py")) if not STDLIB_SKIPPED.intersection(path.relative_to(self.root).parts)]
        super().__init__([path for path in found if path.stat().st_size], reading)
        if len(self.paths) < 2:
            raise DataError(
                f"{self.root} holds {len(self.paths)} *.py files (data.source='stdlib' needs this Python's own sources); "
                "use --set data.source=text --set data.path=FILE"
            )

    def _record(self, block: int, text: bytes) -> Record | None:
        name = self.paths[block].relative_to(self.root).as_posix()
        return None if decoded_problem(text) else Document(name, text)
