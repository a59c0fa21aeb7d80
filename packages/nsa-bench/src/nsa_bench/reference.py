"""What an operation should have returned, on a sample of query rows, forward and backward.

Short sequences are judged by the oracle of nsa_core (`naive`), longer ones by `rows`, both in float64. The gradient fed
back is zero but on the sampled rows, so all gradients of keys and values come from them and are compared whole.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_bench.cases import Case
from nsa_bench.rows import KEYS, ROW_OPERANDS, Piece, Sample, attend_rows, choose_rows, sample_rows
from nsa_core import BlockGeometry
from nsa_core.reference import naive
from nsa_core.testing.inputs import Inputs
from nsa_core.testing.tolerances import LIMITS, near_tie_margin

ORACLE_MAX_LENGTH = 2048
"""Tokens up to which the oracle's loops take seconds."""
MAX_WEIGHT = 2.0**10
"""That of 64k tokens; more would leave the range of fp16."""
OPERANDS = {name: ("q", *keys) for name, keys in KEYS.items()} | {
    "nsa": ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "gates")
}
"""The differentiable operands of each operation, in its order."""
Values = dict[str, Tensor]
"""`out` and the gradients `d` + operand; those of ROW_OPERANDS, and out, at the sampled rows only."""


class Expected(NamedTuple):
    """What is compared with what."""

    sample: Sample
    kept: Tensor
    """bool (R, G): False where the choice of blocks is a near tie, which either way is right."""
    dout: Tensor
    """(R, H, D_v): the gradient that is fed back at the sampled rows."""
    weights: Tensor
    """(R,): powers of 2 that dout was multiplied by, so that no row's share in a key's gradient drowns."""
    values: Values
    """In float64."""
    torch_values: Values | None
    """The same from torch's MATH attention in the case's dtype; None where limits are fixed."""
    method: str
    """Which reference, and on how many rows."""

    @property
    def num_near_ties(self) -> int:
        """Return how many (row, group) pairs are not compared."""
        return int((~self.kept).sum())


def operands_of(operation: str, inputs: Inputs) -> dict[str, Tensor]:
    """Return the operands of `operation` by name, in its order."""
    return {name: getattr(inputs, name) for name in OPERANDS[operation]}


def expect(operation: str, inputs: Inputs, case: Case, block_indices: Tensor | None = None) -> Expected:
    """Return what "cmp", "slc", "win", "nsa" or "dense" should give for `inputs`; block_indices `(1, S, G, n)` for "slc"."""
    operands = operands_of(operation, inputs)
    sample = sample_rows(case, inputs.q.device)
    oracle = max(case.sequence_lengths) <= ORACLE_MAX_LENGTH
    chosen, kept = _choose(operation, operands, sample, case, block_indices)

    def exact(leaves: dict[str, Tensor]) -> Tensor:
        return _attend(operation, leaves, sample, chosen, case.geometry, oracle=oracle)

    def in_torch(leaves: dict[str, Tensor]) -> Tensor:
        return _attend(operation, leaves, sample, chosen, case.geometry, oracle=False)

    return expectation(exact, in_torch, operands, sample, kept, case, "oracle" if oracle else "rows")


def expectation(
    exact: Callable[[dict[str, Tensor]], Tensor],
    in_torch: Callable[[dict[str, Tensor]], Tensor],
    operands: dict[str, Tensor],
    sample: Sample,
    kept: Tensor,
    case: Case,
    method: str,
) -> Expected:
    """Return the expectation of any function of `operands`; `exact` gets float64 leaves, `in_torch` the case's dtype."""
    shape, device = case.shape, kept.device
    weights = _weights(sample.positions)
    generator = torch.Generator(device).manual_seed(1)
    noise = torch.randn(len(kept), shape.num_heads, shape.head_dim_v, device=device, generator=generator).to(case.dtype)
    dout = noise * (weights.unsqueeze(1) * kept.repeat_interleave(shape.heads_per_group, 1)).unsqueeze(-1).to(case.dtype)
    return Expected(
        sample=sample,
        kept=kept,
        dout=dout,
        weights=weights,
        values=_evaluate(exact, operands, sample, dout, torch.float64),
        torch_values=None if case.dtype in LIMITS else _evaluate(in_torch, operands, sample, dout, case.dtype),
        method=f"{method} in float64, {len(kept)} of {case.seq_len} rows",
    )


