"""`nsa-bench prefill`: time a long prompt in tiles over a cache, and compare it with one pass over all of it without a cache.

A tile writes its rows into the cache (APPEND) and computes the attention of all branches. Tiles and the single pass both use the mean as phi; both
times exclude projections, RoPE of the rows and gates. Both results are compared with the reference first; a wrong result gets no time.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import attrs
import torch
from attrs import frozen
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nsa_bench.cases import Case, dtype_of, find_device, geometry_text, given, parse_geometry, parse_lengths, parse_shapes
from nsa_bench.errors import OptionError
from nsa_bench.inputs import make_tensors
from nsa_bench.measurement import describe_failure, finite, free_cached_memory, held_bytes, peak_bytes, time_call, times_in_turn
from nsa_bench.options import PrefillOptions
from nsa_bench.reporting import GIB, collect
from nsa_bench.results import Output, number
from nsa_bench.routes import RouteRecorder, check_backend, request_of, step_request
from nsa_core.attention import append_rows, attend, nsa_attention
from nsa_core.backends.base import NewBlocks, Queries
from nsa_core.blocks import predicted_reads_of_step
from nsa_core.compression import block_windows, build_compressor
from nsa_core.config import NSAConfig
from nsa_core.dispatch import make_call
from nsa_core.kv_cache import CacheOptions, NSACache
from nsa_core.rope import RotaryEmbedding
from nsa_core.telemetry import AttentionObserver
from nsa_core.testing.inputs import Inputs
from nsa_core.testing.sampled import compare, expect, forward_values, operands_of

GPU_CONTEXT, CPU_CONTEXT = "64k", "512"
GPU_TILE, CPU_TILE = "4096", "64"
PASSES = 5
"""Number of timed passes over the prompt; a figure is the median over the passes."""


@frozen(kw_only=True)
class Tile:
    """One tile of a prompt. Times are medians in ms; reads are those of one KV head, summed over the tile's queries."""

    start: int
    tokens: int
    ms: float | None = None
    reads_actual: int
    reads_expected: int


@frozen(kw_only=True)
class PrefillResult:
    """The figures of one prompt in tiles of one size, or why it has none."""

    case: Case
    tile: int
    failure: str | None = None
    tiles: tuple[Tile, ...] = ()
    total_ms: float | None = None
    """Time of all tiles, one after another."""
    whole_ms: float | None = None
    """Time of one pass over the prompt without a cache: phi, then the attention."""
    peak_bytes: int | None = None
    """Peak number of bytes held while the tiles run, including inputs and cache; None on a CPU."""
    cache_bytes: int | None = None
    error: float | None = None
    limit_used: float | None = None
    error_against: str = ""
    routes: str = ""
    """The backends that served the tiles, by operation."""

    @property
    def ratio(self) -> float | None:
        """Return the time of the tiles over that of one pass."""
        return self.total_ms / self.whole_ms if self.total_ms and self.whole_ms else None

    def __str__(self) -> str:
        return f"{self.case.shape}, {self.case.seq_len} tokens, tiles of {self.tile}"


def make_prefill_cases(options: PrefillOptions) -> tuple[tuple[Case, ...], tuple[int, ...]]:
    """Return the prompts that `options` describe, and the tokens of their tiles.

    Raises:
        OptionError: if options are invalid, or the backend is not installed or can serve none of the prompts.
    """
    device = find_device(options.device)
    is_gpu = device.type == "cuda"
    geometry, dtype = parse_geometry(options.geometry), dtype_of(options.dtype, device.type)
    shapes = parse_shapes(options.shapes)
    if odd := [shape for shape in shapes if shape.head_dim_qk % 2]:
        raise OptionError(f"--shapes has {odd[0]} (RoPE turns pairs, so D_k is even); use an even D_k")
    lengths = parse_lengths(given(options.context, GPU_CONTEXT if is_gpu else CPU_CONTEXT), "--context")
    tiles = parse_lengths(given(options.tile, GPU_TILE if is_gpu else CPU_TILE), "--tile")
    cases = tuple(Case(shape=shape, seq_len=length, geometry=geometry, dtype=dtype) for shape in shapes for length in lengths)
    # a tile over the cache, and the pass without one
    measured = (
        (step_request(case, device, batch=1, num_queries=min(tile, case.seq_len)), request_of("nsa", case, device))
        for case, tile in product(cases, tiles)
    )
    check_backend(options.backend, measured)
    return cases, tiles


