"""The tables of `attention` and `compare`."""

import io

import pytest
from attrs import evolve
from rich.console import Console

from nsa_bench.attention.sweep import SweepPoint, judge_sweep, sweep_table
from nsa_bench.attention.targets import all_targets, judge_targets, targets_table
from nsa_bench.cases import SHAPES, Case, Selection
from nsa_bench.measurement import Direction, Measurement, Timing
from nsa_bench.reporting import attention_tables, best_dense, progress_line
from nsa_core.testing.sampled import Check

FWD, BOTH = Direction
CASE = Case(shape=SHAPES["P"], seq_len=65536)
CHECK = Check(error=0.0031, error_of="dq", limit_used=0.4, method="rows in float64, 32 of 65536 rows", near_ties=5)


@pytest.fixture
def show():
    def show(*tables):
        console = Console(file=io.StringIO(), width=100)
        for table in tables:
            console.print(table)
        return console.file.getvalue()

    return show


def one(operation, direction, time_ms, implementation="triton", count=20, **more):
    timing = None if time_ms is None else Timing(median_ms=time_ms, min_ms=time_ms, max_ms=time_ms, count=count)
    ours = operation != "dense"
    return Measurement(
        case=CASE, operation=operation, direction=direction, implementation=implementation, timing=timing, check=CHECK, is_ours=ours, **more
    )


RUN = [
    one("nsa", FWD, 36.2, overlap=0.132),
    one("nsa", BOTH, 131.0, count=7, peak_bytes=3 * 2**30, tensor_bytes=2 * 2**30, overlap=0.132),
    one("win", FWD, None, reason="wrong: out is off"),
    one("dense", FWD, 150.0, "SDPA flash"),
    one("dense", FWD, 124.6, "SDPA cuDNN"),
    one("dense", BOTH, 601.0, "SDPA cuDNN", count=3),
    evolve(one("dense", FWD, None, "flash-attn", reason="not installed"), check=None),
    evolve(one("dense", BOTH, None, "flash-attn", reason="not installed"), check=None),
]


def test_both_directions_stand_on_one_line_with_their_gain_over_dense(show):
    text = show(*attention_tables(RUN))
    [line] = [line for line in text.splitlines() if line.strip().startswith("nsa ") and "triton" in line and "36.2" in line]
    assert "36.2 3.44x" in line
    assert "131 of 7 4.59x" in line
    assert "3.00 1.50x" in line
    assert "3.1e-03 dq" in line
    assert "P (64/4/192/128), 65536 tokens, random" in text


def test_the_fastest_dense_kernel_is_the_baseline(show):
    best = best_dense(RUN)
    assert {key[2]: found.implementation for key, found in best.items()} == {FWD: "SDPA cuDNN", BOTH: "SDPA cuDNN"}
    text = show(*attention_tables(RUN))
    assert "124.6 best" in text
    assert "601 of 3 best" in text
    assert "error / limit" in text
    assert "0.40" in text


def test_notes_name_what_is_absent_or_wrong_and_against_what_errors_are(show):
    text = show(*attention_tables(RUN))
    assert "against rows in float64, 32 of 65536 rows" in text
    assert "fwd win on triton: wrong: out is off" in text
    # said of both directions, said once
    assert text.count("dense on flash-attn: not installed") == 1
    assert text.count("nsa on triton: 13 % of free blocks persist to the next query") == 1
    assert "5 choices of blocks are too close to call" in text


def test_cases_have_tables_of_their_own(show):
    other = evolve(RUN[0], case=evolve(CASE, selection=Selection.TRAINED_LIKE))
    text = show(*attention_tables([RUN[0], other]))
    assert "tokens, random" in text
    assert "tokens, trained-like" in text


def test_the_sweeps_table_names_cliffs(show):
    points = tuple(SweepPoint(variable="S", value=str(tokens), case=evolve(CASE, seq_len=tokens)) for tokens in (8191, 8192, 8193))
    found = [evolve(one("nsa", FWD, time_ms), case=point.case) for point, time_ms in zip(points, (1.0, 1.0, 3.0), strict=True)]
    lines = show(sweep_table(judge_sweep(points, found))).splitlines()
    assert [line.split()[-1] for line in lines if line.strip().startswith("S ")] == ["within", "within", "cliff"]
    wrong = [*found[:2], evolve(found[2], timing=None, reason="wrong: out")]
    assert "wrong: out" in show(sweep_table(judge_sweep(points, wrong)))


def test_the_targets_table_holds_figures_against_must_and_aim(show):
    judgements = judge_targets(all_targets(), RUN)
    text = show(targets_table(judgements, RUN))
    lines = [line.split() for line in text.splitlines()]
    assert ["P", "64k", "random", "nsa", "fwd", "36.2", "ms", "37", "28", "124.6", "cuDNN", "must"] in lines
    assert ["P", "64k", "random", "nsa", "memory", "1.5", "x", "2", "1.4", "must"] in lines
    assert ["P", "64k", "trained-like", "nsa", "fwd", "-", "-", "22", "124.6", "cuDNN", "no", "figure"] in lines
    assert "M 8k random nsa fwd: not measured" in text


def test_progress_says_what_where_and_how_long():
    assert progress_line(RUN[0]) == "P (64/4/192/128), 65536 tokens, random: nsa fwd on triton: 36.2 ms"
    assert progress_line(RUN[2]).endswith("win fwd on triton: wrong: out is off")
    assert progress_line(evolve(RUN[0], timing=None)).endswith(": right")
