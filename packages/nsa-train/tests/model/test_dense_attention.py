"""The dense twin against attention written out."""

import pytest
import torch
from torch import Tensor

from nsa_core import NSAConfig
from nsa_core.errors import CacheOverflowError
from nsa_train.model.dense_attention import DenseAttention

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
