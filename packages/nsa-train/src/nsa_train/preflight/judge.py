"""All rules in their order. This file also holds the rules about the schedule, and about a run's initial weights."""

from collections.abc import Sequence
from pathlib import Path

from nsa_train.checkpoint.initial import initial_weights
from nsa_train.checkpoint.teacher import open_teacher
from nsa_train.errors import ConfigError
from nsa_train.host.environment import missing_report
from nsa_train.host.machine import Machine, processes_of, target_machine
from nsa_train.model.decoder import count_parameters, introduced
from nsa_train.preflight.data import check_data
from nsa_train.preflight.directories import check_disk, check_out_dir
from nsa_train.preflight.findings import Preflight
from nsa_train.preflight.machine import check_machine, check_memory, check_routes
from nsa_train.preflight.memory import MemoryFixes, estimate_memory
from nsa_train.settings.config import RunConfig
from nsa_train.settings.rules import LONG_STEPS, undivided_rows

TOY_PARAMETERS = 1_000_000
ALIGNED = 8
"""Widths of 16-bit products should be multiples of this for tensor cores."""


def run_preflight(
    config: RunConfig,
    out_dir: Path,
    *,
    resuming: bool = False,
    machine: Machine | None = None,
    world_sizes: Sequence[int] | None = None,
    opens_data: bool = True,
) -> Preflight:
    """Return the findings about a run of `config` into `out_dir`. Writes nothing, and uses no GPU memory.

    `resuming`: the directory holds the run that is resumed. `machine`: checked instead of this machine. `world_sizes`: the possible
    numbers of processes of the run, on all hosts together; by default the number on one host. `opens_data`: False leaves out the
    rules about the data.
    """
    findings, where = Preflight(), machine or target_machine(config)
    sizes = world_sizes or [processes_of(config, where)]
    counts = count_parameters(config)
    parameters = getattr(counts, config.model.attention)
    findings.passed.append(introduced(config))
    check_out_dir(findings, out_dir, resuming=resuming)
    check_init_from(findings, config, resuming=resuming)
    frozen = check_selection_teacher(findings, config)
    # if hosts may leave, memory is estimated for the fewest processes, of which each holds the most
    memory = estimate_memory(config, parameters, min(sizes), frozen=frozen)
    findings.memory_gib = memory.total_gib
    check_schedule(findings, config, where, parameters, sizes)
    check_machine(findings, config, where, memory, is_asked_for=machine is not None)
    check_routes(findings, config, where)
    fixes = MemoryFixes(config=config, parameters=parameters, frozen=frozen, world_sizes=sizes, resuming=resuming)
    check_memory(findings, where, memory, fixes)
    check_disk(findings, config, out_dir, parameters)
    if missing := missing_report():
        findings.warned.append(f"report: {missing}")
    if opens_data:
        check_data(findings, config)
    return findings


def check_init_from(findings: Preflight, config: RunConfig, *, resuming: bool) -> None:
    """Check that `train.init_from` names complete weights that fit; a resumed run does not read them."""
    if config.train.init_from is None or resuming:
        return
    try:
        findings.initial = weights = initial_weights(config)
    except ConfigError as error:
        findings.failed.append(str(error))
        return
    steps = "" if weights.step is None else f" after {weights.step} steps"
    findings.passed.append(f"train.init_from: the weights of {weights.path}{steps}")
    findings.warned += [f"train.init_from: {note}" for note in weights.notes]


def check_selection_teacher(findings: Preflight, config: RunConfig) -> int:
    """Check that `train.selection_teacher` names a model that can teach this one; return its number of parameters, 0 without one."""
    if config.train.selection_teacher is None:
        return 0
    try:
        opened = open_teacher(config, with_weights=False, say=lambda line: findings.warned.append(f"train.selection_teacher: {line}"))
    except ConfigError as error:
        findings.failed += str(error).splitlines()
        return 0
    parameters = sum(weight.numel() for weight in opened.decoder.parameters())
    findings.passed.append(f"train.selection_teacher: {opened.path}, {parameters:,} parameters on every process")
    if opened.max_position < config.train.seq_len:
        findings.warned.append(
            f"train.selection_teacher: {opened.path} is meant for {opened.max_position:,} tokens, and rows have train.seq_len="
            f"{config.train.seq_len:,}"
        )
    return parameters


