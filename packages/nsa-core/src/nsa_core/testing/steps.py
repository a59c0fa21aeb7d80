"""The conformance kit for operations without a public function: APPEND, ROTATE and CHOOSE.

APPEND runs through `append_rows`, which selects the backend by name, over the steps of a short conversation. A loop over tokens and blocks
computes the expected content of every store after each step. ROTATE is compared with products of complex numbers in float64. CHOOSE is called
as other backends call it; its choice must equal `nsa_core.reference.choose` bit by bit. Scores are multiples of 1/16 and factors are powers of
2, so their sums are exact in any order, and many scores tie.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from attrs import evolve
from torch import Tensor

from nsa_core import blocks
from nsa_core.attention import append_rows
from nsa_core.backends.base import BranchBackend, BranchRequest, FusedOutput, Keys, Layout, NewBlocks, NewRows, Operation, Queries
from nsa_core.backends.registry import BackendRegistry
from nsa_core.config import BlockGeometry, RopeScaling
from nsa_core.dispatch import make_call
from nsa_core.gating import gated_sum
from nsa_core.reference.choose import choose
from nsa_core.reference.sdpa import SDPABackend
from nsa_core.rope import RotaryEmbedding
from nsa_core.testing.inputs import EQUAL_BLOCKS, ONE_LOCAL, SMALL
from nsa_core.testing.tolerances import Comparable, allowed_error, max_error


class Trial(NamedTuple):
    """One check of a backend."""

    name: str
    request: BranchRequest
    judge: Callable[[], tuple[list[str], Comparable]]
    """Returns the problems, and the counts of rows that scores decided and of near ties."""


def step_by_branches(
    queries: Queries, cmp: Keys, slc: Keys, win: Keys, gates: Tensor, *, geometry: BlockGeometry, scale: float, chosen: Tensor | None = None
) -> FusedOutput:
    """Return the gated sum (Eq. 5), computed by the reference in float64, branch by branch; the operands are those of `FusedBackend`.

    `chosen`, int32 (B, S, G, n), are the blocks of the selected branch; None: the reference chooses them.
    """

    def run(operation: Operation, *operands: Any) -> Any:
        return SDPABackend(operation=operation)(*operands, geometry=geometry, scale=scale)

    def double(keys: Keys) -> Keys:
        return keys._replace(k=keys.k.double(), v=keys.v.double())

    queries, cmp, slc, win = queries._replace(q=queries.q.double()), *map(double, (cmp, slc, win))
    compressed = run(Operation.CMP, queries, cmp)
    chosen = run(Operation.SELECT, queries, cmp, compressed.lse) if chosen is None else chosen
    outs = compressed.out, run(Operation.SLC, queries, slc, chosen).out, run(Operation.WIN, queries, win).out
    return FusedOutput(gated_sum(gates.double(), *outs), chosen)


WIDTHS = {"k": 8, "v": 6}
EMPTY = 7.0
"""Value of a row that was never written."""
KINDS = ("all stores", "keys alone choose", "no compressed branch", "rings written last", "stores in pages", "stores of FP8")
"""Kinds of caches. "rings written last": one call emits the blocks, and a second call writes the rings, as in a step longer than `max_rollback`."""
FP8 = torch.float8_e4m3fn


def _steps(geometry: BlockGeometry) -> tuple[tuple[int, int], ...]:
    """Return how many tokens each step appends to each of two sequences; the widest step is wider than the rings."""
    size = geometry.compression_block_size
    return (size + 3, size // 2), (1, 1), (0, 3), (1, 0), (size + 1, size + 1), (2, 1)


def _num_tokens(geometry: BlockGeometry) -> int:
    return max(map(sum, zip(*_steps(geometry), strict=True)))


def append_trials(backend: BranchBackend, device: torch.device, geometry: BlockGeometry, registry: BackendRegistry) -> Iterator[Trial]:
    """Yield the trials of an APPEND backend."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for sizes in dict.fromkeys((geometry, ONE_LOCAL, EQUAL_BLOCKS)):
            for num_kv_heads in (1, 2, 3):
                one = BranchRequest(
                    operation=Operation.APPEND,
                    geometry=sizes,
                    device_type=device.type,
                    compute_capability=_capability(device),
                    dtype=dtype,
                    kv_dtype=dtype,
                    batch=2,
                    num_sequences=2,
                    num_queries=max(map(max, _steps(sizes))),
                    num_keys=_num_tokens(sizes),
                    num_heads=num_kv_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim_qk=WIDTHS["k"],
                    head_dim_v=WIDTHS["v"],
                    layout=Layout.CACHED,
                )
                what = f"{str(dtype).removeprefix('torch.')} l={sizes.compression_block_size} d={sizes.compression_stride} G={num_kv_heads}"
                for kind in KINDS:
                    layout = Layout.PAGED if kind == "stores in pages" else Layout.CACHED
                    request = evolve(one, layout=layout, kv_dtype=FP8 if kind == "stores of FP8" else dtype)
                    yield Trial(f"{what} {kind}", request, partial(_append_steps, backend, request, kind, device, registry))


