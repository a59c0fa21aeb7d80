"""Cross-entropy of the output layer, whole or a few tokens at a time, so that the logits of a long row are never all in memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_train.data.packing import IGNORED

ChunkKernel = Callable[[Tensor, Tensor, torch.dtype, bool], tuple[Tensor, Tensor]]


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy in nats of `logits` `(B, S, V)` summed over the `labels` `(B, S)` that exist, in at least float32."""
    flat = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def summed_loss_in_chunks(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int, kernel: ChunkKernel | None = None) -> Tensor:
    """Return `summed_loss` of the logits `hidden` `(B, S, D)` x `weight` `(V, D)`, computed `chunk_size` tokens at a time.

    The forward pass also computes both gradients, so that the backward pass needs no logits. Sums are float32, products have
    autocast's dtype. `kernel`: a compiled `loss_and_gradient`.
    """
    flat = hidden.flatten(0, -2)
    apply: Callable[..., Tensor] = _ChunkedLoss.apply
    # inside of `forward` gradients are always off
    return apply(flat, weight, labels.flatten(), chunk_size, kernel or loss_and_gradient, torch.is_grad_enabled())


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int, kernel: ChunkKernel, is_grad_enabled: bool
    ) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        wide = torch.promote_types(weight.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        matrix, hidden_grad = weight.to(dtype), torch.empty_like(hidden) if needs_grad else None
        weight_grad = torch.zeros_like(weight, dtype=wide) if needs_grad else None
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(hidden), chunk_size):
                rows = slice(start, start + chunk_size)
                part = hidden[rows].to(dtype)
                chunk_loss, logit_grad = kernel(part @ matrix.T, labels[rows], wide, needs_grad)
                loss += chunk_loss
                if hidden_grad is not None and weight_grad is not None:
                    hidden_grad[rows] = (logit_grad @ matrix).to(hidden.dtype)
                    weight_grad += logit_grad.T @ part
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(hidden_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        [factor] = grad_outputs
        hidden_grad, weight_grad = ctx.saved_tensors
        return (hidden_grad * factor).to(hidden_grad.dtype), (weight_grad * factor).to(ctx.weight_dtype), None, None, None, None


def loss_and_gradient(logits: Tensor, labels: Tensor, wide: torch.dtype, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """Return the summed loss of `logits` `(N, V)` and its gradient in their dtype (softmax minus one-hot), 0 if a label is absent."""
    counts = labels != IGNORED
    targets = torch.where(counts, labels, 0).unsqueeze(1)
    logs = logits.to(wide).log_softmax(-1)
    picked = logs.gather(1, targets).squeeze(1)
    loss = -torch.where(counts, picked, 0).sum()
    if not needs_grad:
        return loss, logits
    # a comparison, because it takes one pass when compiled and is deterministic, unlike a scatter
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets
    return loss, torch.where(counts.unsqueeze(1), logs.exp() - is_target.to(wide), 0).to(logits.dtype)
