"""The end of a process of a run: its exit code, its message, and the files by which a worker reports both to our launcher.

A worker also detects here that its launcher has ended, because nothing else would stop it. Imports no torch.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from nsa_core.environment import is_loading
from nsa_core.errors import NSAError
from nsa_train.errors import (
    INTERRUPTED,
    ConfigError,
    GuardError,
    HaltedError,
    OrphanedError,
    PeerError,
    SignalledError,
    StoppedError,
    TerminatedError,
    TrainError,
    exit_code_of,
)
from nsa_train.host.environment import ENVIRONMENT, proc_fields
from nsa_train.lifecycle.console import warn

FOLDER = "NSA_TRAIN_OUTCOMES"
"""Environment variable of the workers with the directory for their reports."""
DELIBERATE = (*(kind.exit_code for kind in (ConfigError, HaltedError, GuardError, TerminatedError)), INTERRUPTED)
"""Exit codes after which torchrun must not restart."""
SHARED_ERRORS = (PeerError, StoppedError, GuardError, SignalledError)
"""The errors that every rank raises, and only one rank prints."""
STOP = "stop"
"""The file by which the launcher reports that it received SIGTERM, SIGHUP or Ctrl-C."""
LAUNCHER = "NSA_TRAIN_LAUNCHER"
"""Environment variable of the workers with the launcher's process id."""
STARTER = "NSA_TRAIN_STARTER"
"""Environment variable of a run that must end with the process that started it, such as `nsa-bench`; it holds that process's id."""
LOOK_S = 0.5
"""Seconds between two checks that the launcher still runs."""
_PARENT = os.getppid()
STDERR = 2
SIGNALLED = 128
"""The exit code of a process that a signal ended, by convention of shells, is this plus the signal's number."""
UNSAVED = "before the first step or after the last; nothing was lost; start again with --resume auto"
_ENDED = threading.Event()
"""Set once a command has ended in this process, which may still print messages."""


class Ending(NamedTuple):
    """The end of a command."""

    code: int
    line: str = ""
    """The line for stderr; empty if there is nothing more to print, or another rank prints it"""
    is_own: bool = True
    """False: another rank caused the end"""


def ending_of(error: TrainError | NSAError | SignalledError) -> Ending:
    """Return how this process's command ends after `error`."""
    if isinstance(error, SignalledError):
        if isinstance(error.__context__, TrainError | NSAError):
            # torchrun sends SIGTERM to ranks that are still handling an error; report that error, not the signal
            error = error.__context__
        elif error.exit_code == TerminatedError.exit_code and not is_stop_of_all():
            # the signal was only for this rank, not for the run: torchrun must end the others, or report the failure of another rank
            return Ending(SIGNALLED + error.number, is_own=False)
    # each host reports the end of its launcher, because rank 0 may be on another host
    speaker = "LOCAL_RANK" if isinstance(error, OrphanedError) else "RANK"
    is_said_here = ENVIRONMENT.get(speaker, "0") == "0" or not isinstance(error, SHARED_ERRORS)
    # our errors have one line per problem
    text = error.in_one_line() if isinstance(error, NSAError) else str(error)
    return Ending(exit_code_of(error), text if is_said_here else "", is_own=not isinstance(error, PeerError))


def note_worker() -> bool:
    """Report this process's id to the launcher, if there is one; return False if a signal stopped the launcher before."""
    folder = ENVIRONMENT.get(FOLDER)
    if folder:
        aside = Path(folder) / f"aside-{ENVIRONMENT['LOCAL_RANK']}"
        aside.write_text(str(os.getpid()))
        aside.replace(Path(folder) / f"pid-{ENVIRONMENT['LOCAL_RANK']}")
    return not folder or not is_stop_of_all()


def is_launched() -> bool:
    """Return whether our launcher started this process; the launcher then prints the messages that concern all ranks."""
    return FOLDER in ENVIRONMENT


def is_worker() -> bool:
    """Return whether torchrun's agent started this process, in our launcher or on its own."""
    return "TORCHELASTIC_RUN_ID" in ENVIRONMENT


def has_launcher() -> bool:
    """Return whether this process must end with the one that started it: our launcher, the agent of a user's own torchrun, or a STARTER."""
    return is_worker() or STARTER in ENVIRONMENT


