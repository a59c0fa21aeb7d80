"""Explorations of made-up numbers, of any size, that obey the rules of a choice."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nsa_core.config import BRANCHES, BlockGeometry
from nsa_core.selection import choose_blocks
from nsa_train.explore.records import Exploration, LayerRecord

GEOMETRY = BlockGeometry()
WORDS = ["the", "block", "of", "a", "token", "is", "chosen", "by", "its", "score", ",", "and", "so", "on", "\n"]


def made_up_layer(
    index: int, num_tokens: int, heads: tuple[int, int], geometry: BlockGeometry, *, has_twin: bool, seed: int
) -> LayerRecord:
    """Return a record whose blocks are those that its scores choose."""
    random = torch.Generator().manual_seed(seed + index)
    num_blocks, (num_heads, num_kv_heads) = -(-num_tokens // geometry.selection_block_size), heads
    positions = torch.arange(num_tokens)
    is_candidate = (torch.arange(num_blocks) <= positions[:, None] // geometry.selection_block_size)[:, None]

    def shares() -> torch.Tensor:
        logits = 2 * torch.randn(num_tokens, num_kv_heads, num_blocks, generator=random)
        return logits.masked_fill(~is_candidate, -torch.inf).softmax(-1)

    scores = shares() * num_heads / num_kv_heads
    return LayerRecord(
        index=index,
        geometry=geometry,
        branches=BRANCHES,
        num_kv_heads=num_kv_heads,
        gates=torch.rand(num_tokens, num_heads, 3, generator=random).numpy(),
        block_indices=choose_blocks(scores, positions[:, None], geometry).numpy(),
        scores=scores.numpy(),
        dense_mass=shares().numpy() if has_twin else None,
    )


@pytest.fixture(scope="session")
def made_up() -> Callable[..., Exploration]:
    """A function from sizes to an exploration."""

    def make(
        num_tokens: int, num_layers: int, heads: tuple[int, int] = (4, 2), geometry: BlockGeometry = GEOMETRY, *, has_twin: bool = True
    ) -> Exploration:
        words = np.random.default_rng(0).choice(WORDS, num_tokens).tolist()
        return Exploration(
            model="made-up",
            step=1000,
            twin="twin" if has_twin else None,
            token_ids=list(range(num_tokens)),
            pieces=[word if word == "\n" else f" {word}" for word in words],
            layers=[made_up_layer(index, num_tokens, heads, geometry, has_twin=has_twin, seed=1) for index in range(num_layers)],
        )

    return make


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, save_random: Callable[..., Path]) -> Callable[..., Path]:
    """A function from overrides to the directory of a checkpoint with weights that choose unevenly; do not write to it."""

    @functools.cache
    def save(*overrides: str) -> Path:
        return save_random(tmp_path_factory.mktemp("runs") / "saved" / "checkpoints", *overrides)

    return save
