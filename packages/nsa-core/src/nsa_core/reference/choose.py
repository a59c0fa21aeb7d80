"""The reference of the operation CHOOSE: top-n of importance that another backend's kernel computed (Eq. 10, 11)."""

import torch
from torch import Tensor

from nsa_core.config import BlockGeometry
from nsa_core.selection import choose_blocks


def choose(scores: Tensor, factor: Tensor | None, positions: Tensor, num_kv_heads: int, *, geometry: BlockGeometry) -> Tensor:
    """Return int32 block_indices `(rows, G, n)`; see `backends.base.ChooseBackend`."""
    if factor is not None:
        dtype = torch.promote_types(scores.dtype, torch.float32)
        weighted = scores.to(dtype) * factor.to(dtype).unsqueeze(-1)
        scores = weighted.unflatten(1, (num_kv_heads, -1)).sum(2)
    return choose_blocks(scores, positions.long().unsqueeze(-1), geometry)
