"""Launches of compiled kernels on torch's current stream, so that CUDA graphs capture them."""

from ctypes import c_int
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nsa_kernels_cuda import jit

if TYPE_CHECKING:
    from cuda.core import Stream


class Launch(NamedTuple):
    """One launch of a kernel."""

    grid: tuple[int, int]
    """CTAs along x and y."""
    num_threads: int
    """Threads of a CTA."""
    shared_bytes: int
    """Dynamic shared memory of a CTA."""
    arguments: tuple[Tensor | int | None, ...]
    """Pointers, as tensors on the GPU or None for nullptr, and numbers of type int, in the kernel's order."""


def run(source: Path, kernel: str, launch: Launch, device: torch.device) -> None:
    """Launch `kernel` of `source` on the current stream of `device`. The caller must keep the tensors, as for any op of torch.

    Raises:
        KernelBuildError: if the kernel cannot be compiled or loaded.
    """
    from cuda.core import LaunchConfig
    from cuda.core import launch as launch_kernel

    assert device.index is not None
    loaded = jit.load(source, kernel, device.index)
    config = LaunchConfig(grid=launch.grid, block=launch.num_threads, shmem_size=launch.shared_bytes)
    with torch.cuda.device(device):
        jit.make_context_current(device.index)
        launch_kernel(stream_of(torch.cuda.current_stream().cuda_stream), config, loaded, *as_passed(launch.arguments))


def as_passed(arguments: tuple[Tensor | int | None, ...]) -> list[c_int | int]:
    """Return the arguments that `cuda.core` passes to a kernel: addresses (0 for None) and 32-bit ints."""
    return [c_int(x) if isinstance(x, int) else 0 if x is None else x.data_ptr() for x in arguments]


@lru_cache(maxsize=256)
def stream_of(handle: int) -> "Stream":
    """Return a `cuda.core` stream for the handle of a torch stream. Torch still owns the stream; the wrapper is created once per handle."""
    from cuda.core import Stream

    return Stream.from_handle(handle)
