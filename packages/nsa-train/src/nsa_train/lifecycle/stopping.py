"""Requests to stop, from a signal or a file, received on any rank at any time; the trainer obeys them between two steps.

A thread listens, so that a request is received even while the main thread waits for data or for other ranks. No error ends this
thread, because the next SIGTERM would be lost.
"""

import errno
import faulthandler
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING, Self

from nsa_train.errors import INTERRUPTED, HaltedError, InterruptedRunError, OrphanedError, StoppedError, TerminatedError
from nsa_train.lifecycle.console import warn
from nsa_train.lifecycle.outcomes import handled, has_lost_launcher, reported
from nsa_train.run_dir import RunDirectory

if TYPE_CHECKING:
    from nsa_train.parallel.world import World

POLL_S = 0.2
"""Seconds between two checks for .HALT, and for requests on other ranks."""
TERMINATING = (signal.SIGTERM, signal.SIGHUP)
"""The signals of a scheduler, and of a terminal that is closed."""
SIGNALS = (*TERMINATING, signal.SIGINT, signal.SIGUSR1)
_KEY = "stop"


class Stop(IntEnum):
    """A request to stop; the largest of several requests counts. All values except NO and ORPHANED are exit codes."""

    NO = 0
    HALT = HaltedError.exit_code
    ORPHANED = TerminatedError.exit_code - 1
    """A rank's launcher has ended."""
    TERMINATE = TerminatedError.exit_code
    INTERRUPT = INTERRUPTED
    """Ctrl-C."""

    @property
    def cause(self) -> str:
        """The cause of the stop, in words."""
        return _ENDS[self][0]

    def error(self, step: int) -> StoppedError:
        """Return the error that ends a run saved after `step`."""
        advice = "remove .HALT and go on with --resume" if self is Stop.HALT else "go on with --resume"
        return _ENDS[self][1](f"{self.cause} after step {step}, which is saved; {advice}")


_ENDS: dict[Stop, tuple[str, type[StoppedError]]] = {
    Stop.HALT: ("halted by .HALT", HaltedError),
    Stop.ORPHANED: ("stopped by the end of the launcher", OrphanedError),
    Stop.TERMINATE: ("stopped by SIGTERM or SIGHUP", TerminatedError),
    Stop.INTERRUPT: ("interrupted by Ctrl-C", InterruptedRunError),
}


class StopRequests:
    """Receives SIGTERM, SIGHUP, Ctrl-C and the file .HALT on any rank. Use it as a context manager.

    A second Ctrl-C ends the process at once, after a call of `quitting`. SIGUSR1 writes the stacks of all threads. Handlers are
    set when the main thread enters, and restored when it leaves. A signal that is ignored stays ignored.
    """

    def __init__(self, paths: RunDirectory, world: "World", *, quitting: Callable[[], None] = lambda: None) -> None:
        self.paths, self.world, self._store, self._quitting = paths, world, world.store, quitting
        self._heard = Stop.NO
        self._delay = ""
        self._is_interrupted = False
        self._has_lost_halt = False
        self._ending = threading.Event()
        self._handlers = ExitStack()
        self._thread = threading.Thread(target=self._listen, name="stop-requests", daemon=True)

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        if threading.current_thread() is threading.main_thread():
            self._handlers.enter_context(handled(dict.fromkeys(SIGNALS, _leave_to_the_thread)))
            self._handlers.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        os.write(self._writer, b"\0")
        self._thread.join()
        self._handlers.close()
        os.close(self._reader)
        os.close(self._writer)

    def heard(self, *, look: bool = False) -> Stop:
        """Return the request that this rank knows of; `look`: also check for .HALT now."""
        if look and self._has_halt():
            self._note(Stop.HALT)
        return self._heard

    def expect_delay(self, reason: str) -> None:
        """Say in the message about each request to stop that `reason` delays the stop, until a call with an empty reason."""
        self._delay = reason
        self._tell_delay()

    def _listen(self) -> None:
        while not self._ending.is_set():
            readable, _, _ = select.select([self._reader], [], [], POLL_S)
            # simultaneous requests from a terminal and from the launcher count as one
            for number in set(os.read(self._reader, 64)) if readable else ():
                if number in TERMINATING:
                    self._note(Stop.ORPHANED if has_lost_launcher() else Stop.TERMINATE)
                elif number == signal.SIGINT:
                    self._interrupt()
                elif number == signal.SIGUSR1:
                    self._dump_stacks()
            if not self._ending.is_set():
                self.heard(look=True)
                self._read_store()

    def _interrupt(self) -> None:
        if self._is_interrupted:
            self._quit()
        self._is_interrupted = True
        if self.world.is_main:
            warn("Ctrl-C: the run is saved after the step under way; a second Ctrl-C ends it at once, without saving")
        self._note(Stop.INTERRUPT)

    def _quit(self) -> None:
        """End this process without waiting for anything: the main thread may be in a compiler, or in an exchange with another rank."""
        if self.world.is_main:
            warn("second Ctrl-C: ended at once, nothing was saved since the newest checkpoint; go on with --resume")
        code = INTERRUPTED
        try:
            code = reported(code, is_own=True)
            self._quitting()
        finally:
            # end the process even if the records could not be written
            os._exit(code)

    def _note(self, request: Stop, *, is_shared: bool = False) -> None:
        """Keep the strongest request, and pass it to the other ranks unless it came from them (`is_shared`)."""
        if request > self._heard:
            self._heard = request
            self._tell_delay()
            try:
                if not is_shared and self._store is not None:
                    self._store.set(_KEY, str(int(request)))
            except RuntimeError as error:
                self._store = None
                warn(f"the other ranks hear of the stop at the next step ({error})")

    def _tell_delay(self) -> None:
        if self._delay and self._heard is not Stop.NO and self.world.is_main:
            end = "" if self._is_interrupted else f"; kill -KILL {os.getpid()} ends it at once, without saving"
            warn(f"{self._heard.cause}: {self._delay}; the run is saved after it{end}")

    def _read_store(self) -> None:
        try:
            if self._store is not None and self._store.check([_KEY]):
                self._note(Stop(int(self._store.get(_KEY))), is_shared=True)
        except RuntimeError:
            # the rank that holds the store is gone; the next exchange between ranks reports that
            self._store = None

    def _has_halt(self) -> bool:
        try:
            return self.paths.halt.exists()
        except OSError as error:
            if not self._has_lost_halt:
                warn(f".HALT cannot be looked for: {error}")
            self._has_lost_halt = True
            return False

    def _dump_stacks(self) -> None:
        path = self.paths.stackdump(self.world.rank)
        try:
            with path.open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            # the message of the writing library does not show the disk's error
            if not path.stat().st_size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError as error:
            warn(f"no stack dump: {error}")


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: the number goes to the listening thread, which the signal wakes."""
