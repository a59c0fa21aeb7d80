"""The trials that PLAN.toml describes. Imports no torch.

recipe = "demo"                      # a shipped recipe, or a TOML file in the folder of the plan
baseline = "dense"                   # the arm that the others are compared with; optional
seeds = [0, 1, 2]                    # values of train.seed: initial weights differ, the data keep their order; "{seed}" in a text is the seed

[set]                                # keys of every trial
train.steps = 900

[arms.dense]                         # keys of one arm; an arm without keys is the recipe itself
model.attention = "dense"
[arms.nsa]

[grid]                               # every arm is trained with each combination of these
train.lr = [1e-3, 3e-3]
"""

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import attrs
from attrs import frozen

from nsa_bench.ablate import shipped_plans
from nsa_bench.errors import OptionError
from nsa_train.errors import ConfigError
from nsa_train.settings.config import TABLES, RunConfig, listed, structure, unstructure
from nsa_train.settings.recipe import apply_override, find_recipe, read_toml

KEYS = ("recipe", "baseline", "seeds", "set", "arms", "grid")
MOST_TRIALS = 10_000
MACHINE_KEYS = ("data.path", "data.prefetch", "data.progress_every", "data.timeout_s", "data.workers", "train.device")
"""Keys that may differ between machines: where the corpus is, how it is read, and the device."""
JOINED = ("nsa.backends",)
"""Keys whose tables are joined name by name; every other table replaces an earlier one."""
SEED = "train.seed"
"""The key that `seeds` sets."""
MOST_BYTES = 240
"""Longest name of a run's directory: file systems take 255 bytes, and files of a trial add an ending."""


class Variant(NamedTuple):
    """One line of the table: an arm at one point of the grid."""

    arm: str
    point: tuple[tuple[str, Any], ...] = ()
    """(key, value) of each key of the grid."""

    def __str__(self) -> str:
        return ", ".join((self.arm, *(f"{key.partition('.')[2]}={value}" for key, value in self.point)))


@frozen(eq=False)
class Trial:
    """One run."""

    variant: Variant
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return re.sub(r"[^\w.=+-]+", "_", f"{self.variant} seed={self.seed}")

    @property
    def settings(self) -> dict[str, Any]:
        """`table.key` -> value, as JSON has it, of the recipe's keys that differ from their defaults, without `MACHINE_KEYS`.

        A default that a later version changes is not seen.
        """
        found: dict[str, Any] = {}
        for name, values in unstructure(self.config).items():
            table = getattr(self.config, name)
            for field in attrs.fields(type(table)):
                factory = getattr(field.default, "factory", None)
                default = field.default if factory is None else factory()
                key = f"{name}.{field.name}"
                if key not in MACHINE_KEYS and field.name in values and getattr(table, field.name) != default:
                    value = values[field.name]
                    # JSON has no infinity
                    found[key] = value if not isinstance(value, float) or math.isfinite(value) else str(value)
        plain: dict[str, Any] = json.loads(json.dumps(found))
        return plain


@frozen(kw_only=True)
class Plan:
    """The trials in running order: all arms of one seed and point are neighbours, so that a plan that stops early has complete comparisons."""

    name: str
    baseline: str | None
    trials: tuple[Trial, ...]

    @property
    def variants(self) -> list[Variant]:
        """The lines of the table: the arms in the plan's order, each with its points."""
        found = list(dict.fromkeys(trial.variant for trial in self.trials))
        arms = list(dict.fromkeys(variant.arm for variant in found))
        return sorted(found, key=lambda variant: arms.index(variant.arm))


