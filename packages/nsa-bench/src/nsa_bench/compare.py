"""`nsa-bench compare`: compare our whole operation with other packages that pip installs (peers), on inputs that all of them support.

All branches use one K and V, compressed by the mean over blocks of l = d = l' tokens, because all peers support this. Our time includes the
compression, as theirs does. If a peer is not installed, or does not support a case, the result gives the reason. A peer gets a time
whatever its error is: some peers define the operation differently, and the error shows the size of the difference.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Protocol

import attrs
import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from nsa_bench.cases import Case, dtype_of, find_device, lengths_of, parse_geometry, parse_shapes
from nsa_bench.inputs import make_tensors
from nsa_bench.measurement import (
    Direction,
    Implementation,
    Job,
    Measurement,
    Setup,
    check_all,
    describe_failure,
    free_cached_memory,
    held_bytes,
    measure,
)
from nsa_bench.options import CompareOptions
from nsa_bench.peers import import_problem, limits_of_fla, shared_blocks
from nsa_bench.reporting import attention_tables, collect, measured_rows, progress_line
from nsa_bench.results import Output
from nsa_bench.routes import RouteRecorder, check_backend, request_of
from nsa_core import nsa_attention
from nsa_core.compression import block_windows
from nsa_core.testing.sampled import Expected, attend_sample, choices, expectation
from nsa_core.testing.sampled_rows import Sample, sample_rows

PeerAttention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""q (1, S, H, D_k), k (1, S, G, D_k), v (1, S, G, D_v), gates (1, S, H, 3) -> (1, S, H, D_v)."""


@frozen(kw_only=True)
class PeerRun:
    """A peer's function for one case."""

    run: PeerAttention
    has_window: bool = True
    """False if the peer leaves out the sliding window; it is then compared with the result without a window."""
    note: str = ""


class Peer(Protocol):
    """One other implementation."""

    @property
    def name(self) -> str:
        """Return the peer's name in tables."""

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        """Return every reason why the peer is absent or cannot take `case`."""

    def build(self, case: Case, device: torch.device) -> PeerRun:
        """Return its function for `case`."""


@frozen
class FlashLinearAttention:
    """`fla.ops.nsa.parallel_nsa` of flash-linear-attention: Triton kernels, on a GPU."""

    name: str = "flash-linear-attention"

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        """Return why it cannot run."""
        return limits_of_fla(case.geometry, case.shape.heads_per_group, device)

    def build(self, case: Case, device: torch.device) -> PeerRun:
        """Return `parallel_nsa`; its window needs flash-attn with D_k = D_v, and is left out otherwise."""
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
    """`SparseAttention` of native-sparse-attention-pytorch: a layer, of which only the attention is used.

    It attends to a zero key of its own in addition to the compressed keys. It chooses n blocks by the mean of scores, and adds the query's own
    block. It gathers keys for each query, so that long sequences do not fit into memory.
    """

    name: str = "native-sparse-attention-pytorch"

    def reasons_against(self, case: Case, device: torch.device) -> list[str]:
        """Return why it cannot run."""
        problem = import_problem("native_sparse_attention_pytorch")
        gathered = case.seq_len * case.shape.num_kv_heads * (case.geometry.num_selected_blocks + 1) * case.geometry.selection_block_size
        gathered_gib = gathered * case.shape.head_dims * case.dtype.itemsize / 2**30
        found = [
            (problem is not None, str(problem)),
            *shared_blocks(case.geometry),
            (case.shape.head_dim_qk != case.shape.head_dim_v, "takes D_k = D_v only"),
            (gathered_gib > MAX_GATHERED_GIB, f"gathers {gathered_gib:.0f} GiB of keys and values (measured up to {MAX_GATHERED_GIB} GiB)"),
        ]
        return [reason for is_so, reason in found if is_so]

    def build(self, case: Case, device: torch.device) -> PeerRun:
        """Return its forward pass without projections: its projections, norm, RoPE and gate MLP are replaced."""
        layer = _bare_layer(import_module("native_sparse_attention_pytorch"), case).to(device=device, dtype=case.dtype)

        def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
            layer.to_strategy_combine = _Constant(gates.transpose(1, 2))
            packed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
            return layer(packed).unflatten(-1, q.shape[2:])  # type: ignore[no-any-return]

        return PeerRun(run=run)


MAX_GATHERED_GIB = 16
PEERS: tuple[Peer, ...] = (FlashLinearAttention(), NativeSparseAttentionPytorch())


