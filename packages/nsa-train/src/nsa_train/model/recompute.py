"""Activation checkpointing: the backward pass recomputes results instead of keeping them."""

from collections.abc import Callable
from functools import partial
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


def _kept(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # operations outside torch's own namespaces are attention kernels
    is_kept = operation in PRODUCTS or operation.namespace not in ("aten", "prims", "prim")
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


_checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""A layer draws no random numbers, so the state of the generators is not kept."""
RECOMPUTATIONS: dict[str, Callable[..., Tensor] | None] = {
    "none": None,
    "full": _checkpointed,
    "selective": partial(_checkpointed, context_fn=partial(create_selective_checkpoint_contexts, _kept)),
}
"""Value of `train.activation_checkpointing` -> the function that runs a layer: "full" keeps its inputs for the backward pass, "selective" also
the results of matrix products and attention."""
