"""Launches of kernels whose CTAs form clusters, on torch's current stream."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nsa_kernels_cuda import jit
from nsa_kernels_cuda.launch import as_passed, stream_of

if TYPE_CHECKING:
    from cuda.core import Kernel

SHARED_BYTES = 227 * 1024
"""Shared memory that a CTA may have at compute capability 9.0."""


class ClusterLaunch(NamedTuple):
    """One launch of a kernel in clusters."""

    num_clusters: int
    num_ranks: int
    """CTAs of a cluster; above 8 a GPU may have no room for a cluster."""
    num_threads: int
    """Threads of a CTA."""
    shared_bytes: int
    """Dynamic shared memory of a CTA."""
    arguments: tuple[Tensor | int | None, ...]
    """Pointers, as tensors on the GPU or None for nullptr, and numbers of type int, in the kernel's order."""


def run(source: Path, kernel: str, launch: ClusterLaunch, device: torch.device) -> None:
    """Launch `kernel` of `source` on the current stream of `device`. The caller must keep the tensors, as for any op of torch.

    The kernel may start before the previous launch has ended (programmatic dependent launch), so it must itself wait for that end.

    Raises:
        KernelBuildError: if the kernel cannot be compiled or loaded.
    """
    from cuda.core import LaunchConfig
    from cuda.core import launch as launch_kernel

    # cuda.core before 1.2 has no such option
    pdl = {"programmatic_stream_serialization": True} if hasattr(LaunchConfig, "programmatic_stream_serialization") else {}
    assert device.index is not None
    with torch.cuda.device(device):
        loaded = _load(source, kernel, device.index)
        jit.make_context_current(device.index)
        # after that, because a cluster is checked against the current device
        config = LaunchConfig(
            grid=launch.num_clusters, cluster=launch.num_ranks, block=launch.num_threads, shmem_size=launch.shared_bytes, **pdl
        )
        launch_kernel(stream_of(torch.cuda.current_stream().cuda_stream), config, loaded, *as_passed(launch.arguments))


@cache
def why_no_cluster_fits(source: Path, kernel: str, num_ranks: int, num_threads: int, shared_bytes: int, device: int) -> str:
    """Return why GPU `device` has no room for one cluster of `num_ranks` CTAs of `kernel`; "" if it has room. The driver is queried once.

    A MIG slice may have no GPU processing cluster (GPC) with so many multiprocessors.
    """
    from cuda.bindings import driver

    config, cluster = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = num_ranks, 1, 1
    config.gridDimX, config.gridDimY, config.gridDimZ = num_ranks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = shared_bytes, [cluster], 1
    try:
        with torch.cuda.device(device):
            function = driver.CUfunction(int(_load(source, kernel, device).handle))
            # the driver answers for the current context
            jit.make_context_current(device)
            status, num_clusters = driver.cuOccupancyMaxActiveClusters(function, config)
    except jit.KernelBuildError as error:
        return str(error)
    if status == driver.CUresult.CUDA_SUCCESS and num_clusters:
        return ""
    answer = "the driver has room for none" if status == driver.CUresult.CUDA_SUCCESS else f"the driver says {status.name}"
    return (
        f"a cluster of {num_ranks} CTAs with {shared_bytes} bytes of shared memory each does not fit GPU {device} ({answer}); use 'triton'"
    )


@cache
def _load(source: Path, kernel: str, device: int) -> "Kernel":
    """Return `kernel`, which may then use SHARED_BYTES of shared memory on GPU `device`, and clusters of more than 8 CTAs."""
    from cuda.bindings import driver

    loaded = jit.load(source, kernel, device)
    attributes = driver.CUfunction_attribute
    for attribute, value in (
        (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, SHARED_BYTES),
        (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
    ):
        (status,) = driver.cuKernelSetAttribute(attribute, value, loaded.handle, driver.CUdevice(device))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise jit.KernelBuildError(f"the driver refuses {attribute.name}={value} of {kernel} ({status.name}); name another backend")
    return loaded
