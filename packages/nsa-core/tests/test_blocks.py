"""Block arithmetic against counting tokens one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_core import BlockGeometry, blocks

PAPER = BlockGeometry()


def tokens_of_compressed(i, geometry):
    start = i * geometry.compression_stride
    return set(range(start, start + geometry.compression_block_size))


def tokens_of_selection(j, geometry):
    return set(range(j * geometry.selection_block_size, (j + 1) * geometry.selection_block_size))


def count_compressed(length, geometry):
    """Blocks that lie in the first `length` tokens entirely; none that starts after them can."""
    return sum(tokens_of_compressed(i, geometry) <= set(range(length)) for i in range(length + 1))


@given(data=st.data(), length=st.integers(0, 60))
def test_compressed_blocks_are_those_that_lie_entirely_in_the_sequence(geometries, data, length):
    geometry = data.draw(geometries())

    assert blocks.num_compressed_blocks(length, geometry) == count_compressed(length, geometry)


@given(data=st.data(), t=st.integers(0, 60))
def test_a_compressed_block_is_visible_iff_its_last_token_is_not_in_the_future(geometries, data, t):
    geometry = data.draw(geometries())

    visible = sum(max(tokens_of_compressed(i, geometry)) <= t for i in range(t + 1))
    assert blocks.num_visible_blocks(t, geometry) == visible


@pytest.mark.parametrize(("t", "count"), [(0, 0), (15, 0), (16, 0), (30, 0), (31, 1), (46, 1), (47, 2), (62, 2), (63, 3)])
def test_no_block_is_visible_before_the_first_ends_though_truncated_division_would_show_one(t, count):
    assert blocks.num_visible_blocks(t, PAPER) == count


@pytest.mark.parametrize(("length", "count"), [(0, 0), (16, 0), (31, 0), (32, 1), (47, 1), (48, 2), (65, 3), (8192, 511)])
def test_the_papers_geometry_has_these_compressed_blocks(length, count):
    assert blocks.num_compressed_blocks(length, PAPER) == count


@given(data=st.data(), length=st.integers(0, 80))
def test_selection_blocks_hold_at_least_one_token(geometries, data, length):
    geometry = data.draw(geometries())

    held = sum(bool(tokens_of_selection(j, geometry) & set(range(length))) for j in range(length + 1))
    assert blocks.num_selection_blocks(length, geometry) == held


@given(data=st.data(), t=st.integers(0, 80))
def test_a_query_lies_in_its_own_block(geometries, data, t):
    geometry = data.draw(geometries())

    assert t in tokens_of_selection(blocks.own_block(t, geometry), geometry)


@given(data=st.data(), t=st.integers(0, 80))
def test_a_query_chooses_all_its_candidates_or_n(geometries, data, t):
    geometry = data.draw(geometries())

    candidates = [j for j in range(t + 1) if j * geometry.selection_block_size <= t]
    assert blocks.num_chosen_blocks(t, geometry) == len(candidates[: geometry.num_selected_blocks])


def test_the_papers_overlap_weights_are_1_2_2_2_1():
    assert blocks.overlap_weights(PAPER) == (1, 2, 2, 2, 1)


@given(data=st.data(), j=st.integers(0, 5))
def test_overlap_weights_are_the_tokens_shared_in_strides_and_all_of_them(geometries, data, j):
    geometry = data.draw(geometries())
    stride = geometry.compression_stride
    first = j * geometry.selection_block_size // stride - (geometry.compression_block_size // stride - 1)

    by_block = {first + r: weight for r, weight in enumerate(blocks.overlap_weights(geometry))}

    shared = {
        i: len(tokens_of_compressed(i, geometry) & tokens_of_selection(j, geometry)) / stride
        for i in range(-geometry.compression_block_size, (j + 2) * geometry.selection_block_size // stride)
    }
    assert by_block == {i: weight for i, weight in shared.items() if weight}


def count_reads(length, geometry):
    """The tokens that one KV head reads for the last of `length` tokens, whichever blocks it chose beside its own."""
    if not length:
        return 0
    t = length - 1
    own = t // geometry.selection_block_size
    chosen = {own, *range(min(geometry.num_selected_blocks - 1, own))}
    selected = sum(s // geometry.selection_block_size in chosen for s in range(length))
    window = sum(t - geometry.window_size < s for s in range(length))
    return count_compressed(length, geometry) + selected + window


@given(data=st.data(), length=st.integers(0, 80))
def test_predicted_reads_count_every_token_that_is_read(geometries, data, length):
    geometry = data.draw(geometries(max_window=40))

    assert blocks.predicted_reads(length, geometry) == count_reads(length, geometry)


@pytest.mark.parametrize(("length", "reads"), [(8192, 2047), (16384, 2559), (32768, 3583), (65536, 5631)])
def test_predicted_reads_are_those_of_table_4(length, reads):
    assert blocks.predicted_reads(length, PAPER) == reads


@given(data=st.data(), start=st.integers(0, 40), count=st.integers(0, 12))
def test_a_steps_reads_are_the_sum_over_its_queries(geometries, data, start, count):
    geometry = data.draw(geometries())

    total = sum(count_reads(start + query + 1, geometry) for query in range(count))
    assert blocks.predicted_reads_of_step(start, count, geometry) == total
