"""Copy the state of a run to host memory at a step boundary, so that it can be written while training continues."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from nsa_train.checkpoint.layout import CONFIG, MODEL, OPTIMIZER, RNG, STATE
from nsa_train.checkpoint.manifest import MOST
from nsa_train.checkpoint.rng import capture_rng, from_json, to_json
from nsa_train.checkpoint.tensors import model_tensors, on_host, optimizer_tensors, write_tensors
from nsa_train.errors import CheckpointError
from nsa_train.parallel.world import here
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import to_toml


@frozen(kw_only=True)
class Snapshot:
    """The content of one checkpoint. Rank 0 has the tensors; the other ranks' are empty."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    """The generators of all ranks."""
    config: str
    state: dict[str, Any]
    """Plain values for JSON: data, schedule, scaler, routes, counters, world_size."""

    def write_to(self, folder: Path) -> None:
        """Write the files of the checkpoint, except its manifest.

        Raises:
            CheckpointError: if a file would exceed the size limit for reading.
            OSError: if the disk refuses the write.
        """
        for name, text in ((CONFIG, self.config), (STATE, json.dumps(self.state))):
            content = text.encode()
            if len(content) > MOST[name]:
                raise CheckpointError(
                    f"{folder / name} is not written: it takes {len(content):,} bytes (at most {MOST[name]:,} are read again); "
                    "name files by a glob, or lower train.batch_size"
                )
            (folder / name).write_bytes(content)
        for name, tensors in ((MODEL, self.model), (OPTIMIZER, self.optimizer), (RNG, self.rng)):
            write_tensors(folder / name, tensors)


def capture(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    data: Mapping[str, Any],
    scaler: Any = None,
    routes: Mapping[str, str] | None = None,
    counters: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Return a copy of everything that the next step depends on. A collective, called between two steps.

    `model` may be wrapped by DDP, FSDP2 or torch.compile; `scaler` is a GradScaler; `data` is the merged position of all
    ranks (`merge_states(world.gather(stream.state_dict()))`); `counters` holds other plain values, for example the guards'
    counts.
    """
    state = {
        "world_size": here().world_size,
        "schedule": {"lr": [float(group["lr"]) for group in optimizer.param_groups]},
        "scaler": scaler.state_dict() if scaler is not None else None,
        "data": dict(data),
        "routes": dict(routes or {}),
        "counters": dict(counters or {}),
    }
    generators = here().gather(to_json(capture_rng()))
    # converting to JSON and back copies all live values; a value that is not JSON fails here, not in the background
    return Snapshot(
        model=on_host(model_tensors(model)),
        optimizer=on_host(optimizer_tensors(model, optimizer)),
        rng={f"rank{rank}/{name}": value for rank, part in enumerate(generators) for name, value in from_json(part).items()},
        config=to_toml(config),
        state=json.loads(json.dumps(state)),
    )
