"""Make Queries and Keys from the keywords of a public operation, and check them.

Types, shapes and sizes are always checked. Values are checked only on a CPU, where reading them does not wait for a device.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from nsa_core import blocks, checks
from nsa_core.backends.base import Keys, Queries
from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError, type_of
from nsa_core.reference.rows import positions_of
from nsa_core.varlen import compressed_lengths, cu_blocks_from_cu_seqlens

INT32_MAX = 2**31 - 1
"""Maximum length of a sequence: positions are int32."""
FP8 = (torch.float8_e4m3fn,)
PageTables = Tensor | tuple[Tensor, Tensor] | None
Pairs = Mapping[str, tuple[Tensor | None, Tensor | None]]
"""Ending of the names of k and v ("_cmp", "_slc", "_win", or "" for an operation of one branch) -> k and v, each None if it is absent."""
BranchKeys = Mapping[str, Keys | None]
"""Keys by the same endings; None for an absent branch."""


def queries_of(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    query_start: Tensor | None = None,
    query_count: Tensor | None = None,
    page_table: PageTables = None,
) -> Queries:
    """Return checked Queries of the rows `x` (q, or a layer's input), from the keywords of a public operation.

    Raises:
        InputError: for keywords that do not match x or one another.
    """
    if page_table is not None and query_start is None:
        raise InputError("page_table came without query_start (pages hold whole sequences, so rows need a position); give it")
    if cu_seqlens is not None and (query_count is not None or (query_start is not None and page_table is None)):
        raise InputError(
            "cu_seqlens came with query_start or query_count (a packed batch holds whole sequences, ragged rows need pages); "
            "give query_start and page_table, or cu_seqlens alone"
        )
    check_queries(Queries(x, x.shape[1], cu_seqlens, query_start, query_count), "query_")
    max_count = least = x.shape[1]
    if cu_seqlens is not None:
        max_count, least = checks.longest_of(cu_seqlens, max_count), checks.longest_of(cu_seqlens, 0)
    if query_start is None and query_count is not None:
        query_start = torch.zeros_like(query_count)
    if max_seqlen is not None:
        # with query_start, max_seqlen bounds the tokens of the stores; else it bounds the rows
        least = least if query_start is None else 0
        check_bound("max_seqlen", max_seqlen, least, f"the longest sequence, {least} (it bounds every one)")
        if query_start is None and cu_seqlens is not None:
            max_count = max_seqlen
    return Queries(x, max_count, cu_seqlens, query_start, query_count)


def keys_of(
    queries: Queries, pairs: Pairs, geometry: BlockGeometry, max_seqlen: int | None = None, page_table: PageTables = None
) -> dict[str, Keys | None]:
    """Return a dict from the ending of each pair to its Keys, with the placement that the keywords of a public operation give.

    The Keys are not checked yet, except for ranks and page tables.

    Raises:
        InputError: for tensors whose rank is not 4, or page tables that do not match the queries.
    """
    # the tables of the tokens, and of the compressed keys
    tables = page_table if isinstance(page_table, tuple) else (page_table, page_table)
    if len(tables) != 2:
        raise InputError(f"page_table is a tuple of {len(tables)} (one table, or a pair: tokens, compressed keys); give 1 or 2 tables")
    start, cu_seqlens, tokens = queries.start, queries.cu_seqlens, queries.max_count
    cu_blocks = None
    for table in tables:
        if table is not None and start is not None:
            checks.check_tensor("page_table", table, (start.shape[0], None), "(B, max_pages)", queries.q, torch.int32)
    for ending, (k, v) in pairs.items():
        check_ranks(k, v, ending, is_paged=page_table is not None)
    if start is not None:
        tokens = min(INT32_MAX, _capacity(pairs, tables, geometry), INT32_MAX if max_seqlen is None else max_seqlen)
        cu_seqlens = None
    elif cu_seqlens is not None and "_cmp" in pairs:
        cu_blocks = cu_blocks_from_cu_seqlens(cu_seqlens, geometry)
    # no bool as index: Dynamo of torch 2.11 cannot trace one
    of_tokens, of_blocks = (tokens, cu_seqlens, tables[0]), (blocks.num_compressed_blocks(tokens, geometry), cu_blocks, tables[1])
    return {
        ending: None if k is None else Keys(k, k if v is None else v, *(of_blocks if ending == "_cmp" else of_tokens))
        for ending, (k, v) in pairs.items()
    }


def _capacity(pairs: Pairs, tables: tuple[Tensor | None, Tensor | None], geometry: BlockGeometry) -> int:
    """Return how many tokens of a sequence the first store of tokens can hold; if there is none, how many fit the compressed keys."""
    rows = {ending: k.shape[1] for ending, (k, _) in pairs.items() if k is not None}
    for ending in rows:
        table = tables[1 if ending == "_cmp" else 0]
        rows[ending] *= 1 if table is None else table.shape[1]
    blocks_held = rows.pop("_cmp", 0)
    return next(iter(rows.values()), blocks.max_tokens(blocks_held, geometry))


def check_kinds(queries: object, keys: Mapping[str, object], geometry: BlockGeometry) -> None:
    """Raise InputError unless a caller's `queries` are Queries and `keys` Keys, or None for an absent branch, with bounds on their rows."""
    if not isinstance(queries, Queries):
        raise InputError(f"queries is {type_of(queries)} (the rule: Queries holds the positions of rows); use Queries(q, max_count)")
    checks.check_query(queries.q)
    check_queries(queries, "queries.")
    longest = queries.q.shape[1] if queries.cu_seqlens is None else checks.longest_of(queries.cu_seqlens, 0)
    check_bound("queries.max_count", queries.max_count, longest, f"the longest sequence's rows, {longest}")
    for ending, x in keys.items():
        if x is None:
            continue
        if not isinstance(x, Keys):
            raise InputError(f"k{ending} is {type_of(x)} (the rule: Keys holds the positions of keys); use Keys(k, v, max_count)")
        if any(store is None for store in (x.k, x.v)):
            raise InputError(
                f"one of k{ending} and v{ending} is None (Keys holds both); give both, or None for the Keys of an absent branch"
            )
        check_ranks(x.k, x.v, ending, is_paged=x.page_table is not None)
        least = blocks.num_compressed_blocks(queries.max_count, geometry) if ending == "_cmp" else queries.max_count
        if queries.start is not None:
            least = 0 if x.first is None else min(geometry.window_size, x.k.shape[1])
        check_bound(f"k{ending}.max_count", x.max_count, least, f"the {least} rows that queries read")


def check_bound(name: str, bound: Any, least: int, cause: str) -> None:
    """Raise InputError unless `bound`, a bound on rows that the host knows, is an integer of at least `least`; `cause` explains `least`."""
    if not checks.is_size(bound, 0):
        raise InputError(f"{name}={bound!r} is no bound on rows (the rule: an integer of at least 0); use the number of rows")
    if bound < least:
        raise InputError(f"{name}={bound} is below {cause}; use {least} or more")


def check_ranks(k: Tensor | None, v: Tensor | None, ending: str, *, is_paged: bool) -> None:
    """Raise InputError unless the stores of one branch are tensors of four dimensions, or None."""
    for letter, x in (("k", k), ("v", v)):
        if x is not None:
            checks.check_rank(letter + ending, x, 4, "(pages, page_size, G, D)" if is_paged else "(B, T, G, D)")


def check_queries(queries: Queries, prefix: str) -> None:
    """Raise InputError unless the placement of `queries` matches its rows; messages put `prefix` before the names start and count."""
    q, cu_seqlens, num_sequences = queries.q, queries.cu_seqlens, queries.q.shape[0]
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, q)
        num_sequences = cu_seqlens.shape[0] - 1
        if queries.count is not None:
            raise InputError("queries has cu_seqlens and count (ragged and packed rows all count); drop one")
    for name, x in (("start", queries.start), ("count", queries.count)):
        if x is not None:
            checks.check_tensor(prefix + name, x, (num_sequences,), "(B,)", q, torch.int32)


