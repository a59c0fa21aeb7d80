"""Activation checkpointing: what the backward pass computes again instead of keeping it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""The operations of torch whose results are dear enough to keep."""


def keeping_inputs(layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return `layer(*inputs)`, of which its inputs alone are kept. A layer draws no random numbers, so none are replayed."""
    result: Tensor = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result


def keeping_products(layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return `layer(*inputs)`, of which its inputs, products and attention are kept; see `keeping_inputs`."""
    result: Tensor = checkpoint(layer, *inputs, context_fn=_selective_contexts, use_reentrant=False, preserve_rng_state=False)
    return result


RECOMPUTATIONS = {"none": None, "full": keeping_inputs, "selective": keeping_products}
"""By the names that `train.activation_checkpointing` allows."""


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_kept)


def _kept(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # operations from elsewhere than torch are attention kernels
    is_kept = operation in PRODUCTS or operation.namespace not in ("aten", "prims", "prim")
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
