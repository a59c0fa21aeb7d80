"""The cases of the conformance kit: what to run, in which layout, and the tensors for it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from attrs import evolve, frozen
from torch import Tensor

from nsa_core import blocks
from nsa_core.backends.base import BranchRequest, Layout, Operation
from nsa_core.config import BlockGeometry
from nsa_core.testing.inputs import EQUAL_BLOCKS, ONE_LOCAL, SMALL, Inputs, Shape, make_inputs, random_block_indices
from nsa_core.testing.strategies import edge_lengths

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STEP_ROWS = 9
"""Query rows of a cached or paged case."""
MOSTLY_SHORT = {
    "packed l < l'": Shape(geometry=ONE_LOCAL, lengths=(31, 1, 0, 23, 1, 1, 2, 1, 1, 1), num_heads=2, num_kv_heads=1),
    "packed l = l'": Shape(geometry=EQUAL_BLOCKS, lengths=(25, 1, 0, 1, 2, 1, 1, 1, 13), num_heads=2, num_kv_heads=1, seed=1),
}
"""Packed sequences that no backend makes a batch of equal rows: it would be mostly padding."""


@frozen(kw_only=True)
class Case:
    """One run of one operation."""

    name: str
    shape: Shape
    dtype: torch.dtype
    layout: Layout = Layout.DENSE
    holes: bool = False
    """Mix -1 into block_indices, rows of only -1 included."""
    logit_scale: float = 1.0
    """Factor on q: large logits overflow a softmax that is stabilised by another row's maximum."""

    @property
    def is_step(self) -> bool:
        """Return True where the queries are a step over stores."""
        return self.layout in (Layout.CACHED, Layout.PAGED)


def cases(geometry: BlockGeometry = SMALL, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Case]:
    """Yield the cases: every edge length of `geometry`, and head ratios, layouts and dtypes.

    Some have a geometry of their own, in which scores choose most blocks.
    """
    base = Shape(geometry=geometry)
    decisive = evolve(base, geometry=ONE_LOCAL, num_queries=30)
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for length in edge_lengths(geometry):
            yield Case(name=f"{kind} S={length}", shape=evolve(base, num_queries=length, batch=2, seed=length), dtype=dtype)
        for num_heads, num_kv_heads in ((1, 1), (6, 2), (16, 1), (5, 5)):
            shape = evolve(decisive, num_heads=num_heads, num_kv_heads=num_kv_heads)
            yield Case(name=f"{kind} H/G={num_heads}/{num_kv_heads}", shape=shape, dtype=dtype)
        for dims in ((8, 8), (4, 10)):
            yield Case(name=f"{kind} D={dims}", shape=evolve(decisive, head_dim_qk=dims[0], head_dim_v=dims[1]), dtype=dtype)
        packed = evolve(base, lengths=(13, 0, 1, 37, 7, 8), surplus_blocks=2)
        yield Case(name=f"{kind} packed", shape=packed, dtype=dtype, layout=Layout.PACKED)
        for name, few_long in MOSTLY_SHORT.items():
            yield Case(name=f"{kind} {name}", shape=few_long, dtype=dtype, layout=Layout.PACKED)
        yield Case(name=f"{kind} holes", shape=evolve(decisive, seed=3), dtype=dtype, holes=True)
        yield Case(name=f"{kind} logits x 50", shape=evolve(base, seed=4), dtype=dtype, logit_scale=50.0)
        for layout, shape in ((Layout.CACHED, decisive), (Layout.PAGED, base)):
            yield Case(name=f"{kind} {layout}", shape=evolve(shape, batch=2, seed=5), dtype=dtype, layout=layout)


def request_of(case: Case, operation: Operation, device: torch.device, *, needs_grad: bool) -> BranchRequest:
    """Return what routing would be asked for `case`."""
    shape = case.shape
    return BranchRequest(
        operation=operation,
        geometry=shape.geometry,
        device_type=device.type,
        compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=case.dtype,
        kv_dtype=case.dtype,
        batch=1 if shape.lengths is not None else shape.batch,
        num_sequences=shape.batch if shape.lengths is None else len(shape.lengths),
        num_queries=STEP_ROWS if case.is_step else shape.total,
        num_keys=shape.total if shape.lengths is None else max(shape.lengths),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim_qk=shape.head_dim_qk,
        head_dim_v=shape.head_dim_v,
        layout=case.layout,
        needs_grad=needs_grad and operation is not Operation.SELECT,
    )


class Problem(NamedTuple):
    """The tensors of a case and how its queries are placed."""

    inputs: Inputs
    """In a step: q and gates are the step's rows, the stores are NaN where no token is yet."""
    block_indices: Tensor
    options: dict[str, Any]
    """Keywords that the oracle and the operation both take."""
    page_table: Tensor | None


def problem_of(case: Case, device: torch.device) -> Problem:
    """Return the tensors of `case`, in its dtype."""
    inputs = make_inputs(case.shape, device=device)
    inputs = inputs._replace(q=inputs.q * case.logit_scale).to(case.dtype)
    block_indices = random_block_indices(case.shape, holes=case.holes, device=device)
    options: dict[str, Any] = {"geometry": case.shape.geometry}
    if inputs.cu_seqlens is not None:
        options["cu_seqlens"] = inputs.cu_seqlens
    if not case.is_step:
        return Problem(inputs, block_indices, options, None)
    start = torch.tensor([case.shape.num_queries - STEP_ROWS, case.shape.num_queries // 2], dtype=torch.int32, device=device)
    count = torch.tensor([STEP_ROWS, STEP_ROWS // 2], dtype=torch.int32, device=device)
    options |= {"query_start": start, "query_count": count}
    step, step_indices = _step_of(inputs, block_indices, case.shape.geometry, start, count)
    return Problem(step, step_indices, options, _page_table(case, device) if case.layout is Layout.PAGED else None)


def _step_of(inputs: Inputs, block_indices: Tensor, geometry: BlockGeometry, start: Tensor, count: Tensor) -> tuple[Inputs, Tensor]:
    batch = torch.arange(2, device=start.device).unsqueeze(1)
    rows = start.long().unsqueeze(1) + torch.arange(STEP_ROWS, device=start.device)
    lengths = (start + count).tolist()
    stores = list(inputs.tensors[1:7])
    for place, store in enumerate(stores):
        held = [blocks.num_compressed_blocks(length, geometry) if place < 2 else length for length in lengths]
        future = torch.arange(store.shape[1], device=start.device) >= torch.tensor(held, device=start.device).unsqueeze(1)
        stores[place] = store.masked_fill(future[..., None, None], float("nan"))
    chosen = block_indices[batch, rows]
    chosen[torch.arange(STEP_ROWS, device=start.device) >= count.unsqueeze(1)] = -1
    return Inputs.of([inputs.q[batch, rows], *stores, inputs.gates[batch, rows]]), chosen


def _page_table(case: Case, device: torch.device) -> Tensor:
    """Return a shuffled page table of pages of one selection block each."""
    pages = -(-case.shape.num_queries // case.shape.geometry.selection_block_size)
    order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(11))
    return order.to(torch.int32).view(2, pages).to(device)


def paged(store: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """Return `(pages, page_size, G, D)` of a store `(B, T, G, D)`; differentiable. What the last pages lack is NaN."""
    batch, pages = page_table.shape
    missing = pages * page_size - store.shape[1]
    tail = store.new_full((batch, missing, *store.shape[2:]), float("nan"))
    cut = torch.cat([store, tail], 1).view(batch * pages, page_size, *store.shape[2:])
    return cut[torch.argsort(page_table.flatten())]
