"""Loss and right answers by the position of a token in its sequence."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core.varlen import positions_from_cu_seqlens
from nsa_train.data.packing import IGNORED, Batch

CHUNK = 8192
"""Number of tokens whose logits are converted to float32 at a time."""


class Bucket(NamedTuple):
    """Tokens at the positions first .. last of their sequences, counted from 0."""

    first: int
    last: int
    targets: int
    loss: float
    """Mean, in nats."""
    right: float
    """Share of tokens whose label is the most likely token."""


def loss_by_position(logits_of: Callable[[Batch], Tensor], batches: Iterable[Batch], *, longest: int, device: torch.device) -> list[Bucket]:
    """Return loss and right answers on `batches`, whose sequences have at most `longest` tokens; buckets are powers of two.

    `logits_of` returns the logits `(total, V)` of a batch on `device`. A bucket without a label is left out.
    """
    sums = torch.zeros(3, math.ceil(math.log2(longest + 1)), dtype=torch.float64, device=device)
    for batch in batches:
        moved = batch.to(device)
        _add(sums, logits_of(moved), moved)
    counts, losses, rights = sums.tolist()
    return [
        Bucket(2**index - 1, 2 ** (index + 1) - 2, int(count), loss / count, right / count)
        for index, (count, loss, right) in enumerate(zip(counts, losses, rights, strict=True))
        if count
    ]


def _add(sums: Tensor, logits: Tensor, batch: Batch) -> None:
    """Add targets, losses and right answers of one batch to `sums` `(3, buckets)`; `logits` `(total, V)`."""
    labels = batch.labels[0]
    # buckets 0, 1 .. 2, 3 .. 6, ...; by integer edges, because a logarithm would be rounded
    edges = 2 ** torch.arange(sums.shape[1], device=sums.device)
    buckets = torch.bucketize(positions_from_cu_seqlens(batch.cu_seqlens, len(labels)) + 1, edges, right=True) - 1
    for at in range(0, len(labels), CHUNK):
        part, expected = logits[at : at + CHUNK].float(), labels[at : at + CHUNK]
        loss = torch.nn.functional.cross_entropy(part, expected, ignore_index=IGNORED, reduction="none")
        found = torch.stack([expected != IGNORED, loss, part.argmax(-1) == expected]).double()
        sums.index_add_(1, buckets[at : at + CHUNK], found)
