"""`nsa-bench thresholds`: find the length from which a kernel is 1.2 times as fast as the reference, or 1.05 times as fast as another kernel.

A threshold is the shortest measured length from which the ratio holds at every longer measured length. Wrong results get no time, so
they never set a threshold. Two backends are compared at the lengths at which both were timed. A much slower backend is not timed at longer
lengths (`GIVE_UP`). A backend with no other backend left to compare is not timed either.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import groupby, permutations, product
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import attrs
import torch
from attrs import frozen
from rich.table import Table
from rich.text import Text

from nsa_bench.attention.run import run_jobs
from nsa_bench.cases import (
    OURS,
    Case,
    HeadShape,
    dtype_of,
    find_device,
    geometry_text,
    given,
    parse_geometry,
    parse_lengths,
    parse_names,
    parse_shapes,
)
from nsa_bench.errors import OptionError
from nsa_bench.measurement import Direction, Job, Measurement, Setup, common_columns, to_row
from nsa_bench.options import ThresholdOptions
from nsa_bench.reporting import progress_line
from nsa_bench.results import Output, number, to_json, write_whole
from nsa_bench.routes import RouteRecorder, reasons_against, request_of
from nsa_core import Operation
from nsa_core.backends.thresholds import FORMAT, SCHEMA, read_table, user_file
from nsa_core.environment import dotted

REFERENCE = "sdpa"
MARGINS = {"reference": 1.2, "kernel": 1.05}
"""The ratios of speed that a kernel must reach against the reference, and against another kernel."""
GIVE_UP = 4.0
"""A backend is not timed at longer lengths if it takes this many times the best backend's time at two lengths in a row, and its ratio does not fall
from the first to the second. One length is not enough, because times of short calls depend on the host."""
ROUNDS = 10
"""Maximum repetitions of a measurement. A call that takes GIVE_UP times the best median so far is timed once."""
IDENTITY = (
    *("compute_capability", "operation", "direction", "num_heads", "num_kv_heads", "head_dim_qk", "head_dim_v", "dtype", "geometry"),
    *("backend", "against"),
)
"""The columns that identify a measurement; a table has one row for each."""
GPU_LENGTHS, CPU_LENGTHS = "256,512,1k,2k,4k,8k,16k", "128,256"


@frozen(kw_only=True)
class ThresholdPlan:
    """The cases, shortest first, and the backends of each operation."""

    cases: tuple[Case, ...]
    operations: tuple[str, ...]
    directions: tuple[Direction, ...]
    backends: tuple[str, ...]
    device: torch.device
    seconds: float = inf
    """Time after which no measurement begins."""


@frozen(kw_only=True)
class Threshold:
    """The length from which `backend` should serve instead of `against`."""

    operation: str
    direction: Direction
    shape: HeadShape
    backend: str
    against: str
    margin: float
    ratios: dict[int, float | None]
    """Tokens -> time of `against` divided by the time of `backend`. None if `backend` has no time; inf if only `against` has none."""

    @property
    def min_length(self) -> int | None:
        """Return the threshold in tokens; None if the longest length that was measured does not reach the margin."""
        found = None
        for length, ratio in sorted(self.ratios.items(), reverse=True):
            if ratio is None or ratio < self.margin:
                break
            found = length
        return found


def make_threshold_plan(options: ThresholdOptions) -> ThresholdPlan:
    """Return the plan that `options` describe.

    Raises:
        OptionError: if options are invalid.
    """
    device = find_device(options.device)
    geometry, dtype = parse_geometry(options.geometry), dtype_of(options.dtype, device.type)
    lengths = sorted(set(parse_lengths(given(options.lengths, GPU_LENGTHS if device.type == "cuda" else CPU_LENGTHS))))
    cases = tuple(
        Case(shape=shape, seq_len=length, geometry=geometry, dtype=dtype) for shape in parse_shapes(options.shapes) for length in lengths
    )
    directions = tuple(Direction) if options.backward else (Direction.FORWARD,)
    operations = parse_names("--operations", options.operations, OURS)
    installed = tuple(dict.fromkeys(one.name for one in RouteRecorder.of_installed().backends))
    backends = parse_names("--backends", given(options.backends, ",".join(installed)), installed)
    if options.seconds is not None and not 0 < options.seconds < inf:
        raise OptionError(f"--seconds={options.seconds:g} is no time (the rule: a number above 0); use 120")
    seconds = inf if options.seconds is None else options.seconds
    return ThresholdPlan(
        cases=cases, operations=operations, directions=directions, backends=backends, device=device, seconds=seconds
    )  # fmt: skip


class Race:
    """The times so far, the backends that are not timed any more, and the clock."""

    def __init__(self, plan: ThresholdPlan) -> None:
        """Start the clock."""
        self.plan, self.is_stopped, self._deadline = plan, False, monotonic() + plan.seconds
        self._times: dict[tuple[Case, str, Direction], dict[str, float]] = {}
        self._behind: dict[tuple[HeadShape, str, Direction], dict[str, float]] = {}
        self._given_up: set[tuple[HeadShape, str, Direction, str]] = set()

    def has_time(self) -> bool:
        """Return False from the deadline on."""
        self.is_stopped = self.is_stopped or monotonic() >= self._deadline
        return not self.is_stopped

    def entrants(self, case: Case, operation: str, names: list[str]) -> dict[str, tuple[Direction, ...]]:
        """Return name -> the directions in which it is timed. The backend that was the fastest at the previous length comes first."""
        found: dict[str, tuple[Direction, ...]] = {}
        for direction in self.plan.directions:
            kept = [name for name in names if (case.shape, operation, direction, name) not in self._given_up]
            for name in kept if len(kept) > 1 else ():
                found[name] = (*found.get(name, ()), direction)
        behind = self._behind.get((case.shape, operation, self.plan.directions[-1]), {})
        return dict(sorted(found.items(), key=lambda one: behind.get(one[0], inf)))

    def patience(self, case: Case, operation: str) -> dict[Direction, float]:
        """Return the times above which a call is timed once."""
        bests = {direction: min(self._times.get((case, operation, direction), {}).values(), default=inf) for direction in Direction}
        return {direction: GIVE_UP * best for direction, best in bests.items()}

    def record(self, one: Measurement) -> None:
        """Keep a time."""
        if one.timing is not None:
            self._times.setdefault((one.case, one.operation, one.direction), {})[one.implementation] = one.timing.median_ms

    def give_up(self, case: Case, operation: str) -> Iterator[str]:
        """Give up the backends that are too slow at the length of `case`, after all were timed there; yield a line for each."""
        for direction in self.plan.directions:
            times = self._times.get((case, operation, direction), {})
            behind = {name: ms / min(times.values()) for name, ms in times.items()}
            before = self._behind.get((case.shape, operation, direction), {})
            self._behind[case.shape, operation, direction] = behind
            for name, ratio in behind.items():
                if GIVE_UP < before.get(name, 0.0) <= ratio:
                    self._given_up.add((case.shape, operation, direction, name))
                    yield (
                        f"{operation} {direction}, {case.shape}: {name} takes {ratio:.1f} times the best at {case.seq_len} tokens; "
                        "longer ones are left out"
                    )


def run_thresholds(options: ThresholdOptions, output: Output) -> list[Measurement]:
    """Measure the cases of `options`, print the table of thresholds, write the files, and return the measurements.

    Raises:
        OptionError: if options are invalid, or no installed kernel serves any of the cases.
    """
    plan = make_threshold_plan(options)
    target = table_file(options)
    output.check_files(target)
    kept = [] if target is None else kept_rows(target)
    common = common_columns(output.environment)
    capability = torch.cuda.get_device_capability(plan.device) if plan.device.type == "cuda" else None
    facts = common | {"compute_capability": None if capability is None else dotted(capability)}
    measurements: list[Measurement] = []
    found: list[Threshold] = []
    race = Race(plan)
    shapes = list(dict.fromkeys(case.shape for case in plan.cases))
    whole: list[HeadShape] = []
    for case, of_case in groupby(_measured(race, output.say), key=lambda one: one.case):
        for one in of_case:
            measurements.append(one)
            output.say(progress_line(one))
            found = thresholds_of(measurements)
            rows = [to_dict(threshold, plan) for threshold in found]
            measured = [to_row(measurement, common) for measurement in measurements]
            content = {
                "environment": output.environment,
                "options": _given(options),
                "margins": MARGINS,
                "rows": rows,
                "measured": measured,
            }
            output.write(content, [{**row, "ratios": _as_text(row["ratios"]), **common} for row in rows])
        if target is not None:
            whole = shapes[: shapes.index(case.shape)]
            write_found(target, kept, [{**facts, **to_dict(one, plan)} for one in found], whole)
    if target is not None:
        write_found(target, kept, [{**facts, **to_dict(one, plan)} for one in found], whole if race.is_stopped else shapes)
        output.say(f"minimum lengths written to {target}")
    if race.is_stopped:
        output.say(f"stopped after {plan.seconds:g} s (--seconds); lengths or shapes are missing")
    output.show(threshold_table(found))
    return measurements


def table_file(options: ThresholdOptions) -> Path | None:
    """Return the file of `--write`, or the user's own table if the option has no value; None without `--write`.

    Raises:
        OptionError: for more than one file.
        OSError: if none can be written.
    """
    if options.write is None:
        return None
    if len(options.write) > 1:
        raise OptionError(f"--write has {len(options.write)} values (a table is one file); give one, or none for the user's own table")
    path = options.write[0] if options.write else user_file()
    if not options.write:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # check before hours of measurement that the folder can be written
    tempfile.TemporaryFile(dir=path.parent).close()
    return path


def kept_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the table in `path`; no rows if there is no file.

    Raises:
        OptionError: if the file is not such a table, or is damaged.
    """
    problem = read_table(path).problem
    if problem is not None:
        raise OptionError(problem)
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return rows


