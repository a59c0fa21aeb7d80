"""What a launch hands to cuda.core, without a GPU."""

from contextlib import nullcontext
from ctypes import c_int
from types import SimpleNamespace

import pytest
import torch

from nsa_kernels_cuda import jit, launch

core = pytest.importorskip("cuda.core")
driver = pytest.importorskip("cuda.bindings.driver")


@pytest.fixture
def launched(monkeypatch):
    """Return the launches that reach cuda.core, as (stream, config, kernel, *arguments)."""
    found = []
    monkeypatch.setattr(core, "launch", lambda *arguments: found.append(arguments))
    monkeypatch.setattr(jit, "load", lambda source, kernel, device: (kernel, device))
    monkeypatch.setattr(jit, "make_context_current", lambda device: None)
    monkeypatch.setattr("torch.cuda.device", nullcontext)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=4096))
    launch.stream_of.cache_clear()
    yield found
    launch.stream_of.cache_clear()


def run(*arguments):
    given = launch.Launch(grid=(5, 3), num_threads=128, shared_bytes=4096, arguments=arguments)
    launch.run(jit.CSRC / "choose.cu", "choose_float32", given, torch.device("cuda", 1))


def test_a_stream_is_cuda_cores_own_which_it_takes_without_a_warning(launched):
    run()
    run()
    [(first, *_), (second, *_)] = launched
    assert isinstance(first, core.Stream)
    assert int(first.handle) == 4096
    # one is made for each stream of torch, not for each launch
    assert second is first


def test_tensors_are_addresses_numbers_ints_and_none_a_null_pointer(launched):
    x = torch.empty(3)
    run(x, None, -7)
    [(_, config, kernel, address, null, number)] = launched
    assert (config.grid, config.block, config.shmem_size) == ((5, 3, 1), (128, 1, 1), 4096)
    assert kernel == ("choose_float32", 1)
    assert (address, null) == (x.data_ptr(), 0)
    assert isinstance(number, c_int)
    assert number.value == -7


@pytest.mark.parametrize(("held", "made"), [(0, [1]), (4096, [])], ids=["a new thread", "a thread that has called CUDA"])
def test_the_context_is_made_current_where_a_thread_has_none(held, made, monkeypatch):
    found = []
    device = lambda index: SimpleNamespace(set_current=lambda: found.append(index))  # noqa: E731
    monkeypatch.setattr(core, "Device", device)
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (driver.CUresult.CUDA_SUCCESS, driver.CUcontext(held)))
    jit.make_context_current(1)
    assert found == made
