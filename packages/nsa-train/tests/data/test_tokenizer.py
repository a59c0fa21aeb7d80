"""Bytes to ids and back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_train.data.tokenizer import PAD, SEPARATOR, ByteTokenizer


@given(st.binary(max_size=200))
def test_any_bytes_are_one_id_each(text: bytes) -> None:
    ids = ByteTokenizer().encode(text)
    assert bytes(ids.tolist()) == text
    assert ids.dtype == torch.int32


@given(st.text(max_size=100))
def test_text_comes_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text.encode())) == text


def test_specials_are_left_out_of_text_and_stand_above_the_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert (SEPARATOR, PAD, tokenizer.vocab_size) == (256, 257, 258)
    assert tokenizer.decode(torch.tensor([72, SEPARATOR, 105, PAD])) == "Hi"


def test_bytes_that_are_not_utf8_show_as_replacement() -> None:
    assert ByteTokenizer().decode(torch.tensor([72, 255])) == "H\ufffd"
