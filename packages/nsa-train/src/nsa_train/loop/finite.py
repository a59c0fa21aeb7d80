"""The names of a run's tensors that are not finite: asked where numbers went wrong, and before a state is saved."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nsa_train.checkpoint.tensors import model_tensors, optimizer_tensors
from nsa_train.errors import GuardError
from nsa_train.parallel.sharding import local_part
from nsa_train.parallel.world import World


def require_finite_state(model: nn.Module, optimizer: torch.optim.Optimizer, world: World, *, step: int, saved_at: int | None) -> None:
    """Let the ranks go on whose weights and moments are finite, all of them; the newest checkpoint is that of `saved_at`. A collective.

    Raises:
        GuardError: on all ranks, naming what is not.
    """
    # in this order: FSDP gives its gathered weights back for the first, and the moments are known by the sharded ones
    weights = model_tensors(model)
    told = world.gather(not_finite({**weights, **optimizer_tensors(model, optimizer)}))
    names = list(dict.fromkeys(name for part in told for name in part))
    if not names:
        return
    # weights that are not finite spoil the moments, too
    spoiled = [name for name in names if name in weights]
    what, key = ("weights", "train.lr") if spoiled else ("optimizer's moments", "train.grad_clip")
    kept = "there is no checkpoint yet" if saved_at is None else f"step-{saved_at} is the newest checkpoint"
    raise GuardError(
        f"step {step}: the {what} are not finite in {some(spoiled or names)} (an update ran over); they are not saved, {kept}; "
        f"go on with --resume and a lower {key}"
    )


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the `tensors` that are not finite throughout, this rank's shards where they are shared; one wait."""
    if not tensors:
        return []
    flags = torch.stack([local_part(tensor).isfinite().all() for tensor in tensors.values()]).tolist()
    return [name for name, is_finite in zip(tensors, flags, strict=True) if not is_finite]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameter -> gradient, where there is one."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def some(names: list[str]) -> str:
    """Return the first three of `names`, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
