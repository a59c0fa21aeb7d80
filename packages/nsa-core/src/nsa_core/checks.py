"""Checks at the public edge: shapes, dtypes and devices always; values only on a CPU, where reading them waits for nothing."""

import torch
from torch import Tensor

from nsa_core.config import BlockGeometry
from nsa_core.errors import InputError


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


def check_tensor(name: str, x: object) -> None:
    """Raise InputError unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} is a {type(x).__name__} (the rule: a tensor); use torch.as_tensor({name})")


def check_rank(name: str, x: Tensor, rank: int, layout: str) -> None:
    """Raise InputError unless `x` is a tensor of `rank` dimensions."""
    check_tensor(name, x)
    if x.dim() != rank:
        raise InputError(f"{name} has shape {tuple(x.shape)} (the layout is {layout}); give it {rank} dimensions")


def check_pair(q: Tensor, k: Tensor, v: Tensor | None, suffix: str, *, paged: bool = False, stored: bool = False) -> None:
    """Raise InputError unless keys `(B, T, G, D_k)` and values `(B, T, G, D_v)` fit q and each other; `stored`: in a dtype of their own."""
    for letter, x in (("k", k), ("v", v)):
        if x is not None:
            name = letter + suffix
            check_rank(name, x, 4, "(pages, page_size, G, D)" if paged else "(B, T, G, D)")
            (check_device if stored else check_like)(name, x, "q", q)
    (batch, _, num_heads, head_dim), shape = q.shape, k.shape
    if shape[3] != head_dim:
        raise InputError(f"k{suffix} has head dimension {shape[3]}, q has {head_dim} (they meet in a product); make them equal")
    if v is not None and v.shape[:3] != shape[:3]:
        raise InputError(f"v{suffix} has shape {tuple(v.shape)}, k{suffix} {tuple(shape)} (equal but for the last); pair them up")
    if not paged and shape[0] != batch:
        raise InputError(f"k{suffix} has batch size {shape[0]}, q has {batch} (the rule: equal); give both the same batch")
    num_kv_heads = shape[2]
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise InputError(
            f"k{suffix} has {num_kv_heads} KV heads for {num_heads} query heads (each serves H/G of them); use a divisor of {num_heads}"
        )


def check_like(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raise InputError unless `x` has the dtype and device of `other`."""
    if x.dtype != other.dtype:
        raise InputError(f"{name} is {x.dtype}, {other_name} is {other.dtype} (q, k, v share one dtype); cast one with .to()")
    check_device(name, x, other_name, other)


def check_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raise InputError unless `x` lies on the device of `other`."""
    if x.device != other.device:
        raise InputError(f"{name} is on {x.device}, {other_name} on {other.device} (one device per call); move one with .to()")


def check_shape(name: str, x: Tensor, shape: tuple[int, ...], layout: str) -> None:
    """Raise InputError unless `x` has exactly `shape`."""
    if tuple(x.shape) != shape:
        raise InputError(f"{name} has shape {tuple(x.shape)} (the layout is {layout}); give it {shape}")


def check_integers(name: str, x: Tensor, rank: int, layout: str, q: Tensor) -> None:
    """Raise InputError unless `x` is an int32 tensor of `rank` dimensions on q's device."""
    check_rank(name, x, rank, layout)
    if x.dtype != torch.int32:
        raise InputError(f"{name} is {x.dtype} (kernels read int32); use {name}.to(torch.int32)")
    check_device(name, x, "q", q)


