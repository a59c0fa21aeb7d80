"""Detect sharded tensors without loading their module, which takes a second and which only FSDP needs."""

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return True for a DTensor. If its module is not loaded, there are none."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor in full, gathered by all ranks together, or the tensor itself."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
