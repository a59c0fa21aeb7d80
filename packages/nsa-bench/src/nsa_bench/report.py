"""`nsa-bench report`: write one page from result files, and with `--bundle` an archive that shows whether a machine is ready.

Every JSON file of a command holds `environment`, `options` and lists of rows. The page shows a table for each list. Columns with the same value in
all rows of the list are shown once, above the table. The page needs no network and no other file.
"""

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.resources import files as resources
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from rich.console import Console

from nsa_bench.errors import OptionError
from nsa_bench.options import CallShape, ResultFiles
from nsa_bench.results import Output, check_writable, describe, number, to_json

MOST_RESULT = 64 * 2**20
"""Maximum bytes of a result file; a larger file is not one of ours."""
MACHINE = ("time", "gpu", "cpu", "torch", "triton", "cuda", "commit")
"""The fields of the environment in a file's heading."""
FIRST_DATE = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the archive, so that equal content gives equal bytes."""


class RowTable(NamedTuple):
    """A list of rows of a result file."""

    name: str
    columns: list[str]
    """Columns that differ between rows."""
    rows: list[list[str]]
    same: dict[str, str]
    """Columns that are equal in all rows."""


class Result(NamedTuple):
    """A result file."""

    path: Path
    content: dict[str, Any]

    @property
    def environment(self) -> dict[str, Any]:
        """Return where and when it was made."""
        found: dict[str, Any] = self.content["environment"]
        return found

    @property
    def heading(self) -> dict[str, str]:
        """Return machine, versions, date and commit."""
        return {name: shown(self.environment[name]) for name in MACHINE if self.environment.get(name) is not None}

    @property
    def options(self) -> dict[str, str]:
        """Return the options that were given."""
        given = self.content.get("options")
        return {name: shown(value) for name, value in given.items() if value is not None} if isinstance(given, dict) else {}

    @property
    def tables(self) -> list[RowTable]:
        """Return a table per list of rows."""
        return [table_of(name, rows) for name, rows in self.content.items() if is_rows(rows)]


def run_report(paths: Sequence[Path], out: Path, *, bundle: Path | None, tests: Sequence[Path], output: Output) -> None:
    """Write a page of the result files at `paths`, files or folders, to `out`, and the archive `bundle`.

    Raises:
        OptionError: if a path does not exist, a file is not a result, there is no result at all, or a file would be written over.
        OSError: if a file cannot be written; before anything is written.
    """
    results, others = find_results(paths)
    missing = [str(path) for path in tests if not path.is_file()]
    if missing:
        raise OptionError(f"--tests={missing[0]} is no file (it goes into the archive as it is); name a report of tests")
    if tests and bundle is None:
        raise OptionError("--tests came without --bundle (reports of tests go into the archive); give --bundle FILE.zip")
    taken = {path.resolve() for path in (*(result.path for result in results), *tests)}
    targets = {option: target for option, target in (("--out", out), ("--bundle", bundle)) if target is not None}
    for option, target in targets.items():
        if target.resolve() in taken:
            raise OptionError(f"{option}={target} is a file that this command reads, or writes already; give another name")
        taken.add(target.resolve())
    check_writable(targets.values())
    for path in others:
        output.say(f"{path} is no result of nsa-bench, and is left out")
    page = page_of(results)
    out.write_text(page, encoding="utf-8")
    output.say(f"{out}: {len(results)} results")
    if bundle is not None:
        write_bundle(bundle, results, page, tests)
        output.say(f"{bundle}: environment, routing, {len(tests)} reports of tests, {len(results)} results")


def find_results(paths: Iterable[Path]) -> tuple[list[Result], list[Path]]:
    """Return the results at `paths`, in order of their dates, and the JSON files in folders that are not results.

    Raises:
        OptionError: as `run_report`.
    """
    results: list[Result] = []
    others: list[Path] = []
    for path in paths:
        if not path.exists():
            raise OptionError(f"PATH={str(path)!r} is not there; name a JSON file of a command, or a folder of them")
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            content = read_result(file)
            if content is not None:
                results.append(Result(file, content))
            elif path.is_dir():
                others.append(file)
            else:
                raise OptionError(
                    f"PATH={str(file)!r} is no result of nsa-bench (it holds an environment and rows); use a command's --json FILE"
                )
    if not results:
        raise OptionError(f"{', '.join(str(path) for path in paths)}: no result of nsa-bench; make one with a command's --json FILE")
    unique = {result.path.resolve(): result for result in results}
    return sorted(unique.values(), key=lambda result: (str(result.environment.get("time")), str(result.path))), others


def read_result(path: Path) -> dict[str, Any] | None:
    """Return the content of a result file, None for another file."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_RESULT:
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_result = isinstance(content, dict) and isinstance(content.get("environment"), dict) and any(map(is_rows, content.values()))
    return content if is_result else None


def is_rows(value: Any) -> bool:
    """Return whether `value` is a list of rows: a list of at least one dictionary."""
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def table_of(name: str, rows: list[dict[str, Any]]) -> RowTable:
    """Return the table of `rows`; a column may be missing in some."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    values = {column: [shown(row.get(column)) for row in rows] for column in columns}
    # a single row keeps all of its columns
    same = {column: found[0] for column, found in values.items() if len(rows) > 1 and len(set(found)) == 1}
    kept = [column for column in columns if column not in same]
    return RowTable(name, kept, [[values[column][index] for column in kept] for index in range(len(rows))], same)


def shown(value: Any) -> str:
    """Return a value as the page shows it: four digits, "" for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def page_of(results: Sequence[Result]) -> str:
    """Return the page as HTML."""
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        resources("nsa_bench").joinpath("report.html.j2").read_text(encoding="utf-8")
    )
    return template.render(results=results, date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC")


def write_bundle(path: Path, results: Sequence[Result], page: str, tests: Sequence[Path]) -> None:
    """Write the archive: environment, routing, reports of tests, results, the page, and the hash of each file."""
    parts = {"environment.json": to_json(describe()).encode(), "routing.json": routing_of_this_machine(), "report.html": page.encode()}
    for folder, files in (("tests", tests), ("benches", [result.path for result in results])):
        parts |= {f"{folder}/{name}": file.read_bytes() for name, file in _distinct(files).items()}
    listed = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(parts.items()))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted((parts | {"SHA256SUMS": listed.encode()}).items()):
            archive.writestr(zipfile.ZipInfo(name, FIRST_DATE), content, zipfile.ZIP_DEFLATED)


def _distinct(files: Sequence[Path]) -> dict[str, Path]:
    """Return unique names for `files`: their own, with a number if another file has it."""
    named: dict[str, Path] = {}
    for file in files:
        name, count = file.name, 2
        while name in named:
            name, count = f"{file.stem}-{count}{file.suffix}", count + 1
        named[name] = file
    return named


def routing_of_this_machine() -> bytes:
    """Return the JSON of `nsa-bench backends` on this machine."""
    # it loads torch, which a page of results does not need
    from nsa_bench.backends import run_backends

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "routing.json"
        run_backends(None, None, CallShape(), Output(ResultFiles(json_file=file), screen=Console(file=StringIO())))
        return file.read_bytes()
