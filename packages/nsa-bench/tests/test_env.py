"""The table of the environment."""

import io

from rich.console import Console

from nsa_bench.results import describe, environment_table, flatten


def test_the_environment_names_what_a_result_depends_on():
    assert {"nsa-core", "nsa-train", "nsa-bench", "torch"} <= set(describe()["packages"])


def test_tables_inside_the_environment_are_flattened():
    environment = {"gpu": None, "packages": {"torch": "2.13.0"}}
    assert list(flatten(environment)) == [("gpu", None), ("packages.torch", "2.13.0")]
    console = Console(file=io.StringIO(), width=400)
    console.print(environment_table(environment))
    assert [line.split() for line in console.file.getvalue().splitlines()] == [["gpu", "none"], ["packages.torch", "2.13.0"]]
