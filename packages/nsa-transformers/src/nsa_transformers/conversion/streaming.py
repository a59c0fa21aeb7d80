"""Modules that read their weights from files when they run, some rows at a time, so that a layer of any size needs little memory."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nsa_transformers.conversion.tensor_files import PIECE_BYTES, Stored


def streamed(module: nn.Module, tensors: Mapping[str, Stored]) -> nn.Module:
    """Change `module`, which was built on the meta device, to compute in float32 with the weights `tensors` (name -> tensor), and return it."""
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear):
            module.set_submodule(name, StreamedLinear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias")))
    for name, _parameter in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, nn.Parameter(whole(tensors[name]), requires_grad=False))
    return module.eval()


def whole(stored: Stored) -> Tensor:
    """Return a whole stored tensor, float32."""
    return stored.rows(0, stored.shape[0]).float()


class StreamedLinear(nn.Module):
    """A linear layer, x @ weight.T + bias in float32, that reads its weight from a file, some rows at a time."""

    def __init__(self, weight: Stored, bias: Stored | None) -> None:
        """Read `bias` `(out,)` from its file; `weight` `(out, in)` is read in each forward pass."""
        super().__init__()
        self._stored = weight
        self._bias = None if bias is None else whole(bias)
        self.weight: Any = torch.zeros(()).expand(weight.shape)
        """A float32 tensor of zeros with the weight's shape: attention modules read its dtype and device, but not its numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `(..., out)` of x `(..., in)`."""
        out = torch.cat([nn.functional.linear(x, rows) for rows in row_pieces(self._stored)], -1)
        return out if self._bias is None else out + self._bias


def row_pieces(stored: Stored) -> Iterator[Tensor]:
    """Yield all rows of a matrix as float32, some at a time."""
    count = max(1, PIECE_BYTES // (4 * stored.shape[1]))
    return (stored.rows(first, count).float() for first in range(0, stored.shape[0], count))
