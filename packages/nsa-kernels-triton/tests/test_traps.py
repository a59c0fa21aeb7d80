"""Every mistake that a public kernel for sparse attention is known to have made, as a test."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from nsa_core import BlockGeometry, compressed_attention, nsa_attention, select_blocks, selected_attention, sliding_window_attention
from nsa_core.backends.base import Keys, Operation, Queries
from nsa_core.errors import InputError
from nsa_core.reference import naive
from nsa_core.testing import properties
from nsa_core.testing.inputs import SMALL, Inputs, Shape, make_inputs, random_block_indices
from nsa_core.testing.properties import Where
from nsa_core.testing.tolerances import NEAR_TIE, allowed_error, max_error
from nsa_kernels_triton import implementations, tile_table
from nsa_kernels_triton.launch import Sequences
from nsa_kernels_triton.plugin import TritonBackend
from nsa_kernels_triton.selected import op as selected
from nsa_kernels_triton.selected.index import Chunk, chunks, index_of

pytestmark = [pytest.mark.usefixtures("nan_buffers"), pytest.mark.filterwarnings("ignore:.*against policy.*")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WHERE = Where(backend="triton", device=DEVICE, dtype=torch.float32)
OPTIONS: dict[str, Any] = {"backend": "triton"}


def inputs_of(shape: Shape, dtype: torch.dtype = torch.float32) -> Inputs:
    return make_inputs(shape, dtype, DEVICE)


def assert_close(ours: Tensor, exact: Tensor) -> None:
    assert max_error(ours, exact) <= allowed_error(exact, ours.dtype)


@pytest.mark.parametrize("num_selected", [3, 5, 7])
def test_any_number_of_chosen_blocks_counts_alike_forward_and_backward(num_selected: int) -> None:
    geometry = evolve(SMALL, num_selected_blocks=num_selected, num_local_blocks=1)
    properties.check_agrees_with_oracle(Shape(geometry=geometry, num_queries=70, num_heads=2, num_kv_heads=1), WHERE)


@pytest.mark.parametrize("operation", [Operation.CMP, Operation.SLC, Operation.WIN])
def test_a_row_is_stabilised_by_its_own_maximum(operation: Operation) -> None:
    # neighbours in one tile whose logits lie thousands apart: with a shared maximum the smaller ones vanish
    shape = Shape(num_queries=40, num_heads=4, num_kv_heads=1)
    inputs = inputs_of(shape)
    factor = torch.tensor([1e-3, 1.0, 50.0, 1000.0], device=DEVICE)
    q = inputs.q * factor[:, None]
    indices = random_block_indices(shape, device=DEVICE)
    calls = {
        Operation.CMP: (compressed_attention, naive.compressed_attention, (q, inputs.k_cmp, inputs.v_cmp)),
        Operation.SLC: (selected_attention, naive.selected_attention, (q, inputs.k_slc, inputs.v_slc, indices)),
        Operation.WIN: (sliding_window_attention, naive.sliding_window_attention, (q, inputs.k_win, inputs.v_win)),
    }
    ours, oracle, operands = calls[operation]
    found = ours(*operands, geometry=SMALL, **OPTIONS)
    exact = oracle(*(x.double() if x.is_floating_point() else x for x in operands), geometry=SMALL)
    assert_close(found.out, exact.out)
    assert_close(found.lse, exact.lse)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17])
def test_the_window_holds_exactly_w_tokens(window: int) -> None:
    geometry = evolve(SMALL, window_size=window)
    q = torch.zeros(1, 40, 1, 8, device=DEVICE)
    v = torch.eye(40, device=DEVICE).view(1, 40, 1, 40)
    out = sliding_window_attention(q, torch.zeros_like(q), v, geometry=geometry, **OPTIONS).out[0, :, 0]
    for t in range(40):
        seen = torch.zeros(40, device=DEVICE)
        seen[max(0, t - window + 1) : t + 1] = 1 / min(window, t + 1)
        torch.testing.assert_close(out[t], seen)


def test_a_decode_step_reads_the_window_that_training_read() -> None:
    shape = Shape(num_queries=37, geometry=evolve(SMALL, window_size=9))
    inputs = inputs_of(shape)
    whole = sliding_window_attention(inputs.q, inputs.k_win, inputs.v_win, geometry=shape.geometry, **OPTIONS).out
    for t in (0, 8, 9, 36):
        start = torch.tensor([t], dtype=torch.int32, device=DEVICE)
        step = inputs.q[:, t : t + 1]
        out = sliding_window_attention(step, inputs.k_win, inputs.v_win, geometry=shape.geometry, query_start=start, **OPTIONS).out
        assert_close(out, whole[:, t : t + 1].double())


@pytest.mark.parametrize("length", [5, 33, 70])
def test_no_future_block_is_chosen_where_every_score_is_zero(length: int) -> None:
    # keys that nobody attends to: all importances underflow to 0, those of blocks in the future included
    geometry = evolve(SMALL, num_selected_blocks=6)
    q = torch.ones(1, length, 2, 8, device=DEVICE)
    k_cmp = torch.zeros(1, max(0, (length - 8) // 4 + 1), 1, 8, device=DEVICE)
    lse = torch.full((1, length, 2), 1e4, device=DEVICE)
    chosen = select_blocks(q, k_cmp, lse, geometry=geometry, **OPTIONS)[0, :, 0].tolist()
    for t, row in enumerate(chosen):
        own = t // 8
        # forced: block 0 and the two ending with the own one; ties go to the lower block
        free = [block for block in range(own + 1) if block not in {0, own - 1, own}]
        forced = {0, own - 1, own} & set(range(own + 1))
        expected = sorted(forced | set(free[: 6 - len(forced)]))
        assert row == expected + [-1] * (6 - len(expected))


def assert_choice(shape: Shape, num_clear: int) -> None:
    """Assert that what is chosen above the near-tie margin, of more than `num_clear` rows, is what the oracle chooses."""
    inputs, geometry = inputs_of(shape), shape.geometry
    exact = inputs.to(torch.float64)
    lse = naive.compressed_attention(exact.q, exact.k_cmp, exact.v_cmp, geometry=geometry).lse
    expected = naive.select_blocks(exact.q, exact.k_cmp, lse, geometry=geometry)
    is_clear = naive.selection_margin(exact.q, exact.k_cmp, lse, geometry=geometry) > NEAR_TIE[torch.float32]
    chosen = select_blocks(inputs.q, inputs.k_cmp, lse.float(), geometry=geometry, **OPTIONS)
    assert int(is_clear.sum()) > num_clear
    assert torch.equal(chosen[is_clear], expected[is_clear])


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_a_compressed_block_that_lies_across_tiles_counts_for_both_selection_blocks(reach: int) -> None:
    # 8 strides to a selection block: the interpreter's tile of 16 keys holds 2 blocks
    geometry = BlockGeometry(2 * reach, 2, 16, 4, 0, 1, 8)
    assert_choice(Shape(geometry=geometry, num_queries=150, num_heads=2, num_kv_heads=1), 60)


@pytest.mark.parametrize(("num_heads", "tile"), [(16, 64), (1, 128), (3, 128), (16, 128)])
def test_strides_and_heads_are_summed_in_any_tile(num_heads: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # a matrix unit's tile holds them in an order of its own
    monkeypatch.setattr(tile_table, "INTERPRETED", tile_table.Tiles(16, tile, 4, 1))
    # asked again
    monkeypatch.setattr(implementations, "config_of", implementations.config_of.__wrapped__)
    geometry = BlockGeometry(4, 2, 8, 4, 1, 1, 8)
    assert_choice(Shape(geometry=geometry, num_queries=170, num_heads=num_heads, num_kv_heads=1), 130)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "geometry"),
    [
        (40, 2, BlockGeometry(4, 2, 8, 4, 1, 1, 8)),
        (1, 1, BlockGeometry(8, 1, 40, 2, 0, 1, 8)),
        pytest.param(20, 1, BlockGeometry(24, 1, 32, 2, 0, 1, 8), marks=pytest.mark.slow),
    ],
    ids=["heads", "strides", "both"],
)
def test_groups_and_blocks_that_no_tile_holds_are_summed_in_pieces(num_heads: int, num_kv_heads: int, geometry: BlockGeometry) -> None:
    # the interpreter's tile holds 16 rows of q and 16 keys
    num_queries = 5 * geometry.selection_block_size + 3
    shape = Shape(geometry=geometry, num_queries=num_queries, num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert_choice(shape, num_kv_heads * num_queries * 4 // 5)


@pytest.mark.parametrize("attend", [compressed_attention, sliding_window_attention])
def test_queries_that_do_not_count_give_zero_whatever_they_hold(attend: Any) -> None:
    # so many that tiles of keys exist which every row sees
    inputs = inputs_of(Shape(num_queries=200))
    k, v = (inputs.k_cmp, inputs.v_cmp) if attend is compressed_attention else (inputs.k_win, inputs.v_win)
    start, count = (torch.tensor([number], dtype=torch.int32, device=DEVICE) for number in (180, 4))
    q = inputs.q[:, 180:].clone()
    q[:, 4:] = math.nan
    out, lse = attend(q, k, v, geometry=SMALL, query_start=start, query_count=count, **OPTIONS)
    whole = attend(inputs.q, k, v, geometry=SMALL, **OPTIONS)
    assert not out[:, 4:].any()
    assert bool((lse[:, 4:] == -math.inf).all())
    torch.testing.assert_close(out[:, :4], whole.out[:, 180:184])
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(attend(*leaves, geometry=SMALL, query_start=start, query_count=count, **OPTIONS).out.sum(), leaves)
    assert all(bool(x.isfinite().all()) for x in gradients)
    assert not gradients[0][:, 4:].any()
    # a NaN that counts is not hidden
    q[:, 0] = math.nan
    assert bool(attend(q, k, v, geometry=SMALL, query_start=start, query_count=count, **OPTIONS).out[:, 0].isnan().all())


def test_a_compressed_block_shows_with_its_last_token_and_no_earlier() -> None:
    # l = 32, d = 16: a division that truncates shows block 0 to the queries 16 .. 30
    geometry = BlockGeometry()
    inputs = inputs_of(Shape(geometry=geometry, num_queries=50, num_heads=2, num_kv_heads=1))
    out, lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry=geometry, **OPTIONS)
    assert not out[:, :31].any()
    assert bool((lse[:, :31] == -math.inf).all())
    assert_close(out[:, 31:47], inputs.v_cmp[:, :1].double().expand(1, 16, 2, -1))
    exact = naive.compressed_attention(inputs.q.double(), inputs.k_cmp.double(), inputs.v_cmp.double(), geometry=geometry)
    assert_close(out, exact.out)


def test_rows_that_choose_nothing_give_zero_and_zero_gradients() -> None:
    shape = Shape(num_queries=24)
    inputs = inputs_of(shape).with_grad()
    indices = torch.full((1, 24, 2, 4), -1, dtype=torch.int32, device=DEVICE)
    indices[:, 20:, 0, 2] = 1
    out, lse = selected_attention(inputs.q, inputs.k_slc, inputs.v_slc, indices, geometry=SMALL, **OPTIONS)
    (out.sum() + torch.where(lse == -math.inf, 0, lse).sum()).backward()
    empty = torch.ones(24, 4, dtype=torch.bool, device=DEVICE)
    empty[20:, :2] = False
    assert not out[0][empty].any()
    assert bool((lse[0][empty] == -math.inf).all())
    assert bool(lse[0][~empty].isfinite().all())
    for x in (inputs.q, inputs.k_slc, inputs.v_slc):
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())
    assert inputs.q.grad is not None
    assert not inputs.q.grad[0][empty].any()


def test_indices_outside_the_past_count_as_absent() -> None:
    # values on a GPU are never checked, so the kernels must ignore these
    shape = Shape(num_queries=37)
    inputs = inputs_of(shape)
    indices = random_block_indices(shape, holes=True, device=DEVICE)
    wild = indices.clone()
    own = torch.arange(37, device=DEVICE)[:, None, None] // 8
    strange = torch.tensor([1000, -7, 2**31 - 1, 5], dtype=torch.int32, device=DEVICE)
    wild = torch.where((indices == -1) & ((strange > own) | (strange < 0)), strange, wild)
    backend = TritonBackend(operation=Operation.SLC)

    def run(chosen: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k_slc, inputs.v_slc)]
        out, lse = backend(Queries(leaves[0], 37), Keys(*leaves[1:], 37), chosen, geometry=SMALL, scale=0.3)
        return [out, lse, *torch.autograd.grad(out.square().sum(), leaves)]

    assert not torch.equal(wild, indices)
    for ours, expected in zip(run(wild), run(indices), strict=True):
        assert torch.equal(ours, expected)


def test_blocks_may_be_named_in_any_order() -> None:
    shape = Shape(num_queries=37)
    inputs = inputs_of(shape)
    indices = random_block_indices(shape, device=DEVICE)
    found = selected_attention(inputs.q, inputs.k_slc, inputs.v_slc, indices, geometry=SMALL, **OPTIONS)
    flipped = selected_attention(inputs.q, inputs.k_slc, inputs.v_slc, indices.flip(-1), geometry=SMALL, **OPTIONS)
    assert_close(found.out, flipped.out.double())


def test_a_block_that_stands_twice_counts_once() -> None:
    # the public function refuses it on a CPU; on a GPU it is not checked
    shape = Shape(num_queries=70, num_heads=4, num_kv_heads=2)
    inputs = inputs_of(shape)
    indices = random_block_indices(shape, device=DEVICE)
    twice = torch.cat([indices[..., :1], indices, indices[..., -1:]], -1)
    geometry = evolve(SMALL, num_selected_blocks=twice.shape[-1])
    exact = attend_and_differentiate(inputs, indices, SMALL)
    for choice in (twice, twice.flip(-1)):
        for ours, expected in zip(attend_and_differentiate(inputs, choice, geometry), exact, strict=True):
            assert_close(ours, expected.double())


def attend_and_differentiate(inputs: Inputs, indices: Tensor, geometry: BlockGeometry) -> list[Tensor]:
    """Return out and the gradients of q, k and v, without the checks that refuse odd choices."""
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k_slc, inputs.v_slc)]
    length = indices.shape[1]
    operands = Queries(leaves[0], length), Keys(*leaves[1:], length), indices
    out = selected.selected_attention(*operands, geometry=geometry, scale=0.3).out
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.fixture
def fine_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut work as finely as only huge inputs are cut: chunks of 32 rows, items of 16 or 3, scores of a few, splits of 8 queries."""
    from nsa_kernels_triton.choice import op as choice
    from nsa_kernels_triton.interval import op as interval
    from nsa_kernels_triton.selected import index

    monkeypatch.setattr(index, "CHUNK_BYTES", 1)
    monkeypatch.setattr(selected, "FORWARD_ITEM_ROWS", 16)
    # so few that a list's items end at different keys of its block
    monkeypatch.setattr(selected, "BACKWARD_ITEM_ROWS", 3)
    monkeypatch.setattr(choice, "SCORE_BYTES", 500)
    monkeypatch.setattr(choice, "SEARCHED_BLOCKS", 1)
    monkeypatch.setattr(interval, "MIN_SPLIT_QUERIES", 8)


