"""Gates of the three branches (Eq. 5): a small MLP of the block's input, one gate per branch and query head."""

import torch
from torch import Tensor, nn

from nsa_core.config import BRANCHES, GateKind


def gates_from_logits(
    logits: Tensor, has_compressed: Tensor, *, kind: GateKind, temperature: float = 1.0, branches: tuple[str, ...] = BRANCHES
) -> Tensor:
    """Return gates `(B, S, H, 3)` (cmp, slc, win), at least float32, from logits of the same shape.

    `has_compressed` `(B, S)`: False where a token sees no compressed block. There the softmax gate gives that branch
    logit -inf, so that the others share 1; the sigmoid gate needs nothing, its branch contributes 0. A branch that is
    not in `branches` has gate 0.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    # filled on the device: a tensor made of a Python list would wait for its copy
    always = torch.ones_like(has_compressed)
    seen = {"cmp": always if kind == "sigmoid" else has_compressed, "slc": always, "win": always}
    is_open = torch.stack([seen[name] if name in branches else torch.zeros_like(always) for name in BRANCHES], -1).unsqueeze(-2)
    if kind == "sigmoid":
        return logits.sigmoid() * is_open
    # finfo.min, not -inf: where nothing is open the gradient must be 0, not NaN
    masked = logits.masked_fill(~is_open, torch.finfo(logits.dtype).min)
    return masked.softmax(-1) * is_open


class GateMLP(nn.Module):
    """Gate logits of a block's input; the last layer starts at zero, so that all branches start equal."""

    def __init__(self, hidden_size: int, num_heads: int, gate_hidden_size: int) -> None:
        """Build `hidden_size` -> `gate_hidden_size` -> 3 * `num_heads`."""
        super().__init__()
        self.num_heads = num_heads
        self.up = nn.Linear(hidden_size, gate_hidden_size)
        self.down = nn.Linear(gate_hidden_size, 3 * num_heads)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(B, S, H, 3)` of x `(B, S, hidden_size)`."""
        logits: Tensor = self.down(nn.functional.silu(self.up(x)))
        return logits.view(*logits.shape[:-1], self.num_heads, 3)
