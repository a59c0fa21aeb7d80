"""Inputs: the right shapes, and the requested drift."""

import pytest
import torch

from nsa_bench.cases import Case, Selection, head_shape, parse_geometry
from nsa_bench.inputs import drifting_queries, free_overlap, make_tensors, positions_of
from nsa_core import compressed_attention, select_blocks

CPU = torch.device("cpu")
GEOMETRY = parse_geometry("8/4/8/8/32")


def case_of(seq_len, selection="random", lengths=None, dtype=torch.float32, shape=(4, 2, 16, 8)):
    return Case(shape=head_shape(*shape), seq_len=seq_len, geometry=GEOMETRY, dtype=dtype, selection=Selection(selection), lengths=lengths)


def overlap(case):
    inputs = make_tensors(case, CPU)
    options = {"geometry": case.geometry, "cu_seqlens": inputs.cu_seqlens}
    with torch.no_grad():
        lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, **options).lse
        chosen = select_blocks(inputs.q, inputs.k_cmp, lse, **options)
    return free_overlap(chosen[0], positions_of(case, CPU), case.geometry)


@pytest.mark.parametrize("selection", list(Selection))
def test_tensors_are_leaves_of_the_shapes_that_the_operation_takes(selection):
    inputs = make_tensors(case_of(40, selection, dtype=torch.bfloat16), CPU)
    assert [tuple(x.shape[1:]) for x in inputs.tensors] == [
        (40, 4, 16), (9, 2, 16), (9, 2, 8), (40, 2, 16), (40, 2, 8), (40, 2, 16), (40, 2, 8), (40, 4, 3),
    ]  # fmt: skip
    assert all(x.is_leaf and x.requires_grad and x.dtype is torch.bfloat16 for x in inputs.tensors)
    assert inputs.cu_seqlens is None


def test_packed_cases_have_their_bounds():
    inputs = make_tensors(case_of(40, lengths=(0, 15, 25)), CPU)
    assert inputs.cu_seqlens.tolist() == [0, 0, 15, 40]
    assert inputs.cu_seqlens.dtype is torch.int32
    assert inputs.k_cmp.shape[1] == 2 + 5


def test_trained_like_queries_choose_about_four_fifths_of_their_predecessors_blocks():
    assert 0.75 <= overlap(case_of(1500, "trained-like")) <= 0.85
    assert 0.7 <= overlap(case_of(1500, "trained-like", lengths=(300, 1200))) <= 0.9


def test_random_queries_do_not():
    assert overlap(case_of(1500)) < 0.3


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.99])
def test_drifting_queries_are_unit_normal_with_the_asked_correlation(correlation):
    case = case_of(600, shape=(8, 2, 64, 64))
    q = drifting_queries(600, case, correlation, torch.Generator().manual_seed(0)).flatten(1)
    assert float(q.var()) == pytest.approx(1, abs=0.1)
    # also across the chunks that they are made in
    for rows in (q, q[250:262]):
        assert float((rows[1:] * rows[:-1]).mean()) == pytest.approx(correlation, abs=0.1)


def test_a_sequence_too_short_to_choose_is_no_error():
    assert overlap(case_of(20, "trained-like")) is None
