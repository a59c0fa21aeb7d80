"""Attention over chosen blocks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from attrs import evolve
from torch import Tensor

from nsa_core.backends.base import Keys, Operation, Queries
from nsa_core.backends.ops import attention_op
from nsa_core.config import BlockGeometry
from nsa_kernels_triton.hopper import launch as hopper
from nsa_kernels_triton.implementations import Config, config_of, kernel_for, kernel_request
from nsa_kernels_triton.interval import op as interval
from nsa_kernels_triton.launch import Operands, Sequences, cdiv, next_power_of_2, optional, queries_of_whole_tiles
from nsa_kernels_triton.numerics import coarse_factor, exact_out, exact_out_of, is_exact, partial_dtype, score_factor, with_positive_scale
from nsa_kernels_triton.pipelines import PipelineConfig
from nsa_kernels_triton.selected import kernels
from nsa_kernels_triton.selected.index import BACKWARD_ITEM_ROWS, FORWARD_ITEM_ROWS, Chunk, Index, chunks, index_of
from nsa_kernels_triton.streams import fork_stream, join_stream, on_its_device
from nsa_kernels_triton.tile_table import Tiles, parts_of


@on_its_device
def _attend(
    queries: Queries, slc: Keys, block_indices: Tensor, *, geometry: BlockGeometry, scale: float, needs_grad: bool
) -> tuple[Tensor | None, ...]:
    out, lse, exact, _ = forward(queries.q, slc.k, slc.v, block_indices, geometry, scale, Sequences.of(queries, slc))
    return (out, lse, exact) if needs_grad else (out, lse)


@on_its_device
def differentiate(
    grads: tuple[Tensor | None, Tensor | None],
    results: Sequence[Tensor],
    queries: Queries,
    slc: Keys,
    block_indices: Tensor,
    *,
    geometry: BlockGeometry,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv for the gradients (of out and lse) and the results of the forward pass; see `attention_op`."""
    q, k, v = queries.q.contiguous(), slc.k.contiguous(), slc.v.contiguous()
    dout, _, delta, shift, extremes = interval.deltas_of(grads, results, v)
    x = Operands(dout, delta, None, shift, extremes, q, k, v, None, -1, False, geometry, scale, Sequences.of(queries, slc))
    return backward(x, block_indices, None, backward_kernel(q, k, v, dout, geometry))


selected_attention = attention_op("nsa_triton::slc", _attend, differentiate, operation=Operation.SLC, saves=exact_out_of)
"""Attention of each query over the tokens s <= t of its chosen blocks (Eq. 12)."""


class Others(NamedTuple):
    """Outputs of the other branches and gates, for the fused Eq. 5."""

    cmp: Tensor | None
    """None: the branch is not part of the sum."""
    win: Tensor
    gates: Tensor


def _constants(q: Tensor, k: Tensor, v: Tensor, index: Index) -> dict[str, Any]:
    qk, value = parts_of(q.shape[3]), parts_of(v.shape[3])
    return {
        "H": q.shape[2],
        "G": k.shape[2],
        "D_K": q.shape[3],
        "D_V": v.shape[3],
        "K1": qk.first,
        "K2": qk.second,
        "V1": value.first,
        "V2": value.second,
        "SLOTS_TOTAL": index.slots,
        **_piece_constants(index),
        "EXACT": is_exact(q),
    }


def _piece_constants(index: Index) -> dict[str, int]:
    pieces = index.pieces
    return {"SELECTION_SIZE": pieces.block_size, "PIECES": pieces.per_block, "PIECE_SIZE": pieces.size, "KEYS": pieces.keys}


def _lists(chunk: Chunk) -> tuple[Tensor, ...]:
    return chunk.items, chunk.num_items, chunk.entries


PROGRAMS_WANTED = 512
"""Number of tiles of early keys that keeps a GPU busy. It must be large, because dK and dV of these keys are not split by queries."""


