"""The oracle against figures worked out by hand, and against torch's dense attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_core.config import BlockGeometry
from nsa_core.reference import naive

FIGURE = BlockGeometry()  # l = 32, d = 16, l' = 64, as in the paper
SMALL = BlockGeometry(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=4,
    num_selected_blocks=3,
    num_initial_blocks=1,
    num_local_blocks=1,
    window_size=3,
)
H, G, D_K, D_V = 4, 2, 6, 5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(B: int, S: int, T: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    T = S if T is None else T
    return random(B, S, H, D_K, seed=seed), random(B, T, G, D_K, seed=seed + 1), random(B, T, G, D_V, seed=seed + 2)


def compressed(x: Tensor, geometry: BlockGeometry) -> Tensor:
    return torch.stack([naive.compress_mean(sequence, geometry) for sequence in x])


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """torch's attention in our layout; mask (S, T) or (B, S, H, T), True if a key is seen."""
    mask = mask if mask.dim() == 2 else mask.transpose(1, 2)
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


def causal(S: int) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def nsa_inputs(S: int, geometry: BlockGeometry, B: int = 1, seed: int = 0) -> list[Tensor]:
    """q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates."""
    q, k, v = qkv(B, S, seed=seed)
    _, k_slc, v_slc = qkv(B, S, seed=seed + 10)
    _, k_win, v_win = qkv(B, S, seed=seed + 20)
    gates = random(B, S, H, 3, seed=seed + 30)
    return [q, compressed(k, geometry), compressed(v, geometry), k_slc, v_slc, k_win, v_win, gates]


@pytest.mark.parametrize(("t", "expected"), [(0, 0), (15, 0), (16, 0), (30, 0), (31, 1), (46, 1), (47, 2), (62, 2), (63, 3)])
def test_a_block_becomes_visible_with_its_last_token(t: int, expected: int) -> None:
    assert naive.num_visible(t, FIGURE) == expected


@pytest.mark.parametrize(("S", "expected"), [(0, 0), (1, 0), (31, 0), (32, 1), (33, 1), (47, 1), (48, 2), (64, 3), (65536, 4095)])
def test_only_whole_blocks_exist(S: int, expected: int) -> None:
    assert naive.num_blocks(S, FIGURE) == expected


def test_overlap_weights_of_the_paper_are_1_2_2_2_1_from_4j_minus_1_to_4j_plus_3() -> None:
    weights = naive.overlap_weights(20, 4, FIGURE)

    assert weights[0] == {0: 2, 1: 2, 2: 2, 3: 1}  # block -1 does not exist
    for j in (1, 2, 3):
        assert weights[j] == {4 * j - 1: 1, 4 * j: 2, 4 * j + 1: 2, 4 * j + 2: 2, 4 * j + 3: 1}


@pytest.mark.parametrize(("S", "expected"), [(8192, 2047), (16384, 2559), (32768, 3583), (65536, 5631)])
def test_predicted_reads_are_those_of_table_4(S: int, expected: int) -> None:
    assert naive.predicted_reads(S, FIGURE) == expected


@pytest.mark.parametrize("S", [1, 2, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 1087, 1088, 1089, 2047])
def test_predicted_reads_follow_the_closed_form(S: int) -> None:
    n_c = 0 if S < 32 else (S - 32) // 16 + 1
    own = (S - 1) // 64

    assert naive.predicted_reads(S, FIGURE) == n_c + (min(16, own + 1) - 1) * 64 + (S - 1) % 64 + 1 + min(512, S)


def test_sequences_of_a_packed_batch_include_empty_ones() -> None:
    assert naive.sequences(2, 3) == [(0, 0, 3), (1, 0, 3)]
    assert naive.sequences(1, 5, torch.tensor([0, 0, 2, 2, 5], dtype=torch.int32)) == [(0, 0, 0), (0, 0, 2), (0, 2, 0), (0, 2, 3)]


def hand_worked_importance(t: int) -> list[float]:
    """p_slc of the query at t with keys chosen so that the two heads' p_cmp are in the ratios 1:2:3:4 and 1:1:1:7."""
    ratios = torch.tensor([[1, 1], [2, 1], [3, 1], [4, 7]], dtype=torch.float64)
    k_cmp = ratios.log().reshape(1, 4, 1, 2)
    q = torch.eye(2, dtype=torch.float64).reshape(1, 1, 2, 2)
    place = {"geometry": SMALL, "scale": 1.0, "query_start": torch.tensor([t])}
    _, lse = naive.compressed_attention(q, k_cmp, k_cmp, **place)
    return naive.importance(q, k_cmp, lse, **place)[0, 0, 0].tolist()


