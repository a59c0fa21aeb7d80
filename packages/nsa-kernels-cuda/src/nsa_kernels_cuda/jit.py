"""Compile CUDA C++ with NVRTC, through `cuda.core`, at first use. Compilation needs no CUDA toolkit, no nvcc and no GPU.

A *source* is a file of `csrc/`. Sources include only one another, and no header of the host or of a toolkit.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import torch

from nsa_core import NSAError
from nsa_kernels_cuda import cubin_cache

if TYPE_CHECKING:
    from cuda.core import Kernel, ObjectCode

CSRC = Path(__file__).parent / "csrc"
STANDARD = "c++17"
ARCHITECTURE_SPECIFIC = ((9, 0),)
"""Compute capabilities with instructions that no later GPU has. Kernels for them are compiled for `sm_90a`, not `sm_90`."""


class KernelBuildError(NSAError, RuntimeError):
    """Raised if a kernel cannot be compiled or loaded; the message says what to install or change."""


class Compiled(NamedTuple):
    """The machine code of a source for one architecture."""

    cubin: bytes
    not_stored: str = ""
    """Why the cache on disk does not hold the code; "" if it does."""


def architecture_of(capability: tuple[int, int]) -> str:
    """Return NVRTC's name of a compute capability: (8, 0) is "sm_80", (9, 0) is "sm_90a"."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if capability in ARCHITECTURE_SPECIFIC else ''}"


def compile_cached(source: Path, architecture: str, folder: Path | None = None) -> Compiled:
    """Return `source` compiled for `architecture`: from the cache in `folder`, else by NVRTC, which also stores it there.

    None means `cubin_cache.default_folder()`. If the folder cannot be written, no error is raised; the result holds the reason.

    Raises:
        KernelBuildError: if NVRTC is missing, or refuses the source or the architecture.
    """
    folder = cubin_cache.default_folder() if folder is None else folder
    key = key_of(source, architecture)
    cubin = cubin_cache.read(folder, key)
    if cubin is not None:
        return Compiled(cubin)
    cubin = run_nvrtc(source, architecture)
    try:
        cubin_cache.write(folder, key, cubin)
    except OSError as error:
        return Compiled(cubin, f"the cache {folder} cannot be written ({error.strerror}); every process compiles {source.name} again")
    return Compiled(cubin)


def key_of(source: Path, architecture: str) -> bytes:
    """Return the SHA-256 of the sources of the folder, the language standard, the architecture, and NVRTC's major and minor version."""
    digest = hashlib.sha256()
    for file in (source, *sorted(source.parent.glob("*.cuh"))):
        text = file.read_bytes()
        digest.update(f"{file.name} {len(text)}\n".encode() + text)
    digest.update("{} {} {}.{}".format(STANDARD, architecture, *nvrtc_version()).encode())
    return digest.digest()


def run_nvrtc(source: Path, architecture: str, report: TextIO | None = None) -> bytes:
    """Return the cubin that NVRTC compiles from `source`. `report` receives what ptxas prints about registers, spills and shared memory.

    Raises:
        KernelBuildError: if NVRTC is missing, or refuses the source or the architecture; the message includes the compiler's message.
    """
    version = nvrtc_version()
    from cuda.core import Program, ProgramOptions
    from cuda.core._utils.cuda_utils import CUDAError

    options = ProgramOptions(
        name=source.name,
        arch=architecture,
        std=STANDARD,
        include_path=str(source.parent),
        ptxas_options=None if report is None else ["-v"],
    )
    try:
        return bytes(Program(source.read_text(encoding="utf-8"), "c++", options).compile("cubin", logs=report).code)
    except CUDAError as error:
        found = "{}.{}".format(*version)
        raise KernelBuildError(
            f"NVRTC {found} does not compile {source.name} for {architecture}: {' '.join(str(error).split())}"
        ) from error


