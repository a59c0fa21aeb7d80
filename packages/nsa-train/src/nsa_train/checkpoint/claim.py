"""One process writes to a directory of checkpoints: two would fill the same files."""

import fcntl
import os
from pathlib import Path

from nsa_train.checkpoint.publish import make_root
from nsa_train.errors import CheckpointError


def claim(root: Path) -> int:
    """Make `root`, claim it for this process, and return the descriptor that holds the claim; it ends when that is closed.

    Where the file system knows no locks on directories, as some network ones, nothing is claimed.

    Raises:
        CheckpointError: when another process has it.
        OSError: when it cannot be made or opened.
    """
    make_root(root)
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(
            f"{root} belongs to another process that still runs (two would overwrite each other's files); end that one, or use another --out"
        ) from None
    except OSError:
        # no locks here: whoever starts two runs in one directory is not told
        pass
    return descriptor
