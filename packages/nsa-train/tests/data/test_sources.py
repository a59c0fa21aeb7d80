"""The corpora: what is read, how it is split, and what is said about files that will not do."""

import os
import sysconfig
from pathlib import Path

import pytest

from nsa_train.config import DataTable
from nsa_train.data.packing import PackedRows
from nsa_train.data.pipeline import BatchStream
from nsa_train.data.sources import Document, read_corpus, read_stdlib, split_by_content, split_by_position
from nsa_train.data.tokenizer import ByteTokenizer
from nsa_train.errors import DataError


def test_stdlib_is_the_sources_of_this_python() -> None:
    corpus = read_corpus(DataTable(source="stdlib"))
    root = Path(sysconfig.get_path("stdlib"))
    names = [document.name for document in (*corpus.train, *corpus.val)]
    assert len(names) > 300
    assert "dataclasses.py" in names
    assert not any(set(Path(name).parts) & {"test", "tests", "site-packages"} for name in names)
    assert all(document.text == (root / document.name).read_bytes() for document in corpus.val)
    assert 1 <= len(corpus.val) < len(corpus.train) / 5


def test_training_batches_hold_source_text_and_not_noise() -> None:
    """A flag of the earlier system silently trained on noise."""
    corpus = read_corpus(DataTable(source="stdlib"))
    tokenizer = ByteTokenizer()
    rows = PackedRows(corpus.train, tokenizer, seq_len=256, seed=0)
    with BatchStream(rows, batch_size=8, seed=0, prefetch=1) as stream:
        batch = next(stream)
    everything = b"\n".join(document.text for document in corpus.train)
    pieces = batch.input_ids[0].split(batch.lengths.tolist())
    assert all(bytes(index for index in piece.tolist() if index < 256) in everything for piece in pieces)


def test_stdlib_is_read_in_sorted_order_each_time_alike() -> None:
    names = [document.name for document in read_stdlib()]
    assert names == [document.name for document in read_stdlib()]
    assert names == sorted(names, key=lambda name: Path(name).parts)


def test_one_file_is_cut_by_position(tiny_text: Path) -> None:
    corpus = read_corpus(DataTable(source="text", path=str(tiny_text)))
    [train], [val] = corpus
    assert train.text + val.text == tiny_text.read_bytes()
    assert len(val.text) == pytest.approx(len(train.text) / 9, rel=0.01)


def test_a_glob_is_split_by_file(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number}")
    corpus = read_corpus(DataTable(source="text", path=str(tmp_path / "*.txt")))
    names = [document.name for document in (*corpus.train, *corpus.val)]
    assert sorted(names) == [str(path) for path in sorted(tmp_path.iterdir())]
    assert 1 <= len(corpus.val) <= 12


def test_a_new_file_moves_no_other_between_the_splits() -> None:
    documents = [Document(str(number), f"document {number}".encode()) for number in range(100)]
    before, after = split_by_content(documents[:-1]), split_by_content(documents)
    assert set(before.val) <= set(after.val)
    assert set(before.train) <= set(after.train)


@pytest.mark.parametrize("count", [2, 3, 5, 40])
def test_both_splits_exist_and_share_no_text(count: int) -> None:
    documents = [Document(f"{number}", f"text {number % (count - 1)}".encode()) for number in range(count)]
    if count == 2:
        documents[1] = Document("1", b"other")
    corpus = split_by_content(documents)
    assert corpus.train
    assert corpus.val
    assert not {document.text for document in corpus.train} & {document.text for document in corpus.val}


def test_equal_files_cannot_be_split() -> None:
    with pytest.raises(DataError, match="a and the 1 other files are equal"):
        split_by_content([Document("a", b"same"), Document("b", b"same")])


def test_any_bytes_are_a_text(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(bytes(range(256)) * 4)
    corpus = read_corpus(DataTable(source="text", path=str(path)))
    assert len(corpus.train[0].text) + len(corpus.val[0].text) == 1024


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.txt", r"absent\.txt cannot be read \(No such file or directory\)"),
        ("empty.txt", r"empty\.txt is empty"),
        ("folder", r"folder cannot be read \(Is a directory\)"),
        ("*.none", r"\*\.none cannot be read \(No such file or directory\)"),
        ("*.txt", r"empty\.txt is empty"),
        ("one.bin", r"one\.bin holds 1 byte"),
    ],
)
def test_a_file_that_will_not_do_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "full.txt").write_text("text")
    (tmp_path / "one.bin").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=message):
        read_corpus(DataTable(source="text", path=str(tmp_path / name)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("text")
    path.chmod(0)
    with pytest.raises(DataError, match=r"secret\.txt cannot be read \(Permission denied\)"):
        read_corpus(DataTable(source="text", path=str(path)))


def test_positions_of_the_cut_stand_in_the_names() -> None:
    [train], [val] = split_by_position(Document("f", b"0123456789"))
    assert (train, val) == (Document("f[:9]", b"012345678"), Document("f[9:]", b"9"))
