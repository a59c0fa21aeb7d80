"""Files that change during a run: named or counted while it reads them, and refused when it resumes."""

import base64
import json
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsa_train.data.dataset import FILE_BLOCKS, open_dataset
from nsa_train.data.opened import KEY
from nsa_train.data.sources.base import Bad, Document, Reading, StripedBlocks
from nsa_train.data.sources.files import FileBlocks
from nsa_train.data.sources.jsonl import LINES_PER_BLOCK
from nsa_train.data.sources.split import rank_of
from nsa_train.data.stream import TrainingStream, merge_states, open_training_stream
from nsa_train.errors import DataError
from nsa_train.settings.config import RunConfig

NUM_LINES = 1500
KINDS = ("jsonl", "text", "parquet", "fineweb_edu jsonl", "fineweb_edu parquet")


class Corpus(NamedTuple):
    """A streamed corpus: overrides of a recipe, and its files."""

    sets: list[str]
    files: list[Path]


def _texts(count: int = NUM_LINES) -> list[str]:
    return [f"document {number:04} " + "word " * (number % 20) for number in range(count)]


def _jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _corpus(folder: Path, kind: str) -> Corpus:
    """Write 1,500 documents of `kind`: one file of JSONL or Parquet, two shards, or 300 texts."""
    source, _, suffix = kind.partition(" ")
    suffix = suffix or source
    texts = _texts()
    files: list[Path] = []
    if source == "text":
        for number in range(300):
            files.append(folder / f"{number:03}.txt")
            files[-1].write_text("\n".join(texts[number::300]))
    else:
        for shard in range(2 if source == "fineweb_edu" else 1):
            part = texts[shard :: 2 if source == "fineweb_edu" else 1]
            files.append(folder / f"{shard}.{suffix}")
            if suffix == "jsonl":
                _jsonl(files[-1], part)
            else:
                pq.write_table(pa.table({"text": part}), files[-1], row_group_size=50, compression=None)
    names = ", ".join(f'"{path}"' for path in files)
    return Corpus([f"data.source={source}", f"data.path=[{names}]", "data.in_memory_mib=0"], files)


def _shrink(path: Path) -> None:
    content = path.read_bytes()
    half = content.find(b"\n", len(content) // 2) + 1 or len(content) // 2
    os.truncate(path, half)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"text": "one more"}\n')


