"""The cases of the conformance kit: what to run, in which layout, and the tensors for it."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from attrs import evolve, frozen
from torch import Tensor

from nsa_core import blocks
from nsa_core.backends.base import BranchRequest, Keys, Layout, Operation, Queries
from nsa_core.config import BlockGeometry
from nsa_core.testing.inputs import EQUAL_BLOCKS, ONE_LOCAL, SMALL, Inputs, Shape, make_inputs, random_block_indices
from nsa_core.testing.strategies import edge_lengths

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STEP_ROWS = 9
"""Maximum number of query rows per sequence in a step."""
STEP_COUNTS = (STEP_ROWS, STEP_ROWS // 2, 0)
"""Valid query rows of each sequence of a step."""
OTHER_SCALE = 0.6
"""A scale of scores that differs from D_k ** -0.5 in every case."""
MOSTLY_SHORT = {
    "packed l < l'": Shape(geometry=ONE_LOCAL, lengths=(31, 1, 0, 23, 1, 1, 2, 1, 1, 1), num_heads=2, num_kv_heads=1),
    "packed l = l'": Shape(geometry=EQUAL_BLOCKS, lengths=(25, 1, 0, 1, 2, 1, 1, 1, 13), num_heads=2, num_kv_heads=1, seed=3),
}
"""Packed shapes of a few long and many short sequences. A padded batch of them would be mostly padding, so no backend makes one."""


@frozen(kw_only=True)
class Case:
    """One run of one operation."""

    name: str
    shape: Shape
    dtype: torch.dtype
    layout: Layout = Layout.DENSE
    holes: bool = False
    """True: -1 is mixed into block_indices, and some rows hold only -1."""
    logit_scale: float = 1.0
    """Factor of q. Large logits show a softmax that subtracts the maximum of another row, because it overflows."""
    window: Literal["whole", "ring", "tail"] = "whole"
    """Form of the sliding branch's keys: the whole sequence, a ring, or the last tokens (`Keys.first`)."""
    has_shared_keys: bool = False
    """The selected and the sliding branch get the same tensors, as in a layer with `kv="shared"`."""
    has_one_row: bool = False
    """Each sequence of the step has one row, as in decoding."""
    scale: float | None = None
    """Factor of the scores; None is D_k ** -0.5."""
    is_in_fp8: bool = False
    """True: the stores of tokens hold FP8 numbers with scales. Such a case is a step without gradients."""

    @property
    def is_step(self) -> bool:
        """Return True if the queries are a step over stores."""
        return self.layout in (Layout.CACHED, Layout.PAGED, Layout.RAGGED)

    @property
    def step_counts(self) -> tuple[int, ...]:
        """Return the number of valid rows of each sequence of the step; in the first sequence all rows are valid."""
        return (1,) * self.shape.batch if self.has_one_row else STEP_COUNTS[: self.shape.batch]

    @property
    def needs_keys(self) -> bool:
        """Return True if the case needs Keys to describe its stores: a ring, a window's last tokens, or FP8 stores."""
        return self.window != "whole" or self.is_in_fp8

    def concerns(self, operation: Operation) -> bool:
        """Return True if `operation` has the operands that the case varies."""
        if self.has_shared_keys or self.has_one_row:
            return operation is Operation.NSA
        if self.is_in_fp8:
            return operation in (Operation.SLC, Operation.WIN, Operation.NSA)
        return self.window == "whole" or operation in (Operation.WIN, Operation.NSA)


