"""single, ddp and fsdp are one computation: equal gradients, equal losses over 50 steps, to float32's rounding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from nsa_train.telemetry.records import read_events

RELATIVE = 1e-6


@pytest.fixture(scope="module")
def found(ranks: Callable[..., Any]) -> dict[str, Any]:
    """Return the losses and gradients that one and two processes found, by name."""
    together: dict[str, Any] = {}
    for world_size in (1, 2):
        folder, (losses, *others) = ranks("agree", world_size=world_size)
        assert all(other == losses for other in others)
        together |= {name: losses.pop(name) for name in [*losses] if name.endswith(("-travels", "-hash"))}
        for name in losses:
            together[name] = losses[name], safetensors.torch.load_file(folder / f"{name}.safetensors")
            together[f"{name}-logged"] = [_first_logged(folder / name / f"heartbeat_rank{rank}.jsonl") for rank in range(world_size)]
    return together


def _first_logged(heartbeat: Path) -> dict[str, Any]:
    figures = next(event for event in read_events(heartbeat) if event["msg"] == "progress")
    shares = figures.pop("gate_branch_shares")
    of_layers = ("gate_", "contribution_", "k_", "reads_", "rows", "pct_", "free_", "overlap_")
    return {name: value for name, value in {**figures, **shares}.items() if name.startswith(of_layers) or name in shares}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulated", ["", "-accumulated"])
def test_figures_of_layers_are_those_of_the_whole_step(found: dict[str, Any], strategy: str, accumulated: str) -> None:
    first, second = found[f"{strategy}{accumulated}-logged"]
    [alone] = found[f"single{accumulated}-logged"]
    assert first == second == pytest.approx(alone, rel=1e-4)
    # 4 rows of 32 tokens, one KV head, two layers
    assert alone["rows"] == 256 * (2 if accumulated else 1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulated", ["", "-accumulated"])
def test_the_hash_of_what_was_consumed_is_the_run_s(found: dict[str, Any], strategy: str, accumulated: str) -> None:
    assert found[f"{strategy}{accumulated}-hash"] == found[f"single{accumulated}-hash"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulated", ["", "-accumulated"])
def test_gradients_equal_those_of_one_process(found: dict[str, Any], strategy: str, accumulated: str) -> None:
    _, ours = found[strategy + accumulated]
    _, theirs = found["single" + accumulated]
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).norm()) <= RELATIVE * float(gradient.norm()), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_losses_of_50_steps_equal_those_of_one_process(found: dict[str, Any], strategy: str) -> None:
    ours, theirs = found[strategy][0], found["single"][0]
    assert len(theirs) == 50
    assert ours == pytest.approx(theirs, rel=RELATIVE)
    assert theirs[-1] < 0.9 * theirs[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_travel_once_a_step(found: dict[str, Any], strategy: str) -> None:
    assert found[f"{strategy}-travels"] == [True] * 50
    assert found[f"{strategy}-accumulated-travels"] == [False, True] * 2


def test_accumulated_micro_batches_are_two_of_the_same_stream(found: dict[str, Any]) -> None:
    first, _ = found["single-accumulated"][0]
    assert first == pytest.approx(sum(found["single"][0][:2]) / 2, rel=0.02)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_teacher_on_every_rank_gives_the_gradients_of_one_process(ranks: Callable[..., Any], strategy: str) -> None:
    (alone, [samples]), (folder, several) = (ranks("taught", world_size=size) for size in (1, 2))
    # 256 queries of a layer in a step, over two passes or two ranks
    assert samples["single"] == several[0][strategy] == several[1][strategy] == [128, 128]
    ours, theirs = (safetensors.torch.load_file(path) for path in (folder / f"{strategy}.safetensors", alone / "single.safetensors"))
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).norm()) <= RELATIVE * float(gradient.norm()), name
