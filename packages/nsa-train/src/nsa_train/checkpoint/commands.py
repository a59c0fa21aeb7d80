"""The results of `nsa-train ckpt ls` and `ckpt verify`, as lines and as JSON; and `ckpt export`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nsa_train.checkpoint.layout import FILES, LATEST, MANIFEST, MODEL, latest_folder, locate_folder, locate_root, step_folders
from nsa_train.checkpoint.manifest import read_manifest
from nsa_train.checkpoint.publish import whole
from nsa_train.checkpoint.store import open_checkpoint
from nsa_train.errors import CheckpointError, ConfigError
from nsa_train.settings.recipe import to_toml

FORMATS = ("safetensors", "hf", "llama")


class Entry(NamedTuple):
    """One checkpoint in the results of a command."""

    line: str
    """Its line"""
    content: dict[str, Any]
    """Its object with `--json`"""

    @property
    def is_damaged(self) -> bool:
        """True if the checkpoint has a problem, which `content` names."""
        return self.content["problem"] is not None


def listing(path: Path) -> list[Entry]:
    """Return the checkpoints of a run for `ckpt ls`; `path` is its directory or its `checkpoints`. Only manifests are read.

    Date and size of a damaged one are null.

    Raises:
        ConfigError: if there is none.
    """
    found, root = [], locate_root(path)
    latest = latest_folder(root)
    for step, folder in step_folders(root).items():
        created, size, problem, is_latest = None, None, None, folder == latest
        try:
            manifest = read_manifest(folder)
            created, size = manifest["created"], sum(entry["size"] for entry in manifest["files"].values())
            said = f"{created}  {_mib(size):>10} MiB{'  <- latest' if is_latest else ''}"
        except CheckpointError as error:
            problem = str(error)
            said = f"damaged: {problem}"
        content = {
            "name": folder.name,
            "path": str(folder),
            "step": step,
            "is_latest": is_latest,
            "created": created,
            "size_bytes": size,
            "problem": problem,
        }
        found.append(Entry(f"{folder.name:12}  {said}", content))
    if not found:
        raise ConfigError(
            f"DIR={str(path)!r} holds no checkpoints (step-N directories); use a run's directory, as `nsa-train run` printed it"
        )
    return found


def verification(path: Path) -> list[Entry]:
    """Read every byte of the checkpoints at `path` (one, or all of a run) and return the results for `ckpt verify`.

    The size of a damaged one is null; its problem names the file and the fault.

    Raises:
        ConfigError: if there is none.
    """
    found = []
    for folder in step_folders(locate_root(path)).values() or [locate_folder(path, "PATH")]:
        size, problem, resolved = None, None, folder.resolve()
        try:
            opened = open_checkpoint(folder).path
            size = sum((opened / name).stat().st_size for name in (*FILES, MANIFEST))
            said = f"{resolved.name}  {_mib(size)} MiB verified"
        except CheckpointError as error:
            said = problem = str(error)
        content = {"name": resolved.name, "path": str(resolved), "is_whole": problem is None, "size_bytes": size, "problem": problem}
        found.append(Entry(said, content))
    return found


def lost_latest(path: Path) -> str:
    """Return a message if `latest` of the run at `path` names a checkpoint that no longer exists; else empty."""
    root = locate_root(path)
    latest = latest_folder(root)
    if latest is None or latest.is_dir():
        return ""
    return f"{root / LATEST} names {latest.name}, which is not there; a resume takes the newest complete one"


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


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"
