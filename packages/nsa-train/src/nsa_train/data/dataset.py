"""Open a recipe's data: the rows or blocks that the lanes read, and the held-out part.

Local files that fit in `data.in_memory_mib`, and a single text of any size, are read whole, checked for bad records and tokenized, and
their rows are shuffled. Larger files and streamed corpora stay in place: lanes read their blocks, shuffled, and pack the documents themselves.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from nsa_train.data.blocks import SyntheticBlocks, TextTokenBlocks, scan_held_out
from nsa_train.data.lanes import BlockLane, BlockSequence, Lane, MixedRows, RowLane, RowSequence, ShuffledRows, TokenBlocks
from nsa_train.data.opened import Walk
from nsa_train.data.packing import IGNORED, Batch, BucketedRows, DrawnRows, PackedRows, Row, collate
from nsa_train.data.position import settings_of
from nsa_train.data.retrieval import Retrieval, retrieval_rows
from nsa_train.data.sources.base import Bad, Blocks, Document, Reading, StripedBlocks, documents_of, first_skipped, within
from nsa_train.data.sources.files import FileBlocks, LostError, files_of
from nsa_train.data.sources.hub import open_hub
from nsa_train.data.sources.jsonl import JsonlBlocks
from nsa_train.data.sources.parquet import ParquetBlocks
from nsa_train.data.sources.split import rank_of, shared, split
from nsa_train.data.sources.text import StdlibBlocks, TextBlocks
from nsa_train.data.tokenizer import Tokenizer, build_tokenizer
from nsa_train.errors import DataError
from nsa_train.settings.config import RunConfig
from nsa_train.settings.data_table import IDS, DataTable

FILE_BLOCKS: dict[str, Callable[[list[Path], Reading], Blocks]] = {"text": TextBlocks, "jsonl": JsonlBlocks, "parquet": ParquetBlocks}
"""Kind of local files -> their blocks."""
OPENINGS = 3
"""Number of held-out documents whose openings the model continues in samples."""
OPENING_BYTES = 32
"""Maximum bytes of each opening."""

FIXED_BATCHES = 16
"""Number of validation batches that define the split of a streamed corpus, independent of `train.eval_batches`, which a resume may change."""
HASHED_BYTES = 2**30
"""Maximum bytes of a corpus of local files that is read whole for the hashes of its blocks. In a larger one, each block is hashed when
it is first read. JSONL is read whole to count its lines, and is hashed then, at any size."""


class Part(NamedTuple):
    """One of the corpora that are mixed, and its weight."""

    blocks: Blocks
    weight: int
    pattern: str = ""
    """Its key in `data.mix`"""


@frozen(kw_only=True, eq=False)
class Dataset:
    """The data of a run. Build it with `open_dataset`; its streams share the data that were read."""

    config: RunConfig
    tokenizer: Tokenizer
    reading: Reading
    lane: Callable[[int], Lane]
    """Lane number -> a new lane at its start"""
    held_out: PackedRows | DrawnRows
    """The validation rows; for a streamed corpus, the first of them"""
    openings: tuple[bytes, ...] = ()
    """The beginnings of a few held-out documents, for samples"""
    bad_records: int = 0
    """Unreadable records of a corpus in memory; those of a streamed corpus are counted when reached"""
    first_bad: Bad | None = None
    shared: tuple[tuple[str, str], ...] = ()
    """Pairs of a held-out text and a training document that contains it; must be empty"""
    sizes: dict[str, int] = field(factory=dict)
    """The known sizes: documents and tokens of each side, blocks"""
    fingerprint: dict[str, Any] = field(factory=dict)
    """The settings and content on which a position depends: a position fits no other data"""
    walk: Walk | None = None
    """The order in which the blocks of streamed local files are opened"""

    @property
    def is_synthetic(self) -> bool:
        """Return whether the tokens are random."""
        return self.config.data.source == "synthetic"

    def validation_batches(self, lanes: range, *, most: int) -> list[Batch]:
        """Return rows `lanes` of at most `most` batches, spread evenly over the validation rows."""
        rows, size = self.held_out, self.config.train.batch_size
        count = min(len(rows), size * most)
        chosen = [index * len(rows) // count for index in range(count)]
        groups = [chosen[at : at + size][lanes.start : lanes.stop] for at in range(0, count, size)]
        # every rank takes part in every batch, even if the last one has too few rows
        padding = Row(np.full(rows.seq_len, rows.pad, np.int32), np.full(rows.seq_len, IGNORED, np.int32), [rows.seq_len])
        return [collate([rows[index] for index in group] or [padding]) for group in groups]

    def prompts(self) -> list[Tensor]:
        """Return the int32 ids of the openings of a few held-out documents; at least one, none empty."""
        found = [self.tokenizer.encode(text) for text in self.openings]
        first = self.held_out[0].input_ids[: min(32, self.held_out.num_tokens)]
        return [ids for ids in found if len(ids)] or [torch.from_numpy(first.copy())]


def open_dataset(config: RunConfig) -> Dataset:
    """Open the data of `config` and return them: find the files, read what fits in memory, and draw the validation split.

    Raises:
        DataError: naming data that are missing, unreadable or too small, or the shard that was being read after `data.timeout_s`.
    """
    reading = Reading()
    return within(config.data.timeout_s, lambda: _opened(config, reading), reading)


def _opened(config: RunConfig, reading: Reading) -> Dataset:
    data, train = config.data, config.train
    tokenizer, parts = _tokenizer_and_parts(data, reading)
    if data.source == "synthetic":
        return _synthetic(config, tokenizer, reading)
    if data.source == "needle":
        return _needle(config, tokenizer, reading)
    if data.source == "fineweb_edu":
        return _streamed(config, tokenizer, reading, parts)
    is_small = sum(part.blocks.size_bytes for part in parts) <= data.in_memory_mib * 2**20
    # one text is one document: there are no blocks to walk
    if is_small or all(isinstance(part.blocks, TextBlocks) and len(part.blocks) == 1 for part in parts):
        return _in_memory(config, tokenizer, reading, parts)
    if not data.packing:
        size = sum(part.blocks.size_bytes for part in parts) / 2**20
        raise DataError(
            f"data.packing=false needs the corpus in memory ({size:.0f} MiB; data.in_memory_mib={data.in_memory_mib:g}); "
            f"use --set data.packing=true, or --set data.in_memory_mib={int(size) + 1}"
        )
    _require_texts(parts, data, train.batch_size)
    return _streamed(config, tokenizer, reading, parts)


def _require_texts(parts: list[Part], data: DataTable, lanes: int) -> None:
    """Refuse fewer texts than lanes: several lanes would read one text from its start, so a batch would hold equal rows."""
    count = sum(len(part.blocks) for part in parts)
    if count <= lanes and all(isinstance(part.blocks, TextBlocks) for part in parts):
        size = sum(part.blocks.size_bytes for part in parts) / 2**20
        raise DataError(
            f"data: {count} texts are too few for train.batch_size={lanes} rows (each row reads its own texts, and one is held out; "
            f"data.in_memory_mib={data.in_memory_mib:g}); use --set data.in_memory_mib={int(size) + 1}, or cut them into more files"
        )


def _tokenizer_and_parts(data: DataTable, reading: Reading) -> tuple[Tokenizer, list[Part]]:
    """Return both, or raise one error with the problems of both, a line each."""
    problems: list[str] = []
    tokenizer: Tokenizer | None = None
    parts: list[Part] = []
    try:
        tokenizer = build_tokenizer(data)
    except DataError as error:
        problems.append(str(error))
    try:
        parts = _parts_of(data, reading)
    except DataError as error:
        problems.append(str(error))
    if tokenizer is None or problems:
        raise DataError("\n".join(problems))
    return tokenizer, parts


def _parts_of(data: DataTable, reading: Reading) -> list[Part]:
    if data.missing_path:
        raise DataError(data.missing_path)
    if data.source in IDS:
        return []
    if data.source == "fineweb_edu":
        return [Part(open_hub(data, reading), 1)]
    if data.source != "mix":
        return [
            Part(StdlibBlocks(reading) if data.source == "stdlib" else FILE_BLOCKS[data.source](files_of(data.paths, reading), reading), 1)
        ]
    kinds = {".jsonl": "jsonl", ".parquet": "parquet"}
    found: list[Part] = []
    for pattern, weight in data.mix.items():
        paths = files_of([pattern], reading)
        suffixes = {kinds.get(Path(path).suffix, "text") for path in paths}
        if len(suffixes) > 1:
            raise DataError(f"data.mix: {pattern!r} matches files of several kinds ({', '.join(sorted(suffixes))}); use a glob for each")
        found.append(Part(FILE_BLOCKS[suffixes.pop()](paths, reading), weight, pattern))
    return found


def _in_memory(config: RunConfig, tokenizer: Tokenizer, reading: Reading, parts: list[Part]) -> Dataset:
    data, train = config.data, config.train
    bad: list[Bad] = []
    found = [[*_documents(part.blocks, data.on_bad_record, bad.append)] for part in parts]
    if not all(found):
        raise DataError(f"data: no document can be read (data.source={data.source!r}{first_skipped(bad)}); name files with text")
    sides = split(found)
    packed = [PackedRows(texts, tokenizer, train.seq_len, seed=data.shuffle_seed) for texts in sides.train]
    rows: list[RowSequence]
    if data.packing:
        rows = [ShuffledRows(part, data.shuffle_seed) for part in packed]
    else:
        rows = [BucketedRows(part, batch_size=train.batch_size, seed=data.shuffle_seed) for part in packed]
    sequence = rows[0] if len(rows) == 1 else MixedRows(rows, [part.weight for part in parts], data.shuffle_seed)
    held_out = PackedRows(sides.val, tokenizer, train.seq_len)
    content = hashlib.sha256(b"".join(hashlib.sha256(part.stream.tobytes()).digest() for part in packed)).hexdigest()
    return Dataset(
        config=config,
        tokenizer=tokenizer,
        reading=reading,
        lane=lambda number: RowLane(sequence, number=number, count=train.batch_size),
        held_out=held_out,
        openings=_openings(sides.val),
        bad_records=sum(record.lost for record in bad),
        first_bad=bad[0] if bad else None,
        shared=shared(sides),
        sizes={
            "train_documents": sum(map(len, sides.train)),
            "train_tokens": sum(len(part.stream) for part in packed),
            "val_documents": len(sides.val),
            "val_tokens": len(held_out.stream),
        },
        fingerprint={**_settings(config, tokenizer), "walk": "rows", "content": content[:16]},
    )


def _documents(blocks: Blocks, policy: str, note: Callable[[Bad], object]) -> Iterator[Document]:
    return documents_of(chain.from_iterable(map(blocks.read, range(len(blocks)))), policy, note)


def _streamed(config: RunConfig, tokenizer: Tokenizer, reading: Reading, parts: list[Part]) -> Dataset:
    data, train = config.data, config.train
    files = tuple(part.blocks for part in parts if isinstance(part.blocks, FileBlocks))
    for blocks in files:
        blocks.keep_hashes(is_salvaging=data.on_bad_record == "skip")
        if blocks.num_bytes <= HASHED_BYTES:
            _hash_all(blocks, reading)
    # each lane reads its own blocks
    whole, lanes = parts, train.batch_size
    parts = [part._replace(blocks=StripedBlocks(part.blocks, -(-lanes // len(part.blocks)))) for part in parts]
    batch_tokens = train.batch_size * train.seq_len
    found = scan_held_out(
        [part.blocks for part in parts], data, tokens=FIXED_BATCHES * batch_tokens, most_tokens=train.eval_batches * batch_tokens
    )
    if len(whole) > 1:
        _require_training(whole, data, found.limit)
    held_out = PackedRows(found.documents, tokenizer, train.seq_len)
    tokens: list[TokenBlocks] = [TextTokenBlocks(part.blocks, tokenizer, found.limit) for part in parts]
    sequence = BlockSequence(tokens, [part.weight for part in parts], data.shuffle_seed)
    return _walked(
        config,
        tokenizer,
        reading,
        sequence,
        # only the hub's shards are not local files, and they are never part of a mix
        walk=Walk(sequence, files, train.batch_size, tuple(blocks.kept.found.copy() for blocks in files)) if files else None,
        held_out=held_out,
        openings=_openings(found.documents),
        first_bad=found.first_bad,
        sizes={"train_blocks": sum(map(len, tokens)), "val_documents": len(found.documents), "scanned_documents": found.scanned},
        fingerprint={
            "blocks": [len(part) for part in tokens],
            "bytes": [part.blocks.size_bytes for part in parts],
            "limit": found.limit,
            # the part of the content that was already read
            "held_out": hashlib.sha256(held_out.stream[: held_out.ends[found.num_fixed - 1]].tobytes()).hexdigest()[:16],
        },
    )


def _hash_all(blocks: FileBlocks, reading: Reading) -> None:
    for block in range(len(blocks)):
        reading.shard = blocks.where(block)
        # reading reports a file that changes at this moment
        with suppress(LostError):
            blocks.record_hash(block)


def _require_training(parts: list[Part], data: DataTable, limit: int) -> None:
    """Refuse a part of a mix with nothing to train on: its first turn would end the run."""
    for part in parts:
        ranks, bad = list[int](), list[Bad]()
        for document in _documents(part.blocks, data.on_bad_record, bad.append):
            ranks.append(rank_of(document.text))
            if ranks[-1] >= limit:
                break
        else:
            size = int(sum(each.blocks.size_bytes for each in parts) / 2**20) + 1
            held_out = "1 is" if len(ranks) == 1 else f"{len(ranks)} are"
            fix = f", or use --set data.in_memory_mib={size}, which cuts a single document" if len(ranks) == 1 else ""
            raise DataError(
                f"data.mix: {part.pattern!r} has no document for training ({held_out} held out for validation, "
                f"by a hash of the content{first_skipped(bad)}); add files to it or leave it out{fix}"
            )


def _synthetic(config: RunConfig, tokenizer: Tokenizer, reading: Reading) -> Dataset:
    train, seed = config.train, config.data.shuffle_seed
    # from the model's whole vocabulary: its loss then stays at ln V, and a lower loss is a leak
    num_ids = config.model.vocab_size or tokenizer.separator
    blocks = SyntheticBlocks(tokenizer, num_ids=num_ids, seq_len=train.seq_len, seed=seed)
    return _walked(
        config,
        tokenizer,
        reading,
        BlockSequence([blocks], [1], seed),
        held_out=blocks.held_out(train.batch_size),
        sizes={"train_blocks": len(blocks)},
    )


def _needle(config: RunConfig, tokenizer: Tokenizer, reading: Reading) -> Dataset:
    train, seed = config.train, config.data.shuffle_seed
    task = Retrieval.of(config.data, train.seq_len)
    rows = retrieval_rows(task, side="train", seed=seed, pad=tokenizer.pad)
    return Dataset(
        config=config,
        tokenizer=tokenizer,
        reading=reading,
        lane=lambda number: RowLane(rows, number=number, count=train.batch_size),
        held_out=retrieval_rows(task, side="val", seed=seed, pad=tokenizer.pad, count=train.batch_size * train.eval_batches),
        sizes={"train_blocks": len(rows)},
        fingerprint={**_settings(config, tokenizer), "walk": "rows", "needle": list(attrs.astuple(task))},
    )


def _walked(config: RunConfig, tokenizer: Tokenizer, reading: Reading, sequence: BlockSequence, **known: Any) -> Dataset:
    train, policy = config.train, config.data.on_bad_record

    def lane(number: int) -> Lane:
        return BlockLane(sequence, number=number, count=train.batch_size, seq_len=train.seq_len, policy=policy)

    fingerprint = {**_settings(config, tokenizer), "walk": "blocks", **known.pop("fingerprint", {})}
    return Dataset(config=config, tokenizer=tokenizer, reading=reading, lane=lane, fingerprint=fingerprint, **known)


def _settings(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    return {**settings_of(config), "vocab_size": tokenizer.vocab_size}


def _openings(documents: Sequence[Document]) -> tuple[bytes, ...]:
    texts = [document.text[:OPENING_BYTES].decode("utf-8", errors="ignore").encode() for document in documents[:OPENINGS]]
    return tuple(text for text in texts if text)
