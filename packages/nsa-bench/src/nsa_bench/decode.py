"""`nsa-bench decode`: time one step over full caches, from Python and by CUDA graph, and compare it with dense attention and other packages.

A step writes its rows into the caches (APPEND) and computes the attention of all branches. Projections, RoPE of its rows and gates are not part
of it. The caches hold random numbers, so no prefill runs. Each step is compared with the reference in float64 before it is timed; a wrong
step gets no time.
"""

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import attrs
import torch
from attrs import frozen
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nsa_bench.baselines import dense_decode_kernels
from nsa_bench.cases import Case, HeadShape, dtype_of, find_device, given, parse_geometry, parse_lengths, parse_shapes
from nsa_bench.errors import OptionError
from nsa_bench.measurement import describe_failure, finite, free_cached_memory, replay_of, time_call
from nsa_bench.options import DecodeOptions
from nsa_bench.peers import DECODE_PEERS, DecodePeer
from nsa_bench.reporting import collect, in_rows
from nsa_bench.results import Output, number
from nsa_bench.routes import check_backend, step_request
from nsa_core import blocks
from nsa_core.attention import append_rows, attend
from nsa_core.backends.base import BranchRequest, Keys, NewBlocks, Queries
from nsa_core.backends.layouts import keys_in_rows
from nsa_core.compression import build_compressor
from nsa_core.config import BlockGeometry, NSAConfig
from nsa_core.dispatch import make_call
from nsa_core.gating import gated_sum
from nsa_core.kv_cache import CacheOptions, NSACache
from nsa_core.kv_cache.stores import Stores
from nsa_core.reference.append import to_fp8
from nsa_core.rope import RotaryEmbedding
from nsa_core.selection import choose_blocks, pool_importance
from nsa_core.telemetry import AttentionObserver, count_reads
from nsa_core.testing.tolerances import allowed_error, max_error, near_tie_margin

GPU_CONTEXTS, CPU_CONTEXTS = "4k,8k,16k,32k,64k,128k", "256"
GPU_BATCHES, CPU_BATCHES = "1,4,16,64", "2"
CHECKED_SEQUENCES = 2
"""Sequences of a batch that are compared with the reference."""
STEP_PARTS = ("total", "append", "attend")
BRANCH_PARTS = ("cmp", "sel", "win")
"""Single branches. They have kernels of their own, which a step does not run; these are compiled for each case."""
HOST_COUNT = 10
"""Maximum repetitions of calls from Python on a GPU."""


@frozen(kw_only=True)
class DecodeCase:
    """A step of `batch` sequences that hold `context` tokens when it ends."""

    shape: HeadShape
    context: int
    batch: int
    geometry: BlockGeometry
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    """The dtype of the selected and the sliding branch's stores; None: `dtype`."""

    def __str__(self) -> str:
        return f"{self.shape}, {self.context} tokens, batch {self.batch}{', stores of FP8' if self.kv_dtype else ''}"


@frozen(kw_only=True)
class DecodeResult:
    """The figures of one case, or why it has none. Times are medians in ms: of calls from Python, and of replays of a CUDA graph."""

    case: DecodeCase
    failure: str | None = None
    routes: str = ""
    error: float | None = None
    limit: float | None = None
    near_ties: int = 0
    reads_actual: int | None = None
    reads_expected: int | None = None
    times: dict[str, float] = attrs.field(factory=dict)
    """Part -> time. Parts are total, append, attend, cmp, sel, win; the prefix "graph " means by CUDA graph."""
    dense: dict[str, float] = attrs.field(factory=dict)
    """Dense kernel -> time, with the same prefix."""
    peers: dict[str, float] = attrs.field(factory=dict)
    """Other package -> time, with the same prefix."""
    peer_notes: tuple[str, ...] = ()
    """Why other packages have no time, and remarks on those that have one."""
    peer_errors: dict[str, float] = attrs.field(factory=dict)
    """Other package -> error of its output."""
    notes: tuple[str, ...] = ()
    check_seconds: float = 0.0
    """Duration of the comparison, including the caches and the compilation of its kernels."""
    time_seconds: float = 0.0
    """Duration of the measurements, including compilation."""


