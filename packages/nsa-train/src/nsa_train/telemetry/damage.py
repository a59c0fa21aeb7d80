"""The damaged records of a run, a line per file; readers leave them out."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nsa_train.errors import ConfigError
from nsa_train.files import MOST_RECORDS, MOST_SAMPLE, read_regular, refusal
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.recipe import read_toml
from nsa_train.telemetry.records import load_json, scan_events, scan_rows

SHOWN = 3
"""Most lines of a file that are numbered; the others are counted."""


def damaged_records(paths: RunDirectory) -> list[str]:
    """Return a line per file of rank 0's records that is damaged: which of its lines, or why it is left out as a whole."""
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
