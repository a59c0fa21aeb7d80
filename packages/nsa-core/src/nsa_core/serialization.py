"""Convert configurations to and from plain dicts and TOML. An unknown key raises an error that suggests a known one."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

import attrs
import cattrs
from cattrs.gen import make_dict_unstructure_fn

from nsa_core.config import BlockGeometry, NSAConfig, RopeScaling, scaling_fields
from nsa_core.errors import ConfigError, NSAError

MOST_NESTED = 8
"""Maximum number of parts of a dotted key, and maximum depth of nested values; a configuration needs three of each."""
_STRINGS_AND_COMMENTS = re.compile(
    r"""
      \"{3} (?: \\. | [^\\] )*? (?: \"{3} | \\?\Z )
    | '{3} .*? (?: '{3} | \Z )
    | " (?: \\. | [^"\\\n] )* "?
    | ' [^'\n]* '?
    | \# [^\n]*
    """,
    re.DOTALL | re.VERBOSE,
)
"""Matches strings and comments of TOML. An unclosed string ends with the text; tomllib then refuses it."""
_LONG_KEY = re.compile(rf"(?:\.[ \t]*[\w-]+[ \t]*){{{MOST_NESTED}}}")
_LONG_NUMBER = re.compile(r"\b0[box][0-9a-fA-F_]{65}")
_LONG_INTEGER = re.compile(r"(?<![\w.])[0-9][0-9_]{4000,}(?![\w.])")
"""Matches integers of more than 4,000 digits: Python refuses those of more than 4,300, with advice that is not about TOML."""


def config_to_dict(config: NSAConfig) -> dict[str, Any]:
    """Return `config` as nested dicts, lists, strings and numbers; None is left out (TOML has no null)."""
    return _converter().unstructure(config)  # type: ignore[no-any-return]


def config_from_dict(values: Mapping[str, Any]) -> NSAConfig:
    """Return the config that `values` describe; the inverse of `config_to_dict`. `rope_scaling` may use Hugging Face's keys.

    Raises:
        ConfigError: for a missing or unknown key (with a suggestion), a wrong type, or a value that breaks a rule.
    """
    values = _by_field_names(values)
    _refuse_unknown(NSAConfig, values, "")
    try:
        return _converter().structure(values, NSAConfig)
    except cattrs.BaseValidationError as error:
        raise _first_reason(error) from None


def config_to_toml(config: NSAConfig) -> str:
    """Return `config` as a TOML document."""
    import tomli_w

    return tomli_w.dumps(config_to_dict(config))


def config_from_toml(text: str) -> NSAConfig:
    """Return the config that a TOML document describes.

    Raises:
        ConfigError: if the text is not TOML, or a key or value is refused.
    """
    try:
        values = toml_tables(text)
    except ValueError as error:
        raise ConfigError(f"the text is no TOML ({error}); write key = value lines") from None
    return config_from_dict(values)


def toml_tables(text: str) -> dict[str, Any]:
    """Return the tables of a TOML document, in time proportional to its length. Keys and values may be nested at most 8 deep.

    Raises:
        ValueError: if the text is nested deeper, has an integer of too many digits (4,000; hexadecimal, octal, binary: 64), or is not TOML.
    """
    _refuse_nesting(text)
    return tomllib.loads(text)


def _refuse_nesting(text: str) -> None:
    """Raise ValueError for texts that tomllib would parse too slowly: it recurses into values, and takes time quadratic in the parts of a key."""
    # strings and comments are removed, because dots and brackets in them do not count; line ends stay for the line numbers
    bare = _STRINGS_AND_COMMENTS.sub(lambda found: "" if found[0][0] == "#" else "s" + "\n" * found[0].count("\n"), text)
    if found := _LONG_KEY.search(bare):
        raise ValueError(f"a key of more than {MOST_NESTED} parts at line {_line_of(found, bare)}")
    if found := _LONG_NUMBER.search(bare):
        raise ValueError(f"a number of more than 64 digits at line {_line_of(found, bare)}")
    if found := _LONG_INTEGER.search(bare):
        raise ValueError(f"an integer of more than 4,000 digits at line {_line_of(found, bare)}")
    depth = 0
    for found in re.finditer(r"[\[\]{}]", bare):
        depth = depth + 1 if found[0] in "[{" else max(0, depth - 1)
        if depth > MOST_NESTED:
            raise ValueError(f"values nested more than {MOST_NESTED} deep at line {_line_of(found, bare)}")


def _line_of(found: re.Match[str], text: str) -> int:
    return text.count("\n", 0, found.start()) + 1


@cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    # innermost class first: the hook of a class uses the hooks of its fields
    for cls in (BlockGeometry, RopeScaling, NSAConfig):
        converter.register_unstructure_hook(cls, _without_none(make_dict_unstructure_fn(cls, converter)))
    # the config itself checks values and names field and rule; cattrs would turn "3" into 3
    converter.register_structure_hook_func(lambda annotation: _attrs_class(annotation) is None, lambda value, _: value)
    for scalar in (int, float, str):
        converter.register_structure_hook(scalar, lambda value, _: value)
    return converter


def _without_none(unstructure: Any) -> Any:
    def dump(instance: Any) -> dict[str, Any]:
        values = {key: value for key, value in unstructure(instance).items() if value is not None}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    return dump


def _by_field_names(values: Any) -> Any:
    """Return `values` with the keys of `rope_scaling` renamed to the fields of `RopeScaling`; anything but a table is returned unchanged."""
    scaling = values.get("rope_scaling") if isinstance(values, Mapping) else None
    return {**values, "rope_scaling": scaling_fields(scaling)} if isinstance(scaling, Mapping) else values


def _refuse_unknown(cls: type, values: object, path: str) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path.rstrip('.') or 'the config'}={values!r} is no table (keys and values are expected); use {{...}}")
    fields = {field.name: field for field in attrs.fields(cls)}
    for key, value in values.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, 1)
            use = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(fields)}"
            raise ConfigError(f"unknown key {path}{key} (the keys of {cls.__name__} are fixed); {use}")
        nested = _attrs_class(fields[key].type)
        if nested is not None and not (value is None and type(None) in get_args(fields[key].type)):
            _refuse_unknown(nested, value, f"{path}{key}.")
    missing = [name for name, field in fields.items() if field.default is attrs.NOTHING and name not in values]
    if missing:
        raise ConfigError(f"missing key {path}{missing[0]} ({cls.__name__} has no default for it); give it")


def _attrs_class(annotation: Any) -> type | None:
    options = get_args(annotation) or (annotation,)
    return next((option for option in options if isinstance(option, type) and attrs.has(option)), None)


def _first_reason(error: BaseException) -> ConfigError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, NSAError):
        return ConfigError(str(error))
    return ConfigError(f"the config cannot be read ({type(error).__name__}: {error}); see NSAConfig for its keys and types")


def toml_value(value: object) -> str:
    """Return `value` as TOML on one line; tomli-w would write a list on several lines."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(_toml_line(key, item) for key, item in value.items()) + "}"
    return _toml_line("value", value).removeprefix("value = ")


def _toml_line(key: str, value: object) -> str:
    """Return `key = value` on one line."""
    import tomli_w

    if isinstance(value, list | tuple | Mapping):
        return tomli_w.dumps({key: 0}).removesuffix("0\n") + toml_value(value)
    return tomli_w.dumps({key: value}).removesuffix("\n")
