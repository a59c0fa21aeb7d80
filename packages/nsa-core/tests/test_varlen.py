"""Packed batches: offsets, positions and compressed blocks against plain lists."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_core import BlockGeometry, InputError, blocks, varlen

LENGTHS = st.lists(st.integers(0, 9), max_size=6)


def cu_seqlens_of(lengths):
    return varlen.cu_seqlens_from_lengths(torch.tensor(lengths, dtype=torch.int32))


@given(lengths=LENGTHS)
def test_offsets_start_at_0_and_add_up_the_lengths(lengths):
    cu_seqlens = cu_seqlens_of(lengths)

    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [sum(lengths[:n]) for n in range(len(lengths) + 1)]


@given(lengths=LENGTHS, surplus=st.integers(0, 3))
def test_every_row_gets_its_sequence_and_rows_after_the_last_get_n(lengths, surplus):
    ids = varlen.sequence_ids(cu_seqlens_of(lengths), sum(lengths) + surplus)

    assert ids.dtype == torch.int64
    assert ids.tolist() == [n for n, length in enumerate(lengths) for _ in range(length)] + [len(lengths)] * surplus


@given(lengths=LENGTHS)
def test_positions_count_from_each_sequences_start(lengths):
    positions = varlen.positions_from_cu_seqlens(cu_seqlens_of(lengths), sum(lengths))

    assert positions.dtype == torch.int64
    assert positions.tolist() == [t for length in lengths for t in range(length)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(data=st.data(), lengths=st.lists(st.integers(0, 60), max_size=6))
def test_compressed_lengths_are_elementwise_the_block_counts(geometries, dtype, data, lengths):
    geometry = data.draw(geometries())

    counts = varlen.compressed_lengths(torch.tensor(lengths, dtype=dtype), geometry)

    assert counts.dtype == dtype
    assert counts.tolist() == [blocks.num_compressed_blocks(length, geometry) for length in lengths]


def test_compressed_lengths_floor_below_one_block():
    lengths = torch.tensor([[0, 1, 15, 16], [17, 31, 32, 48]])

    assert varlen.compressed_lengths(lengths, BlockGeometry()).tolist() == [[0, 0, 0, 0], [0, 0, 1, 2]]


@given(data=st.data(), lengths=st.lists(st.integers(0, 20), max_size=6))
def test_compressed_blocks_of_packed_sequences_stand_one_after_another(geometries, data, lengths):
    geometry = data.draw(geometries())

    cu_blocks = varlen.cu_blocks_from_cu_seqlens(cu_seqlens_of(lengths), geometry)

    counts = [blocks.num_compressed_blocks(length, geometry) for length in lengths]
    assert cu_blocks.dtype == torch.int32
    assert cu_blocks.tolist() == [sum(counts[:n]) for n in range(len(counts) + 1)]


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_packing_then_unpacking_gives_the_sequences_back(lengths):
    sequences = [torch.randn(length, 2, 3) for length in lengths]

    packed, cu_seqlens = varlen.pack(sequences)

    assert packed.shape == (1, sum(lengths), 2, 3)
    assert torch.equal(cu_seqlens, cu_seqlens_of(lengths))
    for sequence, unpacked in zip(sequences, varlen.unpack(packed, lengths), strict=True):
        assert torch.equal(sequence, unpacked)


def test_packing_nothing_is_refused():
    with pytest.raises(InputError, match=r"^sequences=\[\] has no tensor to take dtype, device and trailing sizes from; give one"):
        varlen.pack([])

    packed, cu_seqlens = varlen.pack([torch.zeros(0, 3)])
    assert packed.shape == (1, 0, 3)
    assert cu_seqlens.tolist() == [0, 0]


def test_nothing_reads_a_tensors_values():
    # a meta tensor has none: reading one raises
    cu_seqlens = varlen.cu_seqlens_from_lengths(torch.zeros(3, dtype=torch.int32, device="meta"))

    assert varlen.positions_from_cu_seqlens(cu_seqlens, 7).shape == (7,)
    assert varlen.cu_blocks_from_cu_seqlens(cu_seqlens, BlockGeometry()).shape == (4,)
