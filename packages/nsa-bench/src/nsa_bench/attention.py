"""`nsa-bench attention`: times, memory and errors of the operations, beside the best dense attention.

For every case: the inputs are made, each operation is compared with the reference in each direction, and only what is
right is timed. Peak memory is that of the whole operation, forward and backward, with its inputs.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from nsa_bench.baselines import find_baseline
from nsa_bench.cases import Case
from nsa_bench.inputs import make_tensors
from nsa_bench.measurements import DENSE, Direction, Measurement
from nsa_bench.measuring import Place, Subject, Wanted, check_all, describe_failure, finish, measure
from nsa_bench.selections import free_overlap, make_block_indices, positions_of
from nsa_bench.timing import free_cached_memory, held_bytes
from nsa_core import compressed_attention, nsa_attention, select_blocks, selected_attention, sliding_window_attention
from nsa_core.testing.inputs import Inputs
from nsa_core.testing.sampled import choices, compare_selection, expect, operands_of
from nsa_core.testing.sampled_rows import sample_rows

BASELINE_PATIENCE = 1.5
"""A dense kernel whose first time is this many times the best one's median is not timed again."""


@frozen(kw_only=True)
class Job:
    """What to measure of one case."""

    case: Case
    operations: tuple[str, ...]
    """Of OURS."""
    directions: tuple[Direction, ...] = tuple(Direction)
    baselines: tuple[str, ...] = ()
    """Of BASELINES; packed cases have none."""
    is_timed: bool = True
    """False: only compared, and the memory measured."""
    is_replayed: bool = False
    """On a GPU, time CUDA graphs."""


def run_jobs(jobs: tuple[Job, ...], place: Place) -> Iterator[Measurement]:
    """Yield the measurements of every job, in order, as they are made."""
    for job in jobs:
        operations = (*job.operations, *((DENSE,) if job.baselines and job.case.lengths is None else ()))
        try:
            free_cached_memory(place.device)
            held_before = held_bytes(place.device)
            inputs = make_tensors(job.case, place.device)
        except RuntimeError as error:
            for operation in operations:
                yield from _not_run(operation, job, error)
            continue
        for operation in operations:
            try:
                yield from _measure_operation(operation, job, inputs, place, held_before)
            except RuntimeError as error:
                yield from _not_run(operation, job, error)
        del inputs


def _measure_operation(operation: str, job: Job, inputs: Inputs, place: Place, held_before: int) -> Iterator[Measurement]:
    if operation == "nsa":
        return _measure_whole(job, inputs, place, held_before)
    if operation == "select":
        return _measure_selection(job, inputs, place)
    return _measure_baselines(job, inputs, place) if operation == DENSE else _measure_branch(operation, job, inputs, place)


def _not_run(operation: str, job: Job, error: RuntimeError) -> Iterator[Measurement]:
    """Yield why there is nothing: no memory for inputs or reference, or a GPU that an earlier kernel broke."""
    reason = f"inputs or reference: {describe_failure(error)}"
    for direction in job.directions:
        one = Measurement(case=job.case, operation=operation, direction=direction, implementation="none", reason=reason)
        yield evolve(one, is_ours=operation != DENSE)


def _wanted(job: Job) -> Wanted:
    return Wanted(is_timed=job.is_timed, is_replayed=job.is_replayed)


def _options(case: Case, inputs: Inputs, place: Place) -> dict[str, Any]:
    packed = {} if case.lengths is None else {"cu_seqlens": inputs.cu_seqlens, "max_seqlen": max(case.lengths)}
    return {"geometry": case.geometry, "backend": place.backend, "registry": place.registry, **packed}


def _measure_whole(job: Job, inputs: Inputs, place: Place, held_before: int) -> Iterator[Measurement]:
    case, options = job.case, _options(job.case, inputs, place)

    def run(*operands: Tensor) -> Tensor:
        return nsa_attention(*operands, **options)

    overlap = _overlap(case, inputs, place)
    subject = Subject(operation="nsa", case=case, run=run, operands=operands_of("nsa", inputs))
    # what is expected lives no longer than this line, so that it is no part of the peak
    checked = check_all(subject, expect("nsa", inputs, case.geometry, case.lengths), job.directions, place.registry)
    wanted = evolve(_wanted(job), held_before=held_before)
    for one in measure(subject, checked, wanted, place.device):
        yield evolve(one, overlap=overlap)


