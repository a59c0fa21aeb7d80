"""The operation NSA for a step over stores, by the kernels of `csrc/decode.cu` and `csrc/decode_placed.cu`.

Kernels of `decode.cu` support one row of each sequence, and stores of contiguous rows in q's dtype. Those of `decode_placed.cu` also support
several rows of a sequence, ragged rows, pages and FP8.
"""

import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa_core.backends.base import FusedOutput, Keys, Operation, Queries
from nsa_core.backends.ops import attention_op
from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError
from nsa_kernels_cuda import cluster_launch, jit
from nsa_kernels_cuda.cluster_launch import ClusterLaunch
from nsa_kernels_cuda.decode.plan import FP8, KERNELS, NUM_WARPS, PLACED, WARP_SIZE, WIDTHS, Plan, Sizes, num_blocks_of

SOURCE = jit.CSRC / "decode.cu"
PLACED_SOURCE = jit.CSRC / "decode_placed.cu"
MOST_PAGED_ROWS = 2**31 - 1
"""Maximum rows of a store in pages: the kernel counts them in 32 bits."""
LOG2E = math.log2(math.e)
LONGEST_WINDOW = 2**30
"""The longest window that a kernel gets: it adds it to positions in 32 bits. No sequence is longer."""


def decode(queries: Queries, cmp: Keys, slc: Keys, win: Keys, gates: Tensor, *, geometry: BlockGeometry, scale: float) -> FusedOutput:
    """Return the gated sum and the choice of the rows of a step; see `nsa_core.backends.base.FusedBackend`. It has no gradient.

    Raises:
        InputError: if the kernels cannot read the operands for a reason that routing does not check.
    """
    _check(queries, cmp, slc, win)
    found: FusedOutput = _op(queries, cmp, slc, win, gates, geometry=geometry, scale=scale)
    return found


def _check(queries: Queries, cmp: Keys, slc: Keys, win: Keys) -> None:
    """Raise InputError if the kernel would read wrong data: it gets only addresses and cannot check the operands."""
    if queries.start is None:
        raise InputError(f"queries of shape {tuple(queries.q.shape)} without positions (the kernel takes steps over stores); use 'triton'")
    for name, keys in (("cmp", cmp), ("slc", slc), ("win", win)):
        wanted = FP8 if keys.k_scale is not None and name != "cmp" else queries.q.dtype
        if keys.k.dtype != wanted or keys.v.dtype != wanted:
            raise InputError(
                f"{name} is {keys.k.dtype}, {keys.v.dtype} (the kernel reads q's dtype, and of slc and win {FP8} with scales); use 'triton'"
            )
        if keys.page_table is not None and keys.k.shape[0] * keys.k.shape[1] > MOST_PAGED_ROWS:
            raise InputError(f"{name} has {keys.k.shape[0]} pages of {keys.k.shape[1]} rows (at most {MOST_PAGED_ROWS} rows); use 'triton'")
        if keys.first is not None and name != "win":
            raise InputError(f"{name} begins at `first` (the kernel reads it of the window alone); use 'triton'")