@pytest.mark.usefixtures("fine_cuts")
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(num_queries=75, num_heads=3, num_kv_heads=1), marks=pytest.mark.slow),
        Shape(lengths=(41, 0, 30), num_heads=2, num_kv_heads=2),
        pytest.param(Shape(batch=2, num_queries=41), marks=pytest.mark.slow),
    ],
    ids=["dense", "packed", "batch"],
)
@pytest.mark.parametrize("listed_bytes", [2000, 2**25], ids=["few chunks at once", "all at once"])
def test_work_that_is_cut_into_pieces_adds_up(shape: Shape, listed_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_kernels_triton.selected import index

    monkeypatch.setattr(index, "LISTED_BYTES", listed_bytes)
    # block 0 is chosen by every query: its list is many items, whose partial gradients must meet in a fixed order
    properties.check_agrees_with_oracle(shape, WHERE)


@pytest.mark.usefixtures("fine_cuts")
def test_the_future_stays_unseen_in_pieces() -> None:
    properties.check_past_gradients(Shape(num_queries=60, num_heads=2, num_kv_heads=1), 40, WHERE)


@pytest.mark.parametrize("lengths", [(1,), (0, 0, 5), (1,) * 12, (0, 40, 0)], ids=str)
def test_any_mixture_of_short_and_empty_sequences_runs(lengths: tuple[int, ...]) -> None:
    properties.check_agrees_with_oracle(Shape(lengths=lengths, num_heads=2, num_kv_heads=1), WHERE)


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)])
def test_nothing_in_gives_nothing_out(batch: int, length: int) -> None:
    q = torch.zeros(batch, length, 4, 8, device=DEVICE, requires_grad=True)
    k, v = torch.zeros(batch, length, 2, 8, device=DEVICE), torch.zeros(batch, length, 2, 6, device=DEVICE)
    blocks = torch.zeros(batch, 0, 2, 8, device=DEVICE), torch.zeros(batch, 0, 2, 6, device=DEVICE)
    gates = torch.zeros(batch, length, 4, 3, device=DEVICE)
    out = nsa_attention(q, *blocks, k, v, k, v, gates, geometry=SMALL, **OPTIONS)
    assert out.shape == (batch, length, 4, 6)
    out.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("operation", [Operation.CMP, Operation.SLC, Operation.WIN, Operation.NSA])
