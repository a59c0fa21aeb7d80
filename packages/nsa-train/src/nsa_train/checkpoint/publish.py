"""Put a checkpoint on disk atomically: a reader, or a crash at any point, sees a complete checkpoint or none.

The files are written in a temporary directory, flushed, and renamed into place; then the link `latest` is replaced. The next writer removes
temporary files that a killed process left.
"""

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nsa_train.checkpoint.layout import LATEST, step_folders, step_name
from nsa_train.checkpoint.manifest import write_manifest
from nsa_train.files import ASIDE, naming

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def publish(root: Path, step: int, fill: Callable[[Path], None]) -> Path:
    """Write a checkpoint by calling `fill`, name it `root`/step-N, point `root`/latest to it, and return its path.

    An existing checkpoint of that step is replaced in one move.

    Raises:
        OSError: if the disk refuses the write; existing checkpoints stay, and no partial file remains.
    """
    target, aside = root / step_name(step), root / f"{ASIDE}{step_name(step)}"
    make_root(root)
    _remove(aside)
    aside.mkdir()
    try:
        fill(aside)
        write_manifest(aside, step)
        for path in [*aside.iterdir(), aside]:
            _flush(path)
        _move(aside, target)
    finally:
        # `aside` holds the new files after a failure, the old ones after an exchange
        with suppress(OSError):
            _remove(aside)
    _flush(root)
    point_latest(root, target.name)
    return target


def prune(root: Path, *, current: int, keep_last: int) -> None:
    """Keep the `keep_last` (0: all) newest checkpoints up to step `current`, inclusive, and delete the others.

    Checkpoints of later steps come from a branch of the run that a resume abandoned; they are deleted first.
    """
    if not keep_last:
        return
    folders = step_folders(root)
    leading = [step for step in folders if step <= current]
    for step in sorted(set(folders) - set(leading[-keep_last:])):
        # renamed first, because a half-removed directory must not look like a checkpoint
        _set_aside(folders[step], root / f"{ASIDE}removed-{step_name(step)}")


def clear_debris(root: Path) -> None:
    """Remove files that a killed writer left in `root`."""
    if not root.is_dir():
        return
    for path in root.iterdir():
        if path.name.startswith(ASIDE):
            _remove(path)


def make_root(root: Path) -> None:
    """Create the directory `root`, and make it durable, so that a crash does not remove it."""
    if not root.is_dir():
        root.mkdir(parents=True)
        _flush(root.parent)


def _move(aside: Path, target: Path) -> None:
    """Move `aside` to `target`, which may exist."""
    if not target.exists():
        aside.rename(target)
    elif not _exchange(aside, target):
        # this file system cannot exchange names: for a moment step-N is absent, and readers take the previous checkpoint
        old = target.with_name(f"{ASIDE}old-{target.name}")
        _remove(old)
        target.rename(old)
        aside.rename(target)
        with suppress(OSError):
            _remove(old)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False if the system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(one))


def point_latest(root: Path, name: str) -> None:
    """Replace the link `latest` in one step: a reader sees the old target or the new one."""
    aside = root / f"{ASIDE}{LATEST}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(name)
    try:
        if (root / LATEST).is_dir() and not (root / LATEST).is_symlink():
            # in a copy that did not keep links, `latest` is a directory
            _set_aside(root / LATEST, root / f"{ASIDE}copied-{LATEST}")
        aside.replace(root / LATEST)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    _flush(root)


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder; it is renamed to `out` if the block ends without an error, else deleted.

    Missing folders above `out` are made, and removed again after an error. An error of the disk names `out`.
    """
    made = [folder for folder in out.absolute().parents if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    # a system limits the bytes of a name
    aside = out.with_name(f".{os.fsencode(out.name)[:200].decode(errors='ignore')}.{os.getpid()}")
    try:
        with naming(out, aside):
            # a process of the same number may have been killed here before
            _remove(aside)
            yield aside
            aside.rename(out)
    except BaseException:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        aside.unlink(missing_ok=True)
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


def _set_aside(path: Path, aside: Path) -> None:
    """Remove `path` atomically: a partial directory never has its name."""
    _remove(aside)
    path.rename(aside)
    _remove(aside)


def _remove(path: Path) -> None:
    """Remove a directory or a link, if it exists; a link's target stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
