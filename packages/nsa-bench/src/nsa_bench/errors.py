"""The errors that end a command on purpose; each knows the exit code that the command line returns for it. Imports no torch."""


class BenchError(Exception):
    """Base of them all: what was found (with the value), why it is refused, what to do."""

    exit_code = 1


class OptionError(BenchError, ValueError):
    """An option breaks a rule; one line per problem."""

    exit_code = 2

    @classmethod
    def of(cls, problems: list[str]) -> "OptionError":
        """Return one error that lists every problem, a line each."""
        return cls("\n".join(problems))
