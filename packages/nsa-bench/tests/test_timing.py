"""Repetitions, medians and memory."""

import pytest
import torch

from nsa_bench import measurement
from nsa_bench.measurement import Timing, held_bytes, peak_bytes, replay_of, time_call

CPU = torch.device("cpu")


class Clock:
    """A clock that only calls advance."""

    def __init__(self, seconds):
        self.now, self.seconds, self.calls = 0.0, list(seconds), 0

    def perf_counter(self):
        return self.now

    def call(self):
        self.now += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1


@pytest.fixture(autouse=True)
def short_measurements():
    """Leave measurements as long as they are."""


@pytest.fixture
def timed(monkeypatch):
    def timed(seconds, **options):
        clock = Clock(seconds)
        monkeypatch.setattr(measurement, "time", clock)
        return time_call(clock.call, CPU, **options), clock.calls

    return timed


@pytest.mark.parametrize(("seconds", "count"), [(0.001, 50), (0.1, 15), (0.15, 10), (0.3, 5), (2.0, 3)])
def test_repetitions_fill_the_budget_within_bounds(timed, seconds, count):
    result, calls = timed([seconds])
    assert result.count == count
    # one to warm up, one to see how long it takes
    assert calls == count + 2


def test_the_median_leaves_the_warm_up_and_outliers_out(timed):
    result, _ = timed([9.0, 0.5, 0.4, 7.0, 0.6])
    assert result == Timing(median_ms=pytest.approx(600), min_ms=pytest.approx(400), max_ms=pytest.approx(7000), count=3)


def test_what_takes_longer_than_the_patience_is_timed_once(timed):
    result, calls = timed([0.1], patience_ms=99)
    assert (result.count, calls) == (1, 2)
    assert timed([0.1], patience_ms=101)[0].count == 15


def test_memory_is_a_gpus():
    assert held_bytes(CPU) == 0
    assert peak_bytes(lambda: None, CPU, 0) is None


@pytest.mark.hardware
def test_peak_memory_counts_inputs_and_what_a_call_holds():
    device = torch.device("cuda")
    before = held_bytes(device)
    x = torch.ones(2**20, dtype=torch.uint8, device=device)
    peak = peak_bytes(lambda: torch.cat([x, x]), device, before)
    assert 3 * 2**20 <= peak <= 3.1 * 2**20
    timed = time_call(lambda: x.add(1), device)
    assert 0 < timed.min_ms <= timed.median_ms <= timed.max_ms
    assert timed.count == measurement.MAX_COUNT


@pytest.mark.hardware
def test_a_replay_leaves_the_host_out():
    device = torch.device("cuda")
    x = torch.zeros(8, device=device)

    def call():
        for _ in range(200):
            x.add_(1)

    replay = replay_of(call, device)
    torch.cuda.synchronize()
    # the call before the capture; a captured one runs nothing
    assert x.tolist() == [200.0] * 8
    replay()
    assert x.tolist() == [400.0] * 8
    assert time_call(replay, device).median_ms < time_call(call, device).median_ms
    with pytest.raises(RuntimeError):
        replay_of(lambda: x.sum().item(), device)
