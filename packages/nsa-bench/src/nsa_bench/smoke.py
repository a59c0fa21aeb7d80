"""`nsa-bench smoke`: check a run against nsa-train's smoke rules; the verdicts go to a table and to files."""

from pathlib import Path
from typing import Any

import attrs
from rich.table import Table
from rich.text import Text

from nsa_bench.results import Output
from nsa_train.run_dir import RunDirectory
from nsa_train.smoke import Verdict, judge_run

WORDS = {True: "ok", False: "FAIL", None: "n/a"}


def run_smoke(folder: Path, *, baseline: Path | None, tolerance: float, output: Output) -> bool:
    """Check the run in `folder`, print the table, write the files, and return True if no rule fails.

    Raises:
        nsa_train.errors.ConfigError: if `folder` is not a run, or the baseline cannot be used.
    """
    inputs = {RunDirectory(folder).metrics: "the figures of the run"} | ({} if baseline is None else {baseline: "the baseline"})
    output.check_files(inputs=inputs)
    records, verdicts = judgement = judge_run(folder, baseline=baseline, tolerance=tolerance)
    output.show(smoke_table(folder, verdicts))
    rows: list[dict[str, Any]] = [attrs.asdict(verdict) for verdict in verdicts]
    if output.files.json_file is None:
        # collecting the environment would load torch
        output.write({}, rows)
    else:
        output.write({"environment": output.environment, "run": str(folder), "metrics": records.metrics, "verdicts": rows}, rows)
    return not judgement.has_failed


def smoke_table(folder: Path, verdicts: list[Verdict]) -> Table:
    """Return a line per rule."""
    table = Table("rule", "verdict", "found", title=Text(f"smoke {folder}"))
    for verdict in verdicts:
        word = Text(WORDS[verdict.is_passed], style="red" if verdict.is_passed is False else "")
        table.add_row(Text(verdict.rule), word, Text(verdict.found))
    return table
