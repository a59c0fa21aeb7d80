"""Curves show what was recorded, and nothing else."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from nsa_train.errors import ConfigError
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.figures import History, figure_of, read_history

STEPS: dict[str, list[float]] = {
    "step": [1, 2],
    "loss": [3.0, 2.0],
    "lr": [1e-3, 1e-4],
    "grad_norm": [1.0, 0.5],
    "toks_per_s": [10.0, 20.0],
    "mfu": [math.nan, math.nan],
    "data_synthetic": [0, 0],
}
VALIDATION: dict[str, list[float]] = {"step": [0], "val_loss": [5.0], "ppl": [148.0]}


def _titles(history: History) -> list[str]:
    return [axis.get_title() for axis in figure_of(history).axes if axis.get_title()]


def test_without_gates_and_gpu_there_are_three_curves() -> None:
    titles = _titles(History(STEPS, VALIDATION, []))
    assert titles == ["Loss, nats per token", "Gradient norm (line), learning rate (dotted)", "Throughput, tokens per second"]


def test_mfu_and_memory_are_drawn_where_they_were_recorded() -> None:
    memory = [{"step": 2, "gpu_mem_alloc_gib": 3.0, "gpu_mem_reserved_gib": 5.0}]
    titles = _titles(History({**STEPS, "mfu": [0.2, 0.4]}, VALIDATION, [], memory))
    assert "Throughput, tokens per second (line), MFU in % (dotted)" in titles
    assert "GPU memory, GiB" in titles
    assert len(titles) == 4


def test_a_run_without_the_selected_branch_is_drawn_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    gates = {"step": 1, "gate_branch_shares": {"win": 1.0}, "gate_entropy_mean": 0.0}
    figure_of(History(STEPS, VALIDATION, [gates, {**gates, "step": 2}]))
    assert [str(warning.message) for warning in recwarn] == []


def test_synthetic_data_stand_in_the_title() -> None:
    title = figure_of(History({**STEPS, "data_synthetic": [1, 1]}, {}, [])).get_suptitle()
    assert title.startswith("synthetic data")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def _beat(run: RunDirectory, **event: Any) -> None:
    with run.heartbeat.open("a") as file:
        file.write(json.dumps({"ts": 1.0, **event}) + "\n")


def test_a_step_that_was_done_again_counts_once(run: RunDirectory) -> None:
    run.training.write_text("step,loss\n1,3.0\n")
    for step, entropy in ((1, 0.1), (2, 0.2), (2, 0.9)):
        _beat(run, msg="progress", step=step, gate_entropy_mean=entropy)
    history = read_history(run)
    assert [(event["step"], event["gate_entropy_mean"]) for event in history.progress] == [(1, 0.1), (2, 0.9)]
    assert history.validation == {}


def test_the_dense_twin_has_a_curve_of_memory(run: RunDirectory) -> None:
    """It has no `progress` events."""
    run.training.write_text("step,loss,lr,grad_norm,toks_per_s\n1,3.0,0.1,1.0,10.0\n")
    for step, held in ((1, 2.0), (2, None), (1, 3.0)):
        _beat(run, msg="step_end", step=step, gpu_mem_alloc_gib=held, gpu_mem_reserved_gib=4.0)
    history = read_history(run)
    assert history.memory == [{"step": 1, "gpu_mem_alloc_gib": 3.0, "gpu_mem_reserved_gib": 4.0}]
    assert "GPU memory, GiB" in _titles(history)


def test_a_run_that_took_no_step_has_nothing_to_draw(run: RunDirectory) -> None:
    run.training.write_text("step,loss\n")
    _beat(run, msg="boot", step=0)
    with pytest.raises(ConfigError, match="has no row that can be read: no step was taken yet"):
        read_history(run)
