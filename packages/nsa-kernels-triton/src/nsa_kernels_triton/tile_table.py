"""Tile sizes of the portable kernels, by shared memory and head dimensions. Plain numbers: imports no triton, queries no GPU."""

from functools import cache
from typing import NamedTuple

from attrs import frozen

from nsa_kernels_triton.device import KIB, OLDEST, SHARED_MEMORY_BYTES, shared_memory_bytes


@frozen
class Tiles:
    """The tile sizes of one kernel."""

    block_rows: int
    """Rows of q in a tile: queries times the heads of their group."""
    block_keys: int
    """Keys in a tile: tokens, or compressed blocks."""
    num_warps: int
    num_stages: int
    """Pipeline stages of the tiles that the kernel's loop loads."""


KINDS = ("interval_forward", "interval_dq", "interval_dkdv", "scores", "selected_forward", "selected_backward")
Table = dict[str, dict[int, Tiles]]
"""Kind of kernel -> largest width -> tiles. The width is the padded D_k + D_v (for scores only D_k), in elements."""

SMALLEST_PART = 16
"""Narrowest operand of a matrix product."""

INTERPRETED = Tiles(16, 16, 4, 1)

# bf16 and fp16, by the shared memory of a program. Only 9.0 uses the largest table: its matrix units need the least memory besides tiles
HALF: dict[int, Table] = {
    # measured on an H200, at 8,192 to 32,768 tokens
    227 * KIB: {
        "interval_forward": {256: Tiles(64, 64, 4, 3), 320: Tiles(64, 64, 4, 2), 512: Tiles(128, 64, 8, 2)},
        "interval_dq": {256: Tiles(64, 64, 4, 2), 320: Tiles(128, 64, 8, 3), 384: Tiles(64, 32, 4, 2), 512: Tiles(128, 32, 8, 2)},
        "interval_dkdv": {256: Tiles(32, 64, 4, 3), 384: Tiles(32, 128, 8, 3), 512: Tiles(64, 64, 8, 2)},
        "scores": {64: Tiles(64, 128, 4, 2), 192: Tiles(128, 64, 4, 2), 256: Tiles(64, 64, 4, 2)},
        "selected_forward": {512: Tiles(64, 64, 4, 1)},
        "selected_backward": {128: Tiles(64, 64, 4, 3), 256: Tiles(64, 64, 4, 1), 384: Tiles(128, 64, 8, 1), 512: Tiles(32, 64, 8, 1)},
    },
    163 * KIB: {
        "interval_forward": {320: Tiles(128, 64, 8, 3), 512: Tiles(128, 32, 8, 3)},
        "interval_dq": {320: Tiles(128, 64, 8, 2), 512: Tiles(64, 64, 8, 2)},
        "interval_dkdv": {256: Tiles(64, 128, 8, 2), 320: Tiles(64, 64, 8, 2), 512: Tiles(32, 64, 8, 2)},
        "scores": {256: Tiles(128, 64, 8, 3)},
        "selected_forward": {512: Tiles(128, 64, 8, 2)},
        "selected_backward": {320: Tiles(64, 64, 8, 2), 512: Tiles(32, 64, 8, 2)},
    },
    99 * KIB: {
        "interval_forward": {256: Tiles(128, 64, 8, 2), 320: Tiles(64, 64, 4, 2), 512: Tiles(64, 32, 4, 2)},
        "interval_dq": {320: Tiles(64, 64, 4, 2), 512: Tiles(32, 32, 4, 2)},
        "interval_dkdv": {256: Tiles(64, 64, 4, 2), 320: Tiles(32, 64, 4, 2), 512: Tiles(32, 32, 4, 2)},
        "scores": {192: Tiles(128, 64, 8, 2), 256: Tiles(64, 64, 4, 2)},
        "selected_forward": {320: Tiles(64, 64, 4, 2), 512: Tiles(32, 64, 4, 2)},
        "selected_backward": {128: Tiles(64, 64, 4, 2), 256: Tiles(32, 64, 4, 2), 320: Tiles(64, 32, 4, 2), 512: Tiles(32, 32, 4, 2)},
    },
}

