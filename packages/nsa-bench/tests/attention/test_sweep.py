"""The sweep: its cases, and the definition of a cliff."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_bench.attention.sweep import LENGTH, judge_sweep, short_lengths, sweep_jobs, sweep_points
from nsa_bench.cases import Selection, visible_pairs
from nsa_bench.measurement import Direction, Measurement, Timing
from nsa_core import BlockGeometry

POINTS = sweep_points(LENGTH, BlockGeometry(), torch.bfloat16, Selection.RANDOM)


def measured(case, cost_ps, operation="nsa", direction=Direction.FORWARD):
    """Return a measurement whose cost per pair and element is `cost_ps`; None: without a time."""
    time_ms = None if cost_ps is None else cost_ps * visible_pairs(operation, case) * case.shape.head_dims / 1e9
    timing = None if time_ms is None else Timing(median_ms=time_ms, min_ms=time_ms, max_ms=time_ms, count=10)
    return Measurement(case=case, operation=operation, direction=direction, implementation="triton", timing=timing)


def judged(costs, variable="D"):
    points = [point for point in POINTS if point.variable == variable]
    verdicts = judge_sweep(tuple(points), [measured(point.case, cost) for point, cost in zip(points, costs, strict=True)])
    return [(one.ratio and round(one.ratio, 3), one.verdict) for one in verdicts]


def test_the_points_are_those_of_the_issue():
    values = {}
    for point in POINTS:
        values.setdefault(point.variable, []).append(point.value)
    assert values == {
        "D": ["64", "80", "96", "128", "192", "256"],
        "H/G": ["1", "2", "3", "4", "5", "7", "8", "16"],
        "S": ["8191", "8192", "8193"],
        "packed": ["1 sequence", "100 sequences"],
    }
    groups = [point.case.shape for point in POINTS if point.variable == "H/G"]
    assert [shape.heads_per_group for shape in groups] == [1, 2, 3, 4, 5, 7, 8, 16]
    # about equally many query heads each, so that only H/G varies
    assert all(28 <= shape.num_heads <= 36 for shape in groups)
    one, many = (point.case for point in POINTS if point.variable == "packed")
    assert (one.seq_len, many.seq_len, one.lengths, len(many.lengths)) == (65536, 65536, None, 100)


@given(st.integers(0, 100_000), st.integers(1, 200))
def test_short_lengths_sum_and_grow(total, count):
    lengths = short_lengths(total, count)
    assert (len(lengths), sum(lengths)) == (count, total)
    assert all(later >= earlier - 1 for earlier, later in zip(lengths[:-1], lengths[1:], strict=True))


def test_a_case_dearer_than_a_neighbour_is_a_cliff():
    assert judged([1, 1.4, 1, 1.6, 2.4, 2.4]) == [
        (0.714, "within"), (1.4, "within"), (0.714, "within"), (1.6, "cliff"), (1.5, "within"), (1.0, "within"),
    ]  # fmt: skip


def test_only_neighbours_are_compared():
    assert {verdict for _, verdict in judged([1, 1.4, 1.9, 2.6, 3.6, 5])} == {"within"}


def test_packed_is_held_against_one_sequence_of_the_same_total():
    assert judged([1, 1.6], "packed") == [(0.625, "within"), (1.6, "cliff")]


def test_without_a_time_there_is_no_verdict_for_it_or_its_neighbours():
    assert [verdict for _, verdict in judged([1, None, 1, 1, 1, 9])] == ["no time", "no time", "no time", "within", "within", "cliff"]


def test_variables_do_not_touch_and_operations_are_apart():
    last, first = POINTS[5].case, POINTS[6].case
    found = [
        measured(last, 1),
        measured(first, 9),
        measured(POINTS[7].case, 9),
        measured(first, 1, "win"),
        measured(POINTS[7].case, 9, "win"),
    ]
    verdicts = judge_sweep(POINTS[5:8], found)
    assert [(one.measurement.operation, one.point.value, one.verdict) for one in verdicts] == [
        ("nsa", "256", "no time"), ("nsa", "1", "within"), ("win", "1", "within"), ("nsa", "2", "within"), ("win", "2", "cliff"),
    ]  # fmt: skip


def test_a_case_of_two_variables_is_measured_once():
    jobs = sweep_jobs(POINTS, ("nsa",), (Direction.FORWARD,))
    assert len({job.case for job in jobs}) == len(jobs) == len(POINTS) - 1


def test_a_pair_costs_the_same_however_many_there_are():
    one, many = (measured(point.case, 2.5) for point in POINTS if point.variable == "packed")
    assert one.pair_cost_ps == pytest.approx(many.pair_cost_ps) == pytest.approx(2.5)
