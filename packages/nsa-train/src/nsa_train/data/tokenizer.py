"""Text to token ids and back. `byte`: one id per byte, so any file is readable and nothing is downloaded.

Ids of the byte tokenizer: 0 .. 255 are the bytes, 256 ends a document, 257 fills the last row of an epoch.
"""

from typing import Protocol

import torch
from torch import Tensor

SEPARATOR = 256
"""Follows the last byte of every document; the model learns to predict it, and generation stops at it."""
PAD = 257
"""Fills rows; never a target."""


class Tokenizer(Protocol):
    """What data and sampling need of a tokenizer."""

    vocab_size: int
    separator: int
    pad: int

    def encode(self, text: bytes) -> Tensor:
        """Return int32 `(num_tokens,)` ids of `text`, without separator."""

    def decode(self, ids: Tensor) -> str:
        """Return the text of `ids` `(num_tokens,)`; separator and pad are left out."""


class ByteTokenizer:
    """One token per byte. Takes any bytes; on the way back, bytes that are not UTF-8 show as U+FFFD."""

    vocab_size = 258
    separator = SEPARATOR
    pad = PAD

    def encode(self, text: bytes) -> Tensor:
        """Return int32 `(len(text),)` ids."""
        if not text:
            return torch.empty(0, dtype=torch.int32)
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int32)

    def decode(self, ids: Tensor) -> str:
        """Return the text of `ids`; separator and pad are left out."""
        return bytes(index for index in ids.tolist() if index < SEPARATOR).decode("utf-8", errors="replace")


TOKENIZERS: dict[str, type[ByteTokenizer]] = {"byte": ByteTokenizer}
"""By the names that `data.tokenizer` allows."""