def test_operands_may_be_views_of_larger_tensors(operation: Operation) -> None:
    shape = Shape(num_queries=21)
    inputs = inputs_of(shape)
    indices = random_block_indices(shape, device=DEVICE)

    def evaluate(x: Inputs) -> list[Tensor]:
        x = Inputs.of(y.detach().requires_grad_() for y in x.tensors)
        out, leaves = {
            Operation.CMP: lambda: (compressed_attention(x.q, x.k_cmp, x.v_cmp, geometry=SMALL, **OPTIONS).out, x[:3]),
            Operation.SLC: lambda: (selected_attention(x.q, x.k_slc, x.v_slc, indices, geometry=SMALL, **OPTIONS).out, (x.q, *x[3:5])),
            Operation.WIN: lambda: (sliding_window_attention(x.q, x.k_win, x.v_win, geometry=SMALL, **OPTIONS).out, (x.q, *x[5:7])),
            Operation.NSA: lambda: (nsa_attention(*x.tensors, geometry=SMALL, **OPTIONS), x.tensors),
        }[operation]()
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]

    strided = Inputs.of(torch.stack([x, x + 1], -1)[..., 0] for x in inputs.tensors)
    assert not strided.q.is_contiguous()
    for ours, expected in zip(evaluate(strided), evaluate(inputs), strict=True):
        assert torch.equal(ours, expected)


