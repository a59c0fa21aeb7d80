"""Compare tables that were read as JSON with the attrs classes that describe them, and list every problem with its path."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, override

from nsa_train.settings.rules import Rule, integer, is_number, short

LISTED = 5
"""Maximum problems in a message; the others are counted."""
MOST_LEVELS = 8
"""Maximum nesting of tables and lists where a file may hold any values."""


class _RefusedError(ValueError):
    """A table or a rule refuses a value; the arguments are the value and a description of valid ones."""


def problems_of(values: object, kind: type, path: str) -> list[str]:
    """Return the problems of `values` as a `kind`, each with its path, which begins with `path`; empty if there is none."""
    try:
        _converter().structure(values, kind)
    except (cattrs.ClassValidationError, _RefusedError) as error:
        return list(_problems(error, path))
    return []


def listed_problems(problems: list[str], *, most: int = LISTED) -> str:
    """Return `problems` for a message of one line: the first ones, at most `most`, and how many more there are."""
    more = len(problems) - most
    return "; ".join(problems[:most]) + (f"; and {more} more" if more > 0 else "")


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


def uncasting_converter(**options: Any) -> cattrs.Converter:
    """Return a converter without silent casts, so that the rule of a field checks the value as it was read."""
    converter = cattrs.Converter(**options)
    converter.register_structure_hook_func(lambda kind: not attrs.has(kind), lambda value, _: value)
    for kind in (int, float, str, bool):
        converter.register_structure_hook(kind, lambda value, _: value)
    return converter


@cache
def _converter() -> cattrs.Converter:
    converter = uncasting_converter()
    converter.register_structure_hook_factory(attrs.has, lambda kind: _of_table(kind, converter))
    return converter


def _of_table(kind: type, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    rules = {field.name: field.metadata["rule"] for field in attrs.fields(cast(Any, kind)) if "rule" in field.metadata}
    judges: dict[str, Any] = {name: override(struct_hook=_judge(rule)) for name, rule in rules.items()}
    structure: Callable[[Any, Any], Any] = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True, **judges)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise _RefusedError(value, "a table")
        return structure(value, kind)

    return hook


def _judge(rule: Rule) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        if not rule.holds(value):
            raise _RefusedError(value, rule.text)
        return value

    return hook


def _problems(error: BaseException, path: str) -> Iterator[str]:
    """Yield the message of `error` about the value at `path`, and those of its inner errors about the fields below."""
    if isinstance(error, cattrs.ClassValidationError):
        inner, own = error.group_exceptions()
        for below, note in inner:
            yield from _problems(below, f"{path}.{note.name}".lstrip("."))
        for one in own:
            yield from _problems(one, path)
    elif isinstance(error, cattrs.ForbiddenExtraKeysError):
        yield from (f"{path}[{short(name)}] is unknown" if path else f"{short(name)} is unknown" for name in sorted(error.extra_fields))
    elif isinstance(error, KeyError):
        yield f"{path} is missing"
    else:
        value, expected = error.args
        yield f"{path}={short(value)} is not {expected}".lstrip("=")
