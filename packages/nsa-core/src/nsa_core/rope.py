"""Rotary position embedding, rotate-half as in Hugging Face Llama, with linear, YaRN and Llama 3 scaling."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_core.config import RopeScaling

_KEPT: dict[tuple[int, float, RopeScaling | None, torch.device], Tensor] = {}
"""Cached frequencies, a few hundred bytes each, by size, theta, scaling and device."""


class RopeTables(NamedTuple):
    """cos and sin of the angles of every position, float32 `(S, D)` or `(B, S, D)`.

    For pair i, column i of `sin` holds -sin and column i + D / 2 holds sin; both columns of `cos` hold cos.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """RoPE: rotates each pair (x_i, x_{i + D/2}) by the angle position * theta ** (-2i / D). It has no parameters and no buffers."""

    def __init__(self, dim: int, theta: float = 10000.0, scaling: RopeScaling | None = None) -> None:
        """Rotate vectors of even size `dim`."""
        super().__init__()
        self.dim = dim
        self.theta = theta
        self.scaling = scaling

    def tables(self, positions: Tensor) -> RopeTables:
        """Return the float32 tables of integer `positions` `(S,)` or `(B, S)`."""
        # fake tensors cannot be combined with cached real ones
        frequencies = self.kept_frequencies(positions.device) if type(positions) is Tensor else self._both_frequencies(positions.device)
        angles, factor = positions.to(torch.float32).unsqueeze(-1) * frequencies, self.attention_factor()
        cos, sin = angles.cos(), angles.sin()
        return RopeTables(cos, sin) if factor == 1 else RopeTables(cos * factor, sin * factor)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x `(B, S, H, D)` rotated at `positions` `(S,)` or `(B, S)`, in x's dtype."""
        return rotate(x, self.tables(positions))

    def kept_frequencies(self, device: torch.device) -> Tensor:
        """Return float32 `(D,)`: the negated `frequencies`, then `frequencies`; cached per device for the life of the process.

        A CUDA graph reads the cached tensor. If there is none when the graph is captured, the graph computes it at every replay, in its own
        memory, and nothing is cached. A graph of torch.compile always computes it.
        """
        if torch.compiler.is_compiling():
            return self._both_frequencies(device)
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        key = self.dim, self.theta, self.scaling, device
        found = _KEPT.get(key)
        if found is not None:
            return found
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._both_frequencies(device)
        with torch.inference_mode(False), torch.no_grad():
            # a blocking copy, so that every stream can read them
            found = self._both_frequencies(torch.device("cpu")).to(device)
        if type(found) is Tensor:
            _KEPT[key] = found
        return found

    def _both_frequencies(self, device: torch.device) -> Tensor:
        frequencies = self.frequencies(device)
        return torch.cat([-frequencies, frequencies])

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle by which each pair turns from one position to the next, float32 `(D / 2,)`."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        frequencies = self.theta**-exponents
        if self.scaling is None:
            return frequencies
        if self.scaling.kind == "linear":
            return frequencies / self.scaling.factor
        shares = self._fast_share if self.scaling.kind == "llama3" else self._extrapolated_share
        kept = shares(self.scaling, device)
        return frequencies * kept + frequencies / self.scaling.factor * (1 - kept)

    def _extrapolated_share(self, scaling: RopeScaling, device: torch.device) -> Tensor:
        """Return YaRN's share of the unscaled frequency per dimension pair: 1 for fast pairs, 0 for slow pairs."""
        low = max(math.floor(self._pair_with_rotations(scaling.beta_fast, scaling)), 0)
        high = min(math.ceil(self._pair_with_rotations(scaling.beta_slow, scaling)), self.dim - 1)
        pairs = torch.arange(self.dim // 2, dtype=torch.float32, device=device)
        return 1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)

    def _fast_share(self, scaling: RopeScaling, device: torch.device) -> Tensor:
        """Return Llama 3's share of the unscaled frequency per dimension pair: linear in the number of turns over the original length."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        turns = scaling.original_max_position * self.theta**-exponents / (2 * math.pi)
        return ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)

    def _pair_with_rotations(self, rotations: float, scaling: RopeScaling) -> float:
        turns = scaling.original_max_position / (rotations * 2 * math.pi)
        return self.dim * math.log(turns) / (2 * math.log(self.theta))

    def attention_factor(self) -> float:
        """Return the factor of cos and sin: 1, except with YaRN."""
        if self.scaling is None or self.scaling.kind != "yarn":
            return 1.0
        if self.scaling.attention_factor is not None:
            return self.scaling.attention_factor
        return 0.1 * math.log(self.scaling.factor) + 1.0


def unrotated(x: Tensor, positions: Tensor) -> Tensor:
    """Return x unchanged: a rotation that does nothing."""
    return x


def rotate(x: Tensor, tables: RopeTables) -> Tensor:
    """Return x `(B, S, H, D)` with its halves rotated, computed in at least float32, in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, -1)
    # both halves in one operation: half as many operations as one by one
    return torch.addcmul(wide * tables.cos.unsqueeze(-2), torch.cat([second, first], -1), tables.sin.unsqueeze(-2)).to(x.dtype)


def rotate_step(heads: tuple[Tensor, ...], start: Tensor, rope: RotaryEmbedding) -> tuple[Tensor, ...]:
    """Return each of `heads` after RoPE: the reference of the operation ROTATE; see `backends.base.RotateBackend`."""
    tables = rope.tables(start.unsqueeze(1) + torch.arange(heads[0].shape[1], device=start.device))
    return tuple(rotate(x, tables) for x in heads)
