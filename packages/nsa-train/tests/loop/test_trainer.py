"""A run from end to end: its files, its reproducibility, and switches that change only what they should."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.cli import run_command
from nsa_train.errors import DataError, GuardError
from nsa_train.loop.feed import Feed
from nsa_train.loop.optim import gradient_norm
from nsa_train.loop.trainer import Trainer


def test_the_dense_twin_runs_by_one_key(train: Callable[..., Any]) -> None:
    code, run = train("model.attention=dense")
    assert code == 0
    assert not run.selection.exists()
    assert not run.fallbacks.exists()
    assert all("gate_branch_shares" not in beat for beat in run.beats())
    assert run.losses()[-1] < run.losses()[0]


def test_equal_seeds_repeat_a_run_exactly(train: Callable[..., Any], tiny_run: Any) -> None:
    _, again = train("train.deterministic=true")
    _, other = train("train.seed=1")
    assert again.losses() == tiny_run.losses()
    assert other.losses() != tiny_run.losses()
    assert not torch.are_deterministic_algorithms_enabled()


def _after_updates(monkeypatch: pytest.MonkeyPatch, look: Callable[[Trainer], Any]) -> list[Any]:
    """Return a list that gets what `look` finds after the update of each step."""
    original, found = Trainer._update, []

    def looking(self: Trainer, *args: Any) -> None:
        original(self, *args)
        found.append(look(self))

    monkeypatch.setattr(Trainer, "_update", looking)
    return found


def test_every_update_takes_the_rate_of_its_step(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = _after_updates(monkeypatch, lambda trainer: {group["lr"] for group in trainer.optimizer.param_groups})
    _, run = train("train.warmup_steps=2")
    assert [len(rates) for rates in taken] == [1] * 5
    expected = [0.005, 0.01, 0.01 * (0.1 + 0.9 * 0.75), 0.01 * (0.1 + 0.9 * 0.25), 0.001]
    assert [rate for rates in taken for rate in rates] == pytest.approx(expected)
    assert [float(row["lr"]) for row in run.table(run.training)] == pytest.approx(expected, rel=1e-5)


def test_gradients_are_clipped_to_the_norm_that_was_asked_for(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = _after_updates(monkeypatch, lambda trainer: float(gradient_norm(trainer.model)))
    _, run = train("train.grad_clip=0.5")
    rows = run.table(run.training)
    assert min(float(row["grad_norm"]) for row in rows) > 0.5
    assert taken == pytest.approx([0.5] * 5, rel=1e-4)
    assert {row["is_clipped"] for row in rows} == {"1"}
    taken.clear()
    _, free = train("train.grad_clip=inf")
    assert taken == pytest.approx([float(row["grad_norm"]) for row in free.table(free.training)], rel=1e-4)


@pytest.mark.parametrize("is_asked", [True, False])
def test_deterministic_kernels_run_where_asked_for(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, is_asked: bool) -> None:
    found = _after_updates(monkeypatch, lambda trainer: torch.are_deterministic_algorithms_enabled())
    train(f"train.deterministic={str(is_asked).lower()}")
    assert found == [is_asked] * 5
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_heartbeat_tells_of_the_recent_waits_in_ms(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original, count = Feed.fetch, 0

    def slow(self: Feed, *args: Any) -> Any:
        nonlocal count
        count += 1
        fetched = original(self, *args)
        return fetched and evolve(fetched, seconds=count / 1000)

    monkeypatch.setattr(Feed, "fetch", slow)
    _, run = train()
    ends = [beat for beat in run.beats() if beat["msg"] == "step_end"]
    assert [beat["dt_fetch_s"] for beat in ends] == [0.001, 0.002, 0.003, 0.004, 0.005]
    assert [beat["fetch_p50_ms"] for beat in ends] == [1, 1.5, 2, 2.5, 3]
    assert [beat["fetch_p95_ms"] for beat in ends] == [1, 1, 2, 3, 4]
    assert [float(row["fetch_ms"]) for row in run.table(run.training)] == [1, 2, 3, 4, 5]


WEIGHTS_AGREE = 2e-5
"""Largest difference of weights after five steps with sums in another order.

