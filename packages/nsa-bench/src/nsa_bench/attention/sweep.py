"""`nsa-bench attention --sweep`: find shapes that cost much more than their neighbours.

One variable changes at a time; every case is compared with the cases before and after it, by time per visible pair and
element of D_k + D_v.
"""

from typing import Any

import torch
from attrs import frozen
from rich import box
from rich.table import Table
from rich.text import Text

from nsa_bench.cases import Case, Recorded, Selection, head_shape
from nsa_bench.measurement import Direction, Job, Measurement, to_row
from nsa_bench.results import number
from nsa_core import BlockGeometry

LIMIT = 1.5
"""Largest allowed ratio of a case's cost to a neighbour's."""
LENGTH = 8192
PACKED_FACTOR = 8
"""Total tokens of the packed case, as a multiple of the other cases' length."""
PACKED_SEQUENCES = 100
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
HEADS_PER_GROUP = (1, 2, 3, 4, 5, 7, 8, 16)
HEADS = 32
"""Query heads of the cases that vary H/G, as near as H/G divides."""


@frozen(kw_only=True)
class SweepPoint:
    """One value of the variable that is swept."""

    variable: str
    value: str
    case: Case


@frozen(kw_only=True)
class SweepVerdict:
    """The cost of a point, compared with its neighbours."""

    point: SweepPoint
    measurement: Measurement
    ratio: float | None
    """Its cost over the lower of its neighbours' costs; None if one of them has no time."""

    @property
    def verdict(self) -> str:
        """Return "within", "cliff", or "no time"."""
        if self.ratio is None:
            return "no time"
        return "within" if self.ratio <= LIMIT else "cliff"


def sweep_points(length: int, geometry: BlockGeometry, dtype: torch.dtype, selection: Selection | Recorded) -> tuple[SweepPoint, ...]:
    """Return the points of every variable, in order: D, H/G, S one off `length`, many short sequences against one."""

    def point(
        variable: str, value: object, heads: tuple[int, int, int, int], tokens: int, lengths: tuple[int, ...] | None = None
    ) -> SweepPoint:
        case = Case(shape=head_shape(*heads), seq_len=tokens, geometry=geometry, dtype=dtype, selection=selection, lengths=lengths)
        return SweepPoint(variable=variable, value=str(value), case=case)

    middle, total = (64, 4, 128, 128), PACKED_FACTOR * length
    groups = {size: max(1, round(HEADS / size)) for size in HEADS_PER_GROUP}
    return (
        *(point("D", dim, (64, 4, dim, dim), length) for dim in HEAD_DIMS),
        *(point("H/G", size, (size * count, count, 128, 128), length) for size, count in groups.items()),
        *(point("S", tokens, middle, tokens) for tokens in (length - 1, length, length + 1)),
        point("packed", "1 sequence", middle, total),
        point("packed", f"{PACKED_SEQUENCES} sequences", middle, total, short_lengths(total, PACKED_SEQUENCES)),
    )


def short_lengths(total: int, count: int) -> tuple[int, ...]:
    """Return `count` lengths that grow evenly from near 0 and sum to `total`."""
    ends = [total * i * (i + 1) // (count * (count + 1)) for i in range(count + 1)]
    return tuple(stop - start for start, stop in zip(ends[:-1], ends[1:], strict=True))


def sweep_jobs(points: tuple[SweepPoint, ...], operations: tuple[str, ...], directions: tuple[Direction, ...]) -> tuple[Job, ...]:
    """Return one job per case; a case of several variables is measured once.

    On a GPU CUDA graphs are timed. Otherwise the time of a short operation would be the time of its launches from Python.
    """
    cases = dict.fromkeys(point.case for point in points)
    return tuple(Job(case=case, operations=operations, directions=directions, is_replayed=True) for case in cases)


def judge_sweep(points: tuple[SweepPoint, ...], measurements: list[Measurement]) -> list[SweepVerdict]:
    """Return the verdict of every point, operation and direction that was measured."""
    found = {(one.case, one.operation, one.direction): one for one in measurements}
    verdicts = []
    for index, point in enumerate(points):
        neighbours = [
            other for other in (*points[max(0, index - 1) : index], *points[index + 1 : index + 2]) if other.variable == point.variable
        ]
        for (case, operation, direction), one in found.items():
            if case == point.case:
                nearby = [found.get((other.case, operation, direction)) for other in neighbours]
                verdicts.append(SweepVerdict(point=point, measurement=one, ratio=cost_ratio(one, nearby)))
    return verdicts


def cost_ratio(one: Measurement, nearby: list[Measurement | None]) -> float | None:
    """Return the cost of `one` over the lowest of its neighbours; None if a cost is missing."""
    costs = [None if other is None else other.pair_cost_ps for other in nearby]
    known = [cost for cost in costs if cost is not None]
    own = one.pair_cost_ps
    return None if own is None or not known or len(known) < len(costs) else own / min(known)


def sweep_rows(verdicts: list[SweepVerdict], common: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the verdicts as rows for a file, each with its measurement and the `common` columns."""
    return [
        {
            "variable": one.point.variable,
            "value": one.point.value,
            "ratio": one.ratio,
            "verdict": one.verdict,
            **to_row(one.measurement, common),
        }
        for one in verdicts
    ]


def sweep_table(verdicts: list[SweepVerdict]) -> Table:
    """Return a line per point and operation: cost per pair, and its ratio to the cheaper neighbour."""
    table = Table("swept", "value", "", "pass", "ms", "ps", "ratio", "verdict", title="sweep", box=box.SIMPLE, pad_edge=False)
    table.caption = f"ps: per visible pair and element of D_k + D_v; ratio: to the cheaper neighbour, at most {LIMIT}"
    last = None
    for one in verdicts:
        measurement, variable = one.measurement, one.point.variable
        if last not in (None, variable):
            table.add_section()
        last = variable
        cost = measurement.pair_cost_ps
        table.add_row(
            variable,
            one.point.value,
            measurement.operation,
            measurement.direction.value,
            number(None if measurement.timing is None else measurement.timing.median_ms),
            "-" if cost is None else f"{cost:.3g}",
            "-" if one.ratio is None else f"{one.ratio:.2f}",
            Text(measurement.reason or one.verdict, style="" if one.verdict == "within" else "bold"),
        )
    return table
