"""Rules that the keys of a recipe's tables obey, as data: a test, its noun phrase for messages, a value that passes."""

import difflib
from collections.abc import Callable
from typing import Any, ClassVar, cast

import attrs
from attrs import field, frozen

from nsa_train.errors import ConfigError


@frozen
class Rule:
    """What a key's value must be: a test, the noun phrase for messages, and a value that passes."""

    holds: Callable[[Any], bool]
    text: str
    example: str

    def suggestion(self, value: object) -> str:
        """Return a value to put in place of `value`."""
        return self.example


@frozen
class Choice(Rule):
    """A rule that allows a few names; it suggests the nearest."""

    names: tuple[str, ...] = ()

    def suggestion(self, value: object) -> str:
        """Return the name most like `value`, quoted."""
        return repr((difflib.get_close_matches(str(value), self.names, n=1) or self.names)[0])


MOST_STEPS = 10**9
"""Of steps and of what is counted in them."""
MOST_SEED = 2**63 - 1
"""What every generator takes, and TOML holds."""
MOST_SECONDS = 24 * 3600
"""Of a wait."""


def is_number(value: object, *, at_least: float, at_most: float) -> bool:
    """Return whether `value` is an integer or a fraction in these bounds, both inclusive; nan is in none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and at_least <= value <= at_most


def integer(*, at_least: int, at_most: int, example: int, default: Any = attrs.NOTHING) -> Any:
    """Return a field that holds an integer in these bounds, both inclusive."""

    def holds(value: Any) -> bool:
        return isinstance(value, int) and is_number(value, at_least=at_least, at_most=at_most)

    return _key(Rule(holds, f"an integer from {at_least} to {at_most:,}", str(example)), default)


def above_zero(*, at_most: float, example: float, default: Any = attrs.NOTHING, or_inf: bool = False) -> Any:
    """Return a field that holds a number above 0 and at most `at_most`, or inf with `or_inf`."""

    def holds(value: Any) -> bool:
        return (is_number(value, at_least=0, at_most=at_most) and value > 0) or (or_inf and value == float("inf"))

    text = f"a number above 0 and at most {at_most:,}"
    return _key(Rule(holds, f"{text}, or inf (no limit)" if or_inf else text, str(example)), default)


def not_negative(*, at_most: float, example: float, default: Any = attrs.NOTHING) -> Any:
    """Return a field that holds a number from 0 to `at_most`."""
    text = f"a number from 0 to {at_most:,}"
    return _key(Rule(lambda value: is_number(value, at_least=0, at_most=at_most), text, str(example)), default)


def limited(default: float, *, at_most: float) -> Any:
    """Return a field of a key that nsa-core judges: a number above `at_most` is refused here, all else there."""

    def holds(value: Any) -> bool:
        return not isinstance(value, int | float) or not value > at_most

    return _key(Rule(holds, f"a number up to {at_most:,}", str(default)), default)


def one_of(*names: str, default: Any = attrs.NOTHING) -> Any:
    """Return a field that holds one of `names`."""
    text = "one of " + ", ".join(repr(name) for name in names)
    return _key(Choice(lambda value: value in names, text, repr(names[0]), names), default)


def flag(default: bool) -> Any:
    """Return a field that holds true or false."""
    return _key(Rule(lambda value: isinstance(value, bool), "true or false", "true"), default)


def optional_text(*, example: str) -> Any:
    """Return a field that holds a string that is not empty, or nothing."""
    return _key(Rule(lambda value: value is None or (isinstance(value, str) and bool(value)), "a string", example), None)


def _key(rule: Rule, default: Any) -> Any:
    return field(default=default, metadata={"rule": rule})


def nearest_multiples(value: int, of: int) -> str:
    """Return the multiples of `of` next to `value`, 0 left out, for a message: "4 or 8"."""
    below = value // of * of
    return " or ".join(str(multiple) for multiple in (below, below + of) if multiple)


class Table:
    """A table of a recipe. Building it checks every key at once.

    Raises:
        ConfigError: with one line per key that breaks its rule.
    """

    table: ClassVar[str]

    def __attrs_post_init__(self) -> None:
        problems = self._broken_rules() or self.broken_pairs()
        if problems:
            raise ConfigError.of(problems)

    def broken_pairs(self) -> list[str]:
        """Return a line for each rule between keys of this table that does not hold."""
        return []

    def _broken_rules(self) -> list[str]:
        found = []
        for attribute in attrs.fields(cast(Any, type(self))):
            rule, value = attribute.metadata.get("rule"), getattr(self, attribute.name)
            if rule is not None and not rule.holds(value):
                key = f"{self.table}.{attribute.name}"
                found.append(f"{key}={value!r} is not {rule.text}; use {rule.suggestion(value)}")
        return found
