"""The marker `hardware` and the option `--require-hardware` of the root conftest."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# no machine has this many, so that the outcome is the same with and without a GPU
SOURCE = """
import pytest

@pytest.mark.hardware(num_gpus=10_000)
def test_by_marker():
    raise AssertionError("ran without the hardware")

@pytest.mark.hardware(num_gpus=0)
def test_by_its_own_skip():
    pytest.skip("needs something else")

def test_plain():
    pytest.skip("not about hardware")
"""


@pytest.fixture
def run(tmp_path):
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = hardware: see the root settings\n")
    (tmp_path / "test_sample.py").write_text(SOURCE)

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_missing_hardware_is_a_skip_that_says_what_is_missing(run):
    done = run()
    assert done.returncode == 0
    assert "3 skipped" in done.stdout
    assert "needs 10000 CUDA device(s)" in done.stdout


def test_with_the_option_a_hardware_skip_is_a_failure_and_others_stay(run):
    done = run("--require-hardware")
    assert done.returncode == 1
    assert "1 failed, 1 skipped, 1 error" in done.stdout
    assert "needs something else (--require-hardware turns this skip into a failure)" in done.stdout