def _decode(
    queries: Queries, cmp: Keys, slc: Keys, win: Keys, gates: Tensor, *, geometry: BlockGeometry, scale: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    q = queries.q
    out = q.new_empty(*q.shape[:3], cmp.v.shape[3])
    indices = q.new_empty(*q.shape[:2], cmp.k.shape[2], geometry.num_selected_blocks, dtype=torch.int32)
    if out.numel():
        kernel, launch = launch_of(queries, (cmp, slc, win), gates, out, indices, geometry=geometry, scale=scale)
        cluster_launch.run(source_of(kernel), kernel, launch, q.device)
    return out, indices


_op = attention_op("nsa_cuda::decode", _decode, operation=Operation.NSA)


def launch_of(
    queries: Queries, stores: tuple[Keys, Keys, Keys], gates: Tensor, out: Tensor, indices: Tensor, *, geometry: BlockGeometry, scale: float
) -> tuple[str, ClusterLaunch]:
    """Return the name of the kernel, and the launch that writes `out` and `indices`; `stores` are those of cmp, slc, win."""
    cmp, _slc, win = stores
    (batch, num_rows, num_heads, head_dim_qk), (num_groups, head_dim_v) = queries.q.shape, cmp.v.shape[2:]
    num_blocks = num_blocks_of(cmp.max_count, geometry)
    sizes = Sizes(batch * num_rows * num_groups, num_heads // num_groups, head_dim_qk, head_dim_v, num_blocks, geometry)
    plan = Plan.of(sizes)
    if plan is None:
        raise InputError(f"{num_blocks} blocks in a sequence (a cluster's shared memory does not hold their scores); use 'triton'")
    gates = gates if gates.dtype in (torch.float32, queries.q.dtype) else gates.float()
    copied = (queries.q, *(x for keys in stores for x in (keys.k, keys.v)))
    # routing checks this too, but not while a graph is traced. After a misaligned copy the process could no longer use the GPU
    if head_dim_qk % 16 or head_dim_v % 16 or any(x.data_ptr() % 16 for x in copied):
        raise InputError("q, k or v starts off a multiple of 16 bytes, or 16 does not divide D_k or D_v; copy it, or use 'triton'")
    tensors = (*copied, gates, win.first, queries.start, queries.count, out, indices)
    numbers = (
        plan.num_ranks, num_heads, num_groups, head_dim_qk, head_dim_v, *map(_rows_of, stores), int(win.ring),
        int(gates.dtype == torch.float32), geometry.compression_block_size, geometry.compression_stride,
        min(geometry.window_size, LONGEST_WINDOW),
        geometry.selection_block_size, geometry.num_selected_blocks, geometry.num_initial_blocks, geometry.num_local_blocks,
        sizes.log_columns, num_blocks, plan.num_win_warps, plan.num_stages, _bits_of(scale * LOG2E),
    )  # fmt: skip
    is_placed = num_rows > 1 or queries.cu_seqlens is not None or any(x.page_table is not None or x.k_scale is not None for x in stores)
    arguments = (*tensors, *numbers, *(_placement_of(queries, stores) if is_placed else ()))
    return kernel_of(queries.q.dtype, head_dim_v, is_placed=is_placed), ClusterLaunch(
        num_clusters=sizes.num_pairs,
        num_ranks=plan.num_ranks,
        num_threads=NUM_WARPS * WARP_SIZE,
        shared_bytes=plan.shared_bytes,
        arguments=tuple(x.contiguous() if isinstance(x, Tensor) else x for x in arguments),
    )


def _rows_of(keys: Keys) -> int:
    """Return the maximum number of rows that a store holds for one sequence."""
    num_pages, num_rows = keys.k.shape[:2]
    if keys.page_table is None:
        return num_rows
    return keys.page_table.shape[1] * num_rows if num_pages else 0


def _placement_of(queries: Queries, stores: tuple[Keys, Keys, Keys]) -> tuple[Tensor | int | None, ...]:
    """Return the arguments that a kernel of PLACED_SOURCE takes after those that all kernels take."""
    _cmp, slc, win = stores
    scales = (slc.k_scale, slc.v_scale, win.k_scale, win.v_scale)
    pages = ((max(1, keys.k.shape[1]), keys.k.shape[0]) for keys in stores)
    assert queries.start is not None
    sizes = (number for numbers in pages for number in numbers)
    return (*(keys.page_table for keys in stores), *scales, queries.cu_seqlens, *sizes, queries.start.shape[0], queries.q.shape[1])


def kernel_of(dtype: torch.dtype, head_dim_v: int, *, is_placed: bool = False) -> str:
    """Return the kernel for operands of `dtype`; `is_placed`: one of PLACED_SOURCE."""
    return f"{KERNELS[dtype]}_{next(width for width in WIDTHS if head_dim_v <= width)}{PLACED if is_placed else ''}"


def source_of(kernel: str) -> Path:
    """Return the source of a kernel."""
    return PLACED_SOURCE if kernel.endswith(PLACED) else SOURCE


def _bits_of(x: float) -> int:
    """Return the bits of `x` in float32, as an int."""
    bits: Any = struct.unpack("i", struct.pack("f", x))[0]
    return int(bits)
