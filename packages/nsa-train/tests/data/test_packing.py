"""Packing loses nothing, repeats nothing, and keeps documents apart."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_train.data.packing import IGNORED, PackedRows, Row, collate
from nsa_train.data.sources.base import Document
from nsa_train.data.tokenizer import PAD, SEPARATOR, ByteTokenizer

texts = st.lists(st.binary(max_size=40), min_size=1, max_size=12)
lengths = st.integers(2, 17)


def _rows(documents: list[bytes], seq_len: int, seed: int | None = None) -> PackedRows:
    named = [Document(str(index), text) for index, text in enumerate(documents)]
    return PackedRows(named, ByteTokenizer(), seq_len, seed)


@given(texts, lengths)
def test_no_token_is_lost_or_repeated(documents: list[bytes], seq_len: int) -> None:
    rows = _rows(documents, seq_len)
    ids = [token for index in range(len(rows)) for token in rows[index].input_ids.tolist()]
    stream = [token for text in documents for token in (*text, SEPARATOR)]
    assert ids[: len(stream)] == stream
    assert ids[len(stream) :] == [PAD] * (len(rows) * seq_len - len(stream))
    assert len(ids) - len(stream) < seq_len


@given(texts, lengths)
def test_every_token_but_the_first_of_a_document_is_a_label_once(documents: list[bytes], seq_len: int) -> None:
    rows = _rows(documents, seq_len)
    labels = [label for index in range(len(rows)) for label in rows[index].labels.tolist() if label != IGNORED]
    assert labels == [token for text in documents for token in (*text, SEPARATOR)[1:]]


@given(texts, lengths)
def test_labels_are_the_next_token_and_never_cross_documents(documents: list[bytes], seq_len: int) -> None:
    rows = _rows(documents, seq_len)
    stream = [(number, token) for number, text in enumerate(documents) for token in (*text, SEPARATOR)]
    for position, (here, following) in enumerate(pairwise(stream)):
        label = int(rows[position // seq_len].labels[position % seq_len])
        assert label == (following[1] if here[0] == following[0] else IGNORED)


@given(texts, lengths, st.integers(1, 4))
def test_sequences_of_a_batch_are_pieces_of_one_document(documents: list[bytes], seq_len: int, batch: int) -> None:
    rows = _rows(documents, seq_len)
    packed = collate([rows[index % len(rows)] for index in range(batch)])
    total = batch * seq_len
    assert packed.input_ids.shape == packed.labels.shape == packed.loss_mask.shape == (1, total)
    assert packed.cu_seqlens.tolist() == [0, *packed.lengths.cumsum(0).tolist()]
    assert int(packed.cu_seqlens[-1]) == total
    assert packed.cu_seqlens.dtype == packed.lengths.dtype == torch.int32
    assert packed.longest == max(int(mask.sum()) for mask in packed.loss_mask[0].split(packed.lengths.tolist()))
    assert packed.longest <= int(packed.lengths.max()) <= packed.max_seqlen == seq_len
    assert packed.num_targets == int(packed.loss_mask.sum()) == int((packed.labels != IGNORED).sum())
    for piece in packed.input_ids[0].split(packed.lengths.tolist()):
        ids = piece.tolist()
        assert SEPARATOR not in ids[:-1]
        assert set(ids) == {PAD} or PAD not in ids
        assert set(ids) == {PAD} or any(bytes(ids).rstrip() in text for text in documents if max(ids) < 256) or max(ids) == 256


@given(texts, lengths, st.integers(0, 5))
def test_a_seed_only_reorders_documents(documents: list[bytes], seq_len: int, seed: int) -> None:
    shuffled, plain = _rows(documents, seq_len, seed), _rows(documents, seq_len)
    assert sorted(shuffled.stream.tolist()) == sorted(plain.stream.tolist())
    assert np.array_equal(shuffled.stream, _rows(documents, seq_len, seed).stream)


def test_a_long_document_goes_on_in_the_next_row_and_keeps_its_label() -> None:
    rows = _rows([b"abcdef", b"gh"], 4)
    assert [rows[index].input_ids.tolist() for index in range(3)] == [
        [*b"abcd"],
        [*b"ef", SEPARATOR, *b"g"],
        [*b"h", SEPARATOR, PAD, PAD],
    ]
    assert [rows[index].labels.tolist() for index in range(3)] == [
        [*b"bcde"],
        [*b"f", SEPARATOR, IGNORED, *b"h"],
        [SEPARATOR, IGNORED, IGNORED, IGNORED],
    ]
    assert [rows[index].lengths for index in range(3)] == [[4], [3, 1], [2, 2]]


def test_a_sequence_whose_labels_are_at_its_end_is_as_long_as_they_reach() -> None:
    labels = np.full(10, IGNORED, np.int32)
    labels[[4, 8]] = 3
    assert collate([Row(np.zeros(10, np.int32), labels, [6, 4], 2)]).longest == 5
    labels[8] = IGNORED
    labels[9] = 1
    assert collate([Row(np.zeros(10, np.int32), labels, [1, 9], 2)]).longest == 9


def test_the_longest_sequence_ends_with_its_last_label() -> None:
    """Neither the separator nor padding has one, and the end of a row has one only where its document goes on."""
    rows = _rows([b"abcdef", b"g"], 7)
    assert collate([rows[0]]).longest == 6
    assert collate([rows[1]]).longest == 1
    assert collate([_rows([b"abcdef"], 6)[0]]).longest == 6


def test_a_batch_moves_with_its_host_figures() -> None:
    batch = collate([_rows([b"abcdef"], 4)[0]])
    moved = batch.to(torch.device("cpu"))
    assert (moved.longest, moved.num_targets, moved.max_seqlen) == (4, 4, 4)
    assert torch.equal(moved.input_ids, batch.input_ids)


def test_a_device_gets_what_a_model_reads() -> None:
    moved = collate([_rows([b"abcdef"], 4)[0]]).to(torch.device("meta"))
    assert all(tensor.device.type == "meta" for tensor in (moved.input_ids, moved.labels, moved.cu_seqlens))
    assert moved.loss_mask.device.type == moved.lengths.device.type == "cpu"
