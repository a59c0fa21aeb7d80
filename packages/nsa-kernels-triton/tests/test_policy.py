"""Which requests the kernels take, with simulated compute capabilities, and the tiles that they run on."""

import subprocess
import sys
import warnings
from itertools import product

import pytest
import torch
from attrs import evolve

from nsa_core import BranchRequest, Layout, Operation, ReasonKind, explain_routing
from nsa_kernels_triton import launch, policy
from nsa_kernels_triton.hopper.launch import options_of_one
from nsa_kernels_triton.policy import KINDS, Tiles, padded, reasons_against, shared_memory_bytes, shared_memory_estimate, tiles

ATTENTION = (Operation.CMP, Operation.WIN)
SELECTION = (Operation.SELECT, Operation.SLC, Operation.NSA)
OFFERED = (*ATTENTION, *SELECTION, Operation.CHOOSE)
KNOWN = tuple(policy.SHARED_MEMORY_BYTES)


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
        "k, v of torch.float64 (takes torch.bfloat16, torch.float16, torch.float32)",
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
        assert messages(request, ReasonKind.POLICY) == [policy.FOR_TESTS]


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
    reason = f"incapable: {policy.NOT_INTERPRETING}"
    before, refusal, after = asked_before_and_after_triton_is_loaded(without_interpreter)
    assert before == f"{reason} False"
    assert refusal == f"triton (preference -100): {reason}"
    assert after == f"{reason} True"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process with a GPU does not interpret by default")
