"""The SDPA reference against the oracle, and as torch sees it: custom op, compiled, checkpointed, in bounded memory."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from nsa_core import (
    BackendRegistry,
    BlockGeometry,
    Capability,
    LayerTelemetry,
    Layout,
    NativeSparseAttention,
    NSAConfig,
    Operation,
    attend,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from nsa_core.backends.base import Keys, Queries
from nsa_core.compression import build_compressor
from nsa_core.errors import InputError
from nsa_core.gating import gated_sum, gates_from_logits
from nsa_core.operands import keys_of, queries_of
from nsa_core.reference import branches, naive, padded, sdpa, tiles
from nsa_core.reference.causal import causal_attention
from nsa_core.testing import conformance, masks
from nsa_core.testing.cases import MOSTLY_SHORT, STEP_ROWS, Case, cases, paged
from nsa_core.testing.conformance import check_backend
from nsa_core.testing.inputs import SMALL, Shape, make_inputs, random_block_indices
from nsa_core.testing.tolerances import allowed_error, max_error, relative_error

LAYER = NSAConfig(16, 4, 2, 8, 6, geometry=SMALL, gate_hidden_size=8)


OWN_TRIALS = {Operation.ROTATE: 32, Operation.APPEND: 216, Operation.CHOOSE: 100}
"""The least cases that pass of operations whose cases do not come from `cases`."""


def trials() -> Iterator[Any]:
    """Yield each backend with the dtypes of its cases; two of four are in the slow tier, and one operation has float16 in CI."""
    for backend in sdpa.sdpa_backends():
        name = backend.operation.value
        if backend.operation in OWN_TRIALS:
            yield pytest.param(backend, (), id=name)
            continue
        half = (torch.bfloat16, torch.float16) if backend.operation is Operation.SLC else (torch.bfloat16,)
        yield pytest.param(backend, (torch.float64, *half), id=name)
        # test_properties.py has float32 in CI
        yield pytest.param(backend, (torch.float32, torch.float16), id=f"{name}, other dtypes", marks=pytest.mark.slow)


@pytest.mark.parametrize(("backend", "dtypes"), list(trials()))
def test_every_operation_conforms_to_the_oracle(
    backend: sdpa.SDPABackend, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "cases", partial(cases, dtypes=dtypes))
    report = check_backend(backend)
    # a rotation has heads, rows, dtypes and scalings to vary, and no geometry
    assert len(report.passed) >= OWN_TRIALS.get(backend.operation, 50)
    assert not report.declined
    if backend.operation is Operation.SELECT:
        # scores decide a quarter of the kit's choices, and nearly all of those are compared
        assert report.decided >= sum(num_choices(case) for case in cases(dtypes=dtypes) if case.concerns(Operation.SELECT)) / 4
        assert report.near_ties <= 0.03 * report.decided
        assert f"{report.near_ties} of {report.decided} rows near a tie" in str(report)


def num_choices(case: Case) -> int:
    """Return the choices of a case: one per query row and KV head."""
    rows = STEP_ROWS if case.is_step else case.shape.total
    return rows * case.shape.num_kv_heads * (1 if case.shape.lengths else case.shape.batch)


@pytest.mark.slow
def test_gathered_blocks_in_one_row_steps_conform_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.SCRATCH_BYTES, "cpu", 1)
    monkeypatch.setattr(branches, "MASKED_RATIO", 0)
    geometry = evolve(SMALL, num_selected_blocks=3, window_size=5)
    assert check_backend(sdpa.SDPABackend(operation=Operation.SLC), geometry=geometry).passed


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(backend, marks=() if backend.operation in (Operation.SELECT, Operation.SLC) else pytest.mark.slow)
        for backend in sdpa.sdpa_backends()
        if backend.operation not in OWN_TRIALS
    ],
    ids=lambda backend: backend.operation.value,
)
def test_packed_rows_that_are_not_padded_conform_too(backend: sdpa.SDPABackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded, "MAX_PADDING", 0)
    # other rows are never padded
    of_packed_rows = evolve(backend, capability=evolve(backend.capability, layouts=(Layout.PACKED,)))
    assert {case.partition(" ")[2].split(",")[0] for case in check_backend(of_packed_rows).passed} >= {"packed", *MOSTLY_SHORT}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_large_logits_stay_as_accurate_as_torch_in_low_precision(dtype: torch.dtype) -> None:
    inputs = make_inputs(Shape(num_queries=64, head_dim_qk=16))
    q, k, v = (x.to(dtype) for x in (50 * inputs.q, inputs.k_win, inputs.v_win))
    exact = naive.sliding_window_attention(q.double(), k.double(), v.double(), geometry=SMALL).out
    torch_error = max_error(masks.math_attention(q, k, v, masks.window_mask(64, SMALL)), exact)
    out = sliding_window_attention(q, k, v, geometry=SMALL).out
    assert max_error(out, exact) <= allowed_error(exact, dtype, torch_error)


def operands(branch: str, shape: Shape, device: str = "cpu") -> tuple[Any, ...]:
    """Return the operands of a branch that require gradients: Queries, Keys, and the choice of the selected branch."""
    inputs = make_inputs(shape, torch.float32, device).with_grad()
    pairs = {"_cmp": (inputs.k_cmp, inputs.v_cmp), "_slc": (inputs.k_slc, inputs.v_slc), "_win": (inputs.k_win, inputs.v_win)}
    queries = queries_of(inputs.q, inputs.cu_seqlens)
    keys = keys_of(queries, {f"_{branch}": pairs[f"_{branch}"]}, shape.geometry)
    return queries, keys[f"_{branch}"], *([random_block_indices(shape, device=device)] if branch == "slc" else [])


def flat(*operands: Any) -> list[Any]:
    """Return operands field by field, as the custom op takes them."""
    return [x for operand in operands for x in (operand if isinstance(operand, tuple) else (operand,))]


@pytest.mark.parametrize("shape", [Shape(num_queries=21), Shape(lengths=(9, 0, 12))], ids=["dense", "packed"])
@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_the_branches_pass_opcheck(branch: str, shape: Shape) -> None:
    op = getattr(torch.ops.nsa_core, f"sdpa_{branch}").default
    results = torch.library.opcheck(op, (*flat(*operands(branch, shape)), list(shape.geometry.as_tuple()), 0.3, True))
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


@pytest.mark.parametrize(("absent", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (2, torch.float64)])
def test_the_gated_sum_passes_opcheck(absent: int, dtype: torch.dtype) -> None:
    outputs = [None if place == absent else torch.randn(1, 5, 2, 3, dtype=dtype, requires_grad=True) for place in range(3)]
    results = torch.library.opcheck(gated_sum, (torch.rand(1, 5, 2, 3, requires_grad=True), *outputs))
    assert set(results.values()) == {"SUCCESS"}


def test_the_choice_passes_opcheck() -> None:
    inputs = make_inputs(Shape(num_queries=41), torch.float32)
    lse = torch.zeros(inputs.q.shape[:3])
    queries, cmp = Queries(inputs.q, 41), Keys(inputs.k_cmp, inputs.k_cmp, inputs.k_cmp.shape[1])
    arguments = (*flat(queries, cmp, lse), list(SMALL.as_tuple()), 0.3, False)
    assert set(torch.library.opcheck(torch.ops.nsa_core.sdpa_select.default, arguments).values()) == {"SUCCESS"}


def compiled_equals_eager(layer: nn.Module, x: Tensor, backend: str, **options: Any) -> None:
    """Assert equal outputs and gradients of one graph without breaks."""
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = compiled(ours, **options), layer(theirs, **options)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_the_layer_compiles_to_one_graph_and_serves_other_lengths() -> None:
    layer = NativeSparseAttention(LAYER)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (40, 41, 57):
        x = torch.randn(2, length, 16)
        torch.testing.assert_close(compiled(x), layer(x))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert compiled(torch.randn(2, 63, 16)).shape == (2, 63, 16)


def test_the_layer_compiles_packed_and_backward() -> None:
    cu_seqlens = torch.tensor([0, 13, 40], dtype=torch.int32)
    compiled_equals_eager(NativeSparseAttention(LAYER), torch.randn(1, 40, 16), "aot_eager", cu_seqlens=cu_seqlens)


def test_a_cached_prefill_and_steps_compile_to_graphs_without_breaks() -> None:
    layer, x = NativeSparseAttention(LAYER), torch.randn(2, 40, 16)
    cache = layer.new_cache(2, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        pieces = [compiled(x[:, :36], cache=cache), *(compiled(x[:, t : t + 1], cache=cache) for t in range(36, 40))]
        torch.testing.assert_close(torch.cat(pieces, 1), layer(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_the_layer_compiles_with_inductor() -> None:
    compiled_equals_eager(NativeSparseAttention(LAYER), torch.randn(2, 40, 16), "inductor")


@pytest.mark.parametrize("dynamic", [None, True], ids=["", "symbolic sizes"])
@pytest.mark.parametrize("operation", ["cmp", "select", "slc", "win"])
def test_every_public_operation_compiles_to_one_graph(operation: str, dynamic: bool | None) -> None:
    inputs = make_inputs(Shape(num_queries=24), torch.float32)
    indices = random_block_indices(Shape(num_queries=24))
    lse = torch.zeros(inputs.q.shape[:3])
    calls = {
        "cmp": lambda q: compressed_attention(q, inputs.k_cmp, inputs.v_cmp, geometry=SMALL).out,
        "select": lambda q: select_blocks(q, inputs.k_cmp, lse, geometry=SMALL),
        "slc": lambda q: selected_attention(q, inputs.k_slc, inputs.v_slc, indices, geometry=SMALL).out,
        "win": lambda q: sliding_window_attention(q, inputs.k_win, inputs.v_win, geometry=SMALL, backend="sdpa").out,
    }
    compiled = torch.compile(calls[operation], fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(inputs.q), calls[operation](inputs.q))


class TokensToOutput(nn.Module):
    """phi, the attention and the gates of raw tensors: everything that gradients pass through."""

    def __init__(self, compressor: str, gate: str) -> None:
        super().__init__()
        self.gate = gate
        torch.manual_seed(3)
        self.phi_k = build_compressor(compressor, 1, 4, SMALL).double()  # type: ignore[arg-type]
        self.phi_v = build_compressor(compressor, 1, 3, SMALL).double()  # type: ignore[arg-type]
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def compressed(self, x: Tensor, phi: nn.Module) -> Tensor:
        windows = x.unfold(1, SMALL.compression_block_size, SMALL.compression_stride).movedim(-1, 2)
        return phi(windows)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, k_slc: Tensor, v_slc: Tensor, k_win: Tensor, v_win: Tensor, logits: Tensor
    ) -> Tensor:
        has_compressed = torch.arange(q.shape[1]).expand(q.shape[:2]) >= SMALL.compression_block_size - 1
        gates = gates_from_logits(logits, has_compressed, kind=self.gate)  # type: ignore[arg-type]
        k_cmp, v_cmp = self.compressed(k, self.phi_k), self.compressed(v, self.phi_v)
        return nsa_attention(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, geometry=SMALL, backend="sdpa")


def draw_tokens(seed: int) -> list[Tensor]:
    """Return float64 leaves for `TokensToOutput`."""
    length, generator = 45, torch.Generator().manual_seed(seed)
    sizes = [(1, length, 2, 4), *[(1, length, 1, 4), (1, length, 1, 3)] * 3, (1, length, 2, 3)]
    return [torch.randn(size, dtype=torch.float64, generator=generator, requires_grad=True) for size in sizes]


@torch.no_grad()
def smallest_margin(model: TokensToOutput, inputs: list[Tensor]) -> float:
    """Return the smallest distance between a chosen free block's score and the next one's."""
    k_cmp, v_cmp = model.compressed(inputs[1], model.phi_k), model.compressed(inputs[2], model.phi_v)
    lse = naive.compressed_attention(inputs[0], k_cmp, v_cmp, geometry=SMALL).lse
    return float(naive.selection_margin(inputs[0], k_cmp, lse, geometry=SMALL).min())


@pytest.mark.parametrize(("compressor", "gate"), [("mlp", "sigmoid"), ("conv", "softmax")])
def test_gradcheck_through_the_whole_operation(compressor: str, gate: str) -> None:
    model = TokensToOutput(compressor, gate)
    inputs = next(drawn for drawn in map(draw_tokens, range(100)) if smallest_margin(model, drawn) > 1e-3)
    # a step of 1e-6 must not change a choice
    assert 1e-3 < smallest_margin(model, inputs) < float("inf")
    names = [name for name, _ in model.named_parameters()]

    def call(*tensors: Tensor) -> Tensor:
        parameters = dict(zip(names, tensors[8:], strict=True))
        return torch.func.functional_call(model, parameters, tensors[:8])

    assert torch.autograd.gradcheck(call, (*inputs, *model.parameters()), fast_mode=True)


def test_the_gradient_of_lse_is_exact() -> None:
    inputs = make_inputs(Shape(num_queries=19, num_heads=2, num_kv_heads=1)).with_grad()
    q, k, v = inputs.q, inputs.k_win, inputs.v_win
    assert torch.autograd.gradcheck(lambda *x: tuple(sliding_window_attention(*x, geometry=SMALL)), (q, k, v), fast_mode=True)


def test_activation_checkpointing_leaves_every_gradient_as_it_is() -> None:
    layer = NativeSparseAttention(LAYER)
    x = torch.randn(2, 40, 16)
    gradients = []
    for checkpointed in (False, True):
        layer.zero_grad()
        if checkpointed:
            torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
        else:
            layer(x).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in layer.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_the_dense_compressed_branch_equals_the_definition_with_a_mask(dtype: torch.dtype) -> None:
    shape = Shape(num_queries=61, head_dim_v=8, batch=2)
    inputs = make_inputs(shape, dtype)
    exact = inputs.to(torch.float64)
    mask = masks.compressed_mask(61, shape.num_blocks, SMALL)
    expected = masks.math_attention(exact.q, exact.k_cmp, exact.v_cmp, mask)
    out = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry=SMALL).out
    torch_error = max_error(masks.math_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, mask), expected)
    assert max_error(out, expected) <= allowed_error(expected, dtype, torch_error)


def test_a_paged_store_gives_what_its_pages_in_order_give() -> None:
    shape = Shape(num_queries=48, batch=2)
    inputs = make_inputs(shape)
    page, pages = 16, 3
    order = torch.tensor([[4, 0, 3], [1, 5, 2]], dtype=torch.int32)

    def paged(x: Tensor, rows: int) -> Tensor:
        padded = torch.cat([x, x.new_zeros(2, pages * rows - x.shape[1], *x.shape[2:])], 1).unflatten(1, (pages, rows))
        store = padded.new_zeros(6, *padded.shape[2:])
        store[order.long()] = padded
        return store

    stores = [paged(x, page // SMALL.compression_stride if place < 2 else page) for place, x in enumerate(inputs.tensors[1:7])]
    query_start = torch.tensor([40, 20], dtype=torch.int32)
    index = query_start.long().unsqueeze(1) + torch.arange(8)
    batch = torch.arange(2).unsqueeze(1)
    q, gates = inputs.q[batch, index], inputs.gates[batch, index]
    out = nsa_attention(q, *stores, gates, geometry=SMALL, query_start=query_start, page_table=order)
    whole = nsa_attention(*inputs.tensors, geometry=SMALL)
    assert relative_error(out, whole[batch, index]) < 1e-12


@pytest.mark.parametrize("holds", ["the whole sequences", "their last tokens", "a ring of them"])
def test_a_window_alone_attends_over_a_cache(holds: str) -> None:
    inputs, rows, tail = make_inputs(Shape(num_queries=40, batch=2)), 6, SMALL.window_size - 1
    absent = (None, None, None, None)
    whole = nsa_attention(inputs.q, *absent, inputs.k_win, inputs.v_win, inputs.gates, geometry=SMALL)
    start = torch.tensor([33, 20], dtype=torch.int32)
    batch, index = torch.arange(2).unsqueeze(1), start.long().unsqueeze(1) + torch.arange(rows)
    win = Keys(inputs.k_win, inputs.v_win, 40)
    if holds != "the whole sequences":
        remembered = start.long().unsqueeze(1) - tail + torch.arange(tail + rows)
        win = Keys(inputs.k_win[batch, remembered], inputs.v_win[batch, remembered], tail + rows, first=start - tail)
    if holds == "a ring of them":
        slots = remembered.remainder(tail + rows)[..., None, None]
        rings = (torch.empty_like(x).scatter_(1, slots.expand_as(x), x) for x in (win.k, win.v))
        win = Keys(*rings, 40, ring=True)
    out = attend(Queries(inputs.q[batch, index], rows, start=start), None, None, win, inputs.gates[batch, index], geometry=SMALL)
    assert relative_error(out, whole[batch, index]) < 1e-12
    if holds == "the whole sequences":
        step = (inputs.q[batch, index], *absent, inputs.k_win, inputs.v_win, inputs.gates[batch, index])
        assert relative_error(nsa_attention(*step, geometry=SMALL, query_start=start), whole[batch, index]) < 1e-12


def test_the_compressed_branch_alone_attends_over_a_cache() -> None:
    inputs = make_inputs(Shape(num_queries=40, batch=2))
    start, absent = torch.tensor([33, 20], dtype=torch.int32), (None, None, None, None)
    batch, index = torch.arange(2).unsqueeze(1), start.long().unsqueeze(1) + torch.arange(6)
    whole = nsa_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, *absent, inputs.gates, geometry=SMALL)
    step = (inputs.q[batch, index], inputs.k_cmp, inputs.v_cmp, *absent, inputs.gates[batch, index])
    assert relative_error(nsa_attention(*step, geometry=SMALL, query_start=start), whole[batch, index]) < 1e-12


def test_a_window_of_the_last_tokens_stands_beside_pages() -> None:
    inputs, tail, size = make_inputs(Shape(num_queries=40, batch=2)), SMALL.window_size - 1, SMALL.selection_block_size
    start = torch.tensor([33, 20], dtype=torch.int32)
    batch, index = torch.arange(2).unsqueeze(1), start.long().unsqueeze(1) + torch.arange(6)
    remembered = start.long().unsqueeze(1) - tail + torch.arange(tail + 6)
    order = torch.tensor([[4, 0, 3, 9, 7], [1, 5, 2, 6, 8]], dtype=torch.int32)
    pages = [paged(x, order, size // SMALL.compression_stride if place < 2 else size) for place, x in enumerate(inputs.tensors[1:5])]
    cmp = Keys(*pages[:2], (40 - SMALL.compression_block_size) // SMALL.compression_stride + 1, page_table=order)
    slc = Keys(*pages[2:], 40, page_table=order)

    def step(k_win: Tensor, v_win: Tensor, **options: Any) -> Tensor:
        win = Keys(k_win, v_win, k_win.shape[1], first=start - tail)
        return attend(Queries(inputs.q[batch, index], 6, start=start), cmp, slc, win, inputs.gates[batch, index], geometry=SMALL, **options)

    window = (inputs.k_win[batch, remembered], inputs.v_win[batch, remembered])
    assert relative_error(step(*window), nsa_attention(*inputs.tensors, geometry=SMALL)[batch, index]) < 1e-12
    # pages have no batch, the window has
    with pytest.raises(InputError, match="k_win"):
        step(*(torch.cat([x, x[:1]]) for x in window))
    # a fused backend is also considered with a cache
    registry = BackendRegistry((*sdpa.sdpa_backends(), WholeOperation()))
    with pytest.raises(AssertionError, match="asked for"):
        step(*window, registry=registry)


@frozen
class WholeOperation:
    """A fused backend that records when routing considers it."""

    name: str = "whole"
    operation: Operation = Operation.NSA
    capability: Capability = Capability()

    def reasons_against(self, request: Any) -> tuple[Any, ...]:
        return ()

    def preference(self, request: Any) -> int:
        return 1

    def __call__(self, *operands: Any, **options: Any) -> Tensor:
        raise AssertionError("it was asked for")


def test_keys_that_end_before_the_last_row_are_refused_of_a_window_alone() -> None:
    inputs = make_inputs(Shape(num_queries=40))
    step = (inputs.q[:, :6], None, None, None, None, inputs.k_win, inputs.v_win, inputs.gates[:, :6])
    with pytest.raises(InputError, match="reaches 41 of 40 cached tokens"):
        nsa_attention(*step, geometry=SMALL, query_start=torch.tensor([35], dtype=torch.int32))


def test_surplus_blocks_may_hold_nan_in_a_dense_batch_too() -> None:
    inputs = make_inputs(Shape(num_queries=40, surplus_blocks=3)).with_grad()
    nsa_attention(*inputs.tensors, geometry=SMALL).sum().backward()
    assert inputs.k_cmp.grad is not None
    assert not inputs.k_cmp.grad[:, -3:].any()
    assert inputs.k_cmp.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_shows_in_the_rows_that_see_it_and_in_no_other_sequence(dtype: torch.dtype) -> None:
    inputs = make_inputs(Shape(num_queries=24, batch=2), dtype)
    for place in (3, 4, 5, 6):
        broken = list(inputs.tensors)
        broken[place] = broken[place].clone()
        broken[place][0, 5] = float("nan")
        out = nsa_attention(*broken, geometry=SMALL)
        assert out[0, 5].isnan().all()
        assert out[1].isfinite().all()


@pytest.mark.parametrize("place", range(5), ids=["q", "k", "v", "dout", "dlse"])
@pytest.mark.parametrize("head_dim_v", [8, 6], ids=["fused", "separate products"])
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), 3e38])
def test_rubbish_reaches_the_rows_and_keys_that_see_it_alone(rubbish: float, head_dim_v: int, place: int) -> None:
    inputs = make_inputs(Shape(num_queries=40, head_dim_v=head_dim_v), torch.float32)
    token, window = 21, SMALL.window_size
    dout = torch.ones(1, 40, 4, head_dim_v)
    # a gradient of lse excludes the fused operator
    tensors = [inputs.q, inputs.k_win, inputs.v_win, dout] + [torch.ones(1, 40, 4)] * (place == 4)
    results = []
    for value in (None, rubbish):
        drawn = [x.detach().clone() for x in tensors]
        if value is not None:
            # of the first KV head, whose query heads are the first two
            drawn[place][0, token, 0] = value
        leaves = [x.requires_grad_() for x in drawn[:3]]
        out, lse = sliding_window_attention(*leaves, geometry=SMALL)
        gradients = torch.autograd.grad((out, lse)[: len(drawn) - 3], leaves, drawn[3:])
        results.append((out.detach(), *gradients))
    is_key, is_row = place in (1, 2), place in (0, 3, 4)
    rows = range(token, token + window) if is_key else [token]
    keys = range(token - window + 1, token + (window if is_key else 1))
    heads = [0] if is_row else [0, 1]
    # gradients of out and lse come after them
    reached = {"out": rows if place < 3 else [], "dq": rows, "dk": keys, "dv": keys if place < 4 else []}
    for (name, places), plain, broken in zip(reached.items(), *results, strict=True):
        differs = torch.zeros(plain.shape[1:3], dtype=torch.bool)
        for head in [0] if name in ("dk", "dv") else heads:
            differs[list(places), head] = True
        assert torch.equal(plain[0][~differs], broken[0][~differs]), name
        if (name, place) == ("dv", 2):
            # dv does not depend on v: its rows may be summed in another order, no more
            torch.testing.assert_close(plain, broken)
        elif not rubbish < float("inf"):
            assert (~broken[0][differs].isfinite()).any(-1).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
@pytest.mark.parametrize("layout", ["dense", "cached"])
def test_rows_that_see_nothing_pass_no_gradient_on(branch: str, layout: str, dtype: torch.dtype) -> None:
    shape = Shape(num_queries=40, head_dim_v=8)
    inputs = make_inputs(shape, dtype)
    counts = {"query_count": torch.tensor([17], dtype=torch.int32)} if layout == "cached" else {}
    indices = random_block_indices(shape, holes=True)
    if counts:
        indices[:, 17:] = -1
    calls: dict[str, Any] = {
        "cmp": (compressed_attention, inputs.k_cmp, inputs.v_cmp),
        "slc": (selected_attention, inputs.k_slc, inputs.v_slc, indices),
        "win": (sliding_window_attention, inputs.k_win, inputs.v_win),
    }
    operation, k, v, *rest = calls[branch]
    leaves = [x.detach().requires_grad_() for x in (inputs.q, k, v)]
    out, lse = operation(*leaves, *rest, geometry=SMALL, **counts)
    empty = (lse == float("-inf")).detach()
    if counts:
        assert empty[:, 17:].all()
        assert not out[:, 17:].any()
    for result, others in ((out, empty.unsqueeze(-1)), (lse, empty)):
        gradients = torch.autograd.grad(result, leaves, others.to(result).expand_as(result).clone(), retain_graph=True)
        assert not any(x.any() for x in gradients)
    assert bool(empty.any()) is (branch != "win" or layout == "cached")


def test_rows_beyond_the_count_may_hold_nan() -> None:
    inputs = make_inputs(Shape(num_queries=24)).with_grad()
    count = torch.tensor([17], dtype=torch.int32)
    with torch.no_grad():
        inputs.q[:, 17:], inputs.gates[:, 17:] = float("nan"), float("nan")
    out = nsa_attention(*inputs.tensors, geometry=SMALL, query_count=count)
    assert not out[:, 17:].any()
    out.sum().backward()
    for x in inputs.tensors:
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("lengths", [(8, 8, 8), (9, 1, 14)], ids=["equal lengths", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_in_one_packed_sequence_stays_out_of_the_others(dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    shape = Shape(lengths=lengths)
    inputs = make_inputs(shape, dtype)
    own = slice(lengths[0], lengths[0] + lengths[1])
    for place in range(3, 7):
        broken = inputs.with_grad()
        with torch.no_grad():
            broken.tensors[place][:, own] = float("nan")
        out = nsa_attention(*broken.tensors, geometry=SMALL, cu_seqlens=inputs.cu_seqlens)
        out.nansum().backward()
        assert out[:, own].isnan().all()
        for x in (out, *(tensor.grad for tensor in (broken.q, broken.k_slc, broken.v_slc, broken.k_win, broken.v_win))):
            assert x is not None
            assert x[:, : own.start].isfinite().all()
            assert x[:, own.stop :].isfinite().all()


@pytest.mark.parametrize("kind", ["strided", "expanded"])
@pytest.mark.parametrize("operand", range(4), ids=["q", "k", "v", "dout"])
@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_rows_whose_numbers_are_not_side_by_side_give_the_same(branch: str, operand: int, kind: str) -> None:
    queries, keys, *choice = operands(branch, Shape(num_queries=40, head_dim_v=8))
    tensors = [x.detach() for x in (queries.q, keys.k, keys.v, torch.randn(queries.q.shape))]
    if kind == "expanded":
        tensors[operand] = tensors[operand][..., :1].expand_as(tensors[operand])
    results = []
    for is_plain in (False, True):
        drawn = list(tensors)
        if is_plain:
            drawn[operand] = tensors[operand].contiguous()
        elif kind == "strided":
            drawn[operand] = tensors[operand].transpose(1, 3).contiguous().transpose(1, 3)
        assert (drawn[operand].stride(-1) == 1) is is_plain
        leaves = [x.requires_grad_() for x in drawn[:3]]
        moved = (queries._replace(q=leaves[0]), keys._replace(k=leaves[1], v=leaves[2]), *choice)
        out, _ = sdpa.COMPUTE[Operation(branch)](*moved, geometry=SMALL, scale=0.3)
        results.append((out, *torch.autograd.grad(out, leaves, drawn[3])))
    for plain, strided in zip(*results, strict=True):
        assert torch.equal(plain, strided)


@pytest.mark.parametrize("length", [0, 1, 7])
@pytest.mark.parametrize("batch", [0, 1])
def test_short_and_empty_batches_give_shapes_zeros_and_gradients(batch: int, length: int) -> None:
    inputs = make_inputs(Shape(batch=batch, num_queries=length)).with_grad()
    compressed = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry=SMALL)
    assert not compressed.out.any()
    assert (compressed.lse == float("-inf")).all()
    out = nsa_attention(*inputs.tensors, geometry=SMALL)
    assert out.shape == (batch, length, 4, 6)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs.tensors)


def test_low_precision_gradients_of_rows_that_see_nothing_are_zero() -> None:
    shape = Shape(num_queries=30)
    inputs = make_inputs(shape, torch.bfloat16).with_grad()
    nothing = torch.full((1, 30, 2, 3), -1, dtype=torch.int32)
    result = selected_attention(inputs.q, inputs.k_slc, inputs.v_slc, nothing, geometry=SMALL)
    assert not result.out.any()
    assert (result.lse == float("-inf")).all()
    result.out.sum().backward()
    assert inputs.q.grad is not None
    assert not inputs.q.grad.any()


@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_scratch_stays_within_its_bound(branch: str) -> None:
    """Every step's largest buffers, whatever the length: scores and gathered keys of one step stay under 256 MiB."""
    shape = Shape(geometry=BlockGeometry(), num_queries=16384, num_heads=16, num_kv_heads=1, head_dim_qk=64, head_dim_v=64)
    largest = 0
    for tile in dense_tiles(branch, shape, torch.zeros(1, 16384, 1, 16, dtype=torch.int32), shape.geometry):
        rows = tile.tiles * tile.rows
        keys = tile.visible.shape[-1]
        gathered = 2 * tile.tiles * keys * 128 * 4 if branch != "cmp" else 0
        largest = max(largest, 3 * rows * 16 * keys * 4 + gathered)
    assert 0 < largest <= 256 * 2**20


