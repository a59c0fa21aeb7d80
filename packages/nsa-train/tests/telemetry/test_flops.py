"""Model FLOPs count the pairs that each branch defines, and the products that torch counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from nsa_core import BlockGeometry
from nsa_core.blocks import compressed_pairs, num_chosen_blocks, num_compressed_blocks, num_visible_blocks, selected_pairs, window_pairs
from nsa_train.model.decoder import build_model
from nsa_train.settings.recipe import load_config
from nsa_train.telemetry.flops import model_flops

GEOMETRIES = (
    BlockGeometry(),
    BlockGeometry(
        compression_block_size=4,
        compression_stride=2,
        selection_block_size=4,
        num_selected_blocks=3,
        num_initial_blocks=1,
        num_local_blocks=2,
        window_size=5,
    ),
)


@given(length=st.integers(0, 1500), geometry=st.sampled_from(GEOMETRIES))
def test_pairs_are_those_of_every_query(length: int, geometry: BlockGeometry) -> None:
    size = geometry.selection_block_size
    queries = range(length)
    assert compressed_pairs(length, geometry) == sum(num_visible_blocks(t, geometry) for t in queries)
    assert selected_pairs(length, geometry) == sum((num_chosen_blocks(t, geometry) - 1) * size + t % size + 1 for t in queries)
    assert window_pairs(length, geometry) == sum(min(t + 1, geometry.window_size) for t in queries)


@pytest.mark.parametrize("kv", ["separate", "shared"])
@pytest.mark.parametrize(("attention", "compressor"), [("nsa", "mean"), ("nsa", "mlp"), ("dense", "mlp")])
def test_projections_and_phi_are_what_torch_counts(tiny_config, attention: str, compressor: str, kv: str) -> None:
    """torch counts matrix products by shape; attention is left out by its own operators and their decomposed parts."""
    config = tiny_config(f"model.attention={attention}", f"nsa.compressor={compressor}", f"nsa.kv={kv}")
    model = build_model(config)
    ids = torch.zeros(1, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    counted = counter.get_flop_counts()["Global"]
    linear = sum(flops for operator, flops in counted.items() if str(operator) in ("aten.mm", "aten.addmm"))
    flops = model_flops(config)
    [phi] = flops.attentions
    assert 3 * linear == flops.per_token * 32 + phi.per_block * num_compressed_blocks(32, phi.geometry)
    assert (phi.per_block > 0) == (attention == "nsa" and compressor == "mlp")


def test_an_output_layer_of_its_own_costs_what_a_shared_one_does(tiny_config) -> None:
    shared, own = (model_flops(tiny_config(f"model.tie_embeddings={flag}")) for flag in ("true", "false"))
    assert shared.per_token == own.per_token


def test_the_dense_twin_pays_for_all_of_the_past(tiny_config) -> None:
    dense = model_flops(tiny_config("model.attention=dense"))
    extra = dense.of_sequence(1000) - 1000 * dense.per_token
    # two layers of two heads, 16 + 16 wide: two FLOPs per multiply-add, three passes
    assert extra == 2 * 2 * (16 + 16) * 2 * 3 * 1000 * 1001 // 2


def test_sparse_attention_costs_less_at_long_lengths() -> None:
    nsa, dense = model_flops(load_config("125m")), model_flops(load_config("125m", ["model.attention=dense"]))
    assert nsa.of_sequence(65536) < dense.of_sequence(65536) / 3
    # 6 FLOPs per weight and token, the attention's pairs apart
    assert dense.per_token == pytest.approx(6 * 111.8e6, rel=0.01)


def test_scores_that_only_choose_blocks_have_no_backward_pass(tiny_config) -> None:
    """Without the compressed branch its keys still choose the blocks; nothing flows back through a choice."""
    config = tiny_config("nsa.branches=['slc','win']")
    [flops], layers = model_flops(config).attentions, build_model(config).sparse_layers
    assert [any(weight.requires_grad for weight in layer.compress_k.parameters()) for layer in layers] == [False, False]
    # two layers of two heads, 16 wide: two FLOPs per multiply-add, one pass for the scores, three for scores and outputs
    assert flops.per_pair == {"slc": 3 * 2 * 2 * 2 * (16 + 16), "win": 3 * 2 * 2 * 2 * (16 + 16), "cmp": 2 * 2 * 2 * 16}
    [both] = model_flops(tiny_config("nsa.branches=['cmp','win']")).attentions
    # phi of keys alone, one pass, against keys and values, three passes
    assert 6 * flops.per_block == both.per_block


def test_documents_cost_less_than_one_row_of_their_length(tiny_config) -> None:
    dense = model_flops(tiny_config("model.attention=dense"))
    assert dense.of_step((16, 16)) < dense.of_step((32,))
