"""How a process of a run ends: its code, its line, and what a worker of our launcher leaves for that one. Imports no torch."""

import os
from pathlib import Path
from typing import NamedTuple

from nsa_train.errors import (
    INTERRUPTED,
    ConfigError,
    GuardError,
    HaltedError,
    PeerError,
    SignalledError,
    TerminatedError,
    TrainError,
)

ENVIRONMENT = os.environ  # noqa: TID251 - torchrun and our launcher speak to a worker through it
FOLDER = "NSA_TRAIN_OUTCOMES"
"""Names, in the workers' environment, the directory where they leave it."""
DELIBERATE = (*(kind.exit_code for kind in (ConfigError, HaltedError, GuardError, TerminatedError)), INTERRUPTED)
"""Codes that torchrun must not answer with a new start."""
SHARED_ERRORS = (PeerError, HaltedError, GuardError, TerminatedError, SignalledError)
"""What every rank raises, and one prints."""
STOP = "stop"
"""The file by which the launcher says that SIGTERM or SIGHUP came to it."""


class Ending(NamedTuple):
    """How a command ends."""

    code: int
    line: str = ""
    """For stderr; empty where nothing is left to say, or another rank says it"""
    is_own: bool = True
    """False: the echo of another rank's end"""


def ending_of(error: TrainError | SignalledError) -> Ending:
    """Return how `error`, raised in this process, ends its command."""
    if isinstance(error, SignalledError):
        if isinstance(error.__context__, TrainError):
            # torchrun ends with SIGTERM whoever is still on the way out of an error
            error = error.__context__
        elif error.exit_code == TerminatedError.exit_code and not is_stop_of_all():
            # no end of the run: torchrun is to end the others, or has a failure of another to tell
            return Ending(TrainError.exit_code, is_own=False)
    is_said_here = ENVIRONMENT.get("RANK", "0") == "0" or not isinstance(error, SHARED_ERRORS)
    return Ending(error.exit_code, str(error) if is_said_here else "", is_own=not isinstance(error, PeerError))


def note_worker() -> bool:
    """Leave this process's id where the launcher finds it, if there is one; False where that one was told to stop before."""
    folder = ENVIRONMENT.get(FOLDER)
    if folder:
        aside = Path(folder) / f"aside-{ENVIRONMENT['LOCAL_RANK']}"
        aside.write_text(str(os.getpid()))
        aside.replace(Path(folder) / f"pid-{ENVIRONMENT['LOCAL_RANK']}")
    return not folder or not is_stop_of_all()


def is_stop_of_all() -> bool:
    """Return whether SIGTERM came to the whole run; else torchrun sent it, for another rank has failed, or somebody to this rank alone."""
    folder = ENVIRONMENT.get(FOLDER)
    return not folder or (Path(folder) / STOP).exists()


def worker_pids(folder: Path) -> list[int]:
    """Return the process ids that workers left in `folder`."""
    return [int(path.read_text()) for path in folder.glob("pid-*")]


def reported(code: int, *, is_own: bool) -> int:
    """Return the code to exit with; a deliberate one is left for the launcher, and torchrun sees success.

    `is_own`: the code is this rank's, not the echo of another's.
    """
    folder = ENVIRONMENT.get(FOLDER)
    if not folder:
        return code
    if is_own:
        (Path(folder) / f"code-{ENVIRONMENT['LOCAL_RANK']}").write_text(str(code))
    return 0 if code in DELIBERATE else code


def joint_code(folder: Path) -> int:
    """Return the code of all workers together: a deliberate one where there is one."""
    codes = [int(path.read_text()) for path in folder.glob("code-*")]
    return max((code for code in codes if code in DELIBERATE), default=max(codes, default=0))
