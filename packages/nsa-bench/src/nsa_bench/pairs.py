"""How many (query, key) pairs each operation looks at: exact, in closed form, in plain integers.

The choice of blocks does not matter: a query's own block is always among its blocks, and all others are full.
"""

from nsa_bench.cases import Case
from nsa_core import BlockGeometry


def dense_pairs(length: int) -> int:
    """Return the pairs s <= t of one sequence."""
    return length * (length + 1) // 2


def window_pairs(length: int, geometry: BlockGeometry) -> int:
    """Return the pairs t - w < s <= t of one sequence."""
    width = min(geometry.window_size, length)
    return dense_pairs(width) + (length - width) * width


def compressed_pairs(length: int, geometry: BlockGeometry) -> int:
    """Return the pairs of a query and a compressed block that ends at or before it."""
    rows = max(0, length - geometry.compression_block_size + 1)
    # row u of them sees u // d + 1 blocks
    chunks, rest = divmod(rows, geometry.compression_stride)
    return rows + geometry.compression_stride * (chunks * (chunks - 1) // 2) + rest * chunks


def selected_pairs(length: int, geometry: BlockGeometry) -> int:
    """Return the pairs of a query and a token, not after it, of its chosen blocks."""
    size, others = geometry.selection_block_size, geometry.num_selected_blocks - 1
    blocks, rest = divmod(length, size)
    in_own = blocks * dense_pairs(size) + dense_pairs(rest)
    # a query of block j reads min(n - 1, j) full blocks besides its own
    few = min(blocks, others + 1)
    full = few * (few - 1) // 2 + (blocks - few) * others
    return in_own + size * (size * full + rest * min(others, blocks))


def visible_pairs(operation: str, case: Case) -> int:
    """Return the pairs of `operation` over all query heads and sequences of `case`.

    "select" scores the compressed branch's pairs; "nsa" counts those of the three branches, "dense" all of the past.
    """
    counts = {
        "cmp": (compressed_pairs,),
        "select": (compressed_pairs,),
        "slc": (selected_pairs,),
        "win": (window_pairs,),
        "nsa": (compressed_pairs, selected_pairs, window_pairs),
        "dense": (lambda length, _: dense_pairs(length),),
    }[operation]
    pairs = sum(count(length, case.geometry) for length in case.sequence_lengths for count in counts)
    return case.shape.num_heads * pairs
