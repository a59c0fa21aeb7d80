"""Layers' figures are combined by their nature, and judged against the documented bands."""

import math

import pytest
import torch

from nsa_core.telemetry import LayerTelemetry
from nsa_train.model.choosing import watched
from nsa_train.model.decoder import build_model
from nsa_train.telemetry.health import combine, heartbeat_fields, judge, merged, steadiness
from nsa_train.telemetry.layers import RunTelemetry, of_layers, routes_of


def test_telemetry_is_attached_only_while_watched(tiny_config) -> None:
    model = build_model(tiny_config())
    with watched(model.sparse_layers, RunTelemetry) as collected:
        model(torch.zeros(1, 9, dtype=torch.int64))
    assert all(layer.telemetry is None for layer in model.sparse_layers)
    before = of_layers(collected)
    model(torch.zeros(2, 20, dtype=torch.int64))
    assert of_layers(collected) == before


def test_counts_add_up_and_extremes_stay_extreme(tiny_config) -> None:
    model = build_model(tiny_config())
    with watched(model.sparse_layers, RunTelemetry) as collected:
        model(torch.randint(0, 256, (1, 30)))
    layers = of_layers(collected)
    together = combine(layers)
    assert together["reads_act_total"] == sum(layer["reads_act_total"] for layer in layers)
    assert together["gate_entropy_min"] == min(layer["gate_entropy_min"] for layer in layers)
    assert together["k_max"] == max(layer["k_max"] for layer in layers)
    assert together["gate_entropy_mean"] == sum(layer["gate_entropy_mean"] for layer in layers) / 2


@pytest.mark.parametrize("is_on_ranks", [False, True])
def test_passes_amount_to_one_over_all_their_rows(tiny_config, is_on_ranks: bool) -> None:
    model, ids = build_model(tiny_config()), torch.randint(0, 256, (3, 30))
    with watched(model.sparse_layers, RunTelemetry) as whole:
        model(ids)
    with watched(model.sparse_layers, RunTelemetry) as first:
        model(ids[:1])
        if not is_on_ranks:
            for telemetry in first:
                telemetry.end_pass()
            model(ids[1:])
    with watched(model.sparse_layers, RunTelemetry) as other:
        model(ids[1:])
    rest = [telemetry.passes() for telemetry in other]
    found = of_layers(first, gather=lambda mine: [mine, rest]) if is_on_ranks else of_layers(first)
    for layer, expected in zip(found, of_layers(whole), strict=True):
        assert layer == pytest.approx(expected, rel=1e-6)


def test_a_pass_that_is_computed_again_counts_once(tiny_config) -> None:
    """Activation checkpointing runs the forward pass again in the backward pass."""
    model, ids = build_model(tiny_config()), torch.randint(0, 256, (2, 30))
    with watched(model.sparse_layers, RunTelemetry) as once:
        model(ids)
    with watched(model.sparse_layers, RunTelemetry) as again:
        model(ids)
        model(ids)
        for telemetry in again:
            telemetry.end_pass()
    assert of_layers(again) == of_layers(once)


def test_a_pass_in_which_nothing_counts_changes_no_mean() -> None:
    empty = {
        "gate_entropy_mean": math.nan,
        "gate_entropy_min": math.nan,
        "gate_std_cmp": math.nan,
        "gate_mean_cmp": math.nan,
        "num_gates": 0,
    }
    full = {"gate_entropy_mean": 0.9, "gate_entropy_min": 0.5, "gate_std_cmp": 0.1, "gate_mean_cmp": 0.4, "num_gates": 7}
    assert merged([empty, full, empty]) == pytest.approx({name: value for name, value in full.items() if name != "num_gates"})
    assert all(math.isnan(value) for value in merged([empty, empty]).values())


def test_layers_that_differ_keep_the_least_and_the_most() -> None:
    figures = combine(
        [{"gate_entropy_min": 0.5, "k_max": 3, "k_mean": 2.0, "rows": 4}, {"gate_entropy_min": 0.1, "k_max": 5, "k_mean": 4.0, "rows": 4}]
    )
    assert figures == {"gate_entropy_min": 0.1, "k_max": 5, "k_mean": 3.0, "rows": 8}
    figures = combine([{"gate_entropy_min": 0.1, "k_max": 5}, {"gate_entropy_min": 0.5, "k_max": 3}])
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


def test_a_run_that_became_faster_is_healthy() -> None:
    """By the rule of `nsa-bench smoke`, throughput has a least value and no largest one."""
    assert all(check.is_healthy for check in judge({**HEALTHY, "toks_per_s_of_median": 8.0}))
    [check] = judge({"toks_per_s_of_median": 0.89})
    assert (check.found, check.band, check.is_healthy) == ("89 % of the run's median", "at least 90 %", False)


def test_the_last_tenth_is_compared_with_all_steps() -> None:
    assert steadiness([100.0] * 90 + [50.0] * 10) == 0.5
    assert steadiness([100.0] * 95 + [50.0] * 5) == 0.75
    assert steadiness([math.nan, 0.0, 80.0]) == 1
    assert steadiness([0.0]) is None


def test_k_mean_is_compared_with_what_it_must_be(tiny_config) -> None:
    model = build_model(tiny_config())
    with watched(model.sparse_layers, RunTelemetry) as collected:
        model(torch.randint(0, 256, (1, 30)))
    together = combine(of_layers(collected))
    # blocks of 4 tokens, at most 4: two last queries in block 7
    assert together["k_mean_expected"] == pytest.approx((4 * (1 + 2 + 3) + 4 * 18) / 30)
    assert together["k_mean"] == together["k_mean_expected"]
