"""Packed sequences as a padded batch: there and back, and where that is not done."""

import pytest
import torch
from torch import Tensor

from nsa_core.backends.base import Keys, Queries
from nsa_core.reference import padded
from nsa_core.reference.padded import PaddedBatch, padded_batch
from nsa_core.testing.inputs import SMALL
from nsa_core.varlen import cu_blocks_from_cu_seqlens, cu_seqlens_from_lengths


def batch_of(*lengths: int, device: str = "cpu", bound: int | None = None, of_blocks: bool = False) -> PaddedBatch | None:
    """Return the padded batch of sequences of `lengths`, H = 2, D = 4, float32; `bound`: the host bound, where not the longest.

    `of_blocks`: the keys are compressed blocks.
    """
    cu_seqlens = cu_seqlens_from_lengths(torch.tensor(lengths, dtype=torch.int32)).to(device)
    longest = max(lengths) if bound is None else bound
    x = torch.zeros(1, sum(lengths), 2, 4, device=device)
    offsets = cu_blocks_from_cu_seqlens(cu_seqlens, SMALL) if of_blocks else cu_seqlens
    return padded_batch(Queries(x, longest, cu_seqlens), Keys(x, x, longest, offsets))


def spread(batch: PaddedBatch | None, packed: Tensor) -> Tensor:
    assert batch is not None
    return batch.queries.spread(packed)


def test_sequences_stand_side_by_side_with_zeros_after_their_ends() -> None:
    packed = torch.arange(1, 7).view(1, 6, 1)
    assert spread(batch_of(3, 0, 1, 2), packed).squeeze(-1).tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0], [5, 6, 0]]


def test_equal_sequences_are_not_copied() -> None:
    packed = torch.randn(1, 24, 2, 4)
    batch = batch_of(8, 8, 8)
    there = spread(batch, packed)
    assert there.shape == (3, 8, 2, 4)
    assert there.data_ptr() == packed.data_ptr()
    assert batch is not None
    assert torch.equal(batch.queries.collect(there, 24), packed)


@pytest.mark.parametrize("lengths", [(20, 20), (20, 3, 17)], ids=["equal", "padded"])
def test_compressed_blocks_go_there_and_back_and_surplus_rows_come_back_as_zeros(lengths: tuple[int, ...]) -> None:
    batch = batch_of(*lengths, of_blocks=True)
    assert batch is not None
    count = int(cu_blocks_from_cu_seqlens(cu_seqlens_from_lengths(torch.tensor(lengths)), SMALL)[-1])
    packed = torch.randn(1, count + 2, 2, 4)
    packed[:, count:] = float("nan")
    back = batch.keys.collect(batch.keys.spread(packed), count + 2)
    assert torch.equal(back[:, :count], packed[:, :count])
    assert not back[:, count:].any()


def test_the_longest_is_read_where_it_can_be_so_that_a_loose_bound_costs_nothing() -> None:
    batch = batch_of(8, 8, bound=1000)
    assert batch is not None
    assert (batch.queries.length, batch.keys.length) == (8, 8)


def test_sequences_are_padded_up_to_four_times_their_rows() -> None:
    assert padded.MAX_PADDING == 4
    # 4 rows of 8 are four times 8 rows; a fifth sequence is more
    assert batch_of(8, 0, 0, 0) is not None
    assert batch_of(8, 0, 0, 0, 0) is None


def test_copies_beyond_the_scratch_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    # N * L * H * D * 4 bytes
    size = 2 * 8 * 2 * 4 * 4
    monkeypatch.setattr(padded, "PADDED_BYTES", size)
    assert batch_of(8, 7) is not None
    monkeypatch.setattr(padded, "PADDED_BYTES", size - 1)
    assert batch_of(8, 7) is None
    assert batch_of(8, 8) is not None


def test_where_nothing_can_be_read_only_a_full_bound_says_that_all_are_equal() -> None:
    assert batch_of(8, 8, device="meta") is not None
    assert batch_of(8, 7, device="meta") is None
    assert batch_of(8, 8, device="meta", bound=9) is None


def test_a_batch_without_tokens_is_left_alone() -> None:
    assert batch_of(0, 0) is None
