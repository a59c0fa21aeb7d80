"""Bad numbers never reach the weights, and no parameter is left without a gradient unnoticed."""

import json
import math

import pytest
import torch
from torch import nn

from nsa_core.config import BRANCHES
from nsa_train.errors import GuardError
from nsa_train.loop.guards import GradientWatch, StepGuard, StepNumbers, opening_lengths, shut_parameters
from nsa_train.model.decoder import build_model
from nsa_train.settings.config import TrainTable
from nsa_train.telemetry.records import Cause


class Halves(nn.Module):
    """Two weights, of which a caller sets the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def give(self, first: list[float] | None, second: list[float] | None) -> None:
        for parameter, values in ((self.first, first), (self.second, second)):
            parameter.grad = None if values is None else torch.tensor(values)


def _guard(**values: object) -> StepGuard:
    return StepGuard(TrainTable(steps=1000, seq_len=2, batch_size=1, lr=1.0, **values))


def _row(loss: float = 1.0, bad_batch: int = -1, grad_norm: float = 1.0) -> StepNumbers:
    return StepNumbers(loss=loss, bad_batch=bad_batch, grad_norm=grad_norm)


def test_finite_numbers_pass() -> None:
    assert _guard().judge(2.0, [_row(), _row()]) is None


def test_a_loss_that_is_not_finite_names_rank_and_micro_batch() -> None:
    found = _guard().judge(math.nan, [_row(), _row(math.nan, 2, math.nan)])
    assert found == (Cause.LOSS, "the loss of rank 1, micro-batch 2 is not finite")


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_on_any_rank_is_no_step(norm: float) -> None:
    found = _guard().judge(1.0, [_row(), _row(grad_norm=norm)])
    assert found == (Cause.GRADIENT, f"loss=1.0000 with grad_norm={norm} is not finite")


def test_the_run_stops_after_more_skips_than_allowed() -> None:
    guard = _guard(max_skips=2)
    guard.skipped(3, "so")
    guard.skipped(5, "so")
    with pytest.raises(
        GuardError, match=r"step 9: so; 3 of the last 100 steps were skipped \(train.max_skips=2; the weights are finite\)"
    ) as caught:
        guard.skipped(9, "so")
    assert caught.value.exit_code == 4


def test_old_skips_are_forgotten_and_all_are_counted() -> None:
    guard = _guard(max_skips=1)
    for step in (1, 101, 201, 301):
        guard.skipped(step, "so")
    assert guard.num_skipped == 4
    with pytest.raises(GuardError):
        guard.skipped(400, "so")


def test_a_spike_is_skipped_where_asked_for() -> None:
    losses = [2.0 + 0.01 * (step % 2) for step in range(128)]
    asked, unasked = _guard(skip_loss_spikes=True), _guard()
    for loss in losses[:-1]:
        asked.passed(loss)
        unasked.passed(loss)
    # one loss short of the window, nothing is a spike
    assert asked.judge(9.0, [_row()]) is None
    asked.passed(losses[-1])
    unasked.passed(losses[-1])
    # mean 2.005, sigma 0.005
    assert asked.judge(2.034, [_row()]) is None
    assert asked.judge(1.0, [_row()]) is None
    assert asked.judge(2.036, [_row()]) == (Cause.SPIKE, "loss=2.0360 is a spike (above 2.0050 + 6 x 0.0050, of the 128 steps before)")
    assert unasked.judge(9.0, [_row()]) is None


def test_the_counts_survive_a_checkpoint() -> None:
    guard, again = _guard(max_skips=1, skip_loss_spikes=True), _guard(max_skips=1, skip_loss_spikes=True)
    for step in range(128):
        guard.passed(2.0 + 0.01 * (step % 2))
    guard.skipped(130, "so")
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert again.judge(2.036, [_row()]) is not None
    with pytest.raises(GuardError):
        again.skipped(131, "so")
    watch, later = (GradientWatch(Halves(), last_step=100) for _ in range(2))
    later.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert later.state_dict() == watch.state_dict() == {"num_observed": 0, "longest": 0, "pending": ["first", "second"]}


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


def _watched(seconds: dict[int, float], *, last_step: int = 100) -> GradientWatch:
    """Return a watch that observed the steps of `seconds`, in which the second parameter had these gradients."""
    model = Halves()
    watch = GradientWatch(model, last_step=last_step)
    for step, value in seconds.items():
        model.give([1.0, 0.0], [value, 0.0])
        watch.observe(step, longest=8)
    return watch


def test_where_step_20_is_skipped_the_next_one_is_judged() -> None:
    zeros = dict.fromkeys(range(1, 20), 0.0)
    _watched({**zeros, 22: 1.0, 23: 0.0})
    with pytest.raises(GuardError, match="step 22: the gradient of second was zero in every step since 2"):
        _watched({**zeros, 22: 0.0})


def test_a_branch_that_opens_after_step_20_is_not_judged(tiny_config) -> None:
    model = build_model(tiny_config())
    watch = GradientWatch(model, last_step=100)
    for step in range(1, 30):
        for name, parameter in model.named_parameters():
            is_asleep = opening_lengths(model).get(name, 1) > 3
            parameter.grad = torch.full_like(parameter, float(not is_asleep))
        watch.observe(step, longest=3 if step <= 20 else 32)


def test_a_run_whose_last_step_is_skipped_is_judged_at_its_end() -> None:
    _watched({1: 0.0, 2: 1.0}, last_step=3).ended(3)
    with pytest.raises(GuardError, match="step 3: the gradient of second was zero in every step since 2"):
        _watched({1: 0.0, 2: 0.0}, last_step=3).ended(3)


def test_a_run_of_which_one_step_was_taken_is_not_judged_by_it() -> None:
    _watched({1: 0.0}, last_step=1).ended(1)
    _watched({2: 0.0}, last_step=2).ended(2)


def test_a_run_of_which_no_step_was_taken_has_no_gradients() -> None:
    with pytest.raises(GuardError, match="step 3: no gradient ever reached first, second, as every step was skipped; lower train.lr"):
        _watched({}, last_step=3).ended(3)


def open_one(layer, opened: str) -> None:
    """Set gates as a conversion does: `opened` gets 1 and the other branches 0."""
    with torch.no_grad():
        logits = torch.tensor([20.0 if branch == opened else torch.finfo(torch.float32).min for branch in BRANCHES])
        layer.gate.down.bias.copy_(logits.repeat(layer.config.num_heads))


@pytest.mark.parametrize(("branches", "opened"), [("['win']", "win"), ("['cmp','slc','win']", "slc")])
def test_gates_that_are_exactly_open_or_closed_stop_no_run(tiny_config, branches: str, opened: str) -> None:
    model = build_model(tiny_config(f"nsa.branches={branches}"))
    for block in model.blocks:
        open_one(block.attention, opened)
    watch = GradientWatch(model, last_step=3)
    ids = torch.randint(0, 200, (1, 64))
    for step in (1, 2, 3):
        model.zero_grad()
        model.logits(model.hidden(model.embedding(ids))).square().mean().backward()
        watch.observe(step, 64)
    names = shut_parameters(model)
    assert {name.split(".")[3] for name in names} == {
        "gate",
        *(["k_proj", "v_proj", "compress_k", "compress_v"] if opened == "slc" else []),
    }
    # one weight that is not 0 lets the gates depend on x
    with torch.no_grad():
        model.blocks[0].attention.gate.down.weight[0, 0] = 1.0
    assert {name.split(".")[1] for name in shut_parameters(model)} == {"1"}
    assert shut_parameters(build_model(tiny_config())) == set()


def test_only_the_compressed_branch_may_sleep_in_short_sequences(tiny_config) -> None:
    lengths = opening_lengths(build_model(tiny_config()))
    asleep = {name.split("attention.")[1] for name, length in lengths.items() if name.startswith("blocks.0") and length > 3}
    assert asleep == {
        *("k_proj.cmp.weight", "v_proj.cmp.weight"),
        *(f"compress_{which}.{part}" for which in "kv" for part in ("position", "up.weight", "up.bias", "down.weight", "down.bias")),
    }


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("phi", ["mean", "conv", "mlp"])
@pytest.mark.parametrize("branches", ["['cmp','slc','win']", "['win']", "['cmp']", "['slc','win']", "['cmp','win']"])
@pytest.mark.parametrize(
    ("qk_norm", "kv"),
    [
        ("false", "separate"),
        ("true", "shared"),
        pytest.param("true", "separate", marks=pytest.mark.slow),
        pytest.param("false", "shared", marks=pytest.mark.slow),
    ],
)
def test_opening_lengths_are_exact(tiny_config, length: int, phi: str, branches: str, qk_norm: str, kv: str) -> None:
    """Whatever the rule calls open gets a gradient from some batch of that length, and nothing else does."""
    gate = "softmax" if branches.count(",") == 1 else "sigmoid"
    torch.manual_seed(0)
    sets = {"compressor": phi, "gate": gate, "branches": branches, "qk_norm": qk_norm, "kv": kv}
    config = tiny_config(*(f"nsa.{key}={value}" for key, value in sets.items()))
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


@pytest.mark.parametrize("branches", ["['slc','win']", "['cmp','slc','win']"])
@pytest.mark.parametrize(("window", "blocks"), [(6, 4), (20, 4), (16, 4)])
def test_a_softmax_gate_over_one_k_and_v_sleeps_until_the_branches_differ(tiny_config, branches: str, window: int, blocks: int) -> None:
    sizes = {"compression_block_size": 4, "compression_stride": 2, "selection_block_size": 4, "num_selected_blocks": blocks}
    sets = {**sizes, "window_size": window, "branches": branches, "kv": "shared", "gate": "softmax", "compressor": "mean"}
    model = build_model(tiny_config(*(f"nsa.{key}={value}" for key, value in sets.items()))).double()
    expected = 4 if "cmp" in branches else min(window, 4 * blocks) + 1
    [gate] = {length for name, length in opening_lengths(model).items() if ".gate." in name}
    assert gate == expected
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    for length in (expected - 1, expected):
        model.zero_grad()
        model(torch.randint(0, 256, (2, length))).square().sum().backward()
        largest = max(float(p.grad.abs().max()) for name, p in model.named_parameters() if ".attention.gate." in name)
        assert (largest > 1e-12) == (length == expected)
