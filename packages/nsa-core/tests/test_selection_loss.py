"""The auxiliary loss of the choice against loops over the oracle's importance and over dense attention."""

import copy
import math

import pytest
import torch

from nsa_core import BlockGeometry, NativeSparseAttention, NSAConfig
from nsa_core.attention import sliding_window_attention
from nsa_core.dense_attention import DenseAttention
from nsa_core.errors import InputError
from nsa_core.reference import naive
from nsa_core.selection_loss import SelectionLoss, block_mass, sample_rows, selection_loss

GEOMETRY = BlockGeometry(8, 4, 8, num_selected_blocks=4, num_initial_blocks=1, num_local_blocks=2, window_size=8)
H, G, D = 4, 2, 8


def inputs(lengths, dtype=torch.float32):
    """Return q, k_cmp, k of sequences packed one after another."""
    torch.manual_seed(0)
    total = sum(lengths)
    blocks = sum(max(0, (length - 8) // 4 + 1) for length in lengths)
    return tuple(torch.randn(1, rows, heads, D, dtype=dtype) for rows, heads in ((total, H), (blocks + 3, G), (total, G)))


def mass_of(q, k, lengths, groups=G):
    """Return the mass (total, groups, blocks) of dense attention in blocks of 8 tokens, in float64, by loops."""
    q, k = q.double()[0], k.double()[0]
    heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    mass = torch.zeros(sum(lengths), groups, -(-max(lengths) // 8), dtype=torch.float64)
    start = 0
    for length in lengths:
        for t in range(length):
            for head in range(heads):
                keys = k[start : start + t + 1, head // shared]
                for token, weight in enumerate((keys @ q[start + t, head] * q.shape[-1] ** -0.5).softmax(0).tolist()):
                    mass[start + t, head * groups // heads, token // 8] += weight * groups / heads
        start += length
    return mass


def expected(q, k_cmp, lengths, mass):
    """Return the loss of all rows against `mass` (total, G, blocks), in float64, by loops."""
    q, k_cmp = q.double(), k_cmp.double()
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    v = torch.zeros_like(k_cmp)
    lse = naive.compressed_attention(q, k_cmp, v, geometry=GEOMETRY, cu_seqlens=bounds).lse
    importance = naive.importance(q, k_cmp, lse, geometry=GEOMETRY, cu_seqlens=bounds)
    losses = []
    for start, length in zip(bounds.tolist(), lengths, strict=False):
        for t in range(length):
            own = t // 8
            if own < 4:
                continue
            free = [j for j in range(own + 1) if j >= 1 and j <= own - 2]
            for group in range(G):
                target, found = mass[start + t, group, free], importance[0, start + t, group, free]
                share = target.sum()
                losses.append(float(share * ((target / share) * ((target / share) / (found / found.sum())).log()).sum()))
    return math.fsum(losses) / len(losses)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[35], [5, 19, 0, 9]], ids=["one", "packed"])
def test_the_mass_is_that_of_dense_attention_over_the_keys_of_a_block(lengths, groups):
    q, _, k = inputs(lengths, torch.float64)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    rows = torch.arange(sum(lengths)).flip(0)

    mass = block_mass(q, k, rows, geometry=GEOMETRY, num_groups=groups, cu_seqlens=bounds, max_seqlen=max(lengths))

    assert torch.allclose(mass, mass_of(q, k, lengths, groups)[rows], rtol=1e-12, atol=1e-15)


def test_the_mass_is_summed_in_float32_under_autocast():
    q, _, k = inputs([35])
    rows = torch.arange(35)
    with torch.autocast("cpu", torch.bfloat16):
        mass = block_mass(q, k, rows, geometry=GEOMETRY)
    assert torch.equal(mass, block_mass(q, k, rows, geometry=GEOMETRY))
    assert torch.allclose(mass.sum(-1), torch.ones(35, G))


@pytest.mark.parametrize("lengths", [[70], [5, 61, 33, 44]], ids=["one", "packed"])
def test_the_loss_is_the_divergence_of_importance_from_dense_attention(lengths):
    q, k_cmp, k = inputs(lengths)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)

    loss = selection_loss(q, k_cmp, k, torch.arange(sum(lengths)), geometry=GEOMETRY, cu_seqlens=bounds, max_seqlen=max(lengths))

    assert float(loss) == pytest.approx(expected(q, k_cmp, lengths, mass_of(q, k, lengths)), rel=1e-5)


@pytest.mark.parametrize("lengths", [[70], [5, 61, 33, 44]], ids=["one", "packed"])
def test_a_target_takes_the_place_of_the_own_dense_form(lengths):
    q, k_cmp, k = inputs(lengths)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    options = {"geometry": GEOMETRY, "cu_seqlens": bounds, "max_seqlen": max(lengths)}
    # a teacher of other sizes: 6 heads of 4 channels, 3 KV heads
    theirs = torch.randn(1, sum(lengths), 6, 4), torch.randn(1, sum(lengths), 3, 4)
    rows = torch.arange(sum(lengths))

    loss = selection_loss(q, k_cmp, k, rows, target=block_mass(*theirs, rows, num_groups=G, **options), **options)

    assert float(loss) == pytest.approx(expected(q, k_cmp, lengths, mass_of(*theirs, lengths)), rel=1e-5)


def test_a_target_gets_no_gradient():
    q, k_cmp, k = (x.requires_grad_() for x in inputs([70]))
    target = torch.rand(70, G, 9, requires_grad=True)
    selection_loss(q, k_cmp, k, torch.arange(70), geometry=GEOMETRY, target=target).backward()
    assert target.grad is k.grad is None
    assert q.grad.any() and k_cmp.grad.any()


def test_a_target_of_other_rows_is_refused():
    q, k_cmp, k = inputs([70])
    with pytest.raises(InputError, match=r"target has shape \(3, 2, 9\) .* = \(4, 2, 9\)\); take it by block_mass of the same rows"):
        selection_loss(q, k_cmp, k, torch.arange(4), geometry=GEOMETRY, target=torch.ones(3, 2, 9))


def test_a_batch_of_equal_sequences_needs_no_bounds():
    q, k_cmp, k = (x.unflatten(1, (2, -1)).flatten(0, 1) for x in (torch.randn(1, 2 * n, h, D) for n, h in ((60, H), (14, G), (60, G))))
    bounds = torch.tensor([0, 60, 120], dtype=torch.int32)
    rows = torch.arange(3, 120, 7)

    packed = [x.flatten(0, 1).unsqueeze(0) for x in (q, k_cmp, k)]
    assert torch.allclose(
        selection_loss(q, k_cmp, k, rows, geometry=GEOMETRY),
        selection_loss(*packed, rows, geometry=GEOMETRY, cu_seqlens=bounds, max_seqlen=60),
    )


def test_gradients_reach_queries_and_compressed_keys_alone_and_lower_the_loss():
    q, k_cmp, k = (x.requires_grad_() for x in inputs([70]))
    rows = torch.arange(70)

    losses = []
    for _ in range(40):
        loss = selection_loss(q, k_cmp, k, rows, geometry=GEOMETRY)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            # the compressed keys alone: with the queries dense attention would change
            k_cmp -= 30 * k_cmp.grad
        assert k.grad is None
        assert q.grad.any()
        q.grad = k_cmp.grad = None

    assert losses[-1] < 0.5 * losses[0]


def test_a_query_without_a_choice_teaches_nothing_and_later_tokens_do_not_matter():
    q, k_cmp, k = inputs([70])
    # 32 tokens: all four blocks are chosen
    assert selection_loss(q, k_cmp, k, torch.arange(32), geometry=GEOMETRY) == 0
    row = torch.tensor([50])
    before = selection_loss(q, k_cmp, k, row, geometry=GEOMETRY)
    # the last compressed block that position 50 sees ends there or before: (50 + 1 - 8) // 4 + 1 = 11 blocks
    q[:, 51:], k_cmp[:, 11:], k[:, 51:] = 100, 100, 100
    assert selection_loss(q, k_cmp, k, row, geometry=GEOMETRY) == before > 0


def test_rows_are_spread_evenly_and_moved_by_the_offset():
    assert sample_rows(100, 4, torch.tensor(0.0)).tolist() == [0, 25, 50, 75]
    assert sample_rows(100, 4, torch.tensor(0.5)).tolist() == [12, 37, 62, 87]
    assert sample_rows(3, 8, torch.tensor(1.0)).tolist()[-1] == 2


@pytest.mark.parametrize("compressor", ["mean", "conv"])
@pytest.mark.parametrize("kv", ["separate", "shared"])
def test_a_layer_takes_the_loss_of_its_training_passes(kv, compressor):
    config = NSAConfig(32, H, G, D, D, geometry=GEOMETRY, compressor=compressor, kv=kv)
    torch.manual_seed(0)
    layer = NativeSparseAttention(config)
    x = torch.randn(2, 70, 32)
    plain = layer(x)
    layer.selection_loss = SelectionLoss(num_samples=20)

    out = layer(x)

    assert torch.equal(out, plain)
    loss = layer.selection_loss.value
    assert loss > 0
    loss.backward()
    reached = {name for name, weight in layer.named_parameters() if weight.grad is not None}
    # keys that other branches read stay as they are
    own = {"k_proj.cmp.weight"} if kv == "separate" else set()
    phi = {"compress_k.weight"} if compressor == "conv" else set()
    assert reached == {"q_proj.weight", *own, *phi}
    layer.selection_loss.value = None
    layer.eval()
    layer(x)
    assert layer.selection_loss.value is None


@pytest.mark.parametrize(("shape", "bounds"), [((2, 0), None), ((0, 8), None), ((0, 0), None), ((1, 0), None), ((1, 0), [0, 0, 0])])
@pytest.mark.parametrize("compressor", ["mean", "mlp"])
def test_the_loss_of_an_empty_batch_is_0(compressor, shape, bounds):
    layer = NativeSparseAttention(NSAConfig(32, H, G, D, D, geometry=GEOMETRY, compressor=compressor))
    layer.selection_loss = SelectionLoss()

    out = layer(torch.randn(*shape, 32), cu_seqlens=bounds and torch.tensor(bounds, dtype=torch.int32))

    assert out.shape == (*shape, 32)
    loss = layer.selection_loss.value
    assert loss == 0
    (out.sum() + loss).backward()
    assert not any(weight.grad.any() for weight in layer.parameters())


@pytest.mark.parametrize("kv", ["separate", "shared"])
def test_keys_that_only_choose_get_no_gradient_of_it_and_phi_runs_once(kv):
    layer = NativeSparseAttention(NSAConfig(32, H, G, D, D, geometry=GEOMETRY, kv=kv, branches=("slc", "win")))
    layer.selection_loss, calls = SelectionLoss(num_samples=20), []
    layer.compress_k.register_forward_hook(lambda *_: calls.append(1))
    layer.q_proj.register_forward_hook(lambda module, inputs, q: q.detach())

    layer(torch.randn(1, 70, 32, requires_grad=True))

    assert len(calls) == 1
    assert layer.selection_loss.value > 0
    assert not layer.selection_loss.value.requires_grad


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kv", ["separate", "shared"])
def test_the_own_dense_form_is_that_of_the_layers_queries_and_selected_keys(kv, qk_norm):
    torch.manual_seed(0)
    layer = NativeSparseAttention(NSAConfig(32, H, G, D, D, geometry=GEOMETRY, kv=kv, qk_norm=qk_norm))
    layer.selection_loss = SelectionLoss(num_samples=90)
    x, bounds = torch.randn(1, 90, 32), torch.tensor([0, 20, 90], dtype=torch.int32)
    layer(x, cu_seqlens=bounds, max_seqlen=70)
    own = layer.selection_loss.value

    q, k = layer.queries_keys(x, cu_seqlens=bounds)
    rows = layer.selection_loss.rows(90, x.device)
    layer.selection_loss.target = block_mass(q, k, rows, geometry=GEOMETRY, cu_seqlens=bounds, max_seqlen=70)
    layer(x, cu_seqlens=bounds, max_seqlen=70)

    assert own > 0
    assert torch.equal(layer.selection_loss.value, own)


def test_a_layer_without_selected_keys_has_no_dense_form():
    layer = NativeSparseAttention(NSAConfig(32, H, G, D, D, geometry=GEOMETRY, branches=("cmp", "win")))
    with pytest.raises(InputError, match="have no selected keys"):
        layer.queries_keys(torch.randn(1, 8, 32))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_queries_and_keys_of_dense_attention_are_those_that_it_attends_with(qk_norm):
    torch.manual_seed(0)
    layer = DenseAttention(NSAConfig(32, H, G, D, D, qk_norm=qk_norm, qkv_bias=True))
    x, bounds = torch.randn(1, 30, 32), torch.tensor([0, 12, 30], dtype=torch.int32)
    v = layer.v_proj(x).unflatten(-1, (G, D))
    for options in ({}, {"cu_seqlens": bounds, "max_seqlen": 18}):
        q, k = layer.queries_keys(x, cu_seqlens=options.get("cu_seqlens"))
        out = sliding_window_attention(q, k, v, geometry=BlockGeometry(window_size=30), **options).out
        assert torch.allclose(layer(x, **options), layer.o_proj(out.flatten(-2)), atol=1e-6)


def test_a_layer_is_copied_between_its_training_pass_and_the_backward_pass():
    layer = NativeSparseAttention(NSAConfig(32, H, G, D, D, geometry=GEOMETRY))
    layer.selection_loss = SelectionLoss(num_samples=8)
    layer(torch.randn(1, 70, 32))
    copied = copy.deepcopy(layer).selection_loss
    assert copied.num_samples == 8
    assert torch.equal(copied.value, layer.selection_loss.value)
    # the copy holds the number, the layer still the graph
    assert not copied.value.requires_grad
    layer.selection_loss.value.backward()
    assert layer.q_proj.weight.grad.any()


def test_rows_that_do_not_count_teach_nothing():
    q, k_cmp, k = (torch.randn(2, rows, heads, D) for rows, heads in ((70, H), (16, G), (70, G)))
    counts, rows = torch.tensor([70, 40], dtype=torch.int32), torch.arange(140)
    loss = selection_loss(q, k_cmp, k, rows, geometry=GEOMETRY, query_count=counts)
    assert torch.equal(loss, selection_loss(q, k_cmp, k, rows[:110], geometry=GEOMETRY))
    spoiled = q.clone()
    spoiled[1, 40:] = 7.0
    assert torch.equal(loss, selection_loss(spoiled, k_cmp, k, rows, geometry=GEOMETRY, query_count=counts))