def has_lost_launcher() -> bool:
    """Return whether `has_launcher`, and that process has ended."""
    if not has_launcher():
        return False
    if os.getppid() != _PARENT:
        return True
    # check the launcher's own process: it may have ended before this module was loaded, and a process between the two may live longer
    launcher = int(ENVIRONMENT.get(LAUNCHER if is_worker() else STARTER, _PARENT))
    try:
        os.kill(launcher, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    # a zombie: its parent has not collected its status, and may first read the output of this process to its end
    return proc_fields(f"/proc/{launcher}/status").get("State", "").startswith("Z")


def heed_launcher() -> None:
    """Send SIGTERM to this process once its launcher has ended, for any reason; do nothing if no launcher started it."""

    def look() -> None:
        while not has_lost_launcher():
            time.sleep(LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    if has_launcher():
        threading.Thread(target=look, name="launcher", daemon=True).start()


def is_stop_of_all() -> bool:
    """Return whether SIGTERM was for the whole run; else torchrun sent it because another rank failed, or somebody sent it only to this rank."""
    folder = ENVIRONMENT.get(FOLDER)
    return not folder or (Path(folder) / STOP).exists() or has_lost_launcher()


def worker_pids(folder: Path) -> list[int]:
    """Return the process ids that workers left in `folder`."""
    return [int(path.read_text()) for path in folder.glob("pid-*")]


def reported(code: int, *, is_own: bool) -> int:
    """Return the exit code of this process; a deliberate code is reported to the launcher, and torchrun sees success.

    `is_own`: this rank, not another one, caused the code.
    """
    folder = ENVIRONMENT.get(FOLDER)
    if not folder:
        return code
    if is_own:
        (Path(folder) / f"code-{ENVIRONMENT['LOCAL_RANK']}").write_text(str(code))
    return 0 if code in DELIBERATE else code


def joint_code(folder: Path) -> int:
    """Return the common code of all workers: a deliberate one if there is one."""
    codes = [int(path.read_text()) for path in folder.glob("code-*")]
    return max((code for code in codes if code in DELIBERATE), default=max(codes, default=0))


@contextmanager
def handled(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Let `handlers`, by signal, handle signals while the block runs. A signal that the caller's shell ignores stays ignored."""
    wanted = {number: handler for number, handler in handlers.items() if signal.getsignal(number) != signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ending_by_signals(then: str = UNSAVED) -> Iterator[None]:
    """Let SIGTERM, SIGHUP and Ctrl-C end the block, and SIGUSR1 write the stacks of all threads to stderr.

    Handlers are set only in the main thread, as by `handled`. `then`: what the message says after the cause.

    Raises:
        SignalledError: from the block, with the documented exit code.
    """
    stop = partial(_terminate, then)
    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
        signal.SIGTERM: stop,
        signal.SIGHUP: stop,
        signal.SIGINT: partial(_interrupt, then),
        signal.SIGUSR1: _dump_stacks,
    }
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with handled(handlers if is_main else {}):
            yield
    finally:
        _ENDED.set()


@contextmanager
def last_words() -> Iterator[None]:
    """Prevent SIGTERM from interrupting the last messages of a process: torchrun sends SIGTERM to the peers of a failed rank.

    This is for a process that runs one command. Before the command sets its own handlers (`ending_by_signals`), a signal
    ends the process as usual.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if not _ENDED.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(then: str, number: int, frame: FrameType | None) -> None:
    if isinstance(sys.exc_info()[1], TrainError):
        # the process is ending and prints why
        return
    cause = "the end of the launcher" if has_lost_launcher() else signal.Signals(number).name
    _end(SignalledError(f"stopped by {cause} {then}", exit_code=TerminatedError.exit_code, number=number))


def _interrupt(then: str, number: int, frame: FrameType | None) -> NoReturn:
    _end(SignalledError(f"interrupted by Ctrl-C {then}", exit_code=INTERRUPTED))


def _end(error: SignalledError) -> NoReturn:
    if is_loading("torch"):
        # C code in torch would discard the error
        ending = ending_of(error)
        if ending.line:
            warn(ending.line)
        os._exit(reported(ending.code, is_own=ending.is_own))
    raise error


def _dump_stacks(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(STDERR, all_threads=True)
