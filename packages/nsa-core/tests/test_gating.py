"""Gates: the values of each kind, also with closed branches, which must not disturb a gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_core.config import BRANCHES
from nsa_core.gating import GateMLP, gated_sum, gates_from_logits

KINDS = ("sigmoid", "softmax")
SUBSETS = [("cmp",), ("slc",), ("win",), ("cmp", "slc"), ("cmp", "win"), ("slc", "win"), BRANCHES]


def logits_of(*shape, seed=0):
    return torch.randn(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def everywhere(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def test_sigmoid_gates_are_sigmoids_of_their_own_logits():
    logits = logits_of(2, 5, 4)

    assert torch.equal(gates_from_logits(logits, everywhere(2, 5), kind="sigmoid"), torch.sigmoid(logits))


def test_softmax_gates_are_the_softmax_over_the_branches():
    logits = logits_of(2, 5, 4)

    torch.testing.assert_close(gates_from_logits(logits, everywhere(2, 5), kind="softmax"), torch.softmax(logits, -1))


def test_where_no_compressed_block_is_seen_softmax_shares_1_between_the_other_two():
    logits = logits_of(1, 2, 3)

    gates = gates_from_logits(logits, torch.tensor([[False, True]]), kind="softmax")

    assert torch.equal(gates[:, 0, :, 0], torch.zeros(1, 3, dtype=torch.float64))
    torch.testing.assert_close(gates[:, 0, :, 1:], torch.softmax(logits[:, 0, :, 1:], -1))
    torch.testing.assert_close(gates[:, 1], torch.softmax(logits[:, 1], -1))


def test_where_no_compressed_block_is_seen_sigmoid_changes_nothing():
    logits = logits_of(1, 2, 3)

    assert torch.equal(gates_from_logits(logits, torch.tensor([[False, True]]), kind="sigmoid"), torch.sigmoid(logits))


@pytest.mark.parametrize("kind", KINDS)
def test_the_temperature_divides_the_logits(kind):
    logits = logits_of(1, 4, 2)

    gates = gates_from_logits(logits, everywhere(1, 4), kind=kind, temperature=4.0)

    torch.testing.assert_close(gates, gates_from_logits(logits / 4, everywhere(1, 4), kind=kind))


@pytest.mark.parametrize("branches", SUBSETS)
def test_absent_branches_have_gate_0_and_softmax_shares_1_among_the_rest(branches):
    logits = logits_of(1, 4, 2)
    places = [BRANCHES.index(branch) for branch in branches]

    gates = gates_from_logits(logits, everywhere(1, 4), kind="softmax", branches=branches)

    expected = torch.zeros_like(logits)
    expected[..., places] = torch.softmax(logits[..., places], -1)
    torch.testing.assert_close(gates, expected)
    assert (gates[..., [place for place in range(3) if place not in places]] == 0).all()


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("branches", SUBSETS)
def test_absent_branches_have_gate_0_and_leave_the_other_sigmoids_alone(branches, needs_grad):
    values = logits_of(1, 4, 2)
    logits = values.clone().requires_grad_(needs_grad)
    exists = torch.tensor([branch in branches for branch in BRANCHES])

    gates = gates_from_logits(logits, everywhere(1, 4), kind="sigmoid", branches=branches)

    assert torch.equal(gates, torch.where(exists, torch.sigmoid(values), 0))
    assert torch.equal(logits.detach(), values)
    if needs_grad:
        gates.sum().backward()
        slope = torch.sigmoid(values) * (1 - torch.sigmoid(values))
        torch.testing.assert_close(logits.grad, torch.where(exists, slope, 0))


def test_where_nothing_is_open_every_softmax_gate_is_0_and_the_gradient_is_0():
    logits = logits_of(1, 3, 2).requires_grad_()

    gates = gates_from_logits(logits, torch.tensor([[False, False, True]]), kind="softmax", branches=("cmp",))
    (gates * torch.arange(1.0, 4.0)).sum().backward()

    assert gates[0, :2].eq(0).all()
    assert gates[0, 2].tolist() == [[1, 0, 0], [1, 0, 0]]
    assert logits.grad.eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("branches", SUBSETS)
@given(seen=st.lists(st.booleans(), min_size=3, max_size=3), size=st.sampled_from([1.0, 1e3, 1e30]))
def test_gates_are_shares_and_their_gradients_finite_whatever_is_open(kind, branches, seen, size):
    logits = (logits_of(1, 3, 2) * size).requires_grad_()

    gates = gates_from_logits(logits, torch.tensor([seen]), kind=kind, branches=branches)
    gates.square().sum().backward()

    assert gates.isfinite().all()
    assert ((gates >= 0) & (gates <= 1)).all()
    assert logits.grad.isfinite().all()
    if kind == "softmax":
        is_open = torch.tensor([has or branches != ("cmp",) for has in seen], dtype=torch.float64)
        torch.testing.assert_close(gates.sum(-1), is_open[None, :, None].expand(1, 3, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_the_softmax_gradient_of_a_closed_branch_is_0(kind):
    logits = logits_of(1, 1, 1).requires_grad_()

    gates_from_logits(logits, torch.tensor([[False]]), kind=kind, branches=("cmp", "win")).square().sum().backward()

    closed = [1] if kind == "sigmoid" else [0, 1]
    assert logits.grad[0, 0, 0, closed].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given_dtype", "dtype"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_gates_are_at_least_float32(kind, given_dtype, dtype):
    assert gates_from_logits(logits_of(1, 2, 2).to(given_dtype), everywhere(1, 2), kind=kind).dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_logits_are_widened_before_any_arithmetic(kind):
    logits = logits_of(1, 4, 2).bfloat16()

    narrow = gates_from_logits(logits, everywhere(1, 4), kind=kind, temperature=3.0)

    assert torch.equal(narrow, gates_from_logits(logits.float(), everywhere(1, 4), kind=kind, temperature=3.0))


def test_sigmoid_gates_of_logits_that_overflowed_are_open_or_closed_with_and_without_a_gradient():
    logits = torch.tensor([math.inf, -math.inf, 1e38]).view(1, 1, 1, 3)
    for each in (logits, logits.clone().requires_grad_()):
        assert gates_from_logits(each, None, kind="sigmoid").flatten().tolist() == [1, 0, 1]


@pytest.mark.parametrize(("kind", "seen", "start"), [("sigmoid", True, [0.5] * 3), ("sigmoid", False, [0.5] * 3)])
def test_sigmoid_branches_start_at_one_half(kind, seen, start, random_input):
    gates = gates_from_logits(GateMLP(8, 4, 6)(random_input(1, 2, 8).float()), torch.full((1, 2), seen), kind=kind)

    assert torch.equal(gates, torch.tensor(start).expand(1, 2, 4, 3))


@pytest.mark.parametrize(("seen", "start"), [(True, [1 / 3] * 3), (False, [0, 1 / 2, 1 / 2])])
def test_softmax_branches_start_equal(seen, start, random_input):
    gates = gates_from_logits(GateMLP(8, 4, 6)(random_input(1, 2, 8).float()), torch.full((1, 2), seen), kind="softmax")

    torch.testing.assert_close(gates, torch.tensor(start).expand(1, 2, 4, 3))


def test_logits_are_an_mlp_of_the_input_one_triple_per_head(random_input):
    mlp = GateMLP(8, 4, 6).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    x = random_input(2, 5, 8)

    hidden = x @ mlp.up.weight.T + mlp.up.bias
    flat = (hidden * torch.sigmoid(hidden)) @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(x), torch.stack([flat[..., 3 * head : 3 * head + 3] for head in range(4)], 2))


def test_the_gated_sum_is_at_least_float32_whatever_the_gates_are():
    out, gates = torch.ones(1, 2, 3, 4, dtype=torch.bfloat16), torch.full((1, 2, 3, 3), 0.3, dtype=torch.float64)

    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        assert gated_sum(gates, out.to(dtype), None, out.to(dtype)).dtype == expected
    torch.testing.assert_close(gated_sum(gates, out, None, out), torch.full((1, 2, 3, 4), 0.6))


def test_a_row_without_a_gradient_passes_none_on_whatever_its_gates_and_branches_hold():
    branches = [torch.ones(1, 4, 2, 3) for _ in range(3)]
    gates = torch.ones(1, 4, 2, 3)
    gates[0, 1], branches[1][0, 2], branches[2][0, 3] = float("nan"), float("inf"), float("nan")
    leaves = [x.requires_grad_() for x in (gates, *branches)]
    dout = torch.zeros(1, 4, 2, 3)
    dout[0, 0] = 2.0

    gradients = torch.autograd.grad(gated_sum(*leaves), leaves, dout)

    assert all(not x[0, 1:].any() for x in gradients)
    assert (gradients[0][0, 0] == 6.0).all()
    assert all((x[0, 0] == 2.0).all() for x in gradients[1:])
