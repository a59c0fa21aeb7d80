"""The kernels as torch sees them: custom ops, compiled, checkpointed, under autocast, the same from run to run."""

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nsa_core import (
    NativeSparseAttention,
    NSAConfig,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from nsa_core.telemetry import AttentionObserver
from nsa_core.testing.inputs import SMALL, Inputs, Shape, make_inputs
from nsa_core.testing.tolerances import allowed_error, max_error
from nsa_kernels_triton import implementations
from nsa_kernels_triton.interval import op as interval
from nsa_kernels_triton.selected import op as selected

pytestmark = pytest.mark.filterwarnings("ignore:.*against policy.*")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EACH = ("cmp", "select", "slc", "win", "nsa")
DENSE, PACKED = Shape(num_queries=21), Shape(lengths=(9, 0, 11))
EQUAL_WIDTHS = Shape(num_queries=21, head_dim_v=8)
LAYER = NSAConfig(16, 4, 2, 8, 6, geometry=SMALL, gate_hidden_size=8, backends=dict.fromkeys(EACH, "triton"))


def first_blocks(shape: Shape) -> Tensor:
    """Return block_indices that name block 0 alone."""
    first = torch.zeros(1, shape.total, shape.num_kv_heads, 1, dtype=torch.int32, device=DEVICE)
    return nn.functional.pad(first, (0, shape.geometry.num_selected_blocks - 1), value=-1)


def call(operation: str, inputs: Inputs, shape: Shape) -> tuple[Tensor, ...]:
    """Return the result of `operation` by the kernels."""
    options: dict[str, Any] = {"geometry": shape.geometry, "cu_seqlens": inputs.cu_seqlens, "backend": "triton"}
    if operation == "cmp":
        return tuple(compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, **options))
    if operation == "select":
        return (select_blocks(inputs.q, inputs.k_cmp, torch.zeros(inputs.q.shape[:3], device=DEVICE), **options),)
    if operation == "slc":
        return tuple(selected_attention(inputs.q, inputs.k_slc, inputs.v_slc, first_blocks(shape), **options))
    if operation == "win":
        return tuple(sliding_window_attention(inputs.q, inputs.k_win, inputs.v_win, **options))
    if operation == "nsa of two":
        inputs = inputs._replace(v_cmp=None)
    return (nsa_attention(*inputs.tensors, **options),)


def loss(outputs: tuple[Tensor, ...]) -> Tensor:
    """Return a number that every differentiable output is part of; lse of rows that see nothing are infinite."""
    terms = [torch.where(x.isfinite(), x, 0).sin().sum() for x in outputs]
    return torch.stack(terms).sum()


