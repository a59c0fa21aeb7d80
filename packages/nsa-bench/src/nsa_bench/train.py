"""`nsa-bench train`: train a recipe and its dense twin, each in its own process, and measure both from their records.

A run with an implausible loss gets no time. The loss must start near ln V and stay finite. On synthetic ids it must
stay at ln V, because only a leak can lower it there.
"""

import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen
from rich.table import Table
from rich.text import Text

from nsa_bench.errors import BenchError, OptionError
from nsa_bench.launching import environment_of_run, stopped_by_signals
from nsa_bench.results import Output, facts_of
from nsa_train.errors import ConfigError
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import load_config
from nsa_train.settings.rules import LONG_STEPS
from nsa_train.telemetry.records import load_json, read_events, read_rows

WARM_UP_SHARE, LEAST_WARM_UP = 0.1, 3
"""Share and minimum number of the first steps that the medians leave out: compilation and the allocator's first growth."""
START_BAND = 0.1
"""Maximum deviation of the first loss from ln V, as a share."""
LEAK_NATS = 0.3
"""Maximum nats by which the loss on synthetic ids may fall below ln V."""
TWINS = {"both": ("nsa", "dense"), "nsa": ("nsa",), "dense": ("dense",)}
LEAST_STEPS = 5
COLUMNS = (
    ("toks/s", "toks_per_s", "{:,.0f}"),
    ("MFU", "mfu", "{:.1%}"),
    ("peak GiB", "peak_memory_gib", "{:.2f}"),
    ("ms/step", "step_ms", "{:.1f}"),
    ("fetch p95 ms", "fetch_p95_ms", "{:.2f}"),
    ("parameters", "parameters", "{:,}"),
    ("last loss", "last_loss", "{:.3f}"),
)
"""Title, field, format."""


@frozen(kw_only=True)
class TrainingResult:
    """One twin's figures, or why it has none."""

    attention: str
    failure: str | None = None
    parameters: int | None = None
    tokens_per_step: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    toks_per_s: float | None = None
    step_ms: float | None = None
    mfu: float | None = None
    peak_memory_gib: float | None = None
    fetch_p95_ms: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    routes: str = ""


def run_train(recipe: str, overrides: Sequence[str], *, steps: int, twins: str, output: Output) -> list[TrainingResult]:
    """Train the twins of `recipe`, print their table, write their files, and return the results.

    Raises:
        OptionError: for too few steps, a recipe or an override that breaks a rule, or a backend that cannot serve; before
            anything is written.
        OSError: if a file of the results cannot be written, before a model is trained.
    """
    if steps < LEAST_STEPS:
        raise OptionError(f"--steps={steps} leaves no steady step to time (the first ones warm up); use {LEAST_STEPS} or more")
    if steps >= LONG_STEPS:
        raise OptionError(
            f"--steps={steps} would be a run that must save checkpoints, which this command does not; use fewer than {LONG_STEPS}"
        )
    # the keys that this command sets for each twin; one of the twins keeps model.layers of the recipe
    sets = [{setting.partition("=")[0] for setting in twin_settings((), attention, steps)} for attention in TWINS[twins]]
    asked = {override: override.partition("=")[0].strip() for override in overrides}
    if ignored := [override for override, key in asked.items() if key in set.intersection(*sets)]:
        raise OptionError.of([f"--set {override} is not read (this command sets {asked[override]}); leave it out" for override in ignored])
    try:
        configs = [load_config(recipe, twin_settings(overrides, attention, steps)) for attention in TWINS[twins]]
    except ConfigError as error:
        raise OptionError(str(error)) from None
    output.check_files(inputs={Path(recipe): "the recipe"})
    _check_routes(configs, output)
    environment = output.environment
    results: list[TrainingResult] = []
    with tempfile.TemporaryDirectory(prefix="nsa-bench-") as folder:
        for attention in TWINS[twins]:
            results.append(run_twin(recipe, overrides, attention, steps=steps, folder=Path(folder) / attention))
            output.say(progress_line(results[-1]))
            rows = [_row(one, results, recipe, environment) for one in results]
            options = {"recipe": recipe, "set": list(overrides), "steps": steps}
            output.write({"environment": environment, "options": options, "rows": rows}, rows)
    output.show(training_table(recipe, results))
    return results


def _check_routes(configs: Sequence[RunConfig], output: Output) -> None:
    # loaded here, so that a mistyped key is refused without torch
    from nsa_train.host.machine import target_machine
    from nsa_train.host.routing import overruled_backends, refused_backends, uses_of_run

    for config in configs:
        uses = uses_of_run(config, target_machine(config))
        if refused := refused_backends(config, uses):
            raise OptionError.of([*refused.values()])
        for line in overruled_backends(config, uses).values():
            output.say(f"warn: route: {line}")


def twin_settings(overrides: Sequence[str], attention: str, steps: int) -> list[str]:
    """Return the overrides that make a twin of a recipe: `steps` steps, no saves between, few evaluations."""
    return [
        *overrides,
        *(["model.layers=[]"] if attention == "dense" else []),
        *(f"model.attention={attention}", f"train.steps={steps}", "train.warmup_steps=0", "train.save_every=0"),
        *(f"train.eval_every={steps}", "train.eval_batches=1", f"train.log_every={steps}"),
    ]