def test_importance_worked_by_hand() -> None:
    # l = 4, d = 2, l' = 4. Compressed blocks: 0..3, 2..5, 4..7, 6..9. Selection blocks: 0..3, 4..7, 8..11.
    # omega: block 0 lies in 0 (2); block 1 half in 0 and half in 1 (1, 1); block 2 in 1 (2); block 3 in 1 and 2 (1, 1).
    # p_cmp at t = 9, heads summed: 0.1 + 0.1, 0.2 + 0.1, 0.3 + 0.1, 0.4 + 0.7 = 0.2, 0.3, 0.4, 1.1.
    # p_slc: 2 * 0.2 + 0.3 = 0.7;  0.3 + 2 * 0.4 + 1.1 = 2.2;  1.1.
    assert hand_worked_importance(t=9) == pytest.approx([0.7, 2.2, 1.1], rel=1e-14)


def test_importance_counts_visible_blocks_only() -> None:
    # t = 8 sees three blocks: p = 1/6 + 1/3, 2/6 + 1/3, 3/6 + 1/3 = 3/6, 4/6, 5/6; block 2 scores 0
    assert hand_worked_importance(t=8) == pytest.approx([10 / 6, 14 / 6, 0.0], rel=1e-14)
    # t = 5 sees two: p = 1/3 + 1/2, 2/3 + 1/2 = 5/6, 7/6
    assert hand_worked_importance(t=5) == pytest.approx([17 / 6, 7 / 6], rel=1e-14)
    # t = 2 sees none
    assert hand_worked_importance(t=2) == [0.0]


def test_importance_sums_to_l_over_d_per_head() -> None:
    q, k, v = qkv(2, 23)
    k_cmp = compressed(k, SMALL)
    _, lse = naive.compressed_attention(q, k_cmp, compressed(v, SMALL), geometry=SMALL)

    total = naive.importance(q, k_cmp, lse, geometry=SMALL).sum(-1)

    assert total[:, :3].eq(0).all()
    assert_equal(total[:, 3:], torch.full_like(total[:, 3:], H / G * 4 / 2))


@pytest.mark.parametrize(
    ("own", "initial", "local", "expected"),
    [
        (0, 1, 2, {0}),
        (1, 1, 2, {0, 1}),
        (2, 1, 2, {0, 1, 2}),
        (5, 1, 2, {0, 4, 5}),
        (5, 0, 1, {5}),
        (5, 3, 1, {0, 1, 2, 5}),
        (1, 3, 1, {0, 1}),
        (3, 2, 3, {0, 1, 2, 3}),
    ],
)
@pytest.mark.parametrize("offset", [0, 63])
def test_first_and_local_blocks_are_forced(own: int, initial: int, local: int, expected: set[int], offset: int) -> None:
    geometry = BlockGeometry(num_initial_blocks=initial, num_local_blocks=local)

    assert naive.forced_blocks(own * 64 + offset, geometry) == expected


def test_free_blocks_are_taken_by_score() -> None:
    geometry = BlockGeometry(num_selected_blocks=5, num_initial_blocks=1, num_local_blocks=2)
    scores = [0.0, 0.1, 0.4, 0.3, 0.2, 0.9, 0.0, 0.0]

    assert naive.choose_blocks(scores, 7 * 64, geometry) == [0, 2, 5, 6, 7]
    assert naive.margin_of_choice(scores, 7 * 64, geometry) == pytest.approx(0.1)
    assert naive.choose_blocks(scores, 4 * 64, geometry) == [0, 1, 2, 3, 4]
    assert naive.margin_of_choice(scores, 4 * 64, geometry) == math.inf


@pytest.mark.parametrize("score", [0.0, 0.5])
def test_equal_scores_go_to_the_lower_block(score: float) -> None:
    geometry = BlockGeometry(num_selected_blocks=5, num_initial_blocks=1, num_local_blocks=2)
    scores = [0.0, score, score, score, score, score, 0.0, 0.0]

    assert naive.choose_blocks(scores, 7 * 64, geometry) == [0, 1, 2, 6, 7]
    assert naive.margin_of_choice(scores, 7 * 64, geometry) == 0


