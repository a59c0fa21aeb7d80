"""A registry that records which backends ran, and the check of a named backend."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from attrs import evolve

from nsa_bench.cases import OURS, Case
from nsa_bench.errors import BenchError, OptionError
from nsa_core import (
    BackendRegistry,
    BranchBackend,
    BranchRequest,
    DuplicateBackendError,
    Layout,
    Operation,
    load_plugins,
)

CHOICES = ("select", "choose")
"""Operations without values: D_v of their requests is D_k."""


class RouteRecorder(BackendRegistry):
    """A registry of the installed packages' backends; `served` returns the backends that ran since `forget`."""

    @classmethod
    def of_installed(cls) -> "RouteRecorder":
        """Return a registry of every plug-in that loads.

        Raises:
            BenchError: if two plug-ins offer one backend.
        """
        try:
            return cls(tuple(load_plugins().registry().backends))
        except DuplicateBackendError as error:
            raise BenchError(str(error)) from error

    def __init__(self, backends: tuple[BranchBackend, ...] = ()) -> None:
        """Register `backends`, in order."""
        super().__init__(backends)
        self._served: dict[str, str] = {}
        self.observers.append(self._note)

    def _note(self, asked_for: str, facts: BranchRequest, backend: str | None) -> None:
        if backend is not None:
            self._served[facts.operation] = backend

    def forget(self) -> None:
        """Clear the record of backends that ran."""
        self._served.clear()

    @property
    def served(self) -> str:
        """Return the backends that ran, as text; see `text_of`."""
        return text_of(self._served)


class CallRecorder(BackendRegistry):
    """A registry with the backends of another one, which records each call of an operation, except of ROTATE, so that it can be repeated."""

    def __init__(self, registry: BackendRegistry) -> None:
        """Register the backends of `registry`."""
        self._calls: list[tuple[Operation, Callable[[], object]]] = []
        super().__init__(tuple(RecordedBackend(backend, self._calls) for backend in registry.backends))

    @property
    def operations(self) -> list[Operation]:
        """Return the operations that were called, in order."""
        return [operation for operation, _ in self._calls]

    def repeat(self) -> None:
        """Repeat the calls, in order, with the same operands."""
        for _, call in self._calls:
            call()


class RecordedBackend:
    """A backend that adds its calls to `calls`."""

    def __init__(self, backend: BranchBackend, calls: list[tuple[Operation, Callable[[], object]]]) -> None:
        """Wrap `backend`."""
        self._backend, self._calls = backend, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Compute the operation."""
        call = partial(self._backend, *operands, **keywords)
        if self._backend.operation is not Operation.ROTATE:
            self._calls.append((self._backend.operation, call))
        return call()


def text_of(routes: Mapping[str, str]) -> str:
    """Return the backends that served, by operation: "triton" if one served all, else "cmp sdpa, slc triton"."""
    names = set(routes.values())
    return names.pop() if len(names) == 1 else ", ".join(f"{operation} {name}" for operation, name in routes.items())


def check_name(name: str) -> None:
    """Check that a plug-in has the backend of `--backend`.

    Raises:
        OptionError: if none has.
    """
    known = sorted({backend.name for backend in RouteRecorder.of_installed().backends})
    if name not in ("auto", *known):
        raise OptionError(f"--backend={name!r} is not installed (there is {', '.join(known)}); use --backend auto")


def check_backend(name: str, measured: Iterable[tuple[BranchRequest, ...]]) -> None:
    """Check that the `--backend` of a command can serve one of its measurements; `measured`: the requests of each, which it must all serve.

    The results give the reason for each measurement that it cannot serve.

    Raises:
        OptionError: with all reasons, if no plug-in has the backend, or it can serve none of the measurements.
    """
    if name == "auto":
        return
    check_name(name)
    registry, reasons = RouteRecorder.of_installed(), dict[str, None]()
    for requests in measured:
        against = [reason for request in requests for reason in reasons_against(name, request, registry)]
        if not against:
            return
        reasons |= dict.fromkeys(against)
    raise OptionError(f"--backend={name!r} cannot serve what is to be measured ({name}: {', '.join(reasons)}); use --backend auto")


def request_of(operation: str, case: Case, device: torch.device) -> BranchRequest:
    """Return the request of the forward pass of `operation` on `case`."""
    shape = case.shape
    return BranchRequest(
        operation=operation,
        geometry=case.geometry,
        device_type=device.type,
        compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=case.dtype,
        kv_dtype=case.dtype,
        num_sequences=len(case.sequence_lengths),
        num_queries=case.seq_len,
        num_keys=max(case.sequence_lengths),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim_qk=shape.head_dim_qk,
        head_dim_v=shape.head_dim_qk if operation in CHOICES else shape.head_dim_v,
        layout=Layout.DENSE if case.lengths is None else Layout.PACKED,
    )


def step_request(case: Case, device: torch.device, *, batch: int, num_queries: int, kv_dtype: torch.dtype | None = None) -> BranchRequest:
    """Return the request of the attention of the last `num_queries` tokens of `batch` sequences like `case`, over a cache.

    `kv_dtype`: the dtype of the selected and the sliding branch's stores; None: that of the rows.
    """
    # routing rounds the tokens of a cache up to a power of 2
    num_keys = 1 << (case.seq_len - 1).bit_length()
    return evolve(
        request_of("nsa", case, device), layout=Layout.CACHED, batch=batch, num_sequences=batch, num_queries=num_queries,
        num_keys=num_keys, kv_dtype=kv_dtype or case.dtype,
    )  # fmt: skip


def reasons_against(name: str, request: BranchRequest, registry: BackendRegistry, *, is_named: bool = True) -> list[str]:
    """Return why the backend `name` cannot serve `request`; empty if it can.

    `nsa` over a cache includes `append`, which another backend serves if `name` has none.
    `is_named`: policy reasons do not count, as if a user had named the backend.
    """
    requests = _parts_of(request, name, registry)
    return list(dict.fromkeys(reason for part in requests for reason in _reasons_against(name, part, registry, is_named)))


def _parts_of(request: BranchRequest, name: str, registry: BackendRegistry) -> list[BranchRequest]:
    """Return the requests that `name` gets: for `nsa` those of the branches if it has no backend for `nsa`, and that of `append` if it has one."""
    if request.operation is not Operation.NSA:
        return [request]
    parts = [request] if registry.has(Operation.NSA, name) else [_branch_of(request, each) for each in OURS if each != "nsa"]
    if request.layout is Layout.CACHED and registry.has(Operation.APPEND, name):
        parts.insert(0, evolve(request, operation=Operation.APPEND, num_heads=request.num_kv_heads))
    return parts


def _branch_of(request: BranchRequest, operation: str) -> BranchRequest:
    """Return the part of `nsa` that `operation` computes; only the selected and the sliding branch read stores of another dtype."""
    return evolve(
        request, operation=operation, head_dim_v=request.head_dim_qk if operation in CHOICES else request.head_dim_v,
        kv_dtype=request.kv_dtype if operation in ("slc", "win") else request.dtype,
    )  # fmt: skip


def _reasons_against(name: str, request: BranchRequest, registry: BackendRegistry, is_named: bool) -> list[str]:
    """Return why `name` cannot serve `request`, or should not unless it is named; empty if there is no reason."""
    decision = registry.explain(request, name)
    if decision.chosen is not None and (is_named or all(one.is_eligible for one in decision.candidates if one.name == name)):
        return []
    reasons = [str(reason) for candidate in decision.candidates if candidate.name == name for reason in candidate.reasons]
    return reasons or [f"it has no {request.operation.value}"]
