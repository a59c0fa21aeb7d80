"""Source `parquet`: one document per row, with its text in the string column "text". A row group is a block."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nsa_train.data.sources.base import TEXT_FIELD, Bad, Document, Reading, Record, decoded_problem
from nsa_train.data.sources.files import FileBlocks, LocalFile, LostError
from nsa_train.errors import DataError

ROWS_AT_A_TIME = 256
"""Rows that are decoded together."""


class _Group(NamedTuple):
    """One row group of a file."""

    file: LocalFile
    number: int
    first_row: int
    """In the file, from 0"""
    rows: int


class ParquetBlocks(FileBlocks):
    """Local Parquet files. A file that cannot be opened, or has no such column, is a block with one bad record."""

    def __init__(self, paths: list[Path], reading: Reading) -> None:
        """Read the footers.

        Raises:
            DataError: if pyarrow is not installed.
        """
        self._reading = reading
        self._blocks: list[_Group | Bad] = []
        self.size_bytes = self.num_bytes = 0
        for path in paths:
            reading.shard = str(path)
            self._blocks += self._groups_of(path)

    def __len__(self) -> int:
        return len(self._blocks)

    def where(self, block: int) -> str:
        """Return file and row group of `block`."""
        group = self._blocks[block]
        return group.where if isinstance(group, Bad) else f"data.path: {group.file.path} row group {group.number}"

    def content(self, block: int) -> Iterator[bytes]:
        """Yield the values of the text column in row group `block`, with their lengths; nothing for a file that is a bad record."""
        group = self._blocks[block]
        if isinstance(group, Bad):
            return
        # not the file's bytes: with a damaged footer, pyarrow crashes the process when asked for a column's offset
        for values in _column_parts(group):
            if not isinstance(values, Bad):
                yield b"".join(b"none" if value is None else b"%d:%b" % (len(value), value) for value in values)
        group.file.require_same()

    def read(self, block: int, start: int = 0) -> Iterator[Record]:
        """Yield the records of row group `block` from its row `start` on; a bad one for each row that a changed file loses."""
        group = self._blocks[block]
        if isinstance(group, Bad):
            yield from [group][start:]
            return
        path = group.file.path
        self._reading.shard = f"{path} row group {group.number}"
        index = 0
        try:
            self.record_hash(block)
            for values in _column_parts(group):
                group.file.require_same()
                if isinstance(values, Bad):
                    # rows read before the damage are kept; those after it are lost together
                    lost = group.rows - index
                    if start <= index:
                        yield values._replace(lost=lost)
                    return
                for value in values:
                    if index >= start:
                        yield _record_of(path, group.first_row + index, value)
                    index += 1
        except LostError as error:
            for row in range(max(start, index), group.rows):
                yield error.bad(f"data.path: {path} row {group.first_row + row}")

    def _groups_of(self, path: Path) -> list[_Group | Bad]:
        arrow = _pyarrow()
        where = f"data.path: {path}"
        found = LocalFile.found(path)
        if found.size == 0:
            return [Bad(where, "is empty (a Parquet file has a footer at least)")]
        try:
            with arrow.parquet.ParquetFile(path) as file:
                metadata, schema = file.metadata, file.schema_arrow
                rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
                size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
        except (arrow.ArrowException, OSError, ValueError) as error:
            return [Bad(where, f"is not a whole Parquet file ({_first_line(error)})")]
        problem = _schema_problem(schema)
        if problem:
            return [Bad(where, problem, max(1, sum(rows)))]
        if not any(rows):
            return [Bad(where, "holds no row")]
        self.size_bytes += max(size, found.size)
        self.num_bytes += found.size
        return [_Group(found, number, sum(rows[:number]), count) for number, count in enumerate(rows) if count > 0]


def _schema_problem(schema: Any) -> str | None:
    types = _pyarrow().types
    if schema.names.count(TEXT_FIELD) != 1:
        return f"has no column {TEXT_FIELD!r} (it has {', '.join(map(repr, schema.names[:5])) or 'none'})"
    kind = schema.field(TEXT_FIELD).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        return f"has column {TEXT_FIELD!r} of type {kind} (it must hold strings)"
    return None


def _column_parts(group: _Group) -> Iterator[list[bytes | None] | Bad]:
    """Yield the values of the column, a few rows at a time, and what ended it early.

    Raises:
        LostError: if the file has changed.
    """
    arrow = _pyarrow()
    count = 0
    # before it is opened: a pipe would wait
    group.file.require_same()
    try:
        with arrow.parquet.ParquetFile(group.file.path) as file:
            for batch in file.iter_batches(ROWS_AT_A_TIME, row_groups=[group.number], columns=[TEXT_FIELD]):
                # as bytes: arrow does not check that its strings are UTF-8
                yield batch.column(0).cast(arrow.large_binary()).to_pylist()
                count += len(batch)
    except (arrow.ArrowException, OSError, ValueError) as error:
        where = f"data.path: {group.file.path} from row {group.first_row + count} on, in row group {group.number}"
        yield Bad(where, f"cannot be read ({_first_line(error)})")
        return
    if count < group.rows:
        where = f"data.path: {group.file.path} row group {group.number}"
        yield Bad(where, f"holds {count} rows (its footer says {group.rows})")


def _record_of(path: Path, row: int, value: bytes | None) -> Record:
    where = f"data.path: {path} row {row}"
    if value is None:
        return Bad(where, f"has no value in column {TEXT_FIELD!r}")
    problem = decoded_problem(value)
    return Bad(where, problem) if problem else Document(f"{path}:{row}", value)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            "data.source='parquet' needs pyarrow, which is not installed (Parquet is its format); "
            "use pip install pyarrow, or --set data.source=jsonl"
        ) from None
    return pyarrow