class Recorder(TorchDispatchMode):
    """Notes the calls of this package's custom ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "nsa_triton":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def leaves_of(args: Any, requires_grad: bool) -> Any:
    """Return arguments with leaves for tensors; those of floats require a gradient or not."""
    if isinstance(args, Tensor):
        return args.detach().clone().requires_grad_(requires_grad and args.is_floating_point())
    return type(args)(leaves_of(each, requires_grad) for each in args) if isinstance(args, tuple | list) else args


@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        *((name, DENSE) for name in EACH[:-1]),
        pytest.param("nsa", DENSE, marks=pytest.mark.slow),
        ("nsa", PACKED),
        ("nsa of two", EQUAL_WIDTHS),
    ],
    ids=[*EACH, "nsa, packed", "nsa of two"],
)
def test_the_custom_ops_pass_opcheck(operation: str, shape: Shape) -> None:
    inputs = make_inputs(shape, torch.float32, DEVICE).with_grad()
    with Recorder() as forward:
        outputs = call(operation, inputs, shape)
    with Recorder() as backward:
        if operation != "select":
            loss(outputs).backward()
    assert len(forward.calls) == 1
    assert len(backward.calls) == (operation != "select")
    for requires_grad, calls in ((operation != "select", forward.calls), (False, backward.calls)):
        for op, args in calls:
            assert set(torch.library.opcheck(op, leaves_of(args, requires_grad)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", [EQUAL_WIDTHS, evolve(EQUAL_WIDTHS, lengths=(29, 0, 1, 18))], ids=["dense", "packed"])
def test_without_compressed_values_one_op_sums_two_branches(shape: Shape, dtype: torch.dtype) -> None:
    inputs = make_inputs(shape, torch.float32, DEVICE).to(dtype)
    weights = torch.randn(inputs.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).to(DEVICE)

    def run(operands: Inputs, **options: Any) -> dict[str, Tensor | None]:
        leaves = operands.with_grad()
        out = nsa_attention(*leaves._replace(v_cmp=None).tensors, geometry=SMALL, cu_seqlens=operands.cu_seqlens, **options)
        out.backward(weights.to(out.dtype))
        return {"out": out.detach(), **{name: getattr(leaves, name).grad for name in Inputs._fields[:8]}}

    # the gate of the branch that is left out may be anything
    spoiled = inputs.gates.clone()
    spoiled[..., 0] = torch.nan
    with Recorder() as recorder:
        ours = run(inputs._replace(gates=spoiled), backend="triton")
    names = [function.name() for function, _ in recorder.calls]
    assert names == ["nsa_triton::nsa", "nsa_triton::nsa_backward"]
    # out, choice, and two outputs with their lse
    assert len(recorder.calls[1][1][1]) == 5
    exact, plain = run(inputs.to(torch.float64), backend="sdpa"), run(inputs, backend="sdpa")
    assert (ours["k_cmp"], ours["v_cmp"], exact["k_cmp"]) == (None, None, None)
    assert not ours["gates"][..., 0].any()
    for name in ours.keys() - {"k_cmp", "v_cmp"}:
        torch_error = max_error(plain[name], exact[name])
        assert max_error(ours[name], exact[name]) <= allowed_error(exact[name], dtype, torch_error), name


@pytest.mark.parametrize("head_dim_v", [6, 40])
@pytest.mark.parametrize("early", [False, True])
def test_without_gradients_the_whole_operation_keeps_nothing(head_dim_v: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not early:
        monkeypatch.setattr(selected, "early_queries", lambda *_: 0)
    shape = evolve(DENSE, head_dim_v=head_dim_v)
    inputs = make_inputs(shape, torch.bfloat16, DEVICE)
    kept = {}
    for name, tensors in (("trains", inputs.with_grad()), ("serves", inputs), ("no_grad", inputs.with_grad())):
        with Recorder() as recorder, torch.set_grad_enabled(name != "no_grad"):
            (out,) = call("nsa", tensors, shape)
        ((op, args),) = recorder.calls
        with torch.no_grad():
            total, _chosen, saved = op(*args)
        assert torch.equal(out, total)
        kept[name] = (total, [x.numel() for x in saved])
    assert min(kept["trains"][1]) > 0
    assert kept["serves"][1] == kept["no_grad"][1] == []
    assert torch.equal(kept["serves"][0], kept["trains"][0])


@pytest.mark.parametrize("dynamic", [None, True], ids=["", "symbolic sizes"])
@pytest.mark.parametrize("operation", EACH)
def test_an_operation_compiles_to_one_graph(operation: str, dynamic: bool | None) -> None:
    inputs = make_inputs(DENSE, torch.float32, DEVICE)

    def run(q: Tensor) -> tuple[Tensor, ...]:
        return call(operation, inputs._replace(q=q), DENSE)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch._dynamo.config.patch(recompile_limit=2 * len(EACH)):  # the parameters share the code of `run`
        outputs = compiled(inputs.q)
    for ours, expected in zip(outputs, run(inputs.q), strict=True):
        assert torch.equal(ours, expected)


def test_the_layer_compiles_to_one_graph_with_its_gradients() -> None:
    layer, x = NativeSparseAttention(LAYER).to(DEVICE), torch.randn(1, 21, 16, device=DEVICE)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    gradients = []
    for module in (compiled, layer):
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_a_compiled_layer_serves_other_lengths() -> None:
    layer = NativeSparseAttention(LAYER).to(DEVICE)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (13, 14):
        x = torch.randn(1, length, 16, device=DEVICE)
        torch.testing.assert_close(compiled(x), layer(x))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert compiled(torch.randn(1, 19, 16, device=DEVICE)).shape == (1, 19, 16)


def test_checkpointing_gives_the_same_gradients() -> None:
    layer, x = NativeSparseAttention(LAYER).to(DEVICE), torch.randn(1, 21, 16, device=DEVICE, requires_grad=True)
    layer(x).square().sum().backward()
    plain, x.grad = x.grad, None
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert plain is not None
    assert x.grad is not None
    assert torch.equal(x.grad, plain)


def test_autocast_runs_the_kernels_in_its_dtype() -> None:
    inputs = make_inputs(DENSE, torch.float32, DEVICE).with_grad()
    with torch.autocast(DEVICE, torch.bfloat16), Recorder() as recorder:
        out = call("nsa", inputs, DENSE)[0]
    [(_, args)] = recorder.calls
    assert [x.dtype for x in args if isinstance(x, Tensor)] == [torch.bfloat16] * 7 + [torch.float32]
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    for x in inputs.tensors:
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
        assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("operation", ["select", "nsa"])
def test_runs_are_bit_equal(operation: str) -> None:
    runs = []
    for _ in range(20 if DEVICE == "cuda" else 3):
        inputs = make_inputs(DENSE, torch.float32, DEVICE).with_grad()
        outputs = call(operation, inputs, DENSE)
        if operation == "nsa":
            loss(outputs).backward()
        runs.append([*outputs, *(x.grad for x in inputs.tensors if x.grad is not None)])
    assert len(runs[0]) == (9 if operation == "nsa" else 1)
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


def test_frozen_operands_get_no_gradient() -> None:
    inputs = make_inputs(DENSE, torch.float32, DEVICE)
    q = inputs.q.clone().requires_grad_()
    out = call("nsa", inputs._replace(q=q), DENSE)[0]
    out.sum().backward()
    assert q.grad is not None
    assert all(x.grad is None for x in inputs.tensors[1:])


class TwoLayers(nn.Module):
    """Two layers, one of which is not differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NativeSparseAttention(LAYER) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.layers[0](x)
        return self.layers[1](x)


