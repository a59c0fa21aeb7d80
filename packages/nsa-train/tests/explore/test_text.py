"""The pieces of a text add up to it, and a character of several tokens stands with the first one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa_train.data.tokenizer import ByteTokenizer
from nsa_train.errors import ConfigError
from nsa_train.explore.text import pieces_of, read_text, token_ids


class Words:
    """Words as tokens, of which decoding drops the space at the begin of a text, as SentencePiece does."""

    words = ("▁the", "▁", "cat", "▁cat")

    def decode(self, ids: torch.Tensor) -> str:
        return "".join(self.words[index] for index in ids.tolist()).replace("▁", " ").removeprefix(" ")


def test_pieces_add_up_to_the_text() -> None:
    text = "Naïve\t東京 🙂\r\n</script> end"
    pieces = pieces_of(list(text.encode()), ByteTokenizer())
    assert "".join(pieces) == text
    assert pieces[:5] == ["N", "a", "ï", "", "v"]
    assert pieces[text.encode().index("🙂".encode()) :][:4] == ["🙂", "", "", ""]


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        (b"a\xffb", ["a", "⟨255⟩", "b"]),
        (b"\xe6\x9d", ["⟨230⟩", "⟨157⟩"]),
        (b"\xe6a", ["⟨230⟩", "a"]),
        (b"\x9d\xe6\x9d\xb1", ["⟨157⟩", "東", "", ""]),
    ],
)
def test_a_byte_that_is_no_character_is_its_id(content: bytes, pieces: list[str]) -> None:
    assert pieces_of(list(content), ByteTokenizer()) == pieces


def test_a_separator_is_its_id() -> None:
    assert pieces_of([97, 256, 98, 257], ByteTokenizer()) == ["a", "⟨256⟩", "b", "⟨257⟩"]


def test_a_space_at_the_begin_of_a_token_is_kept() -> None:
    assert pieces_of([0, 3, 2, 0], Words()) == ["the", " cat", "cat", " the"]  # type: ignore[arg-type]


def test_a_text_that_cannot_be_read_is_refused(tmp_path: Path, put_irregular: Callable[[str, Path], None]) -> None:
    with pytest.raises(ConfigError, match="--text='.*nowhere' cannot be read .*name a text file"):
        read_text(tmp_path / "nowhere")
    put_irregular("pipe", tmp_path / "pipe")
    with pytest.raises(ConfigError, match="named pipe"):
        read_text(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="is empty .*name a file with text"):
        read_text(tmp_path / "empty")


def test_bytes_that_are_no_characters_are_refused_where_the_tokenizer_reads_characters() -> None:
    tokenizer = ByteTokenizer()
    assert token_ids(b"ab\xff", tokenizer, Path("t")).tolist() == [97, 98, 255]
    with pytest.raises(ConfigError, match="--text='t' is not UTF-8 at byte 2 .*convert it"):
        token_ids(b"ab\xff", Words(), Path("t"))  # type: ignore[arg-type]
