"""The files that grow during a run: CSV tables with a header, and the heartbeat. Units stand in the names."""

import csv
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TRAINING_COLUMNS = (
    *("step", "loss", "ppl", "lr", "toks_per_s", "grad_norm", "fetch_ms"),
    *("step_ms", "tokens", "mfu", "is_clipped", "data_synthetic"),
)
VALIDATION_COLUMNS = ("step", "val_loss", "ppl")
SELECTION_COLUMNS = (
    "step",
    "k_mean",
    "k_max",
    "rows",
    "pct_at_max",
    "free_block_share_mean",
    "overlap_with_previous_query",
)
FALLBACK_COLUMNS = ("step", "cmp", "select", "slc", "win", "nsa", "total")


def perplexity(loss: float) -> float:
    """Return e to the `loss` in nats; inf where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf


class CsvTable:
    """A CSV file that starts with its header; each row is on disk once it was appended."""

    def __init__(self, path: Path, columns: Sequence[str], *, resumed_at: int | None = None) -> None:
        """Start `path` anew, or with `resumed_at` keep the rows up to that step, which end the resumed run's past."""
        self.path, self.columns = path, tuple(columns)
        kept = [] if resumed_at is None else [row for row in _whole_rows(path) if int(row["step"]) <= resumed_at]
        aside = path.with_name(f".{path.name}.aside")
        with aside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(kept)
        aside.replace(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write the values of `row`, which has no other than the table's columns; one that it lacks stays empty."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writerow({name: _shortened(value) for name, value in row.items()})


def read_rows(path: Path) -> Iterator[dict[str, float]]:
    """Give the rows of a CSV table of numbers, an empty field as NaN; a row that was cut off while written is left out."""
    for row in _whole_rows(path):
        yield {name: float(value) if value else math.nan for name, value in row.items()}


def _whole_rows(path: Path) -> Iterator[dict[str, str]]:
    if not path.is_file():
        return
    with path.open(newline="", encoding="utf-8") as file:
        # the line's end is written last
        yield from csv.DictReader(line for line in file if line.endswith("\n"))


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Give the events of a heartbeat file; a line that was cut off while written is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


class Heartbeat:
    """heartbeat_rank{r}.jsonl: one JSON object per event, with ts (s), iso, pid, rank, step and msg."""

    def __init__(self, folder: Path, rank: int = 0, *, marks: Mapping[str, Any] | None = None) -> None:
        """Go on at the end of the file in `folder`; a line that a killed process left unfinished is closed first.

        `marks` stand in every event.
        """
        self.path, self.rank, self.marks = folder / f"heartbeat_rank{rank}.jsonl", rank, dict(marks or {})
        if self.path.is_file() and self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n"):
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def beat(self, msg: str, step: int, **fields: Any) -> None:
        """Append an event; `msg` is boot, progress, step_end, val, save, skip, halt, ... Figures that are not finite become null."""
        now = time.time()
        event = {
            "ts": round(now, 3),
            "iso": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
            "pid": os.getpid(),
            "rank": self.rank,
            "step": step,
            "msg": msg,
            **self.marks,
            **{name: _shortened(value) for name, value in fields.items()},
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, allow_nan=False) + "\n")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as strict JSON, whole or not at all; figures that are not finite become null."""
    plain = {name: _shortened(value) for name, value in content.items()}
    aside = path.with_name(f".{path.name}.aside")
    aside.write_text(json.dumps(plain, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    aside.replace(path)


def _shortened(value: Any) -> Any:
    """Return floats with six significant digits, None for those that JSON cannot spell."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    return value
