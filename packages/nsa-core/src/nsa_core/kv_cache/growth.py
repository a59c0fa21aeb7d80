"""The part of a step that a growing cache does on the host. Importing this file loads torch's compiler."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nsa_core.errors import CacheOverflowError, InputError
from nsa_core.kv_cache.bounds import HostBounds
from nsa_core.kv_cache.streams import is_captured

if TYPE_CHECKING:
    from nsa_core.kv_cache.cache import NSACache


@torch.compiler.disable  # type: ignore[untyped-decorator]
def make_room(cache: "NSACache", num_queries: int, query_count: Tensor | None, in_place: bool) -> None:
    """Count a step on the host, and grow the stores if it does not fit. torch.compile breaks the graph here.

    Raises:
        CacheOverflowError: if a sequence may become longer than `max_seqlen`, or if its pages have no room.
        InputError: if a CUDA graph captures the step.
    """
    bounds, stores = cache.bounds, cache.stores
    assert isinstance(bounds, HostBounds)
    if is_captured(cache.lengths.device):
        raise InputError(
            "a CUDA graph captures a step of a cache that grows (its bounds live on the host, so a replay would not advance them); "
            f"use new_cache({cache.batch_size}, {stores.capacity}, static=True)"
        )
    if cache.pages is not None:
        counts = bounds.held.new_full(bounds.held.shape, num_queries)
        if query_count is not None and query_count.device.type == "cpu":
            counts.copy_(query_count)
        room = cache.pages.limits(bounds.held, cache.config.geometry)
        grown = bounds.held + counts
        short = (counts > 0) & (grown > room)
        # beyond max_seqlen no reservation helps; the bounds refuse that below
        if bool(short.any()) and int(grown.max()) <= cache.max_seqlen:
            b = int(short.int().argmax())
            raise CacheOverflowError(
                f"sequence {b} would hold {int(grown[b])} tokens (its pages have room for {int(room[b])}); "
                f"use reserve({b}, {int(grown[b])}, length={int(bounds.held[b])}) before the step"
            )
    longest = bounds.begin(num_queries, query_count, in_place=in_place, max_seqlen=cache.max_seqlen)
    if longest > stores.capacity:
        stores.grow(min(max(longest, 2 * stores.capacity), cache.max_seqlen))
        cache.known_forms.clear()
        cache.can_grow = stores.capacity < cache.max_seqlen
