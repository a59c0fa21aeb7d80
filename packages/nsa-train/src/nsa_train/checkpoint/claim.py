"""One process writes to a directory of checkpoints: two would fill the same files."""

import fcntl
import os
import time
from pathlib import Path

from nsa_train.checkpoint.publish import make_root
from nsa_train.errors import ClaimedError

TRIES, PAUSE_S = 5, 0.02
"""How often a claim is tried: who asks `claimed_by_another` holds the directory for a moment."""


def claim(root: Path) -> int:
    """Make `root`, claim it for this process, and return the descriptor that holds the claim; it ends when that is closed.

    Where the file system knows no locks on directories, as some network ones, nothing is claimed.

    Raises:
        ClaimedError: when another process has it.
        OSError: when it cannot be made or opened.
    """
    make_root(root)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(TRIES):
        if _can_lock(descriptor, fcntl.LOCK_EX):
            return descriptor
        time.sleep(PAUSE_S)
    os.close(descriptor)
    raise ClaimedError(_belongs(root))


def claimed_by_another(root: Path) -> str | None:
    """Return what stands against a claim of `root`: another process has it. None where none has, or that cannot be seen."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        return None if _can_lock(descriptor, fcntl.LOCK_SH) else _belongs(root)
    finally:
        os.close(descriptor)


def _belongs(root: Path) -> str:
    return f"{root} belongs to another process that still runs (two would overwrite each other's files); end that one, or use another --out"


def _can_lock(descriptor: int, kind: int) -> bool:
    """Lock the directory if nobody has it, and return whether that is so; True where it knows no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # whoever starts two runs in one directory is not told
        pass
    return True
