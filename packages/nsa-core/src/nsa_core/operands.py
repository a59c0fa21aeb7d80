"""From the keywords of a public operation to Queries and Keys, and every check of their values. Nothing here computes attention."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core import blocks, checks
from nsa_core.backends.base import Keys, Layout, Queries, layout_of
from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError
from nsa_core.reference.rows import rows_of
from nsa_core.varlen import cu_blocks_from_cu_seqlens

INT32_MAX = 2**31 - 1
"""Positions are int32, so no sequence is longer."""
FP8 = (torch.float8_e4m3fn,)
PageTables = Tensor | tuple[Tensor, Tensor] | None
Pairs = Mapping[str, tuple[Tensor | None, Tensor | None]]
"""k and v by the ending of their names: "_cmp", "_slc", "_win", or "" for an operation of one branch; None for an absent one."""


class Placed(NamedTuple):
    """The placement keywords as the caller gave them."""

    cu_seqlens: Tensor | None
    max_seqlen: int | None
    query_start: Tensor | None
    query_count: Tensor | None
    page_table: PageTables


def operands_of(q: Tensor, pairs: Pairs, geometry: BlockGeometry, placed: Placed) -> tuple[Queries, dict[str, Keys | None]]:
    """Return Queries and, by ending, Keys of the tensors and keywords of a public operation, checked.

    Raises:
        InputError: for what does not fit.
    """
    checks.check_query(q)
    checks.check_geometry(geometry)
    tables = _page_tables(placed.page_table, q, placed.query_start, placed.cu_seqlens)
    for ending, (k, v) in pairs.items():
        if k is not None:
            checks.check_pair(q, k, v, ending, paged=tables[ending == "_cmp"] is not None)
    _check_placed(q, placed)
    queries, keys, tokens = place(q, pairs, geometry, placed, tables)
    check_operands(queries, keys, geometry, tokens)
    return queries, keys


def place(
    q: Tensor, pairs: Pairs, geometry: BlockGeometry, placed: Placed, tables: tuple[Tensor | None, Tensor | None] = (None, None)
) -> tuple[Queries, dict[str, Keys | None], int]:
    """Return Queries, Keys by ending, and the bound on the tokens of a sequence; `tables` are those of tokens and of compressed keys."""
    cu_seqlens, max_seqlen, start, count, _ = placed
    if cu_seqlens is None and start is None and count is not None:
        start = torch.zeros_like(count)
    max_count = q.shape[1]
    if cu_seqlens is not None:
        max_count = _longest(cu_seqlens, max_count) if max_seqlen is None or start is not None else max_seqlen
    tokens = max_count
    if start is not None:
        tokens = min([INT32_MAX, *_bounds(pairs, tables, geometry)[:1], *(() if max_seqlen is None else (max_seqlen,))])
    offsets: tuple[Tensor | None, Tensor | None] = (None, None)
    if cu_seqlens is not None and start is None:
        offsets = (cu_seqlens, cu_blocks_from_cu_seqlens(cu_seqlens, geometry) if "_cmp" in pairs else None)
    found: dict[str, Keys | None] = {}
    for ending, (k, v) in pairs.items():
        kind = ending == "_cmp"
        rows = blocks.num_compressed_blocks(tokens, geometry) if kind else tokens
        found[ending] = None if k is None else Keys(k, k if v is None else v, rows, offsets[kind], tables[kind])
    return Queries(q, max_count, cu_seqlens, start, count), found, tokens


def _page_tables(
    page_table: PageTables, q: Tensor, query_start: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the page tables of tokens and of compressed keys."""
    if page_table is None:
        return None, None
    tables = page_table if isinstance(page_table, tuple) else (page_table, page_table)
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for table in tables[: 1 if tables[0] is tables[1] else 2]:
        checks.check_integers("page_table", table, 2, "(B, max_pages)", q)
        checks.check_shape("page_table", table, (batch, table.shape[1]), "(B, max_pages)")
    if query_start is None:
        raise InputError("page_table came without query_start (pages hold whole sequences, so rows need a position); give it")
    return tables


def _bounds(pairs: Pairs, tables: tuple[Tensor | None, Tensor | None], geometry: BlockGeometry) -> list[int]:
    """Return the most tokens of a sequence that each store can hold, stores of tokens first."""
    found = []
    for is_compressed in (False, True):
        for ending, (k, _) in pairs.items():
            if k is not None and (ending == "_cmp") == is_compressed:
                table = tables[is_compressed]
                rows = k.shape[1] * (1 if table is None else table.shape[1])
                found.append(blocks.max_tokens(rows, geometry) if is_compressed else rows)
    return found