LAYOUTS = {
    "a column": lambda *numbers: torch.tensor([[number, 3] for number in numbers], dtype=torch.int32, device=DEVICE)[:, 0],
    "every second": lambda *numbers: torch.tensor([x for number in numbers for x in (number, 9)], dtype=torch.int32, device=DEVICE)[::2],
    "expanded": lambda *numbers: torch.tensor(numbers[:1], dtype=torch.int32, device=DEVICE).expand(len(numbers)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 20])
def test_positions_and_counts_may_be_views(layout: str, rows: int) -> None:
    inputs = inputs_of(Shape(batch=3, num_queries=30))
    q, gates = inputs.q[:, -rows:], inputs.gates[:, -rows:]
    start, count = LAYOUTS[layout](5, 10, 8), LAYOUTS[layout](rows, max(1, rows - 3), 1)
    assert not start.is_contiguous()

    def evaluate(start: Tensor, count: Tensor) -> Tensor:
        return nsa_attention(q, *inputs[1:7], gates, geometry=SMALL, query_start=start, query_count=count, **OPTIONS)

    assert torch.equal(evaluate(start, count), evaluate(start.contiguous(), count.contiguous()))


def test_lengths_of_packed_sequences_may_be_a_view() -> None:
    shape = Shape(lengths=(13, 0, 20), num_heads=2, num_kv_heads=1)
    inputs, cu_seqlens = inputs_of(shape), torch.tensor([0, 13, 13, 33], dtype=torch.int32, device=DEVICE)

    def evaluate(cu_seqlens: Tensor) -> Tensor:
        return sliding_window_attention(inputs.q, inputs.k_win, inputs.v_win, geometry=SMALL, cu_seqlens=cu_seqlens, **OPTIONS).out

    view = torch.stack([cu_seqlens, cu_seqlens + 1], -1)[:, 0]
    assert torch.equal(evaluate(view), evaluate(cu_seqlens))


