"""Attention of a few query rows, written as masks over all keys: the reference for long sequences, and for errors in low precision.

Rows are (R, H, D), keys (T, G, D) of one sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core.blocks import num_compressed_blocks, num_selection_blocks
from nsa_core.config import BlockGeometry
from nsa_core.selection import choose_blocks, pool_importance
from nsa_core.testing.masks import compressed_mask, math_attention, window_mask

NUM_ROWS = 32
"""Number of query rows that are compared, in all sequences together."""
MAX_SEQUENCES = 4
"""Maximum number of packed sequences that are compared; the longest are taken."""
BRANCHES = ("cmp", "slc", "win")
KEYS = {name: (f"k_{name}", f"v_{name}") for name in BRANCHES} | {"dense": ("k_win", "v_win")}
"""Attention -> names of its keys and values; dense attention gets those of the window."""
ROW_OPERANDS = ("q", "gates")
"""Names of the operands with a row per query."""


class Piece(NamedTuple):
    """The compared rows of one sequence."""

    start: int
    """Row of the sequence's first token."""
    length: int
    first_block: int
    """Row of the sequence's first compressed block."""
    positions: Tensor
    """int64 (R,), inside the sequence, ascending."""
    geometry: BlockGeometry

    @property
    def num_blocks(self) -> int:
        """Return the compressed blocks of the sequence."""
        return num_compressed_blocks(self.length, self.geometry)


