"""The kernels for compute capability 9.0, simulated in float32: against the oracle in every layout, and that they ran."""

import importlib
import math

import pytest
import torch
from attrs import evolve

from nsa_core import BlockGeometry, compressed_attention, nsa_attention, select_blocks, selected_attention, sliding_window_attention
from nsa_core.testing import properties
from nsa_core.testing.inputs import Shape, make_inputs, random_block_indices
from nsa_core.testing.properties import Where
from nsa_core.testing.tolerances import allowed_error, max_error
from nsa_kernels_triton import device, implementations, numerics, pipelines, tile_table
from nsa_kernels_triton.choice import op as choice
from nsa_kernels_triton.hopper import launch as hopper
from nsa_kernels_triton.interval import op as interval
from nsa_kernels_triton.pipelines import PipelineConfig
from nsa_kernels_triton.selected import index
from nsa_kernels_triton.selected import op as selected

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*against policy.*"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the other kernels are interpreted, on a machine without a GPU"),
]

WHERE = Where(backend="triton", dtype=torch.float32)
KERNELS = [
    ("forward_kernels", "forward_kernel"),
    ("dkdv_kernels", "dkdv_kernel"),
    ("dq_kernels", "dq_kernel"),
    ("scores_kernels", "scores_kernel"),
    ("selected_kernels", "forward_kernel"),
    ("selected_kernels", "backward_kernel"),
    ("wide_kernels", "backward_kernel"),
]
BACKWARD_KERNELS = [KERNELS[1], KERNELS[2], *KERNELS[5:]]
GEOMETRY = BlockGeometry(
    compression_block_size=16,
    compression_stride=8,
    selection_block_size=64,
    num_selected_blocks=3,
    num_initial_blocks=1,
    num_local_blocks=1,
    window_size=150,
)


@pytest.fixture
def simulated(monkeypatch, simulator):
    """Let float32 CPU tensors use the kernels for bfloat16 on compute capability 9.0; return the kernels."""
    config_of = implementations.config_of

    def short_pipeline(request):
        found = config_of(request._replace(itemsize=2))
        # so short that every stage is used again, and no shorter than a kernel can do with
        stages = 3 if request.kind == "selected_backward" else 2
        return evolve(found, num_stages=stages) if isinstance(found, PipelineConfig) else found

    monkeypatch.setattr(pipelines, "has_gluon", lambda: True)
    monkeypatch.setattr(device, "capability_of", lambda x: (9, 0))
    for module in (implementations, selected):
        monkeypatch.setattr(module, "config_of", short_pipeline)
    for module in (numerics, interval, choice, selected):
        # these kernels compute in base 2
        monkeypatch.setattr(module, "is_exact", lambda q: False)
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda q: 3)
    # fewer interpreted programs, but still several
    monkeypatch.setattr(selected, "MERGED", 2**14)
    # early rows and late ones in every shape
    monkeypatch.setattr(selected, "EARLY_BLOCKS", 3)
    found = {}
    for name, kernel in KERNELS:
        module = importlib.import_module(f"nsa_kernels_triton.hopper.{name}")
        found[name, kernel] = simulator.Simulated(getattr(module, kernel))
        monkeypatch.setattr(module, kernel, found[name, kernel])
    return found


def shape_of(num_queries=0, head_dims=(64, 64), heads=(4, 2), **sizes):
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim_qk": head_dims[0], "head_dim_v": head_dims[1], **sizes}
    return Shape(geometry=GEOMETRY, num_queries=num_queries, **sizes)


