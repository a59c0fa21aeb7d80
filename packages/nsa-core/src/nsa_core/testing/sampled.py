"""Check operations on long sequences, forward and backward, at a sample of their query rows.

    expected = expect("win", inputs, geometry)
    check = compare(backward_values(run, operands_of("win", inputs), expected), expected)
    assert not check.problems, check.problems

The reference runs in float64. For short sequences it is the oracle (`naive`); for longer ones it is attention of the sampled rows with masks
over all keys (`attend_rows`). The gradient of out is zero except in the sampled rows, so all gradients of keys and values come from these rows
and are compared completely.

The limit for a whole result is `tolerances.allowed`. Rows that see many keys have small values, and the larger errors of rows that see few
keys would hide their errors. So each row (a query's out and gradients, a key's gradients) also has its own limit. This limit is ROW_SLACK times
as wide, because the worst of many thousand rows has a larger rounding error than a typical row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from attrs import frozen
from torch import Tensor

from nsa_core.config import BlockGeometry
from nsa_core.reference import naive
from nsa_core.testing.inputs import Inputs
from nsa_core.testing.sampled_rows import KEYS, ROW_OPERANDS, Piece, Sample, attend_rows, choose_rows, sample_rows
from nsa_core.testing.tolerances import LIMITS, allowed, near_tie_margin

ORACLE_MAX_LENGTH = 2048
"""Maximum length for which the oracle is used; its loops then take seconds."""
MAX_WEIGHT = 2.0**10
"""Largest weight of a row, reached at 64k tokens; a larger one would leave the range of fp16."""
OPERANDS = {name: ("q", *keys) for name, keys in KEYS.items()} | {
    "nsa": ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "gates")
}
"""Operation -> names of its differentiable operands, in its order."""
ROW_SLACK = 4
SMALLEST_SHARE = 2**-6
SMALLEST_KEY_SHARE = 2**-4
LARGEST_SMALLEST_SHARE = 2**-2
"""Minimum that a row's largest value counts as, as a share of the whole result's largest value. It exists because the terms of a gradient can
cancel, so that only rounding errors remain. For gradients of queries the share falls from LARGEST_SMALLEST_SHARE, at queries that see few keys,
to SMALLEST_SHARE at later queries. For gradients of keys it is SMALLEST_KEY_SHARE, and for outputs, which do not cancel in this way,
SMALLEST_SHARE.
"""
NOTHING = 2**-20
"""A gradient below this share of the largest one counts as 0 up to rounding. For example, the gradient of q is 0 if no query sees two keys.

Errors of such a gradient, also of an exact zero, are relative to the largest gradient of any operand.
"""
Values = dict[str, Tensor]
"""Name -> value: `out`, and the gradient of each operand as `d` + its name. out and gradients of ROW_OPERANDS have only the sampled rows."""


class Expected(NamedTuple):
    """The values with which a result is compared, and the gradient of out that leads to them."""

    sample: Sample
    kept: Tensor
    """bool (R, G): False at near ties, where either choice is right."""
    dout: Tensor
    """(R, H, D_v): the gradient of out at the sampled rows, in the operands' dtype."""
    weights: Tensor
    """(R,): powers of 2 by which dout was multiplied, so that every row contributes visibly to a key's gradient."""
    values: Values
    """In float64."""
    torch_values: Values | None
    """The same values from torch's MATH attention in the operands' dtype; None for dtypes with fixed limits."""
    method: str
    """The reference that was used, and the number of rows, as text."""

    @property
    def num_near_ties(self) -> int:
        """Return the number of (row, group) pairs that are not compared."""
        return int((~self.kept).sum())


def operands_of(operation: str, inputs: Inputs) -> dict[str, Tensor]:
    """Return the operands of `operation` by name, in its order."""
    return {name: getattr(inputs, name) for name in OPERANDS[operation]}


