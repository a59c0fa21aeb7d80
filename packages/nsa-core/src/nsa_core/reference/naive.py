"""The oracle: the equations of arXiv 2502.11089 as plain loops over batch, sequence, query, head and block.

It is written from the equations alone. It computes in the dtype of its input, at least float32 (tests pass float64), is differentiable
through autograd, and slow on purpose. It shares no code with the backends that it checks; where they use closed forms, it counts.

Shapes: q (B, S, H, D_k), k (B, T, G, D_k), v (B, T, G, D_v), out (B, S, H, D_v), lse (B, S, H), natural log; T = S
unless `query_start` says otherwise. Query head h reads KV head h // (H // G). The query at position t of its sequence
owns the diagonal: it sees itself. A query that sees nothing gives out 0, lse -inf and zero gradients.

Layouts. Dense: every batch entry is one sequence. Packed (`cu_seqlens` given, B = 1): the sequences follow one another, and so do their
compressed blocks. Cached (`query_start` given): row i of sequence b is at position query_start[b] + i, the keys hold the sequence from
token 0, and rows i >= query_count[b] hold no query.
"""

from typing import Literal, NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from nsa_core.config import BlockGeometry


class AttentionOutput(NamedTuple):
    """The result of an attention over a set of keys."""

    out: Tensor
    lse: Tensor


class Options(TypedDict, total=False):
    """Keyword arguments of every attention; one that is not passed counts as None."""

    scale: float | None
    """Factor of the scores; None: D_k ** -0.5."""
    cu_seqlens: Tensor | None
    query_start: Tensor | None
    query_count: Tensor | None


class Sequence(NamedTuple):
    """One sequence: rows start .. start + length - 1 of batch entry `batch`."""

    batch: int
    start: int
    length: int


class Query(NamedTuple):
    """One row of q, its position, and the start of its sequence."""

    batch: int
    row: int
    position: int
    """t, inside its own sequence; -1 for a row that holds no query, which therefore sees nothing."""
    first_token: int
    """The row of k that holds token 0 of its sequence."""
    lengths_before: tuple[int, ...]
    """Lengths of the packed sequences before the query's own sequence."""


class KeysSeen(Protocol):
    """A function that returns the rows of k that a query sees in one group of heads."""

    def __call__(self, query: Query, group: int) -> list[int]:
        """Return row numbers along dimension 1 of k."""
        ...


def num_blocks(S: int, geometry: BlockGeometry) -> int:
    """Count the compressed blocks of S tokens, N_c(S): the blocks whose tokens are all among them (Eq. 7)."""
    return num_visible(S - 1, geometry)


def num_visible(t: int, geometry: BlockGeometry) -> int:
    """Count the compressed blocks that the query at t sees, n_c(t): those whose last token is not after t."""
    count = 0
    while count * geometry.compression_stride + geometry.compression_block_size - 1 <= t:
        count += 1
    return count


