"""An unreadable record is named with file and line, or counted: never dropped silently, never a traceback."""

import json
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsa_train.cli import run_command
from nsa_train.data.dataset import FILE_BLOCKS, open_dataset
from nsa_train.data.lanes import BlockLane, BlockSequence, Entry
from nsa_train.data.sources import jsonl
from nsa_train.data.sources.base import Bad, Document, Reading
from nsa_train.data.sources.jsonl import JsonlBlocks
from nsa_train.data.stream import open_training_stream
from nsa_train.errors import DataError
from nsa_train.settings.config import RunConfig

FUZZED_FAST, FUZZED_SLOW = 300, 10_000
GOOD = [{"text": f"document {number} " * 3} for number in range(40)]
BAD_LINES = {
    b'{"text": "cut off': "is not JSON (Unterminated string starting at column 10)",
    b'{"text": "a"} trailing': "is not JSON",
    b"": "is blank",
    b"   ": "is blank",
    b"[1, 2]": "holds a list",
    b'"text"': "holds a str",
    b"null": "holds None",
    b'{"body": "x"}': "has no field 'text' (it has 'body')",
    b"{}": "has no field 'text' (it has none)",
    b'{"text": null}': "has None in field 'text'",
    b'{"text": 3}': "has an int in field 'text'",
    b'{"text": ["a"]}': "has a list in field 'text'",
    b'{"text": "\xff\xfe"}': "is not UTF-8 (byte 0xff at offset 10)",
    b'{"text": "\\ud800"}': "cannot be written as UTF-8",
    b"[" * 100_000: "is not JSON",
    b'{"text": ' + b"9" * 5000 + b"}": "is not JSON",
    b"\x00\x01": "is not JSON",
}


