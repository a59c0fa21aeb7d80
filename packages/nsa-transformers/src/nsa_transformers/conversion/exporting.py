"""Export models with only dense layers as Llama, Qwen2 or Qwen3, which Transformers loads with its own classes, without this package."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from nsa_core.config import SCALING_ALIASES, NSAConfig
from nsa_core.errors import ConfigError
from nsa_transformers.configuration import Layer, NSAModelConfig
from nsa_transformers.conversion.planning import HEAD, source_name
from nsa_transformers.conversion.sources import ARCHITECTURES, ROPE_KEYS, Architecture

ELSEWHERE = "use --format hf, or train a dense twin: --set model.attention=dense --set model.layers=[]"
NORMED = ("q_proj.weight", "k_proj.weight")
"""Endings of the weights whose outputs are normed in each head with `qk_norm`."""


class DenseForm(NamedTuple):
    """A dense model in the form of a class of Transformers."""

    config: Any
    """The configuration of that class."""
    tensors: dict[str, Tensor]
    """Its weights, by that class's names."""

    def new_model(self, attention: str) -> Any:
        """Return a model of that class with new random weights; `attention` is its attention implementation, such as "sdpa"."""
        model_class = getattr(transformers, self.config.architectures[0])
        return model_class._from_config(self.config, attn_implementation=attention)


def dense_form(config: NSAModelConfig, tensors: Mapping[str, Tensor]) -> DenseForm:
    """Return the model of `config` with the weights `tensors` in the form of Llama, of Qwen2 (with `qkv_bias`), or of Qwen3 (with `qk_norm`).

    Qwen3 has a single epsilon for all norms. If `qk_norm_eps` differs from the decoder's epsilon, q_proj and k_proj are multiplied by
    c = sqrt(eps / qk_norm_eps). The normed q and k stay the same: c q / sqrt(mean(c^2 q^2) + eps) = q / sqrt(mean(q^2) + eps / c^2).

    Raises:
        ConfigError: for a layer that is not dense, D_k other than D_v, `qkv_bias` with `qk_norm`, or sizes that the class does not support.
    """
    architecture, layer = _architecture_of(config), config.decoder_layers()[0].config
    norm = tensors["norm.weight"]
    # a norm computes bfloat16 and float16 in float32
    eps = torch.finfo(torch.promote_types(norm.dtype, torch.float32)).eps if config.rms_norm_eps is None else config.rms_norm_eps
    found = getattr(transformers, f"{architecture.prefix}Config")(
        architectures=[architecture.model_class],
        dtype=str(norm.dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim_qk,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=eps,
        rope_parameters=_rope_parameters(layer),
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    # a state dict of Transformers lists a tied output layer twice
    left_out = HEAD if config.tie_word_embeddings else None
    renamed = {theirs: value for name, value in tensors.items() if (theirs := source_name(name)) != left_out}
    if architecture.qk_norm and eps != layer.qk_norm_eps:
        scale = math.sqrt(eps / layer.qk_norm_eps)
        renamed = {name: value * scale if name.endswith(NORMED) else value for name, value in renamed.items()}
    return DenseForm(found, renamed)


def _architecture_of(config: NSAModelConfig) -> Architecture:
    """Return the first architecture with the `qkv_bias` and `qk_norm` of a dense model."""
    layers = config.decoder_layers()
    for layer_index, layer in enumerate(layers):
        _require_dense(layer_index, layer)
    if config.head_dim_qk != config.head_dim_v:
        raise ConfigError(
            f"head_dim_qk={config.head_dim_qk} and head_dim_v={config.head_dim_v} differ (Llama, Qwen2 and Qwen3 have one head_dim for q, k "
            f"and v); use --format hf, or train with model.head_dim_v={config.head_dim_qk}"
        )
    first = layers[0].config
    if first.qkv_bias and first.qk_norm:
        raise ConfigError(
            "nsa.qkv_bias=true with nsa.qk_norm=true is a model that Transformers lacks (Qwen2 has the biases, Qwen3 the norms); "
            "use --format hf, or train with one of them"
        )
    found = next(one for one in ARCHITECTURES.values() if (one.qkv_bias, one.qk_norm) == (first.qkv_bias, first.qk_norm))
    if found is ARCHITECTURES["llama"] and config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"hidden_size={config.hidden_size} is no multiple of num_attention_heads={config.num_attention_heads} (the rule of "
            f"{found.model_class}); use --format hf"
        )
    return found


def _require_dense(layer_index: int, layer: Layer) -> None:
    if layer.attention == "dense":
        return
    if layer.config.branches == ("win",):
        raise ConfigError(
            f"layer {layer_index} is a sliding window of {layer.config.geometry.window_size} tokens behind a gate (--format llama takes layers of "
            f"full attention); {ELSEWHERE}"
        )
    raise ConfigError(
        f"layer {layer_index} is sparse, with branches={list(layer.config.branches)} (--format llama takes layers of full attention); {ELSEWHERE}"
    )


def _rope_parameters(layer: NSAConfig) -> dict[str, Any]:
    """Return the RoPE settings of `layer` under Transformers' names."""
    scaling = layer.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": layer.rope_theta}
    names = (*ROPE_KEYS[scaling.kind], "attention_factor")
    numbers = {name: getattr(scaling, SCALING_ALIASES.get(name, name)) for name in names}
    known = {name: number for name, number in numbers.items() if number is not None}
    return {"rope_type": scaling.kind, "rope_theta": layer.rope_theta, **known}
