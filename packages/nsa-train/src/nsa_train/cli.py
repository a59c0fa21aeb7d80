"""The command `nsa-train`. Exit codes: 0 done, 1 error, 2 configuration or preflight, 3 halted, 4 anomaly, 75 SIGTERM or SIGHUP, 130 Ctrl-C.

Torch is imported after the configuration was read, so that a mistyped key is reported at once.
"""

import errno
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import datetime
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from attrs import asdict, evolve, frozen
from cyclopts import App, CycloptsError, Parameter

from nsa_core.environment import version_lines
from nsa_core.errors import NSAError
from nsa_train.checkpoint.claim import claimed_by_another
from nsa_train.checkpoint.layout import folder_of_step, require_model
from nsa_train.errors import INTERRUPTED, ConfigError, SignalledError, TerminatedError, TrainError, exit_code_of
from nsa_train.evaluation.options import EvalOptions, Mode, TaskName
from nsa_train.evaluation.report import JSON_FILE
from nsa_train.host.environment import RUNS_ON, is_under_torchrun
from nsa_train.lifecycle.console import Answer, as_object, discard, is_unread, warn
from nsa_train.lifecycle.launch import ALONE, Meeting
from nsa_train.lifecycle.outcomes import Ending, ending_by_signals, ending_of, heed_launcher, last_words, note_worker, reported
from nsa_train.loop.starting import GoingOn, as_sets, start
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig, listed
from nsa_train.settings.options import (
    AUTO,
    NEWEST,
    check_explored,
    check_openable,
    check_path,
    check_sampling,
    check_seconds,
    check_source,
    check_text,
    check_there,
    check_writable,
    default_folder,
    read_prompts,
    resume_step,
)
from nsa_train.settings.recipe import find_recipe, load_config, settled, shipped_recipes, to_toml

app = App(
    name="nsa-train",
    help="Train, sample and inspect language models built on Native Sparse Attention.",
    help_epilogue="Exit codes: 0 done, 1 error, 2 configuration or preflight, 3 halted by .HALT, 4 anomaly, 75 SIGTERM or SIGHUP, 130 Ctrl-C.",
    version=lambda: version_lines(RUNS_ON),
    version_format="plaintext",
    suppress_keyboard_interrupt=False,
    # no --no-... and no --empty-...
    default_parameter=Parameter(negative=()),
)
app.register_install_completion_command(help="Install completion of commands and options for bash, zsh or fish.")
Recipe = Annotated[str, Parameter(help=f"A shipped recipe ({listed(shipped_recipes())}) or the path of a TOML file.")]
RunFolder = Annotated[Path, Parameter(name="DIR", help="The directory of a run, as `nsa-train run` printed it.")]
CHECKPOINT = "The directory of a run, whose newest checkpoint counts, or of one checkpoint: checkpoints/step-N."
JSON_TO_FILE = ("explore",)
"""Commands whose `--json` names a file."""
# `run_command` reads it, so that a failure is an object too
AsJSON = Annotated[bool, Parameter(name="--json", help="Print one JSON object instead of text, also for a failure.")]
Overrides = Annotated[list[str] | None, Parameter(name="--set", help="table.key=value; the value is TOML. Repeatable.")]
SyntheticOnFail = Annotated[
    bool, Parameter(help="If the data is not available, use random ids; the run is renamed and every record says so.")
]
DryRun = Annotated[bool, Parameter(help="Check the run as `preflight` does, and stop.")]


