"""Counts fallbacks: calls routed by "auto" that were not served by the most preferred backend of the start.

The most preferred backend is the one that "auto" takes for the run's training batches on this device when the run starts.
Counted are training calls of eager steps; a compiled graph asks for its route once, while it is traced, and counts there.
Evaluation and sampling route by their own shapes and are not counted.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nsa_core import BackendRegistry, BranchBackend, Layout, NativeSparseAttention, Operation
from nsa_core.backends.registry import AUTO
from nsa_core.tracing import constant_when_traced
from nsa_train.routing import NO_BACKEND


class FallbackCounts:
    """Fallbacks by operation since the start of the run."""

    def __init__(self, preferred: Mapping[str, str]) -> None:
        """Count against `preferred`: operation -> the backend that "auto" takes at the start, `a|b` where layers take several."""
        self.preferred = dict(preferred)
        self.by_operation = dict.fromkeys((operation.value for operation in Operation), 0)

    def note(self, operation: str, backend: str | None) -> None:
        """Count a call of `operation` that `backend` served; None: none did."""
        served = backend or NO_BACKEND
        if served not in self.preferred.get(operation, served).split("|"):
            self.by_operation[operation] += 1

    def row(self) -> dict[str, int]:
        """Return the counts and their total, by the columns of fallback_counters.csv."""
        return {**self.by_operation, "total": sum(self.by_operation.values())}

    def restore(self, row: Mapping[str, float]) -> None:
        """Go on from `row` of the table; a count that it lacks (NaN) stays."""
        known = {name: int(row[name]) for name in self.by_operation if not math.isnan(row[name])}
        self.by_operation |= known


class CountingRegistry(BackendRegistry):
    """The backends of another registry, its training calls by "auto" counted."""

    def __init__(self, backends: Iterable[BranchBackend], counts: FallbackCounts) -> None:
        """Route among `backends`, in order, and count in `counts`."""
        super().__init__(tuple(backends))
        self.counts = counts

    @constant_when_traced
    def resolve_index(self, backend: str, optional: bool, device_index: int, *fields: Any) -> int:
        """Return what BackendRegistry does, and count it; fields[0] is the operation, fields[-2] the layout."""
        index: int = super().resolve_index(backend, optional, device_index, *fields)
        if backend == AUTO and fields[-2] in (Layout.DENSE, Layout.PACKED) and torch.is_grad_enabled():
            self.counts.note(fields[0], self.backends[index].name if index >= 0 else None)
        return index


def attach(layers: Iterable[NativeSparseAttention], registry: BackendRegistry) -> None:
    """Let `layers` route through `registry`."""
    for layer in layers:
        layer.registry = registry
