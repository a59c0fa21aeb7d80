"""`nsa-bench select`: time the choice of blocks alone, by every installed backend, for one long sequence and for packed ones.

"select" scores the compressed keys and chooses (operation SELECT); "choose" is the choice alone, from given importance
(operation CHOOSE). A choice that differs from the reference, except at near ties, gets no time.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import attrs
import torch
from attrs import frozen
from rich.table import Table
from rich.text import Text

from nsa_bench.attention.run import run_jobs
from nsa_bench.attention.sweep import short_lengths
from nsa_bench.cases import Case, dtype_of, find_device, geometry_text, lengths_of, parse_geometry, parse_shapes
from nsa_bench.errors import OptionError
from nsa_bench.inputs import positions_of
from nsa_bench.measurement import Direction, Job, Setup, Timing, describe_failure, free_cached_memory, replay_of, time_call, timing_columns
from nsa_bench.options import SelectOptions
from nsa_bench.reporting import collect, in_rows
from nsa_bench.results import Output, number
from nsa_bench.routes import RouteRecorder, check_backend, reasons_against, request_of
from nsa_core import Operation
from nsa_core.blocks import num_selection_blocks
from nsa_core.reference.choose import choose

MOST_SCORES = 2**28
"""Maximum scores of CHOOSE, float32, that are held at a time."""
COMPARED_ROWS = 512


@frozen(kw_only=True)
class SelectResult:
    """The time of one backend's choice, or why it has none."""

    case: Case
    part: str
    """"select" or "choose"."""
    backend: str
    rows: int
    """Number of queries that choose."""
    timing: Timing | None = None
    reason: str = ""
    """Why there is no time although there should be one."""
    absent: str = ""
    """Why the backend does not serve the case."""
    near_ties: int | None = None

    @property
    def layout(self) -> str:
        """Return "dense" for one sequence, "varlen" for packed ones."""
        return "dense" if self.case.lengths is None else "varlen"

    def __str__(self) -> str:
        return f"{self.part}, {self.layout}, {self.case.shape}, {self.case.seq_len} tokens, {self.backend}"


def make_select_cases(options: SelectOptions) -> tuple[Case, ...]:
    """Return the cases that `options` describe.

    Raises:
        OptionError: if options are invalid, or the backend is not installed or can serve nothing of them.
    """
    device = find_device(options.device)
    geometry, dtype = parse_geometry(options.geometry), dtype_of(options.dtype, device.type)
    if options.sequences < 1:
        raise OptionError(f"--sequences={options.sequences} is too small (the rule: an integer >= 1); use 8")
    cases = []
    for shape, length in product(parse_shapes(options.shapes), lengths_of(options.lengths, device)):
        if length < options.sequences * (options.sequences + 1) // 2:
            raise OptionError(f"--lengths={length} cannot hold --sequences={options.sequences} of different lengths; use fewer sequences")
        dense = Case(shape=shape, seq_len=length, geometry=geometry, dtype=dtype)
        cases += [dense, attrs.evolve(dense, lengths=short_lengths(length, options.sequences))]
    check_backend(options.backend, ((request_of("select", case, device),) for case in cases))
    return tuple(cases)


def run_select(options: SelectOptions, output: Output) -> list[SelectResult]:
    """Measure the cases of `options`, print the table, write the files after every result, and return the results."""

    def line(one: SelectResult) -> str:
        figure = None if one.timing is None else one.timing.median_ms
        return f"{one}: {one.absent or one.reason or f'{number(figure)} ms'}"

    found = _measured(make_select_cases(options), find_device(options.device), options.backend)
    results = collect(found, attrs.asdict(options), output, line, in_rows(to_row))
    output.show(select_table(results))
    return results


def _measured(cases: tuple[Case, ...], device: torch.device, backend: str) -> Iterator[SelectResult]:
    parts = {Operation.SELECT: _selection, Operation.CHOOSE: _choice}
    installed = dict.fromkeys(one.name for one in RouteRecorder.of_installed().backends if one.operation in parts)
    # a name overrides reasons of policy
    is_named = backend != "auto"
    for case, name in product(cases, [backend] if is_named else installed):
        registry = RouteRecorder.of_installed()
        for operation, measure in parts.items():
            # the choice alone does not depend on sequences, so packed rows are not a separate case
            if registry.has(operation, name) and (operation is Operation.SELECT or case.lengths is None):
                against = reasons_against(name, request_of(operation, case, device), registry, is_named=is_named)
                absent = SelectResult(case=case, part=operation.value, backend=name, rows=case.seq_len, absent=", ".join(against))
                yield absent if against else measure(case, name, device, registry)


