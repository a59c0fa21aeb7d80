"""The operation APPEND: choose the kernels that write a step, and their grids."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nsa_core.backends.base import Keys, NewBlocks, NewRows
from nsa_core.compression import ConvCompressor, MeanCompressor, MLPCompressor
from nsa_core.config import BlockGeometry
from nsa_core.reference import append as reference
from nsa_core.rope import RotaryEmbedding, unrotated
from nsa_kernels_triton.append import kernels
from nsa_kernels_triton.launch import cdiv, has_pdl, next_power_of_2, starts_early

MOST_STORES = 3
"""Maximum number of stores whose rows one launch writes."""
TOKEN_SPLITS = 8
"""Number of splits of a block's tokens in the hidden layer of `mlp`."""
BLOCK_ITEMS = 16
"""Blocks in a tile of the matrix products of `mlp`: the smallest tile that they support."""
BLOCK_COLUMNS = 32
MOST_MLP_ROWS = 16
"""Maximum rows of a sequence for which the kernels compute `mlp`. They are made for few blocks; for many, torch's matrix products are faster."""


Parameters = tuple[Tensor, ...]
"""The parameters of one compressor. `mean`: none; `conv`: the taps; `mlp`: position, then weight and bias of `up` and of `down`."""


class Phi(NamedTuple):
    """The parameters that the kernels read from the compressors of keys and values; None if absent."""

    k_taps: Tensor | None = None
    v_taps: Tensor | None = None
    k_mlp: Parameters | None = None
    v_mlp: Parameters | None = None
    frequencies: Tensor | None = None
    """float32 (D_k / 2,): frequencies of the rotation of block keys."""
    factor: float = 1.0


def append(rows: tuple[NewRows, ...], blocks: NewBlocks | None, start: Tensor, count: Tensor, *, geometry: BlockGeometry) -> None:
    """Write rows 0 .. count[b] - 1 from position start[b] on, and the blocks that they complete, in place; start and count are int32 (B,).

    One launch writes the rows of three stores, and the blocks of phi `mean` and `conv`; `mlp` takes a second launch. If the ring of raw tokens
    has fewer rows than l - 1 plus the rows of the step, one more launch writes the rows after the blocks. In two cases the modules are called
    in PyTorch, and the kernels only write the results: if phi or RoPE is a module that the layer did not build, and for `mlp` in steps of
    more than `MOST_MLP_ROWS` rows.
    """
    if not start.numel():
        return
    stores = [new.store for new in rows] + ([] if blocks is None else [blocks.store, blocks.raw.store])
    if not all(x.is_contiguous() for store in stores for x in (store.k, store.v, store.k_scale, store.v_scale) if x is not None):
        # the kernels need contiguous stores, and a contiguous copy would receive the step instead of the store
        reference.append(rows, blocks, start, count, geometry=geometry)
        return
    if not start.is_cuda:
        _append(rows, blocks, start, count, geometry)
        return
    with torch.cuda.device(start.device):
        _append(rows, blocks, start, count, geometry)


def _append(rows: tuple[NewRows, ...], blocks: NewBlocks | None, start: Tensor, count: Tensor, geometry: BlockGeometry) -> None:
    start, count = start.contiguous(), count.contiguous()
    phi = None if blocks is None else phi_of(blocks)
    has_many = phi is not None and phi.k_mlp is not None and blocks is not None and blocks.raw.k.shape[1] > MOST_MLP_ROWS
    if blocks is not None and (phi is None or has_many):
        # first, because writing rows overwrites raw tokens of blocks that are not complete yet
        reference.emit_blocks(blocks, start, count, geometry, write=write_rows)
        blocks = None
    if blocks is not None and phi is not None:
        raw = blocks.raw
        is_written = any(new.store.k is raw.store.k for new in rows)
        keeps_tail = raw.store.k.shape[1] >= geometry.compression_block_size - 1 + raw.k.shape[1]
        together = rows[:MOST_STORES] if keeps_tail or not is_written else ()
        _launch(together, blocks, phi, start, count, geometry)
        rows = rows[len(together) :]
    for first in range(0, len(rows), MOST_STORES):
        _launch(rows[first : first + MOST_STORES], None, Phi(), start, count, geometry)


def write_rows(new: NewRows, start: Tensor, count: Tensor) -> None:
    """Store rows 0 .. count[b] - 1 of `new` from position start[b] on, in place; see `nsa_core.reference.append.write_rows`."""
    _launch((new,), None, Phi(), start.to(torch.int32), count.to(torch.int32), BlockGeometry())


