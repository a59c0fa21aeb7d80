"""One row of a result. An implementation is compared first, then its memory is measured, then its time."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from nsa_bench.cases import Case, geometry_text, visible_pairs
from nsa_bench.routes import RouteRecorder
from nsa_core import BackendUnavailableError
from nsa_core.testing.sampled import Check, Expected, backward_values, compare, forward_values

BUDGET_MS = 1500.0
"""Time spent on the repetitions of one measurement."""
MIN_COUNT, MAX_COUNT = 3, 50
"""Minimum and maximum number of repetitions. A call that takes up to a tenth of the budget is repeated at least 10 times, a longer one less often."""
WARM_UPS = 2
FLUSH_BYTES = 256 * 2**20
"""Bytes that are written before every repetition: several times the L2 of any GPU so far."""


@frozen(kw_only=True)
class Timing:
    """The times of one measurement."""

    median_ms: float
    min_ms: float
    max_ms: float
    count: int

    @classmethod
    def of(cls, times_ms: list[float]) -> "Timing":
        """Return the summary of at least one time."""
        return cls(median_ms=median(times_ms), min_ms=min(times_ms), max_ms=max(times_ms), count=len(times_ms))


def time_call(call: Callable[[], object], device: torch.device, patience_ms: float = float("inf"), max_count: int | None = None) -> Timing:
    """Return at most `max_count` times of `call` after a warm-up; only one if that one already exceeds `patience_ms`."""
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None
    for _ in range(WARM_UPS if device.type == "cuda" else 1):
        call()
    first = _times_ms(call, 1, flushed)
    if first[0] > patience_ms:
        return Timing.of(first)
    count = int(BUDGET_MS / max(first[0], 1e-3))
    return Timing.of(_times_ms(call, min(max(count, MIN_COUNT), max_count or MAX_COUNT, MAX_COUNT), flushed))


def replay_of(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays the kernels of `call` from a CUDA graph, so that no launch waits for Python.

    Raises:
        RuntimeError: if something in `call` cannot be captured, such as reading a value from the GPU.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # kernels are compiled before the capture
        call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _times_ms(call: Callable[[], object], count: int, flushed: Tensor | None) -> list[float]:
    """Return the times of `count` calls: by CUDA events, each after a write to all of `flushed`; by the clock if `flushed` is None."""
    if flushed is None:
        stamps = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            stamps.append(1e3 * (time.perf_counter() - start))
        return stamps
    spans = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for first, last in spans:
        flushed.zero_()
        first.record()
        call()
        last.record()
    torch.cuda.synchronize(flushed.device)
    return [first.elapsed_time(last) for first, last in spans]


def back_to_back_ms(call: Callable[[], object], device: torch.device, *, warm_ups: int, loops: int, count: int) -> float:
    """Return the time of a call in ms: the median over `loops` loops of `count` calls, without a wait between calls. L2 is not flushed."""
    for _ in range(warm_ups):
        call()
    times = []
    for _ in range(loops):
        _wait(device)
        began = time.perf_counter()
        for _ in range(count):
            call()
        _wait(device)
        times.append(1e3 * (time.perf_counter() - began) / count)
    return median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times_in_turn(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the time in ms of each of `calls`, which run once, one after another, without a wait between them on a GPU."""
    if device.type != "cuda":
        return [_times_ms(call, 1, None)[0] for call in calls]
    stamps = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    stamps[0].record()
    for call, stamp in zip(calls, stamps[1:], strict=True):
        call()
        stamp.record()
    torch.cuda.synchronize(device)
    return [first.elapsed_time(last) for first, last in pairwise(stamps)]


