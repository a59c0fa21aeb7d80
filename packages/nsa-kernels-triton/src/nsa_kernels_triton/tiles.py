"""Device functions that all kernels share: bounds of a sequence, tiles of rows, products with float32 accumulation."""

import triton
import triton.language as tl

# the interpreter multiplies bfloat16 tiles wrongly. Unlike a GPU, it also sums a @ b and (b^T @ a^T)^T in different orders. So operands
# are widened when interpreted
INTERPRETING = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

EXTREME = tl.constexpr(2.0**22)
"""From this size on, a score (in the units of `exponential`) is called extreme: its float32 rounding changes a weight by half of it or more."""
RESTRAINED = tl.constexpr(2.0**15)
"""If a row's shift is at least this large in size, the backward pass limits the row's weights to 1.

lse and the shift are each rounded by up to 2^-24 of the score. Below this size that changes a weight by less than 2^-8, the error that
16-bit results may have. Just below EXTREME it would change the only weight of a row by a quarter, so `lower_kernel` lowers such a shift.
"""
ALONE = tl.constexpr(1 + 2.0**-9)
"""If a row's weights add up to at most this times the largest one, the row counts as one with a single weight."""
EXTREME_MARGIN = tl.constexpr(2.0**-21)
"""Upper bound on the rounding errors of a score and its lse together, as a fraction of the score."""
EXTREME_SHIFT = tl.constexpr(2.0**22 * (1 - 2.0**-21))
"""The smallest size of a shift after `shift_of` has lowered it because it was EXTREME."""
WIDEST_REFINED = tl.constexpr(2.0**10)
"""For shifts below this, a sum of weights is exact enough to show that 2^-12 is missing. Calls with larger shifts run the loops for extremes."""
HUGE = tl.constexpr(2.0**63)
"""If every |v|, and the sum of |dO| over each row, is below this, all dot products of dO and values are finite in float32."""


@triton.jit
def wide(x):
    """Return x as int64. In the interpreter x may be a plain int, such as a loop's counter."""
    return tl.full([], 0, tl.int64) + x


@triton.jit
def count_bits(words):
    """Return how many bits of each int32 are set."""
    bits = words.to(tl.uint32, bitcast=True)
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def dot(a, b, acc):
    """Return acc + a @ b, accumulated in float32."""
    if INTERPRETING:
        return acc + tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def exponential(x, EXACT: tl.constexpr):
    """Return e^x if EXACT, else 2^x. For 2^x the scores were multiplied by log2(e) before, which rounds them once more."""
    if EXACT:
        return tl.exp2(x * LOG2E)
    return tl.exp2(x)


@triton.jit
def log_sum(row_max, row_sum, EXACT: tl.constexpr):
    """Return the natural lse of a running maximum and sum in the units of `exponential`."""
    if EXACT:
        return row_max + tl.log2(row_sum) * LN2
    # rounded once
    return row_max * LN2 + tl.log2(row_sum) * LN2


@triton.jit
def coarser(shift, factor, coarse_factor):
    """Return the factor that multiplies q . k of rows whose largest score, in the units of `exponential`, is `shift`.

    A GPU computes product * factor - shift without rounding the product, but shift itself was rounded. So the largest weight of a row is 1 only up
    to that rounding. For EXTREME scores it could be any number, or infinite. Then the factor is a power of two, `coarse_factor`: multiplying
    by it rounds nothing.
    """
    return tl.where(tl.abs(shift) < EXTREME, factor, coarse_factor)


@triton.jit
def divisor_of(row_sum, row_max, row_factor, dtype: tl.constexpr, EXACT: tl.constexpr):
    """Return a row's sum of weights, in which the largest weight is rounded to `dtype`.

    The largest weight differs from 1 only because row_max * row_factor is rounded, while `tl.fma` does not round the products. If this
    weight outweighs all others, the output is then its value: the rounding of the weight to `dtype` cancels.
    """
    if EXACT:
        return row_sum
    largest = tl.exp2(tl.fma(row_max, row_factor, -(row_max * row_factor)))
    return row_sum + (cast(largest, dtype).to(tl.float32) - largest)


