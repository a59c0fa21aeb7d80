"""The reference choice of blocks: importance of some rows at a time, in bounded scratch memory, then top-n (Eq. 9-11)."""

import torch
from torch import Tensor

from nsa_core import blocks
from nsa_core.backends.base import Keys, Queries
from nsa_core.config import BlockGeometry
from nsa_core.reference.branches import is_dense, key_span
from nsa_core.reference.rows import Rows, num_visible_blocks, rows_of
from nsa_core.reference.tiles import accumulator_dtype, rows_per_step
from nsa_core.selection import choose_blocks, pool_importance


def select_blocks(queries: Queries, cmp: Keys, lse: Tensor, geometry: BlockGeometry, scale: float) -> Tensor:
    """Return int32 block_indices `(B, S, G, n)` for q `(B, S, H, D_k)`, k_cmp `(B, C, G, D_k)`, lse `(B, S, H)`."""
    q, k_cmp = queries.q, cmp.k
    batch, num_queries, num_heads, _ = q.shape
    num_kv_heads = k_cmp.shape[2]
    chosen = q.new_empty(batch, num_queries, num_kv_heads, geometry.num_selected_blocks, dtype=torch.int32)
    num_blocks = blocks.num_selection_blocks(max_tokens(queries, cmp, geometry), geometry)
    is_packed = queries.cu_seqlens is not None
    rows = rows_of(queries, cmp)
    widest = max(k_cmp.shape[1], num_blocks)
    step = rows_per_step(batch * (2 * num_heads + 6 * num_kv_heads) * widest * accumulator_dtype(q.dtype).itemsize, q.device)
    for start in range(0, num_queries, step):
        here = slice(start, start + step)
        part = Rows(*(numbers[:, here] for numbers in rows))
        stop = min(start + step, num_queries)
        longest = blocks.num_compressed_blocks(stop, geometry) if is_dense(queries) else cmp.max_count
        importance = _importance(q[:, here], k_cmp, lse[:, here], part, geometry, scale, longest, num_blocks, is_packed)
        chosen[:, here] = choose_blocks(importance, part.positions.unsqueeze(-1), geometry)
    return chosen


def max_tokens(queries: Queries, cmp: Keys, geometry: BlockGeometry) -> int:
    """Return the bound on the tokens of a sequence: the bound on its rows, or in a step the tokens that fit the compressed store."""
    return queries.max_count if queries.start is None else blocks.max_tokens(cmp.max_count, geometry)


def _importance(
    q: Tensor, k_cmp: Tensor, lse: Tensor, rows: Rows, geometry: BlockGeometry, scale: float, longest: int, num_blocks: int, is_packed: bool
) -> Tensor:
    """Return p_slc `(B, R, G, N)` of a few query rows, in float32 or float64 (Eq. 9, 10)."""
    batch, num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cmp.shape[2]
    heads_per_group = num_heads // num_kv_heads
    if num_blocks <= geometry.num_selected_blocks:
        # all candidates are chosen, so scores do not matter
        return lse.new_zeros(batch, num_rows, num_kv_heads, num_blocks)
    end = rows.first_keys + num_visible_blocks(rows.positions, geometry)
    keys = key_span(rows.first_keys, end, k_cmp.shape[1] if is_packed else min(longest, k_cmp.shape[1]))
    visible = _inside(keys.start, keys.stop, rows.first_keys, end)
    acc = accumulator_dtype(q.dtype)
    gathered = keys.gather(k_cmp).to(acc)
    grouped = q.to(acc).reshape(batch, num_rows, num_kv_heads, heads_per_group, head_dim).permute(0, 2, 1, 3, 4)
    scores = torch.matmul(grouped.flatten(2, 3), gathered.transpose(-1, -2)).unflatten(2, (num_rows, heads_per_group)).mul_(scale)
    norm = lse.to(acc).reshape(batch, num_rows, num_kv_heads, heads_per_group).transpose(1, 2).unsqueeze(-1)
    # the clamp keeps a weight at most 1, also if the difference of huge numbers rounds to more than 0
    exponents = scores.sub_(norm).clamp_(max=0).masked_fill_(~visible[:, None, :, None], float("-inf"))
    weights = exponents.exp_().sum(3).transpose(1, 2)
    if is_packed:
        weights = _from_own_first(weights, rows.first_keys - keys.start, longest)
    return pool_importance(weights, geometry, num_blocks)


def _inside(start: int, stop: int, first: Tensor, end: Tensor) -> Tensor:
    index = torch.arange(start, stop, device=first.device)
    return (index >= first.unsqueeze(-1)) & (index < end.unsqueeze(-1))


def _from_own_first(weights: Tensor, first: Tensor, longest: int) -> Tensor:
    """Return weights `(B, R, G, longest)`, shifted so that index 0 is the first block of each row's own sequence; weights outside the span are 0."""
    index = first.unsqueeze(-1) + torch.arange(longest, device=first.device)
    inside = (index < weights.shape[-1]).unsqueeze(2)
    index = index.clamp(max=max(weights.shape[-1] - 1, 0)).unsqueeze(2).expand(-1, -1, weights.shape[2], -1)
    if not weights.shape[-1]:
        return weights.new_zeros(index.shape)
    return torch.where(inside, weights.gather(-1, index), 0)
