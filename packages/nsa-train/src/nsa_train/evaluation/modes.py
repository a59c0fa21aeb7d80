"""The modes of an evaluation: the selected branch of a trained model is unchanged, closed, or reads a random choice of blocks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nsa_core import BackendRegistry, Keys, NativeSparseAttention, Queries
from nsa_core.blocks import num_selection_blocks
from nsa_core.config import BRANCHES, BlockGeometry
from nsa_core.reference.rows import rows_of
from nsa_core.reference.select import max_tokens
from nsa_core.selection import choose_blocks
from nsa_train.evaluation.options import Mode
from nsa_train.model.choosing import ServingBackend


class RandomChoice(ServingBackend):
    """A backend of SELECT that keeps the forced blocks and draws the others uniformly among the candidates, regardless of scores."""

    name = "random"

    def __init__(self, generator: torch.Generator) -> None:
        """Draw from `generator`, on the device of the queries."""
        self._generator = generator

    def __call__(self, queries: Queries, cmp: Keys, lse: Tensor, /, *, geometry: BlockGeometry, scale: float) -> Tensor:
        """Return block_indices int32 `(B, S, G, n)`."""
        batch, num_queries = queries.q.shape[:2]
        sizes = (batch, num_queries, cmp.k.shape[2], num_selection_blocks(max_tokens(queries, cmp, geometry), geometry))
        importance = torch.rand(sizes, generator=self._generator, device=queries.q.device)
        return choose_blocks(importance, rows_of(queries).positions.unsqueeze(-1), geometry)


def close_selected(gate: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
    """Return the gate logits `(B, S, H, 3)` with the selected branch at -inf, so that its gate is 0. A forward hook of `GateMLP`."""
    closed = logits.clone()
    closed[..., BRANCHES.index("slc")] = -torch.inf
    return closed


@contextmanager
def limited_to(mode: Mode, layers: Sequence[NativeSparseAttention], registry: BackendRegistry) -> Iterator[None]:
    """Let `layers` compute in `mode` while the block runs; `registry` comes from `registry_of` and chooses randomly."""
    with ExitStack() as stack:
        for layer in layers:
            if mode is Mode.CLOSED:
                stack.callback(layer.gate.register_forward_hook(close_selected).remove)
            elif mode is Mode.SHUFFLED:
                stack.callback(setattr, layer, "registry", layer.registry)
                layer.registry = registry
        yield