@app.command
@ending_by_signals()
def run(
    recipe: Recipe,
    /,
    *,
    out: Annotated[Path | None, Parameter(help="Directory of the results; runs/RECIPE-TIME by default.")] = None,
    set_: Overrides = None,
    print_config: Annotated[bool, Parameter(help="Print the resolved recipe as TOML and stop.")] = False,
    dry_run: DryRun = False,
    resume: Annotated[
        str | None,
        Parameter(
            help="Continue the run in --out: from the checkpoint of this step; without a step, from the newest complete one; "
            "auto: the same where a run is there, else start one."
        ),
    ] = None,
    meeting: Meeting = ALONE,
    synthetic_on_fail: SyntheticOnFail = False,
) -> int | Answer:
    """Train the model of RECIPE."""
    step = None if resume is None else resume_step(resume)
    overrides = settled([*(set_ or ()), *meeting.overrides()], say=warn)
    if print_config:
        print(to_toml(load_config(recipe, overrides)), end="")
        return 0
    # a mistyped path is refused before torch is loaded
    if step is not None and out is None:
        raise ConfigError("--resume does not say which run; use --out DIR with the directory that `nsa-train run` printed")
    folder = out or _default_out(recipe)
    check_path("--out", folder)
    if out is not None:
        _check_directory(RunDirectory(out), step, dry_run=dry_run)
    config = _checked_config(recipe, overrides)
    flags = ["--synthetic-on-fail"] if synthetic_on_fail else []
    typed = ["run", recipe, "--out", str(folder), *as_sets(overrides), *meeting.words(), *flags]
    again = GoingOn(saved=[*typed, "--resume"], begun=[*typed, "--resume", "auto"])
    if synthetic_on_fail:
        from nsa_train.data.fallback import Start, or_synthetic
        from nsa_train.loop.run import check_free, settled_resume

        if not dry_run:
            # opening the data may take long, and if it fails the run moves to another directory
            check_free(folder)
        is_resuming = settled_resume(folder, step) is not None
        config, recipe, overrides, folder, note = or_synthetic(Start(config, recipe, overrides, folder), resuming=is_resuming)
        if note:
            print(note, file=sys.stderr)
            # the run has another directory, and keeps its random ids even if the data can be read again
            again = evolve(again, saved=["resume", str(folder), *meeting.words()])
    if dry_run:
        return _judge_start(config, folder, meeting, step)
    return start(config, folder, ["run", recipe, "--out", str(folder), *as_sets(overrides)], meeting, step, again)


@app.command
@ending_by_signals()
def resume(
    directory: Annotated[Path, Parameter(name="DIR", help="Directory of the run, as `nsa-train run` printed it.")],
    /,
    *,
    set_: Overrides = None,
    dry_run: DryRun = False,
    meeting: Meeting = ALONE,
) -> int | Answer:
    """Continue the run in DIR from its newest complete checkpoint, with its config.toml."""
    check_path("DIR", directory)
    paths = RunDirectory(directory)
    if not (paths.config.is_file() and paths.checkpoints.is_dir()):
        found = "holds no run (config.toml and checkpoints/)" if directory.is_dir() else "is no directory"
        raise ConfigError(f"DIR={str(directory)!r} {found}; name the directory that `nsa-train run` printed")
    overrides = settled([*(set_ or ()), *meeting.overrides()], say=warn)
    config = _checked_config(str(paths.config), overrides)
    if dry_run:
        return _judge_start(config, directory, meeting, NEWEST)
    typed = ["resume", str(directory), *as_sets(overrides), *meeting.words()]
    words = ["run", str(paths.config), "--out", str(directory), *as_sets(overrides)]
    return start(config, directory, words, meeting, NEWEST, GoingOn(saved=typed, begun=typed))


@app.command
def preflight(
    recipe: Recipe,
    /,
    *,
    out: Annotated[Path | None, Parameter(help="The directory that the run would write to.")] = None,
    set_: Overrides = None,
    machine: Annotated[str | None, Parameter(help="Check for another machine: cpu, a100, h100, h200, ...")] = None,
    nnodes: Annotated[str | None, Parameter(help="Number of such hosts, or MIN:MAX; by default from WORLD_SIZE, or 1.")] = None,
    json_: AsJSON = False,
) -> Answer:
    """Check every rule that a run of RECIPE must meet, without running it."""
    return _judged(
        lambda: _judge(_checked_config(recipe, settled(set_ or (), say=warn)), out or _default_out(recipe), machine=machine, nnodes=nnodes)
    )


def _check_directory(run: RunDirectory, step: int | None, *, dry_run: bool) -> None:
    """Raise ConfigError if `run` cannot be started or resumed in its directory, as far as that shows without torch."""
    if step not in (None, AUTO):
        reason = run.why_not_resumable()
        # a rank that is started again takes the newest checkpoint; without checkpoints/, preflight knows more about the directory
        if not reason and step != NEWEST and run.checkpoints.is_dir() and not is_under_torchrun():
            folder_of_step(run.checkpoints, step)
    elif dry_run or is_under_torchrun():
        # a dry run reports this together with all other findings; in a launched run rank 0 may have written there already
        return
    elif step == AUTO:
        # a host that joins a run finds the claim of its rank 0
        reason = run.why_not_writable()
    else:
        reason = claimed_by_another(run.checkpoints) or run.why_not_new() or run.why_not_writable()
    if reason:
        raise ConfigError(reason)


