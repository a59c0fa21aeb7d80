"""The backend interface: operations, requests, the description of a backend, its operands and results.

An *operation* is one part of the mathematics (Eq. 5, 7-12); a *backend* is one implementation of one operation. Routing
(`nsa_core.backends.registry`) reads only plain numbers, so it can answer for a machine that you do not have.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from attrs import field, frozen
from torch import Tensor

from nsa_core.config import BlockGeometry
from nsa_core.rope import RotaryEmbedding


class Operation(StrEnum):
    """An operation that a backend implements; the protocols below give the operands of each as types."""

    CMP = "cmp"
    """Compressed attention, Eq. 7, 8: (queries, cmp) -> BranchOutput."""
    SELECT = "select"
    """Choice of blocks, Eq. 9-11: (queries, cmp, lse) -> int32 block_indices (B, S, G, n)."""
    SLC = "slc"
    """Selected attention, Eq. 12: (queries, slc, block_indices) -> BranchOutput."""
    WIN = "win"
    """Sliding-window attention: (queries, win) -> BranchOutput."""
    NSA = "nsa"
    """All of Eq. 5 (optional): (queries, cmp, slc, win, gates) -> FusedOutput, or out alone; in that case reads are not counted."""
    APPEND = "append"
    """Writes a step's rows into a cache and emits the compressed blocks that they complete: (rows, blocks, start, count) -> None."""
    CHOOSE = "choose"
    """Top-n of importance (optional; another backend's SELECT or NSA asks the registry for it): (scores, factor, positions) -> block_indices."""
    ROTATE = "rotate"
    """RoPE of a step over a cache, for q and the keys of all branches in one call: (heads, start, rope) -> rotated heads."""


class Layout(StrEnum):
    """How sequences are arranged in the tensors; `layout_of` returns the layout of operands."""

    DENSE = "dense"
    """B sequences of S tokens; query t is row t."""
    PACKED = "packed"
    """B = 1; `cu_seqlens` bounds the sequences."""
    CACHED = "cached"
    """Each sequence has its own rows of the stores, as in a cache; query row i of sequence b is at position start[b] + i."""
    PAGED = "paged"
    """As CACHED, with stores (pages, page_size, G, D) and a page_table (B, max_pages)."""
    RAGGED = "ragged"
    """Query rows are packed by `cu_seqlens`; keys are as in CACHED or PAGED, and so are positions."""


class Queries(NamedTuple):
    """Query rows and their positions. A tuple, not an attrs class, because traced graphs build it."""

    q: Tensor
    """(B, S, H, D_k); packed or ragged: (1, total, H, D_k)."""
    max_count: int
    """Upper bound on the query rows of a sequence, a Python int: kernels compute their grid from it."""
    cu_seqlens: Tensor | None = None
    """int32 (N + 1,), cumulative lengths of packed or ragged rows. This and the tensors below are on q's device; a backend must not wait for a
    GPU to read one on the host."""
    start: Tensor | None = None
    """int32 (N,), position of each sequence's first row; None: position 0."""
    count: Tensor | None = None  # type: ignore[assignment]
    """int32 (N,), valid rows of each sequence; the others give out 0, lse -inf. None: all."""
    follows_append: bool = False
    """True: the last operation on the stream is the APPEND of these rows, and q, start, count and page tables were written before it. So a kernel
    that is launched while APPEND still runs may read these tensors, and the keys of earlier steps. Always False in a traced step, because a
    compiler may reorder its operations."""


