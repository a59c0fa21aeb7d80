"""The public operations. `nsa_attention` computes all of Eq. 5: the three branches, the choice of blocks and the gated sum.

Layouts: q (B, S, H, D_k), k (B, T, G, D_k), v (B, T, G, D_v), out (B, S, H, D_v) in q's dtype, lse (B, S, H) natural log.
The operations on plain tensors take `geometry`, the block sizes, and the keywords of `CallKeywords`.

Under torch.autocast q, k and v are cast to the autocast dtype. Every operation raises InputError for tensors with wrong
shapes, dtypes or devices, and BackendUnavailableError if a named backend cannot run. Outside torch.compile the attention
functions also raise InputError for tensors with forward-mode AD tangents. No operation waits for a GPU.
"""

import warnings
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_core import checks
from nsa_core.backends.base import BranchOutput, FusedOutput, Keys, NewBlocks, NewRows, Operation, Queries
from nsa_core.backends.registry import AUTO, BackendRegistry
from nsa_core.compression import block_windows
from nsa_core.config import BRANCHES, BlockGeometry
from nsa_core.dispatch import Backends, Call, backend_for, check_no_tangent, make_call, run, wrong_result
from nsa_core.errors import InputError
from nsa_core.gating import gated_sum
from nsa_core.operands import FP8, BranchKeys, PageTables, Pairs, check_choice, check_keys, check_kinds, keys_of, queries_of
from nsa_core.reference.rows import positions_of
from nsa_core.rope import RotaryEmbedding
from nsa_core.telemetry import AttentionObserver


class CallKeywords(TypedDict, total=False):
    """The keywords that every operation on plain tensors takes in addition to `geometry`."""

    scale: float | None
    """Factor of the scores q . k; None: D_k ** -0.5."""
    cu_seqlens: Tensor | None
    """int32 (N + 1,), cumulative lengths of sequences packed in one row (B = 1), as in FlashAttention. Positions and blocks count from
    each sequence's start. Together with query_start and page_table (ragged batch), they bound the query rows of each sequence. None: each
    batch entry is a sequence."""
    max_seqlen: int | None
    """Upper bound on the tokens of a sequence, a Python int. None: the longest sequence on a CPU, the size of the tensors on other
    devices, where reading the lengths would wait."""
    query_start: Tensor | None
    """int32 (B,), position of each sequence's first query row. The keys then hold the whole sequence, as in a cache. None:
    position 0."""
    query_count: Tensor | None
    """int32 (B,), valid query rows per sequence; later rows give out 0, lse -inf. None: all rows are valid."""
    page_table: PageTables
    """int32 (B, max_pages), the page numbers of each sequence, in order; keys are then (pages, page_size, G, D). Needs query_start.
    One table serves all stores: page i of k_cmp holds the page_size / d blocks that begin in page i of the tokens. A pair is a table
    for the tokens and one for k_cmp and v_cmp. None: the keys are not paged."""
    backend: Backends
    """"auto" (the default), a backend's name, or names by operation; a name never falls back."""
    registry: BackendRegistry | None
    """Registry in which backends are looked up; None: the backends of the installed packages."""


KEYWORDS = tuple(CallKeywords.__annotations__)


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, geometry: BlockGeometry, **keywords: Unpack[CallKeywords]
) -> BranchOutput:
    """Return the attention of each query over the compressed blocks that are wholly in its past (Eq. 7, 8).

    k_cmp (B, C, G, D_k), v_cmp (B, C, G, D_v) are already compressed. Query t sees block i iff i*d + l - 1 <= t, so
    queries before l - 1 give out 0, lse -inf. In a packed batch the blocks of the sequences follow one another. Rows after the last block
    never change a result and get zero gradient. `CallKeywords` lists the other keywords.
    """
    queries, cmp, call = _begin_branch(q, "_cmp", k_cmp, v_cmp, geometry, keywords)
    result: BranchOutput = run(Operation.CMP, call, queries, cmp)
    return result


