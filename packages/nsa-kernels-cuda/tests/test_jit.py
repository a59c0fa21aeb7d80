"""Compiling by NVRTC, without a GPU: caching, failures, and their reasons in routing."""

import subprocess
import sys
from contextlib import nullcontext
from io import StringIO
from types import SimpleNamespace

import pytest
import torch

from nsa_core import BackendRegistry, BranchRequest, Operation
from nsa_core.reference.sdpa import SDPABackend
from nsa_kernels_cuda import cubin_cache, jit
from nsa_kernels_cuda.choice import op
from nsa_kernels_cuda.plugin import CudaChoice

KERNEL = '#include "twice.cuh"\nextern "C" __global__ void scale(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]); }\n'
HEADER = "__device__ inline float twice(float x) { return 2.0f * x; }\n"
COMPILE = """
import sys
from pathlib import Path
from nsa_kernels_cuda import jit
source, folder = map(Path, sys.argv[1:])
print(len(jit.compile_cached(source, "sm_80", folder).cubin))
"""
REQUEST = BranchRequest(operation="choose", device_type="cuda", compute_capability=(9, 0))

pytestmark = pytest.mark.usefixtures("fresh_jit")


@pytest.fixture
def source(tmp_path):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "twice.cuh").write_text(HEADER)
    path = tmp_path / "csrc" / "scale.cu"
    path.write_text(KERNEL)
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def no_compiler(monkeypatch):
    def fail(*_):
        raise AssertionError("compiled, although the cache holds it")

    monkeypatch.setattr(jit, "run_nvrtc", fail)


def put_gpu(monkeypatch):
    """Let torch say that CUDA has started on a GPU 1 of compute capability 9.0."""
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.device", nullcontext)


def chosen(request=REQUEST):
    """Return the decision between the kernel, which is preferred, and the reference."""
    return BackendRegistry((CudaChoice(), SDPABackend(operation=Operation.CHOOSE))).explain(request)


def test_the_second_call_reads_the_cache(nvrtc, source, folder, request):
    first = jit.compile_cached(source, "sm_80", folder)
    request.getfixturevalue("no_compiler")
    assert jit.compile_cached(source, "sm_80", folder) == first
    assert first.cubin.startswith(b"\x7fELF")
    assert first.not_stored == ""


@pytest.mark.parametrize("change", ["source", "header", "architecture", "options", "version"])
def test_the_key_changes_with_all_that_the_cubin_depends_on(nvrtc, source, change, monkeypatch):
    before, architecture = jit.key_of(source, "sm_80"), "sm_80"
    if change == "source":
        source.write_text(KERNEL + "\n")
    elif change == "header":
        (source.parent / "twice.cuh").write_text(HEADER.replace("2.0f", "3.0f"))
    elif change == "architecture":
        architecture = "sm_90a"
    elif change == "options":
        monkeypatch.setattr(jit, "STANDARD", "c++20")
    else:
        monkeypatch.setattr(jit, "nvrtc_version", lambda: (99, 0))
    assert jit.key_of(source, architecture) != before


def test_a_damaged_entry_is_compiled_anew_and_replaced(nvrtc, source, folder):
    cubin = jit.compile_cached(source, "sm_80", folder).cubin
    [entry] = folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-100])
    assert jit.compile_cached(source, "sm_80", folder).cubin == cubin
    assert cubin_cache.read(folder, jit.key_of(source, "sm_80")) == cubin


def test_processes_that_compile_at_once_all_succeed(nvrtc, source, folder):
    command = [sys.executable, "-c", COMPILE, str(source), str(folder)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    sizes = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sizes == {f"{len(jit.compile_cached(source, 'sm_80', folder).cubin)}\n"}
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]


def test_a_process_killed_while_it_writes_does_no_harm(nvrtc, source, folder):
    kill = "import os\nfrom pathlib import Path\nPath.replace = lambda *_: os._exit(9)\n"
    done = subprocess.run([sys.executable, "-c", kill + COMPILE, str(source), str(folder)], check=False)
    assert done.returncode == 9
    assert [path.suffix for path in folder.iterdir()] == [".tmp"]
    assert jit.compile_cached(source, "sm_80", folder).not_stored == ""


def test_a_folder_that_cannot_be_written_is_noted_and_no_error(nvrtc, source, tmp_path):
    # a file instead: permissions would not stop the superuser
    (tmp_path / "cache").write_text("")
    found = jit.compile_cached(source, "sm_80", tmp_path / "cache")
    assert found.cubin.startswith(b"\x7fELF")
    assert "cannot be written" in found.not_stored
    assert "every process compiles scale.cu again" in found.not_stored


