"""Hypothesis strategies that draw small geometries and shapes, which are likely to hit every edge."""

from hypothesis import strategies as st

from nsa_core.config import BlockGeometry
from nsa_core.testing.inputs import Shape

HEADS = ((1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (6, 2), (4, 1), (16, 1))
"""(H, G) with H/G in 1, 2, 3, 4, 16."""


@st.composite
def geometries(draw: st.DrawFn) -> BlockGeometry:
    """Draw a valid geometry with blocks of at most 16 tokens."""
    stride = draw(st.sampled_from((1, 2, 3, 4)))
    reach = draw(st.integers(1, 3))
    strides = draw(st.integers(reach, 4))
    initial, local = draw(st.integers(0, 2)), draw(st.integers(1, 2))
    return BlockGeometry(
        compression_block_size=stride * reach,
        compression_stride=stride,
        selection_block_size=stride * strides,
        num_selected_blocks=initial + local + draw(st.integers(0, 2)),
        num_initial_blocks=initial,
        num_local_blocks=local,
        window_size=draw(st.integers(1, 20)),
    )


def edge_lengths(geometry: BlockGeometry) -> list[int]:
    """Return lengths at or around every edge of `geometry` (1, l, d, l', w, n * l'), and odd primes."""
    size, stride = geometry.compression_block_size, geometry.compression_stride
    block, window = geometry.selection_block_size, geometry.window_size
    edges = {1, stride, block, window, 3, 13, 37, 53}
    edges |= {size + step for step in (-1, 0, 1)} | {block + 1, window + 1, 2 * window}
    edges |= {geometry.num_selected_blocks * block + step for step in (-1, 0, 1)}
    return sorted(edge for edge in edges if edge >= 1)


@st.composite
def shapes(draw: st.DrawFn, *, packed: bool | None = None, max_length: int = 64) -> Shape:
    """Draw a shape, packed or not (`packed` None: either). A packed shape may hold empty sequences."""
    geometry = draw(geometries())
    lengths = st.sampled_from([length for length in edge_lengths(geometry) if length <= max_length])
    num_heads, num_kv_heads = draw(st.sampled_from(HEADS))
    is_packed = draw(st.booleans()) if packed is None else packed
    sequences = draw(st.lists(lengths | st.just(0), min_size=1, max_size=3).filter(any)) if is_packed else None
    return Shape(
        geometry=geometry,
        batch=draw(st.integers(1, 2)),
        num_queries=draw(lengths),
        lengths=None if sequences is None else tuple(sequences),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=draw(st.sampled_from((2, 4, 6))),
        head_dim_v=draw(st.sampled_from((1, 4, 5))),
        seed=draw(st.integers(0, 2**16)),
        surplus_blocks=draw(st.integers(0, 2)) if is_packed else 0,
    )
