"""Where documents come from: each source is a number of blocks of records, and which records are held out."""

from pathlib import Path

from nsa_train.data.sources.base import Bad, Blocks, Document, Reading, Record, StripedBlocks
from nsa_train.data.sources.files import FileBlocks, Hashes, LostError, changed, files_of
from nsa_train.data.sources.hub import open_hub
from nsa_train.data.sources.jsonl import JsonlBlocks
from nsa_train.data.sources.parquet import ParquetBlocks
from nsa_train.data.sources.text import StdlibBlocks, TextBlocks
from nsa_train.settings.data_table import DataTable

__all__ = [
    "Bad",
    "Blocks",
    "Document",
    "FileBlocks",
    "Hashes",
    "LostError",
    "Reading",
    "Record",
    "StripedBlocks",
    "TextBlocks",
    "changed",
    "files_of",
    "open_blocks",
    "open_files",
    "open_hub",
]


def open_blocks(data: DataTable, reading: Reading) -> Blocks:
    """Return the blocks of `data.source`, one of "stdlib", "text", "jsonl" and "parquet".

    Raises:
        DataError: naming the file that is missing or unreadable.
    """
    if data.source == "stdlib":
        return StdlibBlocks(reading)
    return open_files(data.source, files_of(data.paths, reading), reading)


def open_files(kind: str, paths: list[Path], reading: Reading) -> Blocks:
    """Return the blocks of local files of one `kind`: "text", "jsonl" or "parquet"."""
    if kind == "jsonl":
        return JsonlBlocks(paths, reading)
    if kind == "parquet":
        return ParquetBlocks(paths, reading)
    return TextBlocks(paths, reading)
