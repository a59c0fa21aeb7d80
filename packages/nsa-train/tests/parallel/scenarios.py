"""Run as a script, once per rank: the scenario named on the command line, its findings written as JSON.

RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=... python scenarios.py RECIPE TEACHER FOLDER SCENARIO...
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from attrs import evolve

from nsa_train.checkpoint import resume_point
from nsa_train.errors import TrainError
from nsa_train.loop.trainer import Trainer
from nsa_train.parallel.world import World, join_world, local_part, whole
from nsa_train.settings.recipe import load_config
from nsa_train.telemetry.progress import ProgressDisplay, Screen, StepFigures

STEPS = 50
SPOILED = (
    ("ddp", "loss", "nan", "fp32"),
    ("ddp", "gradient", "nan", "fp32"),
    ("fsdp", "gradient", "inf", "fp32"),
    ("fsdp", "activation", "inf", "fp32"),
    ("ddp", "gradient", "inf", "fp16"),
    ("fsdp", "loss", "nan", "fp16"),
)
SPOILED_MORE = (
    ("ddp", "activation", "nan", "fp32"),
    ("fsdp", "loss", "inf", "fp32"),
    ("ddp", "loss", "inf", "fp16"),
    ("ddp", "activation", "inf", "fp16"),
    ("fsdp", "gradient", "nan", "fp16"),
    ("fsdp", "activation", "nan", "fp16"),
)
RESUMED = (("ddp", "fp32"), ("fsdp", "bf16"))
RESUMED_MORE = (("ddp", "bf16"), ("fsdp", "fp32"))
FAST = ("train.eval_every=1000", "train.save_every=0", "train.log_every=1000")


class Listener(ProgressDisplay):
    """Keeps what the trainer shows."""

    def __init__(self) -> None:
        super().__init__(Screen(quiet=True), 1)
        self.losses: list[float] = []
        self.notes: list[str] = []

    def show_step(self, figures: StepFigures, *, is_logged: bool) -> None:
        self.losses.append(figures.loss)

    def note(self, text: str) -> None:
        self.notes.append(text)


def quietly(recipe: str, out: Path, world: World, *overrides: str, resume: Any = None) -> tuple[Trainer, Listener]:
    """Return a trainer that draws no samples and writes no report, and what it will show."""
    config, listener = load_config(recipe, overrides), Listener()
    trainer = Trainer(config, out, listener, world=world, resume=resume, is_continued=resume is not None)
    trainer._write_samples = lambda name: None
    draw_each_step(trainer)
    trainer.recorder.finished = dict
    return trainer, listener


def draw_each_step(trainer: Trainer) -> None:
    """Use the generators, which no layer does: a resumed run must find them where they were."""
    step = trainer._step

    def drawing(number: int) -> None:
        step(number)
        torch.rand(3)
        random.random()

    trainer._step = drawing


def agree(recipe: str, folder: Path, world: World) -> dict[str, Any]:
    """Train 50 steps with each strategy of this world; the first step's gradients go to files."""
    strategies = ("single",) if world.world_size == 1 else ("ddp", "fsdp")
    found: dict[str, Any] = {}
    for strategy in strategies:
        for name, more in {"": (), "-accumulated": ("train.accumulate=2",)}.items():
            overrides = (
                *FAST,
                *more,
                f"train.strategy={strategy}",
                f"train.steps={STEPS if not more else 2}",
                "train.batch_size=4",
                "train.lr=1e-3",
            )
            trainer, listener = quietly(recipe, folder / f"{strategy}{name}", world, *overrides)
            gradients: dict[str, torch.Tensor] = {}
            keep_first_gradients(trainer, gradients)
            travels = note_travels(trainer, strategy)
            found[strategy + name + "-hash"] = trainer.run()["consumed_hash"]
            found[strategy + name] = listener.losses
            found[strategy + name + "-travels"] = travels
            if world.is_main:
                safetensors.torch.save_file(gradients, folder / f"{strategy}{name}.safetensors")
    return found


def taught(recipe: str, folder: Path, world: World) -> dict[str, Any]:
    """Take one step whose choice a teacher teaches; its gradients go to files. One process takes the ranks' rows one after another."""
    found: dict[str, Any] = {}
    for strategy in ("single",) if world.world_size == 1 else ("ddp", "fsdp"):
        rows = ("train.batch_size=2", "train.accumulate=2") if strategy == "single" else ("train.batch_size=4",)
        teacher = (f"train.selection_teacher={TEACHER}", "train.selection_loss=100", "data.workers=0")
        trainer, _ = quietly(recipe, folder / strategy, world, *FAST, *teacher, *rows, f"train.strategy={strategy}", "train.steps=2")
        gradients: dict[str, torch.Tensor] = {}
        keep_first_gradients(trainer, gradients)
        trainer.run()
        found[strategy] = [auxiliary.num_samples for auxiliary in trainer.model.selection_losses]
        if world.is_main:
            safetensors.torch.save_file(gradients, folder / f"{strategy}.safetensors")
    return found


