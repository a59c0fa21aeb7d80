"""Right results pass and wrong ones do not, for numbers of any size."""

import pytest
import torch
from attrs import evolve

import nsa_core
from nsa_core import BlockGeometry
from nsa_core.reference.causal import causal_attention
from nsa_core.testing import sampled
from nsa_core.testing.inputs import Shape, make_inputs, random_block_indices
from nsa_core.testing.sampled import NotFiniteError, backward_values, compare, compare_selection, expect, forward_values, operands_of

GEOMETRY = BlockGeometry(8, 4, 8, 6, window_size=16)


class Operation:
    """An operation of nsa_core with its operands and expected values."""

    def __init__(self, operation, dtype, seq_len=300, *, lengths=None, geometry=GEOMETRY):
        shape = Shape(geometry=GEOMETRY, num_queries=seq_len, lengths=lengths, num_heads=4, num_kv_heads=2, head_dim_qk=16, head_dim_v=8)
        self.operation, self.lengths = operation, lengths
        self.inputs = make_inputs(shape, dtype).with_grad()
        self.block_indices = random_block_indices(shape) if operation == "slc" else None
        self.options = {"geometry": geometry, "cu_seqlens": self.inputs.cu_seqlens}
        self.operands = operands_of(operation, self.inputs)

    @property
    def expected(self):
        return expect(self.operation, self.inputs, GEOMETRY, self.lengths, self.block_indices)

    def run(self, *operands):
        run = {
            "nsa": nsa_core.nsa_attention,
            "cmp": lambda *x, **options: nsa_core.compressed_attention(*x, **options).out,
            "slc": lambda *x, **options: nsa_core.selected_attention(*x, self.block_indices, **options).out,
            "win": lambda *x, **options: nsa_core.sliding_window_attention(*x, **options).out,
            "dense": lambda *x, **_: causal_attention(*x),
        }
        return run[self.operation](*operands, **self.options)

    def check(self, spoil=lambda out: out):
        def run(*operands):
            return spoil(self.run(*operands))

        return compare(backward_values(run, self.operands, self.expected), self.expected)


@pytest.mark.parametrize("oracle", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operation", ["nsa", "cmp", "slc", "win", "dense"])
def test_the_reference_backend_is_right(operation, dtype, oracle, monkeypatch):
    monkeypatch.setattr(sampled, "ORACLE_MAX_LENGTH", 10_000 if oracle else 0)
    tried = Operation(operation, dtype)
    check = tried.check()
    assert check.problems == ()
    assert 0 <= check.limit_used <= 0.9
    assert check.method == f"{'oracle' if oracle else 'rows'} in float64, 32 of 300 rows"
    forward = compare(forward_values(tried.run, tried.operands, tried.expected), tried.expected)
    assert forward.problems == ()
    assert forward.error_of == "out"


def test_packed_sequences_are_right_too():
    for operation in ("nsa", "cmp", "slc", "win"):
        assert Operation(operation, torch.float32, lengths=(0, 120, 3, 177)).check().problems == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("operation", "geometry"),
    [
        ("win", evolve(GEOMETRY, window_size=17)),
        ("win", evolve(GEOMETRY, window_size=15)),
        ("nsa", evolve(GEOMETRY, window_size=17)),
        ("nsa", evolve(GEOMETRY, num_selected_blocks=5)),
        ("nsa", evolve(GEOMETRY, num_local_blocks=3)),
    ],
)
def test_a_kernel_of_a_slightly_different_operation_is_caught(operation, geometry, dtype):
    tried = Operation(operation, dtype, 3000, geometry=geometry)
    check = tried.check()
    assert check.limit_used > 1
    assert any(problem.startswith("out is off by") for problem in check.problems)


def test_a_block_that_one_late_query_left_out_is_caught():
    tried = Operation("slc", torch.bfloat16, 3000)
    expected = tried.expected
    tried.block_indices = tried.block_indices.clone()
    # a slot of every query, near its free blocks' end
    tried.block_indices[0, 2900:, :, 3] = -1
    check = compare(forward_values(tried.run, tried.operands, expected), expected)
    assert check.limit_used > 1


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.1


