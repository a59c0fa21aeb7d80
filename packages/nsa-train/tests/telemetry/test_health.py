"""Layers' figures are combined by their nature, and judged against the documented bands."""

import torch

from nsa_core.telemetry import LayerTelemetry
from nsa_train.model.decoder import build_model
from nsa_train.telemetry.health import combine, heartbeat_fields, judge, routes_of, watched


def test_telemetry_is_attached_only_while_watched(tiny_config) -> None:
    model = build_model(tiny_config())
    with watched(model.sparse_layers) as collected:
        model(torch.zeros(1, 9, dtype=torch.int64))
    assert all(layer.telemetry is None for layer in model.sparse_layers)
    before = combine(collected)
    model(torch.zeros(2, 20, dtype=torch.int64))
    assert combine(collected) == before


def test_counts_add_up_and_extremes_stay_extreme(tiny_config) -> None:
    model = build_model(tiny_config())
    with watched(model.sparse_layers) as collected:
        model(torch.randint(0, 256, (1, 30)))
    together, layers = combine(collected), [telemetry.summary() for telemetry in collected]
    assert together["reads_act_total"] == sum(layer["reads_act_total"] for layer in layers)
    assert together["gate_entropy_min"] == min(layer["gate_entropy_min"] for layer in layers)
    assert together["k_max"] == max(layer["k_max"] for layer in layers)
    assert together["gate_entropy_mean"] == sum(layer["gate_entropy_mean"] for layer in layers) / 2


def test_routes_that_differ_between_layers_are_listed() -> None:
    first, second = LayerTelemetry(), LayerTelemetry()
    first.record_route("cmp", "sdpa")
    second.record_route("cmp", "other")
    assert routes_of([first, second]) == {"cmp": "other|sdpa"}


def test_shares_become_one_heartbeat_field() -> None:
    fields = heartbeat_fields({"gate_share_cmp": 0.25, "gate_share_win": 0.75, "k_mean": 2.0})
    assert fields == {"k_mean": 2.0, "gate_branch_shares": {"cmp": 0.25, "win": 0.75}}
    assert heartbeat_fields({"k_mean": 2.0}) == {"k_mean": 2.0}


def test_bands_tell_healthy_from_collapsed() -> None:
    healthy = {
        "gate_entropy_mean": 1.0,
        "gate_max_gate": 0.5,
        "gate_collapse_frac": 0.0,
        "reads_pred": 10,
        "reads_act_total": 10,
    }
    assert all(check.is_healthy for check in judge(healthy))
    assert len(judge(healthy)) == 4
    sick = {"gate_entropy_mean": 0.05, "gate_max_gate": 0.99, "gate_collapse_frac": 0.9, "reads_pred": 10, "reads_act_total": 9}
    assert not any(check.is_healthy for check in judge(sick))
    assert judge({}) == []
