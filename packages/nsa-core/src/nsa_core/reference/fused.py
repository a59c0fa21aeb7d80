"""torch's fused CPU attention, which also returns lse. No other file calls it; `is_fusable` tests if this version of torch has it.

The public function `scaled_dot_product_attention` returns no lse. The private operator that it calls on a CPU does. That operator takes a mask
and stores no scores, so short sequences are about twice as fast as with separate products. It adds the mask to the scores as a bias, so
the caller must keep all numbers finite and the size of scores far below that of `HIDDEN`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


HIDDEN = torch.finfo(torch.float32).min / 4
"""Bias that is added to a hidden score. It is far below every score, and finite, so that a row of hidden scores stays finite."""


LARGEST_SCALE = 2.0**30
"""Largest scale for which the scores of ordinary queries and keys stay far from `HIDDEN`."""


def is_fusable(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Return True if the operator exists and supports the call: float32 tensors on a CPU, D_k = D_v, and no huge scale."""
    exists = _FORWARD is not None and _BACKWARD is not None and abs(scale) <= LARGEST_SCALE
    return exists and q.device.type == "cpu" and q.dtype == k.dtype == torch.float32 and q.shape[-1] == v.shape[-1]


VECTOR = 16
"""Number of keys whose exponentials the operator computes at once; it computes the rest one by one, several times slower."""


def fused_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return out `(X, G, R, M, D)` and lse `(X, G, R, M)` of q `(X, G, R, M, D)` over k, v `(X, G, K, D)`.

    `visible` is bool `(X, G, R, K)`; X and G may be 1. It is the same for all M heads, which run one by one, so that it is never repeated.
    """
    assert _FORWARD is not None
    bias = _bias(visible)
    q, k, v = _with_rows_in_place(q, k, v)
    by_head, (k, v, bias) = _by_head(q), _whole_vectors(q, k, v, bias)
    parts = [_FORWARD(head, k, v, 0.0, False, attn_mask=bias, scale=scale) for (head,) in by_head]
    return _joined([out for out, _ in parts], q), _joined([lse for _, lse in parts], q)


def fused_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of `fused_attention`; lse has no gradient here."""
    assert _BACKWARD is not None
    bias = _bias(visible)
    q, k, v = _with_rows_in_place(q, k, v)
    by_head, num_keys = _by_head(dout, q, out, lse), k.shape[2]
    k, v, bias = _whole_vectors(q, k, v, bias)
    parts = [
        _BACKWARD(head_dout, head_q, k, v, head_out, head_lse, 0.0, False, attn_mask=bias, scale=scale)
        for head_dout, head_q, head_out, head_lse in by_head
    ]
    dqs, dks, dvs = zip(*parts, strict=True)
    dk, dv = (sum(heads[1:], heads[0])[:, :, :num_keys] for heads in (dks, dvs))
    return _joined(dqs, q), dk, dv


def _bias(visible: Tensor) -> Tensor:
    """Return the bias of float32 scores: 0 where visible, elsewhere `HIDDEN`."""
    shown = torch.zeros((), dtype=torch.float32, device=visible.device)
    return torch.where(visible, shown, HIDDEN)


def _with_rows_in_place(*tensors: Tensor) -> list[Tensor]:
    """Return `tensors` `(..., D)` with contiguous rows, which the operator assumes."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _by_head(*rows: Tensor) -> list[tuple[Tensor, ...]]:
    """Return `rows` `(X, G, R, M, ...)` head by head as `(X, G, R, ...)`. If R = 1, the M heads become rows, so that one call serves all."""
    if rows[0].shape[2] == 1:
        return [tuple(x.squeeze(2) for x in rows)]
    return list(zip(*(x.unbind(3) for x in rows), strict=True))


def _whole_vectors(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return k, v, bias for the calls of `_by_head`; hidden keys pad the keys to a multiple of VECTOR, except if R = 1."""
    num_rows, surplus = q.shape[2], -k.shape[2] % VECTOR
    if num_rows == 1:
        return k, v, bias.expand(-1, -1, q.shape[3], -1)
    if not surplus:
        return k, v, bias
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, surplus)) for x in (k, v))
    return k, v, torch.nn.functional.pad(bias, (0, surplus), value=HIDDEN)


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return `parts`, one for each entry of `_by_head`, joined to `(X, G, R, M, ...)`; `like` is q."""
    return parts[0].unsqueeze(2) if like.shape[2] == 1 else torch.stack(list(parts), 3)
