"""The files that grow during a run: CSV tables with a header, and the heartbeat. Names contain units."""

import csv
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from nsa_train.errors import ConfigError
from nsa_train.files import (
    MOST_JSON,
    MOST_LINE,
    MOST_RECORDS,
    MOST_SAMPLE,
    IrregularFileError,
    open_regular,
    parse_json,
    read_regular,
    refusal,
    written_whole,
)
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.recipe import read_toml

TRAINING_COLUMNS = (
    *("step", "loss", "ppl", "lr", "toks_per_s", "grad_norm", "fetch_ms"),
    *("step_ms", "tokens", "mfu", "is_clipped", "data_synthetic"),
)
VALIDATION_COLUMNS = ("step", "val_loss", "ppl")
SELECTION_COLUMNS = ("step", "k_mean", "k_max", "rows", "pct_at_max", "free_block_share_mean", "overlap_with_previous_query")
FALLBACK_COLUMNS = ("step", "cmp", "select", "slc", "win", "nsa", "total")
TABLES = {
    "training.csv": TRAINING_COLUMNS,
    "val.csv": VALIDATION_COLUMNS,
    "k_stats.csv": SELECTION_COLUMNS,
    "fallback_counters.csv": FALLBACK_COLUMNS,
}
"""File in a run directory -> its columns."""
COUNTS = ("step", "rank", "pid", "world_size", "restarts_left", "tokens", "fallbacks_total")
FIGURES = (
    *("uptime_s", "loss", "lr", "toks_per_s", "grad_norm", "step_ms", "mfu"),
    *("pct_at_max", "free_block_share_mean", "overlap_with_previous_query", "selection_loss"),
)
FIGURE_FAMILIES = ("gate_", "contribution_", "k_", "reads_", "gpu_mem_")
TABLES_OF_EVENTS = ("gate_branch_shares", "routes")
"""Fields of an event with which its readers compute: whole numbers, numbers, prefixes of numbers, tables."""
EXACT = ("loss", "val_loss", "first_loss", "last_loss", "first_val_loss", "grad_norm")
"""Figures with nine significant digits, which distinguish any two float32 values; the others have six."""
MOST = 2**53
"""No count and no time in seconds exceeds this."""
SHOWN = 3
"""Maximum lines of a file that a message numbers; the others are counted."""


class Cause(StrEnum):
    """Why a step was skipped: the field `cause` of its event."""

    LOSS = "loss"
    """The loss of a micro-batch is not finite."""
    GRADIENT = "gradient"
    """The gradient is not finite, though every loss is."""
    OVERFLOW = "overflow"
    """The gradient overflowed float16, as happens until the loss scale fits."""
    SPIKE = "spike"


def perplexity(loss: float) -> float:
    """Return e to the `loss` in nats; inf if that exceeds a float."""
    return math.exp(loss) if loss < 700 else math.inf


class LongLineError(IrregularFileError):
    """Raised if a line of a growing file is too long."""


