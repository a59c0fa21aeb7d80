"""Where the kernels run, where they should, and on what tiles. Plain numbers: imports no triton, asks no GPU.

The design target is compute capability 8.0 (A100). Newer majors are eligible as well: the kernels use nothing that is
tied to one architecture, and a capability that the tables do not know gets the tiles of the smallest shared memory.
"""

import os
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

import torch
from attrs import frozen

from nsa_core import BranchRequest, Capability, Operation, Reason

CAPABILITY = Capability(
    device_types=("cuda", "cpu"),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    max_head_dim=256,
)
OLDEST = (8, 0)
SELECTIONS = (Operation.SELECT, Operation.SLC, Operation.NSA)
"""The operations whose kernels want the shared memory of the design target."""

KIB = 1024
SHARED_MEMORY_BYTES = {
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 7): 163 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (10, 1): 227 * KIB,
    (10, 3): 227 * KIB,
    (11, 0): 227 * KIB,
    (12, 0): 99 * KIB,
    (12, 1): 99 * KIB,
}
"""What one program may use, by compute capability (CUDA programming guide)."""
SMALLEST = 99 * KIB

NOT_INSTALLED = "triton is not installed (the kernels are written in it); pip install triton"
NOT_INTERPRETING = "device cpu without Triton's interpreter (there is no compiler for it); start Python with TRITON_INTERPRET=1"
TRUE_WORDS = ("1", "true", "yes", "on", "y")
"""Values of a variable that Triton reads as true, in upper or lower case."""
FOR_TESTS = "device cpu runs in Triton's interpreter only (TRITON_INTERPRET=1), which is for tests and thousands of times slower"


def shared_memory_bytes(capability: tuple[int, int]) -> int:
    """Return what one program may use on a GPU of `capability`; unknown ones count as the smallest."""
    return SHARED_MEMORY_BYTES.get(capability, SMALLEST)


def reasons_against(request: BranchRequest) -> tuple[Reason, ...]:
    """Return every reason against the kernels for `request`, at once."""
    reasons = CAPABILITY.reasons_against(request)
    if find_spec("triton") is None:
        reasons += (Reason.incapable(NOT_INSTALLED),)
    if request.device_type == "cuda":
        reasons += _reasons_against_gpu(request)
    elif request.device_type == "cpu":
        reasons += (Reason.policy(FOR_TESTS) if interprets() else Reason.incapable(NOT_INTERPRETING),)
    return reasons


def _reasons_against_gpu(request: BranchRequest) -> tuple[Reason, ...]:
    capability = request.compute_capability
    if capability is None or capability < OLDEST:
        have = "none" if capability is None else "{}.{}".format(*capability)
        return (Reason.incapable(f"compute capability {have} (needs 8.0 or newer)"),)
    have_bytes, target_bytes = shared_memory_bytes(capability), SHARED_MEMORY_BYTES[OLDEST]
    if request.operation in SELECTIONS and have_bytes < target_bytes:
        return (
            Reason.policy(
                "compute capability {}.{} has {} KB of shared memory where selection is made for {} KB (ADR 0009)".format(
                    *capability, have_bytes // KIB, target_bytes // KIB
                )
            ),
        )
    return ()


def preference(request: BranchRequest) -> int:
    """Return how much the kernels are wanted: above the reference (0) on a GPU, below it elsewhere."""
    return 100 if request.device_type == "cuda" else -100


def interprets() -> bool:
    """Return True where Triton runs kernels in its interpreter, or will once it is loaded.

    Triton decides by the same variable when kernels are defined. Asking it would load a compiler, seconds long.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in TRUE_WORDS  # noqa: TID251 - Triton's own switch, which nothing else shows


@frozen
class Tiles:
    """How one kernel cuts its work."""

    block_rows: int
    """Rows of q in a tile: queries times the heads of their group."""
    block_keys: int
    """Keys in a tile: tokens, or compressed blocks."""
    num_warps: int
    num_stages: int
    """Tiles in flight of what the kernel's loop loads."""


KINDS = ("interval_forward", "interval_dq", "interval_dkdv", "scores", "selected_forward", "selected_backward")
Table = dict[str, dict[int, Tiles]]
"""Kind -> largest width -> tiles. The width is D_k + D_v, for scores D_k alone, in padded elements."""

SMALLEST_PART = 16
"""Narrowest operand of a matrix product."""

INTERPRETED = Tiles(16, 16, 4, 1)