def run_twin(recipe: str, overrides: Sequence[str], attention: str, *, steps: int, folder: Path) -> TrainingResult:
    """Train one twin of `recipe` for `steps` steps into `folder` and return its figures."""
    sets = twin_settings(overrides, attention, steps)
    words = [word for override in sets for word in ("--set", override)]
    command = [sys.executable, "-m", "nsa_train", "run", recipe, "--out", str(folder), *words]
    with stopped_by_signals():
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment_of_run())
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        return TrainingResult(attention=attention, failure=f"exit code {done.returncode}: {lines[-1]}")
    return read_result(RunDirectory(folder), load_config(recipe, sets))


def read_result(paths: RunDirectory, config: RunConfig) -> TrainingResult:
    """Return the figures of a finished run from its records.

    Raises:
        BenchError: if its records do not exist.
    """
    from nsa_bench.routes import text_of

    if not paths.metrics.is_file():
        raise BenchError(f"{paths.root} holds no metrics.json (a run writes it at its end); see the run's own message")
    rows, metrics = list(read_rows(paths.training)), load_json(paths.metrics)
    failure = wrong_losses([row["loss"] for row in rows], config)
    steady = rows[max(LEAST_WARM_UP, int(WARM_UP_SHARE * len(rows))) : -1] or rows[-1:]
    routes: dict[str, str] = next((event["routes"] for event in read_events(paths.heartbeat) if event.get("routes")), {})
    common: dict[str, Any] = {
        "attention": config.model.attention,
        "parameters": metrics["parameters"],
        # a skipped step has no row, and its tokens are in no sum
        "tokens_per_step": metrics["tokens"] // len(rows),
        "seq_len": config.train.seq_len,
        "precision": config.train.precision,
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "routes": text_of(routes),
    }
    if failure is not None:
        return TrainingResult(**common, failure=failure)
    shares = [row["mfu"] for row in steady if not math.isnan(row["mfu"])]
    return TrainingResult(
        **common,
        toks_per_s=statistics.median(row["toks_per_s"] for row in steady),
        step_ms=statistics.median(row["step_ms"] for row in steady),
        mfu=statistics.median(shares) if shares else None,
        peak_memory_gib=metrics["peak_memory_gib"],
        fetch_p95_ms=sorted(row["fetch_ms"] for row in steady)[int(0.95 * (len(steady) - 1))],
    )


def wrong_losses(losses: Sequence[float], config: RunConfig) -> str | None:
    """Return the fault of the `losses` of a fresh model, or None if there is none."""
    from nsa_train.model.decoder import vocab_size_of

    uniform = math.log(vocab_size_of(config))
    if not all(math.isfinite(loss) for loss in losses):
        return "a loss is not finite"
    if abs(losses[0] - uniform) > START_BAND * uniform:
        return f"the first loss is {losses[0]:.3f}, not near ln V = {uniform:.3f}"
    if config.data.source == "synthetic" and min(losses) < uniform - LEAK_NATS:
        return f"the loss on random ids fell to {min(losses):.3f}, below ln V = {uniform:.3f}: the future leaks"
    return None


def training_table(recipe: str, results: Sequence[TrainingResult]) -> Table:
    """Return a table of the twins, with the throughput of each over the dense twin's."""
    table = Table("attention", *(title for title, _, _ in COLUMNS), "of dense", "remark", title=f"training {recipe}")
    for one in results:
        values = [getattr(one, field) for _, field, _ in COLUMNS]
        shown = ["-" if value is None else form.format(value) for value, (_, _, form) in zip(values, COLUMNS, strict=True)]
        ratio = ratio_to_dense(one, results)
        table.add_row(one.attention, *shown, "-" if ratio is None else f"{ratio:.2f}x", Text(one.failure or one.routes))
    return table


def ratio_to_dense(one: TrainingResult, results: Sequence[TrainingResult]) -> float | None:
    """Return the throughput of `one` over that of the dense twin among `results`; None if either is missing."""
    dense = next((other.toks_per_s for other in results if other.attention == "dense"), None)
    return one.toks_per_s / dense if one.toks_per_s is not None and dense else None


def progress_line(one: TrainingResult) -> str:
    """Return the progress line of a result."""
    if one.failure is not None:
        return f"{one.attention}: no time, {one.failure}"
    mfu = "" if one.mfu is None else f", MFU {one.mfu:.1%}"
    return f"{one.attention}: {one.toks_per_s:,.0f} toks/s{mfu}, {one.peak_memory_gib:.2f} GiB"


def _row(one: TrainingResult, results: Sequence[TrainingResult], recipe: str, environment: dict[str, Any]) -> dict[str, Any]:
    return {"recipe": recipe, **attrs.asdict(one), "of_dense": ratio_to_dense(one, results), **facts_of(environment)}
