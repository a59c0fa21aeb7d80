"""The fields of a checkpoint's manifest.json and state.json, with their types and ranges. Imports no torch."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from attrs import frozen

from nsa_train.checkpoint.layout import FILES
from nsa_train.data.position import position_problems
from nsa_train.settings.config import RunConfig
from nsa_train.settings.rules import MOST_ROWS, MOST_STEPS, integer, is_number, number, short
from nsa_train.settings.structuring import anything, count, is_count, list_of, problems_of, ruled, text_like

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
"""Maximum number of skipped steps, and of losses, in the state of a guard. The guard itself keeps at most 128."""
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


def _is_loss(value: object) -> bool:
    return is_number(value, at_least=-MOST_LOSS, at_most=MOST_LOSS)


def _is_step(value: object) -> bool:
    return is_count(value, most=MOST_STEPS)


@frozen(kw_only=True)
class Manifest:
    """manifest.json without its own hash."""

    schema_version: int = integer(at_least=SCHEMA_VERSION, at_most=SCHEMA_VERSION, example=SCHEMA_VERSION)
    step: int = count(MOST_STEPS)
    created: str = ruled(_is_date, "a date such as 2026-01-31T12:00:00+00:00")
    files: dict[str, Any] = anything()


@frozen(kw_only=True)
class _File:
    size: int = count(MOST_BYTES)
    sha256: str = text_like("[0-9a-f]{64}", "a SHA-256 (64 hexadecimal digits)")


@frozen(kw_only=True)
class _Schedule:
    lr: list[float] = list_of(
        lambda value: is_number(value, at_least=0, at_most=MOST_RATE), "a list of learning rates, one per parameter group", most=MOST_GROUPS
    )


@frozen(kw_only=True)
class _Scaler:
    """The state of a GradScaler."""

    scale: float = number(at_least=1e-38, at_most=1e38, example=65536)
    growth_factor: float = number(at_least=1, at_most=1e6, example=2)
    backoff_factor: float = number(at_least=1e-6, at_most=1, example=0.5)
    growth_interval: int = integer(at_least=1, at_most=2**31 - 1, example=2000)
    _growth_tracker: int = count(2**31 - 1)


@frozen(kw_only=True)
class _State:
    """state.json."""

    world_size: int = integer(at_least=1, at_most=MOST_ROWS, example=1)
    schedule: _Schedule
    scaler: Any
    data: Any
    routes: dict[str, str] = ruled(
        lambda value: isinstance(value, dict) and all(isinstance(name, str) for name in value.values()),
        "a table of operation and backend",
    )
    counters: dict[str, Any] = anything()


@frozen(kw_only=True)
class _Guard:
    num_skipped: int = count(MOST_STEPS)
    recent_skips: list[int] = list_of(_is_step, f"a list of at most {MOST_LISTED} steps", most=MOST_LISTED)
    losses: list[float] = list_of(_is_loss, f"a list of at most {MOST_LISTED} losses", most=MOST_LISTED)


@frozen(kw_only=True)
class _Watch:
    num_observed: int = count(MOST_STEPS)
    longest: int = count(2**31 - 1)
    pending: list[str] = list_of(
        lambda value: isinstance(value, str) and len(value) <= MOST_NAME, "a list of names of parameters", most=MOST_PARAMETERS
    )


@frozen(kw_only=True)
class _Patience:
    best: float | None = ruled(lambda value: value is None or _is_loss(value), "a loss, or null before the first evaluation")
    num_worse: int = count(MOST_STEPS)


COUNTERS: dict[str, type] = {"guard": _Guard, "watch": _Watch, "patience": _Patience}
"""Counters that every run saves; another program may add others."""


def manifest_problems(content: object) -> list[str]:
    """Return the problems of `content`, a manifest.json without its own hash."""
    found = problems_of(content, Manifest, "")
    if found:
        return found
    assert isinstance(content, dict)
    files = content["files"]
    if set(files) != set(FILES):
        return [f"files={short(sorted(files))} is not {', '.join(sorted(FILES))}"]
    return [problem for name, entry in files.items() for problem in problems_of(entry, _File, f"files[{name}]")]


def state_problems(content: object, config: RunConfig) -> list[str]:
    """Return the problems of `content`, a state.json whose config.toml describes `config`; each problem names its path."""
    found = problems_of(content, _State, "")
    if not isinstance(content, dict):
        return found
    if content.get("scaler") not in (None, {}):
        found += problems_of(content["scaler"], _Scaler, "scaler")
    # empty: the program that saved it trains without the data of nsa-train
    if content.get("data", {}) != {}:
        found += position_problems(content["data"], "data", config)
    counters = content.get("counters")
    if isinstance(counters, Mapping):
        found += [
            problem
            for name, kind in COUNTERS.items()
            if name in counters
            for problem in problems_of(counters[name], kind, f"counters.{name}")
        ]
    return found


def unresumable(content: Mapping[str, Any]) -> list[str]:
    """Return the problems that keep a run from resuming from a sound state: missing parts."""
    found = [] if content["data"] else ["data={} is not a position in the data of a run"]
    return found + [f"counters.{name} is missing" for name in COUNTERS if name not in content["counters"]]
