"""Shared by test files of nsa-core: strategies of valid geometries and configurations, and layers with random weights.

Strategies come as fixtures, because test files do not import each other: `geometry = data.draw(geometries())`.
"""

import pytest
import torch
from hypothesis import strategies as st

from nsa_core import BlockGeometry, NativeSparseAttention, NSAConfig, RopeScaling
from nsa_core.config import BRANCHES, OPERATIONS


@st.composite
def _geometries(draw, max_stride=4, max_strides=4, max_window=12):
    stride = draw(st.integers(1, max_stride))
    strides_per_block = draw(st.integers(1, max_strides))
    strides_per_selection = draw(st.integers(strides_per_block, max_strides + 2))
    initial, local = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    return BlockGeometry(
        compression_block_size=stride * strides_per_block,
        compression_stride=stride,
        selection_block_size=stride * strides_per_selection,
        num_selected_blocks=initial + local + draw(st.integers(0, 3)),
        num_initial_blocks=initial,
        num_local_blocks=local,
        window_size=draw(st.integers(1, max_window)),
    )


@st.composite
def _rope_scalings(draw):
    beta_slow, kind = draw(st.floats(0.5, 4)), draw(st.sampled_from(["linear", "yarn"]))
    return RopeScaling(
        kind=kind,
        factor=draw(st.floats(1, 64)),
        original_max_position=draw(st.integers(1, 10**6)),
        beta_fast=beta_slow + draw(st.floats(0.5, 64)),
        beta_slow=beta_slow,
        attention_factor=draw(st.none() | st.floats(0.1, 4)) if kind == "yarn" else None,
    )


@st.composite
def _configs(draw):
    compressor = draw(st.sampled_from(["mlp", "conv", "mean"]))
    num_kv_heads = draw(st.integers(1, 4))
    branches = tuple(draw(st.permutations(BRANCHES))[: draw(st.integers(1, 3))])
    names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
    return NSAConfig(
        hidden_size=draw(st.integers(1, 10**6)),
        num_heads=num_kv_heads * draw(st.integers(1, 16)),
        num_kv_heads=num_kv_heads,
        head_dim_qk=2 * draw(st.integers(1, 128)),
        head_dim_v=draw(st.integers(1, 256)),
        geometry=draw(_geometries(64, 8, 10**6)),
        compressor=compressor,
        gate=draw(st.sampled_from(["sigmoid", "softmax"])) if len(branches) > 1 else "sigmoid",
        gate_hidden_size=draw(st.integers(1, 512)),
        gate_temperature=draw(st.floats(1e-6, 1e6)),
        rope_theta=draw(st.floats(1.5, 1e9)),
        rope_scaling=draw(st.none() | _rope_scalings()),
        compressed_rope=draw(st.sampled_from(["block_end", "tokens"])) if compressor == "mean" else "block_end",
        branches=branches,
        backends=draw(st.dictionaries(st.sampled_from(OPERATIONS), names)),
        kv=draw(st.sampled_from(["separate", "shared"])),
        qk_norm=draw(st.booleans()),
    )


@pytest.fixture(scope="session")
def geometries():
    """A strategy of small valid geometries; wider with larger bounds."""
    return _geometries


@pytest.fixture(scope="session")
def rope_scalings():
    return _rope_scalings


@pytest.fixture(scope="session")
def configs():
    """A strategy of valid configurations over every field; too big to build layers of."""
    return _configs


@pytest.fixture(scope="session")
def random_layer():
    """`random_layer(config)`: a float64 layer without zero weights, so that no path is hidden by its initial value."""

    def build(config, seed=0, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        layer = NativeSparseAttention(config).to(dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                spread = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(spread * parameter.shape[-1] ** -0.5)
        return layer

    return build


@pytest.fixture(scope="session")
def random_input():
    """`random_input(2, 5, 8)`: seeded float64 normal numbers."""

    def draw(*shape, seed=1, dtype=torch.float64):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)

    return draw
