"""A registry that records which backends ran, and the check of a named backend."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

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


def check_backend(name: str, measured: Iterable[tuple[str, Case]], device: torch.device) -> None:
    """Check that the `--backend` of a measurement can serve a part of it; `measured`: operations (some of OURS) and their cases.

    The results give the reason for each case that it cannot serve.

    Raises:
        OptionError: with all reasons, if no plug-in has the backend, or it can serve none of the cases.
    """
    if name == "auto":
        return
    check_name(name)
    registry, reasons = RouteRecorder.of_installed(), dict[str, None]()
    for operation, case in measured:
        against = reasons_against(name, operation, case, device, registry)
        if not against:
            return
        reasons |= dict.fromkeys(against)
    raise OptionError(f"--backend={name!r} cannot serve what is to be measured ({name}: {', '.join(reasons)}); use --backend auto")


def reasons_against(
    name: str, operation: str, case: Case, device: torch.device, registry: BackendRegistry, *, is_named: bool = True
) -> list[str]:
    """Return why the backend `name` cannot serve the forward pass of `operation` on `case`; empty if it can.

    `is_named`: policy reasons do not count, as if a user had named the backend.
    """
    requests = _requests(name, operation, case, device, registry)
    return list(dict.fromkeys(reason for request in requests for reason in _reasons_against(name, request, registry, is_named)))


def _requests(name: str, operation: str, case: Case, device: torch.device, registry: BackendRegistry) -> list[BranchRequest]:
    """Return the requests of the forward pass of `operation`; `nsa` is four requests if `name` has no backend for it."""
    is_split = operation == "nsa" and not registry.has(Operation.NSA, name)
    parts = [part for part in OURS if part != "nsa"] if is_split else [operation]
    shape = case.shape
    return [
        BranchRequest(
            operation=part,
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
            head_dim_v=shape.head_dim_qk if part in ("select", "choose") else shape.head_dim_v,
            layout=Layout.DENSE if case.lengths is None else Layout.PACKED,
        )
        for part in parts
    ]


def _reasons_against(name: str, request: BranchRequest, registry: BackendRegistry, is_named: bool) -> list[str]:
    """Return why `name` cannot serve `request`, or should not unless it is named; empty if there is no reason."""
    decision = registry.explain(request, name)
    if decision.chosen is not None and (is_named or all(one.is_eligible for one in decision.candidates if one.name == name)):
        return []
    reasons = [str(reason) for candidate in decision.candidates if candidate.name == name for reason in candidate.reasons]
    return reasons or [f"it has no {request.operation.value}"]