def free_cached_memory(device: torch.device) -> None:
    """Free the memory that a GPU's allocator caches, so that one case does not reduce the memory of the next."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def held_bytes(device: torch.device) -> int:
    """Return the bytes of live tensors on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_bytes(call: Callable[[], object], device: torch.device, held_before: int) -> int | None:
    """Return the peak number of bytes held during `call`, including its inputs, minus `held_before`; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held_before


class Direction(StrEnum):
    """Which passes are timed."""

    FORWARD = "fwd"
    """Without gradients, as in inference."""
    BOTH = "fwd+bwd"
    """Forward, then the gradients of every operand."""


@frozen(kw_only=True)
class Job:
    """The measurements of one case."""

    case: Case
    operations: tuple[str, ...]
    """Names of operations in OURS."""
    directions: tuple[Direction, ...] = tuple(Direction)
    baselines: tuple[str, ...] = ()
    """Dense kernels by name; packed cases have none."""
    is_timed: bool = True
    """False: the results are only compared and the memory is measured, without times."""
    is_replayed: bool = False
    """True: on a GPU, CUDA graphs are timed."""
    max_count: int | None = None
    """Maximum repetitions of a measurement; None: MAX_COUNT."""
    patience_ms: Mapping[Direction, float] = field(factory=dict, hash=False)
    """A call of ours that takes longer is timed once."""


@frozen(kw_only=True)
class Measurement:
    """One operation in one direction by one implementation."""

    case: Case
    operation: str
    """One of OURS, or DENSE."""
    direction: Direction
    implementation: str
    """The backends of nsa_core that ran, by name, or a dense kernel, or a peer."""
    is_ours: bool = True
    """False for dense kernels and peers."""
    check: Check | None = None
    timing: Timing | None = None
    reason: str = ""
    """Why there is no time; "" if there is one, or none was requested."""
    note: str = ""
    """Remarks on the time."""
    peak_bytes: int | None = None
    """Peak number of bytes held during forward and backward, including inputs; only on CUDA, and only for the whole operation."""
    tensor_bytes: int | None = None
    """Bytes of the operands, out and their gradients, which every implementation needs."""
    overlap: float | None = None
    """Measured share of free blocks that the next query chooses too; None if no query had to choose."""

    @property
    def is_failure(self) -> bool:
        """Return True if one of our own operations ended without the requested result."""
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
    case, shape, check = measurement.case, measurement.case.shape, measurement.check
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
        **timing_columns(measurement.timing),
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


def timing_columns(timing: Timing | None) -> dict[str, float | None]:
    """Return the columns of a time, None where there is none."""
    return {name: None if timing is None else getattr(timing, name) for name in ("median_ms", "min_ms", "max_ms", "count")}


def finite(value: float) -> float | str:
    """Return `value`, or "inf" if JSON has no number for it."""
    return value if value < float("inf") else "inf"


def common_columns(environment: dict[str, Any]) -> dict[str, Any]:
    """Return machine, versions and commit, the columns that every row carries."""
    names = ("time", "cpu", "gpu", "compute_capability", "python", "torch", "triton", "cuda", "commit")
    packages = {f"{name}_version": version for name, version in environment["packages"].items() if name.startswith("nsa-")}
    return {name: environment[name] for name in names} | packages


@frozen(kw_only=True)
class Setup:
    """The device, and the backends that may serve."""

    device: torch.device
    registry: RouteRecorder
    backend: str | Mapping[str, str] = "auto"
    """A backend's name, or names by operation."""


@frozen(kw_only=True)
class Implementation:
    """A function of named, differentiable operands `(1, ...)`, which is compared and timed."""

    operation: str
    case: Case
    run: Callable[..., Tensor]
    operands: dict[str, Tensor]
    name: str | None = None
    """The name of a kernel or a peer; None: the backends that the registry chooses."""
    is_judged: bool = True
    """False: a wrong result is timed too, and its error is reported."""

    def check(self, direction: Direction, expected: Expected) -> Check:
        """Return the error of the result of one run in `direction`, relative to the expected values."""
        values = forward_values if direction is Direction.FORWARD else backward_values
        return compare(values(self.run, self.operands, expected), expected)

    def call(self, direction: Direction, dout: Tensor) -> Callable[[], object]:
        """Return the call that is timed."""
        leaves = list(self.operands.values())

        def forward() -> object:
            with torch.no_grad():
                return self.run(*leaves)

        def both() -> object:
            return torch.autograd.grad(self.run(*leaves), leaves, dout, allow_unused=True)

        return forward if direction is Direction.FORWARD else both


