"""Let Triton's interpreter fuse multiply and add, with one rounding, as its compiler does on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np


def install(builder: Any, patch: Callable[[Any, str, Any], None]) -> None:
    """Change the interpreter's class of operations by `patch(builder, name, operation)`."""
    patch(builder, "create_fmul", _multiply)
    patch(builder, "create_fadd", _with_exact(np.add))
    patch(builder, "create_fsub", _with_exact(np.subtract))
    patch(builder, "create_fma", lambda self, x, y, z: self.create_fadd(self.create_fmul(x, y), z))


def _multiply(self: Any, left: Any, right: Any) -> Any:
    out = self.binary_op(left, right, np.multiply)
    if out.data.dtype == np.float32:
        # float64 holds the product of two float32 exactly
        out.exact_product = np.multiply(left.data, right.data, dtype=np.float64)
    return out


def _with_exact(operation: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    def combine(self: Any, left: Any, right: Any) -> Any:
        out = self.binary_op(left, right, operation)
        exact = [getattr(x, "exact_product", None) for x in (left, right)]
        if exact[0] is not None:
            out.data = operation(exact[0], right.data).astype(np.float32)
        elif exact[1] is not None:
            out.data = operation(left.data, exact[1]).astype(np.float32)
        return out

    return combine
