"""Launches of the kernels for compute capability 9.0. Their modules are imported here, at the first launch: they need Gluon."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_kernels_triton.device import num_multiprocessors
from nsa_kernels_triton.launch import Operands, Sequences, Tiling
from nsa_kernels_triton.numerics import score_factor
from nsa_kernels_triton.pipelines import PipelineConfig, pipeline_parts

REGISTERS = {2: 128, 3: 80}
"""Number of programs of eight warps that share a multiprocessor -> registers of a thread when a program starts."""
REGISTERS_OF_ONE = {2: 168, 3: 128, 4: 96}
"""The same for a program that has the multiprocessor to itself, by its number of consumer warpgroups (plus one producer warpgroup)."""
UNBOUNDED = 2**30
"""Window size that reaches the first token of any sequence."""
WIDEST_TWICE = 64
"""Head dimensions of q up to which two tiles of the rows of q and dO fit into shared memory with the ring buffers."""


class SharedBlocks(NamedTuple):
    """The blocks that the rows of a tile attend to together."""

    chosen: Tensor
    """int64 (B, S, G): the bits of the blocks that each early row chose."""
    num_initial: int
    num_local: int
    early: int
    """Rows at positions below this attend to all blocks that they chose; later rows attend to the initial and the local blocks."""


def interval_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sizes: dict[str, Any],
    scale: float,
    sequences: Sequences,
    limit: int | None,
    pipeline: PipelineConfig,
    shared: SharedBlocks | None = None,
) -> None:
    """Write out and lse; `sizes` are the constants of the interval, `limit` that of `Sequences.tiling`. `scale` is above 0."""
    from nsa_kernels_triton.hopper import forward_kernels as kernels

    tiling = sequences.tiling(q.shape[1], q.shape[2] // k.shape[2], pipeline.block_rows, of_keys=False, limit=limit)
    num_items = tiling.num_tiles * tiling.num_sequences * k.shape[2]
    overflows = lse.new_empty(pipeline.num_parts, num_items, dtype=torch.int32)
    chosen, num_initial, num_local, early = (lse, 0, 0, 0) if shared is None else shared
    kernels.forward_kernel[(min(num_items, num_multiprocessors(q)),)](
        q, k, v, out, lse, overflows, chosen,
        *sequences.arguments(tiling),
        sequences.num_sequences, q.shape[1], k.shape[1], tiling.num_tiles, tiling.num_sequences, num_items, sequences.search_steps,
        early, score_factor(q, scale),
        H=q.shape[2], G=k.shape[2], **_widths(q.shape[3], v.shape[3]), **_value_widths(v.shape[3]), **sizes,
        # float16 weights overflow if a score is far above the first maximum of its row
        OPTIMISTIC=q.dtype != torch.float16, SHARED=shared is not None, NUM_INITIAL=num_initial, NUM_LOCAL=num_local,
        PARTS=pipeline.num_parts, **_pipeline_constants(pipeline), **options_of_one(pipeline),
    )  # fmt: skip


def shared_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    sequences: Sequences,
    pipeline: PipelineConfig,
    shared: SharedBlocks,
) -> None:
    """Write out and lse of attention to the blocks that the rows of a tile share; `scale` is above 0."""
    sizes = {"IS_WINDOW": True, "SIZE": 1, "STRIDE": 1, "WINDOW": UNBOUNDED, "PACKED": sequences.is_packed, "CACHED": False}
    interval_forward(q, k, v, out, lse, sizes, scale, sequences, None, pipeline, shared)


def interval_dq(x: Operands, dq: Tensor, constants: dict[str, Any], limit: int | None, pipeline: PipelineConfig) -> None:
    """Write dQ; `constants` are those of the portable kernel, `limit` that of `Sequences.tiling`.

    The kernels of the backward pass are launched twice; see `_launch_both`.
    """
    from nsa_kernels_triton.hopper import dq_kernels as kernels

    q, k, v, sequences = x.q, x.k, x.v, x.sequences
    tiling = sequences.tiling(q.shape[1], q.shape[2] // k.shape[2], pipeline.block_rows, of_keys=False, limit=limit)
    num_items = tiling.num_tiles * tiling.num_sequences * k.shape[2]
    _launch_both(
        kernels.dq_kernel, min(num_items, num_multiprocessors(q)), 1,
        q, k, v, *_gradients(x), dq,
        *sequences.arguments(tiling),
        sequences.num_sequences, q.shape[1], k.shape[1], tiling.num_tiles, tiling.num_sequences, num_items, sequences.search_steps,
        x.scale, score_factor(q, x.scale),
        **{name: constants[name] for name in ("H", "G", "IS_WINDOW", "SIZE", "STRIDE", "WINDOW", "PACKED", "CACHED", "ADD")},
        **_widths(q.shape[3], v.shape[3]), **_value_widths(v.shape[3]), GATED=x.gates is not None,
        ROW_STAGES=2 if q.shape[3] <= WIDEST_TWICE else 1,
        PARTS=pipeline.num_parts, **_pipeline_constants(pipeline), **options_of_one(pipeline),
    )  # fmt: skip


def interval_dkdv(
    num_programs: int,
    x: Operands,
    dk: Tensor,
    dv: Tensor,
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
    pipeline: PipelineConfig,
) -> None:
    """Write dK and dV of every split; `numbers` and `constants` are those of the portable kernel."""
    from nsa_kernels_triton.hopper import dkdv_kernels as kernels

    _launch_both(
        kernels.dkdv_kernel, num_programs, 1,
        x.q, x.k, x.v, *_gradients(x), dk, dv, *numbers,
        **{name: constants[name] for name in ("H", "G", "IS_WINDOW", "SIZE", "STRIDE", "WINDOW", "PACKED", "CACHED")},
        **_widths(x.q.shape[3], x.v.shape[3]), V1=_value_widths(x.v.shape[3])["V1"], GATED=x.gates is not None,
        **_pipeline_constants(pipeline), **options_of_one(pipeline),
    )  # fmt: skip


def scores(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    out: Tensor,
    rows: tuple[int, int],
    first_tile: int,
    tiling: Tiling,
    sequences: Sequences,
    factor: float,
    constants: dict[str, Any],
    pipeline: PipelineConfig,
) -> None:
    """Write the importance of blocks for rows[0] .. rows[1] - 1, which are in `tiling`'s tiles from `first_tile` on.

    `constants` are those of the portable kernel.
    """
    from nsa_kernels_triton.hopper import scores_kernels as kernels

    num_items = tiling.num_tiles * tiling.num_sequences * k.shape[2]
    parts = pipeline_parts(q.shape[3])
    kernels.scores_kernel[(min(num_items, num_multiprocessors(q)),)](
        q, k, lse, out,
        *sequences.arguments(tiling),
        sequences.num_sequences, q.shape[1], k.shape[1], out.shape[3], tiling.num_tiles, tiling.num_sequences, num_items,
        *rows, first_tile, sequences.search_steps, factor,
        **(constants | {"K1": parts.first, "K2": parts.second}), **_pipeline_constants(pipeline), **options_of_one(pipeline),
    )  # fmt: skip


def selected_forward(num_items: int, operands: tuple[Any, ...], constants: dict[str, Any], pipeline: PipelineConfig) -> None:
    """Write partial out and lse. `operands` and `constants` are those of the portable kernel; `num_items` is an upper bound."""
    from nsa_kernels_triton.hopper import selected_kernels as kernels

    kernels.forward_kernel[(num_items,)](*operands, **_selected_constants(constants), **_pipeline_constants(pipeline), **_options(pipeline))


def selected_backward(num_items: int, x: Operands, rest: tuple[Any, ...], constants: dict[str, Any], pipeline: PipelineConfig) -> None:
    """Write partial dQ, and add dK and dV. `rest` and `constants` are those of the portable kernel; `num_items` is an upper bound."""
    from nsa_kernels_triton.hopper import selected_kernels, wide_kernels

    sizes = _selected_constants(constants)
    # a head of q comes in two parts
    is_wide = sizes["K2"] > 0
    kernel = wide_kernels.backward_kernel if is_wide else selected_kernels.backward_kernel
    _launch_both(
        kernel, num_items, pipeline.num_programs,
        x.q, x.k, x.v, *_gradients(x), *rest,
        **sizes, V1=_value_widths(x.v.shape[3])["V1"], GATED=x.gates is not None, **_pipeline_constants(pipeline),
        **(options_of_one(pipeline) if is_wide else _options(pipeline)),
    )  # fmt: skip


def _launch_both(kernel: Any, num_programs: int, per_multiprocessor: int, q: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel without EXTREME and with it; all programs of one of the two return at once, before they write anything.

    The kernel with EXTREME, which limits weights, runs if the flag of `no_extremes` is set; otherwise the other one runs. The host never
    reads the flag. If one kernel had both loops, the usual loop would have fewer registers and more instructions. The launch with EXTREME
    has no more programs than fit the GPU, `per_multiprocessor` on each multiprocessor, because they nearly always return at once.
    """
    few = min(num_programs, per_multiprocessor * num_multiprocessors(q))
    kernel.both(((num_programs,), (few,)), "EXTREME")(q, *arguments, **constants)


