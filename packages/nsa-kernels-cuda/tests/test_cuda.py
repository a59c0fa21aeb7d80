"""The choice on a GPU: equal to the rule, on the current stream, captured, and its time compared with Triton's."""

import importlib.util
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_core import (
    BlockGeometry,
    BranchRequest,
    Operation,
    compressed_attention,
    default_registry,
    nsa_attention,
    sliding_window_attention,
)
from nsa_core.reference.choose import choose
from nsa_core.testing import properties
from nsa_core.testing.conformance import check_backend
from nsa_core.testing.inputs import Shape, make_inputs
from nsa_core.testing.properties import Where
from nsa_core.testing.strategies import shapes
from nsa_core.testing.tolerances import max_error
from nsa_kernels_cuda import jit, routing
from nsa_kernels_cuda.choice import op
from nsa_kernels_cuda.flash_attention.backend import flash_attention_backends
from nsa_kernels_cuda.flash_attention.providers import PROVIDERS
from nsa_kernels_cuda.plugin import CudaChoice

pytestmark = [pytest.mark.hardware(capability=(8, 0)), pytest.mark.filterwarnings("ignore:.*against policy.*")]

GEOMETRY = BlockGeometry()
SHAPES = {"M and P, 65,536 tokens": (65_536, 4), "L, 65,536 tokens": (65_536, 8), "S, 32,768 tokens": (32_768, 8)}
"""Tokens and KV heads of the shapes at which the choice is timed."""
MOST_SCORES = 2**27
"""Scores of one call, 512 MiB of float32: longer passes choose chunk by chunk."""
BACKENDS = ("triton", "cuda")
INSTALLED = tuple(provider for provider in PROVIDERS if provider.is_installed)