def best_of(times: dict[str, float], way: str = "") -> float | None:
    """Return the shortest time of any kernel or package, from Python or, with the prefix "graph ", by CUDA graph."""
    return min((time for name, time in times.items() if name.startswith("graph ") == bool(way)), default=None)


def make_decode_cases(options: DecodeOptions) -> tuple[DecodeCase, ...]:
    """Return the cases that `options` describe.

    Raises:
        OptionError: if options are invalid, or the backend is not installed or can serve none of the cases.
    """
    device = find_device(options.device)
    is_gpu = device.type == "cuda"
    contexts = parse_lengths(given(options.context, GPU_CONTEXTS if is_gpu else CPU_CONTEXTS), "--context")
    batches = parse_lengths(given(options.batch, GPU_BATCHES if is_gpu else CPU_BATCHES), "--batch")
    geometry, dtype = parse_geometry(options.geometry), dtype_of(options.dtype, device.type)
    kv_dtype = torch.float8_e4m3fn if options.kv_dtype == "fp8" else None
    shapes = parse_shapes(options.shapes)
    odd = [shape for shape in shapes if shape.head_dim_qk % 2]
    if odd:
        raise OptionError(f"--shapes has {odd[0]} (RoPE turns pairs, so D_k is even); use an even D_k")
    parse_parts(options.parts)
    cases = tuple(
        DecodeCase(shape=shape, context=context, batch=batch, geometry=geometry, dtype=dtype, kv_dtype=kv_dtype)
        for shape, batch, context in product(shapes, batches, contexts)
    )
    check_backend(options.backend, ((_request_of(case, device),) for case in cases))
    return cases


def _request_of(case: DecodeCase, device: torch.device) -> BranchRequest:
    tokens = Case(shape=case.shape, seq_len=case.context, geometry=case.geometry, dtype=case.dtype)
    return step_request(tokens, device, batch=case.batch, num_queries=1, kv_dtype=case.kv_dtype)


def parse_parts(text: str) -> tuple[str, ...]:
    """Return the comma-separated names in `text`, in the order of STEP_PARTS and BRANCH_PARTS; "all" means all names.

    Raises:
        OptionError: for a name that is no part.
    """
    parts, names = (*STEP_PARTS, *BRANCH_PARTS), text.split(",")
    unknown = [name for name in names if name not in (*parts, "all")]
    if unknown:
        raise OptionError(f"--parts has {unknown[0]!r} (the rule: all, or of {', '.join(parts)}); use {','.join(STEP_PARTS)}")
    return parts if "all" in names else tuple(part for part in parts if part in names)


def run_decode(options: DecodeOptions, output: Output) -> list[DecodeResult]:
    """Measure the cases of `options`, print the table, write the files after every case, and return the results."""
    device = find_device(options.device)
    found = (measure_case(case, device, options) for case in make_decode_cases(options))
    results = collect(found, attrs.asdict(options), output, progress_line, in_rows(to_row))
    output.show(decode_table(results))
    return results


@torch.no_grad()
def measure_case(case: DecodeCase, device: torch.device, options: DecodeOptions) -> DecodeResult:
    """Return the figures of a step, or why there are none: it does not fit, nothing serves it, or it is wrong."""
    free_cached_memory(device)
    parts = parse_parts(options.parts)
    began = time.perf_counter()
    try:
        step = DecodeStep(case, device, options.backend)
        step.append()
        result = step.check()
        checked = time.perf_counter()
        result = attrs.evolve(result, check_seconds=checked - began)
        if result.failure is None:
            dense, dense_failed = _dense_kernels(step) if options.baseline else ({}, [])
            times, failed = _times({name: call for name, call in step.parts().items() if name in parts}, device)
            dense_times, dense_notes = _times(dense, device)
            del dense
            result = attrs.evolve(
                result, times=times, failure="; ".join(failed) or None, dense=dense_times, notes=(*dense_failed, *dense_notes)
            )
            if options.peers and case.kv_dtype is None and result.failure is None:
                result = measure_peers(step, result)
            result = attrs.evolve(result, time_seconds=time.perf_counter() - checked)
    except Exception as error:  # noqa: BLE001 - a kernel of a plug-in may raise anything; the table says what
        return DecodeResult(case=case, failure=describe_failure(error))
    return result


