"""The arguments of launches: grids, sequences, tiles of packed sequences, the operands of a backward pass."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_core.backends.base import Keys, Queries
from nsa_core.config import BlockGeometry
from nsa_kernels_triton import device, routing

MOST_EARLY_PAIRS = 32
"""Maximum rows times KV heads of a step with an early start (`Queries.follows_append`).

The first launch of such a step starts while `append` runs. Before `append` ends, it reads q, the lengths, page tables, and the keys of
earlier steps.
"""


def has_pdl(x: Tensor) -> bool:
    """Return True if a launch on x's device may start while the one before it ends (programmatic dependent launch, from 9.0 on)."""
    return (device.capability_of(x) or device.OLDEST) >= (9, 0) and not routing.interprets()


def starts_early(x: Tensor, num_rows: int, num_groups: int) -> bool:
    """Return True if the first launch of a step of `num_rows` rows on x's device starts while `append` runs."""
    return has_pdl(x) and num_rows * num_groups <= MOST_EARLY_PAIRS


def cdiv(total: int, size: int) -> int:
    """Return ceil(total / size). Triton's own `cdiv` also works in kernels, but takes 4 microseconds on the host."""
    return -(-total // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def queries_of_whole_tiles(block_rows: int, heads_per_group: int) -> int:
    """Return the smallest number of queries whose rows fill whole tiles of `block_rows`."""
    return block_rows // math.gcd(block_rows, heads_per_group)


def optional(x: Tensor) -> Tensor | None:
    """Return x, or None if it is empty. Kernels skip an argument that is None."""
    return x if x.numel() else None


class Sequences(NamedTuple):
    """The layout of a batch for a kernel: where each sequence's queries and keys begin. The host never reads the tensors' values."""

    batch: int
    num_queries: int
    cu_seqlens: Tensor | None = None
    """Packed: int32 (N + 1,), where each sequence's queries begin."""
    cu_keys: Tensor | None = None
    """Packed: int32 (N + 1,), where each sequence's keys begin."""
    start: Tensor | None = None
    """Cached: int32 (N,), the position of each sequence's first query, counted from the first row of its keys."""
    count: Tensor | None = None  # type: ignore[assignment]
    """Cached: int32 (N,), the number of valid queries of each sequence; None: all are valid."""
    is_ring: bool = False
    """True for a ring buffer: row p % T of a sequence holds the key of position p. Only the portable forward kernel reads this layout."""

    @classmethod
    def of(cls, queries: Queries, keys: Keys) -> "Sequences":
        """Return the layout of `queries` over `keys`.

        `start` counts from the first stored key: if row 0 holds a later position (`keys.first`), that position is subtracted.
        """
        start = queries.start
        if start is not None and keys.first is not None:
            # kernels compare a query's position with a key's row
            start = start - keys.first
        # kernels read these element after element
        cu_seqlens, cu_keys, start, count = (
            None if x is None else x.contiguous() for x in (queries.cu_seqlens, keys.cu_seqlens, start, queries.count)
        )
        return cls(queries.q.shape[0], queries.q.shape[1], cu_seqlens, cu_keys, start, count, keys.ring)

    @property
    def is_packed(self) -> bool:
        """Return True if the sequences are packed in one row."""
        return self.cu_seqlens is not None

    @property
    def is_cached(self) -> bool:
        """Return True if the queries follow keys of a cache."""
        return self.start is not None

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences."""
        return self.batch if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def search_steps(self) -> int:
        """Return the number of steps of a binary search that finds one of `num_sequences`."""
        return self.num_sequences.bit_length() + 1

    def tiling(self, length: int, per_unit: int, block: int, *, of_keys: bool, limit: int | None = None) -> "Tiling":
        """Return tiles of `block` rows for sequences of at most `length` queries or keys (packed: in total), with `per_unit` rows for each.

        With `limit`, the tiles cover only the first `limit` queries or keys of each sequence.
        """
        if limit is not None:
            length = min(length, limit * (self.num_sequences if self.is_packed else 1))
        num_tiles = -(-length * per_unit // block)
        if not self.is_packed:
            return Tiling(None, num_tiles, self.batch)
        starts = self.cu_keys if of_keys else self.cu_seqlens
        assert starts is not None
        lengths = starts.diff() if limit is None else starts.diff().clamp(max=limit)
        tiles = torch.div(lengths * per_unit + (block - 1), block, rounding_mode="floor")
        cu_tiles = torch.nn.functional.pad(tiles.cumsum(0, dtype=torch.int32), (1, 0))
        return Tiling(cu_tiles, num_tiles + self.num_sequences, 1)

    def arguments(self, tiling: "Tiling") -> tuple[Any, ...]:
        """Return the tensors with the positions of rows and keys, in the order of a kernel's arguments."""
        return self.cu_seqlens, self.cu_keys, tiling.cu_tiles, self.start, self.count


class Tiling(NamedTuple):
    """Tiles of sequences."""

    cu_tiles: Tensor | None
    """Packed: int32 (N + 1,), the first tile of each sequence."""
    num_tiles: int
    """Upper bound on the number of tiles of one sequence; packed: of all sequences."""
    num_sequences: int
    """Columns of tiles: the number of sequences, or 1 if they are packed."""

    def grid(self, num_groups: int, splits: int = 1) -> tuple[int]:
        """Return a grid with a program for each tile, split, column and group. It has one axis, because CUDA limits the others to 65,535."""
        return (self.num_tiles * splits * self.num_sequences * num_groups,)


class Operands(NamedTuple):
    """The operands of the backward pass of one branch. q, k, v and dout are contiguous."""

    dout: Tensor
    delta: Tensor
    """dO . O - dlse, where O is the ungated output."""
    dlse: Tensor | None
    shift: Tensor
    """The number that is subtracted from a row's scores before the exponential gives its weights."""
    extremes: Tensor
    """The extremes of the branch; see `no_extremes`."""
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor | None
    gate: int
    """With `gates`, the output is multiplied by gates[..., gate]."""
    is_window: bool
    geometry: BlockGeometry
    scale: float
    sequences: Sequences

    @property
    def heads_per_group(self) -> int:
        """Return H / G."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def is_empty(self) -> bool:
        """Return True if there are no queries, or no keys."""
        return not self.k.shape[1] or not self.q.numel()
