"""Make the tensors of a case on its device. Queries are independent, or drift so that their choices of blocks persist.

Choices can also be made without scores, with a given persistence.
"""

import torch
from torch import Tensor

from nsa_bench.cases import Case, Recorded, Selection
from nsa_bench.recorded import mapped_choice, pointing_queries, read_recording
from nsa_core import BlockGeometry
from nsa_core.testing.inputs import Inputs
from nsa_core.testing.sampled_rows import Piece, choose_rows

SHARE_KEPT = {Selection.RANDOM: 0.0, Selection.TRAINED_LIKE: 0.8}
"""Share of a query's free blocks that the next query keeps; the others are drawn again."""
CHUNK = 256
"""Rows of one step of the drift."""
PROBE_ROWS = 48
PROBES = 4
"""Overlap is calibrated on PROBES runs of PROBE_ROWS neighbouring queries each."""


def make_tensors(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Return the eight differentiable tensors of `nsa_attention`, leaves that require gradients, and cu_seqlens.

    The values are normal, and gates are uniform in 0 .. 1. Trained-like selection makes q a stationary first-order process over the
    tokens, whose correlation is calibrated to the share of blocks that should persist. With recorded selection q points at the blocks
    that the model chose.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape, tokens = case.shape, case.seq_len

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, *sizes, device=device, dtype=case.dtype, generator=generator)

    def pair(rows: int) -> tuple[Tensor, Tensor]:
        return normal(rows, shape.num_kv_heads, shape.head_dim_qk), normal(rows, shape.num_kv_heads, shape.head_dim_v)

    k_cmp, v_cmp = pair(case.num_blocks)
    others = (*pair(tokens), *pair(tokens))
    if case.selection is Selection.TRAINED_LIKE:
        correlation = calibrate_correlation(case, k_cmp[0], generator)
        q = drifting_queries(tokens, case, correlation, generator).unsqueeze(0)
    elif isinstance(case.selection, Recorded):
        chosen = mapped_choice(case, read_recording(case.selection.path), device)
        q = pointing_queries(case, chosen, k_cmp[0]).unsqueeze(0)
    else:
        q = normal(tokens, shape.num_heads, shape.head_dim_qk)
    gates = torch.rand(1, tokens, shape.num_heads, 3, device=device, dtype=case.dtype, generator=generator)
    cu_seqlens = None if case.lengths is None else torch.tensor([0, *case.lengths], device=device).cumsum(0).int()
    return Inputs.of((x.requires_grad_() for x in (q, k_cmp, v_cmp, *others, gates)), cu_seqlens)


def drifting_queries(tokens: int, case: Case, correlation: float, generator: torch.Generator) -> Tensor:
    """Return q `(tokens, H, D_k)`, unit normal, neighbours correlated: q_t = c q_(t-1) + sqrt(1 - c^2) noise."""
    shape, device = case.shape, generator.device
    width = shape.num_heads * shape.head_dim_qk
    step = torch.arange(CHUNK, device=device)
    # row i of a chunk is the decayed sum of the chunk's noise up to row i, plus the decayed last row before the chunk
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
    """Return the correlation of neighbouring queries at which the stated share of free blocks persists over k_cmp (C, G, D_k).

    Bisects the logarithm of 1 - correlation on runs of queries all along the longest sequence.
    """
    pieces = _probes(case, k_cmp.device)
    low, high = 0.0, 6.0
    for _ in range(12):
        middle = (low + high) / 2
        shares = [_probe(case, piece, k_cmp, 1 - 10**-middle, generator) for piece in pieces]
        known = [share for share in shares if share is not None]
        if not known or sum(known) / len(known) < _share_kept(case):
            low = middle
        else:
            high = middle
    return float(1 - 10 ** -((low + high) / 2))


