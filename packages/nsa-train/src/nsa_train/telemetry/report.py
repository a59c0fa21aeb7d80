"""report.html: one page that needs no other file, rendered from a run's directory alone."""

import base64
import json
import statistics
from importlib.resources import files
from typing import Any

from nsa_train.recipe import read_toml
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.figures import draw_curves, read_history
from nsa_train.telemetry.health import judge

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
RECENT_SHARE = 5
"""The last fifth of the steps is compared with all of them."""


def write_report(paths: RunDirectory) -> None:
    """Draw curves.png and write report.html of a run.

    Raises:
        ConfigError: when the directory holds no records of a run.
    """
    import jinja2

    history = read_history(paths)
    draw_curves(history, paths.curves)
    environment = _read_json(paths.environment)
    template = (files("nsa_train.telemetry") / "report.html.j2").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    metrics = _read_json(paths.metrics)
    last = history.progress[-1] if history.progress else {}
    content = page.render(
        title=paths.root.name,
        metrics=metrics,
        cards=[(form.format(metrics[key]), caption) for key, caption, form in CARDS if metrics.get(key) is not None],
        curves=base64.b64encode(paths.curves.read_bytes()).decode(),
        checks=judge({**last, "toks_per_s_of_median": steadiness(history.training)}),
        speed=[(caption, form.format(metrics[key])) for key, caption, form in SPEED_ROWS if metrics.get(key) is not None],
        mfu_reason=metrics.get("mfu_reason"),
        is_synthetic=environment.get("data_synthetic", False),
        gates=_gate_rows(last),
        selection=[(caption, form.format(last[key])) for key, caption, form in SELECTION_ROWS if last.get(key) is not None],
        routes=last.get("routes", {}),
        last_step=last.get("step"),
        settings=read_toml(paths.config),
        samples={path.stem: path.read_text(encoding="utf-8") for path in sorted(paths.samples.glob("*.txt"), reverse=True)},
        environment={key: value for key, value in environment.items() if key not in ("routing", "packages")},
        packages=environment.get("packages", {}),
        routing=environment.get("routing", {}),
    )
    paths.report.write_text(content, encoding="utf-8")


def steadiness(training: dict[str, list[float]]) -> float | None:
    """Return the median throughput of the last steps over that of the whole run; None without steps."""
    speeds = training.get("toks_per_s", [])
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
        for branch, share in event.get("gate_branch_shares", {}).items()
    ]


def _read_json(path: Any) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
