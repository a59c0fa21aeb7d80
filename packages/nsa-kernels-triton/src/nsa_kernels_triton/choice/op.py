"""The operation that chooses blocks."""

from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from nsa_core import BackendRegistry, blocks, default_registry
from nsa_core.backends.base import BranchBackend, BranchRequest, Keys, Operation, Queries
from nsa_core.backends.ops import attention_op
from nsa_core.config import BlockGeometry
from nsa_core.reference.rows import rows_of
from nsa_core.reference.select import max_tokens
from nsa_kernels_triton import routing
from nsa_kernels_triton.choice import kernels
from nsa_kernels_triton.hopper import launch as hopper
from nsa_kernels_triton.implementations import Config, kernel_for
from nsa_kernels_triton.launch import Sequences, cdiv, next_power_of_2
from nsa_kernels_triton.numerics import is_exact, score_factor
from nsa_kernels_triton.pipelines import PipelineConfig
from nsa_kernels_triton.streams import on_its_device
from nsa_kernels_triton.tile_table import parts_of

SCORE_BYTES = 512 * 2**20
"""Maximum bytes of one chunk's importance. With half as much, selection of 131,072 tokens took 3 % longer on an H200 (H = 64, G = 4)."""


@on_its_device
def _select(queries: Queries, cmp: Keys, lse: Tensor, *, geometry: BlockGeometry, scale: float, needs_grad: bool) -> Tensor:
    return select(queries, cmp, lse, geometry, scale, Sequences.of(queries, cmp))


select_blocks = attention_op("nsa_triton::select", _select, operation=Operation.SELECT)
"""Choose blocks: int32 block_indices `(B, S, G, n)`, ascending, -1 after the last (Eq. 9-11)."""


def choose(scores: Tensor, factor: Tensor | None, positions: Tensor, num_kv_heads: int, *, geometry: BlockGeometry) -> Tensor:
    """Return int32 block_indices `(rows, G, n)`; see `nsa_core.backends.base.ChooseBackend`.

    Scores are at least 0, NaN counts as 0, and a row's own block is one of the N.
    """
    if factor is not None:
        scores = (scores.float() * factor.float().unsqueeze(-1)).unflatten(1, (num_kv_heads, -1)).sum(2)
    num_rows, num_groups, num_blocks = scores.shape
    # the kernel reads several elements of a row at a time
    scores = torch.nn.functional.pad(scores.float().nan_to_num(nan=0.0), (0, -num_blocks % 16)).contiguous()
    chosen = scores.new_empty(num_rows, num_groups, geometry.num_selected_blocks, dtype=torch.int32)
    if chosen.numel():
        positions = positions.to(torch.int32).contiguous()
        with torch.cuda.device_of(scores):
            _choose(scores, positions, chosen, 0, num_rows, next_power_of_2(scores.shape[2]), geometry)
    return chosen