@pytest.mark.parametrize("name", ["q", "k_cmp", "v_slc", "k_win", "gates"])
def test_a_wrong_gradient_is_named(name):
    tried = Operation("nsa", torch.bfloat16)
    place = list(tried.operands).index(name)

    def run(*operands):
        return tried.run(*operands[:place], ScaledGradient.apply(operands[place]), *operands[place + 1 :])

    check = compare(backward_values(run, tried.operands, tried.expected), tried.expected)
    assert [problem.split()[0] for problem in check.problems] == [f"d{name}"]
    assert check.error_of == f"d{name}"


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_a_gradient_that_is_nothing_but_rounding_is_right_and_more_is_not(dtype, noise):
    # one block is compressed: whatever its score, it has all the weight
    tried = Operation("cmp", dtype, 11)
    assert float(tried.expected.values["dk_cmp"].abs().max()) < 1e-12
    assert tried.check().problems == ()
    values = backward_values(tried.run, tried.operands, tried.expected)
    check = compare({**values, "dk_cmp": values["dk_cmp"] + noise}, tried.expected)
    assert [problem.split()[0] for problem in check.problems] == ["dk_cmp"]
    assert 1 < check.limit_used < 1e6


def test_what_is_not_finite_is_wrong_on_any_row():
    tried = Operation("win", torch.float32)
    unsampled = min(set(range(300)) - set(tried.expected.sample.rows.tolist()))

    def spoil(out):
        return out.index_fill(1, torch.tensor([unsampled]), float("nan"))

    with pytest.raises(NotFiniteError, match="out has NaN or infinite elements"):
        tried.check(spoil)


def spoiled(dtype, operation, rows, share):
    """Return the check of a forward pass whose late or early rows are off by a share of their largest value."""
    tried = Operation(operation, dtype, 3000)
    expected = tried.expected
    values = forward_values(tried.run, tried.operands, expected)
    out = values["out"].double()
    largest = out.abs().amax((1, 2), keepdim=True)
    values["out"] = torch.where(rows(expected.sample.positions).view(-1, 1, 1), out + share * largest, out)
    return compare(values, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_numbers_of_late_rows_do_not_hide_behind_large_ones(dtype):
    share = 0.04 if dtype is torch.bfloat16 else 1e-4
    assert spoiled(dtype, "cmp", lambda t: t > 2000, 0.0).limit_used < 1
    assert spoiled(dtype, "cmp", lambda t: t > 2000, share).limit_used > 1


def test_the_largest_numbers_keep_the_projects_own_limit():
    # within the slack of a single row, beyond what the whole result may be off by
    check = spoiled(torch.float32, "win", lambda t: t < 10**9, 2e-5)
    assert 1 < check.limit_used < 3


@pytest.mark.parametrize("operation", ["cmp", "win", "dense"])
def test_late_rows_weigh_as_much_in_the_gradients_of_keys_as_early_ones(operation):
    values = Operation(operation, torch.float32, 3000).expected.values
    for name in list(values)[2:]:
        largest = values[name].abs().flatten(1).amax(1)
        assert float(largest[len(largest) // 2 :].max() / largest.max()) > 0.25, name


def test_late_rows_share_in_the_gradients_of_keys_is_seen():
    tried = Operation("cmp", torch.bfloat16, 3000)

    def run(q, k, v):
        early, late = tried.run(q, k, v), tried.run(q, k.detach(), v.detach())
        return torch.cat([early[:, :1500], late[:, 1500:]], 1)

    check = compare(backward_values(run, tried.operands, tried.expected), tried.expected)
    assert [problem.split()[0] for problem in check.problems] == ["dk_cmp", "dv_cmp"]
    assert check.limit_used > 10


def test_near_ties_count_neither_in_outputs_nor_in_gradients():
    tried = Operation("nsa", torch.float32)
    # two blocks of equal keys score equally: a row that needs one of them has a tie
    with torch.no_grad():
        tried.inputs.k_cmp.copy_(tried.inputs.k_cmp[:, :1].expand_as(tried.inputs.k_cmp))
    expected = tried.expected
    assert expected.num_near_ties > 0
    dropped = ~expected.kept.repeat_interleave(2, 1)
    assert float(expected.dout[dropped].abs().sum()) == 0
    values = backward_values(tried.run, tried.operands, expected)
    values["out"] = torch.where(dropped.unsqueeze(-1), 1e3, values["out"])
    assert compare(values, expected).problems == ()


def test_choices_that_differ_are_wrong_but_for_near_ties():
    chosen = torch.tensor([[[0, 1, 2]], [[0, 2, 3]]])
    other = torch.tensor([[[0, 1, 2]], [[0, 1, 3]]])
    kept = torch.tensor([[True], [False]])
    assert compare_selection(other, chosen, kept, "m").problems == ()
    check = compare_selection(other, chosen, torch.ones_like(kept), "m")
    assert (check.error, check.limit_used) == (0.5, float("inf"))
    assert check.problems == ("1 of 2 choices differ above the near-tie margin",)
