"""Read and write the tensors of safetensors files piece by piece.

The library safetensors maps a whole file into memory, and every page that was read counts as memory of the process. Plain reads need memory
for one piece only.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nsa_core.errors import InputError
from nsa_transformers.checksums import UNSEALED, seal

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Name of a dtype in safetensors -> the dtype, for all dtypes that are converted."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
PIECE_BYTES = 16 * 2**20
"""Maximum number of bytes that are read at a time."""
SHARD_BYTES = 4 * 10**9
"""Maximum number of bytes of tensors in a file, unless a single tensor has more."""


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    code: str
    """Name of the tensor's dtype in safetensors."""
    shape: tuple[int, ...]
    start: int
    """Offset of the tensor's first byte in the file."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the tensor's dtype."""
        return DTYPES[self.code]

    @property
    def nbytes(self) -> int:
        """Return the number of the tensor's bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def pieces(self) -> Iterator[bytes]:
        """Yield the tensor's bytes, a piece at a time."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            left = self.nbytes
            while left:
                piece = file.read(min(left, PIECE_BYTES))
                if not piece:
                    raise InputError(f"{self.file} ended while it was read ({left} bytes are missing); copy it again")
                left -= len(piece)
                yield piece

    def rows(self, first: int, count: int) -> Tensor:
        """Return `count` rows from row `first` on, or fewer at the end: `(rows, ...)`, in the tensor's dtype."""
        count = min(count, self.shape[0] - first)
        found = torch.empty((count, *self.shape[1:]), dtype=self.dtype)
        with self.file.open("rb") as file:
            file.seek(self.start + first * (self.nbytes // self.shape[0]))
            if file.readinto(_bytes_of(found)) != found.nbytes:
                raise InputError(f"{self.file} ended while it was read; copy it again")
        return found


def stored_tensors(files: Sequence[Path]) -> dict[str, Stored]:
    """Return name -> tensor of safetensors `files`; only their headers are read.

    Raises:
        InputError: for a file that is missing or damaged.
    """
    return {name: tensor for file in files for name, tensor in _tensors_of(file).items()}


def _tensors_of(file: Path) -> dict[str, Stored]:
    try:
        # safe_open checks that the tensors fill the file without a gap
        with safe_open(file, "pt") as checked:
            checked.keys()
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{file} is no whole safetensors file ({error}); copy it again") from None
    header.pop("__metadata__", None)
    return {
        name: Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]) for name, entry in header.items()
    }


class Planned(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: Stored | Callable[[], Tensor]
    """The tensor to copy, or a function that makes the tensor."""

    @property
    def nbytes(self) -> int:
        """Return the number of the tensor's bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def write_shards(
    folder: Path, planned: Sequence[Planned], *, shard_bytes: int = SHARD_BYTES, say: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Write `planned` into `folder` as model.safetensors, or as shards of at most `shard_bytes` with an index. Headers hold checksums.

    `say` is called after each tensor, with the number of its bytes.

    Raises:
        InputError: for a tensor to copy that holds NaN or Inf.
    """
    shards = _shards_of(planned, shard_bytes)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SAFE_WEIGHTS_NAME]
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            for tensor in shard:
                _write_tensor(file, tensor)
                say(tensor.nbytes)
        seal(folder / name)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in planned)},
            "weight_map": {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards_of(planned: Sequence[Planned], shard_bytes: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    held = 0
    for tensor in planned:
        if shards[-1] and held + tensor.nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.nbytes
    return shards


def _header(shard: Sequence[Planned]) -> bytes:
    """Return the first bytes of a file with the tensors `shard`: the length of the header, then the header, padded to a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **UNSEALED}}
    start = 0
    for tensor in shard:
        end = start + tensor.nbytes
        entries[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: BinaryIO, tensor: Planned) -> None:
    if isinstance(tensor.source, Stored):
        for piece in tensor.source.pieces():
            if not _is_finite(piece, tensor.dtype):
                raise InputError(
                    f"{tensor.source.file} holds NaN or Inf in the tensor that becomes {tensor.name} (weights are finite); use another checkpoint"
                )
            file.write(piece)
    else:
        file.write(_bytes_of(tensor.source().detach().to(tensor.dtype).contiguous()))


def _is_finite(piece: bytes, dtype: torch.dtype) -> bool:
    # a tensor must not share the memory of `bytes`, which cannot be written; NaN is the result of aminmax if there is one
    smallest, largest = torch.frombuffer(bytearray(piece), dtype=dtype).aminmax()
    return bool(smallest.isfinite() & largest.isfinite())


def _bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous tensor on the CPU, which share its memory."""
    return tensor.flatten().view(torch.uint8).numpy()
