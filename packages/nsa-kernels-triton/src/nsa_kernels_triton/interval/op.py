"""Attention over an interval of keys, and the two operations that use it: compressed and sliding-window attention."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa_core.backends.base import Keys, Operation, Queries
from nsa_core.backends.ops import attention_op
from nsa_core.config import BlockGeometry
from nsa_kernels_triton.hopper import launch as hopper
from nsa_kernels_triton.implementations import Config, kernel_for
from nsa_kernels_triton.interval import kernels
from nsa_kernels_triton.launch import Operands, Sequences, cdiv, next_power_of_2, queries_of_whole_tiles
from nsa_kernels_triton.numerics import coarse_factor, exact_out, exact_out_of, is_exact, no_extremes, score_factor, with_positive_scale
from nsa_kernels_triton.pipelines import PipelineConfig
from nsa_kernels_triton.streams import fork_stream, join_stream, on_its_device
from nsa_kernels_triton.tile_table import parts_of

PROGRAMS_WANTED = 2048
"""Number of programs of dK/dV that keeps a large GPU evenly busy; half as many if each has a multiprocessor to itself."""
MAX_SPLITS = 16
"""Maximum number of partial dK/dV buffers, float32 each."""
MIN_SPLIT_QUERIES = 256


@on_its_device
def _attend(
    queries: Queries, keys: Keys, *, is_window: bool, geometry: BlockGeometry, scale: float, needs_grad: bool
) -> tuple[Tensor | None, ...]:
    out, lse, exact = forward(queries.q, keys.k, keys.v, is_window, geometry, scale, Sequences.of(queries, keys))
    return (out, lse, exact) if needs_grad else (out, lse)


@on_its_device
def differentiate(
    grads: tuple[Tensor | None, Tensor | None],
    results: Sequence[Tensor],
    queries: Queries,
    keys: Keys,
    *,
    is_window: bool,
    geometry: BlockGeometry,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv for the gradients (of out and lse) and the results of the forward pass; see `attention_op`."""
    q, k, v = queries.q.contiguous(), keys.k.contiguous(), keys.v.contiguous()
    dout, dlse, delta, shift, extremes = deltas_of(grads, results, v)
    sequences = Sequences.of(queries, keys)
    operands = Operands(dout, delta, dlse, shift, extremes, q, k, v, None, -1, is_window, geometry, scale, sequences)
    gradients = backward(operands)
    if not operands.is_empty:
        join_stream(q)
    return gradients


compressed_attention = attention_op(
    "nsa_triton::cmp",
    partial(_attend, is_window=False),
    partial(differentiate, is_window=False),
    operation=Operation.CMP,
    saves=exact_out_of,
)
"""Attention of each query over the compressed blocks in its past (Eq. 7, 8)."""

sliding_window_attention = attention_op(
    "nsa_triton::win",
    partial(_attend, is_window=True),
    partial(differentiate, is_window=True),
    operation=Operation.WIN,
    saves=exact_out_of,
)
"""Attention of query t over the tokens t - w < s <= t."""


