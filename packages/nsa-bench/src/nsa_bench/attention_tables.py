"""The results of `nsa-bench attention` and `compare` as tables for a terminal, narrow enough for one of 100 columns."""

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from nsa_bench.cases import KIBI, Case, HeadShape
from nsa_bench.measurements import DENSE, Direction, Measurement
from nsa_bench.sweep import LIMIT, SweepVerdict
from nsa_bench.targets import Judgement

GIB = 2**30
FEW = 10
"""Fewer repetitions than this are stated beside a median."""
DenseTimes = dict[tuple[HeadShape, int, Direction], Measurement]


def attention_tables(measurements: list[Measurement]) -> Iterator[RenderableType]:
    """Yield a table per case: a line per operation and implementation, both directions beside each other, then notes."""
    best = best_dense(measurements)
    for case in dict.fromkeys(one.case for one in measurements):
        yield _case_table(case, [one for one in measurements if one.case == case], best)


def best_dense(measurements: list[Measurement]) -> DenseTimes:
    """Return the fastest dense attention by shape, tokens and direction: the baseline."""
    best: DenseTimes = {}
    for one in measurements:
        if one.operation == DENSE and one.timing is not None:
            key = _key(one)
            if key not in best or one.timing.median_ms < _median(best[key]):
                best[key] = one
    return best


def _case_table(case: Case, measurements: list[Measurement], best: DenseTimes) -> Table:
    columns = ("", "runs on", *(f"{direction} ms" for direction in Direction), "peak GiB", "error", "limit")
    table = Table(*columns, box=box.SIMPLE, pad_edge=False, title=Text(str(case), style="bold"), title_justify="left")
    table.caption, table.caption_justify = _caption(measurements), "left"
    lines: dict[tuple[str, str], list[Measurement]] = {}
    for one in measurements:
        lines.setdefault((one.operation, one.implementation), []).append(one)
    for (operation, implementation), line in lines.items():
        if all(one.check is None and not one.is_ours for one in line):
            # what is absent stands in the notes
            continue
        by_direction = {one.direction: one for one in line}
        times = [_time(by_direction.get(direction), best) for direction in Direction]
        table.add_row(operation, Text(implementation), *times, _peak(line), *_error(line))
    return table


def _caption(measurements: list[Measurement]) -> Text:
    """Return what the numbers do not say: the reference, why times are missing, overlaps, notes."""
    methods = dict.fromkeys(one.check.method for one in measurements if one.check is not None)
    ties = max((one.check.near_ties for one in measurements if one.check is not None), default=0)
    lines = [f"error: of a row's largest value, against {', '.join(methods)}"] if methods else []
    lines += [f"{ties} choices of blocks are too close to call and not compared"] if ties else []
    told: dict[str, list[str]] = {}
    for one in measurements:
        overlap = [] if one.overlap is None else [f"{100 * one.overlap:.0f} % of free blocks persist to the next query"]
        for text in (one.reason, one.note, *overlap):
            if text:
                told.setdefault(f"{one.operation} on {one.implementation}: {text}", []).append(one.direction)
    lines += [text if len(directions) > 1 else f"{directions[0]} {text}" for text, directions in told.items()]
    return Text("\n".join(lines))


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
            _number(None if measurement.timing is None else measurement.timing.median_ms),
            "-" if cost is None else f"{cost:.3g}",
            "-" if one.ratio is None else f"{one.ratio:.2f}",
            Text(measurement.reason or one.verdict, style="" if one.verdict == "within" else "bold"),
        )
    return table


def targets_table(judgements: list[Judgement], measurements: list[Measurement]) -> Table:
    """Return a line per target: what was measured, beside must, aim and the best dense attention; ms, or x the tensors' bytes."""
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
            f"{target.operation} {'memory' if target.is_memory else target.direction}",
            "-" if one.measured is None else f"{one.measured:.4g} {'x' if target.is_memory else 'ms'}",
            _number(target.must),
            _number(target.aim),
            "" if dense is None else f"{_number(_median(dense))} {dense.implementation.removeprefix('SDPA ')}",
            Text(one.verdict, style="" if one.verdict in ("aim", "must") else "bold"),
        )
    table.caption, table.caption_justify = Text("\n".join(missing)), "left"
    return table


def progress_line(one: Measurement) -> str:
    """Return what is told while a run goes on."""
    figure = one.reason or ("right" if one.timing is None else f"{_number(one.timing.median_ms)} ms")
    return f"{one.case}: {one.operation} {one.direction} on {one.implementation}: {figure}"


def _key(one: Measurement) -> tuple[HeadShape, int, Direction]:
    return (one.case.shape, one.case.seq_len, one.direction)


def _median(one: Measurement) -> float:
    assert one.timing is not None
    return one.timing.median_ms


def _time(one: Measurement | None, best: DenseTimes) -> Text:
    """Return the median, how many repetitions where they are few, and the best dense time over it."""
    if one is None or one.timing is None:
        return Text("-")
    count = f" of {one.timing.count}" if one.timing.count < FEW else ""
    dense = best.get(_key(one))
    if dense is one:
        return Text(f"{_number(one.timing.median_ms)}{count} best", style="bold")
    ratio = f" {_median(dense) / one.timing.median_ms:.2f}x" if dense is not None and one.operation == "nsa" else ""
    return Text(f"{_number(one.timing.median_ms)}{count}{ratio}")


def _peak(line: list[Measurement]) -> Text:
    """Return the peak, and its ratio to the tensors that nothing can do without."""
    return Text("".join(f"{one.peak_bytes / GIB:.2f} {one.peak_ratio:.2f}x" for one in line if one.peak_bytes is not None))


def _error(line: list[Measurement]) -> tuple[Text, Text]:
    """Return the largest error of the line and the largest share of the limit that one takes."""
    checks = [one.check for one in line if one.check is not None]
    if not checks:
        return Text("-"), Text("-")
    worst = max(checks, key=lambda check: check.limit_used)
    style = "" if worst.limit_used <= 1 else "bold"
    return Text(f"{worst.error:.1e} {worst.error_of}", style=style), Text(f"{worst.limit_used:.2f}", style=style)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
