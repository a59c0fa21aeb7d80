"""NVRTC where it is installed, and kernels on the host."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from nsa_kernels_cuda import jit

HERE = Path(__file__).parent


@pytest.fixture
def nvrtc():
    """Skip a test that compiles for GPUs where nothing can."""
    try:
        return jit.nvrtc_version()
    except jit.KernelBuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def fresh_jit():
    """Let `jit` look anew for NVRTC, the driver and kernels, and forget afterwards what a test made it find."""
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


def build(name, tmp_path_factory):
    """Return the library of a source that runs kernels in the emulator."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed; it compiles the emulator of a warp")
    library = tmp_path_factory.mktemp("emulator") / f"{name}.so"
    options = ["-std=c++20", "-O2", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC", "-include", "warp_emulator.h"]
    subprocess.run([compiler, *options, "-I", str(jit.CSRC), f"{name}.cpp", "-o", str(library)], cwd=HERE, check=True)
    return ctypes.CDLL(str(library))
