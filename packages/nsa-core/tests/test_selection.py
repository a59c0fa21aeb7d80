"""The arithmetic of selection against plain Python: Eq. 9 by counting tokens, Eq. 11 by sorting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_core import BlockGeometry
from nsa_core.selection import choose_blocks, pool_importance

PAPER = BlockGeometry()


def shared_strides(i, j, geometry):
    start, size = i * geometry.compression_stride, geometry.selection_block_size
    block = range(start, start + geometry.compression_block_size)
    return sum(j * size <= token < (j + 1) * size for token in block) // geometry.compression_stride


@given(data=st.data(), num_compressed=st.integers(0, 14), num_blocks=st.integers(0, 6))
def test_importance_is_each_weight_times_the_strides_it_shares_with_the_block(geometries, data, num_compressed, num_blocks):
    geometry = data.draw(geometries())
    # small integers: the sums are exact in any order
    weights = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=num_compressed, max_size=num_compressed)), dtype=torch.float64)

    importance = pool_importance(weights, geometry, num_blocks)

    expected = [sum(w * shared_strides(i, j, geometry) for i, w in enumerate(weights.tolist())) for j in range(num_blocks)]
    assert importance.tolist() == expected


def test_importance_by_hand_for_the_papers_sizes():
    # l=32, d=16, l'=64: block j takes compressed blocks 4j-1 .. 4j+3 with weights 1, 2, 2, 2, 1
    weights = torch.tensor([1.0, 10, 100, 1000, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10], dtype=torch.float64)

    assert pool_importance(weights, PAPER, 3).tolist() == [2 + 20 + 200 + 1000, 1e3 + 2e4 + 2e5 + 2e6 + 1e7, 1e7 + 2e8 + 2e9 + 2e10]


def test_importance_is_pooled_row_by_row():
    weights = torch.randint(9, (2, 5, 3, 11)).double()

    pooled = pool_importance(weights, PAPER, 3)

    assert pooled.shape == (2, 5, 3, 3)
    for row, expected in zip(weights.flatten(0, 2), pooled.flatten(0, 2), strict=True):
        assert torch.equal(pool_importance(row, PAPER, 3), expected)


@given(data=st.data(), num_compressed=st.integers(1, 14), num_blocks=st.integers(1, 6))
def test_importance_is_bit_identical_however_many_blocks_follow(geometries, data, num_compressed, num_blocks):
    geometry = data.draw(geometries())
    weights = torch.rand(3, num_compressed)
    longer = torch.cat([weights, torch.zeros(3, 5)], -1)

    assert torch.equal(pool_importance(longer, geometry, num_blocks + 2)[:, :num_blocks], pool_importance(weights, geometry, num_blocks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_importance_keeps_its_dtype(dtype):
    assert pool_importance(torch.rand(2, 7, dtype=dtype), PAPER, 2).dtype == dtype


def chosen_by_sorting(scores, t, geometry):
    """Eq. 11 in plain Python, padded with -1 to n."""
    count = geometry.num_selected_blocks
    if t < 0:
        return [-1] * count
    own = t // geometry.selection_block_size
    candidates = range(own + 1)
    forced = {j for j in candidates if j < geometry.num_initial_blocks or j > own - geometry.num_local_blocks}
    ranked = sorted((j for j in candidates if j not in forced), key=lambda j: (-scores[j], j))
    chosen = sorted(forced | set(ranked[: count - len(forced)]))
    return chosen + [-1] * (count - len(chosen))


@given(data=st.data(), num_blocks=st.integers(1, 12))
def test_blocks_are_chosen_as_by_sorting_with_many_ties(geometries, data, num_blocks):
    geometry = data.draw(geometries(max_stride=2))
    score = st.sampled_from([0.0, 0.5, 1.0])
    rows = data.draw(st.lists(st.lists(score, min_size=num_blocks, max_size=num_blocks), min_size=1, max_size=20))
    last = num_blocks * geometry.selection_block_size - 1
    positions = data.draw(st.lists(st.integers(-1, last), min_size=len(rows), max_size=len(rows)))

    chosen = choose_blocks(torch.tensor(rows), torch.tensor(positions), geometry)

    assert chosen.tolist() == [chosen_by_sorting(row, t, geometry) for row, t in zip(rows, positions, strict=True)]


@given(data=st.data(), num_blocks=st.integers(1, 12))
def test_blocks_are_chosen_as_by_sorting_without_ties(geometries, data, num_blocks):
    geometry = data.draw(geometries(max_stride=2))
    t = data.draw(st.integers(0, num_blocks * geometry.selection_block_size - 1))
    scores = data.draw(st.lists(st.floats(0, 1, width=32), min_size=num_blocks, max_size=num_blocks, unique=True))

    assert choose_blocks(torch.tensor([scores]), torch.tensor([t]), geometry).tolist() == [chosen_by_sorting(scores, t, geometry)]


@pytest.mark.parametrize("score", [0.0, 0.5])
def test_equal_scores_go_to_the_lower_blocks(score):
    geometry = BlockGeometry(4, 4, 4, num_selected_blocks=4, num_initial_blocks=0, num_local_blocks=1)

    assert choose_blocks(torch.full((1, 9), score), torch.tensor([4 * 9 - 1]), geometry).tolist() == [[0, 1, 2, 8]]


def test_a_tie_at_the_last_place_takes_the_lower_block_beside_a_higher_score():
    geometry = BlockGeometry(4, 4, 4, num_selected_blocks=4, num_initial_blocks=1, num_local_blocks=1)

    assert choose_blocks(torch.tensor([[0, 0.2, 0.5, 0.5, 0.5, 0.9, 0]]), torch.tensor([27]), geometry).tolist() == [[0, 2, 5, 6]]


def test_forced_blocks_are_chosen_though_their_scores_are_lowest():
    geometry = BlockGeometry(4, 4, 4, num_selected_blocks=5, num_initial_blocks=2, num_local_blocks=2)
    scores = torch.tensor([[0.0, 0, 1, 1, 1, 0, 0]])

    assert choose_blocks(scores, torch.tensor([27]), geometry).tolist() == [[0, 1, 2, 5, 6]]


def test_forced_blocks_that_are_both_initial_and_local_count_once():
    geometry = BlockGeometry(4, 4, 4, num_selected_blocks=5, num_initial_blocks=2, num_local_blocks=2)

    # own = 2: blocks 0, 1 are initial, 1, 2 are local
    assert choose_blocks(torch.zeros(1, 9), torch.tensor([11]), geometry).tolist() == [[0, 1, 2, -1, -1]]


def test_own_block_changes_at_the_blocks_edge():
    geometry = BlockGeometry(4, 4, 4, num_selected_blocks=1, num_initial_blocks=0, num_local_blocks=1)

    positions = torch.tensor([0, 3, 4, 7, 8])
    assert choose_blocks(torch.zeros(5, 3), positions, geometry).flatten().tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), -1.0, 9.0])
def test_scores_after_the_querys_own_block_are_ignored(rubbish):
    geometry = BlockGeometry(4, 4, 4, num_selected_blocks=3, num_initial_blocks=0, num_local_blocks=1)
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2, rubbish, rubbish]])

    assert choose_blocks(scores, torch.tensor([15]), geometry).tolist() == [[1, 2, 3]]


def test_a_score_of_nan_counts_as_0():
    geometry = BlockGeometry(4, 4, 4, num_selected_blocks=4, num_initial_blocks=1, num_local_blocks=1)
    nan = float("nan")

    assert choose_blocks(torch.tensor([[nan, nan, 0.1, nan, 0.2, nan, nan]]), torch.tensor([27]), geometry).tolist() == [[0, 2, 4, 6]]
    assert choose_blocks(torch.full((1, 7), nan), torch.tensor([27]), geometry).tolist() == [[0, 1, 2, 6]]
    # not less than 0: the tie goes to the lower block
    assert choose_blocks(torch.tensor([[0, nan, 0, nan, 0.1, 0, 0]]), torch.tensor([27]), geometry).tolist() == [[0, 1, 4, 6]]


def test_a_row_that_holds_no_query_chooses_nothing():
    geometry = BlockGeometry(4, 4, 4, num_selected_blocks=2, num_initial_blocks=1, num_local_blocks=1)

    assert choose_blocks(torch.rand(1, 6), torch.tensor([-1]), geometry).tolist() == [[-1, -1]]


def test_without_any_block_nothing_is_chosen():
    assert choose_blocks(torch.zeros(2, 0), torch.tensor([-1, -1]), PAPER).tolist() == [[-1] * 16] * 2


def test_one_position_serves_every_group_of_its_query():
    geometry = BlockGeometry(4, 4, 4, num_selected_blocks=2, num_initial_blocks=0, num_local_blocks=1)
    scores = torch.tensor([[[0.9, 0.1, 0], [0.1, 0.9, 0]], [[0.9, 0.1, 0], [0.1, 0.9, 0]]])

    chosen = choose_blocks(scores, torch.tensor([[11], [7]]), geometry)

    assert chosen.tolist() == [[[0, 2], [1, 2]], [[0, 1], [0, 1]]]


def test_the_result_is_contiguous_int32():
    chosen = choose_blocks(torch.rand(2, 3, 40), torch.full((2, 3), 40 * 64 - 1), PAPER)

    assert chosen.dtype == torch.int32
    assert chosen.is_contiguous()
    assert chosen.shape == (2, 3, 16)
