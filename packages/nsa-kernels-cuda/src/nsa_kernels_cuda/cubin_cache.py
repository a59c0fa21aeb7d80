"""Cache of compiled kernels on disk. An entry is used only if it is complete and was written for the requested key."""

import hashlib
import os
import tempfile
import time
from pathlib import Path

import torch

MAGIC = b"nsa-kernels-cuda cubin 1\n"
"""First bytes of an entry, with the number of the format."""
KEY_SIZE = hashlib.sha256().digest_size
ABANDONED_AFTER_S = 3600
"""Age in seconds from which a temporary file counts as abandoned: its process ended before it could rename the file."""


def default_folder() -> Path:
    """Return the folder `nsa_kernels_cuda` in torch's cache, which is `~/.cache/torch` by default."""
    return Path(torch.hub.get_dir()).parent / "nsa_kernels_cuda"


def read(folder: Path, key: bytes) -> bytes | None:
    """Return the cubin of `key`, a SHA-256; None if there is no entry, or if it is damaged or belongs to another key."""
    try:
        entry = _path(folder, key).read_bytes()
    except OSError:
        return None
    head = MAGIC + key
    start = len(head) + KEY_SIZE
    cubin = entry[start:]
    return cubin if entry[:start] == head + hashlib.sha256(cubin).digest() else None


def write(folder: Path, key: bytes, cubin: bytes) -> None:
    """Store the cubin of `key`. If several processes store the same key at once, the last whole entry stays.

    Raises:
        OSError: if the folder cannot be created or written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_abandoned(folder)
    descriptor, name = tempfile.mkstemp(suffix=".tmp", dir=folder)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC + key + hashlib.sha256(cubin).digest() + cubin)
        temporary.replace(_path(folder, key))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _path(folder: Path, key: bytes) -> Path:
    return folder / f"{key.hex()}.cubin"


def _remove_abandoned(folder: Path) -> None:
    for temporary in folder.glob("*.tmp"):
        try:
            if time.time() - temporary.stat().st_mtime > ABANDONED_AFTER_S:
                temporary.unlink()
        except OSError:
            # another process has renamed or removed it
            continue
