"""The tensors of a cache: their sizes, their growth, and the order of their sequences."""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core import blocks
from nsa_core.backends.base import Keys
from nsa_core.config import NSAConfig
from nsa_core.errors import InputError
from nsa_core.kv_cache.pages import Copies, PageTable

DEFAULT_MAX_ROLLBACK = 64
"""Tokens that `crop` may remove by default."""
RINGS = ("win", "raw")
"""The stores that hold only the last tokens."""
PAGED = ("slc", "cmp")
"""The stores that may be paged."""
CONVERTED = ("slc", "win")
"""The stores that `kv_dtype` converts; phi and the choice of blocks read only the other stores."""
KV_DTYPES = (torch.float8_e4m3fn,)


class StoreOptions(NamedTuple):
    """How a cache stores its tokens."""

    capacity: int
    """Maximum number of tokens of a sequence; paged: the number that its page table can address."""
    max_rollback: int
    dtype: torch.dtype
    """The dtype that keys and values are computed in."""
    kv_dtype: torch.dtype | None = None
    """The dtype of the selected and the sliding branch's stores, which then have scales; None: `dtype`, without scales."""
    pages: PageTable | None = None


class Stores:
    """Keys and values per branch, `(B, rows, G, D)`; paged `(pages + 1, rows of a page, G, D)`, where the last page takes invalid rows."""

    def __init__(self, config: NSAConfig, batch_size: int, num_kv_heads: int, options: StoreOptions, device: torch.device | str) -> None:
        """Allocate zeros.

        Raises:
            InputError: for a kv_dtype that the token stores cannot have, or a page that does not hold whole selection blocks.
        """
        if options.kv_dtype not in (None, *KV_DTYPES):
            raise InputError(f"kv_dtype={options.kv_dtype} is no dtype of token stores (the rule: None or torch.float8_e4m3fn); use None")
        block = config.geometry.selection_block_size
        if options.pages is not None and (options.pages.page_size < 1 or options.pages.page_size % block):
            raise InputError(f"page_size={options.pages.page_size} is no multiple of selection_block_size={block}; use {block}")
        if options.kv_dtype is not None and not set(CONVERTED) & set(config.branches):
            warnings.warn(
                f"kv_dtype={options.kv_dtype} is not used with branches={config.branches} (it converts the stores of 'slc' and 'win'); leave it out",
                stacklevel=4,
            )
        self.config, self.pages, self.capacity, self.max_rollback = config, options.pages, options.capacity, options.max_rollback
        self.dtype, self.kv_dtype = options.dtype, options.kv_dtype
        self.keys: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        self.key_scales: dict[str, Tensor] = {}
        self.value_scales: dict[str, Tensor] = {}
        for name, rows in self.sizes(self.capacity).items():
            shape = (batch_size, rows, num_kv_heads)
            if self.pages is not None and name in PAGED:
                shape = (self.pages.num_pages + 1, self._rows_of_page(name), num_kv_heads)
            dtype = self.kv_dtype if self.kv_dtype is not None and name in CONVERTED else self.dtype
            has_values = name in config.branches or (name == "raw" and "cmp" in config.branches)
            for stores, scales, width in (
                (self.keys, self.key_scales, config.head_dim_qk),
                *([(self.values, self.value_scales, config.head_dim_v)] if has_values else []),
            ):
                stores[name] = torch.zeros(*shape, width, dtype=dtype, device=device)
                if dtype in KV_DTYPES:
                    scales[name] = torch.zeros(*shape, dtype=torch.float32, device=device)

    @property
    def window_reads_all(self) -> bool:
        """Return True if the sliding branch reads the selected branch's store, which holds the same keys and values."""
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

    def _rows_of_page(self, name: str) -> int:
        """Return the rows of a page. Page i of compressed keys holds the blocks that begin in page i of the tokens."""
        assert self.pages is not None
        return self.pages.page_size // (self.config.geometry.compression_stride if name == "cmp" else 1)

    def keys_of(self, name: str) -> Keys:
        """Return the store `name` as Keys; a store without values passes its keys as `v`."""
        rows = self.capacity if name != "cmp" else blocks.num_compressed_blocks(self.capacity, self.config.geometry)
        table = None if self.pages is None or name not in PAGED else self.pages.table
        k_scale = self.key_scales.get(name)
        return Keys(
            self.keys[name],
            self.values.get(name, self.keys[name]),
            rows,
            page_table=table,
            ring=name in RINGS,
            k_scale=k_scale,
            v_scale=self.value_scales.get(name, k_scale),
        )

    def _all(self) -> tuple[dict[str, Tensor], ...]:
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def nbytes(self) -> int:
        """Return the bytes of all stores and their scales."""
        return sum(store.nbytes for stores in self._all() for store in stores.values())

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes that each additional token of a sequence needs, including its share of a compressed block; rings do not count."""
        found = 0.0
        for stores in self._all():
            for name in stores.keys() & set(PAGED):
                row = stores[name].shape[2:].numel() * stores[name].element_size()
                found += row / (self.config.geometry.compression_stride if name == "cmp" else 1)
        return found

    # a tensor made in inference mode cannot be written outside of it
    @torch.inference_mode(False)
    def grow(self, capacity: int) -> None:
        """Grow the stores to `capacity` tokens per sequence and copy their content."""
        sizes = self.sizes(capacity)
        for stores in self._all():
            for name, store in stores.items():
                # a ring that grows has not wrapped: it holds the whole sequence
                if store.shape[1] < sizes[name]:
                    stores[name] = store.new_zeros(store.shape[0], sizes[name], *store.shape[2:])
                    stores[name][:, : store.shape[1]] = store
        self.capacity = capacity

    def reorder(self, indices: Tensor, *, in_place: bool) -> None:
        """Replace the sequences by those at `indices` `(B',)`; in place B' is B. Pages stay: their table is reordered."""
        for stores in self._all():
            for name, store in stores.items():
                if self.pages is not None and name in PAGED:
                    continue
                bits = store.view(torch.uint8) if store.dtype in KV_DTYPES else store
                chosen = bits.index_select(0, indices).view(store.dtype)
                if in_place:
                    store.copy_(chosen)
                else:
                    stores[name] = chosen

    def copy_pages(self, copies: Copies) -> None:
        """Copy whole pages of tokens, blocks and scales."""
        if not copies.old:
            return
        # a tensor made from a list on the GPU would wait for its copy
        device = next(iter(self.keys.values())).device
        old, new = (torch.tensor(pages, dtype=torch.int64, device="cpu").to(device, non_blocking=True) for pages in copies)
        for stores in self._all():
            for name in stores.keys() & set(PAGED):
                store = stores[name].view(torch.uint8) if stores[name].dtype in KV_DTYPES else stores[name]
                store.index_copy_(0, new, store.index_select(0, old))
