"""Random inputs of every operation, in any layout, from one description."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from nsa_core import blocks
from nsa_core.config import BlockGeometry

SMALL = BlockGeometry(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=8,
    num_selected_blocks=4,
    num_initial_blocks=1,
    num_local_blocks=2,
    window_size=12,
)
"""A small geometry: all its edges, such as the ends of blocks and of the window, lie within a few dozen tokens."""

ONE_LOCAL = BlockGeometry(
    compression_block_size=2,
    compression_stride=1,
    selection_block_size=4,
    num_selected_blocks=3,
    num_initial_blocks=0,
    num_local_blocks=1,
    window_size=5,
)
"""A geometry in which scores choose all blocks except the query's own, from the 13th token on; l < l'."""

EQUAL_BLOCKS = evolve(ONE_LOCAL, compression_block_size=4, compression_stride=2)
"""ONE_LOCAL with l = l', so that a compressed block may begin in one selection block and end in the next."""


@frozen(kw_only=True)
class Shape:
    """Sizes of the inputs to make. With `lengths`, sequences of these lengths are packed in one row, and `batch` and `num_queries` are ignored."""

    geometry: BlockGeometry = SMALL
    batch: int = 1
    num_queries: int = 40
    lengths: tuple[int, ...] | None = None
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim_qk: int = 8
    head_dim_v: int = 6
    seed: int = 0
    surplus_blocks: int = field(default=0)
    """Number of rows after the last compressed block; they hold NaN, because they must never be read."""

    @property
    def total(self) -> int:
        """Return S, the query tokens of a batch entry."""
        return self.num_queries if self.lengths is None else sum(self.lengths)

    @property
    def num_blocks(self) -> int:
        """Return the number of compressed blocks of a batch entry, for all packed sequences together."""
        lengths = (self.num_queries,) if self.lengths is None else self.lengths
        return sum(blocks.num_compressed_blocks(length, self.geometry) for length in lengths)


class Inputs(NamedTuple):
    """The tensors of `nsa_attention` in its order, and `cu_seqlens` of packed sequences."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_slc: Tensor
    v_slc: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor
    cu_seqlens: Tensor | None = None

    @classmethod
    def of(cls, tensors: Iterable[Tensor], cu_seqlens: Tensor | None = None) -> "Inputs":
        """Return the inputs made of eight tensors."""
        return cls(*tensors, cu_seqlens=cu_seqlens)  # type: ignore[misc]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the eight differentiable tensors."""
        return self[:8]

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Return detached copies in `dtype`."""
        return Inputs.of((x.detach().to(dtype) for x in self.tensors), self.cu_seqlens)

    def with_grad(self) -> "Inputs":
        """Return detached leaves that require gradients."""
        return Inputs.of((x.detach().clone().requires_grad_() for x in self.tensors), self.cu_seqlens)


def make_inputs(shape: Shape, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Inputs:
    """Return seeded normal inputs of `shape`; gates are uniform in 0 .. 1."""
    generator = torch.Generator().manual_seed(shape.seed)
    batch = 1 if shape.lengths is not None else shape.batch

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.float64, generator=generator)

    def pair(rows: int) -> tuple[Tensor, Tensor]:
        return normal(batch, rows, shape.num_kv_heads, shape.head_dim_qk), normal(batch, rows, shape.num_kv_heads, shape.head_dim_v)

    q = normal(batch, shape.total, shape.num_heads, shape.head_dim_qk)
    compressed = [_with_surplus(x, shape.surplus_blocks) for x in pair(shape.num_blocks)]
    gates = torch.rand(batch, shape.total, shape.num_heads, 3, dtype=torch.float64, generator=generator)
    tensors = (q, *compressed, *pair(shape.total), *pair(shape.total), gates)
    cu_seqlens = None
    if shape.lengths is not None:
        cu_seqlens = torch.tensor([0, *torch.tensor(shape.lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return Inputs.of((x.to(device=device, dtype=dtype) for x in tensors), cu_seqlens)


def _with_surplus(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_full((x.shape[0], rows, *x.shape[2:]), float("nan"))], 1)


def random_block_indices(shape: Shape, *, holes: bool = False, device: torch.device | str = "cpu") -> Tensor:
    """Return int32 block_indices `(B, S, G, n)`: distinct candidates of every query, in random order.

    With `holes`, -1 is mixed in, and some rows name no block.
    """
    generator = torch.Generator().manual_seed(shape.seed + 1)
    geometry, count = shape.geometry, shape.geometry.num_selected_blocks
    lengths = (shape.num_queries,) * shape.batch if shape.lengths is None else shape.lengths
    rows = [_row(t, geometry, count, holes, generator) for length in lengths for t in range(length) for _ in range(shape.num_kv_heads)]
    indices = torch.tensor(rows, dtype=torch.int32, device=device).reshape(-1, count)
    batch = 1 if shape.lengths is not None else shape.batch
    return indices.view(batch, shape.total, shape.num_kv_heads, count)


def _row(t: int, geometry: BlockGeometry, count: int, holes: bool, generator: torch.Generator) -> list[int]:
    chosen = torch.randperm(blocks.own_block(t, geometry) + 1, generator=generator)[:count].tolist()
    row = chosen + [-1] * (count - len(chosen))
    if not holes:
        return row
    order = torch.randperm(count, generator=generator).tolist()
    keep = torch.rand(count, generator=generator) < (0.0 if t % 7 == 3 else 0.6)
    return [row[slot] if keep[slot] else -1 for slot in order]


def unpacked(shape: Shape) -> list[Shape]:
    """Return the shapes of the sequences that `shape` packs."""
    return [evolve(shape, lengths=None, num_queries=length) for length in shape.lengths or ()]