SHAPES = {
    "dense": shape_of(330),
    "packed": shape_of(lengths=(210, 0, 1, 50), heads=(2, 1)),
    "batch": shape_of(260, batch=2, heads=(3, 1)),
    "128": shape_of(290, (128, 128), (16, 1)),
    "packed 128": shape_of(lengths=(210, 0, 1, 290), head_dims=(128, 128), heads=(12, 1)),
    "192": shape_of(330, (192, 128), (16, 1)),
    # the portable kernels make dK and dV of such values
    "192 192": shape_of(260, (192, 192), (2, 1)),
    "packed 160 136": shape_of(lengths=(140, 0, 1, 150), head_dims=(160, 136), heads=(3, 1)),
    # what the tiles hold beyond a head's columns
    "48": shape_of(210, (48, 40)),
    "80": shape_of(290, (80, 96), (9, 1)),
    "160": shape_of(290, (160, 72), (10, 1)),
    # queries that are attended to densely end within a block
    "early": evolve(
        shape_of(lengths=(170, 0, 1, 130), head_dims=(128, 128), heads=(9, 1)), geometry=evolve(GEOMETRY, num_selected_blocks=2)
    ),
    # any block may be a row's first
    "no initial block": evolve(shape_of(270, (128, 128), (11, 1)), geometry=evolve(GEOMETRY, num_initial_blocks=0)),
    "two of each": evolve(
        shape_of(lengths=(330, 30), head_dims=(64, 64), heads=(6, 2)),
        geometry=evolve(GEOMETRY, num_selected_blocks=5, num_initial_blocks=2, num_local_blocks=2),
    ),
    # the first keys of late rows lie beyond the first tile of keys
    "one head": shape_of(260, (192, 128), (1, 1)),
}
IN_THE_SLOW_TIER = {"batch", "packed 128", "192", "192 192", "80", "160", "no initial block", "two of each"}
"""Shapes of which each takes many seconds in the simulator."""


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, id=name, marks=pytest.mark.slow if name in IN_THE_SLOW_TIER else ()) for name, shape in SHAPES.items()]
)
def test_outputs_and_all_gradients_equal_the_oracle(shape, simulated):
    properties.check_agrees_with_oracle(shape, WHERE)
    idle = {name for name, kernel in simulated.items() if not kernel.num_launches}
    other = {("selected_kernels" if shape.head_dim_qk > 128 else "wide_kernels", "backward_kernel")}
    if shape.head_dim_v > 128:
        other |= {("wide_kernels", "backward_kernel"), ("dkdv_kernels", "dkdv_kernel")}
    # the scores of few heads, or of narrow ones, are the portable kernel's
    has_pipeline = shape.head_dim_qk > 64 and shape.num_heads > 8
    assert idle == (other if has_pipeline else other | {("scores_kernels", "scores_kernel")})


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    "head_dims",
    [(128, 64), (192, 128), pytest.param((80, 72), marks=pytest.mark.slow), pytest.param((160, 72), marks=pytest.mark.slow)],
    ids=str,
)
def test_a_list_in_many_items_adds_up(head_dims, monkeypatch):
    monkeypatch.setattr(selected, "FORWARD_ITEM_ROWS", 60)
    monkeypatch.setattr(selected, "BACKWARD_ITEM_ROWS", 90)
    monkeypatch.setattr(selected, "early_queries", lambda *_: 0)
    properties.check_agrees_with_oracle(shape_of(200, head_dims, (2, 1)), WHERE)


@pytest.mark.usefixtures("simulated", "nan_buffers")
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape_of(260, heads=(2, 1)), id="dense", marks=pytest.mark.slow),
        pytest.param(shape_of(lengths=(210, 0, 1, 30), heads=(2, 1)), id="packed"),
    ],
)
def test_a_late_second_stream_changes_no_bit(shape, monkeypatch, check_late_stream):
    # several chunks of rows
    monkeypatch.setattr(index, "MAX_CHUNK_ROWS", 128)
    inputs = make_inputs(shape, torch.float32)

    def evaluate():
        leaves = inputs.with_grad().tensors
        out = nsa_attention(*leaves, geometry=GEOMETRY, cu_seqlens=inputs.cu_seqlens, backend="triton")
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]

    assert check_late_stream(evaluate)


def test_lists_hold_what_neighbours_do_not_share(simulated, monkeypatch):
    seen = []

    def recorded(index, geometry):
        for chunk in chunks(index, geometry):
            seen.append(chunk)
            yield chunk

    chunks = selected.chunks
    monkeypatch.setattr(selected, "chunks", recorded)
    shape = shape_of(300, (64, 64), (16, 1))
    inputs = make_inputs(shape, torch.float32)
    kernel = simulated["forward_kernels", "forward_kernel"]
    with torch.no_grad():
        out = nsa_attention(*inputs.tensors, geometry=shape.geometry, backend="triton")
    # compressed, window and shared blocks
    assert kernel.num_launches == 3
    (chunk,) = seen
    # the first block and its own are shared, and before position 192 all
    expected = torch.where(torch.arange(300) < 192, 0, GEOMETRY.num_selected_blocks - 2)
    assert torch.equal(chunk.present[:300].sum((1, 2)), expected)
    trained = nsa_attention(*inputs.with_grad().tensors, geometry=shape.geometry, backend="triton")
    assert torch.equal(out, trained)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("head_dims", [(128, 64), (192, 128)], ids=str)
