"""Result files."""

import csv
import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from nsa_bench.options import ResultFiles
from nsa_bench.results import Output, check_writable, write_csv, write_json


def test_json_is_indented_and_ends_with_a_newline(tmp_path):
    write_json(tmp_path / "a.json", {"é": [1, None]})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"é": [1, None]}
    assert text.endswith("}\n")


def test_what_json_has_no_word_for_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"ms": float("nan")})


def test_csv_has_a_header_and_quotes_what_needs_it(tmp_path):
    write_csv(tmp_path / "a.csv", [{"name": "a,b", "value": None}, {"name": 'say "x"', "value": 2}])
    with (tmp_path / "a.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"name": "a,b", "value": ""}, {"name": 'say "x"', "value": "2"}]


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    write_json(file, {"rows": [1]})
    write = Path.write_text

    def on_a_full_disk(path, text, **options):
        write(path, text[:3], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", on_a_full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_json(file, {"rows": [1, 2]})
    assert json.loads(file.read_text()) == {"rows": [1]}
    assert list(tmp_path.iterdir()) == [file]
    # what a long command has so far may fail to be written, and it goes on
    said = io.StringIO()
    output = Output(ResultFiles(json_file=file), progress=Console(file=said, width=200))
    output.keep(lambda: output.write({"rows": [1, 2]}, []))
    assert f"what there is so far was not written (OSError: [Errno 28] No space left on device: '{file}')" in said.getvalue()


def test_the_target_of_a_link_is_replaced_and_a_pipe_is_written_to(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "a.json")
    write_json(link, {"rows": [1]})
    assert link.is_symlink()
    assert json.loads((tmp_path / "a.json").read_text()) == {"rows": [1]}
    write_json(Path("/dev/null"), {"rows": [1]})
    assert Path("/dev/null").is_char_device()


def test_a_check_of_files_leaves_none_behind(tmp_path):
    there, link = tmp_path / "a.json", tmp_path / "link.csv"
    there.write_text("mine")
    link.symlink_to(tmp_path / "b.csv")
    Output(ResultFiles(json_file=there, csv_file=link)).check_files(tmp_path / "c.png", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "link.csv"]
    assert there.read_text() == "mine"
    with pytest.raises(FileNotFoundError):
        Output(ResultFiles(json_file=tmp_path / "new.json", csv_file=tmp_path / "none" / "a.csv")).check_files()
    assert not (tmp_path / "new.json").exists()


def test_a_pipe_that_has_no_path_can_be_written():
    reader, writer = os.pipe()
    try:
        check_writable([Path(f"/dev/fd/{writer}")])
        write_json(Path(f"/dev/fd/{writer}"), {"rows": [1]})
        assert json.loads(os.read(reader, 100)) == {"rows": [1]}
    finally:
        os.close(reader)
        os.close(writer)
