"""Source `fineweb_edu`: Hugging Face `datasets`, streaming; local Parquet or JSONL shards come through the same code.

`datasets` only opens shards and reads them in order. Our own index decides which shard and row to read, because
its shuffle buffer loses rows on resume.
"""

import glob
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from nsa_train.data.sources.base import TEXT_FIELD, Bad, Reading, Record, document_of
from nsa_train.data.sources.files import LostError, files_of
from nsa_train.data.sources.jsonl import record_of_line
from nsa_train.data.sources.text import WholeFiles
from nsa_train.errors import DataError
from nsa_train.settings.data_table import DataTable

REPOSITORY = "HuggingFaceFW/fineweb-edu"
DEFAULT_SUBSET = "sample-10BT"
REACH_TIMEOUT_S = 10
"""Longest wait for the hub's first answer."""


class HubBlocks:
    """The shards of a streaming dataset."""

    size_bytes = 0

    def __init__(self, dataset: Any, reading: Reading) -> None:
        self._dataset, self._reading = dataset, reading
        self._shards = max(1, int(dataset.num_shards))

    def __len__(self) -> int:
        return self._shards

    def read(self, block: int, start: int = 0) -> Iterator[Record]:
        """Yield the records of shard `block` from number `start` on; one that breaks off ends with a bad record."""
        name = f"{REPOSITORY} shard {block} of {self._shards}"
        self._reading.shard = name
        # after a network failure the same rows may be available again
        for record in _until_broken(name, start, lambda: self._dataset.shard(num_shards=self._shards, index=block).skip(start)):
            if isinstance(record, Bad):
                yield record._replace(is_passing=True, is_end=True)
            else:
                yield _record_of(name, name, *record)


class LocalShards(WholeFiles):
    """Local files instead of the hub's shards. Each is opened by itself: the content of one file says nothing about the others."""

    def __init__(self, kind: str, paths: list[Path], reading: Reading) -> None:
        """`kind`: "parquet" or "jsonl"."""
        super().__init__(paths, reading)
        self._kind, self.size_bytes = kind, 0

    def read(self, block: int, start: int = 0) -> Iterator[Record]:
        """Yield the records of file `block` from number `start` on; one that breaks off, or changes, ends with a bad record."""
        file = self._files[block]
        self._reading.shard = str(file.path)
        number = start
        try:
            self.record_hash(block)
            # before it is opened: a pipe would wait
            file.require_same()
            for record in self._records(file.path, start) if file.size else [_empty(file.path)][start:]:
                file.require_same()
                yield record
                number += 1
            file.require_same()
        except LostError as error:
            # the number of its records is not known
            yield error.bad(f"{self.where(block)} from row {number} on")._replace(is_end=True)

    def _records(self, path: Path, start: int) -> Iterator[Record]:
        where = f"data.path: {path}"
        is_first = True
        for record in _until_broken(where, start, lambda: self._opened(path).skip(start)):
            if isinstance(record, Bad):
                # an unreadable part fails at any start: it counts as one record, at its own number
                if not is_first or start in (0, self._breaks_at(path)):
                    yield record
            elif self._kind == "jsonl":
                row, values = record
                yield record_of_line(path, row + 1, values[TEXT_FIELD])
            else:
                yield _record_of(where, str(path), *record)
            is_first = False

    def _breaks_at(self, path: Path) -> int:
        """Return the first row that a read of a damaged file from its start does not reach."""
        return sum(not isinstance(record, Bad) for record in _until_broken(str(path), 0, lambda: self._opened(path)))

    def _opened(self, path: Path) -> Any:
        # the readers below load_dataset, which contacts the hub at every call, and waits without a network
        from datasets import IterableDataset
        from datasets.io.parquet import ParquetDatasetReader

        if self._kind == "parquet":
            # it interprets names as globs
            return ParquetDatasetReader(glob.escape(str(path)), streaming=True).read()
        # raw lines for our own reader: arrow's JSON reader stops a shard at its first bad line, and crashed on
        # some; the text reader ends lines at carriage returns, which are white space within a record
        return IterableDataset.from_generator(_lines, gen_kwargs={"path": str(path)})


