"""Tokenizers: ids of nsa-train's, text that round-trips, and tokenizer.json in every folder."""

import json

import pytest
from transformers import AutoTokenizer

from nsa_core.errors import InputError
from nsa_transformers.tokenizer import (
    byte_alphabet,
    byte_tokenizer,
    id_tokenizer,
    json_tokenizer,
    merges_tokenizer,
    split_by_rank,
    tokenizer_of,
)

TEXT = " Naïve  — 東京 🙂\r\n\t<|endoftext|> it's 42 x"


@pytest.fixture
def reloaded(tmp_path):
    def save(tokenizer):
        tokenizer.save_pretrained(tmp_path)
        assert (tmp_path / "tokenizer.json").is_file()
        return AutoTokenizer.from_pretrained(tmp_path)

    return save


def test_bytes_are_their_own_ids(reloaded):
    tokenizer = reloaded(byte_tokenizer(512))
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer), tokenizer.model_max_length) == (256, 257, 258, 512)
    assert tokenizer.decode([65, 256, 257, 66], skip_special_tokens=True) == "AB"
    assert tokenizer.decode([0xE6, 65]) == bytes([0xE6, 65]).decode(errors="replace")


def test_prompts_are_padded_on_the_left(reloaded):
    batch = reloaded(byte_tokenizer())(["a", "bcd"], padding=True)
    assert batch["input_ids"] == [[257, 257, 97], [98, 99, 100]]
    assert batch["attention_mask"] == [[0, 0, 1], [1, 1, 1]]


RANKS = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"in": 257, b"ing": 258, b" th": 259, b"thing": 260}


def test_merges_by_rank_give_the_ids_of_the_ranks(reloaded):
    tokenizer = reloaded(merges_tokenizer(RANKS, separator=261, pad=262))
    assert tokenizer("thing")["input_ids"] == [260]
    assert tokenizer(" thin")["input_ids"] == [259, 257]
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert 261 not in tokenizer(TEXT)["input_ids"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (261, 262)
    assert split_by_rank(b"thing", RANKS) == [b"th", b"ing"]


def test_merges_are_those_of_tiktoken():
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed: pip install tiktoken")
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    other = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=RANKS, special_tokens={})
    tokenizer = merges_tokenizer(RANKS, separator=261, pad=262)
    for text in (TEXT, "the thinning thing  in the inn'the", "\n\n  things"):
        assert tokenizer(text)["input_ids"] == other.encode_ordinary(text)


def test_a_tokenizer_json_gets_a_pad(reloaded):
    source = byte_tokenizer().backend_tokenizer.to_str()
    tokenizer = reloaded(json_tokenizer(source, separator=256, pad=257))
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert json_tokenizer(source, separator=256, pad=258).pad_token == "<|pad-258|>"
    with pytest.raises(InputError, match="has id 258 in this tokenizer .the model knows it as 300"):
        json_tokenizer(source.replace("<|pad|>", "<|fill|>"), separator=256, pad=300)


def test_a_folder_without_a_tokenizer_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(InputError, match=rf"^{tmp_path} has no tokenizer.json; copy it from the folder that the model came from$"):
        tokenizer_of(tmp_path)


def test_a_tokenizer_that_needs_code_of_its_folder_is_refused(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    with pytest.raises(
        InputError, match=rf"^the tokenizer in {tmp_path} needs code of that folder, which is never run; use a tokenizer without"
    ):
        tokenizer_of(tmp_path)


def test_a_tokenizer_whose_longest_text_is_no_number_is_refused(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": "long"}))
    with pytest.raises(InputError, match="has no tokenizer that can be read .*; copy its tokenizer.json and tokenizer_config.json again"):
        tokenizer_of(tmp_path)


def test_ids_without_text_are_numbers(reloaded):
    tokenizer = reloaded(id_tokenizer(10, separator=8, pad=9))
    assert tokenizer("3 1 7")["input_ids"] == [3, 1, 7]
    assert tokenizer.decode([3, 1, 8], skip_special_tokens=True) == "3 1"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (8, 9)


def test_the_alphabet_spells_every_byte_once():
    letters = byte_alphabet()
    assert sorted(letters) == list(range(256))
    assert len(set(letters.values())) == 256
    assert (letters[ord("A")], letters[ord(" ")]) == ("A", "Ġ")
