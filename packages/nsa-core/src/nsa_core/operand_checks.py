"""Every check of Queries and Keys: types, shapes and extents always, values on a CPU only, where reading them waits for nothing."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nsa_core import blocks, checks
from nsa_core.backends.base import Keys, Queries
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
    num_sequences, longest = q.shape[0], q.shape[1]
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, q, None)
        num_sequences, longest = cu_seqlens.shape[0] - 1, checks.longest_of(cu_seqlens, 0)
        if queries.count is not None:
            raise InputError("queries has cu_seqlens and count (ragged and packed rows all count); drop one")
    _check_bound("queries", queries.max_count, longest, "the longest sequence's rows, {}")
    checks.check_integers("queries.start", queries.start, (num_sequences,), "(N,)", q)
    checks.check_integers("queries.count", queries.count, (num_sequences,), "(N,)", q)
    for ending, found in keys.items():
        if found is not None:
            _check_keys(queries, found, ending, num_sequences, geometry)


def _check_bound(name: str, bound: Any, least: int, of_rows: str) -> None:
    if not isinstance(bound, int | torch.SymInt) or isinstance(bound, bool) or bound < 0:
        raise InputError(f"{name}.max_count={bound!r} is no bound on rows (the rule: an integer of at least 0); use the number of rows")
    if bound < least:
        raise InputError(f"{name}.max_count={bound} is below {of_rows.format(least)}; use {least} or more")


def _check_keys(queries: Queries, x: Keys, ending: str, num_sequences: int, geometry: BlockGeometry) -> None:
    """Raise InputError unless the Keys of one branch are whole and belong to the queries."""
    q, is_step, name, is_paged = queries.q, queries.start is not None, f"k{ending}", x.page_table is not None
    least = blocks.num_compressed_blocks(queries.max_count, geometry) if ending == "_cmp" else queries.max_count
    if is_step:
        least = 0 if x.first is None else min(geometry.window_size, x.k.shape[1])
    _check_bound(name, x.max_count, least, "the {} rows that queries read")
    # the batch of ragged rows is not q's: it is checked below
    checks.check_pair(q, x.k, x.v, ending, paged=True, stored=x.k_scale is not None)
    batch = num_sequences if is_step else q.shape[0]
    if not is_paged and x.k.shape[0] != batch:
        raise InputError(f"{name} has batch size {x.k.shape[0]}, q has {batch} (a store of each sequence); give both the same batch")
    if not is_step and (is_paged or x.first is not None or x.ring):
        raise InputError(f"{name} is paged, a ring or a part of its sequence without queries.start (rows need a position); give start")
    checks.check_integers(f"{name}.page_table", x.page_table, (num_sequences, None), "(N, max_pages)", q)
    checks.check_integers(f"{name}.first", x.first, (num_sequences,), "(N,)", q)
    is_packed = queries.cu_seqlens is not None and not is_step
    if (x.cu_seqlens is not None) != is_packed:
        state, rule, fix = ("missing", "packed", "give") if is_packed else ("given", "only packed", "drop")
        raise InputError(f"{name}.cu_seqlens is {state} ({rule} queries have packed keys); {fix} it")
    checks.check_integers(f"{name}.cu_seqlens", x.cu_seqlens, (num_sequences + 1,), "(N + 1,)", q)
    if checks.can_read(x.cu_seqlens) and queries.cu_seqlens is not None:
        offsets = x.cu_seqlens.tolist()
        is_same = ending == "_cmp" or offsets == queries.cu_seqlens.tolist()
        if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > x.k.shape[1] or not is_same:
            raise InputError(
                f"{name}.cu_seqlens={offsets} does not bound the rows of its {x.k.shape[1]} (0 first, never less); use the queries' own"
            )
    for scale_name, scale, store in (("k_scale", x.k_scale, x.k), ("v_scale", x.v_scale, x.v)):
        if scale is not None:
            checks.check_floats(f"{name}.{scale_name}", scale, tuple(store.shape[:3]), "k's without the last dimension", q)
            if scale.dtype != torch.float32:
                raise InputError(f"{name}.{scale_name} is {scale.dtype} (scales are float32); use {scale_name}.float()")


def check_operands(queries: Queries, keys: Mapping[str, Keys | None], geometry: BlockGeometry, tokens: int | None = None) -> None:
    """Raise InputError where Keys, by ending, do not fit the queries: extents and fields always, values on a CPU only.

    `tokens`: bound on the tokens of a sequence, by max_seqlen; None: what the stores of tokens bound.
    """
    bound = "max_seqlen" if tokens is not None else "max_count"
    if tokens is None:
        whole = (x for ending, x in keys.items() if x is not None and ending != "_cmp" and x.first is None and not x.ring)
        tokens = min([INT32_MAX, *(x.max_count for x in whole)])
    reach = _check_positions(queries, tokens)
    for ending, x in keys.items():
        if x is None:
            continue
        name, num_rows = f"k{ending}", x.k.shape[1]
        _check_scales(x, ending)
        is_part = x.ring or x.first is not None
        if is_part:
            _check_window(queries, x, ending, geometry, reach)
        if x.page_table is not None:
            _check_pages(name, x, queries, geometry.compression_stride if ending == "_cmp" else 1)
        elif ending == "_cmp":
            _check_blocks(x, tokens, geometry, reach)
        elif queries.start is None and num_rows != queries.q.shape[1]:
            # rows and keys are the same tokens; anything else would misplace the causal mask
            raise InputError(
                f"{name} has {num_rows} tokens for {queries.q.shape[1]} queries (without query_start they are the same tokens); "
                f"give query_start, or as many keys as queries"
            )
        elif queries.start is not None and not is_part and num_rows < tokens:
            raise InputError(f"{name} holds {num_rows} tokens, {bound} allows {tokens} (the store bounds it); lower {bound}")


def _row_counts(queries: Queries) -> Tensor | int:
    """Return the rows of each sequence that count."""
    if queries.cu_seqlens is not None:
        return queries.cu_seqlens.diff()
    return queries.q.shape[1] if queries.count is None else queries.count


def _check_positions(queries: Queries, tokens: int) -> int | None:
    """Return the tokens up to the last query, None where they may not be read; raise InputError where they are more than `tokens`."""
    start, count, most = queries.start, queries.count, queries.q.shape[1]
    if not checks.can_read(start):
        return None
    if int(start.min()) < 0 or (count is not None and (int(count.min()) < 0 or int(count.max()) > most)):
        raise InputError(
            f"query_start={start.tolist()}, query_count={None if count is None else count.tolist()} leave 0 .. S={most} "
            f"(positions start at 0, counts at most S); fix them"
        )
    reach = int((start + _row_counts(queries)).max())
    if reach > tokens:
        raise InputError(
            f"query_start + query_count reaches {reach} of {tokens} cached tokens "
            f"(keys must already hold the queries' own tokens); write them to the cache first"
        )
    return reach


def _check_scales(x: Keys, ending: str) -> None:
    """Raise InputError unless k and v have scales exactly where they are stored in FP8; compressed keys never are."""
    for name, store, scale in (("k", x.k, x.k_scale), ("v", x.v, x.v_scale)):
        if (store.dtype in FP8) == (scale is None) or (scale is None) != (x.k_scale is None):
            state = "without scales" if scale is None else "with scales"
            raise InputError(
                f"{name}{ending} is {store.dtype} {state} (stores of FP8 have k_scale and v_scale, others none); "
                f"give both, or stores of q's dtype"
            )
    if x.k_scale is not None and ending == "_cmp":
        raise InputError("k_cmp is a store of FP8 (blocks are chosen in the compute dtype); give compressed keys of q's dtype")


def _check_window(queries: Queries, x: Keys, ending: str, geometry: BlockGeometry, reach: int | None) -> None:
    """Raise InputError where keys that are a ring or a part of their sequence do not hold every key of their queries' windows."""
    if ending not in ("", "_win"):
        raise InputError(f"k{ending} is a ring or a part of its sequence (only the sliding branch reads so few keys); give all of its keys")
    start, first, needed = queries.start, x.first, geometry.window_size - 1 + queries.max_count
    length = x.k.shape[1] * (1 if x.page_table is None else x.page_table.shape[1])
    if x.ring and length < min(needed, x.max_count if reach is None else reach):
        raise InputError(
            f"the ring k{ending} holds {length} tokens (its queries see window_size - 1 + {queries.max_count} = {needed}); "
            f"make it of {needed} rows, or pass fewer queries"
        )
    if start is None or not checks.can_read(first):
        return
    rows = torch.as_tensor(_row_counts(queries), device=start.device).expand_as(start)
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


