"""Which requests the kernels take, with simulated compute capabilities, and what routing notes on them."""

import subprocess
import sys

import pytest
import torch
from attrs import evolve

from nsa_core import BranchRequest, Layout, Operation, ReasonKind, explain_routing
from nsa_kernels_triton import pipelines, routing
from nsa_kernels_triton.routing import reasons_against

ATTENTION = (Operation.CMP, Operation.WIN)
SELECTION = (Operation.SELECT, Operation.SLC, Operation.NSA)
OFFERED = (*ATTENTION, *SELECTION, Operation.CHOOSE)


def gpu(major, minor, **fields):
    return BranchRequest(**{
        "operation": "win", "device_type": "cuda", "compute_capability": (major, minor), "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16,
        "num_queries": 4096, "num_keys": 4096, "num_heads": 64, "num_kv_heads": 4, "head_dim_qk": 192, "head_dim_v": 128,
        "needs_grad": True, **fields,
    })  # fmt: skip


def messages(request, kind):
    return [reason.message for reason in reasons_against(request) if reason.kind is kind]


@pytest.mark.parametrize("capability", [(8, 0), (8, 7), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0)], ids=str)
@pytest.mark.parametrize("operation", OFFERED)
def test_auto_takes_the_kernels_on_data_centre_gpus(operation, capability):
    decision = explain_routing(gpu(*capability, operation=operation))
    assert decision.chosen == "triton"
    assert decision.candidates[0].reasons == ()


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)])
@pytest.mark.parametrize("operation", SELECTION)
def test_auto_passes_selection_by_where_shared_memory_is_short(operation, capability):
    decision = explain_routing(gpu(*capability, operation=operation))
    assert decision.chosen == (None if operation is Operation.NSA else "sdpa")
    assert decision.candidates[0].is_capable


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)])
@pytest.mark.parametrize("operation", ATTENTION)
def test_auto_takes_the_other_kernels_there(operation, capability):
    assert explain_routing(gpu(*capability, operation=operation)).chosen == "triton"


def test_the_policy_names_its_decision():
    [message] = messages(gpu(8, 9, operation="slc"), ReasonKind.POLICY)
    assert message == "compute capability 8.9 has 99 KB of shared memory where selection is made for 163 KB (ADR 0009)"


@pytest.mark.parametrize("operation", OFFERED)
def test_a_name_overrides_the_policy(operation):
    assert explain_routing(gpu(8, 9, operation=operation), "triton").chosen == "triton"


@pytest.mark.parametrize("operation", OFFERED)
@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_nothing_overrides_a_gpu_that_is_too_old(operation, capability):
    request = gpu(*capability, operation=operation)
    assert explain_routing(request, "triton").chosen is None
    assert messages(request, ReasonKind.INCAPABLE) == [f"compute capability 7.{capability[1]} (needs 8.0 or newer)"]


def test_a_gpu_of_unknown_capability_is_refused():
    assert messages(evolve(gpu(8, 0), compute_capability=None), ReasonKind.INCAPABLE) == ["compute capability none (needs 8.0 or newer)"]


def test_every_reason_comes_at_once():
    request = gpu(7, 5, operation="win", dtype=torch.float64, kv_dtype=torch.float64, head_dim_qk=512)
    assert messages(request, ReasonKind.INCAPABLE) == [
        "q of torch.float64 (takes torch.bfloat16, torch.float16, torch.float32)",
        "k, v of torch.float64 (takes torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)",
        "head dimension 512 (at most 256)",
        "compute capability 7.5 (needs 8.0 or newer)",
    ]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_layout_runs_in_every_dtype_but_double(layout, dtype):
    assert reasons_against(gpu(8, 0, operation="nsa", layout=layout, dtype=dtype, kv_dtype=dtype)) == ()


@pytest.mark.parametrize(("head_dim_qk", "head_dim_v"), [(1, 1), (80, 96), (192, 128), (256, 256)])
def test_every_head_dimension_up_to_256_runs(head_dim_qk, head_dim_v):
    assert reasons_against(gpu(8, 0, operation="slc", head_dim_qk=head_dim_qk, head_dim_v=head_dim_v)) == ()


