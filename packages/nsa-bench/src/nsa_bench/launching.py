"""Environment and signals for runs of nsa-train in child processes, which end if this process ends. Imports no torch."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from nsa_train.lifecycle.outcomes import STARTER, handled


def environment_of_run(**variables: str) -> dict[str, str]:
    """Return the environment of a run that saves and ends if this process ends, with `variables` added."""
    return {**os.environ, STARTER: str(os.getpid()), **variables}  # noqa: TID251 - a process inherits it


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt in the block, as Ctrl-C does."""
    with handled(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)):
        yield