def select(queries: Queries, cmp: Keys, lse: Tensor, geometry: BlockGeometry, scale: float, sequences: Sequences) -> Tensor:
    """Return block_indices, chunk by chunk of the rows of q."""
    q, k_cmp, lse = queries.q.contiguous(), cmp.k.contiguous(), lse.float().contiguous()
    num_groups = k_cmp.shape[2]
    chosen = q.new_empty(*q.shape[:2], num_groups, geometry.num_selected_blocks, dtype=torch.int32)
    total = q.shape[0] * q.shape[1]
    if not chosen.numel():
        return chosen
    num_blocks = max(1, blocks.num_selection_blocks(max_tokens(queries, cmp, geometry), geometry))
    has_choice = num_blocks > geometry.num_selected_blocks
    # the kernels read and write several elements of a row at a time
    num_blocks = cdiv(num_blocks, 16) * 16
    tiles = kernel_for("scores", q, k_cmp, heads_per_group=q.shape[2] // num_groups, strides=_strides(geometry))
    # the kernel for 9.0 writes the sum; the portable one writes the shares of the next blocks separately
    reaches = geometry.compression_block_size > geometry.compression_stride and not isinstance(tiles, PipelineConfig)
    pieces = 2 if reaches else 1
    chunk = min(total, max(1, SCORE_BYTES // (4 * pieces * num_groups * num_blocks))) if has_choice else total
    scores = q.new_empty((pieces, chunk if has_choice else 1, num_groups, num_blocks), dtype=torch.float32)
    other = other_choice(q, num_groups, num_blocks, geometry) if has_choice and not reaches else None
    positions = None
    if sequences.is_packed or sequences.is_cached or other is not None:
        positions = rows_of(queries).positions.to(torch.int32).contiguous()
    for first in range(0, total, chunk):
        last = min(first + chunk, total)
        if has_choice and not k_cmp.shape[1]:
            scores.zero_()
        elif has_choice:
            _score(q, k_cmp, lse, scores, first, last, geometry, scale, sequences, tiles)
        if other is not None and positions is not None:
            of_chunk = scores[0, : last - first], None, positions.view(-1)[first:last], num_groups
            chosen.view(total, num_groups, -1)[first:last] = other(*of_chunk, geometry=geometry)
        else:
            searched = _searched(first, last, q.shape[1], num_blocks, geometry, positions) if has_choice else 1
            _choose(scores, positions, chosen, first, last - first, searched, geometry, reaches=reaches, num_queries=q.shape[1])
    return chosen


def other_choice(q: Tensor, num_groups: int, num_blocks: int, geometry: BlockGeometry) -> BranchBackend | None:
    """Return the backend of CHOOSE that is preferred to this package's kernel; None if there is none, and in the interpreter."""
    if not q.is_cuda:
        return None
    registry = default_registry()
    # the cache's key has the size of the registry, which may grow. It lacks the number of rows, which does not affect the result
    sizes = (len(registry.backends), num_groups, num_blocks)
    return _preferred_choice(registry, sizes, q.device, q.dtype, geometry)


@lru_cache(maxsize=256)
def _preferred_choice(
    registry: BackendRegistry,
    sizes: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    geometry: BlockGeometry,
) -> BranchBackend | None:
    """Return the result of `other_choice`; cached, because routing takes more host time than the launch that it decides."""
    _, num_groups, num_blocks = sizes
    request = BranchRequest(
        operation=Operation.CHOOSE,
        geometry=geometry,
        device_type="cuda",
        compute_capability=torch.cuda.get_device_capability(device),
        device_index=device.index,
        dtype=dtype,
        kv_dtype=dtype,
        num_queries=1,
        num_keys=num_blocks * geometry.selection_block_size,
        num_heads=num_groups,
        num_kv_heads=num_groups,
    )
    mine = routing.preference(request)
    if all(one.preference(request) <= mine for one in registry.backends if one.operation is Operation.CHOOSE):
        # no backend is asked for reasons, which may require a compilation
        return None
    found = registry.resolve(request)
    return found if found.preference(request) > mine else None


def _choose(
    scores: Tensor,
    positions: Tensor | None,
    chosen: Tensor,
    first: int,
    num_rows: int,
    searched: int,
    geometry: BlockGeometry,
    *,
    reaches: bool = False,
    num_queries: int = 1,
) -> None:
    """Write the choice of `num_rows` rows from `first` on, by `scores` (..., rows, G, N). `reaches`: add the second buffer of shares."""
    num_groups, num_blocks = scores.shape[-2:]
    kernels.choose_kernel[(num_rows * num_groups,)](
        scores, positions, chosen, first, num_queries, num_blocks, scores.stride(0),
        G=num_groups, SELECTION_SIZE=geometry.selection_block_size, NUM_SELECTED=geometry.num_selected_blocks,
        NUM_INITIAL=geometry.num_initial_blocks, NUM_LOCAL=geometry.num_local_blocks,
        REACHES=reaches,
        SLOTS=next_power_of_2(geometry.num_selected_blocks), BLOCK_BLOCKS=searched, num_warps=_warps(searched),
    )  # fmt: skip


def _strides(geometry: BlockGeometry) -> int:
    return geometry.selection_block_size // geometry.compression_stride


SEARCHED_BLOCKS = 128
"""Minimum number of blocks that a search covers, if there are that many. The search is compiled for each power of two from here on."""


def _searched(first: int, last: int, num_queries: int, num_blocks: int, geometry: BlockGeometry, positions: Tensor | None) -> int:
    """Return a power of two that is at least the number of blocks that rows first .. last - 1 see.

    Without `positions`, a sequence starts every `num_queries` rows.
    """
    if positions is None:
        is_one = first // num_queries == (last - 1) // num_queries
        last_position = (last - 1) % num_queries if is_one else num_queries - 1
        num_blocks = min(num_blocks, max(SEARCHED_BLOCKS, last_position // geometry.selection_block_size + 1))
    return next_power_of_2(num_blocks)


def _warps(searched: int) -> int:
    """Return the number of warps that search one row: at most 64 scores per thread, unless that takes more than 16 warps."""
    return max(1, min(16, searched // 2048))


def _score(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    scores: Tensor,
    first: int,
    last: int,
    geometry: BlockGeometry,
    scale: float,
    sequences: Sequences,
    tiles: Config,
) -> None:
    num_heads, num_groups = q.shape[2], k_cmp.shape[2]
    group_size = num_heads // num_groups
    strides = _strides(geometry)
    # a tile of the portable kernel may not hold all heads of a group, or all strides of a block: further launches add the rest
    heads = min(next_power_of_2(group_size), tiles.block_rows)
    padded_strides = min(next_power_of_2(strides), tiles.block_keys)
    block_queries = tiles.block_rows // heads
    tiling = sequences.tiling(q.shape[1], 1, block_queries, of_keys=False)
    first_tile = 0
    if not sequences.is_packed and q.shape[0] == 1:
        first_tile = first // block_queries
        tiling = tiling._replace(num_tiles=cdiv(last, block_queries) - first_tile)
    parts = parts_of(q.shape[3])
    constants = {
        "H": num_heads,
        "G": num_groups,
        "D_K": q.shape[3],
        "K1": parts.first,
        "K2": parts.second,
        "SIZE": geometry.compression_block_size,
        "STRIDE": geometry.compression_stride,
        "STRIDES": strides,
        "PADDED_STRIDES": padded_strides,
        "REACH": geometry.compression_block_size // geometry.compression_stride,
        "SELECTION_SIZE": geometry.selection_block_size,
        "NUM_SELECTED": geometry.num_selected_blocks,
        "NUM_LOCAL": geometry.num_local_blocks,
        "PACKED": sequences.is_packed,
        "CACHED": sequences.is_cached,
        "HEADS": heads,
    }
    factor = score_factor(q, scale)
    if isinstance(tiles, PipelineConfig):
        hopper.scores(q, k_cmp, lse, scores, (first, last), first_tile, tiling, sequences, factor, constants, tiles)
        return
    for first_head, first_stride in product(range(0, group_size, heads), range(0, strides, padded_strides)):
        kernels.scores_kernel[tiling.grid(num_groups)](
            q, k_cmp, lse, scores,
            *sequences.arguments(tiling),
            sequences.num_sequences, q.shape[1], k_cmp.shape[1], scores.shape[3], scores[0].numel(), first, last, first_tile,
            tiling.num_tiles, tiling.num_sequences, sequences.search_steps, factor,
            **constants, EXACT=is_exact(q), FIRST_HEAD=first_head, FIRST_STRIDE=first_stride,
            BLOCK_QUERIES=block_queries, BLOCK_BLOCKS=tiles.block_keys // padded_strides,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
