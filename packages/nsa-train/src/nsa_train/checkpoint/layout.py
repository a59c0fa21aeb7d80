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


def locate_folder(path: Path) -> Path:
    """Return the one checkpoint that `path` names: a step-N directory, a `latest` link, or a run's directory.

    Raises:
        ConfigError: if there is none.
    """
    for candidate in (path, path / LATEST, path / "checkpoints" / LATEST):
        if candidate.is_dir() and ((candidate / MANIFEST).exists() or _STEP.fullmatch(candidate.resolve().name)):
            return candidate.resolve()
    raise ConfigError(
        f"CKPT={str(path)!r} holds no checkpoint (a step-N directory with {MANIFEST}, or a run with checkpoints/{LATEST}); "
        "use the directory that `nsa-train run` printed"
    )
