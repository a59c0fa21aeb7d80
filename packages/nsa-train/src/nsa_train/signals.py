"""What a signal does to a command while it does not train; the training loop has its own handlers (`stopping`). Imports no torch."""

import faulthandler
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from nsa_train.errors import INTERRUPTED, SignalledError, TerminatedError

STDERR = 2


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


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    name = signal.Signals(number).name
    message = f"stopped by {name} before the first step or after the last; nothing was lost: start again, with --resume if it had begun"
    raise SignalledError(message, exit_code=TerminatedError.exit_code)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    message = "interrupted by Ctrl-C; go on with --resume, from the newest checkpoint (SIGTERM would have saved first)"
    raise SignalledError(message, exit_code=INTERRUPTED)


def _dump_stacks(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(STDERR, all_threads=True)