def run_prefill(options: PrefillOptions, output: Output) -> list[PrefillResult]:
    """Measure the cases of `options`, print the table, write the files after every case, and return the results."""

    def line(one: PrefillResult) -> str:
        return f"{one}: {one.failure or f'{number(one.total_ms)} ms, {number(one.ratio)} of one pass'}"

    def lists_of(results: list[PrefillResult], common: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
        return {"rows": [row for one in results for row in to_rows(one, common)]}

    found = _measured(*make_prefill_cases(options), find_device(options.device), options.backend)
    results = collect(found, attrs.asdict(options), output, line, lists_of)
    output.show(prefill_table(results))
    return results


def _measured(cases: tuple[Case, ...], tiles: tuple[int, ...], device: torch.device, backend: str) -> Iterator[PrefillResult]:
    for case in cases:
        free_cached_memory(device)
        held_before = held_bytes(device)
        try:
            prompt = Prompt(case, device, backend)
        except RuntimeError as error:
            yield from (PrefillResult(case=case, tile=tile, failure=describe_failure(error)) for tile in tiles)
            continue
        for tile in tiles:
            try:
                yield prompt.measure(tile, held_before)
            except Exception as error:  # noqa: BLE001 - a kernel of a plug-in may raise anything; the table says what
                yield PrefillResult(case=case, tile=tile, failure=describe_failure(error))


class Prompt:
    """Random rows of one sequence, for a cache that reads them tile by tile and for one pass over all of them."""

    @torch.no_grad()
    def __init__(self, case: Case, device: torch.device, backend: str) -> None:
        """Draw q, k, v and gates of every token; compressed keys and values come from phi."""
        shape, geometry = case.shape, case.geometry
        self.case, self.device = case, device
        self.registry = RouteRecorder.of_installed()
        self.served_by: dict[str, Any] = {"backend": backend, "registry": self.registry}
        self.config = NSAConfig(
            hidden_size=shape.num_heads, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim_qk=shape.head_dim_qk,
            head_dim_v=shape.head_dim_v, geometry=geometry, compressor="mean",
        )  # fmt: skip
        drawn = make_tensors(case, device)
        generator = torch.Generator(device).manual_seed(1)
        self.raw_k, self.raw_v = (
            torch.randn(1, case.seq_len, shape.num_kv_heads, width, device=device, dtype=case.dtype, generator=generator)
            for width in (shape.head_dim_qk, shape.head_dim_v)
        )
        self.phi = build_compressor("mean", shape.num_kv_heads, shape.head_dim_qk, geometry)
        self.rope = RotaryEmbedding(shape.head_dim_qk)
        k_cmp, v_cmp = self.compressed()
        self.inputs: Inputs = Inputs.of((x.detach() for x in drawn._replace(k_cmp=k_cmp, v_cmp=v_cmp)[:8]), None)

    def compressed(self) -> tuple[Tensor, Tensor]:
        """Return k and v of the compressed blocks `(1, C, G, D)`, keys rotated at the blocks' last tokens."""
        keys, values = (block_windows(x, self.case.geometry) for x in (self.raw_k, self.raw_v))
        return self.rope(self.phi(keys.tokens), keys.last_positions), self.phi(values.tokens)

    @torch.no_grad()
    def whole(self) -> Tensor:
        """Return out `(1, S, H, D_v)` of one pass without a cache."""
        k_cmp, v_cmp = self.compressed()
        operands = self.inputs._replace(k_cmp=k_cmp, v_cmp=v_cmp)[:8]
        return nsa_attention(*operands, geometry=self.case.geometry, **self.served_by)

    def new_cache(self) -> NSACache:
        """Return an empty cache with room for the prompt."""
        return NSACache(self.config, 1, self.case.seq_len, CacheOptions(static=True), dtype=self.case.dtype, device=self.device)

    @torch.no_grad()
    def read_tile(self, cache: NSACache, start: int, tokens: int, observers: tuple[AttentionObserver, ...] = ()) -> Tensor:
        """Append `tokens` tokens from `start` on to `cache` and return their out `(1, tokens, H, D_v)`."""
        part, inputs, geometry = slice(start, start + tokens), self.inputs, self.case.geometry
        step = cache.begin_step(tokens, None)
        pairs = {"raw": (self.raw_k, self.raw_v), "slc": (inputs.k_slc, inputs.v_slc), "win": (inputs.k_win, inputs.v_win)}
        rows = {name: cache.new_rows(name, k[:, part], v[:, part]) for name, (k, v) in pairs.items()}
        cmp = cache.stores.keys_of("cmp")
        # as in the layer: a tile's attention reads ring buffers before its rows overwrite them
        early = tuple(rows.values()) if step.in_place else (rows["slc"],)
        emitted = NewBlocks(cmp, rows["raw"], self.phi, self.phi, self.rope)
        call = make_call(inputs.q, geometry, **self.served_by)
        append_rows(early, emitted, step.start, step.added, call)
        win = cache.window(rows, step)
        queries = Queries(inputs.q[:, part], tokens, None, step.start, step.added)
        gates = inputs.gates[:, part]
        out = attend(queries, cmp, rows["slc"].store, win, gates, geometry=geometry, observers=observers, **self.served_by)
        if not step.in_place:
            append_rows((rows["raw"], rows["win"]), None, step.start, step.added, call)
        cache.end_step(step)
        return out

    def spans(self, tile: int) -> list[tuple[int, int]]:
        """Return start and tokens of every tile."""
        return [(start, min(tile, self.case.seq_len - start)) for start in range(0, self.case.seq_len, tile)]

    def measure(self, tile: int, held_before: int) -> PrefillResult:
        """Return the figures of the prompt in tiles of `tile` tokens; wrong results have no times."""
        result = self.checked(tile)
        if result.failure is not None:
            return result

        passes = [times_in_turn(self.calls(tile), self.device) for _ in range(PASSES)]
        times = [median(of_tile) for of_tile in zip(*passes, strict=True)]
        return attrs.evolve(
            result,
            tiles=tuple(attrs.evolve(one, ms=time_ms) for one, time_ms in zip(result.tiles, times, strict=True)),
            total_ms=median(sum(of_pass) for of_pass in passes),
            whole_ms=time_call(self.whole, self.device).median_ms,
            peak_bytes=peak_bytes(lambda: self.read(tile), self.device, held_before),
        )

    def read(self, tile: int) -> None:
        """Read the prompt into a new cache. No output is kept."""
        for call in self.calls(tile):
            call()

    def calls(self, tile: int) -> list[Callable[[], Tensor]]:
        """Return the calls that read the prompt into a new cache, in order."""
        cache = self.new_cache()
        return [partial(self.read_tile, cache, start, tokens) for start, tokens in self.spans(tile)]

    def checked(self, tile: int) -> PrefillResult:
        """Return the result with errors and read counters, and any fault as its failure."""
        self.registry.forget()
        cache, outs, tiles = self.new_cache(), [], []
        assert cache.read_counter is not None
        for start, tokens in self.spans(tile):
            outs.append(self.read_tile(cache, start, tokens, (cache.read_counter,)))
            reads = cache.last_reads
            assert reads is not None
            expected = predicted_reads_of_step(start, tokens, self.case.geometry)
            tiles.append(Tile(start=start, tokens=tokens, reads_actual=int(reads.actual.max()), reads_expected=expected))
        in_tiles, routes = torch.cat(outs, 1), self.registry.served
        expected_values = expect("nsa", self.inputs, self.case.geometry)
        failures, checks = [], []
        for name, out in (("tiles", in_tiles), ("one pass", self.whole())):
            check = compare(forward_values(lambda *_, out=out: out, operands_of("nsa", self.inputs), expected_values), expected_values)
            failures += [f"{name}: {problem}" for problem in check.problems]
            checks.append(check)
        failures += [f"{one.reads_actual} tokens were read from {one.start} on (Table 4: {one.reads_expected})" for one in tiles
                     if one.reads_actual != one.reads_expected]  # fmt: skip
        return PrefillResult(
            case=self.case, tile=tile, failure="; ".join(failures) or None, tiles=tuple(tiles), cache_bytes=cache.nbytes,
            error=checks[0].error, limit_used=checks[0].limit_used, error_against=checks[0].method, routes=routes,
        )  # fmt: skip


def to_rows(result: PrefillResult, common: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per tile, each with the figures of the whole prompt; one row if there are no tiles."""
    case, shape = result.case, result.case.shape
    whole = {
        "S": case.seq_len, "tile": result.tile, "shape": shape.name, "heads": shape.num_heads, "kv_heads": shape.num_kv_heads,
        "head_dim_qk": shape.head_dim_qk, "head_dim_v": shape.head_dim_v, "geometry": geometry_text(case.geometry),
        "dtype": str(case.dtype).removeprefix("torch."), "ms_total": result.total_ms, "ms_one_pass": result.whole_ms, "ratio": result.ratio,
        "peak_bytes": result.peak_bytes, "cache_bytes": result.cache_bytes, "error": None if result.error is None else finite(result.error),
        "limit_used": None if result.limit_used is None else finite(result.limit_used), "error_against": result.error_against,
        "routes": result.routes, "reason": result.failure or "",
    }  # fmt: skip
    tiles: tuple[Tile | None, ...] = result.tiles or (None,)
    return [{**_tile_columns(one), **whole, **common} for one in tiles]


def _tile_columns(tile: Tile | None) -> dict[str, Any]:
    names = ("start", "tokens", "ms", "reads_actual", "reads_expected")
    return {name: None if tile is None else getattr(tile, name) for name in names}


def prefill_table(results: list[PrefillResult]) -> Table:
    """Return a line per prompt: the times in ms of its first tile, its last tile, all tiles, and one pass."""
    table = Table("case", "first", "last", "all", "one pass", "ratio", "tokens/s", "peak GiB", "error", title="prefill, ms")
    for one in results:
        if one.failure is not None or not one.tiles:
            table.add_row(Text(str(one)), Text(one.failure or "", style="red"))
            continue
        times = (one.tiles[0].ms, one.tiles[-1].ms, one.total_ms, one.whole_ms, one.ratio)
        rate = None if not one.total_ms else 1e3 * one.case.seq_len / one.total_ms
        peak = None if one.peak_bytes is None else one.peak_bytes / GIB
        table.add_row(Text(str(one)), *(number(x) for x in (*times, rate, peak)), f"{one.error:.1e}")
    return table
