"""The errors that end a command; each has the exit code that the command line returns. Imports no torch."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


class BenchError(Exception):
    """Base of all errors here. The message says what was found (with the value), why it is refused, and what to do."""

    exit_code = 1


class OptionError(BenchError, ValueError):
    """An option breaks a rule; one line per problem."""

    exit_code = 2

    @classmethod
    def of(cls, problems: list[str]) -> "OptionError":
        """Return one error that lists every problem, a line each."""
        return cls("\n".join(problems))


class TrainerError(BenchError):
    """An error of nsa-train, with its message and its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def trainer_for(command: str) -> Iterator[None]:
    """Let a command use nsa-train in the block; `command` is its name in messages.

    Raises:
        OptionError: if nsa-train is not installed.
        TrainerError: if nsa-train refuses something, or fails.
    """
    if find_spec("nsa_train") is None:
        raise OptionError(
            f"{command} drives nsa-train, which is not installed (it is an extra); in a checkout: "
            "pip install ./packages/nsa-train './packages/nsa-bench[train]'"
        )
    from nsa_train.errors import TrainError

    try:
        yield
    except TrainError as error:
        raise TrainerError(str(error), error.exit_code) from error


def require_transformers(command: str) -> None:
    """Check that a command can use nsa-transformers; `command` is its name in messages.

    Raises:
        OptionError: if it is not installed.
    """
    if find_spec("nsa_transformers") is None:
        raise OptionError(
            f"{command} needs nsa-transformers, which is not installed (it is an extra); in a checkout: pip install ./packages/nsa-transformers"
        )


def require_matplotlib(png_file: Path | None) -> None:
    """Check that `png_file`, the value of `--png`, can be drawn.

    Raises:
        OptionError: if it is given and matplotlib is not installed.
    """
    if png_file is not None and find_spec("matplotlib") is None:
        raise OptionError(f"--png={str(png_file)!r} needs matplotlib, which is not installed (it is an extra); pip install matplotlib")


def require_checkpoint(name: str, path: Path) -> None:
    """Check that `path`, the value of argument `name`, is or holds a checkpoint of nsa-train, which must be installed.

    Raises:
        nsa_train.errors.ConfigError: if there is none.
    """
    from nsa_train.checkpoint.layout import require_checkpoint

    require_checkpoint(name, path)


def require_recording(path: str) -> None:
    """Check that `path`, given as `--selection recorded:PATH`, is a regular file: reading a pipe or a device might never end.

    Raises:
        OptionError: if it is none.
    """
    if not Path(path).is_file():
        found = "no regular file" if Path(path).exists() else "no such file"
        raise OptionError(f"--selection=recorded:{path} holds no recorded choices ({found}); name a JSON file of nsa-bench choices")


def shipped_recipes() -> Iterable[str]:
    """Return the names of nsa-train's recipes; no names if it is not installed."""
    if find_spec("nsa_train") is None:
        return ()
    from nsa_train.settings.recipe import shipped_recipes

    return shipped_recipes()
