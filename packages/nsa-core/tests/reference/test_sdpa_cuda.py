"""The SDPA reference on a GPU: the same properties, and that nothing waits for it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from nsa_core import CacheOverflowError, NativeSparseAttention, NSAConfig, Operation
from nsa_core.reference import sdpa
from nsa_core.testing import properties
from nsa_core.testing.conformance import check_backend
from nsa_core.testing.inputs import SMALL, Shape
from nsa_core.testing.properties import Where

pytestmark = pytest.mark.hardware(capability=(8, 0))

CONFIG = NSAConfig(64, 4, 2, 16, 12, geometry=SMALL)
PLACES = [Where(device="cuda", dtype=torch.float64), Where(device="cuda", dtype=torch.float32)]
SHAPES = [Shape(num_queries=61, batch=2), Shape(lengths=(37, 0, 1, 24), surplus_blocks=2, num_heads=6)]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every operation that waits for the GPU an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", sdpa.sdpa_backends(), ids=lambda backend: backend.operation.value)
def test_every_operation_conforms_to_the_oracle_on_a_gpu(backend: sdpa.SDPABackend) -> None:
    report = check_backend(backend, device="cuda")
    # rotation has no block sizes, so it has fewer cases
    assert len(report.passed) > (30 if backend.operation is Operation.ROTATE else 80)
    assert not report.declined


@pytest.mark.parametrize("shape", SHAPES, ids=["dense", "packed"])
@pytest.mark.parametrize("where", PLACES, ids=["float64", "float32"])
def test_the_properties_hold_on_a_gpu(shape: Shape, where: Where) -> None:
    for row in (0, 7, 30, shape.total - 2):
        properties.check_past_outputs_and_choices(shape, row, where)
        properties.check_past_outputs_ignore_future_inputs(shape, row, where)
    properties.check_heads_permute_within_groups(shape, where)
    properties.check_agrees_with_oracle(shape, where)
    if shape.lengths is not None:
        properties.check_packed_equals_separate(shape, where)
    else:
        properties.check_steps_equal_whole(shape, (5, 6, 30), where)
        properties.check_mixed_steps(shape, where)


def gpu_layer(dtype: torch.dtype = torch.float32) -> tuple[NativeSparseAttention, Tensor]:
    torch.manual_seed(0)
    layer = NativeSparseAttention(CONFIG).to("cuda", dtype)
    return layer, torch.randn(2, 61, 64, device="cuda", dtype=dtype)


def test_training_passes_never_wait_for_the_gpu() -> None:
    layer, x = gpu_layer()
    cu_seqlens = torch.tensor([0, 20, 20, 61], dtype=torch.int32, device="cuda")
    # the first pass copies the frequencies of RoPE to the GPU, and waits for the copy
    layer(x)
    with no_waiting():
        layer(x).sum().backward()
        layer(x[:1], cu_seqlens=cu_seqlens).sum().backward()


def test_cached_steps_never_wait_for_the_gpu_and_equal_one_pass() -> None:
    layer, x = gpu_layer(torch.float64)
    counts = torch.tensor([1, 1], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        whole = layer(x)
        cache = layer.new_cache(2, 64)
        with no_waiting():
            pieces = [layer(x[:, :40], cache=cache)]
            pieces += [layer(x[:, t : t + 1], cache=cache) for t in range(40, 60)]
            pieces.append(layer(x[:, 60:61], cache=cache, query_count=counts))
    assert float((torch.cat(pieces, 1) - whole).abs().max()) < 1e-12
    assert torch.equal(cache.total_reads.predicted.unsqueeze(1).expand(-1, 2), cache.total_reads.actual)


def test_reordering_by_indices_on_the_gpu_does_not_wait_and_keeps_the_largest_bound() -> None:
    layer, x = gpu_layer()
    cache = layer.new_cache(2, 64)
    with torch.no_grad():
        layer(x[:, :60], cache=cache, query_count=torch.tensor([50, 60], dtype=torch.int32))
        indices = torch.tensor([0, 0, 1], device="cuda")
        with no_waiting():
            cache.reorder(indices)
        assert cache.lengths.tolist() == [50, 50, 60]
        with pytest.raises(CacheOverflowError, match="sequence 0 would hold 65 tokens"):
            layer(x[:, :5].repeat(2, 1, 1)[:3], cache=cache)


def test_gradients_are_bit_equal_from_run_to_run_in_deterministic_mode() -> None:
    layer, x = gpu_layer()
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        gradients = []
        for _ in range(5):
            layer.zero_grad()
            layer(x).square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in gradients[1:] for a, b in zip(gradients[0], run, strict=True))


def test_the_layer_compiles_to_one_graph_on_a_gpu() -> None:
    layer, x = gpu_layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_autocast_runs_the_branches_in_its_dtype() -> None:
    layer, x = gpu_layer()
    with torch.autocast("cuda", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.isfinite().all()) for parameter in layer.parameters())
