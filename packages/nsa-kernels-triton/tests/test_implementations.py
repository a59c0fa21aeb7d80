"""Which implementation of a kernel runs and why, and the pipelines of those for compute capability 9.0."""

import warnings

import pytest
import torch
from attrs import evolve

from nsa_core import BlockGeometry, BranchRequest, explain_routing
from nsa_kernels_triton import device, implementations, pipelines
from nsa_kernels_triton.hopper.launch import options_of_one
from nsa_kernels_triton.implementations import IMPLEMENTATIONS, KernelRequest, config_of, kernel_for, notes_on
from nsa_kernels_triton.pipelines import PIPELINES, WIDE_PIPELINES, PipelineConfig, pipeline, pipeline_parts
from nsa_kernels_triton.tile_table import Tiles


def request(kind="window_forward", capability=(9, 0), head_dim_qk=128, head_dim_v=128, itemsize=2, **facts):
    return KernelRequest(kind, capability, head_dim_qk, head_dim_v, itemsize, **facts)


def objections(*sizes, **facts):
    """Return what stands against the kernels for 9.0."""
    return IMPLEMENTATIONS[0].objections(request(*sizes, **facts))


@pytest.mark.parametrize("kind", PIPELINES)
def test_pipelines_are_for_half_precision_on_capability_9_0(kind):
    assert isinstance(config_of(request(kind)), PipelineConfig)
    portable = type(None) if kind == "shared_forward" else Tiles
    for sizes in (
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
        assert isinstance(config_of(request(kind, *sizes)), portable)


@pytest.mark.parametrize("kind", sorted(PIPELINES.keys() - {"scores"}))
def test_values_are_refused_for_their_own_sake(kind):
    for head_dim_qk, head_dim_v in ((128, 32), (128, 84), (192, 200), (192, 256), (64, 72), (128, 136)):
        assert pipeline(kind, head_dim_qk, head_dim_v) is None


def test_scores_of_narrow_heads_have_no_pipeline():
    assert pipeline("scores", 64, 128) is None


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [(40, (64, 0)), (64, (64, 0)), (72, (128, 0)), (96, (128, 0)), (136, (128, 64)), (192, (128, 64))],
)
def test_heads_between_the_pipelines_take_the_next_one(head_dim, parts):
    assert pipeline_parts(head_dim) == parts
    assert pipeline("window_forward", head_dim, 40) is PIPELINES["window_forward"][sum(parts)]


def test_values_fit_the_buffer_of_the_first_columns_of_q():
    assert pipeline("window_forward", 80, 96) is PIPELINES["window_forward"][128]
    assert pipeline("window_forward", 64, 72) is None


def test_values_in_two_parts_have_pipelines_of_their_own():
    for kind in PIPELINES:
        wide = PIPELINES[kind][192] if kind == "scores" else WIDE_PIPELINES.get(kind)
        assert pipeline(kind, 192, 136) is wide
        assert pipeline(kind, 128, 136) is (PIPELINES[kind][128] if kind == "scores" else None)


@pytest.mark.parametrize(
    ("kind", "facts", "message"),
    [
        ("window_forward", {"is_aligned": False}, "a tensor that starts off 16 bytes"),
        ("window_forward", {"is_ring": True}, "a ring of keys"),
        ("interval_dq", {"has_dlse": True}, "a gradient of lse"),
        ("scores", {"heads_per_group": 8}, "8 heads per group"),
        ("scores", {"heads_per_group": 17}, "17 heads per group"),
        ("scores", {"strides": 1}, "1 strides per selection block"),
        ("scores", {"strides": 17}, "17 strides per selection block"),
        ("selected_forward", {"selection_block_size": 96}, "selection_block_size=96 (takes multiples of 64)"),
        ("selected_backward", {"selection_block_size": 32}, "selection_block_size=32 (takes multiples of 64)"),
        ("shared_forward", {"selection_block_size": 128}, "selection_block_size=128 (takes 64)"),
        ("shared_forward", {"is_cached": True}, "a cache"),
    ],
)
def test_a_call_that_they_do_not_take_gets_the_portable_kernel_and_a_reason(kind, facts, message):
    [found] = objections(kind, **facts)
    assert found.startswith(message)
    assert not isinstance(config_of(request(kind, **facts)), PipelineConfig)


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("scores", {"heads_per_group": 9, "strides": 2}),
        ("scores", {"heads_per_group": 16, "strides": 16}),
        ("selected_forward", {"selection_block_size": 128}),
        ("interval_dkdv", {"has_dlse": True}),
    ],
)
def test_the_edges_of_what_they_take(kind, facts):
    assert objections(kind, **facts) == []


