"""Convert pages, FP8 stores and ragged rows to plain rows, for backends whose kernels read only plain rows. Every conversion is a copy."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_core.backends.base import Keys, Queries
from nsa_core.varlen import slots_in_batch


def gather_pages(store: Tensor, page_table: Tensor) -> Tensor:
    """Return `(N, max_pages * page_size, ...)`: the pages of each sequence in order; an entry outside the store reads an arbitrary page."""
    return store[page_table.long().clamp(0, max(store.shape[0] - 1, 0))].flatten(1, 2)


def keys_in_rows(keys: Keys, dtype: torch.dtype) -> Keys:
    """Return `keys` as plain rows `(N, T, G, D)`: pages are gathered, and FP8 numbers are multiplied by their scales, to keys in `dtype`."""
    if keys.page_table is None and keys.k_scale is None:
        return keys

    def in_rows(store: Tensor, scale: Tensor | None) -> Tensor:
        if keys.page_table is not None:
            store, scale = gather_pages(store, keys.page_table), scale if scale is None else gather_pages(scale, keys.page_table)
        return store if scale is None else (store.float() * scale.unsqueeze(-1)).to(dtype)

    return keys._replace(k=in_rows(keys.k, keys.k_scale), v=in_rows(keys.v, keys.v_scale), page_table=None, k_scale=None, v_scale=None)


def over_rows(compute: Callable[..., Any], *operands: Any, **keywords: Any) -> Any:
    """Return the results of `compute`, which gets every Keys as plain rows, and ragged query rows as a padded batch of N sequences.

    So `compute` needs only the layouts DENSE, PACKED and CACHED. For ragged rows the results are ragged again. Gradients pass through.
    """
    queries, *others = operands
    others = [keys_in_rows(x, queries.q.dtype) if isinstance(x, Keys) else x for x in others]
    if queries.cu_seqlens is None or queries.start is None:
        return compute(queries, *others, **keywords)
    total, longest, num_sequences = queries.q.shape[1], queries.max_count, queries.start.shape[0]
    # rows after the last sequence have slots of their own
    slots = slots_in_batch(queries.cu_seqlens, total, longest)

    def spread(x: Tensor) -> Tensor:
        flat: Tensor = x.new_zeros(num_sequences * longest + total, *x.shape[2:]).index_copy(0, slots, x[0])
        return flat[: num_sequences * longest].view(num_sequences, longest, *x.shape[2:])

    def collect(x: Tensor) -> Tensor:
        # a row after the last sequence gets zeros
        flat = torch.cat([x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])])
        return flat.index_select(0, slots.clamp(max=num_sequences * longest)).unsqueeze(0)

    padded = Queries(spread(queries.q), longest, None, queries.start, queries.cu_seqlens.diff())
    found = compute(padded, *(x if isinstance(x, Keys) else spread(x) for x in others), **keywords)
    return type(found)(*map(collect, found)) if isinstance(found, tuple) else collect(found)
