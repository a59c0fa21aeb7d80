"""The reference choice of blocks where rows of several packed sequences share one span of compressed blocks."""

import math

import torch

from nsa_core import BlockGeometry, select_blocks
from nsa_core.reference.padded import MAX_PADDING
from nsa_core.varlen import cu_blocks_from_cu_seqlens, cu_seqlens_from_lengths

ONE_LOCAL = BlockGeometry(4, 2, 4, num_selected_blocks=3, num_initial_blocks=0, num_local_blocks=1, window_size=4)


def test_no_weight_is_counted_of_a_block_that_a_packed_sequence_does_not_have() -> None:
    lengths = [25, 1, 0, 1, 2, 1, 1, 1, 13]
    # so few long ones that they are not made a batch
    assert max(lengths) * len(lengths) > MAX_PADDING * sum(lengths)
    cu_seqlens = cu_seqlens_from_lengths(torch.tensor(lengths, dtype=torch.int32))
    first = int(cu_blocks_from_cu_seqlens(cu_seqlens, ONE_LOCAL)[-2])
    # weights of the last sequence's 5 blocks, for its last token: the first of selection block 3
    weights = torch.tensor([1.25, 1e-9, 1.3, 1e-9, 1.0])
    k_cmp = torch.zeros(1, first + 5, 1, 2)
    k_cmp[0, first:, 0, 0] = weights.log()
    q = torch.zeros(1, sum(lengths), 1, 2)
    q[..., 0] = 1.0
    chosen = select_blocks(q, k_cmp, torch.full((1, sum(lengths), 1), math.log(10.0)), geometry=ONE_LOCAL, scale=1.0, cu_seqlens=cu_seqlens)
    # importance 2.5, 2.6 and 2.0; a sixth block, which begins in selection block 2, would lift that to 3.0
    assert chosen[0, -1, 0].tolist() == [0, 1, 3]


def test_no_weight_exceeds_1_though_a_difference_of_huge_scores_may_round_to_more_than_0() -> None:
    # blocks of single tokens, so that a weight is an importance; own = 3 leaves one of 0, 1, 2 to scores
    geometry = BlockGeometry(1, 1, 1, num_selected_blocks=2, num_initial_blocks=0, num_local_blocks=1, window_size=1)
    k_cmp = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]).view(1, 4, 1, 2)
    # the first head sees block 0 alone, the other two see block 1
    q = 100 * torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]).expand(1, 4, 3, 2)
    lse = torch.tensor([70.0, 100.0, 100.0]).expand(1, 4, 3)
    assert select_blocks(q, k_cmp, lse, geometry=geometry, scale=1.0)[0, 3, 0].tolist() == [1, 3]