def test_a_block_that_is_chosen_late_hides_its_end_from_its_first_queries(head_dims):
    inputs = make_inputs(shape_of(128, head_dims, (2, 1)), torch.float32)
    # nobody chooses block 1 before its 41st token
    position = torch.arange(128)
    indices = torch.stack([torch.zeros(128), torch.where(position >= 64 + 40, 1, -1)], -1).to(torch.int32)[None, :, None]
    geometry = evolve(GEOMETRY, num_selected_blocks=2, num_local_blocks=1, num_initial_blocks=1)

    def evaluate(backend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (inputs.q.clone(), inputs.k_slc.clone(), inputs.v_slc.clone())]
        out = selected_attention(*leaves, indices, geometry=geometry, backend=backend).out
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for ours, exact in zip(evaluate("triton", torch.float32), evaluate("sdpa", torch.float64), strict=True):
        assert max_error(ours, exact) <= allowed_error(exact, torch.float32)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("head_dims", [(64, 64), (80, 72)], ids=str)
def test_steps_over_stores_equal_one_pass(head_dims):
    properties.check_steps_equal_whole(shape_of(230, head_dims, heads=(2, 1)), (1, 97, 230), WHERE)


@pytest.mark.usefixtures("simulated")
def test_future_tokens_never_change_past_gradients():
    properties.check_past_gradients(shape_of(200, heads=(2, 1)), 130, WHERE)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("head_dims", [pytest.param((64, 64), marks=pytest.mark.slow), (192, 128)], ids=str)
def test_future_tokens_change_no_bit_of_past_outputs_and_choices(head_dims):
    properties.check_past_outputs_and_choices(shape_of(560, head_dims, heads=(2, 1)), 525, WHERE)


FINE = BlockGeometry(16, 4, 16, 3, 1, 1, 50)
"""Blocks so small that the scores of a row take many tiles of keys, and a block reaches into the next tile's first."""


@pytest.mark.parametrize(
    ("shape", "score_bytes"),
    [
        # three tiles of keys for the last rows, so that one is under way while another is announced
        (Shape(geometry=BlockGeometry(8, 2, 8, 3, 1, 1, 50), num_queries=300, num_heads=16, num_kv_heads=1,
               head_dim_qk=128, head_dim_v=64), 2**28),
        # chunks of rows that begin and end within tiles, and within a sequence
        pytest.param(Shape(geometry=FINE, num_queries=250, batch=2, num_heads=12, num_kv_heads=1, head_dim_qk=128, head_dim_v=64),
                     8 * 16 * 90, marks=pytest.mark.slow),
        # three strides to a block, where four fit
        (Shape(geometry=evolve(FINE, selection_block_size=12, compression_block_size=8), num_queries=250, num_heads=9, num_kv_heads=1,
               head_dim_qk=192, head_dim_v=64), 2**28),
        (Shape(geometry=evolve(FINE, compression_block_size=4), num_queries=250, num_heads=16, num_kv_heads=1,
               head_dim_qk=128, head_dim_v=64), 2**28),
        # so many strides to a block that lanes run out of blocks to share
        (Shape(geometry=BlockGeometry(16, 4, 64, 3, 1, 1, 50), num_queries=420, num_heads=16, num_kv_heads=1,
               head_dim_qk=128, head_dim_v=64), 2**28),
        pytest.param(Shape(geometry=BlockGeometry(4, 4, 64, 3, 1, 1, 50), num_queries=420, num_heads=16, num_kv_heads=1,
                           head_dim_qk=128, head_dim_v=64), 2**28, marks=pytest.mark.slow),
    ],
    ids=["many tiles", "chunks", "three strides", "no overlap", "four sums to a row", "two"],
)  # fmt: skip
def test_the_choice_is_that_of_the_portable_scores(shape, score_bytes, simulated, monkeypatch):
    monkeypatch.setattr(choice, "SCORE_BYTES", score_bytes)
    inputs = make_inputs(shape, torch.float32)
    lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry=shape.geometry, backend="sdpa").lse

    def choose():
        return select_blocks(inputs.q, inputs.k_cmp, lse, geometry=shape.geometry, backend="triton")

    found = choose()
    assert simulated["scores_kernels", "scores_kernel"].num_launches
    monkeypatch.setattr(choice, "kernel_for", lambda kind, q, *_, **__: tile_table.tiles(kind, (9, 0), q.shape[3], q.shape[3], 2))
    # sums in another order may swap nearly equal scores
    assert (found != choose()).any(-1).sum() <= 1


