"""The command `nsa-bench`. Exit codes: 0 done, 1 error, 2 a bad option.

Torch is imported after the options were read, so that a mistyped one is reported at once.
"""

import errno
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from nsa_bench.ablate import shipped_plans
from nsa_bench.errors import (
    BenchError,
    OptionError,
    require_checkpoint,
    require_recording,
    require_transformers,
    shipped_recipes,
    trainer_for,
)
from nsa_bench.options import (
    AttentionOptions,
    CallShape,
    Commit,
    CompareOptions,
    DecodeOptions,
    GenerateOptions,
    LayerOptions,
    PrefillOptions,
    ResultFiles,
    SelectOptions,
    Settings,
    SweepOptions,
    ThresholdOptions,
)
from nsa_bench.results import Output
from nsa_core.environment import INTERRUPTED, version_lines
from nsa_core.errors import NSAError

if TYPE_CHECKING:
    from nsa_bench.measurement import Measurement

app = App(
    name="nsa-bench",
    help="Measure and explain the attention of nsa-core on the machine at hand.",
    help_epilogue="Exit codes: 0 done, 1 error, 2 a bad option.",
    version=lambda: version_lines(("nsa-bench", "nsa-core", "nsa-train", "nsa-kernels-triton", "torch", "triton")),
    version_format="plaintext",
    suppress_keyboard_interrupt=False,
)
app.register_install_completion_command(help="Install completion of commands and options for bash, zsh or fish.")
NO_FILES = ResultFiles()


@app.command
def backends(
    *,
    files: ResultFiles = NO_FILES,
    device: Annotated[Literal["cpu", "cuda"] | None, Parameter(help="This machine's by default.")] = None,
    compute_capability: Annotated[
        str | None, Parameter(help="Compute capability to assume, for example 8.9; no such GPU is needed.")
    ] = None,
    shape: CallShape = CallShape(),
) -> int:
    """Show which backend serves each operation, every reason against the others, and the plug-ins, including broken ones."""
    from nsa_bench.backends import run_backends

    run_backends(device, compute_capability, shape, Output(files, screen=Console()))
    return 0


@app.command
def attention(*, files: ResultFiles = NO_FILES, options: AttentionOptions = AttentionOptions(), commit: Commit = None) -> int:
    """Time the operations, forward and backward, and the best dense attention; a wrong result gets no time."""
    for name in (options.selection or "").split(","):
        kind, _, path = name.partition(":")
        if kind == "recorded" and path:
            # a mistyped path is refused before torch is loaded
            require_recording(path)
    from nsa_bench.attention.run import run_attention

    return _exit_of_measurements(run_attention(options, Output(files, commit)))


@app.command
def decode(*, files: ResultFiles = NO_FILES, options: DecodeOptions = DecodeOptions(), commit: Commit = None) -> int:
    """Time a step over full caches, from Python and by CUDA graph, and dense attention; a wrong result gets no time."""
    from nsa_bench.decode import run_decode

    return _exit_code(any(one.failure for one in run_decode(options, Output(files, commit))))


@app.command
def layer(*, files: ResultFiles = NO_FILES, options: LayerOptions = LayerOptions(), commit: Commit = None) -> int:
    """Time a decode step of a whole layer: its projections alone, by CUDA graph, and from Python; a wrong step gets no time."""
    from nsa_bench.layer import run_layer

    return _exit_code(any(one.failure for one in run_layer(options, Output(files, commit))))


@app.command
def generate(*, files: ResultFiles = NO_FILES, options: GenerateOptions = GenerateOptions(), commit: Commit = None) -> int:
    """Time text generation with NSA, and with dense models of the same sizes; needs nsa-transformers."""
    require_transformers("generate")
    from nsa_bench.generate import OUR_WAYS, run_generate

    return _exit_code(any(OUR_WAYS & one.reasons.keys() for one in run_generate(options, Output(files, commit))))


@app.command
def prefill(*, files: ResultFiles = NO_FILES, options: PrefillOptions = PrefillOptions(), commit: Commit = None) -> int:
    """Time a long prompt in tiles over a cache, and one pass without it, and count its reads; a wrong result gets no time."""
    from nsa_bench.prefill import run_prefill

    return _exit_code(any(one.failure for one in run_prefill(options, Output(files, commit))))


@app.command
def select(*, files: ResultFiles = NO_FILES, options: SelectOptions = SelectOptions(), commit: Commit = None) -> int:
    """Time the choice of blocks alone, by every installed backend, for one sequence and for packed ones."""
    from nsa_bench.selecting import run_select

    return _exit_code(any(one.reason for one in run_select(options, Output(files, commit))))


