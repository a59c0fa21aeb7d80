"""Numbers that are not finite are named: gradients, weights, and the optimizer's moments, which a checkpoint would pass on."""

import math

import pytest
import torch
from torch import nn

from nsa_train.checkpoint.tensors import model_tensors
from nsa_train.errors import GuardError
from nsa_train.loop.guards import gradients_of, not_finite, require_finite_state
from nsa_train.parallel.world import World

ALONE = World(device=torch.device("cpu"))


@pytest.fixture
def model() -> nn.ParameterDict:
    """Two weights."""
    return nn.ParameterDict({"first": nn.Parameter(torch.ones(2)), "second": nn.Parameter(torch.ones(2))})


@pytest.fixture
def optimizer(model: nn.ParameterDict) -> torch.optim.Optimizer:
    """AdamW of both, after a step."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def test_parameters_whose_gradients_are_not_finite_are_named(model: nn.ParameterDict) -> None:
    model["first"].grad, model["second"].grad = torch.tensor([1.0, 2.0]), torch.tensor([math.inf, 0.0])
    assert not_finite(gradients_of(model)) == ["second"]
    model.zero_grad()
    assert not_finite(gradients_of(model)) == []


def test_parameters_that_are_not_finite_are_named(model: nn.ParameterDict) -> None:
    assert not_finite(model_tensors(model)) == []
    model["first"].data[1] = -math.inf
    model["second"].data[0] = math.nan
    assert not_finite(model_tensors(model)) == ["first", "second"]


def test_a_finite_state_goes_on(model: nn.ParameterDict, optimizer: torch.optim.Optimizer) -> None:
    require_finite_state(model, optimizer, ALONE, step=1, saved_at=None)


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq", "step"])
def test_moments_that_are_not_finite_are_named(model: nn.ParameterDict, optimizer: torch.optim.Optimizer, moment: str) -> None:
    optimizer.state[model["second"]][moment].fill_(math.nan)
    with pytest.raises(GuardError, match=rf"^step 7: the optimizer's moments are not finite in second/{moment} \(.*there is no checkpoint"):
        require_finite_state(model, optimizer, ALONE, step=7, saved_at=None)


def test_weights_are_named_before_their_moments(model: nn.ParameterDict, optimizer: torch.optim.Optimizer) -> None:
    model["second"].data[0] = math.nan
    optimizer.state[model["first"]]["exp_avg"][0] = math.nan
    with pytest.raises(GuardError, match=r"^step 7: the weights are not finite in second \(.*step-3 is the newest .* lower train.lr$"):
        require_finite_state(model, optimizer, ALONE, step=7, saved_at=3)
