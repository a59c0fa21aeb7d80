"""Statistics of a layer's forward pass: gates, chosen blocks, reads, routes. Nothing is computed unless a `LayerTelemetry` is attached.

gate_mean_* and gate_std_* are statistics of the gates. All other gate figures use the shares g_b / sum(g) over the branches that exist;
entropies are in nats. In a layer with the compressed branch, tokens that see no compressed block are left out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core.config import COLLAPSE_ENTROPY, COLLAPSE_SHARE, BlockGeometry


class Reads(NamedTuple):
    """Number of keys that one KV head reads, compressed keys included, summed over the queries of a step; int64."""

    predicted: Tensor
    """(B,): computed by the exact form of Table 4's formula."""
    actual: Tensor
    """(B, G): counted from block_indices and lengths."""


def count_reads(block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> Reads:
    """Return the reads of queries at `positions` `(B, S)` (-1: none) with `block_indices` `(B, S, G, n)`."""
    size, stride, width = geometry.compression_block_size, geometry.compression_stride, geometry.selection_block_size
    # few operations, because each delays a cached step; at position -1 every term below is 0
    ends = positions + 1
    blocks = torch.div(ends + (stride - size), stride, rounding_mode="floor").clamp(min=0)
    rest = blocks + ends.clamp(max=geometry.window_size)
    # all tokens so far, or the chosen whole blocks and a part of the query's own
    predicted = torch.minimum(ends, positions.remainder(width) + (1 + (geometry.num_selected_blocks - 1) * width))
    # a chosen block counts its tokens up to the query; the mask turns -1 (no block) into a block after every query
    given = torch.sub(ends[..., None, None], block_indices & torch.iinfo(torch.int32).max, alpha=width).clamp(0, width)
    actual = given.sum(-1) + rest.unsqueeze(-1)
    if positions.shape[1] == 1:
        return Reads((predicted + rest).squeeze(1), actual.squeeze(1))
    return Reads((predicted + rest).sum(1), actual.sum(1))


class AttentionObserver:
    """Base class of observers, which a running `nsa_attention` calls. Every method does nothing; override what you need."""

    needs_branches = False
    """True if the observer needs the output of each branch; the branches then run one by one, without a fused kernel."""

    def record_route(self, operation: str, backend: str) -> None:
        """Note that `backend` runs `operation`."""

    def record_branch(self, branch: str, out: Tensor, positions: Tensor) -> None:
        """Note a branch's output `(B, S, H, D_v)` before its gate, of queries at `positions` `(B, S)`."""

    def record_selection(self, block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> None:
        """Note the chosen blocks `(B, S, G, n)` of queries at `positions` `(B, S)`, -1 for rows that do not count."""


class ReadCounter(AttentionObserver):
    """An observer that counts the reads of the last pass."""

    def __init__(self) -> None:
        """Start without a count."""
        self._reads: Reads | None = None
        self._chosen: tuple[Tensor, Tensor, BlockGeometry] | None = None

    @property
    def reads(self) -> Reads | None:
        """Return the reads of the last pass, None before the first. The first access counts them, on the current stream.

        A step that a graph replays does not update them; `NSACache.last_reads` counts those too.
        """
        if self._chosen is not None:
            self._reads, self._chosen = count_reads(*self._chosen), None
        return self._reads

    def forget(self) -> None:
        """Drop the count."""
        self._reads = self._chosen = None

    def record_selection(self, block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> None:
        """Keep what this pass chose, until `reads` counts it."""
        self._chosen = block_indices, positions, geometry


class LayerTelemetry(AttentionObserver):
    """An observer with the statistics of a layer's last forward pass; attach it as `layer.telemetry`, and read it with `summary`."""

    needs_branches = True

    def __init__(self) -> None:
        """Start empty."""
        self.routes: dict[str, str] = {}
        """Operation -> name of the backend that ran."""
        self.figures: dict[str, Tensor] = {}
        """Name -> figure of the last pass, on its device; `summary` waits for them."""

    def record_route(self, operation: str, backend: str) -> None:
        """Note that `backend` ran `operation`."""
        self.routes[operation] = backend

    @torch.no_grad()
    def record_gates(self, gates: Tensor, has_compressed: Tensor, branches: tuple[str, ...]) -> None:
        """Note gates `(B, S, H, 3)`; only tokens where `has_compressed`, bool `(B, S)`, is True count."""
        columns = [("cmp", "slc", "win").index(branch) for branch in branches]
        kept = torch.stack([gates[..., column] for column in columns], -1).double()
        shares = kept / kept.sum(-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)
        entropy, largest = -torch.special.xlogy(shares, shares).sum(-1), shares.amax(-1)
        counts = has_compressed.unsqueeze(-1)
        self.figures["gate_entropy_mean"] = _mean(entropy, counts)
        self.figures["gate_entropy_min"] = _least(entropy, counts)
        self.figures["gate_max_gate"] = _mean(largest, counts)
        self.figures["gate_collapse_frac"] = _mean((entropy < COLLAPSE_ENTROPY) & (largest > COLLAPSE_SHARE), counts)
        for column, branch in enumerate(branches):
            gate = kept[..., column]
            mean = _mean(gate, counts)
            self.figures[f"gate_share_{branch}"] = _mean(shares[..., column], counts)
            self.figures[f"gate_mean_{branch}"] = mean
            self.figures[f"gate_std_{branch}"] = _mean((gate - mean).square(), counts).sqrt()

    def record_selection_loss(self, loss: Tensor) -> None:
        """Note the auxiliary loss of the choice."""
        self.figures["selection_loss"] = loss.detach()

    @torch.no_grad()
    def record_branch(self, branch: str, out: Tensor, positions: Tensor) -> None:
        """Note a branch's output before its gate; its contribution is mean |out| over the rows that count."""
        self.figures[f"contribution_{branch}"] = _mean(out.abs(), (positions >= 0)[..., None, None])

    @torch.no_grad()
    def record_selection(self, block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> None:
        """Note the chosen blocks `(B, S, G, n)` of queries at `positions` `(B, S)`."""
        rows = (positions >= 0).unsqueeze(-1).expand(block_indices.shape[:-1])
        count = (block_indices >= 0).sum(-1)
        self.figures["rows"] = rows.sum()
        self.figures["k_mean"] = _mean(count, rows)
        self.figures["k_max"] = torch.cat([count.flatten(), count.new_zeros(1)]).amax()
        self.figures["pct_at_max"] = 100 * _mean(count == geometry.num_selected_blocks, rows)
        own = positions // geometry.selection_block_size
        # initial and local blocks are the first and the last of the candidates 0 .. own, so there are at most own + 1 of them
        forced = (own + 1).clamp(max=geometry.num_initial_blocks + geometry.num_local_blocks).unsqueeze(-1)
        self.figures["free_block_share_mean"] = _mean((count - forced) / count.clamp(min=1), rows)
        self.figures["overlap_with_previous_query"] = _overlap_with_previous(block_indices, positions)
        reads = count_reads(block_indices, positions, geometry)
        self.figures["reads_pred"] = reads.predicted.sum() * block_indices.shape[2]
        self.figures["reads_act_total"] = reads.actual.sum()

    def summary(self) -> dict[str, float]:
        """Return every figure as a float; waits for the device."""
        return {name: float(value) for name, value in self.figures.items()}


def _overlap_with_previous(block_indices: Tensor, positions: Tensor) -> Tensor:
    """Return the mean share of a query's blocks that the previous query of the same sequence also chose."""
    here, before = block_indices[:, 1:], block_indices[:, :-1]
    follows = (positions[:, 1:] == positions[:, :-1] + 1) & (positions[:, 1:] > 0)
    shared = sum((here == before[..., slot, None]) & (here >= 0) for slot in range(before.shape[-1]))
    assert isinstance(shared, Tensor)
    share = shared.sum(-1) / (here >= 0).sum(-1).clamp(min=1)
    return _mean(share, follows.unsqueeze(-1))


def _mean(x: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of x over the elements where `counts` is True, NaN if there are none. Boolean indexing would wait for the device."""
    kept = counts.expand(x.shape)
    return torch.where(kept, x, 0).sum(dtype=torch.float64) / kept.sum()


def _least(x: Tensor, counts: Tensor) -> Tensor:
    """Return the minimum of x over the elements where `counts` is True, NaN if there are none."""
    kept = torch.where(counts.expand(x.shape), x, torch.inf).flatten()
    least = torch.cat([kept, kept.new_full((1,), torch.inf)]).amin()
    return torch.where(least == torch.inf, torch.nan, least)