class Sample(NamedTuple):
    """The compared rows of a batch entry."""

    pieces: tuple[Piece, ...]
    num_tokens: int
    """Rows of the batch entry, compared or not."""

    @property
    def rows(self) -> Tensor:
        """Return int64 `(R,)`: the compared rows, as indices among all S rows."""
        return torch.cat([piece.start + piece.positions for piece in self.pieces])

    @property
    def positions(self) -> Tensor:
        """Return int64 `(R,)`: the positions of the compared rows in their own sequences."""
        return torch.cat([piece.positions for piece in self.pieces])

    def split(self, operands: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the operands of each piece: for ROW_OPERANDS the compared rows, for the others the keys of its sequence."""
        parts, row = [], 0
        for piece in self.pieces:
            rows = slice(row, row + len(piece.positions))
            tokens = slice(piece.start, piece.start + piece.length)
            blocks = slice(piece.first_block, piece.first_block + piece.num_blocks)
            slices = dict.fromkeys(ROW_OPERANDS, rows) | {"k_cmp": blocks, "v_cmp": blocks}
            parts.append({name: x[slices.get(name, tokens)] for name, x in operands.items()})
            row = rows.stop
        return parts


def sample_rows(lengths: tuple[int, ...], geometry: BlockGeometry, device: torch.device, seed: int = 0) -> Sample:
    """Return the rows to compare in sequences of `lengths`: rows at edges and random rows, or all rows of a short sequence."""
    start, first_block, sequences = 0, 0, []
    for length in lengths:
        sequences.append((length, start, first_block))
        start, first_block = start + length, first_block + num_compressed_blocks(length, geometry)
    longest = sorted(range(len(lengths)), key=lambda index: -lengths[index])[:MAX_SEQUENCES]
    share = NUM_ROWS // len(longest)
    generator = torch.Generator().manual_seed(seed)
    pieces = [
        Piece(start, length, first_block, _positions(length, geometry, share, generator).to(device), geometry)
        for index, (length, start, first_block) in enumerate(sequences)
        if length and index in longest
    ]
    return Sample(tuple(pieces), sum(lengths))


def _positions(length: int, geometry: BlockGeometry, count: int, generator: torch.Generator) -> Tensor:
    if length <= count:
        return torch.arange(length)
    size, window, block = geometry.compression_block_size, geometry.window_size, geometry.selection_block_size
    last_block = (length - 1) // block * block
    edges = [
        *(length - 1, window, geometry.num_selected_blocks * block, last_block, last_block - 1, window - 1),
        *(size - 1, size - 2 + geometry.compression_stride, block, 0),
    ]
    kept = [edge for edge in dict.fromkeys(edges) if 0 <= edge < length][: count // 2]
    others = torch.randperm(length, generator=generator)[:count].tolist()
    return torch.tensor(sorted(list(dict.fromkeys(kept + others))[:count]))


def attend_rows(operation: str, piece: Piece, operands: dict[str, Tensor], chosen: Tensor | None) -> Tensor:
    """Return out `(R, H, D_v)` of "cmp", "slc", "win" or "dense", or of "nsa", the gated sum of the first three.

    All runs in the dtype of the operands through torch's MATH attention. So the same code gives the float64 reference, and torch's own result
    in a lower precision. `chosen`, int `(R, G, n)`, holds the blocks for "slc" and "nsa".
    """
    if operation == "nsa":
        outs = [attend_rows(branch, piece, operands, chosen) for branch in BRANCHES]
        return torch.stack([out * gate.unsqueeze(-1) for out, gate in zip(outs, operands["gates"].unbind(-1), strict=True)]).sum(0)
    k_name, v_name = KEYS[operation]
    return _attend(operands["q"], operands[k_name], operands[v_name], _mask(operation, piece, chosen))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return attention `(R, H, D_v)` with mask (1 or G, R, T). The heads of a group become rows, so that no key is repeated."""
    num_rows, num_heads, head_dim = q.shape
    num_groups = k.shape[1]
    size = num_heads // num_groups
    if not k.shape[0]:
        # no key is visible; the zeros still depend on the operands, for autograd
        return (q.sum() + k.sum() + v.sum()) * 0 + q.new_zeros(num_rows, num_heads, v.shape[-1])
    groups = []
    for group, queries in enumerate(q.unflatten(1, (num_groups, size)).unbind(1)):
        here = mask[group % len(mask)].repeat_interleave(size, 0)[None, None]
        folded = queries.reshape(1, num_rows * size, 1, head_dim)
        out = math_attention(folded, k[None, :, group, None], v[None, :, group, None], here, scale=head_dim**-0.5)
        groups.append(out.view(num_rows, size, -1))
    return torch.cat(groups, 1)


def _mask(operation: str, piece: Piece, chosen: Tensor | None) -> Tensor:
    """Return bool `(1 or G, R, T)`: the keys that each row sees."""
    geometry, t = piece.geometry, piece.positions.unsqueeze(1)
    if operation == "cmp":
        return compressed_mask(piece.length, piece.num_blocks, geometry, piece.positions).unsqueeze(0)
    if operation == "win":
        return window_mask(piece.length, geometry, piece.positions).unsqueeze(0)
    token = torch.arange(piece.length, device=t.device)
    causal = token <= t
    if operation == "dense":
        return causal.unsqueeze(0)
    assert chosen is not None
    num_blocks = num_selection_blocks(piece.length, geometry)
    blocks = torch.where((chosen < 0) | (chosen >= num_blocks), num_blocks, chosen).long()
    is_chosen = torch.zeros(*chosen.shape[:2], num_blocks + 1, dtype=torch.bool, device=t.device).scatter_(-1, blocks, True)
    return is_chosen.movedim(1, 0)[..., token // geometry.selection_block_size] & causal


class Choice(NamedTuple):
    """The blocks that a row's scores choose."""

    chosen: Tensor
    """int32 (R, G, n), ascending, -1 last."""
    margin: Tensor
    """(R, G): the lowest chosen free score minus the highest free score that was not chosen; inf if scores decided nothing."""
    highest: Tensor
    """(R, G): the row's highest score."""


def choose_rows(piece: Piece, q: Tensor, k_cmp: Tensor) -> Choice:
    """Return the blocks that q `(R, H, D_k)` chooses by k_cmp `(C, G, D_k)` of the piece's sequence (Eq. 8-11)."""
    geometry = piece.geometry
    visible = compressed_mask(piece.length, piece.num_blocks, geometry, piece.positions)
    groups = []
    for group, queries in enumerate(q.unflatten(1, (k_cmp.shape[1], -1)).unbind(1)):
        scores = (queries @ k_cmp[:, group].T * q.shape[-1] ** -0.5).masked_fill(~visible.unsqueeze(1), float("-inf"))
        # a row that sees nothing has no weights
        groups.append(scores.softmax(-1).nan_to_num(nan=0.0).sum(1))
    importance = pool_importance(torch.stack(groups, 1), geometry, num_selection_blocks(piece.length, geometry))
    chosen = choose_blocks(importance, piece.positions.unsqueeze(1), geometry)
    return Choice(chosen, _margin(importance, piece.positions, geometry), importance.amax(-1))


def _margin(importance: Tensor, positions: Tensor, geometry: BlockGeometry) -> Tensor:
    own = (positions // geometry.selection_block_size).view(-1, 1, 1)
    block = torch.arange(importance.shape[-1], device=importance.device)
    is_local = (block > own - geometry.num_local_blocks) & (block <= own)
    is_forced = is_local | ((block < geometry.num_initial_blocks) & (block <= own))
    is_free = (block <= own) & ~is_forced
    room = (own + 1).clamp(max=geometry.num_selected_blocks) - is_forced.sum(-1, keepdim=True)
    ranked = importance.masked_fill(~is_free, float("-inf")).sort(-1, descending=True).values
    decides = (room > 0) & (room < is_free.sum(-1, keepdim=True))
    room = torch.where(decides, room, 1).expand(*ranked.shape[:-1], 1)
    # if scores decide nothing, there may be no score at these indices
    margin = ranked.gather(-1, room - 1) - ranked.gather(-1, room.clamp(max=ranked.shape[-1] - 1))
    return torch.where(decides, margin, float("inf")).squeeze(-1)
