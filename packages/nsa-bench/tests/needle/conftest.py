"""A tiny plan of two stages."""

from pathlib import Path

import pytest

PLAN = """
recipe = "tiny.toml"

[arms.nsa]
[arms.dense]
model.attention = "dense"

[[stages]]
train.seq_len = 40
train.steps = 2
[[stages]]
train.seq_len = 56
train.steps = 1

[grid]
lengths = [64, 80]
depths = 3
samples = 2
distractors = 2
seed = 5
chunk = 17
"""
RECIPE = """
[model]
dim = 16
n_layers = 2
n_heads = 2
n_kv_heads = 1
head_dim_qk = 8
head_dim_v = 8

[nsa]
compression_block_size = 4
compression_stride = 2
selection_block_size = 8
num_selected_blocks = 4
window_size = 12
gate_hidden_size = 4

[data]
source = "needle"
needle_pairs = 3
needle_queries = 2
needle_symbols = 8
needle_tokens = 2

[train]
steps = 100
seq_len = 40
batch_size = 2
lr = 1e-3
eval_batches = 1
samples = false
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """The path of a plan of two arms and two stages, with its recipe."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path / "plan.toml"