class Routes(AttentionObserver):
    """Notes the operations that run."""

    def __init__(self) -> None:
        """Start empty."""
        self.operations: list[str] = []

    def record_route(self, operation: str, backend: str) -> None:
        """Note one."""
        self.operations.append(f"{operation} by {backend}")


@pytest.mark.parametrize(
    "shape", [Shape(num_queries=75, head_dim_v=8), Shape(lengths=(40, 0, 35), surplus_blocks=2, head_dim_v=8)], ids=["dense", "packed"]
)
def test_without_compressed_values_a_pass_without_gradients_is_fused(shape: Shape) -> None:
    inputs, routes = make_inputs(shape, torch.float32, DEVICE), Routes()
    assert inputs.k_cmp.shape[3] == inputs.v_slc.shape[3]

    def attend(backend: str, *observers: AttentionObserver) -> Tensor:
        options: dict[str, Any] = {"geometry": SMALL, "cu_seqlens": inputs.cu_seqlens, "observers": observers, "backend": backend}
        return nsa_attention(inputs.q, inputs.k_cmp, None, *inputs.tensors[3:], **options)

    torch.testing.assert_close(attend("triton", routes), attend("sdpa"), atol=1e-5, rtol=1e-5)
    assert routes.operations == ["nsa by triton"]


def test_a_pass_without_gradients_feeds_one_with() -> None:
    model = TwoLayers().to(DEVICE)
    model(torch.randn(1, 13, 16, device=DEVICE)).sum().backward()
    assert all(parameter.grad is None for parameter in model.layers[0].parameters())
    assert any(parameter.grad is not None for parameter in model.layers[1].parameters())


@pytest.mark.parametrize("heads_per_group", [1, 2, 3, 6, 16, 24, 32])
def test_the_rows_of_early_queries_fill_tiles_and_no_fewer_queries_do(heads_per_group: int) -> None:
    q, k = torch.zeros(1, 8, 2 * heads_per_group, 16), torch.zeros(1, 8, 2, 16)
    rows = implementations.kernel_for("interval_dq", q, q).block_rows
    queries = interval.tile_sizes(q, k, k)[0]
    assert [x for x in range(1, queries + 1) if x * heads_per_group % rows == 0] == [queries]
