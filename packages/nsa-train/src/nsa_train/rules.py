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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def integer(*, at_least: int, example: int, default: Any = attrs.NOTHING) -> Any:
    """Return a field that holds an integer >= `at_least`."""

    def holds(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= at_least

    return _key(Rule(holds, f"an integer >= {at_least}", str(example)), default)


def above_zero(*, example: float, default: Any = attrs.NOTHING, or_inf: bool = False) -> Any:
    """Return a field that holds a number above 0, finite unless `or_inf`."""

    def holds(value: Any) -> bool:
        return _is_number(value) and value > 0 and (or_inf or value < float("inf"))

    return _key(Rule(holds, "a number above 0 (inf: no limit)" if or_inf else "a finite number above 0", str(example)), default)


def not_negative(*, example: float, default: Any = attrs.NOTHING) -> Any:
    """Return a field that holds a finite number >= 0."""

    def holds(value: Any) -> bool:
        return _is_number(value) and 0 <= value < float("inf")

    return _key(Rule(holds, "a finite number >= 0", str(example)), default)


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
