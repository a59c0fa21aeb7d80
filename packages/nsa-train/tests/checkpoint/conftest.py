"""A decoder of one layer with optimizer state, a directory with two checkpoints of it, and checkpoints of other models."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from nsa_train.checkpoint import CheckpointWriter, capture
from nsa_train.checkpoint.snapshot import Snapshot
from nsa_train.cli import run_command
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
    """The arguments of `capture`."""

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
    """A directory with step-1, step-2 and `latest`, which names step-2; do not write to it."""
    root = tmp_path_factory.mktemp("good") / "checkpoints"
    with CheckpointWriter(root) as writer:
        for step in (1, 2):
            writer.save(step, build_parts(step).snapshot())
    return root


@pytest.fixture
def root(good_root: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(good_root, tmp_path / "run/checkpoints", symlinks=True))


@pytest.fixture
def saved(save_random: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A function from overrides to the directory of a checkpoint with random weights."""
    return partial(save_random, tmp_path / "checkpoints")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def exported(saved: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A function from overrides to the folder of an export."""

    def export(*overrides: str, kind: str = "hf") -> Path:
        out = tmp_path / "exported"
        assert run_command(["ckpt", "export", str(saved(*overrides)), str(out), "--format", kind]) == 0
        return out

    return export


@pytest.fixture
def gpt2_files(tmp_path: Path) -> Path:
    """vocab.bpe and encoder.json with a few merges."""
    from nsa_transformers.tokenizer import byte_alphabet

    alphabet = byte_alphabet()
    letters = [alphabet[byte] for byte in sorted(alphabet, key=lambda byte: (alphabet[byte] != chr(byte), byte))]
    merges = [("b", "o"), ("t", "t"), ("bo", "tt"), ("s", "t")]
    vocabulary = [*letters, *(left + right for left, right in merges), "<|endoftext|>"]
    (tmp_path / "encoder.json").write_text(json.dumps({token: index for index, token in enumerate(vocabulary)}))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges))
    return tmp_path / "vocab.bpe"