def open_hub(data: DataTable, reading: Reading) -> HubBlocks | LocalShards:
    """Return the shards of FineWeb-Edu, or of the local files that replace it.

    Raises:
        DataError: if they cannot be reached; the message lists the commands that would work.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            "data.source='fineweb_edu' needs the package datasets, which is not installed; use pip install datasets, "
            "or --set data.source=stdlib"
        ) from None
    if data.path is not None:
        return _local(data, reading)
    reading.shard = f"https://huggingface.co/datasets/{REPOSITORY}"
    subset = data.subset or DEFAULT_SUBSET
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(REPOSITORY, timeout=REACH_TIMEOUT_S)
        dataset = datasets.load_dataset(REPOSITORY, name=subset, split="train", streaming=True)
        dataset = dataset.select_columns([TEXT_FIELD])
        # a shard per row group, if this version of datasets supports it: more shards to shuffle
        return HubBlocks(dataset.reshard() if hasattr(dataset, "reshard") else dataset, reading)
    # there is no common error class: httpx, requests, and each package's own
    except Exception as error:  # noqa: BLE001
        raise DataError(
            f"data.source='fineweb_edu' cannot be reached ({_first_line(error)}): {REPOSITORY}, {subset}, is streamed from the hub, "
            "and no copy of it is kept here; any of these works: "
            f"--set data.path='fineweb/**/*.parquet' after `hf download {REPOSITORY} --repo-type dataset --include 'sample/10BT/*' "
            f"--local-dir fineweb` where there is a network; --set data.source=stdlib; --synthetic-on-fail"
        ) from None


def _local(data: DataTable, reading: Reading) -> LocalShards:
    paths = files_of(data.paths, reading)
    kinds = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl"}
    found = {kinds.get(path.suffix) for path in paths}
    if len(found) != 1 or None in found:
        raise DataError(
            f"data.path={str(paths[0])!r} and the others are not all .parquet or all .jsonl (data.source='fineweb_edu' reads shards of one kind); "
            "use a glob such as 'fineweb/**/*.parquet'"
        )
    empty = [path for path in paths if path.stat().st_size == 0]
    if empty and data.on_bad_record == "fail":
        # earlier than the order of the shards would reach it
        raise DataError(str(_empty(empty[0])))
    return LocalShards(str(found.pop()), paths, reading)


def _empty(path: Path) -> Bad:
    return Bad(f"data.path: {path}", "is empty (a shard holds at least one record)")


def _until_broken(where: str, start: int, rows: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[tuple[int, dict[str, Any]] | Bad]:
    """Yield number and values of each of the `rows`, which begin at number `start`, and a bad record if reading fails."""
    number = start
    try:
        for values in rows():
            yield number, values
            number += 1
    except Exception as error:  # noqa: BLE001
        # datasets has no common error: opening and reading raise those of pyarrow, fsspec, httpx and its own
        yield Bad(f"{where} from row {number} on", f"cannot be read ({_first_line(error)})")


def _lines(path: str) -> Iterator[dict[str, bytes]]:
    with Path(path).open("rb") as file:
        for line in file:
            yield {TEXT_FIELD: line.removesuffix(b"\n")}


def _record_of(where: str, name: str, row: int, values: dict[str, Any]) -> Record:
    at = f"{where} row {row}"
    if TEXT_FIELD not in values:
        return Bad(at, f"has no field {TEXT_FIELD!r} (it has {', '.join(map(repr, list(values)[:5]))})")
    return document_of(f"{name}:{row}", at, values[TEXT_FIELD])


def _first_line(error: BaseException) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = (str(cause).splitlines() or [""])[0][:200]
    return f"{type(cause).__name__}: {text}"
