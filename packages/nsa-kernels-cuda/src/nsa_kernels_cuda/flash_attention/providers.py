"""Adapters that give each library's causal attention the same two calls, `forward` and `backward`, and list its limits.

Tensors are q (B, S, H, D_k), k (B, S, G, D_k), v (B, S, G, D_v) and lse (B, S, H); the last dimension is contiguous, the others need not
be. Query t sees keys t - window + 1 .. t, or all keys up to t if window is None.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, Protocol

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn.functional import pad

from nsa_core import BranchRequest, Capability, Layout, Operation, Reason
from nsa_core.backends.base import BranchOutput

FLASH_2 = Capability(
    device_types=("cuda",),
    min_compute_capability=(8, 0),
    dtypes=(torch.bfloat16, torch.float16),
    layouts=(Layout.DENSE,),
    max_head_dim=256,
    lse_gradient=False,
)
"""The capability of FlashAttention-2 in dense batches, the only layout of the adapter."""
FLASH_4 = evolve(FLASH_2, min_compute_capability=(9, 0), lse_gradient=True)
CUDNN = evolve(FLASH_2, max_head_dim=None, deterministic_gradient=False)
LEAST_CUDNN = 91501
"""cuDNN 9.15.1. Older versions err at lengths that are no multiples of 128 (pytorch#169849)."""


class Gradients(NamedTuple):
    """Gradients of q, k and v."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class ResultGradients(NamedTuple):
    """Gradients of out and lse."""

    out: Tensor
    lse: Tensor | None


class Provider(Protocol):
    """One library's causal attention."""

    def __hash__(self) -> int:
        """Return a hash by value, because an op is declared once for each provider."""

    @property
    def name(self) -> str:
        """Return the provider's name, as in `flash_attn[NAME]`."""

    @property
    def is_installed(self) -> bool:
        """Return True if the provider's package is installed; does not import the package."""

    @property
    def capability(self) -> Capability:
        """Return the part of the provider's abilities and limits that a Capability can express."""

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return every reason why the provider cannot serve `request`, including reasons from its capability."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> BranchOutput:
        """Return attention and its lse."""

    def backward(
        self, grads: ResultGradients, q: Tensor, k: Tensor, v: Tensor, result: BranchOutput, *, scale: float, window: int | None
    ) -> Gradients:
        """Return the gradients of q, k and v, given those of out and lse; `grads.lse` is not read without `capability.lse_gradient`."""


@frozen(kw_only=True)
class FlashAttention2:
    """flash-attn 2, by the functions that its autograd calls, as in release 2.8. Not tested: it could not be installed on the author's machine."""

    name: str = "fa2"
    capability: Capability = FLASH_2

    @property
    def is_installed(self) -> bool:
        """Return True if its package is installed."""
        return _is_installed("flash-attn")

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return its limits."""
        return _missing(self, "flash-attn") + _reasons(self, request) + _unequal_heads(request)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> BranchOutput:
        """Return attention and its lse."""
        from flash_attn.flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, scale, True, *_sides(window), 0.0, None, False)
        return BranchOutput(out, lse.transpose(1, 2))

    def backward(
        self, grads: ResultGradients, q: Tensor, k: Tensor, v: Tensor, result: BranchOutput, *, scale: float, window: int | None
    ) -> Gradients:
        """Return the gradients of q, k and v, given the gradient of out."""
        from flash_attn.flash_attn_interface import _flash_attn_backward

        found = Gradients(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)))
        lse = result.lse.transpose(1, 2).contiguous()
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        _flash_attn_backward(
            grads.out, q, k, v, result.out, lse, *found, 0.0, scale, True, *_sides(window), 0.0, None, is_deterministic
        )  # fmt: skip
        return found


@frozen(kw_only=True)
class TorchFlash:
    """FlashAttention-2 as built into torch."""

    name: str = "torch"
    is_installed: bool = True
    capability: Capability = FLASH_2

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return its limits."""
        return _reasons(self, request) + _unequal_heads(request)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> BranchOutput:
        """Return attention and its lse."""
        left, right = _sides(window)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, scale=scale, window_size_left=left, window_size_right=right
        )
        return BranchOutput(out, lse.transpose(1, 2))

    def backward(
        self, grads: ResultGradients, q: Tensor, k: Tensor, v: Tensor, result: BranchOutput, *, scale: float, window: int | None
    ) -> Gradients:
        """Return the gradients of q, k and v, given the gradient of out."""
        left, right = _sides(window)
        # without dropout the generator's state is not read
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        return Gradients(
            *torch.ops.aten._flash_attention_backward(
                grads.out, q, k, v, result.out, result.lse.transpose(1, 2).contiguous(), None, None, q.shape[1], k.shape[1], 0.0, True,
                state, state, scale=scale, window_size_left=left, window_size_right=right,
            )
        )  # fmt: skip


