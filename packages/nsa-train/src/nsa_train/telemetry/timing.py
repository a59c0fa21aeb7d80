"""Per-branch times and profiler ranges, on request: backends wrapped so that each call is marked."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from nsa_core import BranchBackend


class BranchTimes:
    """Milliseconds of the forward calls of each operation, summed over layers and micro-batches."""

    def __init__(self) -> None:
        """Start without a call."""
        self._host_ms: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self, operation: str, device: torch.device) -> Iterator[None]:
        """Add the time of the block to `operation`; on a GPU its kernels' time, without waiting for them."""
        if device.type != "cuda":
            started = time.perf_counter()
            yield
            self._host_ms[operation] = self._host_ms.get(operation, 0.0) + 1e3 * (time.perf_counter() - started)
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._events.append((operation, first, last))

    def total_ms(self) -> dict[str, float]:
        """Return operation -> milliseconds; waits for the device."""
        totals = dict(self._host_ms)
        for operation, first, last in self._events:
            last.synchronize()
            totals[operation] = totals.get(operation, 0.0) + first.elapsed_time(last)
        return totals


class MarkedBackend:
    """A backend whose calls are timed, named for a profiler, or both; routing sees no difference."""

    def __init__(self, backend: BranchBackend, *, times: BranchTimes | None = None, has_ranges: bool = False) -> None:
        """Wrap `backend`; `times`: where its time is added, `has_ranges`: NVTX ranges on a GPU."""
        self.backend, self.times, self.has_ranges = backend, times, has_ranges

    def __getattr__(self, name: str) -> Any:
        """Return what routing asks for, such as `name`, `operation` and `reasons_against`: the backend's own."""
        return getattr(self.backend, name)

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Compute the operation under its mark."""
        device, operation = _first_tensor(operands).device, self.operation.value
        measured = self.times.measured(operation, device) if self.times else nullcontext()
        with marked_range(f"nsa.{operation}", device if self.has_ranges else None), measured:
            return self.backend(*operands, **keywords)


def _first_tensor(operands: Any) -> torch.Tensor:
    """Return the tensor that the operands of any operation begin with: Queries, a step's rows, and scores are tuples or tensors."""
    while isinstance(operands, tuple):
        operands = operands[0]
    assert isinstance(operands, torch.Tensor)
    return operands


def marked_range(name: str, device: torch.device | None) -> AbstractContextManager[Any]:
    """Return an NVTX range on a GPU, nothing elsewhere and for None."""
    return torch.cuda.nvtx.range(name) if device is not None and device.type == "cuda" else nullcontext()
