"""FineWeb-Edu through `datasets`: local shards, interrupted reads, and no network."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsa_train.checkpoint import CheckpointWriter
from nsa_train.cli import run_command
from nsa_train.data.dataset import FILE_BLOCKS, open_dataset
from nsa_train.data.fallback import Start, or_synthetic
from nsa_train.data.sources.base import Bad, Document, Reading
from nsa_train.data.sources.hub import open_hub
from nsa_train.data.stream import open_training_stream
from nsa_train.errors import DataError
from nsa_train.settings.config import RunConfig
from nsa_train.settings.data_table import DataTable
from nsa_train.settings.recipe import load_config


def _records(path: Path) -> list[Document | Bad]:
    blocks = open_hub(DataTable(source="fineweb_edu", path=str(path), on_bad_record="skip"), Reading())
    return [record for block in range(len(blocks)) for record in blocks.read(block)]


@pytest.mark.parametrize(("name", "seed"), [("c-*.parquet", 3), ("a-*.jsonl", 1)])
def test_local_shards_come_through_datasets(corpora, name: str, seed: int) -> None:
    records = _records(corpora.folder / name)
    assert sorted(record.text.decode() for record in records if isinstance(record, Document)) == sorted(corpora.texts_of(seed))
    assert len(records) == len(corpora.texts_of(seed))


def test_a_shard_is_read_from_any_row_on(corpora) -> None:
    blocks = open_hub(DataTable(source="fineweb_edu", path=f"{corpora.folder}/c-*.parquet"), Reading())
    whole = list(blocks.read(1))
    assert all(list(blocks.read(1, start)) == whole[start:] for start in (0, 1, 7, 8, 39, 40, 41))


def test_values_that_are_no_text_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    _, bad, _ = _records(tmp_path / "a.parquet")
    assert str(bad).startswith(f"data.path: {tmp_path}/a.parquet row 1 has None in field 'text'")
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    [bad] = _records(tmp_path / "a.parquet")
    assert str(bad).startswith(f"data.path: {tmp_path}/a.parquet row 0 has no field 'text' (it has 'body')")


@pytest.mark.parametrize("damage", ["cut", "line", "junk"])
def test_a_shard_that_breaks_off_is_named(tmp_path: Path, damage: str) -> None:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(20)]
    path = tmp_path / "a.jsonl"
    if damage == "line":
        path.write_text("\n".join([*lines[:7], "{oops", *lines[7:]]))
    elif damage == "cut":
        path.write_text("\n".join(lines)[:-5])
    else:
        path.write_bytes(b"\x00\xff" * 99)
    try:
        found = [str(record) for record in _records(path) if isinstance(record, Bad)]
    except DataError as error:
        found = [str(error)]
    assert found
    if damage == "line":
        assert [text.split(" is not")[0] for text in found] == [f"data.path: {path} line 8"]
        assert len(_records(path)) == 21
    assert all(str(path) in text and "\n" not in text for text in found)


def test_a_damaged_parquet_shard_ends_the_run_or_is_counted(corpora, tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    for shard in range(3):
        (tmp_path / f"c-{shard}.parquet").write_bytes((corpora.folder / f"c-{shard}.parquet").read_bytes())
    content = bytearray((tmp_path / "c-1.parquet").read_bytes())
    content[100:2000] = bytes(1900)
    (tmp_path / "c-1.parquet").write_bytes(content)
    overrides = ["data.source=fineweb_edu", f"data.path={tmp_path}/c-*.parquet"]
    with pytest.raises(DataError, match=r"c-1\.parquet from row \d+ on cannot be read"):
        open_dataset(data_config(*overrides))
    with open_training_stream(data_config(*overrides, "data.on_bad_record=skip")) as stream:
        for _ in range(60):
            next(stream)
        assert int(stream.figures()["data_bad_records"]) >= 1


@pytest.mark.parametrize("wrong", ["cut", "rowless", "damaged"])
def test_a_damaged_shard_counts_once_however_many_rows_share_it(tmp_path: Path, data_config: Callable[..., RunConfig], wrong: str) -> None:
    for name in ("sound", wrong):
        _shard(tmp_path / f"{name}.parquet", name)
    config = data_config(
        "data.source=fineweb_edu", f"data.path={tmp_path}/*.parquet", "data.on_bad_record=skip", "train.batch_size=16", "train.seq_len=8"
    )
    with open_training_stream(config) as stream:
        while not stream.figures()["data_epoch"]:
            next(stream)
        assert stream.figures()["data_bad_records"] == 1


@pytest.mark.parametrize("wrong", ["cut", "rowless", "damaged"])
def test_a_damaged_shard_reads_alike_from_any_row_on(tmp_path: Path, wrong: str) -> None:
    _shard(tmp_path / f"{wrong}.parquet", wrong)
    blocks = open_hub(DataTable(source="fineweb_edu", path=f"{tmp_path}/{wrong}.parquet", on_bad_record="skip"), Reading())
    whole = list(blocks.read(0))
    assert f"{wrong}.parquet from row {len(whole) - 1} on cannot be read" in str(whole[-1])
    assert all(list(blocks.read(0, start)) == whole[start:] for start in range(13))


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    """JSON counts a bare carriage return as white space, also between the values of a record."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text":\r"one"}\n{"text": "two"}\r\n\r{"text": "\xc2\x85\xe2\x80\xa8three"}\r')
    records = _records(path)
    assert records == list(FILE_BLOCKS["jsonl"]([path], Reading()).read(0))
    assert [record.text.decode() for record in records if isinstance(record, Document)] == ["one", "two", "\x85\u2028three"]


