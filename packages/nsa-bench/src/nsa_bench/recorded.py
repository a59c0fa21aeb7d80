"""Choices of blocks that a trained model made: their file format, and the rule that maps them to a case of another shape.

Each KV head of each layer that chooses is a *track*. A case takes its choices from the tracks by this rule:

1. KV head g of G reads track g * T // G of the T tracks, which are ordered layer by layer.
2. Query t reads the recorded query t. Queries beyond the S_r recorded ones repeat those from S_r // 2 on, so that neighbours stay neighbours.
3. A free block keeps its relative distance: at distance e of the E + 1 candidates before the recorded query's own block, it becomes
   distance e * (own + 1) // (E + 1). For equal shapes that is the recorded block.
4. Forced blocks, n and the block size are the case's. If n is smaller, the nearest free blocks stay. If it is larger, or two
   blocks became one, the nearest other blocks are added.
"""

import base64
import json
import math
import zlib
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor

from nsa_bench.cases import Case
from nsa_bench.errors import OptionError, require_recording
from nsa_core import BlockGeometry
from nsa_core.blocks import num_compressed_blocks, num_selection_blocks
from nsa_core.selection import choose_blocks

ROWS = 2**25
"""Maximum scores of the rows that are mapped at a time."""
POINTING = 10.0
"""Score, in nats, of a query with the compressed keys of the blocks that it should choose; its score with other keys is about 0."""


@frozen(kw_only=True, eq=False)
class Recording:
    """The choices of a model's layers for one sequence."""

    block_indices: Tensor
    """int16 or int32 `(T, S, n)`: a track for each KV head of each layer that chooses, layer by layer; ascending, -1 after the last."""
    geometry: BlockGeometry


def recording_to_json(recording: Recording) -> dict[str, Any]:
    """Return the table `recorded` of a result file: differences of neighbouring queries, int32, compressed by zlib, in base64."""
    indices = recording.block_indices.int().cpu()
    steps = torch.cat([indices[:, :1], indices[:, 1:] - indices[:, :-1]], 1).contiguous()
    return {
        "geometry": attrs.asdict(recording.geometry),
        "shape": list(indices.shape),
        "block_indices": base64.b64encode(zlib.compress(steps.numpy().tobytes(), 9)).decode(),
    }


def read_recording(path: str) -> Recording:
    """Return the recording of a JSON file that `nsa-bench choices` wrote.

    Raises:
        OptionError: if the file holds none.
    """
    require_recording(path)
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))["recorded"]
        shape = tuple(int(size) for size in table["shape"])
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"shape {shape}")
        # read at most one byte more than the shape holds, because a damaged text may expand to any size
        data = bytearray(zlib.decompressobj().decompress(base64.b64decode(table["block_indices"]), 4 * math.prod(shape) + 1))
        steps = torch.frombuffer(data, dtype=torch.int32).view(shape)
        found = Recording(block_indices=steps.cumsum(1).int(), geometry=BlockGeometry(**table["geometry"]))
    except (OSError, ArithmeticError, ValueError, KeyError, TypeError, RuntimeError, zlib.error) as error:
        raise OptionError(
            f"--selection=recorded:{path} holds no recorded choices ({type(error).__name__}: {error}); name a JSON file of nsa-bench choices"
        ) from None
    return found


def mapped_choice(case: Case, recording: Recording, device: torch.device) -> Tensor:
    """Return int32 block_indices `(S, G, n)` of `case`: those of `recording`, by the rule above."""
    indices = recording.block_indices.to(device)
    groups = case.shape.num_kv_heads
    tracks = indices[[group * len(indices) // groups for group in range(groups)]]
    found = []
    for length in case.sequence_lengths:
        num_blocks = num_selection_blocks(length, case.geometry)
        step = max(1, ROWS // (groups * max(num_blocks, 1)))
        found += [
            _mapped_rows(
                tracks, torch.arange(first, min(first + step, length), device=device), num_blocks, case.geometry, recording.geometry
            )
            for first in range(0, length, step)
        ]
    return torch.cat(found) if found else tracks.new_empty(0, groups, case.geometry.num_selected_blocks)


def _mapped_rows(tracks: Tensor, positions: Tensor, num_blocks: int, geometry: BlockGeometry, recorded: BlockGeometry) -> Tensor:
    """Return int32 `(R, G, n)` for the rows at `positions` of a sequence with `num_blocks` blocks; tracks `(G, S_r, n_r)`."""
    num_recorded = tracks.shape[1]
    half = num_recorded // 2
    source = torch.where(positions < num_recorded, positions, half + (positions - num_recorded) % (num_recorded - half))
    chosen = tracks[:, source].transpose(0, 1).long()
    own = (positions // geometry.selection_block_size).view(-1, 1, 1)
    own_recorded = (source // recorded.selection_block_size).view(-1, 1, 1)
    is_free = (chosen >= recorded.num_initial_blocks) & (chosen <= own_recorded - recorded.num_local_blocks)
    block = own - (own_recorded - chosen) * (own + 1) // (own_recorded + 1)
    # the nearest other blocks if blocks are missing, the nearest recorded ones if there are too many
    nearness = torch.arange(num_blocks + 1, device=positions.device) / (num_blocks + 1)
    scores = nearness.expand(*chosen.shape[:2], -1).clone()
    target = torch.where(is_free, block, num_blocks)
    scores.scatter_(-1, target, 2 + nearness[target])
    return choose_blocks(scores[..., :num_blocks], positions.unsqueeze(-1), geometry)


def pointing_queries(case: Case, block_indices: Tensor, k_cmp: Tensor) -> Tensor:
    """Return q `(S, H, D_k)` whose scores over unit normal k_cmp `(C, G, D_k)` choose nearly the free blocks of block_indices `(S, G, n)`.

    The free blocks of a row are divided among the heads of the group. A head's query is the sum of the compressed keys in the middle of its
    blocks, scaled so that each of these keys has a score of `POINTING` nats, and others nearly 0. With few heads and a small D_k, some blocks
    are confused.
    """
    geometry, shape = case.geometry, case.shape
    per_group, dim = shape.heads_per_group, shape.head_dim_qk
    free = range(geometry.num_initial_blocks, geometry.num_selected_blocks - geometry.num_local_blocks)
    q = torch.zeros(case.seq_len, shape.num_heads, dim, dtype=case.dtype, device=k_cmp.device)
    first_row = first_block = 0
    for length in case.sequence_lengths:
        rows, num_blocks = slice(first_row, first_row + length), num_compressed_blocks(length, geometry)
        for head in range(shape.num_heads if num_blocks else 0):
            group, head_in_group = divmod(head, per_group)
            for slot in free[head_in_group::per_group] or free[head_in_group % len(free) : head_in_group % len(free) + 1] if free else ():
                block = block_indices[rows, group, slot].long()
                middle = block * geometry.selection_block_size + (geometry.selection_block_size - geometry.compression_block_size) // 2
                keys = k_cmp[first_block + (middle // geometry.compression_stride).clamp(0, num_blocks - 1), group]
                q[rows, head] += torch.where(block.unsqueeze(1) >= 0, keys * (POINTING / dim**0.5), 0)
        first_row, first_block = first_row + length, first_block + num_blocks
    return q
