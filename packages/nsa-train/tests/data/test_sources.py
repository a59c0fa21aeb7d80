"""The corpora: their content, their split, and the messages about unusable files."""

import os
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa_train.data.dataset import FILE_BLOCKS, open_dataset
from nsa_train.data.sources.base import Bad, Document, Reading
from nsa_train.data.sources.jsonl import BYTES_PER_BLOCK, LINES_PER_BLOCK, JsonlBlocks
from nsa_train.data.sources.split import limit_of, rank_of, split
from nsa_train.data.sources.text import StdlibBlocks
from nsa_train.data.stream import open_training_stream
from nsa_train.errors import DataError
from nsa_train.settings.config import RunConfig


def _documents(texts: list[bytes]) -> list[Document]:
    return [Document(str(number), text) for number, text in enumerate(texts)]


def test_stdlib_is_the_sources_of_this_python() -> None:
    blocks = StdlibBlocks(Reading())
    records = [record for block in range(len(blocks)) for record in blocks.read(block)]
    root = Path(sysconfig.get_path("stdlib"))
    names = [record.name for record in records if isinstance(record, Document)]
    assert len(names) == len(records) > 300
    assert "dataclasses.py" in names
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert not any(set(Path(name).parts) & {"test", "tests", "site-packages"} for name in names)
    assert all(record.text == (root / record.name).read_bytes() for record in records[::50] if isinstance(record, Document))


def test_training_batches_hold_source_text_and_not_noise(data_config: Callable[..., RunConfig]) -> None:
    """A flag of the earlier system silently trained on noise."""
    dataset = open_dataset(data_config())
    with open_training_stream(dataset.config, dataset=dataset) as stream:
        batch = next(stream)
    blocks = StdlibBlocks(Reading())
    everything = b"\n".join(record.text for block in range(len(blocks)) for record in blocks.read(block) if isinstance(record, Document))
    pieces = batch.input_ids[0].split(batch.lengths.tolist())
    assert all(bytes(index for index in piece.tolist() if index < 256) in everything for piece in pieces)


