"""Run this process's rank from a configuration to an exit code: join, check, resume, train."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from nsa_train.checkpoint.claim import claimed_by_another
from nsa_train.checkpoint.initial import InitialWeights
from nsa_train.checkpoint.resuming import check_resumable, require_run, resume_point
from nsa_train.checkpoint.store import Checkpoint
from nsa_train.checkpoint.writer import refused_by_disk
from nsa_train.data.tokenizer import lacks_file
from nsa_train.errors import ConfigError, TrainError
from nsa_train.host.environment import ENVIRONMENT, is_under_torchrun
from nsa_train.loop.guards import Patience
from nsa_train.loop.trainer import Trainer
from nsa_train.model.decoder import introduced
from nsa_train.parallel.world import join_world
from nsa_train.preflight.judge import run_preflight
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.settings.options import AUTO, NEWEST
from nsa_train.telemetry.progress import ProgressDisplay, Screen
from nsa_train.telemetry.records import damaged_records, read_json


def train(config: RunConfig, out: Path, *, resume: int | None = None) -> dict[str, Any]:
    """Train `config` into `out`, from step 0 or from the checkpoint of step `resume` (or NEWEST, or AUTO); return the metrics.

    Raises:
        TrainError: if the run ended before its last step; its `exit_code` says how.
    """
    warnings: list[str] = []
    initial: InitialWeights | None = None
    if not is_under_torchrun():
        resume = settled_resume(out, resume)
        # before a device is used: preflight reports everything that is missing at once
        initial = check_start(config, out, resuming=resume is not None, say=warnings.append)
    if config.train.deterministic:
        # cuBLAS reads this variable when it starts; with this value its sums are deterministic
        ENVIRONMENT.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with (
        join_world(config.train.strategy, config.train.device) as world,
        ProgressDisplay(Screen(quiet=not world.is_main), config.train.steps) as display,
    ):
        # the name may contain the time, which differs between processes
        out = Path(world.from_main(str(out)))
        if world.is_restart:
            # also if the first start resumed from an earlier step, because it made that step the newest
            resume = AUTO
        if is_under_torchrun():
            resume = world.from_main(settled_resume(out, resume))
            initial = world.on_main(
                lambda: check_start(config, out, resuming=resume is not None, say=warnings.append, world_sizes=[world.world_size])
            )
        for line in warnings:
            display.note(line)
        checkpoint = None if resume is None else resume_from(config, out, resume, say=display.note)
        # after a failure past the last step, torchrun's restart finishes the run
        reason = nothing_left(checkpoint, config, RunDirectory(out)) if checkpoint and not world.is_restart else ""
        if reason := world.from_main(reason):
            display.note(f"resume: {reason}")
            return read_json(RunDirectory(out).metrics)
        for line in damaged_records(RunDirectory(out)) if resume is not None and world.is_main else ():
            display.note(f"resume: {line}")
        display.note(f"out: {out}")
        display.note(introduced(config))
        is_continued = world.from_main(resume is not None and RunDirectory(out).config.exists())
        try:
            metrics = Trainer(config, out, display, world=world, resume=checkpoint, is_continued=is_continued, initial=initial).run()
        except OSError as error:
            raise TrainError(refused_by_disk(f"the run in {out} broke off", error, RunDirectory(out).checkpoints)) from error
        if world.is_main:
            display.note(_summary(metrics, out))
        return metrics


def settled_resume(out: Path, resume: int | None) -> int | None:
    """Return the step to resume from: for AUTO the newest if `out` holds a run, else None, a new start."""
    if resume != AUTO:
        return resume
    return NEWEST if RunDirectory(out).holds_run() else None


def check_free(out: Path) -> None:
    """Check that no other process writes to the run's directory, and that it holds no .HALT. Checks neither machine nor data.

    Raises:
        ConfigError: if another process writes, or there is a .HALT.
    """
    if problem := claimed_by_another(RunDirectory(out).checkpoints):
        raise ConfigError(problem)
    if (halt := RunDirectory(out).halt).exists():
        raise ConfigError(f"{halt} is left from before (it would stop the run at once); remove it and start again")


def check_start(
    config: RunConfig, out: Path, *, resuming: bool, say: Callable[[str], None], world_sizes: Sequence[int] | None = None
) -> InitialWeights | None:
    """Check all rules of a run, report warnings, and return the verified weights of `train.init_from`. `world_sizes`: as for `run_preflight`.

    Raises:
        ConfigError: with a line for each rule that does not hold.
    """
    check_free(out)
    findings = run_preflight(config, out, resuming=resuming, world_sizes=world_sizes)
    findings.require()
    for line in findings.warned:
        say(f"warn: {line}")
    return findings.initial


def resume_from(config: RunConfig, out: Path, step: int, *, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint of the run in `out` from which `config` resumes; None if none was saved yet. A collective.

    Raises:
        TrainError: if there is none after `step`, all are damaged, or it describes another run.
    """

    def judge(checkpoint: Checkpoint) -> None:
        if lacks_file(checkpoint.config.data):
            # it may lie elsewhere now
            data = evolve(checkpoint.config.data, tokenizer_path=config.data.tokenizer_path)
            checkpoint = evolve(checkpoint, config=evolve(checkpoint.config, data=data))
        require_run(checkpoint)

    found = resume_point(RunDirectory(out).checkpoints, step=None if step == NEWEST else step, judge=judge)
    if found is None:
        say(f"resume: {out} holds no checkpoint yet; starting at step 0")
        return None
    for line in found.refused:
        say(f"resume: {line}")
    check_resumable(found, config)
    seed, before = config.train.seed, found.config.train.seed
    if seed != before:
        say(f"resume: train.seed={seed} changes nothing: the generators of {found.path.name} go on, seeded with {before}")
    say(f"resume: from {found.path.name}")
    return found


def nothing_left(checkpoint: Checkpoint, config: RunConfig, paths: RunDirectory) -> str:
    """Return why a run has nothing to do after `checkpoint`; empty if it must take a step, or record its end."""
    train, name, step = config.train, checkpoint.path.name, checkpoint.step
    if step > train.steps:
        return f"{name} is beyond train.steps={train.steps}: there is nothing to do; to go on use --set train.steps={step + 1} or more"
    # metrics.json is written last, and removed while a run continues
    if not read_json(paths.metrics):
        return ""
    if step == train.steps:
        return f"{name} is the last step of train.steps={step}: there is nothing to do; to go on use --set train.steps={step + 1} or more"
    patience = Patience(train.early_stop_patience)
    patience.load_state_dict(checkpoint.state["counters"]["patience"])
    if not patience.is_over:
        return ""
    return f"{name} was stopped early ({patience}): there is nothing to do; to go on use --set train.early_stop_patience=0, or more"


def _summary(metrics: Mapping[str, Any], out: Path) -> str:
    before, after, speed = (metrics[name] for name in ("first_val_loss", "val_loss", "toks_per_s_median"))
    losses = "val_loss unknown" if before is None or after is None else f"val_loss {before:.3f} -> {after:.3f} nats per token"
    report = RunDirectory(out).report
    return f"done: {losses}, {speed or 0:.0f} toks/s, {metrics['seconds']:.0f} s; see {report if report.is_file() else out}"
