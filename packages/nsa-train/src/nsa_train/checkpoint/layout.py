"""Names of a checkpoint's files, and locations of checkpoints."""

import re
from pathlib import Path

from nsa_train.errors import ConfigError

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
"""Weights, whole tensors, by their names in the decoder."""
OPTIMIZER = "optimizer.safetensors"
"""Optimizer state as `parameter/field`, for example `embedding.weight/exp_avg`."""
RNG = "rng.safetensors"
"""Every generator of every rank, as `rank0/torch_cpu`."""
CONFIG = "config.toml"
STATE = "state.json"
"""Everything else that the next step depends on: data position, schedule, scaler, counters, routes."""
FILES = (MODEL, OPTIMIZER, RNG, CONFIG, STATE)
"""The files that the manifest lists."""
LATEST = "latest"
"""The link to the checkpoint that was saved last."""
HF_CONFIG = "config.json"
"""The file that marks a folder for Transformers."""
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def step_name(step: int) -> str:
    """Return the directory's name of the checkpoint after optimizer step `step`."""
    return f"step-{step}"


def step_folders(root: Path) -> dict[int, Path]:
    """Return step -> directory of the checkpoints in `root`, whole or not, lowest step first."""
    if not root.is_dir():
        return {}
    named = ((_STEP.fullmatch(path.name), path) for path in root.iterdir())
    found = {int(match[1]): path for match, path in named if match and path.is_dir()}
    return dict(sorted(found.items()))


def folder_of_step(root: Path, step: int) -> Path:
    """Return the directory in `root` of the checkpoint after step `step`, whole or not.

    Raises:
        ConfigError: if there is none; the message names those that exist.
    """
    folders = step_folders(root)
    if step not in folders:
        there = ", ".join(map(str, folders)) or "none"
        raise ConfigError(f"--resume={step}: {root} has no {step_name(step)} (there are: {there}); use --resume for the latest")
    return folders[step]


def latest_folder(root: Path) -> Path | None:
    """Return the step directory in `root` that the link `latest` names, whether or not it exists; None without a link."""
    link = root / LATEST
    if not link.is_symlink():
        return None
    name = link.readlink().name
    return root / name if _STEP.fullmatch(name) else None


def locate_root(path: Path) -> Path:
    """Return the directory of checkpoints that `path` is or holds: a run's directory or its `checkpoints`."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def is_folder(path: Path) -> bool:
    """Return True if `path` holds a config.json, so that it is neither a run nor a checkpoint."""
    return (path / HF_CONFIG).is_file()


def require_model(name: str, path: Path) -> None:
    """Check that `path`, the value of argument `name`, holds a checkpoint, whole or not, or an export.

    Raises:
        ConfigError: if it holds none.
    """
    if not is_folder(path):
        require_checkpoint(name, path)


def require_checkpoint(name: str, path: Path) -> None:
    """Check that `path`, the value of argument `name`, is or holds a checkpoint, whole or not.

    Raises:
        ConfigError: if there is none.
    """
    if not step_folders(locate_root(path)):
        locate_folder(path, name)


def locate_folder(path: Path, name: str = "CKPT") -> Path:
    """Return the one checkpoint that `path` names: a step-N directory, a `latest` link, or a run's directory. `name` is that of the argument.

    Raises:
        ConfigError: if there is none.
    """
    for candidate in (path, path / LATEST, path / "checkpoints" / LATEST):
        # a run's directory may be called step-2 as well
        is_step = _STEP.fullmatch(candidate.resolve().name) and not (candidate / "checkpoints").is_dir()
        if candidate.is_dir() and ((candidate / MANIFEST).exists() or is_step):
            return candidate.resolve()
    raise ConfigError(
        f"{name}={str(path)!r} holds no checkpoint (a step-N directory with {MANIFEST}, or a run with checkpoints/{LATEST}); "
        "use the directory that `nsa-train run` printed"
    )
