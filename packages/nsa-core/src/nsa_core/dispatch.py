"""Find the backend for operands, and call it. Routing uses constants only, so that it also works while a graph is traced."""

import operator
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nsa_core import blocks, checks
from nsa_core.backends.base import BranchOutput, BranchRequest, FusedOutput, Keys, Operation, Queries, layout_of
from nsa_core.backends.registry import AUTO, BackendRegistry, RoutingDecision
from nsa_core.config import OPERATIONS, BlockGeometry
from nsa_core.errors import InputError, type_of
from nsa_core.plugins.manager import default_registry
from nsa_core.telemetry import AttentionObserver

BRANCH_OPERATIONS = ("cmp", "select", "slc", "win")
"""The operations that the fused operation NSA replaces."""
RESULTS: dict[Operation, tuple[type, ...]] = {
    Operation.CMP: (BranchOutput,),
    Operation.SELECT: (Tensor,),
    Operation.SLC: (BranchOutput,),
    Operation.WIN: (BranchOutput,),
    Operation.NSA: (FusedOutput, Tensor),
}
"""Operation that `run` calls -> the types that its backends may return."""
Backends = str | Mapping[str, str]
"""A backend's name or "auto": one for all operations, or a mapping from operation to name."""


class Call(NamedTuple):
    """Settings that the operations of one call share."""

    geometry: BlockGeometry
    scale: float
    backend: Backends
    registry: BackendRegistry
    observers: tuple[AttentionObserver, ...] = ()
    returns_lse: bool = False
    """True if lse reaches the caller, who may differentiate it."""


def make_call(
    q: Tensor,
    geometry: BlockGeometry,
    scale: float | None = None,
    backend: Backends = AUTO,
    registry: BackendRegistry | None = None,
    observers: tuple[AttentionObserver, ...] = (),
) -> Call:
    """Return the call, with its defaults filled in.

    Raises:
        InputError: if `backend` names an unknown operation or gives it anything but a name, `scale` is not a finite number, `registry` is no
            BackendRegistry, or an observer no AttentionObserver.
        BackendUnavailableError: if no backend of append, choose or rotate has the name that `backend` gives.
    """
    registry = registry_of(registry)
    if not isinstance(backend, str | Mapping):
        raise InputError(f"backend={backend!r} is {type_of(backend)} (the rule: a name, or names by operation); use 'auto'")
    for operation, name in () if isinstance(backend, str) else backend.items():
        if operation not in OPERATIONS:
            known = ", ".join(map(repr, OPERATIONS))
            raise InputError(f"backend names the operation {operation!r} (the rule: one of {known}); fix the key")
        if not isinstance(name, str):
            raise InputError(f"backend names {name!r} for {operation!r} (the rule: the name of a backend, or 'auto'); use 'auto'")
        if operation in ("append", "choose", "rotate") and name != AUTO:
            registry.named(operation, name)
    checks.check_scale(scale)
    _check_observers(observers)
    return Call(geometry, float(q.shape[-1]) ** -0.5 if scale is None else scale, backend, registry, observers)


def registry_of(registry: object) -> BackendRegistry:
    """Return `registry`, or that of the installed packages for None; raise InputError for anything else."""
    if registry is None:
        return default_registry()
    if not isinstance(registry, BackendRegistry):
        raise InputError(
            f"registry={registry!r} is {type_of(registry)} (the rule: a BackendRegistry, or None for the installed backends); use None"
        )
    return registry


def _check_observers(observers: object) -> None:
    if not isinstance(observers, Collection) or not all(isinstance(observer, AttentionObserver) for observer in observers):
        raise InputError(f"observers={observers!r} are no observers (the rule: a tuple of AttentionObserver); use ()")


def run(operation: Operation, call: Call, *operands: Any) -> Any:
    """Return the result of the backend for `operation`. For NSA, None means that no fused backend serves and the branches run one by one.

    Raises:
        InputError: if the backend returns another type than its protocol in `backends.base` has, and as `backend_for`.
        BackendUnavailableError: as `backend_for`.
    """
    backend = backend_for(operation, call, *operands)
    if backend is None:
        return None
    for observer in call.observers:
        observer.record_route(operation.value, backend.name)
    found = backend(*operands, geometry=call.geometry, scale=call.scale)
    if not isinstance(found, RESULTS[operation]):
        wanted = " or ".join(kind.__name__ for kind in RESULTS[operation])
        raise wrong_result(operation, backend, found, wanted)
    return found


def wrong_result(operation: Operation, backend: Any, found: object, wanted: str) -> InputError:
    """Return the error about `found`, which `backend` returned instead of what its operation returns."""
    return InputError(f"backend {backend.name!r} for {operation.value!r} returned {type_of(found)} (the rule: {wanted}); return that")


