"""The conformance kit: one call runs a backend, forward and backward, against the oracle.

    from nsa_core.testing.conformance import check_backend
    print(check_backend(MyBackend()))

Every case that the backend's own `reasons_against` lets through is run through the public operation, by name, so a
fallback cannot pass for it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from nsa_core import attention
from nsa_core.backends.base import BranchBackend, BranchRequest, Layout, Operation
from nsa_core.backends.registry import BackendRegistry
from nsa_core.config import BlockGeometry
from nsa_core.errors import NSAError
from nsa_core.reference import naive
from nsa_core.reference.sdpa import sdpa_backends
from nsa_core.testing import masks
from nsa_core.testing.inputs import SMALL, Inputs, Shape, make_inputs, random_block_indices
from nsa_core.testing.strategies import edge_lengths
from nsa_core.testing.tolerances import allowed_error, max_error, near_tie_margin

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ConformanceError(NSAError, AssertionError):
    """A backend disagrees with the oracle; the message lists every case."""


@frozen(kw_only=True)
class ConformanceReport:
    """What was run and what the backend declined."""

    backend: str
    operation: Operation
    passed: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()
    failures: tuple[str, ...] = field(default=())
    near_ties: int = 0
    """Rows of selections left out because two scores lay within the near-tie margin."""

    def __str__(self) -> str:
        head = f"{self.backend} / {self.operation}: {len(self.passed)} cases passed, {len(self.declined)} declined, "
        return "\n".join([head + f"{len(self.failures)} failed, {self.near_ties} rows near a tie", *self.failures])


@frozen(kw_only=True)
class Case:
    """One run of one operation."""

    name: str
    shape: Shape
    dtype: torch.dtype
    holes: bool = False
    """Mix -1 into block_indices, rows of only -1 included."""
    logit_scale: float = 1.0
    """Factor on q: large logits overflow a softmax that is stabilised by another row's maximum."""


def cases(geometry: BlockGeometry = SMALL, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Case]:
    """Yield the cases: every edge length, head ratio, packing and dtype."""
    base = Shape(geometry=geometry)
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for length in edge_lengths(geometry):
            yield Case(name=f"{kind} S={length}", shape=evolve(base, num_queries=length, batch=2, seed=length), dtype=dtype)
        for num_heads, num_kv_heads in ((1, 1), (6, 2), (16, 1), (5, 5)):
            shape = evolve(base, num_heads=num_heads, num_kv_heads=num_kv_heads)
            yield Case(name=f"{kind} H/G={num_heads}/{num_kv_heads}", shape=shape, dtype=dtype)
        for dims in ((8, 8), (4, 10)):
            yield Case(name=f"{kind} D={dims}", shape=evolve(base, head_dim_qk=dims[0], head_dim_v=dims[1]), dtype=dtype)
        packed = evolve(base, lengths=(13, 0, 1, 37, 7, 8), surplus_blocks=2)
        yield Case(name=f"{kind} packed", shape=packed, dtype=dtype)
        yield Case(name=f"{kind} holes", shape=evolve(base, seed=3), dtype=dtype, holes=True)
        yield Case(name=f"{kind} logits x 50", shape=evolve(base, seed=4), dtype=dtype, logit_scale=50.0)


def check_backend(backend: BranchBackend, *, device: torch.device | str = "cpu", geometry: BlockGeometry = SMALL) -> ConformanceReport:
    """Return the report of `backend`, forward and (where it offers gradients) backward, against the float64 oracle.

    float64 within 1e-12 and float32 within 1e-5 of the largest value; bf16 and fp16 within twice the error of torch's
    MATH attention plus 2^-8. Selections must equal the oracle's above the near-tie margin.

    Raises:
        ConformanceError: when a case fails, or the backend declines every case.
    """
    registry = BackendRegistry((backend, *(other for other in sdpa_backends() if other.name != backend.name)))
    report = ConformanceReport(backend=backend.name, operation=backend.operation)
    for case in cases(geometry):
        reasons = backend.reasons_against(_request(backend, case, torch.device(device)))
        if reasons:
            report = evolve(report, declined=(*report.declined, f"{case.name}: {'; '.join(map(str, reasons))}"))
            continue
        problems, near_ties = _run_case(backend, case, torch.device(device), registry)
        report = evolve(report, near_ties=report.near_ties + near_ties)
        if problems:
            report = evolve(report, failures=(*report.failures, *(f"  {case.name}: {problem}" for problem in problems)))
        else:
            report = evolve(report, passed=(*report.passed, case.name))
    if report.failures:
        raise ConformanceError(f"{report}\n(the oracle is nsa_core.reference.naive); mend the backend or narrow its capability")
    if not report.passed:
        raise ConformanceError(f"{backend.name} declined every case, the first: {report.declined[0]}; widen its capability")
    return report