@pytest.mark.parametrize("strides", [1, 32])
def test_scores_of_very_few_or_many_strides_are_portable(strides, simulated):
    geometry = evolve(FINE, compression_block_size=4, selection_block_size=4 * strides)
    shape = Shape(geometry=geometry, num_queries=40 + 400 * (strides > 1), num_heads=16, num_kv_heads=1, head_dim_qk=128, head_dim_v=64)
    inputs = make_inputs(shape, torch.float32)
    select_blocks(inputs.q, inputs.k_cmp, torch.zeros(inputs.q.shape[:3]), geometry=geometry, backend="triton")
    assert not simulated["scores_kernels", "scores_kernel"].num_launches


@pytest.mark.parametrize("attend", [sliding_window_attention, compressed_attention])
@pytest.mark.parametrize("head_dims", [(128, 128), (192, 128)], ids=str)
def test_tiles_whose_weights_overflow_are_done_again(attend, head_dims, simulated):
    kernel = simulated["forward_kernels", "forward_kernel"]
    inputs = make_inputs(shape_of(640, head_dims, (16, 1)), torch.float32)
    is_window = attend is sliding_window_attention
    k, v = (inputs.k_win, inputs.v_win) if is_window else (inputs.k_cmp, inputs.v_cmp)
    # later scores lie hundreds above those of the first keys, for the last rows
    k[:, -4:] *= 300
    found = attend(inputs.q, k, v, geometry=GEOMETRY, backend="triton")
    overflows = kernel.arguments[5]
    assert 0 < overflows.amax(0).sum() < overflows.shape[1]
    # products of large numbers round in bfloat16, for which these kernels are made
    exact = attend(inputs.q.double(), k.double(), v.double(), geometry=GEOMETRY, backend="sdpa")
    assert max_error(found.out, exact.out) <= allowed_error(exact.out, torch.bfloat16)
    seen = exact.lse.isfinite()
    assert max_error(found.lse[seen], exact.lse[seen]) <= allowed_error(exact.lse[seen], torch.bfloat16)


@pytest.mark.parametrize("heads", [(1, 1), (16, 1)], ids=["one head", "sixteen"])
def test_rows_whose_scores_are_all_very_low_need_no_second_pass(heads, simulated):
    # of one head, most rows of a tile see none of its first keys
    inputs = make_inputs(shape_of(260, (128, 128), heads), torch.float32)
    q, k = inputs.q.clone(), inputs.k_win.clone()
    q[..., 0], k[..., 0] = 60.0, -60.0
    found = sliding_window_attention(q, k, inputs.v_win, geometry=GEOMETRY, backend="triton")
    exact = sliding_window_attention(q.double(), k.double(), inputs.v_win.double(), geometry=GEOMETRY, backend="sdpa")
    assert exact.lse.max() < -200
    assert not simulated["forward_kernels", "forward_kernel"].arguments[5].any()
    assert max_error(found.out, exact.out) <= allowed_error(exact.out, torch.bfloat16)


def test_a_row_that_is_done_again_leaves_its_tile_alone(simulated):
    inputs = make_inputs(shape_of(200, (128, 128), (16, 1)), torch.float32)

    def attend(factor):
        k = inputs.k_win.clone()
        k[:, 190] *= factor
        found = sliding_window_attention(inputs.q, k, inputs.v_win, geometry=GEOMETRY, backend="triton")
        return found, simulated["forward_kernels", "forward_kernel"].arguments[5].any()

    (before, overflows_before), (after, overflows_after) = attend(1), attend(1000)
    assert (overflows_before, overflows_after) == (False, True)
    assert torch.equal(before.out[:, :190], after.out[:, :190])
    assert torch.equal(before.lse[:, :190], after.lse[:, :190])


