"""What env.json says of machine and memory."""

import subprocess
from pathlib import Path

import torch

from nsa_train.telemetry.environment import commit_of, describe_environment, gpu_memory, peak_memory_mib

CPU = torch.device("cpu")


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
    before = peak_memory_mib(CPU)
    block = torch.ones(2**20 * 64)
    assert 200 < peak_memory_mib(CPU) - before < 400 or peak_memory_mib(CPU) > 1024
    assert block.numel() == 2**26
    assert gpu_memory(CPU) == {}


def test_versions_and_routing_are_recorded() -> None:
    environment = describe_environment(CPU, {"cmp": "why"})
    assert environment["routing"] == {"cmp": "why"}
    assert environment["packages"]["torch"].startswith(torch.__version__.split("+")[0])
