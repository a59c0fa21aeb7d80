"""Choices made without scores: valid, and with the stated persistence."""

import pytest
import torch
from attrs import evolve

from nsa_bench.cases import Case, Selection, head_shape, parse_geometry
from nsa_bench.inputs import free_overlap, make_block_indices, positions_of
from nsa_core import BlockGeometry
from nsa_core.reference import naive

CPU = torch.device("cpu")
GEOMETRY = parse_geometry("4/2/4/6/16")


def case_of(seq_len, selection="trained-like", geometry=GEOMETRY, lengths=None, groups=3):
    shape = head_shape(2 * groups, groups, 8, 8)
    return Case(shape=shape, seq_len=seq_len, geometry=geometry, selection=Selection(selection), lengths=lengths)


@pytest.mark.parametrize("selection", list(Selection))
@pytest.mark.parametrize(
    "geometry",
    [GEOMETRY, BlockGeometry(4, 2, 4, 3, 1, 2, 8), BlockGeometry(4, 2, 4, 5, 0, 1, 8), BlockGeometry(4, 2, 4, 8, 3, 4, 8)],
)
def test_choices_are_valid(selection, geometry):
    case = case_of(500, selection, geometry, lengths=(1, 0, 3, 96, 400))
    indices, positions = make_block_indices(case, CPU), positions_of(case, CPU).tolist()
    assert (indices.dtype, tuple(indices.shape)) == (torch.int32, (1, 500, 3, geometry.num_selected_blocks))
    for t, row in zip(positions, indices[0].tolist(), strict=True):
        for chosen in row:
            blocks = [block for block in chosen if block >= 0]
            own = t // geometry.selection_block_size
            assert blocks == sorted(set(blocks))
            assert len(blocks) == min(geometry.num_selected_blocks, own + 1)
            assert chosen[len(blocks) :] == [-1] * (len(chosen) - len(blocks))
            assert naive.forced_blocks(t, geometry) <= set(blocks)
            assert max(blocks) == own


@pytest.mark.parametrize(("selection", "low", "high"), [("trained-like", 0.79, 0.81), ("random", 0.0, 0.03)])
def test_the_stated_share_of_free_blocks_persists(selection, low, high):
    case = case_of(4000, selection)
    assert low <= free_overlap(make_block_indices(case, CPU)[0], positions_of(case, CPU), GEOMETRY) <= high


def test_groups_choose_apart_and_seeds_differ():
    case = case_of(400)
    first = make_block_indices(case, CPU)
    assert not torch.equal(first[:, :, 0], first[:, :, 1])
    assert torch.equal(first, make_block_indices(case, CPU))
    assert not torch.equal(first, make_block_indices(case, CPU, seed=1))


def test_overlap_counts_free_blocks_of_queries_that_had_to_choose():
    geometry = BlockGeometry(4, 2, 4, 4, 1, 2, 8)
    # one free block each: kept, kept, changed, kept although it is local by then, in a new sequence
    rows = [[0, 1, 3, 4], [0, 1, 3, 4], [0, 1, 3, 4], [0, 2, 3, 4], [0, 2, 4, 5], [0, 1, 2, 3]]
    positions = torch.tensor([16, 17, 18, 19, 20, 12])
    found = free_overlap(torch.tensor(rows, dtype=torch.int32).unsqueeze(1), positions, geometry)
    assert found == pytest.approx((1 + 1 + 0 + 1) / 4)


def test_without_a_free_choice_there_is_no_overlap():
    assert free_overlap(make_block_indices(case_of(24), CPU)[0], torch.arange(24), GEOMETRY) is None
    forced_only = case_of(100, geometry=BlockGeometry(4, 2, 4, 3, 1, 2, 8))
    assert free_overlap(make_block_indices(forced_only, CPU)[0], torch.arange(100), forced_only.geometry) is None


def test_positions_start_anew_in_every_sequence():
    case = evolve(case_of(5), lengths=(2, 0, 3))
    assert positions_of(case, CPU).tolist() == [0, 1, 0, 1, 2]