def cases(geometry: BlockGeometry = SMALL, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Case]:
    """Yield the cases: every edge length of `geometry`, head ratios, layouts and dtypes.

    Some cases have another geometry, in which scores choose most blocks.
    """
    base = Shape(geometry=geometry)
    decisive = evolve(base, geometry=ONE_LOCAL, num_queries=30)
    # here a compressed block that ends after the query may begin in a free block, so that a choice which reads it differs
    straddling = evolve(decisive, geometry=EQUAL_BLOCKS)
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for length in edge_lengths(geometry):
            yield Case(name=f"{kind} S={length}", shape=evolve(base, num_queries=length, batch=2, seed=length), dtype=dtype)
        for num_heads, num_kv_heads in ((1, 1), (6, 2), (16, 1), (5, 5)):
            shape = evolve(decisive, num_heads=num_heads, num_kv_heads=num_kv_heads)
            yield Case(name=f"{kind} H/G={num_heads}/{num_kv_heads}", shape=shape, dtype=dtype)
        for dims in ((8, 8), (4, 10)):
            shape = evolve(decisive, head_dim_qk=dims[0], head_dim_v=dims[1])
            yield Case(name=f"{kind} D={dims}", shape=shape, dtype=dtype, scale=OTHER_SCALE)
        # a window of all tokens, in sizes that kernels for attention without a window support
        wide = evolve(decisive, geometry=evolve(ONE_LOCAL, window_size=64), batch=2, head_dim_qk=16, head_dim_v=16, seed=9)
        yield Case(name=f"{kind} window of all tokens", shape=wide, dtype=dtype)
        packed = evolve(base, lengths=(13, 0, 1, 37, 7, 8), surplus_blocks=2)
        yield Case(name=f"{kind} packed", shape=packed, dtype=dtype, layout=Layout.PACKED, scale=OTHER_SCALE)
        for name, few_long in MOSTLY_SHORT.items():
            yield Case(name=f"{kind} {name}", shape=few_long, dtype=dtype, layout=Layout.PACKED)
        yield Case(name=f"{kind} holes", shape=evolve(straddling, seed=3), dtype=dtype, holes=True)
        yield Case(name=f"{kind} logits x 50", shape=evolve(base, seed=4), dtype=dtype, logit_scale=50.0)
        for layout, shape, batch in ((Layout.CACHED, straddling, 2), (Layout.PAGED, base, 2), (Layout.RAGGED, straddling, 3)):
            placed = evolve(shape, batch=batch, seed=5)
            yield Case(name=f"{kind} {layout}", shape=placed, dtype=dtype, layout=layout, scale=OTHER_SCALE)
        for window in ("ring", "tail"):
            shape = evolve(decisive, batch=2, seed=6)
            yield Case(name=f"{kind} cached, {window}", shape=shape, dtype=dtype, layout=Layout.CACHED, window=window)
        forms: tuple[Literal["whole", "ring", "tail"], ...] = ("whole", "ring", "tail")
        for form in forms:
            # sizes that tensor cores read without padding
            shape = evolve(decisive, batch=3, head_dim_qk=16, head_dim_v=16, seed=8)
            name = f"{kind} one row, {form}"
            yield Case(name=name, shape=shape, dtype=dtype, layout=Layout.CACHED, window=form, has_one_row=True, scale=OTHER_SCALE)
        # steps of several rows, in sizes that tensor cores read as they are
        several = evolve(decisive, batch=3, head_dim_qk=16, head_dim_v=16)
        in_fp8 = evolve(several, seed=10)
        yield Case(name=f"{kind} cached, FP8 stores", shape=in_fp8, dtype=dtype, layout=Layout.CACHED, is_in_fp8=True, scale=OTHER_SCALE)
        steps = ((layout, several) for layout in (Layout.CACHED, Layout.PAGED, Layout.RAGGED))
        for layout, shape in ((Layout.DENSE, decisive), (Layout.PACKED, packed), *steps):
            yield Case(
                name=f"{kind} {layout}, shared k and v", shape=evolve(shape, seed=7), dtype=dtype, layout=layout, has_shared_keys=True
            )


def request_of(case: Case, operation: Operation, device: torch.device, *, needs_grad: bool) -> BranchRequest:
    """Return the routing request of `case`."""
    shape, is_differentiated = case.shape, needs_grad and operation is not Operation.SELECT and not case.is_in_fp8
    return BranchRequest(
        operation=operation,
        geometry=shape.geometry,
        device_type=device.type,
        compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        device_index=device.index,
        dtype=case.dtype,
        kv_dtype=FP8 if case.is_in_fp8 else case.dtype,
        batch=1 if shape.lengths is not None or case.layout is Layout.RAGGED else shape.batch,
        num_sequences=shape.batch if shape.lengths is None else len(shape.lengths),
        num_queries=_num_rows(case),
        num_keys=shape.total if shape.lengths is None else max(shape.lengths),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim_qk=shape.head_dim_qk,
        head_dim_v=shape.head_dim_v,
        layout=case.layout,
        needs_grad=is_differentiated,
        # over a window's last tokens all of Eq. 5 is called
        needs_lse_grad=is_differentiated and operation is not Operation.NSA and not case.needs_keys,
    )