def _append_steps(
    backend: BranchBackend, request: BranchRequest, kind: str, device: torch.device, registry: BackendRegistry
) -> tuple[list[str], Comparable]:
    """Return the differences of the stores after the first wrong step."""
    conversation, geometry = _Conversation(request, kind, device), request.geometry
    start = torch.zeros(2, dtype=torch.int32, device=device)
    for counts in _steps(geometry):
        count = torch.tensor(counts, dtype=torch.int32, device=device)
        for names in conversation.calls:
            rows, emitted = conversation.operands(names, start, max(counts))
            call = make_call(rows[0].k, geometry, backend={"append": backend.name}, registry=registry)
            append_rows(rows, emitted, start, count, call)
            for b, (first, more) in enumerate(zip(start.tolist(), counts, strict=True)):
                conversation.expect(names, b, first, first + more)
            if problems := conversation.differences(f"after {' and '.join(names)} of tokens {start.tolist()} + {list(counts)}"):
                return problems, Comparable()
        start = start + count
    return [], Comparable()


class _Conversation:
    """Two sequences that grow step by step: the stores that a backend writes, and their expected content."""

    def __init__(self, request: BranchRequest, kind: str, device: torch.device) -> None:
        geometry, dtype, heads = request.geometry, request.dtype, request.num_kv_heads
        self.dtype, self.geometry, self.num_tokens = dtype, geometry, request.num_keys
        generator = torch.Generator().manual_seed(0)
        size = geometry.compression_block_size
        sizes = {"slc": self.num_tokens, "win": 5, "raw": size + 1, "cmp": blocks.num_compressed_blocks(self.num_tokens, geometry)}
        self.tokens, self.stores, self.expected, self.scales = {}, {}, {}, {}
        self.table, self.page_sizes = None, {}
        if kind == "stores in pages":
            self.page_sizes = {"slc": geometry.selection_block_size, "cmp": geometry.selection_block_size // geometry.compression_stride}
            pages = -(-self.num_tokens // geometry.selection_block_size)
            self.table = torch.randperm(2 * pages, generator=generator).view(2, pages).to(device=device, dtype=torch.int32)
        for name, rows in sizes.items():
            shape = (2, rows)
            if name in self.page_sizes:
                assert self.table is not None
                # the last page takes invalid rows
                shape = (self.table.numel() + 1, self.page_sizes[name])
            for part, width in WIDTHS.items():
                drawn = torch.randn(2, self.num_tokens, heads, width, generator=generator, dtype=torch.float64)
                self.tokens[f"{name} {part}"] = drawn.to(device=device, dtype=dtype)
                self.expected[f"{name} {part}"] = torch.full((*shape, heads, width), EMPTY, dtype=dtype, device=device)
                self.stores[f"{name} {part}"] = self.expected[f"{name} {part}"].clone()
                if kind == "stores of FP8" and name in ("slc", "win"):
                    self.stores[f"{name} {part}"] = self.expected[f"{name} {part}"].to(FP8)
                    self.scales[f"{name} {part}"] = torch.ones(*shape, heads, dtype=torch.float32, device=device)
        self.has_blocks, self.has_values = kind != "no compressed branch", kind != "keys alone choose"
        stores = ("slc", "win", "raw") if self.has_blocks else ("slc", "win")
        self.calls = (("slc",), ("win", "raw")) if kind == "rings written last" else (stores,)
        """For each call, the stores whose rows it writes; the call with "slc" emits the blocks."""
        self.weights = torch.arange(1, size + 1, dtype=dtype, device=device)[:, None, None] / size**2

    def operands(self, names: tuple[str, ...], start: Tensor, widest: int) -> tuple[tuple[NewRows, ...], NewBlocks | None]:
        """Return the operands of a call with `widest` rows per sequence; rows after the last token are NaN and invalid."""

        def new(name: str) -> NewRows:
            k, v = (_rows_from(self.tokens[f"{name} {part}"], start, widest) for part in "kv")
            return NewRows(self._keys(name, ring=name != "slc"), k, v if name != "raw" or self.has_values else None)

        rows = tuple(map(new, names))
        if "slc" not in names or not self.has_blocks:
            return rows, None
        raw = rows[names.index("raw")] if "raw" in names else new("raw")
        return rows, NewBlocks(self._keys("cmp"), raw, self._compress, self._compress if self.has_values else None, _rotate)

    def expect(self, names: tuple[str, ...], b: int, first: int, end: int) -> None:
        """Expect tokens first .. end - 1 of sequence b in the stores `names`."""
        for name in names:
            for part in "kv" if name != "raw" or self.has_values else "k":
                store = self.expected[f"{name} {part}"]
                for position in range(first, end):
                    store[self._slot(name, b, position)] = self.tokens[f"{name} {part}"][b, position]
        if "slc" in names and self.has_blocks:
            for i in range(blocks.num_compressed_blocks(first, self.geometry), blocks.num_compressed_blocks(end, self.geometry)):
                self._expect_block(b, i)

    def differences(self, when: str) -> list[str]:
        """Return a line for each wrong store. Rows of tokens must be equal bit by bit; blocks may differ by the rounding of a sum.

        Rows of FP8 stores may differ by the rounding to FP8.
        """
        found = []
        for name, store in self.stores.items():
            wanted, found_there = self.expected[name].double(), store.double()
            if name.split()[0] in self.page_sizes:
                wanted, found_there = wanted[:-1], found_there[:-1]
            written = wanted.masked_fill(wanted == EMPTY, 0)
            limit = allowed_error(written, self.dtype, 4 * torch.finfo(self.dtype).eps) if name.startswith("cmp") else 0.0
            if name in self.scales:
                found_there = found_there * self.scales[name].unsqueeze(-1)
                # half the distance of neighbouring FP8 numbers: of 3 mantissa bits, or of the smallest numbers of the row
                slack = (written.abs() / 16).maximum(written.abs().amax(-1, keepdim=True) / 448 * 2.0**-10)
                found_there = torch.where((found_there - wanted).abs() <= 1.01 * slack, wanted, found_there)
            error = max_error(found_there, wanted)
            if not error <= limit:
                found.append(f"{name} is off by {error:.2e} {when} (allowed: {limit:.2e})")
        return found

    def _expect_block(self, b: int, i: int) -> None:
        size, begin = self.geometry.compression_block_size, i * self.geometry.compression_stride
        for part in "kv" if self.has_values else "k":
            block = self._compress(self.tokens[f"raw {part}"][b, begin : begin + size][None, None])
            if part == "k":
                block = _rotate(block, torch.tensor([[begin + size - 1]], device=block.device))
            self.expected[f"cmp {part}"][self._slot("cmp", b, i)] = block[0, 0]

    def _slot(self, name: str, b: int, position: int) -> tuple[int, int]:
        """Return the index in a store of `position` (or block) of sequence b."""
        if self.table is None or name not in self.page_sizes:
            return b, position % self.expected[f"{name} k"].shape[1]
        page, row = divmod(position, self.page_sizes[name])
        return int(self.table[b, page]), row

    def _keys(self, name: str, *, ring: bool = False) -> Keys:
        table = self.table if name in self.page_sizes else None
        k, v = (self.stores[f"{name} {part}"] for part in "kv")
        k_scale, v_scale = (self.scales.get(f"{name} {part}") for part in "kv")
        return Keys(k, v, self.num_tokens, page_table=table, ring=ring, k_scale=k_scale, v_scale=v_scale)

    def _compress(self, x: Tensor) -> Tensor:
        return (x * self.weights).sum(2)


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Return x times a factor that depends on each block's position; it stands in for RoPE."""
    return x * (1 + positions[..., None, None].to(x.dtype) / 64)


def _rows_from(x: Tensor, start: Tensor, widest: int) -> Tensor:
    padded = torch.cat([x, x.new_full((2, widest, *x.shape[2:]), float("nan"))], 1)
    return torch.stack([padded[b, first : first + widest] for b, first in enumerate(start.tolist())])


class Scores(NamedTuple):
    """Operands of a choice."""

    scores: Tensor
    factor: Tensor | None
    positions: Tensor
    num_kv_heads: int


def rotate_trials(backend: BranchBackend, device: torch.device) -> Iterator[Trial]:
    """Yield the trials of a ROTATE backend."""
    yarn = RopeScaling(kind="yarn", factor=4.0, original_max_position=32)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for head_dim, num_rows, heads in ((6, 1, (2,)), (16, 1, (6, 2, 2)), (16, 3, (5, 1, 1, 1)), (24, 2, (3, 2, 2, 2, 1))):
            for scaling in (None, yarn):
                request = BranchRequest(
                    operation=Operation.ROTATE,
                    device_type=device.type,
                    compute_capability=_capability(device),
                    dtype=dtype,
                    kv_dtype=dtype,
                    batch=2,
                    num_sequences=2,
                    num_queries=num_rows,
                    num_keys=num_rows,
                    num_heads=heads[0],
                    num_kv_heads=heads[-1],
                    head_dim_qk=head_dim,
                    head_dim_v=head_dim,
                    layout=Layout.CACHED,
                )
                what = f"{str(dtype).removeprefix('torch.')} D={head_dim} m={num_rows} heads={heads}{'' if scaling is None else ' yarn'}"
                rope = RotaryEmbedding(head_dim, scaling=scaling)
                yield Trial(what, request, partial(_judge_rotation, backend, request, heads, rope, device))


def _judge_rotation(
    backend: Any, request: BranchRequest, num_heads: tuple[int, ...], rope: RotaryEmbedding, device: torch.device
) -> tuple[list[str], Comparable]:
    generator, rows, head_dim = torch.Generator().manual_seed(0), request.num_queries, request.head_dim_qk
    given = [torch.randn(2, rows, count, head_dim, generator=generator).to(device, request.dtype) for count in num_heads]
    start = torch.tensor([0, 40_000], dtype=torch.int32, device=device)
    kept = [x.clone() for x in given]
    found = []
    # angles are float32, cos and sin are not rounded; a GPU gets its frequencies from the CPU, because its powers differ in the last bits
    positions = (start.unsqueeze(1) + torch.arange(rows, device=device)).float()
    angles = (positions[..., None] * rope.kept_frequencies(device)[head_dim // 2 :]).double().unsqueeze(2)
    turn = torch.polar(torch.full_like(angles, rope.attention_factor()), angles)
    for index, (x, got) in enumerate(zip(given, backend(tuple(given), start, rope), strict=True)):
        pairs = torch.complex(*x.double().chunk(2, -1)) * turn
        expected = torch.cat([pairs.real, pairs.imag], -1)
        # cos and sin are float32, so float64 results have float32 precision
        limit = allowed_error(expected, torch.float32 if request.dtype == torch.float64 else request.dtype)
        if got.dtype != x.dtype or max_error(got, expected) > limit:
            found.append(f"heads {index} are {got.dtype}, off by {max_error(got, expected):.1e} where {limit:.1e} is allowed")
        if not torch.equal(x, kept[index]):
            found.append(f"heads {index} were changed in place")
    return found, Comparable()


def choose_trials(backend: BranchBackend, device: torch.device) -> Iterator[Trial]:
    """Yield the trials of a CHOOSE backend."""
    for label, geometry in (("forced blocks", SMALL), ("one local block", ONE_LOCAL), ("l = l'", EQUAL_BLOCKS)):
        for num_heads, num_kv_heads in ((2, 2), (6, 2), (16, 1)):
            for num_blocks in (1, 2, geometry.num_selected_blocks, geometry.num_selected_blocks + 1, 33, 130):
                for has_factor in (False, True):
                    problem = _scores(geometry, num_heads, num_kv_heads, num_blocks, has_factor, device)
                    name = f"{label}, H/G={num_heads}/{num_kv_heads}, N={num_blocks}{', factor' if has_factor else ''}"
                    request = BranchRequest(
                        operation=Operation.CHOOSE,
                        geometry=geometry,
                        device_type=device.type,
                        compute_capability=_capability(device),
                        num_queries=len(problem.positions),
                        num_keys=num_blocks * geometry.selection_block_size,
                        num_heads=num_heads,
                        num_kv_heads=num_kv_heads,
                    )
                    yield Trial(name, request, partial(_judge_choice, backend, problem, geometry))


def _scores(geometry: BlockGeometry, num_heads: int, num_kv_heads: int, num_blocks: int, has_factor: bool, device: torch.device) -> Scores:
    """Return scores with ties and some NaN, for rows at the edges of blocks and for rows without a query (position -1)."""
    generator = torch.Generator().manual_seed(num_blocks + has_factor)
    width = geometry.selection_block_size
    edges = {edge for j in (0, 1, num_blocks // 2, num_blocks - 1) for edge in (j * width, (j + 1) * width - 1)}
    positions = torch.tensor([-1, *sorted(edges & set(range(num_blocks * width))), -1], dtype=torch.int32)
    heads = num_heads if has_factor else num_kv_heads
    scores = torch.randint(0, 16, (len(positions), heads, num_blocks), generator=generator).float() / 16
    scores[torch.rand(scores.shape, generator=generator) < 0.02] = float("nan")
    # a row of equal scores, and a row half of whose scores are NaN
    scores[1], scores[-2, :, : num_blocks // 2] = 0.25, float("nan")
    factor = 2.0 ** -torch.randint(0, 4, (len(positions), heads), generator=generator).float() if has_factor else None
    return Scores(scores.to(device), None if factor is None else factor.to(device), positions.to(device), num_kv_heads)


def _judge_choice(backend: Any, problem: Scores, geometry: BlockGeometry) -> tuple[list[str], Comparable]:
    got = backend(*problem, geometry=geometry)
    expected = choose(*problem, geometry=geometry)
    if got.dtype != torch.int32 or got.shape != expected.shape:
        return [f"block_indices are {got.dtype} {tuple(got.shape)}, not int32 {tuple(expected.shape)}"], Comparable()
    wrong = (got != expected).any(-1)
    found = [f"{int(wrong.sum())} of {wrong.numel()} rows choose other blocks"] if bool(wrong.any()) else []
    return found, Comparable(wrong.numel(), 0)


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