def _check_blocks(x: Keys, tokens: int, geometry: BlockGeometry, reach: int | None) -> None:
    """C must hold every block that a query may see: N_c(S), or the sum of N_c(S_i) where that can be read."""
    needed = x.max_count if tokens == INT32_MAX else blocks.num_compressed_blocks(tokens, geometry)
    if x.cu_seqlens is not None:
        needed = int(x.cu_seqlens[-1]) if checks.can_read(x.cu_seqlens) else 0
    seen = 0 if reach is None else blocks.num_compressed_blocks(reach, geometry)
    if x.max_count < seen:
        raise InputError(f"k_cmp.max_count={x.max_count} is below the {seen} blocks that queries see; use {seen} or more")
    if x.k.shape[1] < needed:
        raise InputError(
            f"k_cmp has {x.k.shape[1]} blocks where the sequences have {needed} (N_c = (S - l) // d + 1 each); compress all of them"
        )


def _check_pages(name: str, x: Keys, queries: Queries, stride: int) -> None:
    """Pages up to each sequence's last query row must exist, each once; entries beyond are never read."""
    # on a GPU a tensor made of a Python number would wait for its copy
    if queries.start is None or not checks.can_read(x.page_table):
        return
    rows = _row_counts(queries)
    last_tokens = torch.where(torch.as_tensor(rows, device=queries.start.device) > 0, queries.start + rows, 0)
    if x.ring or x.first is not None:
        # fewer tokens than the sequence has: how many, the checks of the window know
        last_tokens = last_tokens.clamp(max=x.k.shape[1] * x.page_table.shape[1])
    checks.check_page_table(x.page_table, last_tokens, name, x.k.shape[0], x.k.shape[1] * stride)


def check_choice(queries: Queries, slc: Keys, block_indices: Tensor, geometry: BlockGeometry) -> None:
    """Raise InputError where block_indices are no int32 `(B, S, G, n)`, or (on a CPU) name a block twice or outside 0 .. own."""
    q, layout = queries.q, "(B, S, G, n)"
    checks.check_rank("block_indices", block_indices, 4, layout)
    checks.check_integers("block_indices", block_indices, (*q.shape[:2], slc.k.shape[2], max(1, block_indices.shape[3])), layout, q)
    if checks.can_read(block_indices):
        checks.check_block_indices(block_indices, rows_of(queries).positions, geometry)