def test_a_cpu_that_interprets_runs_by_name_and_says_so_before_a_compiler_is_loaded(without_interpreter):
    reason = f"policy: {policy.FOR_TESTS}"
    assert asked_before_and_after_triton_is_loaded(without_interpreter | {"TRITON_INTERPRET": "True"}) == [
        f"{reason} False", "it ran", f"{reason} True",
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["1", "true", "On", "YES", "y", "0", "off", "2", "t", " 1", ""])
def test_the_switch_is_read_as_triton_reads_it(word, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", word)
    assert policy.interprets() == triton.knobs.runtime.interpret


def test_without_triton_nothing_runs(monkeypatch):
    monkeypatch.setattr(policy, "find_spec", lambda name: None)
    assert messages(gpu(8, 0, operation="win"), ReasonKind.INCAPABLE) == [policy.NOT_INSTALLED]


def test_other_devices_are_out_of_reach():
    assert messages(BranchRequest(operation="win", device_type="mps"), ReasonKind.INCAPABLE) == ["device mps (needs cuda or cpu)"]


@pytest.mark.parametrize("capability", [*KNOWN, (13, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_fit_shared_memory_at_every_head_dimension(kind, capability):
    for head_dim_qk, head_dim_v, itemsize in product(range(16, 257, 8), range(16, 257, 8), (2, 4)):
        tile = tiles(kind, capability, head_dim_qk, head_dim_v, itemsize)
        estimate = shared_memory_estimate(kind, tile, capability, head_dim_qk, head_dim_v, itemsize)
        assert estimate <= shared_memory_bytes(capability), (head_dim_qk, head_dim_v, itemsize, tile)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), None])
def test_tiles_are_powers_of_two_that_matrix_units_take(kind, capability):
    for head_dim, itemsize in product((1, 16, 64, 128, 192, 256), (2, 4)):
        tile = tiles(kind, capability, head_dim, head_dim, itemsize)
        for extent in (tile.block_rows, tile.block_keys):
            assert extent >= 16
            assert extent & (extent - 1) == 0
        assert tile.num_warps in (4, 8)
        assert tile.num_stages >= 1


def test_an_unknown_gpu_gets_the_smallest_tiles():
    assert shared_memory_bytes((13, 7)) == min(policy.SHARED_MEMORY_BYTES.values()) == policy.SMALLEST
    assert tiles("interval_forward", (13, 7), 128, 128, 2) == tiles("interval_forward", (8, 9), 128, 128, 2)


def test_a_newer_gpu_gets_the_tiles_of_the_design_target():
    for kind in KINDS:
        assert tiles(kind, (10, 0), 192, 128, 2) == tiles(kind, (8, 0), 192, 128, 2)


def test_the_interpreter_gets_small_tiles():
    assert {tiles(kind, None, 192, 128, 2) for kind in KINDS} == {Tiles(16, 16, 4, 1)}


@pytest.mark.parametrize(
    ("head_dim", "columns"), [(1, 16), (16, 16), (17, 32), (40, 48), (64, 64), (80, 80), (96, 96), (192, 192), (200, 256), (256, 256)]
)
def test_a_head_dimension_is_padded_in_two_parts(head_dim, columns):
    assert padded(head_dim) == columns


@pytest.fixture
def known_triton(monkeypatch):
    """Let a Triton be installed that the kernels for compute capability 9.0 are written for."""
    monkeypatch.setattr(policy, "has_gluon", lambda: True)


@pytest.mark.usefixtures("known_triton")
@pytest.mark.parametrize("kind", policy.PIPELINES)
def test_rings_are_for_half_precision_on_capability_9_0(kind):
    assert policy.pipeline(kind, (9, 0), 128, 128, 2) is not None
    for capability, head_dim_qk, head_dim_v, itemsize in (
        (None, 128, 128, 2),
        ((8, 0), 128, 128, 2),
        ((10, 0), 128, 128, 2),
        ((9, 0), 128, 128, 4),
        # rows that start off 16 bytes, results in float32, and heads beyond the tiles
        ((9, 0), 84, 84, 2),
        ((9, 0), 32, 32, 2),
        ((9, 0), 200, 128, 2),
        ((9, 0), 256, 256, 2),
    ):
        assert policy.pipeline(kind, capability, head_dim_qk, head_dim_v, itemsize) is None


@pytest.mark.usefixtures("known_triton")
@pytest.mark.parametrize("kind", sorted(policy.PIPELINES.keys() - {"scores"}))
def test_values_are_refused_for_their_own_sake(kind):
    for head_dim_qk, head_dim_v in ((128, 32), (128, 84), (192, 200), (192, 256), (64, 72), (128, 136)):
        assert policy.pipeline(kind, (9, 0), head_dim_qk, head_dim_v, 2) is None


@pytest.mark.usefixtures("known_triton")
def test_scores_of_narrow_heads_have_no_ring():
    assert policy.pipeline("scores", (9, 0), 64, 128, 2) is None


@pytest.mark.usefixtures("known_triton")
@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [(40, (64, 0)), (64, (64, 0)), (72, (128, 0)), (96, (128, 0)), (136, (128, 64)), (192, (128, 64))],
)
def test_heads_between_the_rings_take_the_next_one(head_dim, parts):
    assert policy.pipeline_parts(head_dim) == parts
    assert policy.pipeline("window_forward", (9, 0), head_dim, 40, 2) is policy.PIPELINES["window_forward"][sum(parts)]


@pytest.mark.usefixtures("known_triton")
def test_values_fit_the_place_of_the_first_columns_of_q():
    assert policy.pipeline("window_forward", (9, 0), 80, 96, 2) is policy.PIPELINES["window_forward"][128]
    assert policy.pipeline("window_forward", (9, 0), 64, 72, 2) is None


@pytest.mark.usefixtures("known_triton")
def test_values_in_two_parts_have_rings_of_their_own():
    for kind in policy.PIPELINES:
        wide = policy.PIPELINES[kind][192] if kind == "scores" else policy.WIDE_PIPELINES.get(kind)
        assert policy.pipeline(kind, (9, 0), 192, 136, 2) is wide
        assert policy.pipeline(kind, (9, 0), 128, 136, 2) is (policy.PIPELINES[kind][128] if kind == "scores" else None)


@pytest.fixture
def unknown_triton(monkeypatch):
    """Let a Triton be installed that the kernels for compute capability 9.0 are not written for."""
    monkeypatch.setattr(policy, "version", lambda name: "3.99.0")
    for remembered in (policy.has_gluon, policy._warn_without_gluon):
        remembered.cache_clear()
    yield
    for remembered in (policy.has_gluon, policy._warn_without_gluon):
        remembered.cache_clear()


