"""Make Triton's interpreter waste less, which halves its time and more: what it computes stays the same.

It prepares the language anew whenever one jit function calls another; it computes for every sum of integers whether it overflows, in a
dozen steps, and drops the outcome; and it builds a table of all dtypes whenever it looks one up.
"""

from collections.abc import Callable
from typing import Any


def make_quick(interpreter: Any) -> None:
    """Change the module `triton.runtime.interpreter`; leave a Triton alone that does not have these functions."""
    if hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _once_a_name(interpreter._get_np_dtype)
    # an assertion alone would read the outcome, and the interpreter has none but for debugging
    if not interpreter.interpreter_builder.options.debug:
        interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def _once_a_launch(prepare: Callable[[Any], Any]) -> Callable[[Any], Any]:
    scope: Any = None
    modules: set[int] = set()

    def prepare_once(function: Any) -> Any:
        nonlocal scope
        # a launch's end takes back what its start changed
        if scope is None or not scope._changes:
            modules.clear()
            scope = prepare(function)
        elif id(function.__globals__) not in modules:
            prepare(function)
        modules.add(id(function.__globals__))
        return scope

    return prepare_once


def _once_a_name(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def look_up_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    return look_up_once