def test_deterministic_gradients_are_no_obstacle():
    assert reasons_against(gpu(9, 0, operation="slc", deterministic=True)) == ()


def test_on_a_cpu_auto_takes_the_reference_and_a_name_the_interpreter():
    # the tests of this package interpret: see conftest.py
    pytest.importorskip("triton")
    request = BranchRequest(operation="win")
    assert explain_routing(request).chosen == "sdpa"
    if not torch.cuda.is_available():
        assert explain_routing(request, "triton").chosen == "triton"
        assert messages(request, ReasonKind.POLICY) == [routing.FOR_TESTS]


PROGRAM = """
import sys, torch
from nsa_core import *
request = BranchRequest(operation="win")
reason = lambda: explain_routing(request, "triton").candidates[-1].reasons[0]
print(reason(), "triton" in sys.modules)
x = torch.zeros(1, 3, 1, 4)
try:
    sliding_window_attention(x, x, x, geometry=BlockGeometry(), backend="triton")
    print("it ran")
except BackendUnavailableError as error:
    print(error.args[0].splitlines()[-1].strip())
import triton
print(reason(), "triton" in sys.modules)
"""


def asked_before_and_after_triton_is_loaded(environment):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process with a GPU does not interpret by default")
def test_a_cpu_that_does_not_interpret_is_told_how_to_before_a_compiler_is_loaded(without_interpreter):
    reason = f"incapable: {routing.NOT_INTERPRETING}"
    before, refusal, after = asked_before_and_after_triton_is_loaded(without_interpreter)
    assert before == f"{reason} False"
    assert refusal == f"triton (preference -100): {reason}"
    assert after == f"{reason} True"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process with a GPU does not interpret by default")
def test_a_cpu_that_interprets_runs_by_name_and_says_so_before_a_compiler_is_loaded(without_interpreter):
    reason = f"policy: {routing.FOR_TESTS}"
    assert asked_before_and_after_triton_is_loaded(without_interpreter | {"TRITON_INTERPRET": "True"}) == [
        f"{reason} False", "it ran", f"{reason} True",
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["1", "true", "On", "YES", "y", "0", "off", "2", "t", " 1", ""])
def test_the_switch_is_read_as_triton_reads_it(word, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", word)
    assert routing.interprets() == triton.knobs.runtime.interpret


def test_without_triton_nothing_runs(monkeypatch):
    monkeypatch.setattr(routing, "find_spec", lambda name: None)
    assert messages(gpu(8, 0, operation="win"), ReasonKind.INCAPABLE) == [routing.NOT_INSTALLED]


def test_other_devices_are_out_of_reach():
    assert messages(BranchRequest(operation="win", device_type="mps"), ReasonKind.INCAPABLE) == ["device mps (needs cuda or cpu)"]


@pytest.mark.parametrize("operation", [*ATTENTION, *SELECTION])
def test_routing_says_why_the_kernels_of_9_0_are_off(operation, monkeypatch):
    monkeypatch.setattr(pipelines, "has_gluon", lambda: False)
    decision = explain_routing(gpu(9, 0, operation=operation, head_dim_qk=128, head_dim_v=128))
    [candidate] = [candidate for candidate in decision.candidates if candidate.name == "triton"]
    assert decision.chosen == "triton"
    assert candidate.notes == (pipelines.without_gluon(),)
    assert f"note: {pipelines.without_gluon()}" in str(decision)
    for other in (
        gpu(8, 0, operation=operation),
        gpu(9, 0, operation="choose"),
        gpu(9, 0, operation=operation, dtype=torch.float32, kv_dtype=torch.float32),
    ):
        assert not any(candidate.notes for candidate in explain_routing(other).candidates if candidate.name == "triton")


def test_routing_has_nothing_to_add_where_the_kernels_of_9_0_are_on(monkeypatch):
    monkeypatch.setattr(pipelines, "has_gluon", lambda: True)
    assert not any(candidate.notes for candidate in explain_routing(gpu(9, 0, operation="nsa")).candidates)
