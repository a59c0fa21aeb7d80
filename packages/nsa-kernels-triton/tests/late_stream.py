"""A simulated second stream: a launch on it runs as late as possible, at the join."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LateStream:
    """Stands in for `fork_stream` and `join_stream`; torch's own operations are done at once.

    A tensor that is freed before the join is then missing, except the stream's own scratch, which lives until the join.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_current = False
        self.waiting: list[Callable[[], None]] = []
        self.scratch = _Scratch()
        self.num_late = 0

    @contextmanager
    def fork_stream(self, _x: Tensor) -> Iterator[None]:
        self.is_open = self.is_current = True
        with self.scratch:
            yield
        self.is_current = False

    def join_stream(self, _x: Tensor) -> None:
        assert self.is_open, "no stream that was captured may wait for one that was not"
        self.is_open = False
        self.num_late += len(self.waiting)
        # the interpreter leaves its arguments in reference cycles
        gc.collect()
        for launch in self.waiting:
            launch()
        self.waiting.clear()
        for x in self.scratch.tensors:
            x.fill_(math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)
        self.scratch.tensors.clear()

    def launcher(self, launcher: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel's `__getitem__` or `both` whose launches wait here."""

        def launch_of(kernel: Any, grid: tuple[int, ...], *flag: str) -> Callable[..., None]:
            launch = launcher(kernel, grid, *flag)

            def launch_or_wait(*arguments: Any, **constants: Any) -> None:
                if self.is_current:
                    given = [_weak(x) if isinstance(x, Tensor) else lambda x=x: x for x in arguments]
                    self.waiting.append(lambda: launch(*(x() for x in given), **constants))
                else:
                    launch(*arguments, **constants)

            return launch_or_wait

        return launch_of


class _Scratch(TorchDispatchMode):
    """Holds the tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor) and not any(_memory(result) == _memory(x) for x in args if isinstance(x, Tensor)):
            self.tensors.append(result)
        return result


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _weak(x: Tensor) -> Callable[[], Tensor]:
    """Return a weak reference to x that works while its memory is held elsewhere."""
    memory, form, dtype = StorageWeakRef(x.untyped_storage()), (x.storage_offset(), x.shape, x.stride()), x.dtype

    def held() -> Tensor:
        assert not memory.expired(), "memory was given back before the join"
        return torch.empty(0, dtype=dtype).set_(torch.UntypedStorage._new_with_weak_ptr(memory.cdata), *form)

    return held