def check_schedule(findings: Preflight, config: RunConfig, machine: Machine, parameters: int, world_sizes: Sequence[int]) -> None:
    """Check steps, checkpoints, precision and divisibility of a run of a model with `parameters`, for each number of processes in `world_sizes`."""
    failures = [*_long_run(config, machine), *unequal_shares(config, world_sizes)]
    findings.failed += failures
    findings.warned += _warnings(config, machine, parameters)
    if not failures:
        train = config.train
        findings.passed.append(
            f"schedule: {train.steps:,} steps of {train.batch_size * train.accumulate * train.seq_len:,} tokens in {train.precision}, "
            f"saved every {train.save_every or train.steps:,}"
        )


def unequal_shares(config: RunConfig, world_sizes: Sequence[int]) -> list[str]:
    """Return the problems of dividing a micro-batch among each of `world_sizes` processes, of all hosts together."""
    train = config.train
    if train.strategy == "single" and max(world_sizes) > 1:
        return [
            f"train.strategy='single' is one process, and {max(world_sizes)} are asked for (each would train alone); "
            "use --set train.strategy=ddp"
        ]
    return undivided_rows(train.batch_size, world_sizes)


def _long_run(config: RunConfig, machine: Machine) -> list[str]:
    train, found = config.train, []
    if train.steps < LONG_STEPS:
        return []
    if train.save_every == 0:
        found.append(
            f"train.save_every={train.save_every} with train.steps={train.steps} (a run of {LONG_STEPS} steps or more saves as it goes); "
            f"use --set train.save_every={train.steps // 10}"
        )
    if machine.device_type == "cuda" and train.precision != "bf16":
        found.append(
            f"train.precision={train.precision!r} with train.steps={train.steps} on a GPU (a long GPU run computes in bf16); "
            "use --set train.precision=bf16"
        )
    return found


def _warnings(config: RunConfig, machine: Machine, parameters: int) -> list[str]:
    train, model, found = config.train, config.model, []
    if train.steps >= LONG_STEPS and parameters < TOY_PARAMETERS:
        found.append(f"model: {parameters:,} parameters for {train.steps:,} steps is a toy; see model.dim and model.n_layers")
    if train.steps >= LONG_STEPS and train.steps // 2 < train.save_every:
        found.append(
            f"train.save_every={train.save_every} with train.steps={train.steps} saves nothing before the run is half over; "
            f"use --set train.save_every={train.steps // 10}"
        )
    if train.steps >= LONG_STEPS and config.data.source == "synthetic":
        found.append("data.source='synthetic' in a long run trains on noise: good for throughput alone; use a corpus to learn from")
    if machine.device_type == "cuda" and train.precision == "fp32":
        found.append("train.precision='fp32' on a GPU leaves its tensor cores idle; use --set train.precision=bf16")
    if machine.device_type == "cuda" and train.precision != "fp32":
        widths = {"model.dim": model.dim, "model.head_dim_qk": model.head_dim_qk, "model.head_dim_v": model.head_dim_v}
        found += [
            f"{name}={width} is not a multiple of {ALIGNED} (16-bit products are slow then); use {-(-width // ALIGNED) * ALIGNED}"
            for name, width in widths.items()
            if width % ALIGNED
        ]
    sizes = [
        layer.config.geometry.compression_block_size
        for layer in config.pattern()
        if layer.attention == "nsa" and "cmp" in layer.config.branches
    ]
    if sizes and train.seq_len < min(sizes):
        found.append(f"train.seq_len={train.seq_len} is shorter than nsa.compression_block_size: no token ever sees a compressed block")
    if train.eval_every > train.steps:
        found.append(
            f"train.eval_every={train.eval_every} is more than train.steps={train.steps}: only the start and the end are evaluated"
        )
    return found