def _write(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def _lines(bad: bytes | None = None, at: int = 17) -> list[bytes]:
    lines = [json.dumps(record).encode() for record in GOOD]
    return lines if bad is None else [*lines[:at], bad, *lines[at:]]


@pytest.mark.parametrize(("line", "why"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
@pytest.mark.parametrize("in_memory_mib", [64, 0])
def test_a_bad_line_is_named_or_counted(
    tmp_path: Path, data_config: Callable[..., RunConfig], line: bytes, why: str, in_memory_mib: int
) -> None:
    path = _write(tmp_path / "a.jsonl", _lines(line))
    overrides = ["data.source=jsonl", f"data.path={path}", f"data.in_memory_mib={in_memory_mib}"]
    with pytest.raises(DataError, match=re.escape(f"data.path: {path} line 18 {why}")) as caught:
        open_dataset(data_config(*overrides))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("fix or remove it, or use --set data.on_bad_record=skip")
    config = data_config(*overrides, "data.on_bad_record=skip")
    with open_training_stream(config) as stream:
        while not stream.figures()["data_epoch"]:
            next(stream)
        assert stream.figures()["data_bad_records"] == 1


@pytest.mark.parametrize(("before", "which"), [(0, "line 1 has 2,097,153 bytes"), (2, "line [123] is read with lines 1 to 3, which have ")])
def test_an_endless_line_of_a_streamed_file_is_refused_before_it_is_read(
    tmp_path: Path, data_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, before: int, which: str
) -> None:
    """A hole of a sparse file, or an array of all records on one line, would take all memory."""
    monkeypatch.setattr(jsonl, "MOST_TOGETHER", 2**20)
    good = _lines()
    path = _write(tmp_path / "a.jsonl", [*good[:before], b"\0" * 2**21, *good[before:]])
    overrides = ["data.source=jsonl", f"data.path={path}", "data.in_memory_mib=0"]
    with pytest.raises(DataError, match=f"data.path: {re.escape(str(path))} {which}") as caught:
        open_dataset(data_config(*overrides))
    advice = "cut the longest line into several records, or use --set data.on_bad_record=skip"
    assert str(caught.value).endswith(f"(the rule: at most 1,048,576, because lines of a streamed file are read whole); {advice}")
    records = [record for block in _blocks_of(path) for record in block]
    assert (len(records), sum(isinstance(record, Bad) for record in records)) == (len(good) + 1, before + 1)
    # in memory, where the corpus is as large as its user allowed, only the line is bad
    with pytest.raises(DataError, match=re.escape(f"data.path: {path} line {before + 1} is not JSON")):
        open_dataset(data_config(*overrides, "data.in_memory_mib=64"))


def _blocks_of(path: Path) -> Iterator[list[Document | Bad]]:
    blocks = JsonlBlocks([path], Reading())
    blocks.keep_hashes(is_salvaging=False)
    yield from (list(blocks.read(block)) for block in range(len(blocks)))


@pytest.mark.parametrize("in_memory_mib", [64, 0])
def test_the_counts_of_two_ranks_add_up_to_the_run_s(tmp_path: Path, data_config: Callable[..., RunConfig], in_memory_mib: int) -> None:
    path = _write(tmp_path / "a.jsonl", [line for good in _lines() for line in (good, good, b"oops")])
    overrides = ("data.source=jsonl", f"data.path={path}", f"data.in_memory_mib={in_memory_mib}", "data.on_bad_record=skip")
    config = data_config(*overrides, "train.batch_size=2")
    counts = []
    for rank in (0, 1):
        with open_training_stream(config, rank=rank, world_size=2) as stream:
            while not stream.figures()["data_epoch"]:
                next(stream)
            counts.append(stream.figures()["data_bad_records"])
    assert sum(counts) == len(GOOD)


def test_a_bad_record_is_counted_once_however_often_it_is_met(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    path = _write(tmp_path / "a.jsonl", [line for good in _lines() for line in (good, good, b"oops")])
    config = data_config("data.source=jsonl", f"data.path={path}", "data.in_memory_mib=0", "data.on_bad_record=skip")
    counts = {}
    with open_training_stream(config) as stream:
        while (epoch := int(stream.figures()["data_epoch"])) < 3:
            next(stream)
            counts[epoch] = stream.figures()["data_bad_records"]
    assert counts == {0: len(GOOD), 1: len(GOOD), 2: len(GOOD)}


def test_a_way_that_breaks_off_is_counted_each_time() -> None:
    class Broken:
        def __len__(self) -> int:
            return 1

        def entries(self, block: int, start: int, epoch: int) -> Iterator[Entry]:
            yield Entry(0, np.arange(4, dtype=np.int32))
            yield Entry(1, None, Bad("far away", "cannot be read", is_passing=True))

    lane = BlockLane(BlockSequence([Broken()], [1], 0), number=0, count=1, seq_len=4, policy="skip")
    for _ in range(4):
        lane.next_row()
    assert lane.state()["bad_records"] == 3


def test_a_bad_line_that_is_met_late_ends_the_run_with_its_name(
    tmp_path: Path, data_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path / "a.jsonl", _lines(b"oops", at=40))
    monkeypatch.setattr("nsa_train.data.sources.jsonl.LINES_PER_BLOCK", 5)
    monkeypatch.setattr("nsa_train.data.blocks.SCAN_DOCUMENTS", 2)
    config = data_config("data.source=jsonl", f"data.path={path}", "data.in_memory_mib=0", "data.shuffle_seed=1")
    with open_training_stream(config) as stream:
        with pytest.raises(DataError, match=r"a\.jsonl line 41 is not JSON"):
            deque(stream)
        # the end stays the end
        with pytest.raises(DataError, match=r"a\.jsonl line 41 is not JSON"):
            next(stream)


def test_the_count_of_a_streamed_corpus_goes_on_after_a_resume(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    path = _write(tmp_path / "a.jsonl", [line for good in _lines() for line in (good, good, b"oops")])
    config = data_config("data.source=jsonl", f"data.path={path}", "data.in_memory_mib=0", "data.on_bad_record=skip")
    with open_training_stream(config) as straight:
        for _ in range(12):
            next(straight)
        expected = straight.figures()["data_bad_records"]
    with open_training_stream(config) as first:
        for _ in range(5):
            next(first)
        state = first.state_dict()
        before = first.figures()["data_bad_records"]
    with open_training_stream(config) as second:
        second.load_state_dict(state)
        assert second.figures()["data_bad_records"] == before
        for _ in range(7):
            next(second)
        assert second.figures()["data_bad_records"] == expected > before > 0


def test_an_empty_text_is_a_document_and_a_byte_order_mark_is_none(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", [b'\xef\xbb\xbf{"text": ""}', b'{"text": "b"}\r'])
    blocks = FILE_BLOCKS["jsonl"]([path], Reading())
    assert [record.text for record in blocks.read(0) if isinstance(record, Document)] == [b"", b"b"]


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (pa.table({"body": ["x"]}), "has no column 'text' (it has 'body')"),
        (pa.table({"text": [1, 2]}), "(2 records) has column 'text' of type int64"),
        (pa.table({"text": [["x"]]}), "has column 'text' of type list<"),
        (pa.table({"text": [b"x"]}), "has column 'text' of type binary"),
        (pa.table({"text": pa.array([], pa.string())}), "holds no row"),
    ],
)
def test_a_wrong_parquet_schema_names_file_and_column(tmp_path: Path, table: pa.Table, why: str) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    blocks = FILE_BLOCKS["parquet"]([tmp_path / "a.parquet"], Reading())
    [record] = [record for block in range(len(blocks)) for record in blocks.read(block)]
    assert isinstance(record, Bad)
    assert str(record).startswith(f"data.path: {tmp_path}/a.parquet ")
    assert why in str(record)


def test_rows_of_parquet_without_a_value_or_utf8_are_named(tmp_path: Path) -> None:
    raw = pa.Array.from_buffers(pa.string(), 3, pa.array([b"good", None, b"\xff"]).buffers())
    pq.write_table(pa.table({"text": raw}), tmp_path / "a.parquet")
    blocks = FILE_BLOCKS["parquet"]([tmp_path / "a.parquet"], Reading())
    good, *bad = blocks.read(0)
    assert good.text == b"good"
    assert [str(record).split(";")[0] for record in bad] == [
        f"data.path: {tmp_path}/a.parquet row 1 has no value in column 'text'",
        f"data.path: {tmp_path}/a.parquet row 2 is not UTF-8 (byte 0xff at offset 0)",
    ]


def test_a_damaged_row_group_counts_every_row_that_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"row {number} " * 50 for number in range(40)]}), path, row_group_size=10, compression="gzip")
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    damaged = bytearray(path.read_bytes())
    damaged[start : start + 40] = bytes(40)
    path.write_bytes(damaged)
    blocks = FILE_BLOCKS["parquet"]([path], Reading())
    records = [record for block in range(len(blocks)) for record in blocks.read(block)]
    [bad] = [record for record in records if isinstance(record, Bad)]
    assert (len(records), bad.lost) == (31, 10)
    assert "a.parquet from row 20 on, in row group 2 (10 records) cannot be read" in str(bad)