def _edit(path: Path) -> None:
    """Replace the words of some documents by as many other bytes, in place."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content.replace(b"document", b"DOCUMENT"))


def _replace(path: Path) -> None:
    """Replace it by another file of the same size and time."""
    before = path.stat()
    other = path.with_suffix(".other")
    shutil.copy(path, other)
    _edit(other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def _make_pipe(path: Path) -> None:
    """Replace it by a named pipe, which a plain open would wait for."""
    path.unlink()
    os.mkfifo(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "shrunk": _shrink,
    "grown": _grow,
    "edited": _edit,
    "replaced": _replace,
    "deleted": Path.unlink,
    "pipe": _make_pipe,
}


def _read(stream: TrainingStream, *, epochs: int = 1) -> None:
    """Take batches until every lane has finished so many epochs."""
    for _ in range(3000):
        if int(stream.figures()["data_epoch"]) >= epochs:
            return
        next(stream)
    raise AssertionError("the epoch does not end")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_under_a_run_ends_it_by_name(
    tmp_path: Path, data_config: Callable[..., RunConfig], kind: str, change: str
) -> None:
    corpus = _corpus(tmp_path, kind)
    with open_training_stream(data_config(*corpus.sets, "data.workers=0")) as stream:
        next(stream)
        # of texts, those that the lanes have opened are not read again in this epoch
        for path in corpus.files:
            CHANGES[change](path)
        with pytest.raises(DataError, match=r"data\.path: .*\.(jsonl|txt|parquet) ") as caught:
            _read(stream)
    assert any(str(path) in str(caught.value) for path in corpus.files)
    said = {"deleted": ("No such file",), "pipe": ("named pipe", "and is 0 (")}.get(change, ("the file changed after it was opened",))
    assert any(words in str(caught.value) for words in said)
    assert str(caught.value).endswith("put the file back as it was and start again, or use --set data.on_bad_record=skip")


def test_the_message_says_how_the_file_changed(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", ["a", "b"])
    blocks = FILE_BLOCKS["jsonl"]([path], Reading())
    size = path.stat().st_size
    _grow(path)
    assert f"a.jsonl line 1 is lost: the file changed after it was opened, its size was {size} bytes and is {size + 21} " in str(
        next(iter(blocks.read(0)))
    )
    os.truncate(path, size)
    os.utime(path, ns=(0, 0))
    assert re.search(r"it was modified at \d{4}-\d\d-\d\d \S+ \(\d{4}-\d\d-\d\d \S+ before\)", str(next(iter(blocks.read(0)))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["linked", "permitted"])
def test_a_file_whose_bytes_stay_is_read_on(tmp_path: Path, data_config: Callable[..., RunConfig], kind: str, change: str) -> None:
    """A new hard link and another mode move the time of the last change of its inode, and nothing else."""
    corpus = _corpus(tmp_path, kind)
    with open_training_stream(data_config(*corpus.sets, "data.workers=0")) as stream:
        next(stream)
        for path in corpus.files:
            if change == "linked":
                path.with_suffix(".link").hardlink_to(path)
            else:
                path.chmod(0o600)
        _read(stream)


@pytest.mark.parametrize("batch_size", [8, 32])
@pytest.mark.parametrize("change", ["shrunk", "grown", "edited"])
def test_skipping_counts_each_lost_line_of_jsonl_once_and_goes_on(
    tmp_path: Path, data_config: Callable[..., RunConfig], change: str, batch_size: int
) -> None:
    """Blocks whose bytes are the same are read on; with 32 rows several share a block."""
    corpus = _corpus(tmp_path, "jsonl")
    [path] = corpus.files
    lines = path.read_bytes().splitlines(keepends=True)
    sets = [*corpus.sets, "data.on_bad_record=skip", "data.workers=0", f"train.batch_size={batch_size}"]
    with open_training_stream(data_config(*sets)) as stream:
        next(stream)
        _change_last_third(path, change)
        # the first epoch continues with earlier records, later ones have the same losses again
        _read(stream, epochs=2)
        first = stream.figures()["data_bad_records"]
        _read(stream, epochs=4)
        assert stream.figures()["data_bad_records"] == first
    content, position, lost = path.read_bytes(), 0, 0
    for start in range(0, NUM_LINES, LINES_PER_BLOCK):
        block = b"".join(lines[start : start + LINES_PER_BLOCK])
        lost += len(lines[start : start + LINES_PER_BLOCK]) if content[position : position + len(block)] != block else 0
        position += len(block)
    assert first == lost
    assert (lost > 0) == (change != "grown")


def _change_last_third(path: Path, change: str) -> None:
    if change == "grown":
        _grow(path)
        return
    content = path.read_bytes()
    at = content.find(b"\n", len(content) * 2 // 3) + 1
    if change == "shrunk":
        os.truncate(path, at)
    else:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content[at:].replace(b"document", b"DOCUMENT"))


@pytest.mark.parametrize(("kind", "lost"), [("text", 1), ("parquet", 1500), ("fineweb_edu jsonl", 0), ("fineweb_edu parquet", 0)])
def test_skipping_counts_what_a_changed_file_of_another_kind_loses_and_goes_on(
    tmp_path: Path, data_config: Callable[..., RunConfig], kind: str, lost: int
) -> None:
    corpus = _corpus(tmp_path, kind)
    other = tmp_path / "other"
    other.mkdir()
    sound = _corpus(other, kind)
    names = ", ".join(f'"{path}"' for path in [*corpus.files, *sound.files])
    sets = [corpus.sets[0], f"data.path=[{names}]", *corpus.sets[2:], "data.on_bad_record=skip", "data.workers=0"]
    with open_training_stream(data_config(*sets)) as stream:
        _shrink(corpus.files[0])
        _read(stream, epochs=2)
        found = stream.figures()["data_bad_records"]
    # a shard of `datasets` counts once for each row that reads it, because the number of its records is unknown
    assert found == lost if lost else 1 <= found <= 8


def test_a_corpus_that_is_gone_ends_a_run_that_skips_with_the_reason(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    corpus = _corpus(tmp_path, "jsonl")
    with open_training_stream(data_config(*corpus.sets, "data.on_bad_record=skip", "data.workers=0")) as stream:
        corpus.files[0].unlink()
        with pytest.raises(
            DataError, match=r"no block holds a document .*; the last: data\.path: .*0\.jsonl line \d+ cannot be read \(No such"
        ):
            next(stream)
        assert stream.figures()["data_bad_records"] <= NUM_LINES


@pytest.mark.parametrize("kind", KINDS)
def test_pipes_in_place_of_a_corpus_end_a_run_that_skips(tmp_path: Path, data_config: Callable[..., RunConfig], kind: str) -> None:
    corpus = _corpus(tmp_path, kind)
    config = data_config(*corpus.sets, "data.workers=0", "data.on_bad_record=skip")
    with open_training_stream(config) as stream:
        next(stream)
        for path in corpus.files:
            _make_pipe(path)
        with pytest.raises(DataError, match=r"^data: no block holds a document for training"):
            _read(stream, epochs=3)


@pytest.mark.parametrize("turns", [1, 3])
def test_what_breaks_a_shard_off_reaches_every_reader_of_it(turns: int) -> None:
    """Also if it is not at a record of that reader."""

    class Broken:
        size_bytes = 0

        def __len__(self) -> int:
            return 1

        def read(self, block: int, start: int = 0) -> Iterator[Document | Bad]:
            yield from [Document(str(number), b"") for number in range(7)][start:]
            yield Bad("far away", "cannot be read", is_passing=True, is_end=True)

    blocks = StripedBlocks(Broken(), turns)
    for block in range(len(blocks)):
        *documents, last = blocks.read(block)
        assert isinstance(last, Bad)
        assert [document.name for document in documents] == [str(number) for number in range(block, 7, turns)]
    assert len(blocks) == turns


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a corpus count as a large one: except for JSONL, little is known beyond the blocks that lanes have read."""
    monkeypatch.setattr("nsa_train.data.blocks.SCAN_DOCUMENTS", 2)
    monkeypatch.setattr("nsa_train.data.dataset.HASHED_BYTES", 0)


