"""`attention_op` declares an operation as a custom op, which works with torch.compile, FSDP and checkpointing.

The caller writes two plain functions, forward and backward. From them `attention_op` makes the schema, the fake implementation and autograd,
and it flattens `Queries` and `Keys`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_core.backends.base import BranchOutput, FusedOutput, Keys, Operation, Queries
from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError

OPERANDS: dict[Operation, tuple[Any, ...]] = {
    Operation.CMP: (Queries, Keys),
    Operation.SELECT: (Queries, Keys, Tensor),
    Operation.SLC: (Queries, Keys, Tensor),
    Operation.WIN: (Queries, Keys),
    Operation.NSA: (Queries, Keys, Keys, Keys, Tensor),
}
"""Operation that can be declared -> types of its operands."""
SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", bool: "bool"}


class Declared(NamedTuple):
    """An op that is registered with torch for the life of the process."""

    library: torch.library.Library
    schema: str
    functions: dict[str, Callable[..., Any]]
    """Dispatch key, or key of `REGISTER` -> function of the latest declaration."""


DECLARED: dict[str, Declared] = {}
"""Name -> declared op. Each op is registered only once, because torch 2.11 crashes when an op is deregistered and registered again."""

REGISTER: dict[str, Callable[..., Any]] = {"fake": torch.library.register_fake, "backward": torch.library.register_autograd}
"""The registrations that are not for a dispatch key -> torch's function for each."""

geometry_of = cache(BlockGeometry)
"""Returns the `BlockGeometry` with the numbers of `as_tuple`; cached, because the constructor checks them each time."""


def attention_op(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Sequence[Tensor]] | None = None,
    *,
    operation: Operation,
    saves: Callable[..., Sequence[Tensor | None]] | None = None,
) -> Callable[..., Any]:
    """Declare the custom op `name` ("package::op") of `operation`, and return the function that calls it.

    The function takes the operands of `operation` (`OPERANDS`) and the keywords `geometry` and `scale`. It returns the result that the
    operation's protocol in `backends.base` has: BranchOutput, block_indices, or FusedOutput.

    Args:
        name: of the op; `name` + "_backward" is the op of the backward pass.
        forward: `forward(*operands, geometry=, scale=, needs_grad=)` returns the results in order and then, where `needs_grad`
            is True, what `saves` lists. No tensor that it returns may alias an operand.
        backward: `backward(grads, results, *operands, geometry=, scale=)` returns the gradients of q, of each Keys' k and v, and
            for NSA of the gates. `grads` is (dout, dlse), each None if it has no gradient, or for NSA (dout,). `results` is what
            `forward` returned, for NSA without out. Autograd records nothing in it. If `backward` is None, the operation has no gradient.
        operation: the operation that the functions compute.
        saves: `saves(*operands, geometry=)` returns uninitialised tensors with the shapes and dtypes of what `forward` keeps for
            `backward` in addition to the results. `backward` gets them after the results, without those that are None.

    Raises:
        InputError: for a name without a namespace, or an operation without operands in `OPERANDS`. A call raises it if a function does not
            return what is listed here.
    """
    if operation not in OPERANDS:
        known = ", ".join(repr(each.value) for each in OPERANDS)
        raise InputError(f"operation={str(operation)!r} cannot be declared (the rule: one of {known}); use declare_op")
    is_choice, schema = operation is Operation.SELECT, _schema_of(operation)
    returned = "Tensor" if is_choice else "(Tensor, Tensor, Tensor[])" if saves else "(Tensor, Tensor)"
    result = FusedOutput if operation is Operation.NSA else BranchOutput

    def returns(found: Any) -> Any:
        """Return the results of `forward` in the order and the types of the schema."""
        if is_choice:
            return found
        return (*found[:2], [x for x in found[2:] if x is not None]) if saves else tuple(found)

    def run_forward(*inputs: Any) -> Any:
        *flat, geometry, scale, needs_grad = inputs
        found = forward(*_grouped(operation, flat), geometry=geometry_of(*geometry), scale=scale, needs_grad=needs_grad)
        rule = "1 tensor, block_indices" if is_choice else "2 tensors, and more only with saves"
        _check_results(f"forward of {name}", (found,) if is_choice else found, 1 if is_choice else 2, rule, may_have_more=saves is not None)
        return returns(found)

    def fake(*inputs: Any) -> Any:
        *flat, geometry, _scale, needs_grad = inputs
        operands, sizes = _grouped(operation, flat), geometry_of(*geometry)
        results = _results_like(operation, operands[0], operands[1], sizes)
        return returns((*results, *saves(*operands, geometry=sizes)) if saves and needs_grad else results)

    op = declare_op(name, f"({schema}, int[] geometry, float scale, bool needs_grad) -> {returned}", run_forward, fake)

    def below_autograd(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    differentiable = None if backward is None else _differentiable(name, below_autograd, backward, operation)

    def run_autograd(*inputs: Any) -> Any:
        # the last input is needs_grad
        return returns(differentiable.apply(*inputs)) if differentiable is not None and inputs[-1] else below_autograd(*inputs)

    _implement(name, "Autograd", run_autograd)

    def call(*operands: Any, geometry: BlockGeometry, scale: float) -> Any:
        flat = [x for operand in operands for x in (operand if isinstance(operand, tuple) else (operand,))]
        needs_grad = backward is not None and torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in flat)
        # without gradients the call skips autograd; a traced graph cannot skip it
        run = op if needs_grad or torch.compiler.is_compiling() else below_autograd
        found = run(*flat, list(geometry.as_tuple()), scale, needs_grad)
        return found if is_choice else result(found[0], found[1])

    return call


