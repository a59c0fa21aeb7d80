"""The public operations. `nsa_attention` is the main path: compressed, select, selected, window, gates (Eq. 5).

Layouts: q (B, S, H, D_k), k (B, T, G, D_k), v (B, T, G, D_v), out (B, S, H, D_v) in q's dtype, lse (B, S, H) natural log.

Keyword arguments that every operation takes:
    geometry: block sizes, see `BlockGeometry`.
    scale: factor of the scores; None is D_k ** -0.5.
    cu_seqlens: int32 (N + 1,), packed sequences in one row (B = 1); positions and blocks count from each one's start. With
        query_start and page_table the rows of each sequence stand over its own pages.
    max_seqlen: host bound on tokens per sequence; None: the longest on a CPU, the tensor's extent elsewhere.
    query_start: int32 (B,), position of each sequence's first query row in keys that hold the whole sequence (a cache).
    query_count: int32 (B,), valid query rows per sequence; rows beyond give out 0, lse -inf.
    page_table: int32 (B, max_pages), pages of each sequence in stores (pages, page_size, G, D); needs query_start. One
        table serves all stores: a page of k_cmp holds the blocks, page_size / d, of the page of tokens with its number.
        A pair has a table for the stores of tokens and one for those of compressed keys.
    backend: "auto", a backend's name, or names by operation; a name never falls back.
    registry: where backends are looked up; None: those of the installed packages.

Under torch.autocast q, k and v are cast to the autocast dtype. Every operation raises InputError for tensors that do not
fit and BackendUnavailableError where a named backend cannot serve. Outside torch.compile the attentions refuse tensors with
tangents of forward-mode differentiation as well (InputError). Nothing waits for a GPU.
"""

from typing import Any

import torch
from torch import Tensor