class CsvTable:
    """A CSV file that starts with its header; `append` returns when the row is on disk."""

    def __init__(self, path: Path, columns: Sequence[str], *, resumed_at: int | None = None) -> None:
        """Start an empty table at `path`; with `resumed_at`, keep the rows up to that step and delete later ones."""
        self.path, self.columns = path, tuple(columns)
        rows = () if resumed_at is None else scan_rows(path)
        kept = [row for _, row in rows if row is not None and int(row["step"]) <= (resumed_at or 0)]
        with written_whole(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(kept)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write the values of `row`, which has only columns of the table; a missing column stays empty."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            if file.tell() == 0:
                # the file was deleted while the run wrote to it
                writer.writeheader()
            writer.writerow(_shortened(row))


def read_rows(path: Path) -> Iterator[dict[str, float]]:
    """Yield the rows of a CSV table of numbers, with empty and missing fields as NaN and without rows that cannot be read."""
    missing = dict.fromkeys(TABLES.get(path.name, ()), math.nan)
    for _, row in scan_rows(path):
        if row is not None:
            yield missing | {name: float(value) if value else math.nan for name, value in row.items()}


def scan_rows(path: Path) -> Iterator[tuple[int, dict[str, str] | None]]:
    """Yield the number and the fields of each line below a table's header; the fields are None if a line cannot be read.

    A header that cannot be read comes as line 1; its columns are then those of the run directory's table of that name. A last
    line without a line end is being written, or its process was killed: it is left out.
    """
    names = known = TABLES.get(path.name, ())
    for number, line in _whole_lines(path):
        if number > 1:
            yield number, _fields_of(line, names)
            continue
        found = tuple(line.decode("utf-8", errors="replace").split(","))
        # columns differ between versions
        if not known or ("step" in found and (set(found) <= set(known) or set(known) <= set(found))):
            names = found
        else:
            yield number, None


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a heartbeat file, without lines that are not events."""
    return (event for _, event in scan_events(path) if event is not None)


def scan_events(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number and the event of each line of a heartbeat, None for a line that cannot be read; as `scan_rows`."""
    return ((number, as_event(line)) for number, line in _whole_lines(path))


def as_event(line: bytes) -> dict[str, Any] | None:
    """Return the event in a heartbeat's line; None if it is not an event, or lacks a field that every reader needs."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and _is_event(event) else None


def standing_skips(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of skipped steps that are part of the run, without steps that were repeated after a resume."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["msg"] == "boot":
            found = [skip for skip in found if skip["step"] <= (event.get("resumed_at") or 0)]
        elif event["msg"] == "skip":
            found.append(event)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the table in a JSON file; an empty one if the file is missing or damaged."""
    try:
        return load_json(path)
    except (FileNotFoundError, ValueError):
        # IrregularFileError is a ValueError
        return {}


def load_json(path: Path) -> dict[str, Any]:
    """Return the table in a JSON file.

    Raises:
        ValueError: if it holds no table.
        OSError: if it cannot be read.
    """
    content = parse_json(read_regular(path, MOST_JSON))
    if not isinstance(content, dict):
        raise ValueError(f"{type(content).__name__} in place of a table")
    return content


class Heartbeat:
    """heartbeat_rank{r}.jsonl: one JSON object per event, with ts (s), iso, uptime_s, pid, rank, step and msg."""

    def __init__(self, folder: Path, rank: int = 0, *, marks: Mapping[str, Any] | None = None) -> None:
        """Go on at the end of the file in `folder`; a line that a killed process left unfinished is closed first.

        Every event has `marks`.

        Raises:
            ConfigError: if the path exists and is not a file that can be read.
        """
        self.path, self.rank, self.marks = RunDirectory(folder).heartbeat_of(rank), rank, dict(marks or {})
        self._started_s = time.monotonic()
        if problem := refusal(self.path, MOST_RECORDS):
            raise ConfigError(f"{self.path} cannot be continued ({problem}); move it away, and go on with --resume")
        if self.path.exists() and not _ends_whole(self.path):
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def beat(self, msg: str, step: int, **fields: Any) -> None:
        """Append an event; `msg` is boot, progress, step_end, val, save, skip, halt, ... Figures that are not finite become null."""
        now = time.time()
        event = {
            "ts": round(now, 3),
            "iso": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
            # ts jumps if the clock is set; uptime_s does not
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "pid": os.getpid(),
            "rank": self.rank,
            "step": step,
            "msg": msg,
            **self.marks,
            **_shortened(fields),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, allow_nan=False) + "\n")


def seconds_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """Return the seconds between two events of one process, by `uptime_s`, or by `ts` if a record lacks it."""
    name = "ts" if before.get("uptime_s") is None or after.get("uptime_s") is None else "uptime_s"
    return max(0.0, float(after[name] - before[name]))


