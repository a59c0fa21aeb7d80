"""Activation checkpointing: the backward pass recomputes results instead of keeping them."""

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
"""Matrix products and attention of torch: selective recomputation keeps their results."""


def keeping_inputs(layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return `layer(*inputs)`; only the inputs are kept for the backward pass.

    The state of the random generators is not kept, because a layer draws no random numbers.
    """
    result: Tensor = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result


def keeping_products(layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return `layer(*inputs)`; inputs and the results of matrix products and attention are kept. See `keeping_inputs`."""
    result: Tensor = checkpoint(layer, *inputs, context_fn=_selective_contexts, use_reentrant=False, preserve_rng_state=False)
    return result


RECOMPUTATIONS = {"none": None, "full": keeping_inputs, "selective": keeping_products}
"""Value of `train.activation_checkpointing` -> the function that runs a layer."""


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_kept)


def _kept(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # operations outside torch's own namespaces are attention kernels
    is_kept = operation in PRODUCTS or operation.namespace not in ("aten", "prims", "prim")
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
