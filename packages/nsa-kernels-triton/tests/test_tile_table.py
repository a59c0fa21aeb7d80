"""The tiles that the portable kernels run on."""

from itertools import product

import pytest

from nsa_kernels_triton import device
from nsa_kernels_triton.device import shared_memory_bytes
from nsa_kernels_triton.tile_table import KINDS, Tiles, padded, shared_memory_estimate, tiles

KNOWN = tuple(device.SHARED_MEMORY_BYTES)


@pytest.mark.parametrize("capability", [*KNOWN, (13, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_fit_shared_memory_at_every_head_dimension(kind, capability):
    for head_dim_qk, head_dim_v, itemsize in product(range(16, 257, 8), range(16, 257, 8), (2, 4)):
        tile = tiles(kind, capability, head_dim_qk, head_dim_v, itemsize)
        estimate = shared_memory_estimate(kind, tile, capability, head_dim_qk, head_dim_v, itemsize)
        assert estimate <= shared_memory_bytes(capability), (head_dim_qk, head_dim_v, itemsize, tile)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), None])
def test_tiles_are_powers_of_two_that_matrix_units_take(kind, capability):
    for head_dim, itemsize in product((1, 16, 64, 128, 192, 256), (2, 4)):
        tile = tiles(kind, capability, head_dim, head_dim, itemsize)
        for extent in (tile.block_rows, tile.block_keys):
            assert extent >= 16
            assert extent & (extent - 1) == 0
        assert tile.num_warps in (4, 8)
        assert tile.num_stages >= 1


def test_an_unknown_gpu_gets_the_smallest_tiles():
    assert shared_memory_bytes((13, 7)) == min(device.SHARED_MEMORY_BYTES.values()) == device.SMALLEST
    assert tiles("interval_forward", (13, 7), 128, 128, 2) == tiles("interval_forward", (8, 9), 128, 128, 2)


def test_a_newer_gpu_gets_the_tiles_of_the_design_target():
    for kind in KINDS:
        assert tiles(kind, (10, 0), 192, 128, 2) == tiles(kind, (8, 0), 192, 128, 2)


def test_the_interpreter_gets_small_tiles():
    assert {tiles(kind, None, 192, 128, 2) for kind in KINDS} == {Tiles(16, 16, 4, 1)}


@pytest.mark.parametrize(
    ("head_dim", "columns"), [(1, 16), (16, 16), (17, 32), (40, 48), (64, 64), (80, 80), (96, 96), (192, 192), (200, 256), (256, 256)]
)
def test_a_head_dimension_is_padded_in_two_parts(head_dim, columns):
    assert padded(head_dim) == columns