def pid_namespace() -> str | None:
    """Return the pid namespace of this process, with an id of this boot of the host; None if Linux does not provide it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as strict JSON, atomically; figures that are not finite become null."""
    with written_whole(path) as aside:
        aside.write_text(json.dumps(_shortened(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _shortened(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return `content` with rounded floats, and None for those that JSON cannot represent."""
    return {name: _short(value, digits=9 if name in EXACT else 6) for name, value in content.items()}


def _short(value: Any, *, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return _shortened(value) if isinstance(value, dict) else value


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        for number, (line, _) in enumerate(lines_from(path, 0), 1):
            yield number, line
    except LongLineError:
        yield number + 1, b""
    except (FileNotFoundError, IrregularFileError):
        # a caller that must report it calls `refusal`
        return


def lines_from(path: Path, start: int) -> Iterator[tuple[bytes, int]]:
    """Yield each line of `path` from byte `start` on, without its line end, and the byte at which the next one begins.

    A last line without an end is left out.

    Raises:
        LongLineError: at a line of more than 16 MiB; in a sparse file it may have no end.
        IrregularFileError: if it is not a regular file, or larger than 4 GiB.
        OSError: if it does not exist or cannot be read.
    """
    with open_regular(path, MOST_RECORDS) as file:
        file.seek(start)
        while line := file.readline(MOST_LINE):
            if line.endswith(b"\n"):
                start += len(line)
                yield line.rstrip(b"\r\n"), start
            elif len(line) == MOST_LINE:
                raise LongLineError(f"the line at byte {start:,} is longer than {MOST_LINE // 2**20} MiB")


def _ends_whole(path: Path) -> bool:
    """Return whether the last line of a regular file has its end, or there is none."""
    with open_regular(path, MOST_RECORDS) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() in (b"", b"\n")


def _fields_of(line: bytes, names: Sequence[str]) -> dict[str, str] | None:
    try:
        row = dict(zip(names, line.decode("ascii").split(","), strict=True))
        for value in row.values():
            float(value or "nan")
        is_row = 0 <= int(row.get("step", "0")) < MOST
    except ValueError:
        return None
    return row if is_row else None


def _is_event(event: Mapping[str, Any]) -> bool:
    shares = event.get("gate_branch_shares") or {}
    figures = {name: value for name, value in event.items() if name in FIGURES or name.startswith(FIGURE_FAMILIES)}
    figures = {name: value for name, value in figures.items() if name not in TABLES_OF_EVENTS}
    return (
        isinstance(event.get("msg"), str)
        and _is_number(event.get("ts"))
        and abs(event["ts"]) < MOST
        and _is_count(event.get("step"))
        and all(event.get(name) is None or _is_count(event[name]) for name in COUNTS)
        and (event.get("resumed_at") in (None, -1) or _is_count(event["resumed_at"]))
        and all(isinstance(event.get(name) or {}, dict) for name in TABLES_OF_EVENTS)
        and all(value is None or _is_number(value) for value in (*figures.values(), *shares.values()))
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _is_number(value: object) -> bool:
    # a float's range, which an integer of JSON may leave
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def damaged_records(paths: RunDirectory) -> list[str]:
    """Return a message for each damaged file of rank 0's records: the damaged lines, or why the whole file is left out."""
    tables = (paths.training, paths.validation, paths.selection, paths.fallbacks)
    found = [_lines_left_out(path, scan_rows(path)) for path in tables]
    found.append(_lines_left_out(paths.heartbeat, scan_events(paths.heartbeat)))
    found += [_left_out(path, load_json) for path in (paths.environment, paths.metrics)]
    found.append(_left_out(paths.config, read_toml))
    found += [_undecoded(path) for path in sorted(paths.samples.glob("*.txt"))]
    return [line for line in found if line]


def _lines_left_out(path: Path, scanned: Iterable[tuple[int, Any]]) -> str:
    if problem := refusal(path, MOST_RECORDS):
        return f"{path} cannot be read ({problem}); it is left out"
    numbers = [number for number, content in scanned if content is None]
    if not numbers:
        return ""
    shown = ", ".join(map(str, numbers[:SHOWN])) + (f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else "")
    return f"{path}: line{'s' * (len(numbers) > 1)} {shown} cannot be read, and {'are' if len(numbers) > 1 else 'is'} left out"


def _left_out(path: Path, read: Callable[[Path], object]) -> str:
    if not path.exists():
        return ""
    try:
        read(path)
    except ConfigError as error:
        return f"{error}".partition("; ")[0] + "; it is left out"
    except ValueError as error:
        return f"{path} cannot be read as JSON ({error}); it is left out"
    return ""


def _undecoded(path: Path) -> str:
    if problem := refusal(path, MOST_SAMPLE):
        return f"{path} cannot be read ({problem}); it is left out"
    content = read_regular(path, MOST_SAMPLE)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return f"{path}: line {line} is not UTF-8; what cannot be read of the text is left out"
    return ""
