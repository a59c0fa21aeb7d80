"""The conditions for training to continue: finite numbers, no spikes (if configured), a gradient for every parameter, and patience."""

import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nsa_core import NativeSparseAttention, NSAConfig
from nsa_core.config import BRANCHES
from nsa_core.gating import gates_from_logits
from nsa_train.checkpoint.tensors import model_tensors, optimizer_tensors
from nsa_train.errors import GuardError
from nsa_train.parallel.world import World, local_part, whole
from nsa_train.settings.config import TrainTable
from nsa_train.telemetry.records import Cause

FIRST_STEPS = 20
"""By this step every parameter must have had a gradient that is not zero."""
SKIP_WINDOW = 100
"""Number of last steps in which skips are counted against train.max_skips."""
SPIKE_WINDOW = 128
"""Number of previous losses with which a spike is compared."""
SPIKE_SIGMAS = 6.0


class StepNumbers(NamedTuple):
    """The numbers of one rank in a step, before any update."""

    loss: float
    """Loss, summed over its targets."""
    bad_batch: int
    """The first of its micro-batches whose loss is not finite; -1 if all are."""
    grad_norm: float
    """Norm of the whole model's gradient."""


class Skip(NamedTuple):
    """The reason why a step must not update the weights."""

    cause: Cause
    reason: str