def test_a_choice_without_room_has_an_infinite_margin() -> None:
    geometry = BlockGeometry(num_selected_blocks=3, num_initial_blocks=1, num_local_blocks=2)

    assert naive.choose_blocks([0.0] * 8, 7 * 64, geometry) == [0, 6, 7]
    assert naive.margin_of_choice([0.0] * 8, 7 * 64, geometry) == math.inf


def test_selected_blocks_are_ascending_then_minus_one() -> None:
    S = 18
    q = torch.zeros(1, S, 2, 4, dtype=torch.float64)  # every p_cmp equal: ties everywhere
    k_cmp = random(1, naive.num_blocks(S, SMALL), 1, 4)
    _, lse = naive.compressed_attention(q, k_cmp, k_cmp, geometry=SMALL)

    block_indices = naive.select_blocks(q, k_cmp, lse, geometry=SMALL)

    assert block_indices.dtype == torch.int32
    assert block_indices.shape == (1, S, 1, 3)
    assert block_indices[0, 3, 0].tolist() == [0, -1, -1]
    assert block_indices[0, 4, 0].tolist() == [0, 1, -1]
    assert block_indices[0, 11, 0].tolist() == [0, 1, 2]
    # t = 17: blocks 1 and 2 score 4 * p each, block 3 too (its five visible neighbours end at 17), so the lowest wins
    assert block_indices[0, 17, 0].tolist() == [0, 1, 4]
    margin = naive.selection_margin(q, k_cmp, lse, geometry=SMALL)
    assert margin[0, :12].isinf().all()
    assert margin[0, 17, 0] == 0


