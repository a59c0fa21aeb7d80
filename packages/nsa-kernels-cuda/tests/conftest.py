"""NVRTC if it is installed, and kernels in the host emulator."""

import ctypes
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from nsa_kernels_cuda import jit

HERE = Path(__file__).parent


@pytest.fixture
def nvrtc():
    """Skip a test that compiles for GPUs if NVRTC is missing."""
    try:
        return jit.nvrtc_version()
    except jit.KernelBuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def fresh_jit():
    """Let `jit` look again for NVRTC, the driver and kernels, and forget afterwards what a test made it find."""
    remembered = (jit.nvrtc_version, jit.driver_version, jit.load, jit.library_of, jit._why_unavailable)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


@pytest.fixture(scope="session")
def emulated_choose(tmp_path_factory):
    """Give the library of `emulated_choose.cpp`."""
    return build("emulated_choose", tmp_path_factory)


@pytest.fixture(scope="session")
def emulated_decode(tmp_path_factory):
    """Give the library of `emulated_decode.cpp`."""
    return build("emulated_decode", tmp_path_factory)


@pytest.fixture(scope="session")
def build_watched(tmp_path_factory):
    """Give a function from a folder of kernels to the library of `emulated_decode.cpp` that also finds hazards."""
    return partial(build, "emulated_decode", tmp_path_factory, finds_hazards=True)


@pytest.fixture(scope="session")
def watched_decode(build_watched):
    """Give the library that finds hazards: accesses to shared memory that no barrier orders."""
    return build_watched(csrc=jit.CSRC)


def build(name, tmp_path_factory, *, finds_hazards=False, csrc=jit.CSRC):
    """Return the library of a source that runs the kernels of `csrc` in the emulator."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed; it compiles the emulator of a warp")
    folder = tmp_path_factory.mktemp("emulator")
    # what _FORTIFY_SOURCE puts in place of longjmp, a default of some compilers, refuses a jump to another stack
    options = ["-std=c++20", "-O2", "-U_FORTIFY_SOURCE", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-fPIC", "-I", str(csrc)]
    # the compiler calls functions of warp_hazards.cpp at each access; the sanitizer's own library is not linked
    watching = ["-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"] if finds_hazards else []
    parts = {name: [*watching, "-include", "warp_emulator.h"], **({"warp_hazards": []} if finds_hazards else {})}
    for part, more in parts.items():
        subprocess.run([compiler, *options, *more, "-c", f"{part}.cpp", "-o", str(folder / f"{part}.o")], cwd=HERE, check=True)
    # if both objects define a function, the linker takes the first
    objects = [str(folder / f"{part}.o") for part in reversed(parts)]
    subprocess.run([compiler, "-shared", *objects, "-o", str(folder / f"{name}.so")], check=True)
    return ctypes.CDLL(str(folder / f"{name}.so"))