def test_every_reason_comes_at_once():
    assert len(objections("scores", (8, 0), 32, 32, 4, is_aligned=False, heads_per_group=1, strides=1, has_gluon=False)) == 7


@pytest.fixture
def unknown_triton(monkeypatch):
    """Let a Triton be installed that the kernels for compute capability 9.0 are not written for."""
    monkeypatch.setattr(pipelines, "version", lambda name: "3.99.0")
    remembered = (pipelines.has_gluon, implementations._warn_without_gluon, config_of)
    for each in remembered:
        each.cache_clear()
    yield
    for each in remembered:
        each.cache_clear()


@pytest.mark.usefixtures("unknown_triton")
def test_an_unknown_triton_leaves_the_portable_kernels_with_one_warning():
    assert not pipelines.has_gluon()
    with pytest.warns(UserWarning, match="capability 9.0 are off: Triton 3.99.0 is installed, and they need 3.6 or 3.7"):
        assert isinstance(config_of(request(has_gluon=False)), Tiles)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(config_of(request("interval_dq", has_gluon=False)), Tiles)


@pytest.mark.usefixtures("unknown_triton")
def test_nobody_is_warned_of_kernels_that_would_not_run_anyway(recwarn):
    for capability, head_dim, itemsize in (((8, 0), 128, 2), ((9, 0), 128, 4), ((9, 0), 32, 2), (None, 128, 2)):
        assert isinstance(config_of(request("window_forward", capability, head_dim, head_dim, itemsize, has_gluon=False)), Tiles)
    assert not recwarn


def test_a_tensor_that_starts_off_16_bytes_goes_to_the_portable_kernel(monkeypatch):
    monkeypatch.setattr(pipelines, "has_gluon", lambda: True)
    monkeypatch.setattr(device, "capability_of", lambda x: (9, 0))
    rows = torch.zeros(2 * 64 + 8, dtype=torch.bfloat16)
    aligned, odd = (rows[offset : offset + 128].view(1, 1, 2, 64) for offset in (0, 1))
    assert isinstance(kernel_for("window_forward", aligned, aligned, aligned), PipelineConfig)
    for tensors in ((odd, aligned, aligned), (aligned, odd, aligned), (aligned, aligned, odd)):
        assert isinstance(kernel_for("window_forward", *tensors), Tiles)


def test_routing_can_show_what_keeps_the_kernels_of_9_0_off(monkeypatch):
    monkeypatch.setattr(pipelines, "has_gluon", lambda: True)
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim_qk": 128, "head_dim_v": 128, "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    fine = BlockGeometry(32, 16, 32, 16, 1, 2, 512)
    asked = BranchRequest(operation="nsa", device_type="cuda", compute_capability=(9, 0), geometry=fine, needs_grad=True, **sizes)
    assert notes_on(asked) == (
        "portable kernels for scores: 4 heads per group (takes 9 to 16)",
        "portable kernels for selected_forward, selected_backward: selection_block_size=32 (takes multiples of 64)",
    )
    odd = BranchRequest(operation="win", device_type="cuda", compute_capability=(9, 0), **sizes)
    assert notes_on(odd) == ()
    misaligned = evolve(odd, is_aligned=False)
    assert notes_on(misaligned) == (
        "portable kernels for window_forward: a tensor that starts off 16 bytes (rows are copied in pieces of 16)",
    )
    assert "note: portable kernels for window_forward: a tensor that starts off 16 bytes" in str(explain_routing(misaligned))


@pytest.mark.parametrize("kind", pipelines.PIPELINES)
def test_consumer_and_producer_threads_share_the_registers_of_a_program(kind):
    for config in (*pipelines.PIPELINES[kind].values(), *(wide for name, wide in pipelines.WIDE_PIPELINES.items() if name == kind)):
        # setmaxnreg takes multiples of 8 from 24 to 256
        assert config.loader_registers % 8 == 0
        assert 24 <= config.loader_registers <= 128
        if config.num_programs == 1 or not kind.startswith("selected"):
            options = options_of_one(config)
            assert options["PART_REGISTERS"] % 8 == 0
            assert 128 * (config.num_parts * options["PART_REGISTERS"] + config.loader_registers) <= 2**16
            assert 128 * (config.num_parts + 1) * options["maxnreg"] <= 2**16


@pytest.mark.parametrize("kind", ["compressed_forward", "window_forward", "interval_dq", "scores"])
def test_four_warps_compute_64_rows(kind):
    for config in (*pipelines.PIPELINES[kind].values(), *(wide for name, wide in pipelines.WIDE_PIPELINES.items() if name == kind)):
        assert config.block_rows == 64 * config.num_parts
