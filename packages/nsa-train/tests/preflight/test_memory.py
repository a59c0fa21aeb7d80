"""Preflight's fix of a run that does not fit in memory is one that, by the same estimate, makes it fit."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa_train.host.machine import Machine, described_machine
from nsa_train.preflight.judge import run_preflight
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import load_config


def gpu(memory_gib: float) -> Machine:
    return Machine(device_type="cuda", name="gpu", compute_capability=(9, 0), memory_gib=memory_gib, num_gpus=1, is_here=False)


GPU = gpu(40)
LARGE = ("data.source=synthetic", "data.path=", "train.device=cuda", "train.precision=bf16")


def memory_line(config: RunConfig, out: Path, machine: Machine, **options: object) -> str:
    """Return the one line about memory, whatever it says."""
    findings = run_preflight(config, out, machine=machine, **options)
    [line] = [line for line in (*findings.passed, *findings.warned, *findings.failed) if line.startswith("memory: ")]
    return line


def settings_of(line: str) -> list[str]:
    return re.findall(r"--set (\S+?)(?=[,;]?(?: |$))", line)


@pytest.mark.parametrize("recipe", ["125m", "350m-64k", "a100"])
@pytest.mark.parametrize("name", ["a10g", "l40s", "a100", "h200"])
@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["train.activation_checkpointing=none", "train.loss_chunk=0"],
        ["train.batch_size=24", "train.accumulate=3", "train.seq_len=8192"],
        ["train.batch_size=1", "train.seq_len=262144"],
    ],
    ids=["as it is", "dear", "rows", "long"],
)
def test_the_fix_that_is_offered_makes_the_run_fit(tmp_path: Path, recipe: str, name: str, sets: list[str]) -> None:
    sets = ["data.source=synthetic", *sets]
    line = memory_line(load_config(recipe, sets), tmp_path / "out", described_machine(name))
    if "fit in" in line:
        fix = settings_of(line)
        assert fix, line
        fixed = memory_line(load_config(recipe, [*sets, *fix]), tmp_path / "out", described_machine(name))
        assert "not fit in" not in fixed, (line, fixed)


def test_recomputing_all_is_offered_where_recomputing_a_part_is_not_enough(tmp_path: Path) -> None:
    line = memory_line(load_config("350m-64k"), tmp_path / "out", described_machine("l40s"))
    assert line.endswith("does not fit in the 44.4 GiB of NVIDIA L40S; use --set train.activation_checkpointing=full")


@pytest.mark.parametrize(
    ("recipe", "memory_gib", "fix"),
    [
        # fewer rows at a time: as many in a step
        (["train.batch_size=6", "train.accumulate=2"], 60, "--set train.batch_size=4 --set train.accumulate=3"),
        (["train.batch_size=6"], 60, "--set train.batch_size=3 --set train.accumulate=2"),
        # there is but one row
        (["train.batch_size=1", "train.seq_len=98304"], 60, "--set train.activation_checkpointing=selective"),
        (["train.batch_size=1", "train.seq_len=98304"], 30, "--set train.activation_checkpointing=full"),
        (["train.batch_size=1", "train.seq_len=65536", "train.loss_chunk=0"], 70, "--set train.loss_chunk=4096"),
        (
            ["train.batch_size=1", "train.seq_len=98304", "train.loss_chunk=0"],
            20,
            "--set train.activation_checkpointing=full --set train.loss_chunk=4096",
        ),
    ],
)
def test_the_cheapest_fix_that_is_enough_is_offered(tmp_path: Path, recipe: list[str], memory_gib: int, fix: str) -> None:
    base = ["data.source=synthetic", "train.seq_len=16384", "train.activation_checkpointing=none"]
    assert memory_line(load_config("125m", [*base, *recipe]), tmp_path / "out", gpu(memory_gib)).endswith(f"use {fix}")


def test_rows_that_are_offered_divide_among_the_processes(tmp_path: Path) -> None:
    sets = ["data.source=synthetic", "train.strategy=ddp", "train.batch_size=24", "train.seq_len=16384"]
    line = memory_line(load_config("125m", sets), tmp_path / "out", gpu(70), world_sizes=[2, 8])
    # 12 would fit, too
    assert line.endswith("use --set train.batch_size=8 --set train.accumulate=3"), line


def test_a_resumed_run_is_offered_no_other_rows(tmp_path: Path) -> None:
    """Its position is one in the rows that it has."""
    config = load_config("125m", ["data.source=synthetic", "train.batch_size=6", "train.seq_len=16384"])
    (tmp_path / "config.toml").touch()
    assert "batch_size" in memory_line(config, tmp_path / "out", GPU)
    line = memory_line(config, tmp_path, GPU, resuming=True)
    assert line.endswith("use --set train.activation_checkpointing=full"), line
    longer = load_config("125m", ["data.source=synthetic", "train.batch_size=64", "train.seq_len=65536"])
    line = memory_line(longer, tmp_path, GPU, resuming=True)
    assert "batch_size" not in line
    assert "seq_len" not in line


def test_a_model_whose_states_alone_do_not_fit_is_told_so(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    line = memory_line(tiny_config(*LARGE, "model.dim=65536"), tmp_path / "out", GPU)
    assert "weights, gradients and optimizer alone take 1," in line
    assert "batch_size" not in line
    [processes] = re.findall(r"; use a smaller model, or train\.strategy=fsdp on (\d+) or more GPUs$", line)
    shared = tiny_config(
        *LARGE, "model.dim=65536", "train.strategy=fsdp", f"train.batch_size={processes}", "train.activation_checkpointing=full"
    )
    assert "not fit" not in memory_line(shared, tmp_path / "out", GPU, world_sizes=[int(processes)])
    assert "not fit" in memory_line(shared, tmp_path / "out", GPU, world_sizes=[int(processes) // 2])


def test_copies_that_do_not_fit_may_be_shared_by_as_many_processes(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = tiny_config(*LARGE, "model.dim=16384", "train.strategy=ddp", "train.batch_size=6")
    line = memory_line(config, tmp_path / "out", GPU, world_sizes=[6])
    assert line.endswith("use a smaller model, or train.strategy=fsdp on 6 or more GPUs"), line


def test_more_processes_do_not_help_a_machine_without_gpus(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    host = Machine(device_type="cpu", name="cpu", memory_gib=20.0)
    line = memory_line(tiny_config("model.dim=65536"), tmp_path / "out", host)
    assert line.endswith("use a smaller model, a machine with more memory, or train.strategy=fsdp on GPUs")
    tight = Machine(device_type="cpu", name="cpu", memory_gib=0.5)
    line = memory_line(tiny_config(), tmp_path / "out", tight)
    assert line.endswith("Python, torch and its libraries alone take 0.8 GiB; use a machine with more memory")


def test_a_row_that_is_too_long_is_told_what_would_fit(tmp_path: Path) -> None:
    sets = ["data.source=synthetic", "train.batch_size=1", "train.seq_len=4194304"]
    line = memory_line(load_config("125m", sets), tmp_path / "out", GPU)
    assert "activations alone take " in line
    assert "--set train.seq_len=" in line
    assert "fsdp" not in line
