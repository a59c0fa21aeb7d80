"""From the keywords of a public operation to Queries and Keys."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core import blocks, checks
from nsa_core.backends.base import Keys, Queries
from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError
from nsa_core.operand_checks import INT32_MAX, check_operands
from nsa_core.varlen import cu_blocks_from_cu_seqlens

PageTables = Tensor | tuple[Tensor, Tensor] | None
Pairs = Mapping[str, tuple[Tensor | None, Tensor | None]]
"""k and v by the ending of their names: "_cmp", "_slc", "_win", or "" for an operation of one branch; None for an absent one."""


class Keywords(NamedTuple):
    """The placement keywords as the caller gave them."""

    cu_seqlens: Tensor | None
    max_seqlen: int | None
    query_start: Tensor | None
    query_count: Tensor | None
    page_table: PageTables


def operands_of(q: Tensor, pairs: Pairs, geometry: BlockGeometry, keywords: Keywords) -> tuple[Queries, dict[str, Keys | None]]:
    """Return Queries and, by ending, Keys of the tensors and keywords of a public operation, checked.

    Raises:
        InputError: for what does not fit.
    """
    checks.check_query(q)
    checks.check_geometry(geometry)
    check_keywords(q, keywords)
    for ending, (k, v) in pairs.items():
        if k is not None:
            checks.check_pair(q, k, v, ending, paged=keywords.page_table is not None)
    queries, keys, tokens = place(q, pairs, geometry, keywords)
    check_operands(queries, keys, geometry, tokens)
    return queries, keys


def place(q: Tensor, pairs: Pairs, geometry: BlockGeometry, keywords: Keywords) -> tuple[Queries, dict[str, Keys | None], int]:
    """Return Queries, Keys by ending, and the bound on the tokens of a sequence, of keywords that are checked."""
    cu_seqlens, max_seqlen, start, count, page_table = keywords
    # of tokens, and of compressed keys
    tables = page_table if isinstance(page_table, tuple) else (page_table, page_table)
    offsets: tuple[Tensor | None, Tensor | None] = (None, None)
    tokens = max_count = q.shape[1]
    if cu_seqlens is None and start is None and count is not None:
        start = torch.zeros_like(count)
    if cu_seqlens is not None:
        tokens = max_count = checks.longest_of(cu_seqlens, max_count) if max_seqlen is None or start is not None else max_seqlen
    if start is not None:
        tokens = min(INT32_MAX, _capacity(pairs, tables, geometry), INT32_MAX if max_seqlen is None else max_seqlen)
    elif cu_seqlens is not None:
        offsets = (cu_seqlens, cu_blocks_from_cu_seqlens(cu_seqlens, geometry) if "_cmp" in pairs else None)
    found: dict[str, Keys | None] = {}
    for ending, (k, v) in pairs.items():
        kind = ending == "_cmp"
        rows = blocks.num_compressed_blocks(tokens, geometry) if kind else tokens
        found[ending] = None if k is None else Keys(k, k if v is None else v, rows, offsets[kind], tables[kind])
    return Queries(q, max_count, cu_seqlens, start, count), found, tokens


def _capacity(pairs: Pairs, tables: tuple[Tensor | None, Tensor | None], geometry: BlockGeometry) -> int:
    """Return the most tokens of a sequence that a store can hold: the first store of tokens, or that of compressed keys where it is alone."""
    ending = next((ending for ending, (k, _) in pairs.items() if k is not None and ending != "_cmp"), "_cmp")
    (k, _), is_compressed = pairs[ending], ending == "_cmp"
    assert k is not None
    table = tables[is_compressed]
    rows = k.shape[1] * (1 if table is None else table.shape[1])
    return blocks.max_tokens(rows, geometry) if is_compressed else rows


def check_keywords(q: Tensor, keywords: Keywords) -> None:
    """Raise InputError where the placement keywords do not fit q, or a layer's x, or each other."""
    cu_seqlens, max_seqlen, query_start, query_count, page_table = keywords
    batch = q.shape[0]
    if cu_seqlens is not None:
        checks.check_rank("cu_seqlens", cu_seqlens, 1, "(N + 1,)")
        batch = cu_seqlens.shape[0] - 1
    if page_table is not None:
        tables = page_table if isinstance(page_table, tuple) else (page_table, page_table)
        if len(tables) != 2:
            raise InputError(f"page_table is a tuple of {len(tables)} (one table, or a pair: tokens, compressed keys); give 1 or 2 tables")
        for table in tables:
            checks.check_integers("page_table", table, (batch, None), "(B, max_pages)", q)
        if query_start is None:
            raise InputError("page_table came without query_start (pages hold whole sequences, so rows need a position); give it")
    if cu_seqlens is not None:
        if query_count is not None or (query_start is not None and page_table is None):
            raise InputError(
                "cu_seqlens came with query_start or query_count (a packed batch holds whole sequences, ragged rows lie over pages); "
                "give query_start and page_table, or cu_seqlens alone"
            )
        checks.check_cu_seqlens(cu_seqlens, q, max_seqlen if query_start is None else None)
    checks.check_integers("query_start", query_start, (batch,), "(B,)", q)
    checks.check_integers("query_count", query_count, (batch,), "(B,)", q)
    if cu_seqlens is query_start is query_count is None and max_seqlen is not None and max_seqlen < q.shape[1]:
        raise InputError(f"max_seqlen={max_seqlen} is below S={q.shape[1]} (it bounds every sequence); use {q.shape[1]} or None")
