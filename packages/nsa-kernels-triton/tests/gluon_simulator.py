"""Simulate the kernels for compute capability 9.0: their Python code runs over tensors, with a thread for every warp partition.

Triton's interpreter does not run Gluon. Here torch computes its operations, as late as the code allows: a copy lands when its arrival is
announced or its group is awaited, and a product is computed when it is awaited, from the current content of shared memory. Unwritten
memory is NaN. So a stage of a ring buffer that is freed or read too soon shows in the result, and a deadlock raises an error.
Partitions take turns at random after writes to shared memory and before reads of products' operands, so two writes to one address
show as well. Layouts, memory fences and barriers among the warps of one partition are not simulated; the compiler and a GPU check
them. A float32 product and the sum that it goes into are rounded once, because the compiler fuses the two.
"""

import ast
import inspect
import math
import random
import textwrap
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class DeadlockError(Exception):
    """Partitions wait for each other."""


class Pointer:
    """An address, or many, in a tensor's storage."""

    def __init__(self, flat: Tensor, offset: Any) -> None:
        self.flat, self.offset = flat, offset
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    @classmethod
    def to(cls, x: Tensor) -> "Pointer":
        """Return the address of x's first element."""
        return cls(torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()), torch.tensor(x.storage_offset()))

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.flat, self.offset + offset)

    def __sub__(self, offset: Any) -> "Pointer":
        return Pointer(self.flat, self.offset - offset)


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x)


def _loaded(ptr: Pointer, mask: Any, other: Any) -> Tensor:
    index = _tensor(ptr.offset).long()
    mask = torch.ones_like(index, dtype=torch.bool) if mask is None else _tensor(mask).expand(index.shape)
    out = torch.full(index.shape, other, dtype=ptr.flat.dtype)
    out[mask] = ptr.flat[index[mask]]
    return out


