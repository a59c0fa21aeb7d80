"""A fused backend (Eq. 5) for the steps of a cache, by masks, forward only. It shows the fields of Queries and Keys."""

import torch
from torch import Tensor

from nsa_core import BlockGeometry, BranchRequest, Capability, FusedOutput, Keys, Layout, Operation, Queries, Reason
from nsa_core.backends.base import FusedBackend
from nsa_core.plugins import hookimpl
from nsa_core.selection import choose_blocks, pool_importance


class FusedStep:
    name = "fused_step"
    operation = Operation.NSA
    capability = Capability(layouts=(Layout.CACHED,), gradient=False)

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        return self.capability.reasons_against(request)

    def preference(self, request: BranchRequest) -> int:
        return 1

    def __call__(
        self, queries: Queries, cmp: Keys, slc: Keys, win: Keys, gates: Tensor, /, *, geometry: BlockGeometry, scale: float
    ) -> FusedOutput:
        q, start = queries.q, queries.start
        assert start is not None
        row = torch.arange(q.shape[1], device=q.device)
        count = torch.full_like(start, q.shape[1]) if queries.count is None else queries.count
        positions = torch.where(row < count[:, None], start[:, None] + row, -1)
        t = positions[..., None]
        ends = torch.arange(cmp.k.shape[1], device=q.device) * geometry.compression_stride + geometry.compression_block_size - 1
        out_cmp, weights = attend(q, cmp, (ends <= t)[:, :, None], scale)
        token = torch.arange(slc.k.shape[1], device=q.device)
        block = token // geometry.selection_block_size
        chosen = choose_blocks(pool_importance(weights, geometry, int(block[-1]) + 1), t.long(), geometry)
        out_slc, _ = attend(q, slc, (chosen[..., None] == block).any(-2) & (token <= t)[:, :, None], scale)
        slot, last = torch.arange(win.k.shape[1], device=q.device), (start + count - 1)[:, None]
        first = torch.zeros_like(start) if win.first is None else win.first
        stored = last - (last - slot) % len(slot) if win.ring else slot + first[:, None]
        seen = (stored[:, None] >= 0) & (stored[:, None] <= t) & (stored[:, None] > t - geometry.window_size)
        out_win, _ = attend(q, win, seen[:, :, None], scale)
        outs = torch.stack([out_cmp, out_slc, out_win], -2)
        return FusedOutput((outs * gates[..., None].to(outs.dtype)).sum(-2).to(q.dtype), chosen)


def attend(q: Tensor, keys: Keys, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return out and the weights summed over each group's heads; visible (B, S, G or 1, T). Rows that hold no token may be NaN."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(dtype).unflatten(2, (keys.k.shape[2], -1))
    k, v = keys.k.to(dtype), keys.v.to(dtype)
    if keys.k_scale is not None and keys.v_scale is not None:
        # a store of FP8
        k, v = k * keys.k_scale[..., None].to(dtype), v * keys.v_scale[..., None].to(dtype)
    scores = torch.einsum("bsgrd,btgd->bsgrt", grouped, k) * scale
    weights = scores.masked_fill(~visible[:, :, :, None], -torch.inf).softmax(-1).nan_to_num()
    out = torch.einsum("bsgrt,btgd->bsgrd", weights, v.nan_to_num())
    return out.flatten(2, 3), weights.sum(3)


@hookimpl
def nsa_branch_backends() -> list[FusedBackend]:
    return [FusedStep()]