def early_queries(q: Tensor, k: Tensor, v: Tensor, geometry: BlockGeometry, sequences: Sequences) -> int:
    """Return how many queries at the start of each sequence use dense attention, because they choose all of their blocks.

    Each of them sees a window that reaches its sequence's first token. The result is 0 with a cache, because queries may have any position
    there, and if the batch has too few sequences for dense attention to be faster.
    """
    if sequences.is_cached:
        return 0
    step, block_keys = interval.tile_sizes(q, k, v)
    early = geometry.num_selected_blocks * geometry.selection_block_size // step * step
    programs = sequences.num_sequences * k.shape[2] * -(-early // block_keys)
    return early if programs >= PROGRAMS_WANTED or not q.is_cuda else 0


EARLY_BLOCKS = 48
"""In the first EARLY_BLOCKS blocks, neighbouring queries attend together to all blocks that they chose. At most 64, the bits of one word.

Measured at n = 16.
"""


def _shared_kernel(q: Tensor, k: Tensor, v: Tensor, **facts: int) -> PipelineConfig | None:
    """Return the pipeline of the kernel in which neighbouring queries attend to shared blocks; None if the kernel does not support the request."""
    found = config_of(kernel_request("shared_forward", q, v, k, **facts))
    assert not isinstance(found, Tiles)
    return found


MERGED = 4096
"""Elements of a tile of the merge: 16 KiB of float32."""


def _merge_rows(width: int) -> int:
    """Return the rows of a merging tile."""
    return max(1, MERGED // width)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    geometry: BlockGeometry,
    scale: float,
    sequences: Sequences,
    others: Others | None = None,
    keeps_out: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return out, lse, the exact out (or None) and, with `others`, the gated sum of the branches (else an empty tensor).

    With `others` the choice must follow Eq. 11: every query has chosen its initial and local blocks, and a query with at most n blocks has
    chosen all of them. If only the sum is needed, `keeps_out=False` saves the memory of out and exact out, which may then be empty or
    incomplete.
    """
    q, scale = with_positive_scale(q, scale)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    block_size = geometry.selection_block_size
    shared_pipeline = None
    if others is not None:
        shared_pipeline = _shared_kernel(q, k, v, is_cached=sequences.is_cached, selection_block_size=block_size)
    early, left_out = 0, (0, 0)
    if shared_pipeline is not None:
        # `early` is rounded down to a whole number of tiles of rows
        step = queries_of_whole_tiles(shared_pipeline.block_rows, q.shape[2] // k.shape[2])
        early = EARLY_BLOCKS * block_size // step * step
        left_out = (geometry.num_initial_blocks, geometry.num_local_blocks)
    elif others is not None:
        early = early_queries(q, k, v, geometry, sequences)
    # the merge reads the results of early queries, or of shared blocks, from `out` and `lse`
    shape = (*q.shape[:3], v.shape[3])
    out = q.new_empty(shape if keeps_out or shared_pipeline or early else 0)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    exact = exact_out(q, v) if keeps_out or early else None
    total = q.new_empty(shape if others is not None else 0)
    if not q.numel():
        return out, lse, exact, total
    tiles = kernel_for("selected_forward", q, v, k, selection_block_size=block_size)
    dtype = partial_dtype(q, v.shape[3])
    index = index_of(
        block_indices, sequences, k.shape[1], geometry, tiles.block_keys, q.shape[2], v.shape[3], dtype.itemsize, FORWARD_ITEM_ROWS,
        early, left_out,
    )  # fmt: skip
    if shared_pipeline is not None:
        assert index.bits is not None
        shared = hopper.SharedBlocks(index.bits, *left_out, early)
        with fork_stream(q):
            hopper.shared_forward(q, k, v, out, lse, scale, sequences, shared_pipeline, shared)
    elif early:
        interval.attend_into(out, lse, exact, q, k, v, True, evolve(geometry, window_size=early), scale, sequences, early)
    constants = _constants(q, k, v, index)
    width = next_power_of_2(v.shape[3])
    parts = q.new_empty(index.chunk_rows * index.slots * q.shape[2], v.shape[3], dtype=dtype)
    part_lse = lse.new_empty(parts.shape[0])
    for chunk in chunks(index, geometry):
        operands = (
            q, k, v, parts, part_lse, *_lists(chunk), index.rows, index.key_rows,
            chunk.first_row, index.num_rows, chunk.num_pieces, score_factor(q, scale), coarse_factor(q, scale),
        )  # fmt: skip
        if isinstance(tiles, PipelineConfig):
            hopper.selected_forward(chunk.items.shape[0], operands, constants, tiles)
        else:
            kernels.forward_kernel[(chunk.items.shape[0],)](
                *operands, **constants, BLOCK_ROWS=tiles.block_rows, num_warps=tiles.num_warps, num_stages=tiles.num_stages
            )
        if shared_pipeline is not None and chunk.first_row == 0:
            join_stream(q)
        rows = (chunk.last_row - chunk.first_row) * q.shape[2]
        kernels.merge_kernel[(cdiv(rows, _merge_rows(width)),)](
            parts, part_lse, chunk.present, optional(out), exact, lse,
            *((None, None, None, None) if others is None else (others.cmp, others.win, others.gates, total)),
            index.rows, chunk.first_row, chunk.last_row, early,
            H=q.shape[2], G=k.shape[2], D_V=v.shape[3], WIDTH=width, SLOTS_TOTAL=index.slots, COMBINE=others is not None,
            SHARED=shared_pipeline is not None, KEEPS=keeps_out, BLOCK_ROWS=_merge_rows(width),
        )  # fmt: skip
    return out, lse, exact, total


PARTIAL_KEYS = 16
"""Keys per program that adds split-K partials; the program's registers hold eight partials of so many keys at a time."""
PARTIAL_LISTS = 8
"""Lists per such program; most of them have one item."""


def backward_kernel(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, geometry: BlockGeometry) -> Config:
    """Return the configuration of the kernel that serves `backward`."""
    return kernel_for("selected_backward", q, v, k, dout, selection_block_size=geometry.selection_block_size)


LOWERED_HEADS = 16
"""Heads of a tile when shifts are lowered: the smallest M of a tensor-core product, so that tiles fit the shared memory of every GPU."""


def _lower(x: Operands, index: Index) -> None:
    """Lower the shifts of rows with a single weight, if the call has extremes; see `tiles.lower_alone`."""
    qk = parts_of(x.q.shape[3])
    num_tiles = index.num_rows * index.num_groups * cdiv(x.heads_per_group, LOWERED_HEADS)
    kernels.lower_kernel[(min(interval.LOWERING_PROGRAMS, num_tiles),)](
        x.q, x.k, x.shift, x.extremes, index.block_indices, index.rows, index.num_rows, score_factor(x.q, x.scale),
        H=x.q.shape[2], G=index.num_groups, D_K=x.q.shape[3], K1=qk.first, K2=qk.second, NUM_SELECTED=index.block_indices.shape[3],
        **_piece_constants(index), HEADS=LOWERED_HEADS, EXACT=is_exact(x.q), num_stages=1,
    )  # fmt: skip


def backward(x: Operands, block_indices: Tensor, dq: Tensor | None, tiles: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv. dQ is added to `dq`, if given. `tiles` is the result of `backward_kernel`.

    With gates, the choice must follow Eq. 11. The current stream joins the second one (`join_stream`) before this returns.
    """
    q, k, v, geometry, scale, sequences = x.q, x.k, x.v, x.geometry, x.scale, x.sequences
    dk = torch.zeros_like(k, dtype=torch.float32)
    dv = torch.zeros_like(v, dtype=torch.float32)
    adds = dq is not None
    dq = torch.empty_like(q) if dq is None else dq
    if not q.numel():
        return dq, dk.to(k.dtype), dv.to(v.dtype)
    dtype = partial_dtype(q, q.shape[3])
    early = 0 if x.gates is None else early_queries(q, k, v, geometry, sequences)
    index = index_of(
        block_indices, sequences, k.shape[1], geometry, tiles.block_keys, q.shape[2], q.shape[3], dtype.itemsize, BACKWARD_ITEM_ROWS, early
    )
    _lower(x, index)
    if early:
        assert adds
        local = x._replace(is_window=True, geometry=evolve(geometry, window_size=early))
        interval.backward_into(dq, dk, dv, local, limit=early)
    constants = _constants(q, k, v, index)
    parts = q.new_empty(index.chunk_rows * index.slots * q.shape[2], q.shape[3], dtype=dtype)
    # a query's heads of one group are contiguous: no padding if 16 divides their width
    width = q.shape[2] // k.shape[2] * q.shape[3]
    columns = max(16, min(1024, width & -width))
    gate = {"GATE": x.gate}
    num_partials = index.chunk_rows * index.num_groups * index.slots // index.item_queries
    dk_partial = dk.new_empty(num_partials * index.pieces.keys, q.shape[3])
    dv_partial = dv.new_empty(num_partials * index.pieces.keys, v.shape[3])
    for chunk in chunks(index, geometry):
        extent = (chunk.first_row, index.num_rows, chunk.num_pieces)
        results = (parts, dk, dv, dk_partial, dv_partial)
        numbers = (*_lists(chunk), index.rows, index.key_rows, *extent, scale, score_factor(q, scale))
        if isinstance(tiles, PipelineConfig):
            hopper.selected_backward(chunk.items.shape[0], x, (*results, *numbers), constants, tiles)
        else:
            kernels.backward_kernel[(chunk.items.shape[0],)](
                q, k, v, x.dout, x.shift, x.delta, x.extremes, x.gates, *results, *numbers, **constants, **gate,
                BLOCK_ROWS=tiles.block_rows, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            )  # fmt: skip
        num_lists = chunk.ends.shape[1]
        with fork_stream(q):
            kernels.add_partials_kernel[(cdiv(num_lists, PARTIAL_LISTS), cdiv(index.pieces.keys, PARTIAL_KEYS), 2)](
                dk, dv, dk_partial, dv_partial, chunk.ends, chunk.entries, index.rows, index.key_rows, *extent, num_lists,
                G=k.shape[2], D_K=q.shape[3], D_V=v.shape[3], WIDTH_K=next_power_of_2(q.shape[3]), WIDTH_V=next_power_of_2(v.shape[3]),
                SLOTS_TOTAL=index.slots, **_piece_constants(index), LISTS=PARTIAL_LISTS, PART=min(index.pieces.keys, PARTIAL_KEYS),
            )  # fmt: skip
        num_rows = (chunk.last_row - chunk.first_row) * k.shape[2]
        kernels.merge_dq_kernel[(cdiv(num_rows, MERGED // columns) * cdiv(width, columns),)](
            parts, chunk.present, dq, x.extremes, chunk.first_row, chunk.last_row,
            G=k.shape[2], WIDTH=width, SLOTS_TOTAL=index.slots, ADD=adds, COLUMNS=columns, BLOCK_ROWS=MERGED // columns,
        )  # fmt: skip
        join_stream(q)
    # both casts in one launch
    if is_exact(k):
        return dq, dk, dv
    sums = torch.empty_like(k), torch.empty_like(v)
    interval.add_splits(dk[None], dv[None], *sums)
    return dq, *sums
