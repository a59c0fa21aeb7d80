"""`nsa-bench attention`: times, memory and errors of the operations and of the best dense attention.

For every case, the inputs are made, each operation is compared with the reference in each direction, and only right
results are timed. Peak memory is that of the whole operation, forward and backward, with its inputs.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import evolve
from torch import Tensor

from nsa_bench.attention.plan import Plan, make_plan
from nsa_bench.attention.sweep import judge_sweep, sweep_rows, sweep_table
from nsa_bench.attention.targets import judge_targets, target_rows, targets_table
from nsa_bench.baselines import find_baseline
from nsa_bench.cases import DENSE, Case, Recorded
from nsa_bench.inputs import free_overlap, make_block_indices, make_tensors, positions_of
from nsa_bench.measurement import (
    Direction,
    Implementation,
    Job,
    Measurement,
    Setup,
    check_all,
    describe_failure,
    finish,
    free_cached_memory,
    held_bytes,
    measure,
)
from nsa_bench.options import AttentionOptions
from nsa_bench.reporting import attention_tables, collect, measured_rows, progress_line
from nsa_bench.results import Output
from nsa_bench.routes import RouteRecorder, check_backend, request_of
from nsa_core import compressed_attention, nsa_attention, select_blocks, selected_attention, sliding_window_attention
from nsa_core.testing.inputs import Inputs
from nsa_core.testing.sampled import choices, compare_selection, expect, operands_of
from nsa_core.testing.sampled_rows import sample_rows

BASELINE_PATIENCE = 1.5
"""A dense kernel whose first time is this many times the best one's median is not timed again."""


def run_attention(options: AttentionOptions, output: Output) -> list[Measurement]:
    """Measure the cases of `options`, print the tables, write the files, and return the measurements.

    Raises:
        OptionError: if options are invalid, or the backend can serve nothing of them; before anything is written.
    """
    plan = make_plan(options)
    recordings = {Path(job.case.selection.path) for job in plan.jobs if isinstance(job.case.selection, Recorded)}
    output.check_files(inputs=dict.fromkeys(recordings, "the recording"))
    check_backend(options.backend, ((request_of(each, job.case, plan.device),) for job in plan.jobs for each in job.operations))
    setup = Setup(device=plan.device, registry=RouteRecorder.of_installed(), backend=options.backend)
    return run_plan(plan, setup, attrs.asdict(options), output)


