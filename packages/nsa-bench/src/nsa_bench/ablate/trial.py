"""One trial, in a process of its own: `python -m nsa_bench.ablate.trial RECIPE OUT` trains, and then judges the model.

It is judged on its held-out rows: loss and right answers by the position of a token in its sequence.
"""

import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_bench.ablate.run import JUDGED
from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.cli import run_command
from nsa_train.data.packing import IGNORED, Batch
from nsa_train.data.stream import open_validation
from nsa_train.files import written_whole
from nsa_train.host.routing import DTYPES
from nsa_train.parallel.world import local_device
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import load_config

CHUNK = 8192
"""Tokens whose logits are float32 at a time."""


def run_trial(recipe: Path, out: Path) -> int:
    """Train `recipe` into `out`, or go on with it, and judge it on its held-out rows; return the exit code of `nsa-train`."""
    code = run_command(["run", str(recipe), "--out", str(out), "--resume", "auto"])
    if code != 0 or not RunDirectory(out).metrics.is_file():
        return code
    config = load_config(str(recipe))
    found = judge_run(RunDirectory(out), config, local_device(config.train.device, 0))
    with written_whole(out / JUDGED) as aside:
        aside.write_text(json.dumps({"by_position": [bucket._asdict() for bucket in found]}, allow_nan=False) + "\n", encoding="utf-8")
    return 0


class Bucket(NamedTuple):
    """Tokens at the positions first .. last of their sequences, counted from 0."""

    first: int
    last: int
    targets: int
    loss: float
    """Mean, in nats."""
    right: float
    """Share whose label is the likeliest token."""


def judge_run(out: RunDirectory, config: RunConfig, device: torch.device) -> list[Bucket]:
    """Return loss and right answers of the run's newest checkpoint on the rows of its evaluations; buckets are powers of two.

    Raises:
        nsa_train.errors.TrainError: when the checkpoint or the data cannot be read.
    """
    model = load_model(open_checkpoint(out.checkpoints)).to(device)
    sums = torch.zeros(3, math.ceil(math.log2(config.train.seq_len + 1)), dtype=torch.float64, device=device)
    precision = config.train.precision
    for batch in open_validation(config):
        with torch.inference_mode(), torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32"):
            logits = model(batch.input_ids.to(device), cu_seqlens=batch.cu_seqlens.to(device), max_seqlen=batch.max_seqlen)
        _add(sums, logits[0], batch.to(device))
    counts, losses, rights = sums.tolist()
    return [
        Bucket(2**index - 1, 2 ** (index + 1) - 2, int(count), loss / count, right / count)
        for index, (count, loss, right) in enumerate(zip(counts, losses, rights, strict=True))
        if count
    ]


def _add(sums: Tensor, logits: Tensor, batch: Batch) -> None:
    """Add targets, losses and right answers of one batch to `sums` `(3, buckets)`; `logits` `(total, V)`."""
    labels = batch.labels[0]
    starts = torch.repeat_interleave(batch.cu_seqlens[:-1].long(), batch.cu_seqlens.long().diff(), output_size=len(labels))
    # 0, 1 .. 2, 3 .. 6, ...: exact, where a logarithm would be rounded
    edges = 2 ** torch.arange(sums.shape[1], device=sums.device)
    buckets = torch.bucketize(torch.arange(len(labels), device=labels.device) - starts + 1, edges, right=True) - 1
    for at in range(0, len(labels), CHUNK):
        part, expected = logits[at : at + CHUNK].float(), labels[at : at + CHUNK]
        loss = torch.nn.functional.cross_entropy(part, expected, ignore_index=IGNORED, reduction="none")
        found = torch.stack([expected != IGNORED, loss, part.argmax(-1) == expected]).double()
        sums.index_add_(1, buckets[at : at + CHUNK], found)


if __name__ == "__main__":
    sys.exit(run_trial(Path(sys.argv[1]), Path(sys.argv[2])))
