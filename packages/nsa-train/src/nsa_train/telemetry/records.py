"""The files that grow during a run: CSV tables with a header, and the heartbeat. Units stand in the names."""

import csv
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TRAINING_COLUMNS = ("step", "loss", "ppl", "lr", "toks_per_s", "grad_norm", "fetch_ms")
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


def perplexity(loss: float) -> float:
    """Return e to the `loss` in nats; inf where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf


class CsvTable:
    """A CSV file that starts with its header; each row is on disk once it was appended."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, tuple(columns)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(self.columns)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write the values of `row`, which has exactly the table's columns."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writerow({name: _shortened(value) for name, value in row.items()})


class Heartbeat:
    """heartbeat_rank{r}.jsonl: one JSON object per event, with ts (s), iso, pid, rank, step and msg."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.path, self.rank = folder / f"heartbeat_rank{rank}.jsonl", rank

    def beat(self, msg: str, step: int, **fields: Any) -> None:
        """Append an event; `msg` is boot, progress, step_end, val, save or halt. Figures that are not finite become null."""
        now = time.time()
        event = {
            "ts": round(now, 3),
            "iso": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
            "pid": os.getpid(),
            "rank": self.rank,
            "step": step,
            "msg": msg,
            **{name: _shortened(value) for name, value in fields.items()},
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, allow_nan=False) + "\n")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as strict JSON; figures that are not finite become null."""
    plain = {name: _shortened(value) for name, value in content.items()}
    path.write_text(json.dumps(plain, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _shortened(value: Any) -> Any:
    """Return floats with six significant digits, None for those that JSON cannot spell."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    return value