def phi_of(blocks: NewBlocks) -> Phi | None:
    """Return the parameters of the compressors and of RoPE of `blocks`; None unless these are unmodified modules that the layer built."""
    compress_k, compress_v, rotate, new = blocks.compress_k, blocks.compress_v, blocks.rotate, blocks.raw
    has_values = compress_v is not None and new.v is not None
    k, v = _parameters_of(compress_k, new.k), _parameters_of(compress_v, new.k) if has_values else ()
    if k is None or v is None or (has_values and type(compress_v) is not type(compress_k)):
        return None
    is_mlp = type(compress_k) is MLPCompressor
    phi = Phi(k_mlp=k, v_mlp=v or None) if is_mlp else Phi(k[0] if k else None, v[0] if v else None)
    if rotate is unrotated:
        return phi
    if type(rotate) is not RotaryEmbedding or rotate.dim != new.k.shape[3]:
        return None
    return phi._replace(frequencies=rotate.kept_frequencies(new.k.device)[rotate.dim // 2 :], factor=rotate.attention_factor())


def _parameters_of(compress: Any, new: Tensor) -> Parameters | None:
    """Return the parameters of an unmodified compressor of the layer; None if it has hooks, shards or other modules."""
    kind = type(compress)
    # by name, because torch's iterators over modules and parameters take several times as long
    modules: tuple[Any, ...] = (compress,)
    found: tuple[Any, ...] = ()
    if kind is MLPCompressor:
        up, down = compress.up, compress.down
        # a module that replaces a layer, as in LoRA, computes something else
        if not type(up) is type(down) is nn.Linear:
            return None
        modules, found = (compress, up, down), (compress.position, up.weight, up.bias, down.weight, down.bias)
    elif kind is ConvCompressor:
        found = (compress.weight,)
    elif kind is not MeanCompressor:
        return None
    # hooks run only when the module is called
    if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
        return None
    for x in found:
        # the module's call gathers a sharded parameter
        if type(x) not in (Tensor, nn.Parameter) or not x.is_contiguous() or (kind is MLPCompressor and x.dtype != new.dtype):
            return None
    return found


class _Store(NamedTuple):
    """A kernel's arguments for one store: its tensors, rows of a sequence or page, number of pages, and entries of a sequence's page table."""

    tensors: tuple[Tensor | None, ...] = (None,) * 7
    sizes: tuple[int, int, int] = (0, 0, 0)
    ring: bool = False

    @classmethod
    def of(cls, new: NewRows) -> "_Store":
        store, v = new.store, new.v
        tensors = (
            store.k, None if v is None else store.v, store.k_scale, None if v is None else store.v_scale,
            None if store.page_table is None else store.page_table.contiguous(),
            _dense(new.k), None if v is None else _dense(v),
        )  # fmt: skip
        return cls(tensors, sizes_of(store), store.ring)


def sizes_of(store: Keys) -> tuple[int, int, int]:
    """Return the number of rows of a sequence or page, of pages, and of entries in a sequence's page table."""
    pages, rows = store.k.shape[:2]
    return rows, pages, 0 if store.page_table is None else store.page_table.shape[1]


def _dense(x: Tensor) -> Tensor:
    return (x.detach() if x.requires_grad else x).contiguous()


def _launch(rows: tuple[NewRows, ...], blocks: NewBlocks | None, phi: Phi, start: Tensor, count: Tensor, geometry: BlockGeometry) -> None:
    """Launch for up to MOST_STORES stores, and the blocks that the step completes."""
    first = rows[0] if rows else blocks.raw if blocks is not None else None
    if first is None or not first.k.numel():
        return
    batch, num_new, num_groups, head_dim_qk = first.k.shape
    values = [new.v for new in (*rows, *([] if blocks is None else [blocks.raw])) if new.v is not None]
    head_dim_v = values[0].shape[3] if values else head_dim_qk
    stores = [_Store.of(new) for new in rows] + [_Store()] * (MOST_STORES - len(rows))
    numbers, size = cdiv(num_new, geometry.compression_stride), geometry.compression_block_size
    num_items = batch * numbers * num_groups
    item_tiles = cdiv(num_items, BLOCK_ITEMS)
    programs = 2 * batch * num_new * len(rows)
    raw: tuple[Tensor | None, ...] = (None,) * 4
    cmp: tuple[Tensor | None, ...] = (None,) * 3
    ring_rows, cmp_sizes = 1, (1, 1, 0)
    mlp = _Hidden()
    tiles_k = tiles_v = 0
    splits = min(TOKEN_SPLITS, size)
    if blocks is not None:
        has_values = blocks.compress_v is not None and blocks.raw.v is not None
        fresh_v = _dense(blocks.raw.v) if has_values and blocks.raw.v is not None else None
        raw = (blocks.raw.store.k, blocks.raw.store.v if has_values else None, _dense(blocks.raw.k), fresh_v)
        table = blocks.store.page_table
        cmp = (blocks.store.k, blocks.store.v if has_values else None, None if table is None else table.contiguous())
        ring_rows, cmp_sizes = blocks.raw.store.k.shape[1], sizes_of(blocks.store)
        programs += 2 * num_items
        if phi.k_mlp is not None:
            tiles_k, tiles_v = cdiv(head_dim_qk, BLOCK_COLUMNS), cdiv(head_dim_v, BLOCK_COLUMNS) if phi.v_mlp is not None else 0
            mlp = _Hidden.of(phi.k_mlp, phi.v_mlp, splits, num_items, start.device)
            programs += item_tiles * splits * (tiles_k + tiles_v)
    half_k, half_v = cdiv(head_dim_qk, 2), cdiv(head_dim_v, 2)
    width_k, width_v = max(16, next_power_of_2(head_dim_qk)), max(16, next_power_of_2(head_dim_v))
    is_dependent = has_pdl(start)
    both = {
        "G": num_groups, "D_K": head_dim_qk, "D_V": head_dim_v, "WIDTH_K": width_k, "WIDTH_V": width_v, "HALF_K": half_k, "HALF_V": half_v,
        "SIZE": size, "STRIDE": geometry.compression_stride, "TOKEN_SPLITS": splits, "BLOCK_ITEMS": BLOCK_ITEMS, "BLOCK_COLUMNS": BLOCK_COLUMNS,
        "num_warps": 4, "num_stages": 1 if first.k.element_size() > 2 else 2, "PDL": is_dependent,
        "LETS_START": starts_early(start, batch * num_new, num_groups),
        **({"launch_pdl": True} if is_dependent else {}),
    }  # fmt: skip
    kernels.append_kernel[(programs,)](
        start, count, *stores[0].tensors, *stores[1].tensors, *stores[2].tensors,
        *raw, *cmp, phi.k_taps, phi.v_taps, phi.frequencies,
        *mlp.means, *mlp.positions, *mlp.up, *mlp.partials,
        num_new, batch, numbers, item_tiles, *stores[0].sizes, *stores[1].sizes, *stores[2].sizes, ring_rows, *cmp_sizes, phi.factor,
        GROUPS=next_power_of_2(num_groups), HALF_WIDTH_K=next_power_of_2(half_k), HALF_WIDTH_V=next_power_of_2(half_v),
        TOKENS=next_power_of_2(size), RING_A=stores[0].ring, RING_B=stores[1].ring, RING_C=stores[2].ring, WRITTEN=len(rows),
        SPLIT_TOKENS=cdiv(size, splits), TILES_K=tiles_k, **both,
    )  # fmt: skip
    if not tiles_k:
        return
    half_tiles = cdiv(half_k, BLOCK_COLUMNS), cdiv(half_v, BLOCK_COLUMNS) if tiles_v else 0
    kernels.down_kernel[(item_tiles, sum(half_tiles))](
        start, count, *mlp.partials, *mlp.up_bias, *mlp.down, *mlp.down_bias, *mlp.means, *cmp, phi.frequencies,
        num_items, numbers, *cmp_sizes, phi.factor, TILES_K=half_tiles[0], **both,
    )  # fmt: skip


Pair = tuple[Tensor | None, Tensor | None]


class _Hidden(NamedTuple):
    """The weights of `mlp` and the buffers between its two launches, for keys and for values."""

    positions: Pair = (None, None)
    up: Pair = (None, None)
    up_bias: Pair = (None, None)
    down: Pair = (None, None)
    down_bias: Pair = (None, None)
    means: Pair = (None, None)
    """float32 (items, D)."""
    partials: Pair = (None, None)
    """float32 (splits of tokens, items, D)."""

    @classmethod
    def of(cls, k: Parameters, v: Parameters | None, splits: int, num_items: int, device: torch.device) -> "_Hidden":
        columns = []
        for parameters in (k,) if v is None else (k, v):
            width = parameters[-1].shape[0]
            means = torch.empty(num_items, width, dtype=torch.float32, device=device)
            partials = torch.empty(splits, num_items, width, dtype=torch.float32, device=device)
            columns.append((*parameters, means, partials))
        return cls(*((*pair, None)[:2] for pair in zip(*columns, strict=True)))
