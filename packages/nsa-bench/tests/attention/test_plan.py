"""From options to jobs."""

import pytest
import torch

from nsa_bench.attention import plan as plans
from nsa_bench.attention.plan import AttentionOptions, make_plan
from nsa_bench.baselines import BASELINES
from nsa_bench.cases import OURS, find_device
from nsa_bench.compare import make_comparisons
from nsa_bench.errors import OptionError
from nsa_bench.measurement import Direction
from nsa_bench.options import CompareOptions
from nsa_core import BlockGeometry


def plan(**options):
    return make_plan(AttentionOptions(device="cpu", **options))


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_cpu_measures_little_by_default():
    jobs = plan().jobs
    assert {job.case.seq_len for job in jobs} == {256}
    assert {job.case.dtype for job in jobs} == {torch.float32}
    assert [job.case.shape.name for job in jobs] == ["P", "L", "M", "S"]
    assert {(job.operations, job.directions, job.baselines) for job in jobs} == {(OURS, tuple(Direction), BASELINES)}
    assert jobs[0].case.geometry == BlockGeometry()


@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_measures_2k_to_128k_in_bf16():
    found = make_plan(AttentionOptions())
    assert found.device.type == "cuda"
    assert sorted({job.case.seq_len // 1024 for job in found.jobs}) == [2, 4, 8, 16, 32, 64, 128]
    assert {job.case.dtype for job in found.jobs} == {torch.bfloat16}


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("options", "is_replayed"), [({}, False), ({"graph": True}, True), ({"sweep": True}, True), ({"preset": "targets"}, False)]
)
def test_what_is_timed_as_cuda_graphs(options, is_replayed):
    assert {job.is_replayed for job in make_plan(AttentionOptions(**options)).jobs} == {is_replayed}


def test_every_option_reaches_the_jobs():
    jobs = plan(
        dtype="fp64", lengths="100,1k", shapes="L,6/2/8/4", operations="win,nsa", selection="trained-like,random",
        geometry="8/4/8/6/16", baseline="cudnn", backward=False,
    ).jobs  # fmt: skip
    assert len(jobs) == 2 * 2 * 2
    first, second = jobs[:2]
    assert (first.case.dtype, first.case.seq_len, first.case.shape.name, first.case.geometry.window_size) == (torch.float64, 100, "L", 16)
    assert (first.operations, first.directions) == (("nsa", "win"), (Direction.FORWARD,))
    assert [job.case.selection.value for job in jobs[:2]] == ["random", "trained-like"]
    # dense attention has no selection: once is enough
    assert (first.baselines, second.baselines) == (("cudnn",), ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": True}, "--graph times CUDA graphs"),
        ({"operations": "nsa,sum"}, "--operations has 'sum'"),
        ({"selection": "trained"}, "--selection has 'trained'"),
        ({"baseline": "fastest"}, "--baseline='fastest'"),
        ({"lengths": "long"}, "--lengths has 'long'"),
        ({"sweep": True, "shapes": "P"}, "--shapes came with --sweep"),
        ({"sweep": True, "baseline": "all"}, "--baseline came with --sweep"),
        ({"sweep": True, "lengths": "2k,4k"}, "varies one length by 1"),
        ({"sweep": True, "lengths": "1"}, "varies one length by 1"),
        ({"preset": "targets", "lengths": "2k"}, "--lengths came with --preset"),
        ({"preset": "targets", "sweep": True}, "--sweep came with --preset"),
        ({"preset": "targets"}, "--preset=targets on a CPU"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        plan(**options)


def test_every_contradiction_is_named_at_once():
    with pytest.raises(OptionError, match=r"--lengths came.*\n--dtype came"):
        plan(preset="targets", lengths="2k", dtype="bf16")


def test_a_sweep_has_points_and_no_baselines():
    found = plan(sweep=True, lengths="64")
    assert {job.operations for job in found.jobs} == {("nsa",)}
    assert {job.operations for job in plan(sweep=True, operations="slc,win").jobs} == {("slc", "win")}
    assert [point.value for point in found.points if point.variable == "S"] == ["63", "64", "65"]
    assert {job.baselines for job in found.jobs} == {()}
    assert {point.case.seq_len for point in plan(sweep=True).points if point.variable == "D"} == {8192}


@pytest.mark.usefixtures("a_gpu")
def test_the_targets_may_go_without_backward_or_baselines():
    found = make_plan(AttentionOptions(preset="targets", baseline="none"))
    assert len(found.targets) == 30
    assert {job.baselines for job in found.jobs} == {()}
    forward = make_plan(AttentionOptions(preset="targets", backward=False))
    assert {direction for job in forward.jobs for direction in job.directions} == {Direction.FORWARD}


def test_a_gpu_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(None).type == "cpu"
    with pytest.raises(OptionError, match="--device=cuda on a machine without a GPU"):
        find_device("cuda")


def test_comparisons_are_shapes_by_lengths():
    device, jobs = make_comparisons(CompareOptions(device="cpu", lengths="64,100", shapes="P,M", backward=False))
    assert device.type == "cpu"
    assert [(one.case.shape.name, one.case.seq_len) for one in jobs] == [("P", 64), ("P", 100), ("M", 64), ("M", 100)]
    assert {one.directions for one in jobs} == {(Direction.FORWARD,)}
    assert jobs[0].case.geometry.compression_stride == 64


def test_the_options_that_others_decide_exist():
    names = {name for fixed in plans.FIXED_BY.values() for name in fixed} | set(plans.FIXED_BY)
    assert all(hasattr(AttentionOptions(), name) for name in names)