@pytest.mark.usefixtures("simulated")
def test_a_shared_block_that_overflows_changes_no_row_of_the_past():
    shape = shape_of(280, (128, 128), (16, 1))
    inputs = make_inputs(shape, torch.float32)

    def attend(factor, backend="triton", dtype=torch.float32):
        k_slc = inputs.k_slc.clone()
        k_slc[:, 265] *= factor
        with torch.no_grad():
            return nsa_attention(*inputs._replace(k_slc=k_slc).to(dtype).tensors, geometry=shape.geometry, backend=backend)

    before, after, exact = attend(1), attend(1000), attend(1000, "sdpa", torch.float64)
    assert torch.equal(before[:, :265], after[:, :265])
    assert not torch.equal(before[:, 265:], after[:, 265:])
    assert max_error(after, exact) <= allowed_error(exact, torch.bfloat16)


@pytest.mark.usefixtures("simulated")
def test_a_row_whose_first_scores_are_minus_infinity_is_exact():
    inputs = make_inputs(shape_of(300, heads=(1, 1)), torch.float32)
    q, k = inputs.q.abs(), inputs.k_win.clone()
    # the last key of the tile in which row 255 sees its first ones, and the only one of that tile for it
    k[:, 106:128] = float("-inf")
    found = sliding_window_attention(q, k, inputs.v_win, geometry=GEOMETRY, backend="triton")
    exact = sliding_window_attention(q.double(), k.double(), inputs.v_win.double(), geometry=GEOMETRY, backend="sdpa")
    seen = exact.lse.isfinite()
    assert torch.equal(found.lse.isfinite(), seen)
    assert max_error(found.lse[seen], exact.lse[seen]) <= allowed_error(exact.lse[seen], torch.float32)
    assert max_error(found.out[seen], exact.out[seen]) <= allowed_error(exact.out[seen], torch.float32)


@pytest.mark.usefixtures("simulated")
def test_a_dominant_weight_cancels_out_however_it_was_rounded():
    inputs = make_inputs(shape_of(200, (128, 128), (16, 1)), torch.float32)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (inputs.q, inputs.k_win))
    # one late key has all of the weight, some powers of two above the first ones
    q[..., 0], k[..., 0] = 20.0, 0.0
    k[:, 190, :, 0] = 12.0
    q, k, v = (x.bfloat16() for x in (q, k, inputs.v_win))
    out = sliding_window_attention(q, k, v, geometry=GEOMETRY, backend="triton").out.float()[0, 190:]
    value = v[0, 190, 0].float()
    # the rounding of single outputs averages out
    factor = (out * value).sum(-1) / value.square().sum()
    assert (factor - 1).abs().max() <= 2**-11


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_float16_keeps_running_maxima(dtype, simulated):
    inputs = make_inputs(shape_of(150, heads=(2, 1)), torch.float32)
    q, k, v = (x.to(dtype) for x in (inputs.q, inputs.k_win, inputs.v_win))
    found = sliding_window_attention(q, k, v, geometry=GEOMETRY, backend="triton")
    exact = sliding_window_attention(q.double(), k.double(), v.double(), geometry=GEOMETRY, backend="sdpa")
    assert simulated["forward_kernels", "forward_kernel"].constants["OPTIMISTIC"] == (dtype is torch.float32)
    assert max_error(found.out, exact.out) <= allowed_error(exact.out, dtype)


@pytest.mark.parametrize("attend", [sliding_window_attention, compressed_attention])
def test_lse_has_a_gradient_too(attend, simulated):
    inputs = make_inputs(shape_of(150, heads=(2, 1)), torch.float32)
    names = ("q", "k_win", "v_win") if attend is sliding_window_attention else ("q", "k_cmp", "v_cmp")

    def gradients(backend):
        leaves = [getattr(inputs, name).clone().requires_grad_() for name in names]
        found = attend(*leaves, geometry=GEOMETRY, backend=backend)
        seen = found.lse.isfinite()
        return torch.autograd.grad(found.out.sum() + found.lse[seen].square().sum(), leaves)

    for ours, exact in zip(gradients("triton"), gradients("sdpa"), strict=True):
        assert max_error(ours, exact.double()) <= allowed_error(exact.double(), torch.float32)
    assert simulated["forward_kernels", "forward_kernel"].num_launches


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("size", [300, pytest.param(1e5, marks=pytest.mark.slow), 1e18])
@pytest.mark.parametrize(
    ("branch", "head_dims"), [("cmp", (64, 64)), ("win", (64, 64)), ("win", (192, 128)), ("slc", (64, 64)), ("slc", (192, 128))]
)
def test_weights_are_right_where_lse_is_some_roundings_off(branch, head_dims, size, extremes):
    shape = shape_of(140, head_dims, (2, 1))
    inputs = extremes.scaled(make_inputs(shape, torch.float32), size)
    indices = random_block_indices(shape)
    extremes.assert_gradients_forgive_roundings(branch, inputs, indices, GEOMETRY, size)


