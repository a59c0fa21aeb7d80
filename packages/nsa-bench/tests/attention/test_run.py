"""`nsa-bench attention`, case by case."""

import time

import pytest
import torch
from attrs import evolve
from torch.nn.attention import SDPBackend

from nsa_bench import measurement
from nsa_bench.attention import run as attention
from nsa_bench.attention.run import run_jobs
from nsa_bench.baselines import BASELINES, Baseline, _sdpa
from nsa_bench.cases import OURS, Case, Selection, head_shape, parse_geometry
from nsa_bench.measurement import Direction, Job, Setup
from nsa_bench.routes import RouteRecorder
from nsa_core import Reason
from nsa_core.reference.causal import causal_attention
from nsa_core.reference.sdpa import sdpa_backends

CPU = torch.device("cpu")
CASE = Case(shape=head_shape(4, 2, 16, 16), seq_len=120, geometry=parse_geometry("8/4/8/6/16"), dtype=torch.float32)
FORWARD, BOTH = Direction


class Spoiled:
    """A backend of nsa_core with a changed result."""

    def __init__(self, backend, spoil):
        self._backend, self._spoil = backend, spoil
        self.name, self.operation, self.capability = "spoiled", backend.operation, backend.capability

    def reasons_against(self, request):
        return ()

    def preference(self, request):
        return 100

    def __call__(self, *tensors, **options):
        return self._spoil(self._backend(*tensors, **options))


def setup_of(operation=None, spoil=None, backend="auto"):
    spoiled = [Spoiled(each, spoil) for each in sdpa_backends() if each.operation == operation]
    return Setup(device=CPU, registry=RouteRecorder((*sdpa_backends(), *spoiled)), backend=backend)


def run(job, where=None):
    return {(one.operation, one.direction): one for one in run_jobs((job,), where or setup_of())}


def test_every_operation_is_checked_and_timed_in_both_directions():
    found = run(Job(case=CASE, operations=OURS))
    assert set(found) == {(name, direction) for name in OURS for direction in Direction} - {("select", BOTH)}
    for one in found.values():
        assert one.reason == ""
        assert one.implementation == "sdpa"
        assert one.timing.count >= 3
        assert one.check.limit_used <= 1
    assert found["nsa", BOTH].tensor_bytes == 2 * 4 * (120 * 4 * (32 + 3) + (29 + 2 * 120) * 2 * 32)
    assert found["nsa", BOTH].peak_bytes is None
    assert found["cmp", BOTH].check.error_of in ("out", "dq", "dk_cmp", "dv_cmp")


def test_packed_cases_have_no_dense_baseline():
    found = run(Job(case=evolve(CASE, lengths=(50, 0, 70)), operations=("nsa", "select"), baselines=("flash",)))
    assert set(found) == {("nsa", FORWARD), ("nsa", BOTH), ("select", FORWARD)}
    assert not any(one.reason for one in found.values())


@pytest.mark.parametrize("operation", ["cmp", "slc", "win"])
def test_a_wrong_backend_gets_no_time(operation):
    def spoil(output):
        return output._replace(out=output.out * 1.01)

    found = run(Job(case=CASE, operations=OURS), setup_of(operation, spoil))
    for name in (operation, "nsa"):
        for direction in Direction:
            one = found[name, direction]
            assert one.timing is None
            assert one.is_failure
            assert one.reason.startswith("wrong: out is off by")
            assert one.check.limit_used > 1
    assert "spoiled" in found[operation, FORWARD].implementation
    others = set(OURS) - {operation, "nsa"}
    assert all(one.timing is not None for (name, _), one in found.items() if name in others)


def test_a_wrong_choice_gets_no_time():
    found = run(Job(case=CASE, operations=("select", "nsa")), setup_of("select", lambda indices: indices.roll(1, dims=1)))
    assert "choices differ above the near-tie margin" in found["select", FORWARD].reason
    assert found["select", FORWARD].timing is None
    assert found["nsa", FORWARD].reason.startswith("wrong: ")


def test_a_backward_alone_that_is_wrong_leaves_the_forward_its_time():
    def spoil(output):
        # the value stays, the gradient doubles
        return output._replace(out=2 * output.out - output.out.detach())

    found = run(Job(case=CASE, operations=("win",)), setup_of("win", spoil))
    assert found["win", FORWARD].timing is not None
    assert found["win", BOTH].timing is None
    assert [part.split()[0] for part in found["win", BOTH].reason.removeprefix("wrong: ").split("; ")] == ["dq", "dk_win", "dv_win"]


def test_a_backend_that_breaks_is_reported_and_the_others_go_on():
    def spoil(output):
        raise RuntimeError("launch failed\nand a long story")

    found = run(Job(case=CASE, operations=("slc", "win", "select")), setup_of("win", spoil))
    assert {found["win", direction].reason for direction in Direction} == {"RuntimeError: launch failed"}
    assert found["slc", BOTH].timing is not None
    broken = run(Job(case=CASE, operations=("select",)), setup_of("select", spoil))
    assert broken["select", FORWARD].reason == "RuntimeError: launch failed"
    assert broken["select", FORWARD].is_failure


def test_what_is_not_finite_is_wrong():
    def spoil(output):
        return output._replace(out=output.out / 0)

    assert "out has NaN or infinite elements" in run(Job(case=CASE, operations=("win",)), setup_of("win", spoil))["win", FORWARD].reason


