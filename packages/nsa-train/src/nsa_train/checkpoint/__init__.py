"""Checkpoints that are whole or absent: safetensors and JSON, no pickle.

`step-N/` holds weights, optimizer state, generators, configuration and everything else that the next step depends on,
with a manifest of sizes and SHA-256 sums. A run calls `capture`, `CheckpointWriter.save`, `resume_point` and `restore`, on
all ranks; whoever reads one checkpoint calls `open_checkpoint` and `load_model`.
"""

from nsa_train.checkpoint.claim import claimed_by_another
from nsa_train.checkpoint.formats import export
from nsa_train.checkpoint.ranks import gather_json
from nsa_train.checkpoint.restore import check_resumable, load_model, require_run, restore, resume_point
from nsa_train.checkpoint.snapshot import Snapshot, capture
from nsa_train.checkpoint.store import Checkpoint, Listed, latest_valid, list_checkpoints, open_checkpoint, verify
from nsa_train.checkpoint.writer import CheckpointWriter, refused_by_disk

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "Listed",
    "Snapshot",
    "capture",
    "check_resumable",
    "claimed_by_another",
    "export",
    "gather_json",
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
