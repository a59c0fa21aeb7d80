"""Checkpoints that are complete or absent: safetensors and JSON, no pickle.

`step-N/` holds weights, optimizer state, generators, configuration and everything else that the next step depends on,
with a manifest of sizes and SHA-256 sums. A run calls `capture`, `CheckpointWriter.save`, `resume_point` and `restore`, on
all ranks. A program that reads one checkpoint calls `open_checkpoint` and `load_model`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa_train.checkpoint.resuming import load_model, restore, resume_point
    from nsa_train.checkpoint.snapshot import capture
    from nsa_train.checkpoint.store import open_checkpoint
    from nsa_train.checkpoint.writer import CheckpointWriter

__all__ = ["CheckpointWriter", "capture", "load_model", "open_checkpoint", "restore", "resume_point"]
_HOMES = {
    **dict.fromkeys(("load_model", "restore", "resume_point"), "resuming"),
    "CheckpointWriter": "writer",
    "capture": "snapshot",
    "open_checkpoint": "store",
}
"""Name -> its module, loaded when the name is first used: listing and verifying need no torch."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
