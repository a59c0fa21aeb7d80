"""Plan a conversion: the tensors of the converted model, their names, and the source of each."""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_core.compression import build_compressor
from nsa_core.config import NSAConfig
from nsa_core.decoder import Block, weightless
from nsa_core.errors import ConfigError, InputError
from nsa_core.gating import GateMLP
from nsa_transformers.configuration import NSAModelConfig
from nsa_transformers.conversion.options import ConversionOptions, Gates, gate_logits
from nsa_transformers.conversion.sources import Source, open_source
from nsa_transformers.conversion.tensor_files import DTYPES, Planned, Stored
from nsa_transformers.conversion.translation import converted_config
from nsa_transformers.weights import GENERATION, generation_settings, shown

OF_MODEL = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
"""Name of a tensor outside the layers -> its name in the source."""
OF_LAYER = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""Name of a layer's module -> its name in the source."""
COPIED = re.compile(r"attention\.([qkvo]_proj|[qk]_norm)(?:\.(?:cmp|slc|win))?\.(weight|bias)")
"""Matches the attention tensors that are copied from the source. The K and V of each branch are copies of the source's K and V."""
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Matches buffers that old checkpoints hold; Transformers computes them."""
NAMED = 3
"""Maximum number of tensors that a message names."""
ENDS = ("bos_token_id", "eos_token_id")
"""Keys of an id, or of a list of ids, at which a text begins or ends."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Conversion(NamedTuple):
    """A conversion that is checked, but not written yet."""

    source: Source
    options: ConversionOptions
    config: NSAModelConfig
    planned: list[Planned]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.planned)

    @property
    def num_parameters(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(torch.Size(tensor.shape).numel() for tensor in self.planned)


def plan_conversion(folder: Path, options: ConversionOptions) -> Conversion:
    """Return the conversion of the dense checkpoint in `folder`. It reads headers, and the data of a tied output layer; nothing is written.

    Raises:
        ConfigError: if the checkpoint or an option is not supported.
        InputError: for damaged files, and for tensors that are missing, extra, or of another shape or dtype.
    """
    source = open_source(folder)
    _require_dtypes(source)
    _require_sizes(source)
    _require_ids(source)
    code = source.tensors[EMBEDDING].code
    config = converted_config(source, options, str(DTYPES[code]).removeprefix("torch."))
    forms = tensor_shapes(config)
    _require_tensors(source, {source_name(name): shape for name, shape in forms.items() if source_name(name)})
    made = lru_cache(maxsize=1)(partial(made_tensors, config, options.gates))
    planned = [_planned(name, shape, source, DTYPES[code], made) for name, shape in forms.items()]
    return Conversion(source, options, config, planned)


def tensor_shapes(config: NSAModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of a model of `config`, from the embedding to the output layer; nothing is allocated."""
    rows = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": rows}
    with weightless():
        for layer_index, layer in enumerate(config.decoder_layers()):
            block = Block(config.sizes(), layer.build)
            shapes |= {f"blocks.{layer_index}.{name}": tuple(weight.shape) for name, weight in block.state_dict().items()}
    shapes["norm.weight"] = (config.hidden_size,)
    return shapes if config.tie_word_embeddings else {**shapes, "lm_head.weight": rows}


def source_name(name: str) -> str:
    """Return the name that the tensor `name` has in the source; an empty string if the source does not have it."""
    if name in OF_MODEL:
        return OF_MODEL[name]
    _blocks, layer_index, rest = name.split(".", 2)
    if found := COPIED.fullmatch(rest):
        return f"model.layers.{layer_index}.self_attn.{found[1]}.{found[2]}"
    module, _, kind = rest.rpartition(".")
    return f"model.layers.{layer_index}.{OF_LAYER[module]}.{kind}" if module in OF_LAYER else ""


def made_tensors(config: NSAModelConfig, gates: Gates, layer_index: int) -> dict[str, Tensor]:
    """Return name -> tensor of the gate and phi of layer `layer_index`, float32, initialised with the seed `layer_index`.

    phi starts as the mean. The gate's last weight is 0, and its last bias opens the branches that `gates` names.
    """
    layer: NSAConfig = config.decoder_layers()[layer_index].config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(layer_index)
        modules = nn.ModuleDict({"gate": GateMLP(layer.hidden_size, layer.num_heads, layer.gate_hidden_size)})
        for name, head_dim in (("compress_k", layer.head_dim_qk), ("compress_v", layer.head_dim_v)):
            modules[name] = build_compressor(layer.compressor, layer.num_kv_heads, head_dim, layer.geometry)
    tensors = modules.state_dict()
    tensors["gate.down.bias"] = gate_logits(layer, gates).repeat(layer.num_heads)
    return {f"blocks.{layer_index}.attention.{name}": value for name, value in tensors.items()}


def _planned(name: str, shape: tuple[int, ...], source: Source, dtype: torch.dtype, made: Callable[[int], dict[str, Tensor]]) -> Planned:
    if copied := source_name(name):
        stored = source.tensors[copied]
        return Planned(name, stored.dtype, shape, stored)
    layer_index = int(name.split(".")[1])
    return Planned(name, dtype, shape, lambda: made(layer_index)[name])


def _require_dtypes(source: Source) -> None:
    for name, tensor in source.tensors.items():
        if tensor.code not in DTYPES:
            raise InputError(f"{shown(name)} in {tensor.file} is {tensor.code} (the rule: one of {', '.join(DTYPES)}); save it in bfloat16")


def _require_sizes(source: Source) -> None:
    """Raise InputError if config.json has other sizes than the tensors. This is checked before modules of these untrusted sizes are built."""
    theirs = source.config
    last, hidden = f"model.layers.{theirs.num_hidden_layers - 1}", theirs.hidden_size
    wanted = {
        EMBEDDING: (theirs.vocab_size, hidden),
        f"{last}.self_attn.q_proj.weight": (theirs.num_attention_heads * source.head_dim, hidden),
        f"{last}.self_attn.k_proj.weight": (theirs.num_key_value_heads * source.head_dim, hidden),
        f"{last}.mlp.down_proj.weight": (hidden, theirs.intermediate_size),
    }
    _refuse(source, _misfits(source.tensors, wanted))


def _require_ids(source: Source) -> None:
    """Raise ConfigError for ids without a row of the embedding in config.json or generation_config.json, or if the latter cannot be read."""
    last = source.config.vocab_size - 1
    own = {name: getattr(source.config, name) for name in ENDS}
    tables = {"config.json": own, GENERATION: generation_settings(source.folder)}
    for file, name in product(tables, ENDS):
        value = tables[file].get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(index) is int and 0 <= index <= last for index in ids):
            raise ConfigError(
                f"{source.folder / file} has {name}={value!r:.80} (the rule: an id of the vocabulary, 0 .. {last}, or a list of them); "
                "use the id of its tokenizer"
            )


def _require_tensors(source: Source, wanted: dict[str, tuple[int, ...]]) -> None:
    """Raise InputError unless the source has the tensors `wanted`, and no others."""
    found = {name: tensor for name, tensor in source.tensors.items() if not IGNORED.fullmatch(name)}
    if source.config.tie_word_embeddings and HEAD in found:
        _require_equal(found.pop(HEAD), found[EMBEDDING])
    _refuse(source, _misfits(found, wanted) + [f"{shown(name)} is not of this model" for name in sorted(found) if name not in wanted])


def _misfits(found: Mapping[str, Stored], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a line for each tensor of `wanted` that is missing or has another shape."""
    missing = [f"{name} is missing" for name in wanted if name not in found]
    return missing + [
        f"{name} expected {list(shape)}, found {list(found[name].shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]


def _refuse(source: Source, problems: list[str]) -> None:
    """Raise InputError with the first few `problems`, if there are any."""
    if problems:
        more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise InputError(
            f"the weights in {source.folder} are not those of its config.json: {'; '.join(problems[:NAMED])}{more}; use the files of one checkpoint"
        )


def _require_equal(head: Stored, embedding: Stored) -> None:
    """Raise InputError if a tied output layer differs from the embedding."""
    is_alike = (head.code, head.shape) == (embedding.code, embedding.shape)
    if not is_alike or any(one != other for one, other in zip(head.pieces(), embedding.pieces(), strict=True)):
        raise InputError(
            f"{HEAD} in {head.file} differs from the embedding (tie_word_embeddings=true would lose it); "
            "set tie_word_embeddings to false in config.json"
        )