@triton.jit
def shift_of(lse, EXACT: tl.constexpr):
    """Return the shift to subtract from scores so that `exponential` gives normalised weights; +inf if a row sees nothing, so that they are 0.

    EXTREME shifts are lowered by the bound on their rounding. The largest weight of such a row is then 1 or more, and must be cut at 1.
    """
    shift = lse if EXACT else lse * LOG2E
    size = tl.abs(shift)
    shift = tl.where((size >= EXTREME) & (size < float("inf")), shift - size * EXTREME_MARGIN, shift)
    return tl.where(lse == float("-inf"), float("inf"), shift)


@triton.jit
def is_lowerable(shift):
    """Return True for the shifts that `lower_kernel` lowers if their row has a single weight: RESTRAINED ones that are not EXTREME."""
    return (tl.abs(shift) >= RESTRAINED) & (tl.abs(shift) < EXTREME)


@triton.jit
def lower_alone(shift_ptrs, shift, total, largest, exists):
    """Lower the stored shifts of rows whose weights add up to `total` and whose largest weight is `largest`, if this is their single weight.

    Then the weight is 1 or more, and is cut at 1. With several weights that cut would not make their sum 1, so their shift stays. To lower a
    shift twice is harmless.
    """
    is_alone = exists & is_lowerable(shift) & (total <= largest * ALONE)
    # an infinite shift minus infinity would be NaN
    tl.store(shift_ptrs, shift - tl.where(is_alone, tl.abs(shift), 0.0) * EXTREME_MARGIN, mask=is_alone)


@triton.jit
def largest_weight(shift):
    """Return the upper limit of the weights of rows: 1 if the shift is RESTRAINED, because it may have been lowered; else infinity."""
    # the shift is compared after it was lowered, so the threshold is lowered, too
    return tl.where(tl.abs(shift) < RESTRAINED * (1 - EXTREME_MARGIN), float("inf"), 1.0)