@pytest.mark.usefixtures("simulated", "fused_products", "nan_buffers")
@pytest.mark.parametrize("size", [pytest.param(100, marks=pytest.mark.slow), 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("branch", "num_queries"), [("cmp", 40), ("win", 40), ("cmp", 200), ("win", 200), ("slc", 200)], ids=str)
def test_peaked_rows_are_as_exact_as_torchs_flash_attention(branch, num_queries, dtype, size, low_precision):
    # a peak's weight is 1 up to 2^-7, and dS of a row cancels only where its out is the value as it is
    shape = shape_of(num_queries, heads=(4, 1)) if num_queries > 40 else low_precision.SHAPES["wide"]
    low_precision.assert_as_exact_as_flash(branch, shape, dtype, size, size)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("size", [8e3, 1e4, 1e18])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("branch", ["cmp", "win"])
def test_huge_scores_leave_everything_finite(branch, dtype, size, extremes):
    # some rows' scores lie below 2^22: their weights come from an lse that is off by up to a quarter
    extremes.assert_huge_scores_are_right(branch, dtype, size)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("operands", [(1, 3, 5), (2, 4, 6)], ids=["keys", "values"])
@pytest.mark.parametrize(
    "head_dims", [(64, 64), pytest.param((128, 128), marks=pytest.mark.slow), pytest.param((192, 128), marks=pytest.mark.slow)], ids=str
)
def test_rows_without_a_gradient_give_none_whatever_their_keys_and_values_are(head_dims, operands, extremes):
    inputs = make_inputs(shape_of(200, head_dims, (16, 1)), torch.float32)
    extremes.assert_rows_without_a_gradient_give_none(inputs, operands, 3e38, GEOMETRY, 137)


@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("size", [1, 1e2])
def test_one_of_two_launches_of_the_backward_pass_works(head_dims, size, simulated, extremes):
    inputs = extremes.scaled(make_inputs(shape_of(230, head_dims, (2, 1)), torch.float32), size)
    leaves = [x.clone().requires_grad_() for x in inputs.tensors]
    nsa_attention(*leaves, geometry=GEOMETRY, backend="triton").sum().backward()
    last = "wide_kernels" if head_dims[0] > 128 else "selected_kernels"
    for name in (("dq_kernels", "dq_kernel"), ("dkdv_kernels", "dkdv_kernel"), (last, "backward_kernel")):
        launches = [(constants["EXTREME"], num_parted > 0) for constants, _, num_parted in simulated[name].launches]
        assert launches
        assert launches == [(False, size == 1), (True, size > 1)] * (len(launches) // 2), name


@pytest.mark.parametrize(("head_dims", "per_multiprocessor"), [((64, 64), 2), ((192, 128), 1)], ids=str)
def test_the_launch_for_extreme_rows_has_few_programs_that_share_the_items(head_dims, per_multiprocessor, simulated, extremes):
    inputs = extremes.scaled(make_inputs(shape_of(330, head_dims, (4, 2)), torch.float32), 1e2)
    leaves = [x.clone().requires_grad_() for x in inputs.tensors]
    nsa_attention(*leaves, geometry=GEOMETRY, backend="triton").sum().backward()
    last = "wide_kernels" if head_dims[0] > 128 else "selected_kernels"
    for name, most in ((("dkdv_kernels", "dkdv_kernel"), 3), ((last, "backward_kernel"), 3 * per_multiprocessor)):
        (_, usual, _), (constants, few, num_items) = simulated[name].launches[-2:]
        assert constants["EXTREME"]
        # the stand-in for a GPU has three multiprocessors
        assert few == most < num_items <= usual, name


@pytest.mark.parametrize(
    "shape",
    [
        SHAPES["packed"],
        shape_of(lengths=(20, 0, 1, 230), head_dims=(192, 128), heads=(2, 1)),
        # 9 heads do not divide a tile
        pytest.param(SHAPES["early"], marks=pytest.mark.slow),
    ],
    ids=["64", "192", "128"],
)
def test_the_loops_for_extreme_rows_equal_the_oracle_in_packed_rows(shape, simulated, monkeypatch):
    def flagged(*arguments):
        extremes = numerics.no_extremes(*arguments)
        extremes[..., 0] = 1
        return extremes

    monkeypatch.setattr(interval, "no_extremes", flagged)
    properties.check_agrees_with_oracle(shape, WHERE)
    computed = {name: {constants["EXTREME"] for constants, _, parted in simulated[name].launches if parted} for name in BACKWARD_KERNELS}
    idle = ("wide_kernels" if shape.head_dim_qk <= 128 else "selected_kernels", "backward_kernel")
    assert computed == {name: set() if name == idle else {True} for name in BACKWARD_KERNELS}


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128)], ids=str)
def test_extreme_scores_of_the_future_change_no_bit_of_past_gradients(head_dims):
    # one more query, and its keys, send the call through the loops of extreme rows
    length, seen = 230, 229
    inputs = make_inputs(shape_of(length, head_dims, (2, 1)), torch.float32)

    def evaluate(size):
        leaves = [x.clone() for x in inputs.tensors]
        leaves[0][:, seen:] *= size
        leaves = [x.requires_grad_() for x in leaves]
        out = nsa_attention(*leaves, geometry=GEOMETRY, backend="triton")
        return torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=torch.Generator().manual_seed(3)))[0]

    assert torch.equal(evaluate(1)[:, :seen], evaluate(1e6)[:, :seen])


