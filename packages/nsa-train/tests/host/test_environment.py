"""Machine and memory in env.json."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa_core.environment import commit_of
from nsa_train.host.environment import describe_environment
from nsa_train.host.machine import gpu_memory

CPU = torch.device("cpu")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_folder(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    author = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    (tmp_path / "first").touch()
    for words in (["init", "-q"], ["add", "first"], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    commit = commit_of(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    # packages installed in an environment inside somebody's checkout have no commit of theirs
    installed = tmp_path / ".venv/site-packages/nsa_core"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    assert commit_of(installed) is None
    (tmp_path / "file").touch()
    subprocess.run(["git", "-C", str(tmp_path), "add", "file"], check=True)
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_memory_is_in_mib() -> None:
    """In a fresh process, whose peak no other test has raised."""
    script = """
import torch
from nsa_train.host.machine import peak_memory_mib
before = peak_memory_mib(torch.device("cpu"))
block = torch.ones(2**26)
print(peak_memory_mib(torch.device("cpu")) - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # 256 MiB, less what start-up had peaked above
    assert 200 < float(done.stdout) < 300


def test_without_a_gpu_its_memory_is_none() -> None:
    names = [f"gpu_mem_{kind}_{unit}" for kind in ("alloc", "reserved") for unit in ("mib", "gib")]
    assert gpu_memory(CPU) == dict.fromkeys(names)


def test_gpu_memory_has_the_units_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier system reported MiB as GB."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 2**30)
    assert gpu_memory(torch.device("cuda", 0)) == {
        "gpu_mem_alloc_mib": 3072,
        "gpu_mem_alloc_gib": 3,
        "gpu_mem_reserved_mib": 5120,
        "gpu_mem_reserved_gib": 5,
    }


def test_versions_and_routing_are_recorded() -> None:
    environment = describe_environment(CPU, {"cmp": "why"}, world_size=2)
    assert environment["world_size"] == 2
    assert {"time", "python", "torch", "triton", "cuda", "gpu", "compute_capability", "commit"} <= set(environment)
    assert environment["routing"] == {"cmp": "why"}
    assert environment["packages"]["torch"].startswith(torch.__version__.split("+")[0])
