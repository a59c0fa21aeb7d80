"""The errors that end a command; each has the exit code that the command line returns. Imports no torch."""

from nsa_core import environment
from nsa_core.errors import NSAError

INTERRUPTED = environment.INTERRUPTED


class TrainError(Exception):
    """Base of all errors here. The message says what was found (with the value), why it is refused, and what to do."""

    exit_code = 1


class ConfigError(TrainError, ValueError):
    """Raised if a recipe, a `--set` or an argument breaks a rule; the message has one line per problem."""

    exit_code = 2

    @classmethod
    def of(cls, problems: list[str]) -> "ConfigError":
        """Return one error that lists every problem, a line each."""
        return cls("\n".join(problems))


class DataError(TrainError, ValueError):
    """Raised if a file of the corpus is missing, empty, unreadable or too small; the message names it."""

    exit_code = 2


class CheckpointError(TrainError):
    """Raised if a checkpoint is incomplete or damaged; the message names the file, the expected value and the value found."""


class ClaimedError(CheckpointError):
    """Raised if another running process writes to the directory of checkpoints; nothing was started there."""

    exit_code = 2


class GuardError(TrainError):
    """Raised if training was stopped before bad numbers reached the weights; the message names step and parameter."""

    exit_code = 4


class StoppedError(TrainError):
    """Raised if the run stopped on request, at a step boundary and after saving."""


class HaltedError(StoppedError):
    """Raised if a file .HALT stopped the run."""

    exit_code = 3


class TerminatedError(StoppedError):
    """Raised if SIGTERM stopped the run."""

    exit_code = 75


class OrphanedError(TerminatedError):
    """Raised if the launcher of this rank, or of another one, ended, so that the run stopped."""


class InterruptedRunError(StoppedError):
    """Raised if Ctrl-C stopped the run."""

    exit_code = INTERRUPTED


class SignalledError(KeyboardInterrupt):
    """Raised if SIGTERM or Ctrl-C ended a command that had nothing to save.

    It is not an `Exception`: the signal may come inside a library that catches all of those.
    """

    def __init__(self, message: str, *, exit_code: int, number: int = 0) -> None:
        """`number`: the signal, if it ends this process."""
        super().__init__(message)
        self.exit_code, self.number = exit_code, number


class LostContactError(TrainError):
    """Raised if an exchange with another rank failed: that rank is gone, or has been silent for too long."""


class PeerError(TrainError):
    """Raised if another rank failed; its own message says why."""

    def __init__(self, message: str, *, exit_code: int = TrainError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with `error`: its own, 2 if nsa-core refuses a configuration, else 1."""
    if isinstance(error, TrainError | SignalledError):
        return error.exit_code
    return ConfigError.exit_code if isinstance(error, NSAError) and error.is_refusal else TrainError.exit_code
