"""tools/compare_versions.py: its arithmetic on given rounds, and this checkout compared with itself in Triton's interpreter."""

import json
import math
import os
import random
import time
from pathlib import Path
from statistics import stdev

import pytest

from tools import compare_versions
from tools.compare_versions import Bench, kernel_lines, order, parse_cases, ratio_lines, summarize

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
CHECKOUT = os.pathsep.join(str(PACKAGES / name / "src") for name in ("nsa-core", "nsa-kernels-triton"))
TINY = ("--device=cpu", "--cases=1/1/16/16:8", "--directions=forward", "--idle=0")


def rounds_of(case, direction, **times_ms):
    """Return rounds of one case: the medians of each version; minima are a tenth below."""
    return [
        {"case": case, "direction": direction, "version": name, "round": i, "time": {"median_ms": ms, "min_ms": 0.9 * ms, "calls": 3}}
        for name, times in times_ms.items()
        for i, ms in enumerate(times)
    ]


def test_versions_alternate_from_round_to_round():
    assert [list(order(["A", "B"], number)) for number in range(3)] == [["A", "B"], ["B", "A"], ["A", "B"]]


def test_a_known_ratio_is_recovered_although_the_clock_drifts():
    clock = [1.0, 1.1, 1.3, 1.2]
    (row, *_) = summarize(rounds_of("M:8192", "both", OLD=[2 * x for x in clock], NEW=[2.06 * x for x in clock]), "OLD")
    assert (row["case"], row["direction"], row["version"], row["n"]) == ("M:8192", "both", "NEW", 4)
    assert row["base_ms"] == pytest.approx(2.3)
    assert [row[key] for key in ("medians", "minima", "neighbours")] == pytest.approx([1.03] * 3)
    assert row["error"] == pytest.approx(0, abs=1e-12)


def test_the_error_is_that_of_the_mean_of_the_logarithms():
    draw = random.Random(0)
    logs = [draw.gauss(0.01, 0.005) for _ in range(50)]
    (row, *_) = summarize(rounds_of("S:32768", "forward", OLD=[3.0] * 50, NEW=[3 * math.exp(x) for x in logs]), "OLD")
    assert math.log(row["neighbours"]) == pytest.approx(sum(logs) / 50)
    assert row["error"] == pytest.approx(stdev(logs) / math.sqrt(50))
    assert abs(math.log(row["neighbours"]) - 0.01) < 3 * row["error"]


def test_means_over_cases_are_geometric_by_direction_and_in_all():
    rounds = [
        *rounds_of("M:8192", "forward", OLD=[1.0, 1.0], NEW=[2.0, 2.0]),
        *rounds_of("P:8192", "forward", OLD=[1.0, 1.0], NEW=[8.0, 8.0]),
        *rounds_of("M:8192", "both", OLD=[1.0, 1.0], NEW=[4.0, 16.0]),
    ]
    means = {row["direction"]: row for row in summarize(rounds, "OLD") if row["case"] == "mean"}
    assert {name: row["neighbours"] for name, row in means.items()} == pytest.approx({"forward": 4, "both": 8, "all": 128 ** (1 / 3)})
    assert {name: row["n"] for name, row in means.items()} == {"forward": 2, "both": 1, "all": 3}
    assert means["all"]["error"] == pytest.approx(means["both"]["error"] / 3)


def test_a_round_that_was_interrupted_has_no_ratio():
    (row, *_) = summarize(rounds_of("M:8192", "both", OLD=[1.0, 5.0], NEW=[2.0]), "OLD")
    assert (row["neighbours"], row["n"], row["error"]) == (2, 1, None)
    assert summarize(rounds_of("M:8192", "both", OLD=[1.0]), "OLD") == []


def test_a_mean_waits_for_the_first_turn_of_every_version():
    rounds = rounds_of("M:8192", "forward", OLD=[1.0], A=[2.0], B=[3.0]) + rounds_of("M:8192", "both", OLD=[1.0], A=[2.0])
    means = {(row["version"], row["direction"]): row["medians"] for row in summarize(rounds, "OLD") if row["case"] == "mean"}
    assert means == pytest.approx({("A", "forward"): 2, ("A", "both"): 2, ("A", "all"): 2, ("B", "forward"): 3, ("B", "all"): 3})


def test_kernels_are_side_by_side_and_the_longest_is_first():
    place = {"case": "M:8192", "direction": "both"}
    old = place | {"version": "OLD", "profile": {"choose": [2.0, 1.0], "gone": [5.0, 4.0]}}
    new = place | {"version": "NEW", "profile": {"choose": [9.04, 2.0]}}
    assert list(kernel_lines([old, new])) == [
        ["M:8192 both", "OLD", "NEW"],
        ["choose", "2.0 (1)", "9.0 (2)"],
        ["gone", "5.0 (4)", "0.0 (0)"],
    ]


