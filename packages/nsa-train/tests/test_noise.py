"""On bytes drawn at random nothing can be learnt: a run that gets below ln 256 reads its labels."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from nsa_train.data.packing import Batch
from nsa_train.run_dir import RunDirectory
from nsa_train.trainer import Trainer

attentions = pytest.mark.parametrize("attention", ["nsa", "dense"])


@pytest.fixture
def noise(tmp_path: Path) -> str:
    """A setting that reads 200 KB of random bytes, more than a run consumes: none is seen twice."""
    path = tmp_path / "noise.bin"
    path.write_bytes(random.Random(0).randbytes(200_000))
    return f"data.path={path}"


def _gain_in_nats(run: RunDirectory) -> float:
    """Return how much better than guessing the held-out bytes were predicted, in nats per token."""
    loss: float = json.loads(run.metrics.read_text())["val_loss"]
    return math.log(256) - loss


LENGTH = ("train.steps=40", "train.batch_size=16", "train.eval_every=100", "train.save_every=0")


@attentions
def test_noise_is_never_predicted(train: Callable[..., Any], noise: str, attention: str) -> None:
    code, run = train(noise, f"model.attention={attention}", *LENGTH)
    assert code == 0
    # 8,192 held-out tokens: by chance 20 nats in all are reached once in e^20 runs
    assert _gain_in_nats(run) < 20 / 8192


@attentions
def test_a_planted_leak_is_heard(train: Callable[..., Any], noise: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run with the next token in place of every second input must fall below ln 256 by far."""
    original = Trainer._summed_loss

    def leaking(self: Trainer, forward: Any, batch: Batch) -> torch.Tensor:
        ids = batch.input_ids.clone()
        ids[:, :-1:2] = ids[:, 1::2]
        return original(self, forward, evolve(batch, input_ids=ids))

    monkeypatch.setattr(Trainer, "_summed_loss", leaking)
    code, run = train(noise, f"model.attention={attention}", *LENGTH)
    assert code == 0
    assert _gain_in_nats(run) > 10 * 20 / 8192