def _probes(case: Case, device: torch.device) -> list[Piece]:
    longest = max(case.sequence_lengths)
    earlier = case.sequence_lengths[: case.sequence_lengths.index(longest)]
    before = Case(shape=case.shape, seq_len=0, geometry=case.geometry, lengths=earlier)
    stops = [longest * (i + 1) // PROBES for i in range(PROBES)]
    return [
        Piece(0, longest, before.num_blocks, torch.arange(max(0, stop - PROBE_ROWS), stop, device=device), case.geometry) for stop in stops
    ]


def _probe(case: Case, piece: Piece, k_cmp: Tensor, correlation: float, generator: torch.Generator) -> float | None:
    """Return the share of free blocks that persists among the piece's queries if they drift with `correlation`."""
    count = len(piece.positions)
    q = drifting_queries(count, case, correlation, generator).float()
    keys = k_cmp[piece.first_block : piece.first_block + piece.num_blocks].float()
    return free_overlap(choose_rows(piece, q, keys).chosen, piece.positions, case.geometry)


def positions_of(case: Case, device: torch.device) -> Tensor:
    """Return int64 `(S,)`: every row's position in its own sequence."""
    return torch.cat([torch.arange(length, device=device) for length in case.sequence_lengths])


def make_block_indices(case: Case, device: torch.device, seed: int = 0) -> Tensor:
    """Return int32 block_indices `(1, S, G, n)`: valid choices, ascending, whose free blocks persist as the case says.

    A query has F slots for free blocks, where F is n minus the forced blocks. Slot s draws among the free candidates j with j = s modulo F, so
    that no block is listed twice. For each next query a slot draws again with the probability that the case states. Recorded choices
    are mapped by the rule of `recorded`.
    """
    if isinstance(case.selection, Recorded):
        return mapped_choice(case, read_recording(case.selection.path), device).unsqueeze(0)
    geometry, positions = case.geometry, positions_of(case, device)
    generator = torch.Generator(device).manual_seed(seed)
    num_free = geometry.num_selected_blocks - geometry.num_initial_blocks - geometry.num_local_blocks
    free = _free_blocks(positions, num_free, case, generator)
    own = (positions // geometry.selection_block_size).view(-1, 1, 1)
    local = own - torch.arange(geometry.num_local_blocks, device=device)
    initial = torch.arange(geometry.num_initial_blocks, device=device).expand(len(positions), 1, -1)
    # an initial block that is also local would be listed twice, and one in the future is invalid
    initial = torch.where(initial <= own - geometry.num_local_blocks, initial, -1)
    forced = torch.cat([initial, local.clamp(min=-1)], -1).expand(-1, case.shape.num_kv_heads, -1)
    blocks, most = torch.cat([free, forced], -1), torch.iinfo(torch.int64).max
    # ascending, -1 (none) last
    ordered = torch.where(blocks < 0, most, blocks).sort(-1).values
    return torch.where(ordered == most, -1, ordered).int()[..., : geometry.num_selected_blocks].unsqueeze(0)


def free_overlap(block_indices: Tensor, positions: Tensor, geometry: BlockGeometry) -> float | None:
    """Return the mean share of a query's free blocks that the next query of its sequence chooses too.

    block_indices `(S, G, n)`, positions int64 `(S,)`. Only queries that had to choose count, those with more than n
    candidates; None if there is none.
    """
    here, before = block_indices[1:], block_indices[:-1]
    own = positions[:-1] // geometry.selection_block_size
    counts = (positions[1:] == positions[:-1] + 1) & (own + 1 > geometry.num_selected_blocks)
    if not bool(counts.any()):
        return None
    here, before, own = here[counts], before[counts], own[counts].view(-1, 1, 1)
    is_free = (before >= geometry.num_initial_blocks) & (before <= own - geometry.num_local_blocks)
    kept = torch.zeros_like(is_free)
    for slot in range(here.shape[-1]):
        kept |= before == here[..., slot, None]
    share = (kept & is_free).sum(-1) / is_free.sum(-1).clamp(min=1)
    return float(share[is_free.any(-1)].double().mean()) if bool(is_free.any()) else None


def _free_blocks(positions: Tensor, num_free: int, case: Case, generator: torch.Generator) -> Tensor:
    """Return `(S, G, F)`: each slot's block, -1 if it has none to draw from."""
    geometry, device = case.geometry, positions.device
    sizes = (len(positions), case.shape.num_kv_heads, num_free)
    if not num_free:
        return torch.empty(sizes, dtype=torch.int64, device=device)
    slot = torch.arange(num_free, device=device)
    own = positions // geometry.selection_block_size
    count = (own + 1 - geometry.num_initial_blocks - geometry.num_local_blocks).clamp(min=0)
    # candidates of slot s: s, s + F, s + 2F, ... below `count`
    choices = ((count.unsqueeze(1) - slot + num_free - 1).clamp(min=0) // num_free).unsqueeze(1)
    drawn = (torch.rand(sizes, device=device, generator=generator) * choices).long()
    block = torch.where(choices > 0, drawn.clamp(max=(choices - 1).clamp(min=0)) * num_free + slot + geometry.num_initial_blocks, -1)
    # a new draw may fall on the old block
    odds = (1 - _share_kept(case)) * choices / (choices - 1).clamp(min=1)
    anew = torch.rand(sizes, device=device, generator=generator) < odds
    # a slot without a candidate draws as soon as it has one; every slot draws at the start of a sequence
    anew[1:] |= block[:-1] < 0
    anew |= (positions == 0).view(-1, 1, 1)
    rows = torch.arange(len(positions), device=device).view(-1, 1, 1)
    last_draw = torch.where(anew, rows, 0).cummax(0).values
    return block.gather(0, last_draw)


def _share_kept(case: Case) -> float:
    assert isinstance(case.selection, Selection)
    return SHARE_KEPT[case.selection]
