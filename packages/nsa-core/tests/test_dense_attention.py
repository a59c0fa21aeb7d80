"""The dense twin against attention written out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_core import NativeSparseAttention, NSAConfig
from nsa_core.dense_attention import DenseAttention, fast_causal_attention
from nsa_core.errors import CacheOverflowError, InputError, type_of
from nsa_core.reference.causal import causal_attention

CONFIG = NSAConfig(hidden_size=24, num_heads=4, num_kv_heads=2, head_dim_qk=6, head_dim_v=4)


def _layer() -> DenseAttention:
    torch.manual_seed(0)
    return DenseAttention(CONFIG).double()


def _written_out(layer: DenseAttention, x: Tensor) -> Tensor:
    """Attention head by head with an explicit mask."""
    length, positions = x.shape[1], torch.arange(x.shape[1])
    q = layer.rope(layer.q_proj(x).view(*x.shape[:2], 4, 6), positions)
    k = layer.rope(layer.k_proj(x).view(*x.shape[:2], 2, 6), positions)
    v = layer.v_proj(x).view(*x.shape[:2], 2, 4)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    heads = []
    for head in range(4):
        scores = q[:, :, head] @ k[:, :, head // 2].transpose(1, 2) / 6**0.5
        heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, :, head // 2])
    return layer.o_proj(torch.cat(heads, -1))


@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_it_is_causal_attention_with_grouped_heads(length: int) -> None:
    layer, x = _layer(), torch.randn(2, length, 24, dtype=torch.float64)
    torch.testing.assert_close(layer(x), _written_out(layer, x))


@pytest.mark.parametrize("cuts", [[11], [1] * 11, [4, 4, 3], [1, 10], [10, 1]])
def test_any_split_through_the_cache_equals_the_whole(cuts: list[int]) -> None:
    layer, x = _layer(), torch.randn(3, 11, 24, dtype=torch.float64)
    cache = layer.new_cache(3, 11)
    parts = [layer(part, cache=cache) for part in x.split(cuts, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))


def test_sequences_of_a_batch_may_differ_in_length() -> None:
    layer, x = _layer(), torch.randn(2, 8, 24, dtype=torch.float64)
    counts = torch.tensor([5, 2], dtype=torch.int32)
    cache = layer.new_cache(2, 10)
    first = layer(x[:, :5], cache=cache, query_count=counts)
    second = layer(x[:, 5:], cache=cache)
    for index, count in enumerate(counts.tolist()):
        whole = torch.cat([x[index : index + 1, :count], x[index : index + 1, 5:]], 1)
        parts = torch.cat([first[index : index + 1, :count], second[index : index + 1]], 1)
        torch.testing.assert_close(parts, layer(whole))


def test_a_full_cache_says_what_would_fit() -> None:
    layer = _layer()
    cache = layer.new_cache(1, 4)
    layer(torch.zeros(1, 3, 24, dtype=torch.float64), cache=cache)
    with pytest.raises(CacheOverflowError, match="2 tokens after 3 pass max_seqlen=4 .* max_seqlen=5 or more"):
        layer(torch.zeros(1, 2, 24, dtype=torch.float64), cache=cache)


def test_a_cache_without_a_bound_grows_and_a_static_one_notes_what_did_not_fit() -> None:
    layer, x = _layer(), torch.randn(2, 1030, 24, dtype=torch.float64)
    cache = layer.new_cache(2)
    parts = [layer(part, cache=cache) for part in x.split([1020, 7, 3], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))
    fixed = layer.new_cache(2, 1024, static=True)
    layer(x[:, :1020], cache=fixed)
    layer(x[:, 1020:1024], cache=fixed)
    fixed.check()
    layer(x[:, 1024:1025], cache=fixed, query_count=torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(CacheOverflowError, match=r"sequences \[1\] lost tokens"):
        fixed.check()


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_is_cropped_reordered_and_reset(static: bool) -> None:
    layer, x = _layer(), torch.randn(2, 9, 24, dtype=torch.float64)
    cache = layer.new_cache(2, 12, static=static)
    layer(x, cache=cache)
    cache.crop(4)
    cache.reorder(torch.tensor([1, 1]))
    again = x[[1, 1]]
    torch.testing.assert_close(layer(again[:, 5:], cache=cache), layer(again)[:, 5:])
    cache.reset()
    torch.testing.assert_close(layer(x, cache=cache), layer(x))
    with pytest.raises(CacheOverflowError, match="cannot go back by 10 tokens"):
        cache.crop(10)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("on", range(3), ids=["built", "grown", "reordered"])
def test_a_cache_that_inference_mode_built_or_changed_serves_outside_of_it(on: int, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_core.dense_attention.FIRST_CAPACITY", 6)
    layer, x = _layer(), torch.randn(2, 11, 24, dtype=torch.float64)
    modes = [torch.inference_mode(number == on) for number in range(3)]
    with torch.no_grad():
        with modes[0]:
            cache = layer.new_cache(2, 12, static=static)
        outs = [layer(x[:, :5], cache=cache)]
        with modes[1]:
            outs.append(layer(x[:, 5:8], cache=cache))
        outs.append(layer(x[:, 8:9], cache=cache))
        with modes[2]:
            cache.reorder(torch.tensor([1, 0]))
        outs.append(layer(x[[1, 0], 9:], cache=cache)[[1, 0]])
        torch.testing.assert_close(torch.cat(outs, 1), layer(x))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("empty", ["crop", "reset"])
def test_nan_in_removed_tokens_reaches_no_later_step(static: bool, empty: str) -> None:
    layer, x = _layer(), torch.randn(2, 8, 24, dtype=torch.float64)
    cache = layer.new_cache(2, 20, static=static)
    spoiled = x.clone()
    spoiled[1, 6] = torch.nan
    layer(spoiled, cache=cache)
    cache.crop(8) if empty == "crop" else cache.reset()
    layer(x, cache=cache, query_count=torch.tensor([8, 3], dtype=torch.int32))
    found = layer(x[:, :1], cache=cache)
    whole = [torch.cat([x[index : index + 1, :count], x[index : index + 1, :1]], 1) for index, count in enumerate((8, 3))]
    for index in range(2):
        torch.testing.assert_close(found[index], layer(whole[index])[0, -1:])


def test_nan_in_rows_that_do_not_count_is_not_stored() -> None:
    layer, x = _layer(), torch.randn(2, 8, 24, dtype=torch.float64)
    cache = layer.new_cache(2)
    spoiled = x.clone()
    spoiled[:, 3:] = torch.nan
    layer(spoiled, cache=cache, query_count=torch.tensor([3, 3], dtype=torch.int32))
    assert cache.keys.isfinite().all() and cache.values.isfinite().all()


@pytest.mark.parametrize("query_count", [None, [4, 1]])
def test_rows_that_a_static_cache_drops_give_0(query_count: list[int] | None) -> None:
    layer, x = _layer(), torch.randn(2, 12, 24, dtype=torch.float64)
    cache = layer.new_cache(2, 10, static=True)
    layer(x[:, :8], cache=cache)
    counts = None if query_count is None else torch.tensor(query_count, dtype=torch.int32)
    out = layer(x[:, 8:], cache=cache, query_count=counts)
    stored = [2, 2] if query_count is None else [2, 1]
    assert cache.lengths.tolist() == [8 + count for count in stored]
    with pytest.raises(CacheOverflowError):
        cache.check()
    whole = layer(x)
    for index, count in enumerate(stored):
        torch.testing.assert_close(out[index, :count], whole[index, 8 : 8 + count])
        assert not out[index, count:].any()


def test_what_does_not_fit_the_layer_is_refused_and_changes_nothing() -> None:
    layer, x = _layer(), torch.randn(1, 5, 24, dtype=torch.float64)
    cache = DenseAttention(CONFIG).new_cache(1, 20)
    with pytest.raises(InputError, match=r"the cache holds torch.float32, the layer computes in torch.float64"):
        layer(x, cache=cache)
    assert cache.lengths.tolist() == [0]
    for wrong, message in (
        (x.float(), r"x is torch.float32, the layer's weights are torch.float64"),
        (x[..., :20], r"x has shape \(1, 5, 20\) \(the layout is \(B, S, hidden_size=24\)\)"),
    ):
        with pytest.raises(InputError, match=message):
            layer(wrong)
    with pytest.raises(InputError, match="cu_seqlens came with a cache or query_count"):
        layer(x, cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32), query_count=torch.tensor([3], dtype=torch.int32))


def test_biases_of_q_k_and_v_count() -> None:
    config = NSAConfig(hidden_size=24, num_heads=4, num_kv_heads=2, head_dim_qk=6, head_dim_v=4, qkv_bias=True)
    layer = DenseAttention(config).double()
    assert {name for name, _ in layer.named_parameters() if name.endswith("bias")} == {"q_proj.bias", "k_proj.bias", "v_proj.bias"}
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(layer(x), _written_out(layer, x))


def test_a_step_back_leaves_the_cache_as_it_was() -> None:
    layer, x = _layer(), torch.randn(2, 9, CONFIG.hidden_size, dtype=torch.float64)
    cache = layer.new_cache(2, 9)
    layer(x[:, :6], cache=cache)
    expected = layer(x[:, 6:], cache=cache)
    cache.crop(3)
    # other tokens, cropped as well
    layer(-x[:, :3], cache=cache)
    cache.crop(3)
    assert (cache.bound, cache.lengths.tolist()) == (6, [6, 6])
    torch.testing.assert_close(layer(x[:, 6:], cache=cache), expected)


def test_a_prefill_holds_no_mask_of_all_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    layer, x = _layer(), torch.randn(2, 7, CONFIG.hidden_size, dtype=torch.float64)
    cache = layer.new_cache(2, 9)
    layer(x[:, :4], cache=cache)
    later = layer(x[:, 4:], cache=cache)
    monkeypatch.undo()
    torch.testing.assert_close(later, layer(x)[:, 4:])


def _packed(layer: DenseAttention, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return a packed batch through the layer, and each sequence alone."""
    weight = layer.q_proj.weight
    parts = [torch.randn(1, length, CONFIG.hidden_size, dtype=weight.dtype, device=weight.device) for length in lengths]
    bounds = torch.tensor([0, *lengths], device=weight.device).cumsum(0, dtype=torch.int32)
    together = layer(torch.cat(parts, 1), cu_seqlens=bounds, max_seqlen=max(lengths))
    return together, torch.cat([layer(part) for part in parts], 1)