def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, *, geometry: BlockGeometry, **keywords: Unpack[CallKeywords]) -> Tensor:
    """Return block_indices int32 `(B, S, G, n)`: the blocks that each query chooses (Eq. 9-11).

    Indices count from the start of the query's own sequence. They ascend, and -1 fills the unused slots at the end. lse `(B, S, H)`
    comes from `compressed_attention` and normalises the weights. All H/G heads of a group share one choice. Ties go to the lower block.
    The result has no gradient. `CallKeywords` lists the other keywords.
    """
    # the choice reads no values, so k_cmp is passed as v_cmp
    queries, cmp, call = _begin_branch(q, "_cmp", k_cmp, k_cmp, geometry, keywords)
    checks.check_tensor("lse", lse, tuple(q.shape[:3]), "(B, S, H)", q)
    checks.check_wide("lse", lse)
    result: Tensor = run(Operation.SELECT, call, queries, cmp, lse)
    return result


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *, geometry: BlockGeometry, **keywords: Unpack[CallKeywords]
) -> BranchOutput:
    """Return the attention of each query over the tokens s <= t of its chosen blocks (Eq. 12).

    block_indices int32 `(B, S, G, n)` for any n >= 1. -1 means no block, in any slot. A row of only -1 gives out 0, lse -inf and
    zero gradients. Valid indices are 0 .. own = t // l', each once. On a CPU other indices and duplicates raise InputError; on a GPU
    an index outside 0 .. own counts as -1. `CallKeywords` lists the other keywords.
    """
    queries, keys, call = _begin_branch(q, "", k, v, geometry, keywords)
    check_choice(queries, k, block_indices, geometry)
    result: BranchOutput = run(Operation.SLC, call, queries, keys, block_indices)
    return result


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, *, geometry: BlockGeometry, **keywords: Unpack[CallKeywords]) -> BranchOutput:
    """Return the attention of query t over the `window_size` tokens t - w < s <= t, which include its own token.

    `CallKeywords` lists the other keywords.
    """
    queries, keys, call = _begin_branch(q, "", k, v, geometry, keywords)
    result: BranchOutput = run(Operation.WIN, call, queries, keys)
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
    observers: tuple[AttentionObserver, ...] = (),
    **keywords: Unpack[CallKeywords],
) -> Tensor:
    """Return the gated sum of the three branches `(B, S, H, D_v)` (Eq. 5).

    gates `(B, S, H, 3)`, any float dtype, are the factors of cmp, slc and win; they are used as given. A branch whose v is None
    is left out, and its gate is ignored. The selected branch always needs k_cmp, because its scores choose the blocks. Without v_cmp,
    k_cmp must be finite: a fused kernel may read it as v_cmp, with gate 0. Each of `observers` gets callbacks; if one needs the output
    of each branch, the branches run one by one. `CallKeywords` lists the other keywords.
    """
    pairs = {"_cmp": (k_cmp, v_cmp), "_slc": (k_slc, v_slc), "_win": (k_win, v_win)}
    for ending, (k, v) in pairs.items():
        # without the compressed branch, k_cmp still chooses blocks
        if (k is None) != (v is None) and (ending, v) != ("_cmp", None):
            raise InputError(f"one of k{ending} and v{ending} is None (a branch has both or neither); give both")
    queries, keys, call = _begin(q, pairs, geometry, keywords, observers)
    return _gated_attention(queries, keys, gates, ("cmp",) if v_cmp is None else (), call)


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
    """Return what `nsa_attention` returns, for operands that carry their positions: ring buffers, window tails, shards of a sequence, FP8 stores.

    A branch that is None, or named in `absent`, is left out of the sum. The selected branch always needs cmp, to choose blocks.

    Raises:
        InputError: for operands that do not match.
    """
    keys = {"_cmp": cmp, "_slc": slc, "_win": win}
    checks.check_geometry(geometry)
    checks.check_absent(absent)
    check_kinds(queries, keys, geometry)
    if queries.count is not None and queries.start is None and queries.cu_seqlens is None:
        # a count belongs to a cached call; this one begins at position 0
        queries = queries._replace(start=torch.zeros_like(queries.count))
    return attend_branches(queries, keys, gates, absent, make_call(queries.q, geometry, scale, backend, registry, observers))


