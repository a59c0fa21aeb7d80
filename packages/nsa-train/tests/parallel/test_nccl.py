"""On two GPUs over NCCL: the strategies train as one GPU does, and their checkpoints load on one."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_train.run_dir import RunDirectory

pytestmark = pytest.mark.hardware(num_gpus=2)
TIMEOUT_S = 240


def _losses(recipe: Path, out: Path, *words: str, sets: tuple[str, ...] = ()) -> list[float]:
    """Train for 10 steps, or go on to the 12th, and return the loss of every step that is recorded."""
    overrides = ("train.device=cuda", "train.precision=fp32", "train.batch_size=4", "train.steps=10", "train.save_every=10", *sets)
    command = [sys.executable, "-m", "nsa_train", "run", str(recipe), "--out", str(out), *words]
    command += [word for override in overrides for word in ("--set", override)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    with RunDirectory(out).training.open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def alone(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return _losses(tiny_recipe, tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_gpus_train_as_one_and_their_checkpoint_loads_on_one(
    strategy: str, alone: list[float], tiny_recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    both = _losses(tiny_recipe, out, "--nproc", "2", sets=(f"train.strategy={strategy}",))
    assert len(RunDirectory(out).heartbeats) == 2
    # losses are recorded with six digits
    assert both == pytest.approx(alone, rel=3e-6)
    continued = _losses(tiny_recipe, out, "--resume", sets=("train.steps=12", "train.strategy=single"))
    assert continued[:10] == both
    assert len(continued) == 12
