"""The reference of the operation APPEND: a step's rows written into a cache's stores, and the compressed blocks that they complete."""

import torch
from torch import Tensor

from nsa_core.backends.base import NewBlocks, NewRows
from nsa_core.compression import block_windows
from nsa_core.config import BlockGeometry
from nsa_core.varlen import compressed_lengths


def append(rows: tuple[NewRows, ...], blocks: NewBlocks | None, start: Tensor, count: Tensor, *, geometry: BlockGeometry) -> None:
    """Write the step's rows and blocks, in place; see `backends.base.AppendBackend`."""
    # before the ring of raw tokens forgets those of open blocks
    if blocks is not None:
        _emit(blocks, start, count, geometry)
    for new in rows:
        write_rows(new, start, count)


def _emit(new: NewBlocks, start: Tensor, count: Tensor, geometry: BlockGeometry) -> None:
    """Write the compressed keys and values of the blocks that end within the step."""
    done = compressed_lengths(start, geometry)
    first = done * geometry.compression_stride
    raw_k, raw_v = join_rows(new.raw, first, start - first, geometry.compression_block_size - 1)
    k = new.compress_k(block_windows(raw_k, geometry).tokens)
    index = done.long().unsqueeze(1) + torch.arange(k.shape[1], device=k.device)
    k = new.rotate(k, index * geometry.compression_stride + geometry.compression_block_size - 1)
    v = None if new.compress_v is None or raw_v is None else new.compress_v(block_windows(raw_v, geometry).tokens)
    write_rows(NewRows(new.store, k, v), done, compressed_lengths(start + count, geometry) - done)


def write_rows(new: NewRows, start: Tensor, count: Tensor) -> None:
    """Store rows 0 .. count[b] - 1 of `new` from position start[b] on, in place.

    Of more rows than a ring has, the last stay; rows beyond the end of another store are dropped. Rows that do not count change nothing.
    """
    store, size = new.store, new.store.k.shape[1]
    width = min(new.k.shape[1], size)
    if not width:
        return
    if not store.ring:
        count = torch.minimum(count, size - start)
    # the last `width` rows that count: no two of them have one slot
    rows = torch.arange(width, device=new.k.device) + (count.long() - width).unsqueeze(1)
    slots = (start.long().unsqueeze(1) + rows).remainder(size)
    counts = (rows >= 0)[..., None, None]
    for held, fresh in _pairs(new):
        values = fresh.detach().to(held.dtype).gather(1, _pick(rows.clamp(min=0), fresh))
        at = _pick(slots, held)
        held.scatter_(1, at, torch.where(counts, values, held.gather(1, at)))


def join_rows(new: NewRows, first: Tensor, tail: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
    """Return k and v `(B, most + m, G, D)`: `tail[b]` rows of the ring from position first[b] on, then the m new ones.

    `most` bounds `tail`; rows after the last new one mean nothing.
    """
    size, num_new = new.store.k.shape[1], new.k.shape[1]
    index = torch.arange(most + num_new, device=new.k.device).expand(new.k.shape[0], -1)
    slots = (first.long().unsqueeze(1) + index[:, :most]).remainder(size)
    behind = index - tail.long().unsqueeze(1)
    source = torch.where(behind < 0, index, behind.clamp(max=num_new - 1) + most)

    def joined(held: Tensor, fresh: Tensor) -> Tensor:
        both = torch.cat([held.gather(1, _pick(slots, held)).to(fresh.dtype), fresh], 1)
        return both.gather(1, _pick(source, both))

    pairs = [joined(held, fresh) for held, fresh in _pairs(new)]
    return pairs[0], None if new.v is None else pairs[1]


def _pairs(new: NewRows) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of a store, each with its new rows."""
    return [(new.store.k, new.k)] + ([] if new.v is None else [(new.store.v, new.v)])


def _pick(rows: Tensor, x: Tensor) -> Tensor:
    return rows[..., None, None].expand(-1, -1, *x.shape[2:])