def _measure_branch(operation: str, job: Job, inputs: Inputs, place: Place) -> Iterator[Measurement]:
    """Yield the measurements of "cmp", "slc" over choices made directly, or "win"."""
    case, options = job.case, _options(job.case, inputs, place)
    overlap = block_indices = None
    attend: Callable[..., Any] = compressed_attention if operation == "cmp" else sliding_window_attention
    if operation == "slc":
        attend, block_indices = selected_attention, make_block_indices(case, place.device)
        overlap = free_overlap(block_indices[0], positions_of(case, place.device), case.geometry)
    indices = () if block_indices is None else (block_indices,)

    def run(*operands: Tensor) -> Tensor:
        out: Tensor = attend(*operands, *indices, **options).out
        return out

    subject = Subject(operation=operation, case=case, run=run, operands=operands_of(operation, inputs))
    checked = check_all(subject, expect(operation, inputs, case.geometry, case.lengths, block_indices), job.directions, place.registry)
    for one in measure(subject, checked, _wanted(job), place.device):
        yield evolve(one, overlap=overlap)


def _measure_selection(job: Job, inputs: Inputs, place: Place) -> Iterator[Measurement]:
    """Yield the measurement of "select", which has no backward."""
    if Direction.FORWARD not in job.directions:
        return
    case, options = job.case, _options(job.case, inputs, place)
    q, k_cmp = inputs.q, inputs.k_cmp
    one = Measurement(case=case, operation="select", direction=Direction.FORWARD, implementation="none")
    try:
        with torch.no_grad():
            lse = compressed_attention(q, k_cmp, inputs.v_cmp, **options).lse
            place.registry.forget()
            sample = sample_rows(case.sequence_lengths, case.geometry, place.device)
            got = select_blocks(q, k_cmp, lse, **options)[0, sample.rows]
            chosen, kept = choices({"q": q, "k_cmp": k_cmp}, sample)
            check = compare_selection(got, chosen, kept, f"scores in float64, {len(got)} of {case.seq_len} rows")
    except Exception as error:  # noqa: BLE001 - one kernel's failure is a result, not the end of the others
        yield evolve(one, reason=describe_failure(error))
        return
    reason = "".join(f"wrong: {problem}" for problem in check.problems)
    one = evolve(one, implementation=place.registry.served, check=check, reason=reason)

    @torch.no_grad()
    def call() -> Tensor:
        return select_blocks(q, k_cmp, lse, **options)

    yield one if reason else finish(one, call, _wanted(job), place.device)


def _measure_baselines(job: Job, inputs: Inputs, place: Place) -> Iterator[Measurement]:
    best: dict[Direction, float] = {}
    expected = expect(DENSE, inputs, job.case.geometry)
    for name in job.baselines:
        baseline = find_baseline(name, job.case, place.device)
        if baseline.run is None:
            for direction in job.directions:
                one = Measurement(case=job.case, operation=DENSE, direction=direction, implementation=baseline.name, is_ours=False)
                yield evolve(one, reason=baseline.reason)
            continue
        subject = Subject(operation=DENSE, case=job.case, run=baseline.run, operands=operands_of(DENSE, inputs), name=baseline.name)
        checked = check_all(subject, expected, job.directions, place.registry)
        patience = {direction: BASELINE_PATIENCE * time_ms for direction, time_ms in best.items()}
        for one in measure(subject, checked, evolve(_wanted(job), patience_ms=patience), place.device):
            if one.timing is not None:
                best[one.direction] = min(best.get(one.direction, float("inf")), one.timing.median_ms)
            yield one


def _overlap(case: Case, inputs: Inputs, place: Place) -> float | None:
    """Return the measured overlap of the choices that the whole operation makes; None where they cannot be made."""
    options = _options(case, inputs, place)
    try:
        with torch.no_grad():
            lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, **options).lse
            block_indices = select_blocks(inputs.q, inputs.k_cmp, lse, **options)
    except Exception:  # noqa: BLE001 - the operations themselves report it
        return None
    return free_overlap(block_indices[0], positions_of(case, place.device), case.geometry)