def check_keys(queries: Queries, keys: BranchKeys, geometry: BlockGeometry) -> None:
    """Raise InputError if Keys do not match the queries or one another."""
    for ending, x in keys.items():
        if x is not None:
            _check_stores(queries.q, x, ending)
            _check_fields(queries, x, ending, geometry)
    reach = _check_positions(queries, keys, geometry)
    for ending, x in keys.items():
        if x is None:
            continue
        if _is_part(x):
            _check_window(queries, x, ending, geometry, reach)
        if x.page_table is not None:
            _check_pages(queries, x, ending, geometry)
        elif ending == "_cmp":
            _check_blocks(x, geometry, reach)
        elif not _is_part(x):
            _check_tokens(queries, x, ending)


def _is_part(x: Keys) -> bool:
    """Return True if the keys may be only a part of their sequence."""
    return x.ring or x.first is not None


def _check_stores(q: Tensor, x: Keys, ending: str) -> None:
    """Raise InputError unless keys `(B, T, G, D_k)` and values `(B, T, G, D_v)` match q and each other."""
    for letter, store, scale in (("k", x.k, x.k_scale), ("v", x.v, x.v_scale)):
        dtype = store.dtype
        if scale is not None:
            checks.check_tensor(f"k{ending}.{letter}_scale", scale, tuple(store.shape[:3]), "k's without the last", q, torch.float32)
        if (dtype in FP8) == (scale is None) or (scale is None) != (x.k_scale is None):
            state = "without scales" if scale is None else "with scales"
            raise InputError(
                f"{letter}{ending} is {dtype} {state} (stores of FP8 have k_scale and v_scale, others none); "
                f"give both, or stores of q's dtype"
            )
        if scale is None and dtype != q.dtype:
            raise InputError(f"{letter}{ending} is {dtype}, q is {q.dtype} (q, k, v share one dtype); cast one with .to()")
        if store.device != q.device:
            checks.check_device(letter + ending, store, "q", q)
    if x.k_scale is not None and ending == "_cmp":
        raise InputError("k_cmp is a store of FP8 (blocks are chosen in the compute dtype); give compressed keys of q's dtype")
    shape, other, (_, _, num_heads, head_dim) = x.k.shape, x.v.shape, q.shape
    if shape[3] != head_dim:
        raise InputError(f"k{ending} has head dimension {shape[3]}, q has {head_dim} (they meet in a product); make them equal")
    if other[:3] != shape[:3]:
        raise InputError(
            f"v{ending} has shape {tuple(other)}, k{ending} {tuple(shape)} (equal except for the last size); pass matching tensors"
        )
    if shape[2] < 1 or num_heads % shape[2]:
        raise InputError(
            f"k{ending} has {shape[2]} KV heads for {num_heads} query heads (each serves H/G of them); use a divisor of {num_heads}"
        )


