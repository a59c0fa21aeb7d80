"""The reference of the operation APPEND: write a step's rows into the stores of a cache, and the compressed blocks that they complete."""

from collections.abc import Callable

import torch
from torch import Tensor

from nsa_core.backends.base import Keys, NewBlocks, NewRows
from nsa_core.compression import block_windows
from nsa_core.config import BlockGeometry
from nsa_core.varlen import compressed_lengths

LARGEST_FP8 = 448.0
"""The largest number of float8_e4m3fn."""


def append(rows: tuple[NewRows, ...], blocks: NewBlocks | None, start: Tensor, count: Tensor, *, geometry: BlockGeometry) -> None:
    """Write the step's rows and blocks, in place; see `backends.base.AppendBackend`."""
    # emit blocks first: the new rows overwrite raw tokens that they need
    if blocks is not None:
        emit_blocks(blocks, start, count, geometry, write=write_rows)
    for new in rows:
        write_rows(new, start, count)


def emit_blocks(
    new: NewBlocks, start: Tensor, count: Tensor, geometry: BlockGeometry, *, write: Callable[[NewRows, Tensor, Tensor], None]
) -> None:
    """Compress the blocks that end within the step and pass them to `write`, which has the arguments of `write_rows`."""
    done = compressed_lengths(start, geometry)
    first = done * geometry.compression_stride
    raw_k, *raw_v = join_rows(new.raw, first, start - first, geometry.compression_block_size - 1)
    windows = block_windows(raw_k, geometry)
    k = new.rotate(new.compress_k(windows.tokens), first.unsqueeze(1) + windows.last_positions)
    v = None if new.compress_v is None or not raw_v else new.compress_v(block_windows(raw_v[0], geometry).tokens)
    write(NewRows(new.store, k, v), done, compressed_lengths(start + count, geometry) - done)


def write_rows(new: NewRows, start: Tensor, count: Tensor) -> None:
    """Store rows 0 .. count[b] - 1 of `new` from position start[b] on, in place.

    A ring keeps the last rows that fit. Any other store drops rows beyond its end, or beyond its pages. Invalid rows change nothing.
    """
    store, num_new = new.store, new.k.shape[1]
    size = store.k.shape[1] * (1 if store.page_table is None else store.page_table.shape[1])
    width = min(num_new, size)
    if not width:
        return
    if not store.ring:
        count = torch.minimum(count, size - start)
    # the last `width` valid rows: no two of them share a slot
    rows = torch.arange(width, device=new.k.device) + (count.long() - width).unsqueeze(1)
    positions = (start.long().unsqueeze(1) + rows).remainder(size)
    counts = rows >= 0
    slots = positions if store.page_table is None else _page_slots(store, positions, counts)
    for held, fresh in _pairs(new):
        values = fresh.to(held.dtype).gather(1, _pick(rows.clamp(min=0), fresh))
        if store.page_table is not None:
            held.flatten(0, 1).index_copy_(0, slots.flatten(), values.flatten(0, 1))
            continue
        at = _pick(slots, held)
        held.scatter_(1, at, torch.where(counts.view(*counts.shape, *[1] * (held.dim() - 2)), values, held.gather(1, at)))


def _page_slots(store: Keys, positions: Tensor, counts: Tensor) -> Tensor:
    """Return the rows of the flattened paged store that hold `positions` `(B, m)`; for positions that no page holds, rows of the last page."""
    assert store.page_table is not None
    num_pages, page_size = store.k.shape[:2]
    pages = store.page_table.long().gather(1, torch.div(positions, page_size, rounding_mode="floor"))
    is_held = counts & (pages >= 0) & (pages < num_pages - 1)
    return torch.where(is_held, pages, num_pages - 1) * page_size + positions.remainder(page_size)


def join_rows(new: NewRows, first: Tensor, tail: Tensor, most: int) -> list[Tensor]:
    """Return rows `(B, most + m, ...)` of k, of v if there is one, and of scales.

    The first tail[b] rows are those of the ring from position first[b] on; the new rows follow them. `most` bounds `tail`. Rows after the
    last new row must be ignored.
    """
    size, num_new = new.store.k.shape[1], new.k.shape[1]
    index = torch.arange(most + num_new, device=new.k.device).expand(new.k.shape[0], -1)
    slots = (first.unsqueeze(1) + index[:, :most]).remainder(size)
    behind = index - tail.unsqueeze(1)
    source = torch.where(behind < 0, index, behind.clamp(max=num_new - 1) + most)

    def joined(held: Tensor, fresh: Tensor) -> Tensor:
        both = torch.cat([held.gather(1, _pick(slots, held)).to(fresh.dtype), fresh], 1)
        return both.gather(1, _pick(source, both))

    return [joined(held, fresh) for held, fresh in _pairs(new)]


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x `(..., D)` in float8_e4m3fn, and float32 scales `(...)`: a stored number times its scale is the number in x, up to rounding.

    Each row has its own scale, chosen from its largest value.
    """
    # never 0, so that a row of zeros stays zero
    largest = x.abs().amax(-1).float()
    # divide by a tensor: on a GPU torch would multiply by the reciprocal of a Python number, which rounds differently
    scale = (largest / torch.full_like(largest, LARGEST_FP8)).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scale.unsqueeze(-1)).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn), scale


def _pairs(new: NewRows) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of a store, each with its new rows: k, v if there is one, and the scales of FP8 stores.

    FP8 numbers are viewed as bits, which every operation can copy.
    """
    store = new.store
    held = [store.k] if new.v is None else [store.k, store.v]
    fresh = [x.detach() for x in (new.k, new.v) if x is not None]
    if store.k_scale is None:
        return list(zip(held, fresh, strict=True))
    converted = [to_fp8(x) for x in fresh]
    bits = [(x.view(torch.uint8), y.view(torch.uint8)) for x, (y, _) in zip(held, converted, strict=True)]
    scales = [scale for scale in (store.k_scale, store.v_scale) if scale is not None]
    return bits + [(x, y) for x, (_, y) in zip(scales, converted, strict=False)]


def _pick(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(*rows.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
