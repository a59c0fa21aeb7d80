"""The rule of the disk: the checkpoints that are kept fit on it, and one more while it is written."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from nsa_train.checkpoint.layout import LATEST, step_folders
from nsa_train.files import ASIDE
from nsa_train.preflight.findings import Preflight
from nsa_train.preflight.places import existing_place
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig

BYTES_PER_PARAMETER = 12
"""Bytes of a checkpoint for each parameter: the weight and Adam's two moments, float32."""


@frozen(kw_only=True)
class Held:
    """The content of a directory of checkpoints when a run starts."""

    steps: tuple[int, ...]
    """The steps of its checkpoints, whole or not, lowest first."""
    debris_bytes: int
    """Bytes that a killed save left, which the next start removes."""
    saved_bytes: int
    """Bytes of its checkpoints: they are kept, and counted as such, or they give their room back."""


def check_disk(findings: Preflight, config: RunConfig, out_dir: Path, parameters: int) -> None:
    """Judge that the disk of `out_dir` holds the checkpoints that are kept, and one more while it is written.

    Those of this run that lie there already take room that is theirs, or that the run gets back.
    """
    root = RunDirectory(out_dir).checkpoints
    place, held = existing_place(root), held_in(root)
    size, count = BYTES_PER_PARAMETER * parameters, kept_checkpoints(config, held.steps) + 1
    free = shutil.disk_usage(place).free
    # the first save of a start removes older checkpoints only once it is written
    at_once = free + held.debris_bytes
    room = at_once + held.saved_bytes
    there = f"{in_units(free)} free{_given_back(room - free)}"
    text = f"{count} checkpoints of {in_units(size)} (kept, and one being written)"
    findings.needs.append(f"disk: {in_units(size * count)} for {text}; here: {there}")
    if size * count > room:
        fitting = room // size - 1
        fix = f"use --set train.keep_last={fitting}, or another disk" if fitting >= 1 else "name a directory on another disk"
        findings.failed.append(f"disk: {text} do not fit in the {there} at {place}; {fix}")
    elif size > at_once:
        findings.failed.append(
            f"disk: the next checkpoint, of {in_units(size)}, does not fit in the {in_units(at_once)} free at {place} "
            "(older ones are removed only after it is written); make room there, or move the run to another disk"
        )
    else:
        findings.passed.append(f"disk: {text} fit in {there}")


def kept_checkpoints(config: RunConfig, held: tuple[int, ...] = ()) -> int:
    """Return how many checkpoints stand at the end of a run that finds those of the steps `held`, and goes on from one of them."""
    train = config.train
    # those of a branch that was left go with keep_last, others stay
    staying = [step for step in held if not train.keep_last or step <= train.steps]
    start, every = min(min(held, default=0), train.steps), train.save_every or train.steps
    # multiples of `every` beyond `start`, and the last step
    coming = train.steps // every - start // every + (train.steps % every > 0 and start < train.steps)
    replaced = sum(start < step <= train.steps and (step % every == 0 or step == train.steps) for step in staying)
    written = len(staying) + coming - replaced
    return min(written, train.keep_last) if train.keep_last else written


def held_in(root: Path) -> Held:
    """Return what lies in `root`, which may be absent."""
    folders = step_folders(root)
    debris = root.glob(f"{ASIDE}*")
    # in a run that was copied without its links, `latest` is a directory, and becomes a link at the first save
    saved = [*folders.values(), root / LATEST]
    return Held(steps=tuple(folders), debris_bytes=sum(map(_bytes_below, debris)), saved_bytes=sum(map(_bytes_below, saved)))


def _bytes_below(folder: Path) -> int:
    """Return the bytes of the files below `folder`; none for a link, which takes none here."""
    total = 0
    for path, _, names in os.walk(folder) if not folder.is_symlink() else ():
        for name in names:
            # another process may be writing there, which is a failure of its own
            with suppress(OSError):
                total += (Path(path) / name).lstat().st_size
    return total


def _given_back(size_bytes: int) -> str:
    return f" and {in_units(size_bytes)} of this run's checkpoints" if size_bytes else ""


def in_units(size_bytes: int) -> str:
    """Return `size_bytes` with two decimals in GiB, below one in MiB, and below one of those in KiB."""
    power, unit = next(((power, unit) for power, unit in ((30, "GiB"), (20, "MiB")) if size_bytes >= 2**power), (10, "KiB"))
    return f"{size_bytes / 2**power:,.2f} {unit}"
