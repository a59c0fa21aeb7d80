"""How long a call takes and how much memory it holds: CUDA events and a cold L2 on a GPU, the clock on a CPU."""

import time
from collections.abc import Callable
from statistics import median

import torch
from attrs import frozen

BUDGET_MS = 1500.0
"""Time spent on the repetitions of one measurement."""
MIN_COUNT, MAX_COUNT = 3, 50
"""Repetitions, whatever the budget is: at least 10 of what takes up to a tenth of it, few of what takes longer."""
WARM_UPS = 2
FLUSH_BYTES = 256 * 2**20
"""Written before every repetition: several times the L2 of any GPU so far."""


@frozen(kw_only=True)
class Timing:
    """The times of one measurement."""

    median_ms: float
    min_ms: float
    max_ms: float
    count: int

    @classmethod
    def of(cls, times_ms: list[float]) -> "Timing":
        """Return the summary of at least one time."""
        return cls(median_ms=median(times_ms), min_ms=min(times_ms), max_ms=max(times_ms), count=len(times_ms))


def time_call(call: Callable[[], object], device: torch.device, patience_ms: float = float("inf")) -> Timing:
    """Return the times of `call` after a warm-up; a single one where that already exceeds `patience_ms`."""
    timer = _Timer(device)
    for _ in range(WARM_UPS if device.type == "cuda" else 1):
        call()
    first = timer.times_ms(call, 1)
    if first[0] > patience_ms:
        return Timing.of(first)
    count = int(BUDGET_MS / max(first[0], 1e-3))
    return Timing.of(timer.times_ms(call, min(max(count, MIN_COUNT), MAX_COUNT)))


def replay_of(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays the kernels of `call`, captured in a CUDA graph: no launch of them waits for Python.

    Raises:
        RuntimeError: when something in `call` cannot be captured, such as reading a value from the GPU.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # kernels are compiled before the capture
        call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class _Timer:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def times_ms(self, call: Callable[[], object], count: int) -> list[float]:
        return [self._on_clock(call) for _ in range(count)] if self.buffer is None else self._by_events(call, count)

    def _on_clock(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def _by_events(self, call: Callable[[], object], count: int) -> list[float]:
        assert self.buffer is not None
        spans = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, stop in spans:
            self.buffer.zero_()
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) for start, stop in spans]


def free_cached_memory(device: torch.device) -> None:
    """Give back what a GPU's allocator keeps for later, so that one case's leftovers do not crowd the next."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def held_bytes(device: torch.device) -> int:
    """Return the bytes of live tensors on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_bytes(call: Callable[[], object], device: torch.device, held_before: int) -> int | None:
    """Return the most bytes held during `call`, its inputs included, beyond `held_before`; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held_before
