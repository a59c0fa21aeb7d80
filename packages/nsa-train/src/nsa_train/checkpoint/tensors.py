"""Convert weights and optimizer state to whole tensors, under names that no wrapper changes, and back into sharded or plain ones."""

import re
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import NamedTuple, cast

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nsa_train.errors import CheckpointError
from nsa_train.parallel.world import here, is_sharded
from nsa_train.settings.rules import SHOWN, short
from nsa_train.settings.structuring import listed_problems

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of a parameter's name that torch.compile and checkpoint wrappers add."""
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "U8": "uint8"}
"""Name of a dtype in safetensors -> its name in torch."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The moments that AdamW keeps for each parameter, in addition to the count of its steps."""
NAMED = 3
"""Maximum number of tensors that a message names; the others are counted."""


class Form(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @classmethod
    def of(cls, value: Tensor) -> "Form":
        """Return the dtype and shape of `value`."""
        return cls(str(value.dtype).removeprefix("torch."), tuple(value.shape))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> live weight or buffer of `model`, sharded ones as they are."""
    # this call makes FSDP free its gathered weights, so callers must make it before they use the parameters
    return {_stable(name): value for name, value in _unwrapped(model).state_dict().items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the live state of `optimizer` by `parameter/field`, for example `embedding.weight/exp_avg`."""
    return {
        f"{name}/{key}": value
        for name, parameter in _parameters(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole copies of `tensors` in host memory on rank 0, nothing on the other ranks. A collective."""
    held, is_main = {}, here().is_main
    for name, value in tensors.items():
        whole = value.full_tensor().detach() if is_sharded(value) else value.detach()
        if is_main:
            held[name] = whole.to("cpu", copy=True).contiguous()
    return held


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        CheckpointError: if it is not such a file.
    """
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise _no_tensors(path, error) from None


def read_forms(path: Path) -> dict[str, Form]:
    """Return name -> dtype and shape of the tensors of a safetensors file; only its header is read.

    Raises:
        CheckpointError: if it is not such a file.
    """
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            return {name: Form(DTYPES.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise _no_tensors(path, error) from None


def require_forms(
    path: Path, expected: Mapping[str, Tensor], *, of: str = "its config.toml", advice: str = "use the recipe that wrote it"
) -> None:
    """Check that a safetensors file has the tensors `expected`, by name, shape and dtype; only its header is read.

    `of`: where the expected tensors come from, for the message.

    Raises:
        CheckpointError: naming the first few tensors that differ, and the number of the others.
    """
    found = read_forms(path)
    wanted = {name: Form.of(value) for name, value in expected.items()}
    differing = [f"{name} expected {form}, found {found.get(name, 'none')}" for name, form in wanted.items() if found.get(name) != form]
    # the names in the file are untrusted
    differing += [f"{_shown(name)} expected none, found {found[name]}" for name in sorted(set(found) - set(wanted))]
    if differing:
        more = " tensors" if len(differing) > NAMED else ""
        raise CheckpointError(f"{path} does not fit {of}: {listed_problems(differing, most=NAMED)}{more}; {advice}")


def require_moments(path: Path, weights: Mapping[str, Tensor], *, is_begun: bool) -> None:
    """Check that a safetensors file holds the state of AdamW for `weights`: for each weight the whole state, or none.

    `is_begun`: a step was taken, so that some weights have a state. A weight has none until a gradient reaches it.

    Raises:
        CheckpointError: naming the first tensor that does not fit.
    """
    found, expected = read_forms(path), dict[str, Form]()
    for name in {key.rpartition("/")[0] for key in found} & weights.keys():
        expected |= {f"{name}/step": Form("float32", ()), **{f"{name}/{field}": Form.of(weights[name]) for field in MOMENTS}}
    for key in sorted(found.keys() | expected):
        _require_moment(path, key, expected.get(key), found.get(key))
    if is_begun and not found:
        raise CheckpointError(f"{path} is damaged: it holds nothing, and steps were taken; take another step-* of this run")
    with safe_open(path, "pt") as file:
        for key in found:
            if key.endswith("/step") and not 0 <= (steps := float(file.get_tensor(key))) < inf:
                raise CheckpointError(f"{path} is damaged: {key}={steps} is not a count of steps; take another step-* of this run")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write `tensors` as the safetensors file `path`.

    Raises:
        OSError: if the disk refuses the write.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        # transformers asks for a "format"
        safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt", **metadata})
    except SafetensorError as error:
        # the library's own error type is converted; its text contains the operating system's error
        raise OSError(f"{path}: {error}") from error
    # safetensors ignores the user's umask and gives read permission to the owner only
    path.chmod(mode)


def load_model_tensors(model: nn.Module, path: Path) -> None:
    """Load the weights of `path` into `model`; only rank 0 reads them. A collective.

    Raises:
        CheckpointError: on all ranks, if names, shapes or dtypes differ; the weights are then untouched.
    """

    def read(targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        require_forms(path, targets)
        return read_tensors(path)

    fill_weights(model, read)


def fill_weights(model: nn.Module, read: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Load the result of `read`, which gets the weights by name, into `model`; only rank 0 calls `read`. A collective.

    Raises:
        TrainError: on all ranks, if `read` raises one; the weights are then untouched.
    """
    targets = model_tensors(model)
    world = here()
    found = world.on_main(lambda: read(targets)) or {}
    with torch.no_grad():
        for name, target in targets.items():
            whole = found.get(name, torch.empty(target.shape, dtype=target.dtype))
            target.copy_(_placed(world.broadcast(whole.to(target.device)), like=target))


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Load the state in `path` into `optimizer`, built for `model`; only rank 0 reads the file. A collective.

    Raises:
        CheckpointError: on all ranks, if it holds state of parameters that `model` lacks.
    """
    parameters, world = _parameters(model), here()
    found = world.on_main(lambda: _read_moments(path, parameters)) or {}
    forms = world.from_main({key: Form.of(value) for key, value in found.items()})
    fused = {id(p): bool(group.get("fused") or group.get("capturable")) for group in optimizer.param_groups for p in group["params"]}
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)
    for key, (kind, shape) in forms.items():
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        # if the optimizer is not fused, torch keeps its step count on the host
        device = parameter.device if field != "step" or fused.get(id(parameter), False) else torch.device("cpu")
        whole = found.get(key, torch.empty(shape, dtype=getattr(torch, kind)))
        value = world.broadcast(whole.to(parameter.device)).to(device)
        optimizer.state[parameter][field] = _placed(value, like=parameter) if value.shape == parameter.shape else value


def _read_moments(path: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for key, form in read_forms(path).items():
        parameter = parameters.get(key.rpartition("/")[0])
        if parameter is None or form.shape not in ((), tuple(parameter.shape)):
            _require_moment(path, key, None if parameter is None else Form.of(parameter), form)
    return read_tensors(path)


def _require_moment(path: Path, key: str, expected: Form | None, found: Form | None) -> None:
    if expected != found:
        raise CheckpointError(
            f"{path} does not fit this model: {_shown(key)} expected {expected or 'none'}, found {found or 'none'}; "
            "use the recipe that wrote it"
        )


def _shown(name: str) -> str:
    """Return a tensor's name for a message; an unusual name is quoted and shortened."""
    return name if re.fullmatch(rf"[\w./]{{1,{SHOWN}}}", name, re.ASCII) else short(name)


def _no_tensors(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is not a safetensors file ({error!r:.120}); take another step-* of this run")


def _placed(whole: Tensor, *, like: Tensor) -> Tensor:
    """Return `whole`, which every rank has, sharded as `like` is, without communication."""
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
