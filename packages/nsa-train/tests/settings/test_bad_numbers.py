"""Numbers that are not finite, spikes and missing gradients: the actions, messages, counts and checkpoints of a run."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa_train.cli import run_command
from nsa_train.loop.trainer import Trainer
from nsa_train.model.generate import BROKEN
from nsa_train.run_dir import RunDirectory


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
    assert [int(row["step"]) for row in run.table(run.training)] == [1, 2, 4, 5]
    [beat] = [beat for beat in run.beats() if beat["msg"] == "skip"]
    assert beat["step"] == 3
    assert "sha256" in beat["batch"]


def test_a_loss_spike_is_skipped_on_request(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsa_train.loop.guards.SPIKE_WINDOW", 4)
    original, calls = Trainer._summed_loss, 0

    def spiking(self: Trainer, forward: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        return original(self, forward, batch) * (10 if calls in (6, 16) and torch.is_grad_enabled() else 1)

    monkeypatch.setattr(Trainer, "_summed_loss", spiking)
    _, skipping = train("train.skip_loss_spikes=true", "train.steps=8")
    assert "step 0006 | skipped, the weights stay as they were: loss=" in capsys.readouterr().out
    assert [int(row["step"]) for row in skipping.table(skipping.training)] == [1, 2, 3, 4, 5, 7, 8]
    _, taking = train("train.steps=8")
    assert len(taking.losses()) == 8


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
    assert len(run.losses()) == 12 - len(skipped)
    assert {beat["cause"] for beat in run.beats() if beat["msg"] == "skip"} == {"overflow"}
    assert run.losses()[-1] < run.losses()[0]


@pytest.mark.parametrize("max_skips", [1, 0])
def test_float16_counts_a_loss_that_is_not_finite_and_keeps_its_scale(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], max_skips: int
) -> None:
    _spoil(monkeypatch, {3})
    code, run = train("train.precision=fp16", f"train.max_skips={max_skips}")
    assert code == (0 if max_skips else 4)
    assert "step 0003 | skipped, the weights stay as they were: the loss of rank 0, micro-batch 0 is not finite" in capsys.readouterr().out
    assert [int(row["step"]) for row in run.table(run.training)] == ([1, 2, 4, 5] if max_skips else [1, 2])
    assert [beat["cause"] for beat in run.beats() if beat["msg"] == "skip"] == ["loss"]
    state = json.loads((run.checkpoints / "latest" / "state.json").read_text())
    assert state["scaler"]["scale"] == 2.0**16
    assert state["counters"]["guard"]["num_skipped"] == 1


@pytest.mark.parametrize("spoiled", [(3,), (2, 3, 6), (5, 8)], ids=str)
def test_the_scale_of_float16_moves_as_torchs_own_does(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, spoiled: tuple[int, ...]
) -> None:
    """After every step the scaler's whole state is that of a GradScaler that saw the same overflows."""
    found: list[dict[str, Any]] = []
    torchs = torch.amp.GradScaler
    settings = {"init_scale": 2.0**10, "growth_interval": 3, "backoff_factor": 0.3}

    class Recorded(torchs):
        def update(self, new_scale: Any = None) -> None:
            super().update(new_scale)
            found.append(self.state_dict())

    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: Recorded(device, **settings))
    original, calls = Trainer._backward, 0

    def overflowing(self: Trainer, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        weight = self.model.norm.weight
        handle = weight.register_hook(lambda gradient: gradient * torch.inf) if calls in spoiled else None
        numbers = original(self, *args)
        if handle:
            handle.remove()
        return numbers

    monkeypatch.setattr(Trainer, "_backward", overflowing)
    assert train("train.precision=fp16", "train.steps=9", "train.eval_every=9", "train.save_every=0")[0] == 0

    scaler, weight = torchs("cpu", **settings), torch.nn.Parameter(torch.ones(2))
    optimizer, wanted = torch.optim.SGD([weight], lr=1e-3), []
    for step in range(1, 10):
        weight.grad = scaler.scale(torch.ones(2)) * (torch.inf if step in spoiled else 1)
        scaler.step(optimizer)
        scaler.update()
        wanted.append(scaler.state_dict())
    assert found == wanted


def test_float16_counts_a_spike_and_keeps_its_scale(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_train.loop.guards.SPIKE_WINDOW", 2)
    scaler = torch.amp.GradScaler
    # ten times the loss shall not run over as well
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: scaler(device, init_scale=2.0**10))
    original, calls = Trainer._summed_loss, 0

    def spiking(self: Trainer, forward: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        return original(self, forward, batch) * (10 if calls == 4 and torch.is_grad_enabled() else 1)

    monkeypatch.setattr(Trainer, "_summed_loss", spiking)
    code, run = train("train.precision=fp16", "train.skip_loss_spikes=true")
    assert code == 0
    state = json.loads((run.checkpoints / "latest" / "state.json").read_text())
    assert state["scaler"]["scale"] == 2.0**10
    assert state["counters"]["guard"]["recent_skips"] == [4]
    calls = 0
    assert train("train.precision=fp16", "train.skip_loss_spikes=true", "train.max_skips=0")[0] == 4


def test_a_first_gradient_that_is_not_finite_stops_the_run_and_is_named(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Trainer._summed_loss

    def spoiled(self: Trainer, forward: Any, batch: Any) -> torch.Tensor:
        loss = original(self, forward, batch)
        # a gradient that is not finite from a loss that is
        return loss + (0 * self.model.norm.weight).sqrt().sum() if torch.is_grad_enabled() else loss

    monkeypatch.setattr(Trainer, "_summed_loss", spoiled)
    code, run = train()
    assert code == 4
    printed = capsys.readouterr()
    assert "with grad_norm=nan is not finite, in norm.weight; the first gradient of every parameter must be finite" in printed.err
    assert "step 0001 | skipped, the weights stay as they were: loss=" in printed.out
    assert "rank 0, micro-batch 0 (sha256 of its ids " in printed.out
    assert run.losses() == []
    assert [*run.checkpoints.iterdir()] == []


def test_a_first_loss_that_is_not_finite_stops_the_run(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _spoil(monkeypatch, {1})
    assert train()[0] == 4
    assert "step 1: the loss of rank 0, micro-batch 0 is not finite, in embedding.weight, blocks.0." in capsys.readouterr().err


def test_a_first_step_that_is_skipped_leaves_whole_records(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: scaler(device, init_scale=2.0**26))
    code, run = train("train.precision=fp16", "train.steps=12")
    assert code == 0
    beats = run.beats()
    assert [beat["msg"] for beat in beats].index("data") < [beat["msg"] for beat in beats].index("skip")
    [first] = [beat for beat in beats if beat["msg"] == "data"]
    assert first["step"] == 1
    metrics = json.loads(run.metrics.read_text())
    assert metrics["data_first_tokens"] == first["data_first_tokens"] != []


def test_a_run_that_took_no_step_ends_in_a_message(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: scaler(device, init_scale=2.0**60))
    code, _ = train("train.precision=fp16", "train.steps=3")
    assert code == 4
    assert "step 3: no gradient ever reached embedding.weight, " in capsys.readouterr().err


def test_a_run_that_stops_early_without_a_step_names_what_no_gradient_reached(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scale is so high that every step runs over, and no validation is better than the one before the first."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: scaler(device, init_scale=2.0**60))
    code, run = train("train.precision=fp16", "train.steps=9", "train.eval_every=1", "train.early_stop_patience=1")
    assert code == 4
    assert "step 1: no gradient ever reached embedding.weight, " in capsys.readouterr().err
    assert not run.metrics.exists()


def _overflow_after(step: int, monkeypatch: pytest.MonkeyPatch, *, moment: str = "", bad: float = torch.inf) -> None:
    """Let the update of `step` run over in one weight, or in its `moment`."""
    original, count = Trainer._update, 0

    def overflowing(self: Trainer, grad_norm: float, rate: float) -> None:
        nonlocal count
        original(self, grad_norm, rate)
        count += 1
        if count == step:
            weight = self.model.norm.weight
            (self.optimizer.state[weight][moment] if moment else weight.data)[3] = bad

    monkeypatch.setattr(Trainer, "_update", overflowing)


def test_weights_that_are_not_finite_are_never_saved(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _overflow_after(5, monkeypatch)
    code, run = train()
    assert code == 4
    assert (
        "step 5: the weights are not finite in norm.weight (an update ran over); they are not saved, step-3 is the newest checkpoint; "
        "go on with --resume and a lower train.lr"
    ) in capsys.readouterr().err
    assert (run.checkpoints / "latest").readlink().name == "step-3"
    assert not (run.checkpoints / "step-5").exists()


@pytest.mark.parametrize(("moment", "bad"), [("exp_avg", torch.nan), ("exp_avg_sq", torch.inf)])
def test_moments_that_are_not_finite_are_never_saved(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moment: str, bad: float
) -> None:
    """The weights are finite still: the next update would spoil them, or never move one of them again."""
    _overflow_after(5, monkeypatch, moment=moment, bad=bad)
    code, run = train()
    assert code == 4
    assert (
        f"step 5: the optimizer's moments are not finite in norm.weight/{moment} (an update ran over); they are not saved, "
        "step-3 is the newest checkpoint; go on with --resume and a lower train.grad_clip"
    ) in capsys.readouterr().err
    assert (run.checkpoints / "latest").readlink().name == "step-3"
    assert not (run.checkpoints / "step-5").exists()


def test_weights_that_are_not_finite_show_in_the_next_step(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _overflow_after(1, monkeypatch)
    code, run = train()
    assert code == 4
    assert "step 2: the weights are not finite in norm.weight (an update ran over); they are not saved, there is no checkpoint yet" in (
        capsys.readouterr().err
    )
    assert [*run.checkpoints.iterdir()] == []


def test_a_model_of_nan_logits_ends_its_run_with_all_records(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite weights may be so large that their logits are not."""
    original = Trainer._write_samples

    def large(self: Trainer, name: str) -> None:
        self.model.norm.weight.data.fill_(3e38)
        self.model.embedding.weight.data.mul_(1e3)
        original(self, name)

    monkeypatch.setattr(Trainer, "_write_samples", lambda self, name: (large if name == "after.txt" else original)(self, name))
    code, run = train()
    assert code == 0
    assert "--- ends here: the model's logits are not finite ---" in (run.samples / "after.txt").read_text()
    assert run.metrics.is_file()


def test_too_many_skipped_steps_stop_the_run_saved_with_code_4(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nsa_train.checkpoint import load_model, open_checkpoint

    _spoil(monkeypatch, {3, 4, 5})
    code, run = train("train.max_skips=1", "train.steps=6")
    assert code == 4
    message = capsys.readouterr().err
    assert "step 4: the loss of rank 0, micro-batch 0 is not finite; 2 of the last 100 steps were skipped" in message
    assert len(run.losses()) == 2
    assert run.beats()[-1]["msg"] == "halt"
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


def test_sample_refuses_a_model_of_nan_logits(
    tiny_run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = iter([*b"and s", BROKEN])
    monkeypatch.setattr("nsa_train.model.stream.draw", lambda *args: torch.tensor([next(drawn)]))
    assert run_command(["sample", str(tiny_run.root), "--prompt", "once "]) == 1
    printed = capsys.readouterr()
    assert printed.out == "once and s\n"
    assert "the model's logits are not finite after 5 tokens; sample an earlier checkpoint" in printed.err
