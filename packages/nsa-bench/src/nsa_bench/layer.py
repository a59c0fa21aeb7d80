"""`nsa-bench layer`: time a decode step of a whole layer, with its projections, RoPE, gates and output.

The layer itself fills a static cache with random rows. Its steps are timed in five ways: the linear maps alone, the operations of the backends
(append and attention) alone, the step in one CUDA graph, the step as the layer's ordinary call (a cache on a GPU captures its steps), and the same
call with captures off. L2 is not flushed between two steps, because the weights of a layer with hidden size 4,096 fill it anyway. A layer gets no
times if its reads are wrong, or if captured and eager outputs differ.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import attrs
import torch
from attrs import frozen
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from nsa_bench.cases import HeadShape, dtype_of, find_device, geometry_text, given, parse_geometry, parse_lengths, parse_names, parse_shapes
from nsa_bench.errors import OptionError
from nsa_bench.measurement import back_to_back_ms, describe_failure, free_cached_memory, replay_of
from nsa_bench.options import LayerOptions
from nsa_bench.reporting import collect, in_rows
from nsa_bench.results import Output, number
from nsa_bench.routes import CallRecorder, RouteRecorder
from nsa_core.blocks import predicted_reads
from nsa_core.config import BRANCHES, NSAConfig
from nsa_core.kv_cache import NSACache
from nsa_core.module import NativeSparseAttention
from nsa_core.testing.tolerances import allowed_error, max_error

GPU_CONTEXT, CPU_CONTEXT = "64k", "256"
GPU_BATCH, CPU_BATCH = "1,16", "2"
CHECKED_STEPS = 4
"""Steps that are compared: a cache runs the first one eagerly, captures the second, and replays it from then on."""
WARM_UPS = 10
LOOPS = 3
GPU_STEPS, CPU_STEPS = 40, 3
"""Steps of a loop. A time is the median of LOOPS loops, each divided by its steps."""
FILL_TOKENS = 65536
"""Tokens of all sequences together that the layer reads at a time when it fills the cache."""
WAYS = ("projections", "operations", "graph", "captured", "eager")
"""The ways in which a step is timed: its linear maps alone, and its operations alone, each by CUDA graph; the step in one CUDA graph, with the
cache's second streams; the layer's ordinary call with a cache that captures its steps; and that call with captures off."""


@frozen(kw_only=True)
class LayerCase:
    """A layer, and steps of one token of `batch` sequences that hold about `context` tokens."""

    shape: HeadShape
    config: NSAConfig
    context: int
    batch: int
    dtype: torch.dtype
    count_reads: bool

    def __str__(self) -> str:
        counted = ", reads counted" if self.count_reads else ""
        return f"{self.shape}, hidden {self.config.hidden_size}, {self.context} tokens, batch {self.batch}{counted}"


@frozen(kw_only=True)
class LayerResult:
    """The figures of one case, or why it has none. Times are in ms per step; times by CUDA graph exist only on a GPU."""

    case: LayerCase
    failure: str | None = None
    routes: str = ""
    times: dict[str, float] = attrs.field(factory=dict)
    """Way (one of WAYS) -> time. Without a GPU nothing is captured, and projections and operations run from Python."""
    error: float | None = None
    """Largest difference of a captured step from the eager one."""
    reads_actual: int | None = None
    reads_expected: int | None = None
    cache_bytes: int | None = None
    weight_bytes: int | None = None
    """Bytes of the weights of the linear maps."""


def make_layer_cases(options: LayerOptions) -> tuple[LayerCase, ...]:
    """Return the cases that `options` describe.

    Raises:
        OptionError: if options are invalid.
        ConfigError: if the sizes do not fit one another.
    """
    device = find_device(options.device)
    is_gpu = device.type == "cuda"
    contexts = parse_lengths(given(options.context, GPU_CONTEXT if is_gpu else CPU_CONTEXT), "--context")
    batches = parse_lengths(given(options.batch, GPU_BATCH if is_gpu else CPU_BATCH), "--batch")
    if min(contexts) <= (most := steps_of_a_cache(device)):
        raise OptionError(f"--context={min(contexts)} leaves no room (a measurement takes {most} steps); use {2 * most} or more")
    shapes, geometry, dtype = parse_shapes(options.shapes), parse_geometry(options.geometry), dtype_of(options.dtype, device.type)
    branches = parse_names("--branches", options.branches, BRANCHES)
    configs = [
        NSAConfig(
            hidden_size=options.hidden, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim_qk=shape.head_dim_qk,
            head_dim_v=shape.head_dim_v, geometry=geometry, compressor=options.compressor, branches=branches, kv=options.kv,
        )
        for shape in shapes
    ]  # fmt: skip
    # Table 4 counts all three branches; a layer with fewer counts no reads
    counted = (False, True) if branches == BRANCHES else (False,)
    return tuple(
        LayerCase(shape=shape, config=config, context=context, batch=batch, dtype=dtype, count_reads=count_reads)
        for (shape, config), context, batch, count_reads in product(zip(shapes, configs, strict=True), contexts, batches, counted)
    )


def steps_of_a_cache(device: torch.device) -> int:
    """Return the maximum number of steps that a measurement runs on one cache."""
    by_call = WARM_UPS + LOOPS * _steps(device)
    # a step before the capture, and the replays; or the step whose operations are repeated
    return CHECKED_STEPS + by_call + (1 + by_call if device.type == "cuda" else 1)


def _steps(device: torch.device) -> int:
    return GPU_STEPS if device.type == "cuda" else CPU_STEPS


def run_layer(options: LayerOptions, output: Output) -> list[LayerResult]:
    """Measure the cases of `options`, print the table, write the files after every case, and return the results."""

    def line(one: LayerResult) -> str:
        best = one.times.get("captured", one.times.get("eager"))
        return f"{one.case}: {one.failure or f'{number(best)} ms a step'}"

    found = _measured(make_layer_cases(options), find_device(options.device))
    results = collect(found, attrs.asdict(options), output, line, in_rows(to_row))
    output.show(layer_table(results))
    return results


def _measured(cases: tuple[LayerCase, ...], device: torch.device) -> Iterator[LayerResult]:
    for case in cases:
        free_cached_memory(device)
        try:
            yield measure_layer(case, device)
        except Exception as error:  # noqa: BLE001 - a kernel of a plug-in may raise anything; the table says what
            yield LayerResult(case=case, failure=describe_failure(error))


@torch.no_grad()
def measure_layer(case: LayerCase, device: torch.device) -> LayerResult:
    """Return the figures of a layer's step; a wrong step has no times."""
    is_gpu = device.type == "cuda"
    registry = RouteRecorder.of_installed()
    torch.manual_seed(0)
    layer = NativeSparseAttention(case.config, registry=registry).to(device, case.dtype).eval()
    rows = torch.randn(CHECKED_STEPS, case.batch, 1, case.config.hidden_size, device=device, dtype=case.dtype)
    maps = linear_maps(layer)
    attended = torch.randn(case.batch, 1, layer.o_proj.in_features, device=device, dtype=case.dtype)
    inputs = [attended if map_ is layer.o_proj else rows[0] for map_ in maps]

    def projections() -> list[Tensor]:
        return [map_(x) for map_, x in zip(maps, inputs, strict=True)]

    times = {"projections": step_ms(replay_of(projections, device) if is_gpu else projections, device)}
    weight_bytes = sum(weight.nbytes for map_ in maps for weight in map_.parameters())
    result = LayerResult(case=case, weight_bytes=weight_bytes)
    outs: dict[str, Tensor] = {}
    for way in ("eager", "captured") if is_gpu else ("eager",):
        free_cached_memory(device)
        steps = LayerSteps(layer, case, device, step_graphs=way == "captured")
        registry.forget()
        outs[way] = torch.stack([steps.step(x) for x in rows])
        result = attrs.evolve(result, **steps.figures(), routes=registry.served)
        if failures := [*steps.wrong_reads(), *_differences(outs)]:
            return attrs.evolve(result, failure="; ".join(failures))
        again = partial(steps.step, rows[0])
        times[way] = step_ms(again, device)
        if way == "captured":
            times["graph"] = step_ms(replay_of(again, device), device)
            result = attrs.evolve(result, error=max_error(outs["captured"], outs["eager"]))
        else:
            operations = steps.operations(rows[0]).repeat
            times["operations"] = step_ms(replay_of(operations, device) if is_gpu else operations, device)
            del operations
        steps.cache.check()
        # the next cache gets its memory
        del steps, again
    return attrs.evolve(result, times=times)


