"""The optimizer decays matrices only, the schedule counts optimizer steps, clipping returns the norm."""

import pytest
import torch
from torch import nn

from nsa_train.loop.optim import build_optimizer, clip_gradients, gradient_norm, learning_rate
from nsa_train.model.decoder import build_model
from nsa_train.settings.config import TrainTable


def _table(**values: object) -> TrainTable:
    return TrainTable(**{"steps": 100, "seq_len": 8, "batch_size": 1, "lr": 1.0, "warmup_steps": 10, **values})


def test_norms_biases_and_embeddings_do_not_decay(tiny_config) -> None:
    config = tiny_config()
    model = build_model(config)
    decayed, others = build_optimizer(model, config.train).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == config.train.weight_decay
    assert others["weight_decay"] == 0
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    kept = {names[id(parameter)] for parameter in others["params"]}
    assert {"embedding.weight", "norm.weight", "blocks.0.attention_norm.weight"} <= kept
    assert all(name.endswith(("bias", "norm.weight", "embedding.weight")) for name in kept)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.hardware)])
def test_adamw_is_that_of_the_recipes_in_one_kernel(tiny_config, device: str) -> None:
    config = tiny_config()
    optimizer = build_optimizer(build_model(config).to(device), config.train)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (config.train.lr, (0.9, 0.95), 1e-8)
        assert group["fused"] is True


def test_the_first_update_is_that_of_the_definition(tiny_config) -> None:
    config = tiny_config("train.weight_decay=0")
    model = build_model(config)
    optimizer, weight = build_optimizer(model, config.train), model.norm.weight
    before, mean, square = weight.detach().clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate((0.5, 0.1), start=1):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        before -= config.train.lr * (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        torch.testing.assert_close(weight.detach(), before)


def test_warm_up_is_linear_and_the_cosine_ends_at_a_tenth() -> None:
    train = _table()
    assert [learning_rate(step, train) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate(55, train) == pytest.approx(0.55)
    assert learning_rate(100, train) == pytest.approx(0.1)
    rates = [learning_rate(step, train) for step in range(10, 101)]
    assert rates == sorted(rates, reverse=True)


def test_without_warm_up_the_first_step_is_near_the_peak() -> None:
    assert learning_rate(1, _table(warmup_steps=0)) == pytest.approx(1.0, rel=1e-3)


def test_clipping_keeps_direction_and_reports_the_norm_before() -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    norm = gradient_norm(layer)
    clip_gradients(layer, norm, 1.0)
    assert float(norm) == 5.0
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[0.6, 0.8]]))
    clip_gradients(layer, gradient_norm(layer), float("inf"))
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[0.6, 0.8]]))
