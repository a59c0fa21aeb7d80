"""Packed sequences side by side: a batch of equal rows, which is served without masks between sequences."""

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core import blocks
from nsa_core.backends.base import Operation, Placement
from nsa_core.config import BlockGeometry
from nsa_core.varlen import sequence_ids

MAX_PADDING = 4
"""Packed sequences are padded to the longest while that makes at most this many times their rows."""

PADDED_BYTES = 32 * 2**20
"""The most that one padded copy takes; equal sequences need no copy."""


class SideBySide(NamedTuple):
    """How packed rows `(1, rows, ...)` become a batch `(N, L, ...)` and back."""

    num_sequences: int
    length: int
    """L: rows of the longest sequence."""
    slots: Tensor | None
    """int64 (rows,): the place of each packed row among the N * L; None: all sequences have L rows, so they are the same."""

    def spread(self, packed: Tensor) -> Tensor:
        """Return `(N, L, ...)`, zeros after the end of each sequence; packed rows after the last sequence are not read."""
        shape = (self.num_sequences, self.length, *packed.shape[2:])
        if self.slots is None:
            return packed[0, : self.num_sequences * self.length].reshape(shape)
        padded = packed.new_zeros(shape)
        padded.flatten(0, 1).index_copy_(0, self.slots, packed[0, : self.slots.shape[0]])
        return padded

    def collect(self, batch: Tensor, num_rows: int) -> Tensor:
        """Return `(1, num_rows, ...)`, the packed rows of `batch` `(N, L, ...)`; zeros after the last sequence."""
        rows = batch.flatten(0, 1)
        if self.slots is not None:
            rows = rows.index_select(0, self.slots)
        if rows.shape[0] < num_rows:
            rows = torch.cat([rows, rows.new_zeros(num_rows - rows.shape[0], *rows.shape[1:])])
        return rows.unsqueeze(0)


class PaddedBatch(NamedTuple):
    """Tokens and compressed blocks of packed sequences, side by side."""

    tokens: SideBySide
    blocks: SideBySide

    def keys(self, branch: str) -> SideBySide:
        """Return which of the two the keys of `branch` are."""
        return self.blocks if branch == Operation.CMP else self.tokens

    @property
    def placement(self) -> Placement:
        """Return that of the batch: dense."""
        return Placement(self.tokens.length, self.tokens.length)


def padded_batch(placement: Placement, q: Tensor, geometry: BlockGeometry) -> PaddedBatch | None:
    """Return the batch that packed rows q `(1, S, H, D_k)` make, or None where it would be mostly padding.

    Lengths are read on a CPU; elsewhere only `max_key_count` says that all are equal.
    """
    cu_seqlens, cu_blocks, total = placement.cu_seqlens, placement.cu_blocks, q.shape[1]
    if cu_seqlens is None or cu_blocks is None or not total:
        return None
    can_read = cu_seqlens.device.type == "cpu"
    longest = int(cu_seqlens.diff().max()) if can_read else placement.max_key_count
    num_sequences, num_blocks = cu_seqlens.shape[0] - 1, blocks.num_compressed_blocks(longest, geometry)
    rows = num_sequences * longest
    if rows > MAX_PADDING * total:
        return None
    if rows == total:
        return PaddedBatch(SideBySide(num_sequences, longest, None), SideBySide(num_sequences, num_blocks, None))
    if not can_read or rows * q.shape[2] * q.shape[3] * q.element_size() > PADDED_BYTES:
        return None
    tokens = SideBySide(num_sequences, longest, _slots(cu_seqlens, total, longest))
    return PaddedBatch(tokens, SideBySide(num_sequences, num_blocks, _slots(cu_blocks, int(cu_blocks[-1]), num_blocks)))


def _slots(offsets: Tensor, num_rows: int, length: int) -> Tensor:
    """Return int64 `(num_rows,)`: where the packed rows of sequences that begin at `offsets` stand among N * length."""
    sequence = sequence_ids(offsets, num_rows)
    return sequence * length + torch.arange(num_rows) - offsets.long()[sequence]
