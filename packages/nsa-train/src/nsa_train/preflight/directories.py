"""Rules about the directory of a run: whether it is free, and whether its disk has room for the checkpoints."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from nsa_train.checkpoint.claim import HOLDER, claimed_by_another
from nsa_train.checkpoint.layout import LATEST, step_folders
from nsa_train.files import ASIDE, nearest_existing
from nsa_train.preflight.findings import Preflight
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.settings.rules import is_utf_8

BYTES_PER_PARAMETER = 12
"""Bytes of a checkpoint for each parameter: the weight and Adam's two moments, float32."""


def check_out_dir(findings: Preflight, out_dir: Path, *, resuming: bool = False) -> None:
    """Check that `out_dir` belongs to this run, can be written, is not used by a running one, and holds no .HALT."""
    runs_above = (run for run in map(RunDirectory, out_dir.absolute().parents) if run.config.is_file() and run.heartbeat.is_file())
    around = next(runs_above, None)
    if not is_utf_8(str(out_dir)):
        findings.failed.append(f"--out={str(out_dir)!r} is not UTF-8 (no record could name it); name another directory")
    elif claim := claimed_by_another(RunDirectory(out_dir).checkpoints):
        findings.failed.append(claim)
    elif out_dir.is_dir() and not resuming and not _is_untouched(RunDirectory(out_dir)):
        findings.failed.append(RunDirectory(out_dir).not_empty())
    elif refused := RunDirectory(out_dir).why_not_writable():
        findings.failed.append(refused)
    elif resuming and (absent := RunDirectory(out_dir).why_not_resumable()):
        findings.failed.append(absent)
    elif around is not None:
        findings.failed.append(
            f"--out={str(out_dir)!r} is inside the run {str(around.root)!r} (runs must not be nested); name a directory outside it"
        )
    else:
        findings.passed.append(f"out: {out_dir} {'goes on' if resuming else 'is free'}")
    if RunDirectory(out_dir).halt.exists():
        findings.failed.append(
            f"--out={str(out_dir)!r} still holds .HALT (a run that finds it stops at once); remove it: rm '{RunDirectory(out_dir).halt}'"
        )


def _is_untouched(paths: RunDirectory) -> bool:
    """Return whether a directory holds nothing; a run that was killed before its first record has only claimed `checkpoints`."""
    left = [path for path in paths.root.iterdir() if not path.name.startswith(ASIDE)]
    return all(path == paths.checkpoints and path.is_dir() and all(inside.name == HOLDER for inside in path.iterdir()) for path in left)


def check_disk(findings: Preflight, config: RunConfig, out_dir: Path, parameters: int) -> None:
    """Check that the disk of `out_dir` has room for the checkpoints that are kept, and for one more while it is written.

    Existing checkpoints of this run count as room, because they are either among the checkpoints that are kept, or are deleted by the run.
    """
    root = RunDirectory(out_dir).checkpoints
    folder, folders = nearest_existing(root), step_folders(root)
    size, count = BYTES_PER_PARAMETER * parameters, kept_checkpoints(config, tuple(folders)) + 1
    free = shutil.disk_usage(folder).free
    # a start removes files of a killed save; older checkpoints are removed after its first save
    at_once = free + sum(map(_bytes_below, root.glob(f"{ASIDE}*")))
    # in a run that was copied without its links, `latest` is a directory, and becomes a link at the first save
    room = at_once + sum(map(_bytes_below, [*folders.values(), root / LATEST]))
    given_back = f" and {in_units(room - free)} of this run's checkpoints" if room > free else ""
    there = f"{in_units(free)} free{given_back}"
    text = f"{count} checkpoints of {in_units(size)} (kept, and one being written)"
    findings.needs.append(f"disk: {in_units(size * count)} for {text}; here: {there}")
    if size * count > room:
        fitting = room // size - 1
        fix = f"use --set train.keep_last={fitting}, or another disk" if fitting >= 1 else "name a directory on another disk"
        findings.failed.append(f"disk: {text} do not fit in the {there} at {folder}; {fix}")
    elif size > at_once:
        findings.failed.append(
            f"disk: the next checkpoint, of {in_units(size)}, does not fit in the {in_units(at_once)} free at {folder} "
            "(older ones are removed only after it is written); make room there, or move the run to another disk"
        )
    else:
        findings.passed.append(f"disk: {text} fit in {there}")


def kept_checkpoints(config: RunConfig, held: tuple[int, ...] = ()) -> int:
    """Return how many checkpoints exist at the end of a run. At its start there are checkpoints of the steps `held`; it resumes from one of them."""
    train = config.train
    # with keep_last, checkpoints of an abandoned branch are removed; without it, all stay
    staying = [step for step in held if not train.keep_last or step <= train.steps]
    start, every = min(min(held, default=0), train.steps), train.save_every or train.steps
    # multiples of `every` beyond `start`, and the last step
    coming = train.steps // every - start // every + (train.steps % every > 0 and start < train.steps)
    replaced = sum(start < step <= train.steps and (step % every == 0 or step == train.steps) for step in staying)
    written = len(staying) + coming - replaced
    return min(written, train.keep_last) if train.keep_last else written


def _bytes_below(folder: Path) -> int:
    """Return the bytes of the files below `folder`; 0 for a link."""
    total = 0
    for path, _, names in os.walk(folder) if not folder.is_symlink() else ():
        for name in names:
            # another process may be writing there, which another rule reports
            with suppress(OSError):
                total += (Path(path) / name).lstat().st_size
    return total


def in_units(size_bytes: int) -> str:
    """Return `size_bytes` as text with two decimals: in GiB, below 1 GiB in MiB, below 1 MiB in KiB."""
    power, unit = next(((power, unit) for power, unit in ((30, "GiB"), (20, "MiB")) if size_bytes >= 2**power), (10, "KiB"))
    return f"{size_bytes / 2**power:,.2f} {unit}"
