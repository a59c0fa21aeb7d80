"""Compute the positions of query rows, as tensors, for all layouts."""

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core.backends.base import Keys, Queries
from nsa_core.config import BlockGeometry
from nsa_core.varlen import sequence_ids


class Rows(NamedTuple):
    """Two numbers for each query row, int64 `(B, S)` each; only a CPU's are read on the host."""

    positions: Tensor
    """Position inside the row's own sequence; -1 for an invalid row."""
    first_keys: Tensor
    """Index, in the second dimension of the keys, of position (or block) 0 of the row's sequence; below 0 if that is not stored."""


def rows_of(queries: Queries, keys: Keys | None = None) -> Rows:
    """Return the Rows of `queries` over `keys`, which must not be paged. Without `keys`, `first_keys` are those of keys laid out like the queries."""
    positions = positions_of(queries)
    if queries.cu_seqlens is None:
        first, zero = None if keys is None else keys.first, torch.zeros_like(positions)
        return Rows(positions, zero if first is None else zero - first.long().unsqueeze(1))
    ids = sequence_ids(queries.cu_seqlens, queries.q.shape[1])
    offsets = queries.cu_seqlens if keys is None or keys.cu_seqlens is None else keys.cu_seqlens
    return Rows(positions, offsets.long()[ids].unsqueeze(0))


def positions_of(queries: Queries) -> Tensor:
    """Return int64 `(B, S)`: each row's position inside its own sequence, -1 for an invalid row."""
    batch, num_queries = queries.q.shape[:2]
    if num_queries == 1 and queries.cu_seqlens is None and queries.start is not None:
        # few operations, because each delays a step of one token
        positions = queries.start.long().unsqueeze(1)
        return positions if queries.count is None else positions.masked_fill((queries.count < 1).unsqueeze(1), -1)
    index = torch.arange(num_queries, device=queries.q.device).unsqueeze(0)
    if queries.cu_seqlens is None:
        positions = index.expand(batch, num_queries) if queries.start is None else index + queries.start.unsqueeze(1)
        return positions if queries.count is None else positions.masked_fill(index >= queries.count.unsqueeze(1), -1)
    ids = sequence_ids(queries.cu_seqlens, num_queries)
    positions = index - queries.cu_seqlens.long()[ids]
    return positions if queries.start is None else positions + torch.nn.functional.pad(queries.start.long(), (0, 1))[ids]


def num_visible_blocks(positions: Tensor, geometry: BlockGeometry) -> Tensor:
    """Return n_c(t) for each t of `positions`; 0 where t is below l - 1, also at -1."""
    size, stride = geometry.compression_block_size, geometry.compression_stride
    blocks = torch.div(positions + 1 - size, stride, rounding_mode="floor") + 1
    return torch.where(positions >= size - 1, blocks, 0)