def check_all(tried: Implementation, expected: Expected, directions: tuple[Direction, ...], registry: RouteRecorder) -> list[Measurement]:
    """Return a measurement without a time for each direction; a wrong result has the reason why it gets no time."""
    return [_check(tried, expected, direction, registry) for direction in directions]


def measure(
    tried: Implementation,
    checked: list[Measurement],
    job: Job,
    device: torch.device,
    *,
    held_before: int | None = None,
    patience_ms: Mapping[Direction, float] = MappingProxyType({}),
) -> Iterator[Measurement]:
    """Yield `checked` with memory and time, as `finish` does. If memory is measured, the expected values must have been freed before."""
    case = tried.case
    dout = torch.randn(1, case.seq_len, case.shape.num_heads, case.shape.head_dim_v, device=device, dtype=case.dtype)
    total = 2 * (sum(x.nbytes for x in tried.operands.values()) + dout.nbytes)
    for one in checked:
        patience = patience_ms.get(one.direction, job.patience_ms.get(one.direction, float("inf")))
        yield (
            one
            if one.reason
            else finish(evolve(one, tensor_bytes=total), tried.call(one.direction, dout), job, device, held_before, patience)
        )


def finish(
    one: Measurement,
    call: Callable[[], object],
    job: Job,
    device: torch.device,
    held_before: int | None = None,
    patience_ms: float = float("inf"),
) -> Measurement:
    """Return `one` with the memory and the time of `call`, or with the reason why it has none.

    `held_before`: bytes held before the inputs were made, if the peak of forward and backward is measured. A call that takes
    longer than `patience_ms` is timed once.
    """
    try:
        if held_before is not None and one.direction is Direction.BOTH:
            one = evolve(one, peak_bytes=peak_bytes(call, device, held_before))
        if job.is_timed:
            if job.is_replayed and device.type == "cuda":
                call = replay_of(call, device)
            one = evolve(one, timing=time_call(call, device, patience_ms, job.max_count))
    except Exception as error:  # noqa: BLE001 - one kernel's failure is a result, not the end of the others
        return evolve(one, reason=describe_failure(error))
    return one


def _check(tried: Implementation, expected: Expected, direction: Direction, registry: RouteRecorder) -> Measurement:
    registry.forget()
    check, reason = None, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check = tried.check(direction, expected)
        except Exception as error:  # noqa: BLE001 - see finish
            reason = describe_failure(error)
    wrong = check is not None and bool(check.problems)
    if check is not None and wrong and tried.is_judged:
        reason = "wrong: " + "; ".join(check.problems)
    notes = ["not the result of the reference"] if wrong and not tried.is_judged else []
    # torch's warnings explain why a kernel refuses the inputs
    warned = dict.fromkeys(first_line(warning.message) for warning in caught if warning.category is UserWarning)
    return Measurement(
        case=tried.case,
        operation=tried.operation,
        direction=direction,
        implementation=registry.served or "none" if tried.name is None else tried.name,
        is_ours=tried.name is None,
        check=check,
        reason=f"{reason} ({'; '.join(warned)})" if reason and warned else reason,
        note="" if reason else "; ".join([*notes, *warned]),
    )


def describe_failure(error: BaseException) -> str:
    """Return one line for the table: the kind of error and its first line, or all lines if they are reasons against a backend."""
    if isinstance(error, BackendUnavailableError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: object) -> str:
    """Return the first line of a message; errors of kernels can have hundreds."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
