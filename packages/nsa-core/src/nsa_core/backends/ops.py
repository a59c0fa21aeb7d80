"""`attention_op`: an operation declared once, by two plain functions, as a custom op that torch.compile, FSDP and checkpointing see through.

The declaration makes schema, fake, autograd and the flattening of `Queries` and `Keys`, from their fields.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from operator import itemgetter
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
"""The operands of each operation that can be declared; tensors stand last."""

geometry_of = cache(BlockGeometry)
"""The geometry of the numbers of `BlockGeometry.as_tuple`; to make one is to check it."""


class _Inputs:
    """The inputs of an operation's op: tensors that are always there, those of the others that are, and numbers.

    The first number says which of the others are there, bit by bit; a truth value is its bit alone.
    """

    def __init__(self, operation: Operation) -> None:
        kinds = OPERANDS[operation]
        self.groups = [(kind, list(kind.__annotations__.values())) for kind in kinds if kind is not Tensor]
        hints = [hint for _, hints in self.groups for hint in hints] + [Tensor] * (len(kinds) - len(self.groups))
        self.tensors, self.numbers = ([place for place, hint in enumerate(hints) if hint is kind] for kind in (Tensor, int))
        self.others = [place for place, hint in enumerate(hints) if hint not in (Tensor, int)]
        self.num_tensors, self.num_last = len(self.tensors), len(kinds) - len(self.groups)
        self.getters = cache(self._getters)
        # torch fills in an op's inputs in time quadratic in their number, so what is seldom there, and numbers, are lists
        self.schema = ", ".join([*(f"Tensor x{place}" for place in range(self.num_tensors)), "Tensor[] placed, SymInt[] numbers"])

    def flattened(self, operands: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Return the inputs that `operands` are."""
        fields = [x for operand in operands for x in (operand if isinstance(operand, tuple) else (operand,))]
        others = [fields[place] for place in self.others]
        are_there = sum([1 << place for place, x in enumerate(others) if x is not None and x is not False])
        placed = [x for x in others if isinstance(x, Tensor)] if are_there else []
        return [fields[place] for place in self.tensors], placed, [are_there, *[fields[place] for place in self.numbers]]

    def grouped(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the operands that `inputs` are."""
        *tensors, placed, (are_there, *numbers) = inputs
        fields = [*tensors, *numbers, *placed, None, False, True]
        operands = [kind._make(get(fields)) for kind, get in self.getters(int(are_there))]
        return operands + tensors[self.num_tensors - self.num_last :]

    def _getters(self, are_there: int) -> list[tuple[Any, Any]]:
        """Return each kind of the operands and what picks its fields in `grouped`."""
        tensors, numbers = count(), count(self.num_tensors)
        placed = count(self.num_tensors + len(self.numbers))
        found = []
        for kind, hints in self.groups:
            places = []
            for hint in hints:
                if hint in (Tensor, int):
                    places.append(next(tensors if hint is Tensor else numbers))
                    continue
                is_there, are_there = are_there % 2, are_there // 2
                places.append(is_there - 2 if hint is bool else next(placed) if is_there else -3)
            found.append((kind, itemgetter(*places)))
        return found


def attention_op(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Sequence[Tensor]] | None = None,
    *,
    operation: Operation,
    saves: Callable[..., Sequence[Tensor | None]] | None = None,
) -> Callable[..., Any]:
    """Declare the custom op `name` ("package::op") of `operation`, and return the function that calls it.

    The function takes the operands of `operation` (`OPERANDS`) and the keywords `geometry` and `scale`. It returns what the
    protocol of the operation in `backends.base` does: BranchOutput, block_indices, or FusedOutput.

    Args:
        name: of the op; `name` + "_backward" is the op of the backward pass.
        forward: `forward(*operands, geometry=, scale=, needs_grad=)` returns the results in order and then, where `needs_grad`
            is True, what `saves` lists. No tensor that it returns may alias an operand.
        backward: `backward(grads, results, *operands, geometry=, scale=)` returns the gradients of q, of each Keys' k and v, and
            for NSA of the gates. `grads` is (dout, dlse), either of them None where no gradient comes, or for NSA (dout,);
            `results` is what `forward` returned, for NSA without out. None: the operation carries no gradient.
        operation: the operation that the functions compute.
        saves: `saves(*operands, geometry=)` returns what `backward` reads beside the results, uninitialised; None for what is not
            there, which `backward` does not get.
    """
    inputs, is_choice = _Inputs(operation), operation is Operation.SELECT
    returned = "Tensor" if is_choice else "(Tensor, Tensor, Tensor[])" if saves else "(Tensor, Tensor)"
    result = FusedOutput if operation is Operation.NSA else BranchOutput

    def returns(found: Sequence[Tensor | None]) -> Any:
        return (*found[:2], [x for x in found[2:] if x is not None]) if saves else tuple(found)

    def run_forward(*arguments: Any) -> Any:
        *flat, geometry, scale, needs_grad = arguments
        found = forward(*inputs.grouped(flat), geometry=geometry_of(*geometry), scale=scale, needs_grad=needs_grad)
        return found if is_choice else returns(found)

    def fake(*arguments: Any) -> Any:
        *flat, geometry, _scale, needs_grad = arguments
        operands, sizes = inputs.grouped(flat), geometry_of(*geometry)
        if is_choice:
            return _choice_like(operands[0], operands[1], sizes)
        kept = saves(*operands, geometry=sizes) if saves and needs_grad else ()
        return returns((*_results_like(operation, operands[0], operands[1], sizes), *kept))

    schema = f"({inputs.schema}, int[] geometry, float scale, bool needs_grad) -> {returned}"
    op = torch.library.custom_op(name, run_forward, mutates_args=(), schema=schema)
    op.register_fake(fake)
    if backward is not None:
        _declare_backward(op, f"{name}_backward", backward, operation, inputs)

    def apply(*operands: Any, geometry: BlockGeometry, scale: float) -> Any:
        tensors, placed, numbers = inputs.flattened(operands)
        if backward is None:
            tensors, needs_grad = [x.detach() for x in tensors], False
        else:
            needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        found = op(*tensors, placed, numbers, list(geometry.as_tuple()), scale, needs_grad)
        return found if is_choice else result(found[0], found[1])

    return apply


def _declare_backward(op: Any, name: str, backward: Callable[..., Any], operation: Operation, inputs: _Inputs) -> None:
    """Declare the op of the backward pass, and make it the derivative of `op`."""
    # the gated sum is not kept for the backward pass; the last tensor of SLC is block_indices
    num_grads, num_dropped = (1, 1) if operation is Operation.NSA else (2, 0)
    num_tensors, num_trained = inputs.num_tensors, inputs.num_tensors - (operation is Operation.SLC)

    def run_backward(*arguments: Any) -> Any:
        grads, results, (*flat, geometry, scale) = arguments[:num_grads], arguments[num_grads], arguments[num_grads + 1 :]
        return tuple(backward(grads, results, *inputs.grouped(flat), geometry=geometry_of(*geometry), scale=scale))

    grads = ", ".join(f"Tensor? d{place}" for place in range(num_grads))
    schema = f"({grads}, Tensor[] results, {inputs.schema}, int[] geometry, float scale) -> ({', '.join(['Tensor'] * num_trained)})"
    backward_op = torch.library.custom_op(name, run_backward, mutates_args=(), schema=schema)

    @backward_op.register_fake
    def fake(*arguments: Any) -> Any:
        return tuple(x.new_empty(x.shape) for x in arguments[num_grads + 1 : num_grads + 1 + num_trained])

    def keep(ctx: Any, inputs: Sequence[Any], output: tuple[Any, ...]) -> None:
        *tensors, placed, ctx.numbers, ctx.geometry, ctx.scale, _needs_grad = inputs
        results = [*output[:2], *(output[2] if len(output) > 2 else ())]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[num_grads:])
        ctx.save_for_backward(*tensors, *placed, *results[num_dropped:])
        ctx.num_placed = len(placed)

    def differentiate(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # read once: checkpointing hands out every saved tensor a single time
        saved, last = ctx.saved_tensors, num_tensors + ctx.num_placed
        found: list[Any] = [None] * num_tensors
        if any(grad is not None for grad in grads[:num_grads]):
            placed, results = list(saved[num_tensors:last]), list(saved[last:])
            found[:num_trained] = backward_op(
                *grads[:num_grads], results, *saved[:num_tensors], placed, ctx.numbers, ctx.geometry, ctx.scale
            )
        return *found, [None] * ctx.num_placed, None, None, None, None

    op.register_autograd(differentiate, setup_context=keep)


def _choice_like(queries: Queries, keys: Keys, geometry: BlockGeometry) -> Tensor:
    return queries.q.new_empty(*queries.q.shape[:2], keys.k.shape[2], geometry.num_selected_blocks, dtype=torch.int32)


def _results_like(operation: Operation, queries: Queries, keys: Keys, geometry: BlockGeometry) -> tuple[Tensor, Tensor]:
    q = queries.q
    out = q.new_empty(*q.shape[:-1], keys.v.shape[-1])
    if operation is Operation.NSA:
        return out, _choice_like(queries, keys, geometry)
    return out, q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
