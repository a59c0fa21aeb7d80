"""Read folders that Transformers loads through nsa-transformers: their configuration and weights. Needs nsa-train[hf]."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from nsa_train.checkpoint.layout import HF_CONFIG
from nsa_train.checkpoint.tensors import NAMED, read_forms
from nsa_train.errors import ConfigError
from nsa_train.model.decoder import undrawn_weights
from nsa_train.settings.config import RunConfig
from nsa_train.settings.structuring import listed_problems

MODEL_TYPE = "nsa_core"
LONGEST = 2**31 - 1
NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim_qk": "head_dim_qk",
    "head_dim_v": "head_dim_v",
    "attention": "attention",
    "tie_word_embeddings": "tie_embeddings",
    "rms_norm_eps": "norm_eps",
}
"""Name in a config.json -> key of table `model`, where both have the same value."""


def folder_config(folder: Path) -> Any:
    """Return the `NSAModelConfig` of `folder`.

    Raises:
        ConfigError: if nsa-transformers is not installed, or config.json describes none of its models.
        InputError: if it names another architecture, or its `architectures` are not a list of names.
    """
    require_installed(f"the model at {str(folder)!r}")
    from huggingface_hub.errors import StrictDataclassError

    from nsa_transformers import NSAModelConfig
    from nsa_transformers.weights import require_architecture, require_names

    path = folder / HF_CONFIG
    found = _content(path)
    if found.get("model_type") != MODEL_TYPE:
        raise ConfigError(
            f"{path} has model_type={found.get('model_type')!r} (a run takes {MODEL_TYPE!r}); name a folder that `ckpt export --format hf`, "
            "`convert` or NSAForCausalLM.save_pretrained wrote"
        )
    # version 5.16 of Transformers refuses other values in words of its own
    require_names(found.get("architectures") or [], path)
    try:
        config = NSAModelConfig(**{key: value for key, value in found.items() if key not in ("model_type", "transformers_version")})
    except (StrictDataclassError, AttributeError, TypeError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{path} describes no model ({said}); name a folder that `ckpt export --format hf` wrote") from None
    require_architecture(config)
    return config


def model_tables(config: Any) -> dict[str, dict[str, Any]]:
    """Return the tables `model` and `nsa` of a recipe for the model of an `NSAModelConfig`."""
    model = {
        **{key: value for name, key in NAMES.items() if (value := getattr(config, name)) is not None},
        "layers": config.layers or [],
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        "max_position": min(config.max_position_embeddings, LONGEST),
    }
    return {"model": model, "nsa": dict(config.nsa or {})}


def ends_with(config: Any, separator: int) -> bool:
    """Return False if the model of an `NSAModelConfig` ends its texts with other ids than `separator`."""
    ends = config.eos_token_id
    return ends is None or separator in (ends if isinstance(ends, list | tuple) else [ends])


def require_folder_weights(folder: Path, config: RunConfig, *, of: str) -> list[Path]:
    """Return the files of the weights in `folder`. First compare their headers with `config`'s decoder, and their data with checksums, if any.

    `of`: the source of the decoder's description, for the message.

    Raises:
        ConfigError: naming the tensors that are missing, extra or of another shape.
        InputError: naming a pickle file, a damaged file, or tensors of integers.
    """
    from nsa_transformers.checksums import require_undamaged
    from nsa_transformers.weights import require_floats, require_safetensors, weight_files

    require_safetensors(folder)
    require_floats(folder)
    files = weight_files(folder)
    found = {name: form for file in files for name, form in read_forms(file).items()}
    wanted = undrawn_weights(config)
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not of this model" for name in sorted(found) if name not in wanted]
    problems += [
        f"{name} expected {list(wanted[name].shape)}, found {list(form.shape)}"
        for name, form in found.items()
        if name in wanted and form.shape != tuple(wanted[name].shape)
    ]
    if problems:
        raise ConfigError(
            f"the weights in {folder} are not those of {of}: {listed_problems(problems, most=NAMED)}; use the recipe next to them, or its sizes"
        )
    require_undamaged(files)
    return files


def folder_weights(folder: Path, files: list[Path]) -> dict[str, Tensor]:
    """Return name -> weight, float32, of the safetensors `files` of `folder`.

    Raises:
        ConfigError: naming the weights that are not finite.
    """
    tensors = {name: value.float() for file in files for name, value in safetensors.torch.load_file(file).items()}
    if broken := [name for name, value in tensors.items() if not bool(value.isfinite().all())]:
        raise ConfigError(
            f"the weights in {folder} hold NaN or Inf, in {listed_problems(broken, most=NAMED)} (training cannot go on from them); "
            "use an earlier state of the model"
        )
    return tensors


def require_installed(what: str) -> None:
    """Raise ConfigError if nsa-transformers is not installed; `what` needs it."""
    try:
        import nsa_transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{what} needs nsa-transformers, which is not installed ({error}); in a checkout: pip install ./packages/nsa-transformers"
        ) from None


def _content(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r:.120}); name a folder that holds config.json and safetensors") from None
    return found
