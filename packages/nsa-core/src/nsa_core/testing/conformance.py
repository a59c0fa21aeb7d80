"""The conformance kit: one call compares a backend with the oracle, forward and backward.

    from nsa_core.testing.conformance import check_backend
    print(check_backend(MyBackend()))

The kit skips a case if the backend's `reasons_against` has an incapable reason. It runs every other case through the public operation
and selects the backend by name, so that no other backend can serve it. `nsa_core.testing.steps` has the cases of APPEND, ROTATE and CHOOSE.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from nsa_core import attention
from nsa_core.backends.base import BranchBackend, BranchOutput, Capability, Keys, Operation, ReasonKind
from nsa_core.backends.registry import BackendRegistry
from nsa_core.config import BlockGeometry
from nsa_core.dispatch import make_call, run
from nsa_core.errors import NSAError
from nsa_core.operands import keys_of, queries_of
from nsa_core.reference import naive
from nsa_core.reference.sdpa import sdpa_backends
from nsa_core.telemetry import AttentionObserver
from nsa_core.testing import masks
from nsa_core.testing.cases import Arrangement, Case, Problem, cases, problem_of, request_of
from nsa_core.testing.inputs import SMALL, Inputs
from nsa_core.testing.steps import Trial, append_trials, choose_trials, rotate_trials
from nsa_core.testing.tolerances import Comparable, allowed_error, max_error, near_tie_margin

WITH_LSE = " with lse's"


class ConformanceError(NSAError, AssertionError):
    """A backend disagrees with the oracle; the message lists every case."""


@frozen(kw_only=True)
class ConformanceReport:
    """The names of cases that passed; the cases, or gradients of lse, that the backend declined; and the failures, a line each."""

    backend: str
    operation: Operation
    passed: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()
    failures: tuple[str, ...] = field(default=())
    near_ties: int = 0
    """Rows of selections that were not compared, because two scores were within the near-tie margin."""
    decided: int = 0
    """Rows of selections in which scores decided, including the near ties."""

    def __str__(self) -> str:
        head = f"{self.backend} / {self.operation}: {len(self.passed)} cases passed, {len(self.declined)} declined, "
        rows = f"{self.near_ties} of {self.decided}" if self.decided else "0"
        return "\n".join([head + f"{len(self.failures)} failed, {rows} rows near a tie", *self.failures])


def check_backend(backend: BranchBackend, *, device: torch.device | str = "cpu", geometry: BlockGeometry = SMALL) -> ConformanceReport:
    """Compare `backend` with the float64 oracle, forward and (if it has gradients) backward, and return the report.

    Attention and selection run on dense, packed, cached, paged and ragged batches. WIN and NSA also run over a ring and over a window's last
    tokens, and NSA with one k and v for the selected and the sliding branch. SLC, WIN and NSA also run over stores of FP8. Some cases
    have a scale that is not D_k ** -0.5. SELECT gets NaN for `cmp.v`. APPEND is compared with a plain loop over steps, ROTATE with products
    of complex numbers, and CHOOSE bit by bit with the reference's choice.

    Limits relative to the largest value: 1e-12 in float64, 1e-5 in float32; in bf16 and fp16 twice the error of torch's MATH attention
    plus 2^-8. Chosen blocks must equal the oracle's, except at near ties; also there none may follow the query's own. If
    `capability.lse_gradient` is False, the gradient of lse counts as declined, and the rest of a case is compared.

    Raises:
        ConformanceError: if a case fails, the backend declines every case, or too many choices are near ties.
    """
    others = tuple(other for other in sdpa_backends() if (other.name, other.operation) != (backend.name, backend.operation))
    registry = BackendRegistry((backend, *others))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*against policy.*")
        return _check_cases(backend, torch.device(device), geometry, registry)


def _check_cases(backend: BranchBackend, device: torch.device, geometry: BlockGeometry, registry: BackendRegistry) -> ConformanceReport:
    report = ConformanceReport(backend=backend.name, operation=backend.operation)
    for name, request, judge in _trials(backend, device, geometry, registry):
        # a backend selected by name runs despite policy reasons
        reasons = [reason for reason in backend.reasons_against(request) if reason.kind is ReasonKind.INCAPABLE]
        if reasons:
            report = evolve(report, declined=(*report.declined, f"{name}: {'; '.join(map(str, reasons))}"))
            continue
        problems, rows = judge()
        if request.needs_lse_grad and not backend.capability.lse_gradient:
            report = evolve(report, declined=(*report.declined, f"{name}, gradient of lse: it differentiates out alone"))
        report = evolve(report, near_ties=report.near_ties + rows.near_ties, decided=report.decided + rows.decided)
        if problems:
            report = evolve(report, failures=(*report.failures, *(f"  {name}: {problem}" for problem in problems)))
        else:
            report = evolve(report, passed=(*report.passed, name))
    if report.failures:
        raise ConformanceError(f"{report}\n(the oracle is nsa_core.reference.naive); fix the backend or narrow its capability")
    if not report.passed:
        raise ConformanceError(f"{backend.name} declined every case, the first: {report.declined[0]}; widen its capability")
    if not Comparable(report.decided, report.near_ties).are_enough:
        raise ConformanceError(f"{report}\n(at most a tenth may be too close to call, since those are not compared); use another geometry")
    return report


def _trials(backend: BranchBackend, device: torch.device, geometry: BlockGeometry, registry: BackendRegistry) -> Iterator[Trial]:
    if backend.operation is Operation.APPEND:
        yield from append_trials(backend, device, geometry, registry)
    elif backend.operation is Operation.CHOOSE:
        yield from choose_trials(backend, device)
    elif backend.operation is Operation.ROTATE:
        yield from rotate_trials(backend, device)
    else:
        for case in cases(geometry):
            if case.concerns(backend.operation):
                request = request_of(case, backend.operation, device, needs_grad=backend.capability.gradient)
                yield Trial(case.name, request, partial(_run_case, backend, case, device, registry))


class _Choice(AttentionObserver):
    """An observer that keeps the chosen blocks of a call; None if a fused backend returns its sum alone."""

    block_indices: Tensor | None = None

    def record_selection(self, block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> None:
        """Keep the chosen blocks."""
        self.block_indices = block_indices


def _run_case(backend: BranchBackend, case: Case, device: torch.device, registry: BackendRegistry) -> tuple[list[str], Comparable]:
    """Return the differences from the oracle, and the counts of rows that scores decide and of near ties among them."""
    problem = problem_of(case, device)
    if backend.operation is Operation.SELECT:
        return _check_selection(backend, problem, case, registry)
    kept, rows = torch.ones(problem.inputs.q.shape[:2], device=device), Comparable()
    is_fused = backend.operation is Operation.NSA
    if is_fused:
        chosen, near, rows = _oracle_selection(problem, case)
        problem = problem._replace(block_indices=chosen)
        # a query with a near tie is excluded from the output and from the gradients
        kept = (~near.any(-1)).to(kept)
    extra = (problem.block_indices,) if backend.operation is Operation.SLC else ()
    arrangement, choice = Arrangement(case, problem), _Choice()
    options: dict[str, Any] = {"backend": _by_name(backend), "registry": registry} | ({"observers": (choice,)} if is_fused else {})

    def whole(leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # k and v of the selected branch once more
        return (*leaves[:5], *leaves[3:5], *leaves[5:]) if case.has_shared_keys else leaves

    def theirs(*leaves: Tensor) -> Any:
        return _run_operation(backend.operation, (*whole(leaves), *extra), arrangement, options)

    def oracle(*leaves: Tensor) -> Any:
        result = _ORACLES[backend.operation](*whole(leaves), *extra, **problem.options)
        return result if is_fused or not case.needs_keys else result.out

    def yardstick(*leaves: Tensor) -> Any:
        return masks.branch_attention(backend.operation, whole(leaves), problem.block_indices, case.shape, case.scale)

    needs_yardstick = case.dtype in (torch.bfloat16, torch.float16) and not case.is_step
    operands = _operands(backend.operation, problem.inputs)
    if case.has_shared_keys:
        operands = (*operands[:5], *operands[7:])
    # a store of FP8 has no gradient
    capability = evolve(backend.capability, gradient=False) if case.is_in_fp8 else backend.capability
    problems = _compare(capability, operands, kept, theirs, oracle, yardstick if needs_yardstick else None)
    if choice.block_indices is not None:
        problems += _wrong_choices(arrangement.padded(choice.block_indices, -1), problem.block_indices, near)
    return problems, rows


def _run_operation(operation: Operation, operands: tuple[Tensor, ...], arrangement: Arrangement, options: dict[str, Any]) -> Any:
    """Return the results of the public operation for the oracle's `operands`, in the shapes of the oracle's results."""
    if arrangement.case.needs_keys:
        return _run_over_keys(operation, operands, arrangement, options)
    num_stores = {Operation.SELECT: 1, Operation.NSA: 6}.get(operation, 2)
    q, stores, rest = operands[0], operands[1 : 1 + num_stores], operands[1 + num_stores :]
    arranged = [arrangement.rows(q), *map(arrangement.store, stores), *map(arrangement.rows, rest)]
    result = _OPERATIONS[operation](*arranged, **arrangement.options, **options)
    if isinstance(result, tuple):
        return arrangement.padded(result[0], 0), arrangement.padded(result[1], float("-inf"))
    return arrangement.padded(result, -1 if operation is Operation.SELECT else 0)


def _run_over_keys(operation: Operation, operands: tuple[Tensor, ...], arrangement: Arrangement, options: dict[str, Any]) -> Tensor:
    """Return out over a ring, a window's last tokens or stores of FP8, which only Keys describe."""
    queries, case = arrangement.queries(operands[0]), arrangement.case
    if operation is Operation.SLC:
        call = make_call(queries.q, case.shape.geometry, case.scale, **options)
        result: BranchOutput = run(operation, call, queries, arrangement.tokens(*operands[1:3]), operands[3])
        return result.out
    cmp, slc, gates = None, None, torch.ones_like(operands[0][..., :3])
    k_win, v_win = operands[1:3]
    if operation is Operation.NSA:
        k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = operands[1:]
        cmp, slc = Keys(k_cmp, v_cmp, k_cmp.shape[1]), arrangement.tokens(k_slc, v_slc)
    win = arrangement.tokens(k_win, v_win) if case.window == "whole" else arrangement.window(k_win, v_win)
    return attention.attend(queries, cmp, slc, win, gates, geometry=case.shape.geometry, scale=case.scale, **options)


