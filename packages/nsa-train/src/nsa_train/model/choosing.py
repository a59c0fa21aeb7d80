"""The inspection of models: backends of SELECT that replace all others or record their choices, and notes of what a pass computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nsa_core import (
    BackendRegistry,
    BlockGeometry,
    BranchRequest,
    Capability,
    Keys,
    NativeSparseAttention,
    Operation,
    Queries,
    Reason,
    load_plugins,
)
from nsa_core.decoder import Decoder
from nsa_core.dispatch import make_call, run
from nsa_core.telemetry import LayerTelemetry

Watch = TypeVar("Watch", bound=LayerTelemetry)


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


class PassNote(LayerTelemetry):
    """Keeps the gates and the chosen blocks of a layer's last pass."""

    needs_branches = False
    gates: Tensor | None = None
    """`(B, S, H, 3)`."""
    block_indices: Tensor | None = None
    """int32 `(B, S, G, n)`."""

    def record_gates(self, gates: Tensor, has_compressed: Tensor, branches: tuple[str, ...]) -> None:
        """Keep the gates."""
        self.gates = gates

    def record_selection(self, block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> None:
        """Keep the choice."""
        self.block_indices = block_indices


@contextmanager
def watched(layers: Sequence[NativeSparseAttention], kind: type[Watch]) -> Iterator[list[Watch]]:
    """Attach telemetry of a `kind` to `layers` while the block runs, in place of their own."""
    collected = [kind() for _ in layers]
    with ExitStack() as stack:
        for layer, telemetry in zip(layers, collected, strict=True):
            stack.callback(setattr, layer, "telemetry", layer.telemetry)
            layer.telemetry = telemetry
        yield collected


def watch_inputs(decoder: Decoder, ids: Tensor, each: Callable[[int, Tensor], object]) -> None:
    """Run `decoder` over `ids` `(S,)`. Call `each` for each layer with its number and the input of its attention, `(1, S, hidden)`."""

    def note(index: int, layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        each(index, inputs[0])

    blocks: Any = decoder.blocks
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.callback(block.attention.register_forward_pre_hook(partial(note, index)).remove)
        decoder.hidden(decoder.embedding(ids[None]))
