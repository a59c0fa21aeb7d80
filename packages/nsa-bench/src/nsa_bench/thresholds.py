"""`nsa-bench thresholds`: from how many tokens on a kernel is worth its launch: 1.2 times as fast as the reference, 1.05 times as another kernel.

A threshold is the least measured length from which on the ratio holds at every longer one that was measured. Wrong results get no time, so
they never make one.
"""

from collections.abc import Iterator
from itertools import permutations, product
from pathlib import Path
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
    parse_geometry,
    parse_lengths,
    parse_names,
    parse_shapes,
)
from nsa_bench.errors import OptionError
from nsa_bench.measurement import Direction, Job, Measurement, Setup, common_columns, to_row
from nsa_bench.options import ThresholdOptions
from nsa_bench.reporting import number, progress_line
from nsa_bench.results import Output, write_json
from nsa_bench.routes import RouteRecorder, reasons_against
from nsa_core import Operation

REFERENCE = "sdpa"
MARGINS = {"reference": 1.2, "kernel": 1.05}
"""How many times as fast a kernel must be as the reference, and as another kernel."""
GPU_LENGTHS, CPU_LENGTHS = "256,512,1k,2k,4k,8k,16k", "128,256"


@frozen(kw_only=True)
class ThresholdPlan:
    """The cases, shortest first, and the backends of each operation."""

    cases: tuple[Case, ...]
    operations: tuple[str, ...]
    directions: tuple[Direction, ...]
    backends: tuple[str, ...]
    device: torch.device


@frozen(kw_only=True)
class Threshold:
    """The length from which on `backend` is to be taken in place of `against`."""

    operation: str
    direction: Direction
    shape: HeadShape
    backend: str
    against: str
    margin: float
    ratios: dict[int, float | None]
    """Tokens -> the other's time over the backend's; None where the backend has none, or neither. inf: the other has none."""

    @property
    def min_length(self) -> int | None:
        """Return the threshold in tokens; None where the longest length that was measured does not reach the margin."""
        found = None
        for length, ratio in sorted(self.ratios.items(), reverse=True):
            if ratio is None or ratio < self.margin:
                break
            found = length
        return found


def make_threshold_plan(options: ThresholdOptions) -> ThresholdPlan:
    """Return what `options` ask for.

    Raises:
        OptionError: for options that cannot be.
    """
    device = find_device(options.device)
    geometry, dtype = parse_geometry(options.geometry), dtype_of(options.dtype, device.type)
    lengths = sorted(set(parse_lengths(options.lengths or (GPU_LENGTHS if device.type == "cuda" else CPU_LENGTHS))))
    cases = tuple(
        Case(shape=shape, seq_len=length, geometry=geometry, dtype=dtype) for shape in parse_shapes(options.shapes) for length in lengths
    )
    directions = tuple(Direction) if options.backward else (Direction.FORWARD,)
    operations = parse_names("--operations", options.operations, OURS)
    installed = tuple(dict.fromkeys(one.name for one in RouteRecorder.of_installed().backends))
    backends = parse_names("--backends", options.backends or ",".join(installed), installed)
    return ThresholdPlan(cases=cases, operations=operations, directions=directions, backends=backends, device=device)


def run_thresholds(options: ThresholdOptions, output: Output) -> list[Threshold]:
    """Measure what `options` ask for, print the table, write the files, and return the thresholds.

    Raises:
        OptionError: for options that cannot be, or where no installed kernel serves any of the cases.
    """
    plan = make_threshold_plan(options)
    output.check_files()
    if options.write is not None:
        options.write.open("a").close()
    common = common_columns(output.environment)
    measurements: list[Measurement] = []
    found: list[Threshold] = []
    for one in _measured(plan):
        measurements.append(one)
        output.say(progress_line(one))
        found = thresholds_of(measurements)
        rows = [to_dict(threshold, plan) for threshold in found]
        measured = [to_row(measurement, common) for measurement in measurements]
        content = {"environment": output.environment, "options": _given(options), "margins": MARGINS, "rows": rows, "measured": measured}
        output.write(content, [{**row, "ratios": _as_text(row["ratios"]), **common} for row in rows])
        if options.write is not None:
            write_json(options.write, {name: content[name] for name in ("environment", "margins", "rows")})
    output.show(threshold_table(found))
    return found


def _given(options: ThresholdOptions) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in attrs.asdict(options).items()}


def _measured(plan: ThresholdPlan) -> Iterator[Measurement]:
    """Yield the measurements of every backend that serves a case, the reference's among them.

    Raises:
        OptionError: before anything is measured, where no kernel serves any case.
    """
    registry = RouteRecorder.of_installed()
    calls = [
        (case, operation, name)
        for case, operation, name in product(plan.cases, plan.operations, plan.backends)
        if not reasons_against(name, operation, case, plan.device, registry)
    ]
    if all(name == REFERENCE for _, _, name in calls):
        raise OptionError(
            "no installed kernel serves any of these cases on this device (a threshold compares two); see `nsa-bench backends`"
        )
    for case, operation, name in calls:
        job = Job(case=case, operations=(operation,), directions=plan.directions)
        # a backend without the whole operation serves its four parts
        is_split = operation == Operation.NSA and not registry.has(Operation.NSA, name)
        setup = Setup(device=plan.device, registry=RouteRecorder.of_installed(), backend=name if is_split else {operation: name})
        yield from (attrs.evolve(one, implementation=name) for one in run_jobs((job,), setup))


def thresholds_of(measurements: list[Measurement]) -> list[Threshold]:
    """Return the threshold of every kernel against the reference and against every other kernel that was measured beside it."""
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
            found.append(
                Threshold(
                    operation=operation, direction=direction, shape=shape, backend=backend, against=against, margin=margin, ratios=ratios
                )
            )  # fmt: skip
    return found


def _ratio(own: float | None, other: float | None) -> float | None:
    if own is None:
        return None
    # the other one fails here, such as for lack of memory
    return float("inf") if other is None else other / own


def to_dict(one: Threshold, plan: ThresholdPlan) -> dict[str, Any]:
    """Return a threshold as the files have it; a ratio is "inf" where the other backend has no time."""
    shape, case = one.shape, plan.cases[0]
    return {
        "operation": one.operation, "direction": one.direction.value, "shape": shape.name, "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads, "head_dim_qk": shape.head_dim_qk, "head_dim_v": shape.head_dim_v,
        "dtype": str(case.dtype).removeprefix("torch."), "geometry": geometry_text(case.geometry), "backend": one.backend,
        "against": one.against, "margin": one.margin, "min_length": one.min_length,
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