def overlap(i: int, j: int, geometry: BlockGeometry) -> int:
    """Count the tokens that compressed block i and selection block j share, in units of d: omega[i, j] of Eq. 9."""
    d = geometry.compression_stride
    block = range(i * d, i * d + geometry.compression_block_size)
    shared = sum(s // geometry.selection_block_size == j for s in block)
    assert shared % d == 0
    return shared // d


def predicted_reads(S: int, geometry: BlockGeometry) -> int:
    """Count one by one the keys that a KV head reads to decode the query at t = S - 1 (Table 4).

    It does not matter which blocks were chosen: the query's own block is always among them, and all others are full.
    """
    t, own = S - 1, (S - 1) // geometry.selection_block_size
    chosen = range(max(0, own + 1 - geometry.num_selected_blocks), own + 1)
    selected = sum(s // geometry.selection_block_size in chosen for s in range(S))
    window = sum(t - geometry.window_size < s <= t for s in range(S))
    return num_visible(t, geometry) + selected + window


def sequences(batch_size: int, num_rows: int, cu_seqlens: Tensor | None = None) -> list[Sequence]:
    """List the sequences of a dense batch (one per entry) or of a packed one (cu_seqlens (N + 1,)); empty ones count."""
    if cu_seqlens is None:
        return [Sequence(batch, 0, num_rows) for batch in range(batch_size)]
    bounds = cu_seqlens.tolist()
    return [Sequence(0, bounds[n], bounds[n + 1] - bounds[n]) for n in range(len(bounds) - 1)]


def queries(q: Tensor, **options: Unpack[Options]) -> list[Query]:
    """List the rows of q in memory order, each with its position and the start of its sequence."""
    query_start, query_count = options.get("query_start"), options.get("query_count")
    is_packed = options.get("cu_seqlens") is not None
    assert not is_packed or (query_start is None and query_count is None)
    found = []
    lengths_before: list[int] = []
    for batch, start, length in sequences(q.shape[0], q.shape[1], options.get("cu_seqlens")):
        first = 0 if query_start is None else int(query_start[batch])
        count = length if query_count is None else int(query_count[batch])
        for i in range(length):
            position = first + i if i < count else -1
            found.append(Query(batch, start + i, position, start, tuple(lengths_before)))
        if is_packed:
            lengths_before.append(length)
    return found


def first_block(query: Query, geometry: BlockGeometry) -> int:
    """Return the row of k_cmp that holds block 0 of the query's sequence."""
    return sum(num_blocks(length, geometry) for length in query.lengths_before)


def _join(pieces: list[Tensor], shape: tuple[int, ...], *sources: Tensor) -> Tensor:
    """Return the pieces, in order, as one tensor; for autograd it depends on the sources even if there are no pieces."""
    nothing = [source.flatten()[:0] for source in sources]
    return torch.cat(nothing + [piece.flatten() for piece in pieces]).reshape(shape)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _blocks(x: Tensor, geometry: BlockGeometry) -> list[Tensor]:
    """Cut x (S, G, D) into the blocks that phi summarises: i*d .. i*d + l - 1, each (l, G, D)."""
    starts = [i * geometry.compression_stride for i in range(num_blocks(x.shape[0], geometry))]
    return [x[start : start + geometry.compression_block_size] for start in starts]


def compress_mean(x: Tensor, geometry: BlockGeometry) -> Tensor:
    """Return the mean of each block: x (S, G, D) -> (N_c, G, D)."""
    _, G, D = x.shape
    return _join([block.mean(0) for block in _blocks(x, geometry)], (-1, G, D), x)


def compress_conv(x: Tensor, weight: Tensor, geometry: BlockGeometry) -> Tensor:
    """Return each block's weighted sum: x (S, G, D) -> (N_c, G, D).

    weight (G * D, 1, l) holds one weight per channel g * D + c and token of the block, as a depthwise Conv1d does.
    """
    _, G, D = x.shape
    weight_LGD = weight.reshape(G, D, -1).permute(2, 0, 1)
    rows = [(block * weight_LGD).sum(0) for block in _blocks(x, geometry)]
    return _join(rows, (-1, G, D), x, weight)


def compress_mlp(
    x: Tensor,
    position: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    geometry: BlockGeometry,
) -> Tensor:
    """Return W2 SiLU(W1 flatten(block + position) + b1) + b2 + the mean of the block: x (S, G, D) -> (N_c, G, D).

    position is (l, D), w1 (D, l * D), b1 (D,), w2 (D, D), b2 (D,); all groups share them. A block is flattened token by token. The mean is
    the mean of x alone, without position.
    """
    _, G, D = x.shape
    rows = []
    for block in _blocks(x, geometry):
        for group in range(G):
            tokens = block[:, group]
            hidden = w1 @ (tokens + position).flatten() + b1
            rows.append(w2 @ (hidden * torch.sigmoid(hidden)) + b2 + tokens.mean(0))
    return _join(rows, (-1, G, D), x, position, w1, b1, w2, b2)


def _scale(q: Tensor, **options: Unpack[Options]) -> float:
    given = options.get("scale")
    return float(q.shape[-1] ** -0.5) if given is None else given


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> AttentionOutput:
    """Return softmax(scale q k) v of one query (D_k,) over the m keys (m, D_k) and values (m, D_v) that it sees (Eq. 2).

    m = 0 needs no special case: the log of an empty sum is -inf, and an empty sum of values is 0.
    """
    scores = scale * (keys @ q)
    lse = torch.logsumexp(scores, dim=0)
    return AttentionOutput(torch.exp(scores - lse) @ values, lse)


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: KeysSeen, **options: Unpack[Options]) -> AttentionOutput:
    """Return out and lse of every row and head over the keys that `seen` returns for its group."""
    (B, S, H, _), G, D_v = q.shape, k.shape[2], v.shape[3]
    scale = _scale(q, **options)
    q_BSH = [[row.unbind(0) for row in entry.unbind(0)] for entry in _at_least_float32(q).unbind(0)]
    k_BG = [entry.unbind(1) for entry in _at_least_float32(k).unbind(0)]
    v_BG = [entry.unbind(1) for entry in _at_least_float32(v).unbind(0)]
    outs, lses = [], []
    for query in queries(q, **options):
        for group in range(G):
            index = torch.tensor(seen(query, group), dtype=torch.int64, device=q.device)
            keys = k_BG[query.batch][group].index_select(0, index)
            values = v_BG[query.batch][group].index_select(0, index)
            for head in range(group * (H // G), (group + 1) * (H // G)):
                out, lse = attend(q_BSH[query.batch][query.row][head], keys, values, scale)
                outs.append(out)
                lses.append(lse)
    joined_out = _join(outs, (B, S, H, D_v), *(_at_least_float32(x) for x in (q, k, v)))
    joined_lse = _join(lses, (B, S, H), *(_at_least_float32(x) for x in (q, k)))
    return AttentionOutput(joined_out.to(q.dtype), joined_lse)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]) -> AttentionOutput:
    """Return causal attention of q_t over all tokens s <= t (Eq. 1, 2): the sparse branches equal it if they see all tokens."""

    def seen(query: Query, group: int) -> list[int]:
        return [query.first_token + s for s in range(query.position + 1)]

    return _attention(q, k, v, seen, **options)


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, geometry: BlockGeometry, **options: Unpack[Options]
) -> AttentionOutput:
    """Return attention of q_t over the compressed blocks that end at or before t (Eq. 7, 8).

    k_cmp (B, C, G, D_k), v_cmp (B, C, G, D_v) come from phi. C may exceed the number of blocks; surplus rows are never read. In a packed
    batch, the blocks of the sequences follow one another.
    """

    def seen(query: Query, group: int) -> list[int]:
        first = first_block(query, geometry)
        return [first + i for i in range(num_visible(query.position, geometry))]

    return _attention(q, k_cmp, v_cmp, seen, **options)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *, geometry: BlockGeometry, **options: Unpack[Options]
) -> AttentionOutput:
    """Return attention of q_t over the tokens s <= t of its group's chosen blocks (Eq. 11, 12).

    block_indices (B, S, G, any) counts blocks from the sequence's own start. Its order does not matter, and an entry
    outside 0 .. t // l' (such as -1) chooses nothing.
    """
    chosen = block_indices.tolist()

    def seen(query: Query, group: int) -> list[int]:
        blocks = set(chosen[query.batch][query.row][group])
        tokens = range(query.position + 1)
        return [query.first_token + s for s in tokens if s // geometry.selection_block_size in blocks]

    return _attention(q, k, v, seen, **options)


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, *, geometry: BlockGeometry, **options: Unpack[Options]) -> AttentionOutput:
    """Return attention of q_t over the last w tokens, its own included: t - w < s <= t (section 3.3.3)."""

    def seen(query: Query, group: int) -> list[int]:
        t, w = query.position, geometry.window_size
        return [query.first_token + s for s in range(t + 1) if t - w < s]

    return _attention(q, k, v, seen, **options)


