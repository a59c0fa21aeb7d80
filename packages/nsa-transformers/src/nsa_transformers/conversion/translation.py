"""Translate the configuration of a dense model into the configuration of an NSA model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_core.errors import ConfigError
from nsa_transformers.configuration import NSAModelConfig, nsa_table
from nsa_transformers.conversion.options import ConversionOptions, dense_branch
from nsa_transformers.conversion.sources import ROPE_KEYS, YARN_NUMBERS, Source

OPEN_WINDOW = "its layers see a sliding window (the rule: such a layer becomes a window of the same size)"


def converted_config(source: Source, options: ConversionOptions, dtype: str) -> NSAModelConfig:
    """Return the configuration of the converted model; `dtype` is the name of the dtype of its embedding and its new weights.

    Raises:
        ConfigError: for a part of the source that NSA does not have, or an unsuitable option; the message names it.
    """
    theirs = source.config
    _refuse_parts(source)
    table = {**options.nsa, **_rope(theirs), "kv": options.kv, "qkv_bias": source.architecture.qkv_bias}
    if source.architecture.qk_norm:
        table |= {"qk_norm": True, "qk_norm_eps": theirs.rms_norm_eps}
    values = {
        "architectures": ["NSAForCausalLM"],
        "dtype": dtype,
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": theirs.intermediate_size,
        "num_hidden_layers": theirs.num_hidden_layers,
        "num_attention_heads": theirs.num_attention_heads,
        "num_key_value_heads": theirs.num_key_value_heads,
        "head_dim_qk": source.head_dim,
        "head_dim_v": source.head_dim,
        "max_position_embeddings": theirs.max_position_embeddings,
        "rms_norm_eps": theirs.rms_norm_eps,
        "tie_word_embeddings": theirs.tie_word_embeddings,
        "bos_token_id": theirs.bos_token_id,
        "eos_token_id": theirs.eos_token_id,
        "pad_token_id": theirs.pad_token_id,
    }
    # built without the pattern first: nsa_table then writes all keys of the table, also those with default values
    whole = NSAModelConfig(**values, nsa=table).decoder_layers()[0].config
    found = NSAModelConfig(**values, nsa=nsa_table(whole), **_layers(source, options))
    _require_windows(source, found)
    return found


def _refuse_parts(source: Source) -> None:
    """Raise ConfigError for parts of a dense model that the decoder does not have."""
    theirs, kind = source.config, source.config.model_type
    if theirs.hidden_act != "silu":
        raise ConfigError(f"hidden_act={theirs.hidden_act!r} is not converted (the decoder's MLP has 'silu'); use a model with 'silu'")
    if kind in ("llama", "qwen3") and theirs.attention_bias:
        raise ConfigError("attention_bias=True gives o_proj a bias (the decoder's output projection has none); use a model without")
    if kind == "llama" and theirs.mlp_bias:
        raise ConfigError("mlp_bias=True gives the MLP biases (the decoder's has none); use a model without")


def _rope(theirs: Any) -> dict[str, Any]:
    """Return `rope_theta` and, if positions are scaled, `rope_scaling` of a configuration of Transformers."""
    rope = theirs.rope_parameters
    kind = rope["rope_type"]
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"partial_rotary_factor={rope['partial_rotary_factor']} is not converted (RoPE turns whole heads); use a model with 1.0"
        )
    if kind == "yarn" and rope.get("truncate") is False:
        raise ConfigError(
            "truncate=False of rope_type='yarn' is not converted (the ramp begins and ends at whole pairs); use a model with true"
        )
    for key in ("rope_theta", *ROPE_KEYS.get(kind, ()), *YARN_NUMBERS):
        value = rope.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number and (value is not None or key == "rope_theta"):
            raise ConfigError(f"rope_parameters has {key}={value!r} (the rule: a number); copy config.json again")
    theta = {"rope_theta": float(rope["rope_theta"])}
    if kind == "default":
        return theta
    scaling = {key: rope[key] for key in ROPE_KEYS[kind] if rope.get(key) is not None}
    if kind == "yarn":
        scaling.setdefault("factor", theirs.max_position_embeddings / scaling["original_max_position_embeddings"])
        scaling |= _yarn_attention(rope, scaling["factor"])
    return {**theta, "rope_scaling": {"kind": kind, **scaling}}


def _yarn_attention(rope: Mapping[str, Any], factor: float) -> dict[str, float]:
    """Return `attention_factor` if the source replaces YaRN's own, 0.1 ln(factor) + 1; else an empty dict."""
    if rope.get("attention_factor") is not None:
        return {"attention_factor": float(rope["attention_factor"])}
    if not (rope.get("mscale") and rope.get("mscale_all_dim")) or factor <= 1:
        return {}
    above, below = (0.1 * rope[key] * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim"))
    return {"attention_factor": above / below}


def _layers(source: Source, options: ConversionOptions) -> dict[str, Any]:
    """Return `attention` and `layers` of config.json. A window layer without a `window_size` gets the source's."""
    windows = source.windows
    pattern = ["nsa"] if options.layers is None else options.layers
    if len(windows) % len(pattern):
        fitting = [size for size in range(1, len(windows) + 1) if len(windows) % size == 0]
        raise ConfigError(
            f"--layers has {len(pattern)} entries, the model {len(windows)} layers (the pattern is repeated, whole); "
            f"use {' or '.join(map(str, fitting))} entries"
        )
    entries = [_with_window(entry, options.nsa, windows[layer_index :: len(pattern)]) for layer_index, entry in enumerate(pattern)]
    if all(entry in ("dense", {"attention": "dense"}) for entry in entries):
        return {"attention": "dense"}
    return {"layers": None if entries == ["nsa"] else entries}


def _with_window(entry: Any, table: Mapping[str, Any], windows: Sequence[int | None]) -> Any:
    own = dict(entry) if isinstance(entry, Mapping) else {"attention": entry}
    merged = {**table, **own}
    is_window = own.get("attention", "nsa") == "nsa" and merged.get("branches") in (["win"], ("win",))
    if is_window and "window_size" not in merged and len(set(windows)) == 1 and windows[0] is not None:
        return {**own, "window_size": windows[0]}
    return dict(own) if isinstance(entry, Mapping) else entry


def _require_windows(source: Source, found: NSAModelConfig) -> None:
    """Raise ConfigError unless every sliding layer becomes a window of its size, and every sparse layer reads tokens."""
    for layer_index, (window, layer) in enumerate(zip(source.windows, found.decoder_layers(), strict=True)):
        geometry = layer.config.geometry
        if layer.attention == "nsa":
            dense_branch(layer.config)
        if window is None:
            continue
        if layer.attention != "nsa" or layer.config.branches != ("win",):
            raise ConfigError(
                f"sliding_window={window}: {OPEN_WINDOW}, and layer {layer_index} is none; use --layers '{_pattern(source.windows)}'"
            )
        if geometry.window_size != window:
            raise ConfigError(
                f"sliding_window={window}: {OPEN_WINDOW}, and layer {layer_index} has window_size={geometry.window_size}; use window_size = {window}"
            )


def _pattern(windows: Sequence[int | None]) -> str:
    """Return the shortest pattern of layers, in TOML, in which layers with one of `windows` are windows and the others sparse."""
    entries = ['"nsa"' if window is None else f'{{branches = ["win"], window_size = {window}}}' for window in windows]
    sizes = [size for size in range(1, len(entries) + 1) if entries == entries[:size] * (len(entries) // size)]
    return f"[{', '.join(entries[: sizes[0]])}]"
