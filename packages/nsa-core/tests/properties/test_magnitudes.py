"""Causality holds whatever the magnitude of the future, up to the largest finite numbers: operations, gated sum, layer, cache."""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from nsa_core import (
    BranchOutput,
    NSAConfig,
    compressed_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from nsa_core.reference import branches, naive, padded, tiles
from nsa_core.reference.causal import causal_attention
from nsa_core.testing import properties
from nsa_core.testing.inputs import SMALL, Inputs, Shape, make_inputs, random_block_indices
from nsa_core.testing.properties import Where, block_rows
from nsa_core.testing.tolerances import relative_error

MAGNITUDES = {
    torch.float64: (1e18, 1e308),
    torch.float32: (1e4, 1e9, 1e18, 1e24, 1e30, 1e38, 3e38),
    torch.bfloat16: (1e38,),
    torch.float16: (6e4,),
}
IN_THE_SLOW_TIER = {(torch.float64, 1e18), *((torch.float32, size) for size in (1e4, 1e18, 1e24, 1e38))}
CASES = [
    pytest.param(
        dtype,
        size,
        id=f"{dtype}-{size:.0e}".removeprefix("torch."),
        marks=pytest.mark.slow if (dtype, size) in IN_THE_SLOW_TIER else (),
    )
    for dtype, sizes in MAGNITUDES.items()
    for size in sizes
]
LAYOUTS = {
    # equal head dimensions in float32: torch's fused attention
    "dense": Shape(num_queries=37, batch=2, head_dim_v=8),
    "dense, unequal head dimensions": Shape(num_queries=37, num_heads=6),
    "packed, side by side": Shape(lengths=(19, 0, 1, 25), head_dim_v=8, surplus_blocks=2),
    "packed, as they lie": Shape(lengths=(19, 0, 1, 25), head_dim_v=8, surplus_blocks=2),
    # keys gathered for single rows
    "gathered, row by row": Shape(num_queries=37, head_dim_v=8),
}
ROWS = (12, 27)
"""Within the first sequence of the packed layouts, and in a later one."""


@pytest.fixture(params=LAYOUTS)
def shape(request: pytest.FixtureRequest) -> Iterator[Shape]:
    with pytest.MonkeyPatch.context() as patch:
        if "as they lie" in request.param:
            patch.setattr(padded, "MAX_PADDING", 0)
        if "row by row" in request.param:
            patch.setitem(tiles.SCRATCH_BYTES, "cpu", 1)
            patch.setattr(branches, "MASKED_RATIO", 0)
        yield LAYOUTS[request.param]


@pytest.mark.parametrize(("dtype", "magnitude"), CASES)
def test_a_huge_future_never_changes_the_past(shape: Shape, dtype: torch.dtype, magnitude: float) -> None:
    for row in ROWS:
        properties.check_past_outputs_and_choices(shape, row, Where(dtype=dtype), magnitude=magnitude)
        properties.check_past_outputs_ignore_future_inputs(shape, row, Where(dtype=dtype), magnitude=magnitude)
        properties.check_past_gradients(shape, row, Where(dtype=dtype), magnitude=magnitude)


def with_future(x: Tensor, row: int, magnitude: float) -> Tensor:
    """Return x `(B, S, ...)` with numbers of about `magnitude` after `row`."""
    largest = torch.finfo(x.dtype).max
    other = torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * magnitude
    return torch.cat([x[:, : row + 1], other.clamp(-largest, largest).to(x)[:, row + 1 :]], 1)


Operation = Callable[[Tensor, Tensor, Tensor], BranchOutput]


def operations(shape: Shape, inputs: Inputs, query_start: Tensor | None) -> dict[str, tuple[Operation, Tensor, Tensor]]:
    """Return each attention as a function of q, k, v, and its k and v."""
    indices = random_block_indices(shape)
    placed = {"geometry": shape.geometry, "query_start": query_start}
    return {
        "cmp": (lambda *x: compressed_attention(*x, **placed), inputs.k_cmp, inputs.v_cmp),
        "slc": (lambda *x: selected_attention(*x, indices, **placed), inputs.k_slc, inputs.v_slc),
        "win": (lambda *x: sliding_window_attention(*x, **placed), inputs.k_win, inputs.v_win),
    }


def gradients(operation: Operation, row: int, *tensors: Tensor, of: str = "out") -> list[Tensor]:
    """Return out and lse up to `row`, and the gradients of out, lse, or out and one row of lse, 0 after it."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = operation(*leaves)
    past_out, past_lse = out[:, : row + 1], torch.where(lse == float("-inf"), 0, lse)[:, : row + 1]
    weights = torch.arange(1, row + 2).view(1, -1, 1)
    losses = {"out": (past_out * weights.unsqueeze(-1)).sum(), "lse": (past_lse * weights).sum()}
    loss = losses["out"] + past_lse[:, row].sum() if of == "out and a row of lse" else losses[of]
    return [past_out.detach(), past_lse.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("of", ["out", "lse", "out and a row of lse"])
@pytest.mark.parametrize("layout", ["dense", "cached"])
@pytest.mark.parametrize("name", ["cmp", "slc", "win"])
@pytest.mark.parametrize(("dtype", "magnitude"), CASES)
def test_a_huge_future_stays_out_of_every_gradient(name: str, layout: str, of: str, dtype: torch.dtype, magnitude: float) -> None:
    shape = Shape(num_queries=29, head_dim_v=8)
    inputs = make_inputs(shape, dtype)
    query_start = torch.zeros(1, dtype=torch.int32) if layout == "cached" else None
    operation, k, v = operations(shape, inputs, query_start)[name]
    for row in (6, 20):
        ends = block_rows(shape) if name == "cmp" else torch.arange(shape.num_queries)
        last = int((ends <= row).sum()) - 1
        changed = (with_future(inputs.q, row, magnitude), *(with_future(x, last, magnitude) for x in (k, v)))
        usual = gradients(operation, row, inputs.q, k, v, of=of)
        huge = gradients(operation, row, *changed, of=of)
        for ours, theirs in zip(usual, huge, strict=True):
            assert torch.equal(ours, theirs)
        for x, kept in zip(huge[2:], (row, last, last), strict=True):
            assert not x[:, kept + 1 :].any()


@pytest.mark.parametrize("head_dim_v", [8, 6], ids=["equal head dimensions", "unequal"])
@pytest.mark.parametrize(("dtype", "magnitude"), CASES)
def test_a_huge_future_never_changes_the_past_of_dense_attention(head_dim_v: int, dtype: torch.dtype, magnitude: float) -> None:
    inputs = make_inputs(Shape(num_queries=70, head_dim_v=head_dim_v), dtype)
    tensors = (inputs.q, inputs.k_win, inputs.v_win)

    def dense(*x: Tensor) -> BranchOutput:
        return BranchOutput(causal_attention(*x), torch.zeros(x[0].shape[:3]))

    for row in (6, 30):
        usual = gradients(dense, row, *tensors)
        # all three, and v alone: torch's kernels multiply a weight of 0 with it
        for places in ((0, 1, 2), (2,)):
            changed = (with_future(x, row, magnitude) if place in places else x for place, x in enumerate(tensors))
            huge = gradients(dense, row, *changed)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(usual, huge, strict=True))
            assert not any(x[:, row + 1 :].any() for x in huge[2:])


@pytest.mark.parametrize("head_dim_v", [8, 6], ids=["equal head dimensions", "unequal"])
@pytest.mark.parametrize("scale", [1e12, -1e38])
def test_a_huge_scale_lets_no_future_through_either(scale: float, head_dim_v: int) -> None:
    inputs = make_inputs(Shape(num_queries=70, head_dim_v=head_dim_v), torch.float32)
    tensors = (inputs.q, inputs.k_win, inputs.v_win)

    def dense(*x: Tensor) -> BranchOutput:
        return BranchOutput(causal_attention(*x, scale=scale), torch.zeros(x[0].shape[:3]))

    for operation in (lambda *x: sliding_window_attention(*x, geometry=SMALL, scale=scale), dense):
        usual, huge = gradients(operation, 12, *tensors), gradients(operation, 12, *(with_future(x, 12, 1e2) for x in tensors))
        for ours, theirs in zip(usual, huge, strict=True):
            assert torch.equal(ours[:, :13].nan_to_num(), theirs[:, :13].nan_to_num())
        assert not any(x[:, 13:].any() for x in huge[2:])


@pytest.mark.parametrize("head_dim_v", [8, 6], ids=["fused", "separate products"])
@pytest.mark.parametrize("magnitude", [1e4, 3e5, 1e9, 1e18, 1e30, 1e37])
def test_huge_scores_give_the_gradients_of_the_oracle(magnitude: float, head_dim_v: int) -> None:
    inputs = make_inputs(Shape(num_queries=40, head_dim_v=head_dim_v), torch.float32)
    ours = [x.requires_grad_() for x in (inputs.q, inputs.k_win * magnitude, inputs.v_win)]
    exact = [x.detach().double().requires_grad_() for x in ours]
    out = sliding_window_attention(*ours, geometry=SMALL).out
    expected = naive.sliding_window_attention(*exact, geometry=SMALL).out
    assert relative_error(out, expected) < 1e-5
    (dv,), (expected_dv,) = torch.autograd.grad(out.sum(), ours[2]), torch.autograd.grad(expected.sum(), exact[2])
    # a score of 1e4 is itself known to 1e-3
    assert relative_error(dv, expected_dv) < 1e-3


@pytest.mark.parametrize("magnitude", [1.0, 1e9, 1e18, 1e30, 3e38])
def test_forced_blocks_and_their_number_survive_scores_of_any_magnitude(magnitude: float) -> None:
    inputs = make_inputs(Shape(num_queries=64), torch.float32)
    k_cmp = (inputs.k_cmp.double() * magnitude).clamp(-3.4e38, 3.4e38).float()
    lse = compressed_attention(inputs.q, k_cmp, inputs.v_cmp, geometry=SMALL).lse
    chosen = select_blocks(inputs.q, k_cmp, lse, geometry=SMALL)
    own = torch.arange(64).view(1, 64, 1, 1) // SMALL.selection_block_size
    for forced in (torch.zeros_like(own), own, (own - 1).clamp(min=0)):
        assert (chosen == forced).any(-1).all()
    assert torch.equal((chosen >= 0).sum(-1), (own[..., 0] + 1).clamp(max=SMALL.num_selected_blocks).expand(1, 64, 2))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("compressor", "gate", "rope", "qk_norm"),
    [
        ("mlp", "softmax", "block_end", False),
        ("conv", "sigmoid", "block_end", False),
        ("mean", "sigmoid", "tokens", False),
        ("mean", "sigmoid", "block_end", True),
    ],
)
@pytest.mark.parametrize(("dtype", "magnitude"), CASES)
def test_a_huge_future_never_changes_the_past_of_a_layer(
    compressor: Any, gate: Any, rope: Any, qk_norm: bool, packed: bool, dtype: torch.dtype, magnitude: float, random_layer: Any
) -> None:
    config = NSAConfig(16, 4, 2, 8, 8, geometry=SMALL, gate_hidden_size=8, compressor=compressor, gate=gate, compressed_rope=rope)
    layer = random_layer(attrs.evolve(config, qk_norm=qk_norm), dtype=dtype)
    x = torch.randn(1, 41, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    cu_seqlens = torch.tensor([0, 15, 15, 41], dtype=torch.int32) if packed else None

    def past(x: Tensor, row: int) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        out = layer(leaf, cu_seqlens=cu_seqlens)[:, : row + 1]
        return out.detach(), torch.autograd.grad(out.sum(), leaf)[0]

    for row in ROWS:
        usual, huge = past(x, row), past(with_future(x, row, magnitude), row)
        for ours, theirs in zip(usual, huge, strict=True):
            assert torch.equal(ours[:, : row + 1], theirs[:, : row + 1])
        assert not huge[1][:, row + 1 :].any()


@pytest.mark.parametrize("head_dim_v", [8, 6], ids=["equal head dimensions", "unequal"])
@pytest.mark.parametrize("name", ["cmp", "slc", "win"])
def test_a_key_of_minus_infinity_counts_as_hidden(name: str, head_dim_v: int) -> None:
    shape = Shape(num_queries=29, head_dim_v=head_dim_v)
    inputs = make_inputs(shape, torch.float64)
    operation, k, v = operations(shape, inputs, None)[name]
    q, k = inputs.q.abs(), k.clone()
    # far below the others in every row, and never the only one that a row sees
    k[:, 2] = -1e6
    usual = gradients(operation, 28, q, k, v, of="out and a row of lse")
    k[:, 2] = float("-inf")
    for ours, theirs in zip(usual, gradients(operation, 28, q, k, v, of="out and a row of lse"), strict=True):
        assert torch.equal(ours, theirs)
