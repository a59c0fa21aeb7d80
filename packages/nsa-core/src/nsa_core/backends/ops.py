"""`attention_op`: an operation declared once, by two plain functions, as a custom op that torch.compile, FSDP and checkpointing see through.

The declaration makes schema, fake, autograd and the flattening of `Queries` and `Keys`, from their fields.
"""

from collections.abc import Callable, Sequence
from functools import cache
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
_TRAINED: dict[type, int] = {Tensor: 1, Queries: 1, Keys: 2}
"""How many fields of an operand, the first ones, are tensors that are always there; of Queries and Keys they carry a gradient."""
_OTHERS: dict[type, tuple[bool, ...]] = {Tensor: ()} | {
    kind: tuple(hint not in (int, bool) for hint in list(kind.__annotations__.values())[_TRAINED[kind] :]) for kind in (Queries, Keys)
}
"""The other fields: True for an optional tensor, False for a number."""

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
            `results` is what `forward` returned, for NSA without out. None: the operation carries no gradient.
        operation: the operation that the functions compute.
        saves: a NamedTuple of what `backward` reads beside the results, with a classmethod `like(*operands, geometry=)` that
            returns uninitialised tensors of the same shapes.
    """
    kinds = OPERANDS[operation]
    # torch fills in an op's inputs in time quadratic in their number, so what is seldom there, and numbers, are lists
    num_tensors = sum(_TRAINED[kind] for kind in kinds)
    inputs = ", ".join([*(f"Tensor x{place}" for place in range(num_tensors)), "Tensor[] placed, SymInt[] numbers"])
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
        tensors, placed, numbers = _flattened(operands)
        if backward is None:
            tensors, needs_grad = [x.detach() for x in tensors], False
        else:
            needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        found = op(*tensors, placed, numbers, list(geometry.as_tuple()), scale, needs_grad)
        if num_outputs == 1:
            return found
        return (FusedOutput if operation is Operation.NSA else BranchOutput)(found[0], found[1])

    return apply


def _declare_backward(op: Any, name: str, backward: Callable[..., Any], operation: Operation, inputs: str, num_outputs: int) -> None:
    """Declare the op of the backward pass, and make it the derivative of `op`."""
    kinds = OPERANDS[operation]
    num_grads = 1 if operation is Operation.NSA else 2
    num_tensors = sum(_TRAINED[kind] for kind in kinds)
    # the gated sum is not kept for the backward pass; the other tensor of SLC is block_indices
    num_dropped = 1 if operation is Operation.NSA else 0
    num_trained = num_tensors - (operation is Operation.SLC)

    def run_backward(*arguments: Any) -> Any:
        grads, results, (*flat, geometry, scale) = arguments[:num_grads], arguments[num_grads], arguments[num_grads + 1 :]
        return tuple(backward(grads, results, *_grouped(kinds, flat), geometry=geometry_of(*geometry), scale=scale))

    grads = ", ".join(f"Tensor? d{place}" for place in range(num_grads))
    schema = f"({grads}, Tensor[] results, {inputs}, int[] geometry, float scale) -> ({', '.join(['Tensor'] * num_trained)})"
    backward_op = torch.library.custom_op(name, run_backward, mutates_args=(), schema=schema)

    @backward_op.register_fake
    def fake(*arguments: Any) -> Any:
        return tuple(x.new_empty(x.shape) for x in arguments[num_grads + 1 : num_grads + 1 + num_trained])

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, placed, ctx.numbers, ctx.geometry, ctx.scale, _needs_grad = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[num_grads:])
        ctx.save_for_backward(*output[num_dropped:], *tensors, *placed)

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # read once: checkpointing hands out every saved tensor a single time
        saved, num_kept = ctx.saved_tensors, num_outputs - num_dropped
        tensors, placed = saved[num_kept : num_kept + num_tensors], list(saved[num_kept + num_tensors :])
        found: list[Any] = [None] * num_tensors
        if any(grad is not None for grad in grads[:num_grads]):
            results = list(saved[:num_kept])
            computed = backward_op(*grads[:num_grads], results, *tensors, placed, ctx.numbers, ctx.geometry, ctx.scale)
            found[:num_trained] = computed
        return *found, [None] * len(placed), None, None, None, None

    op.register_autograd(differentiate, setup_context=keep)


def _flattened(operands: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Return the tensors that are always there, the optional ones that are there, and numbers: which these are, bit by bit, and the rest."""
    tensors: list[Tensor] = []
    placed: list[Tensor] = []
    numbers, bit = [0], 1
    for operand in operands:
        if not isinstance(operand, tuple):
            tensors.append(operand)
            continue
        kind = type(operand)
        count = _TRAINED[kind]
        tensors += operand[:count]
        for x, is_tensor in zip(operand[count:], _OTHERS[kind], strict=True):
            if not is_tensor:
                # a list that has symbols takes no bool
                numbers.append(int(x) if isinstance(x, bool) else x)
                continue
            if x is not None:
                placed.append(x)
                numbers[0] |= bit
            bit *= 2
    return tensors, placed, numbers


def _grouped(kinds: tuple[type, ...], flat: Sequence[Any]) -> list[Any]:
    """Return the operands of what `_flattened` made of them, as an op's inputs."""
    *tensors, placed, numbers = flat
    rest, optionals, counts = iter(tensors), iter(placed), iter(numbers)
    are_there = next(counts)
    found = []
    for kind in kinds:
        fields = [next(rest) for _ in range(_TRAINED[kind])]
        for is_tensor in _OTHERS[kind]:
            if not is_tensor:
                fields.append(next(counts))
                continue
            fields.append(next(optionals) if are_there % 2 else None)
            are_there //= 2
        found.append(fields[0] if kind is Tensor else kind(*fields))
    return found


def _choice_like(queries: Queries, keys: Keys, geometry: BlockGeometry) -> Tensor:
    return queries.q.new_empty(*queries.q.shape[:2], keys.k.shape[2], geometry.num_selected_blocks, dtype=torch.int32)


def _results_like(operation: Operation, queries: Queries, keys: Keys, geometry: BlockGeometry) -> tuple[Tensor, Tensor]:
    q = queries.q
    out = q.new_empty(*q.shape[:-1], keys.v.shape[-1])
    if operation is Operation.NSA:
        return out, _choice_like(queries, keys, geometry)
    return out, q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
