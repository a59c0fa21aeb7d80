"""The custom op of the whole operation. Nothing of size (B, S, H, D) is made but the branches' outputs and the gated sum."""

from typing import Any

import torch
from torch import Tensor

from nsa_core.backends.base import Placement
from nsa_core.config import BlockGeometry
from nsa_kernels_triton.interval import op as interval
from nsa_kernels_triton.launch import Sequences, exact_out, geometry_of, on_its_device, ring_for
from nsa_kernels_triton.select import op as select
from nsa_kernels_triton.selected import op as selected

NUM_SAVED = 7
"""Outputs beside the sum that the backward pass reads."""


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    geometry: BlockGeometry,
    scale: float,
    placement: Placement,
) -> Tensor:
    """Return the gated sum of the three branches `(B, S, H, D_v)` (Eq. 5)."""
    placed = (placement.cu_seqlens, placement.cu_blocks, placement.query_start, placement.query_count, placement.max_key_count)
    stores = (k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, *stores, gates))
    out: Tensor = triton_nsa_attention(q, *stores, gates, list(geometry.as_tuple()), scale, *placed, trains)[0]
    return out


@torch.library.custom_op("nsa_triton::nsa_attention", mutates_args=())
@on_its_device
def triton_nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    geometry: list[int],
    scale: float,
    cu_seqlens: Tensor | None,
    cu_blocks: Tensor | None,
    query_start: Tensor | None,
    query_count: Tensor | None,
    max_key_count: int,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gated sum, and what the backward pass needs: out and lse of cmp, slc and win, block_indices.

    Where nothing `trains` that is empty.
    """
    sizes = geometry_of(*geometry)
    blocks, tokens = _sequences(q, cu_seqlens, cu_blocks, query_start, query_count, max_key_count)
    q, gates = q.contiguous(), gates.contiguous()
    out_cmp, lse_cmp, exact_cmp = interval.forward(q, k_cmp, v_cmp, False, sizes, scale, blocks)
    block_indices = select.choose(q, k_cmp, lse_cmp, sizes, scale, blocks)
    out_win, lse_win, exact_win = interval.forward(q, k_win, v_win, True, sizes, scale, tokens)
    others = selected.Others(out_cmp, out_win, gates)
    out_slc, lse_slc, exact_slc, total = selected.forward(q, k_slc, v_slc, block_indices, sizes, scale, tokens, others, trains)
    if not trains:
        return total, *_nothing(q)  # type: ignore[return-value]
    if exact_cmp.numel():
        out_cmp, out_slc, out_win = exact_cmp, exact_slc, exact_win
    return total, out_cmp, lse_cmp, out_slc, lse_slc, out_win, lse_win, block_indices


def _nothing(q: Tensor) -> tuple[Tensor, ...]:
    """Return an empty tensor in place of each that the backward pass reads; no two outputs of an op may be the same."""
    return tuple(q.new_empty(0) for _ in range(NUM_SAVED))


@triton_nsa_attention.register_fake
def _(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    num_selected, trains = rest[5][3], rest[-1]

    total = q.new_empty(*q.shape[:3], v_cmp.shape[3])
    if not trains:
        return total, *_nothing(q)

    def out() -> Tensor:
        exact = exact_out(q, v_cmp)
        return exact if exact.numel() else torch.empty_like(total)

    def lse() -> Tensor:
        return q.new_empty(q.shape[:3], dtype=torch.float32)

    block_indices = q.new_empty(*q.shape[:2], k_cmp.shape[2], num_selected, dtype=torch.int32)
    return total, out(), lse(), out(), lse(), out(), lse(), block_indices


@torch.library.custom_op("nsa_triton::nsa_attention_backward", mutates_args=())
@on_its_device
def triton_nsa_attention_backward(
    dout: Tensor,
    saved: list[Tensor],
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    geometry: list[int],
    scale: float,
    cu_seqlens: Tensor | None,
    cu_blocks: Tensor | None,
    query_start: Tensor | None,
    query_count: Tensor | None,
    max_key_count: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, the six stores and the gates; `saved` is what the forward pass returned after the sum."""
    out_cmp, lse_cmp, out_slc, lse_slc, out_win, lse_win, block_indices = saved
    sizes = geometry_of(*geometry)
    blocks, tokens = _sequences(q, cu_seqlens, cu_blocks, query_start, query_count, max_key_count)
    dout, q, gates = dout.contiguous(), q.contiguous(), gates.contiguous()
    k_cmp, v_cmp, k_win, v_win = (x.contiguous() for x in (k_cmp, v_cmp, k_win, v_win))
    v_slc = v_slc.contiguous()
    outs, lses = (out_cmp, out_slc, out_win), (lse_cmp, lse_slc, lse_win)
    deltas, shifts, extremes, dgates = interval.branch_deltas(dout, outs, lses, gates, (v_cmp, v_slc, v_win))
    if ring_for("selected_backward", q, v_cmp) is not None:
        # once for all branches: loads to shared memory take at least four bytes
        gates = gates.float()
    cmp = interval.Operands(dout, deltas[0], None, shifts[0], extremes[0], q, k_cmp, v_cmp, gates, 0, False, sizes, scale, blocks)
    win = interval.Operands(dout, deltas[2], None, shifts[2], extremes[2], q, k_win, v_win, gates, 2, True, sizes, scale, tokens)
    dq, dk_cmp, dv_cmp = interval.backward(cmp)
    dq, dk_win, dv_win = interval.backward(win, dq)
    dq, dk_slc, dv_slc = selected.backward(
        dout, deltas[1], shifts[1], extremes[1], q, k_slc, v_slc, block_indices, gates, dq, sizes, scale, tokens
    )
    return dq, dk_cmp, dv_cmp, dk_slc, dv_slc, dk_win, dv_win, dgates


@triton_nsa_attention_backward.register_fake
def _(dout: Tensor, saved: list[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in rest[:8])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, geometry, scale, cu_seqlens, cu_blocks, query_start, query_count, max_key_count, _trains = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], *tensors, cu_seqlens, cu_blocks, query_start, query_count)
    ctx.constants = (geometry, scale, max_key_count)


def _backward(ctx: Any, dout: Tensor | None, *_unused: None) -> tuple[Tensor | None, ...]:
    geometry, scale, max_key_count = ctx.constants
    # read once: checkpointing hands every saved tensor out a single time
    everything = ctx.saved_tensors
    saved, tensors, placed = everything[:NUM_SAVED], everything[NUM_SAVED:-4], everything[-4:]
    if dout is None:
        return (None,) * 16
    gradients = triton_nsa_attention_backward(dout, list(saved), *tensors, geometry, scale, *placed, max_key_count)
    return *gradients, *[None] * 8


triton_nsa_attention.register_autograd(_backward, setup_context=_setup_context)


def _sequences(
    q: Tensor,
    cu_seqlens: Tensor | None,
    cu_blocks: Tensor | None,
    query_start: Tensor | None,
    query_count: Tensor | None,
    max_key_count: int,
) -> tuple[Sequences, Sequences]:
    """Return where rows and compressed blocks lie, and where rows and tokens lie."""
    placement = Placement(0, max_key_count, cu_seqlens, cu_blocks, query_start, query_count)
    return Sequences(placement, q.shape[0], q.shape[1], cu_blocks), Sequences(placement, q.shape[0], q.shape[1], cu_seqlens)
