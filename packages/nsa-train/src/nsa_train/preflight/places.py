"""Rules about directories: where the results go."""

import os
from pathlib import Path

from nsa_train.checkpoint.claim import HOLDER, claimed_by_another
from nsa_train.files import ASIDE
from nsa_train.preflight.findings import Preflight
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.rules import is_utf_8


def check_out_dir(findings: Preflight, out_dir: Path, *, resuming: bool = False) -> None:
    """Judge that `out_dir` is a run's own, can be written, is no running one's, and was not told to halt."""
    existing, other = existing_place(out_dir), _run_around(out_dir)
    if not is_utf_8(str(out_dir)):
        findings.failed.append(f"--out={str(out_dir)!r} is not UTF-8 (no record could name it); name another directory")
    elif claim := claimed_by_another(RunDirectory(out_dir).checkpoints):
        findings.failed.append(claim)
    elif out_dir.is_dir() and not resuming and not _is_untouched(RunDirectory(out_dir)):
        findings.failed.append(
            f"--out={str(out_dir)!r} is not empty (a run never mixes with another); name a new directory, leave --out away, "
            "or go on with that run by --resume"
        )
    elif link := _dangling_link(out_dir):
        findings.failed.append(
            f"--out={str(out_dir)!r} cannot be written ({link} is a link to {str(link.readlink())!r}, which is not there); "
            "make that, or name another directory"
        )
    elif not existing.is_dir() or not os.access(existing, os.W_OK):
        findings.failed.append(f"--out={str(out_dir)!r} cannot be written ({existing} refuses it); name another directory")
    elif resuming and (absent := RunDirectory(out_dir).why_not_resumable()):
        findings.failed.append(absent)
    elif other is not None:
        findings.failed.append(
            f"--out={str(out_dir)!r} lies inside the run {str(other)!r} (a run never mixes with another); name a directory beside it"
        )
    else:
        findings.passed.append(f"out: {out_dir} {'goes on' if resuming else 'is free'}")
    if RunDirectory(out_dir).halt.exists():
        findings.failed.append(
            f"--out={str(out_dir)!r} still holds .HALT (a run that finds it stops at once); remove it: rm '{RunDirectory(out_dir).halt}'"
        )


def existing_place(path: Path) -> Path:
    """Return `path` where it is there, else the nearest directory above that is."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _is_untouched(paths: RunDirectory) -> bool:
    """Return whether a directory holds nothing; a run that was killed before its first record has claimed `checkpoints`, no more."""
    left = [path for path in paths.root.iterdir() if not path.name.startswith(ASIDE)]
    return all(path == paths.checkpoints and path.is_dir() and all(inside.name == HOLDER for inside in path.iterdir()) for path in left)


def _dangling_link(path: Path) -> Path | None:
    return next((place for place in (path, *path.absolute().parents) if place.is_symlink() and not place.exists()), None)


def _run_around(out_dir: Path) -> Path | None:
    """Return the run's directory that `out_dir` lies inside, None where it stands alone."""
    for parent in out_dir.absolute().parents:
        if RunDirectory(parent).config.is_file() and RunDirectory(parent).heartbeat.is_file():
            return parent
    return None