def _check_fields(queries: Queries, x: Keys, ending: str, geometry: BlockGeometry) -> None:
    """Raise InputError unless the placement of one branch's Keys matches the placement of the queries."""
    q, cu_seqlens, is_step, name = queries.q, queries.cu_seqlens, queries.start is not None, f"k{ending}"
    num_sequences, is_packed = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, cu_seqlens is not None and not is_step
    batch = 1 if is_packed else num_sequences
    if x.page_table is None and x.k.shape[0] != batch:
        raise InputError(f"{name} has batch size {x.k.shape[0]}, q has {batch} (the rule: equal); give both the same batch")
    if not is_step and (x.page_table is not None or _is_part(x)):
        raise InputError(f"{name} is paged, a ring or a part of its sequence without queries.start (rows need a position); give start")
    if _is_part(x) and ending not in ("", "_win"):
        raise InputError(f"{name} is a ring or a part of its sequence (only the sliding branch reads so few keys); give all of its keys")
    if x.ring and x.first is not None:
        raise InputError(f"{name} is a ring with first (row p % T of a ring holds position p, wherever its tokens begin); drop one of them")
    if (x.cu_seqlens is not None) != is_packed:
        state, fix = ("missing", "give") if is_packed else ("given", "drop")
        raise InputError(f"{name}.cu_seqlens is {state} (packed queries have packed keys, others none); {fix} it")
    if x.page_table is not None:
        checks.check_tensor(f"{name}.page_table", x.page_table, (num_sequences, None), "(N, max_pages)", q, torch.int32)
    if x.first is not None:
        checks.check_tensor(f"{name}.first", x.first, (num_sequences,), "(N,)", q, torch.int32)
    if x.cu_seqlens is not None:
        checks.check_tensor(f"{name}.cu_seqlens", x.cu_seqlens, (num_sequences + 1,), "(N + 1,)", q, torch.int32)
    if checks.can_read(x.cu_seqlens) and cu_seqlens is not None:
        _check_offsets(x.cu_seqlens.tolist(), cu_seqlens.tolist(), ending, geometry)


