"""The results of `nsa-train ckpt ls` and `ckpt verify`, as lines and as JSON."""

from pathlib import Path
from typing import Any, NamedTuple

from nsa_train.checkpoint.layout import FILES, LATEST, MANIFEST, latest_folder, locate_root, step_folders
from nsa_train.checkpoint.manifest import read_manifest
from nsa_train.checkpoint.store import open_checkpoint
from nsa_train.errors import CheckpointError, ConfigError


class Entry(NamedTuple):
    """One checkpoint in the results of a command."""

    line: str
    """Its line"""
    content: dict[str, Any]
    """Its object with `--json`"""

    @property
    def problem(self) -> str | None:
        """Return what is wrong with it; None if it is sound."""
        return self.content["problem"]


def listing(path: Path) -> list[Entry]:
    """Return the checkpoints of a run for `ckpt ls`; `path` is its directory or its `checkpoints`. Only manifests are read.

    Date and size of a damaged one are null.

    Raises:
        ConfigError: if there is none.
    """
    found, root = [], locate_root(path)
    for step, folder in step_folders(root).items():
        created, size, problem, is_latest = None, None, None, folder == latest_folder(root)
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
        raise _none_at(path)
    return found


def verification(path: Path) -> list[Entry]:
    """Read every byte of the checkpoints at `path` (one, or all of a run) and return the results for `ckpt verify`.

    The size of a damaged one is null; its problem names the file and the fault.

    Raises:
        ConfigError: if there is none.
    """
    found = []
    for folder in step_folders(locate_root(path)).values() or ([path] if path.is_dir() else []):
        size, problem, place = None, None, folder.resolve()
        try:
            whole = open_checkpoint(folder).path
            size = sum((whole / name).stat().st_size for name in (*FILES, MANIFEST))
            said = f"{place.name}  {_mib(size)} MiB verified"
        except CheckpointError as error:
            said = problem = str(error)
        content = {"name": place.name, "path": str(place), "is_whole": problem is None, "size_bytes": size, "problem": problem}
        found.append(Entry(said, content))
    if not found:
        raise _none_at(path)
    return found


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
