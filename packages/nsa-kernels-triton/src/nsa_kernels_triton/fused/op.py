"""The whole operation (Eq. 5). It allocates no tensor of size (B, S, H, D) except the branches' outputs and the gated sum."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core.backends.base import Keys, Operation, Queries
from nsa_core.backends.ops import attention_op
from nsa_core.config import BlockGeometry
from nsa_kernels_triton.choice import op as choice
from nsa_kernels_triton.implementations import kernel_for
from nsa_kernels_triton.interval import op as interval
from nsa_kernels_triton.launch import Operands, Sequences
from nsa_kernels_triton.numerics import exact_out
from nsa_kernels_triton.pipelines import PipelineConfig
from nsa_kernels_triton.selected import op as selected
from nsa_kernels_triton.streams import on_its_device


class SavedBranches(NamedTuple):
    """Outputs (float32 where `numerics.exact_out` gives a buffer) and lse of the three branches. The backward pass reads them and the choice.

    If the compressed keys only choose blocks, their output and lse are None.
    """

    out_slc: Tensor
    lse_slc: Tensor
    out_win: Tensor
    lse_win: Tensor
    out_cmp: Tensor | None = None
    lse_cmp: Tensor | None = None

    @classmethod
    def like(cls, queries: Queries, cmp: Keys, slc: Keys, win: Keys, gates: Tensor, *, geometry: BlockGeometry) -> "SavedBranches":
        """Return uninitialised buffers for them."""
        q = queries.q

        def out() -> Tensor:
            exact = exact_out(q, win.v)
            return q.new_empty(*q.shape[:3], win.v.shape[3]) if exact is None else exact

        def lse() -> Tensor:
            return q.new_empty(q.shape[:3], dtype=torch.float32)

        return cls(out(), lse(), out(), lse(), *(() if cmp.only_chooses else (out(), lse())))


@on_its_device
def _attend(
    queries: Queries, cmp: Keys, slc: Keys, win: Keys, gates: Tensor, *, geometry: BlockGeometry, scale: float, needs_grad: bool
) -> tuple[Tensor | None, ...]:
    blocks, tokens, window = (Sequences.of(queries, keys) for keys in (cmp, slc, win))
    q, gates = queries.q.contiguous(), gates.contiguous()
    queries = queries._replace(q=q)
    out_cmp, lse_cmp, exact_cmp = interval.forward(q, cmp.k, cmp.v, False, geometry, scale, blocks)
    block_indices = choice.select(queries, cmp, lse_cmp, geometry, scale, blocks)
    out_win, lse_win, exact_win = interval.forward(q, win.k, win.v, True, geometry, scale, window)
    of_cmp = () if cmp.only_chooses else (out_cmp if exact_cmp is None else exact_cmp, lse_cmp)
    others = selected.Others(None if cmp.only_chooses else out_cmp, out_win, gates)
    del out_cmp
    out_slc, lse_slc, exact_slc, total = selected.forward(q, slc.k, slc.v, block_indices, geometry, scale, tokens, others, needs_grad)
    if not needs_grad:
        return total, block_indices
    if exact_slc is not None and exact_win is not None:
        out_slc, out_win = exact_slc, exact_win
    return total, block_indices, *SavedBranches(out_slc, lse_slc, out_win, lse_win, *of_cmp)


@on_its_device
def _differentiate(
    grads: tuple[Tensor],
    results: Sequence[Tensor],
    queries: Queries,
    cmp: Keys,
    slc: Keys,
    win: Keys,
    gates: Tensor,
    *,
    geometry: BlockGeometry,
    scale: float,
) -> tuple[Tensor, ...]:
    block_indices, *kept = results
    saved = SavedBranches(*kept)
    blocks, tokens, window = (Sequences.of(queries, keys) for keys in (cmp, slc, win))
    dout, q, gates = grads[0].contiguous(), queries.q.contiguous(), gates.contiguous()
    (k_cmp, v_cmp), (k_slc, v_slc), (k_win, v_win) = ((x.k.contiguous(), x.v.contiguous()) for x in (cmp, slc, win))
    outs, lses = (saved.out_cmp, saved.out_slc, saved.out_win), (saved.lse_cmp, saved.lse_slc, saved.lse_win)
    values = (None if cmp.only_chooses else v_cmp, v_slc, v_win)
    deltas, shifts, extremes, dgates = interval.branch_deltas(dout, outs, lses, gates, values)
    tiles = selected.backward_kernel(q, k_slc, v_slc, dout, geometry)
    if isinstance(kernel_for("interval_dkdv", q, v_cmp, k_cmp, dout), PipelineConfig):
        # once for all branches: asynchronous copies to shared memory need elements of at least four bytes
        gates = gates.float()
    of_cmp = Operands(dout, deltas[0], None, shifts[0], extremes[0], q, k_cmp, v_cmp, gates, 0, False, geometry, scale, blocks)
    of_win = Operands(dout, deltas[2], None, shifts[2], extremes[2], q, k_win, v_win, gates, 2, True, geometry, scale, window)
    of_slc = Operands(dout, deltas[1], None, shifts[1], extremes[1], q, k_slc, v_slc, gates, 1, False, geometry, scale, tokens)
    if cmp.only_chooses:
        dq, dk_cmp, dv_cmp = None, torch.zeros_like(k_cmp), torch.zeros_like(v_cmp)
    else:
        dq, dk_cmp, dv_cmp = interval.backward(of_cmp)
    dq, dk_win, dv_win = interval.backward(of_win, dq)
    dq, dk_slc, dv_slc = selected.backward(of_slc, block_indices, dq, tiles)
    return dq, dk_cmp, dv_cmp, dk_slc, dv_slc, dk_win, dv_win, dgates


nsa_attention = attention_op("nsa_triton::nsa", _attend, _differentiate, operation=Operation.NSA, saves=SavedBranches.like)
"""Gated sum of the branches `(B, S, H, D_v)` (Eq. 5), and the choice."""