class Keys(NamedTuple):
    """The keys and values of one branch, and their positions."""

    k: Tensor
    """(B, T, G, D_k); packed: (1, total, G, D_k); paged: (pages, page_size, G, D_k)."""
    v: Tensor
    """As k, with D_v columns."""
    max_count: int
    """Upper bound on the rows of a sequence (tokens, or blocks for cmp), a Python int: kernels compute their grid from it. For a ring it may
    exceed T."""
    cu_seqlens: Tensor | None = None
    """Packed: int32 (N + 1,), the cumulative numbers of rows of the sequences."""
    page_table: Tensor | None = None
    """Paged: int32 (N, max_pages), the pages of each sequence in order."""
    first: Tensor | None = None
    """int32 (N,), position of row 0, if k holds only the last tokens of a window or a shard of a longer sequence. None: position 0."""
    ring: bool = False
    """True: k and v are ring buffers of the last T tokens; position p is in row p % T."""
    k_scale: Tensor | None = None
    """FP8 stores only: float32, k's shape without the last dimension. A key is its stored numbers multiplied by its scale."""
    v_scale: Tensor | None = None
    only_chooses: bool = False
    """Operand cmp of NSA only. True: these keys choose blocks, and their attention is not part of the sum. v is then k, and their gates are 0, so a
    backend may treat them like other keys. It may instead leave out their output and all that it adds to gradients; that of their gates is 0."""


def layout_of(queries: Queries, keys: Keys) -> Layout:
    """Return the layout of the operands."""
    if queries.start is None:
        return Layout.DENSE if queries.cu_seqlens is None else Layout.PACKED
    if queries.cu_seqlens is not None:
        return Layout.RAGGED
    return Layout.CACHED if keys.page_table is None else Layout.PAGED


class ReasonKind(StrEnum):
    """INCAPABLE: the backend cannot serve the request. POLICY: it can, but should not unless the caller names it."""

    INCAPABLE = "incapable"
    POLICY = "policy"


@frozen
class Reason:
    """One reason against a backend. A caller who names the backend overrides a `policy` reason, but never an `incapable` one."""

    kind: ReasonKind
    message: str

    @classmethod
    def incapable(cls, message: str) -> "Reason":
        """Return a reason why the backend cannot run."""
        return cls(ReasonKind.INCAPABLE, message)

    @classmethod
    def policy(cls, message: str) -> "Reason":
        """Return a reason why the backend should not run unless it is selected by name."""
        return cls(ReasonKind.POLICY, message)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@frozen(kw_only=True)
class BranchRequest:
    """A call of an operation, in plain hashable numbers.

    `num_queries` is the number of rows of a batch entry (packed: the total), and `num_keys` an upper bound on the tokens of a sequence. With a
    cache, `num_keys` is rounded up to a power of 2, so that a growing cache is not routed again at every step. Under torch.compile all lengths,
    and the batch sizes, are rounded up to a power of 8 instead, so that one graph serves many lengths. `dispatch.facts_of` returns the fields
    for a call.
    """

    operation: Operation = field(converter=Operation)
    geometry: BlockGeometry = field(factory=BlockGeometry)
    device_type: str = "cpu"
    compute_capability: tuple[int, int] | None = None
    """(major, minor) of a CUDA device, None elsewhere."""
    device_index: int | None = None
    """The CUDA device of the operands; None elsewhere, and in a request for another machine."""
    dtype: torch.dtype = torch.float32
    """The dtype of q."""
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
    needs_lse_grad: bool = False
    """True if lse may get a gradient: the operations of one branch return lse to the caller, `nsa_attention` does not."""
    is_aligned: bool = True
    """False if the address of a tensor is no multiple of 16 bytes, which some kernels require; checked on CUDA devices only."""
    deterministic: bool = False
    """True under `torch.use_deterministic_algorithms`: gradients must be bit-identical from run to run."""


