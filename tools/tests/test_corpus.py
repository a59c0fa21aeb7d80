"""tools/corpus.py on small projects of a temporary directory, and a part of it on this Python."""

import json
import random

import pytest

from nsa_train.data.sources.base import Document
from nsa_train.data.sources.split import split
from tools import corpus
from tools.corpus import Project

WORDS = ["def", "return", "value", "import", "self", "\n", "é"]


@pytest.fixture
def projects(tmp_path):
    """Eight projects of 20 files of about 1 KiB, the last of which two share."""
    found = []
    for index in range(8):
        folder = tmp_path / f"project-{index}"
        folder.mkdir()
        drawn = random.Random(index)
        for number in range(19):
            (folder / f"{number:02d}.py").write_text(" ".join(drawn.choices(WORDS, k=250)), encoding="utf-8")
        (folder / "vendored.py").write_text("shared = 1\n" * 100)
        found.append(Project(f"project-{index}", "1.0", sorted(folder.glob("*"))))
    return found


def texts_of(out):
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.glob("*/*.txt"))}


def run(projects, out, *words):
    assert corpus.main([str(out), "--piece-mib", "0.004", *words], projects) == 0
    return json.loads((out / "corpus.json").read_text())


def test_held_out_documents_are_whole_projects_that_are_not_trained_on(projects, tmp_path):
    record = run(projects, tmp_path / "out")
    texts = texts_of(tmp_path / "out")
    sides = split([[Document(name, text) for name, text in texts.items()]])
    assert {document.name for document in sides.val} == {name for name in texts if name.startswith("held-out/")}
    projects_of = {side: {name.split("/")[1][:9] for name in texts if name.startswith(side)} for side in ("train", "held-out")}
    assert projects_of["held-out"]
    assert not projects_of["held-out"] & projects_of["train"]
    assert {row["name"]: row["side"] for row in record["projects"]} == {name: side for side, names in projects_of.items() for name in names}


def test_a_folder_that_is_no_corpus_is_left_alone(projects, tmp_path, capsys):
    (tmp_path / "mine/train").mkdir(parents=True)
    (tmp_path / "mine/train/precious.txt").touch()
    with pytest.raises(SystemExit):
        run(projects, tmp_path / "mine")
    assert "train would be deleted, and no corpus.json beside it says that it is a corpus" in capsys.readouterr().err
    assert (tmp_path / "mine/train/precious.txt").exists()
    run(projects, tmp_path / "out")
    run(projects, tmp_path / "out")


def test_a_file_stands_in_the_first_project_that_has_it(projects, tmp_path):
    record = run(projects, tmp_path / "out")
    assert sum(text.count(b"shared = 1\n" * 100) for text in texts_of(tmp_path / "out").values()) == 1
    assert [row["duplicates"] for row in sorted(record["projects"], key=lambda row: row["name"])] == [0, *[1] * 7]


def test_pieces_end_where_files_end_and_lose_nothing(projects, tmp_path):
    run(projects, tmp_path / "out")
    texts = texts_of(tmp_path / "out")
    for project in projects:
        pieces = [text for name, text in texts.items() if f"/{project.name}-" in name]
        files = [path.read_text().strip().encode() for path in project.paths[:-1]]
        assert len(pieces) > 2
        assert all(sum(file in piece for piece in pieces) == 1 for file in files)


def test_the_limit_cuts_pieces_and_no_project_takes_more_than_a_quarter(projects, tmp_path):
    record = run(projects, tmp_path / "out", "--limit-mib", "0.05")
    assert sum(row["bytes"] for row in record["projects"]) == pytest.approx(0.05 * 2**20, rel=0.15)
    assert max(row["bytes"] for row in record["projects"]) <= 0.05 * 2**20 / 4 + 2**13


def test_two_runs_write_the_same_bytes(projects, tmp_path):
    first, second = (run(projects, tmp_path / name) for name in "ab")
    assert first == second
    assert texts_of(tmp_path / "a") == texts_of(tmp_path / "b")


def test_files_that_are_no_utf8_text_are_left_out(projects, tmp_path):
    projects[0].paths[0].write_bytes(b"\xff\xfe" + b"latin" * 300)
    projects[0].paths[1].write_bytes(b"binary\0" * 300)
    run(projects, tmp_path / "out")
    assert not any(b"latin" in text or b"binary" in text for text in texts_of(tmp_path / "out").values())


def test_too_few_projects_are_refused(projects, tmp_path, capsys):
    assert corpus.main([str(tmp_path / "out"), "--piece-mib", "0.004"], projects[:1]) == 1
    assert "too few" in capsys.readouterr().out


def test_the_standard_library_comes_first_and_every_project_once():
    found = list(corpus.installed_projects())
    names = [project.name for project in found]
    assert names[0] == corpus.STDLIB
    assert "torch" in names
    assert len(set(names)) == len(names)
    assert any(path.name == "argparse.py" for path in found[0].paths)
