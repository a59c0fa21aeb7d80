"""From operands to a backend: routing by constants, so that a graph being traced can ask as well."""

import operator
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from nsa_core import blocks
from nsa_core.backends.base import BranchRequest, Keys, NewBlocks, NewRows, Operation, Queries, layout_of
from nsa_core.backends.registry import AUTO, BackendRegistry, RequestFacts, RoutingDecision
from nsa_core.config import OPERATIONS, BlockGeometry
from nsa_core.errors import InputError
from nsa_core.plugins.manager import default_registry
from nsa_core.telemetry import AttentionObserver

BRANCH_OPERATIONS = ("cmp", "select", "slc", "win")
"""The operations that the fused one replaces."""
Backends = str | Mapping[str, str]
"""A backend's name or "auto", for every operation or by operation."""


class Call(NamedTuple):
    """Settings that the operations of one call share."""

    geometry: BlockGeometry
    scale: float
    backend: Backends
    registry: BackendRegistry
    observers: tuple[AttentionObserver, ...] = ()


def make_call(
    q: Tensor,
    geometry: BlockGeometry,
    scale: float | None,
    backend: Backends,
    registry: BackendRegistry | None,
    observers: tuple[AttentionObserver, ...] = (),
) -> Call:
    """Return the call, with its defaults settled.

    Raises:
        InputError: where `backend` names an operation that there is not.
    """
    if not isinstance(backend, str | Mapping):
        raise InputError(f"backend={backend!r} is a {type(backend).__name__} (the rule: a name, or names by operation); use 'auto'")
    registry = default_registry() if registry is None else registry
    for operation, name in () if isinstance(backend, str) else backend.items():
        if operation in ("append", "choose") and name != AUTO:
            registry.named(operation, name)
        if operation not in OPERATIONS:
            known = ", ".join(map(repr, OPERATIONS))
            raise InputError(f"backend names the operation {operation!r} (the rule: one of {known}); fix the key")
    scale = float(q.shape[-1]) ** -0.5 if scale is None else scale
    return Call(geometry, scale, backend, registry, observers)


def run(operation: Operation, call: Call, *operands: Any) -> Any:
    """Return what the backend chosen for `operation` makes of its operands."""
    name = call.backend if isinstance(call.backend, str) else call.backend.get(operation.value, AUTO)
    index = call.registry.resolve_index(name, False, *facts_of(operation, operands, call.geometry))
    return _called(index, operation, call, operands)


def run_fused(call: Call, operands: tuple[Any, ...], one_by_one: str | None) -> Any:
    """Return what a backend makes of all of Eq. 5 in one, or None where the branches run one by one.

    `one_by_one` says why they must; naming a backend for "nsa" is then ignored, with a warning.
    """
    name = _fused_name(call)
    if one_by_one is not None:
        if name not in (None, AUTO) and not isinstance(call.backend, str) and not torch.compiler.is_compiling():
            warnings.warn(f"backend {name!r} for 'nsa' is not used: {one_by_one}, so the branches run one by one", stacklevel=4)
        return None
    if name is None:
        return None
    index = call.registry.resolve_index(name, True, *facts_of(Operation.NSA, operands, call.geometry))
    return None if index < 0 else _called(index, Operation.NSA, call, operands)


def run_append(call: Call, new: NewRows, rows: tuple[NewRows, ...], new_blocks: NewBlocks | None, start: Tensor, count: Tensor) -> None:
    """Let the backend chosen for APPEND write the step; the request is that of a step of `new` with one query head per KV head."""
    queries = Queries(new.k, new.k.shape[1], None, start, count)
    name = call.backend if isinstance(call.backend, str) else call.backend.get(Operation.APPEND.value, AUTO)
    # a plain name may be that of a backend of attention alone
    name = name if name == AUTO or call.registry.has(Operation.APPEND, name) or not isinstance(call.backend, str) else AUTO
    index = call.registry.resolve_index(name, False, *facts_of(Operation.APPEND, (queries, new.store), call.geometry))
    backend: Any = call.registry.backends[index]
    backend(rows, new_blocks, start, count, geometry=call.geometry)


def _called(index: int, operation: Operation, call: Call, operands: tuple[Any, ...]) -> Any:
    backend: Any = call.registry.backends[index]
    for observer in call.observers:
        observer.record_route(operation.value, backend.name)
    return backend(*operands, geometry=call.geometry, scale=call.scale)


