"""From a verified checkpoint back to a run: weights, optimizer, schedule, scaler and generators, at any world size."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from attrs import asdict
from torch import nn

from nsa_train.checkpoint.layout import MODEL, OPTIMIZER, RNG
from nsa_train.checkpoint.manifest import OTHERS
from nsa_train.checkpoint.rng import restore_rng, seed_fresh_rng
from nsa_train.checkpoint.store import Checkpoint, latest_valid, valid_at
from nsa_train.checkpoint.tensors import load_model_tensors, load_optimizer_tensors, read_tensors, read_weights
from nsa_train.config import RunConfig, structure, unstructure
from nsa_train.errors import CheckpointError, ConfigError
from nsa_train.model.decoder import Decoder, build_model
from nsa_train.parallel.ranks import broadcast_bytes, broadcast_json, on_rank_0, rank

OF_WEIGHTS = ("model", "nsa", "data.tokenizer")
"""Tables and keys without which the weights would not fit; where an operation runs (nsa.backends) is free."""
OF_ROWS = ("data.source", "data.packing", "data.shuffle_seed", "train.batch_size", "train.seq_len")
"""Keys that fix the rows, in which the checkpoint has a position; whether the files are the same shows when they are read."""


def resume_point(root: Path, *, step: int | None = None) -> Checkpoint | None:
    """Return the checkpoint to resume from, on every rank the same; rank 0 alone looks and verifies. A collective.

    Without `step` it is `latest_valid`, None where nothing was saved yet. With `step` it is that one or an error.

    Raises:
        CheckpointError: on all ranks, when it (without `step`: every one) is damaged.
        ConfigError: on all ranks, when there is none after `step`.
    """
    found = on_rank_0(lambda: latest_valid(root) if step is None else valid_at(root, step))
    fields = broadcast_json(found and {**asdict(found, recurse=False), "path": str(found.path), "config": unstructure(found.config)})
    if not fields:
        return None
    path, config, refused = Path(fields["path"]), structure(fields["config"]), tuple(fields["refused"])
    return Checkpoint(path=path, step=fields["step"], config=config, state=fields["state"], refused=refused)


def check_resumable(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Let `config` pass if a run under it can go on from `checkpoint`.

    Raises:
        ConfigError: a line for each key that describes another model, or other rows of data.
    """
    saved, now = _fixed_keys(checkpoint.config), _fixed_keys(config)
    problems = [
        f"{key}={json.dumps(now.get(key))} is not what {checkpoint.path.name} was saved with ({_reason(key)}); "
        + (f"use --set {key}={json.dumps(saved[key])}" if key in saved else f"leave {key} out")
        for key in sorted(set(saved) | set(now))
        if saved.get(key) != now.get(key)
    ]
    if problems:
        raise ConfigError.of(problems)


def restore(checkpoint: Checkpoint, *, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
    """Give `model`, `optimizer`, `scaler` and this process's generators the state that `checkpoint` holds. A collective.

    They may be plain, under DDP or sharded by FSDP2, at any world size: rank 0 alone reads the files, and the weights are
    bit-equal. A rank that the checkpoint does not know draws from freshly seeded generators. The data position is
    `checkpoint.state["data"]`, the guards' counts are `checkpoint.state["counters"]`: the trainer passes those on.

    Raises:
        CheckpointError: on all ranks, when the files do not fit `model`.
    """
    load_model_tensors(model, checkpoint.path / MODEL)
    load_optimizer_tensors(model, optimizer, checkpoint.path / OPTIMIZER)
    for group, rate in zip(optimizer.param_groups, checkpoint.state["schedule"]["lr"], strict=False):
        group["lr"] = rate
    if scaler is not None and checkpoint.state["scaler"]:
        scaler.load_state_dict(checkpoint.state["scaler"])
    _restore_generators(checkpoint)


def load_model(checkpoint: Checkpoint) -> Decoder:
    """Return the decoder of a verified checkpoint, on the CPU, in evaluation mode.

    Raises:
        CheckpointError: when its weights do not fit the decoder that its config.toml describes.
    """
    with torch.random.fork_rng(devices=[]):
        model = build_model(checkpoint.config)
    # no collective: a single process may look at a checkpoint while the others do something else
    model.load_state_dict(read_weights(checkpoint.path / MODEL, model.state_dict()))
    return model.eval()


def _restore_generators(checkpoint: Checkpoint) -> None:
    path = checkpoint.path / RNG
    payload = broadcast_bytes(on_rank_0(lambda: safetensors.torch.save(read_tensors(path))))
    states: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in safetensors.torch.load(payload).items():
        owner, _, name = key.partition("/")
        states.setdefault(owner, {})[name] = value
    try:
        if mine := states.get(f"rank{rank()}"):
            restore_rng(mine)
        else:
            seed_fresh_rng(step=checkpoint.step, rank=rank(), state_of_rank_0=states["rank0"])
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not hold the state of the generators ({error!r:.120}); {OTHERS}") from None


def _fixed_keys(config: RunConfig) -> Mapping[str, Any]:
    flat = {f"{table}.{key}": value for table, values in unstructure(config).items() for key, value in values.items()}
    fixed = (*OF_WEIGHTS, *OF_ROWS)
    return {key: value for key, value in flat.items() if key != "nsa.backends" and (key in fixed or key.partition(".")[0] in fixed)}


def _reason(key: str) -> str:
    return "its position is one in other rows" if key in OF_ROWS else "its weights would not fit"
