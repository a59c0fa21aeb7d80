"""The options of a cache, apart from its sizes."""

from typing import NamedTuple

import torch

from nsa_core import checks
from nsa_core.errors import InputError, type_of
from nsa_core.kv_cache.stores import DEFAULT_MAX_ROLLBACK


class CacheOptions(NamedTuple):
    """How an `NSACache` stores tokens and runs steps: the keywords of a layer's `new_cache`. torch.compile can trace it, as any named tuple.

    By default the stores grow by doubling. A `static` cache is allocated at once and keeps no state on the host, so that CUDA graphs may
    capture its steps. It drops tokens that do not fit and sets a flag on the device, which `NSACache.check` reads.
    """

    static: bool = False
    """Allocate the cache at once and keep no state on the host. False: without pages, the stores grow by doubling."""
    page_size: int | None = None
    """Tokens per page, a multiple of `selection_block_size`: the selected and the compressed branch's stores are paged, and do not grow.
    `NSACache.reserve` gives pages to a sequence. None: no pages."""
    num_pages: int | None = None
    """Pages of the cache; None: enough for `max_seqlen` tokens of every sequence."""
    kv_dtype: torch.dtype | None = None
    """`torch.float8_e4m3fn`: the selected and the sliding branch's keys and values are stored in 8 bits, with a scale per token and KV head.
    phi and the choice of blocks read keys and values that were never converted. None: no conversion."""
    max_rollback: int = DEFAULT_MAX_ROLLBACK
    """Number of tokens that `crop` may remove."""
    keep_raw: bool = False
    """Keep every raw token, so that `crop` may remove any number of tokens."""
    count_reads: bool = True
    """Count the keys that each step reads (`NSACache.last_reads`); only in a layer with all three branches."""
    step_graphs: bool | None = None
    """True: the layer captures the steps as CUDA graphs and replays them; see `NSACache.graphs`. Only for a static cache on a GPU; a capture
    that fails raises an error. None: as True for a static cache on a GPU, but a capture that fails gives a warning, and steps run eagerly."""

    @property
    def is_fixed(self) -> bool:
        """Return True if the stores never grow."""
        return self.static or self.page_size is not None

    def captures(self, device: torch.device | str) -> bool:
        """Return True if the layer captures the steps of a cache on `device`."""
        return (self.static and torch.device(device).type == "cuda") if self.step_graphs is None else self.step_graphs

    def check(self, batch_size: int, max_seqlen: int | None, device: torch.device | str) -> None:
        """Raise InputError for sizes that are not integers or below 1 (batch_size, max_rollback: below 0), and for options that do not match."""
        is_size = (
            checks.is_size(batch_size, 0) and (max_seqlen is None or checks.is_size(max_seqlen, 1)) and checks.is_size(self.max_rollback, 0)
        )
        if not is_size:
            raise InputError(
                f"batch_size={batch_size}, max_seqlen={max_seqlen}, max_rollback={self.max_rollback} "
                "(integers of at least 0, 1 and 0); use 1, 4096 and 64"
            )
        for name in ("static", "keep_raw", "count_reads", "step_graphs"):
            option = getattr(self, name)
            if not isinstance(option, bool) and not (name == "step_graphs" and option is None):
                raise InputError(f"{name}={option!r} is {type_of(option)} (the rule: a bool); use True or False")
        if self.num_pages is not None and self.page_size is None:
            raise InputError(
                f"num_pages={self.num_pages} without page_size (a page has a size in tokens); use page_size=64, or leave num_pages out"
            )
        if max_seqlen is None and self.is_fixed:
            kind = "static=True (a static cache" if self.static else f"page_size={self.page_size} (a table of pages"
            raise InputError(f"max_seqlen=None with {kind} is allocated once, whole); use max_seqlen=4096")
        if self.step_graphs and not (self.static and torch.device(device).type == "cuda"):
            raise InputError(
                f"step_graphs=True with static={self.static} on {device} (a CUDA graph holds a step of a static cache on a GPU); "
                "use static=True and a GPU, or leave it out"
            )


DEFAULTS = CacheOptions()
"""The default options of `NSACache` and of `new_cache`."""