def _state(config: RunConfig, batches: int, *, start: Any = None, world_size: int = 1, workers: int = 1) -> dict[str, Any]:
    """Return the state of all ranks after `batches` more from `start` on; the data is opened again, as by a new process."""
    changed = attrs.evolve(config, data=attrs.evolve(config.data, workers=workers))
    with ExitStack() as streams:
        ranks = [streams.enter_context(open_training_stream(changed, rank=rank, world_size=world_size)) for rank in range(world_size)]
        for stream in ranks:
            if start is not None:
                stream.load_state_dict(start)
            deque(islice(stream, batches), maxlen=0)
        merged: dict[str, Any] = json.loads(json.dumps(merge_states([stream.state_dict() for stream in ranks])))
    return merged


def _edit_in_training(files: list[Path], limit: int) -> Path:
    """Change one document for training of the last third by another of the same size that is for training too; the time stays."""
    for number in range(NUM_LINES - 300, NUM_LINES):
        [path] = [path for path in files if b"document %04d" % number in path.read_bytes()]
        whole = path.read_bytes() if path.suffix == ".txt" else _texts()[number].encode()
        edited = whole.replace(b"document %04d" % number, b"DOCUMENT %04d" % number)
        if min(rank_of(whole), rank_of(edited)) < limit:
            continue
        before = path.stat()
        path.write_bytes(path.read_bytes().replace(b"document %04d" % number, b"DOCUMENT %04d" % number))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return path
    raise AssertionError("all are held out")


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_of_the_same_size_is_refused_on_resume(
    tmp_path: Path, data_config: Callable[..., RunConfig], request: pytest.FixtureRequest, kind: str, is_large: bool
) -> None:
    """Also in parts that the run has not reached, except in large corpora of other files than JSONL."""
    if is_large:
        request.getfixturevalue("large")
    corpus = _corpus(tmp_path, kind)
    config = data_config(*corpus.sets, "train.seq_len=256")
    state = _state(config, 80 if is_large and kind != "jsonl" else 0)
    path = _edit_in_training(corpus.files, open_dataset(config).fingerprint["limit"])
    message = (
        rf"data\.path: {path}( lines \d+ to \d+| row group \d+)? changed after the run of the checkpoint read it .*; put the file back"
    )
    with open_training_stream(config) as stream, pytest.raises(DataError, match=message):
        stream.load_state_dict(state)


