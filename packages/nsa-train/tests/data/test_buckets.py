"""Unpacked batches: a piece of one document per row, similar lengths together, nothing lost."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_train.data.dataset import open_dataset
from nsa_train.data.packing import IGNORED, BucketedRows, PackedRows, buckets_up_to
from nsa_train.data.sources.base import Document
from nsa_train.data.stream import open_training_stream
from nsa_train.data.tokenizer import PAD, SEPARATOR, ByteTokenizer
from nsa_train.errors import ConfigError, DataError
from nsa_train.settings.config import RunConfig

texts = st.lists(st.binary(max_size=150).map(lambda text: text.replace(b"\xff", b"x")), min_size=1, max_size=12)


def _rows(documents: list[bytes], batch_size: int, seq_len: int) -> BucketedRows:
    named = [Document(str(number), text) for number, text in enumerate(documents)]
    return BucketedRows(PackedRows(named, ByteTokenizer(), seq_len), batch_size=batch_size, seed=1)


@given(texts, st.integers(1, 4), st.sampled_from([16, 20, 64]))
def test_an_epoch_holds_every_piece_once(documents: list[bytes], batch_size: int, seq_len: int) -> None:
    rows = _rows(documents, batch_size, seq_len)
    pieces = [
        tuple(stream[at : at + seq_len]) for text in documents for stream in [[*text, SEPARATOR]] for at in range(0, len(stream), seq_len)
    ]
    for epoch in range(2):
        first = epoch * rows.batches_per_epoch * batch_size
        drawn = [rows.at(first + number) for number in range(rows.batches_per_epoch * batch_size)]
        found = Counter(tuple(index for index in row.input_ids.tolist() if index != PAD) for row in drawn)
        del found[()]
        assert found == Counter(pieces)
        assert sum(row.ended for row in drawn) == len(documents)


@given(texts, st.integers(1, 4))
def test_a_batch_is_padded_to_one_bucket_and_its_rows_hold_one_sequence(documents: list[bytes], batch_size: int) -> None:
    rows = _rows(documents, batch_size, 64)
    for batch in range(rows.batches_per_epoch):
        drawn = [rows.at(batch * batch_size + place) for place in range(batch_size)]
        [size] = {len(row.input_ids) for row in drawn}
        assert size in (16, 32, 64)
        assert max(row.lengths[0] if row.input_ids[0] != PAD else 0 for row in drawn) <= size
        for row in drawn:
            assert sum(row.lengths) == size
            assert len(row.lengths) <= 2
            labels = row.labels[row.labels != IGNORED].tolist()
            assert labels[: len(row.input_ids) - 1] == row.input_ids[1 : len(labels) + 1].tolist()[: len(labels)] or len(labels) == size


def test_a_piece_that_goes_on_keeps_its_last_label() -> None:
    rows = _rows([bytes(range(40))], 1, 16)
    drawn = sorted((rows.at(number) for number in range(3)), key=lambda row: int(row.input_ids[0]))
    assert [int(row.labels[15]) for row in drawn] == [16, 32, IGNORED]
    assert [row.lengths for row in drawn] == [[16], [16], [9, 7]]


def test_bucketing_saves_padding(corpora, data_config: Callable[..., RunConfig]) -> None:
    config = data_config(*corpora.walks["buckets"], "train.seq_len=256", "train.batch_size=4")
    with open_training_stream(config) as stream:
        batches = [next(stream) for _ in range(60)]
    ids = np.concatenate([batch.input_ids.numpy()[0] for batch in batches])
    assert {batch.max_seqlen for batch in batches} > {64, 256}
    # one length for all would be padding by more than half
    assert (ids == PAD).mean() < 0.35


def test_the_buckets_double_up_to_the_row() -> None:
    assert buckets_up_to(100).tolist() == [16, 32, 64, 100]
    assert buckets_up_to(64).tolist() == [16, 32, 64]
    assert buckets_up_to(7).tolist() == [7]


def test_bucketing_asks_for_a_corpus_in_memory(corpora, data_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(DataError, match=r"data\.packing=false needs the corpus in memory .*data\.in_memory_mib=1$"):
        open_dataset(data_config(*corpora.walks["buckets"], "data.in_memory_mib=0"))
    with pytest.raises(ConfigError, match=r"data\.packing=false does not work with data\.source='mix'"):
        data_config(*corpora.walks["blocks of a mix"], "data.packing=false")
