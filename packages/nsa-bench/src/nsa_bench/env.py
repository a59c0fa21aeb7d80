"""`nsa-bench env`: time, machine, versions and commit, which every result carries."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from nsa_bench.results import Output


def run_env(output: Output) -> None:
    """Print and write the environment."""
    output.show(environment_table(output.environment))
    output.write(output.environment, [{"name": name, "value": value} for name, value in flatten(output.environment)])


def environment_table(environment: dict[str, Any]) -> Table:
    """Return names and values, one package a line."""
    table = Table(show_header=False, box=None)
    for name, value in flatten(environment):
        # foreign text goes in as `Text`, so that brackets in it are no markup
        table.add_row(name, Text("none" if value is None else str(value)))
    return table


def flatten(environment: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and plain values; those of a table inside are named `packages.torch`."""
    for name, value in environment.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", item) for inner, item in value.items())
        else:
            yield name, value