@pytest.mark.parametrize("lengths", [[8, 8, 8], [24], [3, 8, 1, 5], [1, 1]])
def test_packed_sequences_equal_each_alone(lengths: list[int]) -> None:
    torch.testing.assert_close(*_packed(_layer(), lengths))


@pytest.mark.parametrize("lengths", [[8, 8, 8], [24]])
def test_sequences_of_the_bounds_length_need_no_gathering(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DenseAttention, "_padded", None)
    torch.testing.assert_close(*_packed(_layer(), lengths))


@pytest.mark.hardware(capability=(8, 0))
def test_float32_with_groups_of_heads_stores_no_scores_on_a_gpu() -> None:
    """The scores of 16,384 rows and 8 heads would take 8 GiB."""
    q, k, v = (torch.randn(1, 16384, heads, 64, device="cuda", requires_grad=True) for heads in (8, 2, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = fast_causal_attention(q, k, v)
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**30
    last = [x.detach()[:, :512].double().requires_grad_() for x in (q, k, v)]
    exact = causal_attention(*last)
    assert float((out[:, :512] - exact).detach().abs().max()) < 1e-5
    exact.sum().backward()
    # only early rows reach the gradient of q there
    assert float((q.grad[:, :512] - last[0].grad).abs().max()) < 1e-5
    assert k.grad.isfinite().all()


@pytest.mark.hardware(capability=(8, 0))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[256, 256], [100, 256, 1, 63]])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_a_gpu_takes_a_fast_kernel_and_no_padded_batch(
    dtype: torch.dtype, lengths: list[int], heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, against float64 written out."""
    monkeypatch.setattr(DenseAttention, "_padded", None)
    config = NSAConfig(hidden_size=64, num_heads=heads[0], num_kv_heads=heads[1], head_dim_qk=64, head_dim_v=64)
    torch.manual_seed(0)
    exact = DenseAttention(config).double().cuda()
    fast = DenseAttention(config).to("cuda", dtype)
    fast.load_state_dict(exact.state_dict())
    exact.load_state_dict(fast.state_dict())
    x = torch.randn(1, sum(lengths), 64, device="cuda", dtype=dtype)
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    out = fast(x, cu_seqlens=bounds, max_seqlen=256)
    expected = torch.cat([exact(part.double()) for part in x.split(lengths, 1)], 1)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    margin = 0.02 if dtype == torch.bfloat16 else 0.004
    assert float(((out.double() - expected).norm() / expected.norm()).detach()) < margin
    for ours, theirs in zip(fast.parameters(), exact.parameters(), strict=True):
        assert float((ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()) < margin


def test_rows_that_do_not_count_take_no_room_and_give_0() -> None:
    layer, x = _layer(), torch.randn(2, 8, 24, dtype=torch.float64)
    cache, counts = layer.new_cache(2, 12), torch.tensor([3, 1], dtype=torch.int32)
    outs = [layer(x, cache=cache, query_count=counts) for _ in range(4)]
    assert cache.lengths.tolist() == [12, 4]
    assert not outs[3][0, 3:].any()
    whole = torch.cat([x[:1, :3]] * 4, 1)
    torch.testing.assert_close(outs[3][:1, :3], layer(whole)[:, 9:])


def _counts(*counts: int) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("num_rows", "counts"), [(5, (9, -3)), (1, (3, -1))])
def test_a_count_outside_the_rows_changes_nothing(static: bool, num_rows: int, counts: tuple[int, int]) -> None:
    layer, x = _layer(), torch.randn(2, num_rows, 24, dtype=torch.float64)
    cache = layer.new_cache(2, 30, static=static)
    with pytest.raises(InputError, match=rf"query_count=\[{counts[0]}, {counts[1]}\] leaves 0 .. {num_rows} "):
        layer(x, cache=cache, query_count=_counts(*counts))
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("num_tokens", [-1, 1.0, True])
def test_only_a_count_of_tokens_can_be_cropped(num_tokens: Any) -> None:
    layer = _layer()
    cache = layer.new_cache(2, 6)
    layer(torch.zeros(2, 5, 24, dtype=torch.float64), cache=cache)
    with pytest.raises(InputError, match=f"num_tokens={num_tokens} .* at least 0"):
        cache.crop(num_tokens)
    assert cache.lengths.tolist() == [5, 5]


def test_each_sequence_has_room_up_to_max_seqlen() -> None:
    layer, x = _layer(), torch.randn(2, 5, 24, dtype=torch.float64)
    cache = layer.new_cache(2, 6)
    layer(x, cache=cache, query_count=_counts(5, 0))
    second = layer(x, cache=cache, query_count=_counts(0, 5))
    assert cache.lengths.tolist() == [5, 5]
    torch.testing.assert_close(second[1:], layer(x)[1:])
    cache.reorder(torch.tensor([1, 0]))
    layer(x[:, :1], cache=cache, query_count=_counts(1, 0))
    cache.crop(1)
    assert cache.lengths.tolist() == [5, 4]
    with pytest.raises(CacheOverflowError, match="2 tokens after 5 pass max_seqlen=6"):
        layer(x[:, :2], cache=cache)


@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_rows_beyond_the_count_give_0(has_cache: bool, num_rows: int) -> None:
    layer, x = _layer(), torch.randn(2, num_rows, 24, dtype=torch.float64)
    cache = layer.new_cache(2, 8) if has_cache else None
    out = layer(x, cache=cache, query_count=_counts(0, 1))
    assert not out[0].any()
    assert not out[1, 1:].any()
    torch.testing.assert_close(out[1:, :1], layer(x[1:, :1]))
    if cache is not None:
        assert not layer(x, cache=cache, query_count=_counts(1, 0))[1].any()


def test_a_cache_that_does_not_fit_is_refused_and_unchanged() -> None:
    layer, x = _layer(), torch.randn(2, 3, 24, dtype=torch.float64)
    for wrong in (5, NativeSparseAttention(CONFIG).new_cache(2)):
        with pytest.raises(InputError, match=f"^cache is {type_of(wrong)} .the rule: a DenseCache.; build it with"):
            layer(x, cache=wrong)
    for sequences in (1, 3):
        cache = layer.new_cache(sequences)
        with pytest.raises(InputError, match=f"^the cache holds {sequences} sequences, x has 2; build it with new_cache"):
            layer(x, cache=cache)
        assert (cache.lengths.tolist(), cache.bound) == ([0] * sequences, 0)


@pytest.mark.parametrize("sizes", [(-1, 4), ("2", 4), (2, 0), (2, "4"), (2, 1.5)])
def test_sizes_that_no_cache_has_are_refused(sizes: tuple[Any, Any]) -> None:
    with pytest.raises(InputError, match=f"^batch_size={sizes[0]}, max_seqlen={sizes[1]} .integers of at least 0 and 1.; use 1 and 4096$"):
        _layer().new_cache(*sizes)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 1], "^indices is a list "),
        (torch.tensor([[0, 1]]), "^indices has shape"),
        (torch.tensor([0.0, 1.0]), "^indices are torch.float32 "),
        (torch.tensor([0, 2]), "^indices name sequence 2 .the cache holds 2.; use 0 .. 1$"),
        (torch.tensor([-1, 0]), "^indices name sequence -1 "),
    ],
    ids=str,
)
@pytest.mark.parametrize("static", [False, True])
def test_indices_that_name_no_sequences_are_refused(static: bool, indices: Any, message: str) -> None:
    layer, x = _layer(), torch.randn(2, 3, 24, dtype=torch.float64)
    cache = layer.new_cache(2, 8, static=static)
    layer(x, cache=cache)
    with pytest.raises(InputError, match=message):
        cache.reorder(indices)
    assert (cache.lengths.tolist(), cache.batch_size) == ([3, 3], 2)


def test_sequences_longer_than_their_bound_are_refused() -> None:
    layer, x = _layer(), torch.randn(1, 20, 24, dtype=torch.float64)
    with pytest.raises(InputError, match="max_seqlen=8 is below the longest sequence, 12 "):
        layer(x, cu_seqlens=_counts(0, 12, 20), max_seqlen=8)
    with pytest.raises(InputError, match="cu_seqlens came with a cache"):
        layer(x, cu_seqlens=_counts(0, 12, 20), cache=layer.new_cache(1, 20))
