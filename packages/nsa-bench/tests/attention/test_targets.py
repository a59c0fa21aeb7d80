"""Targets and their measured figures."""

import pytest
import torch
from attrs import evolve

from nsa_bench.attention.targets import all_targets, judge_targets, target_jobs
from nsa_bench.cases import SHAPES, Case, Selection
from nsa_bench.measurement import Direction, Measurement, Timing
from nsa_core.testing.sampled import OPERANDS

FWD, BOTH = Direction
TARGETS = all_targets()


def target(name, kibi, direction, selection=Selection.RANDOM, operation="nsa", is_memory=False):
    wanted = (name, kibi * 1024, direction, selection, operation, is_memory)
    [found] = [t for t in TARGETS if (t.shape.name, t.seq_len, t.direction, t.selection, t.operation, t.is_memory) == wanted]
    return found


def measured(one, value):
    case = Case(shape=one.shape, seq_len=one.seq_len, selection=one.selection)
    held = {"peak_bytes": int(100 * value), "tensor_bytes": 100} if one.is_memory else {}
    timing = None if one.is_memory else Timing(median_ms=value, min_ms=value, max_ms=value, count=10)
    return Measurement(case=case, operation=one.operation, direction=one.direction, implementation="triton", timing=timing, **held)


def test_the_table_is_the_issues():
    assert len(TARGETS) == 2 * 11 + 4 + 4
    figures = {(t.must, t.aim) for t in TARGETS}
    assert (37.0, 28.0) in figures
    assert (260.0, 190.0) in figures
    assert (target("P", 64, BOTH).must, target("P", 64, BOTH).aim, target("P", 64, BOTH).unit) == (140.0, 95.0, "ms")
    assert (target("M", 64, FWD, Selection.TRAINED_LIKE).must, target("M", 64, FWD, Selection.TRAINED_LIKE).aim) == (None, 16.0)
    assert (target("P", 128, BOTH, is_memory=True).must, target("P", 128, BOTH, is_memory=True).unit) == (2.0, "x tensors")
    assert [t.shape.heads_per_group for t in TARGETS if t.operation == "slc"] == [1, 2, 4, 8]
    assert all(t.must is None or t.aim < t.must for t in TARGETS)


def test_the_jobs_give_every_target_its_figure_once():
    jobs = target_jobs(TARGETS, ("cudnn",))
    assert len(jobs) == 11 + 4 + 1
    for one in TARGETS:
        [job] = [j for j in jobs if (j.case.shape, j.case.seq_len, j.case.selection) == (one.shape, one.seq_len, one.selection)]
        assert job.operations == (one.operation,)
        assert one.direction in job.directions
        assert job.is_timed or one.is_memory
        assert job.case.dtype is torch.bfloat16
    [memory_only] = [job for job in jobs if not job.is_timed]
    assert (memory_only.case.shape.name, memory_only.case.seq_len, memory_only.directions) == ("P", 131072, (BOTH,))
    # dense attention is timed once per shape and length, and not for selected attention alone
    with_dense = [(job.case.shape.name, job.case.seq_len) for job in jobs if job.baselines]
    assert len(set(with_dense)) == len(with_dense) == 9


@pytest.mark.parametrize(("name", "gigabytes"), [("P", 12.2), ("M", 9.8)])
def test_twice_the_tensors_at_64k_are_what_the_issue_allows(name, gigabytes):
    shape, tokens, blocks = SHAPES[name], 65536, 4095
    rows = {
        "q": (tokens, shape.num_heads, shape.head_dim_qk),
        "gates": (tokens, shape.num_heads, 3),
        "out": (tokens, shape.num_heads, shape.head_dim_v),
    }
    for branch, count in (("cmp", blocks), ("slc", tokens), ("win", tokens)):
        rows |= {
            f"k_{branch}": (count, shape.num_kv_heads, shape.head_dim_qk),
            f"v_{branch}": (count, shape.num_kv_heads, shape.head_dim_v),
        }
    assert set(rows) == {*OPERANDS["nsa"], "out"}
    with_gradients = 2 * sum(torch.empty(sizes, dtype=torch.bfloat16, device="meta").nbytes for sizes in rows.values())
    assert 2 * with_gradients / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("value", "verdict"), [(28.0, "aim"), (28.1, "must"), (37.0, "must"), (37.1, "1.00 x must"), (74.0, "2.00 x must")]
)
def test_a_figure_is_held_against_aim_and_must(value, verdict):
    one = target("P", 64, FWD)
    [judgement] = judge_targets((one,), [measured(one, value)])
    assert (judgement.measured, judgement.verdict) == (value, verdict)


def test_an_aim_alone_is_missed_by_a_factor():
    one = target("P", 64, FWD, Selection.TRAINED_LIKE)
    assert judge_targets((one,), [measured(one, 33.0)])[0].verdict == "1.50 x aim"


def test_memory_is_a_ratio():
    time, memory = target("M", 64, BOTH), target("M", 64, BOTH, is_memory=True)
    both = evolve(measured(time, 80.0), peak_bytes=180, tensor_bytes=100)
    judgements = judge_targets((time, memory), [both])
    assert [(one.measured, one.verdict) for one in judgements] == [(80.0, "must"), (1.8, "must")]


def test_what_has_no_figure_says_why():
    one, memory = target("P", 64, FWD), target("P", 128, BOTH, is_memory=True)
    [judgement] = judge_targets((one,), [])
    assert (judgement.verdict, judgement.reason) == ("no figure", "not measured")
    wrong = evolve(measured(one, 1.0), timing=None, reason="wrong: out")
    assert judge_targets((one,), [wrong])[0].reason == "wrong: out"
    on_cpu = evolve(measured(memory, 1.0), peak_bytes=None)
    assert judge_targets((memory,), [on_cpu])[0].reason == "memory is measured on CUDA devices only"
    # another selection, or direction, is another figure
    assert judge_targets((one,), [measured(target("P", 64, BOTH), 1.0)])[0].measured is None