def test_an_edit_of_the_same_size_is_refused_on_resume_in_memory(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    corpus = _corpus(tmp_path, "jsonl")
    config = data_config(*corpus.sets, "data.in_memory_mib=64")
    state = _state(config, 3)
    _edit_in_training(corpus.files, 2**28)
    with open_training_stream(config) as stream, pytest.raises(DataError, match="content was"):
        stream.load_state_dict(state)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_an_edit_that_a_resume_did_not_look_for_at_once_is_refused_when_it_is_read(
    tmp_path: Path, data_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    corpus = _corpus(tmp_path, kind)
    config = data_config(*corpus.sets, "train.seq_len=256")
    state = _state(config, 80)
    path = _edit_in_training(corpus.files, open_dataset(config).fingerprint["limit"])
    monkeypatch.setattr("nsa_train.data.opened.OpenedBlocks._unread", lambda self: iter(()))
    with open_training_stream(config) as stream:
        stream.load_state_dict(state)
        with pytest.raises(DataError, match=rf"data\.path: {path}.* changed after the run of the checkpoint"):
            deque(islice(stream, 200), maxlen=0)


@pytest.mark.usefixtures("large")
def test_a_resume_reads_at_most_so_much_again(
    tmp_path: Path, data_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = data_config(*_corpus(tmp_path, "parquet").sets, "train.seq_len=256", "data.workers=0")
    state = _state(config, 80)
    [files] = open_dataset(config).walk.files
    read: list[int] = []
    original = FileBlocks.record_hash
    monkeypatch.setattr(FileBlocks, "record_hash", lambda self, block: read.append(block) or original(self, block))
    # one of 30 blocks was read in search of held-out documents
    for most, count in ((2**34, 29), (files.num_bytes // 3, 10), (1, 1)):
        monkeypatch.setattr("nsa_train.data.opened.VERIFIED_BYTES", most)
        with open_training_stream(config) as stream:
            read.clear()
            stream.load_state_dict(state)
        assert len(read) == count


@pytest.mark.usefixtures("large")
def test_ranks_share_what_is_read_again(tmp_path: Path, data_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    config = data_config(*_corpus(tmp_path, "parquet").sets, "train.seq_len=256", "data.workers=0")
    state = _state(config, 80)
    read: list[int] = []
    original = FileBlocks.record_hash

    def noted(self: FileBlocks, block: int) -> None:
        if self.hashes is not None and not self.hashes.found[block]:
            read.append(block)
        original(self, block)

    monkeypatch.setattr(FileBlocks, "record_hash", noted)
    parts = []
    for rank in range(4):
        dataset = open_dataset(config)
        read.clear()
        with open_training_stream(config, rank=rank, world_size=4, dataset=dataset) as stream:
            stream.load_state_dict(state)
        parts.append(set(read))
    assert set.union(*parts) >= set(range(30)) - {0} - set(np.flatnonzero(dataset.walk.scanned[0]).tolist())
    assert sum(map(len, parts)) == len(set.union(*parts))
    assert max(map(len, parts)) <= 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_time_of_the_same_bytes_is_no_change(tmp_path: Path, data_config: Callable[..., RunConfig], kind: str) -> None:
    corpus = _corpus(tmp_path, kind)
    config = data_config(*corpus.sets)
    expected, state = _state(config, 9), _state(config, 5)
    for path in corpus.files:
        path.touch()
    assert _state(config, 4, start=state) == expected


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("kind", KINDS)
def test_the_hashes_in_a_state_are_those_of_the_position_alone(tmp_path: Path, data_config: Callable[..., RunConfig], kind: str) -> None:
    """The position counts, not the blocks that were read ahead, nor the ranks that read them."""
    config = data_config(*_corpus(tmp_path, kind).sets, "train.seq_len=128")
    expected = _state(config, 40)
    for workers, world_size in ((0, 1), (3, 2)):
        assert _state(config, 40, workers=workers, world_size=world_size) == expected
        before = _state(config, 17, workers=workers, world_size=world_size)
        assert _state(config, 23, start=before, workers=2 - workers // 2, world_size=4) == expected
    if kind in ("text", "parquet"):
        assert _count(_state(config, 0)) < _count(_state(config, 1)) < _count(expected)


def _count(state: dict[str, Any]) -> int:
    return sum(
        int(np.count_nonzero(np.frombuffer(base64.b64decode(text), "<u4"))) for corpus in state["fingerprint"][KEY] for text in corpus
    )


def test_a_position_without_hashes_is_taken_and_gets_some(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    config = data_config(*_corpus(tmp_path, "jsonl").sets)
    expected, state = _state(config, 9), _state(config, 5)
    del state["fingerprint"][KEY]
    found = _state(config, 4, start=state)
    assert found["lanes"] == expected["lanes"]
    assert _count(found) > 0


@pytest.mark.parametrize("wrong", [5, "text", [], [[]], [[""], [""]], [["!"]], [["AAAA"]], [[5]], {"a": 1}])
def test_hashes_that_make_no_sense_are_refused(tmp_path: Path, data_config: Callable[..., RunConfig], wrong: Any) -> None:
    config = data_config(*_corpus(tmp_path, "jsonl").sets)
    state = _state(config, 1)
    state["fingerprint"][KEY] = wrong
    with open_training_stream(config) as stream, pytest.raises(DataError, match="the checkpoint's hashes of blocks do not fit this data"):
        stream.load_state_dict(state)


def test_ranks_that_read_different_bytes_do_not_merge(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    config = data_config(*_corpus(tmp_path, "jsonl").sets, "data.workers=0")
    with open_training_stream(config, rank=0, world_size=2) as one, open_training_stream(config, rank=1, world_size=2) as other:
        parts = [one.state_dict(), other.state_dict()]
        [[text]] = parts[1]["fingerprint"][KEY]
        values = np.frombuffer(base64.b64decode(text), "<u4").copy()
        values[values != 0] ^= 6
        parts[1]["fingerprint"][KEY] = [[base64.b64encode(values.tobytes()).decode()]]
        with pytest.raises(DataError, match="ranks read different bytes in the same block"):
            merge_states(parts)


def test_many_blocks_are_kept_in_several_texts(
    tmp_path: Path, data_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa_train.data.opened.CHUNK", 5)
    config = data_config(*_corpus(tmp_path, "jsonl").sets)
    state = _state(config, 5)
    [texts] = state["fingerprint"][KEY]
    assert [len(base64.b64decode(text)) for text in texts] == [20, 20, 20, 20, 16]
    assert _state(config, 4, start=state) == _state(config, 9)


def test_a_block_that_hangs_on_resume_is_named_when_the_time_is_up(
    tmp_path: Path, data_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, large: None
) -> None:
    config = data_config(*_corpus(tmp_path, "parquet").sets, "data.timeout_s=0.3", "data.workers=0")
    state = _state(config, 80)
    event = threading.Event()
    with open_training_stream(config) as stream:
        monkeypatch.setattr(FileBlocks, "record_hash", lambda self, block: event.wait(20))
        with pytest.raises(DataError, match=r"nothing came within 0\.3 s \(reading data\.path: .*0\.parquet row group \d+\)"):
            stream.load_state_dict(state)
    event.set()