def overlap_weights(num_compressed: int, num_selection: int, geometry: BlockGeometry) -> list[dict[int, int]]:
    """Return, for each selection block j, its non-zero weights {i: omega[i, j]}, i ascending."""
    weights = []
    for j in range(num_selection):
        omega = {i: overlap(i, j, geometry) for i in range(num_compressed)}
        weights.append({i: weight for i, weight in omega.items() if weight})
    return weights


def importance_of_head(p_cmp: list[float], weights: list[dict[int, int]]) -> list[float]:
    """Return sum over visible i of omega[i, j] * p_cmp[i] for each selection block j (Eq. 9)."""
    visible = range(len(p_cmp))
    return [sum(weight * p_cmp[i] for i, weight in omega_j.items() if i in visible) for omega_j in weights]


def importance(q: Tensor, k_cmp: Tensor, lse: Tensor, *, geometry: BlockGeometry, **options: Unpack[Options]) -> Tensor:
    """Return p_slc (B, S, G, N), summed over the heads of a group (Eq. 9, 10), without gradient.

    lse (B, S, H) is the result of the compressed branch. N is the number of blocks up to the last position of any query. Blocks that a query
    does not see have importance 0.
    """
    rows = queries(q, **options)
    (B, S, H, _), G = q.shape, k_cmp.shape[2]
    scale = _scale(q, **options)
    q, k_cmp, lse = (_at_least_float32(x.detach()) for x in (q, k_cmp, lse))
    furthest = max((query.position for query in rows), default=-1)
    num_selection = furthest // geometry.selection_block_size + 1
    weights = overlap_weights(num_visible(furthest, geometry), num_selection, geometry)
    p_slc = torch.zeros(B, S, G, num_selection, dtype=q.dtype, device=q.device)
    for query in rows:
        batch, row, first = query.batch, query.row, first_block(query, geometry)
        for group in range(G):
            keys = k_cmp[batch, first : first + num_visible(query.position, geometry), group]
            per_head = []
            for head in range(group * (H // G), (group + 1) * (H // G)):
                p_cmp = torch.exp(scale * (keys @ q[batch, row, head]) - lse[batch, row, head])
                per_head.append(importance_of_head(p_cmp.tolist(), weights))
            p_slc[batch, row, group] = p_slc.new_tensor([sum(heads) for heads in zip(*per_head, strict=True)])
    return p_slc


def forced_blocks(t: int, geometry: BlockGeometry) -> set[int]:
    """Return the blocks that the query at t always attends to: the first ones, and the local ones that end with its own."""
    own = t // geometry.selection_block_size
    initial = {j for j in range(own + 1) if j < geometry.num_initial_blocks}
    local = {j for j in range(own + 1) if own - geometry.num_local_blocks < j}
    return initial | local


def rank_free_blocks(scores: list[float], t: int, geometry: BlockGeometry) -> tuple[list[int], int]:
    """Return the candidates that are not forced, best first (ties: lower j first), and how many of them are chosen."""
    own = t // geometry.selection_block_size
    forced = forced_blocks(t, geometry)
    free = [j for j in range(own + 1) if j not in forced]
    room = min(geometry.num_selected_blocks, own + 1) - len(forced)
    return sorted(free, key=lambda j: (-scores[j], j)), room


def choose_blocks(scores: list[float], t: int, geometry: BlockGeometry) -> list[int]:
    """Return the min(n, own + 1) blocks of the query at t, ascending, from its p_slc (Eq. 11)."""
    ranked, room = rank_free_blocks(scores, t, geometry)
    return sorted(forced_blocks(t, geometry) | set(ranked[:room]))


def margin_of_choice(scores: list[float], t: int, geometry: BlockGeometry) -> float:
    """Return the lowest chosen free score minus the highest free score that was not chosen; inf if scores decided nothing."""
    ranked, room = rank_free_blocks(scores, t, geometry)
    if room == 0 or room == len(ranked):
        return float("inf")
    return scores[ranked[room - 1]] - scores[ranked[room]]


def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, *, geometry: BlockGeometry, **options: Unpack[Options]) -> Tensor:
    """Return block_indices (B, S, G, n), int32, ascending, -1 after the last, one choice per group (Eq. 9 to 11)."""
    p_slc = importance(q, k_cmp, lse, geometry=geometry, **options)
    n = geometry.num_selected_blocks
    block_indices = torch.full((*p_slc.shape[:3], n), -1, dtype=torch.int32, device=q.device)
    for query in queries(q, **options):
        for group, scores in enumerate(p_slc[query.batch, query.row].tolist()):
            chosen = choose_blocks(scores, query.position, geometry)
            block_indices[query.batch, query.row, group, : len(chosen)] = block_indices.new_tensor(chosen)
    return block_indices


def selection_margin(q: Tensor, k_cmp: Tensor, lse: Tensor, *, geometry: BlockGeometry, **options: Unpack[Options]) -> Tensor:
    """Return (B, S, G): the lowest chosen free score minus the highest free score that was not chosen, for the near-tie rule.

    It is inf if scores decided nothing: all candidates were chosen, or the forced blocks took all slots.
    """
    p_slc = importance(q, k_cmp, lse, geometry=geometry, **options)
    margin = torch.full(p_slc.shape[:3], float("inf"), dtype=p_slc.dtype, device=q.device)
    for query in queries(q, **options):
        for group, scores in enumerate(p_slc[query.batch, query.row].tolist()):
            margin[query.batch, query.row, group] = margin_of_choice(scores, query.position, geometry)
    return margin


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    *,
    geometry: BlockGeometry,
    **options: Unpack[Options],
) -> Tensor:
    """Return g_cmp o_cmp + g_slc o_slc + g_win o_win (Eq. 5): (B, S, H, D_v), in q's dtype.

    gates (B, S, H, 3) in the order compressed, selected, window; used as given. The choice of blocks has no gradient.
    """
    o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, geometry=geometry, **options)
    block_indices = select_blocks(q, k_cmp, lse, geometry=geometry, **options)
    o_slc, _ = selected_attention(q, k_slc, v_slc, block_indices, geometry=geometry, **options)
    o_win, _ = sliding_window_attention(q, k_win, v_win, geometry=geometry, **options)
    g_cmp, g_slc, g_win = _at_least_float32(gates).unsqueeze(-1).unbind(-2)
    return (g_cmp * o_cmp + g_slc * o_slc + g_win * o_win).to(q.dtype)


