"""A window's keys as the kernels read them: in order, from some position on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_core import BlockGeometry
from nsa_core.backends.base import Keys, Queries


def with_window_in_order(compute: Callable[..., Any], queries: Queries, *others: Any, geometry: BlockGeometry, scale: float) -> Any:
    """Return what `compute` makes of the operands of WIN or NSA, with a copy of the rows that `queries` see in place of a ring."""
    place = 0 if len(others) == 1 else 2
    if others[place].ring:
        others = (*others[:place], rows_in_order(others[place], queries, geometry), *others[place + 1 :])
    return compute(queries, *others, geometry=geometry, scale=scale)


def rows_in_order(ring: Keys, queries: Queries, geometry: BlockGeometry) -> Keys:
    """Return the `window_size - 1 + max_count` rows of `ring` that `queries` see, in order of position; `first` is that of the first.

    Rows after a sequence's last query hold what the ring holds there; no query sees them.
    """
    assert queries.start is not None
    first = (queries.start - (geometry.window_size - 1)).clamp(min=0)
    count = min(geometry.window_size - 1 + queries.max_count, ring.max_count)
    positions = first.long().unsqueeze(1) + torch.arange(count, device=first.device)

    def copied(store: Tensor) -> Tensor:
        rows = positions.remainder(store.shape[1])[..., None, None]
        return store.gather(1, rows.expand(-1, -1, *store.shape[2:]))

    return ring._replace(k=copied(ring.k), v=copied(ring.v), max_count=count, first=first, ring=False)
