"""On a GPU: the device's generator and both kinds of AdamW go on where they were."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_train.checkpoint import CheckpointWriter, open_checkpoint, restore
from nsa_train.checkpoint.tensors import model_tensors, optimizer_tensors


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


@pytest.mark.hardware
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_resumed_model_on_the_gpu_takes_the_straight_ones_next_step(
    tmp_path: Path, build_parts: Callable[..., Any], is_fused: bool
) -> None:
    runs = []
    for seed in (1, 2):
        parts = build_parts(seed, is_trained=False)
        model = parts.model.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused)
        _step(model, optimizer)
        runs.append(parts._replace(model=model, optimizer=optimizer))
    straight, resumed = runs
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, straight.snapshot())
    _step(straight.model, straight.optimizer)
    restore(open_checkpoint(tmp_path), model=resumed.model, optimizer=resumed.optimizer)
    _step(resumed.model, resumed.optimizer)
    for found, expected in (
        (model_tensors(resumed.model), model_tensors(straight.model)),
        (optimizer_tensors(resumed.model, resumed.optimizer), optimizer_tensors(straight.model, straight.optimizer)),
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
