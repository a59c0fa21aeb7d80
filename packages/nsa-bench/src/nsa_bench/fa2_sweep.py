"""`nsa-bench fa2-sweep`: time the available dense attention by head dimension, length and dtype, and find the knee of each curve.

The knee is the shortest length at which a kernel reaches 90 % of its best rate at that head dimension and dtype. Below it, launches
and partly filled tiles take most of the time.
"""

from itertools import product
from typing import Any

import attrs
import torch
from attrs import frozen
from rich.table import Table
from rich.text import Text

from nsa_bench.attention.run import run_jobs
from nsa_bench.baselines import parse_baselines
from nsa_bench.cases import DTYPES, Case, find_device, given, head_shape, lengths_of, parse_lengths, parse_names, visible_pairs
from nsa_bench.errors import OptionError
from nsa_bench.measurement import Direction, Job, Measurement, Setup, to_row
from nsa_bench.options import SweepOptions
from nsa_bench.reporting import collect, progress_line
from nsa_bench.results import Output, number
from nsa_bench.routes import RouteRecorder

KNEE = 0.9
"""Share of the best rate at which a curve counts as flat."""
BACKWARD_WORK = 2.5
"""Number of matrix products of the backward pass, relative to the forward pass."""
HEADS = 16


@frozen(kw_only=True)
class Curve:
    """The rates of one kernel at one head dimension, dtype and direction."""

    kernel: str
    head_dim: int
    dtype: torch.dtype
    direction: Direction
    rates: dict[int, float]
    """Tokens -> TFLOP/s, for the lengths that have a time."""

    @property
    def best(self) -> float:
        """Return the highest rate in TFLOP/s."""
        return max(self.rates.values())

    @property
    def knee(self) -> int:
        """Return the shortest length, in tokens, that reaches `KNEE` of the best rate."""
        return min(length for length, rate in self.rates.items() if rate >= KNEE * self.best)


def sweep_jobs(options: SweepOptions, device: torch.device) -> tuple[Job, ...]:
    """Return a job per head dimension, dtype and length.

    Raises:
        OptionError: if options are invalid.
    """
    dtypes = parse_names("--dtypes", given(options.dtypes, "bf16,fp16" if device.type == "cuda" else "fp32"), tuple(DTYPES))
    baselines = parse_baselines(options.baseline)
    if not baselines:
        raise OptionError("--baseline=none leaves nothing to time; use flash")
    directions = tuple(Direction) if options.backward else (Direction.FORWARD,)
    return tuple(
        Job(
            case=Case(shape=head_shape(HEADS, HEADS, dim, dim), seq_len=length, dtype=DTYPES[dtype]),
            operations=(),
            directions=directions,
            baselines=baselines,
        )
        for dtype, dim, length in product(dtypes, parse_lengths(options.head_dims, "--head-dims"), lengths_of(options.lengths, device))
    )


def run_fa2_sweep(options: SweepOptions, output: Output) -> list[Curve]:
    """Measure the cases of `options`, print the table, write the files after every result, and return the curves."""

    def lists_of(measurements: list[Measurement], common: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
        rows = [{**to_row(one, common), "tflops": rate_of(one)} for one in measurements]
        return {"rows": rows, "knees": [to_dict(curve) for curve in curves_of(measurements)]}

    device = find_device(options.device)
    found = run_jobs(sweep_jobs(options, device), Setup(device=device, registry=RouteRecorder.of_installed()))
    measurements = collect(found, attrs.asdict(options), output, progress_line, lists_of)
    curves = curves_of(measurements)
    output.show(curve_table(curves, [one for one in measurements if one.reason]))
    return curves


def rate_of(one: Measurement) -> float | None:
    """Return TFLOP/s of the causal pairs' products; None without a time."""
    if one.timing is None:
        return None
    work = 2.0 * visible_pairs("dense", one.case) * one.case.shape.head_dims
    passes = 1 if one.direction is Direction.FORWARD else 1 + BACKWARD_WORK
    return work * passes / one.timing.median_ms / 1e9


def curves_of(measurements: list[Measurement]) -> list[Curve]:
    """Return a curve per kernel, head dimension, dtype and direction that has a time."""
    rates: dict[tuple[str, int, torch.dtype, Direction], dict[int, float]] = {}
    for one in measurements:
        rate = rate_of(one)
        if rate is not None:
            key = (one.implementation, one.case.shape.head_dim_qk, one.case.dtype, one.direction)
            rates.setdefault(key, {})[one.case.seq_len] = rate
    return [
        Curve(kernel=kernel, head_dim=dim, dtype=dtype, direction=direction, rates=found)
        for (kernel, dim, dtype, direction), found in rates.items()
    ]


def to_dict(one: Curve) -> dict[str, Any]:
    """Return a curve as in the JSON file."""
    return {
        "kernel": one.kernel,
        "head_dim": one.head_dim,
        "dtype": str(one.dtype).removeprefix("torch."),
        "direction": one.direction.value,
        "knee": one.knee,
        "best_tflops": one.best,
        "tflops": {str(length): rate for length, rate in one.rates.items()},
    }


def curve_table(curves: list[Curve], absent: list[Measurement]) -> Table:
    """Return a line per curve: its knee, and its rates by length."""
    table = Table("kernel", "D", "dtype", "pass", f"tokens for {KNEE:.0%}", "best", "TFLOP/s by tokens", title="dense attention")
    for one in curves:
        rates = "  ".join(f"{length}: {number(rate)}" for length, rate in one.rates.items())
        dtype = str(one.dtype).removeprefix("torch.")
        table.add_row(Text(one.kernel), str(one.head_dim), dtype, one.direction.value, str(one.knee), number(one.best), Text(rates))
    notes = dict.fromkeys(f"{one.implementation}: {one.reason}" for one in absent)
    table.caption = Text("\n".join(notes)) if notes else None
    return table
