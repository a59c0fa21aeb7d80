"""Choices of blocks made without scores, with a stated persistence, and how much of a choice persists."""

import torch
from torch import Tensor

from nsa_bench.cases import Case, Selection
from nsa_core import BlockGeometry

SHARE_KEPT = {Selection.RANDOM: 0.0, Selection.TRAINED_LIKE: 0.8}
"""Share of a query's free blocks that the next query keeps; those not kept are drawn anew."""


def positions_of(case: Case, device: torch.device) -> Tensor:
    """Return int64 `(S,)`: every row's position in its own sequence."""
    return torch.cat([torch.arange(length, device=device) for length in case.sequence_lengths])


def make_block_indices(case: Case, device: torch.device, seed: int = 0) -> Tensor:
    """Return int32 block_indices `(1, S, G, n)`: valid choices, ascending, whose free blocks persist as the case says.

    The free blocks 1 .. F of a query, F = n less the forced ones, are held in F slots. Slot s draws among the free
    candidates j with j = s modulo F, so that no block is named twice, and draws anew with the stated probability.
    """
    geometry, positions = case.geometry, positions_of(case, device)
    generator = torch.Generator(device).manual_seed(seed)
    num_free = geometry.num_selected_blocks - geometry.num_initial_blocks - geometry.num_local_blocks
    free = _free_blocks(positions, num_free, case, generator)
    own = (positions // geometry.selection_block_size).view(-1, 1, 1)
    local = own - torch.arange(geometry.num_local_blocks, device=device)
    initial = torch.arange(geometry.num_initial_blocks, device=device).expand(len(positions), 1, -1)
    # an initial block that is local as well, or lies in the future, would be named twice or wrongly
    initial = torch.where(initial <= own - geometry.num_local_blocks, initial, -1)
    forced = torch.cat([initial, local.clamp(min=-1)], -1).expand(-1, case.shape.num_kv_heads, -1)
    return _ascending(torch.cat([free, forced], -1), geometry).unsqueeze(0)


def free_overlap(block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> float | None:
    """Return the mean share of a query's free blocks that the next query of its sequence chooses too.

    block_indices `(S, G, n)`, positions int64 `(S,)`. Only queries that had to choose count, those with more than n
    candidates; None where there is none.
    """
    here, before = block_indices[1:], block_indices[:-1]
    own = positions[:-1] // geometry.selection_block_size
    counts = (positions[1:] == positions[:-1] + 1) & (own + 1 > geometry.num_selected_blocks)
    if not bool(counts.any()):
        return None
    here, before, own = here[counts], before[counts], own[counts].view(-1, 1, 1)
    is_free = (before >= geometry.num_initial_blocks) & (before <= own - geometry.num_local_blocks)
    kept = torch.zeros_like(is_free)
    for slot in range(here.shape[-1]):
        kept |= before == here[..., slot, None]
    share = (kept & is_free).sum(-1) / is_free.sum(-1).clamp(min=1)
    return float(share[is_free.any(-1)].double().mean()) if bool(is_free.any()) else None


def _free_blocks(positions: Tensor, num_free: int, case: Case, generator: torch.Generator) -> Tensor:
    """Return `(S, G, F)`: each slot's block, -1 where it has none to draw from."""
    geometry, device = case.geometry, positions.device
    sizes = (len(positions), case.shape.num_kv_heads, num_free)
    if not num_free:
        return torch.empty(sizes, dtype=torch.int64, device=device)
    slot = torch.arange(num_free, device=device)
    own = positions // geometry.selection_block_size
    count = (own + 1 - geometry.num_initial_blocks - geometry.num_local_blocks).clamp(min=0)
    # candidates of slot s: s, s + F, s + 2F, ... below `count`
    choices = ((count.unsqueeze(1) - slot + num_free - 1).clamp(min=0) // num_free).unsqueeze(1)
    drawn = (torch.rand(sizes, device=device, generator=generator) * choices).long()
    block = torch.where(choices > 0, drawn.clamp(max=(choices - 1).clamp(min=0)) * num_free + slot + geometry.num_initial_blocks, -1)
    # a new draw may fall on the old block
    odds = (1 - SHARE_KEPT[case.selection]) * choices / (choices - 1).clamp(min=1)
    anew = torch.rand(sizes, device=device, generator=generator) < odds
    # a slot that had no candidate draws as soon as it has one, and so does every sequence at its start
    anew[1:] |= block[:-1] < 0
    anew |= (positions == 0).view(-1, 1, 1)
    rows = torch.arange(len(positions), device=device).view(-1, 1, 1)
    last_draw = torch.where(anew, rows, 0).cummax(0).values
    return block.gather(0, last_draw)


def _ascending(blocks: Tensor, geometry: BlockGeometry) -> Tensor:
    """Return int32 `(S, G, n)` of `blocks`: ascending, -1 (none) last."""
    most = torch.iinfo(torch.int64).max
    ordered = torch.where(blocks < 0, most, blocks).sort(-1).values
    return torch.where(ordered == most, -1, ordered).int()[..., : geometry.num_selected_blocks]
