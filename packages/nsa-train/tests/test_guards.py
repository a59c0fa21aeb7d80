"""Bad numbers never reach the weights, and no parameter is left without a gradient unnoticed."""

import pytest
import torch
from torch import nn

from nsa_train.errors import GuardError
from nsa_train.guards import GradientWatch, check_finite, opening_lengths
from nsa_train.model.decoder import build_model


class Halves(nn.Module):
    """Two weights, of which a caller sets the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def give(self, first: list[float] | None, second: list[float] | None) -> None:
        for parameter, values in ((self.first, first), (self.second, second)):
            parameter.grad = None if values is None else torch.tensor(values)


def test_a_loss_that_is_not_finite_names_the_step() -> None:
    with pytest.raises(GuardError, match=r"step 7: loss=nan is not finite .*weights are those of step 6"):
        check_finite(7, loss=float("nan"), grad_norm=1.0, model=Halves())


def test_a_gradient_that_is_not_finite_names_the_parameter() -> None:
    model = Halves()
    model.give([1.0, 2.0], [float("inf"), 0.0])
    with pytest.raises(GuardError, match=r"step 3: grad_norm=inf is not finite, in second "):
        check_finite(3, loss=1.0, grad_norm=float("inf"), model=model)


def test_a_missing_gradient_stops_step_1() -> None:
    model = Halves()
    model.give([1.0, 2.0], None)
    with pytest.raises(GuardError, match="step 1: no gradient reaches second"):
        GradientWatch(model, last_step=100).observe(1, longest=8)


def test_a_gradient_that_stays_zero_stops_at_step_20() -> None:
    model = Halves()
    watch = GradientWatch(model, last_step=100)
    for step in range(1, 20):
        # step 1 does not count: layers that start at zero pass no gradient on yet
        model.give([1.0, 0.0], [float(step == 1), 0.0])
        watch.observe(step, longest=8)
    with pytest.raises(GuardError, match="step 20: the gradient of second was zero in every step since 2"):
        watch.observe(20, longest=8)


def test_one_gradient_in_steps_2_to_20_is_enough() -> None:
    model = Halves()
    watch = GradientWatch(model, last_step=100)
    for step in range(1, 30):
        model.give([1.0, 0.0], [float(step == 11), 0.0])
        watch.observe(step, longest=8)


def test_a_short_run_is_judged_at_its_last_step() -> None:
    model = Halves()
    watch = GradientWatch(model, last_step=3)
    model.give([1.0, 0.0], [0.0, 0.0])
    watch.observe(1, longest=8)
    watch.observe(2, longest=8)
    with pytest.raises(GuardError, match="step 3"):
        watch.observe(3, longest=8)


def test_only_the_compressed_branch_may_sleep_in_short_sequences(tiny_config) -> None:
    lengths = opening_lengths(build_model(tiny_config()))
    asleep = {name.split("attention.")[1] for name, length in lengths.items() if name.startswith("blocks.0") and length > 3}
    assert asleep == {
        *("k_proj.cmp.weight", "v_proj.cmp.weight"),
        *(f"compress_{which}.{part}" for which in "kv" for part in ("position", "up.weight", "up.bias", "down.weight", "down.bias")),
    }


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("phi", ["mean", "conv", "mlp"])
@pytest.mark.parametrize("branches", ["['cmp','slc','win']", "['win']", "['cmp']", "['slc','win']"])
def test_opening_lengths_are_exact(tiny_config, length: int, phi: str, branches: str) -> None:
    """Whatever the rule calls open gets a gradient from some batch of that length, and nothing else does."""
    gate = "softmax" if branches.count(",") == 1 else "sigmoid"
    torch.manual_seed(0)
    config = tiny_config(f"nsa.compressor={phi}", f"nsa.gate={gate}", f"nsa.branches={branches}")
    model = build_model(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            # no layer that starts at zero may hide another
            parameter.add_(0.1 * torch.randn_like(parameter))
    model(torch.randint(0, 256, (2, length))).square().sum().backward()
    opening = opening_lengths(model)
    for name, parameter in model.named_parameters():
        if ".attention." in name and parameter.requires_grad:
            has_gradient = parameter.grad is not None and bool(parameter.grad.abs().max() > 1e-12)
            assert has_gradient == (length >= opening.get(name, 1)), name
