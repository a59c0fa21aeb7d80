"""Writes a run's directory while the trainer goes through its events."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from nsa_core.telemetry import LayerTelemetry
from nsa_train.config import RunConfig
from nsa_train.model.decoder import count_parameters
from nsa_train.recipe import to_toml
from nsa_train.routing import routing_decisions
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry import health
from nsa_train.telemetry.environment import describe_environment, gpu_memory, peak_memory_mib
from nsa_train.telemetry.progress import StepFigures
from nsa_train.telemetry.records import (
    SELECTION_COLUMNS,
    TRAINING_COLUMNS,
    VALIDATION_COLUMNS,
    CsvTable,
    Heartbeat,
    perplexity,
    write_json,
)
from nsa_train.telemetry.report import write_report


class Recorder:
    """The records of one run; every method is one event."""

    def __init__(self, config: RunConfig, out_dir: Path, device: torch.device) -> None:
        """Create `out_dir` with config.toml, env.json and the tables' headers."""
        self.config, self.device, self.paths = config, device, RunDirectory(out_dir)
        out_dir.mkdir(parents=True, exist_ok=True)
        self.paths.config.write_text(to_toml(config), encoding="utf-8")
        routing = {name: str(decision) for name, decision in routing_decisions(config, device).items()}
        write_json(self.paths.environment, describe_environment(device, routing))
        self.training = CsvTable(self.paths.training, TRAINING_COLUMNS)
        self.validation = CsvTable(self.paths.validation, VALIDATION_COLUMNS)
        is_sparse = config.model.attention == "nsa"
        self.selection = CsvTable(self.paths.selection, SELECTION_COLUMNS) if is_sparse else None
        self.heartbeat = Heartbeat(out_dir)
        self.parameters = count_parameters(config)
        self.started = time.monotonic()
        self.steps: list[StepFigures] = []
        self.losses_on_validation: list[float] = []
        self.heartbeat.beat("boot", 0, parameters=getattr(self.parameters, config.model.attention))

    def stepped(self, figures: StepFigures, *, fetches: Sequence[float], telemetry: Sequence[LayerTelemetry]) -> None:
        """Record an optimizer step; `fetches`: recent waits for data in ms; `telemetry`: of each NSA layer, if logged."""
        self.steps.append(figures)
        self.training.append(_columns({**attrs.asdict(figures), "ppl": perplexity(figures.loss)}, TRAINING_COLUMNS))
        fields = {
            **_columns(attrs.asdict(figures), ("loss", "lr", "toks_per_s", "grad_norm")),
            "dt_fetch_s": figures.fetch_ms / 1e3,
            "fetch_p50_ms": statistics.median(fetches),
            "fetch_p95_ms": sorted(fetches)[int(0.95 * (len(fetches) - 1))],
            **gpu_memory(self.device),
        }
        if telemetry:
            summary = health.combine(telemetry)
            routes = health.routes_of(telemetry)
            self.heartbeat.beat("progress", figures.step, **fields, **health.heartbeat_fields(summary), routes=routes)
            if self.selection and "k_mean" in summary:
                self.selection.append({"step": figures.step, **_columns(summary, SELECTION_COLUMNS[1:])})
        self.heartbeat.beat("step_end", figures.step, **fields)

    def validated(self, step: int, loss: float) -> None:
        """Record an evaluation; `loss` in nats per token."""
        self.losses_on_validation.append(loss)
        self.validation.append({"step": step, "val_loss": loss, "ppl": perplexity(loss)})
        self.heartbeat.beat("val", step, val_loss=loss)

    def saved(self, step: int, path: Path) -> None:
        """Record a checkpoint."""
        self.heartbeat.beat("save", step, checkpoint=path.name)

    def halted(self, error: BaseException) -> None:
        """Record that the run ended before its last step."""
        step = self.steps[-1].step if self.steps else 0
        self.heartbeat.beat("halt", step, reason=str(error) or type(error).__name__)

    def finished(self) -> dict[str, Any]:
        """Write metrics.json, curves.png and report.html; return the metrics."""
        first, last = self.steps[0], self.steps[-1]
        metrics = {
            "attention": self.config.model.attention,
            "parameters_nsa": self.parameters.nsa,
            "parameters_dense": self.parameters.dense,
            "steps": last.step,
            "tokens": last.step * _tokens_per_step(self.config),
            "seconds": time.monotonic() - self.started,
            "first_loss": first.loss,
            "last_loss": last.loss,
            "first_val_loss": self.losses_on_validation[0],
            "val_loss": self.losses_on_validation[-1],
            "val_ppl": perplexity(self.losses_on_validation[-1]),
            "toks_per_s_median": statistics.median(step.toks_per_s for step in self.steps),
            "peak_memory_mib": peak_memory_mib(self.device),
        }
        write_json(self.paths.metrics, metrics)
        write_report(self.paths)
        return metrics


def _columns(figures: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: figures[name] for name in names}


def _tokens_per_step(config: RunConfig) -> int:
    return config.train.batch_size * config.train.accumulate * config.train.seq_len