# bf16 and fp16, by the shared memory of a program; the largest is for 9.0 alone, whose matrix units need least beside the tiles
HALF: dict[int, Table] = {
    # measured on an H200, at 8,192 to 32,768 tokens
    227 * KIB: {
        "interval_forward": {256: Tiles(64, 64, 4, 3), 320: Tiles(64, 64, 4, 2), 512: Tiles(128, 64, 8, 2)},
        "interval_dq": {256: Tiles(64, 64, 4, 2), 320: Tiles(128, 64, 8, 3), 384: Tiles(64, 32, 4, 2), 512: Tiles(128, 32, 8, 2)},
        "interval_dkdv": {256: Tiles(32, 64, 4, 3), 384: Tiles(32, 128, 8, 3), 512: Tiles(64, 64, 8, 2)},
        "scores": {64: Tiles(64, 128, 4, 2), 192: Tiles(128, 64, 4, 2), 256: Tiles(64, 64, 4, 2)},
        "selected_forward": {512: Tiles(64, 64, 4, 1)},
        "selected_backward": {128: Tiles(64, 64, 4, 3), 256: Tiles(64, 64, 4, 1), 384: Tiles(128, 64, 8, 1), 512: Tiles(32, 64, 8, 1)},
    },
    163 * KIB: {
        "interval_forward": {320: Tiles(128, 64, 8, 3), 512: Tiles(128, 32, 8, 3)},
        "interval_dq": {320: Tiles(128, 64, 8, 2), 512: Tiles(64, 64, 8, 2)},
        "interval_dkdv": {256: Tiles(64, 128, 8, 2), 320: Tiles(64, 64, 8, 2), 512: Tiles(32, 64, 8, 2)},
        "scores": {256: Tiles(128, 64, 8, 3)},
        "selected_forward": {512: Tiles(128, 64, 8, 2)},
        "selected_backward": {320: Tiles(64, 64, 8, 2), 512: Tiles(32, 64, 8, 2)},
    },
    99 * KIB: {
        "interval_forward": {256: Tiles(128, 64, 8, 2), 320: Tiles(64, 64, 4, 2), 512: Tiles(64, 32, 4, 2)},
        "interval_dq": {320: Tiles(64, 64, 4, 2), 512: Tiles(32, 32, 4, 2)},
        "interval_dkdv": {256: Tiles(64, 64, 4, 2), 320: Tiles(32, 64, 4, 2), 512: Tiles(32, 32, 4, 2)},
        "scores": {192: Tiles(128, 64, 8, 2), 256: Tiles(64, 64, 4, 2)},
        "selected_forward": {320: Tiles(64, 64, 4, 2), 512: Tiles(32, 64, 4, 2)},
        "selected_backward": {128: Tiles(64, 64, 4, 2), 256: Tiles(32, 64, 4, 2), 320: Tiles(64, 32, 4, 2), 512: Tiles(32, 32, 4, 2)},
    },
}

# float32 has no tensor cores at full precision and is there to be exact: one table, within the smallest shared memory
SINGLE: Table = {
    "interval_forward": {128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 2), 512: Tiles(16, 16, 4, 2)},
    "interval_dq": {128: Tiles(32, 32, 4, 2), 256: Tiles(32, 32, 4, 1), 512: Tiles(16, 16, 4, 1)},
    "interval_dkdv": {128: Tiles(32, 32, 4, 2), 256: Tiles(32, 32, 4, 1), 512: Tiles(16, 16, 4, 1)},
    "scores": {64: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 2)},
    "selected_forward": {256: Tiles(32, 32, 4, 2), 512: Tiles(16, 16, 4, 1)},
    "selected_backward": {256: Tiles(32, 32, 4, 1), 512: Tiles(16, 16, 4, 1)},
}


def tiles(kind: str, capability: tuple[int, int] | None, head_dim_qk: int, head_dim_v: int, itemsize: int) -> Tiles:
    """Return the tiles of a kernel of `kind`; `capability` None is the interpreter. `itemsize` is that of q, k and v, in bytes."""
    return INTERPRETED if capability is None else _tiles(kind, capability, head_dim_qk, head_dim_v, itemsize)


@cache
def _tiles(kind: str, capability: tuple[int, int], head_dim_qk: int, head_dim_v: int, itemsize: int) -> Tiles:
    table = _half_table(capability) if itemsize == 2 else SINGLE
    width = padded(head_dim_qk) + (0 if kind == "scores" else padded(head_dim_v))
    return next(found for largest, found in table[kind].items() if width <= largest)


def _half_table(capability: tuple[int, int]) -> Table:
    """Return the table of `capability`: 9.0's own, else that of the design target or, with less shared memory, the smallest."""
    available = shared_memory_bytes(capability)
    return HALF[available if capability[0] == 9 else min(available, SHARED_MEMORY_BYTES[OLDEST])]


