"""Keys and values of past tokens, per branch, for chunked prefill and decode.

`cache.py` has NSACache, which the layer calls, and `options.py` its options. `stores.py` holds the tensors, and `pages.py` the page table.
`bounds.py` counts the tokens of each sequence and how many of them a crop may remove: on the host for a cache that grows, on the device for
a static one. `growth.py` is the part of a step that a growing cache runs on the host. `step_graphs.py` captures and replays the steps of
static caches, and `streams.py` runs parts of a captured step concurrently.
"""

from nsa_core.kv_cache.cache import NSACache, Step
from nsa_core.kv_cache.options import CacheOptions
from nsa_core.kv_cache.stores import DEFAULT_MAX_ROLLBACK, RINGS

__all__ = ["DEFAULT_MAX_ROLLBACK", "RINGS", "CacheOptions", "NSACache", "Step"]
