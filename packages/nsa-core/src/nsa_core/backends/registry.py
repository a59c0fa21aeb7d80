"""The registry of backends and the choice among them, with reasons.

A named backend never falls back to another: if it is incapable, routing raises; if it has only policy reasons against it, it runs
with a warning. "auto" takes the eligible backend of highest preference.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve, frozen

from nsa_core.backends.base import BranchBackend, BranchRequest, NotingBackend, Operation, Reason, ReasonKind
from nsa_core.config import BlockGeometry
from nsa_core.errors import BackendUnavailableError, DuplicateBackendError, InputError
from nsa_core.tracing import constant_when_traced

AUTO = "auto"
MAX_ROUTES = 4096
"""Maximum number of cached requests; a full cache is cleared."""


RouteObserver = Callable[[str, BranchRequest, str | None], None]
"""Called at each choice with the requested backend, the request, and the chosen backend's name (None if none serves)."""


@frozen(kw_only=True)
class Candidate:
    """One backend with its reasons against one request."""

    name: str
    preference: int
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()
    """Sentences for the user on how the backend serves the request; they do not count against it."""

    @property
    def is_eligible(self) -> bool:
        """Return True if "auto" may take it."""
        return not self.reasons

    @property
    def is_capable(self) -> bool:
        """Return True if the backend can run the request; policy reasons do not count."""
        return all(reason.kind is ReasonKind.POLICY for reason in self.reasons)


@frozen(kw_only=True)
class RoutingDecision:
    """Which backend serves a request, and the reasons against each of the others."""

    request: BranchRequest
    backend: str
    """The requested backend: "auto" or a name."""
    chosen: str | None
    """The name of the backend that serves the request; None if none does."""
    candidates: tuple[Candidate, ...]
    """Every backend of the operation, most preferred first."""

    def __str__(self) -> str:
        lines = [f"{self.request.operation}: {self.chosen or 'none'} (asked for: {self.backend})"]
        for candidate in self.candidates:
            verdict = "; ".join(str(reason) for reason in candidate.reasons) or "eligible"
            lines.append(f"  {candidate.name} (preference {candidate.preference}): {verdict}")
            lines += [f"    note: {note}" for note in candidate.notes]
        return "\n".join(lines)


PARTS = ("name", "operation", "capability", "reasons_against", "preference", "__call__")
"""The attributes of a `BranchBackend`."""


def check_is_backend(backend: Any) -> None:
    """Raise InputError unless routing can ask `backend`."""
    if isinstance(backend, type):
        raise InputError(f"{backend!r} is a class (a backend is an object); use {backend.__name__}()")
    # no isinstance: from Python 3.12 on it misses attributes that a wrapper of a backend has through __getattr__
    if lacks := [part for part in PARTS if not (callable(backend) if part == "__call__" else hasattr(backend, part))]:
        raise InputError(f"{backend!r} is no BranchBackend ({', '.join(PARTS)}) and lacks {', '.join(lacks)}; add it")
    if backend.operation not in tuple(Operation):
        raise InputError(
            f"{backend!r} implements operation {backend.operation!r} (the rule: one of {', '.join(Operation)}); use one of them"
        )
    name: object = backend.name
    if not isinstance(name, str) or name in ("", AUTO):
        raise InputError(f"{backend!r} has the name {name!r} (the rule: a string that is not empty and not 'auto'); rename it")


