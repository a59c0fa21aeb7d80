"""Read dense checkpoints of Transformers that can be converted: config.json, headers of weights, and the kinds of layers."""

import copy
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from nsa_core.errors import ConfigError
from nsa_transformers.conversion.tensor_files import Stored, stored_tensors
from nsa_transformers.weights import quiet, read_json, require_safetensors, weight_files


class Architecture(NamedTuple):
    """A family of dense models."""

    prefix: str
    """Prefix of its classes in Transformers."""
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def model_class(self) -> str:
        """Return the name of the model with its output layer."""
        return f"{self.prefix}ForCausalLM"


ARCHITECTURES = {
    "llama": Architecture("Llama"),
    "mistral": Architecture("Mistral"),
    "qwen2": Architecture("Qwen2", qkv_bias=True),
    "qwen3": Architecture("Qwen3", qk_norm=True),
}
"""model_type of config.json -> architecture."""

ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
}
"""Kind of RoPE -> names of its numbers in Transformers."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
"""The keys of config.json that give sizes of weights."""
YARN_NUMBERS = ("attention_factor", "mscale", "mscale_all_dim")
"""Keys of the numbers that determine YaRN's attention factor."""


class Source(NamedTuple):
    """A dense checkpoint: its configuration, and the headers of its weights."""

    folder: Path
    architecture: Architecture
    config: Any
    """The configuration object of Transformers, with default values filled in."""
    tensors: dict[str, Stored]

    @property
    def windows(self) -> list[int | None]:
        """Return the sliding window of each layer, the query's own token included; None: full attention.

        Raises:
            ConfigError: for a layer of another kind.
        """
        count, window = self.config.num_hidden_layers, getattr(self.config, "sliding_window", None)
        is_mistral = self.config.model_type == "mistral"
        kinds = ["sliding_attention"] * count if is_mistral else getattr(self.config, "layer_types", None) or ["full_attention"] * count
        if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
            raise ConfigError(
                f"layer_types names {unknown[0]!r} (layers of full and of sliding attention are converted); use another model"
            )
        if window is not None and window < 1 and "sliding_attention" in kinds:
            raise ConfigError(
                f"sliding_window={window} (the rule: an integer of at least 1, or null); use null for full attention, or the window that "
                "the model was trained with, such as 4096"
            )
        return [window if kind == "sliding_attention" else None for kind in kinds]

    @property
    def head_dim(self) -> int:
        """Return the head dimension of q, k and v."""
        return int(self.config.head_dim)

    def part(self, name: str) -> Any:
        """Return the class `name` of the family, without its prefix: `DecoderLayer`, `RotaryEmbedding`."""
        kind = self.config.model_type
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        return getattr(module, f"{self.architecture.prefix}{name}")


def open_source(folder: Path) -> Source:
    """Return the dense checkpoint in `folder`. No weight is read, and no code of the folder is run.

    Raises:
        ConfigError: if it is not a folder, or its architecture is not supported.
        InputError: for pickled weights, and files that are missing or damaged.
    """
    if not folder.is_dir():
        raise ConfigError(f"SOURCE={str(folder)!r} is no folder (nothing is downloaded); name one that holds config.json and safetensors")
    content = read_json(folder / "config.json")
    architecture = _architecture_of(content, folder)
    config = _config_of(content, architecture, folder)
    require_safetensors(folder)
    return Source(folder, architecture, config, stored_tensors(weight_files(folder)))


def _architecture_of(content: dict[str, Any], folder: Path) -> Architecture:
    kind, named = content.get("model_type"), content.get("architectures")
    found = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    known = ", ".join(architecture.model_class for architecture in ARCHITECTURES.values())
    if found is None:
        raise ConfigError(
            f"{folder / 'config.json'} has model_type={kind!r} (the architectures that are converted: {known}); use one of them"
        )
    if named and named != [found.model_class]:
        raise ConfigError(
            f"{folder / 'config.json'} has architectures={named} (the rule: {[found.model_class]}); use a model with its output layer"
        )
    if content.get("quantization_config") is not None:
        raise ConfigError(
            f"{folder / 'config.json'} has a quantization_config (weights in float32, float16 and bfloat16 are converted); use those"
        )
    for key in ("dtype", "torch_dtype"):
        name = content.get(key)
        if name is not None and not (isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype)):
            raise ConfigError(f"{folder / 'config.json'} has {key}={name!r} (the rule: the name of a dtype of torch); use 'bfloat16'")
    _refuse_rope(content)
    return found


def _refuse_rope(content: dict[str, Any]) -> None:
    """Raise ConfigError for a kind of RoPE that is not in ROPE_KEYS, before Transformers asks for the numbers of that kind."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = content.get(key)
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
        if kind not in tuple(ROPE_KEYS):
            raise ConfigError(
                f"rope_type={kind!r} is not converted (the rule: one of {', '.join(map(repr, ROPE_KEYS))}); use a model of one of those"
            )


def _config_of(content: dict[str, Any], architecture: Architecture, folder: Path) -> Any:
    # without auto_map the table holds only values, and no remote code; from_dict changes its argument, so it gets a copy
    values = {key: value for key, value in copy.deepcopy(content).items() if key != "auto_map"}
    try:
        with quiet():
            config = getattr(transformers, f"{architecture.prefix}Config").from_dict(values)
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{folder / 'config.json'} describes no {architecture.model_class} ({said:.200}); copy it again") from None
    for name in SIZES:
        size = getattr(config, name, None)
        if name == "head_dim" and size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{folder / 'config.json'} has {name}={size!r} (the rule: an integer >= 1); use the size that the weights have"
            )
    if getattr(config, "head_dim", None) is None:
        # the layers of Transformers would compute with None
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config
