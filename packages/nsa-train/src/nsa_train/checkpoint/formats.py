"""Export weights for other programs: one safetensors file, or a folder in Hugging Face's layout."""

from collections.abc import Callable
from pathlib import Path

from nsa_train.checkpoint.layout import MODEL
from nsa_train.checkpoint.publish import whole
from nsa_train.checkpoint.store import open_checkpoint
from nsa_train.errors import ConfigError
from nsa_train.settings.recipe import to_toml

FORMATS = ("safetensors", "hf", "llama")


def export(
    path: Path,
    out: Path,
    format: str = "safetensors",  # noqa: A002 - the option's name
    *,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Verify the checkpoint at `path`, write its weights to `out`, and return `out`; skipped checkpoints are reported.

    "safetensors": one file. "hf": a folder that Transformers loads through nsa-transformers. Both have the decoder's names. "llama": a folder
    of a dense model that Transformers loads by its own class, of Llama, Qwen2 or Qwen3. Weights are float32.

    Raises:
        ConfigError: if `format` is unknown, `out` exists, or the model has a part that `format` lacks.
        CheckpointError: if the checkpoint is damaged, or its weights are not those that its config.toml describes.
        OSError: if the disk refuses the write; nothing half-written is left.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format={format!r} is not one of {', '.join(FORMATS)}; use --format hf")
    if out.exists():
        raise ConfigError(f"OUT={str(out)!r} exists already (an export never overwrites); use another name")
    checkpoint = open_checkpoint(path)
    for line in checkpoint.refused:
        say(line)
    # refuse a wrong path without loading torch
    from nsa_train.checkpoint.resuming import require_weights
    from nsa_train.checkpoint.tensors import read_tensors, write_tensors

    require_weights(checkpoint)
    tensors = read_tensors(checkpoint.path / MODEL)
    if format != "safetensors":
        from nsa_train.checkpoint.hugging_face import write_folder

        return write_folder(out, checkpoint, tensors, format)
    with whole(out) as aside:
        write_tensors(aside, tensors, step=str(checkpoint.step), config=to_toml(checkpoint.config))
    return out
