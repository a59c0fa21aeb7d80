"""The text of an exploration: its bytes, its token ids, and each token's piece of text."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa_train.data.tokenizer import ByteTokenizer, Tokenizer
from nsa_train.errors import ConfigError
from nsa_train.files import IrregularFileError, read_regular

MOST_TEXT = 16 * 2**20
"""Maximum bytes of a text: far more than any model has positions for."""
MOST_JOINED = 8
"""Maximum number of tokens that may share one or more characters."""
REPLACED = "\ufffd"
"""Replaces bytes that are not a character."""


def read_text(path: Path) -> bytes:
    """Return the bytes of a text.

    Raises:
        ConfigError: if it cannot be read, or is empty.
    """
    try:
        content = read_regular(path, MOST_TEXT)
    except (OSError, IrregularFileError) as error:
        raise ConfigError(f"--text={str(path)!r} cannot be read ({error}); name a text file") from None
    if not content:
        raise ConfigError(f"--text={str(path)!r} is empty (a model needs a first token); name a file with text")
    return content


def token_ids(content: bytes, tokenizer: Tokenizer, path: Path) -> Tensor:
    """Return int64 `(num_tokens,)` ids of a text, without separator.

    Raises:
        ConfigError: if it is not UTF-8 and the tokenizer reads characters, or if it gives no token.
    """
    if not isinstance(tokenizer, ByteTokenizer):
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--text={str(path)!r} is not UTF-8 at byte {error.start:,} (the model's tokenizer reads characters); convert it to UTF-8"
            ) from None
    ids = tokenizer.encode(content).long()
    if not len(ids):
        raise ConfigError(f"--text={str(path)!r} gives no token (its tokenizer drops all of it); name another text")
    return ids


def pieces_of(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    """Return the text of each token.

    If several tokens form whole characters only together, the first one has all of their text and the others have "". A token that is not text,
    such as a separator or a byte that is not a character, is its id in angle brackets.
    """
    found: list[str] = []
    before: list[int] = []
    while len(found) < len(ids):
        first = len(found)
        text, size = REPLACED, 0
        while REPLACED in text and size < MOST_JOINED:
            size += 1
            text = _continued(before, ids[first : first + size], tokenizer)
        if not text or REPLACED in text:
            # no later token may join it
            found, before = [*found, f"⟨{ids[first]}⟩"], []
            continue
        before = ids[first : first + size]
        found += [text, *[""] * (len(before) - 1)]
    return found


def _continued(before: list[int], here: list[int], tokenizer: Any) -> str:
    """Return the text of tokens that follow `before`, so that a space at their start is kept."""
    first, whole = (str(tokenizer.decode(torch.tensor(ids, dtype=torch.int64))) for ids in (before, before + here))
    return whole.removeprefix(first) if whole.startswith(first) else str(tokenizer.decode(torch.tensor(here)))