def load_plan(plan: str, overrides: Sequence[str] = ()) -> Plan:
    """Return the plan of a shipped name or a TOML file; `overrides` (`table.key=value`) replace keys of its section `set`.

    Raises:
        OptionError: with a line for each fault of the plan; a fault of one trial names the trial.
    """
    path = shipped_plans("ablate").get(plan, Path(plan))
    if not path.is_file():
        raise OptionError(
            f"PLAN={plan!r} is neither a shipped plan nor a file; use one of {listed(shipped_plans('ablate'))}, or a TOML file's path"
        )
    try:
        content = read_toml(path)
        problems = [*_problems(content)]
        if problems:
            raise OptionError.of([f"{path.name}: {problem}" for problem in problems])
        nearby = path.parent / content["recipe"]
        base = read_toml(nearby if nearby.is_file() else find_recipe(content["recipe"]))
        common: dict[str, Any] = {}
        for override in overrides:
            apply_override(common, override)
    except ConfigError as error:
        raise OptionError(str(error)) from None
    if SEED in flat_keys(common):
        raise OptionError(
            f"--set {SEED}={flat_keys(common)[SEED]!r} is not read (each trial has one of the plan's seeds); change seeds in {path.name}"
        )
    if problems := list(_unread(content, flat_keys(common), path.name)):
        raise OptionError.of(problems)
    trials = tuple(_trials(content, base, flat_keys(common), path.name))
    if problems := list(broken_names([trial.name for trial in trials])):
        raise OptionError.of([f"{path.name}: {problem}" for problem in problems])
    return Plan(name=path.stem, baseline=content.get("baseline"), trials=trials)


def broken_names(names: Sequence[str]) -> Iterator[str]:
    """Yield why `names` cannot be names of runs' directories: two runs with equal names would be one run, and a file system limits the length."""
    for name, count in Counter(names).items():
        if count > 1:
            yield (
                f"{count} runs have the directory {name!r} (each has its own, named by letters, digits and .=+-_ of the arm and the grid's "
                "values); rename an arm, or drop a value that the grid has twice"
            )
        if len(name.encode()) > MOST_BYTES:
            yield f"a run has the directory {name[:40]!r}... of {len(name.encode())} bytes (the rule: at most {MOST_BYTES}); use shorter names"


def nameless(arms: Iterable[str]) -> Iterator[str]:
    """Yield why names of arms show no arm: neither a line of the table nor a directory would name it."""
    for arm in arms:
        if not re.search(r"\w", arm):
            yield f"arms.{arm!r} names no arm (the rule: a letter or digit, for the table and for names of directories); use [arms.nsa]"


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{name} is unknown; use one of {listed(KEYS)}" for name in content if name not in KEYS)
    if not isinstance(content.get("recipe"), str):
        yield f'recipe={content.get("recipe")!r} names no recipe; use recipe = "demo"'
    seeds, arms, baseline = content.get("seeds", [0]), content.get("arms", {}), content.get("baseline")
    if not (isinstance(seeds, list) and seeds and all(isinstance(seed, int) and not isinstance(seed, bool) for seed in seeds)):
        yield f"seeds={seeds!r} is not a list of integers; use seeds = [0, 1, 2]"
    elif len(set(seeds)) < len(seeds):
        yield f"seeds={seeds!r} names a seed twice; name each once"
    if not (isinstance(arms, dict) and arms and all(isinstance(keys, dict) for keys in arms.values())):
        yield 'arms are missing; use [arms.NAME] with the keys of an arm, for instance [arms.dense] with model.attention = "dense"'
    else:
        yield from nameless(arms)
        if baseline is not None and not (isinstance(baseline, str) and baseline in arms):
            yield f"baseline={baseline!r} is none of the arms ({listed(arms)}); name one of them, or leave it away"
    tables = {name: content.get(name, {}) for name in ("set", "grid")}
    yield from (f"{name}={table!r} is not a table; use a section [{name}]" for name, table in tables.items() if not isinstance(table, dict))
    if isinstance(tables["grid"], dict):
        for key, values in flat_keys(tables["grid"]).items():
            if not (isinstance(values, list) and values):
                advice = "name one value or more, or drop the key" if values == [] else f"use [{values!r}]"
                yield f"grid.{key}={values!r} is not a list of values; {advice}"
    yield from _settings_of_seeds(content)
    yield from _replaced_by_the_grid(content)