from nsa_core import checks
from nsa_core.backends.base import BranchOutput, FusedOutput, Keys, NewBlocks, NewRows, Operation, Queries
from nsa_core.backends.registry import AUTO, BackendRegistry
from nsa_core.compression import block_windows
from nsa_core.config import BRANCHES, BlockGeometry
from nsa_core.dispatch import Backends, Call, check_no_tangent, make_call, run, run_append, run_fused
from nsa_core.errors import InputError
from nsa_core.gating import gated_sum
from nsa_core.operand_checks import FP8, check_choice, check_kinds, check_operands, check_placement
from nsa_core.operands import Keywords, PageTables, operands_of
from nsa_core.reference.rows import rows_of
from nsa_core.telemetry import AttentionObserver


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
    page_table: PageTables = None,
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
) -> BranchOutput:
    """Return the attention of each query over the compressed blocks that lie wholly in its past (Eq. 7, 8).

    k_cmp (B, C, G, D_k), v_cmp (B, C, G, D_v) are already compressed; query t sees block i iff i*d + l - 1 <= t, so
    queries before l - 1 give out 0, lse -inf. Packed, the sequences' blocks stand one after another; rows beyond the
    last block are never read and get zero gradient. See the module's docstring for the keywords.
    """
    keywords = Keywords(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    return _attend_alone(Operation.CMP, "_cmp", (q, k_cmp, v_cmp), keywords, geometry, scale, backend, registry)


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
    page_table: PageTables = None,
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
) -> Tensor:
    """Return block_indices int32 `(B, S, G, n)`, ascending, -1 after the last: the blocks of each query (Eq. 9-11).

    lse `(B, S, H)` is that of `compressed_attention`, which normalises the weights. All H/G heads of a group share one
    choice; equal scores go to the lower block; indices count from the sequence's own start. No gradient. See the
    module's docstring for the keywords.
    """
    q, k_cmp = _autocast(q, k_cmp)
    keywords = Keywords(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    queries, keys = operands_of(q, {"_cmp": (k_cmp, None)}, geometry, keywords)
    checks.check_shape("lse", lse, tuple(q.shape[:3]), "(B, S, H)")
    checks.check_floating("lse", lse)
    checks.check_device("lse", lse, "q", q)
    result: Tensor = run(Operation.SELECT, make_call(q, geometry, scale, backend, registry), queries, keys["_cmp"], lse)
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
    page_table: PageTables = None,
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
) -> BranchOutput:
    """Return the attention of each query over the tokens s <= t of its chosen blocks (Eq. 12).

    block_indices int32 `(B, S, G, n)` for any n >= 1; -1 means none and may stand anywhere, a row of only -1 gives out 0, lse -inf and
    zero gradients. On a CPU a block named twice or outside 0 .. own is refused; on a GPU what lies outside counts as
    absent. See the module's docstring for the keywords.
    """
    keywords = Keywords(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    return _attend_alone(Operation.SLC, "", (q, k, v), keywords, geometry, scale, backend, registry, block_indices)


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
    page_table: PageTables = None,
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
) -> BranchOutput:
    """Return the attention of query t over the `window_size` tokens t - w < s <= t, its own included.

    See the module's docstring for the keywords.
    """
    keywords = Keywords(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    return _attend_alone(Operation.WIN, "", (q, k, v), keywords, geometry, scale, backend, registry)


def _attend_alone(
    operation: Operation,
    ending: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    keywords: Keywords,
    geometry: BlockGeometry,
    scale: float | None,
    backend: Backends,
    registry: BackendRegistry | None,
    block_indices: Tensor | None = None,
) -> BranchOutput:
    """Return what one branch's operation makes of q, k and v."""
    q, k, v = _autocast(*tensors)
    queries, found = operands_of(q, {ending: (k, v)}, geometry, keywords)
    keys = found[ending]
    assert keys is not None
    if block_indices is not None:
        check_choice(queries, keys, block_indices, geometry)
    choice = () if block_indices is None else (block_indices,)
    result: BranchOutput = run(operation, make_call(q, geometry, scale, backend, registry), queries, keys, *choice)
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
    page_table: PageTables = None,
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
    observers: tuple[AttentionObserver, ...] = (),
) -> Tensor:
    """Return the gated sum of the three branches `(B, S, H, D_v)` (Eq. 5).

    gates `(B, S, H, 3)`, any float dtype: cmp, slc, win; never changed here. A branch whose v is None is absent and its
    gate ignored; the selected branch needs k_cmp all the same. Each of `observers` gets callbacks; the branches run one
    by one where one of them wants each branch's output. See the module's docstring for the other keywords.
    """
    q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = _autocast(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)
    pairs = {"_cmp": (k_cmp, v_cmp), "_slc": (k_slc, v_slc), "_win": (k_win, v_win)}
    _check_pairs(pairs)
    keywords = Keywords(cu_seqlens, max_seqlen, query_start, query_count, page_table)
    queries, keys = operands_of(q, pairs, geometry, keywords)
    absent = tuple(name for name in BRANCHES if pairs[f"_{name}"][1] is None)
    call = make_call(q, geometry, scale, backend, registry, observers)
    return _gated_attention(queries, keys["_cmp"], keys["_slc"], keys["_win"], gates, absent, call)


def attend(
    queries: Queries,
    cmp: Keys | None,
    slc: Keys | None,
    win: Keys | None,
    gates: Tensor,
    *,
    geometry: BlockGeometry,
    scale: float | None = None,
    absent: tuple[str, ...] = (),
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
    observers: tuple[AttentionObserver, ...] = (),
) -> Tensor:
    """Return `nsa_attention` of operands that carry their placement: rings, a window's tail, shards, FP8 stores.

    A branch that is None, or named in `absent`, is left out of the sum. Without slc, cmp is needed for its own sum alone.

    Raises:
        InputError: for operands that do not fit each other.
    """
    checks.check_geometry(geometry)
    if any(name not in BRANCHES for name in absent):
        raise InputError(f"absent={absent!r} names no branch (the rule: a tuple of 'cmp', 'slc', 'win'); use ('cmp',)")
    check_kinds(queries, {"_cmp": cmp, "_slc": slc, "_win": win})
    queries = queries._replace(q=_autocast(queries.q)[0])
    cmp, slc, win = (x and x._replace(k=_autocast(x.k)[0], v=_autocast(x.v)[0]) for x in (cmp, slc, win))
    check_placement(queries, {"_cmp": cmp, "_slc": slc, "_win": win}, geometry)
    call = make_call(queries.q, geometry, scale, backend, registry, observers)
    return attend_placed(queries, cmp, slc, win, gates, absent, call)


