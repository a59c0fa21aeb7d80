"""AdamW, its learning rate, and gradient clipping."""

import math

import torch
from torch import Tensor, nn

from nsa_train.parallel.world import local_part, whole
from nsa_train.settings.config import TrainTable

FINAL_LR_SHARE = 0.1
"""The cosine ends at this share of the peak."""
BETAS = (0.9, 0.95)
FUSED_DEVICES = ("cpu", "cuda")
"""Device types on which one kernel does the whole update."""


def build_optimizer(model: nn.Module, train: TrainTable) -> torch.optim.AdamW:
    """Return AdamW over two groups: matrices decay; norms, biases, vectors and embeddings do not."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    others = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    is_fused = all(p.device.type in FUSED_DEVICES for p in trained)
    return torch.optim.AdamW(groups, lr=train.lr, betas=BETAS, fused=is_fused)


def learning_rate(step: int, train: TrainTable) -> float:
    """Return the rate of optimizer step `step` (from 1): linear warm-up to `lr`, then a cosine to a tenth at `steps`."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    progress = (step - train.warmup_steps) / (train.steps - train.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return train.lr * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def gradient_norm(model: nn.Module) -> Tensor:
    """Return the global Euclidean norm of all gradients of `model`, a scalar; with shards, a collective."""
    return whole(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def clip_gradients(model: nn.Module, norm: float, largest: float) -> None:
    """Scale the gradients of `model`, whose global norm is `norm`, down to a norm of `largest`; smaller ones stay."""
    if norm > largest:
        gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, largest / norm)


def leave_out(scaler: torch.amp.GradScaler, scale: float, *, is_finite: bool) -> None:
    """Set the `scale` of `scaler` after a skipped step, on every rank alike.

    Unless the step's gradient `is_finite`, the count of steps without an overflow restarts, as in `GradScaler.update()`, which
    only checks this rank's shards.
    """
    if not is_finite:
        scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 0})
    scaler.update(scale)
