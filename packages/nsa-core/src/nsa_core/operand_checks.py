"""Every check of Queries and Keys: types, shapes and extents always, values on a CPU only, where reading them waits for nothing."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nsa_core import blocks, checks
from nsa_core.backends.base import Keys, Layout, Queries, layout_of
from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError
from nsa_core.reference.rows import rows_of

INT32_MAX = 2**31 - 1
"""Positions are int32, so no sequence is longer."""
FP8 = (torch.float8_e4m3fn,)


def check_kinds(queries: object, keys: Mapping[str, object]) -> None:
    """Raise InputError unless `queries` is Queries and `keys` holds Keys, or None for an absent branch, with tensors in them."""
    if not isinstance(queries, Queries):
        raise InputError(f"queries is a {type(queries).__name__} (the rule: Queries says where rows stand); use Queries(q, max_count)")
    checks.check_query(queries.q)
    for ending, x in keys.items():
        if x is not None and not isinstance(x, Keys):
            raise InputError(f"k{ending} is a {type(x).__name__} (the rule: Keys says where keys lie); use Keys(k, v, max_count)")
        if x is not None:
            checks.check_rank(f"k{ending}", x.k, 4, "(B, T, G, D)")
            checks.check_rank(f"v{ending}", x.v, 4, "(B, T, G, D)")


def check_placement(queries: Queries, keys: Mapping[str, Keys | None], geometry: BlockGeometry) -> None:
    """Raise InputError unless the fields of operands that a caller built fit each other.

    `keys` holds the Keys of each branch by the ending of its names, "_cmp", "_slc" or "_win"; None for an absent one.
    """
    q, cu_seqlens = queries.q, queries.cu_seqlens
    _check_bound("queries", queries.max_count)
    num_sequences, longest = q.shape[0], q.shape[1]
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, q, None)
        num_sequences = cu_seqlens.shape[0] - 1
        longest = int(cu_seqlens.diff().max()) if checks.can_read(cu_seqlens) and num_sequences else 0
        if queries.count is not None:
            raise InputError("queries has cu_seqlens and count (ragged and packed rows all count); drop one")
    if queries.max_count < longest:
        raise InputError(f"queries.max_count={queries.max_count} is below the longest sequence's rows, {longest}; use {longest} or more")
    for name, x in (("start", queries.start), ("count", queries.count)):
        _check_per_sequence(f"queries.{name}", x, num_sequences, q)
    for ending, found in keys.items():
        if found is not None:
            _check_keys(queries, found, ending, num_sequences, geometry)


def _check_bound(name: str, bound: Any) -> None:
    if not isinstance(bound, int | torch.SymInt) or isinstance(bound, bool) or bound < 0:
        raise InputError(f"{name}.max_count={bound!r} is no bound on rows (the rule: an integer of at least 0); use the number of rows")


def _check_per_sequence(name: str, x: Tensor | None, num_sequences: int, q: Tensor) -> None:
    if x is not None:
        checks.check_integers(name, x, 1, "(N,)", q)
        checks.check_shape(name, x, (num_sequences,), "(N,)")


def _check_keys(queries: Queries, x: Keys, ending: str, num_sequences: int, geometry: BlockGeometry) -> None:
    """Raise InputError unless the Keys of one branch are whole and belong to the queries."""
    q, is_step, name = queries.q, queries.start is not None, f"k{ending}"
    _check_bound(name, x.max_count)
    paged, table = x.page_table is not None, x.page_table
    # the batch of ragged rows is not q's: it is checked below
    checks.check_pair(q, x.k, x.v, ending, paged=True, stored=x.k_scale is not None)
    batch = num_sequences if is_step else q.shape[0]
    if not paged and x.k.shape[0] != batch:
        raise InputError(f"{name} has batch size {x.k.shape[0]}, q has {batch} (a store of each sequence); give both the same batch")
    if not is_step and (paged or x.first is not None or x.ring):
        raise InputError(f"{name} is paged, a ring or a part of its sequence without queries.start (rows need a position); give start")
    if table is not None:
        checks.check_integers(f"{name}.page_table", table, 2, "(N, max_pages)", q)
        checks.check_shape(f"{name}.page_table", table, (num_sequences, table.shape[1]), "(N, max_pages)")
    _check_per_sequence(f"{name}.first", x.first, num_sequences, q)
    _check_offsets(queries, x, ending, num_sequences)
    for scale_name, scale, store in (("k_scale", x.k_scale, x.k), ("v_scale", x.v_scale, x.v)):
        if scale is not None:
            checks.check_rank(f"{name}.{scale_name}", scale, 3, "k's without the last dimension")
            checks.check_shape(f"{name}.{scale_name}", scale, tuple(store.shape[:3]), "k's without the last dimension")
            checks.check_device(f"{name}.{scale_name}", scale, "q", q)
            if scale.dtype != torch.float32:
                raise InputError(f"{name}.{scale_name} is {scale.dtype} (scales are float32); use {scale_name}.float()")
    least = blocks.num_compressed_blocks(queries.max_count, geometry) if ending == "_cmp" else queries.max_count
    if is_step and x.first is not None:
        least = min(geometry.window_size, x.k.shape[1])
    if (not is_step or x.first is not None) and x.max_count < least:
        raise InputError(f"{name}.max_count={x.max_count} is below the {least} rows that queries read; use {least} or more")


def _check_offsets(queries: Queries, x: Keys, ending: str, num_sequences: int) -> None:
    """Raise InputError unless packed queries have packed keys, and no others have."""
    is_packed, name = queries.cu_seqlens is not None and queries.start is None, f"k{ending}.cu_seqlens"
    if (x.cu_seqlens is not None) != is_packed:
        rule = "packed queries have packed keys" if is_packed else "only packed queries have packed keys"
        raise InputError(f"{name} is {'missing' if is_packed else 'given'} ({rule}); {'give' if is_packed else 'drop'} it")
    if x.cu_seqlens is None:
        return
    checks.check_integers(name, x.cu_seqlens, 1, "(N + 1,)", queries.q)
    checks.check_shape(name, x.cu_seqlens, (num_sequences + 1,), "(N + 1,)")
    if checks.can_read(x.cu_seqlens) and queries.cu_seqlens is not None:
        offsets = x.cu_seqlens.tolist()
        is_same = ending == "_cmp" or offsets == queries.cu_seqlens.tolist()
        if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > x.k.shape[1] or not is_same:
            raise InputError(f"{name}={offsets} does not bound the rows of its {x.k.shape[1]} (0 first, never less); use the queries' own")


def check_operands(queries: Queries, keys: Mapping[str, Keys | None], geometry: BlockGeometry, tokens: int | None = None) -> None:
    """Raise InputError where Keys, by ending, do not fit the queries: extents and fields always, values on a CPU only.

    `tokens`: bound on the tokens of a sequence; None: what the stores of tokens bound.
    """
    layout = _layout(queries, keys)
    is_step = layout not in (Layout.DENSE, Layout.PACKED)
    if tokens is None:
        whole = (x for ending, x in keys.items() if x is not None and ending != "_cmp" and x.first is None and not x.ring)
        tokens = min([INT32_MAX, *(x.max_count for x in whole)])
    if is_step:
        _check_positions(queries, tokens)
    for ending, x in keys.items():
        if x is not None:
            _check_scales(x, ending)
            if x.ring or x.first is not None:
                _check_window(queries, x, ending, geometry)
            if x.page_table is not None:
                stride = geometry.compression_stride if ending == "_cmp" else 1
                _check_pages(f"k{ending}", x, queries, stride)
            elif ending == "_cmp":
                _check_blocks(x, queries, tokens, geometry)
            elif x.first is None and not x.ring:
                _check_tokens(f"k{ending}", x, queries, tokens, is_step)


def _layout(queries: Queries, keys: Mapping[str, Keys | None]) -> Layout:
    return next(layout_of(queries, x) for x in keys.values() if x is not None)


def _row_counts(queries: Queries) -> Tensor | int:
    """Return the rows of each sequence that count."""
    if queries.cu_seqlens is not None:
        return queries.cu_seqlens.diff()
    return queries.q.shape[1] if queries.count is None else queries.count


def _check_positions(queries: Queries, tokens: int) -> None:
    start, count = queries.start, queries.count
    if start is None or not checks.can_read(start) or not start.numel():
        return
    rows, most = _row_counts(queries), queries.q.shape[1]
    if int(start.min()) < 0 or (count is not None and (int(count.min()) < 0 or int(count.max()) > most)):
        raise InputError(
            f"query_start={start.tolist()}, query_count={None if count is None else count.tolist()} leave 0 .. S={most} "
            f"(positions start at 0, counts at most S); fix them"
        )
    if int((start + rows).max()) > tokens:
        raise InputError(
            f"query_start + query_count reaches {int((start + rows).max())} of {tokens} cached tokens "
            f"(keys must already hold the queries' own tokens); write them to the cache first"
        )


def _check_scales(x: Keys, ending: str) -> None:
    """Raise InputError unless stores of FP8, and no others, have scales."""
    for name, store, scale in (("k", x.k, x.k_scale), ("v", x.v, x.v_scale)):
        if (store.dtype in FP8) == (scale is None) or (scale is None) != (x.k_scale is None):
            state = "without scales" if scale is None else "with scales"
            raise InputError(
                f"{name}{ending} is {store.dtype} {state} (stores of FP8 have k_scale and v_scale, others none); "
                f"give both, or stores of q's dtype"
            )
    if x.k_scale is not None and ending == "_cmp":
        raise InputError("k_cmp is a store of FP8 (blocks are chosen in the compute dtype); give compressed keys of q's dtype")


def _check_window(queries: Queries, x: Keys, ending: str, geometry: BlockGeometry) -> None:
    """Raise InputError where keys are a ring or a part of their sequence, and do not hold every key of their queries' windows."""
    if ending not in ("", "_win"):
        raise InputError(f"k{ending} is a ring or a part of its sequence (only the sliding branch reads so few keys); give all of its keys")
    start, needed = queries.start, geometry.window_size - 1 + queries.max_count
    length = x.k.shape[1] * (1 if x.page_table is None else x.page_table.shape[1])
    reach = x.max_count
    if start is not None and checks.can_read(start) and start.numel():
        reach = int((start + _row_counts(queries)).max())
    if x.ring and length < min(needed, reach):
        raise InputError(
            f"the ring k{ending} holds {length} tokens (its queries see window_size - 1 + {queries.max_count} = {needed}); "
            f"make it of {needed} rows, or pass fewer queries"
        )
    if x.first is None or start is None or not checks.can_read(x.first) or not x.first.numel():
        return
    rows = torch.as_tensor(_row_counts(queries), device=start.device).expand_as(start)
    first = x.first
    # a sequence without rows reads nothing
    is_read = rows > 0
    if bool((is_read & (first < 0)).any()):
        raise InputError(f"k{ending} begins at positions {first.tolist()} (the first token of a sequence is at 0); give its keys from 0 on")
    if bool((is_read & (first > (start - geometry.window_size + 1).clamp(min=0))).any()):
        raise InputError(
            f"k{ending} begins at positions {first.tolist()} for queries from {start.tolist()} on (a query sees window_size="
            f"{geometry.window_size} tokens back); begin at query_start - {geometry.window_size - 1} or before"
        )
    if bool((is_read & (start + rows - first > length)).any()):
        raise InputError(
            f"k{ending} ends at positions {(first + length).tolist()} before its queries do (they see themselves); give their own keys as well"
        )


