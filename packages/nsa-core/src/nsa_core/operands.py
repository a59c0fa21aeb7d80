"""From the keywords of a public operation to Queries and Keys."""

from collections.abc import Mapping

import torch
from torch import Tensor

from nsa_core import blocks, checks
from nsa_core.backends.base import Keys, Queries
from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError
from nsa_core.operand_checks import INT32_MAX, check_bound, check_queries, check_ranks
from nsa_core.varlen import cu_blocks_from_cu_seqlens

PageTables = Tensor | tuple[Tensor, Tensor] | None
Pairs = Mapping[str, tuple[Tensor | None, Tensor | None]]
"""k and v by the ending of their names: "_cmp", "_slc", "_win", or "" for an operation of one branch; None for an absent one."""


def queries_of(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    query_start: Tensor | None = None,
    query_count: Tensor | None = None,
    page_table: PageTables = None,
) -> Queries:
    """Return the Queries of the rows x, which are q or a layer's input, by the keywords of a public operation; checked.

    Raises:
        InputError: for keywords that do not fit x or each other.
    """
    if page_table is not None and query_start is None:
        raise InputError("page_table came without query_start (pages hold whole sequences, so rows need a position); give it")
    if cu_seqlens is not None and (query_count is not None or (query_start is not None and page_table is None)):
        raise InputError(
            "cu_seqlens came with query_start or query_count (a packed batch holds whole sequences, ragged rows lie over pages); "
            "give query_start and page_table, or cu_seqlens alone"
        )
    check_queries(Queries(x, x.shape[1], cu_seqlens, query_start, query_count), "query_")
    max_count = least = x.shape[1]
    if cu_seqlens is not None:
        max_count, least = checks.longest_of(cu_seqlens, max_count), checks.longest_of(cu_seqlens, 0)
    if query_start is None and query_count is not None:
        query_start = torch.zeros_like(query_count)
    # over stores max_seqlen bounds their tokens, else the rows
    if query_start is None and max_seqlen is not None:
        check_bound("max_seqlen", max_seqlen, least, f"the longest sequence, {least} (it bounds every one)")
        max_count = max_count if cu_seqlens is None else max_seqlen
    return Queries(x, max_count, cu_seqlens, query_start, query_count)


def keys_of(
    queries: Queries, pairs: Pairs, geometry: BlockGeometry, max_seqlen: int | None = None, page_table: PageTables = None
) -> dict[str, Keys | None]:
    """Return Keys of the tensors `pairs`, by ending, that lie as the keywords of a public operation say; not checked yet.

    Raises:
        InputError: for tensors of another rank than stores have, or page tables that do not fit the queries.
    """
    # of tokens, and of compressed keys
    tables = page_table if isinstance(page_table, tuple) else (page_table, page_table)
    if len(tables) != 2:
        raise InputError(f"page_table is a tuple of {len(tables)} (one table, or a pair: tokens, compressed keys); give 1 or 2 tables")
    start, cu_seqlens, tokens = queries.start, queries.cu_seqlens, queries.max_count
    offsets: tuple[Tensor | None, Tensor | None] = (None, None)
    for table in tables:
        if table is not None and start is not None:
            checks.check_tensor("page_table", table, (start.shape[0], None), "(B, max_pages)", queries.q, torch.int32)
    for ending, (k, v) in pairs.items():
        check_ranks(k, v, ending, is_paged=page_table is not None)
    if start is not None:
        tokens = min(INT32_MAX, _capacity(pairs, tables, geometry), INT32_MAX if max_seqlen is None else max_seqlen)
    elif cu_seqlens is not None:
        offsets = (cu_seqlens, cu_blocks_from_cu_seqlens(cu_seqlens, geometry) if "_cmp" in pairs else None)
    found: dict[str, Keys | None] = {}
    for ending, (k, v) in pairs.items():
        is_compressed = ending == "_cmp"
        rows = blocks.num_compressed_blocks(tokens, geometry) if is_compressed else tokens
        found[ending] = None if k is None else Keys(k, k if v is None else v, rows, offsets[is_compressed], tables[is_compressed])
    return found


def _capacity(pairs: Pairs, tables: tuple[Tensor | None, Tensor | None], geometry: BlockGeometry) -> int:
    """Return the most tokens of a sequence that a store can hold: the first store of tokens, or that of compressed keys where it is alone."""
    rows = {ending: k.shape[1] for ending, (k, _) in pairs.items() if k is not None}
    for ending in rows:
        table = tables[ending == "_cmp"]
        rows[ending] *= 1 if table is None else table.shape[1]
    blocks_held = rows.pop("_cmp", 0)
    return next(iter(rows.values()), blocks.max_tokens(blocks_held, geometry))
