"""`nsa-bench attention --preset targets`: the figures that the kernels must reach on one H200, in bf16, with B = 1, and their aims.

Times are medians of the whole operation, or of "slc" alone. Memory is the peak of forward and backward over the
bytes of q, all k and v, gates, out and their gradients.
"""

from typing import Any

from attrs import frozen
from rich import box
from rich.table import Table
from rich.text import Text

from nsa_bench.baselines import BASELINES
from nsa_bench.cases import KIBI, SHAPES, Case, HeadShape, Selection, head_shape
from nsa_bench.measurement import Direction, Job, Measurement
from nsa_bench.reporting import best_dense, median_of
from nsa_bench.results import number

FWD, BOTH = Direction
RANDOM, TRAINED = Selection

TIMES_MS = (
    # shape, 1024 tokens, selection, forward (must, aim), forward + backward (must, aim)
    ("P", 8, RANDOM, (2.6, 1.8), (9.5, 7.0)),
    ("P", 64, RANDOM, (37.0, 28.0), (140.0, 95.0)),
    ("P", 64, TRAINED, (None, 22.0), (None, 75.0)),
    ("M", 8, RANDOM, (2.0, 1.4), (6.6, 5.0)),
    ("M", 32, RANDOM, (11.0, 8.0), (36.0, 26.0)),
    ("M", 64, RANDOM, (28.0, 20.0), (90.0, 65.0)),
    ("M", 64, TRAINED, (None, 16.0), (None, 54.0)),
    ("M", 128, RANDOM, (82.0, 62.0), (260.0, 190.0)),
    ("L", 16, RANDOM, (3.6, 2.4), (12.0, 8.5)),
    ("L", 64, RANDOM, (20.0, 13.0), (62.0, 42.0)),
    ("S", 32, RANDOM, (3.2, 2.0), (11.0, 7.0)),
)
SELECTED_MS = (12.0, 8.0)
SELECTED_HEADS, SELECTED_DIM, SELECTED_KIBI = 32, 128, 64
SELECTED_HEADS_PER_GROUP = (1, 2, 4, 8)
"""Targets of selected attention alone, forward, random selection, by heads per group."""
PEAK_RATIO = (2.0, 1.4)
PEAK_AT = (("P", 64), ("P", 128), ("M", 64), ("M", 128))


@frozen(kw_only=True)
class Target:
    """One figure to reach."""

    shape: HeadShape
    seq_len: int
    selection: Selection = RANDOM
    operation: str = "nsa"
    direction: Direction
    must: float | None
    """The value that must be reached; None: there is only an aim."""
    aim: float
    is_memory: bool = False

    def __str__(self) -> str:
        return f"{self.shape.name} {self.seq_len // KIBI}k {self.selection} {self.what}"

    @property
    def what(self) -> str:
        """Return the operation, and its direction or "memory"."""
        return f"{self.operation} {'memory' if self.is_memory else self.direction}"

    @property
    def unit(self) -> str:
        """Return the unit of the figures."""
        return "x tensors" if self.is_memory else "ms"


@frozen(kw_only=True)
class Judgement:
    """A target and the measured figure."""

    target: Target
    measured: float | None
    reason: str = ""
    """Why there is no figure."""

    @property
    def verdict(self) -> str:
        """Return "aim" or "must" if reached, else the miss; "no figure" if there is none."""
        if self.measured is None:
            return "no figure"
        if self.measured <= self.target.aim:
            return "aim"
        if self.target.must is None:
            return f"{self.measured / self.target.aim:.2f} x aim"
        return "must" if self.measured <= self.target.must else f"{self.measured / self.target.must:.2f} x must"