def _dense_kernels(step: "DecodeStep") -> tuple[dict[str, Callable[[], object]], list[str]]:
    """Return name -> call of dense attention over the selected branch's tokens in the rows' dtype, and reasons why kernels are missing."""
    try:
        slc = keys_in_rows(step.slc, step.case.dtype)
        return dense_decode_kernels(step.queries.q[:, 0], slc.k, slc.v), []
    except torch.cuda.OutOfMemoryError as error:
        return {}, [f"dense: {describe_failure(error)}"]


def measure_peers(step: "DecodeStep", result: DecodeResult, peers: tuple[DecodePeer, ...] = DECODE_PEERS) -> DecodeResult:
    """Return `result` with the times, errors and notes of other packages; a failure of one is a note."""
    device = step.queries.q.device
    for peer in peers:
        remarks, times, errors = peer.reasons_against(step.case, device), dict[str, float](), dict[str, float]()
        if not remarks:
            free_cached_memory(device)
            try:
                built = peer.build(step)
                errors[peer.name] = step.error_of(built.call(), built.window)
                times, failed = _times({peer.name: built.call}, device)
                is_other = result.limit is not None and not errors[peer.name] <= result.limit
                remarks = [built.note] * bool(built.note) + ["not the result of the reference"] * is_other
                remarks += [each.removeprefix(f"{peer.name}: ") for each in failed]
            except Exception as error:  # noqa: BLE001 - as above
                remarks = [describe_failure(error)]
        notes = (f"{peer.name}: {'; '.join(remarks)}",) if remarks else ()
        result = attrs.evolve(
            result, peers=result.peers | times, peer_errors=result.peer_errors | errors, peer_notes=(*result.peer_notes, *notes)
        )  # fmt: skip
    return result


def _times(calls: dict[str, Callable[[], object]], device: torch.device) -> tuple[dict[str, float], list[str]]:
    """Return name -> median, from Python and, on a GPU, by CUDA graph; and notes on calls that could not be timed."""
    found, notes = {}, []
    for name, call in calls.items():
        try:
            is_gpu = device.type == "cuda"
            found[name] = time_call(call, device, max_count=HOST_COUNT if is_gpu else None).median_ms
            if is_gpu:
                found[f"graph {name}"] = time_call(replay_of(call, device), device).median_ms
        except Exception as error:  # noqa: BLE001 - a dense kernel, or one of a plug-in, may raise anything
            notes.append(f"{name}: {describe_failure(error)}")
    return found, notes