def _check_offsets(found: list[int], expected: list[int], ending: str, geometry: BlockGeometry) -> None:
    """Raise InputError unless a branch's cu_seqlens `found` equals `expected`, those of the queries, or for cmp those of their compressed blocks."""
    rule = "rows (they are the queries' tokens)"
    if ending == "_cmp":
        counts = (blocks.num_compressed_blocks(last - first, geometry) for first, last in pairwise(expected))
        expected, rule = [*accumulate(counts, initial=0)], "blocks (N_c = (S - l) // d + 1 each)"
    if found != expected:
        raise InputError(f"k{ending}.cu_seqlens={found} does not bound its sequences' {rule}; use {expected}")


def _row_counts(queries: Queries) -> Tensor | int:
    """Return the number of valid rows of each sequence."""
    if queries.cu_seqlens is not None:
        return queries.cu_seqlens.diff()
    return queries.q.shape[1] if queries.count is None else queries.count


def _check_positions(queries: Queries, keys: BranchKeys, geometry: BlockGeometry) -> int | None:
    """Return the number of tokens up to the last query of any sequence, or None if positions may not be read.

    Raises:
        InputError: for positions below 0, counts outside 0 .. S, or more tokens than `keys` hold.
    """
    start, count, most = queries.start, queries.count, queries.q.shape[1]
    if not checks.can_read(start):
        return None
    if int(start.min()) < 0 or (count is not None and (int(count.min()) < 0 or int(count.max()) > most)):
        raise InputError(
            f"query_start={start.tolist()}, query_count={None if count is None else count.tolist()} leave 0 .. S={most} "
            f"(positions start at 0, counts at most S); fix them"
        )
    # if no store holds all tokens, compressed keys bound them
    whole = [(ending, x.max_count) for ending, x in keys.items() if x is not None and not _is_part(x)]
    bounds = [bound for ending, bound in whole if ending != "_cmp"] or [blocks.max_tokens(bound, geometry) for _, bound in whole]
    reach, tokens = int((start.long() + _row_counts(queries)).max()), min([INT32_MAX, *bounds])
    if reach > tokens:
        raise InputError(
            f"query_start + query_count reaches {reach} of {tokens} cached tokens "
            f"(keys must already hold the queries' own tokens); write them to the cache first"
        )
    return reach


def _check_tokens(queries: Queries, x: Keys, ending: str) -> None:
    """Raise InputError unless k and v hold every token of their sequences."""
    num_rows, num_queries = x.k.shape[1], queries.q.shape[1]
    # without query_start, rows and keys must be the same tokens; else the causal mask would be misplaced
    if queries.start is None and num_rows != num_queries:
        raise InputError(
            f"k{ending} has {num_rows} tokens for {num_queries} queries (without query_start they are the same tokens); "
            f"give query_start, or as many keys as queries"
        )
    if queries.start is not None and num_rows < x.max_count:
        raise InputError(
            f"k{ending} holds {num_rows} tokens of sequences that may have {x.max_count} (a store holds all of them); "
            f"give it {x.max_count} rows, or a bound of {num_rows}"
        )


def _check_window(queries: Queries, x: Keys, ending: str, geometry: BlockGeometry, reach: int | None) -> None:
    """Raise InputError if keys that are a ring or a part of their sequence do not hold every key of their queries' windows."""
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
    seen = start - geometry.window_size + 1
    problems = (
        (first < 0, f"begins at positions {first.tolist()} (the first token of a sequence is at 0); give its keys from 0 on"),
        (
            first > seen.clamp(min=0),
            f"begins at positions {first.tolist()} for queries from {start.tolist()} on (a query sees window_size="
            f"{geometry.window_size} tokens back); begin at query_start - {geometry.window_size - 1} or before",
        ),
        (
            start + rows - first > length,
            f"ends at positions {(first + length).tolist()} before its queries do (they see themselves); give their own keys as well",
        ),
    )
    for is_wrong, message in problems:
        # a sequence without rows reads nothing
        if bool((is_wrong & (rows > 0)).any()):
            raise InputError(f"k{ending} {message}")


