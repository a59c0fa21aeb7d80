"""`nsa-bench report`: a page of result files, and the archive."""

import hashlib
import json
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nsa_bench.cli import run_command
from nsa_bench.report import find_results, table_of


def write(path: Path, rows: list[dict[str, Any]], **more: Any) -> Path:
    environment = {"time": "2026-01-02T03:04:05+00:00", "gpu": "NVIDIA <H200>", "torch": "2.11.0", "commit": "abc", "packages": {}}
    path.write_text(json.dumps({"environment": environment, "options": {"device": None, "shapes": "P"}, "rows": rows, **more}))
    return path


class Cells(HTMLParser):
    """Collects the cells of every table row, and refuses what would reach the network."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._is_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert all(not str(value).startswith(("http", "//")) for _, value in attrs)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self._is_cell = tag in ("td", "th")

    def handle_endtag(self, tag: str) -> None:
        self._is_cell = self._is_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.rows[-1][-1] += data


def test_columns_that_are_equal_in_all_rows_stand_above_the_table() -> None:
    rows = [{"shape": "P", "ms": 1.23456, "note": None}, {"shape": "P", "ms": 2.0, "note": "<b>"}]
    table = table_of("rows", rows)
    assert table.columns == ["ms", "note"]
    assert table.rows == [["1.235", ""], ["2", "<b>"]]
    assert table.same == {"shape": "P"}
    # one row keeps all of its columns
    assert table_of("rows", rows[:1]).columns == ["shape", "ms", "note"]


def test_every_row_of_every_file_is_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a/one.json", [{"ms": 1.5, "name": "</td><script>x"}, {"ms": 2.5, "name": "b & c"}])
    write(tmp_path / "a/two.json", [{"S": 8192}], knees=[{"knee": 256}, {"knee": 512}])
    (tmp_path / "a/other.json").write_text("[1]")
    page = tmp_path / "page.html"
    assert run_command(["report", str(tmp_path / "a"), "-o", str(page)]) == 0
    cells = Cells()
    cells.feed(page.read_text(encoding="utf-8"))
    assert cells.rows == [["ms", "name"], ["1.5", "</td><script>x"], ["2.5", "b & c"], ["S"], ["8192"], ["knee"], ["256"], ["512"]]
    assert "NVIDIA &lt;H200&gt;" in page.read_text(encoding="utf-8")


def test_a_file_that_is_named_twice_is_one_result(tmp_path: Path) -> None:
    one = write(tmp_path / "one.json", [{"ms": 1}])
    assert [result.path for result in find_results([one, tmp_path])[0]] == [one]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "a.json"], "--out=a.json is a file that"),
        (["--bundle", "a.json"], "--bundle=a.json is a file that"),
        (["--bundle", "b.zip", "--tests", "tests.xml", "-o", "tests.xml"], "--out=tests.xml is a file that"),
        (["-o", "x", "--bundle", "x"], "--bundle=x is a file that"),
        (["-o", "page.html", "--bundle", "none/b.zip"], "No such file or directory: 'none/b.zip'"),
    ],
)
def test_no_file_is_written_over_and_none_written_in_part(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tests.xml").write_text("mine")
    before = write(tmp_path / "a.json", [{"a": 1}]).read_text()
    assert run_command(["report", "a.json", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert (Path("a.json").read_text(), Path("tests.xml").read_text()) == (before, "mine")
    assert not Path("page.html").exists()


def test_the_archive_holds_what_its_list_says(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "r.json", [{"name": name}])
    report = tmp_path / "tests.xml"
    report.write_text("<ok/>")
    words = ["report", str(tmp_path / "x"), str(tmp_path / "y"), "-o", str(tmp_path / "p.html"), "--tests", str(report)]
    assert run_command([*words, "--bundle", str(tmp_path / "b.zip")]) == 0
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    listed = dict(reversed(line.split("  ", 1)) for line in held.pop("SHA256SUMS").decode().splitlines())
    assert listed == {name: hashlib.sha256(content).hexdigest() for name, content in held.items()}
    assert {"environment.json", "routing.json", "report.html", "tests/tests.xml", "benches/r.json", "benches/r-2.json"} == set(held)
    assert held["tests/tests.xml"] == b"<ok/>"
    assert {json.loads(held[f"benches/{name}"])["rows"][0]["name"] for name in ("r.json", "r-2.json")} == {"x", "y"}
    assert "sdpa" in held["routing.json"].decode()
    assert "torch" in json.loads(held["environment.json"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone"], "PATH='gone' is not there"),
        (["empty"], "no result of nsa-bench"),
        (["other.json"], "is no result of nsa-bench"),
        (["good.json", "--tests", "good.json"], "--tests came without --bundle"),
        (["good.json", "--tests", "gone.xml", "--bundle", "b.zip"], "--tests=gone.xml is no file"),
    ],
)
def test_paths_that_cannot_be_are_exit_2(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text('{"environment": {}, "rows": "text"}')
    write(tmp_path / "good.json", [{"ms": 1}])
    assert run_command(["report", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "nsa-bench.html").exists()
    assert not (tmp_path / "b.zip").exists()
