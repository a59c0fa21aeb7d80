"""Rules of the keys of a recipe's tables, as data: a test, its noun phrase for messages, a value that passes."""

import difflib
import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import attrs
from attrs import field, frozen

from nsa_core.config import nearest_multiples
from nsa_train.errors import ConfigError

SHOWN = 80
"""Maximum characters of a value, or of an unknown key, in a message."""
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 2
# by default it cuts a list after six values, a table after four, and numbers and dates after 40 and 30 characters
_BRIEF.maxstring = _BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxset = _BRIEF.maxdict = _BRIEF.maxlong = _BRIEF.maxother = SHOWN


@frozen
class Rule:
    """The rule of a key's value: a test, the noun phrase for messages, and a value that passes."""

    holds: Callable[[Any], bool]
    text: str
    example: str
    names: tuple[str, ...] = ()
    """All valid values, if only a few names are valid."""

    def refusal(self, key: str, value: object, *, instead: object = None) -> str:
        """Return the message that refuses `value` of `key`.

        It suggests the name that is most similar to `value`. If none is similar, it suggests `instead`, such as the recipe's own value, if that
        is valid and not a bool; else the example.
        """
        is_usable = isinstance(instead, int | float | str) and not isinstance(instead, bool) and self.holds(instead)
        near = difflib.get_close_matches(str(value).lower(), self.names, n=1)
        suggested = repr(near[0]) if near else repr(instead) if is_usable else self.example
        return f"{key}={short(value)} is not {self.text}; use {suggested}"


def short(value: object) -> str:
    """Return `value` for a message: the beginning of a long value, the outer levels of a nested one."""
    text = _BRIEF.repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def shown(text: str) -> str:
    """Return `text` for a message, without quotes; a long one as `short` does."""
    return text if len(text) <= SHOWN else short(text)


MOST_STEPS = 10**9
"""Maximum number of steps, and of everything that is counted in steps."""
LONG_STEPS = 5000
"""From this number of steps on, a run is long: it must save checkpoints and, on a GPU, compute in bf16."""
MOST_ROWS = 2**16
"""Maximum rows of one micro-batch, on all processes together."""
MOST_ACCUMULATED = 2**16
"""Maximum micro-batches of a step."""
MOST_SEED = 2**63 - 1
"""The largest seed that every generator and TOML support."""
LEAST_SECONDS, MOST_SECONDS = 1e-3, 24 * 3600
"""Bounds of a wait."""


def is_number(value: object, *, at_least: float, at_most: float) -> bool:
    """Return whether `value` is an integer or a fraction in these bounds, both inclusive; nan is in none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and at_least <= value <= at_most


def integer(*, at_least: int, at_most: int, example: int, default: Any = attrs.NOTHING) -> Any:
    """Return a field that holds an integer in these bounds, both inclusive."""

    def holds(value: Any) -> bool:
        return isinstance(value, int) and is_number(value, at_least=at_least, at_most=at_most)

    return _key(Rule(holds, f"an integer from {at_least} to {at_most:,}", str(example)), default)


def number(
    *, at_least: float, at_most: float, example: float, default: Any = attrs.NOTHING, or_zero: bool = False, or_inf: bool = False
) -> Any:
    """Return a field that holds a number in these bounds, both inclusive; also 0 with `or_zero`, inf with `or_inf`, and None if `default` is None."""
    ranges = [(at_least, at_most), *([(0.0, 0.0)] if or_zero else []), *([(math.inf, math.inf)] if or_inf else [])]

    def holds(value: Any) -> bool:
        return (value is None and default is None) or any(is_number(value, at_least=low, at_most=high) for low, high in ranges)

    text = f"{'0 or ' if or_zero else ''}a number from {at_least:g} to {at_most:,}{', or inf (no limit)' if or_inf else ''}"
    return _key(Rule(holds, text, str(example)), default)


def limited(default: float, *, at_most: float, at_least: float = -math.inf) -> Any:
    """Return a field of a key that nsa-core checks: a number beyond these bounds is refused here, everything else there."""

    def holds(value: Any) -> bool:
        return not isinstance(value, int | float) or not (value < at_least or value > at_most)

    text = f"a number up to {at_most:,}" if at_least == -math.inf else f"a number from {at_least:g} to {at_most:,}"
    return _key(Rule(holds, text, str(default)), default)


def one_of(*names: str, default: Any = attrs.NOTHING) -> Any:
    """Return a field that holds one of `names`."""
    text = "one of " + ", ".join(repr(name) for name in names)
    return _key(Rule(lambda value: value in names, text, repr(names[0]), names), default)


def flag(default: bool) -> Any:
    """Return a field that holds true or false."""
    return _key(Rule(lambda value: isinstance(value, bool), "true or false", "true"), default)


def optional_text(*, example: str, is_removable: bool = False) -> Any:
    """Return a field that holds a string that is not empty, or nothing. `is_removable`: an empty string removes a recipe's value."""
    rule = Rule(lambda value: value is None or (isinstance(value, str) and bool(value)), "a non-empty string", example)
    removed = "" if is_removable else None
    return field(default=None, converter=lambda value: None if value == removed else value, metadata={"rule": rule})


def _key(rule: Rule, default: Any) -> Any:
    return field(default=default, metadata={"rule": rule})


def is_utf_8(text: str) -> bool:
    """Return whether `text` can be written as UTF-8; a name that a shell passes on may hold any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def undivided_rows(rows: int, world_sizes: Sequence[int], *, key: str = "") -> list[str]:
    """Return the problems of dividing the `rows` of a micro-batch among each of `world_sizes` processes, which `key` sets."""
    unequal = [size for size in world_sizes if rows % size]
    if not unequal:
        return []
    multiple = math.lcm(*world_sizes)
    fix = f"--set train.batch_size={nearest_multiples(rows, multiple)}" if multiple < MOST_ROWS else "fewer numbers of hosts"
    asked = f"{key}={unequal[0]}" if key else f"{unequal[0]}"
    sizes = f"; there may be {_few(world_sizes)}" if len(world_sizes) > 1 else ""
    return [f"train.batch_size={rows} does not divide among {asked} processes (each takes as many rows{sizes}); use {fix}"]


def _few(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes if len(sizes) <= 6 else [*sizes[:3], "...", sizes[-1]]))


class Table:
    """A table of a recipe. Building it checks every key at once.

    Raises:
        ConfigError: with one line per key that breaks its rule.
    """

    table: ClassVar[str]

    def __attrs_post_init__(self) -> None:
        rules = {attribute.name: attribute.metadata.get("rule") for attribute in attrs.fields(cast(Any, type(self)))}
        broken = [
            rule.refusal(f"{self.table}.{name}", getattr(self, name))
            for name, rule in rules.items()
            if rule is not None and not rule.holds(getattr(self, name))
        ]
        if problems := broken or self.broken_pairs():
            raise ConfigError.of(problems)

    def broken_pairs(self) -> list[str]:
        """Return a line for each rule between keys of this table that does not hold."""
        return []
