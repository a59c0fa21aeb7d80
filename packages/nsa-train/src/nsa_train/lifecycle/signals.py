"""The handlers of a command's signals while it does not train; the training loop has its own (`stopping`). Imports no torch."""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from nsa_train.errors import INTERRUPTED, SignalledError, TerminatedError, TrainError
from nsa_train.lifecycle.outcomes import has_lost_launcher

STDERR = 2
UNSAVED = "before the first step or after the last; nothing was lost; start again with --resume auto"
_ENDED = threading.Event()
"""A command has ended in this process: what follows are its last words."""


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """Let SIGTERM, SIGHUP and Ctrl-C end the block, and SIGUSR1 write the stacks of all threads to stderr.

    Handlers are set in the main thread alone, and put back at the end. A signal that the caller's shell ignores stays ignored.

    Raises:
        SignalledError: from the block, with the documented exit code.
    """
    handlers = {signal.SIGTERM: _terminate, signal.SIGHUP: _terminate, signal.SIGINT: _interrupt, signal.SIGUSR1: _dump_stacks}
    is_main = threading.current_thread() is threading.main_thread()
    wanted = {number: handler for number, handler in handlers.items() if is_main and signal.getsignal(number) != signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _ENDED.set()


@contextmanager
def last_words() -> Iterator[None]:
    """Let no SIGTERM cut off what a process says of its end: torchrun sends it to the peers of a rank that failed.

    For the whole of a process that runs one command. Before the command sets its own handlers (`ending_by_signals`), a signal
    ends the process as ever.
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


def _terminate(number: int, frame: FrameType | None) -> None:
    if isinstance(sys.exc_info()[1], TrainError):
        # the process is on its way out, and says why
        return
    cause = "the end of the launcher" if has_lost_launcher() else signal.Signals(number).name
    raise SignalledError(f"stopped by {cause} {UNSAVED}", exit_code=TerminatedError.exit_code)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise SignalledError(f"interrupted by Ctrl-C {UNSAVED}", exit_code=INTERRUPTED)


def _dump_stacks(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(STDERR, all_threads=True)