@pytest.mark.parametrize("window", [2**31 - 41, 2**31 - 1, 2**31, 2**40])
def test_a_window_longer_than_any_sequence_is_the_whole_past(window: int) -> None:
    shape = Shape(num_queries=40)

    def evaluate(window: int) -> list[Tensor]:
        inputs = inputs_of(shape).with_grad()
        out = nsa_attention(*inputs.tensors, geometry=evolve(SMALL, window_size=window), **OPTIONS)
        return [out, *torch.autograd.grad(out.sin().sum(), inputs.tensors)]

    for found, expected in zip(evaluate(window), evaluate(2**20), strict=True):
        assert torch.equal(found, expected)


def test_partial_results_beyond_32_bits_are_refused() -> None:
    geometry, layout = BlockGeometry(num_selected_blocks=8192), Sequences(1, 64)
    indices = torch.zeros(1, 64, 4, 8192, dtype=torch.int32, device="meta")
    with pytest.raises(InputError, match=r"num_selected_blocks=8192 with 64 heads of 192 .* choose fewer blocks"):
        index_of(indices, layout, 2**19, geometry, 64, 64, 192, 4, 64, 0)


def test_a_gradient_that_is_a_view_is_read_right() -> None:
    shape = Shape(num_queries=21)
    gradients = []
    for is_view in (False, True):
        inputs = inputs_of(shape).with_grad()
        out = nsa_attention(*inputs.tensors, geometry=SMALL, **OPTIONS)
        weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
        out.backward(weights.transpose(1, 2).contiguous().transpose(1, 2) if is_view else weights)
        gradients.append([x.grad for x in inputs.tensors])
    for plain, view in zip(*gradients, strict=True):
        assert plain is not None
        assert view is not None
        assert torch.equal(plain, view)