def backend_for(operation: Operation, call: Call, *operands: Any) -> Any:
    """Return the backend that serves the operands. For NSA, None means that no fused backend serves and the branches run one by one.

    Raises:
        InputError: if a tensor carries a tangent of forward-mode differentiation.
        BackendUnavailableError: if a named backend is unknown or incapable, or "auto" finds none.
    """
    name = name_for(operation, call)
    if name is None:
        return None
    registry, is_optional, is_traced = call.registry, operation is Operation.NSA, torch.compiler.is_compiling()
    # the selected branch's keys bound the tokens of NSA
    queries, keys = operands[0], operands[2 if is_optional else 1]
    needs_grad = (torch.is_grad_enabled() or _is_forward_mode()) and _needs_grad(operation, operands)
    # in a traced graph tensors have no addresses
    is_aligned = is_traced or not queries.q.is_cuda or _are_aligned(queries.q, *_stores(operands))

    def facts() -> dict[str, Any]:
        return facts_of(operation, queries, keys, call, needs_grad=needs_grad, is_aligned=is_aligned)

    if is_traced:
        index = registry.resolve_index(name, is_optional, **facts())
    else:
        # the key holds all that the facts depend on, and takes a third of their time: routing delays a cached step, which repeats the calls of
        # the previous step
        q, k, cu_seqlens = queries.q, keys.k, queries.cu_seqlens
        key = (
            operation, name, call.returns_lse, call.geometry, q.device, q.dtype, k.dtype, q.shape, k.shape, keys.v.shape,
            queries.max_count, keys.max_count, None if cu_seqlens is None else cu_seqlens.shape, queries.start is None,
            keys.page_table is None, needs_grad, is_aligned,
        )  # fmt: skip
        index = registry.route(key, name, is_optional, facts)
    return None if index < 0 else registry.backends[index]


def name_for(operation: Operation, call: Call) -> str | None:
    """Return the name that the call gives for `operation`, or "auto"; None if it names branches that NSA replaces."""
    backend = call.backend
    if isinstance(backend, str):
        if backend == AUTO or operation.value in BRANCH_OPERATIONS or call.registry.has(operation, backend):
            return backend
        # the name may belong to a backend that does not implement the other operations
        return None if operation is Operation.NSA else AUTO
    name = backend.get(operation.value, AUTO)
    are_apart = operation is Operation.NSA and name == AUTO and any(backend.get(each, AUTO) != AUTO for each in BRANCH_OPERATIONS)
    return None if are_apart else name


def facts_of(operation: Operation, queries: Queries, keys: Keys, call: Call, *, needs_grad: bool, is_aligned: bool) -> dict[str, Any]:
    """Return the request of a call as the constants that `BackendRegistry.resolve_index` takes. It also works while a graph is traced.

    In a traced graph, heads and head dimensions may be symbolic (`dynamic=True`); `operator.index` specialises the graph to these sizes.
    """
    q, cu_seqlens, is_traced = queries.q, queries.cu_seqlens, torch.compiler.is_compiling()
    batch, num_queries, num_heads, head_dim = q.shape
    num_sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    num_keys = queries.max_count
    if queries.start is not None:
        is_compressed = operation in (Operation.CMP, Operation.SELECT)
        num_keys = blocks.max_tokens(keys.max_count, call.geometry) if is_compressed else keys.max_count
        # so that a growing cache is not routed again at every step
        num_keys = num_keys if is_traced else 1 << max(operator.index(num_keys) - 1, 0).bit_length()
    if is_traced:
        batch, num_sequences, num_queries, num_keys = map(_length_bucket, (batch, num_sequences, num_queries, num_keys))
    return {
        "operation": operation.value,
        "geometry": call.geometry.as_tuple(),
        "device_type": q.device.type,
        "device_index": q.device.index or 0,
        "dtype": q.dtype,
        "kv_dtype": keys.k.dtype,
        "batch": batch,
        "num_sequences": num_sequences,
        "num_queries": num_queries,
        "num_keys": num_keys,
        "num_heads": operator.index(num_heads),
        "num_kv_heads": operator.index(keys.k.shape[2]),
        "head_dim_qk": operator.index(head_dim),
        "head_dim_v": operator.index(head_dim if operation is Operation.SELECT else keys.v.shape[3]),
        "layout": layout_of(queries, keys).value,
        "needs_grad": needs_grad,
        "needs_lse_grad": needs_grad and call.returns_lse,
        "is_aligned": is_aligned,
    }


def _needs_grad(operation: Operation, operands: tuple[Any, ...]) -> bool:
    """Return True if a gradient is recorded; raise InputError where a tensor carries a tangent of forward-mode differentiation."""
    if operation is Operation.SELECT:
        return False
    tensors = [operands[0].q, *_stores(operands), *[x for x in operands[2:] if isinstance(x, Tensor)]]
    check_no_tangent(*tensors)
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _are_aligned(*tensors: Tensor) -> bool:
    """Return False if the address of a tensor is no multiple of 16 bytes."""
    addresses = 0
    for x in tensors:
        # tensor subclasses without storage have no address
        if type(x) in (Tensor, torch.nn.Parameter):
            addresses |= x.data_ptr()
    return addresses % 16 == 0


def _stores(operands: tuple[Any, ...]) -> list[Tensor]:
    """Return every k and v of the operands."""
    return [store for x in operands[1:] if isinstance(x, Keys) for store in x[:2]]


def check_no_tangent(*tensors: Tensor) -> None:
    """Raise InputError in forward-mode differentiation: torch drops the tangents of a custom op's inputs silently."""
    # only inside forward-mode differentiation, because asking each tensor takes longer
    if _is_forward_mode() and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise InputError(
            "a tensor carries a tangent of forward-mode differentiation (the operations have a backward pass only); use backward() "
            "or torch.autograd.functional.vjp"
        )


def _is_forward_mode() -> bool:
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def _length_bucket(length: int) -> int:
    """Return the next power of 8, so that a traced graph serves a range of lengths."""
    bucket = 1
    while bucket < length:
        bucket *= 8
    return bucket


def explain_routing(request: BranchRequest, backend: str = AUTO, registry: BackendRegistry | None = None) -> RoutingDecision:
    """Return which backend would serve `request`, and every reason against the others. `print` shows the result as text.

    The request may describe another machine.

    Raises:
        InputError: for a registry that is none.
    """
    return registry_of(registry).explain(request, backend)
