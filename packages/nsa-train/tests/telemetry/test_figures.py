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


def test_the_least_healthy_entropy_is_in_the_picture_of_collapsed_gates() -> None:
    gates = {"gate_branch_shares": {"cmp": 0.5, "win": 0.5}, "gate_entropy_mean": 0.02, "gate_entropy_min": 0.01, "gate_collapse_frac": 0.1}
    figure = figure_of(History(STEPS, VALIDATION, [{"step": step, **gates} for step in (1, 2)]))
    [axis] = [axis for axis in figure.axes if axis.get_title().startswith("Gate health")]
    low, high = axis.get_ylim()
    assert low == 0
    assert high > 0.5


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


def test_a_resumed_run_has_a_line_in_every_curve_and_what_it_went_back_before_is_gone(run: RunDirectory) -> None:
    run.training.write_text("step,loss,lr,grad_norm,toks_per_s\n1,3.0,0.1,1.0,10.0\n2,2.5,0.1,1.0,10.0\n")
    gates = {"gate_branch_shares": {"cmp": 0.5, "win": 0.5}, "gate_entropy_mean": 0.5, "free_block_share_mean": 0.5}
    starts: list[tuple[int | None, list[int]]] = [(None, [10, 20, 30]), (20, [30, 40]), (40, [50]), (30, [35, 37])]
    for resumed_at, steps in starts:
        _beat(run, msg="boot", step=resumed_at or 0, resumed_at=resumed_at)
        for step in steps:
            _beat(run, msg="progress", step=step, **gates)
    history = read_history(run)
    assert [event["step"] for event in history.progress] == [10, 20, 30, 35, 37]
    assert history.resumed == [20, 30]
    assert [start.reached for start in history.starts] == [0, 30, 40, 50]
    axes = [axis for axis in figure_of(history).axes if axis.get_title()]
    assert len(axes) == 6
    for axis in axes:
        assert [line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == "--"] == [20, 30]
    assert axes[0].get_legend_handles_labels()[1] == ["resumed", "training"]


def _loss_axis(losses: list[float], validation: dict[str, list[float]]) -> Any:
    steps = [float(step) for step in range(1, len(losses) + 1)]
    columns = {**{name: [1.0] * len(losses) for name in STEPS}, "step": steps, "loss": losses}
    return figure_of(History(columns, validation, [])).axes[0]


def test_held_out_losses_are_points() -> None:
    """A line from one evaluation to the next would tell of losses that nobody measured."""
    axis = _loss_axis([4.0, 3.0], {"step": [0, 2], "val_loss": [5.0, 3.0]})
    [points] = [line for line in axis.lines if line.get_label() == "held out"]
    assert (points.get_linestyle(), points.get_marker()) == ("None", "o")


def test_the_fall_of_the_first_steps_leaves_room_for_the_rest() -> None:
    axis = _loss_axis([*[11.0 - step for step in range(5)], *[3.0 - step / 1000 for step in range(195)]], {"step": [0], "val_loss": [11.1]})
    bottom, top = axis.get_ylim()
    assert 2.7 < bottom < 2.81 < 3.0 < top < 3.1
    assert axis.get_title() == "Loss, nats per token (up to 11.1 before step 11)"
    # a later rise is no such thing
    assert _loss_axis([*[3.0] * 50, *[9.0] * 50], {}).get_ylim()[1] > 9
    assert _loss_axis([5.0, 4.0, 3.0], {"step": [0], "val_loss": [5.5]}).get_ylim()[1] > 5.5


@pytest.mark.parametrize("norms", [[1.1, 1.9], [2.2, 4.4], [0.3, 6.0], [4.0, 7e11], [0.0, 0.0], [math.nan, 2.0]])
def test_the_axis_of_the_gradient_norm_has_figures_whatever_its_range(norms: list[float]) -> None:
    axis = figure_of(History({**STEPS, "grad_norm": norms}, {}, [])).axes[1]
    low, high = axis.get_ylim()
    assert 2 <= len([tick for tick in axis.get_yticks() if low <= tick <= high]) <= 12


def test_a_single_logged_step_is_seen() -> None:
    gates = {"step": 1, "gate_branch_shares": {"cmp": 0.5, "win": 0.5}, "gate_entropy_mean": 0.5}
    [axis] = [axis for axis in figure_of(History(STEPS, {}, [gates])).axes if axis.get_title() == "Share of each branch's gate"]
    assert {line.get_marker() for line in axis.lines} == {"o"}


@pytest.mark.parametrize("losses", [[3.0], [3.0, math.nan, 2.0, math.inf]])
def test_figures_without_a_neighbour_are_seen(losses: list[float]) -> None:
    columns = {**dict.fromkeys(STEPS, losses), "step": [1.0 + index for index in range(len(losses))]}
    lines = [line for axis in figure_of(History(columns, {}, [])).axes for line in axis.lines]
    # loss, gradient norm, throughput, learning rate, MFU
    assert [line.get_marker() for line in lines] == ["o"] * 5
    [line] = _loss_axis([3.0, 2.0, math.nan], {}).lines
    assert line.get_marker() in ("", "None")
