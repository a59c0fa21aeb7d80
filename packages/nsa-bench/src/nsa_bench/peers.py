"""Other packages (peers): the reasons against them, and their decode steps over the caches of `nsa-bench decode`.

Each peer gets the step's keys, values, queries and gates in its own layout; that copy is not part of its time. A step of a peer writes
no rows. A peer gets a time whatever its error is; the error is the difference from the reference with our choice of blocks.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from nsa_bench.baselines import find_flash_attn
from nsa_core import BlockGeometry
from nsa_core.backends.base import Keys

if TYPE_CHECKING:
    from nsa_bench.decode import DecodeCase, DecodeStep

PAGE = 128
"""Rows of a page of `flash_nsa`."""


def import_problem(module: str) -> str | None:
    """Return why `module` cannot be imported, or None if it can."""
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001 - a package built for another torch may raise anything
        return f"{module} cannot be imported ({type(error).__name__}: {error})"
    return None


def limits_of_fla(geometry: BlockGeometry, group_size: int, device: torch.device) -> list[str]:
    """Return why `fla.ops.nsa` cannot run. It needs a GPU, a power of 2 of at least 16 for H/G, and the forced blocks that it supports."""
    problem, count = import_problem("fla.ops.nsa"), geometry.num_selected_blocks
    found = [
        (problem is not None, str(problem)),
        *shared_blocks(geometry),
        (device.type != "cuda", "runs on a GPU only"),
        (group_size < 16 or group_size & (group_size - 1) != 0, f"H/G = {group_size} (takes powers of 2 of at least 16)"),
        ((geometry.num_initial_blocks, geometry.num_local_blocks) != (1, 2), "forces 1 initial and 2 local blocks"),
        (count & (count - 1) != 0, f"n = {count} (takes powers of 2)"),
    ]
    return [reason for is_so, reason in found if is_so]


def shared_blocks(geometry: BlockGeometry) -> list[tuple[bool, str]]:
    """Return whether the blocks differ from those that the peers support, and the message about it."""
    sizes = geometry.as_tuple()[:3]
    return [(len(set(sizes)) > 1, f"l/d/l' = {'/'.join(map(str, sizes))} (takes l = d = l')")]


class PeerStep(NamedTuple):
    """A peer's step, and what it is compared with."""

    call: Callable[[], Tensor]
    """Returns the output (B, H, D_v)."""
    window: Keys | None
    """The keys that the peer's sliding branch reads; None if the peer leaves that branch out."""
    note: str = ""


class DecodePeer(Protocol):
    """One other implementation."""

    @property
    def name(self) -> str:
        """Return the peer's name in tables."""

    def reasons_against(self, case: "DecodeCase", device: torch.device) -> list[str]:
        """Return every reason why the peer is absent or cannot take `case`."""

    def build(self, step: "DecodeStep") -> PeerStep:
        """Return its step over copies of the caches of `step`, whose token is appended."""


