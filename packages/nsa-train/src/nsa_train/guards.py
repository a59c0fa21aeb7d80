"""What must hold for training to go on: finite numbers, and a gradient for every parameter."""

import math
import sys

from torch import nn

from nsa_core import NativeSparseAttention, NSAConfig
from nsa_train.errors import GuardError

FIRST_STEPS = 20
"""By this step every parameter has had a gradient that is not zero."""


def check_finite(step: int, *, loss: float, grad_norm: float, model: nn.Module) -> None:
    """Let finite numbers pass; called before the optimizer, so that others never reach the weights.

    Raises:
        GuardError: naming the step, and the parameters where the loss was still finite.
    """
    if not math.isfinite(loss):
        raise GuardError(f"step {step}: loss={loss} is not finite (the weights are those of step {step - 1}); lower train.lr")
    if not math.isfinite(grad_norm):
        names = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        raise GuardError(
            f"step {step}: grad_norm={grad_norm} is not finite, in {_some(names)} (the weights are those of step {step - 1}); "
            "lower train.lr"
        )


class GradientWatch:
    """Every parameter has a finite gradient at step 1 and one that is not zero in steps 2 .. 20, or the run stops.

    Parameters of a branch that no sequence was long enough to open are excepted.
    """

    def __init__(self, model: nn.Module, *, last_step: int) -> None:
        """Watch `model` up to step 20, or `last_step` where that comes first."""
        self.last_step = min(FIRST_STEPS, last_step)
        self.longest = 0
        self._opening_lengths = opening_lengths(model)
        self._pending = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def observe(self, step: int, longest: int) -> None:
        """Look at the gradients of `step`, which saw sequences of at most `longest` tokens.

        Raises:
            GuardError: naming the parameters without a gradient.
        """
        self.longest = max(self.longest, longest)
        if step == 1:
            missing = [name for name, p in self._pending.items() if p.grad is None and self._is_open(name)]
            if missing:
                raise GuardError(f"step 1: no gradient reaches {_some(missing)}; the graph is cut before it")
        elif self._pending and step <= self.last_step:
            self._pending = {name: p for name, p in self._pending.items() if p.grad is None or not bool(p.grad.any())}
            still = [name for name in self._pending if self._is_open(name)]
            if step == self.last_step and still:
                raise GuardError(f"step {step}: the gradient of {_some(still)} was zero in every step since 2; it does not train")

    def _is_open(self, name: str) -> bool:
        return self.longest >= self._opening_lengths.get(name, 1)


def opening_lengths(model: nn.Module) -> dict[str, int]:
    """Return parameter -> tokens of the shortest sequence that moves it, for NSA layers; absent: 1.

    Values need one key to read. Keys, and the queries that meet them, need two to choose from.
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
    lengths = {f"k_proj.{branch}": length for branch, length in keys.items()}
    lengths |= {"compress_k": keys["cmp"], "v_proj.cmp": size, "compress_v": size}
    lengths["q_proj"] = min(keys[branch] for branch in config.branches)
    if config.branches == ("cmp",):
        lengths |= {"gate": size, "o_proj": size}
    return lengths


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
