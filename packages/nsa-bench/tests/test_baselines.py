"""Dense attention: the available kernels, and the reasons against the others."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from nsa_bench.baselines import BASELINES, _flash_attn_run, causal_block_mask, find_baseline, flash_attn_decode, parse_baselines
from nsa_bench.cases import Case, head_shape
from nsa_bench.errors import OptionError
from nsa_core.reference import naive

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = Case(shape=head_shape(4, 2, 16, 8), seq_len=20, dtype=torch.float32)


def inputs(dim_k=16, dim_v=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 20, heads, dim, generator=generator) for heads, dim in ((4, dim_k), (2, dim_k), (2, dim_v))]


def test_names_of_baselines():
    assert parse_baselines("all") == BASELINES
    assert parse_baselines("none") == ()
    assert parse_baselines("cudnn,flash") == ("cudnn", "flash")
    with pytest.raises(OptionError, match="names 'fastest'.*use cudnn,flash"):
        parse_baselines("cudnn,fastest")


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "flash"])
def test_what_a_cpu_lacks_has_a_reason(name):
    baseline = find_baseline(name, CASE, CPU)
    assert baseline.run is None
    assert "CUDA" in baseline.reason


@pytest.mark.parametrize("dims", [(16, 8), (8, 16), (16, 16)])
def test_flash_pads_unequal_dimensions_and_keeps_the_scale(dims):
    q, k, v = inputs(*dims)
    out = find_baseline("flash", CASE, CPU).run(q, k, v)
    torch.testing.assert_close(out, naive.dense_attention(q, k, v).out, rtol=1e-5, atol=1e-5)


def test_the_newest_flash_attn_is_taken_and_an_absent_one_named(monkeypatch):
    # the search is of modules and needs no GPU; None in sys.modules is a module that cannot be imported
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    absent = find_baseline("flash-attn", CASE, CUDA)
    assert absent.run is None
    assert "cannot be imported (ModuleNotFoundError" in absent.reason
    for module, name in {"flash_attn": "flash-attn-2", "flash_attn_interface": "flash-attn-3"}.items():
        package = ModuleType(module)
        package.flash_attn_func = lambda q, k, v, softmax_scale, causal: v
        monkeypatch.setitem(sys.modules, module, package)
        assert find_baseline("flash-attn", CASE, CUDA).name == name


@pytest.mark.parametrize(("is_always_padded", "needs_grad", "expected"), [(True, False, 16), (False, True, 16), (False, False, 8)])
def test_flash_attn_gets_equal_dimensions_where_it_needs_them(is_always_padded, needs_grad, expected):
    seen = []

    def function(q, k, v, softmax_scale, causal):
        seen.append((v.shape[-1], softmax_scale, causal))
        return torch.zeros(*q.shape[:-1], v.shape[-1]), "lse"

    with torch.set_grad_enabled(needs_grad):
        out = _flash_attn_run(function, is_always_padded=is_always_padded)(*inputs())
    assert seen == [(expected, 0.25, True)]
    assert tuple(out.shape) == (1, 20, 4, 8)


def test_keys_are_split_where_flash_attn_takes_a_number_of_splits():
    seen = []

    def newer(q, k, v, *, causal, num_splits=1):
        seen.append((causal, num_splits))

    for call in flash_attn_decode("flash-attn-4", newer, *inputs()).values():
        call()
    assert seen == [(False, 1), (False, 0)]
    assert list(flash_attn_decode("flash-attn-4", newer, *inputs())) == ["flash-attn-4", "flash-attn-4 split"]
    assert list(flash_attn_decode("flash-attn-2", lambda q, k, v, causal: v, *inputs())) == ["flash-attn-2"]


@pytest.mark.parametrize("length", [1, 100, 128, 129, 256, 300, 1000])
def test_the_block_mask_is_the_one_that_torch_makes(length):
    ours = causal_block_mask(length, CPU)
    theirs = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.seq_lengths == theirs.seq_lengths
    assert blocks_of(ours) == blocks_of(theirs)


def blocks_of(mask):
    """Return which blocks of each row count, in part and wholly; the rest of the indices are never read."""
    pairs = ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    return [[set(row[:count].tolist()) for count, row in zip(counts[0, 0], rows[0, 0], strict=True)] for counts, rows in pairs]


@pytest.mark.hardware(capability=(8, 0))
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (64, 64)])
@pytest.mark.parametrize("name", BASELINES)
def test_kernels_that_are_here_are_right(name, dims):
    from nsa_bench.attention.run import run_jobs
    from nsa_bench.measurement import Job, Setup
    from nsa_bench.routes import RouteRecorder

    case = Case(shape=head_shape(16, 4, *dims), seq_len=300)
    place = Setup(device=CUDA, registry=RouteRecorder.of_installed())
    found = list(run_jobs((Job(case=case, operations=(), baselines=(name,)),), place))
    assert len(found) == 2
    for one in found:
        assert (one.timing is None) == bool(one.reason), one
        assert "wrong" not in one.reason, one.reason