@app.command
def thresholds(*, files: ResultFiles = NO_FILES, options: ThresholdOptions = ThresholdOptions(), commit: Commit = None) -> int:
    """Find the shortest length at which each installed kernel beats the reference, and every other kernel, by a margin."""
    from nsa_bench.thresholds import run_thresholds

    return _exit_of_measurements(run_thresholds(options, Output(files, commit)))


@app.command(name="fa2-sweep")
def fa2_sweep(*, files: ResultFiles = NO_FILES, options: SweepOptions = SweepOptions(), commit: Commit = None) -> int:
    """Time dense attention by head dimension, length and dtype, and find from which length each kernel is near its best rate."""
    from nsa_bench.fa2_sweep import run_fa2_sweep

    return _exit_code(not run_fa2_sweep(options, Output(files, commit)))


@app.command
def compare(*, files: ResultFiles = NO_FILES, options: CompareOptions = CompareOptions(), commit: Commit = None) -> int:
    """Time the whole operation and other packages that are installed, each with its error."""
    from nsa_bench.compare import run_compare

    return _exit_of_measurements(run_compare(options, Output(files, commit)))


@app.command
def train(
    recipe: Annotated[
        str, Parameter(help=f"A shipped recipe of nsa-train ({', '.join(shipped_recipes())}) or the path of a TOML file.")
    ] = "125m",
    /,
    *,
    files: ResultFiles = NO_FILES,
    steps: Annotated[int, Parameter(help="Optimizer steps of each twin; the first tenth warms up.")] = 50,
    set_: Settings = None,
    twins: Annotated[Literal["both", "nsa", "dense"], Parameter(help="Train both models or one.")] = "both",
    commit: Commit = None,
) -> int:
    """Time training: tokens per second, MFU and memory of a recipe and of its dense twin."""
    with trainer_for("train"):
        from nsa_bench.train import run_train

        results = run_train(recipe, set_ or (), steps=steps, twins=twins, output=Output(files, commit))
    return _exit_code(any(one.failure for one in results))


@app.command
def ablate(
    plan: Annotated[str, Parameter(help=f"A shipped plan ({', '.join(shipped_plans('ablate'))}) or the path of a TOML file.")],
    /,
    *,
    out: Annotated[
        Path | None, Parameter(help="Directory of recipes, runs and logs; ablations/PLAN by default. Finished trials stay.")
    ] = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="", help="table.key=value of every trial. Repeatable.")] = None,
    side_by_side: Annotated[int, Parameter(help="Trials that run at a time, spread over the GPUs of this machine.")] = 1,
    minutes: Annotated[float | None, Parameter(help="Save and stop after this many minutes; the next call continues.")] = None,
    earlier: Annotated[
        list[Path] | None,
        Parameter(negative="", help="JSON file of an earlier call, also from another machine; its trials count as finished. Repeatable."),
    ] = None,
    files: ResultFiles = NO_FILES,
    png_file: Annotated[
        Path | None, Parameter(name="--png", help="Draw the loss by tokens, and by position the difference to the baseline, to this file.")
    ] = None,
    commit: Commit = None,
) -> int:
    """Train a grid of settings and seeds and compare their held-out losses; exit 1 if trials failed or are unfinished."""
    with trainer_for("ablate"):
        from nsa_bench.ablate.table import run_ablation

        output = Output(files, commit)
        is_whole = run_ablation(
            plan, out, set_ or (), side_by_side=side_by_side, minutes=minutes, earlier=earlier or (), png_file=png_file, output=output
        )
    return _exit_code(not is_whole)


@app.command
def needle(
    plan: Annotated[str, Parameter(help=f"A shipped plan ({', '.join(shipped_plans('needle'))}) or the path of a TOML file.")],
    /,
    *,
    out: Annotated[
        Path | None, Parameter(help="Directory of recipes, runs and logs; needles/PLAN by default. Finished parts stay.")
    ] = None,
    set_: Annotated[
        list[str] | None, Parameter(name="--set", negative="", help="table.key=value of every stage, or grid.key=value. Repeatable.")
    ] = None,
    arm: Annotated[list[str] | None, Parameter(negative="", help="Train and evaluate only this arm. Repeatable.")] = None,
    minutes: Annotated[float | None, Parameter(help="Save and stop after this many minutes; the next call continues.")] = None,
    files: ResultFiles = NO_FILES,
    png_file: Annotated[Path | None, Parameter(name="--png", help="Draw a heat map of each mode to this file.")] = None,
    commit: Commit = None,
) -> int:
    """Train on rows that grow longer, then decode answers about pairs hidden at every depth; exit 1 if something failed or is unfinished."""
    with trainer_for("needle"):
        from nsa_bench.needle.table import run_needle

        output = Output(files, commit)
        is_whole = run_needle(plan, out, set_ or (), arms=arm or (), minutes=minutes, png_file=png_file, output=output)
    return _exit_code(not is_whole)


