"""From a call to a backend: routing as constants, so that a graph being traced can ask as well."""

import operator
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from nsa_core.backends.base import BranchRequest, Layout, Operation
from nsa_core.backends.registry import AUTO, BackendRegistry, RoutingDecision
from nsa_core.calls import Call
from nsa_core.errors import InputError
from nsa_core.plugins.manager import default_registry


def run(operation: Operation, tensors: tuple[Tensor | None, ...], call: Call) -> Any:
    """Return what the backend chosen for `operation` makes of `tensors`."""
    name = call.backend if isinstance(call.backend, str) else call.backend.get(operation.value, AUTO)
    index = call.registry.resolve_index(name, False, *_constants(operation, tensors, call))
    backend = call.registry.backends[index]
    for observer in call.observers:
        observer.record_route(operation.value, backend.name)
    return backend(*tensors, geometry=call.geometry, scale=call.scale, placement=call.placement)


def fused_backend(tensors: tuple[Tensor | None, ...], call: Call, one_by_one: str | None) -> Any:
    """Return the backend that does all of Eq. 5 in one, or None where the branches run one by one.

    `one_by_one` says why they must; naming a backend for "nsa" is then ignored, with a warning.
    """
    name = _fused_name(call)
    if one_by_one is not None:
        if name not in (None, AUTO) and not isinstance(call.backend, str) and not torch.compiler.is_compiling():
            warnings.warn(f"backend {name!r} for 'nsa' is not used: {one_by_one}, so the branches run one by one", stacklevel=3)
        return None
    if name is None:
        return None
    index = call.registry.resolve_index(name, True, *_constants(Operation.NSA, tensors, call))
    return None if index < 0 else call.registry.backends[index]


def _fused_name(call: Call) -> str | None:
    """Return what is asked for "nsa"; None where only single operations are named, or a plain name has none for it."""
    if isinstance(call.backend, str):
        return call.backend if call.backend == AUTO or call.registry.has(Operation.NSA, call.backend) else None
    name = call.backend.get(Operation.NSA.value, AUTO)
    named_apart = any(other != AUTO for operation, other in call.backend.items() if operation != Operation.NSA.value)
    return None if name == AUTO and named_apart else name


def _constants(operation: Operation, tensors: tuple[Tensor | None, ...], call: Call) -> tuple[Any, ...]:
    """Return the request as constants that a graph being traced can pass on: BackendRegistry.resolve_index.

    Heads and their dimensions may be symbols there (`dynamic=True`); `operator.index` makes the graph one of these very sizes.

    Raises:
        InputError: when a tensor carries a tangent, see `check_no_tangent`.
    """
    q, k, v = (tensors[0], tensors[1], tensors[2])
    assert q is not None and k is not None and v is not None
    cu_seqlens = call.placement.cu_seqlens
    is_differentiable = operation is not Operation.SELECT
    if is_differentiable:
        check_no_tangent(*tensors)
    needs_grad = is_differentiable and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return (
        q.device.index or 0,
        operation.value,
        call.geometry.as_tuple(),
        q.device.type,
        q.dtype,
        k.dtype,
        _length_bucket(q.shape[0]),
        _length_bucket(q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1),
        _length_bucket(q.shape[1]),
        _key_bucket(call),
        operator.index(q.shape[2]),
        operator.index(k.shape[2]),
        operator.index(q.shape[3]),
        operator.index(q.shape[3] if operation is Operation.SELECT else v.shape[3]),
        call.layout.value,
        needs_grad,
    )


def check_no_tangent(*tensors: Tensor | None) -> None:
    """Raise InputError in forward-mode differentiation: torch drops the tangents of a custom op's inputs without a word."""
    if torch.compiler.is_compiling():
        return
    if any(x is not None and unpack_dual(x).tangent is not None for x in tensors):
        raise InputError(
            "a tensor carries a tangent of forward-mode differentiation (the operations have a backward pass only); use backward() "
            "or torch.autograd.functional.vjp"
        )


def _key_bucket(call: Call) -> int:
    """Return the bound on keys; over a store the next power of 2, so that a growing cache does not route at every step."""
    length = call.placement.max_key_count
    if call.layout in (Layout.CACHED, Layout.PAGED) and not torch.compiler.is_compiling():
        return 1 << max(length - 1, 0).bit_length()
    return _length_bucket(length)


def _length_bucket(length: int) -> int:
    """Return `length`; in a graph being traced, the next power of 8, so that the graph serves a range of lengths."""
    if not torch.compiler.is_compiling():
        return length
    bucket = 1
    while bucket < length:
        bucket *= 8
    return bucket


def explain_routing(request: BranchRequest, backend: str = AUTO, registry: BackendRegistry | None = None) -> RoutingDecision:
    """Return which backend would serve `request` and every reason against the others; str() of it is readable.

    The request may describe a machine that is not here.
    """
    return (default_registry() if registry is None else registry).explain(request, backend)
