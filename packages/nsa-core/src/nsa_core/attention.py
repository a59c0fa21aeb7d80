"""The public operations. `nsa_attention` is the main path: compressed, select, selected, window, gates (Eq. 5).

Layouts: q (B, S, H, D_k), k (B, T, G, D_k), v (B, T, G, D_v), out (B, S, H, D_v) in q's dtype, lse (B, S, H) natural log.

Keyword arguments that every operation takes:
    geometry: block sizes, see `BlockGeometry`.
    scale: factor of the scores; None is D_k ** -0.5.
    cu_seqlens: int32 (N + 1,), packed sequences in one row (B = 1); positions and blocks count from each one's start.
    max_seqlen: host bound on tokens per sequence; None: the longest on a CPU, the tensor's extent elsewhere.
    query_start: int32 (B,), position of each sequence's first query row in keys that hold the whole sequence (a cache).
    query_count: int32 (B,), valid query rows per sequence; rows beyond give out 0, lse -inf.
    page_table: int32 (B, max_pages), pages of each sequence in stores (pages, page_size, G, D); needs query_start.
    backend: "auto", a backend's name, or names by operation; a name never falls back.
    registry: where backends are looked up; None: those of the installed packages.

Under torch.autocast q, k and v are cast to the autocast dtype. Every operation raises InputError for tensors that do not
fit and BackendUnavailableError where a named backend cannot serve. Nothing waits for a GPU.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_core import checks
from nsa_core.backends.base import BranchOutput, BranchRequest, Layout, Operation, Placement
from nsa_core.backends.registry import AUTO, BackendRegistry, RoutingDecision
from nsa_core.blocks import num_compressed_blocks
from nsa_core.config import BRANCHES, BlockGeometry
from nsa_core.errors import InputError
from nsa_core.plugins.manager import default_registry
from nsa_core.reference.rows import rows_of
from nsa_core.telemetry import AttentionObserver
from nsa_core.varlen import cu_blocks_from_cu_seqlens

Backends = str | Mapping[str, str]
INT32_MAX = 2**31 - 1
"""Positions are int32: no sequence is longer."""


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


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    geometry: BlockGeometry,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    query_start: Tensor | None = None,
    query_count: Tensor | None = None,
    page_table: Tensor | None = None,
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
) -> BranchOutput:
    """Return the attention of each query over the compressed blocks that lie wholly in its past (Eq. 7, 8).

    k_cmp (B, C, G, D_k), v_cmp (B, C, G, D_v) are already compressed; query t sees block i iff i*d + l - 1 <= t, so
    queries before l - 1 give out 0, lse -inf. Packed, the sequences' blocks stand one after another; rows beyond the
    last block are never read and get zero gradient. See the module's docstring for the keywords.
    """
    q, k_cmp, v_cmp = _autocast(q, k_cmp, v_cmp)
    checks.check_query(q)
    checks.check_pair(q, k_cmp, v_cmp, "_cmp", paged=page_table is not None)
    bound = _compressed_token_bound(k_cmp, geometry, page_table)
    placed = Placed(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    call = _prepare(q, bound, geometry, scale, placed, backend, registry)
    _check_compressed_extent(k_cmp, q, call)
    result: BranchOutput = _run(Operation.CMP, (q, k_cmp, v_cmp), call)
    return result


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    geometry: BlockGeometry,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    query_start: Tensor | None = None,
    query_count: Tensor | None = None,
    page_table: Tensor | None = None,
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
) -> Tensor:
    """Return block_indices int32 `(B, S, G, n)`, ascending, -1 after the last: the blocks of each query (Eq. 9-11).

    lse `(B, S, H)` is that of `compressed_attention`, which normalises the weights. All H/G heads of a group share one
    choice; equal scores go to the lower block; indices count from the sequence's own start. No gradient. See the
    module's docstring for the keywords.
    """
    q, k_cmp = _autocast(q, k_cmp)
    checks.check_query(q)
    checks.check_pair(q, k_cmp, None, "_cmp", paged=page_table is not None)
    checks.check_shape("lse", lse, tuple(q.shape[:3]), "(B, S, H)")
    checks.check_floating("lse", lse)
    checks.check_device("lse", lse, "q", q)
    bound = _compressed_token_bound(k_cmp, geometry, page_table)
    placed = Placed(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    call = _prepare(q, bound, geometry, scale, placed, backend, registry)
    _check_compressed_extent(k_cmp, q, call)
    result: Tensor = _run(Operation.SELECT, (q, k_cmp, lse), call)
    return result


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    geometry: BlockGeometry,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    query_start: Tensor | None = None,
    query_count: Tensor | None = None,
    page_table: Tensor | None = None,
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
) -> BranchOutput:
    """Return the attention of each query over the tokens s <= t of its chosen blocks (Eq. 12).

    block_indices int32 `(B, S, G, n)` for any n >= 1; -1 means none and may stand anywhere, a row of only -1 gives out 0, lse -inf and
    zero gradients. On a CPU a block named twice or outside 0 .. own is refused; on a GPU what lies outside counts as
    absent. See the module's docstring for the keywords.
    """
    q, k, v = _autocast(q, k, v)
    checks.check_query(q)
    checks.check_pair(q, k, v, "", paged=page_table is not None)
    checks.check_integers("block_indices", block_indices, 4, "(B, S, G, n)", q)
    rows = (q.shape[0], q.shape[1], k.shape[2])
    checks.check_shape("block_indices", block_indices, (*rows, max(1, block_indices.shape[3])), "(B, S, G, n)")
    placed = Placed(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    call = _prepare(q, _token_bound(k, page_table), geometry, scale, placed, backend, registry)
    _check_token_extent("k", k, q, call)
    if checks.can_read(block_indices):
        positions = rows_of(call.placement, q.shape[0], q.shape[1], q.device).positions
        checks.check_block_indices(block_indices, positions, geometry)
    result: BranchOutput = _run(Operation.SLC, (q, k, v, block_indices), call)
    return result


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    geometry: BlockGeometry,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    query_start: Tensor | None = None,
    query_count: Tensor | None = None,
    page_table: Tensor | None = None,
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
) -> BranchOutput:
    """Return the attention of query t over the `window_size` tokens t - w < s <= t, its own included.

    See the module's docstring for the keywords.
    """
    q, k, v = _autocast(q, k, v)
    checks.check_query(q)
    checks.check_pair(q, k, v, "", paged=page_table is not None)
    placed = Placed(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    call = _prepare(q, _token_bound(k, page_table), geometry, scale, placed, backend, registry)
    _check_token_extent("k", k, q, call)
    result: BranchOutput = _run(Operation.WIN, (q, k, v), call)
    return result


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_slc: Tensor | None,
    v_slc: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor,
    *,
    geometry: BlockGeometry,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    query_start: Tensor | None = None,
    query_count: Tensor | None = None,
    page_table: Tensor | None = None,
    window_query_start: Tensor | None = None,
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
    observers: tuple[AttentionObserver, ...] = (),
) -> Tensor:
    """Return the gated sum of the three branches `(B, S, H, D_v)` (Eq. 5).

    gates `(B, S, H, 3)`, any float dtype: cmp, slc, win; never changed here. A branch whose v is None is absent and its
    gate ignored; the selected branch needs k_cmp all the same. `window_query_start` int32 (B,): the first query row's
    place in k_win where that holds only each sequence's last tokens. With `observers` the branches run one by one and
    each observer is told. See the module's docstring for the other keywords.
    """
    q, *stores = _autocast(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)
    checks.check_query(q)
    checks.check_shape("gates", gates, (*q.shape[:3], 3), "(B, S, H, 3): cmp, slc, win")
    checks.check_floating("gates", gates)
    if window_query_start is not None:
        checks.check_integers("window_query_start", window_query_start, 1, "(B,)", q)
        checks.check_shape("window_query_start", window_query_start, (q.shape[0],), "(B,)")
    checks.check_device("gates", gates, "q", q)
    branches = _checked_branches(q, stores, page_table, window_query_start)
    placed = Placed(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    bound = _sequence_bound(branches, geometry, placed, window_query_start)
    call = _prepare(q, bound, geometry, scale, placed, backend, registry)._replace(observers=observers)
    _check_extents(q, branches, call, window_query_start)
    if all(store is not None for store in stores) and window_query_start is None and not observers:
        fused = _fused_backend(q, branches, call)
        if fused is not None:
            return fused(q, *stores, gates, geometry=geometry, scale=call.scale, placement=call.placement)
    return _combine(q, gates, _branch_outputs(q, branches, call, window_query_start), call)


class Branches(NamedTuple):
    """Keys and values of the branches; None where a branch is absent."""

    k_cmp: Tensor | None
    v_cmp: Tensor | None
    k_slc: Tensor | None
    v_slc: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None


def _branch_outputs(q: Tensor, branches: Branches, call: Call, window_query_start: Tensor | None) -> dict[int, Tensor]:
    """Return the outputs of the branches that exist, by their place among the gates."""
    k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = branches
    outputs = {}
    lse = None
    if k_cmp is not None and (v_cmp is not None or v_slc is not None):
        # without the branch its lse is still what normalises the scores of the choice
        compressed = _run(Operation.CMP, (q, k_cmp, k_cmp.detach() if v_cmp is None else v_cmp), call)
        lse = compressed.lse
        if v_cmp is not None:
            outputs[0] = compressed.out
    if k_slc is not None and v_slc is not None:
        block_indices = _run(Operation.SELECT, (q, k_cmp, lse), call)
        outputs[1] = _run(Operation.SLC, (q, k_slc, v_slc, block_indices), call).out
        if call.observers:
            positions = rows_of(call.placement, q.shape[0], q.shape[1], q.device).positions
            for observer in call.observers:
                observer.record_selection(block_indices, positions, call.geometry)
    if k_win is not None and v_win is not None:
        outputs[2] = _run(Operation.WIN, (q, k_win, v_win), _window_call(call, k_win, window_query_start)).out
    return outputs


def _window_call(call: Call, k_win: Tensor, window_query_start: Tensor | None) -> Call:
    if window_query_start is None:
        return call
    placement = call.placement._replace(query_start=window_query_start, page_table=None, max_key_count=k_win.shape[1])
    return call._replace(layout=Layout.CACHED, placement=placement)


def _combine(q: Tensor, gates: Tensor, outputs: dict[int, Tensor], call: Call) -> Tensor:
    """Return the gated sum of `outputs`, accumulated in at least float32, in q's dtype."""
    acc = torch.promote_types(q.dtype, torch.float32)
    total = None
    for place, out in outputs.items():
        for observer in call.observers:
            observer.record_branch(BRANCHES[place], out)
        term = out.to(acc) * gates[..., place, None].to(acc)
        total = term if total is None else total + term
    assert total is not None
    return total.to(q.dtype)


