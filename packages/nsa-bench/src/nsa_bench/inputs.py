"""The tensors of a case, made on its device: independent queries, or queries that drift so that their choices persist."""

import torch
from torch import Tensor

from nsa_bench.cases import Case, Selection
from nsa_bench.selections import SHARE_KEPT, free_overlap
from nsa_core.testing.inputs import Inputs
from nsa_core.testing.sampled_rows import Piece, choose_rows

CHUNK = 256
"""Rows of one step of the drift."""
PROBE_ROWS = 48
PROBE_PLACES = 4
"""Overlap is calibrated on so many runs of neighbouring queries of so many rows each."""


def make_tensors(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Return the eight differentiable tensors of `nsa_attention`, leaves that require gradients, and cu_seqlens.

    Normal, with gates uniform in 0 .. 1. Trained-like selection makes q a stationary first-order process over the
    tokens, whose correlation is calibrated to the share of blocks that is to persist.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape, tokens = case.shape, case.seq_len

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, *sizes, device=device, dtype=case.dtype, generator=generator)

    def pair(rows: int) -> tuple[Tensor, Tensor]:
        return normal(rows, shape.num_kv_heads, shape.head_dim_qk), normal(rows, shape.num_kv_heads, shape.head_dim_v)

    stores = (*pair(case.num_blocks), *pair(tokens), *pair(tokens))
    if case.selection is Selection.TRAINED_LIKE:
        correlation = calibrate_correlation(case, stores[0][0], generator)
        q = drifting_queries(tokens, case, correlation, generator).unsqueeze(0)
    else:
        q = normal(tokens, shape.num_heads, shape.head_dim_qk)
    gates = torch.rand(1, tokens, shape.num_heads, 3, device=device, dtype=case.dtype, generator=generator)
    return Inputs.of((x.requires_grad_() for x in (q, *stores, gates)), cu_seqlens_of(case, device))


def cu_seqlens_of(case: Case, device: torch.device) -> Tensor | None:
    """Return int32 `(N + 1,)` of a packed case, None of a dense one."""
    if case.lengths is None:
        return None
    return torch.tensor([0, *case.lengths], device=device).cumsum(0).int()


def drifting_queries(tokens: int, case: Case, correlation: float, generator: torch.Generator) -> Tensor:
    """Return q `(tokens, H, D_k)`, unit normal, neighbours correlated: q_t = c q_(t-1) + sqrt(1 - c^2) noise."""
    shape, device = case.shape, generator.device
    width = shape.num_heads * shape.head_dim_qk
    step = torch.arange(CHUNK, device=device)
    # row i of a chunk is the sum of the chunk's noise up to i, faded, and of the last row before the chunk
    fading = torch.where(step.unsqueeze(1) >= step, float(correlation) ** (step.unsqueeze(1) - step).clamp(min=0), 0.0)
    fading, carried = fading * (1 - correlation**2) ** 0.5, float(correlation) ** (step + 1).unsqueeze(1)
    q = torch.empty(tokens, width, device=device, dtype=case.dtype)
    last = torch.randn(1, width, device=device, generator=generator)
    for start in range(0, tokens, CHUNK):
        noise = torch.randn(CHUNK, width, device=device, generator=generator)
        rows = fading @ noise + carried * last
        last = rows[-1:]
        q[start : start + CHUNK] = rows[: tokens - start].to(case.dtype)
    return q.view(tokens, shape.num_heads, shape.head_dim_qk)


def calibrate_correlation(case: Case, k_cmp: Tensor, generator: torch.Generator) -> float:
    """Return the correlation of neighbouring queries at which the wanted share of free blocks persists over k_cmp (C, G, D_k).

    Bisects the logarithm of 1 - correlation on runs of queries all along the longest sequence.
    """
    pieces = _probes(case, k_cmp.device)
    wanted = SHARE_KEPT[case.selection]
    low, high = 0.0, 6.0
    for _ in range(12):
        middle = (low + high) / 2
        shares = [_probe(case, piece, k_cmp, 1 - 10**-middle, generator) for piece in pieces]
        known = [share for share in shares if share is not None]
        if not known or sum(known) / len(known) < wanted:
            low = middle
        else:
            high = middle
    return float(1 - 10 ** -((low + high) / 2))


def _probes(case: Case, device: torch.device) -> list[Piece]:
    longest = max(case.sequence_lengths)
    place = case.sequence_lengths.index(longest)
    before = Case(shape=case.shape, seq_len=0, geometry=case.geometry, lengths=case.sequence_lengths[:place])
    stops = [longest * (i + 1) // PROBE_PLACES for i in range(PROBE_PLACES)]
    return [
        Piece(0, longest, before.num_blocks, torch.arange(max(0, stop - PROBE_ROWS), stop, device=device), case.geometry) for stop in stops
    ]


def _probe(case: Case, piece: Piece, k_cmp: Tensor, correlation: float, generator: torch.Generator) -> float | None:
    """Return the share that persists among the piece's queries where they drift with `correlation`."""
    count = len(piece.positions)
    q = drifting_queries(count, case, correlation, generator).float()
    keys = k_cmp[piece.first_block : piece.first_block + piece.num_blocks].float()
    return free_overlap(choose_rows(piece, q, keys).chosen, piece.positions, case.geometry)
