"""The tensors of a cache: their sizes, their growth, and the order of their sequences."""

import torch
from torch import Tensor

from nsa_core import blocks
from nsa_core.backends.base import Keys
from nsa_core.config import NSAConfig

DEFAULT_MAX_ROLLBACK = 64
RINGS = ("win", "raw")
"""The stores that hold the last tokens alone."""


class Stores:
    """Keys and values per branch, `(B, rows, G, D)`, of sequences of up to `capacity` tokens."""

    def __init__(
        self, config: NSAConfig, shape: tuple[int, int], capacity: int, max_rollback: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Allocate zeros for `shape`, the sequences and the KV heads."""
        self.config, self.capacity, self.max_rollback = config, capacity, max_rollback
        self.dtype = dtype
        self.keys: dict[str, Tensor] = {}
        """"cmp" blocks, "slc" tokens, and the rings "win" (none where "slc" serves both) and "raw", which hold position p in row p % rows."""
        self.values: dict[str, Tensor] = {}
        batch_size, num_kv_heads = shape
        for name, rows in self.sizes(capacity).items():
            size = (batch_size, rows, num_kv_heads)
            self.keys[name] = torch.zeros(*size, config.head_dim_qk, dtype=dtype, device=device)
            if name in config.branches or (name == "raw" and "cmp" in config.branches):
                self.values[name] = torch.zeros(*size, config.head_dim_v, dtype=dtype, device=device)

    @property
    def window_reads_all(self) -> bool:
        """Return True where the sliding branch reads the selected branch's store, which holds the same keys and values."""
        return self.config.kv == "shared" and {"slc", "win"} <= set(self.config.branches)

    def sizes(self, capacity: int) -> dict[str, int]:
        """Return the tokens (blocks, for "cmp") that each store holds per sequence of up to `capacity` tokens."""
        branches, geometry = self.config.branches, self.config.geometry
        sizes = {}
        if "cmp" in branches or "slc" in branches:
            sizes["cmp"] = max(blocks.num_compressed_blocks(capacity, geometry), 1)
            sizes["raw"] = max(min(geometry.compression_block_size - 1 + self.max_rollback, capacity), 1)
        if "slc" in branches:
            sizes["slc"] = capacity
        if "win" in branches and not self.window_reads_all:
            sizes["win"] = max(min(geometry.window_size - 1 + self.max_rollback, capacity), 1)
        return sizes

    def keys_of(self, name: str) -> Keys:
        """Return the store `name` as an operand; where it has no values, its keys stand for them."""
        rows = self.capacity if name != "cmp" else blocks.num_compressed_blocks(self.capacity, self.config.geometry)
        return Keys(self.keys[name], self.values.get(name, self.keys[name]), rows, ring=name in RINGS)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all stores."""
        return sum(store.nbytes for stores in (self.keys, self.values) for store in stores.values())

    def grow(self, capacity: int) -> None:
        """Give every sequence room for `capacity` tokens; what the stores hold is copied."""
        sizes = self.sizes(capacity)
        for stores in (self.keys, self.values):
            for name, store in stores.items():
                # a ring that grows has not wrapped: it was as long as its sequence
                if store.shape[1] < sizes[name]:
                    stores[name] = store.new_zeros(store.shape[0], sizes[name], *store.shape[2:])
                    stores[name][:, : store.shape[1]] = store
        self.capacity = capacity

    def reorder(self, indices: Tensor, *, in_place: bool) -> None:
        """Replace the sequences by those at `indices` `(B',)`; in place B' is B."""
        for stores in (self.keys, self.values):
            for name, store in stores.items():
                chosen = store.index_select(0, indices)
                if in_place:
                    store.copy_(chosen)
                else:
                    stores[name] = chosen