@frozen(kw_only=True)
class Capability:
    """What a backend supports; None means no limit. `reasons_against` compares it with a request."""

    device_types: tuple[str, ...] | None = None
    min_compute_capability: tuple[int, int] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    """Dtypes of q, k and v."""
    stored_dtypes: tuple[torch.dtype, ...] = ()
    """Further dtypes of k and v only, such as torch.float8_e4m3fn for FP8 stores with scales. With `dtypes=None` they need no entry here."""
    layouts: tuple[Layout, ...] = tuple(Layout)
    gradient: bool = True
    """False: forward only."""
    lse_gradient: bool = True
    """False: only out is differentiable, and a gradient of lse raises in the backward pass."""
    deterministic_gradient: bool = True
    max_head_dim: int | None = None

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return every reason against `request`; empty if there is none.

        A missing gradient of lse is a `policy` reason, because only the backward pass knows whether lse has a gradient. All other reasons are
        `incapable`.
        """
        found = []
        if self.device_types is not None and request.device_type not in self.device_types:
            found.append(f"device {request.device_type} (needs {' or '.join(self.device_types)})")
        needed, have = self.min_compute_capability, request.compute_capability
        if needed is not None and (have is None or have < needed):
            found.append(f"compute capability {_dotted(have)} (needs {_dotted(needed)} or newer)")
        for name, dtype, stored in (("q", request.dtype, ()), ("k, v", request.kv_dtype, self.stored_dtypes)):
            if self.dtypes is not None and dtype not in (*self.dtypes, *stored):
                found.append(f"{name} of {dtype} (takes {', '.join(map(str, (*self.dtypes, *stored)))})")
        if request.layout not in self.layouts:
            found.append(f"layout {request.layout} (takes {', '.join(self.layouts)})")
        if request.needs_grad and not self.gradient:
            found.append("gradients are needed (forward only)")
        if request.needs_grad and request.deterministic and not self.deterministic_gradient:
            found.append("deterministic gradients are asked for (its backward is not deterministic)")
        largest = max(request.head_dim_qk, request.head_dim_v)
        if self.max_head_dim is not None and largest > self.max_head_dim:
            found.append(f"head dimension {largest} (at most {self.max_head_dim})")
        reasons = tuple(map(Reason.incapable, found))
        if request.needs_lse_grad and self.gradient and not self.lse_gradient:
            reasons += (Reason.policy("lse may get a gradient (it differentiates out alone)"),)
        return reasons


def _dotted(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else f"{capability[0]}.{capability[1]}"


class BranchOutput(NamedTuple):
    """Attention output and its log-sum-exp."""

    out: Tensor
    """(B, S, H, D_v), q's dtype; 0 where a query sees nothing."""
    lse: Tensor
    """(B, S, H), natural log, at least float32; -inf where a query sees nothing."""


class FusedOutput(NamedTuple):
    """The gated sum of a fused operation, and the chosen blocks, which observers of reads and selections use."""

    out: Tensor
    """(B, S, H, D_v), q's dtype."""
    block_indices: Tensor
    """int32 (B, S, G, n), ascending, -1 after the last."""


class NewRows(NamedTuple):
    """A step's rows for one store of a cache."""

    store: Keys
    """The backend writes k, v and their scales in place. If `v` is None, it ignores `store.v`. The last page of a paged store belongs to no
    sequence: rows that no page holds may be written there."""
    k: Tensor
    """(B, m, G, D_k)."""
    v: Tensor | None
    """(B, m, G, D_v)."""


class NewBlocks(NamedTuple):
    """The stores and functions that a step needs to emit the compressed blocks that it completes."""

    store: Keys
    """The compressed keys and values, written in place."""
    raw: NewRows
    """The ring of the tokens that unfinished blocks still need, and the step's rows. Blocks are computed from both. The ring itself is written
    only if it is also among the `rows` of the call."""
    compress_k: Callable[[Tensor], Tensor]
    """phi of k: (B, C, l, G, D_k) -> (B, C, G, D_k)."""
    compress_v: Callable[[Tensor], Tensor] | None
    rotate: Callable[[Tensor, Tensor], Tensor]
    """RoPE of blocks (B, C, G, D_k) at the positions of their last tokens, int64 (B, C)."""