def attend_branches(
    queries: Queries,
    keys: BranchKeys,
    gates: Tensor,
    absent: tuple[str, ...],
    call: Call,
    *,
    is_known: bool = False,
    are_gates_closed: bool = False,
) -> Tensor:
    """Return what `attend` returns. The caller has checked `queries`; this function checks `keys`.

    `is_known`: operands of these shapes and dtypes passed the check before, so that only values are checked, and only on a CPU.
    `are_gates_closed`: the gates of absent branches are already 0.
    """
    queries, keys = _autocast(queries, keys)
    if not is_known or checks.can_read(queries.start):
        check_keys(queries, keys, call.geometry)
    return _gated_attention(queries, keys, gates, absent, call, are_gates_closed=are_gates_closed)


def _begin_branch(
    q: Tensor, ending: str, k: Tensor, v: Tensor, geometry: BlockGeometry, keywords: CallKeywords
) -> tuple[Queries, Keys | None, Call]:
    """Return the checked operands and the call of an operation of one branch; `ending` is the suffix of its tensors' names."""
    for letter, x in (("k", k), ("v", v)):
        if x is None:
            raise InputError(
                f"{letter}{ending} is None (an operation of one branch needs it); give a tensor, or leave the branch out of nsa_attention"
            )
    queries, keys, call = _begin(q, {ending: (k, v)}, geometry, keywords)
    return queries, keys[ending], call._replace(returns_lse=True)


def _begin(
    q: Tensor, pairs: Pairs, geometry: BlockGeometry, keywords: CallKeywords, observers: tuple[AttentionObserver, ...] = ()
) -> tuple[Queries, BranchKeys, Call]:
    """Return the checked operands and the call of a public operation."""
    if unknown := [name for name in keywords if name not in KEYWORDS]:
        raise TypeError(f"{min(unknown)}= is no keyword of the operation; use one of geometry, {', '.join(KEYWORDS)}")
    checks.check_query(q)
    checks.check_geometry(geometry)
    max_seqlen, page_table = keywords.get("max_seqlen"), keywords.get("page_table")
    queries = queries_of(q, keywords.get("cu_seqlens"), max_seqlen, keywords.get("query_start"), keywords.get("query_count"), page_table)
    queries, keys = _autocast(queries, keys_of(queries, pairs, geometry, max_seqlen, page_table))
    check_keys(queries, keys, geometry)
    backend, registry = keywords.get("backend", AUTO), keywords.get("registry")
    return queries, keys, make_call(q, geometry, keywords.get("scale"), backend, registry, observers)


def _autocast(queries: Queries, keys: BranchKeys) -> tuple[Queries, BranchKeys]:
    """Return the operands in the autocast dtype if autocast is on; float64 operands and FP8 stores keep their dtype."""
    kind = queries.q.device.type
    # asking about autocast raises on the meta device
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return queries, keys

    def cast(x: Tensor) -> Tensor:
        return x.to(torch.get_autocast_dtype(kind)) if x.is_floating_point() and x.dtype not in (torch.float64, *FP8) else x

    # the last operation on the stream may now be a cast, not APPEND
    return queries._replace(q=cast(queries.q), follows_append=False), {
        ending: None if x is None else x._replace(k=cast(x.k), v=cast(x.v)) for ending, x in keys.items()
    }


def _check_branches(queries: Queries, keys: BranchKeys, gates: Tensor, absent: tuple[str, ...]) -> None:
    """Raise InputError if the shapes of gates and branches do not match, or if a needed branch is missing."""
    checks.check_tensor("gates", gates, (*queries.q.shape[:3], 3), "(B, S, H, 3): cmp, slc, win", queries.q)
    if len(absent) == len(BRANCHES):
        raise InputError("every branch is None (Eq. 5 sums at least one); give the k and v of one")
    for ending, x in keys.items():
        if x is not None and x.only_chooses:
            raise InputError(f"k{ending}.only_chooses is True (attend sets it itself, where cmp is absent); leave it False")
    if keys["_cmp"] is None and "slc" not in absent:
        raise InputError("k_cmp is None with the selected branch (blocks are chosen by compressed scores, Eq. 8); give k_cmp")
    heads = {x.k.shape[2] for x in keys.values() if x is not None}
    if len(heads) > 1:
        raise InputError(f"the branches have {sorted(heads)} KV heads (one choice per group serves all); give them equal G")
    widths = {x.v.shape[3] for ending, x in keys.items() if x is not None and ending[1:] not in absent}
    if len(widths) > 1:
        raise InputError(f"the branches' values have head dimensions {sorted(widths)} (Eq. 5 adds their outputs); give them equal D_v")


