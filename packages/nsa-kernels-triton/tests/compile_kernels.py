"""Compile every kernel that operations launch, for a GPU that may be absent: `compile_kernels.py 8.0 192 128 slc,nsa [CASE ...]`.

The operations run as they would, forward and backward, on CPU tensors; each launch is compiled for the target with its
real arguments and the target's tiles, and not run. Prints one JSON object a kernel: its name, its shared memory in
bytes, its case, and the reductions in it that Triton 3.6 gets wrong. Needs a process without TRITON_INTERPRET.
"""

import ast
import importlib
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nsa_core import BlockGeometry, Operation
from nsa_core.backends.base import Keys, NewBlocks, NewRows, Queries
from nsa_core.blocks import num_compressed_blocks, num_selection_blocks
from nsa_core.compression import build_compressor
from nsa_core.rope import RotaryEmbedding
from nsa_kernels_triton import device
from nsa_kernels_triton.plugin import TritonBackend

LENGTH = 1100
"""Tokens of a sequence: more blocks than a query chooses, and a prime number."""
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "packed": {"layout": "packed"},
    "cached": {"layout": "cached"},
    "group of 16": {"num_heads": 16, "num_kv_heads": 1},
    "cached group of 16": {"layout": "cached", "num_heads": 16, "num_kv_heads": 1},
    "group of 1": {"num_heads": 2, "num_kv_heads": 2},
    "other geometry": {"geometry": BlockGeometry(16, 16, 32, 33, 1, 1, 100)},
    "float32": {"dtype": torch.float32},
    "float16": {"dtype": torch.float16, "num_heads": 16, "num_kv_heads": 1},
    # more heads, and more strides of a block, than a tile holds
    "group of 256": {"num_heads": 256, "num_kv_heads": 1},
    "large blocks": {"geometry": BlockGeometry(32, 2, 512, 2, 0, 1, 512)},
    # an argument of 1 is compiled in as a constant
    "one token": {"length": 1},
    "one tile": {"length": 1, "num_heads": 16, "num_kv_heads": 1},
    "one packed token": {"length": 1, "layout": "packed"},
    "one cached token": {"length": 1, "layout": "cached"},
    # a few rows over a whole cache, without gradients
    "step": {"layout": "cached", "num_rows": 1},
    "step over a ring": {"layout": "cached", "num_rows": 1, "ring": True},
    "step of a group of 16": {"layout": "cached", "num_rows": 5, "num_heads": 16, "num_kv_heads": 1},
    "long step": {"layout": "cached", "num_rows": 1, "num_heads": 32, "num_kv_heads": 8, "length": 8000},
    "step in other forms": {
        "layout": "cached",
        "num_rows": 1,
        "num_heads": 32,
        "num_kv_heads": 2,
        "length": 9000,
        "forms": {"launch.MOST_EARLY_PAIRS": 0, "decode.op.LEAST_CHOOSER_BLOCKS": 32},
    },
    "step of small blocks": {"layout": "cached", "num_rows": 1, "geometry": BlockGeometry(4, 2, 8, 4, 1, 2, 20), "dtype": torch.float32},
}


