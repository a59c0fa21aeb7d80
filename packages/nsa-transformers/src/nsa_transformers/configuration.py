"""`NSAModelConfig`, which holds the content of config.json, and the layers that it describes."""

import dataclasses
import difflib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from attrs import fields
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from nsa_core.config import MOST_SIZE, BlockGeometry, NSAConfig
from nsa_core.decoder import ATTENTIONS, DecoderSizes, mlp_width
from nsa_core.errors import ConfigError
from nsa_core.serialization import config_from_dict, config_to_dict

SCHEMA = 1
"""Version of our own keys of config.json: `attention`, `layers`, `nsa`."""
GEOMETRY = tuple(item.name for item in fields(BlockGeometry))
SIZES = ("hidden_size", "num_heads", "num_kv_heads", "head_dim_qk", "head_dim_v")
"""Fields of `NSAConfig` that config.json holds under Hugging Face's names."""
MOST = {"vocab_size": 2**31 - 1, "intermediate_size": MOST_SIZE, "num_hidden_layers": 2**16}
"""Maximum values of the sizes that no layer checks."""
TABLE_KEYS = (*GEOMETRY, *(item.name for item in fields(NSAConfig) if item.name not in (*SIZES, "geometry")))
"""The keys of `nsa`."""
ELSEWHERE = {
    **{name: f"nsa.{name}" for name in TABLE_KEYS},
    "rope_parameters": "nsa.rope_theta and nsa.rope_scaling",
    "head_dim": "head_dim_qk and head_dim_v",
    "attention_bias": "nsa.qkv_bias",
    "sliding_window": "nsa.window_size",
}
"""Key of another model's config.json, or of nsa-core, that would be ignored here -> the key that has its meaning here."""
LAYER_KEYS = ("attention", "branches", *GEOMETRY)
"""The keys that an entry of `layers` may have."""
REMOTE_MODULE = "modeling_nsa_core"
REMOTE_CODE = '''"""The classes of this model are those of the installed package nsa-transformers."""

from nsa_transformers import NSAForCausalLM, NSAModel, NSAModelConfig  # noqa: F401
'''
"""The module that is saved next to config.json; `trust_remote_code=True` runs it if nsa_transformers was not imported."""
AUTO_MAP = {
    "AutoConfig": f"{REMOTE_MODULE}.NSAModelConfig",
    "AutoModel": f"{REMOTE_MODULE}.NSAModel",
    "AutoModelForCausalLM": f"{REMOTE_MODULE}.NSAForCausalLM",
}


class Layer(NamedTuple):
    """One layer of the decoder."""

    attention: str
    """"nsa" or "dense"."""
    config: NSAConfig

    def build(self) -> nn.Module:
        """Return a new attention module."""
        return ATTENTIONS[self.attention](self.config)