@triton.jit
def cut(weights, largest):
    """Return weights, limited to `largest`; NaN stays NaN."""
    return tl.minimum(weights, largest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def restrained(weights, shift):
    """Return weights cut at `largest_weight`; 0 if the shift is infinite, for any scores."""
    return tl.where(shift == float("inf"), 0.0, cut(weights, largest_weight(shift)))


@triton.jit
def refined_delta(weights, dweights, delta, dlse, shift, is_end, EXACT: tl.constexpr):
    """Return delta = dO . O - dlse of rows, computed more exactly if `is_end` and nearly all of a row's weight is in this tile (rows, keys).

    In that case dO . O is the mean of dweights, weighted by the weights. The given delta contains the rounding of O (unless EXACT: float32).
    This error is visible if only a few keys have weight, because dS should then be about 0.
    """
    if EXACT:
        return delta
    share = tl.sum(weights, 1)
    has_all = is_end & (share > 1 - 2**-12) & (tl.abs(shift) < WIDEST_REFINED)
    return tl.where(has_all, tl.sum(weights * dweights, 1) / share - dlse, delta)


@triton.jit
def lowered_by(extremes_ptr):
    """Return the number of powers of two by which dS must be lowered for float16 to hold it; see `numerics.no_extremes`."""
    # squares are below 2^(exponent - 126); |dS| <= 2 |dO| |v| + |dlse|, and a weight may exceed 1 by roundings
    square = (tl.load(extremes_ptr + 1) >> 23) + (tl.load(extremes_ptr + 2) >> 23) - 252
    bound = tl.maximum((square + 1) // 2 + 1, (tl.load(extremes_ptr + 3) >> 23) - 126) + 1
    return tl.minimum(tl.maximum(bound - 14, 0), 126)


@triton.jit
def power_of_two(exponent):
    """Return 2^exponent, float32, of an int32 from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Return x in `dtype`, rounded to nearest even; the interpreter truncates to bfloat16."""
    if INTERPRETING and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x).to(dtype)
    return x.to(dtype)


@triton.jit
def load_columns(base_ptr, rows, row_mask, FIRST: tl.constexpr, WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """Return columns FIRST .. FIRST + WIDTH - 1 of the rows at element offsets `rows`; 0 beyond NUM_COLUMNS and where masked."""
    columns = FIRST + tl.arange(0, WIDTH)
    ptrs = base_ptr + rows[:, None] + columns[None, :]
    if FIRST + WIDTH > NUM_COLUMNS:
        if MASKED:
            return tl.load(ptrs, mask=row_mask[:, None] & (columns < NUM_COLUMNS)[None, :], other=0.0)
        return tl.load(ptrs, mask=(columns < NUM_COLUMNS)[None, :], other=0.0)
    if MASKED:
        return tl.load(ptrs, mask=row_mask[:, None], other=0.0)
    return tl.load(ptrs)


@triton.jit
def store_columns(base_ptr, rows, row_mask, values, FIRST: tl.constexpr, WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr):
    """Store `values` (rows, WIDTH) as columns FIRST .. of the rows at element offsets `rows`, in the pointer's dtype."""
    columns = FIRST + tl.arange(0, WIDTH)
    ptrs = base_ptr + rows[:, None] + columns[None, :]
    mask = row_mask[:, None] & (columns < NUM_COLUMNS)[None, :]
    tl.store(ptrs, cast(values, base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def position_of(number, num_tiles, num_columns):
    """Return tile, column of sequences and group of program `number` of the grid (tiles * columns * G,); CUDA limits the other axes to 65,535."""
    return number % num_tiles, number // num_tiles % num_columns, number // (num_tiles * num_columns)


@triton.jit
def program_position(num_tiles, num_columns):
    """Return tile, column of sequences and group of this program; see `position_of`."""
    return position_of(tl.program_id(0), num_tiles, num_columns)


@triton.jit
def find_sequence(item, cu_items_ptr, num_sequences, search_steps):
    """Return, elementwise, the packed sequence s with cu_items[s] <= item < cu_items[s + 1]; num_sequences if `item` is beyond the last."""
    low = item * 0
    high = low + num_sequences
    for _ in range(search_steps):
        middle = (low + high) // 2
        is_after = tl.load(cu_items_ptr + tl.minimum(middle + 1, num_sequences)) <= item
        low = tl.where(is_after & (low < high), middle + 1, low)
        high = tl.where(is_after, high, middle)
    return low


@triton.jit
def query_rows(sequence, cu_seqlens_ptr, query_start_ptr, query_count_ptr, num_queries, PACKED: tl.constexpr, CACHED: tl.constexpr):
    """Return a sequence's first row of q, its number of rows, how many of them are valid, and the position of the first."""
    if PACKED:
        first = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
        num_rows = (tl.load(cu_seqlens_ptr + sequence + 1) - first).to(tl.int32)
        return first, num_rows, num_rows, 0
    first = sequence.to(tl.int64) * num_queries
    start = 0
    count = num_queries
    if CACHED:
        start = tl.load(query_start_ptr + sequence)
        if query_count_ptr is not None:
            count = tl.load(query_count_ptr + sequence)
    return first, num_queries, count, start


@triton.jit
def visible_keys(t, IS_WINDOW: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the keys first .. end - 1 that the query at position `t` sees; none at t = -1.

    Sliding window: t - WINDOW < key <= t. Compressed blocks: key * STRIDE + SIZE - 1 <= t (Eq. 7). Triton's division truncates towards 0,
    so positions below SIZE - 1 do not use it.
    """
    if IS_WINDOW:
        return tl.maximum(t - (WINDOW - 1), 0), t + 1
    return t * 0, tl.where(t >= SIZE - 1, (t + 1 - SIZE) // STRIDE + 1, 0)
