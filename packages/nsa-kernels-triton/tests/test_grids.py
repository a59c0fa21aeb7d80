"""Only the first axis of a grid grows with sequences and groups: CUDA limits the others to 65,535."""

import importlib
import pkgutil

import pytest
import torch

import nsa_kernels_triton
from nsa_core import BlockGeometry, NativeSparseAttention, NSAConfig, nsa_attention, sliding_window_attention
from nsa_core.attention import append_rows, rotate_heads
from nsa_core.backends.base import NewBlocks
from nsa_core.dispatch import make_call
from nsa_core.rope import RotaryEmbedding
from nsa_kernels_triton import device, pipelines

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*against policy.*"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="launches are recorded on a machine without a GPU; `test_cuda.py` runs many sequences"
    ),
]

MANY = 65_537
LIMITS = (2**31 - 1, 65_535, 65_535)
SMALL_BLOCKS = BlockGeometry(2, 1, 2, 1, 0, 1, 2)
LARGE_BLOCKS = BlockGeometry(2, 2, 64, 1, 0, 1, 2)
"""Those that the kernels for compute capability 9.0 take."""


@pytest.fixture
def grids(monkeypatch):
    """Record the grid of every launch, by kernel; nothing runs."""
    from nsa_kernels_triton.cached_launch import CachedLaunch

    found = {}

    def record(kernel, *grids):
        found.setdefault(kernel, []).extend(grids)
        return lambda *arguments, **constants: None

    monkeypatch.setattr(CachedLaunch, "__getitem__", record)
    monkeypatch.setattr(CachedLaunch, "both", lambda kernel, grids, flag: record(kernel, *grids))
    return found


@pytest.fixture
def on_hopper(monkeypatch):
    """Let CPU tensors use the kernels for compute capability 9.0."""
    monkeypatch.setattr(pipelines, "has_gluon", lambda: True)
    monkeypatch.setattr(device, "capability_of", lambda x: (9, 0))


def train(geometry, batch=1, length=3, heads=1, groups=1, head_dims=(16, 16), is_packed=False, dtype=torch.bfloat16):
    """Run all of Eq. 5 forward and backward, and one branch with a gradient of its lse."""
    num_blocks = max(0, (length - geometry.compression_block_size) // geometry.compression_stride + 1)
    shape = (1, batch * length) if is_packed else (batch, length)
    blocks = (1, batch * num_blocks) if is_packed else (batch, num_blocks)
    stores = [torch.zeros(*rows, groups, width, dtype=dtype) for rows in (blocks, shape, shape) for width in head_dims]
    leaves = [x.requires_grad_() for x in (torch.zeros(*shape, heads, head_dims[0], dtype=dtype), *stores, torch.zeros(*shape, heads, 3))]
    bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32)
    options = {"geometry": geometry, "backend": "triton", **({"cu_seqlens": bounds, "max_seqlen": length} if is_packed else {})}
    nsa_attention(*leaves, **options).sum().backward()
    out, lse = sliding_window_attention(leaves[0], *leaves[5:7], **options)
    (out.sum() + lse.sum()).backward()


def step(geometry, batch=1, heads=1, groups=1):
    """Run all of Eq. 5 for one row of each sequence over a cache."""
    stores = [torch.zeros(batch, rows, groups, 16) for rows in (3, 3, 4, 4, 4, 4)]
    start = torch.zeros(batch, dtype=torch.int32)
    q, gates = torch.zeros(batch, 1, heads, 16), torch.zeros(batch, 1, heads, 3)
    nsa_attention(q, *stores, gates, geometry=geometry, backend="triton", query_start=start)


def append(geometry, batch=1, groups=1):
    """Write one row of each sequence into a cache, and the blocks that it completes."""
    config = NSAConfig(16, groups, groups, 16, 16, geometry=geometry, compressor="mlp", backends={"append": "triton"})
    layer = NativeSparseAttention(config)
    cache = layer.new_cache(batch, 4, static=True, count_reads=False)
    rows = [cache.new_rows(name, *(torch.zeros(batch, 1, groups, 16) for _ in range(2))) for name in ("raw", "slc", "win")]
    start, count = torch.ones(batch, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)
    blocks = NewBlocks(cache.stores.keys_of("cmp"), rows[0], layer.compress_k, layer.compress_v, layer.rope)
    append_rows(tuple(rows), blocks, start, count, make_call(rows[0].k, geometry, backend=config.backends))


