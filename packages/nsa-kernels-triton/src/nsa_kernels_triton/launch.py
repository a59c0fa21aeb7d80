"""What every launch needs: tiles, sequences as kernel arguments, tiles of packed sequences."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from nsa_core.backends.base import Placement
from nsa_core.config import BlockGeometry
from nsa_kernels_triton import policy

LOG2E = 1.4426950408889634

P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(body: Callable[P, R]) -> Callable[P, R]:
    """Return the body of an op with the device of its first tensor as the current one: launches go there."""

    @wraps(body)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        if not first.is_cuda:
            return body(*args, **kwargs)
        with torch.cuda.device(first.device):
            try:
                return body(*args, **kwargs)
            except BaseException:
                # what runs beside may still use what is given back here; a capture joins what it has forked, and nothing else
                with beside(first):
                    pass
                join(first)
                raise

    return run


@contextmanager
def beside(x: Tensor) -> Iterator[None]:
    """Launch on a second stream what may run beside all that the current stream, of x's device, is given from here to `join`.

    It starts after what the current stream was given before. What it reads and writes was made there, and is not given back before
    `join`; memory that is taken inside is the second stream's own, and nothing else reads it.
    """
    if not x.is_cuda:
        yield
        return
    current = torch.cuda.current_stream()
    second = second_stream(current)
    second.wait_stream(current)
    with torch.cuda.stream(second):
        yield


def join(x: Tensor) -> None:
    """Let the current stream wait for what was launched `beside` it, once something was: a CUDA graph takes no other join."""
    if x.is_cuda:
        current = torch.cuda.current_stream()
        current.wait_stream(second_stream(current))


_SECOND_STREAMS: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


def second_stream(current: torch.cuda.Stream) -> torch.cuda.Stream:
    """Return the stream of what runs `beside` others on `current`, always the same: one of torch's pool of 32.

    Where a program has so many streams that they share, they wait for each other, and results stay right.
    """
    # of two threads that come first, both get the one that is kept
    return _SECOND_STREAMS.get(current) or _SECOND_STREAMS.setdefault(current, torch.cuda.Stream(current.device))


def cdiv(total: int, size: int) -> int:
    """Return how many parts of `size` cover `total`. Triton's own is for kernels too, and takes 4 microseconds here."""
    return -(-total // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


@cache
def geometry_of(*numbers: int) -> BlockGeometry:
    """Return the geometry of an op's numbers, those of `BlockGeometry.as_tuple`; to make one is to check it."""
    return BlockGeometry(*numbers)


def num_multiprocessors(x: Tensor) -> int:
    """Return the multiprocessors of x's device, 1 without a GPU."""
    return _properties(x.device)[1] if x.is_cuda else 1


def _capability(x: Tensor) -> tuple[int, int] | None:
    return _properties(x.device)[0] if x.is_cuda else None


@cache
def _properties(device: torch.device) -> tuple[tuple[int, int], int]:
    """Return compute capability and multiprocessors; torch takes microseconds for each."""
    found = torch.cuda.get_device_properties(device)
    return (found.major, found.minor), found.multi_processor_count


def tiles_for(kind: str, q: Tensor, head_dim_qk: int, head_dim_v: int) -> policy.Tiles:
    """Return the tile sizes of a kernel on q's device."""
    return policy.tiles(kind, _capability(q), head_dim_qk, head_dim_v, q.element_size())


def ring_for(kind: str, q: Tensor, v: Tensor, *others: Tensor) -> policy.Ring | None:
    """Return the ring of a kernel that is written for q's device; None where the portable one serves.

    It does for a tensor, one of `others` included, that does not start at 16 bytes: rows are copied in pieces of up to 16.
    """
    if any(x.data_ptr() % policy.COPIED_BYTES for x in (q, v, *others)):
        return None
    return policy.ring(kind, _capability(q), q.shape[3], v.shape[3], q.element_size())


def queries_of_whole_tiles(block_rows: int, heads_per_group: int) -> int:
    """Return the fewest queries whose rows fill tiles of `block_rows`."""
    return block_rows // math.gcd(block_rows, heads_per_group)


def is_exact(q: Tensor) -> bool:
    """Return True where scores stay natural: base 2 saves a product, and rounds large scores once more."""
    return q.dtype == torch.float32


def score_factor(q: Tensor, scale: float) -> float:
    """Return what kernels multiply products by: the scale, and log2(e) where they compute in base 2."""
    return scale if is_exact(q) else scale * LOG2E


def coarse_factor(q: Tensor, scale: float) -> float:
    """Return the power of two next to `score_factor`, for a `scale` of at least 0: products with it are exact, however large."""
    factor = score_factor(q, scale)
    return 2.0 ** round(math.log2(factor)) if factor > 0 else 0.0


def no_extremes(q: Tensor, *branches: int) -> Tensor:
    """Return zeros, int32 (*branches, 4), in which `row_deltas` notes the extremes of each branch for its backward pass.

    The first number is 1 where the shift of some row is at least `tiles.WIDEST_REFINED` or not finite, else 0. The kernels then
    restrain weights, because lse may not normalise them. The others serve float16 and are bits of float32 numbers that bound dS: the
    largest squared norm of a row of dO (times its squared gate, if that is above 1), the largest squared norm of a row of values, and
    the largest |dlse|.
    """
    return torch.zeros(*branches, 4, dtype=torch.int32, device=q.device)


def exact_out(q: Tensor, v: Tensor) -> Tensor:
    """Return the buffer of outputs that the backward pass reads in place of the rounded ones; empty where those will do."""
    shape = (*q.shape[:3], v.shape[3]) if not is_exact(q) and v.shape[3] <= policy.WIDEST_EXACT else (0,)
    return q.new_empty(shape, dtype=torch.float32)


def partial_dtype(q: Tensor, head_dim: int) -> torch.dtype:
    """Return the dtype of partial results of `head_dim` columns."""
    return torch.float32 if head_dim <= policy.WIDEST_EXACT else q.dtype


def optional(x: Tensor) -> Tensor | None:
    """Return x, or None where it is empty: kernels then do without it."""
    return x if x.numel() else None


class Sequences(NamedTuple):
    """Where rows and keys lie, as kernels take it. Nothing here was read on the host."""

    placement: Placement
    batch: int
    num_queries: int
    cu_keys: Tensor | None
    """Packed: int32 (N + 1,), where each sequence's keys begin."""

    @property
    def is_packed(self) -> bool:
        """Return True where the sequences lie in one row."""
        return self.placement.cu_seqlens is not None

    @property
    def is_cached(self) -> bool:
        """Return True where queries stand at query_start in keys that hold the whole sequence."""
        return self.placement.query_start is not None

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences."""
        cu_seqlens = self.placement.cu_seqlens
        return self.batch if cu_seqlens is None else cu_seqlens.shape[0] - 1

    @property
    def search_steps(self) -> int:
        """Return the bisections that find one of `num_sequences`."""
        return self.num_sequences.bit_length() + 1

    def tiling(self, length: int, per_unit: int, block: int, *, of_keys: bool, limit: int | None = None) -> "Tiling":
        """Return the tiles of `block` rows, `per_unit` to each of `length` queries or keys a sequence (packed: in all).

        `limit`: only the first `limit` of each sequence.
        """
        if limit is not None:
            length = min(length, limit * (self.num_sequences if self.is_packed else 1))
        num_tiles = -(-length * per_unit // block)
        if not self.is_packed:
            return Tiling(None, num_tiles, self.batch)
        starts = self.cu_keys if of_keys else self.placement.cu_seqlens
        assert starts is not None
        lengths = starts.diff() if limit is None else starts.diff().clamp(max=limit)
        tiles = torch.div(lengths * per_unit + (block - 1), block, rounding_mode="floor")
        cu_tiles = torch.nn.functional.pad(tiles.cumsum(0, dtype=torch.int32), (1, 0))
        return Tiling(cu_tiles, num_tiles + self.num_sequences, 1)

    def arguments(self, tiling: "Tiling") -> tuple[Any, ...]:
        """Return what tells a kernel where rows and keys lie, in the kernels' order."""
        placement = self.placement
        return placement.cu_seqlens, self.cu_keys, tiling.cu_tiles, placement.query_start, placement.query_count


class Tiling(NamedTuple):
    """Tiles of sequences."""

    cu_tiles: Tensor | None
    """Packed: int32 (N + 1,), the first tile of each sequence."""
    num_tiles: int
    """Bound on the tiles of one sequence; packed: of all."""
    num_sequences: int
    """Columns of tiles: the sequences, or 1 where they are packed."""

    def grid(self, num_groups: int, splits: int = 1) -> tuple[int]:
        """Return a grid with a program for each tile, split, column and group: one axis, because CUDA ends the others at 65,535."""
        return (self.num_tiles * splits * self.num_sequences * num_groups,)