@frozen
class FlashLinearAttentionStep:
    """The three kernels of `fla.ops.nsa`, over compressed keys from a cache; and flash-attn for the window, if it is installed."""

    name: str = "flash-linear-attention"

    def reasons_against(self, case: "DecodeCase", device: torch.device) -> list[str]:
        """Return why it cannot run."""
        return limits_of_fla(case.geometry, case.shape.heads_per_group, device)

    def build(self, step: "DecodeStep") -> PeerStep:
        """Return its step; the window is left out if flash-attn is absent or needs D_k = D_v."""
        parallel, compression = import_module("fla.ops.nsa.parallel"), import_module("fla.ops.nsa.compression")
        geometry, context, q = step.geometry, step.case.context, step.queries.q
        size, count, scale = geometry.selection_block_size, geometry.num_selected_blocks, q.shape[-1] ** -0.5
        # its kernels need a row for the last block, even if that block is not complete
        k_cmp, v_cmp = (_rows(x, -(-context // size)) for x in (step.cmp.k, step.cmp.v))
        k, v = (_rows(x, context) for x in (step.slc.k, step.slc.v))
        g_cmp, g_slc, g_win = step.gates.to(q.dtype).unsqueeze(-1).unbind(-2)
        library, function = find_flash_attn()
        missing = f"flash-attn {library}" if function is None else ""
        if library == "flash-attn-2" and k.shape[-1] != v.shape[-1]:
            function, missing = None, "flash-attn-2 takes D_k = D_v only"
        k_win, v_win = (x[:, -geometry.window_size :].contiguous() for x in (k, v))

        def call() -> Tensor:
            out, lse = compression.parallel_nsa_compression(q=q, k=k_cmp, v=v_cmp, TK=context, block_size=size, scale=scale)
            block_indices = parallel.parallel_nsa_topk(
                q=q, k=k_cmp, TK=context, lse=lse, block_counts=count, block_size=size, scale=scale
            )  # fmt: skip
            selected, _ = parallel.parallel_nsa_fwd(q, k, v, block_indices, count, size, scale)
            out = out * g_cmp + selected * g_slc
            if function is not None:
                attended = function(q, k_win, v_win, softmax_scale=scale, causal=False)
                out = out + (attended[0] if isinstance(attended, tuple) else attended) * g_win
            return out[:, 0]  # type: ignore[no-any-return]

        return PeerStep(call, None if missing else step.slc, f"without its window branch: {missing}" if missing else "")


@frozen
class FlashNSAStep:
    """`flash_nsa.inference.nsa_decode` of mdy666/Scalable-Flash-Native-Sparse-Attention: one paged K and V for all branches and blocks."""

    name: str = "flash-nsa"

    def reasons_against(self, case: "DecodeCase", device: torch.device) -> list[str]:
        """Return why it cannot run."""
        geometry, shape, problem = case.geometry, case.shape, import_problem("flash_nsa.inference")
        stride, size, group = geometry.compression_stride, geometry.selection_block_size, shape.heads_per_group
        dim_k, dim_v = shape.head_dim_qk, shape.head_dim_v
        found = [
            (problem is not None, str(problem)),
            (device.type != "cuda", "runs on a GPU only"),
            (case.dtype.itemsize != 2, f"{str(case.dtype).removeprefix('torch.')} (takes bfloat16 and float16)"),
            (not _is_power(stride) or geometry.compression_block_size % stride != 0, f"d = {stride} (takes powers of 2 that divide l)"),
            (not _is_power(size) or size > PAGE, f"l' = {size} (takes powers of 2 up to {PAGE})"),
            (group > 16 and group % 16 != 0, f"H/G = {group} (takes up to 16, and multiples of 16)"),
            # it splits D_k in two powers of 2
            (
                not _is_power(dim_k) and not _is_power(dim_k - 2 ** (dim_k.bit_length() - 1)),
                f"D_k = {dim_k} (takes sums of two powers of 2)",
            ),
            (not _is_power(dim_v), f"D_v = {dim_v} (takes powers of 2)"),
        ]
        return [reason for is_so, reason in found if is_so]

    def build(self, step: "DecodeStep") -> PeerStep:
        """Return its step over the selected branch's tokens, which its window also reads. Its new block goes to a page that is never read."""
        decode, geometry, context = import_module("flash_nsa.inference").nsa_decode, step.geometry, step.case.context
        q, batch, device = step.queries.q[:, 0].contiguous(), step.case.batch, step.queries.q.device
        num_blocks = max(context - geometry.compression_block_size + geometry.compression_stride, 0) // geometry.compression_stride
        pages, block_pages = (max(-(-rows // PAGE), 1) for rows in (context, num_blocks))

        def pool(tokens: Tensor, blocks: Tensor) -> Tensor:
            """Return the pages of the tokens, of the blocks, and one that is not read."""
            rows = (_rows(tokens[:, :context], pages * PAGE), _rows(blocks[:, :num_blocks], block_pages * PAGE))
            spare = tokens.new_zeros(PAGE, *tokens.shape[2:])
            pages_of_rows: Tensor = torch.cat([*(x.flatten(0, 1) for x in rows), spare]).unflatten(0, (-1, PAGE))
            return pages_of_rows

        k, v = pool(step.slc.k, step.cmp.k), pool(step.slc.v, step.cmp.v)
        table = torch.arange(k.shape[0], dtype=torch.int32, device=device)
        of_tokens, of_blocks = table[: batch * pages].view(batch, -1), table[batch * pages : -1].view(batch, -1)
        completes = num_blocks > 0 and (context - geometry.compression_block_size) % geometry.compression_stride == 0
        slots = torch.full((batch,), (k.shape[0] - 1) * PAGE if completes else -1, dtype=torch.int32, device=device)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        # it applies the sigmoid to gates itself
        logits = step.gates[:, 0].double().logit().to(torch.promote_types(q.dtype, torch.float32))
        # its window has one token more than its setting
        sizes = {
            "kernel_size": geometry.compression_block_size, "stride": geometry.compression_stride,
            "block_size": geometry.selection_block_size, "top_n": geometry.num_selected_blocks,
            "num_init_blocks": geometry.num_initial_blocks, "num_local_blocks": geometry.num_local_blocks,
            "window_size": geometry.window_size - 1, "fixed_y_maxlen": max(num_blocks, 1),
            "fixed_num_slc_blocks": -(-context // geometry.selection_block_size),
        }  # fmt: skip

        def call() -> Tensor:
            out: Tensor = decode(
                q, k, v, logits, context_lens=lengths, block_tables=of_tokens, cmp_slot_mapping=slots, cmp_block_tables=of_blocks, **sizes
            )
            return out

        return PeerStep(call, step.slc)


DECODE_PEERS: tuple[DecodePeer, ...] = (FlashLinearAttentionStep(), FlashNSAStep())


def _rows(x: Tensor, count: int) -> Tensor:
    """Return the first `count` rows of x (B, T, G, D), contiguous, with zeros after the last."""
    kept = x[:, :count]
    return pad(kept, (0, 0, 0, 0, 0, count - kept.shape[1])).contiguous()


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
