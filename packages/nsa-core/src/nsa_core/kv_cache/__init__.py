"""Keys and values of past tokens, per branch, for chunked prefill and decode.

`cache.py` has NSACache, which the layer talks to, and `options.py` its options. `stores.py` holds the tensors, `bounds.py` knows
how many tokens each sequence holds and may take back: on the host for a cache that grows, on the device for a static one. `growth.py` is the
part of a step that runs on the host, for a cache that grows. `streams.py` lets parts of a captured step run concurrently, `step_graphs.py`
captures and replays the steps of static caches.
"""

from nsa_core.kv_cache.cache import NSACache, Step
from nsa_core.kv_cache.options import CacheOptions
from nsa_core.kv_cache.stores import DEFAULT_MAX_ROLLBACK, RINGS

__all__ = ["DEFAULT_MAX_ROLLBACK", "RINGS", "CacheOptions", "NSACache", "Step"]
