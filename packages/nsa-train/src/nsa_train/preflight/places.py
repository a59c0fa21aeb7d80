"""Rules about directories: where the results go, and whether the checkpoints fit."""

import os
import shutil
from pathlib import Path

from nsa_train.checkpoint import claimed_by_another
from nsa_train.config import RunConfig
from nsa_train.preflight.findings import Preflight
from nsa_train.rules import is_utf_8
from nsa_train.run_dir import RunDirectory

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: the weight and Adam's two moments, float32."""


def check_out_dir(findings: Preflight, out_dir: Path, *, resuming: bool = False) -> None:
    """Judge that `out_dir` is a run's own, can be written, is no running one's, and was not told to halt."""
    existing, other = _existing(out_dir), _run_around(out_dir)
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
    elif resuming and _is_foreign(RunDirectory(out_dir)):
        findings.failed.append(
            f"--out={str(out_dir)!r} holds no run to resume (neither config.toml nor a heartbeat); leave --resume away, or name the run's directory"
        )
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


def check_disk(findings: Preflight, config: RunConfig, out_dir: Path, parameters: int) -> None:
    """Judge that the disk of `out_dir` holds the checkpoints that are kept, and one more while it is written."""
    size = BYTES_PER_PARAMETER * parameters
    count = kept_checkpoints(config) + 1
    free = shutil.disk_usage(_existing(out_dir)).free
    text = f"{count} checkpoints of {size / 2**30:.2f} GiB (kept, and one being written)"
    findings.needs.append(f"disk: {size * count / 2**30:.2f} GiB for {text}; here: {free / 2**30:.1f} GiB free")
    if size * count > free:
        fitting = free // size - 1
        mend = f"use --set train.keep_last={fitting}, or another disk" if fitting >= 1 else "name a directory on another disk"
        findings.failed.append(f"disk: {text} do not fit in the {free / 2**30:.2f} GiB free at {_existing(out_dir)}; {mend}")
    else:
        findings.passed.append(f"disk: {text} fit in {free / 2**30:.1f} GiB free")


def kept_checkpoints(config: RunConfig) -> int:
    """Return how many checkpoints stand at the end of a run."""
    train = config.train
    written = -(-train.steps // train.save_every) if train.save_every else 1
    return min(written, train.keep_last) if train.keep_last else written


def _is_foreign(paths: RunDirectory) -> bool:
    """Return whether there is something that no run left; one that was killed early leaves little."""
    return paths.root.is_dir() and not _is_untouched(paths) and not paths.config.exists() and not paths.heartbeats


def _is_untouched(paths: RunDirectory) -> bool:
    """Return whether a directory holds nothing; a run that was killed before its first record has claimed `checkpoints`, no more."""
    return all(path == paths.checkpoints and path.is_dir() and not any(path.iterdir()) for path in paths.root.iterdir())


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _dangling_link(path: Path) -> Path | None:
    return next((place for place in (path, *path.absolute().parents) if place.is_symlink() and not place.exists()), None)


def _run_around(out_dir: Path) -> Path | None:
    """Return the run's directory that `out_dir` lies inside, None where it stands alone."""
    for parent in out_dir.absolute().parents:
        if RunDirectory(parent).config.is_file() and RunDirectory(parent).heartbeat.is_file():
            return parent
    return None