def all_targets() -> tuple[Target, ...]:
    """Return every target, in the order of the tables above."""
    times = [
        Target(shape=SHAPES[name], seq_len=kibi * KIBI, selection=selection, direction=direction, must=must, aim=aim)
        for name, kibi, selection, forward, both in TIMES_MS
        for direction, (must, aim) in ((FWD, forward), (BOTH, both))
    ]
    must, aim = SELECTED_MS
    selected = [
        Target(
            shape=head_shape(SELECTED_HEADS, SELECTED_HEADS // size, SELECTED_DIM, SELECTED_DIM),
            seq_len=SELECTED_KIBI * KIBI,
            operation="slc",
            direction=FWD,
            must=must,
            aim=aim,
        )
        for size in SELECTED_HEADS_PER_GROUP
    ]
    must, aim = PEAK_RATIO
    memory = [Target(shape=SHAPES[name], seq_len=kibi * KIBI, direction=BOTH, must=must, aim=aim, is_memory=True) for name, kibi in PEAK_AT]
    return (*times, *selected, *memory)


def target_jobs(targets: tuple[Target, ...], baselines: tuple[str, ...] = BASELINES) -> tuple[Job, ...]:
    """Return the jobs that give every target its figure: one per shape, length, selection and operation."""
    jobs, served = list[Job](), dict[tuple[Case, str], list[Target]]()
    for target in targets:
        case = Case(shape=target.shape, seq_len=target.seq_len, selection=target.selection)
        served.setdefault((case, target.operation), []).append(target)
    for (case, operation), here in served.items():
        directions = tuple(direction for direction in Direction if any(other.direction is direction for other in here))
        is_timed = any(not other.is_memory for other in here)
        has_baselines = is_timed and operation == "nsa" and case.selection is RANDOM
        dense = baselines if has_baselines else ()
        jobs.append(Job(case=case, operations=(operation,), directions=directions, baselines=dense, is_timed=is_timed))
    return tuple(jobs)


def judge_targets(targets: tuple[Target, ...], measurements: list[Measurement]) -> list[Judgement]:
    """Return every target with its figure, or with the reason why it has none."""
    found = {(one.case.shape, one.case.seq_len, one.case.selection, one.operation, one.direction): one for one in measurements}
    return [_judged(one, found.get((one.shape, one.seq_len, one.selection, one.operation, one.direction))) for one in targets]


def _judged(target: Target, one: Measurement | None) -> Judgement:
    if one is None:
        return Judgement(target=target, measured=None, reason="not measured")
    if target.is_memory:
        absent = "memory is measured on CUDA devices only" if one.peak_bytes is None else ""
        return Judgement(target=target, measured=one.peak_ratio, reason=one.reason or absent)
    return Judgement(target=target, measured=None if one.timing is None else one.timing.median_ms, reason=one.reason)


def target_rows(judgements: list[Judgement]) -> list[dict[str, Any]]:
    """Return the judgements as rows for a file."""
    return [
        {
            "shape": one.target.shape.name, "seq_len": one.target.seq_len, "selection": one.target.selection.value,
            "operation": one.target.operation, "direction": one.target.direction.value, "unit": one.target.unit,
            "measured": one.measured, "must": one.target.must, "aim": one.target.aim, "verdict": one.verdict,
        }
        for one in judgements
    ]  # fmt: skip


def targets_table(judgements: list[Judgement], measurements: list[Measurement]) -> Table:
    """Return a line per target: the measured figure, must, aim and the best dense attention; ms, or x the tensors' bytes."""
    table = Table(title="targets on one H200", box=box.SIMPLE, pad_edge=False)
    for name in ("case", "", "figure", "must", "aim", "best dense ms", "verdict"):
        table.add_column(name, no_wrap=True)
    best, missing = best_dense(measurements), {}
    for one in judgements:
        target = one.target
        dense = None if target.is_memory else best.get((target.shape, target.seq_len, target.direction))
        if one.measured is None:
            missing[f"{target}: {one.reason}"] = True
        table.add_row(
            Text(f"{target.shape.name} {target.seq_len // KIBI}k {target.selection}"),
            target.what,
            "-" if one.measured is None else f"{one.measured:.4g} {'x' if target.is_memory else 'ms'}",
            number(target.must),
            number(target.aim),
            "" if dense is None else f"{number(median_of(dense))} {dense.implementation.removeprefix('SDPA ')}",
            Text(one.verdict, style="" if one.verdict in ("aim", "must") else "bold"),
        )
    table.caption, table.caption_justify = Text("\n".join(missing)), "left"
    return table