@cache
def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC, (major, minor).

    Raises:
        KernelBuildError: if cuda-core, cuda-bindings or NVRTC is missing.
    """
    try:
        import cuda.core  # noqa: F401 - it needs cuda-bindings
        from cuda.bindings import nvrtc
    # incompatible versions of the two packages may raise any exception
    except Exception as error:
        raise KernelBuildError(
            f"CUDA C++ is compiled through cuda-core and cuda-bindings, which do not import here ({error}); "
            "pip install --upgrade cuda-core 'cuda-bindings==13.*', or 12.* with torch for CUDA 12"
        ) from error
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise KernelBuildError(f"NVRTC is not found (kernels are compiled by it at first use); pip install {_nvrtc_package()}") from error
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    return major, minor


def _nvrtc_package() -> str:
    """Return the requirement of the NVRTC that the installed cuda-bindings load."""
    from importlib.metadata import version

    major = version("cuda-bindings").partition(".")[0]
    return f"nvidia-cuda-nvrtc-cu{major}" if int(major) < 13 else f"'nvidia-cuda-nvrtc=={major}.*'"


@cache
def driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver runs, (major, minor); None on a machine without a driver. Does not initialise CUDA."""
    from cuda.bindings import driver

    try:
        status, number = driver.cuDriverGetVersion()
    except RuntimeError:
        return None
    return (number // 1000, number % 1000 // 10) if status == driver.CUresult.CUDA_SUCCESS else None


@cache
def load(source: Path, kernel: str, device: int) -> "Kernel":
    """Return `kernel` of `source`, compiled for GPU `device` and loaded there.

    Raises:
        KernelBuildError: if the source cannot be compiled, or the driver refuses the kernel.
    """
    library = library_of(source, architecture_of(torch.cuda.get_device_capability(device)))
    from cuda.core._utils.cuda_utils import CUDAError

    try:
        with torch.cuda.device(device):
            make_context_current(device)
            found = library.get_kernel(kernel)
            # query an attribute, because the driver may load code only at the first query, and may not load it while a CUDA graph is captured
            registers = found.attributes.num_regs
            # num_regs is a method in cuda.core 0.x
            _ = registers() if callable(registers) else registers
    except (CUDAError, RuntimeError) as error:
        raise KernelBuildError(
            f"the driver (CUDA {_dotted(driver_version())}) does not load {source.name} of NVRTC {_dotted(nvrtc_version())}: {error}; "
            "update the driver, or install the NVRTC of its version"
        ) from error
    return found


@cache
def library_of(source: Path, architecture: str) -> "ObjectCode":
    """Return all kernels of `source`, compiled for `architecture`; the driver loads them once per process, at the first request for one.

    Raises:
        KernelBuildError: if the source cannot be compiled.
    """
    cubin = compile_cached(source, architecture).cubin
    from cuda.core import ObjectCode

    return ObjectCode.from_cubin(cubin, name=source.name)


def make_context_current(device: int) -> None:
    """Make the primary context of GPU `device` current for the driver; `device` is torch's current GPU.

    In a thread the first call of CUDA's runtime does this, but a new thread may not have made such a call.
    """
    from cuda.bindings import driver

    # the call fails without a context
    status, current = driver.cuCtxGetDevice()
    if status != driver.CUresult.CUDA_SUCCESS or int(current) != device:
        from cuda.core import Device

        Device(device).set_current()


def device_here(capability: tuple[int, int], index: int | None) -> int | None:
    """Return GPU `index` (None: the current one) if CUDA is initialised and the GPU has `capability`; else None."""
    if not torch.cuda.is_initialized():
        return None
    device = torch.cuda.current_device() if index is None else index
    is_here = device < torch.cuda.device_count() and torch.cuda.get_device_capability(device) == capability
    return device if is_here else None


def why_unavailable(source: Path, kernels: tuple[str, ...], capability: tuple[int, int], index: int | None = None) -> str:
    """Return why `kernels` cannot run on GPU `index` (None: the current one) of `capability`, and what to do; "" if they can.

    This compiles the kernels, so that routing knows the answer before a call. If CUDA is initialised and the GPU is present, the driver also
    loads them there, so that a CUDA graph can capture the first call of each.
    """
    return _why_unavailable(source, kernels, capability, device_here(capability, index))


@cache
def _why_unavailable(source: Path, kernels: tuple[str, ...], capability: tuple[int, int], device: int | None) -> str:
    try:
        newest = nvrtc_version()
        runs = driver_version()
        if runs is not None and runs[0] < newest[0]:
            return (
                f"the driver runs CUDA {_dotted(runs)} and NVRTC is of {_dotted(newest)} (its major version must not be newer); "
                f"update the driver, or install NVRTC {runs[0]}"
            )
        if device is None:
            compile_cached(source, architecture_of(capability))
        else:
            for kernel in kernels:
                load(source, kernel, device)
    except KernelBuildError as error:
        return str(error)
    return ""


def note_on_cache(source: Path, capability: tuple[int, int]) -> str:
    """Return why the cubin of `source` is not in the cache on disk; "" if it is. The source must compile."""
    return compile_cached(source, architecture_of(capability)).not_stored


def _dotted(version: Any) -> str:
    return "none" if version is None else "{}.{}".format(*version)
