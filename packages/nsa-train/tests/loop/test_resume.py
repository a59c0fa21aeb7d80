"""An interrupted run continues exactly: every loss, weight, moment, generator and data position equal, 0 ULP."""

import json
import os
import platform
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_train.checkpoint import CheckpointWriter
from nsa_train.cli import run_command
from nsa_train.loop.trainer import Trainer
from nsa_train.run_dir import RunDirectory

EXACT = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "config.toml")


@pytest.fixture
def run_in(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that runs the tiny recipe for 8 steps in a directory, with words and overrides, and returns the exit code."""
    monkeypatch.setattr("nsa_train.telemetry.recorder.write_report", lambda paths: None)
    step = Trainer._step

    def drawing(self: Trainer, number: int) -> None:
        # no layer uses the generators: a resumed run must find them where they were all the same
        step(self, number)
        torch.rand(3)
        random.random()

    monkeypatch.setattr(Trainer, "_step", drawing)

    def run(name: str, *words: str, overrides: tuple[str, ...] = ()) -> int:
        sets = [word for override in ("train.steps=8", *overrides) for word in ("--set", override)]
        return run_command(["run", str(tiny_recipe), "--out", str(tmp_path / name), *sets, *words])

    return run


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float, float, float]]:
    """Step, loss, gradient norm and rate of every step that is recorded, in full precision."""
    seen: list[tuple[int, float, float, float]] = []
    monkeypatch.setattr(
        "nsa_train.telemetry.progress.ProgressDisplay.show_step",
        lambda self, figures, is_logged: seen.append((figures.step, figures.loss, figures.grad_norm, figures.lr)),
    )
    return seen


def _halt_in(step: int, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Write .HALT while `step` runs."""
    original = Trainer._backward

    def halting(self: Trainer, *args: Any) -> Any:
        halting.count += 1
        if halting.count == step:
            self.recorder.paths.halt.touch()
        return original(self, *args)

    halting.count = 0
    monkeypatch.setattr(Trainer, "_backward", halting)
    return monkeypatch


def _tables(root: Path) -> list[str]:
    """Return the records of a run without its times."""
    rows = [line.split(",") for line in (root / "training.csv").read_text().splitlines()]
    kept = [index for index, name in enumerate(rows[0]) if name in ("step", "loss", "ppl", "lr", "grad_norm", "is_clipped")]
    return [",".join(row[index] for index in kept) for row in rows] + (root / "val.csv").read_text().splitlines()


KINDS = {
    "fp32": (),
    "bf16": ("train.precision=bf16",),
    "fp16": ("train.precision=fp16",),
    "accumulated": ("train.accumulate=2", "train.loss_chunk=16"),
    "checkpointed": ("train.activation_checkpointing=selective", "train.async_save=true", "train.skip_loss_spikes=true"),
    "dense": ("model.attention=dense", "train.deterministic=true"),
}
FAST = ("fp32", "bf16", "fp16")


@pytest.mark.parametrize("kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_an_interrupted_run_is_the_straight_run(
    run_in: Callable[..., int], losses: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert run_in("straight", overrides=KINDS[kind]) == 0
    straight = [*losses]
    losses.clear()
    with monkeypatch.context() as patch:
        _halt_in(4, patch)
        assert run_in("broken", overrides=KINDS[kind]) == 3
    (tmp_path / "broken" / ".HALT").unlink()
    assert [step for step, *_ in losses] == [1, 2, 3, 4]
    assert run_in("broken", "--resume", overrides=KINDS[kind]) == 0
    assert losses == straight
    for name in EXACT:
        ours, theirs = (RunDirectory(tmp_path / run).checkpoints / "step-8" / name for run in ("broken", "straight"))
        assert ours.read_bytes() == theirs.read_bytes(), name
    assert _tables(tmp_path / "broken") == _tables(tmp_path / "straight")


def test_skipped_steps_count_across_a_resume(run_in: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, count = Trainer._summed_loss, 0

    def spoiled(self: Trainer, *args: Any) -> torch.Tensor:
        nonlocal count
        count += torch.is_grad_enabled()
        loss = original(self, *args)
        return loss * float("nan") if count in (2, 6) and torch.is_grad_enabled() else loss

    monkeypatch.setattr(Trainer, "_summed_loss", spoiled)
    with monkeypatch.context() as patch:
        _halt_in(4, patch)
        assert run_in("run", overrides=("train.max_skips=1",)) == 3
    (tmp_path / "run/.HALT").unlink()
    # one more than allowed, with the one before
    assert run_in("run", "--resume", overrides=("train.max_skips=1",)) == 4
    counters = json.loads((tmp_path / "run/checkpoints/latest/state.json").read_text())["counters"]
    assert (counters["guard"]["num_skipped"], counters["guard"]["recent_skips"]) == (2, [2, 6])
    assert counters["watch"]["num_observed"] == 4


def test_the_first_tokens_are_recorded_where_a_resumed_run_skips_its_first_step(
    run_in: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_in("run", overrides=("train.steps=3",)) == 0
    original, count = Trainer._summed_loss, 0

    def spoiled(self: Trainer, *args: Any) -> torch.Tensor:
        nonlocal count
        count += torch.is_grad_enabled()
        loss = original(self, *args)
        return loss * float("nan") if count == 1 and torch.is_grad_enabled() else loss

    monkeypatch.setattr(Trainer, "_summed_loss", spoiled)
    assert run_in("run", "--resume") == 0
    events = [json.loads(line) for line in RunDirectory(tmp_path / "run").heartbeat.read_text().splitlines()]
    assert [event["step"] for event in events if event["msg"] == "data"] == [1, 4]
    assert [event["step"] for event in events if event["msg"] == "skip"] == [4]


def test_sigterm_saves_and_exits_75_and_the_handlers_are_put_back(
    run_in: Callable[..., int], losses: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    original = Trainer._evaluate

    def terminated(self: Trainer, step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_evaluate", terminated)
        assert run_in("run", overrides=("train.save_every=0",)) == 75
    assert "stopped by SIGTERM or SIGHUP after step 6, which is saved; go on with: nsa-train run " in capsys.readouterr().err
    assert "Thread" in RunDirectory(tmp_path / "run").stackdump(0).read_text()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert run_in("run", "--resume") == 0
    assert [step for step, *_ in losses] == list(range(1, 9))


def test_resuming_from_a_named_step_drops_what_came_after(run_in: Callable[..., int], losses: list[Any], tmp_path: Path) -> None:
    assert run_in("run") == 0
    straight, before = [*losses], _tables(tmp_path / "run")
    losses.clear()
    assert run_in("run", "--resume", "3") == 0
    assert losses == straight[3:]
    assert _tables(tmp_path / "run") == before


def test_a_resumed_run_may_evaluate_on_more_or_fewer_batches(run_in: Callable[..., int], tmp_path: Path) -> None:
    assert run_in("run", overrides=("train.steps=4",)) == 0
    assert run_in("run", "--resume", overrides=("train.eval_batches=1",)) == 0
    # steps 0, 3 and 4 of the first start, 6 and 8 of the second
    assert [line.split(",")[0] for line in (tmp_path / "run" / "val.csv").read_text().splitlines()] == ["step", "0", "3", "4", "6", "8"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    run_in: Callable[..., int], losses: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_in("run") == 0
    weights = tmp_path / "run/checkpoints/step-8/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    losses.clear()
    assert run_in("run", "--resume") == 0
    printed = capsys.readouterr().out
    assert "step-8" in printed
    assert "expected" in printed
    assert "resume: from step-6" in printed
    assert [step for step, *_ in losses] == [7, 8]


def test_a_finished_run_that_is_resumed_stays_finished(run_in: Callable[..., int], losses: list[Any], tmp_path: Path) -> None:
    assert run_in("run") == 0
    before = _tables(tmp_path / "run")
    losses.clear()
    assert run_in("run", "--resume") == 0
    assert losses == []
    assert _tables(tmp_path / "run") == before


def test_a_run_that_saved_nothing_starts_over_in_its_directory(
    run_in: Callable[..., int], losses: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_after_step", lambda self, step: (_ for _ in ()).throw(OSError("the disk went away")))
        assert run_in("run") == 1
    assert run_in("run") == 2
    assert "is not empty" in capsys.readouterr().err
    losses.clear()
    assert run_in("run", "--resume") == 0
    assert "holds no checkpoint yet; starting at step 0" in capsys.readouterr().out
    assert [step for step, *_ in losses] == [1, 2, 3, 4, 5, 6, 7, 8]
    steps = [line.split(",")[0] for line in (tmp_path / "run" / "training.csv").read_text().splitlines()]
    assert steps == ["step", *map(str, range(1, 9))]


def test_a_stale_halt_is_refused_at_the_start(
    run_in: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _halt_in(2, monkeypatch)
    assert run_in("run") == 3
    assert "halted by .HALT after step 2, which is saved; remove .HALT and go on with: nsa-train run " in capsys.readouterr().err
    assert run_in("run", "--resume") == 2
    message = capsys.readouterr().err
    assert ".HALT is left from before" in message
    assert "remove it" in message


@pytest.mark.parametrize("words", [[], ["--resume"]])
def test_the_directory_of_a_running_run_is_refused_before_data_or_gpu_are_looked_at(
    run_in: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("data or a GPU was looked at")

    assert run_in("run", overrides=("train.steps=2",)) == 0
    capsys.readouterr()
    before = _tables(tmp_path / "run")
    monkeypatch.setattr("nsa_train.data.dataset._opened", refuse)
    for name in ("_lazy_init", "is_available", "device_count", "get_device_properties", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    with CheckpointWriter(tmp_path / "run" / "checkpoints"):
        assert run_in("run", *words) == 2
    assert capsys.readouterr().err == (
        f"nsa-train: {tmp_path}/run/checkpoints belongs to another process that still runs: pid {os.getpid()} on host {platform.node()} "
        f"(two would overwrite each other's files); end that one (kill {os.getpid()}, which saves), or use another --out\n"
    )
    assert _tables(tmp_path / "run") == before


def test_what_cannot_be_resumed_is_refused(run_in: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "demo", "--resume"]) == 2
    assert "use --out DIR" in capsys.readouterr().err
    assert run_in("run") == 0
    assert run_in("run", "--resume", "5") == 2
    assert "5" in capsys.readouterr().err
    assert run_in("run", "--resume", overrides=("model.n_layers=1",)) == 2
    message = capsys.readouterr().err
    assert "model.n_layers=1" in message
    assert "step-8" in message


def test_early_stopping_ends_saved_and_counts_across_a_resume(
    run_in: Callable[..., int], losses: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("train.early_stop_patience=2", "train.eval_every=1", "train.lr=1e-12", "train.steps=30", "train.warmup_steps=0")
    found = iter([3.0, 2.0, *[2.5] * 30])
    original = Trainer._evaluate

    def worse(self: Trainer, step: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(self.patience, "observe", lambda loss, observe=self.patience.observe: observe(next(found)))
            original(self, step)

    monkeypatch.setattr(Trainer, "_evaluate", worse)
    with monkeypatch.context() as patch:
        _halt_in(2, patch)
        assert run_in("run", overrides=overrides) == 3
    (tmp_path / "run/.HALT").unlink()
    assert run_in("run", "--resume", overrides=overrides) == 0
    assert "stopped early: no better validation loss than 2.0000 in 2 evaluations" in capsys.readouterr().out
    assert [step for step, *_ in losses] == [1, 2, 3]
    state = json.loads((tmp_path / "run/checkpoints/latest/state.json").read_text())
    assert state["counters"]["patience"] == {"best": 2.0, "num_worse": 2}


def test_a_resume_with_other_rows_is_refused_and_leaves_the_records_alone(
    run_in: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_in("run") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert run_in("run", "--resume", "3", overrides=("train.batch_size=4",)) == 2
    assert "train.batch_size=4 is not what step-3 was saved with (its position is one in other rows)" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
