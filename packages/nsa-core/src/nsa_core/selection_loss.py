"""An auxiliary loss that teaches compressed scores to rank blocks as attention over all keys would.

The choice of blocks (Eq. 11) has no gradient: compressed keys and queries learn to rank blocks only as far as the compressed branch needs
it. For a sample of queries this loss compares two distributions over blocks. One is the importance of each block (Eq. 9, 10); it has a
gradient. The other is the attention mass that dense attention puts into each block; it is a target without a gradient. The layer computes
the dense attention from the same queries and the selected branch's keys, or the caller passes a teacher's.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_core.blocks import num_selection_blocks
from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError
from nsa_core.varlen import compressed_lengths, cu_blocks_from_cu_seqlens, positions_from_cu_seqlens, sequence_ids

NUM_SAMPLES = 256
"""Number of queries that are sampled in each pass of a layer."""
CHUNK = 32
"""Maximum number of queries whose scores over all keys are in memory at a time."""


class Rows(NamedTuple):
    """The m sampled rows of q, and their positions."""

    row: Tensor
    """(m,) int64, among all rows of the batch"""
    sequence: Tensor
    """(m,) int64"""
    start: Tensor
    """(m,) int64, the first row of the sequence"""
    position: Tensor
    """(m,) int64, in the sequence"""


class SelectionLoss:
    """The loss of one layer: attach it as `layer.selection_loss`, and read `value` after each training pass of the layer."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        """Sample `num_samples` queries in each pass."""
        self.num_samples = num_samples
        self.offset: Tensor | None = None
        """A scalar tensor from 0 to 1 on the layer's device, which shifts the sampled queries (`sample_rows`); None: no shift."""
        self.target: Tensor | None = None
        """Target of the next pass: `block_mass` at `rows`, for example from a teacher. Set it before each pass; None: the layer computes its own."""
        self.value: Tensor | None = None
        """The loss of the last pass, with its gradient; a copy of this object holds it without."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: torch copies no tensor that is part of a graph."""
        return self.__dict__ | {"value": None if self.value is None else self.value.detach()}

    def rows(self, num_rows: int, device: torch.device) -> Tensor:
        """Return int64 `(num_samples,)`: the sampled queries of a pass over `num_rows` rows; empty for 0 rows."""
        return sample_rows(num_rows, self.num_samples, torch.zeros((), device=device) if self.offset is None else self.offset)

    def take(self, q: Tensor, k_cmp: Tensor, k: Tensor, *, share: float = 1.0, **keywords: Any) -> Tensor:
        """Compute the loss of a pass, store it as `value` and return it. The arguments are those of `selection_loss`, without `rows` and `target`.

        `share`: this rank's share of the KV heads. With tensor parallelism `value` is this rank's part of the mean; the sum over ranks is the loss.
        """
        rows = self.rows(q.shape[0] * q.shape[1], q.device)
        self.value = selection_loss(q, k_cmp, k, rows, target=self.target, **keywords) * share
        return self.value


def sample_rows(num_rows: int, num_samples: int, offset: Tensor) -> Tensor:
    """Return int64 `(num_samples,)`: evenly spaced indices below `num_rows`, shifted by `offset` (0 to 1) times their distance; empty for 0 rows."""
    steps = (torch.arange(num_samples, device=offset.device, dtype=torch.float64) + offset) / num_samples
    # rounding may reach num_rows
    rows = (steps * num_rows).long().clamp(max=num_rows - 1)
    return rows if num_rows else rows[:0]


