"""Numbers at the limits of the dtypes: huge scores, huge values, rows without a gradient, NaN."""

import math
from functools import partial

import pytest
import torch
from attrs import evolve
from torch import Tensor

from nsa_core import BlockGeometry, compressed_attention, nsa_attention, select_blocks, selected_attention, sliding_window_attention
from nsa_core.backends.base import Keys, Queries
from nsa_core.reference import naive
from nsa_core.testing.inputs import SMALL, Inputs, Shape, make_inputs, random_block_indices
from nsa_core.testing.tolerances import allowed_error, max_error
from nsa_kernels_triton.interval import op as interval
from nsa_kernels_triton.selected import op as selected

pytestmark = [pytest.mark.usefixtures("nan_buffers"), pytest.mark.filterwarnings("ignore:.*against policy.*")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GEOMETRY = BlockGeometry()
OPERANDS = {"cmp": (0, 1, 2), "slc": (0, 3, 4), "win": (0, 5, 6)}
NAMES = ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win")
HALF = [torch.bfloat16, torch.float16]


def scaled(inputs: Inputs, of_scores: float = 1, of_values: float = 1) -> Inputs:
    """Return inputs with q and the keys `of_scores` times as large, values `of_values` times."""
    factors = {name: of_values if name.startswith("v") else of_scores for name in NAMES}
    return inputs._replace(**{name: factor * getattr(inputs, name) for name, factor in factors.items()})


def evaluate(branch: str, inputs: Inputs, indices: Tensor, geometry: BlockGeometry, backend: str) -> list[Tensor]:
    """Return out and the gradients of q, k and v of one branch."""
    function = {"cmp": compressed_attention, "slc": selected_attention, "win": sliding_window_attention}[branch]
    leaves = [inputs.tensors[index].detach().clone().requires_grad_() for index in OPERANDS[branch]]
    extra = (indices,) if branch == "slc" else ()
    out = function(*leaves, *extra, geometry=geometry, backend=backend, cu_seqlens=inputs.cu_seqlens).out
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("size", [pytest.param(1e4, marks=pytest.mark.slow), 1e18])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=["bf16", "fp16", "float32"])
@pytest.mark.parametrize("branch", OPERANDS)
def test_huge_scores_leave_everything_finite(branch: str, dtype: torch.dtype, size: float) -> None:
    assert_huge_scores_are_right(branch, dtype, size)


def assert_huge_scores_are_right(branch: str, dtype: torch.dtype, size: float) -> None:
    """Assert that gradients are finite, and out and dv exact, for q and keys of `size` or the largest that dtype multiplies."""
    shape = Shape(num_queries=40, num_heads=4, num_kv_heads=1, head_dim_qk=64, head_dim_v=64)
    inputs = scaled(make_inputs(shape, device=DEVICE), min(size, torch.finfo(dtype).max / 8)).to(dtype)
    indices = random_block_indices(shape, holes=True, device=DEVICE)
    out, *gradients = evaluate(branch, inputs, indices, SMALL, "triton")
    exact, *_, dv = evaluate(branch, inputs.to(torch.float64), indices, SMALL, "sdpa")
    assert all(bool(x.isfinite().all()) for x in gradients)
    # a row's weight lies on one key: outputs are its value, and values get whole rows of dO
    assert max_error(out, exact) <= allowed_error(exact, dtype)
    assert max_error(gradients[2], dv) <= allowed_error(dv, dtype)


@pytest.mark.parametrize("size", [2e3, 5e3, 1e18])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=["bf16", "fp16", "float32"])
def test_huge_scores_choose_the_blocks_that_have_the_weight(dtype: torch.dtype, size: float) -> None:
    # one key of each head has all of its weight
    shape = Shape(num_queries=150, num_heads=3, num_kv_heads=1, head_dim_qk=64, geometry=evolve(SMALL, num_selected_blocks=7))
    inputs = scaled(make_inputs(shape, device=DEVICE), min(size, torch.finfo(dtype).max / 8)).to(dtype)
    lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry=shape.geometry, backend="triton").lse
    chosen = select_blocks(inputs.q, inputs.k_cmp, lse, geometry=shape.geometry, backend="triton")
    exact = [x.double() for x in (inputs.q, inputs.k_cmp, inputs.v_cmp)]
    lse = compressed_attention(*exact, geometry=shape.geometry, backend="sdpa").lse
    assert torch.equal(chosen, select_blocks(*exact[:2], lse, geometry=shape.geometry, backend="sdpa"))