class StepGuard:
    """Prevents weight updates from numbers that are not finite, on all ranks alike, and from spikes if `skip_loss_spikes` is set.

    Every rank checks the same numbers, so that all ranks skip the same steps and stop at the same one.
    """

    def __init__(self, train: TrainTable) -> None:
        self.max_skips, self.skips_spikes = train.max_skips, train.skip_loss_spikes
        self.num_skipped = 0
        """Steps skipped in the whole run."""
        self._recent_skips: deque[int] = deque()
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def judge(self, loss: float, everyone: Sequence[StepNumbers]) -> Skip | None:
        """Return why a step with the mean `loss` and the ranks' numbers `everyone` must not update the weights; None if it may."""
        for rank, found in enumerate(everyone):
            if found.bad_batch >= 0:
                return Skip(Cause.LOSS, f"the loss of rank {rank}, micro-batch {found.bad_batch} is not finite")
        norms = [found.grad_norm for found in everyone]
        if not all(map(math.isfinite, (loss, *norms))):
            worst = max(norms, key=lambda norm: (not math.isfinite(norm), norm))
            return Skip(Cause.GRADIENT, f"loss={loss:.4f} with grad_norm={worst} is not finite")
        if self.skips_spikes and len(self._losses) == SPIKE_WINDOW:
            mean, sigma = statistics.fmean(self._losses), statistics.pstdev(self._losses)
            if loss > mean + SPIKE_SIGMAS * sigma:
                limit = f"{mean:.4f} + {SPIKE_SIGMAS:g} x {sigma:.4f}"
                return Skip(Cause.SPIKE, f"loss={loss:.4f} is a spike (above {limit}, of the {SPIKE_WINDOW} steps before)")
        return None

    def passed(self, loss: float) -> None:
        """Record a step that updated the weights."""
        if self.skips_spikes:
            self._losses.append(loss)

    def skipped(self, step: int, reason: str) -> None:
        """Record a step that was skipped.

        Raises:
            GuardError: if more than train.max_skips of the last 100 steps were skipped.
        """
        self.num_skipped += 1
        self._recent_skips.append(step)
        while self._recent_skips[0] <= step - SKIP_WINDOW:
            self._recent_skips.popleft()
        if len(self._recent_skips) > self.max_skips:
            raise GuardError(
                f"step {step}: {reason}; {len(self._recent_skips)} of the last {SKIP_WINDOW} steps were skipped "
                f"(train.max_skips={self.max_skips}; the weights are finite); lower train.lr, or look at the batches that the log names"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, JSON-able."""
        return {"num_skipped": self.num_skipped, "recent_skips": [*self._recent_skips], "losses": [*self._losses]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts that `state_dict` returned."""
        self.num_skipped = state["num_skipped"]
        self._recent_skips = deque(state["recent_skips"])
        self._losses = deque(state["losses"], maxlen=SPIKE_WINDOW)


class GradientWatch:
    """Stops the run unless every parameter has a gradient at the first step and a nonzero one in steps 2 .. 20.

    Parameters of a branch for which no sequence was long enough are exempt, and those that `shut_parameters` names. With shards, a gradient counts
    on whichever rank it is not zero. Skipped steps do not count: if step 20 was skipped, the next step is checked.
    """

    def __init__(self, model: nn.Module, *, last_step: int, world: World | None = None) -> None:
        """Watch `model` up to step 20, or `last_step` if that comes first."""
        self.last_step = min(FIRST_STEPS, last_step)
        self.longest = 0
        self.num_observed = 0
        self._world = world
        self._opening_lengths = opening_lengths(model)
        shut = shut_parameters(model)
        self._pending = {name: p for name, p in model.named_parameters() if p.requires_grad and name not in shut}

    def observe(self, step: int, longest: int) -> None:
        """Check the gradients of `step`, in which the longest sequence of all ranks had `longest` tokens.

        Raises:
            GuardError: naming the parameters without a gradient.
        """
        self.longest = max(self.longest, longest)
        self.num_observed += 1
        if self.num_observed == 1:
            missing = [name for name, p in self._pending.items() if p.grad is None and self._is_open(name)]
            if missing:
                raise GuardError(f"step {step}: no gradient reaches {some(missing)}; the graph is cut before it")
        elif self._pending:
            here = [p.grad is not None and bool(local_part(p.grad).any()) for p in self._pending.values()]
            ranks = self._world.gather(here) if self._world else [here]
            self._pending = {name: p for (name, p), *moved in zip(self._pending.items(), *ranks, strict=True) if not any(moved)}
            if step >= self.last_step:
                self._require_moved(step)

    def ended(self, step: int) -> None:
        """Check a run that ends with `step`, even if that step was skipped.

        Raises:
            GuardError: naming the parameters without a gradient, also if no step was taken at all.
        """
        if self.num_observed == 0 and self._pending:
            raise GuardError(
                f"step {step}: no gradient ever reached {some([*self._pending])}, as every step was skipped; "
                "lower train.lr, or look at the batches that the log names"
            )
        # the first gradients may be zero, so after a single step nothing is known
        if self.num_observed > 1 and step >= self.last_step:
            self._require_moved(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the observations so far, JSON-able."""
        return {"num_observed": self.num_observed, "longest": self.longest, "pending": [*self._pending]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the observations that `state_dict` returned."""
        self.num_observed, self.longest = state["num_observed"], state["longest"]
        self._pending = {name: p for name, p in self._pending.items() if name in set(state["pending"])}

    def _require_moved(self, step: int) -> None:
        still = [name for name in self._pending if self._is_open(name)]
        if still:
            raise GuardError(f"step {step}: the gradient of {some(still)} was zero in every step since 2; it does not train")
        # checked once
        self._pending = {}

    def _is_open(self, name: str) -> bool:
        return self.longest >= self._opening_lengths.get(name, 1)


def shut_parameters(model: nn.Module) -> set[str]:
    """Return the names of parameters that no gradient can reach, because gates that do not depend on x yet are exactly 0 or 1.

    So a conversion begins in a layer of one branch, and with `--gates selected`. A collective if weights are sharded.
    """
    found = set[str]()
    for name, layer in model.named_modules():
        if not isinstance(layer, NativeSparseAttention):
            continue
        weight, bias = whole(layer.gate.down.weight.detach()), whole(layer.gate.down.bias.detach())
        if bool(weight.any()):
            continue
        config = layer.config
        logits = bias.view(1, 1, -1, len(BRANCHES))
        sees_all = torch.ones(1, 1, dtype=torch.bool, device=bias.device)
        gates = gates_from_logits(logits, sees_all, kind=config.gate, temperature=config.gate_temperature, branches=config.branches)
        if not bool(((gates == 0) | (gates == 1)).all()):
            continue
        closed = [branch for index, branch in enumerate(BRANCHES) if not gates[..., index].any()]
        starts = ["gate.", *(f"{each}.{branch}." for branch in closed for each in ("k_proj", "v_proj", "k_norm"))]
        starts += ["compress_"] if "cmp" in closed else []
        found |= {f"{name}.{parameter}" for parameter, _ in layer.named_parameters() if parameter.startswith(tuple(starts))}
    return found


def opening_lengths(model: nn.Module) -> dict[str, int]:
    """Return parameter -> tokens of the shortest sequence that gives it a gradient, for NSA layers; absent: 1.

    Values need one visible key. Keys and queries need two visible keys.
    """
    return {
        f"{name}.{parameter}": length
        for name, module in model.named_modules()
        if isinstance(module, NativeSparseAttention)
        for parameter, _ in module.named_parameters()
        for start, length in _opening_lengths_by_prefix(module.config).items()
        if parameter.startswith(start)
    }


def _opening_lengths_by_prefix(config: NSAConfig) -> dict[str, int]:
    size, stride = config.geometry.compression_block_size, config.geometry.compression_stride
    keys = {
        "cmp": size + stride,
        "slc": 2 if config.geometry.num_selected_blocks * config.geometry.selection_block_size > 1 else sys.maxsize,
        "win": 2 if config.geometry.window_size > 1 else sys.maxsize,
    }
    lengths = {"compress_k": keys["cmp"], "compress_v": size}
    any_branch = min(keys[branch] for branch in config.branches)
    lengths |= dict.fromkeys(("q_proj", "q_norm"), any_branch)
    if config.kv == "shared":
        lengths |= dict.fromkeys(("k_proj", "k_norm"), any_branch)
    else:
        lengths |= {f"{name}.{branch}": length for branch, length in keys.items() for name in ("k_proj", "k_norm")}
        lengths["v_proj.cmp"] = size
    lengths["gate"] = _opening_length_of_gate(config)
    if config.branches == ("cmp",):
        lengths |= dict.fromkeys(("o_proj", "v_proj"), size)
    return lengths


def _opening_length_of_gate(config: NSAConfig) -> int:
    """Return the tokens from which the gate gets a gradient: a softmax needs branches that differ."""
    geometry = config.geometry
    if config.gate == "sigmoid" and config.branches != ("cmp",):
        return 1
    found = [geometry.compression_block_size] if "cmp" in config.branches else []
    if {"slc", "win"} <= set(config.branches):
        # with shared keys and values both branches return the same result until one of them omits tokens
        covered = min(geometry.window_size, geometry.num_selected_blocks * geometry.selection_block_size)
        found.append(covered + 1 if config.kv == "shared" else 1)
    return min(found)


class Patience:
    """Early stopping: counts evaluations in a row without a better validation loss. With `most` 0 the run never ends early."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.best = math.inf
        self.num_worse = 0

    @property
    def has_observed(self) -> bool:
        """True after the first evaluation with a finite loss."""
        return not math.isinf(self.best)

    @property
    def is_over(self) -> bool:
        """True once `most` evaluations in a row brought no better loss."""
        return 0 < self.most <= self.num_worse

    def observe(self, loss: float) -> None:
        """Record an evaluation."""
        self.num_worse = 0 if loss < self.best else self.num_worse + 1
        self.best = min(self.best, loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, JSON-able."""
        return {"best": self.best if self.has_observed else None, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts that `state_dict` returned."""
        self.best, self.num_worse = (math.inf if state["best"] is None else state["best"]), state["num_worse"]

    def __str__(self) -> str:
        return f"no better validation loss than {self.best:.4f} in {self.num_worse} evaluations"


def require_finite_state(model: nn.Module, optimizer: torch.optim.Optimizer, world: World, *, step: int, saved_at: int | None) -> None:
    """Check on all ranks that weights and moments are finite; the newest checkpoint is that of `saved_at`. A collective.

    Raises:
        GuardError: on all ranks, naming the tensors that are not finite.
    """
    # model_tensors first: it makes FSDP free its gathered weights, and the names of the moments come from the sharded weights
    weights = model_tensors(model)
    gathered = world.gather(not_finite({**weights, **optimizer_tensors(model, optimizer)}))
    names = list(dict.fromkeys(name for part in gathered for name in part))
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
    """Return the names of the `tensors` with values that are not finite (for shards: on this rank); waits for the device once."""
    if not tensors:
        return []
    flags = torch.stack([local_part(tensor).isfinite().all() for tensor in tensors.values()]).tolist()
    return [name for name, is_finite in zip(tensors, flags, strict=True) if not is_finite]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameter -> gradient, for parameters that have one."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def some(names: list[str]) -> str:
    """Return the first three of `names`, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