def test_the_default_cases_are_the_targets_as_plain_numbers():
    cases = parse_cases("targets")
    assert sorted(cases) == sorted(
        ["S:32768", "L:16384", "L:65536", "M:8192", "M:32768", "M:65536", "M:131072", "P:8192", "P:65536"],
    )
    assert cases["P:8192"] == [64, 4, 192, 128, 8192, 511]
    assert parse_cases("P:8k,2/1/16/32:40") == {"P:8192": [64, 4, 192, 128, 8192, 511], "2/1/16/32:40": [2, 1, 16, 32, 40, 1]}


@pytest.mark.parametrize("idle", [0.0, 1.0, 2.0])
def test_the_gpu_rests_in_proportion_to_the_calls_before(idle, monkeypatch):
    class CallsOfTwoMilliseconds(Bench):
        def _call(self, direction):
            end = time.perf_counter() + 0.002
            while time.perf_counter() < end:
                pass

    bench, rests = CallsOfTwoMilliseconds("cpu", idle), []
    monkeypatch.setattr(compare_versions.time, "sleep", rests.append)
    times, launch_s = bench._times_ms("forward", 3, 0.0)
    assert len(times) == 3 and min(times) >= 2 and launch_s >= 0.002
    assert rests == [pytest.approx(idle * sum(times) / 1e3)]
    rests.clear()
    found = bench.time("forward")
    # one rest after the first call, then one for one or two calls
    assert found["calls"] / 2 <= len(rests) - 1 <= found["calls"]
    assert 3 <= found["calls"] <= 32 and found["median_ms"] >= found["min_ms"] >= 2


def test_a_checkout_is_compared_with_itself(tmp_path, capfd):
    file = tmp_path / "compared.json"
    words = [f"OLD={CHECKOUT}", f"NEW={CHECKOUT}", "--rounds=2", "--commit=NEW=abc", f"--json={file}", *TINY]
    assert compare_versions.main(words) == 0
    record = json.loads(file.read_text())
    assert [(one["version"], one["round"]) for one in record["rounds"]] == [("OLD", 0), ("NEW", 0), ("NEW", 1), ("OLD", 1)]
    assert all(one["time"]["calls"] == 3 and one["time"]["median_ms"] >= one["time"]["min_ms"] > 0 for one in record["rounds"])
    assert record["command"] == words
    assert {name: version["commit"] for name, version in record["versions"].items()} == {"OLD": None, "NEW": "abc"}
    assert all(version["path"] == CHECKOUT and {"nsa_core", "torch", "triton"} <= set(version) for version in record["versions"].values())
    assert {"time", "cpu", "gpu", "torch", "triton", "commit"} <= set(record["environment"])
    assert record["ratios"] == summarize(record["rounds"], "OLD")
    assert [row["case"] for row in record["ratios"]] == ["1/1/16/16:8", "mean", "mean"]
    printed = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert printed == [[cell for cell in line if cell] for line in ratio_lines(record["ratios"])]


@pytest.mark.slow
def test_a_profile_lists_the_operators_of_every_version(tmp_path, capfd):
    file = tmp_path / "profiled.json"
    assert compare_versions.main([f"A={CHECKOUT}", f"B={CHECKOUT}", "--profile", f"--json={file}", *TINY]) == 0
    old, new = (one["profile"] for one in json.loads(file.read_text())["rounds"])
    # operators of torch in the interpreter are the same from call to call
    assert {name: launches for name, (_, launches) in old.items()} == {name: launches for name, (_, launches) in new.items()}
    assert old["aten::empty"][1] >= 1
    assert capfd.readouterr().out.startswith("1/1/16/16:8 forward")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["OLD={checkout}", "NEW={empty}"], "NEW={empty} has no nsa_core"),
        (["OLD={checkout}"], "needs two versions"),
        (["OLD={checkout}", "NEW={checkout}", "--rounds=0"], "--rounds: '0' is not an integer of at least 1; use 12"),
        (["OLD={checkout}", "OLD={checkout}"], "two versions of different names"),
        (["OLD={checkout}", "NEW={checkout}", "--commit=B=abc"], "names no version; use OLD=HASH"),
        (["OLD={checkout}", "NEW={checkout}", "--cases=Q:8k"], "--cases has 'Q'"),
        (["OLD={checkout}", "NEW={checkout}", "--directions=backward"], "--directions has 'backward'"),
    ],
)
def test_a_wrong_option_is_one_error(words, message, tmp_path, capfd):
    places = {"checkout": CHECKOUT, "empty": str(tmp_path)}
    with pytest.raises(SystemExit) as ended:
        compare_versions.main([word.format(**places) for word in words] + ["--device=cpu"])
    assert ended.value.code == 2
    assert message.format(**places) in capfd.readouterr().err


def test_packages_from_elsewhere_are_not_timed(tmp_path, capfd):
    # these folders have the names of the packages but no code, so that Python goes on to the installed ones
    for name in compare_versions.PACKAGES:
        (tmp_path / name).mkdir()
    with pytest.raises(SystemExit, match="NEW ended"):
        compare_versions.main([f"OLD={CHECKOUT}", f"NEW={tmp_path}", *TINY])
    assert "was imported, which is not below" in capfd.readouterr().err
