"""Convert text to token ids and back. `byte`: one id per byte, so any file is readable and nothing is downloaded. `gpt2`: byte-pair encoding.

Ids of the byte tokenizer: 0 .. 255 are the bytes, 256 ends a document, 257 fills the last row of an epoch. The byte-pair encoding
comes from `tokenizers` (a tokenizer.json) or `tiktoken` (vocab.bpe and encoder.json, or its cache). It is lossless both ways: the text
`<|endoftext|>` in a document is encoded as ordinary text, never as the separator.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa_train.errors import DataError
from nsa_train.files import MOST_TOKENIZER, read_regular, refusal
from nsa_train.settings.data_table import IDS, DataTable

SEPARATOR = 256
"""Id of the separator, which follows the last byte of every document. The model learns to predict it, and generation stops at it."""
PAD = 257
"""Id of the padding that fills rows; it is never a target."""

GPT2_VOCAB_SIZE = 50_258
"""GPT-2's 50,257 ids, among which 50,256 is <|endoftext|>, the separator; plus 50,257, the pad."""

END_OF_TEXT = "<|endoftext|>"
Ids = NDArray[np.int32]
"""(num_tokens,) int32"""
PROBE = "The 3 quick foxes,\n\tnaïve & très-vite: 0.25 == x[12];".encode()
"""Text that different tokenizers of the same size split differently."""


class Tokenizer(Protocol):
    """The interface of a tokenizer that data and sampling use."""

    vocab_size: int
    separator: int
    pad: int

    def encode(self, text: bytes) -> Tensor:
        """Return int32 `(num_tokens,)` ids of `text`, without separator."""

    def encode_batch(self, texts: Sequence[bytes]) -> list[Ids]:
        """Return the ids of each of `texts`, followed by the separator."""

    def decode(self, ids: Tensor) -> str:
        """Return the text of `ids` `(num_tokens,)`; separator and pad are left out."""


