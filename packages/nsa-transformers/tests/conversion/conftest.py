"""Dense models of Transformers, their folders, and conversions of them."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from nsa_transformers import NSAForCausalLM
from nsa_transformers.conversion import ConversionOptions, Converted, plan_conversion, write_converted

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
OWN = {"Llama": {}, "Qwen2": {}, "Qwen3": {"rms_norm_eps": 1e-3}, "Mistral": {"sliding_window": None}}
"""The keys that only one family of models has."""
NSA = {
    "compression_block_size": 4,
    "compression_stride": 2,
    "selection_block_size": 8,
    "num_selected_blocks": 3,
    "num_initial_blocks": 1,
    "num_local_blocks": 1,
    "window_size": 12,
    "gate_hidden_size": 8,
}


class Dense(NamedTuple):
    """A dense model and the folder that holds it."""

    model: Any
    folder: Path


@pytest.fixture
def dense(tmp_path):
    """A function from a family and overrides of its configuration to a model none of whose weights is zero, and its folder."""

    def build(family: str = "Llama", *, shards: str = "1GB", dtype: torch.dtype = torch.float32, **overrides: Any) -> Dense:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **OWN[family], **overrides})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
        model = model.to(dtype).eval()
        model.save_pretrained(tmp_path / "dense", max_shard_size=shards)
        return Dense(model, tmp_path / "dense")

    return build


class Sparse(NamedTuple):
    """A converted model, its folder, and the result of its conversion."""

    model: NSAForCausalLM
    folder: Path
    found: Converted


@pytest.fixture
def convert(tmp_path):
    """A function from a folder and options to the converted model."""

    def run(folder: Path, **options: Any) -> Sparse:
        out = tmp_path / "converted"
        found = write_converted(plan_conversion(folder, ConversionOptions(**{"nsa": NSA, **options})), out)
        return Sparse(NSAForCausalLM.from_pretrained(out).eval(), out, found)

    return run


@pytest.fixture
def difference():
    """A function from two models and ids to the largest difference of their logits, as a share of the largest."""

    @torch.no_grad()
    def measure(one: Any, other: Any, ids: torch.Tensor) -> float:
        expected, found = (model(ids).logits.float() for model in (one, other))
        return float((expected - found).abs().max() / expected.abs().max())

    return measure


@pytest.fixture
def ids():
    """A function from a length to two sequences of ids."""
    return lambda length: torch.randint(0, SIZES["vocab_size"], (2, length), generator=torch.Generator().manual_seed(1))
