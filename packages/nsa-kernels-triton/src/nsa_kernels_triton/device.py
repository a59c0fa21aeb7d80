"""Properties of a tensor's GPU, and of GPUs that are not present. Imports no triton."""

from functools import cache

import torch
from torch import Tensor

OLDEST = (8, 0)
"""The design target, A100."""
KIB = 1024
SHARED_MEMORY_BYTES = {
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 7): 163 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (10, 1): 227 * KIB,
    (10, 3): 227 * KIB,
    (11, 0): 227 * KIB,
    (12, 0): 99 * KIB,
    (12, 1): 99 * KIB,
}
"""Shared memory that one program may use, by compute capability (CUDA programming guide)."""
SMALLEST = 99 * KIB


def shared_memory_bytes(capability: tuple[int, int]) -> int:
    """Return the shared memory that one program may use on a GPU of `capability`; for an unknown capability, the smallest known size."""
    return SHARED_MEMORY_BYTES.get(capability, SMALLEST)


def num_multiprocessors(x: Tensor) -> int:
    """Return the number of multiprocessors of x's device; 1 without a GPU."""
    return _properties(x.device)[1] if x.is_cuda else 1


def capability_of(x: Tensor) -> tuple[int, int] | None:
    """Return the compute capability of x's device; None without a GPU, where the interpreter runs."""
    return _properties(x.device)[0] if x.is_cuda else None


@cache
def _properties(device: torch.device) -> tuple[tuple[int, int], int]:
    """Return the compute capability and the number of multiprocessors; cached, because torch takes microseconds for each."""
    found = torch.cuda.get_device_properties(device)
    return (found.major, found.minor), found.multi_processor_count
