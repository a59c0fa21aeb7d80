"""Launches of compiled kernels on torch's current stream, so that CUDA graphs capture them."""

from ctypes import c_int
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_kernels_cuda import jit


class Launch(NamedTuple):
    """One launch of a kernel."""

    grid: tuple[int, int]
    """Blocks along x and y."""
    num_threads: int
    """Threads of a block."""
    shared_bytes: int
    """Dynamic shared memory of a block."""
    arguments: tuple[Tensor | int | None, ...]
    """Pointers, as tensors on the GPU or None for nullptr, and numbers of type int, in the kernel's order."""


class CurrentStream:
    """Torch's current stream, by the protocol with which `cuda.core` takes streams of other libraries."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol and the handle of the stream."""
        return 0, torch.cuda.current_stream().cuda_stream


def run(source: Path, kernel: str, launch: Launch, device: torch.device) -> None:
    """Launch `kernel` of `source` on the current stream of `device`; the caller keeps the tensors, as for any op of torch.

    Raises:
        KernelBuildError: where the kernel cannot be compiled or loaded.
    """
    from cuda.core import LaunchConfig
    from cuda.core import launch as launch_kernel

    loaded = jit.load(source, kernel, jit.architecture_of(torch.cuda.get_device_capability(device)))
    config = LaunchConfig(grid=launch.grid, block=launch.num_threads, shmem_size=launch.shared_bytes)
    arguments = [c_int(x) if isinstance(x, int) else 0 if x is None else x.data_ptr() for x in launch.arguments]
    with torch.cuda.device(device):
        launch_kernel(CurrentStream(), config, loaded, *arguments)