def _replaced_by_the_grid(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield each key of `set` and of an arm that the grid sets too, so that no trial has its value."""
    arms, grid = content.get("arms"), content.get("grid", {})
    tables = {"set": content.get("set"), **({f"arms.{name}": keys for name, keys in arms.items()} if isinstance(arms, dict) else {})}
    for name, table in tables.items():
        if isinstance(table, dict) and isinstance(grid, dict):
            for key, other in overlapping(flat_keys(table), flat_keys(grid)):
                yield f"{name}.{key}={flat_keys(table)[key]!r} is not read (grid.{other} sets it in every trial); drop one of the two"


def _unread(content: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> Iterator[str]:
    """Yield each override of a key that the grid or an arm sets."""
    sections = {"grid": content.get("grid", {}), **{f"arms.{name}": keys for name, keys in content["arms"].items()}}
    for section, table in sections.items():
        for key in dict.fromkeys(key for key, _ in overlapping(overrides, flat_keys(table))):
            yield f"--set {key}={overrides[key]!r} is not read (section {section} of {source} sets it); change it there"


def _settings_of_seeds(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield each table that sets the seed of trials; it may not, because trials take their seeds from the plan."""
    arms = content.get("arms")
    tables = {name: content.get(name) for name in ("set", "grid")}
    tables |= {f"arms.{name}": keys for name, keys in arms.items()} if isinstance(arms, dict) else {}
    for name, table in tables.items():
        if isinstance(table, dict) and SEED in (keys := flat_keys(table)):
            yield f"{name}.{SEED}={keys[SEED]!r} is not read (each trial has one of the plan's seeds); use seeds = [0, 1, 2]"


def flat_keys(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return `table.key` -> value of `tables`, whether they were written as sections or as dotted keys in quotes.

    A table of JOINED gives `table.key.name` -> value, so that of a plan's tables and the recipe's none hides the other's names.
    """
    found: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, dict) and (name in TABLES or (value and name in JOINED)):
            found |= flat_keys({f"{name}.{key}": item for key, item in value.items()})
        else:
            found[name] = value
    return found


def overlapping(keys: Iterable[str], others: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs of which one key equals or holds the other, as `nsa.backends` holds `nsa.backends.win`."""
    pairs = product(sorted(keys), others)
    return [(key, other) for key, other in pairs if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")]


def _trials(content: Mapping[str, Any], base: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> Iterator[Trial]:
    common, grid = {**flat_keys(content.get("set", {})), **overrides}, flat_keys(content.get("grid", {}))
    seeds = content.get("seeds", [0])
    # counted before the points are made, which may be more than memory holds
    if (count := len(seeds) * len(content["arms"]) * math.prod(map(len, grid.values()))) > MOST_TRIALS:
        raise OptionError(f"{source}: {count:,} trials are more than {MOST_TRIALS:,}; cut the grid")
    problems = [
        f"{source}: grid.{key}={values!r} has equal values (they would be one line of the table); name each once"
        for key, values in grid.items()
        if len(set(map(_plain, values))) < len(values)
    ]
    if problems:
        raise OptionError.of(problems)
    points = [tuple(zip(grid, values, strict=True)) for values in product(*grid.values())]
    for seed in seeds:
        for point in points:
            for arm, keys in content["arms"].items():
                settings = _with_seed({**common, **flat_keys(keys), **dict(point), SEED: seed}, seed)
                variant = Variant(arm, tuple((key, _plain(value)) for key, value in point))
                yield Trial(variant, seed, _config(base, settings, f"{source}: {variant}"))


def _with_seed(value: Any, seed: int) -> Any:
    """Return the value with the seed in place of "{seed}" in its texts, so that each trial can begin with weights of its own (`train.init_from`)."""
    if isinstance(value, str):
        return value.replace("{seed}", str(seed))
    if isinstance(value, list):
        return [_with_seed(item, seed) for item in value]
    return {key: _with_seed(item, seed) for key, item in value.items()} if isinstance(value, dict) else value


def _plain(value: Any) -> int | float | str:
    """Return a value of the grid as a part of a dictionary's key."""
    return value if isinstance(value, int | float | str) else str(value)


def _config(base: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> RunConfig:
    tables = copy.deepcopy(dict(base))
    problems = []
    for name, value in settings.items():
        joined = next((one for one in JOINED if name.startswith(f"{one}.")), None)
        path, _, key = name.partition(".") if joined is None else (joined, ".", name.removeprefix(f"{joined}."))
        table: Any = tables
        for part in path.split("."):
            table = table.setdefault(part, {}) if isinstance(table, dict) else None
        if not key or not isinstance(table, dict):
            problems.append(f"{name} is not of the form table.key; use train.steps")
            continue
        table[key] = value
    if problems:
        raise OptionError.of([f"{where}: {problem}" for problem in problems])
    try:
        config = structure(tables)
        config.pattern()
    except ConfigError as error:
        raise OptionError.of([f"{where}: {line}" for line in str(error).splitlines()]) from None
    return config