def deltas_of(
    grads: tuple[Tensor | None, Tensor | None], results: Sequence[Tensor], v: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Return dout, dlse, and `row_deltas` of the results out, lse and exact out of one branch; v must be contiguous."""
    (dout, dlse), (out, lse, *exact) = grads, results
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    return dout, dlse, *row_deltas(exact[0] if exact else out, lse, dout, dlse, v)


def _constants(q: Tensor, k: Tensor, v: Tensor, is_window: bool, geometry: BlockGeometry, sequences: Sequences) -> dict[str, Any]:
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
        "EXACT": is_exact(q),
        **_sizes(is_window, geometry, sequences),
    }


def _sizes(is_window: bool, geometry: BlockGeometry, sequences: Sequences) -> dict[str, Any]:
    return {
        "IS_WINDOW": is_window,
        "SIZE": geometry.compression_block_size,
        "STRIDE": geometry.compression_stride,
        "WINDOW": geometry.window_size,
        "PACKED": sequences.is_packed,
        "CACHED": sequences.is_cached,
    }


def forward(
    q: Tensor, k: Tensor, v: Tensor, is_window: bool, geometry: BlockGeometry, scale: float, sequences: Sequences
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out `(B, S, H, D_v)`, lse `(B, S, H)` float32, and out in float32 if the backward pass needs it (else None)."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = q.new_empty(*q.shape[:3], v.shape[3])
    exact = exact_out(q, v)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if not k.shape[1] or not q.numel():
        return out.zero_(), lse.fill_(float("-inf")), None if exact is None else exact.zero_()
    attend_into(out, lse, exact, q, k, v, is_window, geometry, scale, sequences)
    return out, lse, exact


def attend_into(
    out: Tensor,
    lse: Tensor,
    exact: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_window: bool,
    geometry: BlockGeometry,
    scale: float,
    sequences: Sequences,
    limit: int | None = None,
) -> None:
    """Write out, lse and, unless it is None, the exact out.

    With `limit`, only tiles with the first `limit` queries of each sequence are computed.
    """
    q, scale = with_positive_scale(q, scale)
    kind = "window_forward" if is_window else "compressed_forward"
    tiles = kernel_for(kind, q, v, k, is_ring=sequences.is_ring)
    if isinstance(tiles, PipelineConfig):
        hopper.interval_forward(q, k, v, out, lse, _sizes(is_window, geometry, sequences), scale, sequences, limit, tiles)
        return
    tiling = sequences.tiling(q.shape[1], q.shape[2] // k.shape[2], tiles.block_rows, of_keys=False, limit=limit)
    kernels.forward_kernel[tiling.grid(k.shape[2])](
        q, k, v, out, exact, lse,
        *sequences.arguments(tiling),
        sequences.num_sequences, q.shape[1], k.shape[1], tiling.num_tiles, tiling.num_sequences, sequences.search_steps,
        score_factor(q, scale), coarse_factor(q, scale),
        **_constants(q, k, v, is_window, geometry, sequences), RING=sequences.is_ring,
        BLOCK_ROWS=tiles.block_rows, BLOCK_KEYS=tiles.block_keys, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def row_deltas(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dO . O - dlse, the shifts that the kernels subtract from scores, both `(B, S, H)` float32, and the extremes.

    dO, v and out must be contiguous; `no_extremes` describes the extremes.
    """
    delta, shift, extremes = torch.empty_like(lse), torch.empty_like(lse), no_extremes(dout)
    if delta.numel():
        grid, num_value_programs, sizes = _over_rows(dout, v)
        kernels.delta_kernel[grid](
            out, dout, lse, dlse, v, delta, shift, extremes, delta.numel(), v.shape[:3].numel(), num_value_programs, EXACT=is_exact(dout), **sizes
        )  # fmt: skip
    return delta, shift, extremes


def branch_deltas(
    dout: Tensor, outs: tuple[Tensor | None, ...], lses: tuple[Tensor | None, ...], gates: Tensor, values: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `row_deltas` of the three branches, `(3, B, S, H)` and `(3, 4)`, and the gradient of the gates, which is dO . O.

    If the tensors of the first branch are None, the gradient of its gates is 0, and its deltas and shifts are not written.
    """
    deltas = dout.new_empty((3, *dout.shape[:3]), dtype=torch.float32)
    shifts, extremes, dgates = torch.empty_like(deltas), no_extremes(dout, 3), gates.new_empty(gates.shape)
    if deltas.numel():
        grid, num_value_programs, sizes = _over_rows(dout, *(v for v in values if v is not None))
        kernels.branch_deltas_kernel[grid](
            dout, *outs, *lses, *values, gates, deltas, shifts, extremes, dgates,
            deltas[0].numel(), *(0 if v is None else v.shape[:3].numel() for v in values), num_value_programs, EXACT=is_exact(dout), **sizes,
        )  # fmt: skip
    return deltas, shifts, extremes, dgates


def _over_rows(dout: Tensor, *values: Tensor) -> tuple[tuple[int], int, dict[str, Any]]:
    """Return grid and constants of the kernels that read every row of values and of dO, and how many of their programs read values."""
    width = next_power_of_2(dout.shape[3])
    # few rows and warps, so that many programs overlap their loads; 4,096 numbers and 4 warps took 7 % longer on an H200
    block = max(1, 1024 // width)
    num_value_programs = max(cdiv(v.shape[:3].numel(), block) for v in values)
    num_programs = num_value_programs + cdiv(dout.shape[:3].numel(), block)
    return (num_programs,), num_value_programs, {"D_V": dout.shape[3], "WIDTH": width, "BLOCK_ROWS": block, "num_warps": 2}


def _backward_constants(x: Operands) -> dict[str, Any]:
    return _constants(x.q, x.k, x.v, x.is_window, x.geometry, x.sequences) | {"GATE": x.gate}


def backward(x: Operands, dq: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv. dQ is added to `dq`, if given. dk and dv are computed on the second stream: call `join_stream` before you read them.

    If `x.is_empty`, nothing is launched.
    """
    if x.is_empty:
        return torch.zeros_like(x.q) if dq is None else dq, torch.zeros_like(x.k), torch.zeros_like(x.v)
    adds = dq is not None
    dq = torch.empty_like(x.q) if dq is None else dq
    _lower(x)
    dk, dv = _dkdv(x)
    _launch_dq(x, dq, adds=adds)
    return dq, dk, dv


def backward_into(dq: Tensor, dk: Tensor, dv: Tensor, x: Operands, *, limit: int) -> None:
    """Compute the gradients of the first `limit` queries of each sequence; their window has `limit` tokens.

    dQ is added to `dq`; dK and dV are written to float32 `dk` and `dv`, except for keys from position `limit` on. `limit` must be a multiple of
    the first of `tile_sizes`, so that tiles of rows end there.
    """
    _launch_dq(x, dq, adds=True, limit=limit)
    tiles = kernel_for("interval_dkdv", x.q, x.v, x.k, x.dout)
    _launch_dkdv(x, dk.unsqueeze(0), dv.unsqueeze(0), tiles, split_queries=limit, limit=limit)


def tile_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Return the smallest number of queries whose rows fill whole tiles of the dQ kernel, and the keys in a tile of dK and dV."""
    rows = kernel_for("interval_dq", q, v, k).block_rows
    return queries_of_whole_tiles(rows, q.shape[2] // k.shape[2]), kernel_for("interval_dkdv", q, v, k).block_keys


LOWERING_PROGRAMS = 1024
"""Maximum programs that lower shifts. There are few, because in nearly all calls each of them only reads that there are no extremes."""


def _lower(x: Operands) -> None:
    """Lower the shifts of rows with a single weight, if the call has extremes; see `tiles.lower_alone`."""
    # tiles of q and k fit the shared memory of every GPU, for any D_k
    block = 64 if x.q.dtype.itemsize * x.q.shape[3] <= 256 else 32
    num_rows, sequences = x.q.shape[0] * x.q.shape[1], x.sequences
    num_tiles = cdiv(num_rows * x.heads_per_group, block) * x.k.shape[2]
    constants = {name: value for name, value in _backward_constants(x).items() if name not in ("D_V", "V1", "V2", "GATE")}
    kernels.lower_kernel[(min(LOWERING_PROGRAMS, num_tiles),)](
        x.q, x.k, x.shift, x.extremes, sequences.cu_seqlens, sequences.cu_keys, sequences.start, sequences.count,
        num_rows, sequences.num_sequences, x.q.shape[1], x.k.shape[1], sequences.search_steps, score_factor(x.q, x.scale),
        **constants, BLOCK_ROWS=block, BLOCK_KEYS=block, num_warps=4, num_stages=1,
    )  # fmt: skip


def _launch_dq(x: Operands, dq: Tensor, *, adds: bool, limit: int | None = None) -> None:
    constants = _backward_constants(x) | {"ADD": adds}
    tiles = kernel_for("interval_dq", x.q, x.v, x.k, x.dout, has_dlse=x.dlse is not None)
    if isinstance(tiles, PipelineConfig):
        hopper.interval_dq(x, dq, constants, limit, tiles)
        return
    tiling = x.sequences.tiling(x.q.shape[1], x.heads_per_group, tiles.block_rows, of_keys=False, limit=limit)
    kernels.dq_kernel[tiling.grid(x.k.shape[2])](
        x.q, x.k, x.v, x.dout, x.shift, x.delta, x.extremes, x.dlse, x.gates, dq,
        *x.sequences.arguments(tiling),
        x.sequences.num_sequences, x.q.shape[1], x.k.shape[1], tiling.num_tiles, tiling.num_sequences, x.sequences.search_steps,
        x.scale, score_factor(x.q, x.scale),
        **constants,
        BLOCK_ROWS=tiles.block_rows, BLOCK_KEYS=tiles.block_keys, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _dkdv(x: Operands) -> tuple[Tensor, Tensor]:
    """Return dk and dv, computed on the second stream."""
    k, v, num_queries = x.k, x.v, x.q.shape[1]
    splits, split_queries = 1, num_queries
    tiles = kernel_for("interval_dkdv", x.q, v, k, x.dout)
    if not x.is_window:
        tiling = x.sequences.tiling(k.shape[1], 1, tiles.block_keys, of_keys=True)
        programs = tiling.num_tiles * tiling.num_sequences * k.shape[2]
        wanted = min(MAX_SPLITS, -(-(PROGRAMS_WANTED // 2 if isinstance(tiles, PipelineConfig) else PROGRAMS_WANTED) // programs))
        split_queries = max(MIN_SPLIT_QUERIES, -(-num_queries // wanted))
        splits = -(-num_queries // split_queries)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    with fork_stream(k):
        if splits == 1:
            dk_parts, dv_parts = dk[None], dv[None]
        else:
            dk_parts, dv_parts = (torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device) for y in (k, v))
        if x.sequences.is_packed:
            # no tile covers the rows after the last sequence's keys
            dk_parts.zero_()
            dv_parts.zero_()
        _launch_dkdv(x, dk_parts, dv_parts, tiles, split_queries=split_queries)
        if splits > 1:
            add_splits(dk_parts, dv_parts, dk, dv)
    return dk, dv


ADDED = 1024
"""Elements per program that adds splits."""


def add_splits(dk_parts: Tensor, dv_parts: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write to dk and dv the sums of their parts `(splits, ...)`, float32 and contiguous."""
    num_k, num_v = dk.numel(), dv.numel()
    if num_k + num_v:
        kernels.add_splits_kernel[(cdiv(max(num_k, num_v), ADDED), 2)](
            dk_parts, dv_parts, dk, dv, num_k, num_v, dk_parts.shape[0], BLOCK=ADDED
        )  # fmt: skip


def _launch_dkdv(x: Operands, dk: Tensor, dv: Tensor, tiles: Config, *, split_queries: int, limit: int | None = None) -> None:
    """Write dK and dV `(splits, B, T, G, D)`; each split covers `split_queries` queries of every sequence."""
    q, k, v, sequences = x.q, x.k, x.v, x.sequences
    tiling = sequences.tiling(k.shape[1], 1, tiles.block_keys, of_keys=True, limit=limit)
    grid = tiling.grid(k.shape[2], dk.shape[0])
    numbers = (
        *sequences.arguments(tiling), sequences.num_sequences, q.shape[1], k.shape[1], k.shape[0] * k.shape[1],
        tiling.num_tiles, dk.shape[0], tiling.num_sequences, split_queries, sequences.search_steps, x.scale, score_factor(q, x.scale),
    )  # fmt: skip
    if isinstance(tiles, PipelineConfig):
        hopper.interval_dkdv(*grid, x, dk, dv, numbers, _backward_constants(x), tiles)
        return
    kernels.dkdv_kernel[grid](
        q, k, v, x.dout, x.shift, x.delta, x.extremes, x.gates, dk, dv, *numbers, **_backward_constants(x),
        BLOCK_ROWS=tiles.block_rows, BLOCK_KEYS=tiles.block_keys, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
