"""Speed up Triton's interpreter, with unchanged results.

The interpreter prepares the language at each call between jit functions, checks every integer sum for overflow in a dozen steps and
ignores the outcome, builds a table of all dtypes at each look-up, formats the name and shape of every result's type, and decides for every
two operands anew to which type they are converted.
"""

from collections.abc import Callable
from typing import Any

NUMBERS = (bool, int, float)
MOST_NUMBERS = 1024
"""The largest number of converted constants that are kept."""


def make_quick(interpreter: Any) -> None:
    """Change the module `triton.runtime.interpreter` and the types of its language; private functions where it has them."""
    if hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _once_a_name(interpreter._get_np_dtype)
    # only an assertion would read the outcome, and the interpreter has those for debugging only
    if not interpreter.interpreter_builder.options.debug:
        interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    core = interpreter.tl.core
    if hasattr(interpreter, "_patch_attr"):
        interpreter._patch_attr = _without_a_check(core, interpreter.interpreter_semantic)
    semantic = interpreter.TritonSemantic
    semantic.binary_op_type_checking_impl = _once_a_pair(semantic.binary_op_type_checking_impl, core.tensor)
    semantic.broadcast_impl_value = _once_two_types(semantic.broadcast_impl_value, core.tensor)
    core._unwrap_if_constexpr = _with_plain_values_first(core._unwrap_if_constexpr, (core.tensor, *NUMBERS))
    core.dtype.__eq__ = _with_dtypes_first(core.dtype.__eq__, core.dtype)
    core.block_type.__init__ = _once_a_shape(core.block_type.__init__)
    core.tensor.__init__ = _once_a_type(core.tensor.__init__)


def _once_a_launch(prepare: Callable[[Any], Any]) -> Callable[[Any], Any]:
    scope: Any = None
    modules: set[int] = set()

    def prepare_once(function: Any) -> Any:
        nonlocal scope
        # a launch's end undoes the changes of its start
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


def _once_a_shape(initialise: Callable[..., None]) -> Callable[..., None]:
    found: dict[Any, tuple[Any, ...]] = {}

    def initialise_once(block_type: Any, element_type: Any, shape: Any) -> None:
        # sizes are numbers, or constants that hold them
        key = (element_type.name, *(getattr(size, "value", size) for size in shape))
        if key not in found:
            initialise(block_type, element_type, shape)
            found[key] = block_type.shape, block_type.numel, block_type.name
        block_type.element_ty = element_type
        block_type.shape, block_type.numel, block_type.name = found[key]

    return initialise_once


def _once_a_type(initialise: Callable[..., None]) -> Callable[..., None]:
    found: dict[str, tuple[Any, Any]] = {}

    def initialise_once(tensor: Any, handle: Any, type: Any) -> None:  # noqa: A002 - the name that callers use
        if type.name not in found:
            initialise(tensor, handle, type)
            found[type.name] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = found[type.name]

    return initialise_once


def _without_a_check(core: Any, semantic: Any) -> Callable[..., None]:
    """Return what patches a builtin: it is called with its semantic, so the check that it has one is left out."""
    checked = core.builtin(lambda: None).__code__

    def patch(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is checked else member

        def call(*args: Any, **keywords: Any) -> Any:
            keywords["_semantic"] = semantic
            return function(*args, **keywords)

        scope.set_attr(owner, name, call)

    return patch


def _once_a_pair(convert: Callable[..., Any], tensor: type) -> Callable[..., Any]:
    """Return `convert`, which makes two operands one type. That type follows from theirs, and from the values of Python numbers."""
    numbers: dict[Any, Any] = {}
    convert_tensors = _once_two_types(convert, tensor)

    def convert_once(
        semantic: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        flags = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        of_lhs, of_rhs = (x.type.name if isinstance(x, tensor) else (type(x), x or repr(x)) for x in (lhs, rhs))
        if isinstance(of_lhs, str) and isinstance(of_rhs, str):
            return convert_tensors(semantic, lhs, rhs, *flags)
        key = (of_lhs, of_rhs, flags)
        if not all(isinstance(of, str) or of[0] in NUMBERS for of in (of_lhs, of_rhs)):
            return convert(semantic, lhs, rhs, *flags)
        if key in numbers:
            return (lhs, numbers[key]) if isinstance(of_lhs, str) else (numbers[key], rhs)
        found = convert(semantic, lhs, rhs, *flags)
        kept = (found[0] is lhs, found[1] is rhs)
        if kept in ((True, False), (False, True)):
            if len(numbers) >= MOST_NUMBERS:
                numbers.clear()
            numbers[key] = found[kept.index(False)]
        return found

    return convert_once


def _once_two_types(convert: Callable[..., Any], tensor: type) -> Callable[..., Any]:
    """Return `convert`, which makes two tensors one type, or broadcasts them, by their types alone."""
    types: dict[Any, tuple[Any, Any]] = {}

    def to_type(semantic: Any, operand: Any, wanted: Any) -> Any:
        if operand.type.name != wanted.name:
            operand = semantic.cast(operand, wanted.scalar)
        if operand.type.name == wanted.name:
            return operand
        if operand.type.is_block():
            return tensor(semantic.builder.create_broadcast(operand.handle, wanted.shape.values), wanted)
        return tensor(semantic.builder.create_splat(wanted, operand.handle), wanted)

    def convert_once(semantic: Any, lhs: Any, rhs: Any, *flags: bool) -> Any:
        key = (lhs.type.name, rhs.type.name, flags)
        if key not in types:
            found = convert(semantic, lhs, rhs, *flags)
            types[key] = found[0].type, found[1].type
            return found
        wanted_lhs, wanted_rhs = types[key]
        return to_type(semantic, lhs, wanted_lhs), to_type(semantic, rhs, wanted_rhs)

    return convert_once


def _with_plain_values_first(unwrap: Callable[[Any], Any], plain: tuple[type, ...]) -> Callable[[Any], Any]:
    return lambda value: value if type(value) in plain else unwrap(value)


def _with_dtypes_first(equal: Callable[[Any, Any], bool], dtype: type) -> Callable[[Any, Any], bool]:
    return lambda one, other: one.name == other.name if isinstance(other, dtype) else equal(one, other)