def _checked_branches(q: Tensor, stores: list[Tensor | None], page_table: Tensor | None, window_query_start: Tensor | None) -> Branches:
    branches = Branches(*stores)
    if branches.v_cmp is None and branches.v_slc is None and branches.v_win is None:
        raise InputError("every branch is None (Eq. 5 sums at least one); give the k and v of one")
    if branches.k_cmp is None and branches.v_slc is not None:
        raise InputError("k_cmp is None with the selected branch (blocks are chosen by compressed scores, Eq. 8); give k_cmp")
    if branches.k_cmp is None and branches.v_cmp is not None:
        raise InputError("k_cmp is None with a v_cmp (a branch has both or neither); give both")
    paged = page_table is not None
    if branches.k_cmp is not None:
        checks.check_pair(q, branches.k_cmp, branches.v_cmp, "_cmp", paged=paged)
    for k, v, suffix in ((branches.k_slc, branches.v_slc, "_slc"), (branches.k_win, branches.v_win, "_win")):
        if (k is None) != (v is None):
            raise InputError(f"one of k{suffix} and v{suffix} is None (a branch has both or neither); give both")
        if k is not None:
            local = suffix == "_win" and window_query_start is not None
            checks.check_pair(q, k, v, suffix, paged=paged and not local)
    heads = {store.shape[2] for store in stores if store is not None}
    if len(heads) != 1:
        raise InputError(f"the branches have {sorted(heads)} KV heads (one choice per group serves all); give them equal G")
    return branches


