"""Run one trial in its own process: `python -m nsa_bench.ablate.trial RECIPE OUT` trains a model, and then evaluates it.

The evaluation uses the held-out rows: loss and right answers by the position of a token in its sequence.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from nsa_bench.ablate.run import JUDGED
from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.cli import run_command
from nsa_train.data.packing import Batch
from nsa_train.data.stream import open_validation
from nsa_train.evaluation.positions import Bucket, loss_by_position
from nsa_train.files import written_whole
from nsa_train.host.routing import DTYPES
from nsa_train.lifecycle.outcomes import heed_launcher
from nsa_train.parallel.world import local_device
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import load_config


def run_trial(recipe: Path, out: Path) -> int:
    """Train `recipe` into `out`, or continue the run there, and evaluate it on its held-out rows; return the exit code of `nsa-train`."""
    code = run_command(["run", str(recipe), "--out", str(out), "--resume", "auto"])
    if code != 0 or not RunDirectory(out).metrics.is_file():
        return code
    config = load_config(str(recipe))
    found = judge_run(RunDirectory(out), config, local_device(config.train.device, 0))
    with written_whole(out / JUDGED) as aside:
        aside.write_text(json.dumps({"by_position": [bucket._asdict() for bucket in found]}, allow_nan=False) + "\n", encoding="utf-8")
    return 0


def judge_run(out: RunDirectory, config: RunConfig, device: torch.device) -> list[Bucket]:
    """Return loss and right answers of the run's newest checkpoint on the rows of its evaluations; buckets are powers of two.

    Raises:
        nsa_train.errors.TrainError: if the checkpoint or the data cannot be read.
    """
    model = load_model(open_checkpoint(out.checkpoints)).to(device)
    precision = config.train.precision

    def logits_of(batch: Batch) -> Tensor:
        with torch.inference_mode(), torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32"):
            logits: Tensor = model(batch.input_ids, cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen)
        return logits[0]

    return loss_by_position(logits_of, open_validation(config), longest=config.train.seq_len, device=device)


if __name__ == "__main__":
    heed_launcher()
    sys.exit(run_trial(Path(sys.argv[1]), Path(sys.argv[2])))
