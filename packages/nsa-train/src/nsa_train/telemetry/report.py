"""report.html: one page that needs no other file, rendered from a run's directory alone."""

import base64
import re
import statistics
from importlib.resources import files
from pathlib import Path
from typing import Any

from nsa_train.errors import ConfigError
from nsa_train.files import MOST_SAMPLE, as_text, read_regular, refusal, written_whole
from nsa_train.recipe import read_toml
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.figures import draw_curves, read_history
from nsa_train.telemetry.health import judge
from nsa_train.telemetry.records import read_json

CARDS = (
    ("val_loss", "held-out loss, nats per token", "{:.3f}"),
    ("first_val_loss", "held-out loss before training", "{:.3f}"),
    ("last_loss", "last training loss", "{:.3f}"),
    ("toks_per_s_median", "tokens per second, median", "{:,.0f}"),
    ("mfu", "of the chip's dense bf16 peak (MFU)", "{:.1%}"),
    ("seconds", "seconds, all in all", "{:,.0f}"),
    ("peak_memory_mib", "MiB of memory at the peak", "{:,.0f}"),
)
"""Key of metrics.json, its caption, its format."""

SPEED_ROWS = (
    ("toks_per_s_median", "tokens per second, median", "{:,.0f}"),
    ("step_ms_median", "ms per optimizer step, median", "{:,.1f}"),
    ("fetch_ms_p95", "ms of a step waiting for data, 95th percentile", "{:,.2f}"),
    ("mfu", "MFU: model FLOPs of the attention that ran, of the chip's dense bf16 peak", "{:.1%}"),
    ("model_flops_per_token", "model FLOPs per token, forward and backward", "{:.3g}"),
    ("peak_dense_bf16_tflops", "dense bf16 peak of the chip, TFLOP/s", "{:,.0f}"),
    ("peak_memory_mib", "peak memory, MiB", "{:,.0f}"),
    ("peak_memory_gib", "peak memory, GiB", "{:,.2f}"),
    ("clipped_steps", "steps whose gradient was clipped", "{:,}"),
    ("skipped_steps", "steps skipped by a guard", "{:,}"),
    ("fallbacks_total", "fallbacks of routing", "{:,}"),
)
"""The same for the table of throughput and memory."""
SELECTION_ROWS = (
    ("k_mean", "blocks that a query reads", "{:.2f}"),
    ("k_max", "the most that one reads", "{:,}"),
    ("pct_at_max", "% of queries that read the most", "{:.1f}"),
    ("free_block_share_mean", "share of them chosen freely, neither initial nor local", "{:.3f}"),
    ("overlap_with_previous_query", "share of them that the query before chose too", "{:.3f}"),
    ("reads_act_total", "tokens read in the step", "{:,}"),
)
"""The same for the last progress event."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters but tab and newline that no browser shows."""
RECENT_SHARE = 5
"""The last fifth of the steps is compared with all of them."""


def write_report(paths: RunDirectory) -> None:
    """Draw curves.png and write report.html of a run; what of its records is damaged is left out.

    Raises:
        ConfigError: when the directory holds no records of a run.
    """
    import jinja2

    history = read_history(paths)
    with written_whole(paths.curves) as aside:
        draw_curves(history, aside)
    environment, metrics = read_json(paths.environment), _read_metrics(paths.metrics)
    template = (files("nsa_train.telemetry") / "report.html.j2").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    last = history.progress[-1] if history.progress else {}
    content = page.render(
        title=paths.root.name,
        metrics=metrics,
        has_metrics=paths.metrics.exists(),
        is_halted=history.newest.get("msg") == "halt",
        drawn_to=(int(history.training["step"][-1]), history.newest.get("iso", "an unknown time")),
        cards=_figures(CARDS, metrics),
        curves=base64.b64encode(paths.curves.read_bytes()).decode(),
        checks=judge({**last, "toks_per_s_of_median": steadiness(history.training)}),
        speed=_figures(SPEED_ROWS, metrics),
        mfu_reason=metrics.get("mfu_reason"),
        is_synthetic=environment.get("data_synthetic", False),
        gates=_gate_rows(last),
        selection=_figures(SELECTION_ROWS, last),
        routes=last.get("routes") or {},
        last_step=last.get("step"),
        settings=_read_settings(paths.config),
        samples={
            path.stem: _read_text(path)
            for path in sorted(paths.samples.glob("*.txt"), reverse=True)
            if path.exists() and not refusal(path, MOST_SAMPLE)
        },
        environment={key: value for key, value in environment.items() if key not in ("routing", "packages")},
        packages=_table(environment, "packages"),
        routing=_table(environment, "routing"),
    )
    with written_whole(paths.report) as aside:
        aside.write_text(content, encoding="utf-8")


def steadiness(training: dict[str, list[float]]) -> float | None:
    """Return the median throughput of the last steps over that of the whole run; None without steps."""
    speeds = [speed for speed in training.get("toks_per_s", []) if speed > 0]
    if not speeds:
        return None
    return statistics.median(speeds[-max(1, len(speeds) // RECENT_SHARE) :]) / statistics.median(speeds)


def _gate_rows(event: dict[str, Any]) -> list[dict[str, Any]]:
    """Return per branch its gate's share, mean and spread, and its contribution."""
    return [
        {
            "branch": branch,
            "share": share,
            "mean": event.get(f"gate_mean_{branch}"),
            "std": event.get(f"gate_std_{branch}"),
            "contribution": event.get(f"contribution_{branch}"),
        }
        for branch, share in (event.get("gate_branch_shares") or {}).items()
    ]


def _figures(rows: tuple[tuple[str, str, str], ...], found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return caption and formatted value of each of `rows` that `found` has."""
    return [(caption, form.format(found[key])) for key, caption, form in rows if isinstance(found.get(key), int | float)]


def _read_metrics(path: Path) -> dict[str, Any]:
    """Return metrics.json, or nothing where it lacks what the head of the page says."""
    metrics = read_json(path)
    counts = ("parameters_nsa", "parameters_dense", "steps", "tokens")
    is_whole = metrics.get("attention") in ("nsa", "dense") and all(isinstance(metrics.get(name), int) for name in counts)
    return metrics if is_whole else {}


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return {name: table for name, table in read_toml(path).items() if isinstance(table, dict)}
    except ConfigError:
        return {}


def _read_text(path: Path) -> str:
    """Return a text, U+FFFD in the place of control characters, which no page may hold."""
    return CONTROL.sub("\ufffd", as_text(read_regular(path, MOST_SAMPLE), errors="replace"))


def _table(environment: dict[str, Any], name: str) -> dict[str, Any]:
    found = environment.get(name)
    return found if isinstance(found, dict) else {}
