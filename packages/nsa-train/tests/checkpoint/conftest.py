"""A decoder of one layer with optimizer state, and a directory with two checkpoints of it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from nsa_train.checkpoint import CheckpointWriter, capture
from nsa_train.checkpoint.snapshot import Snapshot
from nsa_train.data.stream import state_of
from nsa_train.model.decoder import Decoder, build_model
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import load_config

SIZES = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim_qk": 16, "head_dim_v": 16}
COUNTERS = {
    "guard": {"num_skipped": 1, "recent_skips": [1], "losses": [5.5]},
    "watch": {"num_observed": 1, "longest": 32, "pending": ["norm.weight"]},
    "patience": {"best": None, "num_worse": 0},
}


def position(batches: int, rows: int) -> dict[str, Any]:
    """Return the position of a run in its data after so many micro-batches of `rows` rows."""
    lane = {"row": batches, "epoch": 0, "hash": "ab" * 32, "first_tokens": [1, 2], "documents": 3, "bad_records": 0}
    return state_of({"walk": "rows"}, batches, {str(number): lane for number in range(rows)})


class Parts(NamedTuple):
    """What `capture` takes."""

    config: RunConfig
    model: Decoder
    optimizer: torch.optim.Optimizer

    def snapshot(self, **more: Any) -> Snapshot:
        """Return a copy of it all."""
        return capture(**{**self._asdict(), "data": position(7, self.config.train.batch_size), "counters": COUNTERS, **more})


@pytest.fixture(scope="session")
def build_parts() -> Callable[..., Parts]:
    """A function from a seed to a model that took one optimizer step."""

    def build(seed: int = 0, *, is_trained: bool = True, **of_optimizer: Any) -> Parts:
        config = load_config("demo", [f"model.{key}={value}" for key, value in SIZES.items()])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_model(config)
            optimizer = torch.optim.AdamW(model.parameters(), **of_optimizer)
            if is_trained:
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
        return Parts(config, model, optimizer)

    return build


@pytest.fixture(scope="session")
def good_root(tmp_path_factory: pytest.TempPathFactory, build_parts: Callable[..., Parts]) -> Path:
    """A directory with step-1 and step-2, `latest` at the second; do not write to it."""
    root = tmp_path_factory.mktemp("good") / "checkpoints"
    with CheckpointWriter(root) as writer:
        for step in (1, 2):
            writer.save(step, build_parts(step).snapshot())
    return root


@pytest.fixture
def root(good_root: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(good_root, tmp_path / "run/checkpoints", symlinks=True))
