"""The options of `nsa-train eval`, which are checked before a model is opened, and its figures. Imports no torch."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from attrs import frozen

from nsa_train.errors import ConfigError
from nsa_train.files import MOST_RECORDS, open_regular
from nsa_train.settings.config import listed
from nsa_train.settings.rules import MOST_SEED

MOST_LENGTH = 2**24
"""Largest sequence length, in tokens, that the options accept."""
MOST_COUNT = 100_000
"""Maximum number of samples of a cell, of depths, and of pairs."""


class Mode(StrEnum):
    """How the selected branch computes for the rows that are evaluated."""

    TRAINED = "trained"
    """The model as it is."""
    CLOSED = "closed"
    """The selected branch's gates are 0. Exception: with a softmax gate over cmp and slc alone, the first l - 1 rows keep slc, their only branch."""
    SHUFFLED = "shuffled"
    """The free blocks are drawn at random among those that are not forced; the forced ones stay."""
    DENSE = "dense"
    """It reads every block."""


class TaskName(StrEnum):
    """The tasks of an evaluation, in the order in which they run."""

    LOSS_BY_POSITION = "loss-by-position"
    LOSS_BY_LAYER = "loss-by-layer"
    PASSKEY = "passkey"
    MQAR = "mqar"
    COPY = "copy"
    BLOCK_RECALL = "block-recall"


class Figure(NamedTuple):
    """One figure with its coordinates; a coordinate that its task does not have is None."""

    task: str
    mode: str | None
    measure: str
    """"loss" (nats per token), "right" (a share), "recall" (a share of attention mass), ..."""
    value: float
    samples: int
    """Number of tokens, answers or queries in the mean `value`."""
    length: int | None = None
    """Tokens of a sequence, question and answer included."""
    depth: float | None = None
    """Relative position of a pass key: 0 is the first position, 1 the last."""
    first: int | None = None
    """The first position of a bucket, counted from 0."""
    last: int | None = None
    """The last position of a bucket, inclusive."""
    layer: int | None = None
    """The layer; of loss-by-layer the only one in `mode`, and None if all are."""
    group: int | None = None
    """The KV head."""


@frozen(kw_only=True)
class EvalOptions:
    """The sizes of an evaluation; `of` checks them."""

    tasks: tuple[TaskName, ...] = ()
    """The tasks; empty: all that the model can do."""
    modes: tuple[Mode, ...] = ()
    """The modes; empty: all that the model has."""
    texts: tuple[Path, ...] = ()
    """Documents of loss-by-position, loss-by-layer and block-recall, one per file; empty: the held-out rows of the run."""
    lengths: tuple[int, ...] = ()
    """Tokens of a sequence of passkey, mqar and copy; empty: half of the model's positions, and all of them."""
    depths: int = 5
    """Depths of passkey, spread evenly over a sequence."""
    samples: int = 20
    """Number of sequences of each cell; also the maximum number of held-out sequences of block-recall. loss-by-layer takes whole batches until it has
    as many."""
    symbols: int | None = None
    """Ids of each alphabet of passkey and mqar on plain ids. None: as in the run's training data; if these were not plain ids, 64, or a third
    of the tokenizer's ids if that is less."""
    pairs: int | None = None
    """Pairs of a sequence of mqar; None: as many as in the run's training data, or 8 if it was not trained on pairs."""
    seed: int = 1
    """Seed of sequences and shuffled choices; no training row is drawn from it."""

    @classmethod
    def of(
        cls, *, tasks: str | None, modes: Sequence[str], lengths: str | None, texts: Sequence[Path], **numbers: int | None
    ) -> "EvalOptions":
        """Return the options of a command line; `tasks` and `lengths` are separated by commas.

        Raises:
            ConfigError: with a line for each option that breaks its rule.
        """
        problems = [
            *_unknown("--tasks", _split(tasks), TaskName),
            *_unknown("--mode", modes, Mode),
            *_broken_lengths(_split(lengths)),
            *_broken_numbers(numbers),
            *_unreadable(texts),
        ]
        if problems:
            raise ConfigError.of(problems)
        asked = _split(tasks)
        return cls(
            tasks=tuple(task for task in TaskName if task in asked),
            modes=tuple(mode for mode in Mode if mode in modes),
            lengths=tuple(sorted({int(length) for length in _split(lengths)})),
            texts=tuple(texts),
            **{name: value for name, value in numbers.items() if value is not None},
        )


def unreadable(path: Path, error: Exception) -> str:
    """Return the message for a text that cannot be read."""
    return f"--text={str(path)!r} cannot be read ({error}); name a UTF-8 text file"


def _unreadable(texts: Sequence[Path]) -> Iterator[str]:
    for path in texts:
        try:
            with open_regular(path, MOST_RECORDS):
                pass
        except (OSError, ValueError) as error:
            yield unreadable(path, error)


def _split(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",")]


def _unknown(option: str, names: Sequence[str], known: type[StrEnum]) -> list[str]:
    wrong = [name for name in names if name not in tuple(known)]
    return [f"{option}={name!r} is none of those that exist; use some of {listed(known)}" for name in wrong]


def _broken_lengths(lengths: Sequence[str]) -> list[str]:
    wrong = [text for text in lengths if not (text.isascii() and text.isdigit() and 2 <= int(text[:12]) <= MOST_LENGTH)]
    return [f"--lengths={text!r} is no number of tokens from 2 to {MOST_LENGTH:,}; use --lengths 1024,2048" for text in wrong]


def _broken_numbers(numbers: dict[str, int | None]) -> list[str]:
    bounds = {"seed": (0, MOST_SEED, 1), "symbols": (2, 2**16, 32), "pairs": (1, MOST_COUNT, 8)}
    found = []
    for name, value in numbers.items():
        least, most, example = bounds.get(name, (1, MOST_COUNT, 5))
        if value is not None and not least <= value <= most:
            found.append(f"--{name}={value} is not a whole number from {least} to {most:,}; use {example}")
    return found
