"""Fixtures of the nsa-train tests: a tiny recipe, a small text, and one finished run that many tests read."""

import csv
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from nsa_train.checkpoint import CheckpointWriter, capture
from nsa_train.cli import run_command
from nsa_train.model.decoder import build_model
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import load_config

TINY_RECIPE = """
[model]
dim = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
head_dim_qk = 16
head_dim_v = 16

[nsa]
compression_block_size = 4
compression_stride = 2
selection_block_size = 4
num_selected_blocks = 4
num_initial_blocks = 1
num_local_blocks = 2
window_size = 8
gate_hidden_size = 8

[data]
source = "text"
path = "{text}"

[train]
steps = 5
seq_len = 32
batch_size = 2
lr = 1e-2
warmup_steps = 1
log_every = 2
eval_every = 3
eval_batches = 2
save_every = 3
"""


class RecordedRun(RunDirectory):
    """A run's directory and its records, read strictly: a line that cannot be read is an error."""

    def table(self, path: Path) -> list[dict[str, str]]:
        """Return the rows of one of its tables, such as `training`."""
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    def beats(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return the events of `rank`."""
        return [json.loads(line) for line in self.heartbeat_of(rank).read_text().splitlines()]

    def losses(self) -> list[float]:
        """Return the training loss of each recorded step."""
        return [float(row["loss"]) for row in self.table(self.training)]


class DiskUsage(NamedTuple):
    """What `shutil.disk_usage` returns, in bytes."""

    total: int
    used: int
    free: int


class PutIrregular:
    """Puts something other than a small regular file at a path; `kinds`: the kind, and its name in messages."""

    kinds = MappingProxyType(
        {
            "pipe": "it is a named pipe (FIFO)",
            "socket": "it is a socket",
            "device": "it is a character device",
            "directory": "it is a directory",
            "holes": "it has 1,099,511,627,776 bytes",
        }
    )

    def __call__(self, kind: str, path: Path) -> None:
        """Replace what is at `path`."""
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            # its path may be too long to bind to
            os.mknod(path, stat.S_IFSOCK | 0o600)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "directory":
            path.mkdir()
        else:
            with path.open("wb") as file:
                file.truncate(2**40)


@pytest.fixture(scope="session")
def put_irregular() -> PutIrregular:
    """A function that puts a pipe, a socket, a device, a directory or a sparse terabyte at a path."""
    return PutIrregular()


@pytest.fixture(scope="session")
def recorded() -> Callable[[Path], RecordedRun]:
    """A function from a run's directory to its records."""
    return RecordedRun


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors run faster on one thread, and the machine may be shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's runs draw short samples; `tiny_run`, which is made before, has samples of full length."""
    monkeypatch.setattr("nsa_train.telemetry.recorder.SAMPLE_TOKENS", 3)


@pytest.fixture(autouse=True)
def set_free_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the bytes that every disk has free: a TiB at first, so that no test depends on the machine's."""

    def set_bytes(free: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: DiskUsage(2 * free, free, free))

    set_bytes(2**40)
    return set_bytes


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of about 8 KB."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"{number} bottles stood on wall {number * 7 % 13}.\n" for number in range(250)))
    return path


@pytest.fixture(scope="session")
def tiny_recipe(tmp_path_factory: pytest.TempPathFactory, tiny_text: Path) -> Path:
    """The path of a recipe that trains in a second."""
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(TINY_RECIPE.format(text=tiny_text))
    return path


@pytest.fixture(scope="session")
def tiny_config(tiny_recipe: Path) -> Callable[..., RunConfig]:
    """A function from overrides such as `train.steps=3` to a configuration."""

    def build(*overrides: str) -> RunConfig:
        return load_config(str(tiny_recipe), overrides)

    return build


@pytest.fixture(scope="session")
def save_random(tiny_config: Callable[..., RunConfig]) -> Callable[..., Path]:
    """A function from a directory of checkpoints and overrides to a checkpoint there whose weights choose unevenly."""

    def save(root: Path, *overrides: str) -> Path:
        config = tiny_config(*overrides)
        torch.manual_seed(0)
        model = build_model(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
        with CheckpointWriter(root) as writer:
            return writer.save(7, capture(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config, data={}))

    return save


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Path) -> RecordedRun:
    """The directory of a finished run through the command line; do not write to it."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    assert run_command(["run", str(tiny_recipe), "--out", str(out)]) == 0
    return RecordedRun(out)


@pytest.fixture
def train(tmp_path: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that runs the tiny recipe with overrides into a new directory and returns (exit code, directory).

    The report is not drawn: `tiny_run` has one.
    """
    monkeypatch.setattr("nsa_train.telemetry.recorder.write_report", lambda paths: None)
    count = 0

    def run(*overrides: str) -> tuple[int, RecordedRun]:
        nonlocal count
        count += 1
        out = tmp_path / f"run-{count}"
        sets = [word for override in overrides for word in ("--set", override)]
        return run_command(["run", str(tiny_recipe), "--out", str(out), *sets]), RecordedRun(out)

    return run
