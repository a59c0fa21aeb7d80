"""Convert Transformers' padding masks and packed position ids for nsa-core: masks to an order of columns with counts, ids to `cu_seqlens`."""

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core.errors import InputError

INTEGERS = (torch.int32, torch.int64)
"""Dtypes of ids and positions."""


class Padding(NamedTuple):
    """How to move the valid columns of each row to its front, and back after the pass."""

    order: Tensor
    """int64 (B, S): for each column of the moved batch, its column before the move."""
    back: Tensor
    """int64 (B, S): for each column before the move, its column in the moved batch."""
    counts: Tensor
    """int32 (B,): number of valid columns."""


class Packing(NamedTuple):
    """The bounds of sequences that are packed in one row."""

    cu_seqlens: Tensor
    """int32 (N + 1,)"""
    max_seqlen: int


def move(x: Tensor, order: Tensor) -> Tensor:
    """Return x `(B, S, D)` with column s of row b replaced by its column `order[b, s]`."""
    return x.gather(1, order.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def padding_of(mask: Tensor | None, batch_size: int, num_tokens: int, past: int) -> Padding | None:
    """Return the padding among the last `num_tokens` columns of `mask` `(B, past + S)` or `(B, S)`; None if all are valid.

    Waits for the mask's device.

    Raises:
        InputError: for a mask of another shape, or one whose valid columns are not next to one another.
    """
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape[0] != batch_size or mask.shape[1] not in (num_tokens, past + num_tokens):
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)} (the layout is (B, past + S) = ({batch_size}, {past + num_tokens}), 1 where a token is "
            "valid); causality is built in, so leave other masks out"
        )
    require_marks(mask)
    is_valid = mask != 0
    require_no_holes(is_valid)
    return None if bool(is_valid[:, -num_tokens:].all()) else padding_in_graph(mask, num_tokens)


def require_marks(mask: Tensor) -> None:
    """Raise InputError if `mask` holds anything but 0 and 1; waits for its device."""
    if bool((is_other := (mask != 0) & (mask != 1)).any()):
        raise InputError(
            f"attention_mask holds {mask[is_other][0].item()} (1 where a token is valid, else 0; position_ids say where packed sequences begin, and "
            "nothing is added to scores); pass 0 and 1"
        )


def padding_in_graph(mask: Tensor, num_tokens: int) -> Padding:
    """Return the padding among the last `num_tokens` columns of `mask`. The host reads no value, so a compiled step can call this."""
    is_valid = mask[:, -num_tokens:] != 0
    counts = is_valid.sum(1)
    lead = torch.where(counts > 0, is_valid.int().argmax(1), 0).unsqueeze(1)
    columns = torch.arange(num_tokens, device=mask.device)
    return Padding((columns + lead) % num_tokens, (columns - lead) % num_tokens, counts.to(torch.int32))


def require_no_holes(is_valid: Tensor) -> None:
    """Raise InputError if the valid columns of a row of `is_valid` `(B, T)` are not next to one another."""
    starts = is_valid.clone()
    starts[:, 1:] &= ~is_valid[:, :-1]
    if bool((broken := starts.sum(1) > 1).any()):
        raise InputError(
            f"attention_mask has a hole in row {int(broken.int().argmax())} (valid tokens must be next to one another, padding left or right of "
            "them; behind right padding no token can follow); pad on the left, with padding_side='left'"
        )


def require_mask_of_past(mask: Tensor, num_tokens: int, lengths: Tensor) -> None:
    """Raise InputError if the numbers of valid earlier columns in `mask` `(B, past + S)` are not the cache's `lengths` `(B,)`."""
    if mask.shape[1] == num_tokens:
        return
    marked = (mask[:, :-num_tokens] != 0).sum(1)
    if bool((is_other := marked != lengths.to(mask.device)).any()):
        row = int(is_other.int().argmax())
        raise InputError(
            f"attention_mask has {int(marked[row])} valid tokens before the new ones in row {row} (past_key_values holds {int(lengths[row])} there, "
            "and a step does not change them); begin it with the mask that the earlier tokens came with"
        )


def packing_of(positions: Tensor | None, batch_size: int, num_tokens: int) -> Packing | None:
    """Return the bounds of the sequences that `positions` `(B, S)` or `(1, S)` describe; None if each row is one sequence.

    A sequence begins at each position 0. Waits for the device of the positions.

    Raises:
        InputError: for positions that do not start at 0, or do not go up in steps of 1.
    """
    if positions is None:
        return None
    rows = _rows(positions, batch_size, num_tokens)
    steps = torch.arange(num_tokens, device=rows.device)
    if bool((rows == steps).all()):
        return None
    is_start = rows == 0
    follows = rows[:, 1:] == rows[:, :-1] + 1
    if not bool(is_start[:, :1].all()) or not bool((follows | is_start[:, 1:]).all()):
        raise InputError(
            "position_ids are no sequences from 0 on (RoPE and blocks count from a sequence's own start, in steps of 1); "
            "pass 0 .. n - 1 for each packed sequence, or leave position_ids out"
        )
    starts = is_start.flatten().nonzero().flatten()
    bounds = torch.cat([starts, starts.new_tensor([rows.numel()])])
    return Packing(bounds.to(torch.int32), int(bounds.diff().max()))


def require_positions(positions: Tensor, padding: Padding | None, batch_size: int, num_tokens: int, lengths: Tensor | None) -> None:
    """Raise InputError unless the `positions` of valid tokens count up in steps of 1 from `lengths` `(B,)`, the earlier tokens (None: from 0)."""
    rows = _rows(positions, batch_size, num_tokens)
    moved = rows if padding is None else rows.gather(1, padding.order)
    steps = torch.arange(num_tokens, device=rows.device)
    expected = steps if lengths is None else lengths.to(rows.device).long().unsqueeze(1) + steps
    is_valid = torch.ones_like(moved, dtype=torch.bool) if padding is None else steps < padding.counts.unsqueeze(1)
    if bool(((moved != expected) & is_valid).any()):
        raise InputError(
            "position_ids are not those of the tokens (after a cache or with padding they continue from the earlier tokens in steps of 1); "
            "leave position_ids out, or pass the attention_mask of the whole text"
        )


def _rows(positions: Tensor, batch_size: int, num_tokens: int) -> Tensor:
    if positions.dim() != 2 or positions.shape[0] not in (1, batch_size) or positions.shape[1] != num_tokens:
        raise InputError(
            f"position_ids have shape {tuple(positions.shape)} (the layout is (B, S) = ({batch_size}, {num_tokens})); reshape them"
        )
    if positions.dtype not in INTEGERS:
        raise InputError(f"position_ids is {positions.dtype} (positions are int32 or int64); use position_ids.long()")
    return positions.expand(batch_size, num_tokens)
