"""Give kernels the keys of a window: the ring buffer itself, or a copy of its rows in order."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_core import BlockGeometry
from nsa_core.backends.base import Keys, Queries
from nsa_kernels_triton.routing import MOST_STEP_ROWS


def with_window_in_order(compute: Callable[..., Any], queries: Queries, *others: Any, geometry: BlockGeometry, scale: float) -> Any:
    """Return the result of `compute` for the operands of WIN or NSA.

    A step of WIN reads a ring buffer in place. Longer passes, backward passes and NSA get a copy of the rows that `queries` see, in order: the
    kernels for compute capability 9.0 read nothing else. The copy is small compared with the windows of all rows.
    """
    window = 0 if len(others) == 1 else 2
    keys = others[window]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (queries.q, keys.k, keys.v))
    if keys.ring and (needs_grad or len(others) > 1 or queries.max_count > MOST_STEP_ROWS):
        others = (*others[:window], rows_in_order(keys, queries, geometry), *others[window + 1 :])
    return compute(queries, *others, geometry=geometry, scale=scale)


def rows_in_order(ring: Keys, queries: Queries, geometry: BlockGeometry) -> Keys:
    """Return the `window_size - 1 + max_count` rows of `ring` that `queries` see, in order; `first` is the position of the first row.

    Rows after a sequence's last query hold old contents of the ring; no query sees them.
    """
    assert queries.start is not None
    first = (queries.start - (geometry.window_size - 1)).clamp(min=0)
    count = min(geometry.window_size - 1 + queries.max_count, ring.max_count)
    positions = first.long().unsqueeze(1) + torch.arange(count, device=first.device)

    def copied(store: Tensor) -> Tensor:
        rows = positions.remainder(store.shape[1])[..., None, None]
        return store.gather(1, rows.expand(-1, -1, *store.shape[2:]))

    return ring._replace(k=copied(ring.k), v=copied(ring.v), max_count=count, first=first, ring=False)
