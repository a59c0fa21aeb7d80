"""Telemetry that is attached to the NSA layers of a run for a step, and its figures layer by layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nsa_core import BlockGeometry, NativeSparseAttention
from nsa_core.telemetry import LayerTelemetry
from nsa_train.telemetry.health import merged


class RunTelemetry(LayerTelemetry):
    """LayerTelemetry of several passes, the micro-batches of a step.

    It also says what k_mean must be, the mean of min(n, own + 1) over the same queries, and of how many elements each mean is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passes: list[dict[str, Tensor]] = []

    def end_pass(self) -> None:
        """Keep the figures of the pass; until then, what is computed again replaces them."""
        self._passes.append(self.figures)
        self.figures = {}

    def passes(self) -> list[dict[str, float]]:
        """Return the figures of each pass; waits for the device."""
        return [{name: float(value) for name, value in one.items()} for one in (*self._passes, self.figures) if one]

    @torch.no_grad()
    def record_gates(self, gates: Tensor, has_compressed: Tensor, branches: tuple[str, ...]) -> None:
        """Note gates `(B, S, H, 3)`; `has_compressed` `(B, S)` says which tokens see a compressed block."""
        super().record_gates(gates, has_compressed, branches)
        self.figures["num_gates"] = has_compressed.sum()

    @torch.no_grad()
    def record_branch(self, branch: str, out: Tensor, positions: Tensor) -> None:
        """Note a branch's output before its gate."""
        super().record_branch(branch, out, positions)
        self.figures["num_outputs"] = (positions >= 0).sum()

    @torch.no_grad()
    def record_selection(self, block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> None:
        """Note the chosen blocks `(B, S, G, n)` of queries at `positions` `(B, S)`."""
        super().record_selection(block_indices, positions, geometry)
        is_query = positions >= 0
        expected = (positions // geometry.selection_block_size + 1).clamp(max=geometry.num_selected_blocks)
        self.figures["num_followers"] = ((positions[:, 1:] == positions[:, :-1] + 1) & (positions[:, 1:] > 0)).sum()
        self.figures["k_mean_expected"] = torch.where(is_query, expected, 0).sum(dtype=torch.float64) / is_query.sum()


@contextmanager
def watched(layers: Sequence[NativeSparseAttention]) -> Iterator[list[RunTelemetry]]:
    """Attach telemetry to `layers` while the block runs; each forward pass ends with `end_pass`, which the last one may leave out."""
    collected = [RunTelemetry() for _ in layers]
    for layer, telemetry in zip(layers, collected, strict=True):
        layer.telemetry = telemetry
    try:
        yield collected
    finally:
        for layer in layers:
            layer.telemetry = None


def _alone(item: Any) -> list[Any]:
    return [item]


def of_layers(collected: Sequence[RunTelemetry], gather: Callable[[Any], list[Any]] = _alone) -> list[dict[str, float]]:
    """Return the figures of each layer over all its passes. A collective, where `gather` returns what each rank passed."""
    ranks = gather([telemetry.passes() for telemetry in collected])
    return [merged([one for passes in layer for one in passes]) for layer in zip(*ranks, strict=True)]


def routes_of(collected: Sequence[LayerTelemetry]) -> dict[str, str]:
    """Return operation -> backend that ran; layers that differ are listed, `a|b`."""
    names: dict[str, set[str]] = {}
    for telemetry in collected:
        for operation, backend in telemetry.routes.items():
            names.setdefault(operation, set()).add(backend)
    return {operation: "|".join(sorted(backends)) for operation, backends in names.items()}
