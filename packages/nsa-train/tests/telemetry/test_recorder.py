"""Events become records: all documented fields, every rank its heartbeat, a resumed run one history."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_train.host.chips import CHIPS
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.flops import model_flops

EVERY_EVENT = {"ts", "iso", "pid", "rank", "step", "msg"}
EVERY_STEP = {
    *("loss", "lr", "toks_per_s", "grad_norm", "dt_fetch_s", "fetch_p50_ms", "fetch_p95_ms", "data_bad_records"),
    *("gpu_mem_alloc_mib", "gpu_mem_reserved_mib", "gpu_mem_alloc_gib", "gpu_mem_reserved_gib"),
}
LOGGED_STEP = {
    *("gate_entropy_mean", "gate_entropy_min", "gate_max_gate", "gate_collapse_frac", "gate_branch_shares"),
    *(f"{kind}_{branch}" for kind in ("gate_mean", "gate_std", "contribution") for branch in ("cmp", "slc", "win")),
    *("k_mean", "k_max", "pct_at_max", "reads_pred", "reads_act_total", "routes", "fallbacks_total"),
}


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_train.telemetry.recorder.write_report", lambda paths: None)


def test_a_logged_step_has_every_documented_field(session) -> None:
    run = session()
    run.step(1)
    [progress] = [beat for beat in run.records.beats() if beat["msg"] == "progress"]
    assert set(progress) >= EVERY_EVENT | EVERY_STEP | LOGGED_STEP
    assert progress["k_mean"] == progress["k_mean_expected"]
    [end] = [beat for beat in run.records.beats() if beat["msg"] == "step_end"]
    assert set(end) >= EVERY_EVENT | EVERY_STEP
    assert end["dt_fetch_s"] == pytest.approx(end["fetch_p50_ms"] / 1e3)


def test_waits_for_data_are_told_by_median_and_95th_percentile_in_ms(session) -> None:
    run = session()
    run.step(1, fetches=[float(ms) for ms in range(101)])
    run.step(2, fetches=[7.0])
    first, second = (beat for beat in run.records.beats() if beat["msg"] == "step_end")
    assert (first["fetch_p50_ms"], first["fetch_p95_ms"]) == (50, 95)
    assert (second["fetch_p50_ms"], second["fetch_p95_ms"]) == (7, 7)


def test_every_event_has_its_word(session, tmp_path: Path) -> None:
    run = session()
    run.recorder.began("val", 0)
    run.recorder.validated(0, 5.0)
    run.step(1, is_logged=False)
    run.recorder.skipped(2, "loss=nan", "documents 3..9", cause="loss")
    run.recorder.saved(2, tmp_path / "step-2")
    run.recorder.halted("asked by .HALT", code=3)
    beats = run.records.beats()
    assert [beat["msg"] for beat in beats] == ["boot", "val_begin", "val", "step_end", "skip", "save", "halt"]
    assert (beats[4]["cause"], beats[4]["reason"], beats[4]["batch"]) == ("loss", "loss=nan", "documents 3..9")
    assert (beats[-1]["code"], beats[-1]["step"]) == (3, 2)
    assert not run.recorder.paths.anomaly_type.exists()


def test_a_guard_names_its_anomaly(session) -> None:
    run = session()
    run.recorder.halted("loss=nan", code=4, anomaly="non_finite")
    assert run.recorder.paths.anomaly_type.read_text() == "non_finite\n"
    again = session(resumed_at=0)
    assert not again.recorder.paths.anomaly_type.exists()


def test_a_full_disk_does_not_hide_why_the_run_ended(session, monkeypatch: pytest.MonkeyPatch) -> None:
    run = session()

    def full(*args: Any, **fields: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.recorder.heartbeat, "beat", full)
    run.recorder.halted("loss=nan", code=4, anomaly="non_finite")


def test_another_rank_writes_its_heartbeat_and_nothing_else(session) -> None:
    run = session(rank=1, world_size=2)
    run.step(1)
    run.recorder.validated(1, 3.0)
    assert run.recorder.finished() == {}
    root = run.recorder.paths.root
    assert [path.name for path in root.iterdir()] == ["heartbeat_rank1.jsonl"]
    assert {beat["rank"] for beat in run.records.beats(rank=1)} == {1}


def test_a_resumed_run_has_one_history(session) -> None:
    first = session()
    first.recorder.validated(0, 5.5)
    for step in (1, 2, 3, 4):
        first.step(step, loss=5.0 - step, is_clipped=True)
    first.recorder.validated(4, 1.0)
    paths = first.records
    # killed inside a row, and inside an event
    with paths.training.open("a") as file:
        file.write("5,0.1")
    with paths.heartbeat.open("a") as file:
        file.write('{"ts": 1, "step": 5, "ms')

    second = session(resumed_at=2)
    for step in (3, 4):
        second.step(step, loss=9.0)
    second.recorder.validated(4, 2.0)
    metrics = second.recorder.finished()

    rows = paths.table(paths.training)
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["loss"] for row in rows] == ["4.0", "3.0", "9.0", "9.0"]
    assert paths.training.read_text().count("step,loss,ppl,lr,toks_per_s,grad_norm,fetch_ms") == 1
    assert [(row["step"], row["val_loss"]) for row in paths.table(paths.validation)] == [("0", "5.5"), ("4", "2.0")]
    assert [row["step"] for row in paths.table(paths.selection)] == ["1", "2", "3", "4"]
    assert [row["step"] for row in paths.table(paths.fallbacks)] == ["1", "2", "3", "4"]
    lines = paths.heartbeat.read_text().splitlines()
    assert [json.loads(line)["msg"] for line in lines if not line.endswith('"ms')].count("boot") == 2
    assert json.loads(lines[-1])["msg"] == "finish"
    assert [entry["step"] for entry in json.loads(paths.environment.read_text())["resumed"]] == [2]
    session(resumed_at=4)
    assert [entry["step"] for entry in json.loads(paths.environment.read_text())["resumed"]] == [2, 4]
    assert (metrics["first_loss"], metrics["last_loss"], metrics["first_val_loss"], metrics["val_loss"]) == (4.0, 9.0, 5.5, 2.0)
    assert metrics["clipped_steps"] == 2


def test_without_a_known_peak_there_is_no_mfu_and_a_reason(session) -> None:
    run = session()
    run.step(1)
    metrics = run.recorder.finished()
    assert metrics["mfu"] is None
    assert metrics["mfu_reason"] == "no peak is defined for device cpu"
    assert json.loads(run.recorder.paths.metrics.read_text())["mfu"] is None


def test_mfu_is_model_flops_over_the_peak(session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_train.telemetry.recorder.chip_of", lambda device: CHIPS["h200"])
    run = session()
    run.step(1, toks_per_s=64.0)
    # a step of 2 rows of 32 tokens took a second
    expected = model_flops(run.config).of_step((32, 20, 12)) / 989e12
    [row] = run.records.table(run.records.training)
    assert float(row["mfu"]) == pytest.approx(expected, rel=1e-5)
    assert float(row["step_ms"]) == pytest.approx(1000)
    assert run.recorder.finished()["mfu"] == pytest.approx(expected, rel=1e-5)


def test_a_step_of_short_rows_has_its_own_tokens_and_time(session) -> None:
    """Without packing, a batch is as wide as its bucket: 2 rows of 16 tokens of the 32 that a row may have."""
    run = session(world_size=2)
    run.step(1, toks_per_s=64.0, lengths=(16, 10, 6))
    run.step(2, toks_per_s=64.0)
    first, second = run.records.table(run.records.training)
    # the other rank's rows are as wide
    assert (first["tokens"], second["tokens"]) == ("64", "128")
    assert (float(first["step_ms"]), float(second["step_ms"])) == (1000, 2000)
    assert run.recorder.finished()["tokens"] == 192
    [end, _] = [beat for beat in run.records.beats() if beat["msg"] == "step_end"]
    assert (end["tokens"], end["step_ms"]) == (64, 1000)


def test_memory_has_the_units_of_its_name(session) -> None:
    run = session()
    run.step(1)
    metrics = run.recorder.finished()
    assert metrics["peak_memory_gib"] == pytest.approx(metrics["peak_memory_mib"] / 1024)


def test_tensorboard_shows_clip_events_and_lengths(session) -> None:
    run = session()
    run.step(1, is_clipped=True)
    run.step(2)
    run.step(3, is_clipped=True)
    run.recorder.validated(3, 2.5)
    run.recorder.finished()
    events = _board(run.recorder.paths.tensorboard)
    tags = events.Tags()
    assert {"loss/training", "loss/validation", "train/lr", "train/grad_norm", "train/toks_per_s", "nsa/gate_entropy_mean"} <= set(
        tags["scalars"]
    )
    assert [(event.step, event.value) for event in events.Scalars("clip/events_total")] == [(1, 1.0), (3, 2.0)]
    histogram = events.Histograms("data/sequence_length_tokens")[0].histogram_value
    assert (histogram.bucket_limit, histogram.bucket) == ([16.0, 32.0], [1.0, 2.0])


def _board(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    events.Reload()
    return events


def test_tensorboard_hides_what_came_after_the_resumed_step(session) -> None:
    first = session()
    for step in (1, 2, 3, 4):
        first.step(step, loss=5.0)
    first.recorder.halted("killed", code=1)
    second = session(resumed_at=2)
    second.step(3, loss=9.0)
    second.recorder.finished()
    events = _board(first.recorder.paths.tensorboard)
    assert [(event.step, event.value) for event in events.Scalars("loss/training")] == [(1, 5.0), (2, 5.0), (3, 9.0)]


def test_a_histogram_of_lengths_is_of_the_steps_since_the_one_before(session) -> None:
    run = session("train.log_every=2")
    for step in (1, 2, 3, 4):
        run.step(step, is_logged=False)
    run.recorder.finished()
    counts = [
        sum(event.histogram_value.bucket) for event in _board(run.recorder.paths.tensorboard).Histograms("data/sequence_length_tokens")
    ]
    # three sequences a step
    assert counts == [6, 6]


def test_branch_times_are_summed_over_the_calls() -> None:
    from nsa_train.telemetry.layers import BranchTimes

    times = BranchTimes()
    for _ in range(3):
        with times.measured("win", torch.device("cpu")):
            time.sleep(0.01)
    assert times.total_ms()["win"] >= 30


def test_branch_times_come_on_request(session) -> None:
    run = session("train.profile=branches")
    run.step(1)
    run.step(2, is_logged=False)
    [progress] = [beat for beat in run.records.beats() if beat["msg"] == "progress"]
    assert set(progress["branch_forward_ms"]) == {"cmp", "select", "slc", "win"}
    assert all(0 < spent < 10_000 for spent in progress["branch_forward_ms"].values())
    plain = session()
    plain.step(1)
    assert "branch_forward_ms" not in plain.records.beats()[-2]


def test_ranges_come_on_request(session, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def note(name: str, device: torch.device | None) -> Any:
        from contextlib import nullcontext

        if device is not None:
            names.append(name)
        return nullcontext()

    monkeypatch.setattr("nsa_train.telemetry.layers.marked_range", note)
    monkeypatch.setattr("nsa_train.telemetry.recorder.marked_range", note)
    run = session("train.profile=nvtx")
    with run.recorder.phase("forward"):
        run.step(1, is_logged=False)
    layers = run.config.model.n_layers
    assert names == ["forward", *["nsa.cmp", "nsa.select", "nsa.slc", "nsa.win"] * layers]
    names.clear()
    plain = session()
    with plain.recorder.phase("forward"):
        plain.step(1, is_logged=False)
    assert names == []


def test_the_directory_names_its_hidden_files(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert (run.halt.name, run.anomaly_type.name, run.stackdump(3).name) == (".HALT", ".anomaly_type", "stackdump_rank3.txt")
    run.write_anomalies(["stall", "flatline"])
    assert run.anomaly_type.read_text() == "stall\nflatline\n"
    assert [path.name for path in tmp_path.iterdir()] == [".anomaly_type"]