@app.command
def choices(
    run: Annotated[Path, Parameter(name="RUN", help="The directory of a run of nsa-train, or of one of its checkpoints.")],
    /,
    *,
    sequences: Annotated[int, Parameter(help="Held-out sequences.")] = 4,
    recorded_tokens: Annotated[int, Parameter(help="Tokens of the first sequence whose choices are kept in the JSON file.")] = 8192,
    files: ResultFiles = NO_FILES,
    commit: Commit = None,
) -> int:
    """Show which blocks the layers of a trained model choose; the JSON file serves `attention --selection recorded:FILE`."""
    with trainer_for("choices"):
        # a mistyped path is refused before torch is loaded
        require_checkpoint("RUN", run)
        from nsa_bench.choices import run_choices

        run_choices(run, sequences=sequences, recorded_tokens=recorded_tokens, output=Output(files, commit))
    return 0


@app.command
def smoke(
    run_dir: Annotated[Path, Parameter(name="RUN_DIR", help="The directory of a run, as `nsa-train run` printed it.")],
    /,
    *,
    files: ResultFiles = NO_FILES,
    compare_baseline: Annotated[Path | None, Parameter(help="metrics.json of another run; a worse figure is an error.")] = None,
    tolerance: Annotated[float, Parameter(help="Per cent by which a figure may be worse than the baseline's.")] = 5.0,
) -> int:
    """Check a run's records: loss, NaN, throughput, fetch, gates, selection; exit 1 if a rule does not hold."""
    with trainer_for("smoke"):
        from nsa_bench.smoke import run_smoke

        is_sound = run_smoke(run_dir, baseline=compare_baseline, tolerance=tolerance, output=Output(files))
    return _exit_code(not is_sound)


@app.command
def report(
    paths: Annotated[list[Path], Parameter(name="PATH", help="JSON files of commands, or folders of them.")],
    /,
    *,
    out: Annotated[Path, Parameter(name=("-o", "--out"), help="The page to write.")] = Path("nsa-bench.html"),
    bundle: Annotated[Path | None, Parameter(help="Write a zip as well: environment, routing, tests, results, the page.")] = None,
    tests: Annotated[list[Path] | None, Parameter(negative="", help="A report of tests for the zip. Repeatable.")] = None,
) -> int:
    """Write one page from result files, and an archive that shows whether this machine is ready."""
    from nsa_bench.report import run_report

    run_report(paths, out, bundle=bundle, tests=tests or (), output=Output(NO_FILES))
    return 0


@app.command
def env(*, files: ResultFiles = NO_FILES) -> int:
    """Show the environment that a result would record: time, machine, versions, commit."""
    from nsa_bench.results import run_env

    run_env(Output(files, screen=Console()))
    return 0


def _exit_code(has_failed: bool) -> int:
    return BenchError.exit_code if has_failed else 0


def _exit_of_measurements(measurements: "list[Measurement]") -> int:
    """Return 1, with a message, if one of our operations gave no right result; an absent peer does not count."""
    failed = [one for one in measurements if one.is_failure]
    if failed:
        print(f"nsa-bench: {len(failed)} of {len(measurements)} results are wrong or failed; the output above says why", file=sys.stderr)
    return _exit_code(bool(failed))


def main(tokens: Iterable[str] | None = None) -> NoReturn:
    """Run the command line `tokens` (default: this process's) and exit with its code."""
    sys.exit(run_command(sys.argv[1:] if tokens is None else tokens))


def run_command(tokens: Iterable[str]) -> int:
    """Return the exit code of the command line `tokens`; expected errors end in a message, not a traceback."""
    result: int | None
    try:
        result = app(list(tokens), exit_on_error=False, result_action="return_value")
    except CycloptsError:
        # cyclopts has printed what is wrong
        return OptionError.exit_code
    except BenchError as error:
        print(f"nsa-bench: {error}", file=sys.stderr)
        return error.exit_code
    except NSAError as error:
        print(f"nsa-bench: {error.in_one_line()}", file=sys.stderr)
        return (OptionError if error.is_refusal else BenchError).exit_code
    except KeyboardInterrupt:
        result = INTERRUPTED
    except BrokenPipeError:
        # the reader closed the output; a flush at the end of the process would fail otherwise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BenchError.exit_code
    except OSError as error:
        is_full = error.errno == errno.ENOSPC
        other = "use a shorter name" if error.errno == errno.ENAMETOOLONG else "give a path that can be written"
        advice = "make room, or give a path on another disk" if is_full else other
        print(f"nsa-bench: {error}; {advice}", file=sys.stderr)
        return (BenchError if is_full else OptionError).exit_code
    return result or 0