@pytest.mark.parametrize("size", [pytest.param(1e4, marks=pytest.mark.slow), 6e4])
@pytest.mark.parametrize("branch", OPERANDS)
def test_huge_values_leave_float16_gradients_exact(branch: str, size: float) -> None:
    shape = Shape(num_queries=40, num_heads=4, num_kv_heads=1, head_dim_qk=16, head_dim_v=64)
    inputs = make_inputs(shape, device=DEVICE)
    # keys so small that gradients of q are numbers of float16
    inputs = scaled(inputs, 0.3, size / max(float(getattr(inputs, name).abs().max()) for name in NAMES if name.startswith("v"))).to(
        torch.float16
    )
    indices = random_block_indices(shape, device=DEVICE)
    ours = evaluate(branch, inputs, indices, SMALL, "triton")
    rounded = evaluate(branch, inputs, indices, SMALL, "sdpa")
    exact = evaluate(branch, inputs.to(torch.float64), indices, SMALL, "sdpa")
    for x, yardstick, truth in zip(ours, rounded, exact, strict=True):
        assert float(truth.abs().max()) < 65504
        assert max_error(x, truth) <= allowed_error(truth, torch.float16, max_error(yardstick, truth))


def test_float16_gradients_are_lowered_for_huge_values_alone() -> None:
    # so small that any lowering would show
    shape = Shape(num_queries=40, num_heads=4, num_kv_heads=1, head_dim_qk=16, head_dim_v=16)
    inputs = make_inputs(shape, device=DEVICE).to(torch.float16)
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k_win, inputs.v_win)]
    out = sliding_window_attention(*leaves, geometry=SMALL, backend="triton").out
    tiny = 2**-20
    dq, dk, _dv = torch.autograd.grad(out, leaves, torch.full_like(out, tiny))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    truth = torch.autograd.grad(naive.sliding_window_attention(*exact, geometry=SMALL).out, exact, torch.full_like(out, tiny).double())
    assert max_error(dq, truth[0]) <= 2**-24 + 0.1 * float(truth[0].abs().max())
    assert max_error(dk, truth[1]) <= 2**-23 + 0.1 * float(truth[1].abs().max())


def backward_of(branch: str, inputs: Inputs, indices: Tensor, geometry: BlockGeometry, roundings: int) -> list[Tensor]:
    """Return the gradients of q, k and v for dO of ones and twos, from an lse that is some roundings off, as another order of sums makes it."""
    q, k, v = (inputs.tensors[index] for index in OPERANDS[branch])
    extra = (indices,) if branch == "slc" else ()
    function = {"cmp": compressed_attention, "slc": selected_attention, "win": sliding_window_attention}[branch]
    out, lse = function(q, k, v, *extra, geometry=geometry, backend="triton")
    lse = torch.where(lse.isfinite(), lse - roundings * 2.0**-23 * lse.abs(), lse)
    dout = 1 + (torch.arange(out.numel(), device=out.device) % 2).to(out).view(out.shape)
    backward = selected.differentiate if branch == "slc" else partial(interval.differentiate, is_window=branch == "win")
    operands = (Queries(q, q.shape[1]), Keys(k, v, k.shape[1]), *extra)
    return list(backward((dout, None), (out, lse), *operands, geometry=geometry, scale=q.shape[3] ** -0.5))


def assert_gradients_forgive_roundings(branch: str, inputs: Inputs, indices: Tensor, geometry: BlockGeometry, size: float) -> None:
    """Assert that gradients of an lse that is two roundings off, either way, are as exact as what a weight on one key asks for."""
    operands = [inputs.tensors[index].double().requires_grad_() for index in OPERANDS[branch]]
    function = {"cmp": compressed_attention, "slc": selected_attention, "win": sliding_window_attention}[branch]
    extra = (indices,) if branch == "slc" else ()
    out = function(*operands, *extra, geometry=geometry, backend="sdpa").out
    dout = 1 + (torch.arange(out.numel(), device=out.device) % 2).to(out).view(out.shape)
    exact = torch.autograd.grad(out, operands, dout)
    for roundings in (-2, 0, 2):
        dq, dk, dv = backward_of(branch, inputs, indices, geometry, roundings)
        # what delta's rounding of O leaves of dS, times keys and queries of `size`; a weight may be off by roundings of its score
        limit = 2**-6 * size + 0.2 * max(float(x.abs().max()) for x in exact[:2])
        assert max(max_error(dq, exact[0]), max_error(dk, exact[1])) <= limit
        if size >= 300:
            assert max_error(dv, exact[2]) <= allowed_error(exact[2], torch.bfloat16)