def dense_tiles(branch: str, shape: Shape, indices: Tensor, geometry: BlockGeometry) -> Any:
    """Return the tiles of a branch of a dense batch of one sequence."""
    q, k, v = make_meta(shape)
    extents = Queries(q, shape.num_queries), Keys(k, v, shape.num_queries)
    if branch == "slc":
        return branches.selected_tiles(*extents, indices, geometry)
    return (branches.window_tiles if branch == "win" else branches.compressed_tiles)(*extents, geometry)


def make_meta(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v of one branch without memory behind their elements."""
    q = torch.zeros(1).expand(1, shape.total, shape.num_heads, shape.head_dim_qk)
    k = torch.zeros(1).expand(1, shape.total, shape.num_kv_heads, shape.head_dim_qk)
    return q, k, k


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thirty_two_thousand_tokens_in_eight_gibibytes_and_three_minutes() -> None:
    """S = 32,768, H = 4, G = 1, D = 64, float32, forward and backward; measured in a fresh process."""
    import json
    import subprocess
    import sys

    script = """
import json, resource, time
import torch
from nsa_core import BlockGeometry, nsa_attention
from nsa_core.testing.inputs import Shape, make_inputs
shape = Shape(geometry=BlockGeometry(), num_queries=32768, num_heads=4, num_kv_heads=1, head_dim_qk=64, head_dim_v=64)
inputs = make_inputs(shape, torch.float32).with_grad()
start = time.perf_counter()
nsa_attention(*inputs.tensors, geometry=shape.geometry).sum().backward()
seconds = time.perf_counter() - start
finite = all(bool(x.grad.isfinite().all()) for x in inputs.tensors)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "finite": finite}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    print(measured)
    assert measured["finite"]
    assert measured["peak_bytes"] < 8 * 2**30
    assert measured["seconds"] < 180


