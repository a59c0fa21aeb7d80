"""The operation NSA for one row of each sequence over stores, by the kernels of `csrc/decode.cu`."""

import math
import struct
from typing import Any

import torch
from torch import Tensor

from nsa_core.backends.base import FusedOutput, Keys, Operation, Queries
from nsa_core.backends.ops import attention_op
from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError
from nsa_kernels_cuda import cluster_launch, jit
from nsa_kernels_cuda.cluster_launch import ClusterLaunch
from nsa_kernels_cuda.decode.plan import KERNELS, NUM_WARPS, WARP_SIZE, WIDTHS, Plan, Sizes, num_blocks_of

SOURCE = jit.CSRC / "decode.cu"
LOG2E = math.log2(math.e)


def decode(queries: Queries, cmp: Keys, slc: Keys, win: Keys, gates: Tensor, *, geometry: BlockGeometry, scale: float) -> FusedOutput:
    """Return the gated sum and the choice of one row of each sequence; see `nsa_core.backends.base.FusedBackend`. It has no gradient.

    Raises:
        InputError: if the kernels cannot read the operands for a reason that routing does not see.
    """
    _check(queries, cmp, slc, win)
    found: FusedOutput = _op(queries, cmp, slc, win, gates, geometry=geometry, scale=scale)
    return found


def _check(queries: Queries, cmp: Keys, slc: Keys, win: Keys) -> None:
    """Raise InputError if the kernel, which gets only addresses, would read wrong data."""
    if queries.start is None or queries.cu_seqlens is not None or queries.q.shape[1] != 1:
        raise InputError(f"queries of shape {tuple(queries.q.shape)} (the kernel takes one row of each sequence over stores); use 'triton'")
    for name, keys in (("cmp", cmp), ("slc", slc), ("win", win)):
        if keys.page_table is not None or keys.k_scale is not None or keys.k.dtype != queries.q.dtype or keys.v.dtype != queries.q.dtype:
            raise InputError(f"{name} is paged or has another dtype than q (the kernel reads rows of q's dtype); use 'triton'")
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
        cluster_launch.run(SOURCE, kernel, launch, q.device)
    return out, indices


_op = attention_op("nsa_cuda::decode", _decode, operation=Operation.NSA)


def launch_of(
    queries: Queries, stores: tuple[Keys, Keys, Keys], gates: Tensor, out: Tensor, indices: Tensor, *, geometry: BlockGeometry, scale: float
) -> tuple[str, ClusterLaunch]:
    """Return the kernel, and the launch that writes `out` and `indices`; `stores` are those of cmp, slc, win."""
    cmp, _slc, win = stores
    (batch, _one, num_heads, head_dim_qk), (num_groups, head_dim_v) = queries.q.shape, cmp.v.shape[2:]
    num_blocks = num_blocks_of(cmp.max_count, geometry)
    sizes = Sizes(batch * num_groups, num_heads // num_groups, head_dim_qk, head_dim_v, num_blocks, geometry)
    plan = Plan.of(sizes)
    if plan is None:
        raise InputError(f"{num_blocks} blocks in a sequence (a cluster's shared memory does not hold their scores); use 'triton'")
    gates = gates if gates.dtype in (torch.float32, queries.q.dtype) else gates.float()
    copied = (queries.q, *(x for keys in stores for x in (keys.k, keys.v)))
    # routing checks it, but not while a graph is traced; a misaligned copy would end the process's use of the GPU
    if head_dim_qk % 16 or head_dim_v % 16 or any(x.data_ptr() % 16 for x in copied):
        raise InputError("q, k or v starts off a multiple of 16 bytes, or 16 does not divide D_k or D_v; copy it, or use 'triton'")
    tensors = (*copied, gates, win.first, queries.start, queries.count, out, indices)
    numbers = (
        plan.num_ranks, num_heads, num_groups, head_dim_qk, head_dim_v, *(keys.k.shape[1] for keys in stores), int(win.ring),
        int(gates.dtype == torch.float32), geometry.compression_block_size, geometry.compression_stride, geometry.window_size,
        geometry.selection_block_size, geometry.num_selected_blocks, geometry.num_initial_blocks, geometry.num_local_blocks,
        sizes.log_columns, num_blocks, plan.num_win_warps, plan.num_stages, _bits_of(scale * LOG2E),
    )  # fmt: skip
    return kernel_of(queries.q.dtype, head_dim_v), ClusterLaunch(
        num_clusters=sizes.num_pairs,
        num_ranks=plan.num_ranks,
        num_threads=NUM_WARPS * WARP_SIZE,
        shared_bytes=plan.shared_bytes,
        arguments=(*(None if x is None else x.contiguous() for x in tensors), *numbers),
    )


def kernel_of(dtype: torch.dtype, head_dim_v: int) -> str:
    """Return the kernel for operands of `dtype`."""
    return f"{KERNELS[dtype]}_{next(width for width in WIDTHS if head_dim_v <= width)}"


def _bits_of(x: float) -> int:
    """Return the bits of `x` in float32, as an int."""
    bits: Any = struct.unpack("i", struct.pack("f", x))[0]
    return int(bits)
