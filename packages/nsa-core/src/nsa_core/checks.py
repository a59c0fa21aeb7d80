"""Checks of the arguments of public functions. Shapes, dtypes and devices are always checked, values only on a CPU, where reading does not wait."""

from collections.abc import Collection
from itertools import pairwise
from math import inf
from numbers import Integral, Real
from typing import Any, TypeGuard

import torch
from torch import SymFloat, SymInt, Tensor

from nsa_core.config import BRANCHES, BlockGeometry, NSAConfig
from nsa_core.errors import InputError, type_of


def check_query(q: Tensor) -> None:
    """Raise InputError unless q is a floating `(B, S, H, D_k)`."""
    check_rank("q", q, 4, "(B, S, H, D_k)")
    check_floating("q", q)
    if q.shape[3] < 1:
        raise InputError("q has head dimension 0 (scores are products over it, the rule: at least 1); use 64")


def check_floating(name: str, x: Tensor) -> None:
    """Raise InputError unless `x` is a floating tensor."""
    if not x.is_floating_point():
        raise InputError(f"{name} is {x.dtype} (attention takes floating tensors); use float32, bfloat16, float16 or float64")


def check_wide(name: str, x: Tensor) -> None:
    """Raise InputError unless `x` is a floating tensor that torch computes with, which it does not in 8 bits."""
    check_floating(name, x)
    if x.dtype.itemsize < 2:
        raise InputError(f"{name} is {x.dtype} (arithmetic needs at least 16 bits); use {name}.to(torch.float32)")


def check_rank(name: str, x: object, rank: int, layout: str) -> None:
    """Raise InputError unless `x` is a tensor of `rank` dimensions."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} is {type_of(x)} (the rule: a tensor); use torch.as_tensor({name})")
    if x.dim() != rank:
        raise InputError(f"{name} has shape {tuple(x.shape)} (the layout is {layout}); give it {rank} dimensions")


def check_tensor(
    name: str, x: Tensor, shape: tuple[int | None, ...], layout: str, q: Tensor | None = None, dtype: torch.dtype | None = None
) -> None:
    """Raise InputError unless `x` is a tensor of `shape` and `dtype` on the device of q; a size of None matches any, a dtype of None any float."""
    if None in shape or not isinstance(x, Tensor):
        check_rank(name, x, len(shape), layout)
        shape = tuple(have if size is None else size for size, have in zip(shape, x.shape, strict=False))
    if dtype is None:
        check_floating(name, x)
    elif x.dtype != dtype:
        raise InputError(f"{name} is {x.dtype} (kernels read {str(dtype).removeprefix('torch.')}); use {name}.to({dtype})")
    if q is not None:
        check_device(name, x, "q", q)
    if tuple(x.shape) != shape:
        raise InputError(f"{name} has shape {tuple(x.shape)} (the layout is {layout}); give it {shape}")


def check_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raise InputError unless `x` is on the device of `other`."""
    if x.device != other.device:
        raise InputError(f"{name} is on {x.device}, {other_name} on {other.device} (one device per call); move one with .to()")


def check_hidden(x: object, hidden_size: int, weight: object) -> None:
    """Raise InputError unless `x` is `(B, S, hidden_size)` on the device of the layer's `weight`, and of its dtype unless autocast casts it."""
    layout = f"(B, S, hidden_size={hidden_size})"
    check_rank("x", x, 3, layout)
    assert isinstance(x, Tensor)
    if x.shape[2] != hidden_size:
        raise InputError(f"x has shape {tuple(x.shape)} (the layout is {layout}); reshape it")
    if not is_plain(weight):
        return
    # offloaded weights are on the meta device until a projection runs
    if not weight.is_meta:
        check_device("x", x, "the layer", weight)
    if x.dtype != weight.dtype and not (x.is_floating_point() and is_autocast(x, x.dtype, weight.dtype)):
        raise InputError(f"x is {x.dtype}, the layer's weights are {weight.dtype} (they meet in products); cast one with .to()")


def check_cache_dtype(x: Tensor, dtype: torch.dtype, weight: object) -> None:
    """Raise InputError unless a cache of `dtype` fits a layer with `weight`, or autocast casts between them."""
    computed = weight.dtype if is_plain(weight) else x.dtype
    if dtype != computed and not is_autocast(x, dtype, computed):
        raise InputError(f"the cache holds {dtype}, the layer computes in {computed}; build it with this layer's new_cache")


def is_plain(weight: object) -> TypeGuard[Tensor]:
    """Return True if a layer with `weight` computes in its dtype. A quantized layer of another package keeps integers, FP8, or no tensor there."""
    return isinstance(weight, Tensor) and weight.is_floating_point() and weight.dtype.itemsize > 1


def is_autocast(x: Tensor, *dtypes: torch.dtype) -> bool:
    """Return True if autocast is on for the device of `x` and casts between `dtypes`: any but float64."""
    is_on = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    return is_on and torch.float64 not in dtypes