def expect(
    operation: str, inputs: Inputs, geometry: BlockGeometry, lengths: tuple[int, ...] | None = None, block_indices: Tensor | None = None
) -> Expected:
    """Return the expected values of the operation "cmp", "slc", "win", "nsa" or "dense" for `inputs`, a batch of one entry.

    `lengths` are those of packed sequences; None: one sequence. "slc" needs `block_indices` `(1, S, G, n)`.
    """
    operands = operands_of(operation, inputs)
    lengths = lengths or (inputs.q.shape[1],)
    sample = sample_rows(lengths, geometry, inputs.q.device)
    is_oracle = max(lengths) <= ORACLE_MAX_LENGTH
    chosen = None if block_indices is None else block_indices[0, sample.rows]
    kept = torch.ones(len(sample.rows), inputs.k_win.shape[2], dtype=torch.bool, device=inputs.q.device)
    if operation == "nsa":
        chosen, kept = choices(operands, sample)

    def exact(leaves: dict[str, Tensor]) -> Tensor:
        return attend_sample(operation, leaves, sample, chosen, _ask_oracle if is_oracle else attend_rows)

    def in_torch(leaves: dict[str, Tensor]) -> Tensor:
        return attend_sample(operation, leaves, sample, chosen)

    return expectation(exact, in_torch, operands, sample, kept, "oracle" if is_oracle else "rows")


