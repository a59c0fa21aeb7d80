"""Preflight judges every rule and writes nothing."""

import functools
from pathlib import Path

import pytest
import torch

from nsa_core import (
    BackendRegistry,
    BranchRequest,
    Capability,
    LayerTelemetry,
    NativeSparseAttention,
    Operation,
    default_registry,
    explain_routing,
)
from nsa_core.backends.base import Reason
from nsa_train.errors import ConfigError
from nsa_train.preflight import run_preflight
from nsa_train.routing import routing_decisions


def test_a_good_run_gets_its_corpus(tiny_config, tmp_path: Path) -> None:
    findings = run_preflight(tiny_config(), tmp_path / "new" / "deep")
    assert findings.failed == []
    assert len(findings.require().train) == 1
    assert not (tmp_path / "new").exists()


def test_a_failed_rule_stops_the_run_with_all_of_them(tiny_config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    findings = run_preflight(tiny_config("data.path=absent.txt", "nsa.backends.slc=nosuch"), tmp_path)
    with pytest.raises(ConfigError) as caught:
        findings.require()
    assert len(str(caught.value).splitlines()) == 3


def test_an_out_directory_below_a_file_is_refused(tiny_config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [failure] = run_preflight(tiny_config(), tmp_path / "file" / "out").failed
    assert "cannot be written" in failure
    [failure] = run_preflight(tiny_config(), tmp_path / "file").failed
    assert "cannot be written" in failure


def test_the_dense_twin_needs_no_routes(tiny_config, tmp_path: Path) -> None:
    findings = run_preflight(tiny_config("model.attention=dense"), tmp_path)
    assert not any(line.startswith("route") for line in findings.passed)


def test_a_split_that_fills_no_row_is_named(tiny_config, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x" * 200)
    findings = run_preflight(tiny_config(f"data.path={tmp_path}/short.txt"), tmp_path / "out")
    assert findings.failed == [
        "train.seq_len=32 is longer than the val split (21 tokens; it must fill one row); use 21 or less, or more text"
    ]


def test_a_backend_that_is_not_installed_is_named_with_those_that_are(tiny_config, tmp_path: Path) -> None:
    [failure] = run_preflight(tiny_config("nsa.backends.slc=nosuch"), tmp_path / "out").failed
    assert failure.startswith("nsa.backends.slc='nosuch' is not installed (there is ")
    assert "sdpa" in failure
    assert failure.endswith("); use 'auto'")


def test_a_backend_that_cannot_serve_is_named_with_its_own_reasons(tiny_config, tmp_path: Path, monkeypatch) -> None:
    class OnlyOnGPUs:
        name, operation, capability = "gpu", Operation.SLC, Capability(device_types=("cuda",), max_head_dim=8)

        def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
            return self.capability.reasons_against(request)

        def preference(self, request: BranchRequest) -> int:
            return 1

        def __call__(self, *tensors, geometry, scale, placement):
            raise AssertionError("routing alone calls no backend")

    registry = BackendRegistry((*default_registry().backends, OnlyOnGPUs()))
    monkeypatch.setattr("nsa_train.routing.explain_routing", functools.partial(explain_routing, registry=registry))
    monkeypatch.setattr("nsa_train.routing.pick_device", lambda: torch.device("cpu"))
    [failure] = run_preflight(tiny_config("nsa.backends.slc=gpu"), tmp_path / "out").failed
    assert failure == (
        "nsa.backends.slc='gpu' cannot serve this run (gpu: incapable: device cpu (needs cuda), "
        "incapable: head dimension 16 (at most 8)); use 'auto'"
    )


@pytest.mark.parametrize(
    ("branches", "operations"),
    [("['slc']", ["cmp", "select", "slc"]), ("['cmp','win']", ["cmp", "win"]), ("['slc','win']", ["cmp", "select", "slc", "win"])],
)
def test_every_operation_that_a_step_runs_is_routed(tiny_config, tmp_path: Path, branches: str, operations: list[str]) -> None:
    config = tiny_config(f"nsa.branches={branches}", "model.head_dim_v=12")
    routed = routing_decisions(config, torch.device("cpu"))
    assert list(routed) == operations
    layer = NativeSparseAttention(config.nsa_config())
    layer.telemetry = LayerTelemetry()
    layer(torch.zeros(1, 32, 32))
    assert sorted(layer.telemetry.routes) == sorted(operations)
    # without the branch its lse is still needed, for which its keys stand in as values
    assert routed["cmp"].request.head_dim_v == (12 if "cmp" in config.nsa.branches else 16)
