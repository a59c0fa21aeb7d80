"""The default backend: scaled dot-product attention in plain torch, on any device, of any shape.

Every branch is one custom op that walks bounded tiles and saves only its inputs, out and lse; the backward op recomputes the
weights.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from attrs import field, frozen
from torch import Tensor

from nsa_core.backends.base import BranchOutput, BranchRequest, Capability, Keys, Operation, Queries, Reason
from nsa_core.backends.layouts import over_rows
from nsa_core.backends.ops import attention_op
from nsa_core.config import BlockGeometry
from nsa_core.reference import branches, select, tiles
from nsa_core.reference.append import append
from nsa_core.reference.choose import choose
from nsa_core.reference.padded import padded_batch

NAME = "sdpa"
Result = TypeVar("Result")


def without_autocast(body: Callable[..., Result]) -> Callable[..., Result]:
    """Return `body` with autocast off: it has chosen the inputs' dtype by now, and inside would take float32 sums down with it."""

    @wraps(body)
    def run(*args: Any, **kwargs: Any) -> Result:
        queries = next(x for x in args if isinstance(x, Queries))
        with torch.autocast(queries.q.device.type, enabled=False):
            return body(*args, **kwargs)

    return run


def _tiles(operation: Operation, queries: Queries, keys: Keys, choice: Sequence[Tensor], geometry: BlockGeometry) -> Iterable[tiles.Tile]:
    if not queries.q.numel() or not keys.k.shape[1]:
        return ()
    if operation is Operation.CMP:
        return branches.compressed_tiles(queries, keys, geometry)
    if operation is Operation.WIN:
        return branches.window_tiles(queries, keys, geometry)
    return branches.selected_tiles(queries, keys, choice[0], geometry)


@without_autocast
def _forward(
    operation: Operation, queries: Queries, keys: Keys, *choice: Tensor, geometry: BlockGeometry, scale: float, needs_grad: bool
) -> BranchOutput:
    batch, num_rows = padded_batch(queries, keys), queries.q.shape[1]
    if batch is None:
        return BranchOutput(*tiles.run_forward(queries, keys, _tiles(operation, queries, keys, choice, geometry), scale))
    choice = tuple(map(batch.queries.spread, choice))
    queries, keys = batch.spread(queries, keys)
    results = tiles.run_forward(queries, keys, _tiles(operation, queries, keys, choice, geometry), scale)
    return BranchOutput(*(batch.queries.collect(x, num_rows) for x in results))


@without_autocast
def _backward(
    operation: Operation,
    grads: tuple[Tensor | None, Tensor | None],
    results: tuple[Tensor, Tensor],
    queries: Queries,
    keys: Keys,
    *choice: Tensor,
    geometry: BlockGeometry,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dout = torch.zeros_like(results[0]) if grads[0] is None else grads[0]
    dlse, (out, lse) = grads[1], results
    batch, num_rows, num_keys = padded_batch(queries, keys), queries.q.shape[1], keys.k.shape[1]
    if batch is None:
        steps = _tiles(operation, queries, keys, choice, geometry)
        return tiles.run_backward((dout, dlse), (out, lse), queries, keys, steps, scale)
    choice = tuple(map(batch.queries.spread, choice))
    dout, out, lse = map(batch.queries.spread, (dout, out, lse))
    dlse = None if dlse is None else batch.queries.spread(dlse)
    queries, keys = batch.spread(queries, keys)
    steps = _tiles(operation, queries, keys, choice, geometry)
    dq, dk, dv = tiles.run_backward((dout, dlse), (out, lse), queries, keys, steps, scale)
    return batch.queries.collect(dq, num_rows), batch.keys.collect(dk, num_keys), batch.keys.collect(dv, num_keys)


@without_autocast
def _select(queries: Queries, cmp: Keys, lse: Tensor, *, geometry: BlockGeometry, scale: float, needs_grad: bool) -> Tensor:
    batch, num_rows = padded_batch(queries, cmp), queries.q.shape[1]
    if batch is None:
        return select.select_blocks(queries, cmp, lse, geometry, scale)
    return batch.queries.collect(select.select_blocks(*batch.spread(queries, cmp), batch.queries.spread(lse), geometry, scale), num_rows)


COMPUTE: dict[Operation, Callable[..., Any]] = {
    operation: partial(
        over_rows,
        attention_op(f"nsa_core::sdpa_{operation}", partial(_forward, operation), partial(_backward, operation), operation=operation),
    )
    for operation in (Operation.CMP, Operation.SLC, Operation.WIN)
} | {
    Operation.SELECT: partial(over_rows, attention_op("nsa_core::sdpa_select", _select, operation=Operation.SELECT)),
    Operation.APPEND: append,
    Operation.CHOOSE: choose,
}
"""The function of each operation."""


@frozen(kw_only=True)
class SDPABackend:
    """One operation of the reference; eligible for every request."""

    operation: Operation = field(converter=Operation)
    name: str = NAME
    capability: Capability = Capability(
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16), stored_dtypes=(torch.float8_e4m3fn,)
    )

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return what the capability says; the reference has no policy."""
        return self.capability.reasons_against(request)

    def preference(self, request: BranchRequest) -> int:
        """Return 0: every faster backend stands above."""
        return 0

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Compute the operation on the operands that its protocol in `backends.base` lists."""
        return COMPUTE[self.operation](*operands, **keywords)


def sdpa_backends() -> tuple[SDPABackend, ...]:
    """Return the reference backend of every operation but the fused one."""
    return tuple(SDPABackend(operation=operation) for operation in Operation if operation is not Operation.NSA)
