"""Training throughput: a recipe and its dense twin, each in a process of its own, measured from the records it leaves.

A run whose loss is not what training must give gets no time: it starts near ln V, stays finite, and on synthetic ids
it stays at ln V, since only a leak can lower it there.
"""

import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from nsa_bench.errors import BenchError
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import load_config
from nsa_train.telemetry.records import load_json, read_events, read_rows

WARM_UP_SHARE, LEAST_WARM_UP = 0.1, 3
"""Of the steps, left out of the medians: compilation and the allocator's first growth."""
START_BAND = 0.1
"""How far the first loss may lie from ln V, as a share."""
LEAK_NATS = 0.3
"""How far the loss on synthetic ids may fall below ln V."""


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


def twin_config(recipe: str, overrides: Sequence[str], attention: str, steps: int) -> tuple[RunConfig, list[str]]:
    """Return the configuration of a twin and the overrides that make it: `steps` steps, nothing saved between, little evaluated.

    Raises:
        nsa_train.errors.ConfigError: for what the recipe or an override breaks.
    """
    sets = [
        *overrides,
        *(["model.layers=[]"] if attention == "dense" else []),
        *(
            f"model.attention={attention}",
            f"train.steps={steps}",
            "train.warmup_steps=0",
            "train.save_every=0",
            f"train.eval_every={steps}",
            "train.eval_batches=1",
        ),
        f"train.log_every={steps}",
    ]
    return load_config(recipe, sets), sets


def run_twin(recipe: str, overrides: Sequence[str], attention: str, *, steps: int, folder: Path) -> TrainingResult:
    """Train one twin of `recipe` for `steps` steps into `folder` and return its figures."""
    config, sets = twin_config(recipe, overrides, attention, steps)
    words = [word for override in sets for word in ("--set", override)]
    command = [sys.executable, "-m", "nsa_train", "run", recipe, "--out", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        return TrainingResult(attention=attention, failure=f"exit code {done.returncode}: {lines[-1]}")
    return read_result(RunDirectory(folder), config)


def read_result(paths: RunDirectory, config: RunConfig) -> TrainingResult:
    """Return the figures of a finished run from its records.

    Raises:
        BenchError: when its records are not there.
    """
    if not paths.metrics.is_file():
        raise BenchError(f"{paths.root} holds no metrics.json (a run writes it at its end); see the run's own message")
    rows, metrics = list(read_rows(paths.training)), load_json(paths.metrics)
    failure = wrong_losses([row["loss"] for row in rows], config)
    steady = rows[max(LEAST_WARM_UP, int(WARM_UP_SHARE * len(rows))) : -1] or rows[-1:]
    routes: dict[str, str] = next((event["routes"] for event in read_events(paths.heartbeat) if event.get("routes")), {})
    common: dict[str, Any] = {
        "attention": config.model.attention,
        "parameters": metrics["parameters"],
        "tokens_per_step": metrics["tokens"] // metrics["steps"],
        "seq_len": config.train.seq_len,
        "precision": config.train.precision,
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "routes": _shown(routes),
    }
    if failure is not None:
        return TrainingResult(**common, failure=failure)
    return TrainingResult(
        **common,
        toks_per_s=statistics.median(row["toks_per_s"] for row in steady),
        step_ms=statistics.median(row["step_ms"] for row in steady),
        mfu=_median_or_none([row["mfu"] for row in steady]),
        peak_memory_gib=metrics["peak_memory_gib"],
        fetch_p95_ms=sorted(row["fetch_ms"] for row in steady)[int(0.95 * (len(steady) - 1))],
    )


def wrong_losses(losses: Sequence[float], config: RunConfig) -> str | None:
    """Return what is wrong with `losses` of a fresh model, None where nothing is."""
    from nsa_train.model.decoder import vocab_size_of

    uniform = math.log(vocab_size_of(config))
    if not all(math.isfinite(loss) for loss in losses):
        return "a loss is not finite"
    if abs(losses[0] - uniform) > START_BAND * uniform:
        return f"the first loss is {losses[0]:.3f}, not near ln V = {uniform:.3f}"
    if config.data.source == "synthetic" and min(losses) < uniform - LEAK_NATS:
        return f"the loss on random ids fell to {min(losses):.3f}, below ln V = {uniform:.3f}: the future leaks"
    return None


def _shown(routes: dict[str, str]) -> str:
    """Return who ran: "triton" where one did it all, else "cmp sdpa, slc triton"."""
    names = set(routes.values())
    return names.pop() if len(names) == 1 else ", ".join(f"{operation} {name}" for operation, name in routes.items())


def _median_or_none(values: list[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else None
