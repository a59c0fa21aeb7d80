"""From keyword arguments to a call: placement, host bounds, and checks of extents. Nothing here computes attention."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_core import checks
from nsa_core.backends.base import Layout, Operation, Placement
from nsa_core.backends.registry import BackendRegistry
from nsa_core.blocks import num_compressed_blocks
from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError
from nsa_core.plugins.manager import default_registry
from nsa_core.telemetry import AttentionObserver
from nsa_core.varlen import cu_blocks_from_cu_seqlens

Backends = str | Mapping[str, str]
"""A backend's name or "auto", for every operation or by operation."""


OPERATION_NAMES = tuple(operation.value for operation in Operation)
"""A plain tuple, for torch 2.11 does not trace through an enumeration's members."""


class Placed(NamedTuple):
    """The placement keywords as the caller gave them."""

    cu_seqlens: Tensor | None
    max_seqlen: int | None
    query_start: Tensor | None
    query_count: Tensor | None
    page_table: Tensor | None


class Call(NamedTuple):
    """What the operations of one call share."""

    geometry: BlockGeometry
    scale: float
    layout: Layout
    placement: Placement
    backend: Backends
    registry: BackendRegistry
    observers: tuple[AttentionObserver, ...] = ()


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return the tensors in the autocast dtype where autocast is on; float64, as everywhere, is left alone."""
    kind = tensors[0].device.type
    # the meta device knows no autocast, and asking would raise
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def token_bound(k: Tensor, page_table: Tensor | None) -> int:
    """Return the most rows of k that one sequence can have: its extent, or that of all its pages."""
    if page_table is None:
        return k.shape[1]
    checks.check_rank("page_table", page_table, 2, "(B, max_pages)")
    return k.shape[1] * page_table.shape[1]


def compressed_token_bound(k_cmp: Tensor, geometry: BlockGeometry, page_table: Tensor | None) -> int:
    """Return the most tokens whose blocks C rows can hold: the next block would need one more."""
    num_blocks = token_bound(k_cmp, page_table)
    return num_blocks * geometry.compression_stride + geometry.compression_block_size - 1


def prepare(
    q: Tensor,
    bound: int,
    geometry: BlockGeometry,
    scale: float | None,
    placed: Placed,
    backend: Backends,
    registry: BackendRegistry | None,
) -> Call:
    """Return the call: placement checked, bounds settled, registry at hand."""
    if not isinstance(backend, str):
        for operation in backend:
            if operation not in OPERATION_NAMES:
                known = ", ".join(map(repr, OPERATION_NAMES))
                raise InputError(f"backend names the operation {operation!r} (the rule: one of {known}); fix the key")
    layout, placement = _place(q, bound, geometry, placed)
    return Call(
        geometry=geometry,
        scale=float(q.shape[-1]) ** -0.5 if scale is None else scale,
        layout=layout,
        placement=placement,
        backend=backend,
        registry=default_registry() if registry is None else registry,
    )


def _place(q: Tensor, bound: int, geometry: BlockGeometry, placed: Placed) -> tuple[Layout, Placement]:
    cu_seqlens, max_seqlen, query_start, query_count, page_table = placed
    num_queries = q.shape[1]
    if cu_seqlens is not None:
        if query_start is not None or query_count is not None or page_table is not None:
            raise InputError("cu_seqlens came with query_start, query_count or page_table (a packed batch holds whole sequences); drop one")
        checks.check_cu_seqlens(cu_seqlens, q, max_seqlen)
        longest = _longest(cu_seqlens, num_queries) if max_seqlen is None else max_seqlen
        cu_blocks = cu_blocks_from_cu_seqlens(cu_seqlens, geometry)
        return Layout.PACKED, Placement(cu_seqlens=cu_seqlens, cu_blocks=cu_blocks, max_query_count=longest, max_key_count=longest)
    for name, x in (("query_start", query_start), ("query_count", query_count)):
        if x is not None:
            checks.check_integers(name, x, 1, "(B,)", q)
            checks.check_shape(name, x, (q.shape[0],), "(B,)")
    if page_table is not None:
        checks.check_integers("page_table", page_table, 2, "(B, max_pages)", q)
        checks.check_shape("page_table", page_table, (q.shape[0], page_table.shape[1]), "(B, max_pages)")
        if query_start is None:
            raise InputError("page_table came without query_start (pages hold whole sequences, so rows need a position); give it")
    if query_start is None:
        if query_count is None:
            if max_seqlen is not None and max_seqlen < num_queries:
                raise InputError(f"max_seqlen={max_seqlen} is below S={num_queries} (it bounds every sequence); use {num_queries} or None")
            return Layout.DENSE, Placement(max_query_count=num_queries, max_key_count=num_queries)
        query_start = torch.zeros_like(query_count)
    placement = Placement(
        query_start=query_start,
        query_count=query_count,
        page_table=page_table,
        max_query_count=num_queries,
        max_key_count=bound if max_seqlen is None else min(bound, max_seqlen),
    )
    _check_query_start(placement)
    return Layout.CACHED if page_table is None else Layout.PAGED, placement


def _longest(cu_seqlens: Tensor, total: int) -> int:
    if checks.can_read(cu_seqlens) and cu_seqlens.shape[0] > 1:
        return int(cu_seqlens.diff().max())
    return total


def _check_query_start(placement: Placement) -> None:
    start, count = placement.query_start, placement.query_count
    if start is None or not checks.can_read(start) or not start.numel():
        return
    rows = placement.max_query_count if count is None else count
    if int(start.min()) < 0 or (count is not None and (int(count.min()) < 0 or int(count.max()) > placement.max_query_count)):
        raise InputError(
            f"query_start={start.tolist()}, query_count={None if count is None else count.tolist()} leave 0 .. S="
            f"{placement.max_query_count} (positions start at 0, counts at most S); fix them"
        )
    if int((start + rows).max()) > placement.max_key_count:
        raise InputError(
            f"query_start + query_count reaches {int((start + rows).max())} of {placement.max_key_count} cached tokens "
            f"(keys must already hold the queries' own tokens); write them to the cache first"
        )


def check_token_extent(name: str, k: Tensor, q: Tensor, call: Call) -> None:
    """Without a query_start, rows and keys are the same tokens; anything else would misplace the causal mask."""
    if call.layout is Layout.PAGED:
        _check_pages(name, k, k.shape[1], call)
    if call.layout in (Layout.DENSE, Layout.PACKED) and k.shape[1] != q.shape[1]:
        raise InputError(
            f"{name} has {k.shape[1]} tokens for {q.shape[1]} queries (without query_start they are the same tokens); "
            f"give query_start, or as many keys as queries"
        )
    if call.layout is Layout.CACHED and k.shape[1] < call.placement.max_key_count:
        raise InputError(
            f"{name} holds {k.shape[1]} tokens, max_seqlen allows {call.placement.max_key_count} (the store bounds it); lower max_seqlen"
        )


def check_compressed_extent(k_cmp: Tensor, q: Tensor, call: Call) -> None:
    """C must hold every block that a query may see: N_c(S), or the sum of N_c(S_i) where that can be read."""
    if call.layout is Layout.PAGED:
        _check_pages("k_cmp", k_cmp, k_cmp.shape[1] * call.geometry.compression_stride, call)
        return
    cu_blocks = call.placement.cu_blocks
    if cu_blocks is None:
        needed = num_compressed_blocks(call.placement.max_key_count, call.geometry)
    else:
        needed = int(cu_blocks[-1]) if checks.can_read(cu_blocks) else 0
    if k_cmp.shape[1] < needed:
        raise InputError(
            f"k_cmp has {k_cmp.shape[1]} blocks where the sequences have {needed} (N_c = (S - l) // d + 1 each); compress all of them"
        )


def _check_pages(name: str, store: Tensor, page_size: int, call: Call) -> None:
    """Pages up to each sequence's last query row must exist; entries beyond are never read."""
    start, count, page_table = call.placement.query_start, call.placement.query_count, call.placement.page_table
    assert start is not None
    assert page_table is not None
    rows = torch.full_like(start, call.placement.max_query_count) if count is None else count
    last_tokens = torch.where(rows > 0, start + rows, 0)
    checks.check_page_table(page_table, last_tokens, name, store.shape[0], page_size)
