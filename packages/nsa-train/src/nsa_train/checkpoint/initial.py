"""Initial weights from `train.init_from`: a run, one of its checkpoints, or a folder that Transformers loads."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attrs import evolve
from torch import Tensor, nn

from nsa_core.errors import NSAError
from nsa_core.serialization import toml_value
from nsa_train.checkpoint.folders import ends_with, folder_config, folder_weights, model_tables, require_folder_weights
from nsa_train.checkpoint.layout import CONFIG, MODEL, is_folder, require_model
from nsa_train.checkpoint.resuming import NO_CONVERSION
from nsa_train.checkpoint.store import open_checkpoint
from nsa_train.checkpoint.tensors import fill_weights, read_tensors, require_forms
from nsa_train.data.tokenizer import build_tokenizer
from nsa_train.errors import CheckpointError, ConfigError
from nsa_train.model.decoder import undrawn_weights
from nsa_train.settings.config import NSATable, RunConfig, attention_of, listed, unstructure

LEARNED_WITH = (
    *("model.n_heads", "model.n_kv_heads", "model.head_dim_qk", "model.norm_eps"),
    *("nsa.rope_theta", "nsa.rope_scaling", "nsa.qk_norm_eps", "nsa.gate", "nsa.gate_temperature", "nsa.compressed_rope"),
)
"""Keys that change no shape but change what the weights compute."""
THIS_RECIPE = "this recipe"


Branches = tuple[str, ...]
"""The branches of a layer."""
Version = tuple[int, int, int]
"""Size, time of the last change and inode of a file."""


class InitialWeights(NamedTuple):
    """Weights that were verified and fit a run, but were not loaded yet."""

    path: Path
    """The checkpoint or folder that holds them."""
    step: int | None
    """Number of training steps that made them; None if the folder does not say."""
    notes: list[str]
    """Differences between their model and the run's, one line each."""
    read: Callable[[], dict[str, Tensor]]
    """Returns name -> weight, float32."""
    verified: dict[Path, Version]
    """File with weights -> its version (size, time, inode) when it was verified."""

    def is_current(self) -> bool:
        """Return True if no file has changed since it was verified."""
        return all(path.is_file() and _version(path) == version for path, version in self.verified.items())


def initial_weights(config: RunConfig) -> InitialWeights:
    """Verify that the weights that `train.init_from` names fit the decoder of `config`, and return them; nothing is allocated.

    Raises:
        ConfigError: if there are no weights, they are damaged, or they belong to another decoder.
    """
    path = Path(config.train.init_from or "")
    require_model("train.init_from", path)
    try:
        return _of_folder(path, config) if is_folder(path) else _of_checkpoint(path, config)
    except (CheckpointError, ConfigError, NSAError) as error:
        raise ConfigError(f"train.init_from={config.train.init_from!r}: {error}") from None


