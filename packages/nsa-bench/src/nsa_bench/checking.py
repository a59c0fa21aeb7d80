"""Whether a result is right, row by row: a wrong kernel gets no time.

The rule is that of spec.md: float64 and float32 within a fixed share of the result's largest value; below, twice the
error of torch's MATH attention in that dtype plus 2^-8 of it. Rows that see many keys have small numbers, which would hide
behind those of rows that see few. So every row by itself (a query's out and gradients, a key's gradients) must keep the
rule as well, with ROW_SLACK times the share, since the worst of many thousand rows rounds worse than a typical one.
"""

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

from nsa_bench.reference import Expected, Values
from nsa_bench.rows import ROW_OPERANDS
from nsa_core.testing.tolerances import LIMITS

ROW_SLACK = 4
SMALLEST_SHARE = 2**-6
SMALLEST_KEY_SHARE = 2**-4
LARGEST_SMALLEST_SHARE = 2**-2
"""A row's largest value counts as at least a share of the whole result's, because gradients can cancel to nothing but noise:
those of queries that see few keys, from LARGEST_SMALLEST_SHARE down to SMALLEST_SHARE the later they stand; those of keys
that few queries see, by SMALLEST_KEY_SHARE. Outputs do not cancel so.
"""
NOTHING = 2**-20
"""A gradient below this share of the largest one is 0 but for rounding, as that of scores is where no query sees two keys.

Such a one, an exact zero too, has no size of its own: its errors are taken relative to the largest gradient, of whatever operand.
"""


@frozen(kw_only=True)
class Check:
    """How far a result lies from the reference."""

    error: float
    """The largest error of a row over the row's largest value, as the rule counts it; inf where something is not finite."""
    error_of: str
    """Which result has it: "out", "dq", ..."""
    limit_used: float
    """The largest error over what is allowed; up to 1 is right."""
    method: str
    """Which reference, in what precision, on how many rows."""
    near_ties: int = 0
    """(row, group) pairs left out because two scores lie too close to call."""
    problems: tuple[str, ...] = ()
    """What is wrong; empty where nothing is."""


def compare(actual: Values, expected: Expected, dtype: torch.dtype) -> Check:
    """Return the check of `actual`, any of the values that `expected` names."""
    worst, problems = (0.0, "out", 0.0), []
    used = 0.0
    for name, value in actual.items():
        error, share = _distance(name, value, expected, dtype)
        worst = max(worst, (error, name, share))
        used = max(used, share)
        if not share <= 1:
            problems.append(f"{name} is off by {error:.1e} of its row's largest value, {share:.1f} times what is allowed")
    return Check(
        error=worst[0],
        error_of=worst[1],
        limit_used=used,
        method=expected.method,
        near_ties=expected.num_near_ties,
        problems=tuple(problems),
    )


def _distance(name: str, value: Tensor, expected: Expected, dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest error of a row over its largest value, and the largest over what is allowed of it and of all."""
    exact = _comparable(name, expected.values[name], expected)
    error, largest = _largest(_comparable(name, value, expected) - exact), _largest(exact)
    if not error.numel():
        return 0.0, 0.0
    if name != "out":
        of_gradients = _largest_gradient(expected)
        if largest.max() < NOTHING * of_gradients:
            largest = of_gradients.expand_as(largest)
    allowed_by_torch = torch.zeros_like(error)
    if expected.torch_values is not None:
        allowed_by_torch = 2 * _largest(_comparable(name, expected.torch_values[name], expected) - exact)
    share = LIMITS.get(dtype, 2**-8)
    scale = torch.maximum(largest, _smallest_share(name, expected) * largest.max())
    of_row = _largest_ratio(error, allowed_by_torch + ROW_SLACK * share * scale)
    of_all = _largest_ratio(error.max(), allowed_by_torch.max() + share * largest.max())
    return _largest_ratio(error, scale), max(of_row, of_all)


def _largest_gradient(expected: Expected) -> Tensor:
    found = [_largest(_comparable(name, x, expected)) for name, x in expected.values.items() if name != "out"]
    return torch.cat(found).max()


def _smallest_share(name: str, expected: Expected) -> Tensor:
    """Return what a row's largest value counts as at least, as a share of the whole result's."""
    if name.removeprefix("d") in ROW_OPERANDS:
        return (LARGEST_SMALLEST_SHARE / expected.weights.double()).clamp(min=SMALLEST_SHARE)
    return expected.weights.new_tensor(SMALLEST_SHARE if name == "out" else SMALLEST_KEY_SHARE)


def _comparable(name: str, value: Tensor, expected: Expected) -> Tensor:
    """Return float64 with a row per query, or key; near ties are 0 and the rows' weights divided out."""
    value = value.double()
    if name == "out":
        kept = expected.kept.repeat_interleave(value.shape[1] // expected.kept.shape[1], 1)
        return torch.where(kept.unsqueeze(-1), value, 0.0)
    return value / expected.weights.view(-1, 1, 1) if name.removeprefix("d") in ROW_OPERANDS else value


def _largest(x: Tensor) -> Tensor:
    """Return the largest |x| of each row, inf for a NaN."""
    return x.abs().nan_to_num(nan=float("inf")).flatten(1).amax(1) if x.numel() else x.new_zeros(0)


def _largest_ratio(part: Tensor, whole: Tensor) -> float:
    """Return the largest part / whole; nothing of nothing is 0."""
    return float(torch.where(part == 0, 0.0, part / whole).nan_to_num(nan=float("inf")).max())


def forward_values(run: Callable[..., Tensor], operands: dict[str, Tensor], expected: Expected) -> Values:
    """Return what `run` gives without gradients, as the reference has it."""
    with torch.no_grad():
        out = run(*operands.values())
    _refuse_holes({"out": out})
    return {"out": out[0, expected.sample.rows]}


def backward_values(run: Callable[..., Tensor], operands: dict[str, Tensor], expected: Expected) -> Values:
    """Return what `run` gives with gradients, for a gradient that is zero but on the sampled rows."""
    out = run(*operands.values())
    dout = torch.zeros_like(out)
    dout[0, expected.sample.rows] = expected.dout.to(out.dtype)
    gradients = dict(zip(operands, torch.autograd.grad(out, list(operands.values()), dout, materialize_grads=True), strict=True))
    _refuse_holes({"out": out} | {f"d{name}": gradient for name, gradient in gradients.items()})
    index = expected.sample.rows
    parts = {f"d{name}": x[0, index] if name in ROW_OPERANDS else x[0] for name, x in gradients.items()}
    return {"out": out.detach()[0, index]} | parts


class NotFiniteError(ArithmeticError):
    """A result has a NaN or an infinity in it, on a sampled row or not."""


def _refuse_holes(values: Values) -> None:
    for name, value in values.items():
        if not bool(torch.isfinite(value).all()):
            raise NotFiniteError(f"{name} has NaN or infinite elements")


def compare_selection(block_indices: Tensor, chosen: Tensor, kept: Tensor, method: str) -> Check:
    """Return the check of block_indices `(R, G, n)` against those of the reference; near ties do not count."""
    wrong = (block_indices != chosen).any(-1) & kept
    share = float(wrong.double().mean()) if wrong.numel() else 0.0
    problems = (f"{int(wrong.sum())} of {wrong.numel()} choices differ above the near-tie margin",) if share else ()
    ratio = float("inf") if share else 0.0
    return Check(error=share, error_of="choice", limit_used=ratio, method=method, near_ties=int((~kept).sum()), problems=problems)