def _num_rows(case: Case) -> int:
    if case.layout is Layout.RAGGED:
        return sum(case.step_counts)
    return case.step_counts[0] if case.is_step else case.shape.total


class Problem(NamedTuple):
    """The tensors of a case and how its queries are placed."""

    inputs: Inputs
    """In a step: q and gates hold the step's rows, and stores hold NaN in rows without a token. For FP8 stores: the numbers times their scales."""
    block_indices: Tensor
    options: dict[str, Any]
    """Keywords of the oracle. The oracle has no pages and no ragged rows; it gets a padded batch instead."""
    page_table: Tensor | None


def problem_of(case: Case, device: torch.device) -> Problem:
    """Return the tensors of `case`, in its dtype."""
    inputs = make_inputs(case.shape, device=device)
    inputs = inputs._replace(q=inputs.q * case.logit_scale).to(case.dtype)
    block_indices = random_block_indices(case.shape, holes=case.holes, device=device)
    if case.is_in_fp8:
        in_fp8 = map(fp8_of, inputs.tensors[3:7], (0, 1, 0, 1))
        stores = (stored.to(case.dtype) * scale.to(case.dtype).unsqueeze(-1) for stored, scale in in_fp8)
        inputs = Inputs.of([*inputs.tensors[:3], *stores, inputs.gates])
    options: dict[str, Any] = {"geometry": case.shape.geometry}
    if case.scale is not None:
        options["scale"] = case.scale
    if inputs.cu_seqlens is not None:
        options["cu_seqlens"] = inputs.cu_seqlens
    if not case.is_step:
        return Problem(inputs, block_indices, options, None)
    length, batch = case.shape.num_queries, case.shape.batch
    start = torch.tensor([length - case.step_counts[0], length // 2, 3][:batch], dtype=torch.int32, device=device)
    count = torch.tensor(case.step_counts, dtype=torch.int32, device=device)
    options |= {"query_start": start, "query_count": count}
    step, step_indices = _step_of(inputs, block_indices, case, start, count)
    return Problem(step, step_indices, options, None if case.layout is Layout.CACHED else _page_table(case, device))


def _step_of(inputs: Inputs, block_indices: Tensor, case: Case, start: Tensor, count: Tensor) -> tuple[Inputs, Tensor]:
    batch = torch.arange(len(start), device=start.device).unsqueeze(1)
    geometry, num_rows = case.shape.geometry, case.step_counts[0]
    rows = start.long().unsqueeze(1) + torch.arange(num_rows, device=start.device)
    lengths = (start + count).tolist()
    stores = list(inputs.tensors[1:7])
    for index, store in enumerate(stores):
        held = [blocks.num_compressed_blocks(length, geometry) if index < 2 else length for length in lengths]
        future = torch.arange(store.shape[1], device=start.device) >= torch.tensor(held, device=start.device).unsqueeze(1)
        stores[index] = store.masked_fill(future[..., None, None], float("nan"))
    chosen = block_indices[batch, rows]
    chosen[torch.arange(num_rows, device=start.device) >= count.unsqueeze(1)] = -1
    return Inputs.of([inputs.q[batch, rows], *stores, inputs.gates[batch, rows]]), chosen


def fp8_of(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return x `(B, T, G, D)` in FP8 and seeded scales `(B, T, G)`: powers of two, so that every dtype holds the products exactly."""
    exponents = torch.randint(-3, 3, x.shape[:3], generator=torch.Generator().manual_seed(seed))
    scale = torch.ldexp(torch.ones(x.shape[:3]), exponents).to(x.device)
    return (x.float() / scale.unsqueeze(-1)).to(FP8), scale


def _page_table(case: Case, device: torch.device) -> Tensor:
    """Return a shuffled page table of pages of one selection block each."""
    pages = -(-case.shape.num_queries // case.shape.geometry.selection_block_size)
    order = torch.randperm(case.shape.batch * pages, generator=torch.Generator().manual_seed(11))
    return order.to(torch.int32).view(case.shape.batch, pages).to(device)


def paged(store: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """Return a store `(B, T, G, D)` cut into pages `(pages, page_size, G, D)`; differentiable. Rows after the end of the store are NaN."""
    batch, pages = page_table.shape
    missing = pages * page_size - store.shape[1]
    tail = store.new_full((batch, missing, *store.shape[2:]), float("nan"))
    cut = torch.cat([store, tail], 1).view(batch * pages, page_size, *store.shape[2:])
    return cut[torch.argsort(page_table.flatten())]


class Arrangement(NamedTuple):
    """Converts the operands of a case for a public operation, and its results back to the shapes of the oracle."""

    case: Case
    problem: Problem

    @property
    def options(self) -> dict[str, Any]:
        """Return the keywords of the operation that describe the layout of its operands."""
        options, table = dict(self.problem.options), self.problem.page_table
        if self.case.layout is Layout.RAGGED:
            count = options.pop("query_count")
            options["cu_seqlens"] = torch.nn.functional.pad(count.cumsum(0, dtype=torch.int32), (1, 0))
        return options if table is None else options | {"page_table": table}

    def rows(self, x: Tensor) -> Tensor:
        """Return x `(B, S, ...)`, with a row per query, in the layout of the operation; differentiable."""
        if self.case.layout is not Layout.RAGGED:
            return x
        return x[self._is_row(x)].unsqueeze(0)

    def store(self, x: Tensor) -> Tensor:
        """Return keys or values `(B, T, G, D)` in the layout of the operation, cut into pages in a case with pages; differentiable."""
        if self.problem.page_table is None:
            return x
        geometry = self.case.shape.geometry
        is_compressed = x.shape[1] == self.problem.inputs.k_cmp.shape[1]
        size = geometry.selection_block_size // (geometry.compression_stride if is_compressed else 1)
        return paged(x, self.problem.page_table, size)

    def padded(self, x: Tensor, fill: float) -> Tensor:
        """Return a result of the operation with a row per query of the oracle's batch; rows without a valid query hold `fill`."""
        if self.case.layout is not Layout.RAGGED:
            return x
        is_row = self._is_row(x)
        whole: Tensor = x.new_full((*is_row.shape, *x.shape[2:]), fill)
        return whole.index_put((is_row,), x[0])

    def window(self, k: Tensor, v: Tensor) -> Keys:
        """Return the sliding branch's keys of a case with a ring or a tail; rows without a token are NaN; differentiable."""
        start, length = self.problem.options["query_start"], k.shape[1]
        end = (start + self.problem.options["query_count"]).long().unsqueeze(1)
        size = self.case.shape.geometry.window_size - 1 + self.case.step_counts[0]
        slots = torch.arange(size, device=k.device)
        first = (start - self.case.shape.geometry.window_size + 1).clamp(min=0)
        is_ring = self.case.window == "ring"
        positions = end - 1 - (end - 1 - slots).remainder(size) if is_ring else first.long().unsqueeze(1) + slots
        is_empty = ((positions < 0) | (positions >= end))[..., None, None]

        def picked(store: Tensor) -> Tensor:
            rows = store[torch.arange(len(start), device=k.device).unsqueeze(1), positions.clamp(0, length - 1)]
            return rows.masked_fill(is_empty, float("nan"))

        return Keys(picked(k), picked(v), length if is_ring else size, first=None if is_ring else first, ring=is_ring)

    def tokens(self, k: Tensor, v: Tensor) -> Keys:
        """Return a branch's keys of a cached case, in FP8 if the case is in FP8."""
        if not self.case.is_in_fp8:
            return Keys(k, v, k.shape[1])
        (k, k_scale), (v, v_scale) = (fp8_of(x.detach(), seed) for seed, x in enumerate((k, v)))
        return Keys(k, v, k.shape[1], k_scale=k_scale, v_scale=v_scale)

    def queries(self, q: Tensor) -> Queries:
        """Return the queries of a cached case."""
        return Queries(q, self.case.step_counts[0], None, self.problem.options["query_start"], self.problem.options["query_count"])

    def _is_row(self, x: Tensor) -> Tensor:
        count = self.problem.options["query_count"]
        is_row: Tensor = torch.arange(self.case.step_counts[0], device=x.device) < count.unsqueeze(1)
        return is_row