@pytest.mark.parametrize("size", [pytest.param(100, marks=pytest.mark.slow), 300, pytest.param(1e5, marks=pytest.mark.slow), 1e18])
@pytest.mark.parametrize("branch", OPERANDS)
def test_weights_are_right_where_lse_is_some_roundings_off(branch: str, size: float) -> None:
    shape = Shape(num_queries=40, num_heads=4, num_kv_heads=1, head_dim_qk=64, head_dim_v=64)
    inputs = scaled(make_inputs(shape, device=DEVICE), size).to(torch.bfloat16)
    assert_gradients_forgive_roundings(branch, inputs, random_block_indices(shape, device=DEVICE), SMALL, size)


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [(4, None), (4, (17, 0, 23)), (40, (9, 5))],
    ids=["dense", "packed", "40 heads"],
)
@pytest.mark.parametrize("branch", OPERANDS)
def test_two_equal_weights_of_a_row_add_up_to_1(
    branch: str, heads: int, lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that a program has several tiles
    monkeypatch.setattr(interval, "LOWERING_PROGRAMS", 2)
    shape = Shape(num_queries=40, num_heads=heads, num_kv_heads=1, head_dim_qk=64, head_dim_v=64, lengths=lengths)
    inputs, indices = scaled(make_inputs(shape, device=DEVICE), 300).to(torch.bfloat16), random_block_indices(shape, device=DEVICE)
    keys = inputs.tensors[OPERANDS[branch][1]]
    # every second key repeats the one before it
    keys[:, 1::2] = keys[:, : keys.shape[1] // 2 * 2 : 2]
    dv = evaluate(branch, inputs, indices, SMALL, "triton")[3]
    exact = evaluate(branch, inputs.to(torch.float64), indices, SMALL, "sdpa")[3]
    # lse and the shift are rounded by up to 2^-24 of the score; both at once in one direction would be twice as much
    scores = torch.einsum("bqhd,bkgd->bqhk", inputs.q.double(), keys.double()) * 64**-0.5 * math.log2(math.e)
    of_rounding = 2 ** (2**-24 * float(scores.abs().max())) - 1
    assert max_error(dv, exact) <= allowed_error(exact, torch.bfloat16) + of_rounding * float(exact.abs().max())


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU always does so; the test above is this one there")
@pytest.mark.usefixtures("fused_products")
@pytest.mark.parametrize("branch", OPERANDS)
def test_products_that_are_rounded_once_leave_peaked_rows_exact(branch: str) -> None:
    # the largest weight of a row is then 1 up to 2^-7, and bfloat16 rounds it by half of that
    shape = Shape(num_queries=40, num_heads=4, num_kv_heads=1, head_dim_qk=64, head_dim_v=64)
    inputs = scaled(make_inputs(shape), 300).to(torch.bfloat16)
    assert_gradients_forgive_roundings(branch, inputs, random_block_indices(shape), SMALL, 300)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize(("of_values", "of_dout", "is_extreme"), [(2.0**62, 2.0**58, False), (-(2.0**63), 1, True), (1, 2.0**59, True)])
def test_values_and_gradients_whose_products_may_overflow_set_the_flag(
    of_values: float, of_dout: float, is_extreme: bool, dtype: torch.dtype
) -> None:
    # one value of the last row, which a program of its own reads, and the 16 numbers of one row of dO
    shape = Shape(num_queries=40, num_heads=4, num_kv_heads=1, head_dim_qk=16, head_dim_v=16)
    inputs = make_inputs(shape, dtype, DEVICE)
    out, lse = sliding_window_attention(inputs.q, inputs.k_win, inputs.v_win, geometry=SMALL, backend="triton")
    v, dout = inputs.v_win.clone(), torch.ones_like(out)
    v[0, -1, 0, -1], dout[0, 7, 2] = of_values, of_dout
    _delta, _shift, extremes = interval.row_deltas(out, lse, dout, None, v)
    assert extremes.tolist() == [int(is_extreme), 0, 0, 0]
    assert interval.row_deltas(out, lse, torch.ones_like(out), None, inputs.v_win)[2].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("first", [0, 1], ids=["three branches", "two"])
def test_a_huge_value_sets_the_flag_of_its_branch_alone(first: int) -> None:
    x = make_inputs(Shape(num_queries=40, num_heads=4, num_kv_heads=1, head_dim_qk=16, head_dim_v=16), torch.bfloat16, DEVICE)
    dout = torch.ones_like(x.q)
    lse = torch.zeros(dout.shape[:3], device=DEVICE)
    outs, lses = ((None,) * first + (each,) * (3 - first) for each in (dout, lse))
    for branch in range(first, 3):
        values = [None, *(v.clone() for v in (x.v_slc, x.v_win))] if first else [v.clone() for v in (x.v_cmp, x.v_slc, x.v_win)]
        values[branch][0, -1, 0, -1] = 2.0**63
        *_, extremes, _dgates = interval.branch_deltas(dout, outs, lses, x.gates, tuple(values))
        assert extremes[:, 0].tolist() == [int(index == branch) for index in range(3)]


def assert_rows_without_a_gradient_give_none(
    inputs: Inputs, positions: tuple[int, ...], size: float, geometry: BlockGeometry, silent_from: int
) -> None:
    """Assert that later rows of some operands, of `size`, change nothing before row `silent_from`, from which on dO is 0."""
    num_blocks = (silent_from - geometry.compression_block_size) // geometry.compression_stride + 1
    # rows that a query before sees: of q, of the compressed keys and values, and of the others
    seen = [silent_from, num_blocks, num_blocks, *[silent_from] * 5]

    def evaluate(size: float | None) -> list[Tensor]:
        leaves = [x.detach().clone() for x in inputs.tensors]
        if size is not None:
            for position in positions:
                rows = leaves[position][:, seen[position] :]
                rows.copy_(size * torch.sign(rows))
        leaves = [x.requires_grad_() for x in leaves]
        out = nsa_attention(*leaves, geometry=geometry, backend="triton")
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        dout[:, silent_from:] = 0
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    before, after = evaluate(None), evaluate(size)
    assert before[1].isfinite().all()
    assert torch.equal(before[0][:, :silent_from], after[0][:, :silent_from])
    for end, x, y in zip(seen, before[1:], after[1:], strict=True):
        assert not y[:, end:].any()
        if x.dtype == torch.float16 and 2 in positions:
            # huge values anywhere lower the power of two by which dS is multiplied
            torch.testing.assert_close(x[:, :end], y[:, :end], rtol=2**-9, atol=2**-10)
        else:
            assert torch.equal(x[:, :end], y[:, :end])


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        pytest.param(torch.bfloat16, 1e9, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 1e30, marks=pytest.mark.slow),
        (torch.bfloat16, 3e38),
        (torch.float16, 6e4),
        pytest.param(torch.float32, 1e30, marks=pytest.mark.slow),
        (torch.float32, 3e38),
    ],
    ids=str,
)
@pytest.mark.parametrize("positions", [(1, 3, 5), (2, 4, 6)], ids=["keys", "values"])
def test_rows_without_a_gradient_give_none_whatever_their_keys_and_values_are(
    positions: tuple[int, ...], dtype: torch.dtype, size: float
) -> None:
    shape = Shape(num_queries=60, num_heads=2, num_kv_heads=1, head_dim_qk=16, head_dim_v=16)
    assert_rows_without_a_gradient_give_none(make_inputs(shape, dtype, DEVICE), positions, size, SMALL, 41)


