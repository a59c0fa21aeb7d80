"""Tables have headers, events are strict JSON, figures keep six digits."""

import json
import math
from pathlib import Path

import pytest

from nsa_train.telemetry.records import CsvTable, Heartbeat, perplexity, read_rows, write_json


def test_a_table_starts_with_its_header(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "t.csv", ["a", "b"])
    assert (tmp_path / "t.csv").read_text() == "a,b\n"
    table.append({"a": 1, "b": 0.123456789})
    assert (tmp_path / "t.csv").read_text().splitlines() == ["a,b", "1,0.123457"]


def test_a_row_with_an_unknown_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not in fieldnames"):
        CsvTable(tmp_path / "t.csv", ["a"]).append({"a": 1, "c": 2})


def test_heartbeats_are_strict_json_with_time_and_place(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, rank=3)
    heartbeat.beat("progress", 7, loss=math.nan, shares={"cmp": math.inf, "win": 0.5})
    [line] = (tmp_path / "heartbeat_rank3.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["rank"], event["step"], event["msg"], event["loss"]) == (3, 7, "progress", None)
    assert event["shares"] == {"cmp": None, "win": 0.5}
    assert event["iso"].endswith("+00:00")


def test_json_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "m.json", {"a": math.nan, "b": 1 / 3})
    assert json.loads((tmp_path / "m.json").read_text()) == {"a": None, "b": 0.333333}


def test_perplexity_is_exp_of_the_loss() -> None:
    assert perplexity(0) == 1
    assert perplexity(2) == pytest.approx(math.e**2)
    assert perplexity(1e6) == math.inf


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "t.csv", ["step", "loss"])
    table.append({"step": 1, "loss": math.nan})
    with table.path.open("a") as file:
        file.write("2,0.1")
    rows = list(read_rows(table.path))
    assert [row["step"] for row in rows] == [1]
    assert math.isnan(rows[0]["loss"])
    assert list(read_rows(tmp_path / "absent.csv")) == []
