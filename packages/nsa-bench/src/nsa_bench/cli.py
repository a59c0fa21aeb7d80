"""The command `nsa-bench`. Exit codes: 0 done, 1 error, 2 a bad option.

Torch is imported after the options were read, so that a mistyped one is reported at once.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from nsa_bench.ablations.plan import shipped_plans
from nsa_bench.errors import BenchError, OptionError
from nsa_core.environment import version_lines
from nsa_core.errors import NSAError
from nsa_train.errors import TrainError, exit_code_of, in_one_line
from nsa_train.lifecycle.console import discard, is_unread
from nsa_train.settings.config import listed
from nsa_train.settings.recipe import shipped_recipes

if TYPE_CHECKING:
    from nsa_bench.measurements import Measurement

app = App(
    name="nsa-bench",
    help="Measure and explain the attention of nsa-core on the machine at hand.",
    help_epilogue="Exit codes: 0 done, 1 error, 2 a bad option.",
    version=lambda: version_lines(("nsa-bench", "nsa-core", "nsa-train", "nsa-kernels-triton", "torch", "triton")),
    version_format="plaintext",
)
app.register_install_completion_command(help="Install completion of commands and options for bash, zsh or fish.")
TABLE_WIDTH = 110
JSONFile = Annotated[Path | None, Parameter(name="--json", help="Write the result to this file as JSON.")]
CSVFile = Annotated[Path | None, Parameter(name="--csv", help="Write the result to this file as CSV.")]
MeasuredDevice = Annotated[Literal["cpu", "cuda"] | None, Parameter(help="cuda where there is a GPU, by default.")]
DType = Annotated[Literal["bf16", "fp16", "fp32", "fp64"] | None, Parameter(help="bf16 on cuda, fp32 on cpu by default.")]
Backend = Annotated[str, Parameter(help="auto, or a backend's name, which never falls back.")]
Backward = Annotated[bool, Parameter(help="Time forward + backward as well.")]
Commit = Annotated[str | None, Parameter(help="The commit that is measured, where the code lies outside its checkout.")]


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
    head_dim_qk: Annotated[int, Parameter(help="D_k: of queries and keys.")] = 192,
    head_dim_v: Annotated[int, Parameter(help="D_v: of values.")] = 128,
    layout: Annotated[
        Literal["dense", "packed", "cached", "paged", "ragged"], Parameter(help="cached, paged and ragged are a decode step of one query.")
    ] = "dense",
    backward: Annotated[bool | None, Parameter(help="Gradients are needed; by default for dense and packed alone.")] = None,
    aligned: Annotated[bool, Parameter(help="Every tensor starts at a multiple of 16 bytes.")] = True,
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
        is_aligned=aligned,
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
def attention(
    *,
    json_file: JSONFile = None,
    csv_file: CSVFile = None,
    device: MeasuredDevice = None,
    dtype: DType = None,
    lengths: Annotated[str | None, Parameter(help="Tokens, k for 1024: 2k,8k. On cuda 2k to 128k, on cpu 256 by default.")] = None,
    shapes: Annotated[str | None, Parameter(help="P, L, M, S or H/G/D_k/D_v, by commas; P,L,M,S by default.")] = None,
    operations: Annotated[str | None, Parameter(help="Of nsa, cmp, select, slc, win; all by default, of a sweep nsa.")] = None,
    selection: Annotated[str | None, Parameter(help="random, trained-like, or both by a comma; random by default.")] = None,
    geometry: Annotated[str | None, Parameter(help="l/d/l'/n/w; 32/16/64/16/512 by default.")] = None,
    backend: Backend = "auto",
    baseline: Annotated[str | None, Parameter(help="Dense attention: all, none, or of flash, cudnn, flex, flash-attn.")] = None,
    backward: Backward = True,
    graph: Annotated[bool, Parameter(negative="", help="Time CUDA graphs, which no launch from Python holds up.")] = False,
    sweep: Annotated[bool, Parameter(negative="", help="Look for cliffs by --graph: D, H/G, S one off a tile, packed.")] = False,
    preset: Annotated[Literal["targets"] | None, Parameter(help="targets: what the kernels must reach on one H200.")] = None,
    commit: Commit = None,
) -> int:
    """Time the operations, forward and backward, beside the best dense attention; what is wrong gets no time."""
    from nsa_bench.plans import AttentionOptions, make_plan
    from nsa_bench.reporting import Report, options_row, run_attention
    from nsa_bench.routes import check_backend

    options = AttentionOptions(
        device=device,
        dtype=dtype,
        lengths=lengths,
        shapes=shapes,
        operations=operations,
        selection=selection,
        geometry=geometry,
        baseline=baseline,
        backward=backward,
        graph=graph,
        sweep=sweep,
        preset=preset,
    )
    plan = make_plan(options)
    check_backend(backend, ((operation, job.case) for job in plan.jobs for operation in job.operations), plan.device)
    report = Report.of(options_row(options, backend), commit, json_file, csv_file)
    return _exit_code(run_attention(plan, backend, report, _screen(), Console(stderr=True)))


@app.command
def compare(
    *,
    json_file: JSONFile = None,
    csv_file: CSVFile = None,
    device: MeasuredDevice = None,
    dtype: DType = None,
    lengths: Annotated[str | None, Parameter(help="Tokens, k for 1024: 2k,8k. On cuda 2k to 128k, on cpu 256 by default.")] = None,
    shapes: Annotated[str, Parameter(help="P, L, M, S or H/G/D_k/D_v, by commas.")] = "P,L,M,S",
    geometry: Annotated[str, Parameter(help="l/d/l'/n/w; the peers share l = d = l' only.")] = "64/64/64/16/512",
    backend: Backend = "auto",
    backward: Backward = True,
    commit: Commit = None,
) -> int:
    """Time the whole operation beside other packages that are installed, with everybody's error."""
    from nsa_bench.plans import make_comparisons
    from nsa_bench.reporting import Report, run_comparison
    from nsa_bench.routes import check_backend

    where, wanted = make_comparisons(device, dtype, lengths, shapes, geometry, backward=backward)
    check_backend(backend, (("nsa", one.case) for one in wanted), where)
    given = {"device": device, "dtype": dtype, "lengths": lengths, "shapes": shapes, "geometry": geometry, "backward": backward}
    report = Report.of({**given, "backend": backend}, commit, json_file, csv_file)
    return _exit_code(run_comparison(where, wanted, backend, report, _screen(), Console(stderr=True)))


