"""The operation CHOOSE by the kernels of `csrc/choose.cu`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_core.backends.ops import declare_op, geometry_of
from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError
from nsa_kernels_cuda import jit, launch
from nsa_kernels_cuda.launch import Launch

SOURCE = jit.CSRC / "choose.cu"
KERNELS = {torch.float32: "choose_float32", torch.bfloat16: "choose_bfloat16", torch.float16: "choose_float16"}
"""The kernel for each dtype of scores."""

WARP_SIZE = 32
MOST_WARPS = 4
"""Maximum warps of a CTA. A warp has one row; there are fewer if the scores of so many rows do not fit shared memory."""
SHARED_BYTES = 48 * 1024
"""Shared memory that a CTA has on every GPU without opting in to more."""
PIECE = 4 * WARP_SIZE
"""Blocks that a warp reads at a time. Shared memory holds a row in whole pieces of this size."""
MOST_SURVIVORS = 128
"""Maximum number of scores that a warp ranks by comparing each with all others. `choice.cuh` has the same number."""
LIST_BYTES = MOST_SURVIVORS * 8 + WARP_SIZE * 4
"""Bytes of shared memory for a warp's survivors (the blocks that it ranks) and its result."""
MOST_BLOCKS = (SHARED_BYTES - LIST_BYTES) // (4 * PIECE) * PIECE
"""Maximum blocks of a row, because the shared memory of a CTA with one warp must hold the row's scores in float32."""


def choose(scores: Tensor, factor: Tensor | None, positions: Tensor, num_kv_heads: int, *, geometry: BlockGeometry) -> Tensor:
    """Return int32 block_indices `(rows, G, n)`; see `nsa_core.backends.base.ChooseBackend`.

    Scores are float32, bfloat16 or float16. They are multiplied, and added over the heads of a group in ascending order, in float32.

    Raises:
        InputError: if scores have another dtype or too many blocks, heads do not divide, or operands have another shape or device.
    """
    _check(scores, factor, positions, num_kv_heads)
    found: Tensor = _choose(scores, factor, positions, num_kv_heads, list(geometry.as_tuple()))
    return found


def _check(scores: Tensor, factor: Tensor | None, positions: Tensor, num_kv_heads: int) -> None:
    """Raise InputError if the kernel would read wrong data: it gets only addresses and cannot check the operands."""
    kernel_of(scores.dtype)
    num_rows, num_heads, num_blocks = scores.shape
    if num_blocks > MOST_BLOCKS:
        raise InputError(f"scores have {num_blocks} blocks (a warp's shared memory holds {MOST_BLOCKS}); use backend 'triton' or 'sdpa'")
    if (num_heads != num_kv_heads) if factor is None else num_heads % num_kv_heads:
        rule = "scores of heads come with a factor" if factor is None else "each KV head serves H/G of them"
        raise InputError(
            f"scores have {num_heads} rows of blocks for num_kv_heads={num_kv_heads} ({rule}); give scores of groups, or a factor"
        )
    for name, x, shape in (("positions", positions, (num_rows,)), ("factor", factor, (num_rows, num_heads))):
        if x is not None and (tuple(x.shape) != shape or x.device != scores.device):
            raise InputError(f"{name} has shape {tuple(x.shape)} on {x.device} (the rule: {shape} on {scores.device}); make it so")


def _run(scores: Tensor, factor: Tensor | None, positions: Tensor, num_kv_heads: int, geometry: Sequence[int]) -> Tensor:
    sizes = geometry_of(*geometry)
    chosen = scores.new_empty(scores.shape[0], num_kv_heads, sizes.num_selected_blocks, dtype=torch.int32)
    if chosen.numel():
        launch.run(SOURCE, kernel_of(scores.dtype), launch_of(scores, factor, positions, chosen, sizes), scores.device)
    return chosen


def _fake(scores: Tensor, factor: Tensor | None, positions: Tensor, num_kv_heads: int, geometry: Sequence[int]) -> Tensor:
    return scores.new_empty(scores.shape[0], num_kv_heads, geometry_of(*geometry).num_selected_blocks, dtype=torch.int32)


_SCHEMA = "(Tensor scores, Tensor? factor, Tensor positions, SymInt num_kv_heads, int[] geometry) -> Tensor"
_choose = declare_op("nsa_cuda::choose", _SCHEMA, _run, _fake, dispatch_key="CUDA")


def kernel_of(dtype: torch.dtype) -> str:
    """Return the kernel for scores of `dtype`.

    Raises:
        InputError: if there is no kernel for it.
    """
    if dtype not in KERNELS:
        raise InputError(f"scores of {dtype} (the kernels read {', '.join(map(str, KERNELS))}); convert them, or use backend 'sdpa'")
    return KERNELS[dtype]


def launch_of(scores: Tensor, factor: Tensor | None, positions: Tensor, chosen: Tensor, geometry: BlockGeometry) -> Launch:
    """Return the launch that writes the choice of `scores` (rows, heads, N) to `chosen` (rows, G, n)."""
    scores, positions = scores.contiguous(), positions.to(torch.int32).contiguous()
    factor = None if factor is None else factor.float().contiguous()
    num_rows, num_heads, num_blocks = scores.shape
    num_groups = chosen.shape[1]
    warp_bytes = LIST_BYTES + -(-num_blocks // PIECE) * PIECE * 4
    num_warps = max(1, min(MOST_WARPS, SHARED_BYTES // warp_bytes))
    is_aligned = num_blocks % 4 == 0 and scores.data_ptr() % (4 * scores.element_size()) == 0
    numbers = (
        num_rows, num_heads, num_groups, num_blocks, int(is_aligned),
        geometry.selection_block_size, geometry.num_selected_blocks, geometry.num_initial_blocks, geometry.num_local_blocks, warp_bytes,
    )  # fmt: skip
    return Launch(
        grid=(-(-num_rows // num_warps), num_groups),
        num_threads=num_warps * WARP_SIZE,
        shared_bytes=num_warps * warp_bytes,
        arguments=(scores, factor, positions, chosen, *numbers),
    )