def _choose(
    operation: str, operands: dict[str, Tensor], sample: Sample, case: Case, block_indices: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Return the blocks (R, G, n) of the sampled rows and which choices count; the given ones, or those by float64 scores."""
    index = sample.rows
    if operation == "nsa":
        return choices(operands, sample, case)
    kept = torch.ones(len(index), case.shape.num_kv_heads, dtype=torch.bool, device=index.device)
    return None if block_indices is None else block_indices[0, index], kept


def choices(operands: dict[str, Tensor], sample: Sample, case: Case) -> tuple[Tensor, Tensor]:
    """Return block_indices (R, G, n) of the sampled rows by float64 scores, and bool (R, G): above the near-tie margin."""
    exact = {name: _part(name, operands[name], sample, torch.float64) for name in ("q", "k_cmp")}
    found = []
    for piece, part in zip(sample.pieces, sample.split(exact, case.geometry), strict=True):
        choice = choose_rows(piece, part["q"], part["k_cmp"], case.geometry)
        found.append((choice.chosen, choice.margin > near_tie_margin(choice.highest, case.dtype)))
    chosen, kept = zip(*found, strict=True)
    return torch.cat(chosen), torch.cat(kept)


def _attend(
    operation: str, leaves: dict[str, Tensor], sample: Sample, chosen: Tensor | None, geometry: BlockGeometry, *, oracle: bool
) -> Tensor:
    parts = sample.split(leaves, geometry)
    counts = [len(piece.positions) for piece in sample.pieces]
    picked = [None] * len(parts) if chosen is None else chosen.split(counts)
    attend = _ask_oracle if oracle else attend_rows
    return torch.cat(
        [attend(operation, piece, part, blocks, geometry) for piece, part, blocks in zip(sample.pieces, parts, picked, strict=True)]
    )


def attend_exactly(operation: str, leaves: dict[str, Tensor], sample: Sample, chosen: Tensor | None, geometry: BlockGeometry) -> Tensor:
    """Return out `(R, H, D_v)` of the sampled rows by `rows`, differentiable in `leaves`."""
    return _attend(operation, leaves, sample, chosen, geometry, oracle=False)


def _ask_oracle(operation: str, piece: Piece, operands: dict[str, Tensor], chosen: Tensor | None, geometry: BlockGeometry) -> Tensor:
    """Return the oracle's out `(R, H, D_v)`: every row is a batch entry of its own, placed by its position."""
    count, start = len(piece.positions), piece.positions.int().cpu()
    batch = {name: x.unsqueeze(1 if name in ROW_OPERANDS else 0).cpu() for name, x in operands.items()}
    entries = {name: x if name in ROW_OPERANDS else x.expand(count, *x.shape[1:]) for name, x in batch.items()}
    if operation == "nsa":
        out = naive.nsa_attention(*entries.values(), geometry=geometry, query_start=start)
    else:
        q, k, v = entries.values()
        if operation == "dense":
            out = naive.dense_attention(q, k, v, query_start=start).out
        elif operation == "cmp":
            out = naive.compressed_attention(q, k, v, geometry=geometry, query_start=start).out
        elif operation == "win":
            out = naive.sliding_window_attention(q, k, v, geometry=geometry, query_start=start).out
        else:
            assert chosen is not None
            out = naive.selected_attention(q, k, v, chosen.unsqueeze(1).cpu(), geometry=geometry, query_start=start).out
    return out[:, 0].to(piece.positions.device)


def _evaluate(
    function: Callable[[dict[str, Tensor]], Tensor], operands: dict[str, Tensor], sample: Sample, dout: Tensor, dtype: torch.dtype
) -> Values:
    leaves = {name: _part(name, x, sample, dtype).requires_grad_() for name, x in operands.items()}
    with torch.enable_grad():
        out = function(leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout.to(out), materialize_grads=True)
    return {"out": out.detach()} | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def _part(name: str, x: Tensor, sample: Sample, dtype: torch.dtype) -> Tensor:
    """Return a copy of what the reference needs of x `(1, ...)`: the sampled rows, or all keys."""
    return (x[0, sample.rows] if name in ROW_OPERANDS else x[0]).detach().to(dtype, copy=True)


def _weights(positions: Tensor) -> Tensor:
    """Return (R,) powers of 2 that grow with the number of keys a row sees: its weight on each of them shrinks."""
    return (2.0 ** torch.log2(positions // 64 + 1).floor()).clamp(max=MAX_WEIGHT)
