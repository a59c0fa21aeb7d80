"""Bad input at the public edge: an InputError that says what was found, why it is refused and what to do."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

from nsa_core import (
    BlockGeometry,
    BranchRequest,
    InputError,
    NativeSparseAttention,
    NSACache,
    NSAConfig,
    NSAError,
    attend,
    compress_mean,
    compressed_attention,
    explain_routing,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from nsa_core.backends.base import Keys, Queries
from nsa_core.dense_attention import DenseAttention
from nsa_core.errors import type_of

SMALL = BlockGeometry(4, 2, 4, 3, 1, 1, 5)
B, S, H, G, D_K, D_V, C = 2, 9, 4, 2, 6, 5, 3


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def tensors(num_tokens=S, batch=B):
    """Valid dense inputs of every operation, by name."""
    blocks = (num_tokens - 4) // 2 + 1
    shapes = {
        "q": (num_tokens, H, D_K),
        "k_cmp": (blocks, G, D_K),
        "v_cmp": (blocks, G, D_V),
        "lse": (num_tokens, H),
        "k": (num_tokens, G, D_K),
        "v": (num_tokens, G, D_V),
        "gates": (num_tokens, H, 3),
    }
    made = {name: torch.zeros(batch, *shape) for name, shape in shapes.items()}
    return {**made, "block_indices": torch.zeros(batch, num_tokens, G, 3, dtype=torch.int32) - 1}


ARGUMENTS = {
    compressed_attention: ("q", "k_cmp", "v_cmp"),
    select_blocks: ("q", "k_cmp", "lse"),
    selected_attention: ("q", "k", "v", "block_indices"),
    sliding_window_attention: ("q", "k", "v"),
    nsa_attention: ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "gates"),
}
OPERATIONS = pytest.mark.parametrize("operation", ARGUMENTS, ids=lambda operation: operation.__name__)
ATTENTIONS = pytest.mark.parametrize("operation", [operation for operation in ARGUMENTS if operation is not select_blocks])


def call(operation, *, num_tokens=S, batch=B, options=None, **changed):
    """Call `operation` on valid inputs, those in `changed` replaced."""
    return operation(*valid(operation, num_tokens, batch, **changed), geometry=SMALL, **(options or {}))


def valid(operation, num_tokens=S, batch=B, **changed):
    """Return the tensors of `operation`, in order, those in `changed` replaced."""
    made = tensors(num_tokens, batch)
    made |= {"k_slc": made["k"], "v_slc": made["v"], "k_win": made["k"], "v_win": made["v"]}
    unknown = set(changed) - set(ARGUMENTS[operation])
    assert not unknown, unknown
    made |= changed
    return [made[name] for name in ARGUMENTS[operation]]


def refusal(operation, **arguments):
    with pytest.raises(InputError) as caught:
        call(operation, **arguments)
    return str(caught.value)


def names_of(operation, *kinds):
    return [name for name in ARGUMENTS[operation] if name.split("_")[0] in kinds]


@OPERATIONS
def test_the_valid_inputs_of_this_file_are_accepted(operation):
    call(operation)


@pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning")
@ATTENTIONS
def test_tangents_of_forward_mode_are_refused(operation):
    for name in names_of(operation, "q", "k", "v", "gates"):
        place = ARGUMENTS[operation].index(name)
        operands = valid(operation)

        def run(x, place=place, operands=operands):
            result = operation(*operands[:place], x, *operands[place + 1 :], geometry=SMALL)
            return result if isinstance(result, torch.Tensor) else result.out

        with pytest.raises(InputError, match="forward-mode"):
            torch.func.jvp(run, (operands[place],), (torch.ones_like(operands[place]),))
        # the same without the transform, and nothing is refused where no tensor has a tangent
        with forward_ad.dual_level():
            with pytest.raises(InputError, match="forward-mode"):
                run(forward_ad.make_dual(operands[place], operands[place]))
            run(operands[place])


def test_tangents_of_gates_are_refused_branch_by_branch_too():
    q, *stores, gates = valid(nsa_attention)
    with forward_ad.dual_level(), pytest.raises(InputError, match="forward-mode"):
        nsa_attention(q, *stores, forward_ad.make_dual(gates, gates), geometry=SMALL, backend={"win": "sdpa"})


@pytest.mark.parametrize("operation", ARGUMENTS)
def test_a_keyword_that_does_not_exist_is_named_with_those_that_do(operation):
    operands = [torch.zeros(1)] * len(ARGUMENTS[operation])
    with pytest.raises(TypeError, match=r"scal= is no keyword of the operation; use one of geometry, scale, cu_seqlens, .*registry"):
        operation(*operands, geometry=SMALL, scal=1.0)


@pytest.mark.parametrize("operation", [compressed_attention, select_blocks, selected_attention, sliding_window_attention])
def test_an_operation_of_one_branch_needs_its_keys_and_values(operation):
    for name in set(ARGUMENTS[operation]) & {"k", "v", "k_cmp", "v_cmp"}:
        found = {**tensors(), name: None}
        with pytest.raises(InputError, match=f"^{name} is None "):
            operation(*(found[argument] for argument in ARGUMENTS[operation]), geometry=SMALL)


def test_a_bound_may_be_an_integer_of_any_kind():
    q, k, v = (tensors(batch=1)[name] for name in ("q", "k", "v"))
    bounds = int32([0, 4, S])
    found = sliding_window_attention(q, k, v, geometry=SMALL, cu_seqlens=bounds, max_seqlen=np.int64(5))
    assert torch.equal(found.out, sliding_window_attention(q, k, v, geometry=SMALL, cu_seqlens=bounds, max_seqlen=5).out)
    for wrong in (12.5, -1):
        with pytest.raises(InputError, match="is no bound on rows"):
            sliding_window_attention(q[:, :1], k, v, geometry=SMALL, query_start=int32([3]), max_seqlen=wrong)
    for kind in (int, np.int64):
        sliding_window_attention(q[:, :1], k, v, geometry=SMALL, query_start=int32([3]), max_seqlen=kind(S))


def test_an_input_error_is_an_nsa_error_and_a_value_error():
    assert issubclass(InputError, NSAError)
    assert issubclass(InputError, ValueError)


@OPERATIONS
def test_a_query_of_the_wrong_rank_is_refused(operation):
    assert (
        refusal(operation, q=torch.zeros(S, H, D_K))
        == f"q has shape ({S}, {H}, {D_K}) (the layout is (B, S, H, D_k)); give it 4 dimensions"
    )


@OPERATIONS
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_query_that_is_not_floating_is_refused(operation, dtype):
    assert refusal(operation, q=torch.zeros(B, S, H, D_K, dtype=dtype)) == (
        f"q is {dtype} (attention takes floating tensors); use float32, bfloat16, float16 or float64"
    )


@OPERATIONS
def test_keys_and_values_of_the_wrong_rank_are_refused(operation):
    for name in names_of(operation, "k", "v"):
        assert refusal(operation, **{name: torch.zeros(S, G, D_K)}) == (
            f"{name} has shape ({S}, {G}, {D_K}) (the layout is (B, T, G, D)); give it 4 dimensions"
        )


@OPERATIONS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_keys_and_values_of_another_dtype_are_refused(operation, dtype):
    made = tensors() | {f"{letter}_{branch}": tensors()[letter] for letter in "kv" for branch in ("slc", "win")}
    for name in names_of(operation, "k", "v"):
        assert refusal(operation, **{name: made[name].to(dtype)}) == (
            f"{name} is {dtype}, q is torch.float32 (q, k, v share one dtype); cast one with .to()"
        )


@OPERATIONS
def test_tensors_on_another_device_are_refused(operation):
    made = tensors() | {f"{letter}_{branch}": tensors()[letter] for letter in "kv" for branch in ("slc", "win")}
    for name in ARGUMENTS[operation][1:]:
        assert refusal(operation, **{name: made[name].to("meta")}) == (
            f"{name} is on meta, q on cpu (one device per call); move one with .to()"
        )


@OPERATIONS
def test_keys_of_another_head_dimension_are_refused(operation):
    for name in names_of(operation, "k"):
        rows = C if name == "k_cmp" else S
        assert refusal(operation, **{name: torch.zeros(B, rows, G, 8)}) == (
            f"{name} has head dimension 8, q has 6 (they meet in a product); make them equal"
        )


@ATTENTIONS
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_values_that_do_not_pair_with_their_keys_are_refused(operation, axis):
    made = tensors() | {f"{letter}_{branch}": tensors()[letter] for letter in "kv" for branch in ("slc", "win")}
    for name in names_of(operation, "v"):
        shape = list(made[name].shape)
        shape[axis] += 1
        partner = "k" + name[1:]
        assert refusal(operation, **{name: torch.zeros(shape)}) == (
            f"{name} has shape {tuple(shape)}, {partner} {tuple(made[partner].shape)} (equal except for the last size); pass matching tensors"
        )


@OPERATIONS
def test_keys_of_another_batch_size_are_refused(operation):
    made = tensors(batch=3) | {f"{letter}_{branch}": tensors(batch=3)[letter] for letter in "kv" for branch in ("slc", "win")}
    for name in names_of(operation, "k"):
        pair = {n: made[n] for n in (name, "v" + name[1:]) if n in ARGUMENTS[operation]}
        assert refusal(operation, **pair) == f"{name} has batch size 3, q has 2 (the rule: equal); give both the same batch"


@OPERATIONS
@pytest.mark.parametrize("num_kv_heads", [3, 8, 0])
def test_kv_heads_that_do_not_divide_the_query_heads_are_refused(operation, num_kv_heads):
    for name in names_of(operation, "k"):
        rows = C if name == "k_cmp" else S
        pair = {name: torch.zeros(B, rows, num_kv_heads, D_K), "v" + name[1:]: torch.zeros(B, rows, num_kv_heads, D_V)}
        assert refusal(operation, **{n: x for n, x in pair.items() if n in ARGUMENTS[operation]}) == (
            f"{name} has {num_kv_heads} KV heads for 4 query heads (each serves H/G of them); use a divisor of 4"
        )


def test_branches_of_different_kv_heads_are_refused():
    one = {"k_win": torch.zeros(B, S, 1, D_K), "v_win": torch.zeros(B, S, 1, D_V)}

    assert refusal(nsa_attention, **one) == "the branches have [1, 2] KV heads (one choice per group serves all); give them equal G"


@pytest.mark.parametrize("width", [1, D_V + 1])
@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_branches_of_values_of_different_widths_are_refused(branch, width):
    one = {f"v_{branch}": torch.zeros(B, C if branch == "cmp" else S, G, width)}

    assert refusal(nsa_attention, **one) == (
        f"the branches' values have head dimensions {sorted([width, D_V])} (Eq. 5 adds their outputs); give them equal D_v"
    )


def test_the_keys_of_an_absent_compressed_branch_are_no_values():
    assert call(nsa_attention, v_cmp=None).shape == (B, S, H, D_V)


@OPERATIONS
@pytest.mark.parametrize("scale", ["1", [0.5], torch.tensor(0.5), True, math.nan, math.inf])
def test_a_scale_that_is_no_number_is_refused(operation, scale):
    message = f"scale={scale!r} is {type_of(scale)} (the rule: a finite number, or None for D_k ** -0.5); use None"
    assert refusal(operation, options={"scale": scale}) == message


@OPERATIONS
@pytest.mark.parametrize("scale", [1, 0.5, np.float32(0.5), np.float64(0.5)])
def test_a_scale_may_be_any_number(operation, scale):
    call(operation, options={"scale": scale})


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        (
            ["k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win"],
            "every branch is None (Eq. 5 sums at least one); give the k and v of one",
        ),
        (["v_cmp", "k_slc", "v_slc", "k_win", "v_win"], "every branch is None (Eq. 5 sums at least one); give the k and v of one"),
        (
            ["k_cmp", "v_cmp"],
            "k_cmp is None with the selected branch (blocks are chosen by compressed scores, Eq. 8); give k_cmp",
        ),
        (["k_cmp", "k_slc", "v_slc"], "one of k_cmp and v_cmp is None (a branch has both or neither); give both"),
        (["k_slc"], "one of k_slc and v_slc is None (a branch has both or neither); give both"),
        (["v_slc"], "one of k_slc and v_slc is None (a branch has both or neither); give both"),
        (["k_win"], "one of k_win and v_win is None (a branch has both or neither); give both"),
        (["v_win"], "one of k_win and v_win is None (a branch has both or neither); give both"),
    ],
)
def test_a_branch_in_pieces_is_refused(absent, message):
    assert refusal(nsa_attention, **dict.fromkeys(absent)) == message


@pytest.mark.parametrize("shape", [(B, S, H), (B, S, H, 2), (B, S, 3, H), (B, S + 1, H, 3), (1, S, H, 3)])
def test_gates_of_another_shape_are_refused(shape):
    assert refusal(nsa_attention, gates=torch.zeros(shape)) == (
        f"gates has shape {shape} (the layout is (B, S, H, 3): cmp, slc, win); give it ({B}, {S}, {H}, 3)"
    )


def test_gates_that_are_not_floating_are_refused():
    assert refusal(nsa_attention, gates=torch.ones(B, S, H, 3, dtype=torch.int64)) == (
        "gates is torch.int64 (attention takes floating tensors); use float32, bfloat16, float16 or float64"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gates_may_be_of_any_floating_dtype(dtype):
    assert call(nsa_attention, gates=torch.zeros(B, S, H, 3, dtype=dtype)).dtype == torch.float32


@pytest.mark.parametrize("shape", [(B, S), (B, H, S), (B, S, G), (B, S + 1, H)])
def test_an_lse_of_another_shape_is_refused(shape):
    assert refusal(select_blocks, lse=torch.zeros(shape)) == (f"lse has shape {shape} (the layout is (B, S, H)); give it ({B}, {S}, {H})")


def test_an_lse_that_is_not_floating_is_refused():
    assert refusal(select_blocks, lse=torch.zeros(B, S, H, dtype=torch.int64)).startswith("lse is torch.int64 ")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_8_bits_are_no_operands_of_arithmetic(dtype):
    lse, k = tensors()["lse"].to(dtype), tensors()["k"].to(dtype)
    assert refusal(select_blocks, lse=lse) == f"lse is {dtype} (arithmetic needs at least 16 bits); use lse.to(torch.float32)"
    # with and without a whole block
    for rows in (S, 1):
        with pytest.raises(InputError, match=rf"^k is {dtype} .arithmetic needs at least 16 bits.; use k.to.torch.float32.$"):
            compress_mean(k[:, :rows], SMALL)


@OPERATIONS
@pytest.mark.parametrize("extra", [1, -1])
def test_without_a_query_start_there_are_as_many_keys_as_queries(operation, extra):
    for name in names_of(operation, "k"):
        if name == "k_cmp":
            continue
        pair = {name: torch.zeros(B, S + extra, G, D_K), "v" + name[1:]: torch.zeros(B, S + extra, G, D_V)}
        assert refusal(operation, **pair) == (
            f"{name} has {S + extra} tokens for {S} queries (without query_start they are the same tokens); "
            f"give query_start, or as many keys as queries"
        )


@pytest.mark.parametrize("operation", [compressed_attention, select_blocks, nsa_attention])
def test_too_few_compressed_blocks_are_refused(operation):
    short = {"k_cmp": torch.zeros(B, C - 1, G, D_K), "v_cmp": torch.zeros(B, C - 1, G, D_V)}

    message = refusal(operation, **{name: x for name, x in short.items() if name in ARGUMENTS[operation]})

    assert message == "k_cmp has 2 blocks where the sequences have 3 (N_c = (S - l) // d + 1 each); compress all of them"


@pytest.mark.parametrize("operation", [compressed_attention, select_blocks, nsa_attention])
def test_surplus_compressed_blocks_are_accepted(operation):
    more = {"k_cmp": torch.zeros(B, C + 2, G, D_K), "v_cmp": torch.zeros(B, C + 2, G, D_V)}

    call(operation, **{name: x for name, x in more.items() if name in ARGUMENTS[operation]})


@pytest.mark.parametrize("operation", [compressed_attention, select_blocks, nsa_attention])
def test_too_few_packed_compressed_blocks_are_refused(operation):
    # sequences of 5 and 4 tokens have 1 block each, though 9 tokens in one would have 3
    one = {"k_cmp": torch.zeros(1, 1, G, D_K), "v_cmp": torch.zeros(1, 1, G, D_V)}
    one = {name: x for name, x in one.items() if name in ARGUMENTS[operation]}

    message = refusal(operation, batch=1, options={"cu_seqlens": int32([0, 5, 9])}, **one)

    assert message == "k_cmp has 1 blocks where the sequences have 2 (N_c = (S - l) // d + 1 each); compress all of them"


@OPERATIONS
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1, 9], "cu_seqlens runs from 1 to 9 (the rule: from 0 to the total S=9); use [0, ..., 9]"),
        ([0, 8], "cu_seqlens runs from 0 to 8 (the rule: from 0 to the total S=9); use [0, ..., 9]"),
        ([0, 10], "cu_seqlens runs from 0 to 10 (the rule: from 0 to the total S=9); use [0, ..., 9]"),
        ([0], "cu_seqlens runs from 0 to 0 (the rule: from 0 to the total S=9); use [0, ..., 9]"),
        ([0, 5, 3, 9], "cu_seqlens decreases from 5 to 3 at entry 2 (offsets never decrease); sort them"),
        ([0, 12, 9], "cu_seqlens decreases from 12 to 9 at entry 2 (offsets never decrease); sort them"),
        ([], "cu_seqlens is empty (it holds N + 1 offsets); use [0, S] for one sequence"),
        ([[0, 9]], "cu_seqlens has shape (1, 2) (the layout is (N + 1,)); give it 1 dimensions"),
    ],
)
def test_ragged_bounds_are_refused(operation, bounds, message):
    assert refusal(operation, batch=1, options={"cu_seqlens": int32(bounds)}) == message


@OPERATIONS
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_bounds_of_another_dtype_are_refused(operation, dtype):
    assert refusal(operation, batch=1, options={"cu_seqlens": torch.tensor([0, 9]).to(dtype)}) == (
        f"cu_seqlens is {dtype} (kernels read int32); use cu_seqlens.to(torch.int32)"
    )


@OPERATIONS
def test_bounds_on_another_device_are_refused(operation):
    assert refusal(operation, batch=1, options={"cu_seqlens": int32([0, 9]).to("meta")}) == (
        "cu_seqlens is on meta, q on cpu (one device per call); move one with .to()"
    )


@OPERATIONS
def test_bounds_of_more_than_one_row_are_refused(operation):
    assert refusal(operation, options={"cu_seqlens": int32([0, 9])}) == (
        "cu_seqlens came with batch size 2 (packed sequences are in one row: B = 1); reshape to (1, S, ...)"
    )


@OPERATIONS
def test_a_bound_below_the_longest_sequence_is_refused(operation):
    assert refusal(operation, batch=1, options={"cu_seqlens": int32([0, 3, 9]), "max_seqlen": 5}) == (
        "max_seqlen=5 is below the longest sequence, 6 (it bounds every one); use 6 or more"
    )


@OPERATIONS
def test_a_bound_at_or_above_the_longest_sequence_is_accepted(operation):
    for bound in (6, 7, 100):
        call(operation, batch=1, options={"cu_seqlens": int32([0, 3, 9]), "max_seqlen": bound})


@OPERATIONS
def test_bounds_with_empty_sequences_are_accepted(operation):
    call(operation, batch=1, options={"cu_seqlens": int32([0, 0, 9, 9])})


@given(bounds=st.lists(st.integers(-2, 12), min_size=1, max_size=5))
def test_bounds_are_accepted_exactly_where_they_cut_the_rows(bounds):
    options = {"cu_seqlens": int32(bounds)}
    if bounds[0] == 0 and bounds[-1] == S and bounds == sorted(bounds):
        call(sliding_window_attention, batch=1, options=options)
    else:
        assert refusal(sliding_window_attention, batch=1, options=options).startswith("cu_seqlens ")


@OPERATIONS
@pytest.mark.parametrize("name", ["query_start", "query_count"])
def test_bounds_and_a_query_start_or_count_exclude_each_other(operation, name):
    assert refusal(operation, batch=1, options={"cu_seqlens": int32([0, 9]), name: int32([0])}) == (
        "cu_seqlens came with query_start or query_count (a packed batch holds whole sequences, ragged rows need pages); "
        "give query_start and page_table, or cu_seqlens alone"
    )


def test_bounds_and_pages_need_positions():
    options = {"cu_seqlens": int32([0, 9]), "page_table": int32([[0]])}

    assert refusal(sliding_window_attention, batch=1, options=options).startswith(
        "page_table came without query_start (pages hold whole sequences"
    )


@OPERATIONS
@pytest.mark.parametrize("name", ["query_start", "query_count"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor([0, 0]), "{} is torch.int64 (kernels read int32); use {}.to(torch.int32)"),
        (torch.tensor([0.0, 0]), "{} is torch.float32 (kernels read int32); use {}.to(torch.int32)"),
        (int32([[0, 0]]), "{} has shape (1, 2) (the layout is (B,)); give it (2,)"),
        (int32([0]), "{} has shape (1,) (the layout is (B,)); give it (2,)"),
        (int32([0, 0]).to("meta"), "{} is on meta, q on cpu (one device per call); move one with .to()"),
    ],
)
def test_a_query_start_or_count_that_is_no_int32_per_sequence_is_refused(operation, name, value, message):
    assert refusal(operation, options={name: value}) == message.replace("{}", name)


@OPERATIONS
@pytest.mark.parametrize(
    ("start", "count"), [([-1, 0], None), ([0, 0], [1, -1]), ([0, 0], [1, S + 1]), (None, [-1, 2]), (None, [S + 1, 2])]
)
def test_a_negative_start_or_a_count_beyond_the_rows_is_refused(operation, start, count):
    options = {"query_start": start and int32(start), "query_count": count and int32(count)}

    message = refusal(operation, options=options)

    assert message == (
        f"query_start={start or [0, 0]}, query_count={count} leave 0 .. S={S} (positions start at 0, counts at most S); fix them"
    )


@pytest.mark.parametrize("operation", [selected_attention, sliding_window_attention])
def test_queries_beyond_the_cached_keys_are_refused(operation):
    assert refusal(operation, options={"query_start": int32([0, 1])}) == (
        "query_start + query_count reaches 10 of 9 cached tokens (keys must already hold the queries' own tokens); "
        "write them to the cache first"
    )


@OPERATIONS
@pytest.mark.parametrize("start", [2**31 - S - 1, 2**31 - S, 2**31 - 1])
def test_a_start_near_the_end_of_int32_is_beyond_the_cached_keys_too(operation, start):
    message = refusal(operation, options={"query_start": int32([0, start])})

    assert message.startswith(f"query_start + query_count reaches {start + S} of 9 cached tokens")


@pytest.mark.parametrize("operation", [compressed_attention, select_blocks])
def test_queries_beyond_what_the_cached_blocks_can_stand_for_are_refused(operation):
    # 3 blocks are all those of up to 3 * 2 + 4 - 1 = 9 tokens
    assert refusal(operation, options={"query_start": int32([0, 1])}).startswith("query_start + query_count reaches 10 of 9 cached tokens")


@pytest.mark.parametrize("operation", [selected_attention, sliding_window_attention])
def test_queries_beyond_max_seqlen_are_refused(operation):
    options = {"query_start": int32([0, 1]), "query_count": int32([5, 5]), "max_seqlen": 5}

    assert refusal(operation, options=options).startswith("query_start + query_count reaches 6 of 5 cached tokens")


@OPERATIONS
def test_queries_that_end_with_the_cached_keys_are_accepted(operation):
    call(operation, options={"query_start": int32([0, 1]), "query_count": int32([S, S - 1])})


def test_a_store_shorter_than_another_is_refused():
    short = {"k_win": torch.zeros(B, 8, G, D_K), "v_win": torch.zeros(B, 8, G, D_V)}
    options = {"query_start": int32([0, 0]), "query_count": int32([5, 5])}

    assert refusal(nsa_attention, options=options, **short) == (
        "k_win holds 8 tokens of sequences that may have 9 (a store holds all of them); give it 9 rows, or a bound of 8"
    )


def test_compressed_stores_too_small_for_max_seqlen_are_refused():
    short = {"k_cmp": torch.zeros(B, 2, G, D_K), "v_cmp": torch.zeros(B, 2, G, D_V)}
    options = {"query_start": int32([0, 0]), "query_count": int32([5, 5])}

    assert refusal(nsa_attention, options=options, **short).startswith("k_cmp has 2 blocks where the sequences have 3")
    call(nsa_attention, options={**options, "max_seqlen": 7}, **short)


@pytest.mark.parametrize("operation", [selected_attention, sliding_window_attention])
@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.tensor([[0], [1]]), "page_table is torch.int64 (kernels read int32); use page_table.to(torch.int32)"),
        (int32([0, 1]), "page_table has shape (2,) (the layout is (B, max_pages)); give it 2 dimensions"),
        (int32([[0, 1]]), "page_table has shape (1, 2) (the layout is (B, max_pages)); give it (2, 2)"),
        (int32([[0], [1]]).to("meta"), "page_table is on meta, q on cpu (one device per call); move one with .to()"),
    ],
)
def test_a_page_table_that_is_no_int32_row_per_sequence_is_refused(operation, table, message):
    assert refusal(operation, options={"page_table": table, "query_start": int32([0, 0])}) == message


def test_pages_without_a_query_start_are_refused():
    assert refusal(sliding_window_attention, options={"page_table": int32([[0], [1]])}) == (
        "page_table came without query_start (pages hold whole sequences, so rows need a position); give it"
    )


def paged_call(operation, table, starts=(3, 1), counts=(9, 2)):
    """Call `operation` over three pages of four tokens, two blocks each, and return its result."""
    stores = {
        name: torch.zeros(3, 2 if "cmp" in name else 4, G, D_V if name[0] == "v" else D_K)
        for name in ARGUMENTS[operation]
        if name[0] in "kv"
    }
    options = {"page_table": int32(table), "query_start": int32(starts), "query_count": int32(counts)}
    return call(operation, options=options, **stores)


@OPERATIONS
@pytest.mark.parametrize("entry", [3, -1])
def test_a_page_that_the_store_does_not_have_is_refused(operation, entry):
    store = next(name for name in ARGUMENTS[operation] if name[0] == "k")
    with pytest.raises(InputError) as caught:
        paged_call(operation, [[0, 1, entry], [2, 0, 0]])
    assert str(caught.value) == (
        f"page_table[0, 2]={entry} names no page of {store} (it has 3, and sequence 0 needs its first 3); use 0 .. 2"
    )


@OPERATIONS
def test_pages_that_no_row_needs_may_be_anything(operation):
    # 3 tokens fill one page; a sequence without rows needs none
    paged_call(operation, [[0, 1, 2], [2, 9, -1]])
    paged_call(operation, [[0, 1, 2], [9, 9, 9]], counts=(9, 0))
    # 8 tokens are two pages, and their third block lies in the second
    with pytest.raises(InputError, match=r"page_table\[1, 1\]=9 names no page of .*sequence 1 needs its first 2"):
        paged_call(operation, [[0, 1, 2], [2, 9, -1]], counts=(9, 7))


@OPERATIONS
@pytest.mark.parametrize("geometry", [None, (32, 16), BlockGeometry])
def test_a_geometry_that_is_none_is_refused(operation, geometry):
    with pytest.raises(InputError) as caught:
        operation(*valid(operation), geometry=geometry)
    assert str(caught.value) == f"geometry={geometry!r} is {type_of(geometry)} (the rule: a BlockGeometry); use BlockGeometry()"


@OPERATIONS
def test_queries_without_a_head_dimension_are_refused(operation):
    keys = {name: torch.zeros(B, C if "cmp" in name else S, G, 0) for name in names_of(operation, "k")}
    assert refusal(operation, q=torch.zeros(B, S, H, 0), **keys) == (
        "q has head dimension 0 (scores are products over it, the rule: at least 1); use 64"
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.float32, torch.bool])
def test_block_indices_of_another_dtype_are_refused(dtype):
    assert refusal(selected_attention, block_indices=torch.zeros(B, S, G, 1, dtype=dtype)) == (
        f"block_indices is {dtype} (kernels read int32); use block_indices.to(torch.int32)"
    )


@pytest.mark.parametrize("shape", [(B, S, H, 3), (1, S, G, 3), (B, S + 1, G, 3)])
def test_block_indices_of_another_shape_are_refused(shape):
    assert refusal(selected_attention, block_indices=torch.zeros(shape, dtype=torch.int32)) == (
        f"block_indices has shape {shape} (the layout is (B, S, G, n)); give it ({B}, {S}, {G}, 3)"
    )


def test_block_indices_of_the_wrong_rank_are_refused():
    assert refusal(selected_attention, block_indices=torch.zeros(B, S, 3, dtype=torch.int32)) == (
        f"block_indices has shape ({B}, {S}, 3) (the layout is (B, S, G, n)); give it 4 dimensions"
    )


def test_block_indices_without_a_slot_are_refused():
    assert refusal(selected_attention, block_indices=torch.zeros(B, S, G, 0, dtype=torch.int32)).endswith(f"give it ({B}, {S}, {G}, 1)")


def indices_with(value, b=1, t=5, g=1, slot=2):
    indices = tensors()["block_indices"]
    indices[b, t, g, slot] = value
    return indices


@pytest.mark.parametrize(("value", "own"), [(2, 1), (100, 1), (-2, 1)])
def test_a_block_outside_the_querys_candidates_is_refused_with_its_place(value, own):
    # token 5 lies in block 1
    assert refusal(selected_attention, block_indices=indices_with(value)) == (
        f"block_indices[1, 5, 1, 2]={value} is out of range (the query's candidates are 0 .. {own}, and -1 for none); "
        f"use what select_blocks returns"
    )


def test_the_candidates_of_packed_queries_count_from_their_own_sequence():
    # token 5 is token 2 of the second sequence: its own block is 0
    indices = torch.full((1, S, G, 3), -1, dtype=torch.int32)
    indices[0, 5, 0, 0] = 1

    message = refusal(selected_attention, batch=1, block_indices=indices, options={"cu_seqlens": int32([0, 3, 9])})

    assert message.startswith("block_indices[0, 5, 0, 0]=1 is out of range (the query's candidates are 0 .. 0")


def test_the_candidates_of_cached_queries_count_from_the_query_start():
    options = {"query_start": int32([0, 4]), "query_count": int32([9, 5])}

    # row 4 of sequence 1 is at position 8, in block 2
    call(selected_attention, block_indices=indices_with(2, t=4), options=options)
    assert "candidates are 0 .. 2" in refusal(selected_attention, block_indices=indices_with(3, t=4), options=options)
    # row 5 holds no query
    assert "candidates are 0 .. -1" in refusal(selected_attention, block_indices=indices_with(0, t=5), options=options)


def test_a_block_named_twice_is_refused_with_its_place():
    indices = indices_with(1)
    indices[1, 5, 1, 0] = 1

    assert refusal(selected_attention, block_indices=indices) == (
        "block_indices[1, 5, 1] names block 1 twice (each chosen block counts once); use -1 for unused slots"
    )


def test_blocks_may_stand_in_any_order_with_none_between():
    indices = tensors()["block_indices"]
    indices[1, 8, 0] = int32([2, -1, 0])

    call(selected_attention, block_indices=indices)


@given(data=st.data())
def test_block_indices_are_accepted_exactly_where_each_row_names_candidates_once(data):
    t = data.draw(st.integers(0, S - 1))
    row = data.draw(st.lists(st.integers(-2, 3), min_size=3, max_size=3))
    indices = tensors()["block_indices"]
    indices[0, t, 1] = int32(row)
    named = [block for block in row if block != -1]

    if all(0 <= block <= t // 4 for block in named) and len(set(named)) == len(named):
        call(selected_attention, block_indices=indices)
    else:
        assert refusal(selected_attention, block_indices=indices).startswith(f"block_indices[0, {t}, 1")


@OPERATIONS
def test_a_backend_for_an_unknown_operation_is_refused(operation):
    assert refusal(operation, options={"backend": {"compress": "sdpa"}}) == (
        "backend names the operation 'compress' (the rule: one of 'cmp', 'select', 'slc', 'win', 'nsa', 'append', 'choose', 'rotate'); fix the key"
    )


@OPERATIONS
def test_a_backend_of_none_for_an_operation_is_refused(operation):
    assert refusal(operation, options={"backend": {"win": None}}) == (
        "backend names None for 'win' (the rule: the name of a backend, or 'auto'); use 'auto'"
    )


@OPERATIONS
def test_a_registry_that_is_none_is_refused(operation):
    message = refusal(operation, options={"registry": 5})
    assert message == "registry=5 is an int (the rule: a BackendRegistry, or None for the installed backends); use None"


def test_a_registry_that_is_none_is_refused_by_the_layer_and_by_an_explanation():
    config = NSAConfig(hidden_size=12, num_heads=H, num_kv_heads=G, head_dim_qk=D_K, head_dim_v=D_V, geometry=SMALL)
    with pytest.raises(InputError, match="registry='sdpa' is a str "):
        NativeSparseAttention(config, registry="sdpa")
    with pytest.raises(InputError, match="registry='sdpa' is a str "):
        explain_routing(BranchRequest(operation="win"), registry="sdpa")


@pytest.mark.parametrize("build", [NativeSparseAttention, DenseAttention, lambda config: NSACache(config, 2)])
@pytest.mark.parametrize(
    ("config", "kind"), [({"hidden_size": 12}, "a dict"), (SMALL, "a BlockGeometry"), (3, "an int"), (None, "None")], ids=repr
)
def test_a_config_that_is_none_is_refused(build, config, kind):
    with pytest.raises(InputError) as caught:
        build(config)
    assert str(caught.value) == f"config={config!r} is {kind} (the rule: an NSAConfig); use NSAConfig(...) or config_from_dict(...)"


@pytest.mark.parametrize("observers", [5, (5,), None])
def test_observers_that_are_none_are_refused(observers):
    message = f"observers={observers!r} "
    assert refusal(nsa_attention, options={"observers": observers}).startswith(message)
    q, _, _, _, _, k_win, v_win, gates = valid(nsa_attention)
    with pytest.raises(InputError) as caught:
        attend(Queries(q, S), None, None, Keys(k_win, v_win, S), gates, geometry=SMALL, observers=observers)
    assert str(caught.value).startswith(message)
