"""Preflight reports all needs of a run at once, also on a machine that meets none."""

import sys
from pathlib import Path

import pytest
import torch

from nsa_train.cli import run_command
from nsa_train.host.machine import Machine, described_machine
from nsa_train.preflight.judge import run_preflight
from nsa_train.settings.recipe import load_config


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU and without a network."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("tiktoken.get_encoding", refuse)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("words", [["preflight", "a100"], ["run", "a100", "--dry-run"]], ids=["preflight", "dry run"])
def test_all_that_a_run_would_need_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run_command([*words, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    needs = {line.split()[1]: line for line in printed.out.splitlines() if line.startswith("needs ")}
    assert list(needs) == ["device:", "disk:", "data:", "tokenizer:", "packages:"]
    for name, *parts in (
        ("device:", "1 CUDA GPU(s) of compute capability 8.0", " GiB each, by estimate", "there is none here"),
        ("disk:", "5.03 GiB for 4 checkpoints", " GiB free"),
        ("data:", "HuggingFaceFW/fineweb-edu, sample-10BT, streamed from https://huggingface.co"),
        ("tokenizer:", "gpt2, from tiktoken's cache or download"),
        ("packages:", "tiktoken (installed), datasets (installed), huggingface_hub (installed)"),
    ):
        assert all(part in needs[name] for part in parts), needs[name]
    device, tokenizer, data = printed.err.splitlines()
    assert device.startswith("FAIL  train.device='cuda' finds no CUDA GPU here (it needs 1 of compute capability 8.0 or newer with about")
    assert tokenizer.startswith("FAIL  data.tokenizer='gpt2' is neither cached nor to be downloaded (ConnectionError)")
    assert data.startswith("FAIL  data.source='fineweb_edu' cannot be reached (ConnectionError: [Errno -2] Name or service not known): ")
    assert "HuggingFaceFW/fineweb-edu, sample-10BT, is streamed from the hub, and no copy of it is kept here" in data


@pytest.mark.usefixtures("bare")
def test_packages_that_are_missing_are_all_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("tiktoken", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    findings = run_preflight(load_config("a100"), tmp_path / "out", machine=described_machine("h200"))
    assert findings.needs[-1] == (
        "packages: tiktoken (missing; pip install tiktoken), datasets (missing; pip install datasets), huggingface_hub (installed)"
    )
    tokenizer, data = findings.failed
    assert tokenizer.startswith("data.tokenizer='gpt2' needs tiktoken, which is not installed")
    assert data.startswith("data.source='fineweb_edu' needs the package datasets, which is not installed")


def test_the_gpus_that_are_there_stand_beside_those_that_are_needed(tiny_config, tmp_path: Path) -> None:
    config = tiny_config("train.strategy=ddp", "train.nproc_per_node=2", "train.device=cuda")
    here = Machine(device_type="cuda", name="NVIDIA L4", compute_capability=(8, 9), memory_gib=22.0, num_gpus=1)
    [device] = [line for line in run_preflight(config, tmp_path / "out", machine=here).needs if line.startswith("device")]
    assert device.startswith("device: 2 CUDA GPU(s) of compute capability 8.0 or newer with about ")
    assert device.endswith(" GiB each, by estimate, on each host; here: 1 x NVIDIA L4 with 22.0 GiB")