@pytest.mark.parametrize(
    ("content", "line"), [(b"\xff\xfe", 1), (b"fine\nthen \xc3", 2), (b"fine\n\nthen " + "é".encode("latin-1") * 9, 3)]
)
def test_a_text_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path, content: bytes, line: int) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    [record] = FILE_BLOCKS["text"]([tmp_path / "a.txt"], Reading()).read(0)
    assert re.match(rf"data\.path: {tmp_path}/a\.txt is not UTF-8 \(byte 0x\w\w at offset \d+, line {line}\)", str(record))


def test_a_corpus_without_a_good_record_says_so(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    path = _write(tmp_path / "a.jsonl", [b"oops", b"{}"])
    for mib in (64, 0):
        config = data_config("data.source=jsonl", f"data.path={path}", "data.on_bad_record=skip", f"data.in_memory_mib={mib}")
        with pytest.raises(DataError, match=r"the first that was skipped: data.path: .*a\.jsonl line 1 is not JSON"):
            open_dataset(config)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_the_command_line_prints_one_line_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    (tmp_path / f"a.{kind}").write_bytes(b"\xff{ no format at all")
    source = {"txt": "text"}.get(kind, kind)
    assert run_command(["loader-check", "demo", "--set", f"data.source={source}", "--set", f"data.path={tmp_path}/a.{kind}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"a.{kind}" in line
    assert "Traceback" not in line


def test_fuzzed_files_are_accounted_for(tmp_path: Path) -> None:
    _check_fuzzed(tmp_path, FUZZED_FAST, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_fuzzed_files_are_accounted_for(tmp_path: Path, seed: int) -> None:
    _check_fuzzed(tmp_path, FUZZED_SLOW // 4, seed=seed)


def _check_fuzzed(folder: Path, count: int, seed: int) -> None:
    """Every record of a fuzzed file is a document or a bad one that is named; an independent reading agrees on each."""
    draw = random.Random(seed)
    for kind, path in _fuzzed(folder, draw, count):
        blocks = FILE_BLOCKS[kind]([path], Reading())
        records = [record for block in range(len(blocks)) for record in blocks.read(block)]
        assert records
        for record in records:
            if isinstance(record, Bad):
                assert str(path) in record.where
                assert record.lost >= 1
                assert "\n" not in str(record)
        good = [record.text for record in records if isinstance(record, Document)]
        if kind == "jsonl":
            _check_lines(path, records)
        elif kind == "text":
            assert good == [content for content in [path.read_bytes()] if content and _is_utf8(content)]
        else:
            _check_rows(path, good, records)


def _check_lines(path: Path, records: list[Document | Bad]) -> None:
    lines = path.read_bytes().split(b"\n")
    lines = lines[:-1] if lines[-1] == b"" else lines
    assert len(records) == max(1, len(lines))
    for number, (line, record) in enumerate(zip(lines, records, strict=False), 1):
        expected = _text_of(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
        if expected is None:
            assert isinstance(record, Bad)
            assert record.where.endswith(f"{path} line {number}")
        else:
            assert record == Document(f"{path}:{number}", expected)


def _check_rows(path: Path, good: list[bytes], records: list[Document | Bad]) -> None:
    try:
        column = pq.read_table(path, columns=["text"]).column("text").cast(pa.large_binary()).to_pylist()
    except (pa.ArrowException, OSError, ValueError, KeyError):
        assert any(isinstance(record, Bad) for record in records)
        return
    assert good == [value for value in column if value is not None and _is_utf8(value)]
    lost = sum(record.lost for record in records if isinstance(record, Bad))
    if pq.ParquetFile(path).metadata.num_rows != len(column) or _rows_of_groups(path) != len(column):
        # its footer promises other rows than there are
        assert lost or _rows_of_groups(path) == len(column)
        return
    assert lost == (len(column) - len(good) or (0 if good else 1))


def _rows_of_groups(path: Path) -> int:
    metadata = pq.ParquetFile(path).metadata
    return sum(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))


def _text_of(line: bytes) -> bytes | None:
    try:
        value = json.loads(line.decode("utf-8"))
        text = value["text"] if isinstance(value, dict) else None
        return text.encode() if isinstance(text, str) else None
    except (ValueError, KeyError, RecursionError):
        return None


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
        return True
    except UnicodeDecodeError:
        return False


def _fuzzed(folder: Path, draw: random.Random, count: int) -> Iterator[tuple[str, Path]]:
    for _ in range(count):
        kind = draw.choice(["jsonl", "jsonl", "text", "parquet"])
        path = folder / f"f.{kind}"
        records = [{"text": "".join(draw.choices('ab é\n"\\<', k=draw.randrange(20)))} for _ in range(draw.randrange(1, 8))]
        if kind == "parquet":
            pq.write_table(pa.table({"text": [record["text"] for record in records]}), path, row_group_size=3)
        else:
            lines = [json.dumps(record, ensure_ascii=draw.random() < 0.5).encode() for record in records]
            if draw.random() < 0.5:
                lines[draw.randrange(len(lines))] = draw.choice([*BAD_LINES])[:200]
            path.write_bytes(b"\n".join(lines) + draw.choice([b"", b"\n"]))
        for _ in range(draw.choice([0, 1, 1, 2, 5])):
            path.write_bytes(_damaged(bytearray(path.read_bytes()), draw))
        yield kind, path


def _damaged(content: bytearray, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) + 1)
    kind = draw.randrange(5)
    if kind == 0 and at < len(content):
        content[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del content[at:]
    elif kind == 2:
        del content[at : at + draw.randrange(9)]
    elif kind == 3:
        content[at:at] = draw.randbytes(draw.randrange(1, 9))
    elif kind == 4:
        content[at:at] = draw.choice([b"\n", b"\xff", b"\x00", b'"', b"{", b"\xef\xbb\xbf", b"\r\n"])
    return bytes(content)


@pytest.mark.parametrize("source", ["jsonl", "text", "parquet", "fineweb_edu jsonl", "fineweb_edu parquet"])
def test_a_run_over_fuzzed_files_goes_on_or_ends_with_a_name(tmp_path: Path, data_config: Callable[..., RunConfig], source: str) -> None:
    _check_runs(tmp_path, data_config, source, count=12)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["jsonl", "text", "parquet", "fineweb_edu jsonl", "fineweb_edu parquet"])
def test_many_runs_over_fuzzed_files_go_on_or_end_with_a_name(tmp_path: Path, data_config: Callable[..., RunConfig], source: str) -> None:
    _check_runs(tmp_path, data_config, source, count=500)


def _check_runs(folder: Path, data_config: Callable[..., RunConfig], source: str, count: int) -> None:
    """Good files and a fuzzed one give a few batches, or one line that names a file. Any other error fails the test."""
    draw = random.Random(7)
    source, _, kind = source.partition(" ")
    kind = kind or source
    # a text is one document, and every row of a batch reads some of its own
    files = 9 if kind == "text" else 3
    goods = [folder / f"good-{number}.{kind}" for number in range(files)]
    for number, good in enumerate(goods):
        if kind == "parquet":
            pq.write_table(pa.table({"text": [record["text"] for record in GOOD[number::files]]}), good)
        else:
            _write(good, _lines()[number::files])
    for _, path in islice((made for made in _fuzzed(folder, draw, 10 * count) if made[0] == kind), count):
        policy = draw.choice(["fail", "skip"])
        names = ", ".join(f'"{name}"' for name in [*goods, path])
        overrides = [f"data.source={source}", f"data.path=[{names}]", f"data.on_bad_record={policy}"]
        message = _outcome(data_config(*overrides, f"data.in_memory_mib={draw.choice([0, 64])}", "data.workers=0"))
        if message:
            assert "\n" not in message
            assert policy == "fail" or source == "fineweb_edu"
            assert str(path) in message


def _outcome(config: RunConfig) -> str:
    """Return what ended the reading of three batches; empty if nothing did."""
    try:
        with open_training_stream(config) as stream:
            deque(islice(stream, 3))
    except DataError as error:
        return str(error)
    return ""