@app.command
def train(
    recipe: Annotated[
        str, Parameter(help=f"A shipped recipe of nsa-train ({listed(shipped_recipes())}) or the path of a TOML file.")
    ] = "125m",
    /,
    *,
    json_file: JSONFile = None,
    csv_file: CSVFile = None,
    steps: Annotated[int, Parameter(help="Optimizer steps of each twin; the first tenth warms up.")] = 50,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="", help="table.key=value, as for nsa-train. Repeatable.")] = None,
    twins: Annotated[Literal["both", "nsa", "dense"], Parameter(help="Which of the two to train.")] = "both",
    commit: Commit = None,
) -> int:
    """Time training: tokens per second, MFU and memory of a recipe and of its dense twin."""
    from nsa_bench.training_report import bench_training

    results = bench_training(
        recipe,
        set_ or (),
        steps=steps,
        twins=twins,
        commit=commit,
        json_file=json_file,
        csv_file=csv_file,
        screen=_screen(),
        progress=Console(stderr=True),
    )
    return BenchError.exit_code if any(one.failure is not None for one in results) else 0


@app.command
def ablate(
    plan: Annotated[str, Parameter(help=f"A shipped plan ({listed(shipped_plans())}) or the path of a TOML file.")],
    /,
    *,
    out: Annotated[
        Path | None, Parameter(help="Directory of recipes, runs and logs; ablations/PLAN by default. Finished trials stay.")
    ] = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="", help="table.key=value of every trial. Repeatable.")] = None,
    side_by_side: Annotated[int, Parameter(help="Trials that run at a time, all on one machine.")] = 1,
    minutes: Annotated[float | None, Parameter(help="Save and stop after so long; the next call goes on.")] = None,
    json_file: JSONFile = None,
    csv_file: CSVFile = None,
    png_file: Annotated[Path | None, Parameter(name="--png", help="Draw the loss by tokens and by position to this file.")] = None,
    commit: Commit = None,
) -> int:
    """Train a grid of settings and seeds and show how their held-out losses differ; exit 1 where trials failed or are left."""
    from nsa_bench.ablations.report import bench_ablation

    is_whole = bench_ablation(
        plan,
        out,
        set_ or (),
        side_by_side=side_by_side,
        minutes=minutes,
        commit=commit,
        json_file=json_file,
        csv_file=csv_file,
        png_file=png_file,
        screen=_screen(),
        progress=Console(stderr=True),
    )
    return 0 if is_whole else BenchError.exit_code


@app.command
def smoke(
    run_dir: Annotated[Path, Parameter(name="RUN_DIR", help="The directory of a run, as `nsa-train run` printed it.")],
    /,
    *,
    json_file: JSONFile = None,
    csv_file: CSVFile = None,
    compare_baseline: Annotated[Path | None, Parameter(help="The metrics.json of another run, to be no worse than.")] = None,
    tolerance: Annotated[float, Parameter(help="Per cent by which a figure may be worse than the baseline's.")] = 5.0,
) -> int:
    """Check a run's records: loss, NaN, throughput, fetch, gates, selection; exit 1 where a rule does not hold."""
    from nsa_bench.smoke_report import bench_smoke

    verdicts = bench_smoke(
        run_dir, baseline=compare_baseline, tolerance=tolerance, json_file=json_file, csv_file=csv_file, screen=_screen()
    )
    return BenchError.exit_code if any(verdict.is_passed is False for verdict in verdicts) else 0


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


def _screen() -> Console:
    """Return where tables go; what is no terminal has room for all their columns."""
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def _exit_code(measurements: "list[Measurement]") -> int:
    """Return 1 where one of our own operations gave no right result, after saying so; a peer's absence is none."""
    failed = [one for one in measurements if one.is_failure]
    if failed:
        print(f"nsa-bench: {len(failed)} of {len(measurements)} results are wrong or failed; the table says why", file=sys.stderr)
    return BenchError.exit_code if failed else 0


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
    except (BenchError, TrainError) as error:
        print(f"nsa-bench: {error}", file=sys.stderr)
        return error.exit_code
    except NSAError as error:
        print(f"nsa-bench: {in_one_line(error)}", file=sys.stderr)
        return exit_code_of(error)
    except OSError as error:
        if is_unread(sys.stdout):
            # whoever read the output has seen enough
            discard(sys.stdout)
            return BenchError.exit_code
        print(f"nsa-bench: {error}; give a path that can be written", file=sys.stderr)
        return OptionError.exit_code
    return result or 0
