"""report.html: one page that needs no other file, rendered from a run's directory alone."""

import base64
import json
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
    ("seconds", "seconds, all in all", "{:,.0f}"),
    ("peak_memory_mib", "MiB of memory at the peak", "{:,.0f}"),
)
"""Key of metrics.json, its caption, its format."""


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
        checks=judge(last),
        gates=_gate_rows(last),
        routes=last.get("routes", {}),
        last_step=last.get("step"),
        settings=read_toml(paths.config),
        samples={path.stem: path.read_text(encoding="utf-8") for path in sorted(paths.samples.glob("*.txt"), reverse=True)},
        environment={key: value for key, value in environment.items() if key not in ("routing", "packages")},
        packages=environment.get("packages", {}),
        routing=environment.get("routing", {}),
    )
    paths.report.write_text(content, encoding="utf-8")


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
