"""Launches with less host time than Triton's own, which bind, specialise and look up their arguments in Python each time."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

_INT32 = range(-(2**31), 2**31)


class CachedLaunch:
    """A jit function that looks up its compiled kernels itself; call it as usual: `kernel[grid](*arguments, **constants)`.

    A launch looks its kernel up by a key. If Triton would compile two different kernels for two launches on an NVIDIA GPU, their keys differ.
    The key holds the dtype and the address modulo 16 bytes of a tensor, and the constants. For an integer (below 2**63) it holds
    whether it is 1, is divisible by 16, and fits an int32. True, 1 and 1.0 are the same constant here, so callers always pass the same of them.

    The first launch for a key goes through Triton. Later launches pass addresses instead of tensors and skip Triton's pre-run hooks;
    settings for debugging and instrumentation stay those of the first launch. On a CPU every launch goes through the jit function itself.
    All other attributes are the jit function's.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.found: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}
        self.__doc__ = kernel.__doc__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that launches `grid` on the current device, which must be the first tensor's device."""
        return partial(self._launch, grid)

    def both(self, grids: tuple[tuple[int, ...], tuple[int, ...]], flag: str) -> Callable[..., None]:
        """Return a function that launches two grids, with the constant `flag` False and then True; it inspects its arguments once."""
        return partial(self._launch_both, grids, flag)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if not arguments[0].is_cuda:
            self.kernel[grid](*arguments, **constants)
            return
        key, passed = _key_of(arguments, constants)
        if not self._launch_found(key, grid, passed):
            self._compile(key, grid, arguments, constants)

    def _launch_both(self, grids: tuple[tuple[int, ...], tuple[int, ...]], flag: str, *arguments: Any, **constants: Any) -> None:
        if not arguments[0].is_cuda:
            for value, grid in zip((False, True), grids, strict=True):
                self.kernel[grid](*arguments, **{flag: value}, **constants)
            return
        key, passed = _key_of(arguments, constants)
        for value, grid in zip((False, True), grids, strict=True):
            if not self._launch_found((flag, value, key), grid, passed):
                self._compile((flag, value, key), grid, arguments, {flag: value, **constants})

    def _launch_found(self, key: tuple[Any, ...], grid: tuple[int, ...], passed: list[Any]) -> bool:
        """Launch the kernel that was compiled for `key`; return False if none was."""
        found = self.found.get(key)
        if found is None:
            return False
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*passed, *rest)
        return True

    def _compile(self, key: tuple[Any, ...], grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Launch through Triton, which compiles the kernel, and store the kernel under `key`."""
        compiled = self.kernel[grid](*arguments, **constants)
        # any other result comes from an interpreter, a hook or an unfinished compilation
        if isinstance(compiled, CompiledKernel):
            self.found[key] = compiled, tuple(constants.get(name) for name in self.kernel.arg_names[len(arguments) :])


def _key_of(arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the key of the kernel that Triton compiles, and the arguments with addresses instead of tensors."""
    passed, kinds = [], [arguments[0].device.index, tuple(constants), *constants.values()]
    for x in arguments:
        value, kind = x, x.__class__
        if kind is int:
            kind = (16 if x % 16 == 0 else x == 1) if x in _INT32 else (x % 16 == 0,)
        elif x is not None and isinstance(x, Tensor):
            kinds.append(x.dtype)
            value = x.data_ptr()
            kind = value % 16
        passed.append(value)
        kinds.append(kind)
    return tuple(kinds), passed
