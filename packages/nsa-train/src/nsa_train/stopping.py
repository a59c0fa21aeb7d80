"""Requests to stop, from a signal or a file, heard on any rank and at any time; the trainer honours them between two steps.

A thread listens, so that a request is heard also while the main thread waits for data or for other ranks. Nothing that goes
wrong in it ends it: the next SIGTERM would be lost.
"""

import errno
import faulthandler
import os
import select
import signal
import threading
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any, Self

from nsa_train.errors import ConfigError, HaltedError, TerminatedError
from nsa_train.parallel.world import World
from nsa_train.run_dir import RunDirectory
from nsa_train.streams import warn

POLL_S = 0.2
"""Between two looks for .HALT, and for what other ranks heard."""
TERMINATING = (signal.SIGTERM, signal.SIGHUP)
"""What a scheduler sends, and a terminal that is closed."""
SIGNALS = (*TERMINATING, signal.SIGUSR1)
_KEY = "stop"


class Stop(IntEnum):
    """What was asked for; of several requests the largest counts. Two of the values are exit codes."""

    NO = 0
    HALT = HaltedError.exit_code
    TERMINATE = TerminatedError.exit_code

    def error(self, step: int) -> HaltedError | TerminatedError:
        """Return the error that ends a run saved after `step`."""
        advice = "go on with --resume"
        if self is Stop.HALT:
            return HaltedError(f"halted by .HALT after step {step}, which is saved; remove .HALT and {advice}")
        return TerminatedError(f"stopped by SIGTERM or SIGHUP after step {step}, which is saved; {advice}")


def refuse_stale_halt(paths: RunDirectory) -> None:
    """Let a run start where no .HALT lies in its directory.

    Raises:
        ConfigError: where one does; it would stop the run at its first step.
    """
    if paths.halt.exists():
        raise ConfigError(f"{paths.halt} is left from before (it would stop the run at once); remove it and start again")


class StopRequests:
    """SIGTERM, SIGHUP and the file .HALT, heard on any rank; SIGUSR1 writes the stacks of all threads. Use as a context manager.

    Handlers are set where the main thread enters, and put back when it leaves. A signal that is ignored stays ignored.
    """

    def __init__(self, paths: RunDirectory, world: World) -> None:
        self.paths, self.world, self._store = paths, world, world.store
        self._heard = Stop.NO
        self._has_lost_halt = False
        self._ending = threading.Event()
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        if threading.current_thread() is threading.main_thread():
            wanted = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, _leave_to_the_thread) for number in wanted}
            self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="stop-requests", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ending.set()
        os.write(self._writer, b"\0")
        assert self._thread is not None
        self._thread.join()
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def heard(self, *, look: bool = False) -> Stop:
        """Return what this rank knows of; `look`: see whether .HALT is there at this moment."""
        if look and self._has_halt():
            self._note(Stop.HALT)
        return self._heard

    def _listen(self) -> None:
        while not self._ending.is_set():
            readable, _, _ = select.select([self._reader], [], [], POLL_S)
            for number in os.read(self._reader, 64) if readable else b"":
                if number in TERMINATING:
                    self._note(Stop.TERMINATE)
                elif number == signal.SIGUSR1:
                    self._dump_stacks()
            if not self._ending.is_set():
                self.heard(look=True)
                self._read_store()

    def _note(self, request: Stop) -> None:
        if request > self._heard:
            self._heard = request
            self._share(request)

    def _share(self, request: Stop) -> None:
        try:
            if self._store is not None:
                self._store.set(_KEY, str(int(request)))
        except RuntimeError as error:
            self._store = None
            warn(f"the other ranks hear of the stop at the next step ({error})")

    def _read_store(self) -> None:
        try:
            if self._store is not None and self._store.check([_KEY]):
                self._heard = max(self._heard, Stop(int(self._store.get(_KEY))))
        except RuntimeError:
            # the rank that keeps the store is gone: the next exchange says so
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
            # it does not say what a disk refuses
            if not path.stat().st_size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError as error:
            warn(f"no stack dump: {error}")


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: the number goes to the listening thread, which the signal wakes."""
