"""Packed batches: arithmetic on `cu_seqlens`, packing and unpacking.

`cu_seqlens` is int32 `(N + 1,)`. It starts at 0, ends at the total and never decreases; empty sequences are allowed. No function of this
file reads a tensor's values on the host.
"""

import torch
from torch import Tensor

from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError


def cu_seqlens_from_lengths(lengths: Tensor) -> Tensor:
    """Return `cu_seqlens`, int32 `(N + 1,)`, of sequences with `lengths` `(N,)`."""
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    offsets[1:] = lengths.cumsum(0)
    return offsets


def sequence_ids(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return int64 `(total,)`: the sequence that each packed row belongs to; rows after the last sequence get N."""
    rows = torch.arange(total, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].long().contiguous(), rows, right=True)


def positions_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return int64 `(total,)`: each packed row's position inside its own sequence."""
    starts = cu_seqlens.long()[sequence_ids(cu_seqlens, total)]
    return torch.arange(total, device=cu_seqlens.device) - starts


def slots_in_batch(cu_seqlens: Tensor, total: int, length: int) -> Tensor:
    """Return int64 `(total,)`: each packed row's index in a batch of N * length rows; rows after the last sequence get indices from N * length."""
    sequence = sequence_ids(cu_seqlens, total)
    return sequence * length + torch.arange(total, device=cu_seqlens.device) - cu_seqlens.long()[sequence]


def compressed_lengths(lengths: Tensor, geometry: BlockGeometry) -> Tensor:
    """Return N_c, the number of compressed blocks, of each length; same shape and dtype as `lengths`."""
    size, stride = geometry.compression_block_size, geometry.compression_stride
    # stride <= size, so the quotient is above 0 only from `size` tokens on
    return torch.div(lengths + (stride - size), stride, rounding_mode="floor").clamp(min=0)


def cu_blocks_from_cu_seqlens(cu_seqlens: Tensor, geometry: BlockGeometry) -> Tensor:
    """Return int32 `(N + 1,)`: the first row of each sequence's compressed blocks in a packed `k_cmp`, then their total."""
    return cu_seqlens_from_lengths(compressed_lengths(cu_seqlens.diff(), geometry))


def pack(sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return tensors `(S_i, ...)` packed one after another, `(1, total, ...)`, and their `cu_seqlens`, int32.

    Raises:
        InputError: for an empty list.
    """
    if not sequences:
        raise InputError("sequences=[] has no tensor to take dtype, device and trailing sizes from; give one, of 0 tokens at least")
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int32, device=sequences[0].device)
    return torch.cat(sequences).unsqueeze(0), cu_seqlens_from_lengths(lengths)


def unpack(packed: Tensor, lengths: list[int]) -> list[Tensor]:
    """Return the tensors `(S_i, ...)` of a packed `(1, total, ...)` whose sequences have `lengths`."""
    return list(packed[0].split(lengths))
