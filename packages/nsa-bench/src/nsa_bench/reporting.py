"""A run from its plan to its files and tables. Files are written after every measurement, so a run that is cut off leaves them.

The JSON file: `environment` (see `nsa_bench.environment`), `options` (as given), `rows`, the measurements, and with a
sweep or a preset `sweep` or `targets`, the verdicts. The CSV file holds the rows, or with a sweep those of `sweep`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from rich.console import Console

from nsa_bench.attention import run_jobs
from nsa_bench.attention_tables import attention_tables, progress_line, sweep_table, targets_table
from nsa_bench.compare import Comparison, run_comparisons
from nsa_bench.environment import describe_environment
from nsa_bench.measurements import Measurement, common_columns, to_row
from nsa_bench.measuring import Place
from nsa_bench.plans import AttentionOptions, Plan
from nsa_bench.results import write_csv, write_json
from nsa_bench.routes import RouteRecorder
from nsa_bench.sweep import SweepVerdict, judge_sweep
from nsa_bench.targets import Judgement, judge_targets


@frozen(kw_only=True)
class Report:
    """Where results go, and what every one of them carries."""

    environment: dict[str, Any]
    options: dict[str, Any]
    json_file: Path | None = None
    csv_file: Path | None = None

    @classmethod
    def of(cls, options: dict[str, Any], commit: str | None, json_file: Path | None, csv_file: Path | None) -> "Report":
        """Return a report of this machine; `commit` stands for the checkout's where that has none.

        Raises:
            OSError: when a file cannot be written, before anything is measured.
        """
        environment = describe_environment()
        environment["commit"] = commit or environment["commit"]
        for path in (json_file, csv_file):
            if path is not None:
                path.open("a").close()
        return cls(environment=environment, options=options, json_file=json_file, csv_file=csv_file)

    def rows(self, measurements: list[Measurement]) -> list[dict[str, Any]]:
        """Return the flat rows of `measurements`."""
        common = common_columns(self.environment)
        return [to_row(one, common) for one in measurements]

    def write(self, measurements: list[Measurement], plan: Plan | None = None) -> None:
        """Write both files anew."""
        rows = self.rows(measurements)
        judged = {} if plan is None else self._judged(measurements, plan)
        if self.json_file is not None:
            write_json(self.json_file, {"environment": self.environment, "options": self.options, "rows": rows, **judged})
        lines = judged.get("sweep", rows)
        if self.csv_file is not None and lines:
            write_csv(self.csv_file, lines)

    def _judged(self, measurements: list[Measurement], plan: Plan) -> dict[str, list[dict[str, Any]]]:
        common = common_columns(self.environment)
        judged = {}
        if plan.points:
            judged["sweep"] = [_verdict_row(one) | to_row(one.measurement, common) for one in judge_sweep(plan.points, measurements)]
        if plan.targets:
            judged["targets"] = [_judgement_row(one) for one in judge_targets(plan.targets, measurements)]
        return judged


def run_attention(plan: Plan, backend: str, report: Report, screen: Console, progress: Console) -> list[Measurement]:
    """Measure `plan`, print its tables, write its files, and return the measurements."""
    place = Place(device=plan.device, registry=RouteRecorder.of_installed(), backend=backend)
    measurements = collect(run_jobs(plan.jobs, place), report, progress, plan)
    if plan.points:
        # a table per point would bury the verdicts; the files have it all
        screen.print(sweep_table(judge_sweep(plan.points, measurements)))
        return measurements
    for table in attention_tables(measurements):
        screen.print(table)
    if plan.targets:
        screen.print(targets_table(judge_targets(plan.targets, measurements), measurements))
    return measurements


def run_comparison(
    device: torch.device, wanted: tuple[Comparison, ...], backend: str, report: Report, screen: Console, progress: Console
) -> list[Measurement]:
    """Measure `wanted`, print the table, write the files, and return the measurements."""
    place = Place(device=device, registry=RouteRecorder.of_installed(), backend=backend)
    measurements = collect(run_comparisons(wanted, place), report, progress)
    for table in attention_tables(measurements):
        screen.print(table)
    return measurements


def collect(found: Iterable[Measurement], report: Report, progress: Console, plan: Plan | None = None) -> list[Measurement]:
    """Return the measurements of `found`, each told and written as it comes."""
    measurements: list[Measurement] = []
    for one in found:
        measurements.append(one)
        progress.print(progress_line(one), markup=False, highlight=False, soft_wrap=True)
        report.write(measurements, plan)
    return measurements


def options_row(options: AttentionOptions, backend: str) -> dict[str, Any]:
    """Return the options as the JSON file holds them."""
    return attrs.asdict(options) | {"backend": backend}


def _verdict_row(one: SweepVerdict) -> dict[str, Any]:
    return {"variable": one.point.variable, "value": one.point.value, "ratio": one.ratio, "verdict": one.verdict}


def _judgement_row(one: Judgement) -> dict[str, Any]:
    target = one.target
    return {
        "shape": target.shape.name,
        "seq_len": target.seq_len,
        "selection": target.selection.value,
        "operation": target.operation,
        "direction": target.direction.value,
        "unit": target.unit,
        "measured": one.measured,
        "must": target.must,
        "aim": target.aim,
        "verdict": one.verdict,
    }