def test_one_file_is_cut_by_position(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    text = "".join(f"{number} bottles stood on the wall; été.\n" for number in range(250))
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    dataset = open_dataset(data_config("data.source=text", f"data.path={tmp_path}/one.txt"))
    val = dataset.tokenizer.decode(torch.from_numpy(dataset.held_out.stream))
    assert text.endswith(val)
    assert len(val) == pytest.approx(len(text) / 10, rel=0.02)
    assert dataset.sizes["train_tokens"] + dataset.sizes["val_tokens"] == len(text.encode()) + 2


def test_a_cut_divides_no_character() -> None:
    found = split([_documents(["é".encode() * 15])])
    assert [document.text.decode() for document in (*found.train[0], *found.val)] == ["é" * 13, "é" * 2]
    assert [document.name for document in (*found.train[0], *found.val)] == ["0[:26]", "0[26:]"]


def test_a_new_file_moves_no_other_between_the_sides() -> None:
    documents = _documents([f"document {number}".encode() for number in range(100)])
    before, after = split([documents[:-1]]), split([documents])
    assert set(before.val) <= set(after.val)
    assert set(before.train[0]) <= set(after.train[0])


@pytest.mark.parametrize("count", [2, 3, 5, 40])
def test_both_sides_exist_and_share_no_text(count: int) -> None:
    texts = [f"text {number % max(2, count - 1)}".encode() for number in range(count)]
    found = split([_documents(texts)])
    assert found.train[0]
    assert found.val
    assert not {document.text for document in found.train[0]} & {document.text for document in found.val}


def test_parts_share_one_limit_so_that_a_copy_elsewhere_is_held_out_too() -> None:
    texts = [f"text {number}".encode() for number in range(60)]
    # by themselves, the three of the second part would give one away
    last = sorted(texts, key=rank_of)[-3:]
    found = split([_documents(texts), _documents(last), _documents([b"alone in its part"])])
    assert len(found.train[1]) == 3
    trained = {document.text for documents in found.train for document in documents}
    assert not trained & {document.text for document in found.val}
    assert len(found.train) == 3


def _lines(word: str) -> str:
    return "".join(f"{number} {word} stood on the wall.\n" for number in range(200))


@pytest.mark.parametrize("is_held_out", [False, True], ids=["trained", "held out"])
@pytest.mark.parametrize("other", ["{}", "before\n{}after\n", "{}\n\n"], ids=["equal", "quoted", "longer"])
def test_a_cut_file_with_a_copy_in_another_part_is_refused_by_name(
    tmp_path: Path, data_config: Callable[..., RunConfig], probe, other: str, is_held_out: bool
) -> None:
    lines = (_lines(f"{number} bottles") for number in range(1000))
    share = limit_of([0, 2**32])
    text = next(text for text in lines if (rank_of(other.format(text).encode()) < share) == is_held_out)
    (tmp_path / "copy.txt").write_text(text)
    (tmp_path / "d").mkdir()
    for number, content in enumerate([other.format(text), *(f"text {number} {'word ' * 40}" for number in range(20))]):
        (tmp_path / f"d/{number:02}.txt").write_text(content)
    found = probe(data_config("data.source=mix", f'data.mix={{"{tmp_path}/copy.txt" = 1, "{tmp_path}/d/*.txt" = 1}}'))
    [line] = found.failed
    held_out, trained = (rf"{tmp_path}/d/00\.txt", rf"{tmp_path}/copy\.txt\[:\d+\]")
    if not is_held_out:
        held_out, trained = (rf"{tmp_path}/copy\.txt\[\d+:\]", held_out)
    assert re.match(rf"data: {held_out} is held out for validation, and shares text with {trained}, which is for training; name each", line)
    assert not found.passed
    fixed = probe(data_config("data.source=mix", f'data.mix={{"{tmp_path}/copy.txt" = 1, "{tmp_path}/d/[01][1-9].txt" = 1}}'))
    assert not fixed.failed


def test_a_short_end_that_other_files_have_too_is_no_copy(tmp_path: Path, data_config: Callable[..., RunConfig], probe) -> None:
    end = "\n\nif __name__ == '__main__':\n    main()\n"
    for name in ("one", "d1", "d2", "d3"):
        (tmp_path / f"{name}.txt").write_text(f"{name} says {name}, " * 20 + end)
    config = data_config("data.source=mix", f'data.mix={{"{tmp_path}/one.txt" = 1, "{tmp_path}/d*.txt" = 1}}', "train.seq_len=16")
    assert not probe(config).failed


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("batch_size", [4, 8])
def test_a_part_of_a_large_mix_without_a_training_document_is_refused_by_name(
    corpora, tmp_path: Path, data_config: Callable[..., RunConfig], kind: str, batch_size: int
) -> None:
    texts = (f"text {number} {'word ' * 40}" for number in range(1000))
    held_out = next(text for text in texts if rank_of(text.encode()) < limit_of([0, 2**32]))
    path = tmp_path / f"held.{kind}"
    path.write_text(held_out if kind == "txt" else f'{{"text": "{held_out}"}}\noops\n')
    mix = f'data.mix={{"{path}" = 1, "{corpora.folder}/a-*.jsonl" = 1}}'
    sets = ["data.source=mix", mix, f"train.batch_size={batch_size}", "data.on_bad_record=skip"]
    with pytest.raises(DataError) as caught:
        open_dataset(data_config(*sets, "data.in_memory_mib=0"))
    assert f"data.mix: '{path}' has no document for training (1 is held out for validation" in str(caught.value)
    assert ("the first that was skipped: data.path: " in str(caught.value)) == (kind == "jsonl")
    fix = re.search(r"--set (data\.in_memory_mib=\d+)", str(caught.value))
    assert fix
    with open_training_stream(data_config(*sets, fix[1])) as stream:
        assert next(stream).num_targets > 0


def test_equal_files_cannot_be_split() -> None:
    with pytest.raises(DataError, match="0 and the 1 other documents are equal"):
        split([_documents([b"same", b"same"])])


def test_one_byte_cannot_be_split() -> None:
    with pytest.raises(DataError, match="0 holds 1 byte"):
        split([_documents([b"x"])])


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "fineweb_edu"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.txt", r"absent\.txt cannot be read \(No such file or directory\)"),
        ("empty.jsonl", r"empty\.jsonl is empty"),
        ("folder", r"folder cannot be read \(Is a directory\)"),
        ("*.none", r"\*\.none cannot be read \(No such file or directory\)"),
        ("pipe", r"pipe cannot be read \(not a regular file\)"),
    ],
)
def test_a_file_that_will_not_do_is_named(
    tmp_path: Path, data_config: Callable[..., RunConfig], source: str, name: str, message: str
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=message):
        open_dataset(data_config(f"data.source={source}", f"data.path={tmp_path}/{name}"))


@pytest.mark.parametrize("source", ["text", "fineweb_edu", "mix"])
def test_a_glob_that_matches_folders_alone_is_named(tmp_path: Path, data_config: Callable[..., RunConfig], source: str) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    glob = f"{tmp_path}/*"
    key = f'data.mix={{"{glob}" = 1}}' if source == "mix" else f"data.path={glob}"
    with pytest.raises(DataError, match=r"matches 2 folders and no file; name files, such as '.*/\*/\*'"):
        open_dataset(data_config(f"data.source={source}", key))


