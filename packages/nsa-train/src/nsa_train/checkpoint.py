"""Checkpoints that are whole or absent: safetensors and JSON, no pickle.

`step-N/` holds model.safetensors, optimizer.safetensors, config.toml and manifest.json (size and SHA-256 of each file,
and of itself). It is written aside, flushed to disk, renamed into place; then the link `latest` is moved to it. Every
byte is verified before it is used.
"""

import hashlib
import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from attrs import frozen
from torch import Tensor, nn

from nsa_train.config import RunConfig, structure
from nsa_train.errors import CheckpointError, ConfigError
from nsa_train.model.decoder import Decoder, build_model
from nsa_train.recipe import read_toml, to_toml

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
CONFIG = "config.toml"
LATEST = "latest"


@frozen
class Checkpoint:
    """A checkpoint whose files were verified."""

    path: Path
    step: int
    config: RunConfig


def save_checkpoint(root: Path, *, step: int, config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Write `root`/step-N, move `root`/latest to it and return its path.

    Raises:
        OSError: when the disk refuses; nothing half-written is left behind.
    """
    target, aside = root / f"step-{step}", root / f".step-{step}.{os.getpid()}"
    aside.mkdir(parents=True)
    try:
        safetensors.torch.save_file(_plain(model.state_dict()), aside / MODEL)
        safetensors.torch.save_file(_plain(optimizer_tensors(model, optimizer)), aside / OPTIMIZER)
        (aside / CONFIG).write_text(to_toml(config), encoding="utf-8")
        (aside / MANIFEST).write_text(_manifest(aside, step), encoding="utf-8")
        for path in [*aside.iterdir(), aside]:
            _flush(path)
        aside.rename(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _flush(root)
    _point_latest(root, target.name)
    return target


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the verified checkpoint at `path`: a step-N directory, a `latest` link, or a run's directory.

    Raises:
        ConfigError: when there is none.
        CheckpointError: when it is damaged; the message names file, expected and found.
    """
    folder = _locate(path)
    manifest = _read_manifest(folder)
    for name, expected in manifest["files"].items():
        _verify(folder / name, expected)
    return Checkpoint(path=folder, step=manifest["step"], config=structure(read_toml(folder / CONFIG)))


def load_model(checkpoint: Checkpoint) -> Decoder:
    """Return the decoder of a verified checkpoint, on the CPU, in evaluation mode.

    Raises:
        CheckpointError: when its weights do not fit the decoder that its config.toml describes.
    """
    with torch.random.fork_rng(devices=[]):
        model = build_model(checkpoint.config)
    try:
        model.load_state_dict(safetensors.torch.load_file(checkpoint.path / MODEL))
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint.path / MODEL} does not fit its {CONFIG}: {error}") from None
    return model.eval()


def load_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give `optimizer`, built for `model`, the state that a verified checkpoint holds."""
    tensors = safetensors.torch.load_file(checkpoint.path / OPTIMIZER)
    for name, parameter in model.named_parameters():
        state = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.rpartition("/")[0] == name}
        optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state by `parameter/field`, for example `embedding.weight/exp_avg`."""
    return {f"{name}/{key}": value for name, parameter in model.named_parameters() for key, value in optimizer.state[parameter].items()}


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _manifest(folder: Path, step: int) -> str:
    files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": files,
    }
    # no newline at the end: whatever is cut off, the rest is no JSON
    return json.dumps({**content, "sha256": _digest(content)}, indent=2)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        expected = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is not a manifest ({error!r}); take another step-* of this run") from None
    if _digest(manifest) != expected:
        raise CheckpointError(f"{path} is damaged: expected SHA-256 {expected}, found {_digest(manifest)}; take another step-* of this run")
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path} has schema_version={manifest['schema_version']} (this version reads {SCHEMA_VERSION}); "
            "use the version of nsa-train that wrote it"
        )
    if set(manifest["files"]) != {MODEL, OPTIMIZER, CONFIG}:
        raise CheckpointError(f"{path} lists {sorted(manifest['files'])}; take another step-* of this run")
    return dict(manifest)


def _verify(path: Path, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing (manifest.json lists it); take another step-* of this run")
    for what, found in (("size in bytes", path.stat().st_size), ("SHA-256", _sha256(path))):
        wanted = expected["size" if what.startswith("size") else "sha256"]
        if found != wanted:
            raise CheckpointError(f"{path} is damaged: {what} expected {wanted}, found {found}; take another step-* of this run")


def _locate(path: Path) -> Path:
    for candidate in (path, path / LATEST, path / "checkpoints" / LATEST):
        if candidate.is_dir() and ((candidate / MANIFEST).exists() or candidate.name.startswith("step-")):
            return candidate.resolve()
    raise ConfigError(
        f"CKPT={str(path)!r} holds no checkpoint (a step-N directory with {MANIFEST}, or a run with checkpoints/{LATEST}); "
        "use the directory that `nsa-train run` printed"
    )


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point_latest(root: Path, name: str) -> None:
    """Replace the link in one step: a reader sees the old target or the new one."""
    aside = root / f".{LATEST}.{os.getpid()}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(name)
    aside.replace(root / LATEST)
    _flush(root)