@pytest.mark.parametrize("attend", [sliding_window_attention, compressed_attention])
def test_rows_of_extreme_scores_are_done_again(attend, simulated):
    kernel = simulated["forward_kernels", "forward_kernel"]
    inputs = make_inputs(shape_of(300, (128, 128), (16, 1)), torch.float32)
    is_window = attend is sliding_window_attention
    k, v = (inputs.k_win, inputs.v_win) if is_window else (inputs.k_cmp, inputs.v_cmp)
    found = attend(1e18 * inputs.q, 1e18 * k, v, geometry=GEOMETRY, backend="triton")
    assert kernel.arguments[5].any()
    exact = attend(1e18 * inputs.q.double(), 1e18 * k.double(), v.double(), geometry=GEOMETRY, backend="sdpa")
    assert max_error(found.out, exact.out) <= allowed_error(exact.out, torch.bfloat16)
    attend(inputs.q, k, v, geometry=GEOMETRY, backend="triton")
    assert not kernel.arguments[5].any()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("head_dims", [pytest.param((128, 128), marks=pytest.mark.slow), (192, 128)], ids=str)
def test_nan_reaches_the_rows_that_the_table_says(head_dims, extremes):
    shape = shape_of(200, head_dims, (16, 1))
    inputs, token, block = make_inputs(shape, torch.float32), 141, 7
    length, row_tile = shape.num_queries, pipelines.pipeline("window_forward", *head_dims).block_rows
    lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry=GEOMETRY, backend="sdpa").lse
    chosen = select_blocks(inputs.q, inputs.k_cmp, lse, geometry=GEOMETRY, backend="sdpa")[0, :, 0]
    chose = set((chosen == token // GEOMETRY.selection_block_size).any(-1).nonzero().flatten().tolist())
    sees = {
        "cmp": set(range(block * GEOMETRY.compression_stride + GEOMETRY.compression_block_size - 1, length)),
        "slc": {t for t in chose if t >= token},
        "win": set(range(token, min(token + GEOMETRY.window_size, length))),
    }
    assert sees["slc"] < chose
    assert len(chose) < length // 2
    for branch, rows in sees.items():
        for name in (f"k_{branch}", f"v_{branch}"):
            poisoned = extremes.poisoned(inputs, name, block if branch == "cmp" else token, math.nan)
            with torch.no_grad():
                out = nsa_attention(*poisoned.tensors, geometry=GEOMETRY, backend="triton")
            bad = set((~out.isfinite().all(-1)[0]).any(1).nonzero().flatten().tolist())
            of_tiles = extremes.rows_of_tile(chose if branch == "slc" else rows, length, row_tile, shape.num_heads)
            if branch == "slc":
                # neighbours attend together to some blocks, by lists to others
                assert rows <= bad <= of_tiles
            else:
                assert bad == (rows if name.startswith("k") else of_tiles), name
