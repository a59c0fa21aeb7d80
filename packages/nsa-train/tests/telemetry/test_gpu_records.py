"""On a GPU: memory, MFU, branch times by events, NVTX ranges."""

import csv
import json

import pytest
import torch

from nsa_train.host.chips import chip_of

pytestmark = pytest.mark.hardware


@pytest.mark.parametrize("profile", ["branches", "nvtx"])
def test_a_step_on_a_gpu_is_recorded(session, profile: str) -> None:
    device = torch.device("cuda", 0)
    run = session(f"train.profile={profile}", device=device)
    with run.recorder.phase("forward"):
        run.step(1)
    events = [json.loads(line) for line in run.recorder.paths.heartbeat.read_text().splitlines()]
    [progress] = [event for event in events if event["msg"] == "progress"]
    assert progress["gpu_mem_alloc_mib"] == pytest.approx(1024 * progress["gpu_mem_alloc_gib"], rel=1e-4)
    assert 0 < progress["gpu_mem_alloc_mib"] <= progress["gpu_mem_reserved_mib"]
    if profile == "branches":
        assert set(progress["branch_forward_ms"]) == {"cmp", "select", "slc", "win"}
        assert all(spent > 0 for spent in progress["branch_forward_ms"].values())
    chip = chip_of(device)
    with run.recorder.paths.training.open(newline="") as file:
        [row] = csv.DictReader(file)
    assert (row["mfu"] == "") == (chip is None)
    environment = json.loads(run.recorder.paths.environment.read_text())
    assert environment["gpu"] == torch.cuda.get_device_name(device)
    assert environment["compute_capability"] is not None