def cases_of(names: Sequence[str]) -> Sequence[str]:
    """Return the cases that `names` name: none for all, "2/3" for the second third."""
    if len(names) != 1 or "/" not in names[0]:
        return names or tuple(CASES)
    part, count = map(int, names[0].split("/"))
    return tuple(CASES)[(part - 1) * len(CASES) // count : part * len(CASES) // count]


def wrong_reductions(ttgir: str) -> tuple[str, ...]:
    """Return the tensors that are reduced over lanes among which others hold copies: Triton 3.6 adds some twice and leaves others out."""
    lanes = {
        name: ast.literal_eval(bases)
        for name, bases in re.findall(r"^(#\w+) = #ttg\.linear<\{.*?lane = (\[.*?\]), warp", ttgir, re.MULTILINE)
    }
    reductions = re.findall(r'"tt\.reduce"\([^)]*\) <\{axis = (\d+).*?\}\) : \(tensor<(\w+), ([^>]*)>', ttgir, re.DOTALL)

    def has_gap(axis: int, bases: list[list[int]]) -> bool:
        along = [number for number, base in enumerate(bases) if base[axis]]
        return bool(along) and not all(any(base) for base in bases[along[0] : along[-1]])

    return tuple(f"{shape} over axis {axis}" for axis, shape, layout in reductions if layout in lanes and has_gap(int(axis), lanes[layout]))


class Target:
    """A Triton driver for an absent GPU."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Stands in for a launch: compiles the kernel and notes its shared memory."""

    def __init__(self) -> None:
        self.found: set[tuple[str, int, tuple[str, ...]]] = set()

    def install(self) -> None:
        """Replace every launch in this process."""
        launch = JITFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
            # names of kernels for one capability have a prefix: "hopper forward forward_kernel"
            *_, folder, module = kernel.fn.__module__.split(".")
            prefix = f"hopper {module.removesuffix('_kernels')} " if folder == "hopper" else ""
            self.found.add((prefix + kernel.fn.__name__, compiled.metadata.shared, wrong_reductions(compiled.asm["ttgir"])))
            return compiled

        JITFunction.run = run


def run_case(
    operations: list[str], head_dim_qk: int, head_dim_v: int, layout: str = "dense", dtype: torch.dtype = torch.bfloat16, **sizes: Any
) -> None:
    """Run `operations` without gradients, and forward and backward, in one case."""
    num_heads, num_kv_heads, length = sizes.get("num_heads", 6), sizes.get("num_kv_heads", 2), sizes.get("length", LENGTH)
    num_rows = sizes.get("num_rows", length)
    geometry = sizes.get("geometry", BlockGeometry())
    bounds = block_bounds = start = count = None
    num_blocks = num_compressed_blocks(length, geometry)
    if layout == "packed":
        bounds, block_bounds = (torch.tensor([0, end] + [end] * (length > 1), dtype=torch.int32) for end in (length, num_blocks))
    elif layout == "cached":
        start, count = torch.zeros(1, dtype=torch.int32), torch.full((1,), num_rows, dtype=torch.int32)

    def normal(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    def pair(rows: int, bounds: Tensor | None) -> Keys:
        return Keys(normal(1, rows, num_kv_heads, head_dim_qk), normal(1, rows, num_kv_heads, head_dim_v), rows, bounds)

    q = normal(1, num_rows, num_heads, head_dim_qk)
    queries = Queries(q, num_rows, bounds, start, count, follows_append=start is not None)
    cmp, slc, win = pair(num_blocks, block_bounds), pair(length, bounds), pair(length, bounds)._replace(ring=sizes.get("ring", False))
    indices = torch.zeros(1, num_rows, num_kv_heads, geometry.num_selected_blocks, dtype=torch.int32)
    others: dict[Operation, tuple[Any, ...]] = {
        Operation.CMP: (cmp,),
        # any dtype of lse is taken
        Operation.SELECT: (cmp, torch.zeros(q.shape[:3], dtype=torch.float64)),
        Operation.SLC: (slc, indices),
        Operation.WIN: (win,),
        Operation.NSA: (cmp, slc, win, normal(1, num_rows, num_heads, 3)),
    }
    for operation in map(Operation, operations):
        backend = TritonBackend(operation=operation)
        if operation is Operation.CHOOSE:
            scores = torch.zeros(length, num_kv_heads, num_selection_blocks(length, geometry))
            backend(scores, None, torch.arange(length), num_kv_heads, geometry=geometry)
            continue
        with torch.no_grad():
            backend(queries, *others[operation], geometry=geometry, scale=0.1)
        if "num_rows" in sizes:
            continue
        found = backend(queries, *others[operation], geometry=geometry, scale=0.1)
        if operation in (Operation.CMP, Operation.SLC, Operation.WIN):
            (found.out.sum() + found.lse.sum()).backward()
        if operation is Operation.NSA:
            found.out.sum().backward()
            run_of_two(backend, geometry, queries, *others[operation])


def run_of_two(backend: TritonBackend, geometry: BlockGeometry, queries: Queries, cmp: Keys, *others: Any) -> None:
    """Run the sum of two branches forward and backward, if the case has D_k = D_v."""
    if cmp.k.shape == cmp.v.shape:
        only = cmp._replace(v=cmp.k, only_chooses=True)
        backend(queries, only, *others, geometry=geometry, scale=0.1).out.sum().backward()


def run_append(
    head_dims: tuple[int, int],
    num_rows: int,
    num_kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    geometry: BlockGeometry | None = None,
    **_: Any,
) -> None:
    """Write a step into rows, into pages, and into FP8 numbers where the target converts to them, with every phi."""
    geometry = BlockGeometry() if geometry is None else geometry
    backend, size, stride = TritonBackend(operation=Operation.APPEND), geometry.selection_block_size, geometry.compression_stride
    start, table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)

    def pair(pages: int, rows: int, dtype: torch.dtype = dtype) -> list[Tensor]:
        return [torch.zeros(pages, rows, num_kv_heads, width, dtype=dtype) for width in head_dims]

    new = pair(1, num_rows)
    raw = NewRows(Keys(*pair(1, geometry.compression_block_size + 64), LENGTH, ring=True), *new)
    stores = [Keys(*pair(5, size), LENGTH, page_table=table)]
    if device.capability_of(start) >= (8, 9):
        scales = [torch.zeros(1, LENGTH, num_kv_heads) for _ in "kv"]
        stores.append(Keys(*pair(1, LENGTH, torch.float8_e4m3fn), LENGTH, ring=True, k_scale=scales[0], v_scale=scales[1]))
    for phi in ("mean", "conv", "mlp"):
        compress = [build_compressor(phi, num_kv_heads, width, geometry).to(dtype) for width in head_dims]
        blocks = NewBlocks(Keys(*pair(5, size // stride), LENGTH, page_table=table), raw, *compress, RotaryEmbedding(head_dims[0]))
        backend((raw, *(NewRows(store, *new) for store in stores)), blocks, start, start + 1, geometry=geometry)


def run_rotate(head_dim: int, num_rows: int, num_kv_heads: int = 2, dtype: torch.dtype = torch.bfloat16, **_: Any) -> None:
    """Rotate q alone, and with the keys of three branches."""
    backend, start, rope = TritonBackend(operation=Operation.ROTATE), torch.zeros(1, dtype=torch.int32), RotaryEmbedding(head_dim)
    q, k = (torch.zeros(1, num_rows, count, head_dim, dtype=dtype) for count in (2 * num_kv_heads, num_kv_heads))
    for heads in ((q,), (q, k, k, k)):
        backend(heads, start, rope)


def set_constants(forms: dict[str, Any]) -> dict[str, Any]:
    """Set the package's constants `module.NAME` of `forms`, and return those that were there."""
    kept = {}
    for path, value in forms.items():
        module, _, name = path.rpartition(".")
        found = importlib.import_module(f"nsa_kernels_triton.{module}")
        kept[path] = getattr(found, name)
        setattr(found, name, value)
    return kept


def main(capability: str, head_dim_qk: str, head_dim_v: str, operations: str, *names: str) -> None:
    """Compile the cases `names`, or all of them, and print what was compiled."""
    major, _, minor = capability.partition(".")
    target = (int(major), int(minor))
    driver.set_active(Target(target))
    device.capability_of = lambda x: target
    compiler = Compiler()
    compiler.install()
    for name in cases_of(names):
        chosen = operations.split(",")
        kept = set_constants(CASES[name].get("forms", {}))
        run_case(
            [each for each in chosen if each not in (Operation.APPEND, Operation.ROTATE)], int(head_dim_qk), int(head_dim_v), **CASES[name]
        )
        if Operation.APPEND in chosen and "num_rows" in CASES[name]:
            run_append((int(head_dim_qk), int(head_dim_v)), **CASES[name])
        if Operation.ROTATE in chosen and "num_rows" in CASES[name]:
            run_rotate(int(head_dim_qk), **CASES[name])
        for kernel, shared, wrong in sorted(compiler.found):
            print(json.dumps({"kernel": kernel, "shared": shared, "case": name, "wrong": wrong}))
        compiler.found.clear()
        set_constants(kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
