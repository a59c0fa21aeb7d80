"""Block arithmetic in plain integers: counts, visibility, overlap weights, reads of a decode step, pairs of query and key.

All functions take and return Python integers, never tensors. Positions count from the start of the sequence; `t` is a query's position.
Divisions round down.
"""

from nsa_core.config import BlockGeometry


def num_compressed_blocks(length: int, geometry: BlockGeometry) -> int:
    """Return N_c, the number of compressed blocks of `length` tokens; an incomplete block at the end does not count (Eq. 7)."""
    size, stride = geometry.compression_block_size, geometry.compression_stride
    return (length - size) // stride + 1 if length >= size else 0


def max_tokens(num_blocks: int, geometry: BlockGeometry) -> int:
    """Return the largest number of tokens that have `num_blocks` compressed blocks."""
    return num_blocks * geometry.compression_stride + geometry.compression_block_size - 1


def num_visible_blocks(t: int, geometry: BlockGeometry) -> int:
    """Return n_c(t), the number of compressed blocks whose last token is not after `t`; 0 for t < l - 1."""
    return num_compressed_blocks(t + 1, geometry)


def num_selection_blocks(length: int, geometry: BlockGeometry) -> int:
    """Return N, the number of selection blocks of `length` tokens; the last one may be incomplete."""
    return -(-length // geometry.selection_block_size)


def own_block(t: int, geometry: BlockGeometry) -> int:
    """Return the index of the selection block that holds token `t`; blocks 0 .. own are the candidates of query `t`."""
    return t // geometry.selection_block_size


def num_chosen_blocks(t: int, geometry: BlockGeometry) -> int:
    """Return how many selection blocks query `t` attends to: min(n, own + 1)."""
    return min(geometry.num_selected_blocks, own_block(t, geometry) + 1)


def overlap_weights(geometry: BlockGeometry) -> tuple[int, ...]:
    """Return omega (Eq. 9): how much each compressed block overlaps with a selection block. 1, 2, 2, 2, 1 for l=32, d=16, l'=64.

    Entry r is the number of tokens that selection block j shares with compressed block j * l'/d - (l/d - 1) + r, divided by d.
    Compressed blocks below 0 do not exist.
    """
    strides, reach = (
        geometry.selection_block_size // geometry.compression_stride,
        geometry.compression_block_size // geometry.compression_stride,
    )
    starts = range(1 - reach, strides)
    return tuple(min(start + reach, strides) - max(start, 0) for start in starts)


def predicted_reads(length: int, geometry: BlockGeometry) -> int:
    """Return the number of keys that one KV head reads to decode the last of `length` tokens (exact form of Table 4's formula).

    It is the sum of three counts: visible compressed blocks, tokens of the chosen blocks up to the query, and tokens of the window. For an
    empty sequence it is 0.
    """
    if length < 1:
        return 0
    last = length - 1
    size = geometry.selection_block_size
    selected = (num_chosen_blocks(last, geometry) - 1) * size + last % size + 1
    return num_visible_blocks(last, geometry) + selected + min(geometry.window_size, length)


def predicted_reads_of_step(start: int, count: int, geometry: BlockGeometry) -> int:
    """Return the summed reads of one KV head for the `count` queries at positions start .. start + count - 1."""
    return sum(predicted_reads(length, geometry) for length in range(start + 1, start + count + 1))


def causal_pairs(length: int) -> int:
    """Return the number of query-key pairs of full causal attention over `length` tokens."""
    return length * (length + 1) // 2


def compressed_pairs(length: int, geometry: BlockGeometry) -> int:
    """Return the number of pairs of a query and a compressed block that it sees (Eq. 7)."""
    count = num_compressed_blocks(length, geometry)
    first = length - geometry.compression_block_size + 1
    return count * first - geometry.compression_stride * count * (count - 1) // 2 if count else 0


def selected_pairs(length: int, geometry: BlockGeometry) -> int:
    """Return the number of pairs of a query t and a token s <= t of its min(n, own + 1) chosen blocks (Eq. 12).

    The number does not depend on which blocks are chosen: the query's own block is always chosen, and all others are full.
    """
    size, most = geometry.selection_block_size, geometry.num_selected_blocks
    whole, rest = divmod(length, size)
    # earlier blocks that the queries of block b read: 0, 1, .., n - 1, n - 1, ..
    rising = min(whole, most)
    earlier = rising * (rising - 1) // 2 + (whole - rising) * (most - 1)
    last = rest * size * (min(most, whole + 1) - 1)
    return size * size * earlier + last + whole * causal_pairs(size) + causal_pairs(rest)


def window_pairs(length: int, geometry: BlockGeometry) -> int:
    """Return the number of pairs of a query and a token of its window, which includes the query's own token."""
    window = min(geometry.window_size, length)
    return causal_pairs(window) + (length - window) * window
