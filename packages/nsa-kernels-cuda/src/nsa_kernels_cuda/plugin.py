"""The CUDA C++ kernels and FlashAttention as backends of nsa_core, found by entry point. Loads neither a compiler nor flash_attn."""

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from nsa_core import BranchBackend, BranchRequest, Capability, Operation, Reason
from nsa_core.plugins import hookimpl
from nsa_kernels_cuda import routing
from nsa_kernels_cuda.choice import op
from nsa_kernels_cuda.decode.backend import CudaDecode
from nsa_kernels_cuda.flash_attention.backend import flash_attention_backends


@frozen(kw_only=True)
class CudaChoice:
    """The backend that chooses blocks, in CUDA C++."""

    name: str = "cuda"
    operation: Operation = Operation.CHOOSE
    capability: Capability = routing.CAPABILITY

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return every reason against the kernel for `request`; compiles it for the GPU of the request."""
        return routing.reasons_against(request)

    def preference(self, request: BranchRequest) -> int:
        """Return the priority of the kernel."""
        return routing.preference(request)

    def notes_on(self, request: BranchRequest) -> tuple[str, ...]:
        """Return notes on how the kernel serves `request`."""
        return routing.notes_on(request)

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Compute the choice on the operands of `nsa_core.backends.base.ChooseBackend`."""
        return op.choose(*operands, **keywords)


@hookimpl
def nsa_branch_backends() -> Sequence[BranchBackend]:
    """Return the kernels of this package, and the adapters to FlashAttention."""
    return [CudaChoice(), CudaDecode(), *flash_attention_backends()]
