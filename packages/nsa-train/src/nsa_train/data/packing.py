"""Documents to rows of `seq_len` tokens, rows to one packed batch.

All documents, each followed by the separator, form one stream, which is cut every `seq_len` tokens: a long document goes
on in the next row, nothing is truncated, and only the last row is padded. Where a document ends inside a row, the row
holds several sequences, and `cu_seqlens` keeps attention inside each. The label of a token is the next token of its
document, also where that one stands in the next row; a separator and padding have none.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from attrs import evolve, frozen
from torch import Tensor

from nsa_train.data.sources import Document
from nsa_train.data.tokenizer import Tokenizer

IGNORED = -100
"""The label of a token that has no next token in its document."""


class Row(NamedTuple):
    """One row of a batch."""

    input_ids: Tensor
    """(T,) int64"""
    labels: Tensor
    """(T,) int64, IGNORED where there is none"""
    lengths: list[int]
    """Tokens of each sequence in the row; they sum to T. Padding counts as a sequence of its own."""


@frozen(kw_only=True, eq=False)
class Batch:
    """Rows packed one after another. N sequences, `total` = rows * T tokens."""

    input_ids: Tensor
    """(1, total) int64"""
    labels: Tensor
    """(1, total) int64, IGNORED where there is none"""
    loss_mask: Tensor
    """(1, total) bool: True where there is a label"""
    lengths: Tensor
    """(N,) int32"""
    cu_seqlens: Tensor
    """(N + 1,) int32"""
    max_seqlen: int
    """Host bound of `lengths`: T"""
    longest: int
    """The longest sequence of this batch, known on the host"""
    num_targets: int
    """Labels that are not IGNORED, known on the host"""

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with its tensors on `device`."""
        names = ("input_ids", "labels", "loss_mask", "lengths", "cu_seqlens")
        return evolve(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


class PackedRows:
    """The rows of a list of documents, by index; documents stand in an order shuffled by `seed` (None: as given)."""

    def __init__(self, documents: Sequence[Document], tokenizer: Tokenizer, seq_len: int, seed: int | None = None) -> None:
        order = list(range(len(documents)))
        if seed is not None:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)).tolist()
        separator = torch.tensor([tokenizer.separator], dtype=torch.int32)
        parts = [part for index in order for part in (tokenizer.encode(documents[index].text), separator)]
        self.stream = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
        """(num_tokens,) int32: every document and its separator."""
        self.ends = torch.tensor([len(part) for part in parts], dtype=torch.int64).cumsum(0)[1::2].contiguous()
        """(num_documents,): where each document's separator ends, in tokens of the stream."""
        self.seq_len = seq_len
        self.pad = tokenizer.pad

    def __len__(self) -> int:
        return -(-len(self.stream) // self.seq_len)

    def __getitem__(self, index: int) -> Row:
        start = index * self.seq_len
        stop = min(start + self.seq_len, len(self.stream))
        padding = start + self.seq_len - stop
        cuts = self._ends_between(start, stop)
        input_ids = self.stream[start:stop].long()
        labels = torch.full((stop - start,), IGNORED)
        following = self.stream[start + 1 : stop + 1].long()
        labels[: len(following)] = following
        labels[[cut - 1 - start for cut in cuts]] = IGNORED
        edges = [start, *cuts, *([stop] if stop not in cuts else [])]
        lengths = [after - before for before, after in pairwise(edges)] + ([padding] if padding else [])
        pad = torch.nn.functional.pad
        return Row(pad(input_ids, (0, padding), value=self.pad), pad(labels, (0, padding), value=IGNORED), lengths)

    def _ends_between(self, start: int, stop: int) -> list[int]:
        """Return the document ends e with start < e <= stop, in stream positions."""
        first, last = torch.searchsorted(self.ends, torch.tensor([start, stop]), right=True).tolist()
        ends: list[int] = self.ends[first:last].tolist()
        return ends


def collate(rows: Sequence[Row]) -> Batch:
    """Return `rows` packed into one batch of `cu_seqlens` sequences."""
    lengths = torch.tensor([length for row in rows for length in row.lengths], dtype=torch.int32)
    labels = torch.cat([row.labels for row in rows]).unsqueeze(0)
    loss_mask = labels != IGNORED
    return Batch(
        input_ids=torch.cat([row.input_ids for row in rows]).unsqueeze(0),
        labels=labels,
        loss_mask=loss_mask,
        lengths=lengths,
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen=len(rows[0].input_ids),
        longest=int(lengths.max()),
        num_targets=int(loss_mask.sum()),
    )
