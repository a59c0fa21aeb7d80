"""Attention of sampled rows, against the oracle."""

import pytest
import torch

from nsa_core import BlockGeometry
from nsa_core.reference import naive
from nsa_core.testing.inputs import SMALL, Shape, make_inputs, random_block_indices
from nsa_core.testing.sampled import attend_sample, operands_of
from nsa_core.testing.sampled_rows import NUM_ROWS, choose_rows, sample_rows

CPU = torch.device("cpu")
GEOMETRIES = [SMALL, BlockGeometry(6, 3, 9, 5, 0, 2, 7), BlockGeometry(4, 4, 4, 6, 2, 1, 50)]


def shape_of(*lengths, geometry):
    sizes = {"num_queries": sum(lengths), "lengths": lengths if len(lengths) > 1 else None}
    return Shape(geometry=geometry, num_heads=6, num_kv_heads=2, head_dim_v=5, **sizes)


def oracle(operation, inputs, geometry, chosen):
    q, *others = operands_of(operation, inputs).values()
    options = {"cu_seqlens": inputs.cu_seqlens}
    if operation == "dense":
        return naive.dense_attention(q, *others, **options).out
    options["geometry"] = geometry
    if operation == "cmp":
        return naive.compressed_attention(q, *others, **options).out
    if operation == "win":
        return naive.sliding_window_attention(q, *others, **options).out
    return naive.selected_attention(q, *others, chosen, **options).out


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("lengths", [(70,), (5, 0, 40, 1, 33)])
@pytest.mark.parametrize("operation", ["cmp", "slc", "win", "dense"])
def test_sampled_rows_equal_the_oracles(operation, lengths, geometry):
    shape = shape_of(*lengths, geometry=geometry)
    inputs = make_inputs(shape)
    chosen = random_block_indices(shape, holes=True)
    sample = sample_rows(lengths, geometry, CPU)
    leaves = {name: x[0, sample.rows] if name == "q" else x[0] for name, x in operands_of(operation, inputs).items()}
    rows = attend_sample(operation, leaves, sample, chosen[0, sample.rows])
    torch.testing.assert_close(rows, oracle(operation, inputs, geometry, chosen)[0, sample.rows], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_choices_and_margins_equal_the_oracles(geometry):
    inputs = make_inputs(shape_of(90, geometry=geometry))
    lse = naive.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry=geometry).lse
    options = {"geometry": geometry}
    [piece] = sample_rows((90,), geometry, CPU).pieces
    q, k_cmp = inputs.q[0, piece.positions].detach(), inputs.k_cmp[0].detach()
    choice = choose_rows(piece, q, k_cmp)
    assert torch.equal(choice.chosen, naive.select_blocks(inputs.q, inputs.k_cmp, lse, **options)[0, piece.positions])
    margin = naive.selection_margin(inputs.q, inputs.k_cmp, lse, **options)[0, piece.positions]
    torch.testing.assert_close(choice.margin, margin, rtol=1e-9, atol=1e-12)
    highest = naive.importance(inputs.q, inputs.k_cmp, lse, **options)[0, piece.positions].amax(-1)
    torch.testing.assert_close(choice.highest, highest, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seq_len", [1, 7, 32, 33, 1000])
def test_a_sample_is_in_order_without_repetition_and_holds_the_ends(seq_len):
    [piece] = sample_rows((seq_len,), SMALL, CPU).pieces
    positions = piece.positions.tolist()
    assert positions == sorted(set(positions))
    assert len(positions) == min(seq_len, NUM_ROWS)
    assert {0, seq_len - 1} <= set(positions)


def test_the_longest_sequences_are_sampled_where_there_are_many():
    lengths = (3, 50, 0, 60, 2, 70, 80, 1)
    sample = sample_rows(lengths, SMALL, CPU)
    assert [piece.length for piece in sample.pieces] == [50, 60, 70, 80]
    assert [piece.start for piece in sample.pieces] == [3, 53, 115, 185]
    assert sample.rows.tolist() == sorted(sample.rows.tolist())