def _check_tokens(name: str, x: Keys, queries: Queries, tokens: int, is_step: bool) -> None:
    """Without a query_start, rows and keys are the same tokens; anything else would misplace the causal mask."""
    if not is_step and x.k.shape[1] != queries.q.shape[1]:
        raise InputError(
            f"{name} has {x.k.shape[1]} tokens for {queries.q.shape[1]} queries (without query_start they are the same tokens); "
            f"give query_start, or as many keys as queries"
        )
    if is_step and x.k.shape[1] < tokens:
        raise InputError(f"{name} holds {x.k.shape[1]} tokens, max_seqlen allows {tokens} (the store bounds it); lower max_seqlen")


def _check_blocks(x: Keys, queries: Queries, tokens: int, geometry: BlockGeometry) -> None:
    """C must hold every block that a query may see: N_c(S), or the sum of N_c(S_i) where that can be read."""
    if x.cu_seqlens is not None:
        needed = int(x.cu_seqlens[-1]) if checks.can_read(x.cu_seqlens) else 0
    else:
        needed = x.max_count if tokens == INT32_MAX else blocks.num_compressed_blocks(tokens, geometry)
    if queries.start is not None and checks.can_read(queries.start) and queries.start.numel():
        seen = blocks.num_compressed_blocks(int((queries.start + _row_counts(queries)).max()), geometry)
        if x.max_count < seen:
            raise InputError(f"k_cmp.max_count={x.max_count} is below the {seen} blocks that queries see; use {seen} or more")
    if x.k.shape[1] < needed:
        raise InputError(
            f"k_cmp has {x.k.shape[1]} blocks where the sequences have {needed} (N_c = (S - l) // d + 1 each); compress all of them"
        )


