"""A run from end to end: what it writes, that it repeats, and that its switches change only what they say."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_train.errors import GuardError
from nsa_train.run_dir import RunDirectory
from nsa_train.trainer import Trainer


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _beats(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.heartbeat.read_text().splitlines()]


def _losses(run: RunDirectory) -> list[float]:
    return [float(row["loss"]) for row in _table(run.training)]


def test_the_dense_twin_runs_by_one_key(train: Callable[..., Any]) -> None:
    code, run = train("model.attention=dense")
    assert code == 0
    assert not run.selection.exists()
    assert not run.fallbacks.exists()
    assert all("gate_branch_shares" not in beat for beat in _beats(run))
    assert _losses(run)[-1] < _losses(run)[0]


def test_equal_seeds_repeat_a_run_exactly(train: Callable[..., Any], tiny_run: RunDirectory) -> None:
    _, again = train("train.deterministic=true")
    _, other = train("train.seed=1")
    assert _losses(again) == _losses(tiny_run)
    assert _losses(other) != _losses(tiny_run)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_accumulation_is_one_larger_batch(train: Callable[..., Any], attention: str) -> None:
    _, whole = train("train.batch_size=4", f"model.attention={attention}")
    _, halves = train("train.batch_size=2", "train.accumulate=2", f"model.attention={attention}")
    assert _losses(halves) == pytest.approx(_losses(whole), rel=1e-4)
    assert [float(row["grad_norm"]) for row in _table(halves.training)] == pytest.approx(
        [float(row["grad_norm"]) for row in _table(whole.training)], rel=1e-3
    )


def test_activation_checkpointing_changes_no_loss(train: Callable[..., Any], tiny_run: RunDirectory) -> None:
    _, run = train("train.activation_checkpointing=full")
    assert _losses(run) == _losses(tiny_run)


def test_bf16_is_autocast_over_float32_weights(train: Callable[..., Any], tiny_run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_train.checkpoint import load_model, open_checkpoint

    code, run = train("train.precision=bf16")
    assert code == 0
    assert _losses(run) != _losses(tiny_run)
    assert _losses(run) == pytest.approx(_losses(tiny_run), rel=0.02)
    assert {weight.dtype for weight in load_model(open_checkpoint(run.root)).parameters()} == {torch.float32}


def _spoil(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Let the loss of `steps` be NaN."""
    original, calls = Trainer._summed_loss, 0

    def spoiled(self: Trainer, forward: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        loss = original(self, forward, batch)
        return loss * float("nan") if calls in steps and torch.is_grad_enabled() else loss

    monkeypatch.setattr(Trainer, "_summed_loss", spoiled)


def test_a_loss_that_is_not_finite_is_skipped_and_its_batch_named(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _spoil(monkeypatch, {3})
    code, run = train()
    assert code == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "skipped" in line)
    assert line.startswith("step 0003 | skipped, the weights stay as they were: the loss of rank 0, micro-batch 0 is not finite; rank 0, ")
    assert [int(row["step"]) for row in _table(run.training)] == [1, 2, 4, 5]
    [beat] = [beat for beat in _beats(run) if beat["msg"] == "skip"]
    assert beat["step"] == 3
    assert "sha256" in beat["batch"]


def test_a_loss_spike_is_skipped_on_request(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsa_train.guards.SPIKE_WINDOW", 4)
    original, calls = Trainer._summed_loss, 0

    def spiking(self: Trainer, forward: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        return original(self, forward, batch) * (10 if calls in (6, 16) and torch.is_grad_enabled() else 1)

    monkeypatch.setattr(Trainer, "_summed_loss", spiking)
    _, skipping = train("train.skip_loss_spikes=true", "train.steps=8")
    assert "step 0006 | skipped, the weights stay as they were: loss=" in capsys.readouterr().out
    assert [int(row["step"]) for row in _table(skipping.training)] == [1, 2, 3, 4, 5, 7, 8]
    _, taking = train("train.steps=8")
    assert len(_losses(taking)) == 8


def test_float16_that_runs_over_finds_its_scale_and_is_no_anomaly(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: scaler(device, init_scale=2.0**26))
    code, run = train("train.precision=fp16", "train.steps=12", "train.max_skips=0")
    assert code == 0
    skipped = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    assert 1 <= len(skipped) < 12
    assert all("is not finite, in " in line for line in skipped)
    assert len(_losses(run)) == 12 - len(skipped)
    assert _losses(run)[-1] < _losses(run)[0]


def test_too_many_skipped_steps_stop_the_run_saved_with_code_4(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nsa_train.checkpoint import load_model, open_checkpoint

    _spoil(monkeypatch, {3, 4, 5})
    code, run = train("train.max_skips=1", "train.steps=6")
    assert code == 4
    message = capsys.readouterr().err
    assert "step 4: the loss of rank 0, micro-batch 0 is not finite; 2 of the last 100 steps were skipped" in message
    assert len(_losses(run)) == 2
    assert _beats(run)[-1]["msg"] == "halt"
    checkpoint = open_checkpoint(run.root)
    assert checkpoint.step == 4
    assert all(weight.isfinite().all() for weight in load_model(checkpoint).parameters())


def test_a_parameter_without_a_gradient_stops_the_run(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The earlier system's compressed branch was a constant: its weights never got a gradient."""
    from nsa_core import NativeSparseAttention

    original = NativeSparseAttention._compress_whole

    def detached(self: NativeSparseAttention, *args: Any) -> Any:
        return tuple(None if part is None else part.detach() for part in original(self, *args))

    monkeypatch.setattr(NativeSparseAttention, "_compress_whole", detached)
    code, _ = train()
    assert code == 4
    message = capsys.readouterr().err
    assert "step 1: no gradient reaches blocks.0.attention." in message
    assert "cmp" in message or "compress" in message


def test_a_report_can_be_drawn_of_a_run_that_stopped(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_train.cli import run_command

    def stop(self: Trainer, step: int) -> None:
        if step == 3:
            raise GuardError("enough")

    monkeypatch.setattr(Trainer, "_after_step", stop)
    code, run = train()
    assert code == 4
    assert not run.report.exists()
    assert run_command(["report", str(run.root)]) == 0
    assert "did not reach its last step" in run.report.read_text()


def test_plain_lines_elsewhere_than_on_a_terminal(train: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    train()
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step 000") and "loss" in line and "val_loss" not in line]
    assert len(steps) == 4
    for part in ("| loss ", "| lr 1.00e-02 |", "| toks/s ", "| grad_norm ", "| fetch ", "ms"):
        assert part in steps[0]
    model = next(line for line in lines if line.startswith("model:"))
    assert "parameters with nsa" in model
    assert "with dense" in model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch 2.13 imports its own deprecated parts
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # and looks at what it warns of
def test_a_compiled_run_has_the_losses_of_an_eager_one(train: Callable[..., Any], tiny_run: RunDirectory) -> None:
    code, run = train("train.compile=true", "train.log_every=100")
    assert code == 0
    assert _losses(run) == pytest.approx(_losses(tiny_run), rel=1e-4)
