"""The arithmetic of selection: from compressed attention weights to chosen blocks (Eq. 9-11)."""

import torch
from torch import Tensor

from nsa_core import blocks
from nsa_core.config import BlockGeometry


def pool_importance(weights: Tensor, geometry: BlockGeometry, num_blocks: int) -> Tensor:
    """Return the importance `(..., num_blocks)` of selection blocks from weights `(..., C)` of compressed blocks (Eq. 9).

    The weight of a compressed block is multiplied by its overlap with the selection block (`blocks.overlap_weights`). The sum always
    runs over ascending compressed blocks, so that its rounding does not depend on C or `num_blocks`.
    """
    strides = geometry.selection_block_size // geometry.compression_stride
    reach = geometry.compression_block_size // geometry.compression_stride
    needed = strides * num_blocks
    available = weights[..., :needed]
    padded = torch.nn.functional.pad(available, (reach - 1, needed - available.shape[-1]))
    importance = weights.new_zeros(*weights.shape[:-1], num_blocks)
    for offset, overlap in enumerate(blocks.overlap_weights(geometry)):
        importance += overlap * padded[..., offset : offset + needed : strides]
    return importance


def choose_blocks(importance: Tensor, positions: Tensor, geometry: BlockGeometry) -> Tensor:
    """Return the chosen blocks of each query, int32 `(..., n)`, ascending, -1 after the last (Eq. 11).

    Args:
        importance: `(..., N)` scores of blocks 0 .. N - 1; scores of blocks after the query's own are ignored.
        positions: int64, broadcastable to `(...)`: the query's position in its sequence; -1 chooses nothing.
        geometry: n, l' and the numbers of forced blocks.

    The first `num_initial_blocks` and the last `num_local_blocks` candidates are always chosen. The remaining slots go to the blocks
    of highest importance; ties go to the lower block. NaN counts as importance 0.
    """
    num_blocks = importance.shape[-1]
    block = torch.arange(num_blocks, device=importance.device)
    own = torch.div(positions, geometry.selection_block_size, rounding_mode="floor").unsqueeze(-1)
    candidate = (block <= own).expand(importance.shape)
    forced = candidate & ((block < geometry.num_initial_blocks) | (block > own - geometry.num_local_blocks))
    # NaN, from overflowed scores, counts as 0, so that a row keeps its forced blocks and its number of blocks
    scores = importance.nan_to_num(nan=0.0).masked_fill(~candidate, float("-inf")).masked_fill(forced, float("inf"))
    return _ascending(_highest(scores, candidate, geometry.num_selected_blocks), geometry.num_selected_blocks)


def _highest(scores: Tensor, candidate: Tensor, count: int) -> Tensor:
    """Return a bool mask of the `count` highest candidates of each row, or of all if there are fewer; ties go to the lower index."""
    if scores.shape[-1] <= count:
        return candidate
    threshold = scores.topk(count, dim=-1).values[..., -1:]
    above = scores > threshold
    ties = candidate & (scores == threshold)
    room = count - above.sum(-1, keepdim=True)
    return above | (ties & (ties.cumsum(-1) <= room))


def _ascending(chosen: Tensor, count: int) -> Tensor:
    """Return int32 `(..., count)`: the indices of True in each row, ascending, -1 after the last."""
    slots = torch.where(chosen, chosen.cumsum(-1) - 1, count)
    indices = torch.full((*chosen.shape[:-1], count + 1), -1, dtype=torch.int32, device=chosen.device)
    block = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device)
    return indices.scatter_(-1, slots, block.expand(chosen.shape))[..., :count].contiguous()