def run_plan(plan: Plan, setup: Setup, options: dict[str, Any], output: Output) -> list[Measurement]:
    """Measure `plan`, print its tables, write its files, and return the measurements; `options` as they were given."""

    def lists_of(measurements: list[Measurement], common: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
        swept = {"sweep": sweep_rows(judge_sweep(plan.points, measurements), common)} if plan.points else {}
        judged = {"targets": target_rows(judge_targets(plan.targets, measurements))} if plan.targets else {}
        return {**measured_rows(measurements, common), **swept, **judged}

    measurements = collect(run_jobs(plan.jobs, setup), options, output, progress_line, lists_of)
    if plan.points:
        # a table per point would hide the verdicts; the files have all points
        output.show(sweep_table(judge_sweep(plan.points, measurements)))
        return measurements
    output.show(*attention_tables(measurements))
    if plan.targets:
        output.show(targets_table(judge_targets(plan.targets, measurements), measurements))
    return measurements


def run_jobs(jobs: tuple[Job, ...], setup: Setup) -> Iterator[Measurement]:
    """Yield the measurements of every job, in order, as they are made."""
    for job in jobs:
        operations = (*job.operations, *((DENSE,) if job.baselines and job.case.lengths is None else ()))
        try:
            free_cached_memory(setup.device)
            held_before = held_bytes(setup.device)
            inputs = make_tensors(job.case, setup.device)
        except RuntimeError as error:
            for operation in operations:
                yield from _not_run(operation, job, error)
            continue
        for operation in operations:
            try:
                yield from _measure_operation(operation, job, inputs, setup, held_before)
            except RuntimeError as error:
                yield from _not_run(operation, job, error)
        del inputs


def _measure_operation(operation: str, job: Job, inputs: Inputs, setup: Setup, held_before: int) -> Iterator[Measurement]:
    if operation == "nsa":
        return _measure_whole(job, inputs, setup, held_before)
    if operation == "select":
        return _measure_selection(job, inputs, setup)
    return _measure_baselines(job, inputs, setup) if operation == DENSE else _measure_branch(operation, job, inputs, setup)


def _not_run(operation: str, job: Job, error: RuntimeError) -> Iterator[Measurement]:
    """Yield why there is nothing: no memory for inputs or reference, or a GPU that an earlier kernel broke."""
    reason = f"inputs or reference: {describe_failure(error)}"
    for direction in job.directions:
        one = Measurement(case=job.case, operation=operation, direction=direction, implementation="none", reason=reason)
        yield evolve(one, is_ours=operation != DENSE)


def _options(case: Case, inputs: Inputs, setup: Setup) -> dict[str, Any]:
    packed = {} if case.lengths is None else {"cu_seqlens": inputs.cu_seqlens, "max_seqlen": max(case.lengths)}
    return {"geometry": case.geometry, "backend": setup.backend, "registry": setup.registry, **packed}


def _measure_whole(job: Job, inputs: Inputs, setup: Setup, held_before: int) -> Iterator[Measurement]:
    case, options = job.case, _options(job.case, inputs, setup)

    def run(*operands: Tensor) -> Tensor:
        return nsa_attention(*operands, **options)

    overlap = _overlap(case, inputs, setup)
    tried = Implementation(operation="nsa", case=case, run=run, operands=operands_of("nsa", inputs))
    # the expected values are freed after this line, so that they are not part of the peak
    checked = check_all(tried, expect("nsa", inputs, case.geometry, case.lengths), job.directions, setup.registry)
    for one in measure(tried, checked, job, setup.device, held_before=held_before):
        yield evolve(one, overlap=overlap)


def _measure_branch(operation: str, job: Job, inputs: Inputs, setup: Setup) -> Iterator[Measurement]:
    """Yield the measurements of "cmp", "slc" over choices made directly, or "win"."""
    case, options = job.case, _options(job.case, inputs, setup)
    overlap = block_indices = None
    attend: Callable[..., Any] = compressed_attention if operation == "cmp" else sliding_window_attention
    if operation == "slc":
        attend, block_indices = selected_attention, make_block_indices(case, setup.device)
        overlap = free_overlap(block_indices[0], positions_of(case, setup.device), case.geometry)
    indices = () if block_indices is None else (block_indices,)

    def run(*operands: Tensor) -> Tensor:
        out: Tensor = attend(*operands, *indices, **options).out
        return out

    tried = Implementation(operation=operation, case=case, run=run, operands=operands_of(operation, inputs))
    checked = check_all(tried, expect(operation, inputs, case.geometry, case.lengths, block_indices), job.directions, setup.registry)
    for one in measure(tried, checked, job, setup.device):
        yield evolve(one, overlap=overlap)


def _measure_selection(job: Job, inputs: Inputs, setup: Setup) -> Iterator[Measurement]:
    """Yield the measurement of "select", which has no backward."""
    if Direction.FORWARD not in job.directions:
        return
    case, options = job.case, _options(job.case, inputs, setup)
    q, k_cmp = inputs.q, inputs.k_cmp
    one = Measurement(case=case, operation="select", direction=Direction.FORWARD, implementation="none")
    try:
        with torch.no_grad():
            lse = compressed_attention(q, k_cmp, inputs.v_cmp, **options).lse
            setup.registry.forget()
            sample = sample_rows(case.sequence_lengths, case.geometry, setup.device)
            got = select_blocks(q, k_cmp, lse, **options)[0, sample.rows]
            chosen, kept = choices({"q": q, "k_cmp": k_cmp}, sample)
            check = compare_selection(got, chosen, kept, f"scores in float64, {len(got)} of {case.seq_len} rows")
    except Exception as error:  # noqa: BLE001 - one kernel's failure is a result, not the end of the others
        yield evolve(one, reason=describe_failure(error))
        return
    reason = "".join(f"wrong: {problem}" for problem in check.problems)
    one = evolve(one, implementation=setup.registry.served, check=check, reason=reason)

    @torch.no_grad()
    def call() -> Tensor:
        return select_blocks(q, k_cmp, lse, **options)

    patience = job.patience_ms.get(Direction.FORWARD, float("inf"))
    yield one if reason else finish(one, call, job, setup.device, patience_ms=patience)


def _measure_baselines(job: Job, inputs: Inputs, setup: Setup) -> Iterator[Measurement]:
    best: dict[Direction, float] = {}
    expected = expect(DENSE, inputs, job.case.geometry)
    for name in job.baselines:
        baseline = find_baseline(name, job.case, setup.device)
        if baseline.run is None:
            for direction in job.directions:
                one = Measurement(case=job.case, operation=DENSE, direction=direction, implementation=baseline.name, is_ours=False)
                yield evolve(one, reason=baseline.reason)
            continue
        tried = Implementation(operation=DENSE, case=job.case, run=baseline.run, operands=operands_of(DENSE, inputs), name=baseline.name)
        checked = check_all(tried, expected, job.directions, setup.registry)
        patience = {direction: BASELINE_PATIENCE * time_ms for direction, time_ms in best.items()}
        for one in measure(tried, checked, job, setup.device, patience_ms=patience):
            if one.timing is not None:
                best[one.direction] = min(best.get(one.direction, float("inf")), one.timing.median_ms)
            yield one


def _overlap(case: Case, inputs: Inputs, setup: Setup) -> float | None:
    """Return the measured overlap of the whole operation's choices; None if they cannot be computed."""
    options = _options(case, inputs, setup)
    try:
        with torch.no_grad():
            lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, **options).lse
            block_indices = select_blocks(inputs.q, inputs.k_cmp, lse, **options)
    except Exception:  # noqa: BLE001 - the operations themselves report it
        return None
    return free_overlap(block_indices[0], positions_of(case, setup.device), case.geometry)