def _check_results(function: str, found: Any, count: int, rule: str, *, may_have_more: bool = False) -> None:
    """Raise InputError unless `found` is `count` tensors: torch crashes when an op returns other than its schema says."""
    is_fitting = isinstance(found, Sequence) and (len(found) == count or (may_have_more and len(found) > count))
    if not is_fitting or not all(isinstance(x, Tensor) for x in found[:count]):
        shown = [type(x).__name__ for x in found] if isinstance(found, Sequence) else type(found).__name__
        raise InputError(f"{function} returned {shown} (the rule: {rule}); return these")


def _fields_of(operation: Operation) -> list[Any]:
    """Return the types of the flattened operands of `operation`."""
    return [hint for kind in OPERANDS[operation] for hint in ([Tensor] if kind is Tensor else kind.__annotations__.values())]


def _schema_of(operation: Operation) -> str:
    return ", ".join(f"{SCHEMA_TYPES[hint]} x{index}" for index, hint in enumerate(_fields_of(operation)))


def _grouped(operation: Operation, flat: Sequence[Any]) -> list[Any]:
    """Return the operands of `operation` that `flat` holds field by field."""
    fields, kinds = iter(flat), OPERANDS[operation]
    return [next(fields) if kind is Tensor else kind._make(islice(fields, len(kind._fields))) for kind in kinds]


def declare_op(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], *, dispatch_key: str = "CompositeExplicitAutograd"
) -> Any:
    """Declare the op `name` and return it. `run` implements it for `dispatch_key` (by default for every device), `fake` for fake tensors.

    `run` and `fake` replace those of an earlier declaration. torch registers the op once per process, even if a package is imported again.

    Raises:
        InputError: if the op was declared with another schema, or its name has no namespace.
    """
    namespace, _, op_name = name.partition("::")
    if not (namespace and op_name):
        raise InputError(f"name={name!r} has no namespace (the rule: 'package::op'); use 'my_package::{name.strip(':')}'")
    if name not in DECLARED:
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(op_name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        DECLARED[name] = Declared(library, schema, {})
    declared = DECLARED[name]
    if declared.schema != schema:
        raise InputError(f"the op {name} is declared twice, as {declared.schema} and as {schema} (an op has one schema); rename one")
    _implement(name, dispatch_key, run)
    _implement(name, "fake", fake)
    return getattr(getattr(torch.ops, namespace), op_name).default


def _implement(name: str, key: str, function: Callable[..., Any]) -> None:
    """Let torch call `function` for the declared op `name` at `key`: a dispatch key, or one of `REGISTER`."""
    library, _, functions = DECLARED[name]
    is_new, functions[key] = key not in functions, function

    def current(*inputs: Any) -> Any:
        return functions[key](*inputs)

    if is_new and key in REGISTER:
        REGISTER[key](name, current, lib=library)
    elif is_new:
        library.impl(name.partition("::")[2], current, key)


def _differentiable(name: str, forward: Callable[..., Any], backward: Callable[..., Any], operation: Operation) -> Any:
    """Return the autograd function of `forward`, an op below autograd, and declare the op of its backward pass."""
    # the gated sum is not kept for the backward pass; the last tensor of SLC is block_indices
    num_grads, num_dropped = (1, 1) if operation is Operation.NSA else (2, 0)
    fields = _fields_of(operation)
    trained = [index for index, hint in enumerate(fields) if hint is Tensor][: -1 if operation is Operation.SLC else None]

    def run(*inputs: Any) -> Any:
        grads, results, (*flat, geometry, scale) = inputs[:num_grads], inputs[num_grads], inputs[num_grads + 1 :]
        found = backward(grads, results, *_grouped(operation, flat), geometry=geometry_of(*geometry), scale=scale)
        _check_results(f"backward of {name}", found, len(trained), f"{len(trained)} tensors, a gradient of each operand that has one")
        return tuple(found)

    def fake(*inputs: Any) -> Any:
        flat = inputs[num_grads + 1 :]
        return tuple(flat[index].new_empty(flat[index].shape) for index in trained)

    grads = ", ".join(f"Tensor? d{index}" for index in range(num_grads))
    gradients = ", ".join(["Tensor"] * len(trained))
    schema = f"({grads}, Tensor[] results, {_schema_of(operation)}, int[] geometry, float scale) -> ({gradients})"
    op = declare_op(f"{name}_backward", schema, run, fake)

    def refuse(*_: Any) -> Any:
        raise RuntimeError(f"{name}: its gradient was differentiated once more (the backward pass has no derivative); differentiate once")

    _implement(f"{name}_backward", "backward", refuse)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            out, other, *kept = forward(*inputs)
            results = (out, other, *(kept[0] if kept else ()))
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*results[num_grads:])
            ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs[:-1]]
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs[:-1]), *results[num_dropped:])
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            # read once: checkpointing returns every saved tensor only once
            saved, count = ctx.saved_tensors, len(ctx.constants)
            found: list[Any] = [None] * (count + 1)
            if any(grad is not None for grad in grads[:num_grads]):
                inputs = [x if constant is None else constant for x, constant in zip(saved[:count], ctx.constants, strict=True)]
                for index, gradient in zip(trained, op(*grads[:num_grads], list(saved[count:]), *inputs), strict=True):
                    found[index] = gradient
            return tuple(found)

    return Differentiable


def _results_like(operation: Operation, queries: Queries, keys: Keys, geometry: BlockGeometry) -> Any:
    """Return the results of `operation`, uninitialised, for its queries and its first Keys."""
    q = queries.q
    choice = q.new_empty(*q.shape[:2], keys.k.shape[2], geometry.num_selected_blocks, dtype=torch.int32)
    if operation is Operation.SELECT:
        return choice
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:3], keys.v.shape[3]), choice if operation is Operation.NSA else lse
