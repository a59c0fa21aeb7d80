"""The results of `nsa-train ckpt ls` and `ckpt verify`, as lines and as JSON."""

from pathlib import Path
from typing import Any, NamedTuple

from nsa_train.checkpoint.layout import LATEST, latest_folder, locate_root, step_folders
from nsa_train.checkpoint.store import Listed, list_checkpoints, verify
from nsa_train.errors import CheckpointError, ConfigError


class Verified(NamedTuple):
    """The result of reading every byte of a checkpoint."""

    path: Path
    size_bytes: int | None
    """None if it is damaged"""
    problem: str = ""
    """Names the damaged file and its fault; empty if the checkpoint is whole"""

    def __str__(self) -> str:
        return self.problem or f"{self.path.name}  {_mib(self.size_bytes or 0)} MiB verified"


def listing(path: Path) -> list[Listed]:
    """Return the checkpoints of a run; `path` is its directory or its `checkpoints`. Only manifests are read.

    Raises:
        ConfigError: if there is none.
    """
    found = list_checkpoints(locate_root(path))
    if not found:
        raise _none_at(path)
    return found


def verification(path: Path) -> list[Verified]:
    """Read every byte of the checkpoints at `path` (one, or all of a run) and return the results.

    Raises:
        ConfigError: if there is none.
    """
    folders = [path] if not step_folders(locate_root(path)) and path.is_dir() else list(step_folders(locate_root(path)).values())
    found = []
    for folder in folders:
        try:
            found.append(Verified(folder.resolve(), verify(folder)))
        except CheckpointError as error:
            found.append(Verified(folder.resolve(), None, str(error)))
    if not found:
        raise _none_at(path)
    return found


def listed_line(entry: Listed) -> str:
    """Return the line that `ckpt ls` prints for a checkpoint."""
    if entry.problem:
        return f"{entry.path.name:12}  damaged: {entry.problem}"
    mark = "  <- latest" if entry.is_latest else ""
    return f"{entry.path.name:12}  {entry.created}  {_mib(entry.size_bytes):>10} MiB{mark}"


def listed_object(entry: Listed) -> dict[str, Any]:
    """Return the object that `ckpt ls --json` prints for a checkpoint; date and size of a damaged one are null."""
    return {
        "name": entry.path.name,
        "path": str(entry.path),
        "step": entry.step,
        "is_latest": entry.is_latest,
        "created": entry.created or None,
        "size_bytes": None if entry.problem else entry.size_bytes,
        "problem": entry.problem or None,
    }


def verified_object(entry: Verified) -> dict[str, Any]:
    """Return the object that `ckpt verify --json` prints for a checkpoint; the size of a damaged one is null."""
    is_whole = not entry.problem
    return {
        "name": entry.path.name,
        "path": str(entry.path),
        "is_whole": is_whole,
        "size_bytes": entry.size_bytes,
        "problem": entry.problem or None,
    }


def lost_latest(path: Path) -> str:
    """Return a message if `latest` of the run at `path` names a checkpoint that no longer exists; else empty."""
    root = locate_root(path)
    latest = latest_folder(root)
    if latest is None or latest.is_dir():
        return ""
    return f"{root / LATEST} names {latest.name}, which is not there; a resume takes the newest whole one"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"


def _none_at(path: Path) -> ConfigError:
    return ConfigError(f"DIR={str(path)!r} holds no checkpoints (step-N directories); use a run's directory, as `nsa-train run` printed it")
