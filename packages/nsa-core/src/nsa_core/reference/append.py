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
        write_rows(new.store.k, new.k, start, count)
        if new.v is not None:
            write_rows(new.store.v, new.v, start, count)


def _emit(new: NewBlocks, start: Tensor, count: Tensor, geometry: BlockGeometry) -> None:
    """Write the compressed keys and values of the blocks that end within the step."""
    done = compressed_lengths(start, geometry)
    finished = compressed_lengths(start + count, geometry) - done
    first = done * geometry.compression_stride
    most = geometry.compression_block_size - 1

    def compressed(compress: object, store: Tensor, fresh: Tensor) -> Tensor:
        tokens = block_windows(join_rows(store, fresh, first, start - first, most), geometry).tokens
        return compress(tokens)  # type: ignore[operator,no-any-return]

    k = compressed(new.compress_k, new.raw.store.k, new.raw.k)
    index = done.long().unsqueeze(1) + torch.arange(k.shape[1], device=k.device)
    ends = index * geometry.compression_stride + geometry.compression_block_size - 1
    write_rows(new.store.k, new.rotate(k, ends), done, finished)
    if new.compress_v is not None and new.raw.v is not None:
        write_rows(new.store.v, compressed(new.compress_v, new.raw.store.v, new.raw.v), done, finished)


def write_rows(store: Tensor, new: Tensor, start: Tensor, count: Tensor) -> None:
    """Store rows 0 .. count[b] - 1 of new `(B, m, G, D)` from row start[b] of `store` `(B, R, G, D)` on, in place; rows count modulo R.

    Where more than R rows are new, the last R stay. Rows that do not count change nothing.
    """
    width = min(new.shape[1], store.shape[1])
    if not width:
        return
    rows = (count.long() - width).unsqueeze(1) + torch.arange(width, device=new.device)
    slots = _pick((start.long().unsqueeze(1) + rows).remainder(store.shape[1]), store)
    values = new.detach().to(store.dtype).gather(1, _pick(rows.clamp(min=0), new))
    store.scatter_(1, slots, torch.where((rows >= 0)[..., None, None], values, store.gather(1, slots)))


def join_rows(store: Tensor, new: Tensor, first: Tensor, tail: Tensor, most: int) -> Tensor:
    """Return `(B, most + m, G, D)`: `tail[b]` rows of the ring `store` from position first[b] on, then new `(B, m, G, D)`.

    `most` bounds `tail`; rows after the last new one mean nothing.
    """
    index = torch.arange(most + new.shape[1], device=new.device).expand(new.shape[0], -1)
    slots = (first.long().unsqueeze(1) + index[:, :most]).remainder(store.shape[1])
    remembered = store.gather(1, _pick(slots, store)).to(new.dtype)
    after = (index - tail.long().unsqueeze(1)).clamp(max=new.shape[1] - 1) + most
    source = torch.where(index < tail.long().unsqueeze(1), index, after)
    both = torch.cat([remembered, new], 1)
    return both.gather(1, _pick(source, both))


def _pick(rows: Tensor, x: Tensor) -> Tensor:
    return rows[..., None, None].expand(-1, -1, *x.shape[2:])