def test_selection_follows_importance_and_neither_has_a_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(2, 41))
    k_cmp = compressed(k, SMALL)
    _, lse = naive.compressed_attention(q, k_cmp, compressed(v, SMALL), geometry=SMALL)
    p_slc = naive.importance(q, k_cmp, lse, geometry=SMALL)
    block_indices = naive.select_blocks(q, k_cmp, lse, geometry=SMALL)

    for t in range(12, 41):  # one free block of 1 .. own - 1
        best = p_slc[:, t, :, 1 : t // 4].argmax(-1) + 1
        assert block_indices[:, t, :, 1].equal(best.int())
        assert block_indices[:, t, :, 0].eq(0).all()
        assert block_indices[:, t, :, 2].eq(t // 4).all()
    assert not p_slc.requires_grad
    assert not block_indices.requires_grad


def test_dense_attention_equals_torch() -> None:
    q, k, v = qkv(2, 13)
    scores = torch.einsum("bshd,bthd->bsht", q, k.repeat_interleave(H // G, 2)) * D_K**-0.5

    out, lse = naive.dense_attention(q, k, v)

    assert_equal(out, sdpa(q, k, v, causal(13)))
    assert_equal(lse, scores.masked_fill(~causal(13)[:, None], -math.inf).logsumexp(-1))


@pytest.mark.parametrize("S", [1, 3, 4, 5, 17])
def test_a_window_as_long_as_the_sequence_is_dense(S: int) -> None:
    q, k, v = qkv(2, S)
    geometry = BlockGeometry(window_size=S)

    out, lse = naive.sliding_window_attention(q, k, v, geometry=geometry)

    assert_equal(out, sdpa(q, k, v, causal(S)))
    assert_equal(lse, naive.dense_attention(q, k, v).lse)


@pytest.mark.parametrize("S", [1, 4, 5, 11, 12])
def test_as_many_blocks_as_the_sequence_has_is_dense(S: int) -> None:
    q, k, v = qkv(2, S)
    k_cmp = compressed(k, SMALL)
    _, lse_cmp = naive.compressed_attention(q, k_cmp, compressed(v, SMALL), geometry=SMALL)
    block_indices = naive.select_blocks(q, k_cmp, lse_cmp, geometry=SMALL)

    out, lse = naive.selected_attention(q, k, v, block_indices, geometry=SMALL)

    assert_equal(out, sdpa(q, k, v, causal(S)))
    assert_equal(lse, naive.dense_attention(q, k, v).lse)


@pytest.mark.parametrize("S", [1, 2, 17])
def test_blocks_of_one_token_are_dense(S: int) -> None:
    q, k, v = qkv(2, S)
    geometry = BlockGeometry(compression_block_size=1, compression_stride=1)

    out, lse = naive.compressed_attention(q, compressed(k, geometry), compressed(v, geometry), geometry=geometry)

    assert_equal(out, sdpa(q, k, v, causal(S)))
    assert_equal(lse, naive.dense_attention(q, k, v).lse)


def test_compressed_attention_is_masked_attention_over_blocks() -> None:
    S = 19
    q, k, v = qkv(2, S)
    k_cmp, v_cmp = compressed(k, SMALL), compressed(v, SMALL)
    last_tokens = torch.arange(k_cmp.shape[1]) * 2 + 3
    mask = last_tokens <= torch.arange(S)[:, None]

    out, lse = naive.compressed_attention(q, k_cmp, v_cmp, geometry=SMALL)

    assert_equal(out[:, 3:], sdpa(q[:, 3:], k_cmp, v_cmp, mask[3:]))
    assert out[:, :3].eq(0).all()
    assert lse[:, :3].eq(-math.inf).all()


def test_selected_attention_reads_the_chosen_blocks_up_to_the_query() -> None:
    q, k, v = qkv(1, 10)
    block_indices = torch.full((1, 10, G, 3), -1, dtype=torch.int32)
    block_indices[0, 9, 0] = torch.tensor([-1, 2, 0])  # tokens 8, 9 and 0 .. 3
    block_indices[0, 9, 1] = torch.tensor([1, 3, -1])  # tokens 4 .. 7; block 3 lies in the future
    mask = torch.zeros(1, 1, H, 10, dtype=torch.bool)
    mask[0, 0, :2, [0, 1, 2, 3, 8, 9]] = True
    mask[0, 0, 2:, 4:8] = True

    out, lse = naive.selected_attention(q, k, v, block_indices, geometry=SMALL)

    assert_equal(out[:, 9:], sdpa(q[:, 9:], k, v, mask))
    assert out[:, :9].eq(0).all()
    assert lse[:, :9].eq(-math.inf).all()


def test_the_window_includes_the_query_and_excludes_t_minus_w() -> None:
    S = 9
    q, k, v = qkv(2, S)

    out, _ = naive.sliding_window_attention(q, k, v, geometry=SMALL)

    assert_equal(out, sdpa(q, k, v, causal(S) & ~causal(S).tril(-3)))


def test_a_given_scale_replaces_the_default() -> None:
    q, k, v = qkv(1, 6)

    assert_equal(naive.dense_attention(q, k, v, scale=0.5).out, naive.dense_attention(q * 0.5 * D_K**0.5, k, v).out)


def test_query_heads_read_the_kv_head_of_their_group() -> None:
    q, k, v = qkv(1, 9)
    changed = v.clone()
    changed[:, :, 1] += 1

    difference = naive.dense_attention(q, k, changed).out - naive.dense_attention(q, k, v).out

    assert difference[:, :, :2].eq(0).all()
    assert_equal(difference[:, :, 2:], torch.ones_like(difference[:, :, 2:]))


def test_nsa_attention_weighs_the_three_branches_by_their_gates() -> None:
    S = 21
    q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = inputs = nsa_inputs(S, SMALL)
    o_cmp, lse = naive.compressed_attention(q, k_cmp, v_cmp, geometry=SMALL)
    block_indices = naive.select_blocks(q, k_cmp, lse, geometry=SMALL)
    o_slc = naive.selected_attention(q, k_slc, v_slc, block_indices, geometry=SMALL).out
    o_win = naive.sliding_window_attention(q, k_win, v_win, geometry=SMALL).out

    out = naive.nsa_attention(*inputs, geometry=SMALL)

    assert_equal(out, torch.einsum("bshr,rbshd->bshd", gates, torch.stack([o_cmp, o_slc, o_win])))


def test_future_tokens_never_change_past_outputs() -> None:
    S, t = 29, 17
    q, k, v = qkv(1, S)
    gates = random(1, S, H, 3, seed=9)
    q_2, k_2, v_2 = (torch.cat([x[:, : t + 1], random(*x[:, t + 1 :].shape, seed=7)], dim=1) for x in (q, k, v))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return naive.nsa_attention(q, compressed(k, SMALL), compressed(v, SMALL), k, v, k, v, gates, geometry=SMALL)

    before, after = run(q, k, v), run(q_2, k_2, v_2)

    assert before[:, : t + 1].equal(after[:, : t + 1])
    assert not before[:, t + 1 :].equal(after[:, t + 1 :])


def test_packed_sequences_equal_separate_ones_with_their_gradients() -> None:
    lengths = [5, 0, 1, 14, 3, 9]
    cu_seqlens = torch.tensor([0, 5, 5, 6, 20, 23, 32], dtype=torch.int32)
    separate = [[x.requires_grad_() for x in nsa_inputs(S, SMALL, seed=100 * S)] for S in lengths]
    packed = [torch.cat(x, dim=1).detach() for x in zip(*separate, strict=True)]
    surplus = math.nan * torch.ones(1, 3, G, D_K, dtype=torch.float64)
    packed[1] = torch.cat([packed[1], surplus], dim=1)
    packed[2] = torch.cat([packed[2], surplus[..., :D_V]], dim=1)
    packed = [x.requires_grad_() for x in packed]
    weights = random(1, 32, H, D_V, seed=77)

    out = naive.nsa_attention(*packed, geometry=SMALL, cu_seqlens=cu_seqlens)
    expected = torch.cat([naive.nsa_attention(*inputs, geometry=SMALL) for inputs in separate], dim=1)
    grads = torch.autograd.grad((out * weights).sum(), packed)
    expected_grads = torch.autograd.grad((expected * weights).sum(), [x for inputs in separate for x in inputs])

    assert_equal(out, expected)
    for index, actual in enumerate(grads):
        wanted = torch.cat(expected_grads[index::8], dim=1)
        assert_equal(actual[:, : wanted.shape[1]], wanted)
        assert actual[:, wanted.shape[1] :].eq(0).all()


def test_packed_selection_counts_from_the_sequences_own_start() -> None:
    lengths, cu_seqlens = [13, 22], torch.tensor([0, 13, 35], dtype=torch.int32)
    separate = [nsa_inputs(S, SMALL, seed=S)[:3] for S in lengths]
    q, k_cmp, v_cmp = (torch.cat(x, dim=1) for x in zip(*separate, strict=True))
    _, lse = naive.compressed_attention(q, k_cmp, v_cmp, geometry=SMALL, cu_seqlens=cu_seqlens)
    packed = naive.select_blocks(q, k_cmp, lse, geometry=SMALL, cu_seqlens=cu_seqlens)

    start = 0
    for S, (q_i, k_i, v_i) in zip(lengths, separate, strict=True):
        _, lse_i = naive.compressed_attention(q_i, k_i, v_i, geometry=SMALL)
        assert packed[:, start : start + S].equal(naive.select_blocks(q_i, k_i, lse_i, geometry=SMALL))
        start += S


def test_a_cached_step_equals_the_rows_of_a_whole_pass() -> None:
    T, starts, counts = 27, [3, 20], [4, 2]
    inputs = nsa_inputs(T, SMALL, B=2)
    whole = naive.nsa_attention(*inputs, geometry=SMALL)
    place = {"geometry": SMALL, "query_start": torch.tensor(starts), "query_count": torch.tensor(counts)}
    steps = [torch.stack([x[b, starts[b] : starts[b] + 4] for b in range(2)]) for x in (inputs[0], inputs[7])]

    out = naive.nsa_attention(steps[0], *inputs[1:7], steps[1], **place)
    _, lse = naive.compressed_attention(steps[0], inputs[1], inputs[2], **place)
    block_indices = naive.select_blocks(steps[0], inputs[1], lse, **place)

    assert_equal(out[0], whole[0, 3:7])
    assert_equal(out[1, :2], whole[1, 20:22])
    assert out[1, 2:].eq(0).all()
    assert lse[1, 2:].eq(-math.inf).all()
    assert block_indices[1, 2:].eq(-1).all()
    assert naive.selection_margin(steps[0], inputs[1], lse, **place)[1, 2:].isinf().all()


def test_rows_beyond_the_query_count_see_nothing() -> None:
    q, k, v = qkv(2, 3, T=8)
    place = {"query_start": torch.tensor([4, 5]), "query_count": torch.tensor([3, 1])}
    block_indices = torch.tensor([0, 1], dtype=torch.int32).expand(2, 3, G, 2)

    for out, lse in (
        naive.dense_attention(q, k, v, **place),
        naive.sliding_window_attention(q, k, v, geometry=SMALL, **place),
        naive.selected_attention(q, k, v, block_indices, geometry=SMALL, **place),
    ):
        assert out[1, 1:].eq(0).all()
        assert lse[1, 1:].eq(-math.inf).all()
        assert lse[0].isfinite().all()
        assert lse[1, 0].isfinite().all()


@pytest.mark.parametrize(("B", "S"), [(0, 5), (2, 0), (0, 0)])
def test_empty_batches_and_sequences_give_empty_outputs(B: int, S: int) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(B, S))
    none = torch.zeros(B, 0, G, D_K, dtype=torch.float64), torch.zeros(B, 0, G, D_V, dtype=torch.float64)

    out = naive.nsa_attention(q, *none, k, v, k, v, torch.zeros(B, S, H, 3), geometry=SMALL)
    out.sum().backward()

    assert out.shape == (B, S, H, D_V)
    assert q.grad is not None
    assert naive.importance(q, none[0], torch.zeros(B, S, H), geometry=SMALL).shape == (B, S, G, 0)


def test_low_precision_keeps_the_outputs_dtype_and_widens_lse() -> None:
    q, k, v = (x.to(torch.bfloat16) for x in qkv(1, 5))

    out, lse = naive.dense_attention(q, k, v)

    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32


def test_gradients_of_the_whole_operation_pass_gradcheck() -> None:
    S = 17
    inputs = [x.requires_grad_() for x in nsa_inputs(S, SMALL, seed=3)]
    _, lse = naive.compressed_attention(*inputs[:3], geometry=SMALL)
    assert naive.selection_margin(inputs[0], inputs[1], lse, geometry=SMALL).min() > 1e-3

    assert torch.autograd.gradcheck(lambda *x: naive.nsa_attention(*x, geometry=SMALL), inputs, fast_mode=True)
    assert torch.autograd.gradcheck(lambda q, k, v: naive.compressed_attention(q, k, v, geometry=SMALL)[0], inputs[:3], fast_mode=True)


def test_lse_is_differentiable() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 7))

    assert torch.autograd.gradcheck(lambda q, k: naive.dense_attention(q, k, v).lse, (q, k), fast_mode=True)


@pytest.mark.parametrize("S", [1, 3, 6])
def test_rows_that_see_nothing_have_zero_gradients(S: int) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, S))
    k_cmp, v_cmp = compressed(k, SMALL), compressed(v, SMALL)

    out, lse = naive.compressed_attention(q, k_cmp, v_cmp, geometry=SMALL)
    (out.sum() + lse[lse.isfinite()].sum() + 0 * lse.exp().sum()).backward()

    assert out[:, :3].eq(0).all()
    assert lse[:, :3].eq(-math.inf).all()
    assert q.grad is not None and q.grad[:, :3].eq(0).all()
    for x in (q, k, v):
        assert x.grad is not None and x.grad.isfinite().all()
        assert S > 3 or x.grad.eq(0).all()