def gate(logits: Tensor, kind: Literal["sigmoid", "softmax"], temperature: float, has_compressed: Tensor) -> Tensor:
    """Return the gates (..., 3) of logits (..., 3), which are first divided by the temperature.

    sigmoid: each branch by itself (section 3.2). softmax: over the three branches; where `has_compressed`, a bool that broadcasts to (...), is
    False, over the last two, and the gate of compressed is exactly 0.
    """
    scaled = _at_least_float32(logits) / temperature
    if kind == "sigmoid":
        return torch.sigmoid(scaled)
    cmp, slc, win = scaled.unbind(-1)
    return torch.softmax(torch.stack([torch.where(has_compressed, cmp, float("-inf")), slc, win], dim=-1), dim=-1)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Return x (..., S, heads, D) with the pair (x[c], x[c + D/2]) turned by the angle position * theta ** (-2c / D).

    This is rotate-half RoPE, as in Hugging Face Llama. positions (..., S) broadcasts over the heads. Angles are float64; their cosines and
    sines have x's dtype, or float32 if that is wider.
    """
    half, wide = x.shape[-1] // 2, _at_least_float32(x)
    turns = []
    for c in range(half):
        angle = positions.to(torch.float64).unsqueeze(-1) * theta ** (-c / half)
        cos, sin = angle.cos().to(wide.dtype), angle.sin().to(wide.dtype)
        first, second = wide[..., c], wide[..., c + half]
        turns.append((first * cos - second * sin, second * cos + first * sin))
    return torch.stack([pair[0] for pair in turns] + [pair[1] for pair in turns], dim=-1).to(x.dtype)