def block_mass(
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    *,
    geometry: BlockGeometry,
    num_groups: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Return the mass `(m, num_groups, N)` that dense causal attention of some queries puts into each selection block; a row sums to 1.

    The mass of a group is the mean over its heads. Scores and sums are in at least float32, also under autocast. Only the scores of `CHUNK` queries
    are in memory at a time. Blocks count from the start of the query's own sequence; those after the query have mass 0.

    Args:
        q: `(B, S, H, D_k)`, rotated; packed: `(1, total, H, D_k)`.
        k: `(B, S, G, D_k)`, the rotated keys of these queries.
        rows: int64 `(m,)`, the queries among the B * S rows; `sample_rows` draws some.
        geometry: only `selection_block_size` is read.
        num_groups: groups of neighbouring heads that share a row of mass, a divisor of H; None: G.
        scale: of scores; None: D_k ** -0.5.
        cu_seqlens: int32 `(sequences + 1,)`, cumulative lengths of packed sequences.
        max_seqlen: upper bound on the tokens of a sequence, a Python int, which fixes N; None: S.
    """
    batch, length, num_kv_heads, dim = k.shape
    bounds = _bounds(batch, length, cu_seqlens, q.device)
    sampled = _located(rows, bounds, batch * length)
    num_blocks = num_selection_blocks(length if max_seqlen is None else max_seqlen, geometry)
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        queries = q.flatten(0, 1)[rows].unflatten(1, (num_kv_heads, -1)).to(wide) * (dim**-0.5 if scale is None else scale)
        keys = k.flatten(0, 1).to(wide)
        key = torch.arange(len(keys), device=keys.device)
        in_block = _one_hot(positions_from_cu_seqlens(bounds, len(keys)) // geometry.selection_block_size, num_blocks).to(wide)
        found = []
        # at least one part, so that an empty sample gives a result with 0 rows
        for part in range(0, max(len(queries), 1), CHUNK):
            some = slice(part, part + CHUNK)
            scores = torch.einsum("mghd,kgd->mghk", queries[some], keys)
            visible = (key >= sampled.start[some].unsqueeze(1)) & (key <= rows[some].unsqueeze(1))
            weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1).flatten(1, 2)
            found.append(weights.unflatten(1, (num_groups or num_kv_heads, -1)).mean(2) @ in_block)
        return torch.cat(found)


def selection_loss(
    q: Tensor,
    k_cmp: Tensor,
    k: Tensor,
    rows: Tensor,
    *,
    geometry: BlockGeometry,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    query_count: Tensor | None = None,
    target: Tensor | None = None,
) -> Tensor:
    """Return the mean of mass * KL(dense || importance) over KV heads and sampled queries, a scalar in at least float32.

    Only queries with more than n candidate blocks count. Both distributions are over the query's candidates except the initial and local
    blocks. `mass` is the share of dense attention in these blocks, so a query that attends mostly elsewhere counts little. Dense attention is
    averaged over the heads of a group. Gradients flow to `q` and `k_cmp` through the importance only, never through the target.

    Args:
        q: `(B, S, H, D_k)`; packed: `(1, total, H, D_k)`.
        k_cmp: `(B, C, G, D_k)`, compressed as for `nsa_attention`.
        k: `(B, S, G, D_k)`, the keys of the selected branch.
        rows: int64 `(m,)`, the sampled queries among the B * S rows; `sample_rows` draws some.
        geometry: block sizes, and the numbers of initial, local and selected blocks.
        scale: of scores; None: D_k ** -0.5.
        cu_seqlens: int32 `(sequences + 1,)`, cumulative lengths of packed sequences.
        max_seqlen: upper bound on the tokens of a sequence, a Python int, which fixes N; None: S.
        query_count: int32 `(B,)`, valid first rows of each sequence; the others are ignored. None: all.
        target: `(m, G, N)`, the mass of dense attention at `rows` in each block, such as a teacher's; None: `block_mass` of `q` and `k`.

    Raises:
        InputError: for a target of another shape.
    """
    batch, length, num_kv_heads = k.shape[:3]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bounds = _bounds(batch, length, cu_seqlens, q.device)
    every = torch.arange(batch + 1, device=q.device)
    block_bounds = every * k_cmp.shape[1] if cu_seqlens is None else cu_blocks_from_cu_seqlens(cu_seqlens, geometry).long()
    num_blocks = num_selection_blocks(length if max_seqlen is None else max_seqlen, geometry)
    sampled = _located(rows, bounds, batch * length)

    own = sampled.position // geometry.selection_block_size
    block = torch.arange(num_blocks, device=q.device)
    has_choice = own >= geometry.num_selected_blocks
    if query_count is not None:
        has_choice &= sampled.position < query_count[sampled.sequence]
    competes = (block >= geometry.num_initial_blocks) & (block <= (own - geometry.num_local_blocks).unsqueeze(1))
    competes = (competes & has_choice.unsqueeze(1)).unsqueeze(1)

    if target is None:
        target = block_mass(q.detach(), k.detach(), rows, geometry=geometry, scale=scale, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    elif target.shape != (len(rows), num_kv_heads, num_blocks):
        expected = (len(rows), num_kv_heads, num_blocks)
        raise InputError(
            f"target has shape {tuple(target.shape)} (the layout is (rows, KV heads, blocks) = {expected}); "
            "take it by block_mass of the same rows"
        )
    # float32, also under autocast
    with torch.autocast(q.device.type, enabled=False):
        queries = q.flatten(0, 1)[rows].unflatten(1, (num_kv_heads, -1)).float() * scale
        importance = _importance(queries, k_cmp.flatten(0, 1).float(), sampled, block_bounds, geometry, num_blocks)
    tiny = torch.finfo(torch.float32).tiny
    dense, importance = target.detach() * competes, importance * competes
    mass, total = dense.sum(-1, keepdim=True), importance.sum(-1, keepdim=True)
    # mass * KL = sum of dense * log((dense / mass) / (importance / total)); 0 where nothing competes
    ratio = (dense.clamp(min=tiny) / mass.clamp(min=tiny)).log() - (importance.clamp(min=tiny) / total.clamp(min=tiny)).log()
    return (dense * ratio).sum() / (has_choice.sum() * num_kv_heads).clamp(min=1)


def _bounds(batch: int, length: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Return int64 `(N + 1,)`: the first row of each sequence among all rows, then the end of the last sequence."""
    return torch.arange(batch + 1, device=device) * length if cu_seqlens is None else cu_seqlens.long()


def _located(rows: Tensor, bounds: Tensor, total: int) -> Rows:
    """Return the sequence and the position of each of `rows` `(m,)`; `bounds` are the sequences' bounds among all `total` rows."""
    sequence = sequence_ids(bounds, total)[rows]
    start = bounds[sequence]
    return Rows(rows, sequence, start, rows - start)


def _importance(queries: Tensor, keys: Tensor, rows: Rows, block_bounds: Tensor, geometry: BlockGeometry, num_blocks: int) -> Tensor:
    """Return the importance `(m, G, num_blocks)` of blocks, from the compressed `keys` `(B * C, G, D)` (Eq. 9, 10), with a gradient.

    The importance is 0 for queries that see no compressed block.
    """
    row, first = torch.arange(len(keys), device=keys.device), block_bounds[rows.sequence].unsqueeze(1)
    num_visible = compressed_lengths(rows.position + 1, geometry).unsqueeze(1)
    visible = ((row >= first) & (row < first + num_visible))[:, None, None]
    scores = torch.einsum("mghd,cgd->mghc", queries, keys)
    # a row that sees nothing gets the softmax of equal scores, and is then set to 0, so that no gradient is NaN
    weights = scores.masked_fill(~visible, torch.finfo(torch.float32).min).softmax(-1).masked_fill(~visible, 0.0)
    return weights.sum(2) @ _overlaps(positions_from_cu_seqlens(block_bounds, len(keys)), geometry, num_blocks)


def _overlaps(index: Tensor, geometry: BlockGeometry, num_blocks: int) -> Tensor:
    """Return omega (Eq. 9), float32 `(C, num_blocks)`: how many strides of the compressed blocks `index` `(C,)` lie in each selection block."""
    strides = geometry.selection_block_size // geometry.compression_stride
    reach = geometry.compression_block_size // geometry.compression_stride
    return torch.stack([_one_hot((index + part) // strides, num_blocks) for part in range(reach)]).sum(0)


def _one_hot(block: Tensor, num_blocks: int) -> Tensor:
    """Return float32 `(rows, num_blocks)`: 1 at `block` `(rows,)`."""
    return (block.unsqueeze(1) == torch.arange(num_blocks, device=block.device)).float()
