"""Rows of results: the same columns for all, and back again from their files."""

import csv
import json

import pytest
import torch

from nsa_bench.cases import SHAPES, Case
from nsa_bench.measurement import Direction, Measurement, Timing, common_columns, to_row
from nsa_bench.results import describe, write_csv, write_json
from nsa_core.testing.sampled import Check

CASE = Case(shape=SHAPES["M"], seq_len=1000, dtype=torch.bfloat16, lengths=(400, 600))
RIGHT = Check(error=0.001, error_of="dq", limit_used=0.4, method="rows", near_ties=3)
TIMED = Measurement(
    case=CASE,
    operation="win",
    direction=Direction.BOTH,
    implementation="triton",
    check=RIGHT,
    timing=Timing(median_ms=2.0, min_ms=1.5, max_ms=3.0, count=12),
)
WRONG = Measurement(
    case=CASE,
    operation="nsa",
    direction=Direction.FORWARD,
    implementation="triton",
    check=Check(error=float("inf"), error_of="out", limit_used=float("inf"), method="rows", problems=("out is off",)),
    reason="wrong: out is off",
)


def rows():
    common = common_columns(describe())
    return [to_row(TIMED, common), to_row(WRONG, common)]


def test_every_row_has_case_machine_versions_and_commit():
    timed, wrong = rows()
    assert list(timed) == list(wrong)
    assert {"gpu", "cpu", "torch", "triton", "commit", "nsa-core_version", "nsa-bench_version", "time"} <= set(timed)
    numbers = (
        "shape",
        "num_heads",
        "num_kv_heads",
        "head_dim_qk",
        "head_dim_v",
        "seq_len",
        "num_sequences",
        "geometry",
        "dtype",
        "selection",
    )
    assert [timed[name] for name in numbers] == ["M", 64, 4, 128, 128, 1000, 2, "32/16/64/16/512", "bfloat16", "random"]
    assert (timed["median_ms"], timed["count"], timed["error"], timed["near_ties"]) == (2.0, 12, 0.001, 3)
    assert (wrong["median_ms"], wrong["error"], wrong["reason"]) == (None, "inf", "wrong: out is off")


def test_rows_survive_json_and_csv(tmp_path):
    # once, because they contain the time
    written = rows()
    write_json(tmp_path / "a.json", {"rows": written})
    assert json.loads((tmp_path / "a.json").read_text())["rows"] == written
    write_csv(tmp_path / "a.csv", written)
    with (tmp_path / "a.csv").open(newline="") as file:
        back = list(csv.DictReader(file))
    assert back == [{name: "" if value is None else str(value) for name, value in row.items()} for row in written]


def test_cost_is_time_per_pair_and_element():
    # windows of 512 over 400 and 600 tokens, 64 heads, 256 elements
    pairs = 64 * (400 * 401 // 2 + 512 * 513 // 2 + 88 * 512)
    assert TIMED.pair_cost_ps == pytest.approx(2e9 / (pairs * 256))
    assert WRONG.pair_cost_ps is None


def test_only_our_own_operations_fail():
    assert WRONG.is_failure
    assert not TIMED.is_failure
    absent = Measurement(case=CASE, operation="dense", direction=Direction.FORWARD, implementation="flex", is_ours=False, reason="absent")
    assert not absent.is_failure


def test_memory_is_held_against_the_tensors():
    held = Measurement(case=CASE, operation="nsa", direction=Direction.BOTH, implementation="triton", peak_bytes=300, tensor_bytes=200)
    assert held.peak_ratio == 1.5
    assert TIMED.peak_ratio is None
