"""A decorator for functions whose results are constants of a graph that torch.compile traces."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def constant_when_traced(function: Function) -> Function:
    """Mark `function`: torch.compile calls it while it traces a graph, and its result is a constant of the graph.

    This sets the same mark as `torch.compiler.assume_constant_result`, which would load torch's whole compiler on import.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
