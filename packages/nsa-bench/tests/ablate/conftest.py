"""A tiny plan, and its trials."""

from pathlib import Path

import pytest

PLAN = """
recipe = "tiny.toml"
baseline = "dense"
seeds = [3, 4]

[set]
train.steps = 2
"train.eval_every" = 1

[arms.dense]
model.attention = "dense"
[arms.nsa]

[grid]
train.lr = [1e-3, 1e-2]
"""
RECIPE = """
[model]
dim = 16
n_layers = 1
n_heads = 2
n_kv_heads = 1
head_dim_qk = 8
head_dim_v = 8

[nsa]
compression_block_size = 4
compression_stride = 2
selection_block_size = 4
num_selected_blocks = 3
window_size = 8
gate_hidden_size = 4

[data]
source = "needle"
needle_pairs = 2
needle_queries = 2

[train]
samples = false
steps = 100
seq_len = 40
batch_size = 2
lr = 1e-3
eval_batches = 3
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """The path of a plan of two arms, two rates and two seeds, next to its recipe."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path / "plan.toml"