def test_a_row_without_blocks_has_zero_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 4))
    nothing = torch.full((1, 4, G, 2), -1, dtype=torch.int32)

    out, lse = naive.selected_attention(q, k, v, nothing, geometry=SMALL)
    out.sum().backward()

    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()
    assert all(x.grad is not None and x.grad.eq(0).all() for x in (q, k, v))


def test_mean_of_a_block_by_hand() -> None:
    x = torch.arange(7, dtype=torch.float64).reshape(7, 1, 1)

    assert naive.compress_mean(x, SMALL).flatten().tolist() == [1.5, 3.5]  # 0..3 and 2..5; 4..7 lacks its last token


@pytest.mark.parametrize("S", [4, 5, 6, 23])
def test_conv_equals_a_depthwise_conv1d(S: int) -> None:
    x, weight = random(S, G, D_K), random(G * D_K, 1, 4, seed=1)
    expected = F.conv1d(x.flatten(1).T[None], weight, stride=2, groups=G * D_K)[0].T.reshape(-1, G, D_K)

    assert_equal(naive.compress_conv(x, weight, SMALL), expected)


def test_conv_of_equal_weights_is_the_mean() -> None:
    x = random(11, G, D_K)

    assert_equal(naive.compress_conv(x, torch.full((G * D_K, 1, 4), 0.25), SMALL), naive.compress_mean(x, SMALL))


