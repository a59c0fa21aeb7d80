"""Observe the NSA layers of a run: their figures in a step, fallbacks, and calls that are timed or named for a profiler."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nsa_core import BackendRegistry, BlockGeometry, BranchBackend, BranchRequest, Layout, NativeSparseAttention, Operation
from nsa_core.backends.registry import AUTO
from nsa_core.telemetry import LayerTelemetry
from nsa_train.host.routing import NO_BACKEND
from nsa_train.model.choosing import PassNote, watched
from nsa_train.model.decoder import Decoder
from nsa_train.telemetry.health import merged

COUNTED = (Operation.CMP, Operation.SELECT, Operation.SLC, Operation.WIN, Operation.NSA)
"""The operations that a training step calls."""


class RunTelemetry(LayerTelemetry):
    """LayerTelemetry over several passes, the micro-batches of a step.

    It also gives the expected k_mean, the mean of min(n, own + 1) over the same queries, and the number of elements of each mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passes: list[dict[str, Tensor]] = []

    def end_pass(self) -> None:
        """Keep the figures of the pass; until this call, recomputed figures replace them."""
        self._passes.append(self.figures)
        self.figures = {}

    def passes(self) -> list[dict[str, float]]:
        """Return the figures of each pass; waits for the device."""
        return [{name: float(value) for name, value in one.items()} for one in (*self._passes, self.figures) if one]

    @torch.no_grad()
    def record_gates(self, gates: Tensor, has_compressed: Tensor, branches: tuple[str, ...]) -> None:
        """Record gates `(B, S, H, 3)`; `has_compressed` `(B, S)` says which tokens see a compressed block."""
        super().record_gates(gates, has_compressed, branches)
        self.figures["num_gates"] = has_compressed.sum()

    @torch.no_grad()
    def record_branch(self, branch: str, out: Tensor, positions: Tensor) -> None:
        """Record a branch's output before its gate."""
        super().record_branch(branch, out, positions)
        self.figures["num_outputs"] = (positions >= 0).sum()

    @torch.no_grad()
    def record_selection(self, block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> None:
        """Record the chosen blocks `(B, S, G, n)` of queries at `positions` `(B, S)`."""
        super().record_selection(block_indices, positions, geometry)
        is_query = positions >= 0
        expected = (positions // geometry.selection_block_size + 1).clamp(max=geometry.num_selected_blocks)
        self.figures["num_followers"] = ((positions[:, 1:] == positions[:, :-1] + 1) & (positions[:, 1:] > 0)).sum()
        self.figures["k_mean_expected"] = torch.where(is_query, expected, 0).sum(dtype=torch.float64) / is_query.sum()


class _EveryChoice(PassNote):
    """Excludes fused backends, because they may not report the blocks that they chose."""

    needs_branches = True


@torch.no_grad()
def chosen_blocks(model: Decoder, ids: Tensor) -> list[Tensor]:
    """Return the blocks that each layer with a selected branch chooses for `ids` `(B, S)`."""
    with watched(model.sparse_layers, _EveryChoice) as collected:
        model(ids)
    return [one.block_indices for one in collected if one.block_indices is not None]


def of_layers(collected: Sequence[RunTelemetry], gather: Callable[[Any], list[Any]] = lambda item: [item]) -> list[dict[str, float]]:
    """Return the figures of each layer over all its passes. A collective; `gather` returns the values of all ranks."""
    ranks = gather([telemetry.passes() for telemetry in collected])
    return [merged([one for passes in layer for one in passes]) for layer in zip(*ranks, strict=True)]


def routes_of(collected: Sequence[LayerTelemetry]) -> dict[str, str]:
    """Return operation -> backend that ran; if layers differ, all are listed as `a|b`."""
    names: dict[str, set[str]] = {}
    for telemetry in collected:
        for operation, backend in telemetry.routes.items():
            names.setdefault(operation, set()).add(backend)
    return {operation: "|".join(sorted(backends)) for operation, backends in names.items()}


class FallbackCounts:
    """Fallbacks by operation since the start of the run: calls routed by "auto" that the preferred backend of the start did not serve.

    That backend is the one that "auto" chose for the run's training batches on this device at the start. Training calls
    of eager steps count; a compiled graph asks for its route once, while it is traced, and counts there.
    """

    def __init__(self, preferred: Mapping[str, str]) -> None:
        """Count against `preferred`: operation -> the backend that "auto" takes at the start, `a|b` if layers use several."""
        self.preferred = dict(preferred)
        self.by_operation = dict.fromkeys((operation.value for operation in COUNTED), 0)

    def observe(self, asked_for: str, facts: BranchRequest, backend: str | None) -> None:
        """Count a choice of a registry, as its observer; evaluation, samples and named backends do not count."""
        if asked_for == AUTO and facts.layout in (Layout.DENSE, Layout.PACKED) and torch.is_grad_enabled():
            self.note(facts.operation, backend)

    def note(self, operation: str, backend: str | None) -> None:
        """Count a call of `operation` that `backend` served (None: no backend did). Operations that are not in COUNTED change nothing."""
        served = backend or NO_BACKEND
        if operation in self.by_operation and served not in self.preferred.get(operation, served).split("|"):
            self.by_operation[operation] += 1

    def row(self) -> dict[str, int]:
        """Return the counts and their total, by the columns of fallback_counters.csv."""
        return {**self.by_operation, "total": sum(self.by_operation.values())}

    def restore(self, row: Mapping[str, float]) -> None:
        """Restore the counts from `row` of the table; a count that it lacks (NaN) stays."""
        known = {name: int(row[name]) for name in self.by_operation if not math.isnan(row[name])}
        self.by_operation |= known


def counting_registry(backends: Iterable[BranchBackend], counts: FallbackCounts) -> BackendRegistry:
    """Return a registry of `backends`, in order, whose training calls by "auto" are counted in `counts`."""
    registry = BackendRegistry(tuple(backends))
    registry.observers.append(counts.observe)
    return registry


def attach(layers: Iterable[NativeSparseAttention], registry: BackendRegistry) -> None:
    """Route the calls of `layers` through `registry`."""
    for layer in layers:
        layer.registry = registry


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
    """A backend whose calls are timed, named for a profiler, or both; for routing it equals the original."""

    def __init__(self, backend: BranchBackend, *, times: BranchTimes | None = None, has_ranges: bool = False) -> None:
        """Wrap `backend`; `times`: where its time is added, `has_ranges`: NVTX ranges on a GPU."""
        self.backend, self.times, self.has_ranges = backend, times, has_ranges

    def __getattr__(self, name: str) -> Any:
        """Return the backend's own attributes, such as `name`, `operation` and `reasons_against`, for routing."""
        return getattr(self.backend, name)

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Compute the operation under its mark."""
        first: Any = operands
        while isinstance(first, tuple):
            # Queries, a step's rows, and scores are tuples or tensors
            first = first[0]
        device, operation = first.device, self.operation.value
        measured = self.times.measured(operation, device) if self.times else nullcontext()
        with marked_range(f"nsa.{operation}", device if self.has_ranges else None), measured:
            return self.backend(*operands, **keywords)


def marked_range(name: str, device: torch.device | None) -> AbstractContextManager[Any]:
    """Return an NVTX range on a GPU, nothing elsewhere and for None."""
    return torch.cuda.nvtx.range(name) if device is not None and device.type == "cuda" else nullcontext()