@frozen(kw_only=True)
class FlashAttention4:
    """flash-attn 4 (`flash_attn.cute`), by the functions that its autograd calls, as in 4.0.0b36. This adapter has not run yet."""

    name: str = "fa4"
    capability: Capability = FLASH_4

    @property
    def is_installed(self) -> bool:
        """Return True if its package is installed."""
        return _is_installed("flash-attn-4")

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return its limits."""
        found = _missing(self, "flash-attn-4") + _reasons(self, request)
        if request.compute_capability not in (None, (9, 0)):
            found += (Reason.incapable("compute capability {}.{} (the adapter is for 9.0)".format(*request.compute_capability)),)
        # without GQA it supports unequal head dimensions
        is_grouped = request.num_heads != request.num_kv_heads
        return found + (_unequal_heads(request) if request.needs_grad and is_grouped else ())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> BranchOutput:
        """Return attention and its lse."""
        from flash_attn.cute.interface import _flash_attn_fwd

        left, right = (None, None) if window is None else (window - 1, 0)
        out, lse, *_ = _flash_attn_fwd(
            q, k, v, softmax_scale=scale, causal=True, window_size_left=left, window_size_right=right, return_lse=True
        )
        return BranchOutput(out, lse.transpose(1, 2))

    def backward(
        self, grads: ResultGradients, q: Tensor, k: Tensor, v: Tensor, result: BranchOutput, *, scale: float, window: int | None
    ) -> Gradients:
        """Return the gradients of q, k and v, given those of out and lse."""
        from flash_attn.cute.interface import _flash_attn_bwd

        left, right = (None, None) if window is None else (window - 1, 0)
        lse, dlse = (None if x is None else x.transpose(1, 2).contiguous() for x in (result.lse, grads.lse))
        found = _flash_attn_bwd(
            q, k, v, result.out, grads.out, lse, softmax_scale=scale, causal=True, window_size_left=left, window_size_right=right,
            deterministic=torch.are_deterministic_algorithms_enabled(), dlse=dlse,
        )  # fmt: skip
        return Gradients(*found[:3])


@frozen(kw_only=True)
class TorchCudnn:
    """cuDNN's attention as built into torch, by the ops that autograd calls, as in 2.11 to 2.13. This adapter has not run yet.

    Its causal mask has no window. torch caches cuDNN's plans by the sizes and strides of q, k and v alone. So out, lse and their gradients
    must always have the same layout, or the backward pass would use a plan for another layout.
    """

    name: str = "cudnn"
    capability: Capability = CUDNN

    @property
    def is_installed(self) -> bool:
        """Return True if torch is built with cuDNN."""
        return torch.version.cuda is not None and torch.backends.cudnn.is_available()

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        """Return its limits."""
        found = []
        if not self.is_installed:
            found.append("torch is built without cuDNN; install a CUDA build of torch")
        elif request.device_type == "cuda" and (problem := _cudnn_problem()):
            found.append(problem)
        dims, (major, minor) = (request.head_dim_qk, request.head_dim_v), request.compute_capability or (0, 0)
        if max(dims) > 128 and not (dims == (192, 128) and (major == 10 or (major, minor) == (9, 0))):
            limit = "takes up to 128, and 192 with 128 on compute capability 9.0 and 10"
            found.append("head dimensions {} and {} ({})".format(*dims, limit))
        window = request.geometry.window_size
        if request.operation is Operation.WIN and request.num_keys > window:
            found.append(f"{request.num_keys} tokens with w = {window} (its causal mask has no window; takes at most w tokens)")
        if not request.is_aligned:
            found.append("a tensor starts off a multiple of 16 bytes")
        return _reasons(self, request) + tuple(map(Reason.incapable, found))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> BranchOutput:
        """Return attention and its lse."""
        rows = q.shape[1]
        assert window is None or window >= rows
        q, k, v = (_for_cudnn(x).transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, scale=scale)
        return BranchOutput(out.transpose(1, 2)[:, :rows], lse.squeeze(-1).transpose(1, 2)[:, :rows])

    def backward(
        self, grads: ResultGradients, q: Tensor, k: Tensor, v: Tensor, result: BranchOutput, *, scale: float, window: int | None
    ) -> Gradients:
        """Return the gradients of q, k and v, given the gradient of out."""
        rows = q.shape[1]
        assert window is None or window >= rows
        q, k, v, out, dout = (_for_cudnn(x).transpose(1, 2) for x in (q, k, v, result.out.contiguous(), grads.out.contiguous()))
        # a row that was added for padding has lse 0; its gradient of out is 0, too
        lse = pad(result.lse.transpose(1, 2), (0, q.shape[2] - rows)).unsqueeze(-1).contiguous()
        # without dropout the generator's state is not read
        state = torch.empty((), dtype=torch.int64, device=q.device)
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, state, state, None, None, None, q.shape[2], k.shape[2], 0.0, True, scale=scale
        )  # fmt: skip
        return Gradients(*(x.transpose(1, 2)[:, :rows] for x in found))


PROVIDERS: tuple[Provider, ...] = (FlashAttention4(), FlashAttention2(), TorchFlash(), TorchCudnn())
"""All providers in order; `flash_attn` uses the first one that is installed and serves the call."""


def _sides(window: int | None) -> tuple[int, int]:
    """Return how many keys a query sees before and after its own; -1 means all."""
    return (-1, -1) if window is None else (window - 1, 0)


def _for_cudnn(x: Tensor) -> Tensor:
    """Return `x` (B, S, H, D) as cuDNN needs it: at least two rows, and strides that are non-zero multiples of 16 bytes."""
    x = pad(x, (0, 0, 0, 0, 0, 1)) if x.shape[1] == 1 else x
    is_taken = all(step and step * x.element_size() % 16 == 0 for step in x.stride()[:-1])
    return x if is_taken else x.clone(memory_format=torch.contiguous_format)


def _cudnn_problem() -> str:
    """Return why cuDNN cannot be used; "" if it can. This loads cuDNN."""
    try:
        found = torch.backends.cudnn.version() or 0
    except RuntimeError as error:
        return f"cuDNN does not load: {str(error).splitlines()[0]}"
    # 9.15.1 is 91501
    dotted = f"{found // 10000}.{found // 100 % 100}.{found % 100}"
    return (
        "" if found >= LEAST_CUDNN else f"cuDNN {dotted} (needs 9.15.1 or newer); upgrade the package nvidia-cudnn of torch's CUDA version"
    )


def _reasons(provider: Provider, request: BranchRequest) -> tuple[Reason, ...]:
    odd = dict.fromkeys(size for size in (request.head_dim_qk, request.head_dim_v) if size % 8)
    limits = (Reason.incapable(f"head dimension {size} (needs a multiple of 8)") for size in odd)
    return (*provider.capability.reasons_against(request), *limits)


def _unequal_heads(request: BranchRequest) -> tuple[Reason, ...]:
    if request.head_dim_qk == request.head_dim_v:
        return ()
    return (Reason.incapable(f"head dimensions {request.head_dim_qk} and {request.head_dim_v} (needs D_k = D_v)"),)


def _missing(provider: Provider, package: str) -> tuple[Reason, ...]:
    return () if provider.is_installed else (Reason.incapable(f"{package} is not installed; pip install {package}"),)


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
