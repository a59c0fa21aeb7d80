"""Orders: every number once per epoch, from a seed alone, at any position; turns by weight."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_train.data import order
from nsa_train.data.order import SeededOrder, Turns


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 13, 64, 100, 257])
def test_every_number_comes_once_per_epoch(count: int, is_listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_LISTED", 2**22 if is_listed else 0)
    numbers = SeededOrder(count, seed=3)
    epochs = [[numbers.at(epoch * count + offset) for offset in range(count)] for epoch in range(3)]
    assert all(sorted(place.item for place in epoch) == list(range(count)) for epoch in epochs)
    assert [place.epoch for epoch in epochs for place in epoch] == [number // count for number in range(3 * count)]
    if count > 12:
        assert epochs[0] != [place._replace(epoch=0) for place in epochs[1]]


@pytest.mark.parametrize("is_listed", [True, False])
def test_seeds_names_and_epochs_decide_the_order(is_listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_LISTED", 2**22 if is_listed else 0)

    def drawn(seed: int, name: str = "", epoch: int = 0) -> tuple[int, ...]:
        numbers = SeededOrder(50, seed, name)
        return tuple(numbers.at(50 * epoch + offset).item for offset in range(50))

    assert drawn(0) == drawn(0)
    # epoch 1 of seed 0 is not epoch 0 of seed 1
    assert len({drawn(0), drawn(1), drawn(0, "other"), drawn(0, epoch=1), drawn(1, epoch=1)}) == 5


def test_a_computed_order_leaves_no_two_neighbours_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_LISTED", 0)
    numbers = SeededOrder(10_000, seed=1)
    drawn = [numbers.at(offset).item for offset in range(10_000)]
    neighbours = sum(abs(one - other) == 1 for one, other in zip(drawn, drawn[1:], strict=False))
    assert neighbours < 10
    # halves of the order hold equal shares of small and large numbers
    assert abs(sum(number < 5000 for number in drawn[:5000]) - 2500) < 200


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 3))
def test_turns_come_by_weight_and_count_each_part_from_zero(weights: list[int], seed: int) -> None:
    turns, total = Turns(weights, seed), sum(weights)
    taken = [turns.at(position) for position in range(3 * total)]
    for part, weight in enumerate(weights):
        assert [turn for owner, turn in taken if owner == part] == list(range(3 * weight))
        assert sum(owner == part for owner, _ in taken[:total]) == weight


def test_turns_of_many_parts_are_counted_quickly() -> None:
    started = time.process_time()
    turns = Turns([1000] * 50, 0)
    assert sorted(turns.at(position) for position in range(50_000)) == [(part, turn) for part in range(50) for turn in range(1000)]
    assert time.process_time() - started < 5
