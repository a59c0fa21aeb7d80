"""The default backend: scaled dot-product attention in plain torch, on any device, of any shape.

Every branch is one custom op (so torch.compile, FSDP and activation checkpointing see through it) that walks bounded
tiles and saves only its inputs, out and lse; the backward op recomputes the weights.
"""

from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from nsa_core.backends.base import BranchOutput, BranchRequest, Capability, Operation, Placement, Reason
from nsa_core.config import BlockGeometry
from nsa_core.reference import branches, select, tiles
from nsa_core.reference.padded import PaddedBatch, padded_batch

NAME = "sdpa"


def _tiles(
    branch: str, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor | None, geometry: BlockGeometry, placement: Placement
) -> Any:
    if not q.numel() or not k.shape[1]:
        return ()
    if branch == Operation.CMP:
        return branches.compressed_tiles(q, k, v, geometry, placement)
    if branch == Operation.WIN:
        return branches.window_tiles(q, k, v, geometry, placement)
    assert block_indices is not None
    return branches.selected_tiles(q, k, v, block_indices, geometry, placement)


def _placement(
    cu_seqlens: Tensor | None,
    cu_blocks: Tensor | None,
    query_start: Tensor | None,
    query_count: Tensor | None,
    max_query_count: int,
    max_key_count: int,
) -> Placement:
    return Placement(
        cu_seqlens=cu_seqlens,
        cu_blocks=cu_blocks,
        query_start=query_start,
        query_count=query_count,
        max_query_count=max_query_count,
        max_key_count=max_key_count,
    )


def _side_by_side(
    batch: PaddedBatch, branch: str, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    keys = batch.keys(branch)
    indices = None if block_indices is None else batch.tokens.spread(block_indices)
    return batch.tokens.spread(q), keys.spread(k), keys.spread(v), indices


def _no_autocast(q: Tensor) -> Any:
    """Autocast has chosen the inputs' dtype by now; inside, it would take the float32 accumulators down with it."""
    return torch.autocast(q.device.type, enabled=False)


@torch.library.custom_op("nsa_core::sdpa_attention", mutates_args=())
def sdpa_attention(
    branch: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor | None,
    geometry: list[int],
    scale: float,
    cu_seqlens: Tensor | None,
    cu_blocks: Tensor | None,
    query_start: Tensor | None,
    query_count: Tensor | None,
    max_query_count: int,
    max_key_count: int,
) -> tuple[Tensor, Tensor]:
    """Return out `(B, S, H, D_v)` and lse `(B, S, H)` of the branch "cmp", "slc" or "win"."""
    placement = _placement(cu_seqlens, cu_blocks, query_start, query_count, max_query_count, max_key_count)
    sizes = BlockGeometry(*geometry)
    with _no_autocast(q):
        batch = padded_batch(placement, q, sizes)
        if batch is None:
            return tiles.run_forward(q, k, v, _tiles(branch, q, k, v, block_indices, sizes, placement), scale)
        rows, num_rows = batch.tokens, q.shape[1]
        q, k, v, block_indices = _side_by_side(batch, branch, q, k, v, block_indices)
        out, lse = tiles.run_forward(q, k, v, _tiles(branch, q, k, v, block_indices, sizes, batch.placement), scale)
        return rows.collect(out, num_rows), rows.collect(lse, num_rows)


@sdpa_attention.register_fake
def _(branch: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=tiles.accumulator_dtype(q.dtype))


@torch.library.custom_op("nsa_core::sdpa_attention_backward", mutates_args=())
def sdpa_attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    branch: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor | None,
    geometry: list[int],
    scale: float,
    cu_seqlens: Tensor | None,
    cu_blocks: Tensor | None,
    query_start: Tensor | None,
    query_count: Tensor | None,
    max_query_count: int,
    max_key_count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of `sdpa_attention` for the gradients of out and lse; lse's may be None."""
    placement = _placement(cu_seqlens, cu_blocks, query_start, query_count, max_query_count, max_key_count)
    sizes = BlockGeometry(*geometry)
    with _no_autocast(q):
        batch = padded_batch(placement, q, sizes)
        if batch is None:
            steps = _tiles(branch, q, k, v, block_indices, sizes, placement)
            return tiles.run_backward(dout, dlse, tiles.Saved(q, k, v, out, lse), steps, scale)
        rows, keys, num_rows, num_keys = batch.tokens, batch.keys(branch), q.shape[1], k.shape[1]
        q, k, v, block_indices = _side_by_side(batch, branch, q, k, v, block_indices)
        dout, out, lse = (rows.spread(x) for x in (dout, out, lse))
        dlse = None if dlse is None else rows.spread(dlse)
        steps = _tiles(branch, q, k, v, block_indices, sizes, batch.placement)
        dq, dk, dv = tiles.run_backward(dout, dlse, tiles.Saved(q, k, v, out, lse), steps, scale)
        return rows.collect(dq, num_rows), keys.collect(dk, num_keys), keys.collect(dv, num_keys)


@sdpa_attention_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, branch: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    branch, q, k, v, block_indices, geometry, scale, *placed, max_query_count, max_key_count = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, block_indices, *output, *placed)
    ctx.constants = (branch, geometry, scale, max_query_count, max_key_count)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, block_indices, out, lse, *placed = ctx.saved_tensors
    branch, geometry, scale, max_query_count, max_key_count = ctx.constants
    dout = q.new_zeros(*q.shape[:-1], v.shape[-1]) if dout is None else dout
    arguments = (branch, q, k, v, block_indices, geometry, scale, *placed, max_query_count, max_key_count)
    dq, dk, dv = sdpa_attention_backward(dout, dlse, out, lse, *arguments)
    return None, dq, dk, dv, *[None] * 9


