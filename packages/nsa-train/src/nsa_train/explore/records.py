"""The records of one text in one model: tokens, and for each layer the choice of blocks, scores, gates and a dense twin's attention."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from attrs import asdict, field, frozen
from numpy.typing import NDArray

from nsa_core.config import BRANCHES, BlockGeometry

FORMAT, VERSION = "nsa-explore", 1
"""Name and version of the JSON object; the version changes if a key changes its meaning."""
GATE_BINS = 20
"""Bins of equal width, from 0 to 1, of a histogram of gates."""
Floats = NDArray[np.float32]


class DistanceBin(NamedTuple):
    """A bar of the histogram of distances."""

    first: int
    """The smallest distance in blocks; 1 is the block before the query's own."""
    last: int
    """The largest distance, inclusive."""
    blocks: int
    """Number of free blocks chosen at these distances, over queries and KV heads."""


@frozen(kw_only=True, eq=False)
class LayerRecord:
    """The record of one layer: S tokens, H heads, G KV heads, n chosen of N selection blocks."""

    index: int
    """Number of the layer in the decoder, from 0."""
    geometry: BlockGeometry | None = None
    """Block sizes; None: a dense layer, for which nothing else is recorded."""
    branches: tuple[str, ...] = ()
    num_kv_heads: int = 0
    gates: Floats | None = None
    """float32 `(S, H, 3)`: cmp, slc, win; 0 if the layer lacks the branch."""
    block_indices: NDArray[np.int32] | None = None
    """int32 `(S, G, n)`, ascending, -1 after the last; None: a layer that chooses no blocks."""
    scores: Floats | None = None
    """float32 `(S, G, N)`: importance of each block, summed over the heads of a group (Eq. 10); None as for block_indices."""
    dense_mass: Floats | None = None
    """float32 `(S, G, N)`: share of the dense twin's attention in each block, mean over the heads of a group; None: no twin."""

    @property
    def num_blocks(self) -> int:
        """Return N, the selection blocks of the text; 0 for a layer that chooses none."""
        return 0 if self.scores is None else self.scores.shape[2]

    def own_blocks(self) -> NDArray[np.int64]:
        """Return int64 `(S,)`: the block of each token; the blocks 0 .. own are its candidates."""
        assert self.geometry is not None
        assert self.gates is not None
        return np.arange(len(self.gates)) // self.geometry.selection_block_size

    def chosen(self) -> NDArray[np.bool_]:
        """Return bool `(S, G, N)`: whether a block was chosen."""
        assert self.block_indices is not None
        # unused slots (-1) set the last column, which is cut off
        found = np.zeros((*self.block_indices.shape[:2], self.num_blocks + 1), np.bool_)
        np.put_along_axis(found, self.block_indices.astype(np.int64), True, axis=-1)
        return found[..., :-1]

    def distance_histogram(self) -> list[DistanceBin]:
        """Return a histogram of the distances of free blocks from the query's own, in powers of two, over queries with more than n candidates."""
        if self.block_indices is None:
            return []
        assert self.geometry is not None
        own = self.own_blocks()[:, None, None]
        is_free = (self.block_indices >= self.geometry.num_initial_blocks) & (self.block_indices <= own - self.geometry.num_local_blocks)
        distances = (own - self.block_indices)[is_free & (own >= self.geometry.num_selected_blocks)]
        bounds = [2**power for power in range(int(distances.max(initial=0)).bit_length() + 1)]
        counts = np.histogram(distances, bounds)[0].tolist() if len(bounds) > 1 else []
        return [DistanceBin(first, 2 * first - 1, count) for first, count in zip(bounds, counts, strict=False)]

    def gate_histogram(self) -> dict[str, list[int]]:
        """Return branch -> counts in `GATE_BINS` bins, over heads and tokens; if the layer has cmp, over tokens that see a compressed block."""
        if self.gates is None:
            return {}
        assert self.geometry is not None
        first = self.geometry.compression_block_size - 1 if "cmp" in self.branches else 0
        kept = self.gates[first:]
        return {branch: np.histogram(kept[..., BRANCHES.index(branch)], GATE_BINS, (0.0, 1.0))[0].tolist() for branch in self.branches}


@frozen(kw_only=True, eq=False)
class Exploration:
    """All that a page shows."""

    model: str
    """Name of the run or folder."""
    step: int | None
    """Number of training steps that made the weights; None: not known."""
    twin: str | None = None
    """Name of the dense twin; None: there is none."""
    token_ids: list[int] = field(factory=list)
    pieces: list[str] = field(factory=list)
    """The text of each token; "" if it continues a character that an earlier token began."""
    layers: list[LayerRecord] = field(factory=list)


def layer_facts(layer: LayerRecord) -> dict[str, Any]:
    """Return the sizes and histograms of a layer as plain values for JSON."""
    facts: dict[str, Any] = {"layer": layer.index, "attention": "dense" if layer.geometry is None else "nsa"}
    if layer.geometry is None or layer.gates is None:
        return facts
    return facts | {
        "branches": list(layer.branches),
        "num_heads": layer.gates.shape[1],
        "num_kv_heads": layer.num_kv_heads,
        "num_blocks": layer.num_blocks,
        "geometry": asdict(layer.geometry),
        "distance_histogram": [one._asdict() for one in layer.distance_histogram()],
        "gate_histogram": layer.gate_histogram(),
    }


def model_facts(found: Exploration) -> dict[str, Any]:
    """Return the fields of the JSON object before its layers."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": found.model,
        "step": found.step,
        "twin": found.twin,
        "num_tokens": len(found.token_ids),
        "token_ids": found.token_ids,
        "token_texts": found.pieces,
    }


def layer_arrays(layer: LayerRecord, decimals: int) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a layer as nested lists by name; a token's scores and mass are only those of its candidates, blocks 0 .. own."""
    for name in ("block_indices", "gates", "scores", "dense_mass"):
        values = getattr(layer, name)
        if values is None:
            yield name, None
        elif name in ("block_indices", "gates"):
            yield name, _rounded(values, decimals)
        else:
            yield name, [_rounded(row[:, : own + 1], decimals) for row, own in zip(values, layer.own_blocks(), strict=True)]


def _rounded(values: NDArray[Any], decimals: int) -> Any:
    # in float64, because there the shortest decimal text of a rounded number has only these decimals
    return (values if values.dtype.kind == "i" else values.astype(np.float64).round(decimals)).tolist()