@pytest.mark.usefixtures("unknown_triton")
def test_an_unknown_triton_leaves_the_portable_kernels_with_one_warning():
    with pytest.warns(UserWarning, match="capability 9.0 are off: Triton 3.99.0 is installed, and they need 3.6 or 3.7"):
        assert policy.pipeline("window_forward", (9, 0), 128, 128, 2) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy.pipeline("interval_dq", (9, 0), 128, 128, 2) is None


@pytest.mark.usefixtures("unknown_triton")
def test_nobody_is_warned_of_kernels_that_would_not_run_anyway(recwarn):
    for capability, head_dim, itemsize in (((8, 0), 128, 2), ((9, 0), 128, 4), ((9, 0), 32, 2), (None, 128, 2)):
        assert policy.pipeline("window_forward", capability, head_dim, head_dim, itemsize) is None
    assert not recwarn


@pytest.mark.usefixtures("unknown_triton")
@pytest.mark.parametrize("operation", [*ATTENTION, *SELECTION])
def test_routing_says_why_the_kernels_of_9_0_are_off(operation):
    decision = explain_routing(gpu(9, 0, operation=operation, head_dim_qk=128, head_dim_v=128))
    [candidate] = [candidate for candidate in decision.candidates if candidate.name == "triton"]
    assert decision.chosen == "triton"
    assert candidate.notes == (policy.without_gluon(),)
    assert f"note: {policy.without_gluon()}" in str(decision)
    for other in (
        gpu(8, 0, operation=operation),
        gpu(9, 0, operation="choose"),
        gpu(9, 0, operation=operation, dtype=torch.float32, kv_dtype=torch.float32),
    ):
        assert not any(candidate.notes for candidate in explain_routing(other).candidates)


def test_routing_has_nothing_to_add_where_the_kernels_of_9_0_are_on(monkeypatch):
    monkeypatch.setattr(policy, "has_gluon", lambda: True)
    assert not any(candidate.notes for candidate in explain_routing(gpu(9, 0, operation="nsa")).candidates)


@pytest.mark.parametrize("kind", policy.PIPELINES)
def test_computing_and_loading_threads_share_the_registers_of_a_program(kind):
    for pipeline in (*policy.PIPELINES[kind].values(), *(wide for name, wide in policy.WIDE_PIPELINES.items() if name == kind)):
        # setmaxnreg takes multiples of 8 from 24 to 256
        assert pipeline.loader_registers % 8 == 0
        assert 24 <= pipeline.loader_registers <= 128
        if pipeline.num_programs == 1 or not kind.startswith("selected"):
            options = options_of_one(pipeline)
            assert options["PART_REGISTERS"] % 8 == 0
            assert 128 * (pipeline.num_parts * options["PART_REGISTERS"] + pipeline.loader_registers) <= 2**16
            assert 128 * (pipeline.num_parts + 1) * options["maxnreg"] <= 2**16


@pytest.mark.parametrize("kind", ["compressed_forward", "window_forward", "interval_dq", "scores"])
def test_four_warps_compute_64_rows(kind):
    for pipeline in (*policy.PIPELINES[kind].values(), *(wide for name, wide in policy.WIDE_PIPELINES.items() if name == kind)):
        assert pipeline.block_rows == 64 * pipeline.num_parts


def test_a_tensor_that_starts_off_16_bytes_goes_to_the_portable_kernel(monkeypatch):
    monkeypatch.setattr(policy, "pipeline", lambda *request: request)
    rows = torch.zeros(2 * 64 + 8, dtype=torch.bfloat16)
    aligned, odd = (rows[offset : offset + 128].view(1, 1, 2, 64) for offset in (0, 1))
    assert launch.pipeline_for("window_forward", aligned, aligned, aligned) is not None
    for tensors in ((odd, aligned, aligned), (aligned, odd, aligned), (aligned, aligned, odd)):
        assert launch.pipeline_for("window_forward", *tensors) is None
