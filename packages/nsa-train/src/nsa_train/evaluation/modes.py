"""The modes of an evaluation: the selected branch of a trained model is unchanged, closed, or reads random blocks or every block."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from nsa_core import BackendRegistry, BranchOutput, Keys, NativeSparseAttention, Operation, Queries
from nsa_core.blocks import num_selection_blocks
from nsa_core.config import BRANCHES, BlockGeometry
from nsa_core.dispatch import make_call, run
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


class EveryBlock(ServingBackend):
    """A backend of SLC that reads all tokens before and at a query, regardless of the chosen blocks."""

    name = "dense"
    operation = Operation.SLC

    def __init__(self, installed: BackendRegistry) -> None:
        """Compute with the backends of WIN in `installed`, whose window then holds every token."""
        self._installed = installed

    def __call__(self, queries: Queries, slc: Keys, block_indices: Tensor, /, *, geometry: BlockGeometry, scale: float) -> BranchOutput:
        """Return out `(B, S, H, D_v)` and its lse."""
        call = make_call(queries.q, evolve(geometry, window_size=slc.max_count), scale, "auto", self._installed)
        found: BranchOutput = run(Operation.WIN, call, queries, slc)
        return found


def close_selected(gate: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
    """Return the gate logits `(B, S, H, 3)` with the selected branch at -inf, so that its gate is 0. A forward hook of `GateMLP`."""
    closed = logits.clone()
    closed[..., BRANCHES.index("slc")] = -torch.inf
    return closed


@contextmanager
def limited_to(mode: Mode, layers: Sequence[NativeSparseAttention], registries: Mapping[Mode, BackendRegistry]) -> Iterator[None]:
    """Let `layers` compute in `mode` while the block runs, with the backends of the mode in `registries`, which come from `registry_of`."""
    with ExitStack() as stack:
        for layer in layers:
            if mode is Mode.CLOSED:
                stack.callback(layer.gate.register_forward_hook(close_selected).remove)
            elif mode is not Mode.TRAINED:
                stack.callback(setattr, layer, "registry", layer.registry)
                layer.registry = registries[mode]
        yield
