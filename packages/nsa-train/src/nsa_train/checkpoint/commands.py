"""What `nsa-train ckpt ls` and `ckpt verify` say, line by line."""

from pathlib import Path

from nsa_train.checkpoint.layout import LATEST, latest_folder, locate_root, step_folders
from nsa_train.checkpoint.store import Listed, list_checkpoints, verify
from nsa_train.errors import CheckpointError, ConfigError


def listing(path: Path) -> list[str]:
    """Return a line per checkpoint of the run at `path`, its directory or its checkpoints'; manifests alone are read.

    Raises:
        ConfigError: when there is none.
    """
    found = list_checkpoints(locate_root(path))
    if not found:
        raise _none_at(path)
    return [_line(entry) for entry in found]


def verification(path: Path) -> dict[str, bool]:
    """Return a line per checkpoint at `path` (one, or all of a run), and whether it is whole; every byte is read.

    Raises:
        ConfigError: when there is none.
    """
    folders = [path] if not step_folders(locate_root(path)) and path.is_dir() else list(step_folders(locate_root(path)).values())
    lines = {}
    for folder in folders:
        try:
            lines[f"{folder.resolve().name}  {_mib(verify(folder))} MiB verified"] = True
        except CheckpointError as error:
            lines[str(error)] = False
    if not lines:
        raise _none_at(path)
    return lines


def lost_latest(path: Path) -> str:
    """Return what to say where `latest` of the run at `path` names a checkpoint that is gone; empty where it does not."""
    root = locate_root(path)
    latest = latest_folder(root)
    if latest is None or latest.is_dir():
        return ""
    return f"{root / LATEST} names {latest.name}, which is not there; a resume takes the newest whole one"


def _line(entry: Listed) -> str:
    if entry.problem:
        return f"{entry.path.name:12}  damaged: {entry.problem}"
    mark = "  <- latest" if entry.is_latest else ""
    return f"{entry.path.name:12}  {entry.created}  {_mib(entry.size_bytes):>10} MiB{mark}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"


def _none_at(path: Path) -> ConfigError:
    return ConfigError(f"DIR={str(path)!r} holds no checkpoints (step-N directories); use a run's directory, as `nsa-train run` printed it")
