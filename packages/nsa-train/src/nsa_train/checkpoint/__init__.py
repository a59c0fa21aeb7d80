"""Checkpoints that are whole or absent: safetensors and JSON, no pickle.

`step-N/` holds weights, optimizer state, generators, configuration and everything else that the next step depends on,
with a manifest of sizes and SHA-256 sums. A run calls `capture`, `CheckpointWriter.save`, `resume_point` and `restore`, on
all ranks; whoever reads one checkpoint calls `open_checkpoint` and `load_model`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa_train.checkpoint.claim import claimed_by_another
    from nsa_train.checkpoint.formats import export
    from nsa_train.checkpoint.resuming import (
        check_resumable,
        initial_checkpoint,
        initialize,
        load_model,
        require_run,
        restore,
        resume_point,
    )
    from nsa_train.checkpoint.snapshot import Snapshot, capture
    from nsa_train.checkpoint.store import Checkpoint, Listed, latest_valid, list_checkpoints, open_checkpoint, verify
    from nsa_train.checkpoint.writer import CheckpointWriter, refused_by_disk

_HOMES = {
    "claim": ("claimed_by_another",),
    "formats": ("export",),
    "resuming": ("check_resumable", "initial_checkpoint", "initialize", "load_model", "require_run", "restore", "resume_point"),
    "snapshot": ("Snapshot", "capture"),
    "store": ("Checkpoint", "Listed", "latest_valid", "list_checkpoints", "open_checkpoint", "verify"),
    "writer": ("CheckpointWriter", "refused_by_disk"),
}
"""Module -> its names, loaded when they are first used: listing and verifying need no torch. No module has the name of a function."""

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "Listed",
    "Snapshot",
    "capture",
    "check_resumable",
    "claimed_by_another",
    "export",
    "initial_checkpoint",
    "initialize",
    "latest_valid",
    "list_checkpoints",
    "load_model",
    "open_checkpoint",
    "refused_by_disk",
    "require_run",
    "restore",
    "resume_point",
    "verify",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
