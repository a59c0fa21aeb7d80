"""Cut each branch into tiles: the keys that a range of query rows reads, and a mask of the keys that each row sees."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core import blocks
from nsa_core.backends.base import Keys, Queries
from nsa_core.config import BlockGeometry
from nsa_core.reference.fused import VECTOR
from nsa_core.reference.rows import num_visible_blocks, rows_of
from nsa_core.reference.tiles import KeyRows, KeyRowsPerHead, KeySlice, Tile, accumulator_dtype, rows_per_step

MASKED_RATIO = 8
"""Selected attention masks all keys, instead of gathering n * l' tokens, if there are at most this many times as many keys."""

MASKED_ROWS = 128
"""Maximum number of query rows of a masked step of the selected branch; compressed steps of packed or cached rows have up to 4 times as many. It
is small, so that a step reads few keys of other sequences or of the future."""


class Extent(NamedTuple):
    """The sizes of a branch's loop."""

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dims: int
    """D_k + D_v."""
    itemsize: int
    """Bytes of an accumulator element."""
    device: torch.device

    @classmethod
    def of(cls, queries: Queries, keys: Keys) -> "Extent":
        """Return the extent of q `(B, S, H, D_k)` over k `(B, T, G, D_k)`, v `(B, T, G, D_v)`."""
        q, k, v = queries.q, keys.k, keys.v
        batch, num_queries, num_heads, head_dim = q.shape
        itemsize = accumulator_dtype(q.dtype).itemsize
        return cls(batch, num_queries, k.shape[1], num_heads, k.shape[2], head_dim + v.shape[-1], itemsize, q.device)

    def score_bytes(self, num_keys: int) -> int:
        """Return the scratch bytes of one query row, in every batch entry, for scores of `num_keys` keys: three buffers of the scores' shape."""
        return 3 * self.batch * self.num_heads * num_keys * self.itemsize


def is_dense(queries: Queries) -> bool:
    """Return True if row t of every batch entry is token t, so that steps share their keys and masks."""
    return queries.cu_seqlens is None and queries.start is None


def num_shared_keys(queries: Queries, keys: Keys) -> int:
    """Return how many rows of the keys the queries may read: in a packed batch all, in a store those of one sequence."""
    return keys.k.shape[1] if queries.cu_seqlens is not None else min(keys.k.shape[1], keys.max_count)


def compressed_tiles(queries: Queries, keys: Keys, geometry: BlockGeometry) -> Iterator[Tile]:
    """Yield the tiles of the compressed branch; k and v are compressed."""
    extent = Extent.of(queries, keys)
    if is_dense(queries):
        return _dense_compressed_tiles(extent, geometry)
    return _placed_compressed_tiles(extent, queries, keys, geometry)


def _dense_compressed_tiles(extent: Extent, geometry: BlockGeometry) -> Iterator[Tile]:
    step = rows_per_step(extent.score_bytes(blocks.num_compressed_blocks(extent.num_queries, geometry)), extent.device)
    for start in range(geometry.compression_block_size - 1, extent.num_queries, step):
        stop = min(start + step, extent.num_queries)
        ends = num_visible_blocks(torch.arange(start, stop, device=extent.device), geometry)
        span = KeySlice(0, blocks.num_visible_blocks(stop - 1, geometry))
        visible = torch.arange(span.stop, device=extent.device) < ends.unsqueeze(1)
        yield Tile(start, 1, stop - start, span, visible[None, None])


def _placed_compressed_tiles(extent: Extent, queries: Queries, keys: Keys, geometry: BlockGeometry) -> Iterator[Tile]:
    rows = rows_of(queries, keys)
    ends = rows.first_keys + num_visible_blocks(rows.positions, geometry)
    most = num_shared_keys(queries, keys)
    step = min(rows_per_step(extent.score_bytes(extent.num_keys), extent.device), 4 * MASKED_ROWS)
    for start in range(0, extent.num_queries, step):
        first, end = rows.first_keys[:, start : start + step], ends[:, start : start + step]
        span = key_span(first, end, most)
        if span.stop > span.start:
            index = torch.arange(span.start, span.stop, device=extent.device)
            visible = (index >= first.unsqueeze(-1)) & (index < end.unsqueeze(-1))
            yield Tile(start, 1, first.shape[1], span, visible.unsqueeze(1), (end > first).unsqueeze(1))


