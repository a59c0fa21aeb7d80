"""Layers' figures are combined by their nature, and judged against the documented bands."""

import pytest
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


class Fixed(LayerTelemetry):
    """A layer with the figures that it is given."""

    def __init__(self, **figures: float) -> None:
        super().__init__()
        self._given = figures

    def summary(self) -> dict[str, float]:
        return self._given


def test_layers_that_differ_keep_the_least_and_the_most() -> None:
    figures = combine([Fixed(gate_entropy_min=0.5, k_max=3, k_mean=2.0, rows=4), Fixed(gate_entropy_min=0.1, k_max=5, k_mean=4.0, rows=4)])
    assert figures == {"gate_entropy_min": 0.1, "k_max": 5, "k_mean": 3.0, "rows": 8}
    figures = combine([Fixed(gate_entropy_min=0.1, k_max=5), Fixed(gate_entropy_min=0.5, k_max=3)])
    assert figures == {"gate_entropy_min": 0.1, "k_max": 5}


def test_routes_that_differ_between_layers_are_listed() -> None:
    first, second = LayerTelemetry(), LayerTelemetry()
    first.record_route("cmp", "sdpa")
    second.record_route("cmp", "other")
    assert routes_of([first, second]) == {"cmp": "other|sdpa"}


def test_shares_become_one_heartbeat_field() -> None:
    fields = heartbeat_fields({"gate_share_cmp": 0.25, "gate_share_win": 0.75, "k_mean": 2.0})
    assert fields == {"k_mean": 2.0, "gate_branch_shares": {"cmp": 0.25, "win": 0.75}}
    assert heartbeat_fields({"k_mean": 2.0}) == {"k_mean": 2.0}


HEALTHY = {
    "gate_entropy_mean": 1.0,
    "gate_max_gate": 0.5,
    "gate_collapse_frac": 0.0,
    "k_mean": 3.5,
    "k_mean_expected": 3.5,
    "reads_pred": 10,
    "reads_act_total": 10,
    "fallbacks_total": 0,
    "toks_per_s_of_median": 0.95,
}
SICK = {
    "gate_entropy_mean": 0.4,
    "gate_max_gate": 0.95,
    "gate_collapse_frac": 0.9,
    "k_mean": 3.4,
    "reads_act_total": 9,
    "fallbacks_total": 1,
    "toks_per_s_of_median": 0.8,
}


def test_a_healthy_run_is_within_every_band() -> None:
    assert [check.name for check in judge(HEALTHY) if not check.is_healthy] == []
    assert len(judge(HEALTHY)) == 7
    assert judge({}) == []


def test_a_single_branch_holds_every_gate_and_is_no_fault() -> None:
    alone = {**HEALTHY, "gate_entropy_mean": 0.0, "gate_max_gate": 1.0, "gate_collapse_frac": 1.0, "gate_branch_shares": {"win": 1.0}}
    assert all(check.is_healthy for check in judge(alone))


@pytest.mark.parametrize("name", SICK)
def test_each_band_tells_sick_from_healthy(name: str) -> None:
    [found] = [check.name for check in judge({**HEALTHY, name: SICK[name]}) if not check.is_healthy]
    assert found == name.removesuffix("_of_median")


def test_k_mean_is_compared_with_what_it_must_be(tiny_config) -> None:
    model = build_model(tiny_config())
    with watched(model.sparse_layers) as collected:
        model(torch.randint(0, 256, (1, 30)))
    together = combine(collected)
    # blocks of 4 tokens, at most 4: two last queries in block 7
    assert together["k_mean_expected"] == pytest.approx((4 * (1 + 2 + 3) + 4 * 18) / 30)
    assert together["k_mean"] == together["k_mean_expected"]