def _check_pages(name: str, x: Keys, queries: Queries, stride: int) -> None:
    """Pages up to each sequence's last query row must exist, each once; entries beyond are never read."""
    assert queries.start is not None and x.page_table is not None
    if not checks.can_read(x.page_table):
        # on a GPU a tensor made of a Python number would wait for its copy
        return
    rows = _row_counts(queries)
    last_tokens = torch.where(torch.as_tensor(rows, device=queries.start.device) > 0, queries.start + rows, 0)
    if x.ring or x.first is not None:
        # fewer tokens than the sequence has: how many, the checks of the window know
        last_tokens = last_tokens.clamp(max=x.k.shape[1] * x.page_table.shape[1])
    checks.check_page_table(x.page_table, last_tokens, name, x.k.shape[0], x.k.shape[1] * stride)


def check_choice(queries: Queries, slc: Keys, block_indices: Tensor, geometry: BlockGeometry) -> None:
    """Raise InputError where block_indices are no int32 `(B, S, G, n)`, or (on a CPU) name a block twice or outside 0 .. own."""
    q = queries.q
    checks.check_integers("block_indices", block_indices, 4, "(B, S, G, n)", q)
    wanted = (q.shape[0], q.shape[1], slc.k.shape[2], max(1, block_indices.shape[3]))
    checks.check_shape("block_indices", block_indices, wanted, "(B, S, G, n)")
    if checks.can_read(block_indices):
        checks.check_block_indices(block_indices, rows_of(queries).positions, geometry)