def test_surplus_rows_of_a_packed_batch_are_never_read() -> None:
    shape = Shape(lengths=(13, 0, 20), surplus_blocks=3, num_heads=2, num_kv_heads=1)
    inputs = inputs_of(shape).with_grad()
    out = nsa_attention(*inputs.tensors, geometry=SMALL, cu_seqlens=inputs.cu_seqlens, **OPTIONS)
    out.sum().backward()
    assert bool(out.isfinite().all())
    for x in (inputs.k_cmp, inputs.v_cmp):
        assert x.grad is not None
        assert not x.grad[:, -3:].any()
        assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("selection_block_size", [24, 40])
def test_a_block_that_no_tile_divides_ends_where_it_ends(selection_block_size: int) -> None:
    geometry = BlockGeometry(16, 8, selection_block_size, 3, 1, 1, 8)
    inputs = inputs_of(Shape(geometry=geometry, num_queries=3 * selection_block_size + 1))
    own = torch.arange(inputs.q.shape[1], dtype=torch.int32) // selection_block_size
    # the first block and the own one: what follows the first is not chosen
    second = torch.where(own > 0, own, -1)
    num_groups = inputs.k_slc.shape[2]
    block_indices = torch.stack([own * 0, second, own * 0 - 1], -1)[None, :, None].expand(1, -1, num_groups, -1).contiguous()
    leaves, exact = inputs.with_grad(), inputs.to(torch.float64).with_grad()
    found = [leaves.tensors[index] for index in (0, 3, 4)]
    truth = [exact.tensors[index] for index in (0, 3, 4)]
    out = selected_attention(*found, block_indices, geometry=geometry, **OPTIONS).out
    expected = naive.selected_attention(*truth, block_indices, geometry=geometry).out
    assert_close(out, expected)
    gradients = torch.autograd.grad(out.square().sum(), found)
    for ours_gradient, exact_gradient in zip(gradients, torch.autograd.grad(expected.square().sum(), truth), strict=True):
        assert_close(ours_gradient, exact_gradient)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-46])