def poisoned(inputs: Inputs, name: str, row: int, value: float) -> Inputs:
    """Return inputs with one row of group 0 of one operand, of q of head 0, made of `value`."""
    x = getattr(inputs, name).clone()
    x[:, row, 0] = value
    return inputs._replace(**{name: x})


def rows_of_tile(rows: set[int], num_queries: int, tile: int, heads_per_group: int) -> set[int]:
    """Return the queries that have a row in a tile where one of `rows` has one."""
    tiles = {row // tile for query in rows for row in range(query * heads_per_group, (query + 1) * heads_per_group)}
    return {row // heads_per_group for row in range(num_queries * heads_per_group) if row // tile in tiles}


@pytest.mark.skipif(DEVICE == "cuda", reason="tiles are those of the interpreter")
@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_nan_reaches_the_rows_that_the_table_says(backend: str, name: str, value: float) -> None:
    length, token, block, heads_per_group = 90, 53, 9, 3
    shape = Shape(num_queries=length, num_heads=6, num_kv_heads=2, head_dim_qk=16, head_dim_v=16)
    inputs = make_inputs(shape, torch.float32)
    lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry=SMALL, backend="sdpa").lse
    chosen = select_blocks(inputs.q, inputs.k_cmp, lse, geometry=SMALL, backend="sdpa")[0, :, 0]
    chose = set((chosen == token // SMALL.selection_block_size).any(-1).nonzero().flatten().tolist())
    first_seeing = block * SMALL.compression_stride + SMALL.compression_block_size - 1
    sees = {
        "q": {token},
        "cmp": set(range(first_seeing, length)),
        "slc": {t for t in chose if t >= token},
        "win": set(range(token, token + SMALL.window_size)),
    }[name.rsplit("_", maxsplit=1)[-1]]
    with torch.no_grad():
        out = nsa_attention(*poisoned(inputs, name, block if "cmp" in name else token, value).tensors, geometry=SMALL, backend=backend)
    is_bad = ~out.isfinite().all(-1)[0]
    assert not is_bad[:, heads_per_group:].any(), "another group"
    bad = set(is_bad.any(1).nonzero().flatten().tolist())
    if name == "q":
        assert not is_bad[:, 1:].any()
        assert bad == sees
    elif backend == "sdpa" or name.startswith("k"):
        assert bad == sees
    elif name == "v_slc":
        # KV-major: the block's rows up to the token are in the same tile
        assert bad == chose
    else:
        assert bad == rows_of_tile(sees, length, 16, heads_per_group)