def _bare_layer(package: Any, case: Case) -> Any:
    geometry, shape = case.geometry, case.shape
    layer = package.SparseAttention(
        dim=1,
        dim_head=shape.head_dim_qk,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        # its window has one token more than its setting
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
    """Returns a fixed tensor for any input."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, _: Tensor) -> Tensor:
        return self.value


class _NoRotation(nn.Module):
    def rotate_queries_with_cached_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k


OPERANDS = ("q", "k", "v", "gates")


def run_compare(options: CompareOptions, output: Output) -> list[Measurement]:
    """Measure the cases of `options`, print the table, write the files, and return the measurements.

    Raises:
        OptionError: if options are invalid, or the backend can serve nothing of them; before anything is written.
    """
    device, jobs = make_comparisons(options)
    check_backend(options.backend, ((request_of("nsa", job.case, device),) for job in jobs))
    setup = Setup(device=device, registry=RouteRecorder.of_installed(), backend=options.backend)
    measurements = collect(run_comparisons(jobs, setup), attrs.asdict(options), output, progress_line, measured_rows)
    output.show(*attention_tables(measurements))
    return measurements


def make_comparisons(options: CompareOptions) -> tuple[torch.device, tuple[Job, ...]]:
    """Return the setup of the comparison, and its jobs, shape by shape.

    Raises:
        OptionError: if values are not lengths, shapes or a geometry.
    """
    device = find_device(options.device)
    geometry, dtype = parse_geometry(options.geometry), dtype_of(options.dtype, device.type)
    directions = tuple(Direction) if options.backward else (Direction.FORWARD,)
    cases = [
        Case(shape=shape, seq_len=length, geometry=geometry, dtype=dtype)
        for shape in parse_shapes(options.shapes)
        for length in lengths_of(options.lengths, device)
    ]
    return device, tuple(Job(case=case, operations=("nsa",), directions=directions) for case in cases)


def run_comparisons(jobs: tuple[Job, ...], setup: Setup, peers: tuple[Peer, ...] = PEERS) -> Iterator[Measurement]:
    """Yield our measurements of every case, then those of every peer, or the reason why the peer has none."""
    for job in jobs:
        try:
            free_cached_memory(setup.device)
            yield from _compare(job, setup, peers)
        except RuntimeError as error:
            # no memory for inputs or reference, or a GPU that an earlier kernel broke
            reason = f"inputs or reference: {describe_failure(error)}"
            yield Measurement(case=job.case, operation="nsa", direction=next(iter(job.directions)), implementation="none", reason=reason)


def _compare(job: Job, setup: Setup, peers: tuple[Peer, ...]) -> Iterator[Measurement]:
    case, held_before = job.case, held_bytes(setup.device)
    inputs = make_tensors(case, setup.device)
    operands = {"q": inputs.q, "k": inputs.k_slc, "v": inputs.v_slc, "gates": inputs.gates}
    del inputs

    def ours(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        k_cmp, v_cmp = (block_windows(x, case.geometry).tokens.mean(2) for x in (k, v))
        return nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, geometry=case.geometry, backend=setup.backend, registry=setup.registry)

    tried = Implementation(operation="nsa", case=case, run=ours, operands=operands)
    yield from _measured(tried, job, setup, held_before, has_window=True)
    for peer in peers:
        yield from _measure_peer(peer, operands, job, setup, held_before)


def _measure_peer(peer: Peer, operands: dict[str, Tensor], job: Job, setup: Setup, held_before: int) -> Iterator[Measurement]:
    case, reasons = job.case, peer.reasons_against(job.case, setup.device)
    try:
        built = None if reasons else peer.build(case, setup.device)
    except Exception as error:  # noqa: BLE001 - a peer's failure is a result, not the end of the others
        built, reasons = None, [describe_failure(error)]
    if built is None:
        for direction in job.directions:
            one = Measurement(case=case, operation="nsa", direction=direction, implementation=peer.name, is_ours=False)
            yield evolve(one, reason="; ".join(reasons))
        return
    tried = Implementation(operation="nsa", case=case, run=built.run, operands=operands, name=peer.name, is_judged=False)
    for one in _measured(tried, job, setup, held_before, has_window=built.has_window):
        yield evolve(one, note="; ".join(text for text in (built.note, one.note) if text))


def _measured(tried: Implementation, job: Job, setup: Setup, held_before: int, *, has_window: bool) -> Iterator[Measurement]:
    expected = expect_shared(tried.operands, tried.case, has_window=has_window)
    checked = check_all(tried, expected, job.directions, setup.registry)
    del expected
    yield from measure(tried, checked, job, setup.device, held_before=held_before)


def expect_shared(operands: dict[str, Tensor], case: Case, *, has_window: bool) -> Expected:
    """Return the expected attention over one shared K and V; without the window if the peer has none."""
    sample = sample_rows(case.sequence_lengths, case.geometry, operands["q"].device)
    # all implementations store compressed keys in the inputs' dtype, so the expected scores use the rounded keys, too
    compressed = {"q": operands["q"], "k_cmp": _means(operands["k"][0].detach(), case).unsqueeze(0)}
    chosen, kept = choices(compressed, sample)

    def attend(leaves: dict[str, Tensor]) -> Tensor:
        return _attend_shared(leaves, sample, chosen, case, has_window=has_window)

    return expectation(attend, attend, operands, sample, kept, "rows")


def _attend_shared(leaves: dict[str, Tensor], sample: Sample, chosen: Tensor, case: Case, *, has_window: bool) -> Tensor:
    q, k, v, gates = (leaves[name] for name in OPERANDS)
    is_open = torch.tensor([1, 1, int(has_window)], device=gates.device)
    parts = {"q": q, "k_cmp": _means(k, case), "v_cmp": _means(v, case), "k_slc": k, "v_slc": v, "k_win": k, "v_win": v}
    return attend_sample("nsa", {**parts, "gates": gates * is_open}, sample, chosen)


def _means(x: Tensor, case: Case) -> Tensor:
    """Return the block means `(C, G, D)` of x `(S, G, D)`."""
    return block_windows(x.unsqueeze(0), case.geometry).tokens.mean(2)[0]
