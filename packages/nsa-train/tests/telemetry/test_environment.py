"""What env.json says of machine and memory."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa_train.telemetry.environment import commit_of, describe_environment, gpu_memory

CPU = torch.device("cpu")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_folder(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    author = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    commit = commit_of(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "file").touch()
    subprocess.run(["git", "-C", str(tmp_path), "add", "file"], check=True)
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_memory_is_in_mib() -> None:
    """In a fresh process, whose peak no other test has raised."""
    script = """
import torch
from nsa_train.telemetry.environment import peak_memory_mib
before = peak_memory_mib(torch.device("cpu"))
block = torch.ones(2**26)
print(peak_memory_mib(torch.device("cpu")) - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # 256 MiB, less what start-up had peaked above
    assert 200 < float(done.stdout) < 300
    assert gpu_memory(CPU) == {}


def test_versions_and_routing_are_recorded() -> None:
    environment = describe_environment(CPU, {"cmp": "why"})
    assert environment["routing"] == {"cmp": "why"}
    assert environment["packages"]["torch"].startswith(torch.__version__.split("+")[0])