def _fused_name(call: Call) -> str | None:
    """Return what is asked for "nsa"; None where only single operations are named, or a plain name has none for it."""
    if isinstance(call.backend, str):
        return call.backend if call.backend == AUTO or call.registry.has(Operation.NSA, call.backend) else None
    name = call.backend.get(Operation.NSA.value, AUTO)
    named_apart = any(call.backend.get(operation, AUTO) != AUTO for operation in BRANCH_OPERATIONS)
    return None if name == AUTO and named_apart else name


def facts_of(operation: Operation, operands: tuple[Any, ...], geometry: BlockGeometry) -> RequestFacts:
    """Return the request that a call makes, as constants that a graph being traced can pass on.

    Heads and their dimensions may be symbols there (`dynamic=True`); `operator.index` makes the graph one of these very sizes.

    Raises:
        InputError: when a tensor carries a tangent of forward-mode differentiation.
    """
    queries, keys = operands[0], operands[1]
    assert isinstance(queries, Queries) and isinstance(keys, Keys)
    q, k, layout, is_traced = queries.q, keys.k, layout_of(queries, keys), torch.compiler.is_compiling()
    stores = [store for keys in operands[1:] if isinstance(keys, Keys) for store in keys[:2]]
    needs_grad = False
    if operation is not Operation.SELECT:
        others = [x for x in operands[2:] if not isinstance(x, Keys)]
        check_no_tangent(q, *stores, *others)
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, *stores, *others))
    batch, num_queries, num_heads, head_dim = q.shape
    num_sequences = batch if queries.cu_seqlens is None else queries.cu_seqlens.shape[0] - 1
    num_keys = queries.max_count
    if queries.start is not None:
        is_compressed = operation in (Operation.CMP, Operation.SELECT)
        # of several Keys the selected ones bound the tokens
        num_keys = blocks.max_tokens(keys.max_count, geometry) if is_compressed else operands[2 if len(stores) > 2 else 1].max_count
        # a growing cache does not route at every step
        num_keys = num_keys if is_traced else 1 << max(num_keys - 1, 0).bit_length()
    if is_traced:
        batch, num_sequences, num_queries, num_keys = map(_length_bucket, (batch, num_sequences, num_queries, num_keys))
    device = q.device
    # positional: names would take the host a microsecond
    return RequestFacts(
        device.index or 0,
        operation.value,
        geometry.as_tuple(),
        device.type,
        q.dtype,
        stores[2 if len(stores) > 2 else 0].dtype,
        batch,
        num_sequences,
        num_queries,
        num_keys,
        operator.index(num_heads),
        operator.index(k.shape[2]),
        operator.index(head_dim),
        operator.index(head_dim if operation is Operation.SELECT else keys.v.shape[3]),
        layout.value,
        needs_grad,
        # a graph being traced has no addresses
        is_traced or not q.is_cuda or _are_aligned(q, *stores),
    )


def _are_aligned(*tensors: Tensor) -> bool:
    """Return False where a tensor starts off a multiple of 16 bytes."""
    addresses = 0
    for x in tensors:
        # subclasses, such as those that stand for shapes alone, may have no address
        if type(x) in (Tensor, torch.nn.Parameter):
            addresses |= x.data_ptr()
    return addresses % 16 == 0


def check_no_tangent(*tensors: Tensor) -> None:
    """Raise InputError in forward-mode differentiation: torch drops the tangents of a custom op's inputs without a word."""
    if torch.compiler.is_compiling():
        return
    for x in tensors:
        if unpack_dual(x).tangent is not None:
            raise InputError(
                "a tensor carries a tangent of forward-mode differentiation (the operations have a backward pass only); use backward() "
                "or torch.autograd.functional.vjp"
            )


def _length_bucket(length: int) -> int:
    """Return the next power of 8, so that a graph being traced serves a range of lengths."""
    bucket = 1
    while bucket < length:
        bucket *= 8
    return bucket


def explain_routing(request: BranchRequest, backend: str = AUTO, registry: BackendRegistry | None = None) -> RoutingDecision:
    """Return which backend would serve `request` and every reason against the others; str() of it is readable.

    The request may describe a machine that is not here.
    """
    return (default_registry() if registry is None else registry).explain(request, backend)
