"""A sliding-window backend that masks one product of all queries with all keys; README.md walks through it."""

import torch

from nsa_core import BlockGeometry, BranchOutput, BranchRequest, Capability, Keys, Layout, Operation, Queries, Reason
from nsa_core.backends.base import AttentionBackend
from nsa_core.plugins import hookimpl

FAST = 1024
LONGEST = 8192


class MaskedWindow:
    name = "masked"
    operation = Operation.WIN
    capability = Capability(layouts=(Layout.DENSE, Layout.PACKED), dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16))

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        reasons = self.capability.reasons_against(request)
        if request.num_queries > LONGEST:
            reasons += (Reason.policy(f"{request.num_queries} tokens would hold that many scores squared (at most {LONGEST})"),)
        return reasons

    def preference(self, request: BranchRequest) -> int:
        return 1 if request.num_queries <= FAST else -1

    def __call__(self, queries: Queries, keys: Keys, /, *, geometry: BlockGeometry, scale: float) -> BranchOutput:
        dtype = torch.promote_types(queries.q.dtype, torch.float32)
        q, k, v = queries.q.to(dtype), keys.k.to(dtype), keys.v.to(dtype)
        rows = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
        distance = rows[:, None] - rows
        visible = (distance >= 0) & (distance < geometry.window_size)
        if queries.cu_seqlens is not None:
            sequence = torch.searchsorted(queries.cu_seqlens[1:], rows, right=True)
            visible &= sequence[:, None] == sequence
        grouped = q.unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
        scores = torch.einsum("bsgrd,btgd->bsgrt", grouped, k) * scale
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        lse = scores.logsumexp(-1)
        out = torch.einsum("bsgrt,btgd->bsgrd", scores.softmax(-1), v)
        return BranchOutput(out.flatten(2, 3).to(queries.q.dtype), lse.flatten(2))


@hookimpl
def nsa_branch_backends() -> list[AttentionBackend]:
    return [MaskedWindow()]
