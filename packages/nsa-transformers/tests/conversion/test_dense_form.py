"""Dense models as Llama, Qwen2 or Qwen3: a converted model of these becomes the original again."""

import pytest
import torch

from nsa_core.errors import ConfigError
from nsa_transformers import NSAForCausalLM, NSAModelConfig
from nsa_transformers.conversion import dense_form

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.5,
    },
}
SAME = (
    *("model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"),
    *("hidden_act", "bos_token_id", "eos_token_id", "pad_token_id"),
)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_source_that_stays_dense_comes_back_bit_for_bit(dense, convert, family, kind):
    source = dense(family, rope_parameters=ROPES[kind], tie_word_embeddings=kind == "linear", rms_norm_eps=1e-3, eos_token_id=[3, 5])
    model = convert(source.folder, layers=["dense"]).model
    found = dense_form(model.config, model.state_dict())
    assert {name: getattr(found.config, name) for name in SAME} == {name: getattr(source.model.config, name) for name in SAME}
    expected = {name: value for name, value in source.model.state_dict().items() if name in found.tensors}
    assert found.tensors.keys() == source.model.state_dict().keys() - ({"lm_head.weight"} if kind == "linear" else set())
    assert all(torch.equal(value, expected[name]) for name, value in found.tensors.items())


def test_a_second_epsilon_scales_what_is_normed():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = NSAModelConfig(**sizes, attention="dense", rms_norm_eps=1e-4, nsa={"qk_norm": True, "qk_norm_eps": 1e-2})
    ours = NSAForCausalLM(config).state_dict()
    found = dense_form(config, ours)
    assert found.config.rms_norm_eps == 1e-4
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        factor = 0.1 if name in ("q_proj", "k_proj") else 1.0
        there = found.tensors[f"model.layers.0.self_attn.{name}.weight"]
        assert torch.allclose(there, factor * ours[f"blocks.0.attention.{name}.weight"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_epsilon_of_a_norm_without_one_is_that_of_its_computation(tiny_model, dtype):
    model = tiny_model("dense", rms_norm_eps=None).to(dtype)
    found = dense_form(model.config, model.state_dict())
    assert found.config.rms_norm_eps == torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def test_a_sparse_model_has_no_dense_form(dense, convert):
    model = convert(dense().folder, layers=["dense", "nsa"]).model
    with pytest.raises(ConfigError, match=r"layer 1 is sparse, with branches=\['cmp', 'slc', 'win'\] .*; use --format hf"):
        dense_form(model.config, model.state_dict())