sdpa_attention.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("nsa_core::sdpa_select_blocks", mutates_args=())
def sdpa_select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    geometry: list[int],
    scale: float,
    cu_seqlens: Tensor | None,
    cu_blocks: Tensor | None,
    query_start: Tensor | None,
    query_count: Tensor | None,
    max_query_count: int,
    max_key_count: int,
) -> Tensor:
    """Return int32 block_indices `(B, S, G, n)`; no gradient."""
    placement = _placement(cu_seqlens, cu_blocks, query_start, query_count, max_query_count, max_key_count)
    sizes = BlockGeometry(*geometry)
    with _no_autocast(q):
        batch = padded_batch(placement, q, sizes)
        if batch is None:
            return select.select_blocks(q, k_cmp, lse, sizes, scale, placement)
        rows, num_rows = batch.tokens, q.shape[1]
        q, k_cmp, lse = rows.spread(q), batch.blocks.spread(k_cmp), rows.spread(lse)
        return rows.collect(select.select_blocks(q, k_cmp, lse, sizes, scale, batch.placement), num_rows)


@sdpa_select_blocks.register_fake
def _(q: Tensor, k_cmp: Tensor, lse: Tensor, geometry: list[int], *rest: Any) -> Tensor:
    batch, num_queries, _, _ = q.shape
    return q.new_empty(batch, num_queries, k_cmp.shape[2], geometry[3], dtype=torch.int32)


def _flatten(placement: Placement) -> tuple[Any, ...]:
    return (
        placement.cu_seqlens,
        placement.cu_blocks,
        placement.query_start,
        placement.query_count,
        placement.max_query_count,
        placement.max_key_count,
    )


def gather_pages(store: Tensor, page_table: Tensor) -> Tensor:
    """Return `(B, max_pages * page_size, G, D)`: the pages of each sequence in order; entries outside the store read some page."""
    return store[page_table.long().clamp(0, max(store.shape[0] - 1, 0))].flatten(1, 2)


@frozen(kw_only=True)
class SDPABackend:
    """One operation of the reference; eligible for every request."""

    operation: Operation = field(converter=Operation)
    name: str = NAME
    capability: Capability = Capability(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16))

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return what the capability says; the reference has no policy."""
        return self.capability.reasons_against(request)

    def preference(self, request: BranchRequest) -> int:
        """Return 0: every faster backend stands above."""
        return 0

    def __call__(self, *tensors: Any, geometry: BlockGeometry, scale: float, placement: Placement) -> Any:
        """Compute the operation; paged stores are gathered into one first."""
        sizes = list(geometry.as_tuple())
        if placement.page_table is not None:
            stores = 2 if self.operation is Operation.SELECT else 3
            tensors = tuple(
                gather_pages(tensor, placement.page_table) if 0 < place < stores else tensor for place, tensor in enumerate(tensors)
            )
        if self.operation is Operation.SELECT:
            return sdpa_select_blocks(*(tensor.detach() for tensor in tensors), sizes, scale, *_flatten(placement))
        q, k, v, *indices = tensors
        block_indices = indices[0] if indices else None
        return BranchOutput(*sdpa_attention(self.operation.value, q, k, v, block_indices, sizes, scale, *_flatten(placement)))


def sdpa_backends() -> tuple[SDPABackend, ...]:
    """Return the reference backend of every operation but the fused one."""
    return tuple(SDPABackend(operation=operation) for operation in Operation if operation is not Operation.NSA)
