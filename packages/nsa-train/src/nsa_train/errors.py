"""The errors that end a command on purpose; each knows the exit code that the command line returns for it. Imports no torch."""

from nsa_core.errors import NSAError

INTERRUPTED = 130
"""The exit code after Ctrl-C, by the shells' custom: 128 and the number of SIGINT."""


class TrainError(Exception):
    """Base of them all: what was found (with the value), why it is refused, what to do."""

    exit_code = 1


class ConfigError(TrainError, ValueError):
    """A recipe, a `--set` or an argument breaks a rule; one line per problem."""

    exit_code = 2

    @classmethod
    def of(cls, problems: list[str]) -> "ConfigError":
        """Return one error that lists every problem, a line each."""
        return cls("\n".join(problems))


class DataError(TrainError, ValueError):
    """A file of the corpus is missing, empty, unreadable or too small; the message names it."""

    exit_code = 2


class CheckpointError(TrainError):
    """A checkpoint is incomplete or damaged: the message names file, expected and found."""


class ClaimedError(CheckpointError):
    """Another process that still runs writes to the directory of checkpoints: nothing was started there."""

    exit_code = 2


class GuardError(TrainError):
    """Training was stopped before bad numbers reached the weights; the message names step and parameter."""

    exit_code = 4


class StoppedError(TrainError):
    """The run stopped on request, at a step boundary and after saving."""


class HaltedError(StoppedError):
    """A file .HALT stopped the run."""

    exit_code = 3


class TerminatedError(StoppedError):
    """SIGTERM stopped the run."""

    exit_code = 75


class OrphanedError(TerminatedError):
    """The launcher of this rank, or of another one, ended, and the run stopped."""


class InterruptedRunError(StoppedError):
    """Ctrl-C stopped the run."""

    exit_code = INTERRUPTED


class SignalledError(KeyboardInterrupt):
    """SIGTERM or Ctrl-C ended a command that had nothing to save.

    No `Exception`: the signal may come inside a library that lets none of those through.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LostContactError(TrainError):
    """An exchange with another rank broke off: that one is gone, or has been silent for too long."""


class PeerError(TrainError):
    """Another rank failed; its own message says why."""

    def __init__(self, message: str, *, exit_code: int = TrainError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with `error`: its own, 2 where nsa-core refuses a configuration, else 1."""
    if isinstance(error, TrainError | SignalledError):
        return error.exit_code
    return ConfigError.exit_code if isinstance(error, NSAError) and error.is_refusal else TrainError.exit_code