def _sequence_bound(branches: Branches, geometry: BlockGeometry, placed: Placed, window_query_start: Tensor | None) -> int:
    """Return the host bound on tokens per sequence that the branches' extents allow."""
    k_win = branches.k_win if window_query_start is None else None
    for k in (branches.k_slc, k_win):
        if k is not None:
            return _token_bound(k, placed.page_table)
    if branches.k_cmp is not None:
        return _compressed_token_bound(branches.k_cmp, geometry, placed.page_table)
    # a window of the last tokens alone: its extent says nothing about the sequence's
    return INT32_MAX


def _check_extents(q: Tensor, branches: Branches, call: Call, window_query_start: Tensor | None) -> None:
    if branches.k_cmp is not None:
        _check_compressed_extent(branches.k_cmp, q, call)
    if branches.k_slc is not None:
        _check_token_extent("k_slc", branches.k_slc, q, call)
    if branches.k_win is not None and window_query_start is None:
        _check_token_extent("k_win", branches.k_win, q, call)


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return the tensors in the autocast dtype where autocast is on; float64, as everywhere, is left alone."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _token_bound(k: Tensor, page_table: Tensor | None) -> int:
    return k.shape[1] if page_table is None else k.shape[1] * page_table.shape[1]


def _compressed_token_bound(k_cmp: Tensor, geometry: BlockGeometry, page_table: Tensor | None) -> int:
    """Return the most tokens whose blocks C rows can hold: the next block would need one more."""
    num_blocks = _token_bound(k_cmp, page_table)
    return num_blocks * geometry.compression_stride + geometry.compression_block_size - 1