class _Record(AttentionObserver):
    """The choice of a step, and the backends that ran."""

    def __init__(self) -> None:
        self.routes: dict[str, str] = {}
        self.block_indices = self.positions = torch.empty(0)

    def record_route(self, operation: str, backend: str) -> None:
        self.routes[operation] = backend

    def record_selection(self, block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> None:
        self.block_indices, self.positions = block_indices, positions


def fill_with_noise(stores: Stores, generator: torch.Generator) -> None:
    """Fill `stores` with normal random numbers. FP8 stores and their scales get what `append` would write for such numbers."""
    for tensors, scales in ((stores.keys, stores.key_scales), (stores.values, stores.value_scales)):
        for name, store in tensors.items():
            if name not in scales:
                store.normal_(generator=generator)
                continue
            # one sequence at a time, because float32 takes four times the memory of FP8
            for numbers, row_scales in zip(store, scales[name], strict=True):
                drawn, found = to_fp8(torch.randn(numbers.shape, device=store.device, generator=generator))
                numbers.copy_(drawn)
                row_scales.copy_(found)


class DecodeStep:
    """A static cache of random numbers, and a step of one token of each sequence."""

    def __init__(self, case: DecodeCase, device: torch.device, backend: str) -> None:
        """Fill the cache up to the step's token."""
        shape, self.case, self.geometry, self.backend = case.shape, case, case.geometry, backend
        config = NSAConfig(
            hidden_size=shape.num_heads, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim_qk=shape.head_dim_qk,
            head_dim_v=shape.head_dim_v, geometry=case.geometry, compressor="mean",
        )  # fmt: skip
        self.cache = NSACache(
            config, case.batch, case.context, CacheOptions(static=True, kv_dtype=case.kv_dtype), dtype=case.dtype, device=device
        )
        generator = torch.Generator(device).manual_seed(0)
        fill_with_noise(self.cache.stores, generator)

        def normal(heads: int, width: int) -> Tensor:
            return torch.randn(case.batch, 1, heads, width, device=device, generator=generator).to(case.dtype)

        self.start = torch.full((case.batch,), case.context - 1, dtype=torch.int32, device=device)
        self.count = torch.ones_like(self.start)
        # the launch before the attention is `append`, or an operation that does not write q
        self.queries = Queries(normal(shape.num_heads, shape.head_dim_qk), 1, None, self.start, self.count, follows_append=True)
        self.gates = torch.rand(case.batch, 1, shape.num_heads, 3, device=device, generator=generator)
        self.rows = {
            name: self.cache.new_rows(name, normal(shape.num_kv_heads, shape.head_dim_qk), normal(shape.num_kv_heads, shape.head_dim_v))
            for name in ("raw", "slc", "win")
        }
        compress_k, compress_v = (
            build_compressor("mean", shape.num_kv_heads, width, case.geometry) for width in (shape.head_dim_qk, shape.head_dim_v)
        )
        self.cmp, self.slc, self.win = (self.cache.stores.keys_of(name) for name in ("cmp", "slc", "win"))
        self.blocks = NewBlocks(self.cmp, self.rows["raw"], compress_k, compress_v, RotaryEmbedding(shape.head_dim_qk))

    def append(self) -> None:
        """Write the step; if the named backend writes no caches, use the best backend that does."""
        call = make_call(self.queries.q, self.geometry, backend=self.backend)
        append_rows(tuple(self.rows.values()), self.blocks, self.start, self.count, call)

    def attend(self, branches: tuple[str, ...] = ("cmp", "slc", "win"), observers: tuple[AttentionObserver, ...] = ()) -> Tensor:
        """Return the gated sum of `branches`."""
        cmp = self.cmp if branches != ("win",) else None
        slc, win = (keys if name in branches else None for name, keys in (("slc", self.slc), ("win", self.win)))
        absent = () if "cmp" in branches else ("cmp",)
        return attend(
            self.queries, cmp, slc, win, self.gates, geometry=self.geometry, absent=absent, backend=self.backend, observers=observers
        )  # fmt: skip

    def parts(self) -> dict[str, Callable[[], object]]:
        """Return the calls that are timed: the whole step, its two operations, and single branches ("sel" with its scores and choice)."""

        def total() -> Tensor:
            self.append()
            return self.attend()

        return {
            "total": total,
            "append": self.append,
            "attend": self.attend,
            "cmp": lambda: self.attend(("cmp",)),
            "sel": lambda: self.attend(("slc",)),
            "win": lambda: self.attend(("win",)),
        }

    def check(self) -> DecodeResult:
        """Return the result with its error and counters, and any fault as its failure; only the first sequences are compared."""
        record = _Record()
        out = self.attend(observers=(record,))
        few = slice(min(CHECKED_SEQUENCES, self.case.batch))
        expected, by_torch, near_ties, wrong = self._reference(few, record.block_indices[few])
        error, limit = max_error(out[few], expected), allowed_error(expected, self.case.dtype, max_error(by_torch, expected))
        reads = count_reads(record.block_indices, record.positions, self.geometry)
        actual, wanted = int(reads.actual[0, 0]), blocks.predicted_reads(self.case.context, self.geometry)
        failures = [f"out is off by {error:.2e} (allowed: {limit:.2e})"] * (not error <= limit)
        failures += [f"{wrong} choices of blocks differ above the near-tie margin"] * (wrong > 0)
        failures += [f"{actual} tokens were read (Table 4: {wanted})"] * bool((reads.actual != wanted).any())
        return DecodeResult(
            case=self.case, failure="; ".join(failures) or None, routes=",".join(f"{k}={v}" for k, v in record.routes.items()), error=error,
            limit=limit, near_ties=near_ties, reads_actual=actual, reads_expected=wanted,
        )  # fmt: skip

    def error_of(self, out: Tensor, window: Keys | None) -> float:
        """Return the error of another package's output (B, H, D_v). Its sliding branch reads `window`; None if it has no such branch."""
        record = _Record()
        self.attend(observers=(record,))
        few = slice(min(CHECKED_SEQUENCES, self.case.batch))
        gates = self.gates[few] if window is not None else self.gates[few] * self.gates.new_tensor([1, 1, 0])
        expected, *_ = self._reference(few, record.block_indices[few], window or self.win, gates)
        return max_error(out[few].unsqueeze(1), expected)

    def _reference(
        self, few: slice, chosen: Tensor, win: Keys | None = None, gates: Tensor | None = None
    ) -> tuple[Tensor, Tensor, int, int]:
        """Return Eq. 5 with the chosen blocks, in float64 and by SDPA's MATH in the case's dtype, and two counts of choices that differ.

        The first count is of near ties, the second of wrong choices. Only rows of the stores that the step's queries see are read; of FP8 stores
        all rows of the compared sequences are converted. `win` and `gates` replace the step's own.
        """
        num_groups, last, size = self.case.shape.num_kv_heads, self.case.context - 1, self.geometry.selection_block_size
        q = self.queries.q[few, 0].unflatten(1, (num_groups, -1))

        def branch(keys: Keys, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Return out, out by MATH, and weights over the rows at `positions` (B, G, m). Positions below 0 or after the last row are masked."""
            rows = positions.clamp(0, last) % keys.k.shape[1] if keys.ring else positions.clamp(0, last)
            k_scale, v_scale = (scale if scale is None else scale[few] for scale in (keys.k_scale, keys.v_scale))
            held = keys_in_rows(keys._replace(k=keys.k[few], v=keys.v[few], k_scale=k_scale, v_scale=v_scale), torch.float32)
            k, v = (x.transpose(1, 2).gather(2, rows.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])) for x in (held.k, held.v))
            is_seen = ((positions >= 0) & (positions <= last)).unsqueeze(2)
            with sdpa_kernel(SDPBackend.MATH):
                by_torch = scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=is_seen)
            scores = q.double() @ k.double().mT * self.case.shape.head_dim_qk**-0.5
            weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
            exact, by_torch = (x.flatten(1, 2).unsqueeze(1) for x in (weights @ v.double(), by_torch))
            return exact, by_torch, weights

        def alike(positions: Tensor) -> Tensor:
            return positions.to(q.device).expand(q.shape[0], num_groups, -1)

        *compressed, weights = branch(self.cmp, alike(torch.arange(blocks.num_compressed_blocks(self.case.context, self.geometry))))
        num_blocks = blocks.num_selection_blocks(self.case.context, self.geometry)
        importance = pool_importance(weights.sum(2), self.geometry, num_blocks)
        wanted = choose_blocks(importance, (self.start[few].long())[:, None], self.geometry)
        differs = (wanted != chosen[:, 0]).any(-1)
        near_ties = 0
        for b, g in differs.nonzero().tolist():
            row = importance[b, g]
            swapped = set(wanted[b, g].tolist()) ^ set(chosen[b, 0, g].tolist())
            spread = row[list(swapped)].max() - row[list(swapped)].min() if min(swapped) >= 0 else row.new_tensor(torch.inf)
            near_ties += int(spread <= near_tie_margin(row.max(), self.case.dtype))
        of_blocks = chosen[:, 0].long().unsqueeze(-1) * size + torch.arange(size, device=q.device)
        *selected, _ = branch(self.slc, of_blocks.flatten(2))
        *window, _ = branch(win or self.win, alike(torch.arange(last - self.geometry.window_size + 1, last + 1)))
        gates = self.gates[few] if gates is None else gates
        exact, by_torch = (gated_sum(gates.to(outs[0].dtype), *outs) for outs in zip(compressed, selected, window, strict=True))
        return exact, by_torch, near_ties, int(differs.sum()) - near_ties


def to_row(one: DecodeResult, common: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the files; None is a value that was not measured. The counted reads are those of the step, because no prefill runs."""
    shape = one.case.shape
    times = {
        f"{way}ms_{name}": one.times.get(f"{way.replace('_', ' ')}{name}")
        for way in ("", "graph_")
        for name in ("total", "cmp", "sel", "win", "append", "attend")
    }
    return {
        "S": one.case.context, **times, "reads_actual_decode": one.reads_actual, "reads_expected_decode": one.reads_expected,
        "batch": one.case.batch, "shape": shape.name, "heads": shape.num_heads, "kv_heads": shape.num_kv_heads,
        "head_dim_qk": shape.head_dim_qk, "head_dim_v": shape.head_dim_v, "dtype": str(one.case.dtype).removeprefix("torch."),
        "kv_dtype": str(one.case.kv_dtype or one.case.dtype).removeprefix("torch."),
        "ms_dense": best_of(one.dense), "graph_ms_dense": best_of(one.dense, "graph "),
        "dense": " ".join(f"{name.replace(' ', '_')}={time:.5f}" for name, time in one.dense.items()),
        "ms_peer": best_of(one.peers), "graph_ms_peer": best_of(one.peers, "graph "),
        "peers": " ".join(f"{name.replace(' ', '_')}={time:.5f}" for name, time in one.peers.items()),
        "peer_errors": " ".join(f"{name.replace(' ', '_')}={error:.2e}" for name, error in one.peer_errors.items()),
        "peer_notes": " | ".join(one.peer_notes),
        "error": None if one.error is None else finite(one.error), "limit": None if one.limit is None else finite(one.limit),
        "near_ties": one.near_ties, "routes": one.routes, "reason": one.failure or "; ".join(one.notes),
        **common,
    }  # fmt: skip


def progress_line(one: DecodeResult) -> str:
    """Return the progress line of a case."""
    best = one.times.get("graph total", one.times.get("total"))
    spent = f"compared in {one.check_seconds:.1f} s, timed in {one.time_seconds:.1f} s"
    return f"{one.case}: {one.failure or f'{number(best)} ms a step ({spent})'}"


def decode_table(results: list[DecodeResult]) -> Table:
    """Return a line per case, in microseconds: by graph if there is one, else from Python."""
    way = "graph " if any("graph total" in one.times for one in results) else ""
    table = Table(
        "case",
        "append",
        "attend",
        "step",
        "from Python",
        "dense",
        "dense / step",
        "peer",
        "error",
        title=f"decode, us a step{', by graph' if way else ''}",
    )
    for one in results:
        if one.failure is not None:
            table.add_row(Text(str(one.case)), Text(one.failure, style="red"))
            continue
        dense = best_of(one.dense, way)
        figures = [one.times.get(f"{way}{name}") for name in ("append", "attend", "total")]
        figures += [one.times.get("total"), dense]
        step = figures[2]
        ratio = "-" if dense is None or step is None else f"{dense / step:.2f}"
        error = "-" if one.error is None else f"{one.error:.1e}"
        *own, peer = (Text(number(None if x is None else 1e3 * x)) for x in (*figures, best_of(one.peers, way)))
        table.add_row(Text(str(one.case)), *own, ratio, peer, error)
    notes = dict.fromkeys(note for one in results for note in (*one.notes, *one.peer_notes))
    table.caption = Text("\n".join(notes)) if notes else None
    return table
