"""The reference backend `sdpa`: scaled dot-product attention in plain torch, for any device and any shape.

Every branch is one custom op, which computes tile by tile in bounded scratch memory. It saves only its inputs, out and lse; the backward op
recomputes the weights.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

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
from nsa_core.rope import rotate_step

NAME = "sdpa"


TILES: dict[Operation, Callable[..., Iterable[tiles.Tile]]] = {
    Operation.CMP: branches.compressed_tiles,
    Operation.SLC: branches.selected_tiles,
    Operation.WIN: branches.window_tiles,
}
"""Operation -> the function that cuts it into tiles; takes the operands and the geometry."""


def _tiles(operation: Operation, queries: Queries, keys: Keys, choice: Sequence[Tensor], geometry: BlockGeometry) -> Iterable[tiles.Tile]:
    return TILES[operation](queries, keys, *choice, geometry) if queries.q.numel() and keys.k.shape[1] else ()


def _over_sequences(
    compute: Callable[..., Sequence[Tensor]], queries: Queries, keys: Keys, *rows: Tensor | None, num_of_keys: int = 0
) -> list[Tensor]:
    """Return the results of `compute` for the operands and for `rows`, tensors with a row per query. Packed sequences run as a batch if possible.

    The last `num_of_keys` results have a row per key, the others a row per query.
    """
    # the inputs already have the autocast dtype; autocast here would also compute the float32 sums in it
    with torch.autocast(queries.q.device.type, enabled=False):
        batch = padded_batch(queries, keys)
        if batch is None:
            return list(compute(queries, keys, *rows))
        found = compute(*batch.spread(queries, keys), *(x if x is None else batch.queries.spread(x) for x in rows))
        num_of_queries = len(found) - num_of_keys
        of_queries = [batch.queries.collect(x, queries.q.shape[1]) for x in found[:num_of_queries]]
        return of_queries + [batch.keys.collect(x, keys.k.shape[1]) for x in found[num_of_queries:]]


def _forward(
    operation: Operation, queries: Queries, keys: Keys, *choice: Tensor, geometry: BlockGeometry, scale: float, needs_grad: bool
) -> BranchOutput:
    def compute(queries: Queries, keys: Keys, *choice: Tensor) -> Sequence[Tensor]:
        return tiles.run_forward(queries, keys, _tiles(operation, queries, keys, choice, geometry), scale)

    return BranchOutput(*_over_sequences(compute, queries, keys, *choice))


def _backward(
    operation: Operation,
    grads: tuple[Tensor | None, Tensor | None],
    results: tuple[Tensor, Tensor],
    queries: Queries,
    keys: Keys,
    *choice: Tensor,
    geometry: BlockGeometry,
    scale: float,
) -> list[Tensor]:
    def compute(
        queries: Queries, keys: Keys, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *choice: Tensor
    ) -> Sequence[Tensor]:
        return tiles.run_backward((dout, dlse), (out, lse), queries, keys, _tiles(operation, queries, keys, choice, geometry), scale)

    dout = torch.zeros_like(results[0]) if grads[0] is None else grads[0]
    return _over_sequences(compute, queries, keys, dout, grads[1], *results, *choice, num_of_keys=2)


def _select(queries: Queries, cmp: Keys, lse: Tensor, *, geometry: BlockGeometry, scale: float, needs_grad: bool) -> Tensor:
    def compute(queries: Queries, cmp: Keys, lse: Tensor) -> Sequence[Tensor]:
        return [select.select_blocks(queries, cmp, lse, geometry, scale)]

    return _over_sequences(compute, queries, cmp, lse)[0]


def _declared(operation: Operation) -> Callable[..., Any]:
    passes = (_select,) if operation is Operation.SELECT else (partial(_forward, operation), partial(_backward, operation))
    return partial(over_rows, attention_op(f"nsa_core::sdpa_{operation}", *passes, operation=operation))


COMPUTE: dict[Operation, Callable[..., Any]] = {
    **{operation: _declared(operation) for operation in (Operation.CMP, Operation.SELECT, Operation.SLC, Operation.WIN)},
    Operation.APPEND: append,
    Operation.CHOOSE: choose,
    Operation.ROTATE: rotate_step,
}
"""Operation -> the function that computes it."""


@frozen(kw_only=True)
class SDPABackend:
    """One operation of the reference backend; `"auto"` may choose it for every request of its dtypes."""

    operation: Operation = field(converter=Operation)
    name: str = NAME
    capability: Capability = Capability(
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16), stored_dtypes=(torch.float8_e4m3fn,)
    )

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return the reasons from the capability; the reference has no policy."""
        return self.capability.reasons_against(request)

    def preference(self, request: BranchRequest) -> int:
        """Return 0, which is below every faster backend."""
        return 0

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Compute the operation on the operands that its protocol in `backends.base` lists."""
        return COMPUTE[self.operation](*operands, **keywords)


def sdpa_backends() -> tuple[SDPABackend, ...]:
    """Return the reference backend of every operation except the fused one."""
    return tuple(SDPABackend(operation=operation) for operation in Operation if operation is not Operation.NSA)