def _prepare(
    q: Tensor,
    bound: int,
    geometry: BlockGeometry,
    scale: float | None,
    placed: Placed,
    backend: Backends,
    registry: BackendRegistry | None,
) -> Call:
    """Return the call: placement checked, bounds settled, registry at hand."""
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
            f"{placement.max_query_count} (positions start at 0, counts at most S); mend them"
        )
    if int((start + rows).max()) > placement.max_key_count:
        raise InputError(
            f"query_start + query_count reaches {int((start + rows).max())} of {placement.max_key_count} cached tokens "
            f"(keys must already hold the queries' own tokens); write them to the cache first"
        )


def _check_token_extent(name: str, k: Tensor, q: Tensor, call: Call) -> None:
    """Without a query_start, rows and keys are the same tokens; anything else would misplace the causal mask."""
    if call.layout in (Layout.DENSE, Layout.PACKED) and k.shape[1] != q.shape[1]:
        raise InputError(
            f"{name} has {k.shape[1]} tokens for {q.shape[1]} queries (without query_start they are the same tokens); "
            f"give query_start, or as many keys as queries"
        )
    if call.layout is Layout.CACHED and k.shape[1] < call.placement.max_key_count:
        raise InputError(
            f"{name} holds {k.shape[1]} tokens, max_seqlen allows {call.placement.max_key_count} (the store bounds it); lower max_seqlen"
        )


def _check_compressed_extent(k_cmp: Tensor, q: Tensor, call: Call) -> None:
    """C must hold every block that a query may see: N_c(S), or the sum of N_c(S_i) where that can be read."""
    if call.layout is Layout.PAGED:
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


def _run(operation: Operation, tensors: tuple[Tensor | None, ...], call: Call) -> Any:
    """Return what the backend chosen for `operation` makes of `tensors`."""
    name = call.backend if isinstance(call.backend, str) else call.backend.get(operation.value, AUTO)
    index = call.registry.resolve_index(name, False, *_constants(operation, tensors, call))
    backend = call.registry.backends[index]
    for observer in call.observers:
        observer.record_route(operation.value, backend.name)
    return backend(*tensors, geometry=call.geometry, scale=call.scale, placement=call.placement)


def _fused_backend(q: Tensor, branches: Branches, call: Call) -> Any:
    """Return the backend that does all of Eq. 5 in one, or None where the branches run one by one."""
    name = call.backend
    if not isinstance(name, str):
        named_apart = any(name.get(operation.value, AUTO) != AUTO for operation in Operation if operation is not Operation.NSA)
        name = name.get(Operation.NSA.value, AUTO)
        if named_apart and name == AUTO:
            return None
    if name != AUTO and not call.registry.has(Operation.NSA, name):
        return None
    index = call.registry.resolve_index(name, True, *_constants(Operation.NSA, (q, *branches), call))
    return None if index < 0 else call.registry.backends[index]


def _constants(operation: Operation, tensors: tuple[Tensor | None, ...], call: Call) -> tuple[Any, ...]:
    """Return the request as constants that a graph being traced can pass on: BackendRegistry.resolve_index."""
    q, k, v = (tensors[0], tensors[1], tensors[2])
    assert q is not None and k is not None and v is not None
    cu_seqlens = call.placement.cu_seqlens
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return (
        q.device.index or 0,
        operation.value,
        call.geometry.as_tuple(),
        q.device.type,
        q.dtype,
        k.dtype,
        _length_bucket(q.shape[0]),
        _length_bucket(q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1),
        _length_bucket(q.shape[1]),
        _length_bucket(call.placement.max_key_count),
        q.shape[2],
        k.shape[2],
        q.shape[3],
        q.shape[3] if operation is Operation.SELECT else v.shape[3],
        call.layout.value,
        needs_grad,
    )


def _length_bucket(length: int) -> int:
    """Return `length`; in a graph being traced, the next power of 8, so that the graph serves a range of lengths."""
    if not torch.compiler.is_compiling():
        return length
    bucket = 1
    while bucket < length:
        bucket *= 8
    return bucket


def explain_routing(request: BranchRequest, backend: str = AUTO, registry: BackendRegistry | None = None) -> RoutingDecision:
    """Return which backend would serve `request` and every reason against the others; str() of it is readable.

    The request may describe a machine that is not here.
    """
    return (default_registry() if registry is None else registry).explain(request, backend)
