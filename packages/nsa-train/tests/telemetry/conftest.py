"""A recorder driven step by step, without the trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_train.model.decoder import Decoder, build_model
from nsa_train.settings.config import RunConfig
from nsa_train.telemetry.layers import of_layers
from nsa_train.telemetry.progress import StepFigures
from nsa_train.telemetry.recorder import Recorder

CPU = torch.device("cpu")


class Session:
    """One process of a run: a recorder, the model that it watches, and what the recorder wrote."""

    def __init__(self, config: RunConfig, records: Any, device: torch.device = CPU, **options: int | None) -> None:
        self.config, self.records, self.device = config, records, device
        self.model: Decoder = build_model(config).to(device)
        self.recorder = Recorder(config, records.root, device, **options)  # type: ignore[arg-type]
        self.recorder.attach(self.model.sparse_layers)
        self.recorder.booted(data_hash="abc")

    def step(self, step: int, *, loss: float = 2.0, is_clipped: bool = False, is_logged: bool = True, **more: Any) -> None:
        with self.recorder.observing(is_logged=is_logged) as observed:
            logits = self.model(torch.randint(0, 200, (2, 32), device=self.device))
            logits.sum().backward()
        figures = StepFigures(
            step=step,
            loss=loss,
            lr=1e-3,
            toks_per_s=more.get("toks_per_s", 1000.0),
            grad_norm=more.get("grad_norm", 1.5),
            fetch_ms=2.0,
            is_clipped=is_clipped,
            lengths=more.get("lengths", (32, 20, 12)),
        )
        self.recorder.stepped(
            figures,
            fetches=more.get("fetches", [1.0, 2.0, 3.0]),
            layers=of_layers(observed.telemetry),
            observed=observed,
            data={"data_bad_records": 0},
        )


@pytest.fixture
def session(tmp_path: Path, tiny_config: Callable[..., RunConfig], recorded: Callable[[Path], Any]) -> Callable[..., Session]:
    """A function from overrides, a device and the recorder's options to a session in one directory, tmp_path / "run"."""

    def start(*overrides: str, device: torch.device = CPU, **options: int | None) -> Session:
        return Session(tiny_config(*overrides), recorded(tmp_path / "run"), device, **options)

    return start
