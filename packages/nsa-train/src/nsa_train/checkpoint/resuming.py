"""Restore a run from a verified checkpoint: weights, optimizer, schedule, scaler and generators, at any world size."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import asdict
from torch import nn

from nsa_core.serialization import toml_value
from nsa_train.checkpoint.layout import CONFIG, MODEL, OPTIMIZER, RNG, STATE
from nsa_train.checkpoint.manifest import OTHERS
from nsa_train.checkpoint.rng import from_json, require_rng, restore_rng, seed_fresh_rng, to_json
from nsa_train.checkpoint.schema import NUM_GROUPS, unresumable
from nsa_train.checkpoint.store import Checkpoint, Judge, latest_valid, valid_at
from nsa_train.checkpoint.tensors import load_model_tensors, load_optimizer_tensors, read_tensors, require_forms, require_moments
from nsa_train.data.tokenizer import build_tokenizer, lacks_file
from nsa_train.errors import CheckpointError, ConfigError
from nsa_train.model.decoder import Decoder, build_model, undrawn_weights
from nsa_train.parallel.world import here
from nsa_train.settings.config import RunConfig, structure, unstructure
from nsa_train.settings.structuring import listed_problems

OF_MODEL = ("model", "nsa", "data.tokenizer")
"""Tables and keys that must be equal: a resume continues the same run, also where another value would change no weight."""
FREE = ("nsa.backends", "model.max_position")
"""Keys of those tables that may differ, because they change no weight: the backends of operations, and the length that an export states."""
OF_ROWS = ("data.source", "data.packing", "data.shuffle_seed", "train.batch_size", "train.seq_len")
"""Keys that determine the rows of data, in which the checkpoint holds a position. Only reading the files shows whether they are the same."""
NO_CONVERSION = "one K and V for all branches are other weights than a K and V for each"


def resume_point(root: Path, *, step: int | None = None, judge: Judge = lambda checkpoint: None) -> Checkpoint | None:
    """Return the checkpoint to resume from, the same on every rank; only rank 0 searches and verifies. A collective.

    Without `step` it is the result of `latest_valid`; None if nothing was saved yet. With `step` it is the checkpoint of that step, or an error.
    If `judge`, such as `require_run`, raises a CheckpointError for a checkpoint, the checkpoint counts as damaged.

    Raises:
        CheckpointError: on all ranks, if the checkpoint of `step` is damaged; without `step`, if every checkpoint is.
        ConfigError: on all ranks, if there is no checkpoint of `step`.
    """
    world = here()
    found = world.on_main(lambda: latest_valid(root, judge=judge) if step is None else valid_at(root, step, judge=judge))
    fields = world.from_main(found and {**asdict(found, recurse=False), "path": str(found.path), "config": unstructure(found.config)})
    if not fields:
        return None
    path, config, refused = Path(fields["path"]), structure(fields["config"]), tuple(fields["refused"])
    return Checkpoint(path=path, step=fields["step"], config=config, state=fields["state"], refused=refused)


def require_run(checkpoint: Checkpoint) -> None:
    """Check that a run can resume from a checkpoint: its files fit one another, and its state has a position and all counters.

    Raises:
        CheckpointError: naming the file and the fault in it.
    """
    if problems := unresumable(checkpoint.state):
        raise CheckpointError(f"{checkpoint.path / STATE} is damaged: {listed_problems(problems)}; {OTHERS}")
    _require_rates(checkpoint, groups=NUM_GROUPS)
    require_moments(
        checkpoint.path / OPTIMIZER, require_weights(checkpoint), is_begun=checkpoint.state["counters"]["watch"]["num_observed"] > 0
    )
    states = _states_by_owner(read_tensors(checkpoint.path / RNG))
    owners = {f"rank{rank}" for rank in range(checkpoint.state["world_size"])}
    try:
        if states.keys() != owners:
            raise ValueError(f"it has those of {len(states)} ranks, and world_size={len(owners)}")
        for state in states.values():
            require_rng(state)
    except (ValueError, RuntimeError) as error:
        raise _no_generators(checkpoint.path / RNG, error) from None


def require_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return name -> weight, on the meta device, of the decoder that config.toml describes, after comparing them with the checkpoint's.

    Only the header of the weights' file is read, and nothing is allocated.

    Raises:
        CheckpointError: naming the tensors that differ.
        DataError: if the number of rows is that of a tokenizer whose file is missing.
    """
    if not checkpoint.config.model.vocab_size and lacks_file(checkpoint.config.data):
        build_tokenizer(checkpoint.config.data)
    try:
        expected = undrawn_weights(checkpoint.config)
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.path / CONFIG} describes no decoder ({error}); {OTHERS}") from None
    require_forms(checkpoint.path / MODEL, expected)
    return expected


def check_resumable(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Check that a run with `config` can resume from `checkpoint`.

    Raises:
        ConfigError: a line for each key that describes another model, or other rows of data.
    """
    saved, now = _fixed_keys(checkpoint.config), _fixed_keys(config)
    differing = [key for key in sorted(set(saved) | set(now)) if saved.get(key) != now.get(key)]
    problems = []
    for key in differing:
        keep = f"use --set {key}={toml_value(saved[key])}" if key in saved else f"leave {key} out"
        reason = "its weights would not fit"
        if key in OF_ROWS:
            reason = "its position is one in other rows"
        elif key == "nsa.kv":
            reason = NO_CONVERSION
        elif _keeps_weights(key, checkpoint.config, config):
            reason = "a resume continues the same model"
            keep += f", or start a new run from these weights with --set train.init_from={checkpoint.path}"
        problems.append(f"{key}={json.dumps(now.get(key))} is not what {checkpoint.path.name} was saved with ({reason}); {keep}")
    if problems:
        raise ConfigError.of(problems)


def _keeps_weights(key: str, saved: RunConfig, config: RunConfig) -> bool:
    """Return True if the decoder of `saved` has weights of the same names and shapes with the value that `config` gives `key`."""
    table, _, name = key.partition(".")
    tables, given = unstructure(saved), unstructure(config)[table]
    tables[table] = {field: value for field, value in tables[table].items() if field != name}
    if name in given:
        tables[table][name] = given[name]
    try:
        changed = undrawn_weights(structure(tables))
    except ConfigError:
        # the value breaks a rule together with the saved ones, so both decoders are compared
        changed = undrawn_weights(config)
    shapes = {field: weight.shape for field, weight in undrawn_weights(saved).items()}
    return shapes == {field: weight.shape for field, weight in changed.items()}


def restore(checkpoint: Checkpoint, *, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
    """Load the state of `checkpoint` into `model`, `optimizer`, `scaler` and this process's generators. A collective.

    Model and optimizer may be plain, under DDP or sharded by FSDP2, at any world size: only rank 0 reads the files, and the weights are
    bit-equal. A rank that did not exist when the checkpoint was saved gets freshly seeded generators. The trainer restores the data
    position, `checkpoint.state["data"]`, and the guards' counts, `checkpoint.state["counters"]`.

    Raises:
        CheckpointError: on all ranks, if the files do not fit `model`.
    """
    load_model_tensors(model, checkpoint.path / MODEL)
    load_optimizer_tensors(model, optimizer, checkpoint.path / OPTIMIZER)
    _require_rates(checkpoint, groups=len(optimizer.param_groups))
    for group, rate in zip(optimizer.param_groups, checkpoint.state["schedule"]["lr"], strict=True):
        group["lr"] = rate
    if scaler is not None and checkpoint.state["scaler"]:
        scaler.load_state_dict(checkpoint.state["scaler"])
    _restore_generators(checkpoint)


def load_model(checkpoint: Checkpoint) -> Decoder:
    """Return the decoder of a verified checkpoint, on the CPU, in evaluation mode.

    Raises:
        CheckpointError: if its weights do not fit the decoder that its config.toml describes.
    """
    # before anything is allocated, because the sizes are untrusted
    require_weights(checkpoint)
    with torch.random.fork_rng(devices=[]):
        model = build_model(checkpoint.config)
    # not `load_model_tensors`, which is a collective: a single process may open a checkpoint
    model.load_state_dict(read_tensors(checkpoint.path / MODEL))
    return model.eval()


def _require_rates(checkpoint: Checkpoint, *, groups: int) -> None:
    count = len(checkpoint.state["schedule"]["lr"])
    if count != groups:
        raise CheckpointError(
            f"{checkpoint.path / STATE} is damaged: schedule.lr has {count} rates for {groups} groups of parameters; {OTHERS}"
        )


def _restore_generators(checkpoint: Checkpoint) -> None:
    path = checkpoint.path / RNG
    world = here()
    try:
        states = _states_by_owner(from_json(world.from_main(world.on_main(lambda: to_json(read_tensors(path))))))
        if mine := states.get(f"rank{world.rank}"):
            restore_rng(mine)
        else:
            seed_fresh_rng(step=checkpoint.step, rank=world.rank, state_of_rank_0=states["rank0"])
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise _no_generators(path, error) from None


def _states_by_owner(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Return rank -> generator -> state, from the tensors of rng.safetensors."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        owner, _, name = key.partition("/")
        states.setdefault(owner, {})[name] = value
    return states


def _no_generators(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} does not hold the state of the generators ({error!r:.120}); {OTHERS}")


def _fixed_keys(config: RunConfig) -> Mapping[str, Any]:
    flat = {f"{table}.{key}": value for table, values in unstructure(config).items() for key, value in values.items()}
    fixed = (*OF_MODEL, *OF_ROWS)
    return {key: value for key, value in flat.items() if key not in FREE and (key in fixed or key.partition(".")[0] in fixed)}