class BackendRegistry:
    """Backends by operation and name. Routing is cached per request."""

    def __init__(self, backends: tuple[BranchBackend, ...] = ()) -> None:
        """Register `backends`, in order.

        Raises:
            DuplicateBackendError: if two backends have the same name and operation, or one is named "auto".
            InputError: for a backend that `register` refuses.
        """
        self.backends: list[BranchBackend] = []
        self.observers: list[RouteObserver] = []
        """Functions that are called whenever a call chooses a backend, also if the choice is cached."""
        self._routes: dict[tuple[Any, ...], tuple[int, BranchRequest]] = {}
        self._indices: dict[tuple[str, Operation | str], int] = {}
        self._warned: set[int] = set()
        for backend in backends:
            self.register(backend)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle: without remembered choices, because another machine may choose otherwise."""
        return self.__dict__ | {"_routes": {}}

    def register(self, backend: BranchBackend) -> None:
        """Add `backend`.

        Raises:
            DuplicateBackendError: if its name is taken for its operation, or is "auto".
            InputError: for anything but an object with the parts of a `BranchBackend`.
        """
        if getattr(backend, "name", None) == AUTO:
            raise DuplicateBackendError(f"{backend!r} calls itself 'auto', which names routing itself; use another name")
        check_is_backend(backend)
        if self.has(backend.operation, backend.name):
            known = self.named(backend.operation, backend.name)
            raise DuplicateBackendError(
                f"backend {backend.name!r} for operation {str(backend.operation)!r} is registered twice, by "
                f"{_origin(known)} and {_origin(backend)} (names are unique per operation); rename or uninstall one"
            )
        self._indices[backend.name, backend.operation] = len(self.backends)
        self.backends.append(backend)
        self._routes.clear()

    def has(self, operation: Operation | str, name: str) -> bool:
        """Return True if `name` implements `operation`."""
        return (name, operation) in self._indices

    def named(self, operation: Operation | str, name: str) -> BranchBackend:
        """Return the backend `name` of `operation`.

        Raises:
            BackendUnavailableError: if there is none; the message lists those that exist.
        """
        if self.has(operation, name):
            return self.backends[self._indices[name, operation]]
        known = [backend.name for backend in self.backends if backend.operation == operation]
        raise BackendUnavailableError(
            f"no backend {name!r} for operation {str(operation)!r} is installed; use {' or '.join(map(repr, [AUTO, *known]))}"
        )

    def explain(self, request: BranchRequest, backend: str = AUTO) -> RoutingDecision:
        """Return the decision for `request` with all reasons. If no backend serves the request, `chosen` is None; no error is raised."""
        found = [evolve(_candidate(known, request), notes=_notes_on(known, request)) for known in self._by_preference(request)]
        takers = [c for c in found if (c.is_eligible if backend == AUTO else c.name == backend and c.is_capable)]
        chosen = takers[0].name if takers else None
        return RoutingDecision(request=request, backend=backend, chosen=chosen, candidates=tuple(found))

    def _by_preference(self, request: BranchRequest) -> list[BranchBackend]:
        """Return the backends of the request's operation, most preferred first."""
        found = [known for known in self.backends if known.operation == request.operation]
        return sorted(found, key=lambda known: (-known.preference(request), known.name))

    def resolve(self, request: BranchRequest, backend: str = AUTO) -> BranchBackend:
        """Return the backend that serves `request`.

        Raises:
            BackendUnavailableError: if `backend` is unknown or incapable, or "auto" finds none; the message lists all reasons.
        """
        return self.backends[self._choice(request, backend, optional=False)[0]]

    @constant_when_traced
    def resolve_index(self, backend: str, optional: bool, **facts: Any) -> int:
        """Return the index in `backends` of the choice for a request, and call the observers.

        It takes and returns constants only, so torch.compile can call it while it traces a graph; observers are called only then. `facts`:
        the fields of a BranchRequest, with the geometry as a tuple; compute_capability and deterministic are read from torch. `optional`:
        if "auto" finds no eligible backend, return -1 instead of raising an error.
        """
        return self.route((backend, *facts.values()), backend, optional, lambda: facts)

    def route(self, key: tuple[Any, ...], backend: str, optional: bool, facts: Callable[[], dict[str, Any]]) -> int:
        """Return what `resolve_index` returns for `facts()`. Calls with equal keys share one choice.

        Only the first of them calls `facts`; all of them call the observers.
        A key must hold `backend` and all that `facts` reads, except torch's deterministic flag, which is added here. `register` clears all choices.
        """
        key = torch.are_deterministic_algorithms_enabled(), optional, key
        found = self._routes.get(key)
        if found is None:
            found = self._remember(key, self._choice(_request_of(**facts()), backend, optional))
        index, request = found
        for observer in self.observers:
            observer(backend, request, None if index < 0 else self.backends[index].name)
        return index

    def _choice(self, request: BranchRequest, backend: str, optional: bool) -> tuple[int, BranchRequest]:
        """Return the index of the chosen backend in `backends`, and `request`."""
        key = backend, optional, request
        return self._routes.get(key) or self._remember(key, (self._choose(request, backend, optional), request))

    def _remember(self, key: tuple[Any, ...], found: tuple[int, BranchRequest]) -> tuple[int, BranchRequest]:
        """Store `found` as the choice for `key`, and return it."""
        if len(self._routes) >= MAX_ROUTES:
            self._routes.clear()
        self._routes[key] = found
        return found

    def _choose(self, request: BranchRequest, backend: str, optional: bool) -> int:
        if backend != AUTO:
            self.named(request.operation, backend)
        for known in self._by_preference(request):
            # the loop ends at the first backend that serves, because some backends compile a kernel to answer
            if backend in (AUTO, known.name):
                candidate = _candidate(known, request)
                if candidate.is_eligible or (candidate.is_capable and backend != AUTO):
                    return self._taken(candidate, request)
        if optional and backend == AUTO:
            return -1
        why = (
            "no backend serves this request (backend='auto' takes an eligible one); "
            "name one that only policy refuses, or fix the reasons against them"
            if backend == AUTO
            else f"backend {backend!r} cannot serve this request (a named backend never falls back); "
            f"use backend='auto' or fix the reasons against it"
        )
        raise BackendUnavailableError(f"{why}:\n{self.explain(request, backend)}")

    def _taken(self, candidate: Candidate, request: BranchRequest) -> int:
        """Return the index of the backend that serves `request`, with a warning if policy is against it."""
        index = self._indices[candidate.name, request.operation]
        if candidate.reasons and index not in self._warned:
            self._warned.add(index)
            against = "; ".join(reason.message for reason in candidate.reasons)
            warnings.warn(
                f"backend {candidate.name!r} for {request.operation.value!r} runs against policy because it was named: {against}",
                stacklevel=2,
            )
        return index


def _notes_on(known: BranchBackend | NotingBackend, request: BranchRequest) -> tuple[str, ...]:
    return tuple(known.notes_on(request)) if hasattr(known, "notes_on") else ()


def _candidate(known: BranchBackend, request: BranchRequest) -> Candidate:
    """Return `known` with its reasons against `request`, without notes."""
    return Candidate(name=known.name, preference=known.preference(request), reasons=tuple(known.reasons_against(request)))


def _request_of(geometry: tuple[int, ...], device_index: int, **fields: Any) -> BranchRequest:
    """Return the request that the constants of a call describe; compute capability and determinism are read from torch."""
    return BranchRequest(
        geometry=BlockGeometry(*geometry),
        compute_capability=torch.cuda.get_device_capability(device_index) if fields["device_type"] == "cuda" else None,
        device_index=device_index if fields["device_type"] == "cuda" else None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **fields,
    )


def _origin(backend: BranchBackend) -> str:
    return f"{type(backend).__module__}.{type(backend).__qualname__}"
