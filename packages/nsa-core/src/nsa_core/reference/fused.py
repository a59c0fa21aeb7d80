"""torch's fused CPU attention that also yields lse, by feature test: the one file that calls it.

Public `scaled_dot_product_attention` returns no lse. The operator behind it on a CPU does, takes a mask, and holds no
scores, which makes short sequences about twice as fast as separate products.
"""

import torch
from torch import Tensor

_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def is_fusable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True where the operator exists and takes the tensors: float32 on a CPU, D_k = D_v."""
    exists = _FORWARD is not None and _BACKWARD is not None
    return exists and q.device.type == "cpu" and q.dtype == k.dtype == torch.float32 and q.shape[-1] == v.shape[-1]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return out `(X, G, R, D)` and lse `(X, G, R)` of q `(X, G, R, D)`, k, v `(X, G, K, D)` and an additive mask."""
    assert _FORWARD is not None
    out, lse = _FORWARD(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    return out, lse


def fused_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of `fused_attention` for the gradient of out alone."""
    assert _BACKWARD is not None
    dq, dk, dv = _BACKWARD(dout, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale)
    return dq, dk, dv