def test_any_scale_is_a_scale(scale: float) -> None:
    inputs = inputs_of(Shape(num_queries=40))
    leaves, exact = inputs.with_grad(), inputs.to(torch.float64).with_grad()
    for ours, oracle, indices in (
        (compressed_attention, naive.compressed_attention, (0, 1, 2)),
        (sliding_window_attention, naive.sliding_window_attention, (0, 5, 6)),
    ):
        found = [leaves.tensors[index] for index in indices]
        truth = [exact.tensors[index] for index in indices]
        out = ours(*found, geometry=SMALL, scale=scale, **OPTIONS).out
        expected = oracle(*truth, geometry=SMALL, scale=scale).out
        assert_close(out, expected)
        gradients = torch.autograd.grad(out.square().sum(), found)
        for ours_gradient, exact_gradient in zip(gradients, torch.autograd.grad(expected.square().sum(), truth), strict=True):
            assert_close(ours_gradient, exact_gradient)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_scale_that_is_not_positive_serves_the_whole_operation(scale: float) -> None:
    inputs = inputs_of(Shape(num_queries=60))
    leaves, exact = inputs.with_grad().tensors, inputs.to(torch.float64).with_grad().tensors
    out = nsa_attention(*leaves, geometry=SMALL, scale=scale, **OPTIONS)
    expected = naive.nsa_attention(*exact, geometry=SMALL, scale=scale)
    assert_close(out, expected)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    for ours, truth in zip(gradients, torch.autograd.grad(expected.square().sum(), exact), strict=True):
        assert_close(ours, truth)


@pytest.mark.parametrize("lengths", [None, (5, 40, 0, 70)])
def test_queries_that_choose_every_block_leave_no_partial_results(lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # 4 blocks of 8 tokens may be chosen: the first 32 queries of each sequence are attended to densely
    shape = Shape(num_queries=70, lengths=lengths)
    inputs = inputs_of(shape).with_grad()
    found: list[Chunk] = []

    def noted(*arguments: Any) -> Iterator[Chunk]:
        for chunk in chunks(*arguments):
            found.append(chunk)
            yield chunk

    monkeypatch.setattr(selected, "chunks", noted)
    packed = {} if lengths is None else {"cu_seqlens": inputs.cu_seqlens, "max_seqlen": max(lengths)}
    nsa_attention(*inputs.tensors, geometry=SMALL, **OPTIONS, **packed).sum().backward()
    positions = torch.cat([torch.arange(length) for length in lengths or (70,)])
    assert len(found) == 2, "one chunk, forward and backward"
    for chunk in found:
        counts = chunk.present[: len(positions)].cpu().sum((1, 2))
        assert torch.equal(counts == 0, positions < 32)
