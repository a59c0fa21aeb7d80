"""torch's fused CPU attention that also yields lse, by feature test: the one file that calls it.

Public `scaled_dot_product_attention` returns no lse. The operator behind it on a CPU does, takes a mask, and holds no
scores, so short sequences are about twice as fast as with separate products. Its mask is a bias: the caller keeps scores
far below `HIDDEN`, and everything finite.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


HIDDEN = torch.finfo(torch.float32).min / 4
"""Added to a score that must not count: far below every score, and finite, so that a row of them stays finite."""


LARGEST_SCALE = 2.0**30
"""Up to this scale ordinary queries and keys make scores that stay away from `HIDDEN`."""


def is_fusable(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Return True if the operator exists and takes the tensors: float32 on a CPU, D_k = D_v, and no huge scale."""
    exists = _FORWARD is not None and _BACKWARD is not None and abs(scale) <= LARGEST_SCALE
    return exists and q.device.type == "cpu" and q.dtype == k.dtype == torch.float32 and q.shape[-1] == v.shape[-1]


VECTOR = 16
"""Keys whose exponentials the operator takes at once; it processes the rest one by one, several times slower."""


def fused_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return out `(X, G, R, M, D)` and lse `(X, G, R, M)` of q `(X, G, R, M, D)` over k, v `(X, G, K, D)`.

    `visible`, bool `(X, G, R, K)`, or 1 for X and G, serves all M heads, which run one by one, so that it is never repeated.
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
    """Return dq, dk, dv of `fused_attention` for the gradient of out only."""
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
    """Return `rows` `(X, G, R, M, ...)` head by head as `(X, G, R, ...)`; the heads of a single row become rows, in one call."""
    if rows[0].shape[2] == 1:
        return [tuple(x.squeeze(2) for x in rows)]
    return list(zip(*(x.unbind(3) for x in rows), strict=True))


def _whole_vectors(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return k, v, bias for the calls of `_by_head`, the keys padded to whole vectors with hidden ones."""
    num_rows, surplus = q.shape[2], -k.shape[2] % VECTOR
    if num_rows == 1:
        return k, v, bias.expand(-1, -1, q.shape[3], -1)
    if not surplus:
        return k, v, bias
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, surplus)) for x in (k, v))
    return k, v, torch.nn.functional.pad(bias, (0, surplus), value=HIDDEN)


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the parts from `_by_head` joined to `(X, G, R, M, ...)`, in the layout of q `like`."""
    return parts[0].unsqueeze(2) if like.shape[2] == 1 else torch.stack(list(parts), 3)