def _judged(judge: Callable[[], Answer]) -> Answer:
    """Return the findings of `judge`; a deliberate error is printed like failed rules of preflight."""
    try:
        return judge()
    except (TrainError, NSAError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise
        # our errors have one line per problem
        lines = [error.in_one_line()] if isinstance(error, NSAError) else str(error).splitlines()
        for line in lines:
            print(f"FAIL  {line}", file=sys.stderr)
        return Answer(ConfigError.exit_code if isinstance(error, OSError) else exit_code_of(error), {"errors": lines})


def _judge_start(config: RunConfig, out: Path, meeting: Meeting, step: int | None) -> Answer:
    """Print the findings of preflight on the run that a command would start, or resume from `step`, and return them."""
    from nsa_train.loop.run import settled_resume

    def judge() -> Answer:
        meeting.check()
        return _judge(config, out, nnodes=meeting.nnodes, resume=settled_resume(out, step))

    return _judged(judge)


def _judge(config: RunConfig, out: Path, *, machine: str | None = None, nnodes: str | None = None, resume: int | None = None) -> Answer:
    """Print the findings of preflight on running `config` into `out`, or resuming there from step `resume`, and return them."""
    check_path("--out", out)
    from nsa_train.host.machine import described_machine, target_machine
    from nsa_train.parallel.world import asked_world_size
    from nsa_train.preflight.judge import run_preflight

    where = None if machine is None else described_machine(machine, max(1, config.train.nproc_per_node))
    asked = asked_world_size() if nnodes is None else None
    sizes = [asked] if asked else Meeting(nnodes=nnodes).world_sizes(config, where or target_machine(config))
    findings = run_preflight(config, out, resuming=resume is not None, machine=where, world_sizes=sizes)
    for line in findings.lines():
        print(line, file=sys.stderr if line.startswith("FAIL") else sys.stdout)
    if not findings.failed and resume is not None:
        from nsa_train.loop.run import nothing_left, resume_from

        found = resume_from(config, out, resume, say=print)
        if found and (reason := nothing_left(found, config, RunDirectory(out))):
            print(f"resume: {reason}")
    return Answer(ConfigError.exit_code if findings.failed else 0, {"out": str(out), **findings.content()})


@app.command(name="loader-check")
def loader_check(
    recipe: Recipe,
    /,
    *,
    timeout: Annotated[float, Parameter(help="Longest wait for the first batch, in seconds.")] = 60,
    set_: Overrides = None,
    synthetic_on_fail: SyntheticOnFail = False,
    json_: AsJSON = False,
) -> Answer:
    """Read batches of RECIPE without a model: time to the first, shape, tokens/s, waits, first tokens. On failure exit 2 with the cause."""
    check_seconds("--timeout", timeout, example=60)
    config = _checked_config(recipe, settled(set_ or (), say=warn))
    from nsa_train.data.fallback import Start, or_synthetic
    from nsa_train.data.loader_check import check_loader

    if synthetic_on_fail:
        config, *_, note = or_synthetic(Start(config, recipe, [], Path(recipe)))
        if note:
            print(note, file=sys.stderr)
    figures = check_loader(config, timeout_s=timeout)
    for line in figures.lines():
        print(line)
    return Answer(0, figures.content())


@app.command
def watch(
    directory: RunFolder,
    /,
    *,
    halt: Annotated[bool, Parameter(help="If something is wrong, write .HALT: all ranks save and stop.")] = False,
    once: Annotated[bool, Parameter(help="Poll once; repeat only while the clocks do not show whether a rank is alive.")] = False,
    interval: Annotated[float, Parameter(help="Seconds between two polls.")] = 5.0,
    json_: AsJSON = False,
) -> Answer:
    """Follow the heartbeats of the run in DIR until it ends (exit 0; after an error: 1) or something is wrong (exit 4)."""
    from nsa_train.telemetry.watch import content
    from nsa_train.telemetry.watch import watch as follow

    check_seconds("--interval", interval, example=5)
    if json_ and not once:
        raise ConfigError("--json without --once has no result to print (it prints one object at the end); use --once --json")
    found, lines = dict[str, Any](), list[str]()

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    code = follow(
        RunDirectory(directory),
        is_halting=halt,
        is_once=once,
        interval_s=interval,
        say=say,
        show=lambda watcher, findings: found.update(content(watcher, findings)),
    )
    return Answer(code, {**found, "lines": lines})


@app.command
def sample(
    ckpt: Annotated[Path, Parameter(help=CHECKPOINT)],
    /,
    *,
    prompt: Annotated[str | None, Parameter(help="The beginning of the text; at least one character.")] = None,
    prompts: Annotated[
        Path | None,
        Parameter(name="--prompts", allow_leading_hyphen=True, help="A file with one prompt per line; -: standard input."),
    ] = None,
    tokens: Annotated[int, Parameter(help="Maximum number of tokens to add.")] = 200,
    temperature: Annotated[float, Parameter(help="0 always takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, Parameter(help="Sample from the likeliest tokens whose probabilities add up to this.")] = 1.0,
    stop: Annotated[list[str] | None, Parameter(help="Text that ends the continuation; it is not printed. Repeatable.")] = None,
    seed: Annotated[int, Parameter(help="Equal seeds give equal text.")] = 0,
    device: Annotated[Literal["cpu", "cuda"], Parameter(help="cuda: the first GPU; each step is a CUDA graph there.")] = "cpu",
    backend: Annotated[
        str | None, Parameter(help="Backend of every attention operation, or auto, instead of those in the checkpoint's nsa.backends.")
    ] = None,
) -> int:
    """Print PROMPT and its continuation by the model of CKPT as it is generated; then, to stderr, the tokens per second."""
    check_openable({"CKPT": ckpt})
    check_sampling(prompt, tokens=tokens, temperature=temperature, seed=seed, top_p=top_p, stops=stop or (), file=prompts)
    texts = [prompt] if prompts is None else read_prompts(prompts)
    from nsa_train.checkpoint.store import open_checkpoint

    checkpoint = open_checkpoint(ckpt)
    for line in checkpoint.refused:
        warn(line)
    from nsa_train.checkpoint.resuming import load_model
    from nsa_train.data.tokenizer import build_tokenizer
    from nsa_train.host.machine import machine_of
    from nsa_train.host.routing import refused_backends, sample_dtype, uses_of_sample, with_backend
    from nsa_train.model.stream import Sampling, TextStream, torch_device

    if backend is not None:
        checkpoint = evolve(checkpoint, config=with_backend(checkpoint.config, backend))
    where = torch_device(device)
    uses = uses_of_sample(checkpoint.config, machine_of(where))
    if problems := refused_backends(checkpoint.config, uses, advice="use --backend auto"):
        asked = f"CKPT={str(ckpt)!r}" if backend is None else f"--backend={backend!r}"
        raise ConfigError(f"{asked}: {next(iter(problems.values()))}")
    tokenizer = build_tokenizer(checkpoint.config.data)
    model = load_model(checkpoint).to(where, sample_dtype(checkpoint.config, device))
    sampling = Sampling(tokens, temperature, top_p, seed, tuple(stop or ()))
    for text in texts:
        print(text, end="", flush=True)
        stream = TextStream(model, tokenizer, tokenizer.encode(str(text).encode()), sampling)
        for piece in stream:
            print(piece, end="", flush=True)
        print(flush=True)
        if stream.is_cut:
            raise TrainError(
                f"CKPT={str(ckpt)!r}: the model's logits are not finite after {stream.num_tokens} tokens; sample an earlier checkpoint"
            )
        warn(f"{stream.num_tokens} tokens, {stream.toks_per_s:.1f} tokens/s after a prompt of {stream.prompt_s:.2f} s")
    return 0


@Parameter(name="*")
@frozen(kw_only=True)
class RecallSizes:
    """The sizes of the tasks of recall."""

    depths: Annotated[int, Parameter(help="Number of depths for passkey.")] = 5
    samples: Annotated[int, Parameter(help="Sequences of each length and depth.")] = 20
    symbols: Annotated[int | None, Parameter(help="Ids per alphabet for recall; the run's by default.")] = None
    pairs: Annotated[int | None, Parameter(help="Pairs for mqar; the run's by default, else 8.")] = None


DEFAULT_SIZES = RecallSizes()


@app.command(name="eval")
def evaluate(
    model: Annotated[Path, Parameter(name="RUN_OR_EXPORT", help="A run, a checkpoint, or a folder of `ckpt export --format hf`.")],
    /,
    *,
    tasks: Annotated[str | None, Parameter(help=f"Separated by commas: {listed(TaskName)}. By default all that the model can do.")] = None,
    text: Annotated[
        list[Path] | None,
        Parameter(help="A document for loss-by-position, loss-by-layer and block-recall, instead of the run's held-out rows. Repeatable."),
    ] = None,
    lengths: Annotated[
        str | None, Parameter(help="Tokens of a sequence, separated by commas; half of the model's positions and all of them by default.")
    ] = None,
    twin: Annotated[Path | None, Parameter(help="A dense run or export of the same shape; block-recall uses its attention.")] = None,
    mode: Annotated[list[str] | None, Parameter(help=f"The selected branch: {listed(Mode)}. Repeatable; all by default.")] = None,
    recall: RecallSizes = DEFAULT_SIZES,
    device: Annotated[Literal["cpu", "cuda"], Parameter(help="cuda: the first GPU.")] = "cpu",
    seed: Annotated[int, Parameter(help="Equal seeds give equal figures.")] = 1,
    out: Annotated[Path | None, Parameter(help="Directory of eval.json, eval.csv and eval.png; evals/NAME-TIME by default.")] = None,
    json_: AsJSON = False,
) -> Answer:
    """Measure loss by position, recall of pass keys, pairs and copies, and the choice of blocks of the model at RUN_OR_EXPORT."""
    options = EvalOptions.of(tasks=tasks, modes=mode or (), lengths=lengths, texts=text or (), seed=seed, **asdict(recall))
    folder = out or default_folder(model, datetime.now().astimezone())
    check_path("--out", folder)
    check_writable("--out", folder, JSON_FILE)
    inputs = {"RUN_OR_EXPORT": model, "--twin": twin}
    check_there(inputs)
    _check_models(inputs)
    from nsa_train.evaluation.tasks import run_evaluation

    return Answer(0, run_evaluation(model, twin, options, device=device, out=folder, say=warn))


@app.command
def explore(
    checkpoint: Annotated[Path, Parameter(name="CHECKPOINT", help=f"{CHECKPOINT} Or a folder that `ckpt export --format hf` wrote.")],
    /,
    *,
    text: Annotated[Path, Parameter(help="A file with the text to look at.")],
    out: Annotated[
        Path, Parameter(name=["--out", "-o"], help="The page to write; it replaces an existing file, but none that a model consists of.")
    ] = Path("explorer.html"),
    json_file: Annotated[Path | None, Parameter(name="--json", help="A file to which the same records are written as JSON.")] = None,
    twin: Annotated[
        Path | None, Parameter(help="A dense model with the same number of layers; its attention is shown next to the scores.")
    ] = None,
    tokens: Annotated[int | None, Parameter(help="Maximum number of tokens to look at, from the start of the text.")] = None,
) -> int:
    """Write a page that shows which blocks the model of CHECKPOINT chose for each token of a text, its scores and its gates."""
    inputs = {"CHECKPOINT": checkpoint, "--twin": twin}
    check_explored({**inputs, "--text": text}, {"--out": out, "--json": json_file}, tokens=tokens)
    _check_models(inputs)
    from nsa_train.explore.command import explore_text

    for line in explore_text(checkpoint, text=text, out=out, json=json_file, twin=twin, tokens=tokens, say=warn):
        print(line)
    return 0


@app.command
def report(directory: RunFolder, /) -> int:
    """Draw curves.png and report.html of the run in DIR again, from its records."""
    from nsa_train.telemetry.records import damaged_records
    from nsa_train.telemetry.report import write_report

    paths = RunDirectory(directory)
    for line in damaged_records(paths):
        warn(line)
    write_report(paths)
    print(paths.report)
    return 0


ckpt = App(name="ckpt", help="List, verify, export and import checkpoints.", suppress_keyboard_interrupt=False)
app.command(ckpt)


@ckpt.command
def ls(directory: RunFolder, /, *, json_: AsJSON = False) -> Answer:
    """List the checkpoints of the run in DIR: step, date, size, and which one `latest` names."""
    from nsa_train.checkpoint.commands import listing, lost_latest

    found = listing(directory)
    for entry in found:
        print(entry.line)
    if lost := lost_latest(directory):
        warn(lost)
    return Answer(0, {"checkpoints": [entry.content for entry in found], "warnings": [lost] if lost else []})


@ckpt.command
def verify(
    path: Annotated[Path, Parameter(name="PATH", help="The directory of a run, all of whose checkpoints are read, or of one checkpoint.")],
    /,
    *,
    json_: AsJSON = False,
) -> Answer:
    """Read every byte of the checkpoints at PATH; exit 1 if one is damaged."""
    from nsa_train.checkpoint.commands import lost_latest, verification

    found = verification(path)
    for entry in found:
        print(f"{'FAIL' if entry.is_damaged else 'ok':4}  {entry.line}", file=sys.stderr if entry.is_damaged else sys.stdout)
    if lost := lost_latest(path):
        warn(lost)
    code = TrainError.exit_code if any(entry.is_damaged for entry in found) else 0
    return Answer(code, {"checkpoints": [entry.content for entry in found], "warnings": [lost] if lost else []})


@ckpt.command
@ending_by_signals("before the end; nothing was written; start again")
def export(
    source: Annotated[Path, Parameter(name="CKPT", help=CHECKPOINT)],
    out: Annotated[Path, Parameter(help="The file or folder to write, which must not exist.")],
    /,
    *,
    format_: Annotated[
        str,
        Parameter(
            name="--format",
            help="safetensors: one file. hf: a folder that Transformers loads through nsa-transformers. llama: a dense model as a folder of "
            "Llama, Qwen2 or Qwen3, which Transformers loads by itself and `convert` takes.",
        ),
    ] = "safetensors",
) -> int:
    """Write the weights of CKPT to OUT."""
    check_path("OUT", out)
    check_openable({"CKPT": source, "OUT": out})
    check_writable("OUT", out)
    from nsa_train.checkpoint.commands import export as export_weights

    print(export_weights(source, out, format_, say=warn))
    return 0


@ckpt.command(name="import")
@ending_by_signals("before the end; nothing was written; start again")
def import_(
    source: Annotated[Path, Parameter(name="SOURCE", help="A folder that `ckpt export --format hf` or Transformers wrote.")],
    out: Annotated[Path, Parameter(help="The run's directory to write, which must not exist.")],
    /,
    *,
    recipe: Annotated[str, Parameter(help="Data and training of the run: a shipped recipe or the path of a TOML file.")] = "demo",
    set_: Overrides = None,
) -> int:
    """Create a run at OUT that begins with the weights of SOURCE; `nsa-train resume OUT` trains it."""
    check_path("OUT", out)
    check_openable({"SOURCE": source, "OUT": out})
    check_source(source)
    check_writable("OUT", out)
    overrides = settled(set_ or (), say=warn)
    from nsa_train.checkpoint.hugging_face import import_run

    import_run(source, out, recipe, overrides)
    print(out)
    return 0


@app.command
@ending_by_signals("before the end; nothing was written; start again")
def convert(
    source: Annotated[Path, Parameter(name="SOURCE", help="A folder with config.json and safetensors of Llama, Qwen2, Qwen3 or Mistral.")],
    /,
    *,
    out: Annotated[Path, Parameter(help="The folder to write, which must not exist.")],
    kv: Annotated[str, Parameter(help="shared: one K and V for all branches, the source's; separate: a copy for each.")] = "shared",
    gates: Annotated[
        str,
        Parameter(help="open: all branches count alike; selected: the selected one alone, so that short texts give the source's logits."),
    ] = "open",
    nsa: Annotated[list[str] | None, Parameter(name="--nsa", help="key=value of table nsa; the value is TOML. Repeatable.")] = None,
    layers: Annotated[str | None, Parameter(help='A pattern as in model.layers: \'["dense", {branches = ["win"]}]\'.')] = None,
) -> int:
    """Convert the dense checkpoint SOURCE to an NSA model, verify it layer by layer, and write a recipe that trains it."""
    check_path("--out", out)
    check_openable({"SOURCE": source, "--out": out})
    check_source(source)
    check_writable("--out", out)
    from nsa_train.checkpoint.converting import convert as convert_checkpoint

    for line in convert_checkpoint(source, out, kv=kv, gates=gates, nsa=nsa or (), layers=layers, say=warn):
        print(line)
    return 0


def main(tokens: Iterable[str] | None = None) -> NoReturn:
    """Run the command line `tokens` (default: this process's) and exit with its code."""
    if isinstance(sys.stdout, TextIOWrapper):
        # a question mark for characters that its encoding lacks; stderr escapes them by itself
        sys.stdout.reconfigure(errors="replace")
    with last_words():
        heed_launcher()
        if not note_worker():
            sys.exit(reported(TerminatedError.exit_code, is_own=True))
        sys.exit(run_command(sys.argv[1:] if tokens is None else tokens))


def run_command(tokens: Iterable[str]) -> int:
    """Return the exit code of the command line `tokens`; expected errors end in a message, not a traceback."""
    words = list(tokens)
    is_json = "--json" in words and words[0] not in JSON_TO_FILE and not {*app.help_flags}.intersection(words)
    ending = _run_as_json(words) if is_json else _run_app(words)[0]
    if ending.line:
        warn(ending.line)
    return reported(ending.code, is_own=ending.is_own)


def _run_as_json(tokens: list[str]) -> Ending:
    """Run `tokens`, whose command has `--json`, and print one object, also for a failure."""
    # keep the lines that the command prints without the option, and all other output, off stdout
    with redirect_stdout(StringIO()):
        ending, content = _run_app(tokens)
    command = " ".join(app.parse_commands(tokens)[0])
    written = _ending_of(lambda: print(as_object(command, ending.code, ending.line.splitlines(), content)))[0]
    return ending if written.code == 0 else written


def _run_app(tokens: list[str]) -> tuple[Ending, Mapping[str, Any]]:
    """Return how the command `tokens` ends, and its findings where it has `--json`."""

    def answer() -> Any:
        check_text(tokens)
        return app(with_steps(tokens), exit_on_error=False, result_action="return_value")

    return _ending_of(answer)


def _ending_of(job: Callable[[], int | Answer | None]) -> tuple[Ending, Mapping[str, Any]]:
    try:
        result = job()
        # a closed reader is detected here, not at the end of the process
        print(end="", flush=True)
    except CycloptsError as error:
        # cyclopts has printed what is wrong
        return Ending(ConfigError.exit_code), {"errors": str(error).splitlines()}
    except (TrainError, NSAError, SignalledError) as error:
        return ending_of(error), {}
    except OSError as error:
        if is_unread(sys.stdout):
            # the reader closed the output
            discard(sys.stdout)
            return Ending(TrainError.exit_code), {}
        is_too_long = error.errno == errno.ENAMETOOLONG
        advice = "use a shorter name" if is_too_long else "fix it and start again"
        return Ending(ConfigError.exit_code if is_too_long else TrainError.exit_code, f"{error}; {advice}"), {}
    except KeyboardInterrupt:
        return Ending(INTERRUPTED, "interrupted by Ctrl-C"), {}
    answer = result if isinstance(result, Answer) else Answer(result or 0, {})
    return Ending(answer.code), answer.content


def with_steps(tokens: list[str]) -> list[str]:
    """Return `tokens` with each `--resume` of `run` joined to its step, which may be empty."""
    joined: list[str] = []
    for word in tokens:
        if tokens[0] == "run" and joined and joined[-1] == "--resume":
            is_option = word.startswith("-") and not word[1:].isdigit()
            is_step = not (is_option or word in shipped_recipes() or word.endswith(".toml"))
            joined[-1:] = [f"--resume={word}"] if is_step else ["--resume=", word]
        else:
            joined.append(word)
    return [*joined[:-1], "--resume="] if joined[-1:] == ["--resume"] else joined


def _check_models(inputs: Mapping[str, Path | None]) -> None:
    """Check that the paths of `inputs` (argument -> path; None: left out) hold models, before torch is loaded."""
    check_openable(inputs)
    for name, path in inputs.items():
        if path is not None:
            require_model(name, path)


def _checked_config(recipe: str, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of `recipe` with `overrides`, whose vocabulary holds its tokenizer's ids."""
    config = load_config(recipe, overrides)
    # torch is loaded here, after all other keys were checked
    from nsa_train.model.decoder import vocab_size_of

    vocab_size_of(config)
    return config


def _default_out(recipe: str) -> Path:
    return Path("runs") / f"{find_recipe(recipe).stem}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