def rotate(batch=1, heads=1):
    """Rotate q and a key of one row of each sequence."""
    rope, start = RotaryEmbedding(16), torch.zeros(batch, dtype=torch.int32)
    q, k = torch.zeros(batch, 1, heads, 16), torch.zeros(batch, 1, 1, 16)
    rotate_heads((q, k), start, rope, make_call(q, SMALL_BLOCKS, backend={"rotate": "triton"}))


def assert_within_limits(grids):
    too_large = {kernel.__name__: grid for kernel, all_of in grids.items() for grid in all_of if any(map(int.__gt__, grid, LIMITS))}
    assert not too_large


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_many_sequences_are_launched(grids, dtype):
    train(SMALL_BLOCKS, MANY, dtype=dtype)
    assert_within_limits(grids)


def test_many_packed_sequences_are_launched(grids):
    train(SMALL_BLOCKS, MANY, is_packed=True)
    assert_within_limits(grids)


def test_many_groups_are_launched(grids):
    train(SMALL_BLOCKS, heads=MANY, groups=MANY)
    assert_within_limits(grids)


def test_a_step_of_many_sequences_or_groups_is_launched(grids):
    step(SMALL_BLOCKS, MANY)
    step(SMALL_BLOCKS, heads=MANY, groups=MANY)
    step(SMALL_BLOCKS, heads=MANY)
    assert {kernel.__name__ for kernel in grids} == {"split_kernel", "choose_kernel", "attend_kernel"}
    assert_within_limits(grids)


def test_rows_of_many_sequences_or_groups_are_written(grids):
    append(SMALL_BLOCKS, MANY)
    append(SMALL_BLOCKS, groups=MANY)
    assert {kernel.__name__ for kernel in grids} == {"append_kernel", "down_kernel"}
    assert_within_limits(grids)


def test_heads_of_many_sequences_or_many_heads_are_rotated(grids):
    rotate(MANY)
    rotate(heads=MANY)
    assert {kernel.__name__ for kernel in grids} == {"rotate_kernel"}
    assert_within_limits(grids)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_many_sequences_are_launched_on_hopper(grids, is_packed):
    train(LARGE_BLOCKS, MANY, head_dims=(64, 64), is_packed=is_packed)
    train(LARGE_BLOCKS, MANY, head_dims=(192, 128), is_packed=is_packed)
    assert_within_limits(grids)


@pytest.mark.usefixtures("on_hopper")
def test_many_groups_are_launched_on_hopper(grids):
    train(LARGE_BLOCKS, heads=MANY, groups=MANY, head_dims=(64, 64))
    assert_within_limits(grids)


def test_no_kernel_escapes_these_tests(grids, monkeypatch):
    from nsa_kernels_triton.cached_launch import CachedLaunch

    train(SMALL_BLOCKS, 2, 64, dtype=torch.float16)
    step(SMALL_BLOCKS)
    append(SMALL_BLOCKS)
    rotate()
    monkeypatch.setattr(pipelines, "has_gluon", lambda: True)
    monkeypatch.setattr(device, "capability_of", lambda x: (9, 0))
    for head_dims in ((128, 128), (192, 128)):
        train(BlockGeometry(32, 16, 64, 1, 0, 1, 64), 2, 200, heads=16, head_dims=head_dims)
    names = [module.name for module in pkgutil.walk_packages(nsa_kernels_triton.__path__, "nsa_kernels_triton.")]
    modules = [importlib.import_module(name) for name in names]
    kernels = {kernel for module in modules for kernel in vars(module).values() if isinstance(kernel, CachedLaunch)}
    assert grids.keys() == kernels