def _request(backend: BranchBackend, case: Case, device: torch.device) -> BranchRequest:
    shape = case.shape
    return BranchRequest(
        operation=backend.operation,
        geometry=shape.geometry,
        device_type=device.type,
        compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=case.dtype,
        kv_dtype=case.dtype,
        batch=1 if shape.lengths is not None else shape.batch,
        num_sequences=shape.batch if shape.lengths is None else len(shape.lengths),
        num_queries=shape.total,
        num_keys=shape.total if shape.lengths is None else max(shape.lengths),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim_qk=shape.head_dim_qk,
        head_dim_v=shape.head_dim_v,
        layout=Layout.DENSE if shape.lengths is None else Layout.PACKED,
        needs_grad=backend.capability.gradient,
    )


def _run_case(backend: BranchBackend, case: Case, device: torch.device, registry: BackendRegistry) -> tuple[list[str], int]:
    exact = make_inputs(case.shape, device=device)
    exact = exact._replace(q=exact.q * case.logit_scale).to(case.dtype)
    options = {"geometry": case.shape.geometry, "cu_seqlens": exact.cu_seqlens}
    if backend.operation is Operation.SELECT:
        return _check_selection(backend, exact, case, options, registry)
    block_indices = random_block_indices(case.shape, holes=case.holes, device=device)
    operands = _operands(backend.operation, exact)

    def theirs(*tensors: Tensor) -> Any:
        arguments = (*tensors, block_indices) if backend.operation is Operation.SLC else tensors
        return _OPERATIONS[backend.operation](*arguments, **options, backend=backend.name, registry=registry)

    def oracle(*tensors: Tensor) -> Any:
        arguments = (*tensors, block_indices) if backend.operation is Operation.SLC else tensors
        return _ORACLES[backend.operation](*arguments, **options)

    def yardstick(*tensors: Tensor) -> Any:
        return _math_attention(backend.operation, tensors, block_indices, case.shape)

    needs_yardstick = case.dtype in (torch.bfloat16, torch.float16)
    return _compare(backend, operands, theirs, oracle, yardstick if needs_yardstick else None), 0


def _compare(
    backend: BranchBackend,
    operands: tuple[Tensor, ...],
    theirs: Callable[..., Any],
    oracle: Callable[..., Any],
    yardstick: Callable[..., Any] | None,
) -> list[str]:
    """Return what differs between `theirs` in the operands' dtype and `oracle` in float64: outputs, lse, gradients."""
    dtype = operands[0].dtype
    got = _evaluate(theirs, operands, backend.capability.gradient)
    expected = _evaluate(oracle, tuple(x.double() for x in operands), backend.capability.gradient)
    yard = _evaluate(yardstick, operands, backend.capability.gradient) if yardstick else {}
    problems = []
    for name, value in expected.items():
        # a yardstick has no lse: it is float32 even of low precision inputs, and the 2^-8 is enough
        torch_error = max_error(yard[name], value) if name in yard else 0.0
        error, limit = max_error(got[name], value), allowed_error(value, dtype, torch_error)
        if not error <= limit:
            problems.append(f"{name} is off by {error:.2e} (allowed: {limit:.2e})")
    return problems


def _evaluate(function: Callable[..., Any], operands: tuple[Tensor, ...], gradient: bool) -> dict[str, Tensor]:
    """Return out, lse and the gradients of a fixed random combination of out and lse."""
    leaves = tuple(x.detach().clone().requires_grad_(gradient) for x in operands)
    result = function(*leaves)
    out, lse = result if isinstance(result, tuple) else (result, None)
    values = {"out": out} if lse is None else {"out": out, "lse": lse}
    if gradient:
        generator = torch.Generator().manual_seed(7)
        weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
        loss = (out * weights).sum()
        grads = torch.autograd.grad(loss, leaves)
        values |= {f"gradient {place}": grad for place, grad in enumerate(grads)}
    return values


