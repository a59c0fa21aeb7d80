"""Compressed and sliding-window attention by a provider's plain causal attention.

Compressed: write t = (l - 1) + d * u + r with 0 <= r < d. The d queries with the same u see the same blocks 0 .. u (Eq. 7, 8). So for each r, the
queries with this r compute plain causal attention over the blocks: r is the batch index, u the position. Both are strides of q, which is
not copied; keys and values are expanded over r. If the last chunk is incomplete, sequences of large r are one query shorter. So there
are two calls: one for the values of r in the last chunk, one for the others.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_core.backends.base import BranchOutput, Keys, Operation, Queries
from nsa_core.backends.ops import attention_op
from nsa_core.config import BlockGeometry
from nsa_core.errors import BackendUnavailableError
from nsa_kernels_cuda.flash_attention.providers import Provider, ResultGradients


class Chunks(NamedTuple):
    """The queries of one call: `num_rests` neighbouring values of r, with `num_blocks` queries for each."""

    first_row: int
    num_rests: int
    num_blocks: int
    stride: int

    def of(self, rows: Tensor) -> Tensor:
        """Return `rows` (S, ...) of one sequence as a view (num_rests, num_blocks, ...)."""
        to_row, *to_rest = rows.stride()
        start = rows.storage_offset() + self.first_row * to_row
        sizes = (self.num_rests, self.num_blocks, *rows.shape[1:])
        return rows.as_strided(sizes, (to_row, self.stride * to_row, *to_rest), start)

    def expand(self, blocks: Tensor) -> Tensor:
        """Return the `blocks` (C, G, D) that these queries see, once for each r, without a copy."""
        return blocks[: self.num_blocks].unsqueeze(0).expand(self.num_rests, -1, -1, -1)


def chunks_of(num_queries: int, geometry: BlockGeometry) -> Iterator[Chunks]:
    """Yield the calls for the queries of a sequence that see a block: first the values of r with a query in the last chunk, then the others."""
    first, stride = geometry.compression_block_size - 1, geometry.compression_stride
    num_blocks, num_last = divmod(max(num_queries - first, 0), stride)
    if num_last:
        yield Chunks(first, num_last, num_blocks + 1, stride)
    if num_blocks:
        yield Chunks(first + num_last, stride - num_last, num_blocks, stride)


def attend_to_blocks(provider: Provider, q: Tensor, k: Tensor, v: Tensor, geometry: BlockGeometry, scale: float) -> BranchOutput:
    """Return compressed attention of q (B, S, H, D) over k and v (B, C, G, D)."""
    out, lse = _nothing_seen(q, v)
    for row in range(q.shape[0]):
        for chunks in chunks_of(q.shape[1], geometry):
            found = provider.forward(chunks.of(q[row]), chunks.expand(k[row]), chunks.expand(v[row]), scale=scale, window=None)
            chunks.of(out[row]).copy_(found.out)
            chunks.of(lse[row]).copy_(found.lse)
    return BranchOutput(out, lse)


def _nothing_seen(q: Tensor, v: Tensor) -> BranchOutput:
    """Return the output of queries that see no key."""
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32))
    return BranchOutput(q.new_zeros(*q.shape[:3], v.shape[3]), lse)


def differentiate_blocks(
    provider: Provider, grads: ResultGradients, q: Tensor, k: Tensor, v: Tensor, result: BranchOutput, geometry: BlockGeometry, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v; those of k and v are added over r in float32, or in float64 for such inputs."""
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    exact = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros(x.shape, dtype=exact, device=x.device) for x in (k, v))
    for row in range(q.shape[0]):
        for chunks in chunks_of(q.shape[1], geometry):
            given = ResultGradients(chunks.of(grads.out[row]), None if grads.lse is None else chunks.of(grads.lse[row]))
            of_chunks = BranchOutput(chunks.of(result.out[row]), chunks.of(result.lse[row]))
            operands = chunks.of(q[row]), chunks.expand(k[row]), chunks.expand(v[row])
            found = provider.backward(given, *operands, of_chunks, scale=scale, window=None)
            chunks.of(dq[row]).copy_(found.dq)
            dk[row, : chunks.num_blocks] += found.dk.sum(0, dtype=exact)
            dv[row, : chunks.num_blocks] += found.dv.sum(0, dtype=exact)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@cache
def op_of(operation: Operation, provider: Provider) -> Callable[..., BranchOutput]:
    """Return the op of `operation` by `provider`, which is declared at the first call; imports no FlashAttention library."""
    is_window = operation is Operation.WIN

    def forward(queries: Queries, keys: Keys, *, geometry: BlockGeometry, scale: float, needs_grad: bool) -> BranchOutput:
        q, k, v = (_with_dense_columns(x) for x in (queries.q, keys.k, keys.v))
        # the libraries launch on the current GPU, which may be another one
        with torch.cuda.device_of(q):
            if not is_window:
                return attend_to_blocks(provider, q, k, v, geometry, scale)
            if not q.numel():
                # the libraries refuse an empty batch
                return _nothing_seen(q, v)
            found = provider.forward(q, k, v, scale=scale, window=geometry.window_size)
            return BranchOutput(found.out.contiguous(), found.lse.contiguous())

    def backward(grads: Any, results: Any, queries: Queries, keys: Keys, *, geometry: BlockGeometry, scale: float) -> tuple[Tensor, ...]:
        dout, dlse = grads
        if dlse is not None and not provider.capability.lse_gradient:
            raise BackendUnavailableError(
                f"flash_attn[{provider.name}] was given a gradient of lse (it differentiates out alone); use backend 'triton' or 'sdpa'"
            )
        result = BranchOutput(*results)
        # dout is None if only lse has a gradient
        dout = torch.zeros_like(result.out) if dout is None else dout
        dout, q, k, v = (_with_dense_columns(x) for x in (dout, queries.q, keys.k, keys.v))
        given = ResultGradients(dout, dlse)
        with torch.cuda.device_of(q):
            if not is_window:
                return differentiate_blocks(provider, given, q, k, v, result, geometry, scale)
            if not q.numel():
                return tuple(map(torch.zeros_like, (q, k, v)))
            found = provider.backward(given, q, k, v, result, scale=scale, window=geometry.window_size)
            return tuple(x.contiguous() for x in found)

    known = _providers_named(provider.name)
    if provider not in known:
        known.append(provider)
    number = known.index(provider)
    name = f"nsa_flash_attn::{operation}_{provider.name}{f'_{number + 1}' if number else ''}"
    return attention_op(name, forward, backward, operation=operation)


@cache
def _providers_named(name: str) -> list[Provider]:
    """Return the list of providers of one name that have ops. From the second provider on, the op's name has a number."""
    return []


def _with_dense_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
