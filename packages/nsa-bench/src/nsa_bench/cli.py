"""The command `nsa-bench`. Exit codes: 0 done, 1 error, 2 a bad option.

Torch is imported after the options were read, so that a mistyped one is reported at once.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from nsa_bench.__about__ import __version__
from nsa_bench.errors import BenchError, OptionError

app = App(
    name="nsa-bench",
    help="Measure and explain the attention of nsa-core on the machine at hand.",
    help_epilogue="Exit codes: 0 done, 1 error, 2 a bad option.",
    version=__version__,
)
JSONFile = Annotated[Path | None, Parameter(name="--json", help="Write the result to this file as JSON.")]
CSVFile = Annotated[Path | None, Parameter(name="--csv", help="Write the result to this file as CSV.")]


@app.command
def backends(
    *,
    json_file: JSONFile = None,
    csv_file: CSVFile = None,
    device: Annotated[Literal["cpu", "cuda"] | None, Parameter(help="This machine's by default.")] = None,
    compute_capability: Annotated[str | None, Parameter(help="Of the CUDA device, for example 8.9; it need not be here.")] = None,
    dtype: Annotated[Literal["bf16", "fp16", "fp32", "fp64"] | None, Parameter(help="bf16 on cuda, fp32 on cpu by default.")] = None,
    seq_len: Annotated[int, Parameter(help="Tokens of the sequence.")] = 8192,
    heads: Annotated[int, Parameter(help="Query heads.")] = 64,
    kv_heads: Annotated[int, Parameter(help="KV heads.")] = 4,
    head_dim_qk: int = 192,
    head_dim_v: int = 128,
    layout: Annotated[
        Literal["dense", "packed", "cached", "paged"], Parameter(help="cached and paged are a decode step of one query.")
    ] = "dense",
    backward: Annotated[
        bool | None, Parameter(help="Gradients are needed; by default for dense and packed, not for cached and paged.")
    ] = None,
) -> int:
    """Show which backend serves each operation, every reason against the others, and the plug-ins, broken ones too."""
    from nsa_bench.backends_report import CallShape, find_device, local_capability, make_report, to_json, to_rows
    from nsa_bench.results import write_csv, write_json
    from nsa_bench.tables import routing_tables

    shape = CallShape(
        dtype=dtype,
        seq_len=seq_len,
        heads=heads,
        kv_heads=kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
        layout=layout,
        backward=backward,
    )
    report = make_report(find_device(device, compute_capability, local_capability()), shape)
    console = Console()
    for table in routing_tables(report):
        console.print(table)
    if json_file is not None:
        write_json(json_file, to_json(report))
    if csv_file is not None:
        write_csv(csv_file, to_rows(report))
    return 0


@app.command
def env(*, json_file: JSONFile = None, csv_file: CSVFile = None) -> int:
    """Show what a result would be made with: time, machine, versions, commit."""
    from nsa_bench.environment import describe_environment
    from nsa_bench.results import write_csv, write_json
    from nsa_bench.tables import environment_table, flatten

    environment = describe_environment()
    Console().print(environment_table(environment))
    if json_file is not None:
        write_json(json_file, environment)
    if csv_file is not None:
        write_csv(csv_file, [{"name": name, "value": value} for name, value in flatten(environment)])
    return 0


def main(tokens: Iterable[str] | None = None) -> NoReturn:
    """Run the command line `tokens` (default: this process's) and exit with its code."""
    sys.exit(run_command(sys.argv[1:] if tokens is None else tokens))


def run_command(tokens: Iterable[str]) -> int:
    """Return the exit code of the command line `tokens`; errors that we foresee end in a message, not a traceback."""
    try:
        result: int | None = app(list(tokens), exit_on_error=False, result_action="return_value")
    except CycloptsError:
        # cyclopts has printed what is wrong
        return OptionError.exit_code
    except BenchError as error:
        print(f"nsa-bench: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"nsa-bench: {error}; give a path that can be written", file=sys.stderr)
        return OptionError.exit_code
    return result or 0
