"""`attention_op`: an operation declared once, by two plain functions, as a custom op that torch.compile, FSDP and checkpointing see through.

The declaration makes schema, fake, autograd and the flattening of `Queries` and `Keys`, from their fields.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nsa_core.backends.base import BranchOutput, FusedOutput, Keys, Operation, Queries
from nsa_core.config import BlockGeometry

OPERANDS: dict[Operation, tuple[type, ...]] = {
    Operation.CMP: (Queries, Keys),
    Operation.SELECT: (Queries, Keys, Tensor),
    Operation.SLC: (Queries, Keys, Tensor),
    Operation.WIN: (Queries, Keys),
    Operation.NSA: (Queries, Keys, Keys, Keys, Tensor),
}
"""The operands of each operation that can be declared."""
_SCHEMA = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", bool: "bool"}
_FIELDS: dict[type, tuple[str, ...]] = {
    Tensor: ("Tensor",),
    **{kind: tuple(_SCHEMA[hint] for hint in kind.__annotations__.values()) for kind in (Queries, Keys)},
}
_DIFFERENTIABLE: dict[type, int] = {Queries: 1, Keys: 2}
"""How many fields, the first ones, carry a gradient."""

geometry_of = cache(BlockGeometry)
"""The geometry of the numbers of `BlockGeometry.as_tuple`; to make one is to check it."""


def attention_op(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Sequence[Tensor]] | None = None,
    *,
    operation: Operation,
    saves: Any = None,
) -> Callable[..., Any]:
    """Declare the custom op `name` ("package::op") of `operation`, and return the function that calls it.

    The function takes the operands of `operation` (`OPERANDS`) and the keywords `geometry` and `scale`. It returns what the
    protocol of the operation in `backends.base` does: BranchOutput, block_indices, or FusedOutput.

    Args:
        name: of the op; `name` + "_backward" is the op of the backward pass.
        forward: `forward(*operands, geometry=, scale=, needs_grad=)` returns the results in order and then the fields of `saves`.
            Where `needs_grad` is False, any tensors will do for those. No tensor that it returns may alias an operand.
        backward: `backward(grads, results, *operands, geometry=, scale=)` returns the gradients of q, of each Keys' k and v, and
            for NSA of the gates. `grads` is (dout, dlse), either of them None where no gradient comes, or for NSA (dout,);
            `results` is what `forward` returned. None: the operation carries no gradient.
        operation: the operation that the functions compute.
        saves: a NamedTuple of what `backward` reads beside the results, with a classmethod `like(*operands, geometry=)` that
            returns uninitialised tensors of the same shapes.
    """
    kinds = OPERANDS[operation]
    types = list(chain(*(_FIELDS[kind] for kind in kinds)))
    inputs = ", ".join(f"{hint} x{place}" for place, hint in enumerate(types))
    num_results = 1 if operation is Operation.SELECT else 2
    num_outputs = num_results + (len(saves._fields) if saves else 0)

    def run_forward(*arguments: Any) -> Any:
        *flat, geometry, scale, needs_grad = arguments
        found = forward(*_grouped(kinds, flat), geometry=geometry_of(*geometry), scale=scale, needs_grad=needs_grad)
        return found if num_outputs == 1 else tuple(found)

    def fake(*arguments: Any) -> Any:
        *flat, geometry, _scale, needs_grad = arguments
        operands, sizes = _grouped(kinds, flat), geometry_of(*geometry)
        if num_outputs == 1:
            return _choice_like(operands[0], operands[1], sizes)
        kept = () if saves is None else saves.like(*operands, geometry=sizes)
        return *_results_like(operation, operands[0], operands[1], sizes), *(x if needs_grad else x.new_empty(0) for x in kept)

    returned = "Tensor" if num_outputs == 1 else f"({', '.join(['Tensor'] * num_outputs)})"
    schema = f"({inputs}, int[] geometry, float scale, bool needs_grad) -> {returned}"
    op = torch.library.custom_op(name, run_forward, mutates_args=(), schema=schema)
    op.register_fake(fake)
    if backward is not None:
        _declare_backward(op, f"{name}_backward", backward, operation, inputs, num_outputs)

    def apply(*operands: Any, geometry: BlockGeometry, scale: float) -> Any:
        flat = [x for operand in operands for x in (operand if isinstance(operand, tuple) else (operand,))]
        if backward is None:
            flat, needs_grad = [x.detach() if isinstance(x, Tensor) else x for x in flat], False
        else:
            needs_grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in flat)
        found = op(*flat, list(geometry.as_tuple()), scale, needs_grad)
        if num_outputs == 1:
            return found
        return (FusedOutput if operation is Operation.NSA else BranchOutput)(found[0], found[1])

    return apply


def _declare_backward(op: Any, name: str, backward: Callable[..., Any], operation: Operation, inputs: str, num_outputs: int) -> None:
    """Declare the op of the backward pass, and make it the derivative of `op`."""
    kinds = OPERANDS[operation]
    num_grads = 1 if operation is Operation.NSA else 2
    # the place of each operand's first field among the flat inputs, and the places of those that carry a gradient
    starts = [sum(len(_FIELDS[kind]) for kind in kinds[:place]) for place in range(len(kinds))]
    trained = [start + i for start, kind in zip(starts, kinds, strict=True) for i in range(_DIFFERENTIABLE.get(kind, 0))]
    trained += [starts[-1]] if operation is Operation.NSA else []

    def run_backward(*arguments: Any) -> Any:
        grads, results, (*flat, geometry, scale) = arguments[:num_grads], arguments[num_grads], arguments[num_grads + 1 :]
        return tuple(backward(grads, results, *_grouped(kinds, flat), geometry=geometry_of(*geometry), scale=scale))

    grads = ", ".join(f"Tensor? d{place}" for place in range(num_grads))
    schema = f"({grads}, Tensor[] results, {inputs}, int[] geometry, float scale) -> ({', '.join(['Tensor'] * len(trained))})"
    backward_op = torch.library.custom_op(name, run_backward, mutates_args=(), schema=schema)

    @backward_op.register_fake
    def fake(*arguments: Any) -> Any:
        return tuple(arguments[num_grads + 1 + place].new_empty(arguments[num_grads + 1 + place].shape) for place in trained)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *flat, ctx.geometry, ctx.scale, _needs_grad = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[num_grads:])
        ctx.tensor_places = [place for place, x in enumerate(flat) if isinstance(x, Tensor)]
        ctx.constants = [None if isinstance(x, Tensor) else x for x in flat]
        ctx.save_for_backward(*output, *(flat[place] for place in ctx.tensor_places))

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * (len(ctx.constants) + 3)
        if any(grad is not None for grad in grads[:num_grads]):
            # read once: checkpointing hands out every saved tensor a single time
            saved, flat = ctx.saved_tensors, list(ctx.constants)
            for place, x in zip(ctx.tensor_places, saved[num_outputs:], strict=True):
                flat[place] = x
            computed = backward_op(*grads[:num_grads], list(saved[:num_outputs]), *flat, ctx.geometry, ctx.scale)
            for place, gradient in zip(trained, computed, strict=True):
                found[place] = gradient
        return tuple(found)

    op.register_autograd(differentiate, setup_context=keep)


def _grouped(kinds: tuple[type, ...], flat: Sequence[Any]) -> list[Any]:
    """Return the operands whose fields lie one after another in `flat`."""
    found, place = [], 0
    for kind in kinds:
        size = len(_FIELDS[kind])
        found.append(flat[place] if kind is Tensor else kind(*flat[place : place + size]))
        place += size
    return found


def _choice_like(queries: Queries, keys: Keys, geometry: BlockGeometry) -> Tensor:
    return queries.q.new_empty(*queries.q.shape[:2], keys.k.shape[2], geometry.num_selected_blocks, dtype=torch.int32)


def _results_like(operation: Operation, queries: Queries, keys: Keys, geometry: BlockGeometry) -> tuple[Tensor, Tensor]:
    q = queries.q
    out = q.new_empty(*q.shape[:-1], keys.v.shape[-1])
    if operation is Operation.NSA:
        return out, _choice_like(queries, keys, geometry)
    return out, q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
