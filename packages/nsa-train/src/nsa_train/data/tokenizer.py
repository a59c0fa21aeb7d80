"""Text to token ids and back. `byte`: one id per byte, so any file is readable and nothing is downloaded. `gpt2`: bpe.py.

Ids of the byte tokenizer: 0 .. 255 are the bytes, 256 ends a document, 257 fills the last row of an epoch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa_train.data_table import IDS, DataTable

SEPARATOR = 256
"""Follows the last byte of every document; the model learns to predict it, and generation stops at it."""
PAD = 257
"""Fills rows; never a target."""

GPT2_VOCAB_SIZE = 50_258
"""GPT-2's 50,257 ids, of which 50,256 is <|endoftext|>, the separator; and 50,257, the pad."""

Ids = NDArray[np.int32]
"""(num_tokens,) int32"""


class Tokenizer(Protocol):
    """What data and sampling need of a tokenizer."""

    vocab_size: int
    separator: int
    pad: int

    def encode(self, text: bytes) -> Tensor:
        """Return int32 `(num_tokens,)` ids of `text`, without separator."""

    def encode_batch(self, texts: Sequence[bytes]) -> list[Ids]:
        """Return the ids of each of `texts`, followed by the separator."""

    def decode(self, ids: Tensor) -> str:
        """Return the text of `ids` `(num_tokens,)`; separator and pad are left out."""


class ByteTokenizer:
    """One token per byte. Takes any bytes; on the way back, bytes that are not UTF-8 show as U+FFFD."""

    vocab_size = 258
    separator = SEPARATOR
    pad = PAD

    def encode(self, text: bytes) -> Tensor:
        """Return int32 `(len(text),)` ids."""
        return torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int32))

    def encode_batch(self, texts: Sequence[bytes]) -> list[Ids]:
        """Return the ids of each of `texts`, followed by the separator."""
        return [_with_separator(np.frombuffer(text, np.uint8), SEPARATOR) for text in texts]

    def decode(self, ids: Tensor) -> str:
        """Return the text of `ids`; separator and pad are left out."""
        return bytes(index for index in ids.tolist() if index < SEPARATOR).decode("utf-8", errors="replace")


def _with_separator(ids: NDArray[np.uint8], separator: int) -> Ids:
    found = np.empty(len(ids) + 1, np.int32)
    found[:-1] = ids
    found[-1] = separator
    return found


def build_tokenizer(data: DataTable) -> Tokenizer:
    """Return the tokenizer that `data` names.

    Raises:
        DataError: when its file is missing or will not do, or its package is not installed.
    """
    if data.tokenizer == "byte":
        return ByteTokenizer()
    from nsa_train.data.bpe import open_bpe, unopened_gpt2

    # random ids need no file, only a range
    return unopened_gpt2() if data.source in IDS and data.tokenizer_path is None else open_bpe(data.tokenizer_path)


def num_ids_of(data: DataTable) -> int:
    """Return how many ids the tokenizer of `data` has, separator and pad included; reads its file where it has one of its own.

    GPT-2's where that file is missing, which whoever opens the data says: preflight names all that is missing at once.
    """
    if data.tokenizer == "byte":
        return ByteTokenizer.vocab_size
    if data.tokenizer_path is None or not Path(data.tokenizer_path).is_file():
        return GPT2_VOCAB_SIZE
    return build_tokenizer(data).vocab_size
