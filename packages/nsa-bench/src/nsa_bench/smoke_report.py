"""The command `nsa-bench smoke`: verdicts as a table and as files."""

import math
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsa_bench.errors import OptionError
from nsa_bench.results import write_csv, write_json
from nsa_bench.smoke import check_baseline, check_run
from nsa_bench.smoke_records import Verdict, read_records

WORDS = {True: "ok", False: "FAIL", None: "n/a"}


def bench_smoke(
    folder: Path, *, baseline: Path | None, tolerance: float, json_file: Path | None, csv_file: Path | None, screen: Console
) -> list[Verdict]:
    """Judge the run in `folder`, print the table, write the files, and return the verdicts.

    Raises:
        OptionError: when `folder` is no run, or the baseline cannot be used.
    """
    if not 0 <= tolerance < math.inf:
        raise OptionError(f"--tolerance={tolerance} is not a finite percentage >= 0; use 5")
    records = read_records(folder)
    verdicts = check_run(records)
    if baseline is not None:
        verdicts += check_baseline(records, baseline, tolerance)
    screen.print(smoke_table(folder, verdicts))
    rows: list[dict[str, Any]] = [attrs.asdict(verdict) for verdict in verdicts]
    if json_file is not None:
        from nsa_bench.environment import describe_environment

        write_json(json_file, {"environment": describe_environment(), "run": str(folder), "metrics": records.metrics, "verdicts": rows})
    if csv_file is not None:
        write_csv(csv_file, rows)
    return verdicts


def smoke_table(folder: Path, verdicts: list[Verdict]) -> Table:
    """Return a line per rule."""
    table = Table("rule", "verdict", "found", title=f"smoke {folder}")
    for verdict in verdicts:
        word = Text(WORDS[verdict.is_passed], style="red" if verdict.is_passed is False else "")
        table.add_row(Text(verdict.rule), word, Text(verdict.found))
    return table
