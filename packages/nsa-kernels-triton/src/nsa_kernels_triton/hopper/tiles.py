"""What the kernels for compute capability 9.0 share: portable device functions, and how tiles come to shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from nsa_kernels_triton import tiles

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

# renamed in triton 3.7
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
find_sequence = gluon.jit(tiles.find_sequence.fn)
query_rows = gluon.jit(tiles.query_rows.fn)
visible_keys = gluon.jit(tiles.visible_keys.fn)


@gluon.jit
def load_tile(
    ptr, smem, row, last_row, H: gl.constexpr, HG: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Start copying WIDTH columns of the rows row .. row + ROWS - 1, HG of every H; those from `last_row` on are zeros."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, TILE))
    places = ((rows // HG).to(gl.int64) * H + rows % HG) * D
    async_copy.async_copy_global_to_shared(smem, ptr + places[:, None] + columns[None, :], mask=(rows < last_row)[:, None])
