"""The results of `nsa-train ckpt ls` and `ckpt verify`, as lines and as JSON."""

from pathlib import Path
from typing import Any, NamedTuple

from nsa_train.checkpoint.layout import LATEST, latest_folder, locate_root, step_folders
from nsa_train.checkpoint.store import list_checkpoints, verify
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
    found = []
    for one in list_checkpoints(locate_root(path)):
        said = f"damaged: {one.problem}" if one.problem else f"{one.created}  {_mib(one.size_bytes):>10} MiB"
        content = {
            "name": one.path.name,
            "path": str(one.path),
            "step": one.step,
            "is_latest": one.is_latest,
            "created": one.created or None,
            "size_bytes": None if one.problem else one.size_bytes,
            "problem": one.problem or None,
        }
        found.append(Entry(f"{one.path.name:12}  {said}{'  <- latest' if one.is_latest and not one.problem else ''}", content))
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
        size, problem, place = 0, None, folder.resolve()
        try:
            size = verify(folder)
        except CheckpointError as error:
            problem = str(error)
        content = {"name": place.name, "path": str(place), "is_whole": not problem, "size_bytes": size or None, "problem": problem}
        found.append(Entry(problem or f"{place.name}  {_mib(size)} MiB verified", content))
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