def reads_alike(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers return the same ids for a text of words, numbers, accents and white space."""
    return torch.equal(one.encode(PROBE), other.encode(PROBE))


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
        return [np.append(np.frombuffer(text, np.uint8), np.int32(SEPARATOR)) for text in texts]

    def decode(self, ids: Tensor) -> str:
        """Return the text of `ids`; separator and pad are left out."""
        return bytes(index for index in ids.tolist() if index < SEPARATOR).decode("utf-8", errors="replace")


def build_tokenizer(data: DataTable) -> Tokenizer:
    """Return the tokenizer that `data` names.

    Raises:
        DataError: if its file is missing or invalid, or its package is not installed.
    """
    if data.tokenizer == "byte":
        return ByteTokenizer()
    if data.source not in IDS or data.tokenizer_path is not None:
        return open_bpe(data.tokenizer_path)
    # random ids need no file, only a range
    return BytePairTokenizer(
        lambda texts: [list(text.encode()) for text in texts],
        lambda ids: " ".join(map(str, ids)),
        separator=GPT2_VOCAB_SIZE - 2,
        num_ids=GPT2_VOCAB_SIZE - 1,
    )


def num_ids_of(data: DataTable) -> int:
    """Return how many ids the tokenizer of `data` has, separator and pad included; reads its file if it has its own.

    If that file is missing, the result is GPT-2's number: opening the data reports the file, with everything else that is missing.
    """
    if data.tokenizer == "byte":
        return ByteTokenizer.vocab_size
    if data.tokenizer_path is None or lacks_file(data):
        return GPT2_VOCAB_SIZE
    return build_tokenizer(data).vocab_size


def lacks_file(data: DataTable) -> bool:
    """Return True if `data.tokenizer_path` names a file that is not there, so that the number of ids is unknown."""
    return data.tokenizer_path is not None and not Path(data.tokenizer_path).is_file()


class BytePairTokenizer:
    """Byte-pair encoding with a separator among its ids, and one more id, the pad."""

    def __init__(
        self, encode: Callable[[list[str]], list[list[int]]], decode: Callable[[list[int]], str], *, separator: int, num_ids: int
    ) -> None:
        """`encode` takes texts without special handling; ids are below `num_ids`."""
        self._encode, self._decode = encode, decode
        self.separator, self.pad, self.vocab_size = separator, num_ids, num_ids + 1

    def encode(self, text: bytes) -> Tensor:
        """Return int32 `(num_tokens,)` ids of UTF-8 `text`, without separator."""
        # on the CPU, even while a model is built on the meta device
        return torch.tensor(self._encode([text.decode("utf-8")])[0], dtype=torch.int32, device="cpu")

    def encode_batch(self, texts: Sequence[bytes]) -> list[Ids]:
        """Return the ids of each of `texts`, followed by the separator."""
        found = self._encode([text.decode("utf-8") for text in texts]) if texts else []
        return [np.array([*ids, self.separator], np.int32) for ids in found]

    def decode(self, ids: Tensor) -> str:
        """Return the text of `ids`; separator, pad and unused ids are left out."""
        return self._decode([index for index in ids.tolist() if index < self.pad and index != self.separator])


def open_bpe(path: str | None) -> BytePairTokenizer:
    """Return the tokenizer of a local file, or GPT-2's from tiktoken's cache or download.

    Raises:
        DataError: if there is none; the message names a file that would work.
    """
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise DataError(f"data.tokenizer_path={path!r} is not a file (a tokenizer.json, or vocab.bpe with encoder.json); name one")
        if file.suffix == ".json" and file.name != "encoder.json":
            return _of_json(file)
    encoding = _encoding(path)
    return BytePairTokenizer(
        lambda texts: [encoding.encode_ordinary(text) for text in texts],
        lambda ids: str(encoding.decode(ids)),
        separator=encoding.eot_token,
        num_ids=encoding.n_vocab,
    )


def _of_json(file: Path) -> BytePairTokenizer:
    tokenizers = _imported("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(read_regular(file, MOST_TOKENIZER).decode("utf-8"))
    # tokenizers raises a bare Exception for an invalid file
    except Exception as error:  # noqa: BLE001
        raise DataError(f"data.tokenizer_path={str(file)!r} is no tokenizer ({str(error)[:120]}); name GPT-2's tokenizer.json") from None
    # a special token written in a document is ordinary text
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    separator = tokenizer.token_to_id(END_OF_TEXT)
    if separator is None:
        raise DataError(
            f"data.tokenizer_path={str(file)!r} has no token {END_OF_TEXT!r} (it separates documents); name GPT-2's tokenizer.json"
        )
    last = max(tokenizer.get_vocab(with_added_tokens=True).values())
    found = BytePairTokenizer(
        lambda texts: [found.ids for found in tokenizer.encode_batch(texts, add_special_tokens=False)],
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        separator=separator,
        num_ids=last if _is_pad(tokenizer, last) else last + 1,
    )
    _require_lossless(found, file)
    return found


def _is_pad(tokenizer: Any, last: int) -> bool:
    """Return whether the last id is the pad that an export gave the tokenizer of its run; nsa_transformers.tokenizer names it."""
    token = tokenizer.get_added_tokens_decoder().get(last)
    return token is not None and bool(token.special) and token.content in ("<|pad|>", f"<|pad-{last}|>")


def _require_lossless(tokenizer: BytePairTokenizer, file: Path) -> None:
    probe = f" Naïve  {END_OF_TEXT}\n\t— 東京 🙂\r\n"
    ids = tokenizer.encode(probe.encode())
    back = tokenizer.decode(ids)
    if back != probe or tokenizer.separator in ids.tolist():
        raise DataError(
            f"data.tokenizer_path={str(file)!r} changes text ({probe!r} comes back as {back!r}; a document must come back whole); "
            "name a byte-level one, such as GPT-2's tokenizer.json"
        )


def ranks_of(path: str | None) -> dict[bytes, int]:
    """Return token -> id of GPT-2's merges: those of a local vocab.bpe with encoder.json, or tiktoken's.

    Raises:
        DataError: as `open_bpe`.
    """
    ranks: dict[bytes, int] = _encoding(path)._mergeable_ranks
    return ranks


def _encoding(path: str | None) -> Any:
    """Return tiktoken's encoding by vocab.bpe and encoder.json in the folder of `path`; for None GPT-2's, from its cache or download."""
    tiktoken = _imported("tiktoken")
    if path is None:
        try:
            return tiktoken.get_encoding("gpt2")
        # requests' errors are OSErrors; a damaged cache is a ValueError
        except (OSError, ValueError) as error:
            raise DataError(
                f"data.tokenizer='gpt2' is neither cached nor to be downloaded ({type(error).__name__}); "
                "use --set data.tokenizer_path=tokenizer.json "
                "(on a machine with a network: curl -LO https://huggingface.co/openai-community/gpt2/resolve/main/tokenizer.json), "
                "or --set data.tokenizer=byte"
            ) from None
    file = Path(path)
    merges, encoder = file.with_name("vocab.bpe"), file.with_name("encoder.json")
    for part in (merges, encoder):
        # tiktoken would wait on a pipe
        if problem := refusal(part, MOST_TOKENIZER):
            raise DataError(
                f"data.tokenizer_path={str(file)!r}: {part} cannot be read ({problem}); name vocab.bpe with encoder.json in the same folder"
            )
    try:
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks

        ranks = data_gym_to_mergeable_bpe_ranks(str(merges), str(encoder))
    except (OSError, ValueError, AssertionError, LookupError) as error:
        raise DataError(
            f"data.tokenizer_path={str(file)!r} cannot be read as GPT-2's merges ({type(error).__name__}: {str(error)[:120]}); "
            "name vocab.bpe with encoder.json in the same folder, or a tokenizer.json"
        ) from None
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    separator = len(ranks)
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: separator})


def _imported(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise DataError(
            f"data.tokenizer='gpt2' needs {package}, which is not installed; use pip install {package}, or --set data.tokenizer=byte"
        ) from None
