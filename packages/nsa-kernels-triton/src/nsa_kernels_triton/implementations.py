"""Choose the implementation of a kernel from one ordered table, and give reasons against the others. Uses plain numbers: imports no triton."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from nsa_core import BranchRequest, Operation
from nsa_kernels_triton import device, pipelines, tile_table
from nsa_kernels_triton.numerics import WIDEST_EXACT
from nsa_kernels_triton.pipelines import COPIED_BYTES, PIPELINE_CAPABILITY, WIDEST_PIPELINE, PipelineConfig, without_gluon
from nsa_kernels_triton.tile_table import Tiles

Config = PipelineConfig | Tiles
"""Tile sizes of a kernel; the type says to which implementation they belong."""

KINDS_OF: dict[Operation, tuple[str, ...]] = {
    Operation.CMP: ("compressed_forward", "interval_dq", "interval_dkdv"),
    Operation.WIN: ("window_forward", "interval_dq", "interval_dkdv"),
    Operation.SELECT: ("scores",),
    Operation.SLC: ("selected_forward", "selected_backward"),
}
"""The kernels of each operation that have several implementations, forward ones first."""
KINDS_OF[Operation.NSA] = tuple(dict.fromkeys(kind for kinds in KINDS_OF.values() for kind in kinds))
BACKWARD_KINDS = ("interval_dq", "interval_dkdv", "selected_backward")
PORTABLE_KINDS = {"compressed_forward": "interval_forward", "window_forward": "interval_forward"}
"""Rows of the tile table that several kinds share."""
HEADS = 16
"""Heads of a group, rounded up to a power of two, that the pipeline of the scores kernel supports."""
STRIDES = (2, 16)
"""Minimum and maximum strides of a selection block that this pipeline supports."""


class KernelRequest(NamedTuple):
    """The facts that decide which implementation of a kernel runs. No default value is a reason against one."""

    kind: str
    capability: tuple[int, int] | None
    """Compute capability; None stands for the interpreter."""
    head_dim_qk: int
    head_dim_v: int
    itemsize: int
    """Bytes of a number in q, k and v."""
    has_gluon: bool = True
    """True if the installed Triton compiles the kernels of `hopper`."""
    is_aligned: bool = True
    """True if every tensor starts at a multiple of 16 bytes."""
    has_dlse: bool = False
    """True if lse has a gradient."""
    is_cached: bool = False
    is_ring: bool = False
    """True if the key of position p is in row p % T."""
    heads_per_group: int = HEADS
    selection_block_size: int = 64
    strides: int = 4
    """Compression strides in a selection block."""


class Implementation(NamedTuple):
    """One way to run kernels."""

    name: str
    objections: Callable[[KernelRequest], list[str]]
    """Returns every reason against this implementation, as sentences."""
    config: Callable[[KernelRequest], Config]
    """Returns the tile sizes for a request without objections."""


def _against_hopper(x: KernelRequest) -> list[str]:
    have = "an interpreter" if x.capability is None else "compute capability {}.{}".format(*x.capability)
    pipeline = pipelines.pipeline(x.kind, x.head_dim_qk, x.head_dim_v)
    block_keys = x.selection_block_size if pipeline is None else pipeline.block_keys
    is_scores, is_shared = x.kind == "scores", x.kind == "shared_forward"
    objections = (
        (x.capability != PIPELINE_CAPABILITY, f"{have} (made for {PIPELINE_CAPABILITY[0]}.{PIPELINE_CAPABILITY[1]})"),
        (x.itemsize != 2, f"numbers of {x.itemsize} bytes (takes bfloat16 and float16)"),
        (
            pipeline is None,
            f"head dimensions {x.head_dim_qk} and {x.head_dim_v} (takes multiples of 8 from {WIDEST_EXACT + 8} to {WIDEST_PIPELINE}, "
            f"values in no more columns than q, and at most 128 for dK/dV and the selected backward pass; scores from 72)",
        ),
        (not x.is_aligned, f"a tensor that starts off {COPIED_BYTES} bytes (rows are copied in pieces of {COPIED_BYTES})"),
        (x.is_ring, "a ring of keys (its producer warps copy rows in order)"),
        (x.has_dlse and x.kind == "interval_dq", "a gradient of lse (its kernel reads none)"),
        (
            is_scores and not HEADS // 2 < x.heads_per_group <= HEADS,
            f"{x.heads_per_group} heads per group (takes {HEADS // 2 + 1} to {HEADS})",
        ),
        (
            is_scores and not STRIDES[0] // 2 < x.strides <= STRIDES[1],
            f"{x.strides} strides per selection block (takes {STRIDES[0]} to {STRIDES[1]})",
        ),
        (
            x.kind.startswith("selected") and x.selection_block_size % block_keys != 0,
            f"selection_block_size={x.selection_block_size} (takes multiples of {block_keys})",
        ),
        (is_shared and x.is_cached, "a cache (its rows begin with their sequence)"),
        (
            is_shared and x.selection_block_size != block_keys,
            f"selection_block_size={x.selection_block_size} (takes {block_keys})",
        ),
        (not x.has_gluon, without_gluon()),
    )
    return [message for stands, message in objections if stands]


def _pipeline(x: KernelRequest) -> Config:
    found = pipelines.pipeline(x.kind, x.head_dim_qk, x.head_dim_v)
    assert found is not None
    return found


def _against_portable(x: KernelRequest) -> list[str]:
    return ["it has no kernel of this kind"] if x.kind == "shared_forward" else []


def _tiles(x: KernelRequest) -> Config:
    return tile_table.tiles(PORTABLE_KINDS.get(x.kind, x.kind), x.capability, x.head_dim_qk, x.head_dim_v, x.itemsize)


IMPLEMENTATIONS = (Implementation("hopper", _against_hopper, _pipeline), Implementation("portable", _against_portable, _tiles))
"""All implementations in order; the first one without an objection serves."""


@cache
def config_of(request: KernelRequest) -> Config | None:
    """Return the configuration of the implementation that serves `request`; None if none does.

    Warn once if the installed Triton is the only objection to the first one.
    """
    for implementation in IMPLEMENTATIONS:
        objections = implementation.objections(request)
        if not objections:
            return implementation.config(request)
        if objections == [without_gluon()]:
            _warn_without_gluon()
    return None


@cache
def _warn_without_gluon() -> None:
    warnings.warn(without_gluon(), stacklevel=2)


def kernel_request(kind: str, q: Tensor, v: Tensor, *others: Tensor, **facts: Any) -> KernelRequest:
    """Return the request of a launch over q, v and `others`; `facts` are the fields that do not follow from the tensors."""
    # runs at every launch: a loop takes half the time of `any`
    addresses = q.data_ptr() | v.data_ptr()
    for x in others:
        addresses |= x.data_ptr()
    shape, is_aligned = q.shape, addresses % COPIED_BYTES == 0
    return KernelRequest(kind, device.capability_of(q), shape[3], v.shape[3], q.element_size(), pipelines.has_gluon(), is_aligned, **facts)


def kernel_for(kind: str, q: Tensor, v: Tensor, *others: Tensor, **facts: Any) -> Config:
    """Return `config_of` the `kernel_request`, for a kind that has a kernel for every request."""
    found = config_of(kernel_request(kind, q, v, *others, **facts))
    assert found is not None
    return found


def notes_on(request: BranchRequest) -> tuple[str, ...]:
    """Return a note on each kernel that runs in its portable implementation although the GPU has compute capability 9.0."""
    if request.device_type != "cuda" or request.compute_capability != PIPELINE_CAPABILITY or request.dtype.itemsize != 2:
        return ()
    geometry, kinds_by_reason = request.geometry, dict[str, list[str]]()
    for kind in KINDS_OF.get(request.operation, ()):
        if kind in BACKWARD_KINDS and not request.needs_grad:
            continue
        objections = _against_hopper(
            KernelRequest(
                kind, request.compute_capability, request.head_dim_qk, request.head_dim_v, request.dtype.itemsize,
                pipelines.has_gluon(), request.is_aligned,
                heads_per_group=request.num_heads // request.num_kv_heads,
                selection_block_size=geometry.selection_block_size,
                strides=geometry.selection_block_size // geometry.compression_stride,
            )
        )  # fmt: skip
        # the installed Triton is reported only if it is the only reason against the kernel
        for reason in [x for x in objections if x != without_gluon()] or objections:
            kinds_by_reason.setdefault(reason, []).append(kind)
    return tuple(
        reason if reason == without_gluon() else f"portable kernels for {', '.join(kinds)}: {reason}"
        for reason, kinds in kinds_by_reason.items()
    )
