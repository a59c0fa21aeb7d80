"""The ranges of a whole step, as a profiler sees them."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch


def test_a_step_marks_each_of_its_parts(train, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def note(name: str, device: torch.device | None) -> AbstractContextManager[None]:
        if device is not None:
            names.append(name)
        return nullcontext()

    monkeypatch.setattr("nsa_train.telemetry.recorder.marked_range", note)
    code, _ = train("train.profile=nvtx", "train.steps=2", "train.accumulate=2", "train.eval_every=9", "train.save_every=0")
    assert code == 0
    assert names == ["fetch", *["forward", "backward"] * 2, "update"] * 2