def _gated_attention(
    queries: Queries, keys: BranchKeys, gates: Tensor, absent: tuple[str, ...], call: Call, *, are_gates_closed: bool = False
) -> Tensor:
    """Return the gated sum (Eq. 5), from a fused backend if one is eligible, else branch by branch. A branch without Keys is absent too.

    `are_gates_closed`: the gates of absent branches are already 0.
    """
    absent = tuple(name for name in BRANCHES if name in absent or keys[f"_{name}"] is None)
    _check_branches(queries, keys, gates, absent)
    q, observers = queries.q, call.observers
    operands = _fused_operands(queries, keys, gates, absent, are_gates_closed=are_gates_closed)
    if isinstance(operands, str) or any(observer.needs_branches for observer in observers):
        name = AUTO if isinstance(call.backend, str) else call.backend.get(Operation.NSA.value, AUTO)
        if name != AUTO and not torch.compiler.is_compiling():
            why = operands if isinstance(operands, str) else "observers want each branch"
            warnings.warn(f"backend {name!r} for 'nsa' is not used: {why}, so the branches run one by one", stacklevel=3)
    elif (found := run(Operation.NSA, call, *operands)) is not None:
        out, block_indices = found if isinstance(found, FusedOutput) else (found, None)
        if block_indices is not None:
            _report_choice(block_indices, queries, call)
        return out
    check_no_tangent(gates)
    outputs = _branch_outputs(queries, keys, absent, call)
    for name, out in zip(BRANCHES, outputs, strict=True):
        for observer in observers:
            if out is not None:
                observer.record_branch(name, out, positions_of(queries))
    total: Tensor = gated_sum(gates, *outputs)
    if queries.count is not None:
        # an invalid row is 0 for any gates, NaN included
        is_row = torch.arange(q.shape[1], device=q.device) < queries.count.unsqueeze(1)
        total = torch.where(is_row[..., None, None], total, 0)
    return total.to(q.dtype)


def _fused_operands(
    queries: Queries, keys: BranchKeys, gates: Tensor, absent: tuple[str, ...], *, are_gates_closed: bool
) -> tuple[Any, ...] | str:
    """Return the operands with which one call of NSA gives the same sum, or a text: the reason why the branches must run one by one.

    If only cmp is absent and D_k = D_v, k_cmp is passed as v_cmp with gate 0, and with `Keys.only_chooses`.
    """
    cmp, slc, win = keys.values()
    if not absent:
        return queries, cmp, slc, win, gates
    if absent != ("cmp",) or cmp is None or slc is None or win is None:
        return f"the call leaves out {', '.join(absent)}"
    if cmp.k.shape[3] != slc.v.shape[3]:
        return "the call leaves out cmp, and D_k is not D_v"
    if not are_gates_closed:
        # the last operation on the stream may now be the padding, not APPEND
        queries, gates = queries._replace(follows_append=False), pad(gates[..., 1:], (1, 0))
    k = cmp.k.detach() if cmp.k.requires_grad else cmp.k
    return queries, cmp._replace(k=k, v=k, v_scale=cmp.k_scale, only_chooses=True), slc, win, gates


def _branch_outputs(queries: Queries, keys: BranchKeys, absent: tuple[str, ...], call: Call) -> list[Tensor | None]:
    """Return the outputs of the three branches, in the order of their gates; None for an absent one."""
    outputs: list[Tensor | None] = [None, None, None]
    cmp, lse = keys["_cmp"], None
    if cmp is not None and not ("cmp" in absent and "slc" in absent):
        # the choice of blocks needs this lse even if the compressed branch is absent
        out, lse = run(Operation.CMP, call, queries, cmp._replace(v=cmp.k.detach()) if "cmp" in absent else cmp)
        outputs[0] = None if "cmp" in absent else out
    if "slc" not in absent:
        block_indices = run(Operation.SELECT, call, queries, cmp, lse)
        outputs[1] = run(Operation.SLC, call, queries, keys["_slc"], block_indices).out
        _report_choice(block_indices, queries, call)
    if "win" not in absent:
        outputs[2] = run(Operation.WIN, call, queries, keys["_win"]).out
    return outputs