class Shared:
    """A tensor in shared memory, NaN or a large number before it is written."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype = data, data.dtype

    def index(self, stage: Any) -> "Shared":
        """Return one of several."""
        return Shared(self.data[int(stage)])

    def permute(self, axes: tuple[int, ...]) -> "Shared":
        """Return a transposed view."""
        return Shared(self.data.permute(axes))

    def load(self, layout: Any) -> Tensor:
        """Return a copy in registers."""
        return self.data.clone()

    def store(self, values: Tensor) -> None:
        """Overwrite."""
        assert values.dtype == self.dtype
        self.data.copy_(values)
        _take_turns()

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        assert dtype == self.dtype
        return Shared(self.data.view(-1)[: torch.Size(shape).numel()].view(shape))


class Partition:
    """Warps that run the same code; one partition of a program runs at a time."""

    def __init__(self, partitions: list["Partition"], lots: random.Random, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.partitions = partitions
        self.lots = lots
        self.error: BaseException | None = None
        self.is_done = False
        self.is_ready: Callable[[], bool] = lambda: True
        self.products: list[Product] = []
        # by groups; the last one is not closed yet
        self.copies: list[list[tuple[Shared, Pointer, Any]]] = [[]]
        self._turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(body, arguments))
        self.thread.start()

    def start(self) -> None:
        """Start running."""
        self._turn.release()

    def pass_on(self) -> None:
        """Let the others run as far as they can; continue when no other partition can."""
        mine = self.partitions.index(self)
        for other in (*self.partitions[mine + 1 :], *self.partitions[:mine], self):
            if not other.is_done and other.is_ready():
                break
        else:
            raise DeadlockError("every partition waits")
        self._hand_over(other)

    def take_turns(self) -> None:
        """Continue a random partition among those that can run, this one included."""
        self._hand_over(self.lots.choice([each for each in self.partitions if each is self or (not each.is_done and each.is_ready())]))

    def _hand_over(self, other: "Partition") -> None:
        if other is not self:
            other.start()
            self._turn.acquire()
        if any(each.error for each in self.partitions):
            raise DeadlockError("another partition failed")

    def _run(self, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        _HERE.partition = self
        self._turn.acquire()
        try:
            # `x += 1` rebinds a name in the language, and changes a tensor here
            body(*(x.clone() if isinstance(x, Tensor) else x for x in arguments))
            assert not self.products
            assert not any(self.copies)
        except BaseException as error:  # noqa: BLE001 - it is raised where the program ends
            self.error = error
        self.is_done = True
        left = [other for other in self.partitions if not other.is_done]
        if left and not self.error and not any(other.is_ready() for other in left):
            self.error = DeadlockError("every partition that is left waits")
        if left:
            next(other for other in left if self.error or other.is_ready()).start()


class Barrier:
    """An mbarrier: a phase ends with its `count`-th arrival."""

    def __init__(self) -> None:
        self.invalidate()

    def invalidate(self) -> None:
        """Forget everything; it can be initialised again."""
        self.count = self.missing = self.phase = 0

    def init(self, count: int) -> None:
        """Start phase 0."""
        self.count = self.missing = count

    def arrive(self, count: int) -> None:
        """Count arrivals."""
        assert 0 < count <= self.missing, "more arrivals than a phase has"
        self.missing -= count
        if not self.missing:
            self.missing, self.phase = self.count, self.phase + 1

    def wait(self, parity: int) -> None:
        """Wait until the phase of this parity has ended."""
        here = _here()
        here.is_ready = lambda: self.phase % 2 != parity % 2
        if not here.is_ready():
            here.pass_on()
        here.is_ready = lambda: True


class Barriers(list[Barrier]):
    """Several of them."""

    def index(self, stage: Any) -> Barrier:  # type: ignore[override]
        """Return one."""
        return self[int(stage)]


class Product:
    """A matrix product under way; its operands are read when it is waited for."""

    def __init__(self, left: Any, right: Any, acc: Any, *, use_acc: bool) -> None:
        self.left, self.right, self.acc, self.use_acc = left, right, acc, use_acc
        self.value: Tensor | None = None

    def compute(self) -> None:
        """Read both operands."""
        left, right = (x.data.float() if isinstance(x, Shared) else x.float() for x in (self.left, self.right))
        acc = _finished(self.acc) if self.use_acc else torch.zeros(left.shape[0], right.shape[1])
        self.value = acc + left @ right


def _finished(x: Any) -> Tensor:
    if isinstance(x, Product):
        assert x.value is not None, "a product is used before it was waited for"
        return x.value
    assert isinstance(x, Tensor)
    return x


_HERE = threading.local()


def _here() -> Partition:
    found: Partition = _HERE.partition
    return found


def _take_turns() -> None:
    # before the warps are partitioned there is no current partition
    if hasattr(_HERE, "partition"):
        _here().take_turns()


def _multiply(left: Any, right: Any, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    product = Product(left, right, acc, use_acc=use_acc)
    _here().products.append(product)
    return product


def _wait_for_products(left_over: int, deps: list[Any]) -> Any:
    products = _here().products
    if len(products) > left_over:
        _take_turns()
    while len(products) > left_over:
        products.pop(0).compute()
    found = tuple(x if isinstance(x, Product) and x.value is None else _finished(x) for x in deps)
    return found if len(found) > 1 else found[0]


def _copy(smem: Shared, ptr: Pointer, mask: Any = None) -> None:
    if hasattr(_HERE, "partition"):
        _here().copies[-1].append((smem, ptr, mask))
    else:
        # before the warps are partitioned
        smem.store(_loaded(ptr, mask, 0))


def _close_group() -> None:
    # before the warps are partitioned, copies land at once
    if hasattr(_HERE, "partition"):
        _here().copies.append([])


def _wait_for_groups(left_over: int) -> None:
    if hasattr(_HERE, "partition"):
        closed = _here().copies[:-1]
        _land(closed[: max(0, len(closed) - left_over)])


def _land(groups: list[list[tuple[Shared, Pointer, Any]]]) -> None:
    for copies in groups:
        while copies:
            smem, ptr, mask = copies.pop(0)
            smem.store(_loaded(ptr, mask, 0))


def _release(barrier: Barrier, *, count: int, pred: Any = True) -> None:
    if pred:
        barrier.arrive(count)
        # the producer warps go on: a stage that is freed too soon is overwritten
        _here().pass_on()


def _arrive_landed(barrier: Barrier, *, increment_count: bool) -> None:
    assert not increment_count
    _land(_here().copies)
    # all 128 threads of the producer warps
    barrier.arrive(128)


class Layout:
    """Stands for any layout."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def get_default_for(cls, *_: Any) -> "Layout":
        """Return one."""
        return cls()


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if dtype == torch.int64:
        # a program that allocates again, after its warps have joined, gets the same addresses
        assert not any(barrier.count for barrier in _USED), "initialised twice"
        _ALLOCATED.extend(found := Barriers(Barrier() for _ in range(shape[0])))
        return found
    return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else 2**30, dtype=dtype))


