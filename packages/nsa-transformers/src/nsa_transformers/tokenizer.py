"""Convert tokenizers of nsa-train's checkpoints to `tokenizer.json`: bytes, byte-pair encoding, and ids without text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nsa_core.errors import InputError

TOKENIZER = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
NUM_BYTES = 256


def byte_tokenizer(max_length: int | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with an id per byte: 0 .. 255 the bytes, 256 the end of a text, 257 the pad."""
    alphabet = byte_alphabet()
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in alphabet.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer, separator=NUM_BYTES, pad=NUM_BYTES + 1, max_length=max_length)


def merges_tokenizer(ranks: Mapping[bytes, int], *, separator: int, pad: int, max_length: int | None = None) -> PreTrainedTokenizerFast:
    """Return a byte-pair tokenizer that splits text by GPT-2's pattern. `ranks` are the ids of its tokens, and the order of its merges."""
    alphabet = byte_alphabet()

    def spelled(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    merged = (split_by_rank(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
    merges = [(spelled(left), spelled(right)) for left, right in merged]
    tokenizer = Tokenizer(models.BPE({spelled(token): index for token, index in ranks.items()}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer, separator=separator, pad=pad, max_length=max_length)


def json_tokenizer(text: str, *, separator: int, pad: int, max_length: int | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a tokenizer.json with the content `text`, and add a padding token."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return wrapped(tokenizer, separator=separator, pad=pad, max_length=max_length)


def id_tokenizer(num_ids: int, *, separator: int, pad: int, max_length: int | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of ids without text, written as numbers: "17 4 23"."""
    names = {str(index): index for index in range(num_ids) if index not in (separator, pad)}
    tokenizer = Tokenizer(models.WordLevel({**names, END_OF_TEXT: separator, PAD: pad}, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrapped(tokenizer, separator=separator, pad=pad, max_length=max_length)


def tokenizer_of(folder: Path) -> Any:
    """Return the tokenizer of the model in `folder`; no code of the folder is run.

    Raises:
        InputError: if there is no tokenizer, it cannot be read, or it needs code of the folder.
    """
    try:
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # a setting of tokenizer_config.json that is no number is not read before
        found("")
    # for a file that is no tokenizer the reader may raise any error; the library tokenizers raises a bare Exception
    except Exception as error:  # noqa: BLE001
        if not (folder / TOKENIZER).is_file():
            raise InputError(f"{folder} has no {TOKENIZER}; copy it from the folder that the model came from") from None
        if asks_for_code(error):
            raise InputError(
                f"the tokenizer in {folder} needs code of that folder, which is never run; use a tokenizer without code"
            ) from None
        said = " ".join(str(error).split())
        raise InputError(
            f"{folder} has no tokenizer that can be read ({said:.200}); copy its tokenizer.json and tokenizer_config.json again"
        ) from None
    return found


def asks_for_code(error: Exception) -> bool:
    """Return True if `error` is that of Transformers about code in a folder that is not trusted. It has no type of its own."""
    return "trust_remote_code=True" in str(error)


def wrapped(tokenizer: Any, *, separator: int, pad: int, max_length: int | None) -> PreTrainedTokenizerFast:
    """Return `tokenizer` for Transformers, with the end token `separator` and the padding token `pad`. Text that spells them stays text.

    Raises:
        InputError: if one of the two tokens would get another id.
    """
    end = tokenizer.id_to_token(separator) or END_OF_TEXT
    tokenizer.add_special_tokens([AddedToken(end, normalized=False, special=True)])
    # a tokenizer.json may have its own pad, which is an ordinary token to the model
    filler = tokenizer.id_to_token(pad) or (PAD if tokenizer.token_to_id(PAD) is None else f"<|pad-{pad}|>")
    tokenizer.add_special_tokens([AddedToken(filler, normalized=False, special=True)])
    for name, index in ((end, separator), (filler, pad)):
        if tokenizer.token_to_id(name) != index:
            raise InputError(
                f"{name!r} has id {tokenizer.token_to_id(name)} in this tokenizer (the model knows it as {index}); use the model's own"
            )
    limit = {} if max_length is None else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=end,
        eos_token=end,
        pad_token=filler,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        **limit,
    )


def byte_alphabet() -> dict[int, str]:
    """Return byte -> its character in byte-level tokenizers: the byte's own character if it is printable, else one from U+0100 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printing]
    return {**{byte: chr(byte) for byte in printing}, **{byte: chr(NUM_BYTES + number) for number, byte in enumerate(others)}}


def split_by_rank(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Return the two parts whose merge gives `token`: pairs of bytes are merged, lowest rank first, until two parts remain."""
    parts = [token[start : start + 1] for start in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, len(ranks)) for left, right in zip(parts, parts[1:], strict=False)]
        first = pairs.index(min(pairs))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts
