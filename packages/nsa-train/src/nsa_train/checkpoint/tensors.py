"""Weights and optimizer state as whole tensors under names that no wrapper changes, and back into sharded or plain ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nsa_train.errors import CheckpointError
from nsa_train.parallel.ranks import broadcast_json, broadcast_tensor, on_rank_0, rank
from nsa_train.sharding import is_sharded

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and checkpoint wrappers put into a parameter's name."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> live weight or buffer of `model`, sharded ones as they are."""
    # first of all: FSDP gives its gathered weights back when this is called
    return {_stable(name): value for name, value in _unwrapped(model).state_dict().items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the live state of `optimizer` by `parameter/field`, for example `embedding.weight/exp_avg`."""
    return {
        f"{name}/{key}": value
        for name, parameter in _parameters(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of `tensors` in host memory, whole ones, on rank 0; nothing on the others. A collective."""
    held = {}
    for name, value in tensors.items():
        whole = value.full_tensor().detach() if is_sharded(value) else value.detach()
        if rank() == 0:
            held[name] = whole.to("cpu", copy=True).contiguous()
    return held


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        CheckpointError: when it is none.
    """
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is not a safetensors file ({error!r:.120}); take another step-* of this run") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write `tensors` as the safetensors file `path`.

    Raises:
        OSError: when the disk refuses.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        # transformers asks for a "format"
        safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt", **metadata})
    except SafetensorError as error:
        # it hides the operating system's error in its text
        raise OSError(f"{path}: {error}") from error
    # it lets nobody but the owner read, whatever the user's umask says
    path.chmod(mode)


def load_model_tensors(model: nn.Module, path: Path) -> None:
    """Fill the weights of `model` with those of `path`, which rank 0 alone reads. A collective.

    Raises:
        CheckpointError: on all ranks, when names, shapes or dtypes differ; the weights are then untouched.
    """
    targets = model_tensors(model)
    found = on_rank_0(lambda: read_weights(path, targets)) or {}
    with torch.no_grad():
        for name, target in targets.items():
            whole = found.get(name, torch.empty(target.shape, dtype=target.dtype))
            target.copy_(_placed(broadcast_tensor(whole.to(target.device)), like=target))


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Give `optimizer`, built for `model`, the state that `path` holds, which rank 0 alone reads. A collective.

    Raises:
        CheckpointError: on all ranks, when it holds state of parameters that `model` has not.
    """
    parameters = _parameters(model)
    found = on_rank_0(lambda: _read_moments(path, parameters)) or {}
    forms = broadcast_json({key: _form(value) for key, value in found.items()})
    fused = {id(p): bool(group.get("fused") or group.get("capturable")) for group in optimizer.param_groups for p in group["params"]}
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)
    for key, (shape, kind) in forms.items():
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        # torch keeps the step count of an optimizer that is not fused on the host
        device = parameter.device if field != "step" or fused.get(id(parameter), False) else torch.device("cpu")
        whole = found.get(key, torch.empty(shape, dtype=getattr(torch, kind)))
        value = broadcast_tensor(whole.to(parameter.device)).to(device)
        optimizer.state[parameter][field] = _placed(value, like=parameter) if value.shape == parameter.shape else value


def read_weights(path: Path, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `path`, which are those that `targets` has by name, shape and dtype.

    Raises:
        CheckpointError: naming the first that is not.
    """
    found = read_tensors(path)
    for name in [*targets, *sorted(set(found) - set(targets))]:
        expected, seen = (_described(tensors.get(name)) for tensors in (targets, found))
        if expected != seen:
            raise CheckpointError(
                f"{path} does not fit its config.toml: {name} expected {expected}, found {seen}; use the recipe that wrote it"
            )
    return found


def _read_moments(path: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = read_tensors(path)
    for key, value in found.items():
        parameter = parameters.get(key.rpartition("/")[0])
        if parameter is None or value.shape not in ((), parameter.shape):
            raise CheckpointError(
                f"{path} does not fit this model: {key} expected {_described(parameter)}, found {_described(value)}; "
                "use the recipe that wrote it"
            )
    return found


def _described(value: Tensor | None) -> str:
    return "none" if value is None else f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _form(value: Tensor) -> list[object]:
    return [list(value.shape), str(value.dtype).removeprefix("torch.")]


def _placed(whole: Tensor, *, like: Tensor) -> Tensor:
    """Return `whole`, which every rank has, sharded as `like` is; each rank takes its part, nothing is sent."""
    if is_sharded(like):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return whole


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {_stable(name): parameter for name, parameter in _unwrapped(model).named_parameters()}


def _unwrapped(model: nn.Module) -> nn.Module:
    return cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model


def _stable(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
