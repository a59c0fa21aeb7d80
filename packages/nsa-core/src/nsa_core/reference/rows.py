"""Where query rows stand, as tensors: the one place that tells dense, packed and cached layouts apart."""

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core.backends.base import Placement
from nsa_core.config import BlockGeometry
from nsa_core.varlen import sequence_ids


class Rows(NamedTuple):
    """Per query row, int64 `(B, S)` each; nothing here was read on the host."""

    positions: Tensor
    """Position inside the row's own sequence; -1 for a row that does not count."""
    first_tokens: Tensor
    """Index along T of the first token of the row's sequence."""
    first_blocks: Tensor
    """Index along C of the first compressed block of the row's sequence."""


def rows_of(placement: Placement, batch: int, num_queries: int, device: torch.device) -> Rows:
    """Return the rows of a `(batch, num_queries)` request."""
    index = torch.arange(num_queries, device=device).unsqueeze(0)
    if placement.cu_seqlens is not None:
        ids = sequence_ids(placement.cu_seqlens, num_queries)
        first_tokens = placement.cu_seqlens.long()[ids].unsqueeze(0)
        first_blocks = first_tokens if placement.cu_blocks is None else placement.cu_blocks.long()[ids].unsqueeze(0)
        return Rows(index - first_tokens, first_tokens, first_blocks)
    positions = index.expand(batch, num_queries)
    if placement.query_start is not None:
        positions = positions + placement.query_start.long().unsqueeze(1)
    if placement.query_count is not None:
        positions = torch.where(index < placement.query_count.long().unsqueeze(1), positions, -1)
    return Rows(positions, torch.zeros_like(positions), torch.zeros_like(positions))


def num_visible_blocks(positions: Tensor, geometry: BlockGeometry) -> Tensor:
    """Return n_c(t) elementwise, 0 where `positions` is below l - 1 (so also at -1)."""
    size, stride = geometry.compression_block_size, geometry.compression_stride
    blocks = torch.div(positions + 1 - size, stride, rounding_mode="floor") + 1
    return torch.where(positions >= size - 1, blocks, 0)