def _check_blocks(x: Keys, geometry: BlockGeometry, reach: int | None) -> None:
    """Raise InputError unless C includes every block that a query may see: N_c(S), or, if lengths may be read, the sum of N_c(S_i)."""
    needed = x.max_count
    if x.cu_seqlens is not None:
        needed = int(x.cu_seqlens[-1]) if checks.can_read(x.cu_seqlens) else 0
    seen = 0 if reach is None else blocks.num_compressed_blocks(reach, geometry)
    check_bound("k_cmp.max_count", x.max_count, seen, f"the {seen} blocks that queries see")
    if x.k.shape[1] < needed:
        raise InputError(
            f"k_cmp has {x.k.shape[1]} blocks where the sequences have {needed} (N_c = (S - l) // d + 1 each); compress all of them"
        )


def _check_pages(queries: Queries, x: Keys, ending: str, geometry: BlockGeometry) -> None:
    """Raise InputError unless the pages that queries read exist, each once: up to a sequence's last query, or the last block that it sees.

    Later entries of the table are never read.
    """
    page_table, num_pages, page_size, name = x.page_table, x.k.shape[0], x.k.shape[1], f"k{ending}"
    # on a GPU a tensor from a Python number would wait for its copy
    if queries.start is None or not checks.can_read(page_table) or not page_size:
        return
    rows = torch.as_tensor(_row_counts(queries), device=queries.start.device)
    last_tokens = torch.where(rows > 0, queries.start + rows, 0)
    if _is_part(x):
        # the store holds fewer tokens than the sequence; `_check_window` checks how many
        last_tokens = last_tokens.clamp(max=page_size * page_table.shape[1])
    num_rows, rows_name = (compressed_lengths(last_tokens, geometry), "blocks") if ending == "_cmp" else (last_tokens, "tokens")
    num_needed = (num_rows + page_size - 1) // page_size
    if int(num_needed.max()) > page_table.shape[1]:
        b = int(num_needed.argmax())
        raise InputError(
            f"page_table has {page_table.shape[1]} entries a sequence where sequence {b} has {int(num_needed[b])} pages of {name} "
            f"(a page holds {page_size} {rows_name}); give it {int(num_needed[b])} entries"
        )
    needed = torch.arange(page_table.shape[1], device=page_table.device) < num_needed.unsqueeze(1)
    for b, entry in _first(needed & ((page_table < 0) | (page_table >= num_pages))):
        raise InputError(
            f"page_table[{b}, {entry}]={int(page_table[b, entry])} names no page of {name} (it has {num_pages}, and sequence {b} "
            f"needs its first {int(needed[b].sum())}); use 0 .. {num_pages - 1}"
        )
    ordered, is_repeated = _ordered(torch.where(needed, page_table, -1))
    for b, entry in _first(is_repeated):
        raise InputError(
            f"page_table[{b}] names page {int(ordered[b, entry])} of {name} twice (a page holds the tokens of one stretch of a sequence); "
            f"give each stretch its own page"
        )


def check_choice(queries: Queries, k: Tensor, block_indices: Tensor, geometry: BlockGeometry) -> None:
    """Raise InputError if block_indices are not int32 `(B, S, G, n)`, or (on a CPU) name a block twice or one outside 0 .. own."""
    checks.check_rank("block_indices", block_indices, 4, "(B, S, G, n)")
    shape = (*queries.q.shape[:2], k.shape[2], max(1, block_indices.shape[3]))
    checks.check_tensor("block_indices", block_indices, shape, "(B, S, G, n)", queries.q, torch.int32)
    if not checks.can_read(block_indices):
        return
    own = torch.div(positions_of(queries), geometry.selection_block_size, rounding_mode="floor")[:, :, None, None]
    for b, t, g, slot in _first((block_indices < -1) | (block_indices > own)):
        raise InputError(
            f"block_indices[{b}, {t}, {g}, {slot}]={int(block_indices[b, t, g, slot])} is out of range (the query's candidates are "
            f"0 .. {int(own[b, t, 0, 0])}, and -1 for none); use what select_blocks returns"
        )
    ordered, is_repeated = _ordered(block_indices)
    for b, t, g, slot in _first(is_repeated):
        raise InputError(
            f"block_indices[{b}, {t}, {g}] names block {int(ordered[b, t, g, slot])} twice (each chosen block counts once); use -1 for unused slots"
        )


def _first(mask: Tensor) -> list[list[int]]:
    """Return a list with the index of the first True, or an empty list if there is none."""
    found: list[list[int]] = mask.nonzero()[:1].tolist()
    return found


def _ordered(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sorted rows of `numbers`, and a bool mask of entries of at least 0 that the next entry repeats."""
    ordered = numbers.sort(-1).values
    return ordered, (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
