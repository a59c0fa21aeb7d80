"""Attention of query rows over keys that they share, tile by tile, forward and backward.

A branch is a sequence of `Tile` steps. Forward and backward pass run the same steps, so scratch memory is needed for one step only. Shapes:
X tiles of a step, G KV heads, R rows, M query heads per KV head and row, K keys. Scores and sums are float32 (float64 for float64 inputs).
A row that sees nothing gets out 0, lse -inf and zero gradients. Huge numbers and NaN reach only the rows that see them.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nsa_core.backends.base import Keys, Queries
from nsa_core.reference.containment import (
    EXPONENT,
    ORDINARY,
    are_ordinary,
    finite,
    fusable_rows,
    is_finite,
    is_within,
    only,
    rows_with_gradient,
    rows_within,
    sees_no_number,
)
from nsa_core.reference.fused import fused_attention, fused_attention_backward, is_fusable

SCRATCH_BYTES = {"cpu": 64 * 2**20, "cuda": 192 * 2**20}
"""Device type -> target for the scratch memory of one step: well under 256 MiB, and on a CPU small enough for the allocator to reuse."""


class KeyRange(Protocol):
    """The rows of k and v `(B, T, G, D)` that the tiles of one step read."""

    def gather(self, stored: Tensor) -> Tensor:
        """Return `(X, G, K, D)`."""

    def scatter_add(self, grad: Tensor, part: Tensor) -> None:
        """Add `part` `(X, G, K, D)` to the rows of `grad` `(B, T, G, D)` that `gather` read."""


class KeySlice(NamedTuple):
    """Rows start .. stop - 1 of every batch entry."""

    start: int
    stop: int

    def gather(self, stored: Tensor) -> Tensor:
        """Return `(B, G, stop - start, D)`."""
        return stored[:, self.start : self.stop].transpose(1, 2)

    def scatter_add(self, grad: Tensor, part: Tensor) -> None:
        """Add `part` `(B, G, stop - start, D)` in place."""
        grad[:, self.start : self.stop] += part.transpose(1, 2)


class KeyRows(NamedTuple):
    """Rows of the keys flattened to (B * T), the same for every KV head."""

    rows: Tensor
    """int64 (X, K)."""

    def gather(self, stored: Tensor) -> Tensor:
        """Return `(X, G, K, D)`."""
        gathered = stored.flatten(0, 1).index_select(0, self.rows.flatten())
        return gathered.view(*self.rows.shape, *stored.shape[2:]).transpose(1, 2)

    def scatter_add(self, grad: Tensor, part: Tensor) -> None:
        """Add `part` `(X, G, K, D)` in place."""
        grad.flatten(0, 1).index_add_(0, self.rows.flatten(), part.transpose(1, 2).flatten(0, 1))


class KeyRowsPerHead(NamedTuple):
    """Rows of the keys flattened to (B * T), different for each KV head."""

    rows: Tensor
    """int64 (X, G, K)."""

    def gather(self, stored: Tensor) -> Tensor:
        """Return `(X, G, K, D)`."""
        return stored.flatten(0, 2).index_select(0, self._flat(stored).flatten()).view(*self.rows.shape, stored.shape[3])

    def scatter_add(self, grad: Tensor, part: Tensor) -> None:
        """Add `part` `(X, G, K, D)` in place."""
        grad.flatten(0, 2).index_add_(0, self._flat(grad).flatten(), part.flatten(0, 2))

    def _flat(self, stored: Tensor) -> Tensor:
        num_kv_heads = stored.shape[2]
        return self.rows * num_kv_heads + torch.arange(num_kv_heads, device=stored.device).unsqueeze(1)


class Tile(NamedTuple):
    """One step of a branch's loop: a range of query rows, in every batch entry, and the keys that they read.

    The rows start .. start + tiles * rows - 1 are cut into `tiles` tiles of `rows` rows, each with its own keys. Rows beyond the end of q
    are read as 0 and are not written.
    """

    start: int
    tiles: int
    rows: int
    keys: KeyRange
    visible: Tensor
    """bool, broadcastable to (X, G, R, K) with X = B * tiles."""
    sees: Tensor | None = None
    """bool, broadcastable to (X, G, R): True if a row sees anything; None: every row does."""
    is_ordinary: bool = False
    """True if all operands of the step are known to be ordinary (`containment.ORDINARY`); if False, the step checks them."""

    def gather(self, stored: Tensor) -> Tensor:
        """Return `(X, G, K, D)`, this step's rows of k or v `(B, T, G, D)`, in the accumulator's dtype."""
        return self.keys.gather(stored).to(accumulator_dtype(stored.dtype))

    def blank(self, part: Tensor, value: float = 0.0) -> Tensor:
        """Return `part` `(X, G, R, M, ...)` with `value` in all rows that see nothing."""
        if self.sees is None:
            return part
        sees = self.sees.view(*self.sees.shape, *[1] * (part.dim() - 3))
        return torch.where(sees, part, value)

    def take(self, x: Tensor, num_kv_heads: int) -> Tensor:
        """Return `(X, G, R, M, ...)`, this step's rows of x `(B, S, H, ...)`; a view where the step is one tile."""
        count = self.tiles * self.rows
        piece = x[:, self.start : self.start + count]
        if piece.shape[1] < count:
            tail = x.new_zeros(x.shape[0], count - piece.shape[1], *x.shape[2:])
            piece = torch.cat([piece, tail], 1)
        cut = piece.unflatten(2, (num_kv_heads, -1)).unflatten(1, (self.tiles, self.rows))
        rows: Tensor = cut.transpose(2, 3).flatten(0, 1)
        return rows

    def put(self, x: Tensor, part: Tensor) -> None:
        """Write `part` `(X, G, R, M, ...)` over this step's rows of x `(B, S, H, ...)`, in place."""
        rows = part.unflatten(0, (-1, self.tiles)).transpose(2, 3).flatten(1, 2)
        target = x[:, self.start : self.start + rows.shape[1]].unflatten(2, (part.shape[1], -1))
        target.copy_(rows[:, : target.shape[1]])


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scores of `dtype` inputs are accumulated: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def rows_per_step(bytes_per_row: int, device: torch.device) -> int:
    """Return how many rows one step may have if each needs `bytes_per_row` of scratch memory; at least 1."""
    return max(1, SCRATCH_BYTES.get(device.type, SCRATCH_BYTES["cpu"]) // max(1, bytes_per_row))


def attend(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
    """Return out `(X, G, R, M, D_v)` and lse `(X, G, R, M)` of q `(X, G, R, M, D_k)` over stored k, v."""
    keys, values = tile.gather(k), tile.gather(v)
    q = q.to(values.dtype)
    if not is_fusable(q, keys, values, scale):
        out, lse = _attend(q, keys, values, tile, scale)
    elif tile.is_ordinary or are_ordinary(q, keys, values):
        out, lse = fused_attention(q, keys, values, tile.visible, scale)
    else:
        rows, fusable_keys, fusable_values = fusable_rows(q, keys, values, tile.visible)
        (fusable_q,) = only(rows, q)
        out, lse = fused_attention(fusable_q, fusable_keys, fusable_values, tile.visible, scale)
        rest_out, rest_lse = _attend(q, keys, values, tile, scale)
        out, lse = torch.where(rows.unsqueeze(-1), out, rest_out), torch.where(rows, lse, rest_lse)
    return tile.blank(out), tile.blank(lse, float("-inf"))


def attend_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq `(X, G, R, M, D_k)`, dk `(X, G, K, D_k)`, dv `(X, G, K, D_v)` of `attend`; the weights are recomputed.

    `dout` and `out` are `(X, G, R, M, D_v)`, `dlse` and `lse` `(X, G, R, M)`. `out` is used only if it is in the accumulator's dtype: if it was
    rounded to lower precision, its error would enter every gradient of large logits.
    """
    keys, values = tile.gather(k), tile.gather(v)
    q, dout = q.to(keys.dtype), tile.blank(dout.to(keys.dtype))
    if dlse is not None or out.dtype != keys.dtype or not is_fusable(q, keys, values, scale):
        dlse = None if dlse is None else tile.blank(dlse)
        return _attend_backward(dout, dlse, q, keys, values, tile, scale)
    lse = tile.blank(lse)
    if (tile.is_ordinary or are_ordinary(dout, q, keys, values)) and is_within(lse, EXPONENT):
        return fused_attention_backward(dout, q, keys, values, out, lse, tile.visible, scale)
    rows, fusable_keys, fusable_values = fusable_rows(q, keys, values, tile.visible)
    rows &= rows_within(dout, ORDINARY) & (lse.abs() <= EXPONENT)
    fusable_dout, fusable_q, fusable_out = only(rows, dout, q, out)
    fusable_lse = torch.where(rows, lse, 0)
    parts = fused_attention_backward(fusable_dout, fusable_q, fusable_keys, fusable_values, fusable_out, fusable_lse, tile.visible, scale)
    rest = _attend_backward(torch.where(rows.unsqueeze(-1), 0, dout), None, q, keys, values, tile, scale)
    dq, dk, dv = (part + other for part, other in zip(parts, rest, strict=True))
    return dq, dk, dv


def _attend(q: Tensor, keys: Tensor, values: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
    """Return out and lse as `attend` does, computed by separate matrix products."""
    scores = _scores(q * scale, keys, tile)
    weights = scores.softmax(-1)
    is_ordinary = tile.is_ordinary or are_ordinary(values)
    out = torch.matmul(weights.flatten(2, 3), values if is_ordinary else finite(values)).view(*q.shape[:-1], values.shape[-1])
    if not is_ordinary:
        out.masked_fill_(sees_no_number(values, tile.visible).unsqueeze(-1), float("nan"))
    # the largest weight is exp(largest score - lse)
    return out, scores.amax(-1) - weights.amax(-1).log()


def _attend_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, keys: Tensor, values: Tensor, tile: Tile, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv as `attend_backward` does, computed by separate matrix products."""
    q, hidden, idle = q * scale, None, None
    finite_q, finite_keys = q, keys
    if not (tile.is_ordinary or are_ordinary(dout, dlse, q, keys, values)):
        hidden = ~tile.visible.unsqueeze(-2)
        # a row whose incoming gradient is 0 adds nothing, whatever it holds
        idle = ~rows_with_gradient(dout, dlse).unsqueeze(-1)
        # a row whose incoming gradient is not finite gives NaN, but only to the keys that it sees
        q = q.masked_fill(~is_finite(dout).unsqueeze(-1), float("nan"))
        finite_q, finite_keys, dout = finite(q), finite(keys), finite(dout)
    rows_dout = dout.flatten(2, 3)
    weights = _hide(_scores(q, keys, tile).softmax(-1), hidden, idle)
    dv = torch.matmul(weights.flatten(2, 3).transpose(-1, -2), rows_dout)
    dweights = _hide(torch.matmul(rows_dout, values.transpose(-1, -2)).view_as(weights), hidden, idle)
    dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
    if dlse is not None:
        dscores += weights * dlse.unsqueeze(-1)
    dscores = _hide(dscores, hidden).flatten(2, 3)
    dq = torch.matmul(dscores, finite_keys).mul_(scale).view_as(q)
    dk = torch.matmul(dscores.transpose(-1, -2), finite_q.flatten(2, 3))
    return dq, dk, dv


def _scores(q: Tensor, keys: Tensor, tile: Tile) -> Tensor:
    """Return the scores `(X, G, R, M, K)` of scaled q `(X, G, R, M, D_k)`, -inf where hidden."""
    x, g, r, m, d = q.shape
    scores = torch.matmul(q.reshape(x, g, r * m, d), keys.transpose(-1, -2)).view(x, g, r, m, keys.shape[2])
    # fill, do not add a bias: so a hidden score stays hidden, however large it is
    scores.masked_fill_(~tile.visible.unsqueeze(-2), float("-inf"))
    if tile.sees is not None:
        # one finite score keeps NaN out of a row that sees nothing; the caller discards the row's weights
        scores[..., 0].masked_fill_(~tile.sees.unsqueeze(-1), 0.0)
    return scores


def _hide(x: Tensor, *masks: Tensor | None) -> Tensor:
    """Set x `(X, G, R, M, K)` to 0, in place, where one of `masks` is True, and return it."""
    for mask in masks:
        if mask is not None:
            x.masked_fill_(mask, 0.0)
    return x


def _is_call_ordinary(scale: float, queries: Queries, keys: Keys, *others: Tensor | None) -> bool:
    """Return True if the whole tensors are ordinary, so that every step is. Stores are not checked: a step may read only a small part of them."""
    q, k = queries.q, keys.k
    return k.shape[1] <= q.shape[1] and abs(scale) <= 1 and are_ordinary(q, k, *others)


def run_forward(queries: Queries, keys: Keys, tiles: Iterable[Tile], scale: float) -> tuple[Tensor, Tensor]:
    """Return out `(B, S, H, D_v)` and lse `(B, S, H)` of a branch cut into `tiles`. A row that is in no tile sees nothing."""
    q, k, v = queries.q, keys.k, keys.v
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(q.shape[:-1], float("-inf"), dtype=accumulator_dtype(q.dtype))
    is_ordinary = _is_call_ordinary(scale, queries, keys, v)
    for step in tiles:
        tile = step._replace(is_ordinary=is_ordinary)
        part, part_lse = attend(tile.take(q, k.shape[2]), k, v, tile, scale)
        tile.put(out, part)
        tile.put(lse, part_lse)
    return out, lse


def run_backward(
    grads: tuple[Tensor, Tensor | None], results: tuple[Tensor, Tensor], queries: Queries, keys: Keys, tiles: Iterable[Tile], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the shapes and dtypes of q, k, v. `grads` is dout and dlse, `results` out and lse; `tiles` are as in the forward pass."""
    (q, k, v), (dout, dlse), (out, lse) = (queries.q, keys.k, keys.v), grads, results
    acc, num_kv_heads = accumulator_dtype(q.dtype), k.shape[2]
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape, dtype=acc), v.new_zeros(v.shape, dtype=acc)
    is_ordinary = _is_call_ordinary(scale, queries, keys, v, dout, dlse)
    for step in tiles:
        tile = step._replace(is_ordinary=is_ordinary)
        part_dlse = None if dlse is None else tile.take(dlse, num_kv_heads)
        rows, part_dout, part_out, part_lse = (tile.take(x, num_kv_heads) for x in (q, dout, out, lse))
        part_dq, part_dk, part_dv = attend_backward(part_dout, part_dlse, part_out, part_lse, rows, k, v, tile, scale)
        tile.put(dq, part_dq)
        tile.keys.scatter_add(dk, part_dk)
        tile.keys.scatter_add(dv, part_dv)
    return dq, dk.to(k.dtype), dv.to(v.dtype)
