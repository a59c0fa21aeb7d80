"""The canary: nothing can be learnt from fresh uniform random tokens, so a loss below ln V shows a leak of the future.

With the loss taken before each update, N * (ln V - loss) summed over steps is the logarithm of a martingale of mean 1
when nothing leaks: a sum above 20 nats has probability below e^-20. Every run is repeated with a planted leak, which it
must catch. It cannot see small leaks in the choice of blocks; the causality properties cover those.
"""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa_core import (
    BackendRegistry,
    BlockGeometry,
    BranchOutput,
    Capability,
    NativeSparseAttention,
    NSAConfig,
    Operation,
    default_registry,
)
from nsa_core.backends.base import Keys, Queries
from nsa_core.testing.masks import math_attention
from nsa_core.varlen import positions_from_cu_seqlens, sequence_ids

VOCABULARY, STEPS, LAST = 32, 200, 50
LOSS_ON = ("all positions", "the last quarter", "the last position before each edge")
LIMIT_NATS = 20.0
GEOMETRY = BlockGeometry(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=8,
    num_selected_blocks=3,
    num_initial_blocks=1,
    num_local_blocks=1,
    window_size=12,
)
LENGTHS = (40, 13, 43)
"""Documents of a packed row; unpacked rows are as long as the first."""
HIDDEN, NUM_HEADS = 32, 2


def rows_of_interest(positions: Tensor, lengths: Tensor, loss_on: str) -> Tensor:
    """Return bool: the positions whose next token is scored. The last token of a document has none."""
    has_next = positions < lengths - 1
    if loss_on == "all positions":
        return has_next
    if loss_on == "the last quarter":
        return has_next & (positions >= 3 * lengths // 4)
    after = positions + 1
    starts_block = (after % GEOMETRY.compression_stride == 0) | (after % GEOMETRY.selection_block_size == 0)
    starts_window = after % GEOMETRY.window_size == 0
    return has_next & (starts_block | starts_window | (positions == lengths - 2))


class LeakyWindow:
    """A sliding window that also shows the next token to the rows `leaks` marks."""

    name = "leaky"
    operation = Operation.WIN
    capability = Capability()

    def __init__(self, positions: Tensor, ids: Tensor, leaks: Tensor) -> None:
        distance = torch.arange(len(positions)).unsqueeze(1) - torch.arange(len(positions))
        same = ids.unsqueeze(1) == ids
        seen = (distance >= 0) & (distance < GEOMETRY.window_size) & same
        self.mask = seen | ((distance == -1) & same & leaks.unsqueeze(1))

    def reasons_against(self, request: Any) -> tuple[Any, ...]:
        return ()

    def preference(self, request: Any) -> int:
        return 1

    def __call__(self, queries: Queries, keys: Keys, *, geometry: Any, scale: float) -> BranchOutput:
        q = queries.q
        return BranchOutput(math_attention(q, keys.k, keys.v, self.mask, scale), q.new_zeros(q.shape[:3]))


class DenseTwin(nn.Module):
    """Dense causal attention of the same width, under an explicit mask."""

    def __init__(self, positions: Tensor, ids: Tensor, leaks: Tensor) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.place = nn.Embedding(int(positions.max()) + 2, HIDDEN)
        self.positions = positions
        distance = torch.arange(len(positions)).unsqueeze(1) - torch.arange(len(positions))
        same = ids.unsqueeze(1) == ids
        self.mask = same & ((distance >= 0) | ((distance == -1) & leaks.unsqueeze(1)))

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x + self.place(self.positions)).unflatten(-1, (3, NUM_HEADS, -1)).unbind(2)
        return self.out(math_attention(q, k, v, self.mask).flatten(2))


class Model(nn.Module):
    """Embedding, one attention layer, head."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.attention = attention
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.attention(x, cu_seqlens=cu_seqlens))


def build(kind: str, positions: Tensor, ids: Tensor, leaks: Tensor) -> Model:
    if kind == "dense":
        return Model(DenseTwin(positions, ids, leaks))
    registry = BackendRegistry(tuple(default_registry().backends))
    if leaks.any():
        registry.register(LeakyWindow(positions, ids, leaks))
    config = NSAConfig(HIDDEN, NUM_HEADS, 1, HIDDEN // NUM_HEADS, HIDDEN // NUM_HEADS, geometry=GEOMETRY)
    return Model(NativeSparseAttention(config, registry=registry))


def gained_nats(kind: str, *, packed: bool, loss_on: str, leak: bool) -> float:
    """Return the sum over the last steps of N * (ln V - loss), the loss taken before each update."""
    torch.manual_seed(0)
    lengths = LENGTHS if packed else LENGTHS[:1]
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    total = sum(lengths)
    positions, ids = positions_from_cu_seqlens(cu_seqlens, total), sequence_ids(cu_seqlens, total)
    scored = rows_of_interest(positions, torch.tensor(lengths)[ids], loss_on)
    model = build(kind, positions, ids, scored if leak else torch.zeros_like(scored))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = 1 if packed else 8
    gained, losses = 0.0, []
    for step in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (batch, total))
        logits = model(tokens, cu_seqlens if packed else None)[:, :-1][:, scored[:-1]]
        targets = tokens[:, 1:][:, scored[:-1]]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if step >= STEPS - LAST:
            gained += targets.numel() * (math.log(VOCABULARY) - loss.item())
            losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = sum(losses) / len(losses)
    if not leak and mean > math.log(VOCABULARY) + 0.05:
        warnings.warn(f"canary {kind}, packed={packed}, {loss_on}: mean loss {mean:.3f} is above ln V + 0.05", stacklevel=2)
    return gained


@pytest.mark.filterwarnings("default:canary")
@pytest.mark.parametrize(
    ("packed", "loss_on"),
    [
        pytest.param(
            packed,
            loss_on,
            marks=() if loss_on == LOSS_ON[0] or (packed and loss_on == LOSS_ON[2]) else pytest.mark.slow,
            id=f"{'packed' if packed else 'unpacked'}-{loss_on}",
        )
        for packed in (False, True)
        for loss_on in LOSS_ON
    ],
)
@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_random_tokens_are_never_learned_and_a_planted_leak_is_caught(kind: str, packed: bool, loss_on: str) -> None:
    assert gained_nats(kind, packed=packed, loss_on=loss_on, leak=False) <= LIMIT_NATS
    assert gained_nats(kind, packed=packed, loss_on=loss_on, leak=True) > LIMIT_NATS
