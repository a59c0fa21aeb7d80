"""The backend `cuda` of the operation NSA: which decode steps it can and should serve. Routing compiles the kernels, as a failure is a reason."""

from typing import Any

from attrs import frozen

from nsa_core import BranchRequest, Capability, Operation, Reason
from nsa_core.backends.base import Layout, ReasonKind
from nsa_core.blocks import num_compressed_blocks
from nsa_kernels_cuda import cluster_launch, jit
from nsa_kernels_cuda.decode import op
from nsa_kernels_cuda.decode.plan import FP8, KERNELS, KEYS, NUM_WARPS, WARP_SIZE, WIDTHS, Plan, Sizes, num_blocks_of

ONLY_ON = (9, 0)
"""The only compute capability that the kernels support; they are made for its clusters and shared memory."""
CAPABILITY = Capability(
    device_types=("cuda",),
    min_compute_capability=ONLY_ON,
    dtypes=tuple(KERNELS),
    stored_dtypes=(FP8,),
    layouts=(Layout.CACHED, Layout.PAGED, Layout.RAGGED),
    gradient=False,
    max_head_dim=WIDTHS[-1],
)
IS_PREFERRED = False
"""True when a step is faster than Triton's. On an H200 it takes 0.92 to 1.64 times as long (`3e3960f` against `02ffc5b`)."""
UNMEASURED = "pages, FP8 stores, several or ragged rows (not timed on a GPU yet); name 'cuda' to use it"
MOST_ROWS = 16
"""Maximum rows of a sequence; for more rows there is a reason of policy against the kernels."""


@frozen(kw_only=True)
class CudaDecode:
    """The backend that computes a decode step in one launch, in CUDA C++."""

    name: str = "cuda"
    operation: Operation = Operation.NSA
    capability: Capability = CAPABILITY

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return every reason against the kernels for `request`. If no limit rules them out, this compiles them."""
        reasons = CAPABILITY.reasons_against(request) + tuple(map(Reason.incapable, _limits(request)))
        policy = tuple(map(Reason.policy, _policy(request)))
        if reasons:
            return reasons + policy
        kernel = op.kernel_of(request.dtype, request.head_dim_v, is_placed=_is_placed(request))
        unavailable = jit.why_unavailable(op.source_of(kernel), (kernel,), ONLY_ON, request.device_index) or _why_no_room(kernel, request)
        return ((Reason.incapable(unavailable),) if unavailable else ()) + policy

    def preference(self, request: BranchRequest) -> int:
        """Return the priority: above Triton's kernels (100) if the step is faster, else below them."""
        return 110 if IS_PREFERRED else 50

    def notes_on(self, request: BranchRequest) -> tuple[str, ...]:
        """Return a note on why every process compiles the kernels again, or nothing if the cache on disk holds them."""
        is_incapable = any(reason.kind is ReasonKind.INCAPABLE for reason in self.reasons_against(request))
        note = "" if is_incapable else jit.note_on_cache(op.PLACED_SOURCE if _is_placed(request) else op.SOURCE, ONLY_ON)
        return (note,) if note else ()

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Compute the operation on the operands of `nsa_core.backends.base.FusedBackend`."""
        return op.decode(*operands, **keywords)


def _limits(request: BranchRequest) -> list[str]:
    """Return the limits of the kernels that `CAPABILITY` does not list."""
    geometry, found = request.geometry, []
    if request.compute_capability is not None and request.compute_capability > ONLY_ON:
        found.append("compute capability {}.{} (its clusters are cut for 9.0)".format(*request.compute_capability))
    if request.kv_dtype in KERNELS and request.kv_dtype is not request.dtype:
        found.append(f"k, v of {request.kv_dtype} with q of {request.dtype} (takes one dtype)")
    for name, size in (("D_k", request.head_dim_qk), ("D_v", request.head_dim_v)):
        if size % 16:
            found.append(f"{name}={size} (takes multiples of 16)")
    if not request.is_aligned:
        found.append("a tensor starts off a multiple of 16 bytes (keys are copied 16 bytes at a time)")
    strides = geometry.selection_block_size // geometry.compression_stride
    if strides > KEYS:
        found.append(f"{strides} compressed blocks begin in a selection block (takes {KEYS}); use smaller selection blocks")
    elif Plan.of(_sizes_of(request)) is None:
        found.append(
            f"up to {request.num_keys} tokens of {request.num_heads // request.num_kv_heads} heads (above the shared memory of a cluster); "
            "use a smaller max_seqlen"
        )
    return found


def _policy(request: BranchRequest) -> list[str]:
    """Return why the kernels should serve a step only if the caller names them."""
    if request.layout not in CAPABILITY.layouts:
        return []
    found = [UNMEASURED] if _is_placed(request) else []
    num_rows = request.batch * request.num_queries // max(request.num_sequences, 1)
    if num_rows > MOST_ROWS:
        found.append(f"{num_rows} rows of a sequence (above {MOST_ROWS}; each row reads all its keys by itself)")
    return found


def _is_placed(request: BranchRequest) -> bool:
    """Return True where the kernels of `decode_placed.cu` serve `request`."""
    return request.layout is not Layout.CACHED or request.kv_dtype is FP8 or request.num_queries != 1


def _why_no_room(kernel: str, request: BranchRequest) -> str:
    """Return why the GPU of `request` has no room for a cluster of the plan; "" if it has room, or if this machine lacks that GPU."""
    device, plan = jit.device_here(ONLY_ON, request.device_index), Plan.of(_sizes_of(request))
    assert plan is not None
    if device is None:
        return ""
    num_threads = NUM_WARPS * WARP_SIZE
    return cluster_launch.why_no_cluster_fits(op.source_of(kernel), kernel, plan.num_ranks, num_threads, plan.shared_bytes, device)


def _sizes_of(request: BranchRequest) -> Sizes:
    return Sizes(
        num_pairs=request.batch * request.num_queries * request.num_kv_heads,
        group_size=request.num_heads // request.num_kv_heads,
        head_dim_qk=request.head_dim_qk,
        head_dim_v=request.head_dim_v,
        num_blocks=num_blocks_of(num_compressed_blocks(request.num_keys, request.geometry), request.geometry),
        geometry=request.geometry,
    )