def test_shards_of_several_kinds_are_refused(corpora) -> None:
    with pytest.raises(DataError, match=r"not all \.parquet or all \.jsonl"):
        _records(corpora.folder / "*-*[01].*")


def _shard(path: Path, name: str) -> None:
    """Write 20 documents, or a shard with the fault in its name."""
    texts = [f"{path.stem} {number}" for number in range(20)]
    if path.suffix == ".parquet":
        column = {"numbers": list(range(20)), "rowless": pa.array([], pa.string())}.get(name, texts)
        pq.write_table(pa.table({"other" if name == "missing" else "text": column}), path, row_group_size=10, compression="gzip")
    else:
        path.write_text("".join(json.dumps({"text": number if name == "numbers" else text}) + "\n" for number, text in enumerate(texts)))
    if name in ("cut", "empty"):
        path.write_bytes(path.read_bytes()[: 30 if name == "cut" else 0])
    if name == "damaged":
        # in its second row group, row 10 on
        start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
        content = bytearray(path.read_bytes())
        content[start : start + 40] = bytes(40)
        path.write_bytes(content)


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize(
    ("wrong", "suffix", "why", "bad"),
    [
        ("numbers", ".parquet", r"row 0 has an int in field 'text'", 20),
        ("numbers", ".jsonl", r"line 1 has an int in field 'text'", 20),
        ("missing", ".parquet", r"row 0 has no field 'text' \(it has 'other'\)", 20),
        ("cut", ".parquet", r"from row 0 on cannot be read", 1),
        ("cut", ".jsonl", r"line 2 is not JSON", 1),
        ("empty", ".parquet", r"is empty \(a shard holds at least one record\)", 1),
        ("empty", ".jsonl", r"is empty \(a shard holds at least one record\)", 1),
        ("rowless", ".parquet", r"from row 0 on cannot be read", 1),
    ],
)
def test_a_shard_is_judged_by_itself_wherever_it_stands(
    tmp_path: Path, is_first: bool, wrong: str, suffix: str, why: str, bad: int
) -> None:
    for position, name in enumerate((wrong, "sound") if is_first else ("sound", wrong)):
        _shard(tmp_path / f"{position}-{name}{suffix}", name)
    records = _records(tmp_path / f"*{suffix}")
    good = [record.text for record in records if isinstance(record, Document)]
    assert [text for text in good if b"sound" in text] == [f"{int(is_first)}-sound {number}".encode() for number in range(20)]
    found = [str(record) for record in records if isinstance(record, Bad)]
    assert re.search(rf"{wrong}{suffix} {why}", found[0])
    assert len(found) == bad


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_an_empty_shard_is_refused_at_once_or_counted(tmp_path: Path, data_config: Callable[..., RunConfig], suffix: str) -> None:
    for name in ("sound", "empty"):
        _shard(tmp_path / f"{name}{suffix}", name)
    overrides = ["data.source=fineweb_edu", f"data.path={tmp_path}/*{suffix}"]
    with pytest.raises(DataError, match=rf"empty{suffix} is empty .* use --set data\.on_bad_record=skip"):
        open_dataset(data_config(*overrides))
    with open_training_stream(data_config(*overrides, "data.on_bad_record=skip")) as stream:
        while not stream.figures()["data_epoch"]:
            next(stream)
        assert int(stream.figures()["data_bad_records"]) >= 1


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every request fail at once, as without a network."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)