@runtime_checkable
class BranchBackend(Protocol):
    """One implementation of one operation. The protocols below add the call of each operation."""

    @property
    def name(self) -> str:
        """Return the name by which callers select the backend; names are unique per operation."""

    @property
    def operation(self) -> Operation:
        """Return the operation that the backend implements."""

    @property
    def capability(self) -> Capability:
        """Return what the backend supports."""

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return all reasons against serving `request`, not only the first; an empty tuple means that the backend is eligible."""

    def preference(self, request: BranchRequest) -> int:
        """Return the priority for `request`; "auto" takes the eligible backend with the highest. The SDPA reference has 0."""

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Compute the operation; the protocols below list the operands and the result of each."""


class AttentionBackend(BranchBackend, Protocol):
    """Compressed or sliding-window attention: operation CMP or WIN."""

    def __call__(self, queries: Queries, keys: Keys, /, *, geometry: BlockGeometry, scale: float) -> BranchOutput:
        """Return out and lse; differentiable through autograd where `capability.gradient`."""


class SelectBackend(BranchBackend, Protocol):
    """The choice of blocks: operation SELECT."""

    def __call__(self, queries: Queries, cmp: Keys, lse: Tensor, /, *, geometry: BlockGeometry, scale: float) -> Tensor:
        """Return int32 block_indices (B, S, G, n), ascending, -1 after the last; no gradient. It must not read `cmp.v`."""


class SelectedBackend(BranchBackend, Protocol):
    """Attention over chosen blocks: operation SLC."""

    def __call__(self, queries: Queries, slc: Keys, block_indices: Tensor, /, *, geometry: BlockGeometry, scale: float) -> BranchOutput:
        """Return out and lse; differentiable through autograd where `capability.gradient`."""


class FusedBackend(BranchBackend, Protocol):
    """All of Eq. 5: operation NSA."""

    def __call__(
        self, queries: Queries, cmp: Keys, slc: Keys, win: Keys, gates: Tensor, /, *, geometry: BlockGeometry, scale: float
    ) -> FusedOutput | Tensor:
        """Return the gated sum and block_indices, or the sum alone; differentiable through autograd where `capability.gradient`."""


class AppendBackend(BranchBackend, Protocol):
    """Writes a step into a cache: operation APPEND."""

    def __call__(
        self, rows: tuple[NewRows, ...], blocks: NewBlocks | None, start: Tensor, count: Tensor, /, *, geometry: BlockGeometry
    ) -> None:
        """Write rows 0 .. count[b] - 1 of sequence b at positions start[b] onwards, and the blocks that they complete, in place.

        `start` and `count` are int32 (B,). Compute the blocks first: the rows may overwrite tokens in `blocks.raw` that the blocks need.
        """


class ChooseBackend(BranchBackend, Protocol):
    """Top-n of importance: operation CHOOSE."""

    def __call__(
        self, scores: Tensor, factor: Tensor | None, positions: Tensor, num_kv_heads: int, /, *, geometry: BlockGeometry
    ) -> Tensor:
        """Return int32 block_indices (rows, G, n), ascending, -1 after the last.

        `positions` (rows,): the query's position in its sequence; -1 for a row without a query, which gets only -1. Without `factor`, `scores`
        (rows, G, N) are importances. With `factor` (rows, H), `scores` (rows, H, N) are not normalised: factor is 1 / L, where L is the softmax
        denominator of a head. The importance of a group is then the sum of factor * scores over its heads.
        """


class RotateBackend(BranchBackend, Protocol):
    """RoPE of a step over a cache: operation ROTATE."""

    def __call__(self, heads: tuple[Tensor, ...], start: Tensor, rope: RotaryEmbedding, /) -> tuple[Tensor, ...]:
        """Return each of `heads` (B, m, heads, D_k) after RoPE, in its dtype. Row i of sequence b is at position start[b] + i; start is int32 (B,).

        Angles, cos and sin are float32. The arithmetic is in at least float32. The results have no gradient.
        """


@runtime_checkable
class NotingBackend(Protocol):
    """Optional protocol of a backend that tells users how it would serve a request, for example by a slower kernel than its fastest."""

    def notes_on(self, request: BranchRequest) -> tuple[str, ...]:
        """Return sentences for the user on how the backend would serve `request`; empty if there is nothing to note."""