class Parts(NamedTuple):
    """Columns as one or two powers of two: 192 are 128 + 64, not 256."""

    first: int
    second: int


@frozen
class PipelineConfig:
    """The pipeline of a kernel of `hopper`: a producer warpgroup loads tiles into a ring buffer, one to four consumer warpgroups compute."""

    block_rows: int
    """Rows of q in a tile: queries times the heads of their group."""
    block_keys: int
    num_stages: int
    """Tiles in the ring buffer."""
    loader_registers: int
    """Registers of a producer thread; consumer threads share what is left."""
    num_parts: int = 2
    """Of a tile's rows, or of its keys for dK and dV, each computed by four warps; of the selected kernels, the wide backward has two."""
    num_programs: int = 2
    """To a multiprocessor; read for the selected kernels alone, for of the others one program fills it."""


# measured on an H200, at 32,768 tokens; kind -> columns of q's tiles -> pipeline
PIPELINES: dict[str, dict[int, PipelineConfig]] = {
    "compressed_forward": {
        64: PipelineConfig(192, 128, 4, 32, num_parts=3),
        128: PipelineConfig(192, 64, 3, 32, num_parts=3),
        192: PipelineConfig(128, 64, 3, 40),
    },
    "window_forward": {
        64: PipelineConfig(128, 128, 4, 40),
        128: PipelineConfig(192, 64, 3, 32, num_parts=3),
        192: PipelineConfig(128, 64, 3, 40),
    },
    "shared_forward": {
        64: PipelineConfig(192, 64, 4, 32, num_parts=3),
        128: PipelineConfig(192, 64, 3, 32, num_parts=3),
        192: PipelineConfig(128, 64, 3, 40),
    },
    "interval_dq": {
        64: PipelineConfig(192, 64, 3, 32, num_parts=3),
        128: PipelineConfig(192, 64, 3, 32, num_parts=3),
        192: PipelineConfig(128, 64, 3, 40),
    },
    "interval_dkdv": {64: PipelineConfig(64, 128, 8, 40), 128: PipelineConfig(64, 128, 4, 24), 192: PipelineConfig(32, 128, 6, 40)},
    "scores": {128: PipelineConfig(256, 64, 4, 32, num_parts=4), 192: PipelineConfig(256, 64, 3, 32, num_parts=4)},
    "selected_forward": {
        64: PipelineConfig(64, 64, 4, 40, num_programs=3),
        128: PipelineConfig(64, 64, 4, 56),
        192: PipelineConfig(64, 64, 2, 56),
    },
    "selected_backward": {
        64: PipelineConfig(64, 64, 3, 40),
        128: PipelineConfig(32, 64, 4, 40),
        192: PipelineConfig(64, 64, 3, 56, num_programs=1),
    },
}
# values in two parts as well as q
WIDE_PIPELINES: dict[str, PipelineConfig] = {
    "compressed_forward": PipelineConfig(128, 64, 2, 40),
    "window_forward": PipelineConfig(128, 64, 2, 40),
    "shared_forward": PipelineConfig(128, 64, 2, 40),
    "interval_dq": PipelineConfig(128, 64, 2, 40),
    "selected_forward": PipelineConfig(64, 64, 2, 56),
}
PIPELINE_CAPABILITY = (9, 0)
WIDEST_PIPELINE = 192
COPIED_BYTES = 16
"""What one instruction of the loading warps copies, at most: rows start there."""
WIDEST_EXACT = 32
"""Head dimensions up to this keep outputs in float32 for the backward pass, and partial results too.

dO . O over few columns does not average the rounding of O, and at these widths float32 takes what 64 columns of bfloat16 do.
"""


def pipeline(kind: str, capability: tuple[int, int] | None, head_dim_qk: int, head_dim_v: int, itemsize: int) -> PipelineConfig | None:
    """Return the pipeline of a kernel of `kind` that is written for `capability`; None where the portable one serves.

    Warns once where only the installed Triton keeps it off.
    """
    found = _pipeline(kind, head_dim_qk, head_dim_v) if capability == PIPELINE_CAPABILITY and itemsize == 2 else None
    if found is not None and not has_gluon():
        _warn_without_gluon()
        return None
    return found


