"""Converted models against Transformers' own: equal where the selected branch sees all, and opened alike elsewhere."""

import math

import pytest
import torch
from torch import nn

from nsa_core.errors import ConfigError
from nsa_transformers.conversion.options import gate_logits

FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
CLOSE = 1e-4
NUM_COVERED = 24
"""n * l' of the tests' geometry."""

NSA_OF_TESTS = {
    "compression_block_size": 4,
    "compression_stride": 2,
    "selection_block_size": 8,
    "num_selected_blocks": 3,
    "num_initial_blocks": 1,
    "num_local_blocks": 1,
    "window_size": 12,
}


@pytest.mark.parametrize("shards", ["1GB", "20kB"], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_selected_branch_open_logits_are_the_dense_ones(dense, convert, difference, ids, family, tied, shards):
    source = dense(family, tie_word_embeddings=tied, shards=shards)
    assert (len(list(source.folder.glob("*.safetensors"))) > 1) == (shards != "1GB")
    found = convert(source.folder, gates="selected", shard_bytes=10**9 if shards == "1GB" else 20_000)
    assert difference(source.model, found.model, ids(NUM_COVERED)) < CLOSE
    # beyond n * l' tokens it is sparse
    assert difference(source.model, found.model, ids(NUM_COVERED + 24)) > 10 * CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_branches_with_copies_of_k_and_v_compute_the_same(dense, convert, difference, ids, family):
    source = dense(family)
    found = convert(source.folder, gates="selected", kv="separate")
    assert difference(source.model, found.model, ids(NUM_COVERED)) < CLOSE
    attention = found.model.blocks[0].attention
    assert all(torch.equal(attention.k_proj["cmp"].weight, attention.k_proj[branch].weight) for branch in ("slc", "win"))


@pytest.mark.parametrize("options", [{"gate": "softmax"}, {"gate_temperature": 3.0}, {"compressor": "conv"}, {"branches": ["slc", "win"]}])
def test_the_selected_branch_is_open_alone_whatever_the_gate(dense, convert, difference, ids, options):
    source = dense()
    plain = convert(source.folder, gates="selected", nsa={**NSA_OF_TESTS, **options})
    assert difference(source.model, plain.model, ids(NUM_COVERED)) < CLOSE


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, [1 / 3] * 3),
        ({"gate_temperature": 2.0}, [1 / 3] * 3),
        ({"gate": "softmax"}, [1 / 3] * 3),
        ({"branches": ["slc", "win"]}, [0, 1 / 2, 1 / 2]),
        ({"branches": ["win"]}, [0, 0, 1]),
    ],
)
def test_open_gates_share_one_among_the_branches(dense, convert, options, shares):
    model = convert(dense().folder, nsa={**NSA_OF_TESTS, **options}).model
    logits = model.blocks[1].attention.gate(torch.randn(1, 3, 32)) / options.get("gate_temperature", 1.0)
    gates = logits.softmax(-1) if options.get("gate") == "softmax" else logits.sigmoid()
    assert torch.allclose(gates, torch.tensor(shares, dtype=torch.float32).expand_as(gates), atol=1e-6)


def test_the_last_bias_of_the_gate_is_that_of_the_contract(dense, convert):
    bias = convert(dense().folder).model.blocks[0].attention.gate.down.bias
    assert torch.equal(bias, torch.full_like(bias, math.log(1 / 2)))


def test_the_last_bias_of_a_closed_gate_is_that_of_the_contract(dense, convert):
    bias = convert(dense().folder, gates="selected").model.blocks[0].attention.gate.down.bias
    assert torch.equal(bias.view(-1, 3), torch.tensor([-104.0, 20.0, -104.0]).expand(4, 3))


@pytest.mark.parametrize("compressor", ["mlp", "conv"])
def test_phi_starts_at_the_mean(dense, convert, compressor):
    model = convert(dense().folder, nsa={**NSA_OF_TESTS, "compressor": compressor}).model
    tokens = torch.randn(1, 2, 4, 2, 16)
    assert torch.allclose(model.blocks[1].attention.compress_k(tokens), tokens.mean(2), atol=1e-6)


def test_dense_and_sparse_layers_mix(dense, convert, difference, ids):
    source = dense(num_hidden_layers=4)
    found = convert(source.folder, gates="selected", layers=["dense", {"num_selected_blocks": 2, "num_local_blocks": 1}])
    assert [block.attention.__class__.__name__ for block in found.model.blocks] == ["DenseAttention", "NativeSparseAttention"] * 2
    assert difference(source.model, found.model, ids(16)) < CLOSE
    assert found.found.difference.num_tokens == 16


def test_dense_layers_alone_are_the_source_at_any_length(dense, convert, difference, ids):
    source = dense("Qwen3")
    found = convert(source.folder, layers=["dense"])
    assert found.model.config.attention == "dense"
    assert found.model.config.layers is None
    assert difference(source.model, found.model, ids(100)) < CLOSE


@pytest.mark.parametrize("gates", ["selected", "open"])
def test_differences_from_streams_are_those_of_whole_models(dense, convert, gates):
    source = dense("Qwen2")
    found = convert(source.folder, gates=gates)
    said = found.found.difference
    count = {"selected": NUM_COVERED, "open": 12}[gates]
    assert said.num_tokens == count
    tokens = torch.randint(61, (-(-256 // count), count), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [model(tokens).logits for model in (source.model, found.model)]
    losses = [float(nn.functional.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())) for x in logits]
    assert (said.source_loss, said.converted_loss) == pytest.approx(losses, rel=1e-5)
    assert said.logits == pytest.approx(float((logits[0] - logits[1]).abs().max() / logits[0].abs().max()), rel=1e-2, abs=1e-6)
    assert said.layers < CLOSE


def test_a_converted_model_generates_as_the_dense_one(dense, convert, ids):
    source = dense(eos_token_id=None)
    found = convert(source.folder, gates="selected")
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(source.model.generate(ids(12), **options), found.model.generate(ids(12), **options))


def test_a_layer_of_the_compressed_branch_alone_is_refused(dense, convert):
    with pytest.raises(ConfigError, match=r"branches=\['cmp'\] reads no token as the dense layer did .*use branches=\['cmp', 'win'\]"):
        convert(dense().folder, nsa={**NSA_OF_TESTS, "branches": ["cmp"]})


def test_without_the_selected_branch_the_window_is_opened(dense, convert, difference, ids):
    source = dense()
    found = convert(source.folder, gates="selected", nsa={**NSA_OF_TESTS, "branches": ["cmp", "win"]})
    assert difference(source.model, found.model, ids(12)) < CLOSE
    assert gate_logits(found.model.blocks[0].attention.config, "selected").tolist() == [-104, -104, 20]
