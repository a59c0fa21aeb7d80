"""Counts of pairs of query and key, against counting one by one."""

from hypothesis import given
from hypothesis import strategies as st

from nsa_core import BlockGeometry
from nsa_core.blocks import causal_pairs, compressed_pairs, selected_pairs, window_pairs
from nsa_core.reference import naive


@st.composite
def geometries(draw):
    stride = draw(st.integers(1, 5))
    size = stride * draw(st.integers(1, 3))
    selection = stride * draw(st.integers(size // stride, 6))
    initial, local = draw(st.integers(0, 2)), draw(st.integers(1, 2))
    count = draw(st.integers(initial + local, 6))
    return BlockGeometry(size, stride, selection, count, initial, local, draw(st.integers(1, 20)))


@given(geometries(), st.integers(0, 90))
def test_counts_equal_those_of_a_loop(geometry, length):
    size = geometry.selection_block_size
    compressed = selected = window = 0
    for t in range(length):
        compressed += naive.num_visible(t, geometry)
        own = t // size
        # any choice will do: the query's own block and others that are full
        chosen = range(own, own - min(geometry.num_selected_blocks, own + 1), -1)
        selected += sum(s <= t for block in chosen for s in range(block * size, (block + 1) * size))
        window += sum(t - geometry.window_size < s <= t for s in range(t + 1))
    assert compressed_pairs(length, geometry) == compressed
    assert selected_pairs(length, geometry) == selected
    assert window_pairs(length, geometry) == window
    assert causal_pairs(length) == sum(range(1, length + 1))


@given(geometries(), st.integers(1, 60))
def test_the_three_branches_read_what_table_4_predicts(geometry, length):
    pairs = sum(count(length, geometry) for count in (compressed_pairs, selected_pairs, window_pairs))
    assert pairs == sum(naive.predicted_reads(t + 1, geometry) for t in range(length))