@cache
def _pipeline(kind: str, head_dim_qk: int, head_dim_v: int) -> PipelineConfig | None:
    # scores have no values
    head_dims = (head_dim_qk,) if kind == "scores" else (head_dim_qk, head_dim_v)
    # a row's columns, of two bytes each, are whole copies; results of narrower heads are in float32, which these kernels do not write
    if any(2 * x % COPIED_BYTES or not WIDEST_EXACT < x <= WIDEST_PIPELINE for x in head_dims):
        return None
    parts = [pipeline_parts(x) for x in head_dims]
    # results take the place of tiles of q
    if parts[-1].first > parts[0].first or parts[-1].second > parts[0].second:
        return None
    return WIDE_PIPELINES.get(kind) if len(parts) == 2 and parts[1].second else PIPELINES[kind].get(sum(parts[0]))


@cache
def pipeline_parts(head_dim: int) -> Parts:
    """Return the columns of the tiles that hold `head_dim`, at most `WIDEST_PIPELINE`, in one part or two: 64, 128, or 128 + 64."""
    return Parts(64 if head_dim <= 64 else 128, 64 if head_dim > 128 else 0)


GLUON_MODULE = "triton.experimental.gluon.language.nvidia.hopper"
GLUON_VERSIONS = ("3.6.", "3.7.")
"""Triton's versions whose Gluon, an experimental part, the kernels of `hopper` were compiled with and ran on."""


@cache
def has_gluon() -> bool:
    """Return True where the installed triton compiles the kernels of `hopper`."""
    installed = _installed()
    # builds under another name, such as nightly ones, are no version that is known
    return installed is not None and installed.startswith(GLUON_VERSIONS) and find_spec(GLUON_MODULE) is not None


def _installed() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def notes_on(request: BranchRequest) -> tuple[str, ...]:
    """Return notes on how the kernels serve `request`: why those for compute capability 9.0 are off, where they are."""
    has_kernels = request.operation is not Operation.CHOOSE
    is_theirs = (
        has_kernels and request.device_type == "cuda" and request.compute_capability == PIPELINE_CAPABILITY and request.dtype.itemsize == 2
    )
    has_pipeline = is_theirs and any(_pipeline(kind, request.head_dim_qk, request.head_dim_v) for kind in PIPELINES)
    return (without_gluon(),) if has_pipeline and not has_gluon() else ()


def without_gluon() -> str:
    """Return why the kernels for compute capability 9.0 are off, and which versions of Triton have them."""
    known = [version.removesuffix(".") for version in GLUON_VERSIONS]
    return (
        f"the kernels for compute capability 9.0 are off: Triton {_installed()} is installed, and they need {' or '.join(known)}, because "
        f"Gluon differs between versions; the portable kernels run in their place, up to a third slower. Install triton=={known[-1]}.* and "
        f"a torch that works with it to have them"
    )


@cache
def _warn_without_gluon() -> None:
    warnings.warn(without_gluon(), stacklevel=2)


@cache
def parts_of(head_dim: int) -> Parts:
    """Return the parts that cover `head_dim`, at least 16 each; a second part of 0 is absent."""
    first = 1 << (max(head_dim, SMALLEST_PART).bit_length() - 1)
    rest = head_dim - first
    return Parts(first, 0 if rest <= 0 else max(1 << (rest - 1).bit_length(), SMALLEST_PART))


def padded(head_dim: int) -> int:
    """Return the columns that a tile holds of `head_dim`."""
    return sum(parts_of(head_dim))


def shared_memory_estimate(kind: str, tile: Tiles, capability: tuple[int, int], head_dim_qk: int, head_dim_v: int, itemsize: int) -> int:
    """Return the bytes of shared memory that a kernel of `kind` takes: what stays, what its loop loads, what its threads exchange."""
    width_qk, width_v = padded(head_dim_qk), padded(head_dim_v)
    both = width_qk + width_v
    rows, keys = tile.block_rows, tile.block_keys
    # the matrix units of 9.x to 11.x read shared memory while the next tile arrives; the others read registers
    buffers = tile.num_stages if capability[0] in (9, 10, 11) else max(tile.num_stages - 1, 1)
    elements = {
        # q stays; k and v come and go
        "interval_forward": rows * width_qk + buffers * keys * both + rows * keys,
        # q and dO stay
        "interval_dq": rows * both + buffers * keys * both + rows * keys,
        # k and v stay; weights and their gradients are exchanged
        "interval_dkdv": keys * both + buffers * rows * both + 2 * rows * keys,
        "scores": rows * width_qk + buffers * keys * width_qk + rows * keys // 8,
        # a block's k and v stay; rows of q come and go
        "selected_forward": keys * both + buffers * rows * width_qk + 2 * rows * keys,
        # k is held a second time, transposed
        "selected_backward": keys * (both + width_qk) + buffers * rows * both + 2 * rows * keys,
    }
    return itemsize * elements[kind] + 16 * rows
