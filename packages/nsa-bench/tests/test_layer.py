"""`nsa-bench layer`: a layer's step over a full cache, with its reads counted; on a GPU captured steps are compared with eager ones."""

import csv
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from nsa_bench import layer
from nsa_bench.cli import run_command
from nsa_bench.layer import LayerSteps, linear_maps, make_layer_cases, measure_layer
from nsa_bench.options import LayerOptions
from nsa_bench.routes import RouteRecorder
from nsa_core.backends.base import Operation
from nsa_core.blocks import predicted_reads
from nsa_core.module import NativeSparseAttention

WORDS = ["--shapes", "4/2/16/8", "--hidden", "32", "--geometry", "8/4/16/4/24"]


def cases_of(**options: Any) -> tuple[layer.LayerCase, ...]:
    return make_layer_cases(LayerOptions(**{"device": "cpu", "shapes": "4/2/16/8", "hidden": 32, "geometry": "8/4/16/4/24", **options}))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat little."""
    monkeypatch.setattr(layer, "WARM_UPS", 1)
    monkeypatch.setattr(layer, "LOOPS", 1)


def test_each_case_is_timed_without_and_with_counted_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "l.csv"
    assert run_command(["layer", "--device", "cpu", *WORDS, "--context", "100,90", "--batch", "3", "--csv", str(file)]) == 0
    with file.open() as opened:
        rows = list(csv.DictReader(opened))
    assert [(row["S"], row["count_reads"]) for row in rows] == [("100", "False"), ("100", "True"), ("90", "False"), ("90", "True")]
    for row in rows:
        assert (row["ms_graph"], row["ms_captured"], row["reason"]) == ("", "", "")
        assert 0 < float(row["ms_projections"]) < float(row["ms_eager"])
        # q, k and v of three branches, two maps of the gates, the output; float32
        assert int(row["weight_bytes"]) == 4 * (32 * (64 + 3 * 32 + 3 * 16) + 32 * 32 + gate_weights())
    # one loop each: other work on the machine may delay a single time
    operations, eager = ([float(row[name]) for row in rows] for name in ("ms_operations", "ms_eager"))
    assert 0 < min(operations) < min(eager)
    counted = [row for row in rows if row["count_reads"] == "True"]
    assert all(row["reads_actual"] == row["reads_expected"] != "" for row in counted)
    assert "a layer's step, us" in capsys.readouterr().out


@pytest.mark.parametrize(("branches", "keys", "values"), [("win,slc", 3, 2), ("win", 1, 1)])
def test_the_timed_layer_has_the_branches_that_are_named(tmp_path: Path, branches: str, keys: int, values: int) -> None:
    file = tmp_path / "l.csv"
    assert run_command(["layer", "--device", "cpu", *WORDS, "--context", "64", "--branches", branches, "--csv", str(file)]) == 0
    with file.open() as opened:
        [row] = csv.DictReader(opened)
    # in the paper's order; reads are counted only for all three
    assert (row["branches"], row["count_reads"]) == (",".join(sorted(branches.split(","))), "False")
    # without `cmp` its keys still choose the blocks of `slc`
    assert int(row["weight_bytes"]) == 4 * (32 * (64 + keys * 32 + values * 16) + 32 * 32 + gate_weights())
    assert float(row["ms_eager"]) > 0


def gate_weights() -> int:
    built = NativeSparseAttention(cases_of()[0].config)
    return sum(weight.numel() for weight in built.gate.parameters())


def test_the_cache_is_filled_by_the_layer_and_holds_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "FILL_TOKENS", 14)
    case = cases_of(context="60", batch="2")[1]
    built = NativeSparseAttention(case.config).eval()
    with torch.no_grad():
        steps = LayerSteps(built, case, torch.device("cpu"), step_graphs=False)
        taken = layer.steps_of_a_cache(torch.device("cpu"))
        assert steps.cache.lengths.tolist() == 2 * [60 - taken]
        for _ in range(taken):
            steps.step(torch.zeros(2, 1, 32))
    assert steps.cache.lengths.tolist() == [60, 60]
    steps.cache.check()


@torch.no_grad()
def test_repeated_operations_of_a_step_append_and_attend_and_change_nothing() -> None:
    case = cases_of()[0]
    registry = RouteRecorder.of_installed()
    built = NativeSparseAttention(case.config, registry=registry).eval()
    steps = LayerSteps(built, case, torch.device("cpu"), step_graphs=False)
    recorded = steps.operations(torch.ones(2, 1, 32))
    assert recorded.operations[0] is Operation.APPEND
    assert Operation.NSA in recorded.operations or {Operation.SLC, Operation.WIN} < set(recorded.operations)
    assert Operation.ROTATE not in recorded.operations

    stores = [*steps.cache.keys.values(), *steps.cache.values.values(), steps.cache.lengths]
    before = [x.clone() for x in stores]
    recorded.repeat()
    assert all(torch.equal(x, y) for x, y in zip(before, stores, strict=True))
    assert built.registry is registry


def test_all_linear_maps_of_a_step_are_timed() -> None:
    for kv, projections in (("separate", 7), ("shared", 3)):
        built = NativeSparseAttention(cases_of(kv=kv)[0].config)
        maps = linear_maps(built)
        assert len(maps) == projections + 2
        weights = {id(weight) for map_ in maps for weight in map_.parameters()}
        others = {name for name, weight in built.named_parameters() if id(weight) not in weights}
        assert all(name.startswith(("compress_k", "compress_v")) for name in others)


def test_wrong_reads_get_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "predicted_reads", lambda held, geometry: predicted_reads(held, geometry) + 1)
    without, counted = (measure_layer(case, torch.device("cpu")) for case in cases_of())
    assert set(without.times) == {"projections", "operations", "eager"}
    assert counted.times == {}
    assert counted.failure is not None
    assert "tokens were read (Table 4:" in counted.failure


@torch.no_grad()
def test_one_wrong_count_of_a_sequence_is_found() -> None:
    case = cases_of()[1]
    steps = LayerSteps(NativeSparseAttention(case.config).eval(), case, torch.device("cpu"), step_graphs=False)
    for _ in range(layer.CHECKED_STEPS):
        steps.step(torch.zeros(2, 1, 32))
    assert steps.wrong_reads() == []
    steps.cache._last_reads[1, 1] -= 1
    [problem] = steps.wrong_reads()
    assert problem == f"{steps.expected_reads() - 1} tokens were read (Table 4: {steps.expected_reads()})"


def test_captured_steps_that_differ_get_no_time() -> None:
    outs = {"eager": torch.ones(4, 1, 1, 8)}
    assert layer._differences(outs) == []
    assert layer._differences({**outs, "captured": outs["eager"].clone()}) == []
    [problem] = layer._differences({**outs, "captured": outs["eager"] + 1e-3})
    assert problem.startswith("a captured step is off by 1.0e-03")


def test_a_failure_is_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(self: LayerSteps, x: Tensor) -> Tensor:
        raise RuntimeError("no kernel [here]")

    monkeypatch.setattr(LayerSteps, "step", fail)
    assert run_command(["layer", "--device", "cpu", *WORDS, "--context", "64"]) == 1
    assert "RuntimeError: no kernel [here]" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", "4"], "--context=4 leaves no room"),
        (["--hidden", "0"], "hidden_size=0"),
        (["--shapes", "5/2/16/8"], "5/2/16/8"),
        (["--batch", "x"], "--batch has 'x'"),
        (["--branches", "slc,dense"], "--branches has 'dense' (the rule: some of cmp, slc, win); use cmp"),
    ],
)
def test_wrong_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["layer", "--device", "cpu", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.hardware(capability=(8, 0))
def test_captured_steps_are_timed_on_a_gpu() -> None:
    cases = cases_of(device="cuda", context="512", batch="2")
    for result in (measure_layer(case, torch.device("cuda")) for case in cases):
        assert result.failure is None
        assert set(result.times) == set(layer.WAYS)
        assert result.error is not None
        assert attrs.asdict(result)["routes"] != ""