def expectation(
    exact: Callable[[dict[str, Tensor]], Tensor],
    in_torch: Callable[[dict[str, Tensor]], Tensor],
    operands: dict[str, Tensor],
    sample: Sample,
    kept: Tensor,
    method: str,
) -> Expected:
    """Return the expected values of any function of `operands`: `exact` computes them in float64, `in_torch` in the operands' dtype."""
    q = operands["q"]
    head_dim_v = next(x.shape[-1] for name, x in operands.items() if name.startswith("v"))
    weights = _weights(sample.positions)
    generator = torch.Generator(q.device).manual_seed(1)
    noise = torch.randn(len(kept), q.shape[2], head_dim_v, device=q.device, generator=generator).to(q.dtype)
    dout = noise * (weights.unsqueeze(1) * kept.repeat_interleave(q.shape[2] // kept.shape[1], 1)).unsqueeze(-1).to(q.dtype)
    return Expected(
        sample=sample,
        kept=kept,
        dout=dout,
        weights=weights,
        values=_evaluate(exact, operands, sample, dout, torch.float64),
        torch_values=None if q.dtype in LIMITS else _evaluate(in_torch, operands, sample, dout, q.dtype),
        method=f"{method} in float64, {len(kept)} of {sample.num_tokens} rows",
    )


def choices(operands: dict[str, Tensor], sample: Sample) -> tuple[Tensor, Tensor]:
    """Return block_indices (R, G, n) that the sampled rows choose by float64 scores, and bool (R, G): True unless the choice is a near tie."""
    exact = {name: _part(name, operands[name], sample, torch.float64) for name in ("q", "k_cmp")}
    found = [choose_rows(piece, **part) for piece, part in zip(sample.pieces, sample.split(exact), strict=True)]
    kept = [choice.margin > near_tie_margin(choice.highest, operands["q"].dtype) for choice in found]
    return torch.cat([choice.chosen for choice in found]), torch.cat(kept)


def attend_sample(
    operation: str, leaves: dict[str, Tensor], sample: Sample, chosen: Tensor | None, attend: Callable[..., Tensor] = attend_rows
) -> Tensor:
    """Return out `(R, H, D_v)` of the sampled rows, computed by `attend` sequence by sequence; differentiable in `leaves`."""
    counts = [len(piece.positions) for piece in sample.pieces]
    picked = [None] * len(counts) if chosen is None else chosen.split(counts)
    return torch.cat([attend(operation, *each) for each in zip(sample.pieces, sample.split(leaves), picked, strict=True)])


def _ask_oracle(operation: str, piece: Piece, operands: dict[str, Tensor], chosen: Tensor | None) -> Tensor:
    """Return the oracle's out `(R, H, D_v)`. Every row is passed as a separate batch entry with its position."""
    count = len(piece.positions)
    entries = [
        # keys are the same for all rows
        x.unsqueeze(1).cpu() if name in ROW_OPERANDS else x.cpu().expand(count, *x.shape)
        for name, x in operands.items()
    ]
    oracles: dict[str, Callable[..., Any]] = {
        "nsa": naive.nsa_attention,
        "cmp": naive.compressed_attention,
        "slc": naive.selected_attention,
        "win": naive.sliding_window_attention,
        "dense": naive.dense_attention,
    }
    options = {"query_start": piece.positions.int().cpu()} | ({} if operation == "dense" else {"geometry": piece.geometry})
    if operation == "slc":
        assert chosen is not None
        entries.append(chosen.unsqueeze(1).cpu())
    found = oracles[operation](*entries, **options)
    out: Tensor = found if operation == "nsa" else found.out
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
    """Return a copy of the rows of x `(1, ...)` that the reference needs: the sampled rows, or all keys."""
    return (x[0, sample.rows] if name in ROW_OPERANDS else x[0]).detach().to(dtype, copy=True)


def _weights(positions: Tensor) -> Tensor:
    """Return powers of 2, (R,), that grow with the number of keys that a row sees, because its attention weight on each key shrinks."""
    return (2.0 ** torch.log2(positions // 64 + 1).floor()).clamp(max=MAX_WEIGHT)


@frozen(kw_only=True)
class Check:
    """The comparison of a result with the reference."""

    error: float
    """The largest quotient of a row's error and the row's largest value (see SMALLEST_SHARE); inf if a value is not finite."""
    error_of: str
    """The value that has this error: "out", "dq", ..."""
    limit_used: float
    """The largest quotient of an error and its limit; a right result has at most 1."""
    method: str
    """The reference that was used, its precision and the number of rows, as text."""
    near_ties: int = 0
    """Number of (row, group) pairs that are left out as near ties."""
    problems: tuple[str, ...] = ()
    """A line for each result that is wrong; empty if all are right."""


class _Distance(NamedTuple):
    """The distance of one value from the reference."""

    name: str
    error: float
    """The largest quotient of a row's error and the row's largest value."""
    share: float
    """The largest quotient of an error and its limit, for single rows and for the whole value."""


def compare(actual: Values, expected: Expected) -> Check:
    """Return the check of `actual`, any of the values that `expected` names."""
    found = [_distance(name, value, expected) for name, value in actual.items()]
    worst = max(found, key=lambda one: (one.error, one.name))
    problems = [
        f"{one.name} is off by {one.error:.1e} of its row's largest value, {one.share:.1f} times what is allowed"
        for one in found
        if not one.share <= 1
    ]
    return Check(
        error=worst.error,
        error_of=worst.name,
        limit_used=max(one.share for one in found),
        method=expected.method,
        near_ties=expected.num_near_ties,
        problems=tuple(problems),
    )


def _distance(name: str, value: Tensor, expected: Expected) -> _Distance:
    exact = _comparable(name, expected.values[name], expected)
    error, largest = _largest(_comparable(name, value, expected) - exact), _largest(exact)
    if not error.numel():
        return _Distance(name, 0.0, 0.0)
    if name != "out":
        of_gradients = _largest_gradient(expected)
        if largest.max() < NOTHING * of_gradients:
            largest = of_gradients.expand_as(largest)
    torch_error = torch.zeros_like(error)
    if expected.torch_values is not None:
        torch_error = _largest(_comparable(name, expected.torch_values[name], expected) - exact)
    scale, dtype = torch.maximum(largest, _smallest_share(name, expected) * largest.max()), expected.dout.dtype
    of_row = _largest_ratio(error, allowed(ROW_SLACK * scale, dtype, torch_error))
    of_all = _largest_ratio(error.max(), allowed(largest.max(), dtype, torch_error.max()))
    return _Distance(name, _largest_ratio(error, scale), max(of_row, of_all))


def _largest_gradient(expected: Expected) -> Tensor:
    found = [_largest(_comparable(name, x, expected)) for name, x in expected.values.items() if name != "out"]
    return torch.cat(found).max()


def _smallest_share(name: str, expected: Expected) -> Tensor:
    """Return the minimum that a row's largest value counts as, as a share of the whole result's largest value."""
    if name.removeprefix("d") in ROW_OPERANDS:
        return (LARGEST_SMALLEST_SHARE / expected.weights.double()).clamp(min=SMALLEST_SHARE)
    return expected.weights.new_tensor(SMALLEST_SHARE if name == "out" else SMALLEST_KEY_SHARE)


def _comparable(name: str, value: Tensor, expected: Expected) -> Tensor:
    """Return `value` in float64, with a row per query or key. Near ties are set to 0, and gradients are divided by the weights of their rows."""
    value = value.double()
    if name == "out":
        kept = expected.kept.repeat_interleave(value.shape[1] // expected.kept.shape[1], 1)
        return torch.where(kept.unsqueeze(-1), value, 0.0)
    return value / expected.weights.view(-1, 1, 1) if name.removeprefix("d") in ROW_OPERANDS else value


def _largest(x: Tensor) -> Tensor:
    """Return the largest |x| of each row, inf for a NaN."""
    return x.abs().nan_to_num(nan=float("inf")).flatten(1).amax(1) if x.numel() else x.new_zeros(0)


def _largest_ratio(part: Tensor, whole: Tensor) -> float:
    """Return the largest quotient part / whole; 0 / 0 counts as 0."""
    return float(torch.where(part == 0, 0.0, part / whole).nan_to_num(nan=float("inf")).max())


def forward_values(run: Callable[..., Tensor], operands: dict[str, Tensor], expected: Expected) -> Values:
    """Return the result of `run` at the sampled rows, computed without gradients."""
    with torch.no_grad():
        out = run(*operands.values())
    _refuse_holes({"out": out})
    return {"out": out[0, expected.sample.rows]}


def backward_values(run: Callable[..., Tensor], operands: dict[str, Tensor], expected: Expected) -> Values:
    """Return the result of `run` and the gradients of its operands; the gradient of out is zero except in the sampled rows."""
    out, rows = run(*operands.values()), expected.sample.rows
    dout = torch.zeros_like(out)
    dout[0, rows] = expected.dout.to(out.dtype)
    gradients = dict(zip(operands, torch.autograd.grad(out, list(operands.values()), dout, materialize_grads=True), strict=True))
    _refuse_holes({"out": out} | {f"d{name}": gradient for name, gradient in gradients.items()})
    return {"out": out.detach()[0, rows]} | {f"d{name}": x[0, rows] if name in ROW_OPERANDS else x[0] for name, x in gradients.items()}


class NotFiniteError(ArithmeticError):
    """A result contains a NaN or an infinity, in a sampled row or in another one."""


def _refuse_holes(values: Values) -> None:
    for name, value in values.items():
        if not bool(torch.isfinite(value).all()):
            raise NotFiniteError(f"{name} has NaN or infinite elements")


def compare_selection(block_indices: Tensor, chosen: Tensor, kept: Tensor, method: str) -> Check:
    """Return the check of block_indices `(R, G, n)` against `chosen`, those of the reference; only rows where `kept` is True count."""
    wrong = (block_indices != chosen).any(-1) & kept
    share = float(wrong.double().mean()) if wrong.numel() else 0.0
    problems = (f"{int(wrong.sum())} of {wrong.numel()} choices differ above the near-tie margin",) if share else ()
    ratio = float("inf") if share else 0.0
    return Check(error=share, error_of="choice", limit_used=ratio, method=method, near_ties=int((~kept).sum()), problems=problems)
