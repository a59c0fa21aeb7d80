"""Dense causal attention by the fastest available kernels, which sparse attention must beat.

Each kernel takes q (B, S, H, D_k), k (B, S, G, D_k), v (B, S, G, D_v) and returns (B, S, H, D_v). If a kernel needs D_k = D_v, the narrower
operand is padded with zeros, and that copy is part of the kernel's time.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from nsa_bench.cases import Case
from nsa_bench.errors import OptionError
from nsa_core.reference.causal import causal_attention

BASELINES = ("flash", "cudnn", "flex", "flash-attn")
"""torch's SDPA by FlashAttention-2 and by cuDNN, compiled FlexAttention, and the package flash-attn."""
FLASH_ATTN_MODULES = {"flash_attn.cute": "flash-attn-4", "flash_attn_interface": "flash-attn-3", "flash_attn": "flash-attn-2"}
"""Modules in which versions of flash-attn have `flash_attn_func`, best first."""
FLEX_BLOCK = 128
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@frozen(kw_only=True)
class Baseline:
    """A dense kernel, or the reason why there is none."""

    name: str
    run: Attention | None = None
    reason: str = ""
    """Why the kernel is absent; "" if it is present."""


def parse_baselines(text: str) -> tuple[str, ...]:
    """Return the names of "all", "none" or "cudnn,flash".

    Raises:
        OptionError: for an unknown name.
    """
    if text in ("all", "none"):
        return BASELINES if text == "all" else ()
    unknown = [name for name in text.split(",") if name not in BASELINES]
    if unknown:
        raise OptionError(
            f"--baseline={text!r} names {unknown[0]!r} (the rule: all, none, or some of {', '.join(BASELINES)}); use cudnn,flash"
        )
    return tuple(text.split(","))


def find_baseline(name: str, case: Case, device: torch.device) -> Baseline:
    """Return the kernel `name` for `case`, which must have one sequence. Whether the kernel supports the case shows only when it runs."""
    if name == "flash":
        return Baseline(name="SDPA flash", run=_sdpa(SDPBackend.FLASH_ATTENTION, is_padded=True))
    if name == "cudnn":
        if device.type != "cuda":
            return Baseline(name="SDPA cuDNN", reason="runs on CUDA devices only")
        return Baseline(name="SDPA cuDNN", run=_sdpa(SDPBackend.CUDNN_ATTENTION, is_padded=False))
    if name == "flex":
        if device.type != "cuda":
            return Baseline(name="FlexAttention", reason="measured on CUDA devices only (it has no backward on a CPU)")
        return Baseline(name="FlexAttention", run=_flex(case, device))
    return _flash_attn(device)


def _sdpa(backend: SDPBackend, *, is_padded: bool) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale, dim_v = q.shape[-1] ** -0.5, v.shape[-1]
        if is_padded:
            q, k, v = _equal_dims(q, k, v)
        with sdpa_kernel(backend):
            out = causal_attention(q, k, v, scale=scale)
        return out[..., :dim_v]

    return run


def _equal_dims(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with zeros up to the longest last dimension."""
    longest = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == longest else pad(x, (0, longest - x.shape[-1])) for x in tensors)


def _flex(case: Case, device: torch.device) -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    # clear the compilation cache: after a few shapes torch.compile would fall back to eager, which stores all scores
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = causal_block_mask(case.seq_len, device)
    is_grouped = case.shape.heads_per_group > 1

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, block_mask=block_mask, enable_gqa=is_grouped)
        return out.transpose(1, 2)

    return run


def causal_block_mask(length: int, device: torch.device) -> Any:
    """Return the causal BlockMask of `length` tokens, without the length x length mask that create_block_mask makes."""
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-length // FLEX_BLOCK)
    block = torch.arange(count, device=device, dtype=torch.int32)
    # row i sees block i in part and blocks 0 .. i - 1 wholly; if the last row is truncated, it sees all blocks in part
    in_part, whole = torch.ones_like(block), block.clone()
    if length % FLEX_BLOCK:
        in_part[-1], whole[-1] = count, 0
    own_first = (block.unsqueeze(1) + block) % count
    return BlockMask.from_kv_blocks(
        in_part[None, None],
        own_first[None, None].contiguous(),
        whole[None, None],
        block.expand(1, 1, count, count).contiguous(),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=_is_causal_pair,
        seq_lengths=(length, length),
    )


def _is_causal_pair(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def find_flash_attn() -> tuple[str, Callable[..., Any] | None]:
    """Return name and function of the best installed version of flash-attn; if there is none, return the reason and None."""
    problems = []
    for module, name in FLASH_ATTN_MODULES.items():
        # by name: a kernel package is never a dependency of this one
        try:
            return name, import_module(module).flash_attn_func
        except Exception as error:  # noqa: BLE001 - an extension built for another torch may raise anything
            problems.append(f"{type(error).__name__}: {error}")
    return f"cannot be imported ({'; '.join(dict.fromkeys(problems))})", None


def _flash_attn(device: torch.device) -> Baseline:
    if device.type != "cuda":
        return Baseline(name="flash-attn", reason="runs on CUDA devices only")
    name, function = find_flash_attn()
    if function is None:
        return Baseline(name="flash-attn", reason=name)
    return Baseline(name=name, run=_flash_attn_run(function, is_always_padded=name == "flash-attn-2"))


def _flash_attn_run(function: Callable[..., Any], *, is_always_padded: bool) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale, dim_v = q.shape[-1] ** -0.5, v.shape[-1]
        # newer versions support D_k != D_v in the forward pass, but with grouped heads not in the backward pass
        if is_always_padded or torch.is_grad_enabled():
            q, k, v = _equal_dims(q, k, v)
        out = function(q, k, v, softmax_scale=scale, causal=True)
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended[..., :dim_v]

    return run


def dense_decode_kernels(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Return name -> call of dense attention for one query of each sequence: q `(B, H, D_k)`, k `(B, T, G, D_k)`, v `(B, T, G, D_v)`.

    A group's heads are the rows of one query tile. If a kernel needs D_k = D_v, values are stored as wide as keys; this copy is not part
    of its time.
    """
    # no copy if they already have this width
    wide = v if v.shape[3] >= k.shape[3] else pad(v, (0, k.shape[3] - v.shape[3]))
    grouped = q.unflatten(1, (k.shape[2], -1))

    def by_sdpa(backend: SDPBackend, values: Tensor) -> Callable[[], object]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(grouped, k.transpose(1, 2), values.transpose(1, 2))

        return call

    if q.device.type != "cuda":
        return {"torch math": by_sdpa(SDPBackend.MATH, v)}
    found = {"torch flash": by_sdpa(SDPBackend.FLASH_ATTENTION, wide), "torch cuDNN": by_sdpa(SDPBackend.CUDNN_ATTENTION, v)}
    name, function = find_flash_attn()
    return found if function is None else found | flash_attn_decode(name, function, grouped.transpose(1, 2).contiguous(), k, wide)


def flash_attn_decode(name: str, function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Return name -> call for a version of flash-attn. Newer versions split keys only on request; 0 lets them choose the number of splits."""
    found: dict[str, Callable[[], object]] = {name: partial(function, q, k, v, causal=False)}
    if "num_splits" in signature(function).parameters:
        found[f"{name} split"] = partial(function, q, k, v, causal=False, num_splits=0)
    return found