def test_the_causal_helper_refuses_unequal_lengths() -> None:
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 5, 2, 4)
    with pytest.raises(InputError, match="q has 1 rows, k has 5"):
        causal_attention(q, k, k)


@pytest.mark.parametrize("scale", [None, 0.7, 0.0, -0.3])
@pytest.mark.parametrize("head_dim_v", [8, 6])
def test_the_causal_helper_equals_the_oracle(head_dim_v: int, scale: float | None) -> None:
    inputs = make_inputs(Shape(num_queries=23, head_dim_v=head_dim_v))
    expected = naive.dense_attention(inputs.q, inputs.k_win, inputs.v_win, scale=scale).out
    assert relative_error(causal_attention(inputs.q, inputs.k_win, inputs.v_win, scale=scale), expected) < 1e-12


def test_the_telemetry_names_the_backend_that_ran() -> None:
    layer = NativeSparseAttention(LAYER)
    layer.telemetry = LayerTelemetry()
    layer(torch.randn(1, 30, 16))
    assert layer.telemetry.routes == dict.fromkeys(("cmp", "select", "slc", "win"), "sdpa")


@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_tiles_cover_every_row_that_sees_something_exactly_once(branch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.SCRATCH_BYTES, "cpu", 2**16)
    shape = Shape(num_queries=401)
    steps = list(dense_tiles(branch, shape, torch.zeros(1, 401, 2, 3, dtype=torch.int32), SMALL))
    covered = [(tile.start, tile.start + tile.tiles * tile.rows) for tile in steps]
    assert len(steps) > 1
    assert covered[0][0] == (SMALL.compression_block_size - 1 if branch == "cmp" else 0)
    assert covered[-1][1] == 401
    assert all(before[1] == after[0] for before, after in pairwise(covered))


@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
@pytest.mark.parametrize("masked_ratio", [0, 100], ids=["gathered", "masked"])
def test_tiles_say_which_rows_see_something(branch: str, masked_ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "MASKED_RATIO", masked_ratio)
    indices = random_block_indices(Shape(num_queries=150), holes=True)
    # a block after the query's own counts as absent: on a GPU indices are not checked
    indices[:, :60] = 10
    for tile in dense_tiles(branch, Shape(num_queries=150), indices, SMALL):
        expected = tile.visible.any(-1)
        assert torch.equal(expected, torch.ones_like(expected) if tile.sees is None else tile.sees)
