"""Other implementations of Native Sparse Attention that pip installs, each as a function of q, k, v and gates.

All branches share one K and V, compressed by the mean over blocks of l = d = l' tokens: what the peers have in common. A
peer that is not installed, or cannot take a case, says why. Their results are compared, not judged: some define the
operation differently, and the error says how far that leads.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor, nn

from nsa_bench.cases import Case
from nsa_core import BlockGeometry

PeerAttention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""q (1, S, H, D_k), k (1, S, G, D_k), v (1, S, G, D_v), gates (1, S, H, 3) -> (1, S, H, D_v)."""


@frozen(kw_only=True)
class PeerRun:
    """A peer's function for one case."""

    run: PeerAttention
    has_window: bool = True
    """False: it leaves the sliding window out, and is compared with what that gives."""
    note: str = ""


class Peer(Protocol):
    """One other implementation."""

    @property
    def name(self) -> str:
        """Return the name it is shown by."""

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        """Return why it is absent or cannot take `case`; every reason at once."""

    def build(self, case: Case, device: torch.device) -> PeerRun:
        """Return its function for `case`."""


def import_problem(module: str) -> str | None:
    """Return why `module` cannot be imported, None where it can."""
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001 - a package built for another torch may raise anything
        return f"{module} cannot be imported ({type(error).__name__}: {error})"
    return None


@frozen
class FlashLinearAttention:
    """`fla.ops.nsa.parallel_nsa` of flash-linear-attention: Triton kernels, on a GPU."""

    name: str = "flash-linear-attention"

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        """Return why it cannot run: it wants a GPU, H/G a power of 2 of at least 16, and its own forced blocks."""
        geometry, size = case.geometry, case.shape.heads_per_group
        problem = import_problem("fla.ops.nsa")
        found = [
            (problem is not None, str(problem)),
            *_shared_blocks(geometry),
            (device.type != "cuda", "runs on a GPU only"),
            (size < 16 or size & (size - 1) != 0, f"H/G = {size} (takes powers of 2 of at least 16)"),
            ((geometry.num_initial_blocks, geometry.num_local_blocks) != (1, 2), "forces 1 initial and 2 local blocks"),
            (not _is_power_of_2(geometry.num_selected_blocks), f"n = {geometry.num_selected_blocks} (takes powers of 2)"),
        ]
        return [reason for is_so, reason in found if is_so]

    def build(self, case: Case, device: torch.device) -> PeerRun:
        """Return `parallel_nsa`; its window needs flash-attn with D_k = D_v, and is left out where there is none."""
        module = import_module("fla.ops.nsa.parallel")
        geometry = case.geometry
        has_flash = getattr(module, "flash_attn_func", None) is not None
        has_window = has_flash and case.shape.head_dim_qk == case.shape.head_dim_v

        def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
            g_cmp, g_slc, g_win = gates.unbind(-1)
            out: Tensor = module.parallel_nsa(
                q,
                k,
                v,
                g_cmp=g_cmp,
                g_slc=g_slc,
                g_swa=g_win if has_window else None,
                block_counts=geometry.num_selected_blocks,
                block_size=geometry.selection_block_size,
                window_size=geometry.window_size if has_window else 0,
            )
            return out

        missing = "flash-attn is not installed" if not has_flash else "flash-attn takes D_k = D_v only"
        return PeerRun(run=run, has_window=has_window, note="" if has_window else f"without its window branch: {missing}")


@frozen
class NativeSparseAttentionPytorch:
    """`SparseAttention` of native-sparse-attention-pytorch: a layer, of which everything but the attention is taken out.

    It attends to a zero key of its own besides the compressed ones, adds the query's own block to n others that it chooses
    by the mean of scores, and gathers keys per query, so that long sequences do not fit.
    """

    name: str = "native-sparse-attention-pytorch"

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        """Return why it cannot run."""
        problem = import_problem("native_sparse_attention_pytorch")
        gathered = case.seq_len * case.shape.num_kv_heads * (case.geometry.num_selected_blocks + 1) * case.geometry.selection_block_size
        gathered_gib = gathered * case.shape.head_dims * case.dtype.itemsize / 2**30
        found = [
            (problem is not None, str(problem)),
            *_shared_blocks(case.geometry),
            (case.shape.head_dim_qk != case.shape.head_dim_v, "takes D_k = D_v only"),
            (gathered_gib > MAX_GATHERED_GIB, f"gathers {gathered_gib:.0f} GiB of keys and values (measured up to {MAX_GATHERED_GIB} GiB)"),
        ]
        return [reason for is_so, reason in found if is_so]

    def build(self, case: Case, device: torch.device) -> PeerRun:
        """Return its forward pass between projections: those, the norm, RoPE and its gate's MLP are replaced."""
        layer = _bare_layer(import_module("native_sparse_attention_pytorch"), case).to(device=device, dtype=case.dtype)

        def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
            layer.to_strategy_combine = _Constant(gates.transpose(1, 2))
            packed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
            return layer(packed).unflatten(-1, q.shape[2:])  # type: ignore[no-any-return]

        return PeerRun(run=run)


MAX_GATHERED_GIB = 16
PEERS: tuple[Peer, ...] = (FlashLinearAttention(), NativeSparseAttentionPytorch())


def _shared_blocks(geometry: BlockGeometry) -> list[tuple[bool, str]]:
    """Return whether the blocks are others than the peers share, and what to say then."""
    sizes = geometry.as_tuple()[:3]
    return [(len(set(sizes)) > 1, f"l/d/l' = {'/'.join(map(str, sizes))} (takes l = d = l')")]


def _is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0


def _bare_layer(package: Any, case: Case) -> Any:
    geometry, shape = case.geometry, case.shape
    layer = package.SparseAttention(
        dim=1,
        dim_head=shape.head_dim_qk,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        # it sees one token more than it is told
        sliding_window_size=geometry.window_size - 1,
        compress_block_size=geometry.compression_block_size,
        compress_block_sliding_stride=geometry.compression_stride,
        selection_block_size=geometry.selection_block_size,
        num_selected_blocks=geometry.num_selected_blocks,
        causal=True,
        norm=False,
        compress_mlp=_BlockMean(),
    )
    layer.to_qkv = layer.combine_heads = nn.Identity()
    layer.rotary_emb = _NoRotation()
    return layer.requires_grad_(requires_grad=False)


class _BlockMean(nn.Module):
    """phi as the mean: (B, G, C, l, D) -> (B, G, C, D)."""

    def forward(self, blocks: Tensor) -> Tensor:
        return blocks.mean(-2)


class _Constant(nn.Module):
    """Returns one tensor whatever it is given."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, _: Tensor) -> Tensor:
        return self.value


class _NoRotation(nn.Module):
    def rotate_queries_with_cached_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k