def _specialize(work: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    _PARTED.append(_PROGRAM["id"])
    _USED.extend(_ALLOCATED)
    _ALLOCATED.clear()
    partitions: list[Partition] = []
    lots = random.Random(0)
    partitions += [Partition(partitions, lots, *each) for each in work]
    partitions[0].start()
    for partition in partitions:
        partition.thread.join()
    errors = [partition.error for partition in partitions if partition.error is not None]
    if errors:
        # a partition that failed leaves the others waiting
        raise next((error for error in errors if not isinstance(error, DeadlockError)), errors[0])


def _check(condition: Any) -> None:
    assert condition


def _store(ptr: Pointer, values: Any, mask: Any = None) -> None:
    index = _tensor(ptr.offset).long()
    values = _tensor(values).expand(index.shape).to(ptr.flat.dtype)
    mask = torch.ones_like(index, dtype=torch.bool) if mask is None else _tensor(mask).expand(index.shape)
    ptr.flat[index[mask]] = values[mask]


def _load(ptr: Pointer, mask: Any = None, other: Any = None) -> Tensor:
    poison = float("nan") if ptr.flat.dtype.is_floating_point else 2**30
    return _loaded(ptr, mask, poison if other is None else other)


_PROGRAM: dict[str, tuple[int, int, int]] = {}
_ALLOCATED: list[Barrier] = []
_USED: list[Barrier] = []
"""The barriers of the program: those of the next partition of its warps, and those of earlier ones."""
_PARTED: list[tuple[int, int, int]] = []
"""The programs of a launch that have reached the partition of their warps, each time."""

LANGUAGE = SimpleNamespace(
    int32=torch.int32, uint32=torch.int64, int64=torch.int64, float32=torch.float32, float16=torch.float16, constexpr=lambda x: x,
    program_id=lambda axis: torch.tensor(_PROGRAM["id"][axis]), num_programs=lambda axis: torch.tensor(_PROGRAM["grid"][axis]),
    to_tensor=_tensor,
    arange=lambda start, end, layout=None: torch.arange(start, end), zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype), zeros_like=torch.zeros_like, abs=torch.abs,
    where=lambda condition, x, y: torch.where(_tensor(condition), _tensor(x), _tensor(y)),
    minimum=lambda x, y, propagate_nan=None: torch.minimum(_tensor(x), _tensor(y)), PropagateNan=SimpleNamespace(ALL=None),
    maximum=lambda x, y: torch.maximum(_tensor(x), _tensor(y)),
    join=lambda x, y: torch.stack([x, y], -1), split=lambda x: x.unbind(-1),
    gather=lambda x, index, axis: x.gather(axis, index.long()),
    max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), exp2=torch.exp2, log2=torch.log2,
    fma=lambda x, y, z: _product_plus(y, x, z),
    cdiv=lambda x, y: (x + y - 1) // y, static_range=range, static_assert=_check, convert_layout=lambda x, layout: x, load=_load, store=_store,
    allocate_shared_memory=_allocate, warp_specialize=_specialize, NVMMADistributedLayout=Layout, DotOperandLayout=Layout,
    SliceLayout=Layout, BlockedLayout=Layout, DistributedLinearLayout=Layout, NVMMASharedLayout=Layout, SwizzledSharedLayout=Layout,
)  # fmt: skip
STAND_INS: dict[str, Any] = {
    "gl": LANGUAGE,
    "tl": LANGUAGE,
    "barrier": lambda: None,
    "fence_async_shared": lambda: None,
    "layout_of": lambda x: None,
    "bits_of": lambda x: x.view(torch.int32),
    "float_of": lambda bits: bits.view(torch.float32),
    "reciprocal": torch.reciprocal,
    "opaque": lambda x: x,
    "power_of_two": lambda exponent: torch.exp2(exponent.float()),
    # of a product's tile (queries, 8, columns), row r of the eight lies in the lanes 4 r to 4 r + 3
    "exchange_lanes": lambda x, distance: x[:, torch.arange(8) ^ distance // 4],
    "warpgroup_mma": _multiply,
    "warpgroup_mma_init": lambda acc: acc,
    "warpgroup_mma_wait": _wait_for_products,
    "mbarrier": SimpleNamespace(
        MBarrierLayout=Layout,
        init=lambda barrier, count: barrier.init(count),
        invalidate=lambda barrier: barrier.invalidate(),
        wait=lambda barrier, phase, pred=True: barrier.wait(int(phase)) if pred else None,
        arrive=_release,
    ),
    "async_copy": SimpleNamespace(
        async_copy_global_to_shared=_copy, mbarrier_arrive=_arrive_landed, commit_group=_close_group, wait_group=_wait_for_groups
    ),
}


class Simulated:
    """A kernel that runs here: `Simulated(kernel)[grid](*arguments, **constants)`."""

    def __init__(self, kernel: Any) -> None:
        self.body = _plain(kernel.fn, {})
        self.num_launches = 0
        self.arguments: tuple[Any, ...] = ()
        self.constants: dict[str, Any] = {}
        """The last launch's."""
        self.launches: list[tuple[dict[str, Any], int, int]] = []
        """Of every launch: the constants, the number of programs, and how often one of them reached the partition of its warps."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self._launch(grid, arguments, constants)

    def both(self, grids: tuple[tuple[int, ...], tuple[int, ...]], flag: str) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            for value, grid in zip((False, True), grids, strict=True):
                self._launch(grid, arguments, {flag: value, **constants})

        return launch

    def _launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.num_launches += 1
        self.arguments, self.constants = arguments, constants
        _PARTED.clear()
        sizes = (*grid, 1, 1)[:3]
        placed = [_argument(x) for x in arguments]
        for option in ("num_warps", "maxnreg"):
            constants.pop(option)
        for program in range(math.prod(sizes)):
            row, column = program % sizes[0], program // sizes[0]
            _PROGRAM.update(grid=sizes, id=(row, column % sizes[1], column // sizes[1]))
            _ALLOCATED.clear()
            _USED.clear()
            self.body(*placed, **constants)
        self.launches.append((constants, math.prod(sizes), len(_PARTED)))


def _argument(x: Any) -> Any:
    if isinstance(x, float):
        # float32: its products with tensors are exact in float64
        return torch.tensor(x).item()
    return Pointer.to(x) if isinstance(x, Tensor) else torch.tensor(x) if isinstance(x, int) else x


def _plain(function: FunctionType, seen: dict[int, dict[str, Any]]) -> Callable[..., Any]:
    """Return `function`, and every function that it calls, with stand-ins for the language."""
    names = function.__globals__
    if id(names) not in seen:
        namespace = seen[id(names)] = dict(names)
        for name, value in names.items():
            if name in STAND_INS:
                namespace[name] = STAND_INS[name]
            elif isinstance(getattr(value, "fn", None), FunctionType):
                namespace[name] = _plain(value.fn, seen)
            elif type(value).__name__ == "constexpr":
                namespace[name] = value.value
        namespace["_product_plus"] = _product_plus
    return FunctionType(_fused_code(function), seen[id(names)], function.__name__, function.__defaults__)


_CODES: dict[Any, Any] = {}


def _fused_code(function: FunctionType) -> Any:
    """Return the code of `function`, with `_product_plus` instead of a product and the sum or difference that it stands in."""
    if function.__code__ not in _CODES:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        tree.body[0].decorator_list = []  # type: ignore[attr-defined]
        ast.increment_lineno(tree, first - 1)
        module = compile(ast.fix_missing_locations(_Fuse().visit(tree)), function.__code__.co_filename, "exec")
        _CODES[function.__code__] = next(x for x in module.co_consts if getattr(x, "co_name", None) == function.__name__)
    return _CODES[function.__code__]


class _Fuse(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        for product, other, is_left in ((node.left, node.right, True), (node.right, node.left, False)):
            if isinstance(node.op, ast.Add | ast.Sub) and isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult):
                factor, addend = product.left, other
                if isinstance(node.op, ast.Sub):
                    factor, addend = (factor, ast.UnaryOp(ast.USub(), addend)) if is_left else (ast.UnaryOp(ast.USub(), factor), addend)
                call = ast.Call(ast.Name("_product_plus", ast.Load()), [factor, product.right, addend], [])
                return ast.copy_location(call, node)
        return node


def _product_plus(x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, of float32 tensors rounded once; float64 holds the product exactly."""
    tensors = [each for each in (x, y, z) if isinstance(each, Tensor)]
    if tensors and all(each.dtype == torch.float32 for each in tensors) and not isinstance(z, Pointer):
        x, y, z = (each.double() if isinstance(each, Tensor) else each for each in (x, y, z))
        return (x * y + z).float()
    return z + x * y
