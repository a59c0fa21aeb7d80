"""The command `nsa-bench train`: both twins, their table, their files."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsa_bench.errors import OptionError
from nsa_bench.results import write_csv, write_json
from nsa_bench.training import TrainingResult, run_twin, twin_config
from nsa_train.errors import ConfigError

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


def bench_training(
    recipe: str,
    overrides: Sequence[str],
    *,
    steps: int,
    twins: str,
    commit: str | None,
    json_file: Path | None,
    csv_file: Path | None,
    screen: Console,
    progress: Console,
) -> list[TrainingResult]:
    """Train the twins of `recipe`, print their table, write their files, and return the results.

    Raises:
        OptionError: for too few steps, for what the recipe or an override breaks, and for a backend that cannot serve; before
            anything is written.
    """
    if steps < LEAST_STEPS:
        raise OptionError(f"--steps={steps} leaves no steady step to time (the first ones warm up); use {LEAST_STEPS} or more")
    try:
        configs = [twin_config(recipe, overrides, attention, steps)[0] for attention in TWINS[twins]]
    except ConfigError as error:
        raise OptionError(str(error)) from None
    # a mistyped key is refused without torch
    from nsa_bench.environment import describe_environment
    from nsa_train.host.machine import target_machine
    from nsa_train.host.routing import overruled_backends, refused_backends, uses_of_run

    for config in configs:
        uses = uses_of_run(config, target_machine(config))
        if refused := refused_backends(config, uses):
            raise OptionError.of([*refused.values()])
        for line in overruled_backends(config, uses).values():
            progress.print(f"warn: route: {line}", markup=False, highlight=False, soft_wrap=True)
    environment = describe_environment()
    environment["commit"] = commit or environment["commit"]
    results: list[TrainingResult] = []
    with tempfile.TemporaryDirectory(prefix="nsa-bench-") as folder:
        for attention in TWINS[twins]:
            results.append(run_twin(recipe, overrides, attention, steps=steps, folder=Path(folder) / attention))
            progress.print(progress_line(results[-1]), markup=False, highlight=False, soft_wrap=True)
            rows = [_row(one, results, recipe, environment) for one in results]
            if json_file is not None:
                options = {"recipe": recipe, "set": list(overrides), "steps": steps}
                write_json(json_file, {"environment": environment, "options": options, "rows": rows})
            if csv_file is not None:
                write_csv(csv_file, rows)
    screen.print(training_table(recipe, results))
    return results


def training_table(recipe: str, results: Sequence[TrainingResult]) -> Table:
    """Return the twins side by side, and the throughput of each over the dense one's."""
    table = Table("attention", *(title for title, _, _ in COLUMNS), "of dense", "remark", title=f"training {recipe}")
    for one in results:
        values = [getattr(one, field) for _, field, _ in COLUMNS]
        shown = ["-" if value is None else form.format(value) for value, (_, _, form) in zip(values, COLUMNS, strict=True)]
        ratio = ratio_to_dense(one, results)
        table.add_row(one.attention, *shown, "-" if ratio is None else f"{ratio:.2f}x", Text(one.failure or one.routes))
    return table


def ratio_to_dense(one: TrainingResult, results: Sequence[TrainingResult]) -> float | None:
    """Return the throughput of `one` over that of the dense twin among `results`; None where either is missing."""
    dense = next((other.toks_per_s for other in results if other.attention == "dense"), None)
    return one.toks_per_s / dense if one.toks_per_s is not None and dense else None


def progress_line(one: TrainingResult) -> str:
    """Return the line that tells of a result as it comes."""
    if one.failure is not None:
        return f"{one.attention}: no time, {one.failure}"
    mfu = "" if one.mfu is None else f", MFU {one.mfu:.1%}"
    return f"{one.attention}: {one.toks_per_s:,.0f} toks/s{mfu}, {one.peak_memory_gib:.2f} GiB"


def _row(one: TrainingResult, results: Sequence[TrainingResult], recipe: str, environment: dict[str, Any]) -> dict[str, Any]:
    facts = {name: environment[name] for name in ("time", "gpu", "cpu", "torch", "triton", "commit")}
    return {"recipe": recipe, **attrs.asdict(one), "of_dense": ratio_to_dense(one, results), **facts}