def keep_first_gradients(trainer: Trainer, gradients: dict[str, torch.Tensor]) -> None:
    update = trainer._update

    def keeping(grad_norm: float, rate: float) -> None:
        if not gradients:
            gradients.update({name: whole(p.grad).clone() for name, p in trainer.model.named_parameters() if p.grad is not None})
        update(grad_norm, rate)

    trainer._update = keeping


def note_travels(trainer: Trainer, strategy: str) -> list[bool]:
    """Return a list that gets, for every training micro-batch, whether gradients will travel after it."""
    travels: list[bool] = []
    summed_loss = trainer._summed_loss

    def noting(forward: Any, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and strategy == "ddp":
            travels.append(forward.require_backward_grad_sync)
        if torch.is_grad_enabled() and strategy == "fsdp":
            travels.append(forward._get_fsdp_state()._fsdp_param_group.reduce_grads)
        return summed_loss(forward, batch)

    trainer._summed_loss = noting
    return travels


def spoiled(recipe: str, folder: Path, world: World, cases: tuple[tuple[str, str, str, str], ...] = SPOILED) -> dict[str, Any]:
    """Put NaN or Inf into the loss, a gradient or an activation of rank 1 in step 3 of 5."""
    found: dict[str, Any] = {}
    for strategy, where, bad, precision in cases:
        name = f"{strategy}-{where}-{bad}-{precision}"
        overrides = (*FAST, f"train.strategy={strategy}", f"train.precision={precision}", "train.steps=5", "train.batch_size=4")
        trainer, listener = quietly(recipe, folder / name, world, *overrides)
        if world.rank == 1:
            spoil(trainer, where, float(bad))
        trainer.run()
        weights = {name: whole(p.detach()) for name, p in trainer.model.named_parameters()}
        found[name] = {
            "is_finite": all(bool(weight.isfinite().all()) for weight in weights.values()),
            "sum": sum(float(weight.double().sum()) for weight in weights.values()),
            "steps": len(listener.losses),
            "skips": [note for note in listener.notes if "skipped" in note],
            "skipped": trainer.guard.num_skipped,
            "scale": trainer.scaler.get_scale() if trainer.scaler else None,
        }
    return found


def spoiled_more(recipe: str, folder: Path, world: World) -> dict[str, Any]:
    """Return the findings of the other places and numbers."""
    return spoiled(recipe, folder, world, SPOILED_MORE)


def overflown(recipe: str, folder: Path, world: World) -> dict[str, Any]:
    """Let the update of step 4 run over on rank 1 alone, in a part of a weight or of its moment; a checkpoint is saved after 3, and at 4."""
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        for moment in ("", "exp_avg_sq"):
            name = f"{strategy}-{moment}"
            overrides = (*FAST, f"train.strategy={strategy}", "train.save_every=3", "train.steps=4", "train.batch_size=4")
            trainer, listener = quietly(recipe, folder / name, world, *overrides)
            if world.rank == 1:
                overflow(trainer, step=4, moment=moment)
            found[name] = ending_of(trainer, listener)
    return found


def overflow(trainer: Trainer, *, step: int, moment: str) -> None:
    """Put Inf into this rank's part of the last weight, or of its `moment`, in the update of `step`."""
    update, count = trainer._update, 0

    def overflowing(grad_norm: float, rate: float) -> None:
        nonlocal count
        update(grad_norm, rate)
        count += 1
        if count == step:
            weight = trainer.model.norm.weight
            local_part(trainer.optimizer.state[weight][moment] if moment else weight.data)[-1] = torch.inf

    trainer._update = overflowing


def spoil(trainer: Trainer, where: str, bad: float) -> None:
    """Spoil the third training forward pass of this rank."""
    summed_loss, count = trainer._summed_loss, 0

    def third_time(forward: Any, batch: Any) -> torch.Tensor:
        nonlocal count
        count += torch.is_grad_enabled()
        if count != 3 or not torch.is_grad_enabled():
            return summed_loss(forward, batch)
        if where == "loss":
            return summed_loss(forward, batch) * bad
        name = "norm" if where == "activation" else "blocks.0"
        module = trainer.model.get_submodule(name)

        def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            if where == "activation":
                return output * bad
            output.register_hook(lambda gradient: gradient * bad)
            return output

        handle = module.register_forward_hook(hook)
        try:
            return summed_loss(forward, batch)
        finally:
            handle.remove()

    trainer._summed_loss = third_time


def stopped(recipe: str, folder: Path, world: World) -> dict[str, Any]:
    """Request a stop while the ranks are in each phase of step 3 of 1,000; then read their ends."""
    found: dict[str, Any] = {}
    for request in ("term", "halt"):
        for phase in ("forward", "save", "eval", "data"):
            name = f"{request}-{phase}"
            here = evolve(world, store=dist.PrefixStore(name, world.store))
            overrides = ("train.strategy=ddp", "train.steps=1000", "train.eval_every=3", "train.save_every=4", "train.log_every=1000")
            trainer, listener = quietly(recipe, folder / name, here, *overrides)
            ask_in(phase, trainer, lambda out=folder / name, kind=request: ask(kind, out), is_asking=world.rank == 1)
            found[name] = ending_of(trainer, listener)
    return found


def resumed(recipe: str, folder: Path, world: World, cases: tuple[tuple[str, str], ...] = RESUMED) -> dict[str, Any]:
    """Train 6 steps in one go and in two, which .HALT parts after step 3; the checkpoints are compared by the test."""
    found: dict[str, Any] = {}
    for strategy, precision in cases:
        name = f"{strategy}-{precision}"
        overrides = (*FAST, f"train.strategy={strategy}", f"train.precision={precision}", "train.steps=6", "train.batch_size=4")
        straight, listener = quietly(recipe, folder / f"straight-{name}", world, *overrides)
        straight.run()
        first, before = quietly(recipe, folder / f"broken-{name}", evolve(world, store=dist.PrefixStore(name, world.store)), *overrides)
        ask_in("forward", first, lambda out=folder / f"broken-{name}": ask("halt", out), is_asking=world.rank == 1)
        ended = ending_of(first, before)
        world.barrier()
        checkpoint = resume_point(folder / f"broken-{name}" / "checkpoints")
        (folder / f"broken-{name}" / ".HALT").unlink(missing_ok=True)
        world.barrier()
        second, after = quietly(recipe, folder / f"broken-{name}", world, *overrides, resume=checkpoint)
        second.run()
        found[name] = {"ended": ended, "straight": listener.losses, "broken": before.losses + after.losses}
    return found


def resumed_more(recipe: str, folder: Path, world: World) -> dict[str, Any]:
    """Return the findings of the other strategies and precisions."""
    return resumed(recipe, folder, world, RESUMED_MORE)


def ask(request: str, out: Path) -> None:
    if request == "halt":
        (out / ".HALT").touch()
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def ask_in(phase: str, trainer: Trainer, asking: Callable[[], None], *, is_asking: bool) -> None:
    """Let rank 1 ask in `phase`; in phase "data", data stops coming on rank 0 and rank 1 waits for it in an exchange."""
    if phase == "data":
        ready, accept, taken = trainer.stream.ready, trainer.feed.accept, 0

        def accepted() -> None:
            nonlocal taken
            taken += 1
            accept()

        trainer.feed.accept = accepted
        if is_asking:
            threading.Thread(target=after, args=(lambda: taken >= 3, 0.3, asking)).start()
        else:
            trainer.stream.ready = lambda seconds: (taken < 3 and ready(seconds)) or time.sleep(seconds)
        return
    owner, method = {"forward": (trainer, "_summed_loss"), "save": (trainer.writer, "save"), "eval": (trainer, "_evaluate")}[phase]
    original, calls = getattr(owner, method), 0

    def noticing(*args: Any) -> Any:
        nonlocal calls
        calls += 1 if phase != "forward" else torch.is_grad_enabled()
        # the first evaluation is that of step 0
        if is_asking and calls == {"forward": 3, "save": 1, "eval": 2}[phase] and (phase != "forward" or torch.is_grad_enabled()):
            asking()
        return original(*args)

    setattr(owner, method, noticing)


def after(condition: Callable[[], bool], seconds: float, action: Callable[[], None]) -> None:
    while not condition():
        time.sleep(0.01)
    time.sleep(seconds)
    action()


def ending_of(trainer: Trainer, listener: Listener) -> dict[str, Any]:
    try:
        trainer.run()
    except TrainError as error:
        saved = (trainer.recorder.paths.checkpoints / "latest").readlink().name
        return {"code": error.exit_code, "message": str(error), "steps": len(listener.losses), "saved": saved}
    return {"code": 0}


if __name__ == "__main__":
    recipe, TEACHER, folder, *scenarios = sys.argv[1:]
    torch.set_num_threads(1)
    with join_world("ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "single") as joined:
        for scenario in scenarios:
            place = Path(folder) / scenario
            place.mkdir(exist_ok=True)
            findings = globals()[scenario](recipe, place, joined)
            (place / f"rank{joined.rank}.json").write_text(json.dumps(findings))
