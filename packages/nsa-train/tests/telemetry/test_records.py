"""Tables have headers, events are strict JSON, figures keep six digits, losses and gradient norms nine."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.records import (
    TRAINING_COLUMNS,
    CsvTable,
    Heartbeat,
    as_event,
    damaged_records,
    perplexity,
    read_events,
    read_json,
    read_rows,
    seconds_between,
    write_json,
)


def test_a_table_starts_with_its_header(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "t.csv", ["a", "b"])
    assert (tmp_path / "t.csv").read_text() == "a,b\n"
    table.append({"a": 1, "b": 0.123456789})
    assert (tmp_path / "t.csv").read_text().splitlines() == ["a,b", "1,0.123457"]


def test_a_table_that_was_deleted_begins_again_with_its_header(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "t.csv", ["a", "b"])
    table.append({"a": 1, "b": 2})
    table.path.unlink()
    table.append({"a": 2, "b": 3})
    table.append({"a": 3})
    assert table.path.read_text() == "a,b\n2,3\n3,\n"


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


HEADER = ",".join(TRAINING_COLUMNS)


def _row(step: object) -> str:
    return f"{step},2.0" + "," * (len(TRAINING_COLUMNS) - 2)


BAD_ROWS = [b"\0\0\0\0", b"\xff,1", b"garbage", b"", _row("x").encode(), _row("").encode(), _row(-1).encode(), _row("nan").encode()]
BAD_ROWS += [_row(2).encode() + b",1", b'"' + _row(2).encode()]


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_row_that_cannot_be_read_is_left_out_and_named(bad: bytes, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.training.write_bytes("\n".join([HEADER, _row(1)]).encode() + b"\n" + bad + b"\n" + _row(3).encode() + b"\n")
    assert [row["step"] for row in read_rows(run.training)] == [1, 3]
    assert damaged_records(run) == [f"{run.training}: line 3 cannot be read, and is left out"]
    CsvTable(run.training, TRAINING_COLUMNS, resumed_at=3)
    assert [row["step"] for row in read_rows(run.training)] == [1, 3]
    assert damaged_records(run) == []


def test_many_bad_rows_take_one_line(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.validation.write_text("step,val_loss,ppl\n" + "x\n" * 5)
    assert damaged_records(run) == [f"{run.validation}: lines 2, 3, 4 and 2 more cannot be read, and are left out"]


def test_a_damaged_header_loses_no_row(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.training.write_text(HEADER.replace("loss", "l\0ss") + "\n" + _row(1) + "\n")
    [row] = read_rows(run.training)
    assert (row["step"], row["loss"]) == (1, 2)
    assert damaged_records(run) == [f"{run.training}: line 1 cannot be read, and is left out"]
    CsvTable(run.training, TRAINING_COLUMNS, resumed_at=1)
    assert run.training.read_text() == f"{HEADER}\n{_row(1)}\n"


def test_a_table_of_another_version_keeps_its_columns(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.training.write_text("step,loss\n1,2.0\n")
    [older] = read_rows(run.training)
    assert older["loss"] == 2
    assert math.isnan(older["tokens"])
    run.training.write_text(f"{HEADER},later\n{_row(1)},7\n")
    [newer] = read_rows(run.training)
    assert newer["later"] == 7
    assert damaged_records(run) == []


EVENT: dict[str, object] = {"ts": 1.5, "step": 3, "msg": "progress", "rank": 0}
BAD_EVENTS: list[dict[str, object]] = [
    *({name: value for name, value in EVENT.items() if name != left_out} for left_out in ("ts", "step", "msg")),
    *(
        {**EVENT, name: "x"}
        for name in ("ts", "uptime_s", "step", "resumed_at", "rank", "pid", "world_size", "loss", "toks_per_s", "gate_max_gate", "routes")
    ),
    {**EVENT, "ts": 10**30},
    {**EVENT, "ts": None},
    {**EVENT, "step": -1},
    {**EVENT, "step": 1.5},
    {**EVENT, "pid": True},
    {**EVENT, "gate_branch_shares": {"cmp": "x"}},
    {**EVENT, "loss": 10**400},
]


@pytest.mark.parametrize("bad", [*map(json.dumps, BAD_EVENTS), "[]", "3", "no json", "[" * 100_000, '{"ts": NaN, "step": 1, "msg": "val"}'])
def test_an_event_that_readers_cannot_use_is_left_out_and_named(bad: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.heartbeat.write_text("\n".join([json.dumps(EVENT), bad, json.dumps(EVENT)]) + "\n")
    assert list(read_events(run.heartbeat)) == [EVENT, EVENT]
    assert damaged_records(run) == [f"{run.heartbeat}: line 2 cannot be read, and is left out"]


def test_figures_that_are_null_are_no_damage() -> None:
    event = {**EVENT, "loss": None, "gate_branch_shares": {"cmp": None}, "routes": None, "world_size": None, "host": "x"}
    assert as_event(json.dumps(event).encode()) == event


@pytest.mark.parametrize("content", [b'{"a": 1', b"", b"[1]", b"\xff", b"[" * 100_000])
def test_json_that_cannot_be_read_is_left_out_and_named(content: bytes, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics.write_bytes(content)
    assert read_json(run.metrics) == read_json(tmp_path / "absent.json") == {}
    [line] = damaged_records(run)
    assert line.startswith(f"{run.metrics} cannot be read as JSON (")
    assert line.endswith("); it is left out")


def test_other_damage_is_named_in_a_line_each(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.config.write_text("[model\n")
    run.samples.mkdir()
    (run.samples / "after.txt").write_bytes(b"one\ntw\xffo\n")
    config, sample = damaged_records(run)
    assert config.startswith(f"{run.config} cannot be read as TOML (")
    assert config.endswith("; it is left out")
    assert sample == f"{run.samples}/after.txt: line 2 is not UTF-8; what cannot be read of the text is left out"


@pytest.mark.parametrize("name", ["loss", "grad_norm", "val_loss"])
def test_a_loss_is_read_back_as_the_float32_that_it_was(tmp_path: Path, name: str) -> None:
    value = float(np.float32(5.5520163))
    table, beat = CsvTable(tmp_path / "some.csv", ("step", name)), Heartbeat(tmp_path)
    table.append({"step": 1, name: value})
    beat.beat("step_end", 1, **{name: value}, lr=1 / 3)
    write_json(tmp_path / "metrics.json", {name: value})
    [row], [event] = read_rows(tmp_path / "some.csv"), read_events(beat.path)
    assert np.float32(row[name]) == np.float32(event[name]) == np.float32(read_json(tmp_path / "metrics.json")[name]) == np.float32(value)
    assert event["lr"] == 0.333333


def test_the_wall_clock_does_not_move_the_time_since_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = Heartbeat(tmp_path)
    for wall, monotonic in ((1000.0, 7.0), (4600.0, 8.0), (400.0, 9.5)):
        monkeypatch.setattr("nsa_train.telemetry.records.time.time", lambda wall=wall: wall)
        monkeypatch.setattr("nsa_train.telemetry.records.time.monotonic", lambda monotonic=monotonic: monotonic)
        beat.beat("step_end", 1)
    first, second, third = read_events(beat.path)
    assert (second["ts"] - first["ts"], third["ts"] - second["ts"]) == (3600, -4200)
    assert (seconds_between(first, second), seconds_between(second, third)) == (1.0, 1.5)