def test_a_name_that_cannot_serve_has_its_reason():
    found = run(Job(case=CASE, operations=("nsa", "slc")), setup_of(backend="triton"))
    for one in found.values():
        assert one.timing is None
        assert "no backend 'triton'" in one.reason


class Declining(Spoiled):
    def reasons_against(self, request):
        return Reason.incapable("heads too wide"), Reason.incapable("no such device")


def test_every_reason_against_a_named_backend_is_given():
    declining = [Declining(each, None) for each in sdpa_backends() if each.operation == "win"]
    where = Setup(device=CPU, registry=RouteRecorder((*sdpa_backends(), *declining)), backend="spoiled")
    reason = run(Job(case=CASE, operations=("win",)), where)["win", FORWARD].reason
    assert "heads too wide" in reason
    assert "no such device" in reason
    assert "\n" not in reason


def test_the_measured_overlap_stands_beside_the_times():
    job = Job(case=evolve(CASE, seq_len=600, selection=Selection.TRAINED_LIKE), operations=("nsa", "slc"), directions=(FORWARD,))
    found = run(job)
    assert 0.7 < found["nsa", FORWARD].overlap < 0.9
    assert 0.75 < found["slc", FORWARD].overlap < 0.85
    assert run(evolve(job, case=evolve(job.case, selection=Selection.RANDOM)))["slc", FORWARD].overlap < 0.2


def test_absent_baselines_have_reasons_and_the_one_that_is_here_a_time():
    found = list(run_jobs((Job(case=CASE, operations=(), baselines=BASELINES),), setup_of()))
    assert [one.operation for one in found] == ["dense"] * 8
    by_name = {one.implementation: one for one in found}
    assert set(by_name) == {"SDPA flash", "SDPA cuDNN", "FlexAttention", "flash-attn"}
    assert by_name["SDPA flash"].timing is not None
    for name in set(by_name) - {"SDPA flash"}:
        assert by_name[name].reason
        assert not by_name[name].is_failure


def test_a_much_slower_dense_kernel_is_timed_once(monkeypatch):
    monkeypatch.setattr(measurement, "BUDGET_MS", 1500)

    def slow(q, k, v):
        time.sleep(0.05)
        return causal_attention(q, k, v)

    kernels = {"flash": Baseline(name="fast", run=causal_attention), "flex": Baseline(name="slow", run=slow)}
    monkeypatch.setattr(attention, "find_baseline", lambda name, case, device: kernels[name])
    found = list(run_jobs((Job(case=CASE, operations=(), baselines=("flash", "flex")),), setup_of()))
    assert [(one.implementation, one.timing.count) for one in found] == [("fast", 50), ("fast", 50), ("slow", 1), ("slow", 1)]


def test_memory_is_that_of_the_whole_operation_forward_and_backward(monkeypatch):
    monkeypatch.setattr(measurement, "peak_bytes", lambda call, device, held_before: 10**6 + held_before)
    found = run(Job(case=CASE, operations=("nsa", "win")))
    assert {key: one.peak_bytes for key, one in found.items()} == {
        ("nsa", FORWARD): None, ("nsa", BOTH): 10**6, ("win", FORWARD): None, ("win", BOTH): None,
    }  # fmt: skip
    assert found["nsa", BOTH].peak_ratio == 10**6 / found["nsa", BOTH].tensor_bytes


def test_a_dense_kernel_that_does_not_take_the_case_says_what_torch_says(monkeypatch):
    def cudnn(name, case, device):
        return Baseline(name="SDPA cuDNN", run=_sdpa(SDPBackend.CUDNN_ATTENTION, is_padded=False))

    monkeypatch.setattr(attention, "find_baseline", cudnn)
    found = list(run_jobs((Job(case=CASE, operations=(), baselines=("cudnn",)),), setup_of()))
    assert len(found) == 2
    for one in found:
        assert one.timing is None
        assert one.reason.startswith("RuntimeError: ")
        assert not one.is_failure


def test_memory_alone_takes_no_time():
    found = run(Job(case=CASE, operations=("nsa",), directions=(BOTH,), is_timed=False))
    one = found["nsa", BOTH]
    assert (one.timing, one.reason) == (None, "")
    assert one.check.problems == ()


@pytest.mark.parametrize("name", ["make_tensors", "expect"])
def test_an_operation_that_does_not_fit_is_reported_and_the_next_job_goes_on(name, monkeypatch):
    kept = getattr(attention, name)
    refused = []

    def refuse_once(*arguments, **options):
        if not refused:
            refused.append(name)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return kept(*arguments, **options)

    monkeypatch.setattr(attention, name, refuse_once)
    job = Job(case=CASE, operations=("win",), directions=(FORWARD,))
    first, second = run_jobs((job, evolve(job, operations=("cmp",))), setup_of())
    assert first.reason == "inputs or reference: OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"
    assert (first.operation, second.operation) == ("win", "cmp")
    assert second.timing is not None


@pytest.mark.hardware(capability=(8, 0))
@pytest.mark.parametrize("selection", list(Selection))
def test_a_gpu_measures_everything(selection):
    case = Case(shape=head_shape(16, 2, 64, 64), seq_len=3000, selection=selection)
    where = Setup(device=torch.device("cuda"), registry=RouteRecorder.of_installed())
    found = {(one.operation, one.direction): one for one in run_jobs((Job(case=case, operations=OURS),), where)}
    for one in found.values():
        assert one.reason == "", one
    assert found["nsa", BOTH].peak_bytes > found["nsa", BOTH].tensor_bytes
