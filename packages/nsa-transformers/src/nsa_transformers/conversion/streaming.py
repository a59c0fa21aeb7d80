"""Modules that read their weights from files when they need them: a layer of any size needs memory for a few rows."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nsa_transformers.conversion.tensor_files import PIECE_BYTES, Stored


def streamed(module: nn.Module, tensors: Mapping[str, Stored]) -> nn.Module:
    """Return `module`, built on the meta device, so that it computes in float32 with the weights `tensors`, which have the module's names."""
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
    """x @ weight.T + bias in float32, whose weight is read some rows at a time."""

    def __init__(self, weight: Stored, bias: Stored | None) -> None:
        """Read `weight` `(out, in)` and `bias` `(out,)` from their files."""
        super().__init__()
        self._stored = weight
        self._bias = None if bias is None else whole(bias)
        self.weight: Any = torch.zeros(()).expand(weight.shape)
        """A stand-in with the weight's dtype and shape, which attention reads."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `(..., out)` of x `(..., in)`."""
        out = torch.cat([nn.functional.linear(x, rows) for rows in row_pieces(self._stored)], -1)
        return out if self._bias is None else out + self._bias


def row_pieces(stored: Stored) -> Iterator[Tensor]:
    """Yield the rows of a matrix, float32, a few at a time."""
    count = max(1, PIECE_BYTES // (4 * stored.shape[1]))
    return (stored.rows(first, count).float() for first in range(0, stored.shape[0], count))
