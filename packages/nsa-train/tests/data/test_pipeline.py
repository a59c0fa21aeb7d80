"""Order is seeded, every row comes once per epoch, and a stopped stream goes on exactly where it was."""

import threading
import time

import pytest
import torch

from nsa_train.data.packing import PackedRows
from nsa_train.data.pipeline import BatchStream, ShuffledIndices, validation_batches
from nsa_train.data.sources import Document
from nsa_train.data.tokenizer import ByteTokenizer


@pytest.fixture
def rows() -> PackedRows:
    documents = [Document(str(number), bytes([number]) * (5 + number)) for number in range(20)]
    return PackedRows(documents, ByteTokenizer(), seq_len=8)


def test_every_index_comes_once_per_epoch_in_another_order() -> None:
    indices = ShuffledIndices(13, seed=3)
    epochs = [[next(indices) for _ in range(13)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(13)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_seeds_decide_the_order() -> None:
    def order(seed: int) -> list[int]:
        indices = ShuffledIndices(50, seed)
        return [next(indices) for _ in range(50)]

    assert order(0) == order(0) != order(1)
    # epoch 1 of seed 0 is not epoch 0 of seed 1
    indices = ShuffledIndices(50, 0)
    assert [next(indices) for _ in range(100)][50:] != order(1)


@pytest.mark.parametrize("stop", [0, 1, 3, 9, 30])
def test_a_stopped_stream_goes_on_exactly(rows: PackedRows, stop: int) -> None:
    def stream() -> BatchStream:
        return BatchStream(rows, batch_size=3, seed=1, prefetch=2)

    with stream() as straight:
        expected = [next(straight).input_ids for _ in range(stop + 20)][stop:]
    with stream() as first:
        for _ in range(stop):
            next(first)
        state = first.state_dict()
    with stream() as second:
        second.load_state_dict(state)
        assert all(torch.equal(next(second).input_ids, ids) for ids in expected)


def test_leaving_a_stream_ends_its_thread(rows: PackedRows) -> None:
    before = threading.active_count()
    for taken in (0, 1, 5):
        with BatchStream(rows, batch_size=3, seed=1, prefetch=3) as stream:
            for _ in range(taken):
                next(stream)
        deadline = time.monotonic() + 5
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() == before


def test_validation_rows_are_spread_fixed_and_distinct(rows: PackedRows) -> None:
    batches = validation_batches(rows, batch_size=2, most=3)
    again = validation_batches(rows, batch_size=2, most=3)
    assert len(batches) == 3
    assert all(torch.equal(one.input_ids, other.input_ids) for one, other in zip(batches, again, strict=True))
    chosen = torch.cat([batch.input_ids[0].view(2, 8) for batch in batches]).tolist()
    assert chosen[0] == rows[0].input_ids.tolist()
    assert chosen[3] == rows[len(rows) // 2].input_ids.tolist()


def test_a_small_validation_set_is_used_whole(rows: PackedRows) -> None:
    batches = validation_batches(rows, batch_size=4, most=1000)
    assert sum(batch.input_ids.numel() for batch in batches) == 8 * len(rows)