def key_span(first: Tensor, end: Tensor, most: int) -> KeySlice:
    """Return a slice that covers the keys first .. end - 1 of all rows: the smallest on a CPU, else all `most` keys, to avoid a wait."""
    if first.numel() and first.device.type == "cpu":
        return KeySlice(min(int(first.min()), most), min(int(end.max()), most))
    return KeySlice(0, most)


def window_tiles(queries: Queries, keys: Keys, geometry: BlockGeometry) -> Iterator[Tile]:
    """Yield the tiles of the sliding branch. A tile of consecutive rows reads the window of its first row, and the tokens of its rows."""
    extent = Extent.of(queries, keys)
    if is_dense(queries):
        return _dense_window_tiles(extent, geometry)
    return _placed_window_tiles(extent, queries, keys, geometry)


def _dense_window_tiles(extent: Extent, geometry: BlockGeometry) -> Iterator[Tile]:
    window = min(geometry.window_size, extent.num_queries)
    run = min(max(window, 64), 256)
    step = min(run, rows_per_step(extent.score_bytes(run + window), extent.device))
    for start in range(0, extent.num_queries, step):
        stop = min(start + step, extent.num_queries)
        first = max(0, start - window + 1)
        # a span that begins at a multiple of VECTOR is fastest
        span = KeySlice(first - first % VECTOR, stop)
        index = torch.arange(span.start, stop, device=extent.device)
        distance = index[start - span.start :].unsqueeze(1) - index
        visible = (distance >= 0) & (distance < window)
        yield Tile(start, 1, stop - start, span, visible[None, None])