def _check_placed(q: Tensor, placed: Placed) -> None:
    """Raise InputError where the placement keywords do not fit q or each other."""
    cu_seqlens, max_seqlen, query_start, query_count, page_table = placed
    if cu_seqlens is not None:
        if query_count is not None or (query_start is not None and page_table is None):
            raise InputError(
                "cu_seqlens came with query_start or query_count (a packed batch holds whole sequences, ragged rows lie over pages); "
                "give query_start and page_table, or cu_seqlens alone"
            )
        checks.check_cu_seqlens(cu_seqlens, q, max_seqlen if query_start is None else None)
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for name, x in (("query_start", query_start), ("query_count", query_count)):
        if x is not None:
            checks.check_integers(name, x, 1, "(B,)", q)
            checks.check_shape(name, x, (batch,), "(B,)")
    if cu_seqlens is query_start is query_count is None and max_seqlen is not None and max_seqlen < q.shape[1]:
        raise InputError(f"max_seqlen={max_seqlen} is below S={q.shape[1]} (it bounds every sequence); use {q.shape[1]} or None")


def _longest(cu_seqlens: Tensor, total: int) -> int:
    if checks.can_read(cu_seqlens) and cu_seqlens.shape[0] > 1:
        return int(cu_seqlens.diff().max())
    return total


def check_operands(queries: Queries, keys: Mapping[str, Keys | None], geometry: BlockGeometry, tokens: int | None = None) -> None:
    """Raise InputError where Keys, by ending, do not fit the queries: extents and fields always, values on a CPU only.

    `tokens`: bound on the tokens of a sequence; None: what the stores of tokens bound.
    """
    layout = _layout(queries, keys)
    is_step = layout not in (Layout.DENSE, Layout.PACKED)
    if tokens is None:
        tokens = min([INT32_MAX, *(x.max_count for ending, x in keys.items() if x is not None and ending != "_cmp" and x.first is None)])
    if is_step:
        _check_positions(queries, tokens)
    for ending, x in keys.items():
        if x is not None:
            _check_fields(queries, x, ending, geometry)
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


def _check_fields(queries: Queries, x: Keys, ending: str, geometry: BlockGeometry) -> None:
    """Raise InputError where the fields of Keys contradict each other, or a window's keys do not reach back far enough."""
    is_fp8 = x.k.dtype in FP8
    if is_fp8 == (x.k_scale is None) or (x.v.dtype in FP8) == (x.v_scale is None):
        state = "without scales" if is_fp8 else "with scales"
        raise InputError(
            f"k{ending} is {x.k.dtype} {state} (stores of FP8 have k_scale and v_scale, others none); give both, or stores of q's dtype"
        )
    if (x.ring or x.first is not None) and ending not in ("", "_win"):
        raise InputError(f"k{ending} is a ring or a part of its sequence (only the sliding branch reads so few keys); give all of its keys")
    length, needed = x.k.shape[1], geometry.window_size - 1 + queries.max_count
    if x.ring and length < min(needed, x.max_count):
        raise InputError(
            f"the ring k{ending} holds {length} tokens (its queries see window_size - 1 + {queries.max_count} = {needed}); "
            f"make it of {needed} rows, or pass fewer queries"
        )
    if x.first is None or queries.start is None or not checks.can_read(x.first) or not x.first.numel():
        return
    first, start = x.first, queries.start
    if bool((first < 0).any()):
        raise InputError(f"k{ending} begins at positions {first.tolist()} (the first token of a sequence is at 0); give its keys from 0 on")
    if bool((first > (start - geometry.window_size + 1).clamp(min=0)).any()):
        raise InputError(
            f"k{ending} begins at positions {first.tolist()} for queries from {start.tolist()} on (a query sees window_size="
            f"{geometry.window_size} tokens back); begin at query_start - {geometry.window_size - 1} or before"
        )
    if bool((start + _row_counts(queries) - first).max() > length):
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
    if x.k.shape[1] < needed:
        raise InputError(
            f"k_cmp has {x.k.shape[1]} blocks where the sequences have {needed} (N_c = (S - l) // d + 1 each); compress all of them"
        )


def _check_pages(name: str, x: Keys, queries: Queries, stride: int) -> None:
    """Pages up to each sequence's last query row must exist, each once; entries beyond are never read."""
    assert queries.start is not None and x.page_table is not None
    rows = _row_counts(queries)
    last_tokens = torch.where(torch.as_tensor(rows, device=queries.start.device) > 0, queries.start + rows, 0)
    checks.check_page_table(x.page_table, last_tokens, name, x.k.shape[0], x.k.shape[1] * stride)


def check_choice(queries: Queries, slc: Keys, block_indices: Tensor, geometry: BlockGeometry) -> None:
    """Raise InputError where block_indices are no int32 `(B, S, G, n)`, or (on a CPU) name a block twice or outside 0 .. own."""
    q = queries.q
    checks.check_integers("block_indices", block_indices, 4, "(B, S, G, n)", q)
    wanted = (q.shape[0], q.shape[1], slc.k.shape[2], max(1, block_indices.shape[3]))
    checks.check_shape("block_indices", block_indices, wanted, "(B, S, G, n)")
    if checks.can_read(block_indices):
        checks.check_block_indices(block_indices, rows_of(queries).positions, geometry)
