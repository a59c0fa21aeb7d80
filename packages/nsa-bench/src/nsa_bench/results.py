"""Output of a command's results: tables to the screen, progress lines to stderr, files with machine and commit."""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from nsa_bench.errors import BenchError, OptionError
from nsa_bench.options import ResultFiles
from nsa_core.environment import describe_environment

TABLE_WIDTH = 110
PACKAGES = (
    *("nsa-core", "nsa-train", "nsa-bench", "nsa-kernels-triton", "nsa-kernels-cuda"),
    *("torch", "triton", "numpy", "flash-attn", "transformers"),
)
"""The packages that a result may depend on."""


def describe() -> dict[str, Any]:
    """Return `nsa_core.environment.describe_environment` of this machine and checkout."""
    return describe_environment(PACKAGES, Path(__file__).parent)


def facts_of(environment: dict[str, Any]) -> dict[str, Any]:
    """Return machine, versions and commit as columns of a row; None for what `environment` lacks."""
    return {name: environment.get(name) for name in ("time", "cpu", "gpu", "torch", "triton", "commit")}


class Output:
    """The screen, the progress and the files of one call of a command."""

    def __init__(
        self, files: ResultFiles, commit: str | None = None, *, screen: Console | None = None, progress: Console | None = None
    ) -> None:
        """Open nothing yet; `commit` replaces the checkout's. Output to a file or pipe is wide enough for a table."""
        self.files, self.commit = files, commit
        self.screen = screen or Console(width=None if sys.stdout and sys.stdout.isatty() else TABLE_WIDTH)
        self.progress = progress or Console(stderr=True)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Return time, machine, versions and commit, as of the first use; every result has them."""
        environment = describe()
        return environment | {"commit": self.commit or environment["commit"]}

    def check_files(self, *others: Path | None, inputs: Mapping[Path, str] = MappingProxyType({})) -> None:
        """Check that the files, and `others` that the command writes, can be written, before anything is measured.

        `inputs`: files that the command reads, with what each is, such as "the plan"; a path without a file is left out.

        Raises:
            OptionError: if a file would replace another one or one of `inputs`.
            OSError: if one cannot be written.
        """
        paths = [path for path in (self.files.json_file, self.files.csv_file, *others) if path is not None]
        taken = {path.resolve(): what for path, what in inputs.items() if path.is_file()}
        for path in paths:
            if said := taken.get(path.resolve()):
                raise OptionError(f"{str(path)!r} is {said} (it would be lost); name another file for results")
            # a device or pipe takes several results
            if path.is_file() or not path.exists():
                taken[path.resolve()] = "the file of other results"
        check_writable(paths)

    def say(self, line: str) -> None:
        """Print a line of progress."""
        self.progress.print(line, markup=False, highlight=False, soft_wrap=True)

    def keep(self, write: Callable[[], object]) -> None:
        """Write the results so far by calling `write`. If that fails, print a line of progress and continue."""
        try:
            write()
        except (BenchError, OSError, ValueError) as error:
            self.say(f"what there is so far was not written ({type(error).__name__}: {error})")

    def show(self, *tables: RenderableType) -> None:
        """Print tables."""
        for table in tables:
            self.screen.print(table)

    def write(self, content: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Write `content` to the JSON file and `rows` to the CSV file, if the options name these files."""
        if self.files.json_file is not None:
            write_json(self.files.json_file, content)
        if self.files.csv_file is not None and rows:
            write_csv(self.files.csv_file, rows)


def check_writable(paths: Iterable[Path]) -> None:
    """Check that the files at `paths` can be written. Files that did not exist do not exist afterwards.

    Raises:
        OSError: if one cannot be written.
    """
    for path in paths:
        is_new = not path.exists()
        # open the path itself, not the target of links: /dev/stdout may lead to a pipe, which has no path
        path.open("ab").close()
        if is_new:
            # if `path` is a link, `open` created the link's target
            path.resolve().unlink()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`, indented, with a newline at the end."""
    write_whole(path, to_json(content))


def write_whole(path: Path, text: str, *, mode: int | None = None) -> None:
    """Replace the content of `path` by `text`, in one move after all of it is written. A pipe or device is written directly.

    `mode`: the permissions of a file; by default those of a new file.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", newline="")
        return
    # if `path` is a link, its target is replaced, not the link
    target = path.resolve()
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8", newline="")
        if mode is not None:
            aside.chmod(mode)
        aside.replace(target)
    except PermissionError:
        # no new file can be created in the folder, so write the file itself
        target.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        # the message of a full disk names no file, others the temporary one
        error.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


def to_json(content: dict[str, Any]) -> str:
    """Return `content` as the text of a result file."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write `rows`, at least one and all of the same keys, to `path` with a header; None is an empty field."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, file.getvalue())


def run_env(output: Output) -> None:
    """Print and write the environment."""
    output.check_files()
    output.show(environment_table(output.environment))
    output.write(output.environment, [{"name": name, "value": value} for name, value in flatten(output.environment)])


def environment_table(environment: dict[str, Any]) -> Table:
    """Return a table of names and values, with one package a line."""
    table = Table(show_header=False, box=None)
    for name, value in flatten(environment):
        # foreign text is wrapped in `Text`, so that brackets in it are not markup
        table.add_row(name, Text("none" if value is None else str(value)))
    return table


def flatten(environment: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and plain values; those of a nested table have names such as `packages.torch`."""
    for name, value in environment.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", item) for inner, item in value.items())
        else:
            yield name, value


def number(value: float | None) -> str:
    """Return a figure to four digits, "-" for none."""
    if value is None:
        return "-"
    rounded = float(f"{value:.4g}")
    return f"{value:.4g}" if abs(rounded) < 1e4 else f"{rounded:,.0f}"
