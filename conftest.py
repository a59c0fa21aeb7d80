"""Settings of every test run: the hardware marker, and how many examples hypothesis tries; and a fixture for the command lines."""

import gc
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # several processes share the cores: more threads would wait for each other. Torch reads this when it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# the first example pays for torch's warm-up, so no deadline
settings.register_profile("fast", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=200, deadline=None)
settings.load_profile("fast")


def pytest_addoption(parser):
    parser.addoption(
        "--unpatched-interpreter", action="store_true", help="run Triton's interpreter as it is installed, without what makes it quick"
    )
    parser.addoption(
        "--require-hardware", action="store_true", help="fail, not skip, a test marked `hardware` where the hardware is missing"
    )


def pytest_collection_finish():
    # the garbage collector need not visit modules and thousands of collected tests again and again
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    for marker in item.iter_markers("hardware"):
        missing = missing_hardware(*marker.args, **marker.kwargs)
        if missing:
            pytest.skip(missing)


def missing_hardware(num_gpus=1, capability=(0, 0)):
    """Return what this machine lacks of so many CUDA devices of at least that compute capability; "" if nothing."""
    import torch

    found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    if sum(device >= capability for device in found) >= num_gpus:
        return ""
    return f"needs {num_gpus} CUDA device(s) of compute capability >= {capability[0]}.{capability[1]}; found {found or 'none'}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and item.config.getoption("--require-hardware") and item.get_closest_marker("hardware"):
        report.outcome = "failed"
        report.longrepr = f"{call.excinfo.value} (--require-hardware turns this skip into a failure)"
    return report


SLOW_MODULE = """
import time
try:
    print("loading", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    # as C code in torch does
    raise ImportError("the interrupt is lost")
"""


@pytest.fixture
def signalled_while_loading(tmp_path):
    """A function that starts Python with `words`, sends it a signal while it imports `module`, and returns exit code and stderr."""

    def run(module, words, number=signal.SIGINT):
        (tmp_path / f"{module}.py").write_text(SLOW_MODULE)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
        # a shell starts background processes with SIGINT ignored
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(
                [sys.executable, *words], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        finally:
            signal.signal(signal.SIGINT, before)
        with process:
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        return process.returncode, said

    return run