@strict
class NSAModelConfig(PreTrainedConfig):
    """Configuration of a decoder: sizes under Hugging Face's names, and the attention in the table `nsa`, with the keys of nsa-train's table `nsa`.

    Raises:
        ConfigError: for a schema below 1 or newer than this version, or values that `nsa_core` refuses.
    """

    model_type = "nsa_core"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 258
    hidden_size: int = 256
    intermediate_size: int | None = None
    """None: 8/3 of hidden_size, rounded up to a multiple of 64."""
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 1
    head_dim_qk: int | None = None
    """None: hidden_size // num_attention_heads; the same for head_dim_v."""
    head_dim_v: int | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float | None = None
    """Epsilon of RMSNorm; None: 2^-23, the machine epsilon of float32 (float64: its own)."""
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    attention: str = "nsa"
    """Attention of all layers if `layers` is None: "nsa", or "dense" for full causal attention."""
    layers: list[Any] | None = None
    """A pattern that is repeated until there are num_hidden_layers. An entry is "nsa", "dense", or a table of `attention`, `branches` and block
    sizes."""
    nsa: dict[str, Any] | None = None
    """Block sizes, and the other fields of `nsa_core.NSAConfig`; absent fields have their defaults."""
    nsa_schema: int = SCHEMA

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in values that depend on other fields, and check the layers."""
        if self.nsa_schema > SCHEMA:
            raise ConfigError(
                f"config.json has nsa_schema={self.nsa_schema} (this version of nsa-transformers reads up to {SCHEMA}); "
                "use a newer version of it"
            )
        if self.nsa_schema < 1:
            raise ConfigError(f"config.json has nsa_schema={self.nsa_schema} (the first version is 1); use {SCHEMA}")
        for name, ours in ELSEWHERE.items():
            if kwargs.get(name) is not None:
                raise ConfigError(f"config.json has {name} (it would be ignored: the sizes of NSA are in the table nsa); use {ours}")
        self._require_sizes()
        self._require_dtype(kwargs.get("torch_dtype"))
        head_dim = self.hidden_size // max(self.num_attention_heads, 1)
        self.intermediate_size = self.intermediate_size or mlp_width(self.hidden_size)
        self.head_dim_qk = self.head_dim_qk or head_dim
        self.head_dim_v = self.head_dim_v or head_dim
        self.nsa = dict(self.nsa or {})
        # the auto_map of a repository may have its name in front of the modules' names
        super().__post_init__(**{**kwargs, "auto_map": dict(AUTO_MAP)})
        self.decoder_layers()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: every saved configuration names its classes, in a module of three lines."""

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the content of config.json: all fields of this class, and other fields that differ from their defaults."""
        own = {field.name for field in dataclasses.fields(self)} - {field.name for field in dataclasses.fields(PreTrainedConfig)}
        whole = self.to_dict()
        return {**super().to_diff_dict(), **{name: whole[name] for name in sorted(own)}}

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json, and the module that `trust_remote_code=True` imports."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{REMOTE_MODULE}.py").write_text(REMOTE_CODE, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def sizes(self) -> DecoderSizes:
        """Return the sizes of the decoder, without an untied output layer: `NSAForCausalLM` builds its own output layer."""
        assert self.intermediate_size is not None
        return DecoderSizes(self.vocab_size, self.hidden_size, self.intermediate_size, self.rms_norm_eps)

    def decoder_layers(self) -> list[Layer]:
        """Return the layers, first to last.

        Raises:
            ConfigError: for an invalid key or value, which the message names.
        """
        if self.attention not in tuple(ATTENTIONS):
            raise ConfigError(f"attention={self.attention!r} is unknown (the rule: one of 'nsa', 'dense'); use 'nsa'")
        pattern = self.layers or [self.attention]
        if self.num_hidden_layers < 1 or self.num_hidden_layers % len(pattern):
            raise ConfigError(
                f"num_hidden_layers={self.num_hidden_layers} does not hold the {len(pattern)} entries of layers (the pattern is repeated, whole); "
                f"use {len(pattern) * max(1, round(self.num_hidden_layers / len(pattern)))}"
            )
        built = [self._layer(f"layers[{index}]", entry) for index, entry in enumerate(pattern)]
        return built * (self.num_hidden_layers // len(pattern))

    def _require_sizes(self) -> None:
        """Raise ConfigError for an invalid size outside the layers; `nsa_core` checks the layers' sizes."""
        for name in ("vocab_size", "intermediate_size", "num_hidden_layers", "head_dim_qk", "head_dim_v", "max_position_embeddings"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name}={size} is too small (the rule: an integer >= 1); use the size that the weights have")
            if size is not None and size > MOST.get(name, size):
                raise ConfigError(f"{name}={size} is too large (the rule: an integer <= {MOST[name]}); use the size that the weights have")
        if self.rms_norm_eps is not None and not 0 <= self.rms_norm_eps < float("inf"):
            raise ConfigError(f"rms_norm_eps={self.rms_norm_eps} is negative or no number (it is added to a mean square); use 1e-5")

    def _require_dtype(self, older: Any) -> None:
        """Raise ConfigError unless `dtype` is None, or a floating-point dtype of torch or its name. If it is None, `older`, its older key, counts."""
        given = older if self.dtype is None else self.dtype
        dtype = getattr(torch, given, None) if isinstance(given, str) else given
        if given is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"dtype={given!r} is no dtype of weights (the rule: a floating-point dtype of torch); use 'float32'")

    def _layer(self, key: str, entry: Any) -> Layer:
        own = dict(entry) if isinstance(entry, Mapping) else {"attention": entry}
        attention = own.pop("attention", "nsa")
        unknown = [name for name in own if name not in LAYER_KEYS]
        if attention not in tuple(ATTENTIONS) or unknown:
            raise ConfigError(f"{key}={entry!r} is no layer (the rule: 'nsa', 'dense', or a table of {', '.join(LAYER_KEYS)}); use 'nsa'")
        if attention == "dense" and own:
            raise ConfigError(f"{key} is dense and would ignore {', '.join(own)}; use 'dense'")
        try:
            return Layer(attention, self._nsa_config({**(self.nsa or {}), **own}))
        except ConfigError as error:
            if own:
                raise ConfigError(f"{key}: {error}") from None
            raise

    def _nsa_config(self, table: Mapping[str, Any]) -> NSAConfig:
        if unknown := [key for key in table if key not in TABLE_KEYS]:
            near = difflib.get_close_matches(unknown[0], TABLE_KEYS, 1)
            raise ConfigError(
                f"unknown key nsa.{unknown[0]} (the rule: a size of blocks or a field of NSAConfig); "
                + (f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(TABLE_KEYS)}")
            )
        sizes = (self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim_qk, self.head_dim_v)
        rest = {key: value for key, value in table.items() if key not in GEOMETRY and value is not None}
        geometry = {key: table[key] for key in GEOMETRY if key in table}
        return config_from_dict({**rest, **dict(zip(SIZES, sizes, strict=True)), "geometry": geometry})


def nsa_table(config: NSAConfig) -> dict[str, Any]:
    """Return the table `nsa` of config.json for layers of `config`. `backends` is left out, because it depends on the machine."""
    values = config_to_dict(config)
    geometry = values.pop("geometry")
    return {**geometry, **{key: value for key, value in values.items() if key not in (*SIZES, "backends")}}


def generation_config(config: NSAModelConfig) -> GenerationConfig:
    """Return the settings of `generate` for models of `config`: the ids of the begin, end and padding tokens."""
    return GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)


def attentions(config: NSAModelConfig) -> list[partial[nn.Module]]:
    """Return a function for each layer that makes its attention module."""
    return [partial(Layer.build, layer) for layer in config.decoder_layers()]
