"""Load a `RunConfig` from a recipe's name or path and `--set` overrides, and write it as TOML text."""

import copy
import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli_w

from nsa_train.errors import ConfigError
from nsa_train.files import MOST_RECIPE, as_text, read_regular
from nsa_train.settings.config import RunConfig, keys_like, listed, refusal, structure, unstructure
from nsa_train.settings.rules import SHOWN, is_utf_8, short, shown

MOST_PARTS = 8
"""Maximum parts in the key of a --set; the longest key of a recipe has three."""


def shipped_recipes() -> dict[str, Path]:
    """Return name -> path of the recipes that come with the package."""
    folder = Path(str(files("nsa_train") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_config(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of `recipe` (a shipped name or a TOML path) with `overrides` (`table.key=value`).

    Raises:
        ConfigError: with one line per problem. `model.decoder.vocab_size_of`, which needs torch, checks the size of the vocabulary.
    """
    tables = read_toml(find_recipe(recipe))
    own = copy.deepcopy(tables)
    for override in overrides:
        apply_override(tables, override)
    try:
        config = structure(tables)
        config.pattern()
    except ConfigError as error:
        raise ConfigError.of(_advised(str(error).splitlines(), tables, own, overrides)) from None
    if (size := len(to_toml(config).encode())) > MOST_RECIPE:
        raise ConfigError(
            f"RECIPE={recipe!r}: with its overrides it takes {size:,} bytes (config.toml holds {MOST_RECIPE:,}); name files by a glob"
        )
    return config


def find_recipe(recipe: str) -> Path:
    """Return the path of a shipped recipe or of a TOML file.

    Raises:
        ConfigError: if there is no such recipe or file.
    """
    shipped, path = shipped_recipes(), Path(recipe)
    if recipe in shipped:
        return shipped[recipe]
    with suppress(OSError):
        # a name may be too long for the system
        if path.exists():
            return path
    near = difflib.get_close_matches(recipe, shipped, n=1)
    advice = f"did you mean {near[0]}?" if near else f"use one of {listed(shipped)}, or the path of a TOML file"
    raise ConfigError(f"RECIPE={short(recipe)} is neither a shipped recipe nor a file; {advice}")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of the TOML file `path`.

    Raises:
        ConfigError: if it cannot be read as UTF-8 TOML; the message names path and line.
    """
    try:
        return parse_toml(read_regular(path, MOST_RECIPE))
    # not regular, not UTF-8, or not TOML
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML ({error}); fix the file or use a shipped recipe") from None


def parse_toml(content: bytes) -> dict[str, Any]:
    """Return the tables of a UTF-8 TOML text.

    Raises:
        ValueError: if it is not TOML, or nests keys or values more than 8 deep.
    """
    from nsa_core.serialization import toml_tables

    # some editors begin a file with a byte order mark
    return toml_tables(as_text(content, "utf-8-sig"))


def settled(overrides: Sequence[str], *, say: Callable[[str], None], option: str = "--set") -> list[str]:
    """Return `overrides`, the values of `option`, with only the last one of each key; report keys with several."""
    last: dict[str, str] = {}
    counts = Counter(map(_key_of, overrides))
    for override in overrides:
        # a key gets the position of its last override
        last.pop(_key_of(override), None)
        last[_key_of(override)] = override
    for key, count in counts.items():
        if count > 1:
            say(f"{option} {shown(key)} is given {count} times; the last one counts: {shown(last[key].strip())}")
    return list(last.values())


def apply_override(tables: dict[str, Any], override: str) -> None:
    """Put `table.key=value` into `tables`; the value is TOML, and a bare word is a string.

    Raises:
        ConfigError: if it does not have that form, is not UTF-8, or is more than a recipe holds.
    """
    if not is_utf_8(override):
        raise ConfigError(f"--set {short(override)} is not UTF-8 (config.toml could not hold it); rename the file, or use a glob")
    if (size := len(override.encode())) > MOST_RECIPE:
        raise ConfigError(f"--set {short(override)} takes {size:,} bytes (config.toml holds {MOST_RECIPE:,}); name files by a glob")
    key, equals, text = override.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not 2 <= len(names) <= MOST_PARTS or not all(names):
        near = keys_like(names[-1]) if len(names) <= MOST_PARTS else []
        value = text.strip() if 0 < len(text.strip()) <= SHOWN else "VALUE"
        advice = f"did you mean --set {near[0]}={value}?" if near else "use --set train.steps=100"
        raise ConfigError(f"--set {short(override)} is not of the form table.key=value; {advice}")
    table = tables
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {short(override)}: {name} is a value, not a table of keys; use --set train.steps=100")
    try:
        table[names[-1]] = parse_value(text.strip())
    except ValueError as error:
        raise ConfigError(f"--set {short(override)} holds {error}; use fewer brackets and digits") from None


def parse_value(text: str) -> Any:
    """Return the TOML value in `text`, or `text` itself if it is not TOML.

    Raises:
        ValueError: if it is an integer of too many digits, or a list or table that holds one or nests more than 8 deep.
    """
    try:
        parsed = parse_toml(f"value = {text}".encode())
    except tomllib.TOMLDecodeError:
        return text
    except ValueError:
        if text.startswith(("[", "{")) or re.fullmatch(r"[+-]?[0-9]\w*", text):
            raise
        return text
    return parsed["value"] if len(parsed) == 1 else text


def to_toml(config: RunConfig) -> str:
    """Return `config` as TOML that `load_config` reads back equal."""
    # an empty table is the key's default
    return tomli_w.dumps({name: {key: value for key, value in table.items() if value != {}} for name, table in unstructure(config).items()})


def _advised(problems: Sequence[str], tables: Mapping[str, Any], own: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return `problems` of `tables`; the advice for a key of `overrides` is its value in `own`, the recipe without overrides."""
    advice = {}
    for table, _, name in (_key_of(override).partition(".") for override in overrides):
        values, before = tables.get(table), own.get(table)
        if isinstance(values, Mapping) and name in values:
            known = before.get(name) if isinstance(before, Mapping) else None
            said, better = refusal(problems, f"{table}.{name}", values[name], known)
            advice[said] = better
    return [advice.get(line, line) for line in problems]


def _key_of(override: str) -> str:
    return ".".join(name.strip() for name in override.partition("=")[0].split("."))
