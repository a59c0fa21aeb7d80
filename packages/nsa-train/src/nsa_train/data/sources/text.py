"""Sources `stdlib` and `text`: every file is one document, and a block of its own."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from nsa_train.data.sources.base import Bad, Document, Reading, Record, decoded_problem, read_bytes
from nsa_train.errors import DataError

STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders of the standard library that are not part of the corpus: tests, and what others installed."""


class TextBlocks:
    """Local text files."""

    def __init__(self, paths: list[Path], reading: Reading) -> None:
        self.paths, self._reading = paths, reading
        self.size_bytes = sum(path.stat().st_size for path in paths)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, block: int, start: int = 0) -> Iterator[Record]:
        """Yield the one document of file `block`, unless `start` lies behind it."""
        if start:
            return
        path = self.paths[block]
        self._reading.shard = str(path)
        text = read_bytes(path)
        problem = decoded_problem(text, is_file=True) if text else "is empty (a document holds at least one byte)"
        yield Bad(f"data.path: {path}", problem) if problem else Document(str(path), text)


class StdlibBlocks:
    """The standard library's *.py sources without its tests, named by their path below it.

    Files without content, such as many `__init__.py`, and files that are not UTF-8 are no documents.
    """

    def __init__(self, reading: Reading) -> None:
        """Find the files.

        Raises:
            DataError: when this Python comes without sources.
        """
        self.root, self._reading = Path(sysconfig.get_path("stdlib")), reading
        found = [path for path in sorted(self.root.rglob("*.py")) if not STDLIB_SKIPPED.intersection(path.relative_to(self.root).parts)]
        self.paths = [path for path in found if path.stat().st_size]
        self.size_bytes = sum(path.stat().st_size for path in self.paths)
        if len(self.paths) < 2:
            raise DataError(
                f"{self.root} holds {len(self.paths)} *.py files (data.source='stdlib' needs this Python's own sources); "
                "use --set data.source=text --set data.path=FILE"
            )

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, block: int, start: int = 0) -> Iterator[Record]:
        """Yield the source of file `block`, unless `start` lies behind it."""
        path = self.paths[block]
        self._reading.shard = str(path)
        text = read_bytes(path)
        if start == 0 and not decoded_problem(text):
            yield Document(path.relative_to(self.root).as_posix(), text)
