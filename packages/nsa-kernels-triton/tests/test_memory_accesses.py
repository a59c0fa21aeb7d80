"""No kernel reads or writes outside its tensors. A missing mask may change no result, but compute-sanitizer reports it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hardware(capability=(8, 0))
PROGRAM = Path(__file__).parent / "memory_accesses.py"


def sanitizer() -> str:
    """Return the path of compute-sanitizer, which comes with CUDA's compiler; skip where there is none."""
    homes = [os.environ.get("CUDA_HOME"), *sorted(map(str, Path("/usr/local").glob("cuda*")), reverse=True)]
    folders = [os.environ.get("PATH", ""), *(f"{home}/{folder}" for home in homes if home for folder in ("bin", "compute-sanitizer"))]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if found is None:
        pytest.skip(f"compute-sanitizer is not on the PATH and in no CUDA of {homes}; install CUDA's toolkit to check accesses")
    return found


def memcheck(*arguments: str) -> subprocess.CompletedProcess[str]:
    # without torch's cache every tensor is a separate allocation, whose end the sanitizer knows
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer(), "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(1200)
def test_no_kernel_leaves_its_tensors() -> None:
    done = memcheck()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout


def test_an_access_past_the_end_is_seen() -> None:
    done = memcheck("planted")
    assert done.returncode == 9, done.stdout[-4000:] + done.stderr[-2000:]
    assert "Invalid __global__ write" in done.stdout