def test_routing_notes_a_folder_that_cannot_be_written(nvrtc, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("")
    monkeypatch.setattr(cubin_cache, "default_folder", lambda: tmp_path / "cache")
    decision = chosen()
    assert decision.chosen == "cuda"
    assert "cannot be written" in decision.candidates[0].notes[0]


def test_an_error_in_a_source_is_the_compilers(nvrtc, source):
    source.write_text(KERNEL.replace("twice(x", "thrice(x"))
    with pytest.raises(jit.KernelBuildError, match=r"does not compile scale.cu for sm_80: .*identifier .thrice. is undefined"):
        jit.run_nvrtc(source, "sm_80")


def test_the_report_holds_what_ptxas_says(nvrtc, source):
    report = StringIO()
    jit.run_nvrtc(source, "sm_90a", report)
    assert "registers" in report.getvalue()


def test_an_architecture_that_nvrtc_does_not_know_is_a_reason(nvrtc):
    decision = chosen(BranchRequest(operation="choose", device_type="cuda", compute_capability=(99, 0)))
    assert decision.chosen == "sdpa"
    assert "does not compile choose.cu for sm_990" in str(decision)


class BrokenImport:
    """Raises for `cuda.core` what a version raises that does not fit cuda-bindings."""

    def find_spec(self, name, path=None, target=None):
        if name == "cuda.core":
            raise AttributeError("module 'cuda.bindings' has no attribute 'x'")


def test_a_package_whose_import_fails_in_another_way_is_a_reason_too(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("cuda.core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [BrokenImport(), *sys.meta_path])
    decision = chosen()
    assert decision.chosen == "sdpa"
    assert "do not import here (module 'cuda.bindings' has no attribute 'x')" in str(decision)


@pytest.mark.parametrize("name", ["cuda.core", "cuda.bindings"])
def test_a_missing_package_is_a_reason_with_its_fix(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    decision = chosen()
    assert decision.chosen == "sdpa"
    assert "pip install --upgrade cuda-core 'cuda-bindings==13.*'" in str(decision)


def test_a_missing_nvrtc_is_a_reason_with_its_fix(nvrtc, monkeypatch, fresh_jit):
    from cuda.bindings import nvrtc as bindings

    def fail():
        raise RuntimeError("no libnvrtc")

    monkeypatch.setattr(bindings, "nvrtcVersion", fail)
    jit.nvrtc_version.cache_clear()
    decision = chosen()
    assert decision.chosen == "sdpa"
    assert "NVRTC is not found" in str(decision)
    assert "pip install 'nvidia-cuda-nvrtc==" in str(decision) or "pip install nvidia-cuda-nvrtc-cu12" in str(decision)


def test_a_driver_older_than_nvrtc_is_a_reason(nvrtc, monkeypatch):
    monkeypatch.setattr(jit, "driver_version", lambda: (nvrtc[0] - 1, 4))
    decision = chosen()
    assert decision.chosen == "sdpa"
    assert f"the driver runs CUDA {nvrtc[0] - 1}.4" in str(decision)


def test_an_older_minor_version_of_the_driver_is_none(nvrtc, monkeypatch):
    monkeypatch.setattr(jit, "driver_version", lambda: (nvrtc[0], 0))
    assert chosen().chosen == "cuda"


def test_a_driver_that_refuses_the_cubin_is_a_reason(nvrtc, monkeypatch):
    def refuse(*_):
        raise jit.KernelBuildError("the driver does not load choose.cu")

    monkeypatch.setattr(jit, "load", refuse)
    put_gpu(monkeypatch)
    decision = chosen()
    assert decision.chosen == "sdpa"
    assert "the driver does not load choose.cu" in str(decision)


def test_routing_loads_every_kernel_on_the_current_gpu_so_that_a_capture_need_not(nvrtc, monkeypatch):
    loaded = []
    monkeypatch.setattr(jit, "load", lambda *arguments: loaded.append(arguments))
    put_gpu(monkeypatch)
    assert chosen().chosen == "cuda"
    assert loaded == [(op.SOURCE, kernel, 1) for kernel in op.KERNELS.values()]


def test_routing_loads_on_the_gpu_of_the_request_and_not_on_the_current_one(nvrtc, monkeypatch):
    loaded = []
    monkeypatch.setattr(jit, "load", lambda *arguments: loaded.append(arguments))
    put_gpu(monkeypatch)
    registry = BackendRegistry((CudaChoice(), SDPABackend(operation=Operation.CHOOSE)))
    facts = {"operation": "choose", "geometry": REQUEST.geometry.as_tuple(), "device_type": "cuda", "dtype": torch.float32}
    for index in (3, 0):
        registry.resolve_index("cuda", False, device_index=index, **facts)
    assert [device for _, _, device in loaded] == [3, 3, 3, 0, 0, 0]


def test_nothing_is_loaded_on_a_gpu_that_is_not_here(nvrtc, monkeypatch):
    monkeypatch.setattr(jit, "load", lambda *arguments: pytest.fail("it loaded"))
    put_gpu(monkeypatch)
    assert jit.why_unavailable(op.SOURCE, ("choose_float32",), (9, 0), 4) == ""
    assert jit.why_unavailable(op.SOURCE, ("choose_float32",), (8, 0), 1) == ""


def test_the_kernels_of_a_source_are_loaded_as_one_library_on_each_gpu(source, monkeypatch):
    core = pytest.importorskip("cuda.core")
    libraries, entered = [], []

    class Library:
        def get_kernel(self, name):
            return SimpleNamespace(name=name, attributes=SimpleNamespace(num_regs=8))

    def from_cubin(cubin, name):
        libraries.append((cubin, name))
        return Library()

    put_gpu(monkeypatch)
    monkeypatch.setattr(core, "ObjectCode", SimpleNamespace(from_cubin=from_cubin))
    monkeypatch.setattr(jit, "compile_cached", lambda source, architecture: jit.Compiled(architecture.encode()))
    monkeypatch.setattr(jit, "make_context_current", entered.append)
    found = [jit.load(source, kernel, device).name for device in (0, 1) for kernel in ("one", "two")]
    assert found == ["one", "two", "one", "two"]
    assert libraries == [(b"sm_90a", "scale.cu")]
    assert entered == [0, 0, 1, 1]
