"""Weights for others: one safetensors file, or a folder in Hugging Face's layout."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict

from nsa_train.checkpoint.layout import MODEL
from nsa_train.checkpoint.store import Checkpoint, open_checkpoint
from nsa_train.errors import ConfigError
from nsa_train.settings.recipe import to_toml

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("safetensors", "hf")
MODEL_TYPE = "nsa"
ARCHITECTURE = "NSAForCausalLM"


def export(
    path: Path,
    out: Path,
    format: str = "safetensors",  # noqa: A002 - the option's name
    *,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the weights of the checkpoint at `path`, once verified, to `out`, and return `out`; what was passed over is said.

    "safetensors": one file. "hf": a folder with config.json and model.safetensors. Names are the decoder's, float32.

    Raises:
        ConfigError: when `format` is unknown or `out` exists.
        CheckpointError: when the checkpoint is damaged, or its weights are not those that its config.toml describes.
        OSError: when the disk refuses; nothing half-written is left.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format={format!r} is not one of {', '.join(FORMATS)}; use --format hf")
    if out.exists():
        raise ConfigError(f"OUT={str(out)!r} exists already (an export never overwrites); use another name")
    checkpoint = open_checkpoint(path)
    for line in checkpoint.refused:
        say(line)
    # a path that is wrong is refused without torch
    from nsa_train.checkpoint.resuming import require_weights
    from nsa_train.checkpoint.tensors import read_tensors, write_tensors

    require_weights(checkpoint)
    tensors = read_tensors(checkpoint.path / MODEL)
    if format == "hf":
        return _whole(out, lambda aside: _write_folder(aside, checkpoint, tensors))
    return _whole(out, lambda aside: write_tensors(aside, tensors, step=str(checkpoint.step), config=to_toml(checkpoint.config)))


def hugging_face_config(checkpoint: Checkpoint, tensors: "dict[str, Tensor]") -> dict[str, Any]:
    """Return the content of config.json: Hugging Face's names where it has one, table `nsa` of the recipe under "nsa"."""
    model, train = checkpoint.config.model, checkpoint.config.train
    vocab_size, hidden_size = tensors["embedding.weight"].shape
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": str(tensors["embedding.weight"].dtype).removeprefix("torch."),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": len(tensors["blocks.0.mlp.gate.weight"]),
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim_qk": model.head_dim_qk,
        "head_dim_v": model.head_dim_v,
        "max_position_embeddings": train.seq_len,
        "tie_word_embeddings": True,
        "attention": model.attention,
        **({"layers": model.layers} if model.layers else {}),
        "tokenizer": checkpoint.config.data.tokenizer,
        "nsa": asdict(checkpoint.config.nsa, recurse=False),
        "trained_steps": checkpoint.step,
    }


def _write_folder(folder: Path, checkpoint: Checkpoint, tensors: "dict[str, Tensor]") -> None:
    from nsa_train.checkpoint.tensors import write_tensors

    folder.mkdir()
    write_tensors(folder / "model.safetensors", tensors)
    text = json.dumps(hugging_face_config(checkpoint, tensors), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _whole(out: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` make a file or folder aside, then give it the name `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        write(aside)
        aside.rename(out)
    except BaseException:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        aside.unlink(missing_ok=True)
        raise
    return out
