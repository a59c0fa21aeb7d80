"""Decide which requests the choice of blocks can and should serve. Routing compiles the kernel, because a failed compilation is a reason."""

from nsa_core import BranchRequest, Capability, Reason
from nsa_core.blocks import num_selection_blocks
from nsa_kernels_cuda import jit
from nsa_kernels_cuda.choice.op import KERNELS, MOST_BLOCKS, SOURCE, WARP_SIZE

CAPABILITY = Capability(
    device_types=("cuda",),
    min_compute_capability=(8, 0),
    dtypes=tuple(KERNELS),
    gradient=False,
)
PREFERRED_ON: frozenset[tuple[int, int]] = frozenset()
"""Compute capabilities on which the choice was measured to be faster than Triton's. Empty: on an H100 it takes 1.3 to 1.5 times as long."""


def reasons_against(request: BranchRequest) -> tuple[Reason, ...]:
    """Return every reason against the choice of blocks for `request`, at once."""
    geometry = request.geometry
    reasons = CAPABILITY.reasons_against(request)
    num_blocks = num_selection_blocks(request.num_keys, geometry)
    if num_blocks > MOST_BLOCKS:
        limit = f"{num_blocks} blocks in a sequence (the shared memory of a warp holds {MOST_BLOCKS} scores)"
        reasons += (Reason.incapable(f"{limit}; use larger selection blocks"),)
    num_free = geometry.num_selected_blocks - geometry.num_initial_blocks - geometry.num_local_blocks
    if num_free > WARP_SIZE:
        reasons += (
            Reason.policy(
                f"{num_free} blocks chosen by score for a query (above {WARP_SIZE}, the lanes of a warp, it searches bit by bit)"
            ),
        )
    capability = supported_capability(request)
    unavailable = jit.why_unavailable(SOURCE, tuple(KERNELS.values()), capability, request.device_index) if capability else ""
    return reasons + ((Reason.incapable(unavailable),) if unavailable else ())


def notes_on(request: BranchRequest) -> tuple[str, ...]:
    """Return a note on why every process compiles the kernel again, or nothing if the cache on disk holds it."""
    capability = supported_capability(request)
    if capability is None or jit.why_unavailable(SOURCE, tuple(KERNELS.values()), capability, request.device_index):
        return ()
    note = jit.note_on_cache(SOURCE, capability)
    return (note,) if note else ()


def preference(request: BranchRequest) -> int:
    """Return the priority: above Triton's choice (100) if this kernel was measured to be faster, else between Triton's and the reference (0)."""
    return 110 if request.compute_capability in PREFERRED_ON else 50


def supported_capability(request: BranchRequest) -> tuple[int, int] | None:
    """Return the compute capability of `request`; None if kernels are not compiled for its device."""
    capability, oldest = request.compute_capability, CAPABILITY.min_compute_capability
    assert oldest is not None
    return capability if request.device_type == "cuda" and capability is not None and capability >= oldest else None