def _operands(operation: Operation, inputs: Inputs) -> tuple[Tensor, ...]:
    picked = {
        Operation.CMP: (inputs.q, inputs.k_cmp, inputs.v_cmp),
        Operation.SLC: (inputs.q, inputs.k_slc, inputs.v_slc),
        Operation.WIN: (inputs.q, inputs.k_win, inputs.v_win),
        Operation.NSA: inputs.tensors,
    }
    return picked[operation]


def _math_attention(operation: Operation, tensors: tuple[Tensor, ...], block_indices: Tensor, shape: Shape) -> Tensor:
    """Return torch's attention with an explicit mask, packed sequences by a block-diagonal one."""
    ids, positions = _rows(shape)
    same = ids.unsqueeze(1) == ids
    geometry = shape.geometry
    if operation is Operation.NSA:
        q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = tensors
        outs = (
            _math_attention(Operation.CMP, (q, k_cmp, v_cmp), block_indices, shape),
            _math_attention(Operation.SLC, (q, k_slc, v_slc), block_indices, shape),
            _math_attention(Operation.WIN, (q, k_win, v_win), block_indices, shape),
        )
        return torch.stack([out * gates[..., place, None] for place, out in enumerate(outs)]).sum(0)
    q, k, v = tensors
    if operation is Operation.CMP:
        k, v = k[:, : shape.num_blocks], v[:, : shape.num_blocks]
        if not shape.num_blocks:
            return (q.sum() + k.sum() + v.sum()) * 0 + q.new_zeros(*q.shape[:-1], v.shape[-1])
        lengths = (shape.num_queries,) if shape.lengths is None else shape.lengths
        mask = torch.block_diag(*(masks.compressed_mask(n, naive.num_blocks(n, geometry), geometry).float() for n in lengths)).bool()
    elif operation is Operation.WIN:
        mask = masks.window_mask(shape.total, geometry) & same
    else:
        block = positions // geometry.selection_block_size
        chosen = (block_indices.cpu().unsqueeze(-1) == block).any(3).transpose(1, 2)
        mask = chosen & same & (positions <= positions.unsqueeze(1))
    return masks.math_attention(q, k, v, mask)


def _rows(shape: Shape) -> tuple[Tensor, Tensor]:
    lengths = (shape.num_queries,) if shape.lengths is None else shape.lengths
    ids = torch.cat([torch.full((length,), place) for place, length in enumerate(lengths)])
    return ids, torch.cat([torch.arange(length) for length in lengths])


def _check_selection(
    backend: BranchBackend, inputs: Inputs, case: Case, options: dict[str, Any], registry: BackendRegistry
) -> tuple[list[str], int]:
    """Return the rows whose choice differs from the oracle's although no near tie excuses it, and how many ties there were."""
    exact = inputs.to(torch.float64)
    lse = naive.compressed_attention(exact.q, exact.k_cmp, exact.v_cmp, **options).lse
    given = lse.to(torch.promote_types(case.dtype, torch.float32))
    got = attention.select_blocks(inputs.q, inputs.k_cmp, given, **options, backend=backend.name, registry=registry)
    expected = naive.select_blocks(exact.q, exact.k_cmp, lse, **options)
    margin = naive.selection_margin(exact.q, exact.k_cmp, lse, **options)
    highest = naive.importance(exact.q, exact.k_cmp, lse, **options).amax(-1)
    near = margin <= near_tie_margin(highest, case.dtype).to(margin.device)
    if got.dtype != torch.int32 or got.shape != expected.shape:
        return [f"block_indices are {got.dtype} {tuple(got.shape)}, not int32 {tuple(expected.shape)}"], 0
    wrong = (got != expected.to(got.device)).any(-1) & ~near.to(got.device)
    # equal scores are no near tie: they go to the lower block, whoever computes them
    problems = [f"{int(wrong.sum())} of {wrong.numel()} rows choose other blocks"] if bool(wrong.any()) else []
    return problems, int(near.sum())


_OPERATIONS: dict[Operation, Callable[..., Any]] = {
    Operation.CMP: attention.compressed_attention,
    Operation.SLC: attention.selected_attention,
    Operation.WIN: attention.sliding_window_attention,
    Operation.NSA: attention.nsa_attention,
}
_ORACLES: dict[Operation, Callable[..., Any]] = {
    Operation.CMP: naive.compressed_attention,
    Operation.SLC: naive.selected_attention,
    Operation.WIN: naive.sliding_window_attention,
    Operation.NSA: naive.nsa_attention,
}