def _selection(case: Case, name: str, device: torch.device, registry: RouteRecorder) -> SelectResult:
    job = Job(case=case, operations=("select",), directions=(Direction.FORWARD,), is_replayed=True)
    one = next(run_jobs((job,), Setup(device=device, registry=registry, backend={"select": name})))
    ties = None if one.check is None else one.check.near_ties
    return SelectResult(
        case=case, part="select", backend=name, rows=case.seq_len, timing=one.timing, reason=one.reason, near_ties=ties
    )  # fmt: skip


def _choice(case: Case, name: str, device: torch.device, registry: RouteRecorder) -> SelectResult:
    shape, geometry = case.shape, case.geometry
    num_blocks = num_selection_blocks(case.seq_len, geometry)
    rows = max(1, min(case.seq_len, MOST_SCORES // (shape.num_kv_heads * num_blocks)))
    result = SelectResult(case=case, part="choose", backend=name, rows=rows)
    backend: Any = next(one for one in registry.backends if (one.operation, one.name) == (Operation.CHOOSE, name))
    try:
        free_cached_memory(device)
        generator = torch.Generator(device).manual_seed(0)
        scores = torch.rand(rows, shape.num_kv_heads, num_blocks, device=device, generator=generator)
        # the last rows, which choose among most blocks
        positions = positions_of(case, device)[-rows:].int()
        operands = (scores, None, positions, shape.num_kv_heads)
        few = torch.linspace(0, rows - 1, min(rows, COMPARED_ROWS), device=device).long()
        expected = choose(scores[few], None, positions[few], shape.num_kv_heads, geometry=geometry)

        def call() -> Any:
            return backend(*operands, geometry=geometry)

        wrong = int((call()[few] != expected).any(-1).sum())
        if wrong:
            return attrs.evolve(
                result,
                reason=f"wrong: {wrong} of {expected.shape[0] * expected.shape[1]} choices differ from the reference (equal bit by bit is the rule)",
            )

        timed = replay_of(call, device) if device.type == "cuda" else call
        return attrs.evolve(result, timing=time_call(timed, device), near_ties=0)
    except Exception as error:  # noqa: BLE001 - one kernel's failure is a result, not the end of the others
        return attrs.evolve(result, reason=describe_failure(error))


def to_row(one: SelectResult, common: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the files; None is a value that was not measured."""
    case = one.case
    return {
        "part": one.part, "layout": one.layout, "shape": case.shape.name, "num_heads": case.shape.num_heads,
        "num_kv_heads": case.shape.num_kv_heads, "head_dim_qk": case.shape.head_dim_qk, "seq_len": case.seq_len,
        "num_sequences": len(case.sequence_lengths), "rows": one.rows, "geometry": geometry_text(case.geometry),
        "dtype": str(case.dtype).removeprefix("torch."), "backend": one.backend, **timing_columns(one.timing),
        "near_ties": one.near_ties, "reason": one.absent or one.reason, **common,
    }  # fmt: skip


def select_table(results: list[SelectResult]) -> Table:
    """Return a line per case and backend, and below them why other backends do not serve."""
    table = Table("part", "rows of", "backend", "ms", "ns a row", "near ties", title="choice of blocks")
    for one in results:
        packed = "" if one.case.lengths is None else f" in {len(one.case.lengths)} sequences"
        case = f"{one.case.shape}, {one.case.seq_len} tokens{packed}"
        if one.timing is not None:
            figures = (one.timing.median_ms, 1e6 * one.timing.median_ms / one.rows)
            table.add_row(one.part, Text(case), Text(one.backend), *(number(x) for x in figures), str(one.near_ties))
        elif not one.absent:
            table.add_row(one.part, Text(case), Text(one.backend), Text(one.reason, style="red"))
    absent = dict.fromkeys(f"{one.part} by {one.backend}: {one.absent}" for one in results if one.absent)
    table.caption = Text("\n".join(absent)) if absent else None
    return table
