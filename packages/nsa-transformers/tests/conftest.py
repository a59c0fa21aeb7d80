"""Fixtures: tiny models of every kind, and generation from scratch to compare with."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from nsa_transformers import NSAForCausalLM, NSAModelConfig

VOCABULARY = 50
GEOMETRY = {
    "compression_block_size": 4,
    "compression_stride": 2,
    "selection_block_size": 8,
    "num_selected_blocks": 3,
    "num_initial_blocks": 1,
    "num_local_blocks": 1,
    "window_size": 12,
    "gate_hidden_size": 8,
}
KINDS = {
    "nsa": {},
    "shared": {"nsa": {**GEOMETRY, "kv": "shared", "qk_norm": True, "qkv_bias": True}},
    "mixed": {"layers": ["dense", {"window_size": 6}]},
    "dense": {"attention": "dense"},
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors run faster on one thread, and the machine may be shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., NSAModelConfig]:
    """A function from a kind and overrides to a configuration of two layers."""

    def build(kind: str = "nsa", **overrides: object) -> NSAModelConfig:
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        return NSAModelConfig(**{**sizes, "nsa": GEOMETRY, **KINDS[kind], **overrides})

    return build


@pytest.fixture(scope="session")
def tiny_model(tiny_config: Callable[..., NSAModelConfig]) -> Callable[..., NSAForCausalLM]:
    """A function from a kind and overrides to a model in evaluation mode, none of whose weights is zero."""

    def build(kind: str = "nsa", seed: int = 0, **overrides: object) -> NSAForCausalLM:
        torch.manual_seed(seed)
        model = NSAForCausalLM(tiny_config(kind, **overrides))
        with torch.no_grad():
            for weight in model.parameters():
                # sharp enough that greedy choices are no near ties
                weight.add_(0.3 * torch.randn_like(weight))
        return model.eval()

    return build


@pytest.fixture
def prompt() -> Tensor:
    """Two prompts of 20 tokens, without the last id, which tests pad with."""
    return torch.randint(0, VOCABULARY - 1, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def from_scratch() -> Callable[..., Tensor]:
    """A function that continues prompts greedily, computing everything again for each token."""

    def run(model: NSAForCausalLM, ids: Tensor, count: int) -> Tensor:
        with torch.no_grad():
            for _ in range(count):
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        return ids

    return run
