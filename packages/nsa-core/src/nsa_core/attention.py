"""The public operations. `nsa_attention` is the main path: compressed, select, selected, window, gates (Eq. 5).

Layouts: q (B, S, H, D_k), k (B, T, G, D_k), v (B, T, G, D_v), out (B, S, H, D_v) in q's dtype, lse (B, S, H) natural log.

Keyword arguments that every operation takes:
    geometry: block sizes, see `BlockGeometry`.
    scale: factor of the scores; None is D_k ** -0.5.
    cu_seqlens: int32 (N + 1,), packed sequences in one row (B = 1); positions and blocks count from each one's start.
    max_seqlen: host bound on tokens per sequence; None: the longest on a CPU, the tensor's extent elsewhere.
    query_start: int32 (B,), position of each sequence's first query row in keys that hold the whole sequence (a cache).
    query_count: int32 (B,), valid query rows per sequence; rows beyond give out 0, lse -inf.
    page_table: int32 (B, max_pages), pages of each sequence in stores (pages, page_size, G, D); needs query_start. One
        table serves all stores: a page of k_cmp holds the blocks, page_size / d, of the page of tokens with its number.
    backend: "auto", a backend's name, or names by operation; a name never falls back.
    registry: where backends are looked up; None: those of the installed packages.

Under torch.autocast q, k and v are cast to the autocast dtype. Every operation raises InputError for tensors that do not
fit and BackendUnavailableError where a named backend cannot serve. Outside torch.compile the attentions refuse tensors with
tangents of forward-mode differentiation as well (InputError). Nothing waits for a GPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core import checks
from nsa_core.backends.base import BranchOutput, Layout, Operation
from nsa_core.backends.registry import AUTO, BackendRegistry
from nsa_core.calls import (
    Backends,
    Call,
    Placed,
    autocast,
    check_compressed_extent,
    check_token_extent,
    compressed_token_bound,
    prepare,
    token_bound,
)
from nsa_core.config import BRANCHES, BlockGeometry
from nsa_core.dispatch import check_no_tangent, fused_backend, run
from nsa_core.errors import InputError
from nsa_core.gating import gated_sum
from nsa_core.reference.rows import rows_of
from nsa_core.telemetry import AttentionObserver

INT32_MAX = 2**31 - 1
"""Positions are int32, so no sequence is longer."""


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
    q, k_cmp, v_cmp = autocast(q, k_cmp, v_cmp)
    checks.check_query(q)
    checks.check_geometry(geometry)
    checks.check_pair(q, k_cmp, v_cmp, "_cmp", paged=page_table is not None)
    bound = compressed_token_bound(k_cmp, geometry, page_table)
    placed = Placed(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    call = prepare(q, bound, geometry, scale, placed, backend, registry)
    check_compressed_extent(k_cmp, q, call)
    result: BranchOutput = run(Operation.CMP, (q, k_cmp, v_cmp), call)
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
    q, k_cmp = autocast(q, k_cmp)
    checks.check_query(q)
    checks.check_geometry(geometry)
    checks.check_pair(q, k_cmp, None, "_cmp", paged=page_table is not None)
    checks.check_shape("lse", lse, tuple(q.shape[:3]), "(B, S, H)")
    checks.check_floating("lse", lse)
    checks.check_device("lse", lse, "q", q)
    bound = compressed_token_bound(k_cmp, geometry, page_table)
    placed = Placed(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    call = prepare(q, bound, geometry, scale, placed, backend, registry)
    check_compressed_extent(k_cmp, q, call)
    result: Tensor = run(Operation.SELECT, (q, k_cmp, lse), call)
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
    q, k, v = autocast(q, k, v)
    checks.check_query(q)
    checks.check_geometry(geometry)
    checks.check_pair(q, k, v, "", paged=page_table is not None)
    checks.check_integers("block_indices", block_indices, 4, "(B, S, G, n)", q)
    rows = (q.shape[0], q.shape[1], k.shape[2])
    checks.check_shape("block_indices", block_indices, (*rows, max(1, block_indices.shape[3])), "(B, S, G, n)")
    placed = Placed(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    call = prepare(q, token_bound(k, page_table), geometry, scale, placed, backend, registry)
    check_token_extent("k", k, q, call)
    if checks.can_read(block_indices):
        positions = rows_of(call.placement, q.shape[0], q.shape[1], q.device).positions
        checks.check_block_indices(block_indices, positions, geometry)
    result: BranchOutput = run(Operation.SLC, (q, k, v, block_indices), call)
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
    q, k, v = autocast(q, k, v)
    checks.check_query(q)
    checks.check_geometry(geometry)
    checks.check_pair(q, k, v, "", paged=page_table is not None)
    placed = Placed(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    call = prepare(q, token_bound(k, page_table), geometry, scale, placed, backend, registry)
    check_token_extent("k", k, q, call)
    result: BranchOutput = run(Operation.WIN, (q, k, v), call)
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
    q, *stores = autocast(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)
    checks.check_query(q)
    checks.check_geometry(geometry)
    checks.check_shape("gates", gates, (*q.shape[:3], 3), "(B, S, H, 3): cmp, slc, win")
    checks.check_floating("gates", gates)
    if window_query_start is not None:
        checks.check_integers("window_query_start", window_query_start, 1, "(B,)", q)
        checks.check_shape("window_query_start", window_query_start, (q.shape[0],), "(B,)")
    checks.check_device("gates", gates, "q", q)
    check_no_tangent(gates)
    branches = _checked_branches(q, stores, page_table, window_query_start)
    placed = Placed(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    bound = _sequence_bound(branches, geometry, placed, window_query_start)
    call = prepare(q, bound, geometry, scale, placed, backend, registry)._replace(observers=observers)
    _check_extents(q, branches, call, window_query_start)
    one_by_one = _reason_for_branches(branches, window_query_start, observers)
    fused = fused_backend((q, *branches, gates), call, one_by_one)
    if fused is not None:
        out: Tensor = fused(q, *branches, gates, geometry=geometry, scale=call.scale, placement=call.placement)
        return out
    return _combine(q, gates, _branch_outputs(q, branches, call, window_query_start), call)


class Branches(NamedTuple):
    """Keys and values of the branches; None where a branch is absent."""

    k_cmp: Tensor | None
    v_cmp: Tensor | None
    k_slc: Tensor | None
    v_slc: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None


def _reason_for_branches(branches: Branches, window_query_start: Tensor | None, observers: tuple[AttentionObserver, ...]) -> str | None:
    """Return why the branches must run one by one, or None where one backend may do all of Eq. 5."""
    if any(store is None for store in branches):
        return "a branch is absent"
    if window_query_start is not None:
        return "the window's keys stand apart in a cache"
    return "observers want each branch" if observers else None


def _branch_outputs(q: Tensor, branches: Branches, call: Call, window_query_start: Tensor | None) -> list[Tensor | None]:
    """Return the outputs of the three branches, in the order of their gates; None for an absent one."""
    k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = branches
    outputs: list[Tensor | None] = [None, None, None]
    lse = None
    if k_cmp is not None and (v_cmp is not None or v_slc is not None):
        # without the branch its lse is still what normalises the scores of the choice
        compressed = run(Operation.CMP, (q, k_cmp, k_cmp.detach() if v_cmp is None else v_cmp), call)
        lse = compressed.lse
        if v_cmp is not None:
            outputs[0] = compressed.out
    if k_slc is not None and v_slc is not None:
        block_indices = run(Operation.SELECT, (q, k_cmp, lse), call)
        outputs[1] = run(Operation.SLC, (q, k_slc, v_slc, block_indices), call).out
        if call.observers:
            positions = rows_of(call.placement, q.shape[0], q.shape[1], q.device).positions
            for observer in call.observers:
                observer.record_selection(block_indices, positions, call.geometry)
    if k_win is not None and v_win is not None:
        outputs[2] = run(Operation.WIN, (q, k_win, v_win), _window_call(call, k_win, window_query_start)).out
    return outputs


def _window_call(call: Call, k_win: Tensor, window_query_start: Tensor | None) -> Call:
    if window_query_start is None:
        return call
    placement = call.placement._replace(query_start=window_query_start, page_table=None, max_key_count=k_win.shape[1])
    return call._replace(layout=Layout.CACHED, placement=placement)


def _combine(q: Tensor, gates: Tensor, outputs: list[Tensor | None], call: Call) -> Tensor:
    """Return the gated sum of `outputs`, accumulated in at least float32, in q's dtype."""
    for name, out in zip(BRANCHES, outputs, strict=True):
        if out is not None:
            for observer in call.observers:
                observer.record_branch(name, out, rows_of(call.placement, q.shape[0], q.shape[1], q.device).positions)
    total: Tensor = gated_sum(gates, *outputs)
    count = call.placement.query_count
    if count is not None:
        # a row that does not count is 0 whatever its gates are, NaN included
        is_row = torch.arange(q.shape[1], device=q.device) < count.unsqueeze(1)
        total = torch.where(is_row[..., None, None], total, 0)
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
            return token_bound(k, placed.page_table)
    if branches.k_cmp is not None:
        return compressed_token_bound(branches.k_cmp, geometry, placed.page_table)
    # a window of the last tokens alone: its extent says nothing about the sequence's
    return INT32_MAX


def _check_extents(q: Tensor, branches: Branches, call: Call, window_query_start: Tensor | None) -> None:
    if branches.k_cmp is not None:
        check_compressed_extent(branches.k_cmp, q, call)
    if branches.k_slc is not None:
        check_token_extent("k_slc", branches.k_slc, q, call)
    if branches.k_win is not None and window_query_start is None:
        check_token_extent("k_win", branches.k_win, q, call)