def _select(q: Tensor, k_cmp: Tensor, lse: Tensor, *, geometry: BlockGeometry, **keywords: Any) -> Tensor:
    """Return what `select_blocks` returns; the backend gets NaN as values, because it must not read them."""
    placement = {name: keywords[name] for name in ("cu_seqlens", "query_start", "query_count", "page_table") if name in keywords}
    queries = queries_of(q, **placement)
    pairs = {"_cmp": (k_cmp, torch.full_like(k_cmp, float("nan")))}
    cmp = keys_of(queries, pairs, geometry, page_table=placement.get("page_table"))["_cmp"]
    call = make_call(q, geometry, keywords.get("scale"), keywords["backend"], keywords["registry"])
    chosen: Tensor = run(Operation.SELECT, call, queries, cmp, lse)
    return chosen


def _by_name(backend: BranchBackend) -> dict[str, str]:
    return {backend.operation.value: backend.name}


def _compare(
    capability: Capability,
    operands: tuple[Tensor, ...],
    kept: Tensor,
    theirs: Callable[..., Any],
    oracle: Callable[..., Any],
    yardstick: Callable[..., Any] | None,
) -> list[str]:
    """Return what differs between `theirs` in the operands' dtype and `oracle` in float64: outputs, lse, gradients."""
    dtype = operands[0].dtype
    got = _evaluate(theirs, operands, kept, capability)
    expected = _evaluate(oracle, tuple(x.double() for x in operands), kept, capability)
    yard = _evaluate(yardstick, operands, kept, capability) if yardstick else {}
    problems = _wrong_dtypes(got, dtype)
    for name, value in expected.items():
        # torch's attention returns no lse, so the limit of the gradient without it also serves the gradient with it
        yard_name = name.removesuffix(WITH_LSE)
        # a step has no MATH reference; MATH would compute in float32 and round once
        yard_value = yard.get(yard_name, expected[yard_name].to(got[name].dtype))
        torch_error = max_error(yard_value, expected[yard_name])
        error, limit = max_error(got[name], value), allowed_error(value, dtype, torch_error)
        if not error <= limit:
            problems.append(f"{name} is off by {error:.2e} (allowed: {limit:.2e})")
    return problems


