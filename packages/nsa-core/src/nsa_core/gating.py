"""Gates of the three branches (Eq. 5): a small MLP maps the layer's input to one gate per branch and query head."""

from typing import Any

import torch
from torch import Tensor, nn

from nsa_core.config import BRANCHES, GateKind
from nsa_core.errors import InputError


def gates_from_logits(
    logits: Tensor, has_compressed: Tensor | None, *, kind: GateKind, temperature: float = 1.0, branches: tuple[str, ...] = BRANCHES
) -> Tensor:
    """Return gates `(B, S, H, 3)` (cmp, slc, win), at least float32, from logits of the same shape.

    `has_compressed`, bool `(B, S)`, is False for tokens that see no compressed block. Their softmax gate of cmp is 0, and the other
    gates sum to 1. The sigmoid gate does not read `has_compressed`, because the output of cmp is 0 there. A branch that is not in
    `branches` has gate 0.

    Raises:
        InputError: if `has_compressed` is None for the softmax gate.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        logits = logits / temperature
    if kind == "softmax" or logits.requires_grad:
        # if a logit overflows, a gradient of 0 would become 0 * inf = NaN without the clamp; the limit of half the range keeps all logits above
        # finfo.min, the value of closed gates
        limit = torch.finfo(logits.dtype).max / 2
        logits = logits.clamp(-limit, limit)
    if kind == "sigmoid":
        gates = logits.sigmoid()
        if len(branches) == len(BRANCHES):
            return gates
        absent = [index for index, name in enumerate(BRANCHES) if name not in branches]
        if gates.requires_grad:
            # the backward pass of sigmoid reads the result, so it must not change in place
            gates = gates.clone()
        for index in absent:
            gates[..., index].zero_()
        return gates
    if has_compressed is None:
        raise InputError("has_compressed is None (the softmax gate reads it); give bool (B, S)")
    # filled on the device: a tensor from a Python list would wait for its copy
    always = torch.ones_like(has_compressed)
    seen = {"cmp": has_compressed, "slc": always, "win": always}
    is_open = torch.stack([seen[name] if name in branches else torch.zeros_like(always) for name in BRANCHES], -1).unsqueeze(-2)
    # finfo.min, not -inf: where nothing is open the gradient must be 0, not NaN
    masked = logits.masked_fill(~is_open, torch.finfo(logits.dtype).min)
    return masked.softmax(-1) * is_open


@torch.library.custom_op("nsa_core::gated_sum", mutates_args=())
def gated_sum(gates: Tensor, cmp: Tensor | None, slc: Tensor | None, win: Tensor | None) -> Tensor:
    """Return the sum of gates `(B, S, H, 3)` times branch outputs `(B, S, H, D_v)`, in at least float32 (Eq. 5).

    A branch that is None is absent. In the backward pass, a row with gradient 0 gives gradients of exactly 0, even if its gates or
    outputs are NaN because scores overflowed. The plain derivative of the product would be 0 * NaN = NaN.
    """
    total = None
    for column, out in enumerate((cmp, slc, win)):
        if out is not None:
            acc = torch.promote_types(out.dtype, torch.float32)
            term = out.to(acc) * gates[..., column, None].to(acc)
            total = term if total is None else total + term
    assert total is not None
    return total


@gated_sum.register_fake
def _(gates: Tensor, *branches: Tensor | None) -> Tensor:
    out = next(out for out in branches if out is not None)
    return torch.empty_like(out, dtype=torch.promote_types(out.dtype, torch.float32))


def _keep_operands(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gated_sum_backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
    gates, *branches = ctx.saved_tensors
    is_row = dtotal.abs().amax(-1) != 0
    dgates = torch.zeros_like(gates)
    douts: list[Tensor | None] = [None, None, None]
    for column, out in enumerate(branches):
        if out is not None:
            dgates[..., column] = torch.where(is_row, (dtotal * out.to(dtotal.dtype)).sum(-1), 0)
            gate = torch.where(is_row, gates[..., column], 0).to(dtotal.dtype)
            douts[column] = (dtotal * gate.unsqueeze(-1)).to(out.dtype)
    return dgates, *douts


gated_sum.register_autograd(_gated_sum_backward, setup_context=_keep_operands)


class GateMLP(nn.Module):
    """Computes gate logits from a layer's input. The last Linear starts at zero, so that all gates start equal."""

    def __init__(self, hidden_size: int, num_heads: int, gate_hidden_size: int) -> None:
        """Build `hidden_size` -> `gate_hidden_size` -> 3 * `num_heads`."""
        super().__init__()
        self.up = nn.Linear(hidden_size, gate_hidden_size)
        self.down = nn.Linear(gate_hidden_size, 3 * num_heads)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(B, S, H, 3)` of x `(B, S, hidden_size)`."""
        hidden = self.up(x)
        # if a number overflows, a gradient of 0 would become 0 * inf = NaN without the clamp
        limit = torch.finfo(hidden.dtype).max
        logits: Tensor = self.down(nn.functional.silu(hidden.clamp(-limit, limit)))
        return logits.view(*logits.shape[:-1], logits.shape[-1] // 3, 3)