def attend_placed(
    queries: Queries, cmp: Keys | None, slc: Keys | None, win: Keys | None, gates: Tensor, absent: tuple[str, ...], call: Call
) -> Tensor:
    """Return `attend` of operands whose types and shapes are right by construction, as the layer's are; extents and values are checked."""
    queries = queries._replace(q=_autocast(queries.q)[0])
    cmp, slc, win = (x and x._replace(k=_autocast(x.k)[0], v=_autocast(x.v)[0]) for x in (cmp, slc, win))
    keys = {"_cmp": cmp, "_slc": slc, "_win": win}
    left_out = tuple(name for name in BRANCHES if name in absent or keys[f"_{name}"] is None)
    _check_pairs({ending: (x and x.k, None if ending[1:] in left_out else x and x.v) for ending, x in keys.items()})
    check_operands(queries, keys, call.geometry)
    return _gated_attention(queries, cmp, slc, win, gates, left_out, call)


def append_rows(
    rows: tuple[NewRows, ...],
    new_blocks: NewBlocks | None,
    start: Tensor,
    count: Tensor,
    geometry: BlockGeometry,
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
) -> None:
    """Write a step's rows into the stores of a cache, and the compressed blocks that they complete, in place.

    Sequence b gets rows 0 .. count[b] - 1 at positions start[b] onwards; both int32 (B,). No gradient.
    """
    first = rows[0] if rows else None if new_blocks is None else new_blocks.raw
    for new in rows:
        _check_new_rows(new, start, count)
    if first is not None:
        run_append(make_call(first.k, geometry, None, backend, registry), first, rows, new_blocks, start, count)


def _check_new_rows(new: NewRows, start: Tensor, count: Tensor) -> None:
    """Raise InputError where a step's rows do not fit their store; nothing is written then."""
    store, batch, num_rows = new.store.k, new.k.shape[0], new.k.shape[1]
    if new.store.page_table is not None or new.store.k_scale is not None:
        raise InputError("a store is paged or of FP8 (rows are appended to contiguous stores of their own dtype); use such stores")
    if store.shape[0] != batch:
        raise InputError(f"the store holds {store.shape[0]} sequences, the step has {batch} (one each); give both the same batch")
    for name, x in (("start", start), ("count", count)):
        checks.check_integers(name, x, 1, "(B,)", new.k)
        checks.check_shape(name, x, (batch,), "(B,)")
    if not checks.can_read(start) or not start.numel():
        return
    if int(count.min()) < 0 or int(count.max()) > num_rows:
        raise InputError(f"count={count.tolist()} leaves 0 .. {num_rows} (the rows of the step); fix it")
    if not new.store.ring and int((start + count).max()) > store.shape[1]:
        raise InputError(
            f"the step reaches position {int((start + count).max())} of a store of {store.shape[1]} rows; give it a larger one"
        )


def compress_mean(k: Tensor, geometry: BlockGeometry, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the mean of each compressed block's tokens `(B, C, G, D)` of k `(B, S, G, D)`: phi without parameters (Eq. 7).

    Packed (B = 1), the sequences' blocks stand one after another and C = S // d, always enough.

    Raises:
        InputError: for a k of another rank, or cu_seqlens that do not bound its rows.
    """
    checks.check_rank("k", k, 4, "(B, S, G, D)")
    checks.check_floating("k", k)
    checks.check_geometry(geometry)
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, k, None)
    return block_windows(k, geometry, cu_seqlens).tokens.mean(2)


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return the tensors in the autocast dtype where autocast is on; float64, as everywhere, is left alone."""
    kind = tensors[0].device.type
    # the meta device knows no autocast, and asking would raise
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x is not None and x.is_floating_point() and x.dtype not in (torch.float64, *FP8) else x for x in tensors)


