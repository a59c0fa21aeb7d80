"""A run small enough to be repeated hundreds of times: a decoder of one layer whose batches come from every generator.

Scripts in the same folder import it; it forks its ranks, so torch is loaded once.
"""

import hashlib
import json
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nsa_train.checkpoint import capture, restore
from nsa_train.checkpoint.rng import capture_rng
from nsa_train.checkpoint.snapshot import Snapshot
from nsa_train.checkpoint.store import Checkpoint
from nsa_train.checkpoint.tensors import model_tensors, on_host, optimizer_tensors
from nsa_train.data.stream import state_of
from nsa_train.model.decoder import build_model
from nsa_train.parallel.world import here
from nsa_train.settings.recipe import load_config

SIZES = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim_qk": 16, "head_dim_v": 16}
CONFIG = load_config("demo", [f"model.{key}={value}" for key, value in SIZES.items()])


class ToyRun:
    """Weights, optimizer, a count of batches drawn, and the losses since this process began."""

    def __init__(self, *, strategy: str = "single", precision: str = "fp32", seed: int = 0) -> None:
        """Draw weights from `seed`, the same on all ranks, and start generators that differ by rank."""
        self.precision, self.losses, self.drawn = precision, [], 0
        torch.manual_seed(seed)
        self.model = _wrapped(build_model(CONFIG), strategy, precision)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(100 * seed + rank)
        random.seed(200 * seed + rank)
        numpy.random.seed(300 * seed + rank)

    def step(self) -> None:
        """Train on one batch whose bytes come from torch's, Python's and numpy's generators and the position."""
        self.drawn += 1
        ids = torch.randint(0, 250, (2, 17)) + random.randrange(3) + int(numpy.random.randint(3)) + self.drawn % 2
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            logits = self.model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()).hex())

    def snapshot(self) -> Snapshot:
        """Return the content of a checkpoint."""
        batches, rows = here().gather(self.drawn)[0], CONFIG.train.batch_size
        lane = {"row": batches, "epoch": 0, "hash": "", "first_tokens": [], "documents": 0, "bad_records": 0}
        data = state_of({"walk": "rows"}, batches, {str(number): lane for number in range(rows)})
        return capture(model=self.model, optimizer=self.optimizer, config=CONFIG, data=data)

    def go_on(self, checkpoint: Checkpoint) -> None:
        """Continue with the state of `checkpoint`."""
        restore(checkpoint, model=self.model, optimizer=self.optimizer)
        self.drawn = checkpoint.state["data"]["batches"]

    def digests(self) -> dict[str, str]:
        """Return SHA-256 of weights, optimizer state and this rank's generators."""
        parts = {
            "weights": on_host(model_tensors(self.model)),
            "optimizer": on_host(optimizer_tensors(self.model, self.optimizer)),
            "rng": capture_rng(),
        }
        return {name: hashlib.sha256(safetensors.torch.save(tensors)).hexdigest() for name, tensors in parts.items()}


def on_ranks(world: int, job: Callable[[], Any]) -> list[Any]:
    """Return the result of `job` in each of `world` new processes, which form a gloo group if there are several."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                in_child(lambda rank=rank: _be_rank(rank, world, job, Path(folder)))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        return [json.loads((Path(folder) / f"result-{rank}").read_text()) for rank in range(world)]


def in_child(job: Callable[[], Any]) -> NoReturn:
    """End this process, a fork, after `job`: with code 1 and a traceback if it raises."""
    code = 1
    try:
        job()
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def _be_rank(rank: int, world: int, job: Callable[[], Any], folder: Path) -> None:
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    (folder / f"result-{rank}").write_text(json.dumps(job()))
    if world > 1:
        dist.barrier()


def _wrapped(model: nn.Module, strategy: str, precision: str) -> nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model)
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if precision == "bf16" else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


torch.set_num_threads(1)
# load the modules of the first model and optimizer here, not in every fork
ToyRun()