def write_found(path: Path, kept: list[dict[str, Any]], rows: list[dict[str, Any]], whole: list[HeadShape]) -> None:
    """Write the table of `rows`. If a shape is not in `whole`, a row of `kept` that was measured up to a longer length stays."""
    names, longest = {shape.name for shape in whole}, {identity_of(row): row["max_length"] for row in kept}
    write_table(path, kept, [row for row in rows if row["shape"] in names or row["max_length"] >= longest.get(identity_of(row), 0)])


def write_table(path: Path, kept: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Replace the table in `path` by `rows`, and by those of `kept` that were not measured again."""
    again = {identity_of(row) for row in rows}
    content = {
        "format": FORMAT, "schema": SCHEMA, "margins": MARGINS, "rows": [row for row in kept if identity_of(row) not in again] + rows
    }  # fmt: skip
    # readable for all users, because their routing may read the table
    write_whole(path, to_json(content), mode=0o644)


def identity_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of a row's IDENTITY columns."""
    return tuple(row[name] for name in IDENTITY)


def _given(options: ThresholdOptions) -> dict[str, Any]:
    given = attrs.asdict(options)
    return given | {"write": None if options.write is None else [str(path) for path in options.write]}


def _measured(race: Race, say: Callable[[str], None]) -> Iterator[Measurement]:
    """Yield the measurements of the backends that serve a case and have not been given up, including the reference.

    Raises:
        OptionError: before anything is measured, if no kernel serves any case.
    """
    plan, registry = race.plan, RouteRecorder.of_installed()
    served = {
        (case, operation): [name for name in plan.backends if not reasons_against(name, request_of(operation, case, plan.device), registry)]
        for case, operation in product(plan.cases, plan.operations)
    }
    if all(name == REFERENCE for names in served.values() for name in names):
        raise OptionError(
            "no installed kernel serves any of these cases on this device (a threshold compares two); see `nsa-bench backends`"
        )
    for (case, operation), names in served.items():
        for name, directions in race.entrants(case, operation, names).items():
            if not race.has_time():
                return
            patience = race.patience(case, operation)
            job = Job(case=case, operations=(operation,), directions=directions, max_count=ROUNDS, patience_ms=patience)
            # a backend without the whole operation serves its four parts
            is_split = operation == Operation.NSA and not registry.has(Operation.NSA, name)
            setup = Setup(device=plan.device, registry=RouteRecorder.of_installed(), backend=name if is_split else {operation: name})
            for one in run_jobs((job,), setup):
                timed = attrs.evolve(one, implementation=name)
                race.record(timed)
                yield timed
        for line in race.give_up(case, operation):
            say(line)


def thresholds_of(measurements: list[Measurement]) -> list[Threshold]:
    """Return the threshold of every kernel against the reference and against every other kernel of the same measurement."""
    times: dict[tuple[str, Direction, HeadShape], dict[str, dict[int, float | None]]] = {}
    for one in measurements:
        key = (one.operation, one.direction, one.case.shape)
        ms = None if one.timing is None else one.timing.median_ms
        times.setdefault(key, {}).setdefault(one.implementation, {})[one.case.seq_len] = ms
    found = []
    for (operation, direction, shape), by_backend in times.items():
        for backend, against in permutations(by_backend, 2):
            if backend == REFERENCE:
                continue
            margin = MARGINS["reference" if against == REFERENCE else "kernel"]
            ratios = {
                length: _ratio(by_backend[backend][length], by_backend[against][length])
                for length in by_backend[backend]
                if length in by_backend[against]
            }
            if not ratios:
                continue
            found.append(
                Threshold(
                    operation=operation, direction=direction, shape=shape, backend=backend, against=against, margin=margin, ratios=ratios
                )
            )  # fmt: skip
    return found


def _ratio(own: float | None, other: float | None) -> float | None:
    if own is None:
        return None
    # the other one fails here, for example for lack of memory
    return float("inf") if other is None else other / own


def to_dict(one: Threshold, plan: ThresholdPlan) -> dict[str, Any]:
    """Return a threshold as in the files; a ratio is "inf" if the other backend has no time."""
    shape, case = one.shape, plan.cases[0]
    return {
        "operation": one.operation, "direction": one.direction.value, "shape": shape.name, "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads, "head_dim_qk": shape.head_dim_qk, "head_dim_v": shape.head_dim_v,
        "dtype": str(case.dtype).removeprefix("torch."), "geometry": geometry_text(case.geometry), "backend": one.backend,
        "against": one.against, "margin": one.margin, "min_length": one.min_length, "max_length": max(one.ratios),
        "ratios": {str(length): "inf" if ratio == float("inf") else ratio for length, ratio in one.ratios.items()},
    }  # fmt: skip


def _as_text(ratios: dict[str, Any]) -> str:
    return " ".join(f"{length}={'-' if ratio is None else ratio}" for length, ratio in ratios.items())


def threshold_table(found: list[Threshold]) -> Table:
    """Return a line per operation, direction, shape and pair of backends."""
    table = Table("operation", "pass", "shape", "backend", "against", "from", "ratios by tokens", title="thresholds")
    for one in found:
        ratios = "  ".join(f"{length}: {number(ratio)}" for length, ratio in one.ratios.items())
        least = "never" if one.min_length is None else f"{one.min_length} tokens"
        table.add_row(
            one.operation, one.direction.value, Text(str(one.shape)), one.backend, f"{one.against} x {one.margin}", least, Text(ratios)
        )
    return table