def _selected_constants(constants: dict[str, Any]) -> dict[str, Any]:
    return {name: constants[name] for name in ("H", "G", "SLOTS_TOTAL")} | _widths(constants["D_K"], constants["D_V"])


def _widths(head_dim_qk: int, head_dim_v: int) -> dict[str, int]:
    """Return the head dimensions, and the columns of the tiles of q and k."""
    parts = pipeline_parts(head_dim_qk)
    return {"D_K": head_dim_qk, "K1": parts.first, "K2": parts.second, "D_V": head_dim_v}


def _value_widths(head_dim_v: int) -> dict[str, int]:
    """Return the columns of the tiles of v."""
    parts = pipeline_parts(head_dim_v)
    return {"V1": parts.first, "V2": parts.second}


def _pipeline_constants(pipeline: PipelineConfig) -> dict[str, int]:
    return {
        "ROWS": pipeline.block_rows,
        "KEYS": pipeline.block_keys,
        "STAGES": pipeline.num_stages,
        "LOADER_REGISTERS": pipeline.loader_registers,
    }


def _options(pipeline: PipelineConfig) -> dict[str, int]:
    return {"num_warps": 4, "maxnreg": REGISTERS[pipeline.num_programs]}


def options_of_one(pipeline: PipelineConfig) -> dict[str, int]:
    """Return the options of a program that fills a multiprocessor: registers of a consumer thread, and of each thread when it starts."""
    registers = REGISTERS_OF_ONE[pipeline.num_parts]
    return {
        "PART_REGISTERS": ((pipeline.num_parts + 1) * registers - pipeline.loader_registers) // pipeline.num_parts,
        "num_warps": 4,
        "maxnreg": registers,
    }


def _gradients(x: Operands) -> tuple[Tensor, ...]:
    """Return dout, shift, delta, extremes, and one branch's gates in float32 with the strides of all gates (without gates, an unread tensor)."""
    gate = x.delta if x.gates is None else x.gates.to(torch.float32)[..., x.gate]
    return x.dout, x.shift, x.delta, x.extremes, gate
