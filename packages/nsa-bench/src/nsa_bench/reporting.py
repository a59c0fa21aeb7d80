"""Report the results of a command as they come, in lines and files, and the measurements of `attention` and `compare` in a table per case.

The tables fit a terminal of 100 columns. Files are written after every result, so that an interrupted run leaves
them. The JSON file holds `environment`, `options` (as given) and `rows`, the results; the CSV file holds the rows.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from nsa_bench.cases import DENSE, Case, HeadShape
from nsa_bench.measurement import Direction, Measurement, common_columns, to_row
from nsa_bench.results import Output, number

GIB = 2**30
FEW = 10
"""If there are fewer repetitions than this, their number is shown with the median."""
DenseTimes = dict[tuple[HeadShape, int, Direction], Measurement]
Row = dict[str, Any]
Result = TypeVar("Result")


def collect(
    found: Iterable[Result],
    options: dict[str, Any],
    output: Output,
    line: Callable[[Result], str],
    lists_of: Callable[[list[Result], Row], dict[str, list[Row]]],
) -> list[Result]:
    """Return the results of `found`; each is reported by its `line` and written at once.

    `lists_of` makes the lists of rows for the JSON file, from the results so far and the columns that every row has. One list is `rows`. A list
    named `sweep`, if there is one, replaces the rows in the CSV file.
    """
    output.check_files()
    common = common_columns(output.environment)
    results: list[Result] = []
    for one in found:
        results.append(one)
        output.say(line(one))
        lists = lists_of(results, common)
        output.write({"environment": output.environment, "options": options, **lists}, lists.get("sweep", lists["rows"]))
    return results


def in_rows(to_row: Callable[[Result, Row], Row]) -> Callable[[list[Result], Row], dict[str, list[Row]]]:
    """Return the function for `collect` that makes one of the `rows` from each result."""
    return lambda results, common: {"rows": [to_row(one, common) for one in results]}


measured_rows = in_rows(to_row)


def attention_tables(measurements: list[Measurement]) -> Iterator[RenderableType]:
    """Yield a table per case: a line per operation and implementation, both directions in columns, then notes."""
    best = best_dense(measurements)
    for case in dict.fromkeys(one.case for one in measurements):
        yield _case_table(case, [one for one in measurements if one.case == case], best)


def best_dense(measurements: list[Measurement]) -> DenseTimes:
    """Return the fastest dense attention by shape, tokens and direction: the baseline."""
    best: DenseTimes = {}
    for one in measurements:
        if one.operation == DENSE and one.timing is not None:
            key = _key(one)
            if key not in best or one.timing.median_ms < median_of(best[key]):
                best[key] = one
    return best


def _case_table(case: Case, measurements: list[Measurement], best: DenseTimes) -> Table:
    columns = ("", "runs on", *(f"{direction} ms" for direction in Direction), "peak GiB", "error", "error / limit")
    table = Table(*columns, box=box.SIMPLE, pad_edge=False, title=Text(str(case), style="bold"), title_justify="left")
    table.caption, table.caption_justify = _caption(measurements), "left"
    lines: dict[tuple[str, str], list[Measurement]] = {}
    for one in measurements:
        lines.setdefault((one.operation, one.implementation), []).append(one)
    for (operation, implementation), line in lines.items():
        if all(one.check is None and not one.is_ours for one in line):
            # an absent implementation gets no line; the notes mention it
            continue
        by_direction = {one.direction: one for one in line}
        times = [_time(by_direction.get(direction), best) for direction in Direction]
        # with its ratio to the bytes of the required tensors
        peak = "".join(f"{one.peak_bytes / GIB:.2f} {one.peak_ratio:.2f}x" for one in line if one.peak_bytes is not None)
        table.add_row(operation, Text(implementation), *times, Text(peak), *_error(line))
    return table


def _caption(measurements: list[Measurement]) -> Text:
    """Return the text below a table: the reference, why times are missing, overlaps, notes."""
    methods = dict.fromkeys(one.check.method for one in measurements if one.check is not None)
    ties = max((one.check.near_ties for one in measurements if one.check is not None), default=0)
    lines = [f"error: of a row's largest value, against {', '.join(methods)}"] if methods else []
    lines += [f"{ties} choices of blocks are too close to call and not compared"] if ties else []
    notes: dict[str, list[str]] = {}
    for one in measurements:
        overlap = [] if one.overlap is None else [f"{100 * one.overlap:.0f} % of free blocks persist to the next query"]
        for text in (one.reason, one.note, *overlap):
            if text:
                notes.setdefault(f"{one.operation} on {one.implementation}: {text}", []).append(one.direction)
    lines += [text if len(directions) > 1 else f"{directions[0]} {text}" for text, directions in notes.items()]
    return Text("\n".join(lines))


def progress_line(one: Measurement) -> str:
    """Return the progress line of a measurement."""
    figure = one.reason or ("right" if one.timing is None else f"{number(one.timing.median_ms)} ms")
    return f"{one.case}: {one.operation} {one.direction} on {one.implementation}: {figure}"


def _key(one: Measurement) -> tuple[HeadShape, int, Direction]:
    return (one.case.shape, one.case.seq_len, one.direction)


def median_of(one: Measurement) -> float:
    """Return the median in ms of a measurement that has a time."""
    assert one.timing is not None
    return one.timing.median_ms


def _time(one: Measurement | None, best: DenseTimes) -> Text:
    """Return the median, the repetitions if they are few, and the best dense time over it."""
    if one is None or one.timing is None:
        return Text("-")
    count = f" of {one.timing.count}" if one.timing.count < FEW else ""
    dense = best.get(_key(one))
    if dense is one:
        return Text(f"{number(one.timing.median_ms)}{count} best", style="bold")
    ratio = f" {median_of(dense) / one.timing.median_ms:.2f}x" if dense is not None and one.operation == "nsa" else ""
    return Text(f"{number(one.timing.median_ms)}{count}{ratio}")


def _error(line: list[Measurement]) -> tuple[Text, Text]:
    """Return the largest error of the line, and the largest error as a share of its limit."""
    checks = [one.check for one in line if one.check is not None]
    if not checks:
        return Text("-"), Text("-")
    worst = max(checks, key=lambda check: check.limit_used)
    style = "" if worst.limit_used <= 1 else "bold"
    return Text(f"{worst.error:.1e} {worst.error_of}", style=style), Text(f"{worst.limit_used:.2f}", style=style)