def _wrong_dtypes(got: dict[str, Tensor], dtype: torch.dtype) -> list[str]:
    """Return the results whose dtype is not the inputs'; lse is at least float32."""
    wanted = {name: torch.promote_types(dtype, torch.float32) if name == "lse" else dtype for name in got}
    return [f"{name} is {value.dtype}, not {wanted[name]}" for name, value in got.items() if value.dtype != wanted[name]]


def _evaluate(function: Callable[..., Any], operands: tuple[Tensor, ...], kept: Tensor, capability: Capability) -> dict[str, Tensor]:
    """Return out, lse, and the gradients that `capability` offers: of a fixed random combination of out, and of one of out and lse."""
    leaves = tuple(x.detach().clone().requires_grad_(capability.gradient) for x in operands)
    result = function(*leaves)
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = out * kept[..., None, None].to(out)
    values = {"out": out} if lse is None else {"out": out, "lse": lse}
    if capability.gradient:
        loss = (out * _weights(out)).sum()
        values |= {f"gradient {index}": x for index, x in enumerate(torch.autograd.grad(loss, leaves, retain_graph=True))}
    if capability.gradient and capability.lse_gradient and lse is not None:
        # rows that see nothing have lse -inf and no gradient
        finite = torch.where(lse == float("-inf"), 0, lse)
        loss = (out * _weights(out)).sum() + (finite * _weights(lse)).sum()
        # v does not affect lse
        values |= {f"gradient {index}{WITH_LSE}": x for index, x in enumerate(torch.autograd.grad(loss, leaves)) if index < 2}
    return values


