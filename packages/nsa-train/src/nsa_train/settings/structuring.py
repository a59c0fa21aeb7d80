"""Rules of tables that are read as JSON, by key, and every problem of a table with its path. Imports no torch."""

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from nsa_train.settings.rules import Rule

SHOWN = 80
"""Maximum characters of a value, or of an unknown key, in a message."""
LISTED = 5
"""Maximum problems in a message; the others are counted."""
MOST_LEVELS = 8
"""Maximum nesting of tables and lists where a file may hold any values."""
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring = 2, SHOWN

Fields = Mapping[str, Any]
"""Key of a table -> the Rule of its value, or the Fields of a table below it, or None: any value. No key may be missing."""


def problems_of(values: object, fields: Fields, path: str) -> list[str]:
    """Return the problems of `values` as a table of `fields`, each with its path, which begins with `path`; empty if there is none."""
    if not isinstance(values, dict):
        return [f"{path}={short(values)} is not a table".lstrip("=")]
    found: list[str] = []
    for name, expected in fields.items():
        where = f"{path}.{name}".lstrip(".")
        if name not in values:
            found.append(f"{where} is missing")
        elif isinstance(expected, Mapping):
            found += problems_of(values[name], expected, where)
        elif expected is not None and not expected.holds(values[name]):
            found.append(f"{where}={short(values[name])} is not {expected.text}")
    unknown = (short(name) for name in sorted(values.keys() - fields.keys()))
    return found + [f"{path}[{name}] is unknown" if path else f"{name} is unknown" for name in unknown]


def listed_problems(problems: list[str], *, most: int = LISTED) -> str:
    """Return `problems` for a message of one line: the first ones, at most `most`, and how many more there are."""
    more = len(problems) - most
    return "; ".join(problems[:most]) + (f"; and {more} more" if more > 0 else "")


def short(value: object) -> str:
    """Return `value` for a message: the beginning of a long value, the outer levels of a nested one."""
    text = _BRIEF.repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def text_like(pattern: str, what: str) -> Rule:
    """Return the rule of a text which `pattern` matches from end to end; `what` describes it in messages."""
    return Rule(lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None, what)


def list_of(holds: Callable[[Any], bool], what: str, *, most: int) -> Rule:
    """Return the rule of a list of at most `most` items, for each of which `holds` is true; `what` describes it in messages."""
    return Rule(lambda value: isinstance(value, list) and len(value) <= most and all(map(holds, value)), what)


def is_shallow(value: object, levels: int = MOST_LEVELS) -> bool:
    """Return whether at most `levels` tables and lists are nested in `value`; a deeper value could not be written again."""
    if not isinstance(value, dict | list):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_shallow(item, levels - 1) for item in inside)


ANY_TABLE = Rule(lambda value: isinstance(value, dict) and is_shallow(value), f"a table nested at most {MOST_LEVELS} deep")
