"""Locks a directory of checkpoints for one process: two processes would write the same files."""

import fcntl
import os
import platform
import re
import stat
import time
from contextlib import suppress
from pathlib import Path

from nsa_train.checkpoint.publish import make_root
from nsa_train.errors import ClaimedError

TRIES, PAUSE_S = 5, 0.02
"""Number of attempts at a claim, and seconds between them. One attempt may fail because `claimed_by_another` locks the directory for a moment."""
HOLDER = ".holder"
"""The file that names the process with the claim. A process that is killed leaves the file, but not the claim."""


def claim(root: Path) -> int:
    """Create `root`, claim it for this process, and return the descriptor that holds the claim; `release` ends it.

    If the file system has no locks on directories, as some network file systems, nothing is claimed.

    Raises:
        ClaimedError: if another process has the claim.
        OSError: if `root` cannot be created or opened.
    """
    make_root(root)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(TRIES):
        if _can_lock(descriptor, fcntl.LOCK_EX):
            _sign(root)
            return descriptor
        time.sleep(PAUSE_S)
    os.close(descriptor)
    raise ClaimedError(_belongs(root))


def release(root: Path, descriptor: int) -> None:
    """End the claim that `descriptor` holds."""
    with suppress(OSError):
        (root / HOLDER).unlink(missing_ok=True)
    os.close(descriptor)


def claimed_by_another(root: Path) -> str | None:
    """Return why `root` cannot be claimed: another process has the claim. None if no process has it, or if the file system cannot tell."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        return None if _can_lock(descriptor, fcntl.LOCK_SH) else _belongs(root)
    finally:
        os.close(descriptor)


def _belongs(root: Path) -> str:
    pid, host = _holder(root)
    named, end = (f": pid {pid} on host {host}", f"end that one (kill {pid}, which saves)") if pid else ("", "end that one")
    return f"{root} belongs to another process that still runs{named} (two would overwrite each other's files); {end}, or use another --out"


def _sign(root: Path) -> None:
    # the file only serves a message; saving reports a full disk
    with suppress(OSError):
        (root / HOLDER).unlink(missing_ok=True)
        # mode "x" does not follow a link that somebody put there
        with (root / HOLDER).open("x", encoding="utf-8") as file:
            file.write(f"pid {os.getpid()} on host {platform.node()}\n")


def _holder(root: Path) -> tuple[str, str]:
    """Return the process id and host that have claimed `root`; empty if the file cannot be read."""
    with suppress(OSError):
        # O_NONBLOCK, because opening a pipe that somebody put there would wait
        descriptor = os.open(root / HOLDER, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            text = os.read(descriptor, 512) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
        finally:
            os.close(descriptor)
        if found := re.fullmatch(rb"pid ([0-9]{1,10}) on host ([!-~]{1,255})\n", text):
            return found[1].decode(), found[2].decode()
    return "", ""


def _can_lock(descriptor: int, kind: int) -> bool:
    """Lock the directory if nobody has it, and return whether it was free; True if the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # on such a file system, two runs in one directory are not detected
        pass
    return True
