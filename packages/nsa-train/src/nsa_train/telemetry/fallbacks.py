"""Counts fallbacks: calls routed by "auto" that were not served by the most preferred backend of the start.

The most preferred backend is the one that "auto" takes for the run's training batches on this device when the run starts.
Counted are training calls of eager steps; a compiled graph asks for its route once, while it is traced, and counts there.
Evaluation and sampling route by their own shapes and are not counted.
"""

import math
from collections.abc import Iterable, Mapping

import torch

from nsa_core import BackendRegistry, BranchBackend, BranchRequest, Layout, NativeSparseAttention, Operation
from nsa_core.backends.registry import AUTO
from nsa_train.host.routing import NO_BACKEND

COUNTED = (Operation.CMP, Operation.SELECT, Operation.SLC, Operation.WIN, Operation.NSA)
"""The operations that a training step asks for."""


class FallbackCounts:
    """Fallbacks by operation since the start of the run."""

    def __init__(self, preferred: Mapping[str, str]) -> None:
        """Count against `preferred`: operation -> the backend that "auto" takes at the start, `a|b` where layers take several."""
        self.preferred = dict(preferred)
        self.by_operation = dict.fromkeys((operation.value for operation in COUNTED), 0)

    def observe(self, asked_for: str, facts: BranchRequest, backend: str | None) -> None:
        """Count a choice of a registry, as its observer; evaluation, samples and named backends do not count."""
        if asked_for == AUTO and facts.layout in (Layout.DENSE, Layout.PACKED) and torch.is_grad_enabled():
            self.note(facts.operation, backend)

    def note(self, operation: str, backend: str | None) -> None:
        """Count a call of `operation` that `backend` served; None: none did. Operations that are not COUNTED change nothing."""
        served = backend or NO_BACKEND
        if operation in self.by_operation and served not in self.preferred.get(operation, served).split("|"):
            self.by_operation[operation] += 1

    def row(self) -> dict[str, int]:
        """Return the counts and their total, by the columns of fallback_counters.csv."""
        return {**self.by_operation, "total": sum(self.by_operation.values())}

    def restore(self, row: Mapping[str, float]) -> None:
        """Go on from `row` of the table; a count that it lacks (NaN) stays."""
        known = {name: int(row[name]) for name in self.by_operation if not math.isnan(row[name])}
        self.by_operation |= known


def counting_registry(backends: Iterable[BranchBackend], counts: FallbackCounts) -> BackendRegistry:
    """Return a registry of `backends`, in order, whose training calls by "auto" are counted in `counts`."""
    registry = BackendRegistry(tuple(backends))
    registry.observers.append(counts.observe)
    return registry


def attach(layers: Iterable[NativeSparseAttention], registry: BackendRegistry) -> None:
    """Let `layers` route through `registry`."""
    for layer in layers:
        layer.registry = registry
