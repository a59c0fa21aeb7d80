"""Turn packed sequences into a padded batch with one sequence per entry, which needs no masks between sequences."""

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core.backends.base import Keys, Queries
from nsa_core.varlen import slots_in_batch

MAX_PADDING = 4
"""Packed sequences are padded to the longest if the batch then has at most this many times as many rows."""

PADDED_BYTES = 32 * 2**20
"""Maximum size of the padded copy of q. If all sequences have equal lengths, no copy is needed."""


class SideBySide(NamedTuple):
    """Converts packed rows `(1, rows, ...)` to a batch `(N, L, ...)` and back."""

    num_sequences: int
    length: int
    """L: rows of the longest sequence."""
    slots: Tensor | None
    """int64 (rows,): the index of each packed row among the N * L; None: all sequences have L rows, so the index is the row's own."""

    def spread(self, packed: Tensor) -> Tensor:
        """Return `packed` as a batch `(N, L, ...)`, with zeros after the end of each sequence; rows after the last sequence are not read."""
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
    """Converts packed queries and keys to a batch."""

    queries: SideBySide
    keys: SideBySide

    def spread(self, queries: Queries, keys: Keys) -> tuple[Queries, Keys]:
        """Return the operands as a dense batch."""
        return (
            Queries(self.queries.spread(queries.q), self.queries.length),
            Keys(self.keys.spread(keys.k), self.keys.spread(keys.v), self.keys.length),
        )


def padded_batch(queries: Queries, keys: Keys) -> PaddedBatch | None:
    """Return the conversion of packed rows q `(1, S, H, D_k)` to a batch; None if rows are not packed, or the batch would be too large.

    On a CPU the lengths are read. On other devices a batch is made only if `max_count` implies that all lengths are equal.
    """
    q, total = queries.q, queries.q.shape[1]
    if queries.cu_seqlens is None or keys.cu_seqlens is None or not total:
        return None
    can_read = queries.cu_seqlens.device.type == "cpu"
    longest, num_keys = queries.max_count, keys.max_count
    if can_read:
        longest, num_keys = (int(x.diff().max()) for x in (queries.cu_seqlens, keys.cu_seqlens))
    num_sequences = queries.cu_seqlens.shape[0] - 1
    rows = num_sequences * longest
    if rows > MAX_PADDING * total:
        return None
    if rows == total:
        return PaddedBatch(SideBySide(num_sequences, longest, None), SideBySide(num_sequences, num_keys, None))
    if not can_read or rows * q.shape[2] * q.shape[3] * q.element_size() > PADDED_BYTES:
        return None
    tokens = SideBySide(num_sequences, longest, slots_in_batch(queries.cu_seqlens, total, longest))
    return PaddedBatch(tokens, SideBySide(num_sequences, num_keys, slots_in_batch(keys.cu_seqlens, int(keys.cu_seqlens[-1]), num_keys)))