def initialize(model: nn.Module, config: RunConfig, verified: InitialWeights | None = None) -> None:
    """Load the weights that `train.init_from` names into `model`. A collective; only rank 0 reads the files.

    `verified`: the result of `initial_weights` on rank 0. Without it, or if a file has changed since, the weights are verified here.

    Raises:
        ConfigError: on all ranks, as `initial_weights`.
    """

    def read(_: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return (verified if verified and verified.is_current() else initial_weights(config)).read()

    fill_weights(model, read)


def _version(path: Path) -> Version:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _of_checkpoint(path: Path, config: RunConfig) -> InitialWeights:
    checkpoint = open_checkpoint(path)
    file = checkpoint.path / MODEL
    learned = unstructure(checkpoint.config)
    _require_sharing(_sparse_kv(learned), config)
    advice = f"use the sizes of {checkpoint.path / CONFIG}"
    require_forms(file, undrawn_weights(config), of=THIS_RECIPE, advice=advice)
    notes, tokenizer = _differing(learned, config), checkpoint.config.data.tokenizer
    if tokenizer != config.data.tokenizer:
        notes.append(f"those weights learned the ids of data.tokenizer={tokenizer!r}, and this run reads {config.data.tokenizer!r}")
    return InitialWeights(checkpoint.path, checkpoint.step, notes, lambda: read_tensors(file), {file: _version(file)})


def _of_folder(folder: Path, config: RunConfig) -> InitialWeights:
    found = folder_config(folder)
    learned = model_tables(found)
    _require_sharing(_sparse_kv(learned), config)
    # taken before the files are hashed, so that a file that is replaced meanwhile counts as changed
    before = {file: _version(file) for file in folder.glob("*.safetensors")}
    files = require_folder_weights(folder, config, of=THIS_RECIPE)
    notes, separator = _differing(learned, config), build_tokenizer(config.data).separator
    if not ends_with(found, separator):
        notes.append(f"those weights end texts with id {found.eos_token_id}, and this run with {separator}")
    return InitialWeights(folder, None, notes, lambda: folder_weights(folder, files), before)


def _differing(learned: Mapping[str, Mapping[str, Any]], config: RunConfig) -> list[str]:
    """Return a line for each key of LEARNED_WITH whose value differs in the run."""
    now, default, lines = unstructure(config), {"model": {}, "nsa": unstructure(evolve(config, nsa=NSATable()))["nsa"]}, []
    for key in LEARNED_WITH:
        table, _, name = key.partition(".")
        # a folder may leave defaults out
        after = now[table].get(name)
        before = learned[table].get(name, default[table].get(name))
        if before != after:
            lines.append(f"those weights learned with {key}={_shown(before)}, and this run has {_shown(after)}")
    return lines + _differing_branches(_branches(learned), _branches(now))


def _differing_branches(learned: Sequence[Branches], now: Sequence[Branches]) -> list[str]:
    """Return a line for each change of a layer's branches. Shapes do not show it: with one K and V, other branches may have the same weights."""
    layers: dict[tuple[Branches, Branches], list[int]] = {}
    for index, pair in enumerate(zip(learned, now, strict=False)):
        layers.setdefault(pair, []).append(index)
    return [
        f"those weights learned with the branches {listed(before)} in layer {first}"
        + (f" and {len(others)} more" if others else "")
        + f", and this run has {listed(after)}"
        for (before, after), (first, *others) in layers.items()
        if before != after
    ]


def _branches(tables: Mapping[str, Mapping[str, Any]]) -> list[Branches]:
    """Return the branches of each layer of tables of a recipe, sorted; ("dense",) for a dense layer."""
    model, default = tables["model"], tables["nsa"].get("branches", NSATable().branches)
    pattern = model.get("layers") or [model["attention"]]
    own = [layer.get("branches", default) if isinstance(layer, Mapping) else default for layer in pattern]
    found = [("dense",) if attention_of(layer) == "dense" else tuple(sorted(names)) for layer, names in zip(pattern, own, strict=True)]
    return [found[index % len(found)] for index in range(model["n_layers"])]


def _shown(value: object) -> str:
    # TOML has no null
    return "none" if value is None else toml_value(value)


def _sparse_kv(tables: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return `nsa.kv` of tables of a recipe; None if all layers are dense."""
    model = tables["model"]
    entries = model.get("layers") or [model["attention"]]
    kinds = [entry.get("attention", "nsa") if isinstance(entry, Mapping) else entry for entry in entries]
    return tables["nsa"].get("kv", "separate") if "nsa" in kinds else None


def _require_sharing(saved: str | None, config: RunConfig) -> None:
    """Raise ConfigError if NSA layers share K and V either in `config` or in the saved model, but not in both."""
    now = _sparse_kv(unstructure(config))
    if None not in (saved, now) and saved != now:
        raise ConfigError(f"its weights are those of nsa.kv={toml_value(saved)} ({NO_CONVERSION}); use --set nsa.kv={toml_value(saved)}")