@pytest.mark.usefixtures("no_network")
def test_offline_it_fails_with_the_commands_that_would_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["loader-check", "demo", "--set", "data.source=fineweb_edu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "cannot be reached (ConnectionError: [Errno -2] Name or service not known)" in line
    for command in ("hf download HuggingFaceFW/fineweb-edu", "--set data.path=", "--set data.source=stdlib", "--synthetic-on-fail"):
        assert command in line


@pytest.mark.usefixtures("no_network")
def test_synthetic_on_fail_switches_renames_and_says_so(tmp_path: Path) -> None:
    config = load_config("demo", ["data.source=fineweb_edu", "data.subset=sample-100BT", "data.shuffle_seed=5"])
    found = or_synthetic(Start(config, "demo", ["data.source=fineweb_edu"], tmp_path / "run"))
    assert found.out == tmp_path / "run-synthetic"
    assert found.note.startswith("SYNTHETIC IDS instead of data.source='fineweb_edu': data.source='fineweb_edu' cannot be reached")
    assert (found.config.data.source, found.config.data.shuffle_seed) == ("synthetic", 5)
    # what other processes are started with says the same
    assert load_config(found.recipe, found.overrides) == found.config
    assert or_synthetic(found._replace(note="")).out == found.out
    with open_training_stream(found.config) as stream:
        next(stream)
        assert (stream.figures()["data_source"], stream.figures()["data_synthetic"]) == ("synthetic", 1)


@pytest.mark.usefixtures("no_network")
def test_synthetic_on_fail_never_changes_the_data_of_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real, switched = tmp_path / "run", tmp_path / "run-synthetic"
    words = ["run", "demo", "--set", "data.source=fineweb_edu", "--synthetic-on-fail", "--resume", "--out", str(real)]
    for is_left in (False, True):
        real.mkdir(exist_ok=True)
        (real / "config.toml").touch()
        # also beside one that began with synthetic ids
        if is_left:
            switched.mkdir()
            (switched / "config.toml").touch()
        assert run_command(words) == 2
        error = capsys.readouterr().err
        assert "cannot be reached" in error
        assert f"--synthetic-on-fail with --resume would change the data of '{real}'" in error
        assert switched.exists() == is_left


@pytest.mark.usefixtures("no_network")
def test_a_run_that_began_with_synthetic_ids_goes_on_with_them(tmp_path: Path) -> None:
    start = Start(load_config("demo", ["data.source=fineweb_edu"]), "demo", [], tmp_path / "run")
    (tmp_path / "run-synthetic").mkdir()
    (tmp_path / "run-synthetic/config.toml").touch()
    for out in (start.out, tmp_path / "run-synthetic"):
        assert or_synthetic(start._replace(out=out), resuming=True).out == tmp_path / "run-synthetic"


def test_synthetic_on_fail_opens_no_data_for_a_directory_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(config: RunConfig) -> None:
        raise AssertionError("the data were opened")

    monkeypatch.setattr("nsa_train.data.fallback.open_dataset", opened)
    words = ["run", "demo", "--set", "data.source=fineweb_edu", "--synthetic-on-fail", "--out", str(tmp_path / "run")]
    with CheckpointWriter(tmp_path / "run" / "checkpoints"):
        assert run_command(words) == 2
    assert "belongs to another process that still runs" in capsys.readouterr().err
    (tmp_path / "run" / ".HALT").touch()
    assert run_command(words) == 2
    assert ".HALT is left from before" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_synthetic_on_fail_changes_nothing_where_data_opens(tmp_path: Path) -> None:
    start = Start(load_config("demo"), "demo", [], tmp_path / "run")
    assert or_synthetic(start) == start


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("out", [".", ".."])
def test_synthetic_on_fail_renames_the_directory_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    (tmp_path / "run/inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / ("run" if out == "." else "run/inner"))
    found = or_synthetic(Start(load_config("demo", ["data.source=fineweb_edu"]), "demo", [], Path(out)))
    assert found.out == tmp_path / "run-synthetic"
