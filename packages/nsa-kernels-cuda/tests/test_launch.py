"""The arguments that a launch passes to cuda.core, without a GPU."""

from contextlib import nullcontext
from ctypes import c_int
from types import SimpleNamespace

import pytest
import torch

from nsa_kernels_cuda import cluster_launch, jit, launch

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


@pytest.mark.parametrize(
    ("held", "made"), [(None, [1]), (0, [1]), (1, [])], ids=["a new thread", "the context of another GPU", "that of the GPU"]
)
def test_the_context_of_the_gpu_is_made_current_where_it_is_not(held, made, monkeypatch):
    found = []
    device = lambda index: SimpleNamespace(set_current=lambda: found.append(index))  # noqa: E731
    monkeypatch.setattr(core, "Device", device)
    statuses = driver.CUresult
    answer = (statuses.CUDA_ERROR_INVALID_CONTEXT, None) if held is None else (statuses.CUDA_SUCCESS, driver.CUdevice(held))
    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: answer)
    jit.make_context_current(1)
    assert found == made


@pytest.fixture
def asked(monkeypatch):
    """Return what reaches the driver's question for room, as (function, config), and the answers that it gives."""
    found, answers = [], []
    monkeypatch.setattr(cluster_launch, "_load", lambda source, kernel, device: SimpleNamespace(handle=4096))
    monkeypatch.setattr(jit, "make_context_current", lambda device: None)
    monkeypatch.setattr("torch.cuda.device", nullcontext)
    monkeypatch.setattr(driver, "cuOccupancyMaxActiveClusters", lambda *question: found.append(question) or answers.pop(0))
    cluster_launch.why_no_cluster_fits.cache_clear()
    yield found, answers
    cluster_launch.why_no_cluster_fits.cache_clear()


def why_no_cluster_fits(num_ranks=16, device=0):
    return cluster_launch.why_no_cluster_fits(jit.CSRC / "decode.cu", "decode_bfloat16_128", num_ranks, 256, 200_000, device)


def test_the_driver_is_asked_for_room_once_for_a_configuration_and_gpu(asked):
    found, answers = asked
    answers += [(driver.CUresult.CUDA_SUCCESS, 8)] * 3
    assert [why_no_cluster_fits(), why_no_cluster_fits(), why_no_cluster_fits(8), why_no_cluster_fits(device=1)] == [""] * 4
    assert len(found) == 3
    [(function, config), *_] = found
    assert int(function) == 4096
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes, config.numAttrs) == (16, 256, 200_000, 1)
    [cluster] = config.attrs
    assert cluster.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert (cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z) == (16, 1, 1)


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        ("CUDA_SUCCESS", "the driver has room for none"),
        ("CUDA_ERROR_INVALID_CLUSTER_SIZE", "the driver says CUDA_ERROR_INVALID_CLUSTER_SIZE"),
    ],
)
def test_a_cluster_without_room_is_a_sentence(asked, status, answer):
    asked[1].append((getattr(driver.CUresult, status), 0))
    assert why_no_cluster_fits() == (
        f"a cluster of 16 CTAs with 200000 bytes of shared memory each does not fit GPU 0 ({answer}); use 'triton'"
    )