def can_read(x: Tensor | None) -> TypeGuard[Tensor]:
    """Return True if `x` has values that may be read: not empty, on a CPU, outside a traced graph."""
    return x is not None and x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel() > 0


def check_count(query_count: Tensor, num_sequences: int, num_rows: int) -> None:
    """Raise InputError unless `query_count` is int32 `(B,)` and, where it may be read, its counts are in 0 .. num_rows."""
    check_tensor("query_count", query_count, (num_sequences,), "(B,)", dtype=torch.int32)
    if can_read(query_count) and bool(((query_count < 0) | (query_count > num_rows)).any()):
        raise InputError(f"query_count={query_count.tolist()} leaves 0 .. {num_rows} (the rows that x has); clip it")


def check_indices(indices: Tensor, num_sequences: int) -> None:
    """Raise InputError unless `indices` `(B',)` name sequences of a cache of `num_sequences`; their values are read on a CPU only."""
    check_rank("indices", indices, 1, "(B',)")
    if indices.dtype not in (torch.int64, torch.int32):
        raise InputError(f"indices are {indices.dtype} (they name sequences); use indices.to(torch.int64)")
    if can_read(indices):
        outside = indices[(indices < 0) | (indices >= num_sequences)]
        if outside.numel():
            raise InputError(f"indices name sequence {int(outside[0])} (the cache holds {num_sequences}); use 0 .. {num_sequences - 1}")


def longest_of(cu_seqlens: Tensor, otherwise: int) -> int:
    """Return the rows of the longest sequence, or `otherwise` where they may not be read."""
    return int(cu_seqlens.diff().max()) if can_read(cu_seqlens) and cu_seqlens.shape[0] > 1 else otherwise


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    """Raise InputError unless `cu_seqlens` bounds the rows of a packed q (or x) `(1, S, ...)`; its values are read on a CPU only."""
    check_tensor("cu_seqlens", cu_seqlens, (None,), "(N + 1,)", q, torch.int32)
    if cu_seqlens.shape[0] < 1:
        raise InputError("cu_seqlens is empty (it holds N + 1 offsets); use [0, S] for one sequence")
    if q.shape[0] != 1:
        raise InputError(f"cu_seqlens came with batch size {q.shape[0]} (packed sequences are in one row: B = 1); reshape to (1, S, ...)")
    if not can_read(cu_seqlens):
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != q.shape[1]:
        raise InputError(
            f"cu_seqlens runs from {offsets[0]} to {offsets[-1]} (the rule: from 0 to the total S={q.shape[1]}); use [0, ..., {q.shape[1]}]"
        )
    for entry, (before, after) in enumerate(pairwise(offsets), 1):
        if after < before:
            raise InputError(f"cu_seqlens decreases from {before} to {after} at entry {entry} (offsets never decrease); sort them")


def is_size(size: Any, least: int) -> bool:
    """Return True for an integer of at least `least`. A tensor is not accepted, because it would have to be read."""
    return not isinstance(size, bool) and isinstance(size, Integral | SymInt) and not size < least


def check_geometry(geometry: object) -> None:
    """Raise InputError unless `geometry` is a BlockGeometry."""
    if not isinstance(geometry, BlockGeometry):
        raise InputError(f"geometry={geometry!r} is {type_of(geometry)} (the rule: a BlockGeometry); use BlockGeometry()")


def check_config(config: object) -> None:
    """Raise InputError unless `config` is one of a layer."""
    if not isinstance(config, NSAConfig):
        raise InputError(f"config={config!r} is {type_of(config)} (the rule: an NSAConfig); use NSAConfig(...) or config_from_dict(...)")


def check_scale(scale: Any) -> None:
    """Raise InputError unless `scale` is a finite number or None. A tensor is not accepted, because it would have to be read."""
    is_number = not isinstance(scale, bool) and (isinstance(scale, SymFloat) or (isinstance(scale, Real) and -inf < float(scale) < inf))
    if scale is not None and not is_number:
        raise InputError(f"scale={scale!r} is {type_of(scale)} (the rule: a finite number, or None for D_k ** -0.5); use None")


def check_dtype(dtype: object) -> None:
    """Raise InputError unless `dtype`, for the stores of a cache, is a floating-point dtype of more than 8 bits."""
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise InputError(
            f"dtype={dtype!r} is no dtype of keys and values (the rule: a floating torch.dtype, of 8 bits only as kv_dtype); use torch.float32"
        )


def check_absent(absent: object) -> None:
    """Raise InputError unless `absent` is a collection of names of branches."""
    if not isinstance(absent, Collection) or any(name not in BRANCHES for name in absent):
        raise InputError(f"absent={absent!r} names no branch (the rule: a tuple of 'cmp', 'slc', 'win'); use ('cmp',)")