def _report_choice(block_indices: Tensor, queries: Queries, call: Call) -> None:
    if call.observers:
        positions = positions_of(queries)
        for observer in call.observers:
            observer.record_selection(block_indices, positions, call.geometry)


def append_rows(rows: tuple[NewRows, ...], new_blocks: NewBlocks | None, start: Tensor, count: Tensor, call: Call) -> None:
    """Write a step's rows into the stores of a cache, and the compressed blocks that they complete, in place.

    Sequence b gets rows 0 .. count[b] - 1 at positions start[b] onwards; start and count are int32 (B,). No gradient.
    """
    _check_new_rows(rows, start, count)
    written = rows if new_blocks is None else (*rows, new_blocks.raw._replace(store=new_blocks.store))
    in_pages = [new for new in written if new.store.page_table is not None]
    in_fp8 = [new for new in written if new.store.k_scale is not None]
    # a paged store, else a store of FP8, decides the backend: fewer backends support it
    asks = in_pages or in_fp8 or written
    if asks:
        new = asks[0]
        # the request describes a step with one query head per KV head
        append = backend_for(Operation.APPEND, call, Queries(new.k, new.k.shape[1], None, start, count), new.store)
        append(rows, new_blocks, start, count, geometry=call.geometry)


def rotate_heads(heads: tuple[Tensor, ...], start: Tensor, rope: RotaryEmbedding, call: Call) -> tuple[Tensor, ...]:
    """Return `heads`, q and keys `(B, m, heads, D_k)` of a step, after RoPE. Row i of sequence b is at position start[b] + i.

    `start` is int32 (B,). The result has no gradient.
    """
    q, k = heads[0], heads[-1]
    # the request describes q over the step's own keys
    rotate = backend_for(Operation.ROTATE, call, Queries(q, q.shape[1], None, start), Keys(k, k, k.shape[1]))
    found: Any = rotate(heads, start, rope)
    if not isinstance(found, Sequence) or len(found) != len(heads):
        raise wrong_result(Operation.ROTATE, rotate, found, f"a tuple of {len(heads)} tensors, one for each of `heads`")
    return tuple(found)


def _check_new_rows(rows: tuple[NewRows, ...], start: Tensor, count: Tensor) -> None:
    """Raise InputError if a step's rows do not fit their stores; this runs before anything is written."""
    checked = None
    for new in rows:
        store, table, batch = new.store.k, new.store.page_table, new.k.shape[0]
        holds = store.shape[0] if table is None else table.shape[0]
        if holds != batch:
            raise InputError(f"the store holds {holds} sequences, the step has {batch} (one each); give both the same batch")
        if (store.dtype in FP8) != (new.store.k_scale is not None):
            raise InputError(f"the store is {store.dtype} (stores of FP8 have k_scale and v_scale, others none); give both, or neither")
        # the stores of a layer share batch and device, so one check serves all
        if checked != (batch, new.k.device):
            for name, x in (("start", start), ("count", count)):
                checks.check_tensor(name, x, (batch,), "(B,)", new.k, torch.int32)
            checked = batch, new.k.device
    if not rows or not checks.can_read(start):
        return
    num_rows, reach = min(new.k.shape[1] for new in rows), int((start.long() + count).max())
    if int(count.min()) < 0 or int(count.max()) > num_rows:
        raise InputError(f"count={count.tolist()} leaves 0 .. {num_rows} (the rows of the step); fix it")
    for new in rows:
        table = new.store.page_table
        size = new.store.k.shape[1] * (1 if table is None else table.shape[1])
        if not new.store.ring and reach > size:
            raise InputError(f"the step reaches position {reach} of a store of {size} rows; give it a larger one")


def compress_mean(k: Tensor, geometry: BlockGeometry, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return compressed keys `(B, C, G, D)` of k `(B, S, G, D)`: the mean of each block's tokens, which is phi without parameters (Eq. 7).

    Packed (B = 1): the blocks of all sequences follow one another, and C = S // d, which is always enough.

    Raises:
        InputError: for a k of another rank, no float dtype or 8 bits, or cu_seqlens that do not bound its rows.
    """
    checks.check_rank("k", k, 4, "(B, S, G, D)")
    checks.check_wide("k", k)
    checks.check_geometry(geometry)
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, k)
    return block_windows(k, geometry, cu_seqlens).tokens.mean(2)
