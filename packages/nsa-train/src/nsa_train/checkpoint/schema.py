"""The fields of a checkpoint's manifest.json and state.json, with their types and ranges. Imports no torch."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from nsa_train.checkpoint.layout import FILES
from nsa_train.data.position import position_problems
from nsa_train.settings.config import RunConfig
from nsa_train.settings.rules import (
    ANY_TABLE,
    MOST_ROWS,
    MOST_STEPS,
    Fields,
    Rule,
    integers,
    list_of,
    numbers,
    problems_of,
    short,
    text_like,
)

SCHEMA_VERSION = 3
"""Version of all files together. Version 1 had only weights and moments; 2 had no count of the steps with watched gradients."""
MOST_BYTES = 2**63 - 1
NUM_GROUPS = 2
"""Parameter groups of a run's optimizer: parameters with weight decay, and the others."""
MOST_GROUPS = 1024
"""Maximum number of parameter groups of any optimizer."""
MOST_RATE = 1e6
MOST_LOSS = 1e300
MOST_LISTED = 1000
"""Maximum number of skipped steps, and of losses, in the state of a guard; it needs 128."""
MOST_PARAMETERS = 2**20
MOST_NAME = 1024
"""Maximum number of characters in a parameter's name."""


def _is_date(value: object) -> bool:
    try:
        # printed unescaped, so no control character may separate date and time
        return (
            isinstance(value, str) and len(value) <= 32 and value.isascii() and value.isprintable() and bool(datetime.fromisoformat(value))
        )
    except ValueError:
        return False


_LOSS = numbers(-MOST_LOSS, MOST_LOSS)
_STEP = integers(0, MOST_STEPS)
_NAMES = list_of(lambda value: isinstance(value, str) and len(value) <= MOST_NAME, "a list of names of parameters", most=MOST_PARAMETERS)

MANIFEST: Fields = {
    "schema_version": integers(SCHEMA_VERSION, SCHEMA_VERSION),
    "step": _STEP,
    "created": Rule(_is_date, "a date such as 2026-01-31T12:00:00+00:00"),
    "files": ANY_TABLE,
}
"""manifest.json without its own hash."""
FILE: Fields = {"size": integers(0, MOST_BYTES), "sha256": text_like("[0-9a-f]{64}", "a SHA-256 (64 hexadecimal digits)")}
"""An entry of its files."""
STATE: Fields = {
    "world_size": integers(1, MOST_ROWS),
    "schedule": {"lr": list_of(numbers(0, MOST_RATE).holds, "a list of learning rates, one per parameter group", most=MOST_GROUPS)},
    "scaler": None,
    "data": None,
    "routes": Rule(
        lambda value: isinstance(value, dict) and all(isinstance(name, str) for name in value.values()), "a table of operation and backend"
    ),
    "counters": ANY_TABLE,
}
"""state.json."""
SCALER: Fields = {
    "scale": numbers(1e-38, 1e38),
    "growth_factor": numbers(1, 1e6),
    "backoff_factor": numbers(1e-6, 1),
    "growth_interval": integers(1, 2**31 - 1),
    "_growth_tracker": integers(0, 2**31 - 1),
}
"""The state of a GradScaler."""
COUNTERS: dict[str, Fields] = {
    "guard": {
        "num_skipped": _STEP,
        "recent_skips": list_of(_STEP.holds, f"a list of at most {MOST_LISTED} steps", most=MOST_LISTED),
        "losses": list_of(_LOSS.holds, f"a list of at most {MOST_LISTED} losses", most=MOST_LISTED),
    },
    "watch": {"num_observed": _STEP, "longest": integers(0, 2**31 - 1), "pending": _NAMES},
    "patience": {
        "best": Rule(lambda value: value is None or _LOSS.holds(value), "a loss, or null before the first evaluation"),
        "num_worse": _STEP,
    },
}
"""Counters that every run saves; another program may add others."""


def manifest_problems(content: object) -> list[str]:
    """Return the problems of `content`, a manifest.json without its own hash."""
    found = problems_of(content, MANIFEST, "")
    if found:
        return found
    assert isinstance(content, dict)
    files = content["files"]
    if set(files) != set(FILES):
        return [f"files={short(sorted(files))} is not {', '.join(sorted(FILES))}"]
    return [problem for name, entry in files.items() for problem in problems_of(entry, FILE, f"files[{name}]")]


def state_problems(content: object, config: RunConfig) -> list[str]:
    """Return the problems of `content`, a state.json whose config.toml describes `config`; each problem names its path."""
    found = problems_of(content, STATE, "")
    if not isinstance(content, dict):
        return found
    if content.get("scaler") not in (None, {}):
        found += problems_of(content["scaler"], SCALER, "scaler")
    # empty: the program that saved it trains without the data of nsa-train
    if content.get("data", {}) != {}:
        found += position_problems(content["data"], "data", config)
    counters = content.get("counters")
    if isinstance(counters, Mapping):
        found += [
            problem
            for name, fields in COUNTERS.items()
            if name in counters
            for problem in problems_of(counters[name], fields, f"counters.{name}")
        ]
    return found


def unresumable(content: Mapping[str, Any]) -> list[str]:
    """Return the problems that keep a run from resuming from a sound state: missing parts."""
    found = [] if content["data"] else ["data={} is not a position in the data of a run"]
    return found + [f"counters.{name} is missing" for name in COUNTERS if name not in content["counters"]]