def can_read(x: Tensor) -> bool:
    """Return True where the values of `x` may be read: on a CPU, outside a graph that is being traced."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor, max_seqlen: int | None) -> None:
    """Raise InputError unless `cu_seqlens` bounds the rows of a packed q (or x) `(1, S, ...)`; its values are read on a CPU only."""
    check_integers("cu_seqlens", cu_seqlens, 1, "(N + 1,)", q)
    if cu_seqlens.shape[0] < 1:
        raise InputError("cu_seqlens is empty (it holds N + 1 offsets); use [0, S] for one sequence")
    if q.shape[0] != 1:
        raise InputError(f"cu_seqlens came with batch size {q.shape[0]} (packed sequences lie in one row: B = 1); reshape to (1, S, ...)")
    if not can_read(cu_seqlens):
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != q.shape[1]:
        raise InputError(
            f"cu_seqlens runs from {offsets[0]} to {offsets[-1]} (the rule: from 0 to the total S={q.shape[1]}); use [0, ..., {q.shape[1]}]"
        )
    lengths = [after - before for before, after in zip(offsets, offsets[1:], strict=False)]
    if any(length < 0 for length in lengths):
        where = next(place for place, length in enumerate(lengths) if length < 0)
        raise InputError(
            f"cu_seqlens decreases from {offsets[where]} to {offsets[where + 1]} at entry {where + 1} (offsets never decrease); sort them"
        )
    if max_seqlen is not None and lengths and max(lengths) > max_seqlen:
        raise InputError(
            f"max_seqlen={max_seqlen} is below the longest sequence, {max(lengths)} (it bounds every one); use {max(lengths)} or more"
        )


def check_page_table(page_table: Tensor, last_tokens: Tensor, name: str, num_pages: int, page_size: int) -> None:
    """Raise InputError where an entry that is needed names no page of the store `name`; values are read on a CPU only.

    `last_tokens` `(B,)`: tokens of each sequence up to its last query row, 0 where it has none; a page holds `page_size` tokens.
    """
    if not can_read(page_table) or not page_table.numel() or not page_size:
        return
    num_needed = (last_tokens + page_size - 1) // page_size
    if int(num_needed.max()) > page_table.shape[1]:
        b = int(num_needed.argmax())
        raise InputError(
            f"page_table has {page_table.shape[1]} entries a sequence where sequence {b} has {int(num_needed[b])} pages of {name} "
            f"(a page holds {page_size} tokens); give it {int(num_needed[b])} entries"
        )
    needed = torch.arange(page_table.shape[1]) < num_needed.unsqueeze(1)
    outside = needed & ((page_table < 0) | (page_table >= num_pages))
    if bool(outside.any()):
        b, place = (int(index) for index in outside.nonzero()[0])
        raise InputError(
            f"page_table[{b}, {place}]={int(page_table[b, place])} names no page of {name} (it has {num_pages}, and sequence {b} "
            f"needs its first {int(needed[b].sum())}); use 0 .. {num_pages - 1}"
        )
    ordered = torch.where(needed, page_table, -1).sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        b, place = (int(index) for index in twice.nonzero()[0])
        raise InputError(
            f"page_table[{b}] names page {int(ordered[b, place])} of {name} twice (a page holds the tokens of one stretch of a sequence); "
            f"give each stretch a page of its own"
        )


def check_geometry(geometry: object) -> None:
    """Raise InputError unless `geometry` is one."""
    if not isinstance(geometry, BlockGeometry):
        raise InputError(f"geometry={geometry!r} is a {type(geometry).__name__} (the rule: a BlockGeometry); use BlockGeometry()")


def check_block_indices(block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> None:
    """Raise InputError where a row of `(B, S, G, n)` names a block twice or outside 0 .. own; -1 is none. CPU only."""
    if not can_read(block_indices) or not block_indices.numel():
        return
    own = torch.div(positions, geometry.selection_block_size, rounding_mode="floor")[:, :, None, None]
    outside = (block_indices < -1) | (block_indices > own)
    if bool(outside.any()):
        b, t, g, slot = (int(place) for place in outside.nonzero()[0])
        raise InputError(
            f"block_indices[{b}, {t}, {g}, {slot}]={int(block_indices[b, t, g, slot])} is out of range (the query's candidates are "
            f"0 .. {int(own[b, t, 0, 0])}, and -1 for none); use what select_blocks returns"
        )
    ordered = block_indices.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(twice.any()):
        b, t, g, slot = (int(place) for place in twice.nonzero()[0])
        raise InputError(
            f"block_indices[{b}, {t}, {g}] names block {int(ordered[b, t, g, slot])} twice (each chosen block counts once); use -1 for unused slots"
        )
