"""A long run of tiny steps grows nothing: memory, file handles and threads at its end are those of its beginning."""

import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa_train.loop.trainer import Trainer

STEPS = 2000
MARGIN = 0.02
OVERRIDES = ("train.log_every=50", "train.eval_every=250", "train.save_every=250", "train.keep_last=2", "train.grad_clip=inf")


def _resident_kib() -> int:
    """Return what this process holds in memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def _soak(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, steps: int, *more: str) -> list[tuple[int, int, int]]:
    """Return resident KiB, open files and threads after each of `steps` steps."""
    seen: list[tuple[int, int, int]] = []
    after_step = Trainer._after_step

    def counting(self: Trainer, step: int) -> None:
        after_step(self, step)
        seen.append((_resident_kib(), sum(1 for _ in Path("/proc/self/fd").iterdir()), threading.active_count()))

    monkeypatch.setattr(Trainer, "_after_step", counting)
    code, _ = train(f"train.steps={steps}", *OVERRIDES, *more)
    assert code == 0
    assert len(seen) == steps
    return seen


def _assert_flat(early: list[tuple[int, int, int]], late: list[tuple[int, int, int]]) -> None:
    assert statistics.median(kib for kib, _, _ in late) <= (1 + MARGIN) * statistics.median(kib for kib, _, _ in early)
    for place, name in ((1, "files"), (2, "threads")):
        assert statistics.median(row[place] for row in late) == statistics.median(row[place] for row in early), name


def test_files_and_threads_do_not_pile_up(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty steps with saves, evaluations and samples: the quick part of the soak."""
    seen = _soak(train, monkeypatch, 20, "train.eval_every=2", "train.save_every=2", "train.log_every=1", "train.async_save=true")
    for place, name in ((1, "files"), (2, "threads")):
        # a save holds files for a moment, and garbage of other tests may be collected; a leak never shrinks again
        assert min(row[place] for row in seen[14:]) <= max(row[place] for row in seen[4:10]), name


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_2000_steps_grow_nothing(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    seen = _soak(train, monkeypatch, STEPS, f"model.attention={attention}")
    _assert_flat(seen[200:400], seen[-200:])


def test_a_pile_is_seen() -> None:
    """The check itself: 3 % more memory, one more file, one more thread each fail."""
    flat = [(1000, 10, 3)] * 200
    _assert_flat(flat, [(1019, 10, 3)] * 200)
    for worse in ((1030, 10, 3), (1000, 11, 3), (1000, 10, 4)):
        with pytest.raises(AssertionError):
            _assert_flat(flat, [worse] * 200)
