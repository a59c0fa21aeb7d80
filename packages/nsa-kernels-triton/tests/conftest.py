"""Without a GPU the kernels run in Triton's interpreter, which a process must choose before it imports triton."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # the flag may have changed since the import; triton's library shows its value at the import
    if "triton" in sys.modules and isinstance(sys.modules["triton"].language.sum, sys.modules["triton"].runtime.jit.JITFunction):
        raise pytest.UsageError("a test module imported triton (torch._dynamo does) while tests were collected; import it inside the test")

# cuBLAS needs it before it starts, because deterministic mode fills buffers with NaN
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def nan_buffers():
    """Fill what `torch.empty` and its like return with NaN or the largest integer, so that an unwritten element shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def without_interpreter():
    """Give the environment of a process that compiles kernels, or would."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def beside_this_file(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def simulator():
    """Give the module that runs kernels for compute capability 9.0 without one."""
    return beside_this_file("gluon_simulator")


@pytest.fixture(scope="session")
def compiling():
    """Give the module that compiles kernels for GPUs that are not here."""
    return beside_this_file("compile_kernels")


@pytest.fixture(scope="session")
def extremes():
    """Give the module of `test_extremes.py`, whose assertions hold for simulated kernels as well."""
    return beside_this_file("test_extremes")


@pytest.fixture(scope="session")
def low_precision():
    """Give the module of `test_low_precision.py`, likewise."""
    return beside_this_file("test_low_precision")


@pytest.fixture
def check_late_stream(monkeypatch, simulator):
    """Return a function that asserts, on a CPU, that results do not change if second-stream launches run at the join.

    It returns how many launches that were.
    """
    from nsa_kernels_triton import streams
    from nsa_kernels_triton.cached_launch import CachedLaunch

    def check(evaluate):
        in_order = evaluate()
        stream = beside_this_file("late_stream").LateStream()
        for module in [module for name, module in sys.modules.items() if name.startswith("nsa_kernels_triton.")]:
            for name in ("fork_stream", "join_stream"):
                if getattr(module, name, None) is getattr(streams, name) and module is not streams:
                    monkeypatch.setattr(module, name, getattr(stream, name))
        for kind in (CachedLaunch, simulator.Simulated):
            for name in ("__getitem__", "both"):
                monkeypatch.setattr(kind, name, stream.launcher(getattr(kind, name)))
        late = evaluate()
        assert not stream.is_open
        assert all(torch.equal(x, y) for x, y in zip(late, in_order, strict=True))
        return stream.num_late

    return check


@pytest.fixture
def dependent_launch(monkeypatch):
    """Give what simulates programmatic dependent launch in the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU no interpreter runs the kernels")
    return beside_this_file("dependent_launch").DependentLaunch(monkeypatch)


@pytest.fixture
def fused_products(monkeypatch):
    """Let the interpreter fuse multiply and add, with one rounding, as a GPU does."""
    from triton.runtime import interpreter

    beside_this_file("fused_products").install(interpreter.InterpreterBuilder, monkeypatch.setattr)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter(request):
    if os.environ.get("TRITON_INTERPRET") == "1" and not request.config.getoption("--unpatched-interpreter"):
        from triton.runtime import interpreter

        beside_this_file("quick_interpreter").make_quick(interpreter)
