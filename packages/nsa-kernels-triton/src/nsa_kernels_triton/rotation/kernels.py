"""RoPE of up to four tensors of heads in one launch: q and the keys of the branches."""

import triton
import triton.language as tl

from nsa_kernels_triton.cached_launch import CachedLaunch
from nsa_kernels_triton.tiles import cast, wide


@triton.jit
def _rotate(
    x_ptr, out_ptr, frequencies_ptr, row, tile, position, factor,
    HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Write a tile of the heads of one row, rotated at `position`. `frequencies_ptr` (2 * HALF,): negated frequencies, then the frequencies."""
    heads, columns = tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS), tl.arange(0, WIDTH)
    is_column = columns < HALF
    angles = position.to(tl.float32) * tl.load(frequencies_ptr + HALF + columns, mask=is_column, other=0.0)
    cos, sin = (tl.cos(angles) * factor)[None, :], (tl.sin(angles) * factor)[None, :]
    mask = (heads < HEADS)[:, None] & is_column[None, :]
    offsets = (wide(row) * HEADS + heads)[:, None] * (2 * HALF) + columns[None, :]
    first = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + offsets, cast(first * cos - second * sin, dtype), mask=mask)
    tl.store(out_ptr + offsets + HALF, cast(second * cos + first * sin, dtype), mask=mask)


@CachedLaunch
@triton.jit
def rotate_kernel(
    start_ptr, frequencies_ptr, a_ptr, a_out_ptr, b_ptr, b_out_ptr, c_ptr, c_out_ptr, d_ptr, d_out_ptr, num_new, factor,
    A_HEADS: tl.constexpr, B_HEADS: tl.constexpr, C_HEADS: tl.constexpr, D_HEADS: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, BLOCK_HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate the rows (sequences * num_new, heads, 2 * HALF) of a, b, c and d; an absent tensor is None, with 0 heads.

    Grid: (rows, tiles of BLOCK_HEADS heads of a, then of b, c and d).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, tile = tl.program_id(0), tl.program_id(1)
    position = tl.load(start_ptr + row // num_new) + row % num_new
    B_TILE: tl.constexpr = (A_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    C_TILE: tl.constexpr = B_TILE + (B_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    D_TILE: tl.constexpr = C_TILE + (C_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if tile < B_TILE:
        _rotate(a_ptr, a_out_ptr, frequencies_ptr, row, tile, position, factor, A_HEADS, HALF, WIDTH, BLOCK_HEADS)
    elif tile < C_TILE:
        if b_ptr is not None:
            _rotate(b_ptr, b_out_ptr, frequencies_ptr, row, tile - B_TILE, position, factor, B_HEADS, HALF, WIDTH, BLOCK_HEADS)
    elif tile < D_TILE:
        if c_ptr is not None:
            _rotate(c_ptr, c_out_ptr, frequencies_ptr, row, tile - C_TILE, position, factor, C_HEADS, HALF, WIDTH, BLOCK_HEADS)
    else:
        if d_ptr is not None:
            _rotate(d_ptr, d_out_ptr, frequencies_ptr, row, tile - D_TILE, position, factor, D_HEADS, HALF, WIDTH, BLOCK_HEADS)
