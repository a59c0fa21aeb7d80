"""Which tensors count as ordinary, and which are not read."""

import pytest
import torch

from nsa_core.reference.containment import ORDINARY, are_ordinary, is_within, rows_within


@pytest.mark.parametrize("number", [2.0, -2.0, float("inf"), float("-inf"), float("nan")])
def test_one_number_beyond_the_limit_is_found_with_either_sign(number: float) -> None:
    x = torch.tensor([[1.0, -1.0], [number, 0.0]])
    assert not is_within(x, 1.5)
    assert rows_within(x, 1.5).tolist() == [True, False]
    assert is_within(x[:1], 1.0)


def test_nothing_is_within_every_limit() -> None:
    assert is_within(torch.empty(0, 3), 0.0)


def test_tensors_are_ordinary_up_to_the_limit_and_none_is_no_tensor() -> None:
    assert are_ordinary(torch.tensor([ORDINARY]), None)
    assert not are_ordinary(torch.zeros(1), torch.tensor([-2 * ORDINARY]))


def test_what_cannot_be_read_without_waiting_counts_as_not_ordinary() -> None:
    # the meta device stands for a GPU: reading there would raise
    assert not are_ordinary(torch.zeros(1), torch.zeros(1, device="meta"))