def _differences(outs: dict[str, Tensor]) -> list[str]:
    """Return a message if captured steps differ from eager ones by more than rounding; else an empty list."""
    if len(outs) < 2:
        return []
    error, limit = max_error(outs["captured"], outs["eager"]), allowed_error(outs["eager"], outs["eager"].dtype)
    return [] if error <= limit else [f"a captured step is off by {error:.1e} from one without capture (allowed: {limit:.1e})"]


def linear_maps(layer: NativeSparseAttention) -> list[nn.Module]:
    """Return the linear maps of a step: the projections of q, k and v, the gates, the output."""
    projections = [module for part in (layer.q_proj, layer.k_proj, layer.v_proj) for module in part.modules()]
    return [*(module for module in projections if isinstance(module, nn.Linear)), layer.gate, layer.o_proj]


class LayerSteps:
    """A static cache that the layer has filled with random rows, and its steps of one token of each sequence."""

    def __init__(self, layer: NativeSparseAttention, case: LayerCase, device: torch.device, *, step_graphs: bool) -> None:
        """Fill the cache, and leave room for `steps_of_a_cache`."""
        self.layer, self.case = layer, case
        self.cache: NSACache = layer.new_cache(
            case.batch, case.context, static=True, count_reads=case.count_reads, step_graphs=step_graphs, dtype=case.dtype, device=device
        )
        generator, held = torch.Generator(device).manual_seed(1), case.context - steps_of_a_cache(device)
        tile = max(1, FILL_TOKENS // case.batch)
        for start in range(0, held, tile):
            shape = (case.batch, min(tile, held - start), case.config.hidden_size)
            self.step(torch.randn(shape, device=device, dtype=case.dtype, generator=generator))
        self.held = held

    def step(self, x: Tensor) -> Tensor:
        """Return the layer's output `(B, S, hidden_size)` for x of the same shape; the step is appended to the cache."""
        out: Tensor = self.layer(x, cache=self.cache)
        return out

    def operations(self, x: Tensor) -> CallRecorder:
        """Run one more step and return its recorded operations. A repetition writes and reads the same rows again."""
        before = self.layer.registry
        assert before is not None
        recorded = self.layer.registry = CallRecorder(before)
        try:
            self.step(x)
        finally:
            self.layer.registry = before
        return recorded

    def figures(self) -> dict[str, Any]:
        """Return the columns of the cache and of the reads of the last of CHECKED_STEPS steps."""
        reads = self.cache.last_reads
        return {
            "cache_bytes": self.cache.nbytes,
            "reads_actual": None if reads is None else int(reads.actual.max()),
            "reads_expected": None if reads is None else self.expected_reads(),
        }

    def expected_reads(self) -> int:
        """Return the tokens that a KV head reads in the last of CHECKED_STEPS steps, by Table 4."""
        return predicted_reads(self.held + CHECKED_STEPS, self.case.config.geometry)

    def wrong_reads(self) -> list[str]:
        """Return a message if the counted reads of the last step are wrong for some sequence and KV head; else an empty list."""
        reads = self.cache.last_reads
        if (reads is None) == self.case.count_reads:
            return ["reads were counted, or not, against the case"]
        wrong = [] if reads is None else reads.actual[reads.actual != self.expected_reads()].tolist()
        return [f"{wrong[0]} tokens were read (Table 4: {self.expected_reads()})"] if wrong else []


def step_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of a step in ms, without a wait between steps."""
    return back_to_back_ms(call, device, warm_ups=WARM_UPS, loops=LOOPS, count=_steps(device))


def to_row(one: LayerResult, common: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the files; None is a value that was not measured."""
    case, shape = one.case, one.case.shape
    return {
        "S": case.context, "batch": case.batch, "shape": shape.name, "heads": shape.num_heads, "kv_heads": shape.num_kv_heads,
        "head_dim_qk": shape.head_dim_qk, "head_dim_v": shape.head_dim_v, "hidden_size": case.config.hidden_size,
        "branches": ",".join(case.config.branches), "kv": case.config.kv, "compressor": case.config.compressor,
        "geometry": geometry_text(case.config.geometry), "dtype": str(case.dtype).removeprefix("torch."),
        "count_reads": case.count_reads, **{f"ms_{way}": one.times.get(way) for way in WAYS}, "error": one.error,
        "reads_actual": one.reads_actual, "reads_expected": one.reads_expected, "cache_bytes": one.cache_bytes,
        "weight_bytes": one.weight_bytes, "routes": one.routes, "reason": one.failure or "", **common,
    }  # fmt: skip


def layer_table(results: list[LayerResult]) -> Table:
    """Return a line per case, in microseconds."""
    table = Table("case", *WAYS, title="a layer's step, us")
    for one in results:
        if one.failure is not None:
            table.add_row(Text(str(one.case)), Text(one.failure, style="red"))
            continue
        table.add_row(Text(str(one.case)), *(number(1e3 * one.times[way]) if way in one.times else "-" for way in WAYS))
    return table