def _weights(x: Tensor) -> Tensor:
    """Return weights that every dtype represents exactly, so that they add no rounding error."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16).to(x)


def _operands(operation: Operation, inputs: Inputs) -> tuple[Tensor, ...]:
    picked = {
        Operation.CMP: (inputs.q, inputs.k_cmp, inputs.v_cmp),
        Operation.SLC: (inputs.q, inputs.k_slc, inputs.v_slc),
        Operation.WIN: (inputs.q, inputs.k_win, inputs.v_win),
        Operation.NSA: inputs.tensors,
    }
    return picked[operation]


def _oracle_selection(problem: Problem, case: Case) -> tuple[Tensor, Tensor, Comparable]:
    """Return the oracle's choice, a bool mask `(B, S, G)` of near ties in the case's dtype, and the counts of rows."""
    exact = problem.inputs.to(torch.float64)
    lse = _oracle_lse(problem)
    margin = naive.selection_margin(exact.q, exact.k_cmp, lse, **problem.options)
    highest = naive.importance(exact.q, exact.k_cmp, lse, **problem.options).amax(-1)
    near = margin <= near_tie_margin(highest, case.dtype)
    rows = Comparable(int((margin < float("inf")).sum()), int(near.sum()))
    return naive.select_blocks(exact.q, exact.k_cmp, lse, **problem.options), near, rows


def _oracle_lse(problem: Problem) -> Tensor:
    exact = problem.inputs.to(torch.float64)
    return naive.compressed_attention(exact.q, exact.k_cmp, exact.v_cmp, **problem.options).lse


def _check_selection(backend: BranchBackend, problem: Problem, case: Case, registry: BackendRegistry) -> tuple[list[str], Comparable]:
    """Return the errors of the backend's choice, except at near ties, and the counts of rows."""
    lse = _oracle_lse(problem).to(torch.promote_types(case.dtype, torch.float32))
    operands, options = (problem.inputs.q, problem.inputs.k_cmp, lse), {"backend": _by_name(backend), "registry": registry}
    got = _run_operation(Operation.SELECT, operands, Arrangement(case, problem), options)
    expected, near, rows = _oracle_selection(problem, case)
    return _wrong_choices(got, expected, near), rows


def _wrong_choices(got: Tensor, expected: Tensor, near: Tensor) -> list[str]:
    """Return the errors of the choice `got`. At near ties only a block after the query's own is one."""
    if got.dtype != torch.int32 or got.shape != expected.shape:
        return [f"block_indices are {got.dtype} {tuple(got.shape)}, not int32 {tuple(expected.shape)}"]
    expected, near = expected.to(got.device), near.to(got.device)
    wrong = (got != expected).any(-1) & ~near
    # a query's own block is the last one that the oracle chose
    future = (got > expected.amax(-1, keepdim=True)).any(-1)
    found = {"rows choose other blocks": wrong, "rows choose a block after their query's own": future}
    return [f"{int(rows.sum())} of {rows.numel()} {problem}" for problem, rows in found.items() if bool(rows.any())]


_OPERATIONS: dict[Operation, Callable[..., Any]] = {
    Operation.CMP: attention.compressed_attention,
    Operation.SELECT: _select,
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
