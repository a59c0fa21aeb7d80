"""The backends `flash_attn` and `flash_attn[PROVIDER]`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import evolve, field, frozen

from nsa_core import BackendRegistry, BlockGeometry, BranchOutput, BranchRequest, Capability, Keys, Operation, Queries, Reason
from nsa_core.backends.registry import AUTO
from nsa_core.dispatch import make_call, run
from nsa_kernels_cuda.flash_attention.minimum import UNMEASURED, Files, beats_triton, reasons_by_length, threshold_files
from nsa_kernels_cuda.flash_attention.op import op_of
from nsa_kernels_cuda.flash_attention.providers import FLASH_2, PROVIDERS, Provider

ABOVE_TRITON = 110
"""The preference of a provider that was measured to be faster than Triton's kernels, which have 100."""


@frozen(kw_only=True)
class FlashAttentionBackend:
    """Compressed or sliding-window attention by `provider`."""

    operation: Operation
    provider: Provider
    name: str
    level: int = 40
    files: Files | None = threshold_files
    """Returns the tables of minimum lengths, the preferred one first; None: the backend serves every length."""
    # the op is declared here, because a traced graph cannot declare one
    _op: Callable[..., BranchOutput] = field(init=False, eq=False, repr=False)

    @_op.default
    def _declared(self) -> Callable[..., BranchOutput]:
        return op_of(self.operation, self.provider)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a copy or a pickle is built from: all but the op, which the copy declares itself."""
        fields: dict[str, Any] = {
            "operation": self.operation,
            "provider": self.provider,
            "name": self.name,
            "level": self.level,
            "files": self.files,
        }
        return partial(type(self), **fields), ()

    @property
    def capability(self) -> Capability:
        """Return what the provider can do."""
        return self.provider.capability

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return the limits of the provider, and policy reasons: no length was measured, or the call is shorter than the minimum."""
        by_length = () if self.files is None else reasons_by_length(request, self.name, self.files())
        return (*self.provider.reasons_against(request), *by_length)

    def preference(self, request: BranchRequest) -> int:
        """Return the priority: on a GPU above the reference, and above Triton's kernels if it was measured to be faster."""
        if request.device_type != "cuda":
            return -100 + self.level
        return ABOVE_TRITON if self.files is not None and beats_triton(request, self.name, self.files()) else self.level

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Compute the operation on the operands of `nsa_core.backends.base.AttentionBackend`."""
        return self._op(*operands, **keywords)


@frozen(kw_only=True)
class FirstProviderBackend:
    """Compressed or sliding-window attention by the first provider that can serve the call."""

    operation: Operation
    providers: BackendRegistry
    """One backend for each installed provider, the preferred one first. They serve every length."""
    files: Files = threshold_files
    name: str = "flash_attn"

    @property
    def capability(self) -> Capability:
        """Return what at least one of the providers can do; a gradient of lse only if all of them support it."""
        return evolve(FLASH_2, lse_gradient=all(each.capability.lse_gradient for each in self.providers.backends))

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return the reasons against the provider that serves, including its minimum length; if none serves, those against all providers."""
        serving = self._serving(request)
        if serving is not None:
            limits_of_one = self.providers.named(self.operation, serving).reasons_against(request)
            return (*limits_of_one, *reasons_by_length(request, serving, self.files()))
        limits = [(each.name, reason) for each in self.providers.backends for reason in each.reasons_against(request)]
        return (*(evolve(reason, message=f"{name}: {reason.message}") for name, reason in limits), UNMEASURED)

    def preference(self, request: BranchRequest) -> int:
        """Return the priority: 1 more than the backend `flash_attn[PROVIDER]` of the provider that serves."""
        if request.device_type != "cuda":
            return -59
        serving = self._serving(request)
        return 1 + (ABOVE_TRITON if serving is not None and beats_triton(request, serving, self.files()) else 40)

    def notes_on(self, request: BranchRequest) -> tuple[str, ...]:
        """Return which provider serves."""
        serving = self._serving(request)
        return () if serving is None else (f"by {serving}",)

    def __call__(self, queries: Queries, keys: Keys, /, *, geometry: BlockGeometry, scale: float) -> BranchOutput:
        """Compute the operation; see `nsa_core.backends.base.AttentionBackend`."""
        result: BranchOutput = run(self.operation, make_call(queries.q, geometry, scale, AUTO, self.providers), queries, keys)
        return result

    def _serving(self, request: BranchRequest) -> str | None:
        """Return the name of the backend that serves `request`. Gradients of lse are ignored, because a call cannot know whether it needs one."""
        return self.providers.explain(evolve(request, needs_lse_grad=False)).chosen


def flash_attention_backends(
    providers: tuple[Provider, ...] = PROVIDERS, files: Files = threshold_files
) -> tuple[FlashAttentionBackend | FirstProviderBackend, ...]:
    """Return `flash_attn` by the first provider that serves, and `flash_attn[PROVIDER]` by each, for both operations."""
    found: list[FlashAttentionBackend | FirstProviderBackend] = []
    for operation in (Operation.CMP, Operation.WIN):
        named = [
            FlashAttentionBackend(operation=operation, provider=each, name=f"flash_attn[{each.name}]", files=files) for each in providers
        ]
        installed = tuple(evolve(each, level=-rank, files=None) for rank, each in enumerate(named) if each.provider.is_installed)
        found += [FirstProviderBackend(operation=operation, providers=BackendRegistry(installed), files=files), *named]
    return tuple(found)
