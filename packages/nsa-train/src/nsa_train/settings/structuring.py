"""Compare tables that were read as JSON with the attrs classes that describe them, and list every problem with its path."""

import re
import reprlib
from collections.abc import Callable
from typing import Any, cast

import attrs

from nsa_train.settings.rules import Rule, integer, is_number

SHOWN = 80
"""Maximum characters of a value, or of an unknown key, in a message."""
LISTED = 5
"""Maximum problems in a message; the others are counted."""
MOST_LEVELS = 8
"""Maximum nesting of tables and lists where a file may hold any values."""
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring = 2, SHOWN


def problems_of(values: object, kind: type, path: str) -> list[str]:
    """Return the problems of `values` as a `kind`, each with its path, which begins with `path`; empty if there is none."""
    if not isinstance(values, dict):
        return [f"{path}={short(values)} is not a table".lstrip("=")]
    found: list[str] = []
    fields = attrs.fields_dict(cast(Any, kind))
    for name, field in fields.items():
        where, rule = f"{path}.{name}".lstrip("."), field.metadata.get("rule")
        if name not in values:
            found.append(f"{where} is missing")
        elif attrs.has(cast(Any, field.type)):
            found += problems_of(values[name], cast(Any, field.type), where)
        elif rule is not None and not rule.holds(values[name]):
            found.append(f"{where}={short(values[name])} is not {rule.text}")
    unknown = (short(name) for name in sorted(values.keys() - fields))
    return found + [f"{path}[{name}] is unknown" if path else f"{name} is unknown" for name in unknown]


def listed_problems(problems: list[str], *, most: int = LISTED) -> str:
    """Return `problems` for a message of one line: the first ones, at most `most`, and how many more there are."""
    more = len(problems) - most
    return "; ".join(problems[:most]) + (f"; and {more} more" if more > 0 else "")


def short(value: object) -> str:
    """Return `value` for a message: the beginning of a long value, the outer levels of a nested one."""
    text = _BRIEF.repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def count(most: int) -> Any:
    """Return a field that holds an integer from 0 to `most`."""
    return integer(at_least=0, at_most=most, example=0)


def text_like(pattern: str, what: str) -> Any:
    """Return a field that holds a text which `pattern` matches from end to end."""
    return ruled(lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None, what)


def list_of(holds: Callable[[Any], bool], what: str, *, most: int) -> Any:
    """Return a field that holds a list of at most `most` items, for each of which `holds` is true."""
    return ruled(lambda value: isinstance(value, list) and len(value) <= most and all(map(holds, value)), what)


def is_count(value: object, *, most: int) -> bool:
    """Return whether `value` is an integer from 0 to `most`."""
    return isinstance(value, int) and is_number(value, at_least=0, at_most=most)


def anything() -> Any:
    """Return a field that holds a table of any values, nested at most 8 deep."""
    return ruled(lambda value: isinstance(value, dict) and is_shallow(value), f"a table nested at most {MOST_LEVELS} deep")


def is_shallow(value: object, levels: int = MOST_LEVELS) -> bool:
    """Return whether at most `levels` tables and lists are nested in `value`; a deeper value could not be written again."""
    if not isinstance(value, dict | list):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_shallow(item, levels - 1) for item in inside)


def ruled(holds: Callable[[Any], bool], what: str) -> Any:
    """Return a field whose value passes `holds`; `what` is the noun phrase for messages."""
    return attrs.field(metadata={"rule": Rule(holds, what, "")})
