"""From a function and what it should give to a measurement: compared first, then its memory, then its time."""

import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from nsa_bench.cases import Case
from nsa_bench.measurements import Direction, Measurement
from nsa_bench.routes import RouteRecorder
from nsa_bench.timing import peak_bytes, replay_of, time_call
from nsa_core import BackendUnavailableError
from nsa_core.testing.sampled import Check, Expected, backward_values, compare, forward_values


@frozen(kw_only=True)
class Place:
    """Where it runs and who may serve."""

    device: torch.device
    registry: RouteRecorder
    backend: str = "auto"


@frozen(kw_only=True)
class Subject:
    """Something that is compared and timed: a function of named, differentiable operands `(1, ...)`."""

    operation: str
    case: Case
    run: Callable[..., Tensor]
    operands: dict[str, Tensor]
    name: str | None = None
    """Who runs; None: the backends that the registry chooses."""
    is_judged: bool = True
    """False: a wrong result is timed all the same, its error beside it."""

    def check(self, direction: Direction, expected: Expected) -> Check:
        """Return how far the result of one run in `direction` lies from what is expected."""
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


@frozen(kw_only=True)
class Wanted:
    """What is measured of what is right."""

    is_timed: bool = True
    held_before: int | None = None
    """Bytes held before the inputs were made, where the peak of forward and backward is wanted."""
    is_replayed: bool = False
    """On a GPU, time a CUDA graph of the call, which leaves the launches from Python out."""
    patience_ms: Mapping[Direction, float] = field(factory=dict)
    """What takes longer is timed once."""


def check_all(subject: Subject, expected: Expected, directions: tuple[Direction, ...], registry: RouteRecorder) -> list[Measurement]:
    """Return a measurement without time per direction: right, or with the reason why it will get none."""
    return [_check(subject, expected, direction, registry) for direction in directions]


def measure(subject: Subject, checked: list[Measurement], wanted: Wanted, device: torch.device) -> Iterator[Measurement]:
    """Yield `checked` with memory and time. What was compared with must be gone by now where memory is wanted."""
    case = subject.case
    dout = torch.randn(1, case.seq_len, case.shape.num_heads, case.shape.head_dim_v, device=device, dtype=case.dtype)
    total = 2 * (sum(x.nbytes for x in subject.operands.values()) + dout.nbytes)
    for one in checked:
        yield one if one.reason else finish(evolve(one, tensor_bytes=total), subject.call(one.direction, dout), wanted, device)


def finish(one: Measurement, call: Callable[[], object], wanted: Wanted, device: torch.device) -> Measurement:
    """Return `one` with the memory and the time of `call`, or with the reason why it has none."""
    try:
        if wanted.held_before is not None and one.direction is Direction.BOTH:
            one = evolve(one, peak_bytes=peak_bytes(call, device, wanted.held_before))
        if wanted.is_timed:
            if wanted.is_replayed and device.type == "cuda":
                call = replay_of(call, device)
            one = evolve(one, timing=time_call(call, device, wanted.patience_ms.get(one.direction, float("inf"))))
    except Exception as error:  # noqa: BLE001 - one kernel's failure is a result, not the end of the others
        return evolve(one, reason=describe_failure(error))
    return one


def _check(subject: Subject, expected: Expected, direction: Direction, registry: RouteRecorder) -> Measurement:
    registry.forget()
    check, reason = None, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check = subject.check(direction, expected)
        except Exception as error:  # noqa: BLE001 - see finish
            reason = describe_failure(error)
    wrong = check is not None and bool(check.problems)
    if check is not None and wrong and subject.is_judged:
        reason = "wrong: " + "; ".join(check.problems)
    notes = ["not the result of the reference"] if wrong and not subject.is_judged else []
    # torch says in warnings why a kernel does not take the inputs
    told = dict.fromkeys(first_line(warning.message) for warning in caught if warning.category is UserWarning)
    return Measurement(
        case=subject.case,
        operation=subject.operation,
        direction=direction,
        implementation=registry.served or "none" if subject.name is None else subject.name,
        is_ours=subject.name is None,
        check=check,
        reason=f"{reason} ({'; '.join(told)})" if reason and told else reason,
        note="" if reason else "; ".join([*notes, *told]),
    )


def describe_failure(error: BaseException) -> str:
    """Return one line for the table: the kind of error and its first line, or all of them where they are reasons against a backend."""
    if isinstance(error, BackendUnavailableError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: object) -> str:
    """Return the first line of a message; kernels' errors run to hundreds."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
