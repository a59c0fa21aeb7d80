"""The parts of the plug-in seam: what is asked for, what a backend says of itself, what it gets and gives.

An *operation* is one piece of the mathematics (Eq. 5, 7-12); a *backend* is one implementation of one operation. Routing
(`nsa_core.backends.registry`) reads only plain numbers, so it can answer for a machine that is not there.
"""

from enum import StrEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from attrs import field, frozen
from torch import Tensor

from nsa_core.config import BlockGeometry


class Operation(StrEnum):
    """What a backend implements."""

    CMP = "cmp"
    """Compressed attention, Eq. 7, 8: (q, k_cmp, v_cmp) -> BranchOutput."""
    SELECT = "select"
    """Choice of blocks, Eq. 9-11: (q, k_cmp, lse) -> int32 block_indices (B, S, G, n)."""
    SLC = "slc"
    """Selected attention, Eq. 12: (q, k, v, block_indices) -> BranchOutput."""
    WIN = "win"
    """Sliding-window attention: (q, k, v) -> BranchOutput."""
    NSA = "nsa"
    """All of Eq. 5 in one (optional): (q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates) -> out."""


class Layout(StrEnum):
    """How sequences lie in the tensors."""

    DENSE = "dense"
    """B sequences of S tokens; query t is row t."""
    PACKED = "packed"
    """B = 1; `cu_seqlens` bounds the sequences."""
    CACHED = "cached"
    """Keys are stores of each sequence; query row i of sequence b stands at query_start[b] + i."""
    PAGED = "paged"
    """As CACHED, with stores (pages, page_size, G, D) and a page_table (B, max_pages)."""


class ReasonKind(StrEnum):
    """Whether a backend cannot or only should not serve a request."""

    INCAPABLE = "incapable"
    POLICY = "policy"


@frozen
class Reason:
    """One reason against a backend. A `policy` reason is overridden by naming the backend, an `incapable` one never."""

    kind: ReasonKind
    message: str

    @classmethod
    def incapable(cls, message: str) -> "Reason":
        """Return a reason why the backend cannot run."""
        return cls(ReasonKind.INCAPABLE, message)

    @classmethod
    def policy(cls, message: str) -> "Reason":
        """Return a reason why the backend should not run unless it is asked for by name."""
        return cls(ReasonKind.POLICY, message)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@frozen(kw_only=True)
class BranchRequest:
    """What an operation is asked to do, in plain hashable numbers.

    Lengths are host bounds: `num_queries` rows per batch entry (packed: the total), `num_keys` tokens of the longest
    sequence. Under torch.compile lengths are rounded up to a power of 8, so that one graph serves many.
    """

    operation: Operation = field(converter=Operation)
    geometry: BlockGeometry = field(factory=BlockGeometry)
    device_type: str = "cpu"
    compute_capability: tuple[int, int] | None = None
    """(major, minor) of a CUDA device, None elsewhere."""
    dtype: torch.dtype = torch.float32
    """Of q."""
    kv_dtype: torch.dtype = torch.float32
    batch: int = 1
    num_sequences: int = 1
    num_queries: int = 1
    num_keys: int = 1
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim_qk: int = 64
    head_dim_v: int = 64
    layout: Layout = field(default=Layout.DENSE, converter=Layout)
    needs_grad: bool = False
    deterministic: bool = False
    """True under `torch.use_deterministic_algorithms`: gradients must be bit-identical from run to run."""


@frozen(kw_only=True)
class Capability:
    """What a backend can do, as data; None means no limit. `reasons_against` turns it into sentences."""

    device_types: tuple[str, ...] | None = None
    min_compute_capability: tuple[int, int] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    layouts: tuple[Layout, ...] = tuple(Layout)
    gradient: bool = True
    """False: forward only."""
    deterministic_gradient: bool = True
    max_head_dim: int | None = None

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return every reason why `request` is out of reach, all of kind `incapable`; empty where it is within."""
        return tuple(Reason.incapable(message) for message in self._objections(request))

    def _objections(self, request: BranchRequest) -> list[str]:
        found = []
        if self.device_types is not None and request.device_type not in self.device_types:
            found.append(f"device {request.device_type} (needs {' or '.join(self.device_types)})")
        needed, have = self.min_compute_capability, request.compute_capability
        if needed is not None and (have is None or have < needed):
            found.append(f"compute capability {_dotted(have)} (needs {_dotted(needed)} or newer)")
        for name, dtype in (("q", request.dtype), ("k, v", request.kv_dtype)):
            if self.dtypes is not None and dtype not in self.dtypes:
                found.append(f"{name} of {dtype} (takes {', '.join(str(known) for known in self.dtypes)})")
        if request.layout not in self.layouts:
            found.append(f"layout {request.layout} (takes {', '.join(self.layouts)})")
        if request.needs_grad and not self.gradient:
            found.append("gradients are needed (forward only)")
        if request.needs_grad and request.deterministic and not self.deterministic_gradient:
            found.append("deterministic gradients are asked for (its backward is not deterministic)")
        largest = max(request.head_dim_qk, request.head_dim_v)
        if self.max_head_dim is not None and largest > self.max_head_dim:
            found.append(f"head dimension {largest} (at most {self.max_head_dim})")
        return found


def _dotted(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else f"{capability[0]}.{capability[1]}"


class Placement(NamedTuple):
    """Where rows stand: host bounds for grids, and int32 tensors on q's device that are never read on the host.

    `cu_seqlens` (N + 1,) bounds packed tokens and `cu_blocks` (N + 1,) packed compressed blocks. `query_start` (B,) is the
    position of each sequence's first query row and `query_count` (B,) its valid rows (None: all); rows beyond give
    out 0, lse -inf. `page_table` (B, max_pages) names the pages of each sequence in order. A tuple and no attrs class,
    because graphs being traced build it.
    """

    max_query_count: int
    """Query rows of the longest sequence, at most."""
    max_key_count: int
    """Tokens of the longest sequence, at most."""
    cu_seqlens: Tensor | None = None
    cu_blocks: Tensor | None = None
    query_start: Tensor | None = None
    query_count: Tensor | None = None
    page_table: Tensor | None = None


class BranchOutput(NamedTuple):
    """Attention output and its log-sum-exp."""

    out: Tensor
    """(B, S, H, D_v), q's dtype; 0 where a query sees nothing."""
    lse: Tensor
    """(B, S, H), natural log, at least float32; -inf where a query sees nothing."""


@runtime_checkable
class BranchBackend(Protocol):
    """One implementation of one operation; `Operation` lists the tensors that each takes and what it returns."""

    @property
    def name(self) -> str:
        """Return the name it is asked for by, unique per operation."""

    @property
    def operation(self) -> Operation:
        """Return what it implements."""

    @property
    def capability(self) -> Capability:
        """Return what it can do."""

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return every reason against serving `request`, at once; empty: eligible."""

    def preference(self, request: BranchRequest) -> int:
        """Return how much this backend is wanted; "auto" takes the highest. The SDPA reference stands at 0."""

    def __call__(self, *tensors: Any, geometry: BlockGeometry, scale: float, placement: Placement) -> Any:
        """Compute the operation; differentiable through autograd where `capability.gradient`."""


@runtime_checkable
class NotingBackend(Protocol):
    """A backend that also notes how it would serve a request, such as by slower kernels than its fastest. Optional."""

    def notes_on(self, request: BranchRequest) -> tuple[str, ...]:
        """Return sentences for the user on how it would serve `request`; empty where there is nothing to note."""
