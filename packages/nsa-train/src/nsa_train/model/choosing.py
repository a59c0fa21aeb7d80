"""Backends of SELECT for the inspection of models: the only one in a registry, and one that records its choices."""

from typing import Any, NamedTuple

from torch import Tensor

from nsa_core import BackendRegistry, BlockGeometry, BranchRequest, Capability, Keys, Operation, Queries, Reason, load_plugins
from nsa_core.dispatch import make_call, run


class ServingBackend:
    """The base of a backend that serves every request of its operation; `registry_of` makes it the only one."""

    name = "serving"
    operation = Operation.SELECT
    capability = Capability()

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return nothing: it serves every request."""
        return ()

    def preference(self, request: BranchRequest) -> int:
        """Return the preference of the reference."""
        return 0


def registry_of(backend: Any) -> BackendRegistry:
    """Return the installed backends, with `backend` as the only one of its operation, and without fused ones."""
    replaced = (backend.operation, Operation.NSA)
    others = (one for one in load_plugins().registry().backends if one.operation not in replaced)
    return BackendRegistry((*others, backend))


class Choice(NamedTuple):
    """One call of a layer's choice."""

    block_indices: Tensor
    """int32 `(S, G, n)`."""
    q: Tensor
    """`(S, H, D_k)`."""
    k_cmp: Tensor
    """`(C, G, D_k)`."""
    scale: float
    geometry: BlockGeometry


class NotedChoice(ServingBackend):
    """A backend of SELECT that returns the choice of an installed backend, and records it with its operands."""

    name = "noted"

    def __init__(self, installed: BackendRegistry) -> None:
        """Record the choices of `installed`."""
        self._installed = installed
        self.last: Choice | None = None

    def __call__(self, queries: Queries, cmp: Keys, lse: Tensor, /, *, geometry: BlockGeometry, scale: float) -> Tensor:
        """Return block_indices int32 `(B, S, G, n)`."""
        call = make_call(queries.q, geometry, scale, "auto", self._installed)
        chosen: Tensor = run(Operation.SELECT, call, queries, cmp, lse)
        self.last = Choice(chosen[0], queries.q[0], cmp.k[0], scale, geometry)
        return chosen
