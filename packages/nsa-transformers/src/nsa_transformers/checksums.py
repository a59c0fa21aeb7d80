"""Checksums of weights: the SHA-256 of a safetensors file's data is in the file's metadata. Copies of a file keep it, rewritten files lose it."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from safetensors import safe_open

from nsa_core.errors import InputError

KEY = "data_sha256"
UNSEALED = {KEY: "0" * 64}
"""Metadata of a file before `seal` completes it."""


def seal(file: Path) -> None:
    """Write the SHA-256 of the tensors' bytes into the header of `file`, which must have been written with the metadata UNSEALED."""
    with file.open("r+b") as opened:
        header = _header(opened)
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        # a tensor's name cannot contain this text, because its quotation marks are escaped
        empty, filled = (f'"{KEY}":"{value}"'.encode() for value in (UNSEALED[KEY], digest))
        if header.count(empty) != 1:
            raise InputError(f"{file} was not written with the metadata that a checksum completes ({UNSEALED}); write it with them")
        opened.seek(0)
        opened.write(header.replace(empty, filled))


def seal_copy(file: Path) -> None:
    """Replace `file`, with any metadata, by a copy that has the SHA-256 in its header. The directory needs room for the copy.

    A copy is needed because a longer header moves the data. A process that opens `file` meanwhile gets the old or the new file, complete.
    """
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with file.open("rb") as source, aside.open("wb") as target:
            content = json.loads(_header(source)[8:])
            content["__metadata__"] = {**content.get("__metadata__", {}), **UNSEALED}
            header = json.dumps(content, separators=(",", ":")).encode()
            # data begin at a multiple of 8 bytes
            header += b" " * (-len(header) % 8)
            target.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(source, target, 2**20)
        seal(aside)
        shutil.copymode(file, aside)
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)


def require_undamaged(files: Iterable[Path]) -> None:
    """Raise InputError if the data of a file does not have the SHA-256 in the file's header. A file without a SHA-256 is not read."""
    for file in files:
        with safe_open(file, "pt") as headed:
            expected = (headed.metadata() or {}).get(KEY)
        if expected is None:
            continue
        with file.open("rb") as opened:
            _header(opened)
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != expected:
            raise InputError(
                f"{file} is damaged (its data do not have the SHA-256 in its header); copy it again, "
                f"or save tensors that you changed yourself without the metadata {KEY}"
            )


def _header(opened: BinaryIO) -> bytes:
    """Return the first bytes of a safetensors file, up to its data."""
    length = opened.read(8)
    return length + opened.read(int.from_bytes(length, "little"))
