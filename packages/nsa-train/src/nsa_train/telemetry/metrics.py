"""metrics.json: the results of a run, computed from its tables, so that all starts of a resumed run count."""

import math
import statistics
from collections.abc import Iterable
from typing import Any

import torch

from nsa_train.host.chips import chip_of, reason_without_peak
from nsa_train.host.machine import peak_memory_mib
from nsa_train.model.decoder import count_parameters
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.telemetry.records import read_events, read_rows, seconds_between, standing_skips


def summarise(paths: RunDirectory, config: RunConfig, device: torch.device, *, world_size: int) -> dict[str, Any]:
    """Return the content of metrics.json of a run; a figure without a step is null; memory is this process's peak."""
    steps, evaluations = list(read_rows(paths.training)), list(read_rows(paths.validation))
    parameters, chip = count_parameters(config), chip_of(device)
    events = list(read_events(paths.heartbeat))
    peak_mib, fetches = peak_memory_mib(device), sorted(_known(row["fetch_ms"] for row in steps))
    return {
        "attention": config.model.attention,
        "parameters": getattr(parameters, config.model.attention),
        "parameters_nsa": parameters.nsa,
        "parameters_dense": parameters.dense,
        **data_marks(config),
        "data_first_tokens": next((event.get("data_first_tokens") for event in events if event["msg"] == "data"), None),
        "precision": config.train.precision,
        "device": device.type,
        "world_size": world_size,
        "steps": int(steps[-1]["step"]) if steps else 0,
        "tokens": int(sum(_known(row["tokens"] for row in steps))),
        "seconds": seconds_alive(events),
        "first_loss": steps[0]["loss"] if steps else None,
        "last_loss": steps[-1]["loss"] if steps else None,
        "first_val_loss": evaluations[0]["val_loss"] if evaluations else None,
        "val_loss": evaluations[-1]["val_loss"] if evaluations else None,
        "val_ppl": evaluations[-1]["ppl"] if evaluations else None,
        "toks_per_s_median": _median(row["toks_per_s"] for row in steps),
        "step_ms_median": _median(row["step_ms"] for row in steps),
        "fetch_ms_p95": fetches[int(0.95 * (len(fetches) - 1))] if fetches else None,
        "mfu": _median(row["mfu"] for row in steps),
        "mfu_reason": reason_without_peak(device),
        "peak_dense_bf16_tflops": chip.dense_bf16_tflops if chip else None,
        "peak_memory_mib": peak_mib,
        "peak_memory_gib": peak_mib / 2**10,
        "clipped_steps": sum(row["is_clipped"] == 1 for row in steps),
        "skipped_steps": len(standing_skips(events)),
        "fallbacks_total": next((int(total) for total in reversed(_known(row["total"] for row in read_rows(paths.fallbacks)))), None),
    }


def data_marks(config: RunConfig) -> dict[str, Any]:
    """Return the fields about the data that every artifact has: random ids are only for throughput."""
    return {"data_source": config.data.source, "data_synthetic": config.data.source == "synthetic"}


def tokens_per_step(config: RunConfig) -> int:
    """Return the tokens of one optimizer step of full rows, of all ranks together."""
    return config.train.batch_size * config.train.accumulate * config.train.seq_len


def seconds_alive(events: Iterable[dict[str, Any]]) -> float:
    """Return the seconds between the first and last of the `events` of each process, summed over processes."""
    total, last = 0.0, dict[str, Any]()
    for event in events:
        if last and event["msg"] != "boot":
            total += seconds_between(last, event)
        last = event
    return total


def _median(values: Iterable[float]) -> float | None:
    known = _known(values)
    return statistics.median(known) if known else None


def _known(values: Iterable[float]) -> list[float]:
    """Return `values` without those that a damaged table lacks."""
    return [value for value in values if not math.isnan(value)]
