"""Two processes, gloo: each with half of a sequence's queries, and each with half of a layer's heads, equal one process."""

import os

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from nsa_core import BlockGeometry, ConfigError, Keys, NativeSparseAttention, NSAConfig, Queries, attend, nsa_attention
from nsa_core.parallel import check_shares, tensor_parallel_plan
from nsa_core.selection_loss import SelectionLoss
from nsa_core.testing.inputs import SMALL, Inputs, Shape, make_inputs

RANKS = 2
LENGTH = 44
"""With 10 compressed blocks (l = 8, d = 4), so that both ranks hold equal shares."""
CONFIG = NSAConfig(hidden_size=16, num_heads=4, num_kv_heads=2, head_dim_qk=4, head_dim_v=6, geometry=SMALL)


def run_ranks(body, folder, *arguments):
    """Run body(rank, *arguments) on every rank, with a group."""
    multiprocessing.spawn(_rank, args=(body, f"file://{folder}/store", *arguments), nprocs=RANKS)


def _rank(rank, body, store, *arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    body(rank, *arguments)
    # both finish before either destroys the group
    dist.barrier()
    dist.destroy_process_group()
    # remaining threads of gloo and autograd may end the interpreter with SIGABRT
    os._exit(0)


def half(x: Tensor, rank: int) -> Tensor:
    return x.chunk(RANKS, 1)[rank]


class Gathered(torch.autograd.Function):
    """The halves of all ranks, one after another along dimension 1; one function for all tensors, so that ranks talk in one order."""

    @staticmethod
    def forward(ctx, *halves):
        pieces = [[torch.empty_like(x) for _ in range(RANKS)] for x in halves]
        for found, x in zip(pieces, halves, strict=True):
            dist.all_gather(found, x.contiguous())
        return tuple(torch.cat(found, 1) for found in pieces)

    @staticmethod
    def backward(ctx, *gradients):
        totals = [gradient.contiguous().clone() for gradient in gradients]
        for total in totals:
            dist.all_reduce(total)
        return tuple(half(total, dist.get_rank()) for total in totals)


def attend_to_half(rank: int) -> None:
    """Compare outputs and the gradients of this rank's tokens with those of one process that has all of them."""
    whole = make_inputs(Shape(num_queries=LENGTH, batch=2)).with_grad()
    expected = nsa_attention(*whole.tensors, geometry=SMALL)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=expected.dtype)
    (expected * weights).sum().backward()

    mine = Inputs.of(half(x.detach(), rank).clone().requires_grad_() for x in whole.tensors)
    k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = Gathered.apply(*mine.tensors[1:7])
    first = rank * LENGTH // RANKS
    # the window's keys: this rank's own, and a halo of the w - 1 before them
    begin = max(0, first - SMALL.window_size + 1)
    local = slice(begin, first + LENGTH // RANKS)
    place = torch.full((2,), first, dtype=torch.int32)
    out = attend(
        Queries(mine.q, LENGTH // RANKS, start=place),
        Keys(k_cmp, v_cmp, k_cmp.shape[1]),
        Keys(k_slc, v_slc, LENGTH),
        Keys(k_win[:, local], v_win[:, local], local.stop - begin, first=torch.full_like(place, begin)),
        mine.gates,
        geometry=SMALL,
    )
    (out * half(weights, rank)).sum().backward()

    torch.testing.assert_close(out, half(expected, rank), rtol=0, atol=1e-12)
    for ours, theirs in zip(mine.tensors, whole.tensors, strict=True):
        torch.testing.assert_close(ours.grad, half(theirs.grad, rank), rtol=0, atol=1e-11)


def test_half_of_the_queries_on_each_rank_equals_one_process(tmp_path):
    run_ranks(attend_to_half, tmp_path)


def layer_of(config: NSAConfig) -> NativeSparseAttention:
    torch.manual_seed(0)
    layer = NativeSparseAttention(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def gathered(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def share_heads(rank: int, config: NSAConfig) -> None:
    """Compare a layer whose heads are split between ranks with the whole one: outputs, gradients of x and of every parameter, decoding."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    whole, shared = layer_of(config), layer_of(config)
    check_shares(shared, RANKS)
    parallelize_module(shared, init_device_mesh("cpu", (RANKS,)), tensor_parallel_plan(shared))
    x = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()

    out, expected = shared(ours), whole(theirs)
    out.square().sum().backward()
    expected.square().sum().backward()

    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)
    for (name, parameter), (_, other) in zip(shared.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(gathered(parameter.grad), other.grad, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        cache = shared.new_cache(2, 30)
        assert cache.keys["slc"].shape[2] == config.num_kv_heads // RANKS
        steps = torch.cat([shared(piece, cache=cache) for piece in x.split([25, 1, 4], 1)], 1)
    torch.testing.assert_close(steps, expected.detach(), rtol=0, atol=1e-11)

    # long enough that queries have more candidates than they choose
    x = torch.randn(2, 100, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for layer, inputs in ((shared, ours), (whole, theirs)):
        layer.zero_grad()
        layer.selection_loss = SelectionLoss(num_samples=40)
        layer(inputs)
        layer.selection_loss.value.backward()
    value = shared.selection_loss.value.detach().clone()
    torch.distributed.all_reduce(value)
    assert value > 0
    # the loss is computed in float32
    torch.testing.assert_close(value, whole.selection_loss.value.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)
    for (name, parameter), (_, other) in zip(shared.named_parameters(), whole.named_parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(gathered(parameter.grad), other.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"compressor": "conv"}, marks=pytest.mark.slow),
        pytest.param({"compressor": "mean", "qk_norm": True}, marks=pytest.mark.slow),
        {"kv": "shared", "qk_norm": True},
    ],
    ids=["mlp", "conv", "qk_norm", "shared"],
)
def test_half_of_the_heads_on_each_rank_equals_one_process(tmp_path, changes):
    run_ranks(share_heads, tmp_path, attrs.evolve(CONFIG, **changes))


def cut_parameters(rank: int) -> None:
    """Compare a layer sharded by FSDP with the whole one over a cache: every rank holds all heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole, cut = layer_of(CONFIG), layer_of(CONFIG)
    fully_shard(cut, mesh=init_device_mesh("cpu", (RANKS,)))
    x = torch.randn(1, 30, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    with torch.no_grad():
        cache = cut.new_cache(1, 30)
        assert cache.keys["slc"].shape[2] == CONFIG.num_kv_heads
        steps = torch.cat([cut(piece, cache=cache) for piece in x.split([25, 1, 4], 1)], 1)
        torch.testing.assert_close(steps, whole(x), rtol=0, atol=1e-11)


def test_a_cache_of_a_layer_that_fsdp_cuts_holds_all_heads(tmp_path):
    run_ranks(cut_parameters, tmp_path)


def test_heads_that_ranks_cannot_share_out_are_refused():
    layer = NativeSparseAttention(CONFIG)
    check_shares(layer, 2)
    with pytest.raises(ConfigError, match="num_kv_heads=2 cannot be shared out among 4 ranks"):
        check_shares(layer, 4)


def test_window_keys_that_leave_a_gap_are_refused():
    inputs = make_inputs(Shape(num_queries=20))
    window = BlockGeometry(4, 2, 4, 3, 1, 1, 5)
    start = torch.tensor([15], dtype=torch.int32)
    queries = Queries(inputs.q[:, 15:], 5, start=start)
    for first, is_whole in ((10, True), (11, True), (12, False)):
        win = Keys(inputs.k_win[:, first:], inputs.v_win[:, first:], 20 - first, first=torch.full_like(start, first))
        if is_whole:
            attend(queries, None, None, win, inputs.gates[:, 15:], geometry=window)
            continue
        with pytest.raises(ValueError, match=r"k_win begins at positions \[12\] for queries from \[15\] on"):
            attend(queries, None, None, win, inputs.gates[:, 15:], geometry=window)
