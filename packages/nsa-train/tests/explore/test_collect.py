"""The records of the layers equal the oracle's results, in float64, from the layers' own inputs."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nsa_core.compression import block_windows
from nsa_core.config import BlockGeometry, NSAConfig
from nsa_core.decoder import Decoder, DecoderSizes
from nsa_core.dense_attention import DenseAttention
from nsa_core.module import NativeSparseAttention
from nsa_core.reference import naive
from nsa_core.selection_loss import block_mass
from nsa_train.errors import TrainError
from nsa_train.explore.collect import collect_layers

GEOMETRY = BlockGeometry(
    compression_block_size=4, compression_stride=2, selection_block_size=4, num_selected_blocks=4, num_local_blocks=2, window_size=8
)
CONFIG = NSAConfig(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim_qk=8, head_dim_v=8, geometry=GEOMETRY, gate_hidden_size=8)
KINDS: dict[str, dict[str, Any]] = {
    "all branches": {},
    "no compressed branch": {"branches": ("slc", "win")},
    "shared": {"kv": "shared", "compressor": "mean", "compressed_rope": "tokens", "qk_norm": True, "qkv_bias": True},
    "softmax": {"gate": "softmax", "compressor": "conv"},
}


def decoder_of(*configs: NSAConfig | None) -> Decoder:
    """Return a decoder with a layer of each config, dense where it is None, whose weights choose unevenly."""
    torch.manual_seed(0)
    attentions = [(lambda c=c: DenseAttention(CONFIG) if c is None else NativeSparseAttention(c)) for c in configs]
    model = Decoder(DecoderSizes(vocab_size=50, hidden_size=32, intermediate_size=64), attentions)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model.eval()


def inputs_of(model: Decoder, ids: Tensor) -> list[Tensor]:
    """Return the input `(1, S, hidden)` of each layer's attention."""
    found: list[Tensor] = []
    hooks = [block.attention.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0])) for block in model.blocks]
    with torch.no_grad():
        model(ids[None])
    for hook in hooks:
        hook.remove()
    return found


def oracle_of(layer: NativeSparseAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return block_indices `(S, G, n)`, importance `(S, G, N)` and its margin `(S, G)` by the oracle, in float64."""
    config, positions = layer.config, torch.arange(x.shape[1])

    def part(module: nn.Module, name: str) -> nn.Module:
        return module if config.kv == "shared" else module[name]  # type: ignore[index]

    with torch.no_grad():
        q = layer.q_proj(x).unflatten(-1, (config.num_heads, -1))
        k = part(layer.k_proj, "cmp")(x).unflatten(-1, (config.num_kv_heads, -1))
        if config.qk_norm:
            q, k = layer.q_norm(q), part(layer.k_norm, "cmp")(k)
        q = layer.rope(q, positions)
        on_tokens = config.compressed_rope == "tokens"
        windows = block_windows(layer.rope(k, positions) if on_tokens else k, config.geometry, None)
        k_cmp = layer.compress_k(windows.tokens)
        k_cmp = (k_cmp if on_tokens else layer.rope(k_cmp, windows.last_positions)).double()
        q = q.double()
        lse = naive.compressed_attention(q, k_cmp, k_cmp, geometry=config.geometry).lse
        keywords = {"geometry": config.geometry}
        return (
            naive.select_blocks(q, k_cmp, lse, **keywords)[0],
            naive.importance(q, k_cmp, lse, **keywords)[0],
            naive.selection_margin(q, k_cmp, lse, **keywords)[0],
        )


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 16, 17, 61])
@pytest.mark.parametrize("kind", KINDS)
def test_choice_and_scores_are_those_of_the_oracle(kind: str, num_tokens: int) -> None:
    config = NSAConfig(**{name: getattr(CONFIG, name) for name in CONFIG.__slots__ if not name.startswith("_")} | KINDS[kind])
    model = decoder_of(config, config)
    ids = torch.arange(num_tokens) * 7 % 50
    for record, layer, x in zip(collect_layers(model, ids), model.sparse_layers, inputs_of(model, ids), strict=True):
        chosen, importance, margin = oracle_of(layer, x)
        assert record.scores is not None
        assert record.block_indices is not None
        np.testing.assert_allclose(record.scores, importance.numpy(), atol=1e-5)
        is_clear = (margin > 1e-5).numpy()
        assert is_clear.mean() > 0.9
        np.testing.assert_array_equal(record.block_indices[is_clear], chosen.numpy()[is_clear])


def test_gates_are_those_of_the_layer() -> None:
    model = decoder_of(CONFIG)
    ids = torch.arange(30)
    [record], [layer], [x] = collect_layers(model, ids), model.sparse_layers, inputs_of(model, ids)
    assert record.gates is not None
    np.testing.assert_allclose(record.gates, layer.gate(x)[0].sigmoid().detach().numpy(), atol=1e-6)


def test_layers_that_choose_nothing_have_gates_alone() -> None:
    alone = NSAConfig(**{name: getattr(CONFIG, name) for name in CONFIG.__slots__ if not name.startswith("_")} | {"branches": ("win",)})
    records = collect_layers(decoder_of(None, alone, CONFIG), torch.arange(20), twin=decoder_of(None, None, None))
    assert [one.geometry is None for one in records] == [True, False, False]
    assert [one.block_indices is None for one in records] == [True, True, False]
    assert [one.dense_mass is None for one in records] == [True, True, False]
    assert records[1].gates is not None
    assert not records[1].gates[..., :2].any()
    assert records[1].gates[..., 2].all()


@pytest.mark.parametrize("keywords", [{}, {"qk_norm": True}], ids=["plain", "qk_norm"])
def test_the_twin_is_read_where_it_attends(keywords: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_core import dense_attention

    monkeypatch.setitem(
        globals(), "CONFIG", NSAConfig(**{n: getattr(CONFIG, n) for n in CONFIG.__slots__ if not n.startswith("_")} | keywords)
    )
    seen = []
    monkeypatch.setattr(
        dense_attention, "fast_causal_attention", lambda q, k, v: seen.append((q, k)) or dense_attention.causal_attention(q, k, v)
    )
    records = collect_layers(decoder_of(CONFIG, CONFIG), torch.arange(25), twin=decoder_of(None, None))
    for record, (q, k) in zip(records, seen, strict=True):
        expected = block_mass(q, k, torch.arange(25), geometry=GEOMETRY)
        np.testing.assert_array_equal(record.dense_mass, expected.numpy())
        assert record.dense_mass is not None
        np.testing.assert_allclose(record.dense_mass.sum(-1), 1, atol=1e-5)


def test_a_model_is_left_as_it_was() -> None:
    model = decoder_of(CONFIG)
    before = [(layer.registry, layer.telemetry) for layer in model.sparse_layers]
    collect_layers(model, torch.arange(9))
    assert [(layer.registry, layer.telemetry) for layer in model.sparse_layers] == before


def test_numbers_that_are_not_finite_are_refused() -> None:
    model = decoder_of(CONFIG, CONFIG)
    with torch.no_grad():
        model.sparse_layers[1].q_proj.weight.fill_(torch.nan)
    with pytest.raises(TrainError, match="scores of layer 1 are not finite .* explore an earlier checkpoint"):
        collect_layers(model, torch.arange(40))
