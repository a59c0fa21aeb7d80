"""The backends `flash_attn` and `flash_attn[PROVIDER]`."""

from typing import Any

from attrs import frozen

from nsa_core import BranchRequest, Capability, Operation, Reason
from nsa_kernels_cuda.flash_attention.providers import FLASH_2, PROVIDERS, Provider

UNMEASURED = "no length is measured from which it is faster than the kernels of this project; name it to take it"


@frozen(kw_only=True)
class FlashAttentionBackend:
    """Compressed or sliding-window attention by `provider`."""

    operation: Operation
    provider: Provider
    name: str
    capability: Capability = FLASH_2

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return the limits of the provider, and that no length was measured."""
        return (*self.provider.reasons_against(request), Reason.policy(UNMEASURED))

    def preference(self, request: BranchRequest) -> int:
        """Return how much it is wanted: on a GPU less than the kernels of this project and more than the reference."""
        return 40 if request.device_type == "cuda" else -100

    def notes_on(self, request: BranchRequest) -> tuple[str, ...]:
        """Return which provider serves where the name does not say it."""
        return (f"by flash_attn[{self.provider.name}]",) if self.name == "flash_attn" else ()

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Compute the operation on the operands of `nsa_core.backends.base.AttentionBackend`."""
        from nsa_kernels_cuda.flash_attention.op import op_of

        return op_of(self.operation, self.provider)(*operands, **keywords)


def flash_attention_backends(providers: tuple[Provider, ...] = PROVIDERS) -> tuple[FlashAttentionBackend, ...]:
    """Return `flash_attn` by the first installed provider, and `flash_attn[PROVIDER]` by each, for both operations."""
    first = next(provider for provider in providers if provider.is_installed)
    named = [("flash_attn", first), *((f"flash_attn[{provider.name}]", provider) for provider in providers)]
    return tuple(
        FlashAttentionBackend(operation=operation, provider=provider, name=name)
        for operation in (Operation.CMP, Operation.WIN)
        for name, provider in named
    )