def scores_of(num_tokens: int, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return scores and positions of the last queries of `num_tokens`, as many as `MOST_SCORES` holds."""
    num_blocks = num_tokens // GEOMETRY.selection_block_size
    num_rows = min(num_tokens, MOST_SCORES // (num_kv_heads * num_blocks))
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.rand(num_rows, num_kv_heads, num_blocks, device="cuda", generator=generator) ** 8
    return scores, torch.arange(num_tokens - num_rows, num_tokens, device="cuda", dtype=torch.int32)


def capability_here() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def backend_of(name: str):
    return default_registry().named(Operation.CHOOSE, name)


def median_ms(function, *, num_calls: int = 30) -> float:
    """Return the median time of a call by CUDA events, after three calls that do not count."""
    times = []
    for call in range(3 + num_calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        if call >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def forget_routes() -> None:
    """Clear cached routes after preferences changed."""
    default_registry()._routes.clear()
    if default_registry().has(Operation.CHOOSE, "triton"):
        pytest.importorskip("nsa_kernels_triton.choice.op")._preferred_choice.cache_clear()


@pytest.fixture
def preferred(monkeypatch):
    """Let routing prefer the kernel on this GPU, in a registry that has remembered nothing."""
    monkeypatch.setattr(routing, "PREFERRED_ON", frozenset({torch.cuda.get_device_capability()}))
    forget_routes()
    yield
    forget_routes()


def test_it_conforms_to_the_reference():
    report = check_backend(CudaChoice(), device="cuda")
    print(report)
    assert len(report.passed) == 108


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_long_rows_choose_as_the_reference_does(shape):
    scores, positions = scores_of(*shape)
    scores, positions = scores[-512:].contiguous(), positions[-512:].contiguous()
    # equal scores too
    for each in (scores, (8 * scores).floor()):
        expected = choose(each, None, positions, shape[1], geometry=GEOMETRY)
        assert torch.equal(op.choose(each, None, positions, shape[1], geometry=GEOMETRY), expected)


def test_sums_over_heads_choose_as_the_reference_does_where_they_are_exact():
    scores = torch.randint(0, 2**6, (256, 64, 512), device="cuda").float()
    factor = 2.0 ** -torch.randint(0, 4, (256, 64), device="cuda").float()
    positions = torch.arange(512 * 64 - 256, 512 * 64, device="cuda", dtype=torch.int32)
    for dtype in op.KERNELS:
        expected = choose(scores.to(dtype), factor, positions, 4, geometry=GEOMETRY)
        assert torch.equal(op.choose(scores.to(dtype), factor, positions, 4, geometry=GEOMETRY), expected)


def test_addresses_beyond_two_to_the_31_elements_are_right():
    num_blocks = 2048
    num_rows = 2**31 // (4 * num_blocks) + 8
    scores = torch.zeros(num_rows, 4, num_blocks, device="cuda")
    scores[-1, -1, 100:113] = 1
    positions = torch.full((num_rows,), num_blocks * 64 - 1, device="cuda", dtype=torch.int32)
    chosen = op.choose(scores, None, positions, 4, geometry=GEOMETRY)
    assert chosen[-1, -1].tolist() == [0, *range(100, 113), num_blocks - 2, num_blocks - 1]


def test_it_launches_on_the_current_stream_and_is_captured():
    scores, positions = scores_of(8_192, 4)
    op.choose(scores, None, positions, 4, geometry=GEOMETRY)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.choose(scores, None, positions, 4, geometry=GEOMETRY)
    for seed in range(3):
        scores.copy_(torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)))
        captured.fill_(-7)
        graph.replay()
        assert torch.equal(captured, choose(scores, None, positions, 4, geometry=GEOMETRY))


@pytest.mark.parametrize("dtype", op.KERNELS)
def test_a_first_call_is_captured_where_routing_came_before(dtype):
    jit.load.cache_clear()
    jit.library_of.cache_clear()
    jit._why_unavailable.cache_clear()
    assert routing.reasons_against(BranchRequest(operation="choose", device_type="cuda", compute_capability=capability_here())) == ()
    scores, positions = scores_of(2_048, 4)
    scores = scores.to(dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.choose(scores, None, positions, 4, geometry=GEOMETRY)
    graph.replay()
    assert torch.equal(captured, choose(scores, None, positions, 4, geometry=GEOMETRY))


@pytest.mark.parametrize("is_default", [True, False], ids=["default stream", "own stream"])
def test_a_new_thread_launches_before_it_has_called_cuda(is_default):
    scores, positions = scores_of(2_048, 4)
    expected = choose(scores, None, positions, 4, geometry=GEOMETRY)
    # the allocator keeps memory for the thread's result, which then comes without a call of CUDA
    torch.empty_like(expected)
    stream = torch.cuda.default_stream() if is_default else torch.cuda.Stream()
    torch.cuda.synchronize()

    def call() -> Tensor:
        with torch.cuda.stream(stream):
            return op.choose(scores, None, positions, 4, geometry=GEOMETRY)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(call).result()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_what_a_launch_takes_on_the_host(record_property):
    """Print the median host time of a call from Python."""
    scores, positions = scores_of(128, 4)
    times = []
    for _ in range(200):
        torch.cuda.synchronize()
        start = time.perf_counter()
        op.choose(scores, None, positions, 4, geometry=GEOMETRY)
        times.append(1e6 * (time.perf_counter() - start))
    record_property("us", statistics.median(times))
    print(f"\nchoose, us from Python: {statistics.median(times):.1f}")


def test_the_op_passes_opcheck():
    scores, positions = scores_of(2_048, 4)
    arguments = (scores, None, positions, 4, list(GEOMETRY.as_tuple()))
    assert set(torch.library.opcheck(op._choose, arguments).values()) == {"SUCCESS"}


@pytest.mark.hardware(num_gpus=2, capability=(8, 0))
def test_another_gpu_than_the_current_one_chooses():
    scores, positions = (x.to("cuda:1") for x in scores_of(2_048, 4))
    expected = choose(scores, None, positions, 4, geometry=GEOMETRY)
    assert torch.equal(op.choose(scores, None, positions, 4, geometry=GEOMETRY), expected)


@pytest.mark.hardware(num_gpus=2, capability=(8, 0))
def test_routing_loads_the_choice_on_the_gpu_of_the_request():
    for function in (jit.load, jit.library_of, jit._why_unavailable):
        function.cache_clear()
    capability = torch.cuda.get_device_capability(1)
    request = BranchRequest(operation="choose", device_type="cuda", compute_capability=capability, device_index=1)
    assert routing.reasons_against(request) == ()
    assert jit.load.cache_info().misses == len(op.KERNELS)
    jit.load(op.SOURCE, op.KERNELS[torch.float32], 1)
    assert jit.load.cache_info().misses == len(op.KERNELS)


@pytest.mark.hardware(num_gpus=2, capability=(8, 0))
@pytest.mark.parametrize("backend", flash_attention_backends(INSTALLED), ids=lambda backend: f"{backend.operation} {backend.name}")
def test_flash_attention_runs_on_another_gpu_than_the_current_one(backend):
    shape = Shape(geometry=GEOMETRY, num_queries=500, num_heads=4, num_kv_heads=2, head_dim_qk=64, head_dim_v=64)
    inputs = make_inputs(shape, torch.bfloat16, "cuda:1").with_grad()
    operands = (inputs.q, inputs.k_cmp, inputs.v_cmp) if backend.operation is Operation.CMP else (inputs.q, inputs.k_win, inputs.v_win)
    run = compressed_attention if backend.operation is Operation.CMP else sliding_window_attention
    assert torch.cuda.current_device() == 0
    outs, gradients = [], []
    for name in (backend.name, "sdpa"):
        outs.append(run(*operands, geometry=GEOMETRY, backend=name).out)
        gradients.append(torch.autograd.grad(outs[-1].sum(), operands))
    for found, expected in ((outs[0], outs[1]), *zip(*gradients, strict=True)):
        assert max_error(found, expected) <= 2**-5 * float(expected.detach().abs().max())


@pytest.mark.hardware(capability=(9, 0))
def test_the_fused_operation_takes_it_by_routing(preferred, monkeypatch):
    # 9.0 alone writes importance in one piece
    shape = Shape(geometry=GEOMETRY, num_queries=4096, num_heads=64, num_kv_heads=4, head_dim_qk=128, head_dim_v=128)
    inputs = make_inputs(shape, torch.bfloat16, "cuda")
    calls = []
    counted = op.choose
    monkeypatch.setattr(op, "choose", lambda *operands, **keywords: calls.append(0) or counted(*operands, **keywords))
    routed = nsa_attention(*inputs.tensors, geometry=GEOMETRY, backend="triton")
    assert calls
    monkeypatch.setattr(routing, "PREFERRED_ON", frozenset())
    forget_routes()
    assert torch.equal(routed, nsa_attention(*inputs.tensors, geometry=GEOMETRY, backend="triton"))
    assert len(calls) == 1


def test_the_driver_loads_the_cached_cubin():
    capability = torch.cuda.get_device_capability()
    assert jit.why_unavailable(op.SOURCE, tuple(op.KERNELS.values()), capability) == ""
    request = BranchRequest(operation="choose", device_type="cuda", compute_capability=capability)
    assert routing.reasons_against(request) == ()


@pytest.mark.parametrize("backend", flash_attention_backends(INSTALLED), ids=lambda backend: f"{backend.operation} {backend.name}")
def test_flash_attention_of_every_installed_provider_conforms_to_the_oracle(backend):
    report = check_backend(backend, device="cuda")
    print(report)
    assert report.passed


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer: of the package nvidia-cuda-sanitizer-api, else on PATH, else in /usr/local/cuda/bin."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations if spec else None) or ()
    installed = [str(Path(each) / cuda / "compute-sanitizer") for each in folders for cuda in ("cu13", "cu12")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([*installed, os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))


SANITIZER = find_sanitizer()
FIRST_RACECHECK_OF_CLUSTERS = (2026, 1)
"""compute-sanitizer's first version whose racecheck is asked about the kernel in clusters. Its release notes promise fewer false
reports, across clusters and among a part of a CTA's warps. 2025.3 reports, in a few CTAs of many, that `merge_warps` reads `warp_stats`
in a race with `store_softmax`, which writes them. Each path from the one to the other passes the `__syncthreads` between them.
tests/warp_hazards.h finds no race there."""
CHOICE = """
import torch
from nsa_core import BlockGeometry
from nsa_kernels_cuda.choice import op as choice

torch.manual_seed(0)
geometry = BlockGeometry(8, 4, 8, num_selected_blocks=6, window_size=20)
positions = torch.arange(300, 308, device="cuda", dtype=torch.int32)
choice.choose(torch.rand(8, 2, 40, device="cuda"), None, positions, 2, geometry=geometry)
torch.cuda.synchronize()
print("done")
"""
DECODE = """
import torch
from nsa_core import BlockGeometry, Keys, Queries
from nsa_kernels_cuda.decode import op as decode

torch.manual_seed(0)
geometry = BlockGeometry(8, 4, 8, num_selected_blocks=6, window_size=20)
def keys(length):
    return Keys(*torch.randn(2, 2, length, 2, 16, device="cuda", dtype=torch.bfloat16), length)
q = torch.randn(2, 1, 8, 16, device="cuda", dtype=torch.bfloat16)
start = torch.tensor([90, 37], dtype=torch.int32, device="cuda")
gates = torch.rand(2, 1, 8, 3, device="cuda")
decode.decode(Queries(q, 1, None, start), keys(23), keys(100), keys(100), gates, geometry=geometry, scale=0.3)

def paged(rows, dtype):
    scales = (torch.rand(26, rows, 2, device="cuda"),) * 2 if dtype is torch.float8_e4m3fn else (None, None)
    stores = torch.randn(2, 26, rows, 2, 16, device="cuda").to(dtype)
    table = torch.randperm(26, device="cuda", dtype=torch.int32).view(2, 13)
    return Keys(*stores, 13 * rows, page_table=table, k_scale=scales[0], v_scale=scales[1])
tokens = paged(8, torch.float8_e4m3fn)
queries = Queries(q.expand(2, 3, 8, 16).contiguous(), 3, None, start)
gates = gates.expand(2, 3, 8, 3).contiguous()
decode.decode(queries, paged(2, torch.bfloat16), tokens, tokens, gates, geometry=geometry, scale=0.3)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("tool", "calls"),
    [
        pytest.param("memcheck", CHOICE, id="memcheck choose"),
        pytest.param("racecheck", CHOICE, id="racecheck choose"),
        pytest.param("memcheck", DECODE, id="memcheck decode", marks=pytest.mark.hardware(capability=(9, 0))),
        pytest.param("racecheck", DECODE, id="racecheck decode", marks=pytest.mark.hardware(capability=(9, 0))),
    ],
)
def test_compute_sanitizer_finds_nothing(tool, calls):
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed (nvidia-cuda-sanitizer-api, PATH, /usr/local/cuda/bin)")
    version = subprocess.run([SANITIZER, "--version"], capture_output=True, text=True, check=True).stdout
    year, release = map(int, re.findall(r"Version (\d+)\.(\d+)", version)[0])
    if (tool, calls) == ("racecheck", DECODE) and (year, release) < FIRST_RACECHECK_OF_CLUSTERS:
        pytest.skip(f"{SANITIZER} is {year}.{release}, which reports a race across a __syncthreads; pip install nvidia-cuda-sanitizer-api")
    # torch may ask for what a driver lacks, and goes on
    options = ["--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    command = [SANITIZER, *options, sys.executable, "-c", calls]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done" in done.stdout
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout


FLASH_CHECKS = {"causality": properties.check_past_outputs_and_choices, "group consistency": properties.check_heads_permute_within_groups}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", FLASH_CHECKS)
@pytest.mark.parametrize("name", [f"flash_attn[{provider.name}]" for provider in INSTALLED])
def test_the_properties_hold_of_flash_attention_on_drawn_shapes(name, check):
    """The choice is the reference's, by scores whose lse is the provider's."""
    where = Where(backend={"cmp": name, "win": name, "slc": "sdpa", "select": "sdpa"}, device="cuda", dtype=torch.bfloat16)
    served = set()

    @settings(max_examples=200, deadline=None)
    @given(shape=shapes(packed=False), width=st.sampled_from((8, 16, 64)), data=st.data())
    def holds(shape: Shape, width: int, data: st.DataObject) -> None:
        shape = evolve(shape, head_dim_qk=width, head_dim_v=width)
        if name == "flash_attn[cudnn]":
            # it takes no shorter window
            shape = evolve(shape, geometry=evolve(shape.geometry, window_size=max(shape.geometry.window_size, shape.total)))
        row = (data.draw(st.integers(0, shape.total - 1)),) if check == "causality" else ()
        FLASH_CHECKS[check](shape, *row, where)

    def record(asked: str, request: BranchRequest, taken: str | None) -> None:
        served.add((request.operation, taken))

    default_registry().observers.append(record)
    try:
        holds()
    finally:
        default_registry().observers.remove(record)
    assert served == {(Operation.CMP, name), (Operation.WIN, name), (Operation.SLC, "sdpa"), (Operation.SELECT, "sdpa")}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_a_choice_takes(shape, record_property):
    """Print the figures from which `routing.PREFERRED_ON` is kept: medians, after a check that both choose alike."""
    if not default_registry().has(Operation.CHOOSE, "triton"):
        pytest.skip("nsa-kernels-triton is not installed, with which the choice is compared")
    scores, positions = scores_of(*shape)

    def call(name: str) -> Tensor:
        return backend_of(name)(scores, None, positions, shape[1], geometry=GEOMETRY)

    assert torch.equal(call("cuda"), call("triton"))
    # Triton's op copies the scores first (NaN, padding); its kernel alone is what the fused operation launches
    kernels = {"cuda": lambda: call("cuda"), "triton": triton_kernel(scores, positions)}
    found = {name: round(median_ms(kernels[name]), 4) for name in BACKENDS}
    record_property("ms", found)
    print(f"\n{tuple(scores.shape)} scores, ms: {found}, Triton / CUDA {found['triton'] / found['cuda']:.2f}")


def triton_kernel(scores: Tensor, positions: Tensor):
    """Return a call of Triton's kernel alone, with the launch of its fused operation."""
    triton_op = pytest.importorskip("nsa_kernels_triton.choice.op")
    num_rows, num_kv_heads, num_blocks = scores.shape
    chosen = scores.new_empty(num_rows, num_kv_heads, GEOMETRY.num_selected_blocks, dtype=torch.int32)
    searched = triton_op.next_power_of_2(num_blocks)
    return lambda: triton_op._choose(scores, positions, chosen, 0, num_rows, searched, GEOMETRY)
