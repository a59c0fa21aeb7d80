"""Turn the options of `nsa-bench attention` into jobs, and into the points or targets with which results are compared."""

import torch
from attrs import frozen

from nsa_bench.attention.sweep import LENGTH, SweepPoint, sweep_jobs, sweep_points
from nsa_bench.attention.targets import Target, all_targets, target_jobs
from nsa_bench.baselines import parse_baselines
from nsa_bench.cases import (
    OURS,
    Case,
    Recorded,
    dtype_of,
    find_device,
    given,
    lengths_of,
    parse_geometry,
    parse_lengths,
    parse_names,
    parse_selections,
    parse_shapes,
)
from nsa_bench.errors import OptionError
from nsa_bench.measurement import Direction, Job
from nsa_bench.options import AttentionOptions
from nsa_bench.recorded import read_recording

FIXED_BY = {
    "preset": ("sweep", "lengths", "shapes", "operations", "selection", "geometry", "dtype", "graph"),
    "sweep": ("shapes", "baseline"),
}
"""The options whose values another option decides."""


@frozen(kw_only=True)
class Plan:
    """The jobs, and the points of a sweep or the targets with which results are compared."""

    device: torch.device
    jobs: tuple[Job, ...]
    points: tuple[SweepPoint, ...] = ()
    targets: tuple[Target, ...] = ()


def make_plan(options: AttentionOptions) -> Plan:
    """Return the plan of `options`.

    Raises:
        OptionError: if values are not lengths, shapes, ..., or options contradict each other.
    """
    _check_conflicts(options)
    device = find_device(options.device)
    if options.graph and device.type == "cpu":
        raise OptionError("--graph times CUDA graphs, which a CPU does not have; drop it")
    if options.preset is not None:
        return _target_plan(options, device)
    directions = tuple(Direction) if options.backward else (Direction.FORWARD,)
    # a part with few pairs, such as compressed attention of short sequences, is dominated by its queries
    default = "nsa" if options.sweep else ",".join(OURS)
    operations = parse_names("--operations", given(options.operations, default), OURS)
    selections = parse_selections(given(options.selection, "random"))
    for selection in selections:
        if isinstance(selection, Recorded):
            # a file without choices is refused before anything is measured
            read_recording(selection.path)
    geometry = parse_geometry(given(options.geometry, "32/16/64/16/512"))
    dtype = dtype_of(options.dtype, device.type)
    if options.sweep:
        points = tuple(point for selection in selections for point in sweep_points(_sweep_length(options), geometry, dtype, selection))
        return Plan(device=device, jobs=sweep_jobs(points, operations, directions), points=points)
    lengths = lengths_of(options.lengths, device)
    baselines = parse_baselines(given(options.baseline, "all"))
    jobs = [
        Job(
            case=Case(shape=shape, seq_len=length, geometry=geometry, dtype=dtype, selection=selection),
            operations=operations,
            directions=directions,
            # dense attention does not depend on the selection
            baselines=baselines if selection is selections[0] else (),
            is_replayed=options.graph,
        )
        for shape in parse_shapes(given(options.shapes, "P,L,M,S"))
        for length in lengths
        for selection in selections
    ]
    return Plan(device=device, jobs=tuple(jobs))


def _check_conflicts(options: AttentionOptions) -> None:
    problems = []
    for option, fixed in FIXED_BY.items():
        given = [name for name in fixed if getattr(options, name)] if getattr(options, option) else []
        problems += [f"--{name} came with --{option}, which decides it; drop one of the two" for name in given]
    if problems:
        raise OptionError.of(problems)


def _sweep_length(options: AttentionOptions) -> int:
    lengths = (LENGTH,) if options.lengths is None else parse_lengths(options.lengths)
    if len(lengths) != 1 or lengths[0] < 2:
        raise OptionError(f"--lengths={options.lengths} came with --sweep, which varies one length by 1; use one length >= 2, such as 8k")
    return lengths[0]


def _target_plan(options: AttentionOptions, device: torch.device) -> Plan:
    if device.type != "cuda":
        raise OptionError("--preset=targets on a CPU (its figures are those of one H200, and its lengths end at 128k); run it on a GPU")
    targets = tuple(target for target in all_targets() if options.backward or target.direction is Direction.FORWARD)
    return Plan(device=device, jobs=target_jobs(targets, parse_baselines(given(options.baseline, "all"))), targets=targets)