def mlp_parameters(l: int, D: int) -> list[Tensor]:  # noqa: E741
    shapes = [(l, D), (D, l * D), (D,), (D, D), (D,)]
    return [random(*shape, seed=seed) for seed, shape in enumerate(shapes, start=5)]


def test_mlp_equals_torch_modules_over_unfolded_tokens() -> None:
    x = random(13, G, D_K)
    position, w1, b1, w2, b2 = mlp_parameters(4, D_K)
    tokens = x.unfold(0, 4, 2).permute(0, 1, 3, 2)  # (N_c, G, l, D)
    hidden = F.silu(F.linear((tokens + position).flatten(2), w1, b1))

    out = naive.compress_mlp(x, position, w1, b1, w2, b2, SMALL)

    assert_equal(out, F.linear(hidden, w2, b2) + tokens.mean(2))


def test_mlp_with_a_last_layer_of_zeros_is_the_mean() -> None:
    x = random(13, G, D_K)
    position, w1, b1, w2, b2 = mlp_parameters(4, D_K)

    assert_equal(naive.compress_mlp(x, position, w1, b1, 0 * w2, 0 * b2, SMALL), naive.compress_mean(x, SMALL))


def test_phi_of_too_few_tokens_is_no_block() -> None:
    x = random(3, G, D_K).requires_grad_()

    for out in (
        naive.compress_mean(x, SMALL),
        naive.compress_conv(x, random(G * D_K, 1, 4), SMALL),
        naive.compress_mlp(x, *mlp_parameters(4, D_K), SMALL),
    ):
        assert out.shape == (0, G, D_K)
        assert torch.autograd.grad(out.sum(), x)[0].eq(0).all()


