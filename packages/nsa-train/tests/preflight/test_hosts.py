"""Preflight judges the processes of all hosts together: those that are asked for, before any of them is started."""

from pathlib import Path

import pytest

from nsa_train.cli import run_command
from nsa_train.data.stream import lanes_of
from nsa_train.errors import ConfigError
from nsa_train.host.machine import described_machine
from nsa_train.preflight.judge import run_preflight, unequal_shares
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import load_config


def failures(config: RunConfig, out: Path, **options) -> list[str]:
    return run_preflight(config, out, **options).failed


def test_rows_divide_among_the_processes_of_all_hosts(tiny_config, tmp_path: Path) -> None:
    config = tiny_config("train.strategy=fsdp", "train.nproc_per_node=4", "train.batch_size=20")
    machine = described_machine("h200", num_gpus=4)
    assert failures(config, tmp_path / "out", machine=machine) == []
    [failure] = failures(config, tmp_path / "out", machine=machine, world_sizes=[8])
    assert failure == "train.batch_size=20 does not divide among 8 processes (each takes as many rows); use --set train.batch_size=16 or 24"
    # hosts that may leave and come back
    [failure] = failures(config, tmp_path / "out", machine=machine, world_sizes=[4, 8, 12])
    assert failure == (
        "train.batch_size=20 does not divide among 8 processes (each takes as many rows; there may be 4, 8, 12); "
        "use --set train.batch_size=24"
    )
    assert failures(tiny_config("train.strategy=fsdp", "train.batch_size=24"), tmp_path / "out", machine=machine, world_sizes=[8, 12]) == []


def test_rows_that_do_not_divide_are_told_in_the_same_words_everywhere(tiny_config) -> None:
    keys = ("train.strategy=ddp", "train.batch_size=6")
    [of_preflight] = unequal_shares(tiny_config(*keys), [4])
    with pytest.raises(ConfigError) as of_stream:
        lanes_of(tiny_config(*keys), 0, 4)
    with pytest.raises(ConfigError) as of_recipe:
        tiny_config(*keys, "train.nproc_per_node=4")
    assert str(of_stream.value) == of_preflight
    assert str(of_recipe.value) == of_preflight.replace("4 processes", "train.nproc_per_node=4 processes")


def test_many_numbers_of_hosts_are_told_in_short(tiny_config, tmp_path: Path) -> None:
    config = tiny_config("train.strategy=ddp", "train.batch_size=24")
    [failure] = failures(config, tmp_path / "out", world_sizes=range(1, 900))
    assert failure == (
        "train.batch_size=24 does not divide among 5 processes (each takes as many rows; there may be 1, 2, 3, ..., 899); use fewer numbers of hosts"
    )


def test_one_process_is_not_several(tiny_config, tmp_path: Path) -> None:
    [failure] = failures(tiny_config(), tmp_path / "out", world_sizes=[2])
    assert failure == "train.strategy='single' is one process, and 2 are asked for (each would train alone); use --set train.strategy=ddp"


def test_memory_is_estimated_for_the_fewest_processes(tiny_config, tmp_path: Path) -> None:
    def memory(world_sizes: list[int]) -> str:
        config = load_config("125m", ["train.strategy=fsdp"])
        findings = run_preflight(config, tmp_path / "out", machine=described_machine("h200"), world_sizes=world_sizes)
        return next(line for line in findings.passed if line.startswith("memory"))

    assert memory([2, 4]) == memory([2]) != memory([4])


@pytest.mark.parametrize(
    ("words", "environment", "world_size"),
    [
        (["preflight", "--nnodes", "2"], {}, 4),
        (["preflight"], {"WORLD_SIZE": "4"}, 4),
        (["preflight", "--nnodes", "2"], {"WORLD_SIZE": "5"}, 4),
        (["run", "--dry-run", "--nnodes", "1:2", "--rdzv-endpoint", "localhost:1"], {}, 4),
        (["run", "--nnodes", "2", "--rdzv-endpoint", "localhost:1"], {}, 4),
    ],
    ids=["option", "environment", "both", "dry run", "run"],
)
def test_the_commands_judge_as_many_processes_as_are_asked_for(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch, words, environment, world_size: int
) -> None:
    """Before the hosts meet."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sets = ("train.strategy=ddp", "train.nproc_per_node=2", "train.batch_size=6")
    more = [word for override in sets for word in ("--set", override)]
    assert run_command([words[0], str(tiny_recipe), *words[1:], *more, "--out", str(tmp_path / "out")]) == 2
    assert f"train.batch_size=6 does not divide among {world_size} processes" in capsys.readouterr().err


@pytest.mark.parametrize("nnodes", ["x", "0", "2:1", "1:2:3", "-1", "", "1025", "1:" + "9" * 5000, "²"])
def test_what_is_no_number_of_hosts_is_refused(tiny_recipe: Path, capsys: pytest.CaptureFixture[str], nnodes: str) -> None:
    for words in (["preflight", str(tiny_recipe)], ["run", str(tiny_recipe), "--dry-run"], ["run", str(tiny_recipe)]):
        assert run_command([*words, f"--nnodes={nnodes}"]) == 2
        assert f"--nnodes={nnodes!r} is neither a number of hosts nor MIN:MAX (from 1 to 1,024); use 2, or 2:4" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["x", "0", "-2", ""])
def test_what_is_no_number_of_processes_is_refused(tiny_recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch, text: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    assert run_command(["preflight", str(tiny_recipe)]) == 2
    assert f"WORLD_SIZE={text!r} in the environment is not a number of processes" in capsys.readouterr().err
