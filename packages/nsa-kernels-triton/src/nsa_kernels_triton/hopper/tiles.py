"""Device functions that the kernels for compute capability 9.0 share: portable ones, and copies of tiles to shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma

from nsa_kernels_triton import tiles

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

# renamed in triton 3.7
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
find_sequence = gluon.jit(tiles.find_sequence.fn)
query_rows = gluon.jit(tiles.query_rows.fn)
visible_keys = gluon.jit(tiles.visible_keys.fn)
position_of = gluon.jit(tiles.position_of.fn)
shift_of = gluon.jit(tiles.shift_of.fn)
restrained = gluon.jit(tiles.restrained.fn)
cut = gluon.jit(tiles.cut.fn)
lowered_by = gluon.jit(tiles.lowered_by.fn)
power_of_two = gluon.jit(tiles.power_of_two.fn)


@gluon.jit
def invalidate(full, empty, STAGES: gl.constexpr):
    """Invalidate the barriers of a ring buffer, after all warps have used them, so that the next item can initialise them again."""
    barrier()
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(stage))
        mbarrier.invalidate(empty.index(stage))
    barrier()


@gluon.jit
def lowerings(extremes_ptr, scale, dtype: gl.constexpr):
    """Return the factor that lowers dS, and `scale` times its inverse for the sums of dS. The factor is 1 except for float16."""
    lowering = 1.0
    if dtype == gl.float16:
        lowering = power_of_two(-lowered_by(extremes_ptr))
        scale = scale * power_of_two(lowered_by(extremes_ptr))
    return lowering, scale


@gluon.jit
def dscores_of(weights, dweights, delta, lowering, EXTREME: gl.constexpr, dtype: gl.constexpr):
    """Return dS in `dtype`. For float16 it is multiplied by `lowering`, so that it does not overflow."""
    dscores = weights * (dweights - delta)
    if EXTREME:
        # huge values may make dO . v infinite for keys that a row does not see; the weight of these keys is 0
        dscores = gl.where(weights == 0, 0.0, dscores)
    if dtype == gl.float16:
        dscores = dscores * lowering
    return dscores.to(dtype)


@gluon.jit
def mask_of(exists, columns, NUM_COLUMNS: gl.constexpr, WIDTH: gl.constexpr):
    """Return which elements of a tile of WIDTH columns exist: those of existing rows, before column NUM_COLUMNS."""
    mask = exists[:, None]
    if WIDTH > NUM_COLUMNS:
        mask = mask & (columns < NUM_COLUMNS)[None, :]
    return mask


@gluon.jit
def load_tile(
    ptr, smem, row, last_row,
    H: gl.constexpr, HG: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Start to copy columns FIRST .. FIRST + WIDTH - 1 of rows row .. row + ROWS - 1. Rows are HG of every H heads, and D wide.

    Rows from `last_row` on and columns from D on are zeros.
    """
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, TILE))
    offsets = ((rows // HG).to(gl.int64) * H + rows % HG) * D
    mask = mask_of(rows < last_row, columns, D - FIRST, WIDTH)
    async_copy.async_copy_global_to_shared(smem, ptr + FIRST + offsets[:, None] + columns[None, :], mask=mask)


@gluon.jit
def store_tile(
    ptr, smem, row, last_row,
    H: gl.constexpr, HG: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, wanted=None,
):  # fmt: skip
    """Write a tile of `load_tile` from shared memory; rows from `last_row` on and columns from D on are not written.

    If `wanted` is given, only its rows are written.
    """
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, TILE))
    offsets = ((rows // HG).to(gl.int64) * H + rows % HG) * D
    mask = mask_of(rows < last_row, columns, D - FIRST, WIDTH)
    if wanted is not None:
        mask = mask & gl.convert_layout(wanted, gl.SliceLayout(1, TILE))[:, None]
    gl.store(ptr + FIRST + offsets[:, None] + columns[None, :], smem.load(TILE), mask=mask)


@gluon.jit
def locate_tile(
    item, first_tile, cu_seqlens_ptr, cu_keys_ptr, cu_tiles_ptr, query_start_ptr, query_count_ptr,
    num_sequences, num_queries, num_keys, num_tiles, num_columns, search_steps, PACKED: gl.constexpr, CACHED: gl.constexpr,
):  # fmt: skip
    """Return whether tile number `item` exists, its group and its number in its sequence; tiles with the most keys come first.

    Then, for that sequence: its first row, its number of rows, how many of them are valid, the first position, and the first key row.
    """
    tile = first_tile + num_tiles - 1 - item % num_tiles
    sequence = item // num_tiles % num_columns
    group = item // (num_tiles * num_columns)
    is_tile = True
    if PACKED:
        sequence = find_sequence(tile, cu_tiles_ptr, num_sequences, search_steps)
        is_tile = sequence < num_sequences
        sequence = gl.minimum(sequence, num_sequences - 1)
        tile -= gl.load(cu_tiles_ptr + sequence)
    q_row0, num_rows, num_valid, position = query_rows(
        sequence, cu_seqlens_ptr, query_start_ptr, query_count_ptr, num_queries, PACKED, CACHED
    )
    key_row0 = sequence.to(gl.int64) * num_keys
    if PACKED:
        key_row0 = gl.load(cu_keys_ptr + sequence).to(gl.int64)
    return is_tile, group, tile, q_row0, num_rows, num_valid, position, key_row0


@gluon.jit
def load_keys(
    k_ptr, v_ptr, key, end, loaded, k1_smem, k2_smem, v1_smem, v2_smem, k_full, k_empty, v_full, v_empty,
    G: gl.constexpr, D_K: gl.constexpr, K1: gl.constexpr, K2: gl.constexpr, D_V: gl.constexpr, V1: gl.constexpr,
    V2: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch keys key .. key + KEYS - 1 and their values as tile `loaded` of the ring buffers; keys from `end` on are zeros."""
    stage = loaded % STAGES
    phase = ((loaded // STAGES) & 1) ^ 1
    mbarrier.wait(k_empty.index(stage), phase)
    load_tile(k_ptr, k1_smem.index(stage), key, end, G, 1, D_K, 0, K1, KEYS)
    if K2 > 0:
        load_tile(k_ptr, k2_smem.index(stage), key, end, G, 1, D_K, K1, K2, KEYS)
    async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
    mbarrier.wait(v_empty.index(stage), phase)
    load_tile(v_ptr, v1_smem.index(stage), key, end, G, 1, D_V, 0, V1, KEYS)
    if V2 > 0:
        load_tile(v_ptr, v2_smem.index(stage), key, end, G, 1, D_V, V1, V2, KEYS)
    async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)


@gluon.jit
def hand_over(full, PENDING: gl.constexpr):
    """Commit a stage to the consumer warps: wait until all copies except the last PENDING groups have landed.

    wgmma reads shared memory through the async proxy, but the copies write through the generic proxy, so a fence is needed. It compiles to
    a barrier for all memory operations of a thread. The producer warps execute it, because the consumer warps would also wait for their
    own stores of results.
    """
    async_copy.wait_group(PENDING)
    # each thread waited for its own copies, so all threads meet here; then one arrives for all
    barrier()
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def start_scores(left1, left2, right1, right2, scores, K2: gl.constexpr):
    """Start the product of a tile of queries and keys, or of dO and values, in the registers of `scores`; operands have one part or two."""
    scores = warpgroup_mma(left1, right1.permute((1, 0)), scores, use_acc=False, is_async=True)
    if K2 > 0:
        scores = warpgroup_mma(left2, right2.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def start_next(tile, end_tile, k1, k2, q1_smem, q2_smem, full, scores, K2: gl.constexpr, STAGES: gl.constexpr, FENCED: gl.constexpr):
    """Start the products of keys with a tile of rows. Beyond the last tile they use an old stage and must be discarded.

    FENCED: the producer warps have executed the fence before they signalled `full`.
    """
    stage = tile % STAGES
    mbarrier.wait(full.index(stage), (tile // STAGES) & 1, pred=tile < end_tile)
    if not FENCED:
        fence_async_shared()
    return start_scores(k1, k2, q1_smem.index(stage), q2_smem.index(stage), scores, K2)


@gluon.jit
def bits_of(x):
    """Return the bits of float32 values as integers. For values >= 0 the integers have the order of the values."""
    return x.to(gl.int32, bitcast=True)


@gluon.jit
def float_of(bits):
    """Return the float32 values of `bits`."""
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def reciprocal(x):
    """Return 1 / x for float32 x from 2^-126 to 2^126, to one unit in the last place. A division, for all x, takes six instructions more."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def opaque(x):
    """Return x, int32, through an instruction whose result the compiler does not know.

    It then keeps no address that depends on x from one iteration to the next.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=True, pack=1)


@gluon.jit
def power_near_one(x):
    """Return 2^x for |x| <= 1/4, with a relative error of 2e-6, by float32 products, because the hardware unit of `gl.exp2` limits these kernels."""
    # the Taylor series: ln 2 to the powers 1 .. 4 over their factorials
    return 1 + x * (0.69314718 + x * (0.24022651 + x * (0.055504109 + x * 0.0096181291)))


@gluon.constexpr_function
def layout_of(x):
    """Return the layout of x, the result of a reshape."""
    return x.type.layout


@gluon.constexpr_function
def _exchange_code(distance):
    return f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"


@gluon.jit
def exchange_lanes(x, DISTANCE: gl.constexpr):
    """Return the float32 values of the same registers in the lane whose number differs in bit DISTANCE (a power of two)."""
    return gl.inline_asm_elementwise(_exchange_code(DISTANCE), "=f,f", [x], gl.float32, is_pure=False, pack=1)