Measured: 2e-6 to 7e-6. A micro-batch whose gradient is a ten-thousandth off moves them by 2e-3.
"""


@pytest.fixture
def short_documents(tmp_path: Path) -> tuple[str, ...]:
    """Overrides for a corpus in whose rows documents end: no two micro-batches have the same number of targets for sure."""
    draw = random.Random(0)
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({"text": "abcdefgh" * draw.randint(1, 8)}) + "\n" for _ in range(400)))
    return "data.source=jsonl", f"data.path={path}"


def _weights_apart(ours: Any, theirs: Any) -> float:
    """Return the largest difference between the last weights of two runs."""
    first, second = (load_model(open_checkpoint(run.root)).state_dict() for run in (ours, theirs))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_accumulation_is_one_larger_batch(train: Callable[..., Any], short_documents: tuple[str, ...], attention: str) -> None:
    _, whole = train("train.batch_size=4", f"model.attention={attention}", *short_documents)
    _, parts = train("train.batch_size=2", "train.accumulate=2", f"model.attention={attention}", *short_documents)
    assert parts.losses() == pytest.approx(whole.losses(), rel=2e-6)
    assert _weights_apart(parts, whole) <= WEIGHTS_AGREE


@pytest.mark.parametrize("fault", ["the last micro-batch weighs a ten-thousandth more", "a mean of means"])
def test_a_fault_of_accumulation_is_seen_in_the_weights(
    train: Callable[..., Any], short_documents: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The losses of so few steps do not show the first fault."""
    words = ("train.batch_size=2", "train.accumulate=2", *short_documents)
    _, sound = train(*words)
    summed, targets = Trainer._summed_loss, list[int]()

    def spoiled(self: Trainer, forward: Any, batch: Any) -> torch.Tensor:
        loss = summed(self, forward, batch)
        if not self.model.training:
            return loss
        targets.append(int(batch.loss_mask.sum()))
        factor = 60 / targets[-1] if fault == "a mean of means" else 1.0001 if len(targets) % 2 == 0 else 1.0
        # the loss stays, its gradient does not
        return loss.detach() + factor * (loss - loss.detach())

    monkeypatch.setattr(Trainer, "_summed_loss", spoiled)
    _, faulty = train(*words)
    assert len(set(targets)) > 1
    assert _weights_apart(faulty, sound) > 10 * WEIGHTS_AGREE


def test_activation_checkpointing_changes_no_loss(train: Callable[..., Any], tiny_run: Any) -> None:
    _, run = train("train.activation_checkpointing=full")
    assert run.losses() == tiny_run.losses()


def test_bf16_is_autocast_over_float32_weights(train: Callable[..., Any], tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, run = train("train.precision=bf16")
    assert code == 0
    assert run.losses() != tiny_run.losses()
    assert run.losses() == pytest.approx(tiny_run.losses(), rel=0.02)
    assert {weight.dtype for weight in load_model(open_checkpoint(run.root)).parameters()} == {torch.float32}


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


@pytest.mark.parametrize(("first_failure", "code"), [(1, 2), (4, 1)])
def test_data_that_fail_after_steps_were_taken_are_no_refusal_and_lose_no_step(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first_failure: int, code: int
) -> None:
    fetch, calls = Feed.fetch, []

    def failing(self: Feed, is_stopped: Callable[[], bool]) -> Any:
        calls.append(None)
        if len(calls) == first_failure:
            raise DataError("data.path: a.jsonl line 7 is not JSON")
        return fetch(self, is_stopped)

    run, words = tmp_path / "run", ["--set", "train.save_every=0"]
    monkeypatch.setattr(Feed, "fetch", failing)
    assert run_command(["run", str(tiny_recipe), "--out", str(run), *words]) == code
    assert "a.jsonl line 7 is not JSON" in capsys.readouterr().err
    assert [path.name for path in run.glob("checkpoints/step-*")] == [f"step-{step}" for step in range(first_failure - 1, 0, -3)][:1]
    monkeypatch.undo()
    if code == 1:
        assert run_command(["resume", str(run)]) == 0


def test_held_out_documents_without_a_token_to_predict_are_refused(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text('{"text": ""}\n' * 300 + json.dumps({"text": "document 3 " * 300}) + "\n")
    words = ["--set", "data.source=jsonl", "--set", f"data.path={file}"]
    assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "run"), *words]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "held-out" in line]
    assert line.startswith("nsa-train: data: the held-out documents hold no token to predict")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch 2.13 imports its own deprecated parts
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # and looks at what it warns of
def test_a_compiled_run_has_the_losses_of_an_eager_one(train: Callable[..., Any], tiny_run: Any) -> None:
    code, run = train("train.compile=true", "train.log_every=100")
    assert code == 0
    assert run.losses() == pytest.approx(tiny_run.losses(), rel=1e-4)