def test_gates_by_hand() -> None:
    logits = torch.tensor([math.log(1), math.log(3), math.log(4)], dtype=torch.float64).expand(2, 3)
    has_compressed = torch.tensor([True, False])

    sigmoid = naive.gate(logits, "sigmoid", 1.0, has_compressed)
    softmax = naive.gate(logits, "softmax", 1.0, has_compressed)
    cold = naive.gate(logits, "softmax", 0.5, has_compressed)

    assert_equal(sigmoid, torch.tensor([1 / 2, 3 / 4, 4 / 5], dtype=torch.float64).expand(2, 3))
    assert_equal(softmax, torch.tensor([[1 / 8, 3 / 8, 4 / 8], [0, 3 / 7, 4 / 7]], dtype=torch.float64))
    assert_equal(cold, torch.tensor([[1 / 26, 9 / 26, 16 / 26], [0, 9 / 25, 16 / 25]], dtype=torch.float64))


def test_a_closed_softmax_gate_has_a_finite_gradient() -> None:
    logits = random(2, 3).requires_grad_()

    naive.gate(logits, "softmax", 1.0, torch.tensor([True, False]))[:, 1].sum().backward()

    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[1, 0] == 0


def test_rotation_multiplies_complex_pairs() -> None:
    x = random(2, 5, 3, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 100, 65535]])
    frequencies = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    angles = positions[:, :, None, None] * frequencies
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)

    out = naive.rotate(x, positions, 10000.0)

    torch.testing.assert_close(out, torch.cat([turned.real, turned.imag], dim=-1), rtol=1e-12, atol=1e-11)
    assert out[0, 0].equal(x[0, 0])


def test_rotated_products_depend_on_relative_positions_only() -> None:
    q, k = random(4, 1, 8), random(4, 1, 8, seed=1)
    positions = torch.arange(4)

    near = (naive.rotate(q, positions + 2, 10000.0) * naive.rotate(k, positions, 10000.0)).sum(-1)
    far = (naive.rotate(q, positions + 502, 10000.0) * naive.rotate(k, positions + 500, 10000.0)).sum(-1)

    torch.testing.assert_close(near, far, rtol=1e-11, atol=1e-11)