def _check_pairs(pairs: dict[str, tuple[Tensor | None, Tensor | None]]) -> None:
    """Raise InputError where branches are incomplete, or all absent."""
    k_cmp, v_cmp = pairs["_cmp"]
    if all(v is None for _, v in pairs.values()):
        raise InputError("every branch is None (Eq. 5 sums at least one); give the k and v of one")
    if k_cmp is None and pairs["_slc"][1] is not None:
        raise InputError("k_cmp is None with the selected branch (blocks are chosen by compressed scores, Eq. 8); give k_cmp")
    if k_cmp is None and v_cmp is not None:
        raise InputError("k_cmp is None with a v_cmp (a branch has both or neither); give both")
    for ending in ("_slc", "_win"):
        if (pairs[ending][0] is None) != (pairs[ending][1] is None):
            raise InputError(f"one of k{ending} and v{ending} is None (a branch has both or neither); give both")


def _gated_attention(
    queries: Queries, cmp: Keys | None, slc: Keys | None, win: Keys | None, gates: Tensor, absent: tuple[str, ...], call: Call
) -> Tensor:
    """Return Eq. 5: by a backend that does all of it where one may, else branch by branch."""
    q, observers = queries.q, call.observers
    checks.check_tensor("gates", gates)
    checks.check_shape("gates", gates, (*q.shape[:3], 3), "(B, S, H, 3): cmp, slc, win")
    checks.check_floating("gates", gates)
    checks.check_device("gates", gates, "q", q)
    heads = {x.k.shape[2] for x in (cmp, slc, win) if x is not None}
    if len(heads) > 1:
        raise InputError(f"the branches have {sorted(heads)} KV heads (one choice per group serves all); give them equal G")
    one_by_one = "a branch is absent" if absent else None
    if observers and any(observer.needs_branches for observer in observers):
        one_by_one = "observers want each branch"
    fused = run_fused(call, (queries, cmp, slc, win, gates), one_by_one)
    if fused is not None:
        out, block_indices = fused if isinstance(fused, FusedOutput) else (fused, None)
        if block_indices is not None:
            _report_choice(block_indices, queries, call)
        return out
    check_no_tangent(gates)
    outputs = _branch_outputs(queries, cmp, slc, win, absent, call)
    for name, out in zip(BRANCHES, outputs, strict=True):
        for observer in observers:
            if out is not None:
                observer.record_branch(name, out, rows_of(queries).positions)
    total: Tensor = gated_sum(gates, *outputs)
    if queries.count is not None:
        # a row that does not count is 0 whatever its gates are, NaN included
        is_row = torch.arange(q.shape[1], device=q.device) < queries.count.unsqueeze(1)
        total = torch.where(is_row[..., None, None], total, 0)
    return total.to(q.dtype)


def _branch_outputs(
    queries: Queries, cmp: Keys | None, slc: Keys | None, win: Keys | None, absent: tuple[str, ...], call: Call
) -> list[Tensor | None]:
    """Return the outputs of the three branches, in the order of their gates; None for an absent one."""
    outputs: list[Tensor | None] = [None, None, None]
    lse = None
    if cmp is not None and not ("cmp" in absent and "slc" in absent):
        # without the branch its lse is still what normalises the scores of the choice
        compressed = run(Operation.CMP, call, queries, cmp._replace(v=cmp.k.detach()) if "cmp" in absent else cmp)
        lse = compressed.lse
        outputs[0] = None if "cmp" in absent else compressed.out
    if slc is not None and "slc" not in absent:
        block_indices = run(Operation.SELECT, call, queries, cmp, lse)
        outputs[1] = run(Operation.SLC, call, queries, slc, block_indices).out
        _report_choice(block_indices, queries, call)
    if win is not None and "win" not in absent:
        outputs[2] = run(Operation.WIN, call, queries, win).out
    return outputs


def _report_choice(block_indices: Tensor, queries: Queries, call: Call) -> None:
    if call.observers:
        positions = rows_of(queries).positions
        for observer in call.observers:
            observer.record_selection(block_indices, positions, call.geometry)
