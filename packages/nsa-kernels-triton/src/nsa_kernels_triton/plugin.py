"""The Triton kernels as backends of nsa_core, found by entry point. Imports no triton until a backend is called."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from nsa_core import BlockGeometry, BranchRequest, Capability, Operation, Reason
from nsa_core.backends.base import Keys
from nsa_core.backends.layouts import over_rows
from nsa_core.plugins import hookimpl
from nsa_kernels_triton import implementations, routing
from nsa_kernels_triton.device import capability_of
from nsa_kernels_triton.launch import next_power_of_2
from nsa_kernels_triton.window import with_window_in_order


@frozen(kw_only=True)
class TritonBackend:
    """The backend `triton` of one operation."""

    operation: Operation
    name: str = "triton"
    capability: Capability = routing.CAPABILITY

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return every reason against the kernels for `request`."""
        return routing.reasons_against(request)

    def preference(self, request: BranchRequest) -> int:
        """Return the priority of the kernels: above the reference on a GPU."""
        return routing.preference(request)

    def notes_on(self, request: BranchRequest) -> tuple[str, ...]:
        """Return notes on how the kernels serve `request`."""
        return implementations.notes_on(request)

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Compute the operation on the operands that its protocol in `nsa_core.backends.base` lists."""
        if self.operation in (Operation.WIN, Operation.NSA):
            keywords["geometry"] = with_finite_window(keywords["geometry"], operands[1 if self.operation is Operation.WIN else 3])
        if self.operation is Operation.NSA and is_step(operands, keywords["geometry"]):
            from nsa_kernels_triton.decode.op import decode

            return decode(*operands, **keywords)
        if self.operation is Operation.APPEND:
            return _append(*operands, **keywords)
        if self.operation is Operation.ROTATE:
            return _rotate(*operands)
        compute = _compute_of(self.operation)
        if self.operation is Operation.CHOOSE:
            return compute(*operands, **keywords)
        if self.operation in (Operation.WIN, Operation.NSA):
            compute = partial(with_window_in_order, compute)
        return over_rows(compute, *operands, **keywords)


LONG_WINDOW = 2**22
"""A longer window is cut to the sequences' length: kernels multiply positions plus window by the heads of a group, in int32."""
MOST_STRIDES = 32
"""Maximum strides of a selection block that `decode` supports, because a warp's part of a tile holds whole blocks."""


def with_finite_window(geometry: BlockGeometry, win: Keys) -> BlockGeometry:
    """Return `geometry` with a window that is not much longer than the sequences of `win`."""
    if geometry.window_size <= LONG_WINDOW:
        return geometry
    # a power of two, because kernels are compiled for each window
    return evolve(geometry, window_size=min(geometry.window_size, max(LONG_WINDOW, next_power_of_2(win.max_count))))


def is_step(operands: tuple[Any, ...], geometry: BlockGeometry) -> bool:
    """Return True if `decode` supports these operands of NSA: a few rows of each sequence over a cache, without gradients."""
    queries, cmp, slc, win, gates = operands
    if queries.start is None or queries.max_count > routing.MOST_STEP_ROWS or cmp.first is not None or slc.first is not None:
        return False
    has_scales = slc.k_scale is not None or win.k_scale is not None
    if queries.q.is_cuda and has_scales and not routing.has_fp8(capability_of(queries.q)):
        return False
    if geometry.selection_block_size > MOST_STRIDES * geometry.compression_stride:
        return False
    tensors = (queries.q, cmp.k, cmp.v, slc.k, slc.v, win.k, win.v, gates)
    return cmp.k_scale is None and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def _append(*operands: Any, **keywords: Any) -> None:
    """Write a step into a cache. A graph that `torch.compile` traces uses torch's own operations, which the compiler fuses."""
    if torch.compiler.is_compiling():
        from nsa_core.reference.append import append

        append(*operands, **keywords)
        return
    from nsa_kernels_triton.append import op

    op.append(*operands, **keywords)


def _rotate(*operands: Any) -> tuple[Tensor, ...]:
    """Return a step's rotated heads. A graph that `torch.compile` traces uses torch's own operations, which the compiler fuses."""
    if torch.compiler.is_compiling():
        from nsa_core.rope import rotate_step

        return rotate_step(*operands)
    from nsa_kernels_triton.rotation import op

    return op.rotate(*operands)


def _compute_of(operation: Operation) -> Callable[..., Any]:
    """Return the function that computes `operation`; its module loads triton. Only import statements work here: tracing follows no others."""
    if operation is Operation.NSA:
        from nsa_kernels_triton.fused.op import nsa_attention

        return nsa_attention
    if operation is Operation.CMP:
        from nsa_kernels_triton.interval.op import compressed_attention

        return compressed_attention
    if operation is Operation.SELECT:
        from nsa_kernels_triton.choice.op import select_blocks

        return select_blocks
    if operation is Operation.SLC:
        from nsa_kernels_triton.selected.op import selected_attention

        return selected_attention
    if operation is Operation.WIN:
        from nsa_kernels_triton.interval.op import sliding_window_attention

        return sliding_window_attention
    from nsa_kernels_triton.choice.op import choose

    return choose


@hookimpl
def nsa_branch_backends() -> Sequence[TritonBackend]:
    """Return the Triton kernels of every operation."""
    return [TritonBackend(operation=operation) for operation in Operation]
