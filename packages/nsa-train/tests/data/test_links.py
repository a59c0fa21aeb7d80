"""A file is read once an epoch, however many names it has, and the names that are dropped are counted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa_train.cli import run_command
from nsa_train.data.dataset import open_dataset
from nsa_train.data.sources.base import Reading
from nsa_train.data.sources.files import files_of
from nsa_train.errors import DataError
from nsa_train.settings.config import RunConfig


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A folder with 200 documents in one file, and a link to itself."""
    folder = tmp_path / "rec"
    folder.mkdir()
    lines = [json.dumps({"text": f"<{number}> " + "word " * (number % 9)}) + "\n" for number in range(200)]
    (folder / "a.jsonl").write_text("".join(lines))
    (folder / "self").symlink_to(".")
    return folder


@pytest.mark.parametrize("source", ["jsonl", "fineweb_edu"])
@pytest.mark.parametrize("in_memory_mib", [64, 0])
def test_a_link_to_a_parent_multiplies_nothing(
    records: Path, data_config: Callable[..., RunConfig], source: str, in_memory_mib: int
) -> None:
    sets = [f"data.source={source}", f"data.in_memory_mib={in_memory_mib}", "train.seq_len=16"]
    through_links = open_dataset(data_config(*sets, f"data.path={records}/**/*.jsonl"))
    plain = open_dataset(data_config(*sets, f"data.path={records}/a.jsonl"))
    assert (through_links.sizes, through_links.fingerprint) == (plain.sizes, plain.fingerprint)


def test_the_names_that_are_dropped_are_counted_where_a_run_starts(records: Path, data_config: Callable[..., RunConfig], probe) -> None:
    [line] = probe(data_config("data.source=jsonl", f"data.path={records}/**/*.jsonl")).warned
    assert line == (
        f"data: 40 file names are dropped (links to files that are there already; each file is read once an epoch); the first: "
        f"{records}/self/a.jsonl is {records}/a.jsonl"
    )
    assert probe(data_config("data.source=jsonl", f"data.path={records}/*.jsonl")).warned == []


def test_the_names_that_are_dropped_are_counted_by_loader_check(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["--set", "data.source=jsonl", "--set", "train.seq_len=16", "--set"]
    assert run_command(["loader-check", "demo", *sets, f"data.path={records}/**/*.jsonl"]) == 0
    assert "\nfiles         40 file names are dropped (links to files that are there already" in capsys.readouterr().out
    assert run_command(["loader-check", "demo", *sets, f"data.path={records}/*.jsonl"]) == 0
    assert "dropped" not in capsys.readouterr().out


def _found(*patterns: str) -> tuple[list[str], list[tuple[str, str]]]:
    reading = Reading()
    paths = files_of(patterns, reading)
    return [path.name for path in paths], [(path.name, kept.name) for path, kept in reading.dropped]


def test_hard_links_and_links_to_files_are_names_of_one_file(tmp_path: Path) -> None:
    for name in ("b.txt", "d.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "c.txt").hardlink_to(tmp_path / "b.txt")
    (tmp_path / "e.txt").symlink_to("d.txt")
    assert _found(f"{tmp_path}/*.txt") == (["b.txt", "d.txt"], [("c.txt", "b.txt"), ("e.txt", "d.txt")])
    # also over several patterns; what is named twice by one name was always read once, and is no link
    assert _found(f"{tmp_path}/e.txt", f"{tmp_path}/*.txt") == (["e.txt", "b.txt"], [("c.txt", "b.txt"), ("d.txt", "e.txt")])
    assert _found(f"{tmp_path}/b.txt", f"{tmp_path}/b.txt") == (["b.txt"], [])


def test_the_name_through_the_fewest_folders_is_kept(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text("text")
    (tmp_path / "a").symlink_to(".")
    reading = Reading()
    assert files_of([f"{tmp_path}/**/*.txt"], reading) == [tmp_path / "m.txt"]
    assert len(reading.dropped) == 40


def test_equal_copies_are_files_of_their_own(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same")
    assert _found(f"{tmp_path}/*.txt") == (["a.txt", "b.txt"], [])


def test_a_text_and_a_link_to_it_are_one_text_which_is_cut(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    """Two names of one text, one of them held out and one trained on, would be the same text on both sides."""
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(2000))))
    (tmp_path / "b.txt").symlink_to("a.txt")
    dataset = open_dataset(data_config("data.source=text", f"data.path={tmp_path}/*.txt"))
    assert (dataset.sizes["train_documents"], dataset.sizes["val_documents"], dataset.shared) == (1, 1, ())


def test_links_within_a_part_of_a_mix_are_dropped(records: Path, data_config: Callable[..., RunConfig], probe) -> None:
    (records / "b.txt").write_text(" ".join(map(str, range(2000))))
    (records / "c.txt").hardlink_to(records / "b.txt")
    mix = f'data.mix={{"{records}/**/*.jsonl" = 1, "{records}/*.txt" = 1}}'
    found = probe(data_config("data.source=mix", mix))
    assert not found.failed
    assert found.warned[0].startswith("data: 41 file names are dropped (links")


def test_two_links_in_a_circle_end_in_a_line(records: Path) -> None:
    """They make 2**40 names."""
    (records / "other").symlink_to(".")
    with pytest.raises(DataError, match=r"matches 10,\d+ names of 1 files, and more \(folders hold links to folders above them\); remove"):
        files_of([f"{records}/**/*.jsonl"], Reading())


def test_a_link_to_a_file_beside_a_link_to_the_folder_is_a_name_of_the_file(records: Path) -> None:
    """Through the folder's link 40 times, the file's own link is one more than the system follows."""
    (records / "soft.jsonl").symlink_to("a.jsonl")
    found, dropped = _found(f"{records}/**/*.jsonl")
    assert found == ["a.jsonl"]
    assert len(dropped) > 40
    (records / "other").symlink_to(".")
    with pytest.raises(DataError, match=r"matches 10,\d+ names of 2 files, and more \(folders hold links to folders above them\); remove"):
        files_of([f"{records}/**/*.jsonl"], Reading())


def test_a_link_in_a_circle_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").symlink_to("two.jsonl")
    (tmp_path / "two.jsonl").symlink_to("one.jsonl")
    with pytest.raises(DataError, match=r"one.jsonl cannot be read \(Too many levels of symbolic links\)"):
        files_of([f"{tmp_path}/*.jsonl"], Reading())
