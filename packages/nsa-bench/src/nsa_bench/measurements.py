"""One line of a result: what was measured, on what it ran, how right, how fast."""

from enum import StrEnum
from typing import Any

from attrs import frozen

from nsa_bench.cases import Case, geometry_text, visible_pairs
from nsa_bench.checking import Check
from nsa_bench.timing import Timing


class Direction(StrEnum):
    """Which passes are timed."""

    FORWARD = "fwd"
    """Without gradients, as in inference."""
    BOTH = "fwd+bwd"
    """Forward, then the gradients of every operand."""


OURS = ("nsa", "cmp", "select", "slc", "win")
"""What is measured of a case: all of Eq. 5, then operation by operation."""
DENSE = "dense"


@frozen(kw_only=True)
class Measurement:
    """One operation in one direction by one implementation."""

    case: Case
    operation: str
    """One of OURS, or DENSE."""
    direction: Direction
    implementation: str
    """Who ran: backends of nsa_core by name, a dense kernel, a peer."""
    is_ours: bool = True
    """False for dense kernels and peers."""
    check: Check | None = None
    timing: Timing | None = None
    reason: str = ""
    """Why there is no time; "" where there is one, or none was asked for."""
    note: str = ""
    """What a reader should know of a time that there is."""
    peak_bytes: int | None = None
    """Most bytes held during forward and backward, inputs included; on CUDA, of the whole operation."""
    tensor_bytes: int | None = None
    """Bytes of the operands, out and their gradients, which nothing can do without."""
    overlap: float | None = None
    """Measured share of free blocks that the next query chooses too; None where no query had to choose."""

    @property
    def is_failure(self) -> bool:
        """Return True where one of our own operations ended without the result that was asked for."""
        return bool(self.reason) and self.is_ours

    @property
    def pair_cost_ps(self) -> float | None:
        """Return picoseconds per visible pair and element of D_k + D_v."""
        work = visible_pairs(self.operation, self.case) * self.case.shape.head_dims
        return None if self.timing is None or not work else 1e9 * self.timing.median_ms / work

    @property
    def peak_ratio(self) -> float | None:
        """Return peak_bytes over tensor_bytes."""
        return None if self.peak_bytes is None or not self.tensor_bytes else self.peak_bytes / self.tensor_bytes


def to_row(measurement: Measurement, common: dict[str, Any]) -> dict[str, Any]:
    """Return the measurement as one flat row, the same keys for every one; `common` is machine, versions and commit."""
    case, check, timing = measurement.case, measurement.check, measurement.timing
    shape = case.shape
    return {
        "shape": shape.name,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim_qk": shape.head_dim_qk,
        "head_dim_v": shape.head_dim_v,
        "seq_len": case.seq_len,
        "num_sequences": len(case.sequence_lengths),
        "geometry": geometry_text(case.geometry),
        "dtype": str(case.dtype).removeprefix("torch."),
        "selection": case.selection.value,
        "overlap": measurement.overlap,
        "operation": measurement.operation,
        "direction": measurement.direction.value,
        "implementation": measurement.implementation,
        "median_ms": None if timing is None else timing.median_ms,
        "min_ms": None if timing is None else timing.min_ms,
        "max_ms": None if timing is None else timing.max_ms,
        "count": None if timing is None else timing.count,
        "visible_pairs": visible_pairs(measurement.operation, case),
        "pair_cost_ps": measurement.pair_cost_ps,
        "peak_bytes": measurement.peak_bytes,
        "tensor_bytes": measurement.tensor_bytes,
        "peak_ratio": measurement.peak_ratio,
        "error": None if check is None else finite(check.error),
        "error_of": None if check is None else check.error_of,
        "limit_used": None if check is None else finite(check.limit_used),
        "near_ties": None if check is None else check.near_ties,
        "error_against": None if check is None else check.method,
        "reason": measurement.reason,
        "note": measurement.note,
        **common,
    }


def finite(value: float) -> float | str:
    """Return `value`, or "inf" where JSON has no number for it."""
    return value if value < float("inf") else "inf"


def common_columns(environment: dict[str, Any]) -> dict[str, Any]:
    """Return machine, versions and commit, the columns that every row carries."""
    names = ("time", "cpu", "gpu", "compute_capability", "python", "torch", "triton", "cuda", "commit")
    packages = {f"{name}_version": version for name, version in environment["packages"].items() if name.startswith("nsa-")}
    return {name: environment[name] for name in names} | packages