# full-precision float32 uses no tensor cores, so one table is enough; it fits the smallest shared memory
SINGLE: Table = {
    "interval_forward": {128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 2), 512: Tiles(16, 16, 4, 2)},
    "interval_dq": {128: Tiles(32, 32, 4, 2), 256: Tiles(32, 32, 4, 1), 512: Tiles(16, 16, 4, 1)},
    "interval_dkdv": {128: Tiles(32, 32, 4, 2), 256: Tiles(32, 32, 4, 1), 512: Tiles(16, 16, 4, 1)},
    "scores": {64: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 2)},
    "selected_forward": {256: Tiles(32, 32, 4, 2), 512: Tiles(16, 16, 4, 1)},
    "selected_backward": {256: Tiles(32, 32, 4, 1), 512: Tiles(16, 16, 4, 1)},
}


def tiles(kind: str, capability: tuple[int, int] | None, head_dim_qk: int, head_dim_v: int, itemsize: int) -> Tiles:
    """Return the tiles of a kernel of `kind`. `capability` None stands for the interpreter; `itemsize` is the bytes of a number of q, k and v."""
    return INTERPRETED if capability is None else _tiles(kind, capability, head_dim_qk, head_dim_v, itemsize)


@cache
def _tiles(kind: str, capability: tuple[int, int], head_dim_qk: int, head_dim_v: int, itemsize: int) -> Tiles:
    table = _half_table(capability) if itemsize == 2 else SINGLE
    width = padded(head_dim_qk) + (0 if kind == "scores" else padded(head_dim_v))
    return next(found for largest, found in table[kind].items() if width <= largest)


def _half_table(capability: tuple[int, int]) -> Table:
    """Return the table of `capability`: 9.0 has its own; the others use the design target's, or the smallest if they have less shared memory."""
    available = shared_memory_bytes(capability)
    return HALF[available if capability[0] == 9 else min(available, SHARED_MEMORY_BYTES[OLDEST])]


class Parts(NamedTuple):
    """Columns as one or two powers of two: 192 is 128 + 64, not 256."""

    first: int
    second: int


@cache
def parts_of(head_dim: int) -> Parts:
    """Return the parts that cover `head_dim`, at least 16 columns each. A second part of 0 means that there is only one part."""
    first = 1 << (max(head_dim, SMALLEST_PART).bit_length() - 1)
    rest = head_dim - first
    return Parts(first, 0 if rest <= 0 else max(1 << (rest - 1).bit_length(), SMALLEST_PART))


def padded(head_dim: int) -> int:
    """Return the number of columns of the tile that holds `head_dim`."""
    return sum(parts_of(head_dim))


def shared_memory_estimate(kind: str, tile: Tiles, capability: tuple[int, int], head_dim_qk: int, head_dim_v: int, itemsize: int) -> int:
    """Return the bytes of shared memory of a kernel of `kind`: resident tiles, tiles that its loop loads, and exchanges between threads."""
    width_qk, width_v = padded(head_dim_qk), padded(head_dim_v)
    both = width_qk + width_v
    rows, keys = tile.block_rows, tile.block_keys
    # the matrix units of 9.x to 11.x read shared memory while the next tile arrives; the others read registers
    buffers = tile.num_stages if capability[0] in (9, 10, 11) else max(tile.num_stages - 1, 1)
    elements = {
        # q stays; the loop loads k and v
        "interval_forward": rows * width_qk + buffers * keys * both + rows * keys,
        # q and dO stay
        "interval_dq": rows * both + buffers * keys * both + rows * keys,
        # k and v stay; weights and their gradients are exchanged
        "interval_dkdv": keys * both + buffers * rows * both + 2 * rows * keys,
        "scores": rows * width_qk + buffers * keys * width_qk + rows * keys // 8,
        # a block's k and v stay; the loop loads rows of q
        "selected_forward": keys * both + buffers * rows * width_qk + 2 * rows * keys,
        # k is held a second time, transposed
        "selected_backward": keys * (both + width_qk) + buffers * rows * both + 2 * rows * keys,
    }
    return itemsize * elements[kind] + 16 * rows