def _placed_window_tiles(extent: Extent, queries: Queries, keys: Keys, geometry: BlockGeometry) -> Iterator[Tile]:
    window = max(1, min(geometry.window_size, keys.max_count))
    tile_rows = max(1, min(extent.num_queries, 256, max(16, window)))
    rows = rows_of(queries, keys)
    bases = torch.arange(extent.batch, device=extent.device).unsqueeze(1) * extent.num_keys
    num_keys = tile_rows + window - 1
    offsets = torch.arange(num_keys, device=extent.device) - (window - 1)
    distance = torch.arange(tile_rows, device=extent.device).unsqueeze(1) - offsets
    in_window = (distance >= 0) & (distance < window)
    gathered = 2 * extent.batch * extent.num_kv_heads * num_keys * extent.head_dims * extent.itemsize
    step = rows_per_step(tile_rows * extent.score_bytes(num_keys) + gathered, extent.device)
    num_tiles = -(-extent.num_queries // tile_rows)
    for first in range(0, num_tiles, step):
        tiles = min(step, num_tiles - first)
        start = first * tile_rows
        here = slice(start, start + tiles * tile_rows, tile_rows)
        own = (rows.first_keys + rows.positions)[:, here].unsqueeze(-1) + offsets
        # indices outside the keys are masked, or belong to invalid rows
        own = own.remainder(extent.num_keys) if keys.ring else own.clamp(0, extent.num_keys - 1)
        index = (own + bases.unsqueeze(-1)).flatten(0, 1)
        # reach hides keys before the sequence, and before the first stored key
        reach = _padded(rows.positions + rows.first_keys.clamp(max=0), start, tiles * tile_rows).view(-1, tile_rows, 1)
        visible = (in_window & (distance <= reach)).unsqueeze(1)
        # a row sees at least itself, unless it is invalid or precedes the first key
        sees = (reach >= 0).view(-1, 1, tile_rows)
        yield Tile(start, tiles, tile_rows, KeyRows(index), visible, sees)


def _padded(positions: Tensor, start: int, count: int) -> Tensor:
    piece = positions[:, start : start + count]
    return torch.nn.functional.pad(piece, (0, count - piece.shape[1]), value=-1)


def selected_tiles(queries: Queries, keys: Keys, block_indices: Tensor, geometry: BlockGeometry) -> Iterator[Tile]:
    """Yield the tiles of the selected branch: with masks over all keys if there are few keys, else with gathered blocks."""
    extent = Extent.of(queries, keys)
    gathered = block_indices.shape[-1] * geometry.selection_block_size
    if min(extent.num_keys, keys.max_count) <= MASKED_RATIO * gathered:
        return _masked_selected_tiles(extent, queries, keys, block_indices, geometry)
    return _gathered_selected_tiles(extent, queries, keys, block_indices, geometry)


def _masked_selected_tiles(extent: Extent, queries: Queries, keys: Keys, block_indices: Tensor, geometry: BlockGeometry) -> Iterator[Tile]:
    is_aligned, num_keys = is_dense(queries), num_shared_keys(queries, keys)
    num_blocks = blocks.num_selection_blocks(keys.max_count, geometry)
    rows = rows_of(queries, keys)
    step = min(rows_per_step(2 * extent.score_bytes(num_keys), extent.device), MASKED_ROWS)
    for start in range(0, extent.num_queries, step):
        here = slice(start, start + step)
        own = torch.div(rows.positions[:, here], geometry.selection_block_size, rounding_mode="floor")
        chosen = _membership(block_indices[:, here], own, num_blocks)
        if is_aligned:
            span, visible = _aligned_view(chosen, start, geometry)
        else:
            span = key_span(rows.first_keys[:, here], (rows.first_keys + rows.positions + 1)[:, here], num_keys)
            visible = _relative_view(chosen, span, rows.first_keys[:, here], rows.positions[:, here], geometry)
        if span.stop > span.start:
            # a chosen block holds at least one token that is not after the row
            sees = chosen.any(-1).transpose(1, 2)
            yield Tile(start, 1, visible.shape[1], span, visible.transpose(1, 2), sees)


def _aligned_view(chosen: Tensor, start: int, geometry: BlockGeometry) -> tuple[KeySlice, Tensor]:
    """Return the keys before the end of a dense step, and bool `(B, R, G, K)`: the keys that each row sees."""
    stop = start + chosen.shape[1]
    index = torch.arange(stop, device=chosen.device)
    causal = index <= index[start:].unsqueeze(1)
    picked = chosen.unsqueeze(-1).expand(*chosen.shape, geometry.selection_block_size).flatten(-2)[..., :stop]
    return KeySlice(0, stop), picked & causal.unsqueeze(1)


def _relative_view(chosen: Tensor, keys: KeySlice, first: Tensor, positions: Tensor, geometry: BlockGeometry) -> Tensor:
    """Return bool `(B, R, G, K)`: which of `keys` each row sees; `first` is the index of the first token of the row's own sequence."""
    # a key outside 0 .. position belongs to another sequence or to the future
    relative = torch.arange(keys.start, keys.stop, device=first.device) - first.unsqueeze(-1)
    inside = (relative >= 0) & (relative <= positions.unsqueeze(-1))
    block = torch.div(relative, geometry.selection_block_size, rounding_mode="floor").clamp(0, chosen.shape[-1] - 1)
    picked = chosen.gather(-1, block.unsqueeze(2).expand(-1, -1, chosen.shape[2], -1))
    return picked & inside.unsqueeze(2)


def _membership(block_indices: Tensor, own: Tensor, num_blocks: int) -> Tensor:
    """Return bool `(B, R, G, num_blocks + 1)`: which of the blocks 0 .. own `block_indices` names; the last column is always False."""
    outside = (block_indices < 0) | (block_indices > own[..., None, None])
    listed = torch.where(outside, num_blocks, block_indices).long()
    chosen = torch.zeros(*block_indices.shape[:-1], num_blocks + 1, dtype=torch.bool, device=block_indices.device)
    chosen.scatter_(-1, listed, True)
    chosen[..., num_blocks] = False
    return chosen


def _gathered_selected_tiles(
    extent: Extent, queries: Queries, keys: Keys, block_indices: Tensor, geometry: BlockGeometry
) -> Iterator[Tile]:
    size = geometry.selection_block_size
    rows = rows_of(queries, keys)
    num_keys = block_indices.shape[-1] * size
    gathered = 3 * extent.batch * extent.num_kv_heads * num_keys * extent.head_dims * extent.itemsize
    step = rows_per_step(extent.score_bytes(num_keys) + gathered, extent.device)
    first_keys = rows.first_keys + torch.arange(extent.batch, device=extent.device).unsqueeze(1) * extent.num_keys
    offsets = torch.arange(size, device=extent.device)
    for start in range(0, extent.num_queries, step):
        here = slice(start, start + step)
        listed = block_indices[:, here].long()
        relative = (listed.unsqueeze(-1) * size + offsets).flatten(-2)
        visible = (relative >= 0) & (relative <= rows.positions[:, here, None, None])
        index = torch.where(visible, first_keys[:, here, None, None] + relative, 0)
        seen = visible.flatten(0, 1).unsqueeze(2)
        yield Tile(start, listed.shape[1], 1, KeyRowsPerHead(index.flatten(0, 1)), seen, seen.any(-1))
