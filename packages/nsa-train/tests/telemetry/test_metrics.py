"""metrics.json: each figure uses the rows that its name states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.telemetry.metrics import seconds_alive, summarise
from nsa_train.telemetry.records import FALLBACK_COLUMNS, TRAINING_COLUMNS, VALIDATION_COLUMNS, CsvTable, Heartbeat


@pytest.fixture
def summary(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> Callable[..., dict[str, Any]]:
    """A function from rows of training.csv to the metrics of a run with them, two evaluations and two rows of fallbacks."""
    paths = RunDirectory(tmp_path)

    def of(rows: list[dict[str, float]]) -> dict[str, Any]:
        tables = (
            (paths.training, TRAINING_COLUMNS, rows),
            (paths.validation, VALIDATION_COLUMNS, [{"step": 0, "val_loss": 5.0, "ppl": 150.0}, {"step": 9, "val_loss": 2.0, "ppl": 7.5}]),
            (paths.fallbacks, FALLBACK_COLUMNS, [{"step": 1, "total": 1}, {"step": 9, "total": 4}]),
        )
        for path, columns, content in tables:
            table = CsvTable(path, columns)
            for row in content:
                table.append(row)
        return summarise(paths, tiny_config(), torch.device("cpu"), world_size=1)

    return of


def _row(step: int) -> dict[str, float]:
    # speeds 1, 4, 9, ...: mean, median and extremes differ
    figures = {"toks_per_s": step**2, "step_ms": 100 - step**2, "fetch_ms": float(step), "mfu": step / 100}
    return {"step": step, "loss": 5.0 - step / 10, "tokens": 64 + step, "is_clipped": int(step in (2, 3)), **figures}


def test_every_figure_is_of_its_own_rows(summary: Callable[..., Any]) -> None:
    metrics = summary([_row(step) for step in range(1, 10)])
    assert (metrics["steps"], metrics["tokens"], metrics["clipped_steps"]) == (9, 9 * 64 + 45, 2)
    assert (metrics["first_loss"], metrics["last_loss"]) == (4.9, 4.1)
    assert (metrics["first_val_loss"], metrics["val_loss"], metrics["val_ppl"]) == (5.0, 2.0, 7.5)
    assert (metrics["toks_per_s_median"], metrics["step_ms_median"], metrics["mfu"]) == (25, 75, 0.05)
    # of nine values the eighth: 0.95 * (9 - 1) is 7.6
    assert metrics["fetch_ms_p95"] == 8
    assert metrics["fallbacks_total"] == 4


def test_without_a_step_there_are_no_figures(summary: Callable[..., Any]) -> None:
    metrics = summary([])
    assert (metrics["steps"], metrics["tokens"], metrics["clipped_steps"]) == (0, 0, 0)
    for name in ("first_loss", "last_loss", "toks_per_s_median", "step_ms_median", "fetch_ms_p95", "mfu"):
        assert metrics[name] is None, name
    assert metrics["val_ppl"] == 7.5


def test_fields_that_a_table_lacks_are_left_out(summary: Callable[..., Any]) -> None:
    metrics = summary([{"step": 1, "loss": 5.0}, _row(2), {"step": 3, "loss": 4.0}])
    assert (metrics["steps"], metrics["tokens"], metrics["fetch_ms_p95"]) == (3, 66, 2)


def test_a_skip_that_is_repeated_after_a_resume_counts_once(tmp_path: Path, summary: Callable[..., Any]) -> None:
    heartbeat = Heartbeat(tmp_path)
    for step in (2, 4, 6):
        heartbeat.beat("skip", step, cause="overflow")
    heartbeat.beat("boot", 3, resumed_at=3)
    heartbeat.beat("skip", 4, cause="overflow")
    assert summary([_row(step) for step in range(1, 8)])["skipped_steps"] == 2


def test_seconds_are_those_of_a_clock_that_nobody_sets(tmp_path: Path) -> None:
    """Two processes of 10 s and 5 s; the wall clock is set by an hour in the first, and records of old have that one alone."""
    times = [("boot", 0.0, 100.0), ("step_end", 4.0, 3704.0), ("step_end", 10.0, 110.0), ("boot", 0.0, 500.0), ("finish", 5.0, 505.0)]
    events = [{"msg": msg, "uptime_s": uptime, "ts": ts} for msg, uptime, ts in times]
    assert seconds_alive(events) == 15
    before = [{"msg": msg, "ts": 100 * number} for number, msg in enumerate(("boot", "step_end", "finish", "boot", "finish"))]
    assert seconds_alive(before) == 300
    assert seconds_alive([]) == 0