@pytest.mark.parametrize(("source", "package"), [("parquet", "pyarrow"), ("fineweb_edu", "datasets")])
def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(
    corpora, data_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, source: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"needs .*{package}, which is not installed.*; use pip install {package}, or --set"):
        open_dataset(data_config(f"data.source={source}", f"data.path={corpora.folder}/b.parquet"))


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "fineweb_edu"])
@pytest.mark.parametrize("name", ["Übung 東京", "notes [1]"])
def test_a_name_may_hold_any_character(corpora, tmp_path: Path, data_config: Callable[..., RunConfig], source: str, name: str) -> None:
    original = (
        next((corpora.folder / "d").iterdir()) if source == "text" else corpora.folder / ("a-0.jsonl" if source == "jsonl" else "b.parquet")
    )
    path = tmp_path / f"{name}{original.suffix}"
    path.write_bytes(original.read_bytes())
    if source == "text":
        path.write_text("a text of some length, " * 99)
    dataset = open_dataset(data_config(f"data.source={source}", f"data.path={path}"))
    with open_training_stream(dataset.config, dataset=dataset) as stream:
        assert next(stream).num_targets > 0


def test_large_texts_that_are_fewer_than_the_rows_are_refused(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    """Several rows would read one text side by side, and a batch would hold equal rows."""
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(" ".join(f"{number}.{word}" for word in range(4000)))
    sets = ["data.source=text", f"data.path={tmp_path}/[1-8].txt", "data.in_memory_mib=0"]
    with pytest.raises(DataError, match=r"8 texts are too few for train\.batch_size=8 rows .*; use --set data\.in_memory_mib=1, or cut"):
        open_dataset(data_config(*sets))
    for fixed in (["data.in_memory_mib=1"], [f"data.path={tmp_path}/*.txt"]):
        with open_training_stream(data_config(*sets, *fixed)) as stream:
            rows = next(stream).input_ids[0].split(48)
        assert len({row.numpy().tobytes() for row in rows}) == 8


def test_a_large_held_out_document_at_the_very_beginning_ends_no_search(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    texts = [f"{number} {'word ' * 4000}".encode() for number in range(400)]
    held_out = [text for text in texts if rank_of(text) < limit_of([0, 2**32])][:12]
    # all that can be met first fill the validation split, and the last of the corpus do not
    for number, text in enumerate([*held_out, *(text for text in texts if text not in held_out)][:13]):
        (tmp_path / f"{number:02}.txt").write_bytes(text)
    dataset = open_dataset(data_config("data.source=text", f"data.path={tmp_path}/*.txt", "data.in_memory_mib=0"))
    assert dataset.sizes["val_documents"] >= 1
    with open_training_stream(dataset.config, dataset=dataset) as stream:
        assert next(stream).num_targets > 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("text")
    path.chmod(0)
    with pytest.raises(DataError, match=r"secret\.txt cannot be read \(Permission denied\)"):
        open_dataset(data_config("data.source=text", f"data.path={path}"))


def test_a_list_of_globs_reads_every_file_once(corpora, data_config: Callable[..., RunConfig]) -> None:
    folder = corpora.folder
    both = open_dataset(data_config("data.source=jsonl", f'data.path=["{folder}/a-0.jsonl", "{folder}/a-*.jsonl"]'))
    once = open_dataset(data_config("data.source=jsonl", f"data.path={folder}/a-*.jsonl"))
    assert both.fingerprint == once.fingerprint


@pytest.mark.parametrize("length", [1, 700, 5000])
def test_jsonl_blocks_hold_every_line_once_wherever_they_are_cut(tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_train.data.sources.jsonl._CHUNK", 1009)
    monkeypatch.setattr("nsa_train.data.sources.jsonl.BYTES_PER_BLOCK", 2**14)
    lines = [f'{{"text": "{number}{"x" * (number * 7919 % length)}"}}' for number in range(301)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    blocks = JsonlBlocks([tmp_path / "a.jsonl"], Reading())
    found = [record for block in range(len(blocks)) for record in blocks.read(block)]
    assert [record.text.decode() for record in found if isinstance(record, Document)] == [line[10:-2] for line in lines]
    assert [record.name for record in found][::100] == [f"{tmp_path}/a.jsonl:{number}" for number in (1, 101, 201, 301)]
    assert max(len(list(blocks.read(block))) for block in range(len(blocks))) <= LINES_PER_BLOCK
    assert [record for block in range(len(blocks)) for record in blocks.read(block, 3)] == [
        record for block in range(len(blocks)) for record in list(blocks.read(block))[3:]
    ]
    assert BYTES_PER_BLOCK == 2**18


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_block_is_read_from_any_record_on(corpora, kind: str) -> None:
    path = corpora.folder / ("a-0.jsonl" if kind == "jsonl" else "b.parquet")
    blocks = FILE_BLOCKS[kind]([path], Reading())
    whole = list(blocks.read(0))
    assert len(whole) > 8
    assert all(list(blocks.read(0, start)) == whole[start:] for start in range(len(whole) + 2))
    assert not any(isinstance(record, Bad) for record in whole)
