"""What the options of `nsa-bench attention` ask for: jobs, and how their results are judged."""

import torch
from attrs import field, frozen

from nsa_bench.attention import Job
from nsa_bench.backends_report import DTYPES
from nsa_bench.baselines import parse_baselines
from nsa_bench.cases import CPU_LENGTHS, LENGTHS, Case, Selection, parse_geometry, parse_lengths, parse_shapes
from nsa_bench.compare import Comparison, comparisons
from nsa_bench.errors import OptionError
from nsa_bench.measurements import OURS, Direction
from nsa_bench.sweep import LENGTH, SweepPoint, sweep_jobs, sweep_points
from nsa_bench.targets import Target, all_targets, target_jobs

FIXED_BY = {
    "preset": ("sweep", "lengths", "shapes", "operations", "selection", "geometry", "dtype", "graph"),
    "sweep": ("shapes", "baseline"),
}
"""The options that another one decides."""


@frozen(kw_only=True)
class AttentionOptions:
    """The options as they were given; None where they were not."""

    device: str | None = None
    dtype: str | None = None
    lengths: str | None = None
    shapes: str | None = None
    operations: str | None = None
    selection: str | None = None
    geometry: str | None = None
    baseline: str | None = None
    backward: bool = True
    graph: bool = False
    sweep: bool = False
    preset: str | None = None


@frozen(kw_only=True)
class Plan:
    """What will be measured, and what it is held against."""

    device: torch.device
    jobs: tuple[Job, ...]
    points: tuple[SweepPoint, ...] = field(default=())
    """Of a sweep."""
    targets: tuple[Target, ...] = field(default=())
    """Of the preset "targets"."""


def make_plan(options: AttentionOptions) -> Plan:
    """Return the plan of `options`.

    Raises:
        OptionError: for values that are no lengths, shapes, ..., or options that contradict each other.
    """
    _check_conflicts(options)
    device = find_device(options.device)
    if options.graph and device.type == "cpu":
        raise OptionError("--graph times CUDA graphs, which a CPU does not have; drop it")
    if options.preset is not None:
        return _target_plan(options, device)
    directions = tuple(Direction) if options.backward else (Direction.FORWARD,)
    # where a part has few pairs, as compressed attention of short sequences, its cost by the pair is that of its queries
    default = "nsa" if options.sweep else ",".join(OURS)
    operations = parse_names("--operations", options.operations or default, OURS)
    selections = [Selection(name) for name in parse_names("--selection", options.selection or "random", tuple(Selection))]
    geometry = parse_geometry(options.geometry or "32/16/64/16/512")
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    if options.sweep:
        points = tuple(point for selection in selections for point in sweep_points(_sweep_length(options), geometry, dtype, selection))
        return Plan(device=device, jobs=sweep_jobs(points, operations, directions), points=points)
    lengths = parse_lengths(options.lengths or (LENGTHS if device.type == "cuda" else CPU_LENGTHS))
    baselines = parse_baselines(options.baseline or "all")
    jobs = [
        Job(
            case=Case(shape=shape, seq_len=length, geometry=geometry, dtype=dtype, selection=selection),
            operations=operations,
            directions=directions,
            # dense attention does not depend on the selection
            baselines=baselines if selection is selections[0] else (),
            is_replayed=options.graph,
        )
        for shape in parse_shapes(options.shapes or "P,L,M,S")
        for length in lengths
        for selection in selections
    ]
    return Plan(device=device, jobs=tuple(jobs))


def make_comparisons(
    device: str | None, dtype: str | None, lengths: str | None, shapes: str, geometry: str, *, backward: bool
) -> tuple[torch.device, tuple[Comparison, ...]]:
    """Return where `nsa-bench compare` runs and what it compares.

    Raises:
        OptionError: for values that are no lengths, shapes or geometry.
    """
    where = find_device(device)
    return where, comparisons(
        parse_shapes(shapes),
        parse_lengths(lengths or (LENGTHS if where.type == "cuda" else CPU_LENGTHS)),
        parse_geometry(geometry),
        DTYPES[dtype or ("bf16" if where.type == "cuda" else "fp32")],
        tuple(Direction) if backward else (Direction.FORWARD,),
    )


def find_device(kind: str | None) -> torch.device:
    """Return the device of `--device`: by default the GPU where there is one.

    Raises:
        OptionError: when a GPU is asked for that is not here.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device=cuda on a machine without a GPU (times are taken here, none is simulated); use --device cpu")
    return torch.device(kind or ("cuda" if torch.cuda.is_available() else "cpu"))


def parse_names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of "nsa,slc", each of `known`, in that order and once each.

    Raises:
        OptionError: for an unknown name.
    """
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise OptionError(f"{option} has {unknown[0]!r} (the rule: some of {', '.join(known)}); use {known[0]}")
    return tuple(name for name in known if name in names)


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
    return Plan(device=device, jobs=target_jobs(targets, parse_baselines(options.baseline or "all")), targets=targets)
