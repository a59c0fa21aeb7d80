"""Operands with positions: ragged rows over pages, pairs of page tables, FP8 stores, rings; and refusals."""

import re

import pytest
import torch
from torch import Tensor

from nsa_core import (
    BackendRegistry,
    BackendUnavailableError,
    Capability,
    InputError,
    Keys,
    Operation,
    Queries,
    attend,
    checks,
    compress_mean,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from nsa_core.attention import append_rows
from nsa_core.backends.base import NewRows
from nsa_core.backends.layouts import over_rows
from nsa_core.blocks import num_compressed_blocks
from nsa_core.dispatch import make_call
from nsa_core.reference import naive
from nsa_core.reference.choose import choose
from nsa_core.reference.sdpa import COMPUTE, sdpa_backends
from nsa_core.testing.cases import paged
from nsa_core.testing.inputs import SMALL, Inputs, Shape, make_inputs
from nsa_core.testing.tolerances import relative_error

PAGE = SMALL.selection_block_size
CHUNKS = [(0, 23), (16, 40), (9, 33)]
STEPS = [(40, 41), (7, 8), (0, 1), (25, 26), (44, 45)]
"""First and last position + 1 of each sequence's rows: three chunks of prompts and five steps of one token."""


def int32(values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Mixed:
    """Sequences of `LENGTH` tokens in interleaved pages, and the rows of a mixed batch over them."""

    LENGTH = 48

    def __init__(self) -> None:
        ranges = CHUNKS + STEPS
        self.whole = make_inputs(Shape(num_queries=self.LENGTH, batch=len(ranges)))
        pages = self.LENGTH // PAGE
        self.table = torch.randperm(len(ranges) * pages, generator=torch.Generator().manual_seed(5)).int().view(len(ranges), pages)
        self.stores = [
            paged(x, self.table, PAGE // SMALL.compression_stride if place < 2 else PAGE) for place, x in enumerate(self.whole.tensors[1:7])
        ]
        self.start = int32([first for first, _ in ranges])
        self.cu_seqlens = int32([0, *(last - first for first, last in ranges)]).cumsum(0).int()
        self.rows = [(b, slice(first, last)) for b, (first, last) in enumerate(ranges)]
        self.options = {"geometry": SMALL, "cu_seqlens": self.cu_seqlens, "query_start": self.start, "page_table": self.table}

    def ragged(self, x: Tensor) -> Tensor:
        """Return the rows of x `(B, S, ...)`, one sequence after another."""
        return torch.cat([x[b, rows] for b, rows in self.rows]).unsqueeze(0)


@pytest.fixture(scope="module")
def mixed() -> Mixed:
    return Mixed()


def test_chunks_and_steps_over_shared_pages_equal_each_alone(mixed):
    q, gates = mixed.ragged(mixed.whole.q), mixed.ragged(mixed.whole.gates)
    out = nsa_attention(q, *mixed.stores, gates, **mixed.options)
    expected = mixed.ragged(nsa_attention(*mixed.whole.tensors, geometry=SMALL))
    assert out.shape == expected.shape
    assert relative_error(out, expected) < 1e-12


def test_every_operation_takes_ragged_rows_over_pages(mixed):
    whole, q, options = mixed.whole, mixed.ragged(mixed.whole.q), mixed.options
    k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = mixed.stores
    compressed = compressed_attention(q, k_cmp, v_cmp, **options)
    expected = naive.compressed_attention(whole.q, whole.k_cmp, whole.v_cmp, geometry=SMALL)
    assert relative_error(compressed.out, mixed.ragged(expected.out)) < 1e-12
    torch.testing.assert_close(compressed.lse, mixed.ragged(expected.lse), rtol=0, atol=1e-12)
    chosen = select_blocks(q, k_cmp, compressed.lse, **options)
    assert torch.equal(chosen, mixed.ragged(naive.select_blocks(whole.q, whole.k_cmp, expected.lse, geometry=SMALL)))
    every = naive.select_blocks(whole.q, whole.k_cmp, expected.lse, geometry=SMALL)
    selected = selected_attention(q, k_slc, v_slc, chosen, **options)
    assert (
        relative_error(selected.out, mixed.ragged(naive.selected_attention(whole.q, whole.k_slc, whole.v_slc, every, geometry=SMALL).out))
        < 1e-12
    )
    window = sliding_window_attention(q, k_win, v_win, **options)
    assert (
        relative_error(window.out, mixed.ragged(naive.sliding_window_attention(whole.q, whole.k_win, whole.v_win, geometry=SMALL).out))
        < 1e-12
    )


def test_gradients_pass_through_ragged_rows_and_pages(mixed):
    leaves = [x.detach().clone().requires_grad_() for x in (mixed.ragged(mixed.whole.q), *mixed.stores, mixed.ragged(mixed.whole.gates))]
    out = nsa_attention(*leaves, **mixed.options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    (out * weights).sum().backward()
    whole = mixed.whole.with_grad()
    (mixed.ragged(nsa_attention(*whole.tensors, geometry=SMALL)) * weights).sum().backward()
    torch.testing.assert_close(leaves[0].grad, mixed.ragged(whole.q.grad), rtol=0, atol=1e-11)
    torch.testing.assert_close(leaves[-1].grad, mixed.ragged(whole.gates.grad), rtol=0, atol=1e-11)
    for place, (ours, theirs) in enumerate(zip(leaves[1:7], whole.tensors[1:7], strict=True)):
        rows = paged(theirs.grad, mixed.table, PAGE // SMALL.compression_stride if place < 2 else PAGE)
        # NaN fills the unused rows of the last page of compressed keys, which nothing reads
        torch.testing.assert_close(ours.grad, rows.nan_to_num(nan=0.0), rtol=0, atol=1e-11)


def test_a_pair_of_page_tables_has_one_for_compressed_keys(mixed):
    whole, blocks_of_a_page = mixed.whole, 4
    pages = -(-whole.k_cmp.shape[1] // blocks_of_a_page)
    table = torch.randperm(len(mixed.rows) * pages, generator=torch.Generator().manual_seed(8)).int().view(-1, pages)
    compressed = [paged(x, table, blocks_of_a_page) for x in (whole.k_cmp, whole.v_cmp)]
    options = mixed.options | {"page_table": (mixed.table, table)}
    out = nsa_attention(mixed.ragged(whole.q), *compressed, *mixed.stores[2:], mixed.ragged(whole.gates), **options)
    assert relative_error(out, mixed.ragged(nsa_attention(*whole.tensors, geometry=SMALL))) < 1e-12


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_seqlens": [0, 70, 76], "query_start": [0, 0]}, "page_table has shape"),
        ({"cu_seqlens": "short"}, "cu_seqlens runs from 0 to"),
        ({"query_start": [0, 0]}, r"query_start has shape \(2,\)"),
        ({"query_count": [1] * 8}, "ragged rows need pages"),
        ({"query_start": [47] * 8}, "query_start [+] query_count reaches"),
    ],
)
def test_ragged_rows_that_do_not_add_up_are_refused(mixed, changed, message):
    changed = {
        name: mixed.cu_seqlens - (mixed.cu_seqlens > 70).int() if value == "short" else int32(value) for name, value in changed.items()
    }
    with pytest.raises(InputError, match=message):
        nsa_attention(mixed.ragged(mixed.whole.q), *mixed.stores, mixed.ragged(mixed.whole.gates), **mixed.options | changed)


def test_a_page_that_one_sequence_names_twice_is_refused_and_sequences_may_share_one(mixed):
    q, gates = mixed.ragged(mixed.whole.q), mixed.ragged(mixed.whole.gates)
    twice, shared = mixed.table.clone(), mixed.table.clone()
    twice[1, 2] = twice[1, 0]
    shared[1, 0] = shared[0, 0]
    with pytest.raises(InputError, match=rf"page_table\[1\] names page {int(twice[1, 0])} of k_cmp twice"):
        nsa_attention(q, *mixed.stores, gates, **mixed.options | {"page_table": twice})
    nsa_attention(q, *mixed.stores, gates, **mixed.options | {"page_table": shared})


class Step:
    """One step of 4 rows over stores of 40 tokens."""

    ROWS, LENGTH = 4, 40

    def __init__(self) -> None:
        whole = make_inputs(Shape(num_queries=self.LENGTH, batch=2))
        rows = slice(self.LENGTH - self.ROWS, self.LENGTH)
        self.whole, self.queries = whole, Queries(whole.q[:, rows], self.ROWS, start=int32([self.LENGTH - self.ROWS] * 2))
        self.gates, self.expected = whole.gates[:, rows], nsa_attention(*whole.tensors, geometry=SMALL)[:, rows]
        self.keys = [
            Keys(k, v, k.shape[1]) for k, v in ((whole.k_cmp, whole.v_cmp), (whole.k_slc, whole.v_slc), (whole.k_win, whole.v_win))
        ]

    def attend(self, **changed: Keys) -> Tensor:
        cmp, slc, win = (changed.get(name, keys) for name, keys in zip(("cmp", "slc", "win"), self.keys, strict=True))
        return attend(self.queries, cmp, slc, win, self.gates, geometry=SMALL)


@pytest.fixture(scope="module")
def step() -> Step:
    return Step()


def test_a_step_over_stores_equals_the_last_rows_of_one_pass(step):
    assert relative_error(step.attend(), step.expected) < 1e-12


@pytest.mark.parametrize("absent", [None, "cmp", ("raw",)])
def test_only_names_of_branches_are_absent(step, absent):
    with pytest.raises(InputError, match="absent=.* names no branch .the rule: a tuple of 'cmp', 'slc', 'win'.; use"):
        attend(step.queries, *step.keys, step.gates, geometry=SMALL, absent=absent)


def test_fp8_stores_are_read_with_their_scales(step):
    changed, read = {}, list(step.whole.tensors)
    for place, name in ((3, "slc"), (5, "win")):
        stores, scales = [], []
        for x in step.whole.tensors[place : place + 2]:
            scale = x.abs().amax(-1).float() / 448
            stored = (x / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
            read[place + len(stores)] = (stored.float() * scale.unsqueeze(-1)).to(x.dtype)
            stores.append(stored)
            scales.append(scale)
        changed[name] = Keys(*stores, step.LENGTH, k_scale=scales[0], v_scale=scales[1])
    expected = nsa_attention(*Inputs.of(read).tensors, geometry=SMALL)[:, -step.ROWS :]
    assert relative_error(step.attend(**changed), expected) < 1e-12
    assert relative_error(step.attend(**changed), step.expected) > 1e-4


def test_scales_belong_to_fp8_stores_alone(step):
    win = step.keys[2]
    scale = torch.ones(win.k.shape[:-1])
    with pytest.raises(InputError, match="k_win is torch.float64 with scales"):
        step.attend(win=win._replace(k_scale=scale, v_scale=scale))
    stored = win._replace(k=win.k.to(torch.float8_e4m3fn), v=win.v.to(torch.float8_e4m3fn))
    with pytest.raises(InputError, match="k_win is torch.float8_e4m3fn"):
        step.attend(win=stored)


def test_a_ring_shorter_than_the_window_is_refused(step):
    needed = SMALL.window_size - 1 + step.ROWS
    win = step.keys[2]
    rings = win._replace(k=win.k[:, : needed - 1], v=win.v[:, : needed - 1], ring=True)
    with pytest.raises(InputError, match=rf"the ring k_win holds {needed - 1} tokens .* = {needed}"):
        step.attend(win=rings)


def test_only_the_window_may_be_a_ring_or_a_part(step):
    with pytest.raises(InputError, match="k_slc is a ring or a part of its sequence"):
        step.attend(slc=step.keys[1]._replace(first=int32([0, 0])))


def test_window_keys_that_end_before_the_queries_are_refused(step):
    win = step.keys[2]
    part = win._replace(k=win.k[:, 20:-1], v=win.v[:, 20:-1], max_count=19, first=int32([20, 20]))
    with pytest.raises(InputError, match=r"k_win ends at positions \[39, 39\] before its queries do"):
        step.attend(win=part)


def test_a_store_shorter_than_another_is_refused_without_a_word_of_max_seqlen(step):
    win = step.keys[2]
    with pytest.raises(InputError, match="k_win holds 38 tokens of sequences that may have 40"):
        step.attend(win=win._replace(k=win.k[:, :38], v=win.v[:, :38]))


def test_nothing_of_a_refused_call_is_written(step):
    before = [x.clone() for keys in step.keys for x in (keys.k, keys.v)]
    with pytest.raises(InputError):
        step.attend(win=step.keys[2]._replace(k_scale=torch.ones(2, 40, 2), v_scale=torch.ones(2, 40, 2)))
    assert all(torch.equal(x, y) for x, y in zip(before, (x for keys in step.keys for x in (keys.k, keys.v)), strict=True))


@pytest.mark.parametrize("lengths", [None, (19, 0, 3, 30)])
def test_the_mean_of_blocks_is_that_of_their_tokens(lengths):
    total = 40 if lengths is None else sum(lengths)
    k = torch.randn(1, total, 2, 5, dtype=torch.float64)
    cu_seqlens = None if lengths is None else int32([0, *lengths]).cumsum(0).int()
    k_cmp = compress_mean(k, SMALL, cu_seqlens=cu_seqlens)
    size, stride = SMALL.compression_block_size, SMALL.compression_stride
    first, blocks = 0, []
    for length in lengths or (total,):
        blocks += [k[0, first + i * stride : first + i * stride + size].mean(0) for i in range(naive.num_blocks(length, SMALL))]
        first += length
    torch.testing.assert_close(k_cmp[0, : len(blocks)], torch.stack(blocks), rtol=0, atol=1e-14)
    assert lengths is not None or k_cmp.shape[1] == len(blocks)


def test_a_mean_of_keys_that_are_not_four_dimensional_is_refused():
    with pytest.raises(InputError, match="k has shape"):
        compress_mean(torch.randn(3, 40, 5), SMALL)


def changed_step(step: Step, **fields):
    """Return the step's operands, those in `fields` replaced: queries, cmp, slc, win, gates."""
    found = dict(zip(("queries", "cmp", "slc", "win", "gates"), (step.queries, *step.keys, step.gates), strict=True))
    return [*(found | fields).values()]


TABLE = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"queries": None}, "queries is None"),
        ({"cmp": torch.zeros(2, 9, 2, 8)}, "k_cmp is a Tensor [(]the rule: Keys"),
        ({"win": Keys([1.0], torch.zeros(2, 40, 2, 6), 40)}, "k_win is a list [(]the rule: a tensor"),
        ({"slc": {"v": None}}, "one of k_slc and v_slc is None [(]Keys holds both[)]; give both"),
        ({"cmp": {"k": None}}, "one of k_cmp and v_cmp is None"),
        ({"gates": None}, "gates is None"),
        ({"queries": {"max_count": None}}, "queries.max_count=None is no bound"),
        ({"queries": {"max_count": 3}}, "queries.max_count=3 is below the longest sequence's rows, 4"),
        ({"queries": {"start": int32([36])}}, r"queries.start has shape \(1,\)"),
        ({"queries": {"start": torch.tensor([36, 36])}}, "queries.start is torch.int64"),
        ({"queries": {"count": int32([[4, 4]])}}, "queries.count has shape"),
        ({"queries": {"start": None}}, "40 tokens for 4 queries|is below the|belongs"),
        ({"win": {"first": int32([0])}}, r"k_win.first has shape \(1,\)"),
        ({"win": {"first": int32([-1, 0])}}, r"k_win begins at positions \[-1, 0\]"),
        ({"win": {"first": int32([0, 0]), "ring": True}}, "k_win is a ring with first .*; drop one of them"),
        ({"slc": {"page_table": torch.tensor(TABLE)}}, "k_slc.page_table is torch.int64"),
        ({"slc": {"page_table": int32(TABLE[:1])}}, r"k_slc.page_table has shape \(1, 5\)"),
        ({"slc": {"cu_seqlens": int32([0, 40, 80])}}, "k_slc.cu_seqlens is given"),
        ({"cmp": {"max_count": 2}}, "k_cmp.max_count=2 is below the 9 blocks"),
        ({"slc": {"max_count": 20}}, "reaches 40 of 20 cached tokens"),
        ({"slc": {"k_scale": torch.ones(2, 40, 2)}}, "k_slc is torch.float64 with scales"),
        ({"slc": {"k_scale": torch.ones(2, 40, 1)}}, r"k_slc.k_scale has shape \(2, 40, 1\)"),
    ],
)
def test_operands_that_do_not_fit_are_refused_in_words(step, fields, message):
    for name, change in fields.items():
        if isinstance(change, dict):
            whole = dict(zip(("queries", "cmp", "slc", "win"), (step.queries, *step.keys), strict=True))
            fields = fields | {name: whole[name]._replace(**change)}
    with pytest.raises(InputError, match=message):
        attend(*changed_step(step, **fields), geometry=SMALL)


@pytest.mark.parametrize("offsets", [[0, 0, 0], [0, 3, 8], [0, 8, 8], [0, 5, 9], [0, 2, 4], [1, 4, 8], [0, 8, 4]])
def test_offsets_of_compressed_keys_are_those_of_their_sequences_blocks(offsets):
    cu_seqlens = int32([0, 20, 40])
    q, k, gates = torch.randn(1, 40, 4, 8), torch.randn(1, 40, 2, 8), torch.rand(1, 40, 4, 3)
    # two rows more than there are blocks
    k_cmp = compress_mean(k, SMALL, cu_seqlens=cu_seqlens)
    queries, cmp = Queries(q, 20, cu_seqlens), Keys(k_cmp, k_cmp, 4, int32([0, 4, 8]))
    expected = nsa_attention(q, k_cmp, k_cmp, None, None, None, None, gates, geometry=SMALL, cu_seqlens=cu_seqlens)
    assert torch.equal(attend(queries, cmp, None, None, gates, geometry=SMALL), expected)
    message = f"k_cmp.cu_seqlens={offsets} does not bound its sequences' blocks (N_c = (S - l) // d + 1 each); use [0, 4, 8]"
    with pytest.raises(InputError, match=re.escape(message)):
        attend(queries, cmp._replace(cu_seqlens=int32(offsets)), None, None, gates, geometry=SMALL)


def test_a_page_table_too_narrow_for_the_queries_is_refused(mixed):
    q, gates = mixed.ragged(mixed.whole.q), mixed.ragged(mixed.whole.gates)
    narrow = mixed.options | {"page_table": (mixed.table, mixed.table[:, :3].contiguous())}
    with pytest.raises(InputError, match="page_table has 3 entries a sequence where sequence 1 has 5 pages of k_cmp"):
        nsa_attention(q, *mixed.stores, gates, **narrow)


@pytest.mark.parametrize("rows", [1, 2, 3, 64])
def test_pages_of_compressed_keys_are_needed_for_the_blocks_that_queries_see(mixed, rows):
    q, gates = mixed.ragged(mixed.whole.q), mixed.ragged(mixed.whole.gates)
    counts = [num_compressed_blocks(last, SMALL) for _, last in CHUNKS + STEPS]
    width = -(-max(counts) // rows)
    table = torch.arange(len(counts) * width, dtype=torch.int32).view(-1, width)
    stores = []
    for x in (mixed.whole.k_cmp, mixed.whole.v_cmp):
        store = x.new_full((table.numel() * rows, *x.shape[2:]), float("nan"))
        for b, count in enumerate(counts):
            store[b * width * rows : b * width * rows + count] = x[b, :count]
        stores.append(store.unflatten(0, (-1, rows)))
    is_needed = torch.arange(width) < torch.tensor([[-(-count // rows)] for count in counts])
    options = mixed.options | {"page_table": (mixed.table, table.where(is_needed, -1))}
    expected = mixed.ragged(nsa_attention(*mixed.whole.tensors, geometry=SMALL))
    assert relative_error(nsa_attention(q, *stores, *mixed.stores[2:], gates, **options), expected) < 1e-12
    last = int(is_needed[0].sum()) - 1
    options["page_table"][1][0, last] = -1
    with pytest.raises(InputError, match=rf"page_table\[0, {last}\]=-1 names no page of k_cmp .*sequence 0 needs its first {last + 1}"):
        nsa_attention(q, *stores, *mixed.stores[2:], gates, **options)


def test_the_bound_of_a_ring_may_be_its_rows_or_its_sequences_tokens(step):
    rows = SMALL.window_size - 1 + step.ROWS
    last = torch.arange(step.LENGTH - rows, step.LENGTH)
    slots = (last % rows)[None, :, None, None]
    rings = [torch.empty_like(x[:, -rows:]).scatter_(1, slots.expand(2, -1, *x.shape[2:]), x[:, -rows:]) for x in step.keys[2][:2]]
    for bound in (rows, step.LENGTH):
        assert relative_error(step.attend(win=Keys(*rings, bound, ring=True)), step.expected) < 1e-12


def test_rows_of_an_append_that_do_not_fit_their_store_are_refused_before_anything_is_written():
    store = torch.zeros(2, 8, 2, 4)
    new = torch.ones(2, 3, 2, 4)
    for start, count, changes, message in [
        ([7, 0], [3, 3], {}, "reaches position 10 of a store of 8 rows"),
        ([2**31 - 1, 0], [3, 3], {}, "reaches position 2147483650 of a store of 8 rows"),
        ([0, 0], [4, 3], {}, r"count=\[4, 3\] leaves 0 .. 3"),
        ([0], [3], {}, r"start has shape \(1,\)"),
        ([7, 0], [3, 3], {"page_table": int32([[0], [1]])}, "reaches position 10 of a store of 8 rows"),
        ([0, 0], [3, 3], {"k": store.to(torch.float8_e4m3fn)}, "the store is torch.float8_e4m3fn .stores of FP8 have k_scale and v_scale"),
        ([0], [3], {"page_table": int32([[0], [1]])}, r"start has shape \(1,\)"),
        ([0, 0, 0], [1, 1, 1], {"k": torch.zeros(3, 8, 2, 4)}, "the store holds 3 sequences, the step has 2"),
    ]:
        keys = Keys(store, store, 8)._replace(**changes)
        with pytest.raises(InputError, match=message):
            append_rows((NewRows(keys, new, None),), None, int32(start), int32(count), make_call(new, SMALL))
    assert not store.any()


def test_each_of_several_stores_is_checked_and_their_common_positions_once(monkeypatch):
    def rows_of(batch=2, size=8, num_rows=3):
        store = torch.zeros(batch, size, 2, 4)
        return NewRows(Keys(store, store, size), torch.ones(batch, num_rows, 2, 4), None)

    start, count, names = int32([5, 0]), int32([3, 3]), []
    for other, message in [
        (rows_of(size=7), "reaches position 8 of a store of 7 rows"),
        (rows_of(num_rows=2), r"count=\[3, 3\] leaves 0 .. 2"),
        (rows_of(batch=3), r"start has shape \(2,\)"),
    ]:
        first = rows_of()
        with pytest.raises(InputError, match=message):
            append_rows((first, other), None, start, count, make_call(first.k, SMALL))
        assert not first.store.k.any()
    check_tensor = checks.check_tensor
    monkeypatch.setattr(checks, "check_tensor", lambda name, *others: names.append(name) or check_tensor(name, *others))

    append_rows((rows_of(), rows_of(size=9), rows_of()), None, start, count, make_call(rows_of().k, SMALL))

    assert names == ["start", "count"]


def test_naming_what_the_fused_operation_does_not_replace_leaves_it_on():
    inputs = make_inputs(Shape(num_queries=20))

    class Fused:
        name, operation, capability = "whole", Operation.NSA, Capability()

        def reasons_against(self, request):
            return ()

        def preference(self, request):
            return 1

        def __call__(self, queries, *others, geometry, scale):
            return queries.q.new_ones(1, 20, 4, 6)

    registry = BackendRegistry((*sdpa_backends(), Fused()))
    for backend, is_fused in (({"append": "sdpa"}, True), ({"choose": "sdpa"}, True), ({"win": "sdpa"}, False)):
        out = nsa_attention(*inputs.tensors, geometry=SMALL, registry=registry, backend=backend)
        assert bool((out == 1).all()) is is_fused
    with pytest.raises(BackendUnavailableError, match="no backend 'nope' for operation 'choose'"):
        nsa_attention(*inputs.tensors, geometry=SMALL, registry=registry, backend={"choose": "nope"})


def test_ragged_rows_after_the_last_sequence_give_zeros_and_get_no_gradient():
    # on a GPU nobody checks whether cu_seqlens ends before the rows do
    queries = Queries(torch.randn(1, 10, 2, 4, dtype=torch.float64, requires_grad=True), 7, int32([0, 7]), int32([0]))
    keys = Keys(torch.randn(1, 7, 1, 4, dtype=torch.float64), torch.randn(1, 7, 1, 4, dtype=torch.float64), 7)
    out = over_rows(COMPUTE[Operation.WIN], queries, keys, geometry=SMALL, scale=0.5).out
    assert not out[:, 7:].any()
    out[:, 7:].sum().backward()
    assert not queries.q.grad.any()


def test_queries_before_the_first_key_of_a_part_see_nothing():
    # on a GPU nobody checks whether a part begins after its queries, as a shard of a longer sequence may
    inputs = make_inputs(Shape(num_queries=6, batch=2)).with_grad()
    queries = Queries(inputs.q, 6, start=int32([4, 4]))
    keys = Keys(inputs.k_win, inputs.v_win, 6, first=int32([7, 4]))
    out, lse = COMPUTE[Operation.WIN](queries, keys, geometry=SMALL, scale=0.5)
    assert not out[0, :3].any()
    assert (lse[0, :3] == -torch.inf).all()
    assert lse[0, 3:].isfinite().all()
    assert lse[1].isfinite().all()
    out.square().sum().backward()
    assert not inputs.q.grad[0, :3].any()
    assert all(x.grad.isfinite().all() for x in (inputs.q, inputs.k_win, inputs.v_win))


def test_a_factor_loses_no_precision():
    scores = torch.tensor([[[9.0, 0.5, 0.5 + 1e-9, 0.1, 0.1, 0.1]]], dtype=torch.float64)
    position = torch.tensor([6 * SMALL.selection_block_size - 1])
    plain = choose(scores, None, position, 1, geometry=SMALL)
    assert torch.equal(plain, choose(scores, torch.ones(1, 1, dtype=torch.float64), position, 1, geometry=SMALL))
    assert plain.tolist() == [[[0, 2, 4, 5]]]


@pytest.mark.parametrize("count", [[5, 40], [0, 1]])
def test_a_count_without_a_start_counts_from_position_0(count: list[int]) -> None:
    inputs = make_inputs(Shape(batch=2))
    operands = (Keys(inputs.k_cmp, inputs.v_cmp, inputs.k_cmp.shape[1]), *(Keys(k, v, 40) for k, v in (inputs[3:5], inputs[5:7])))
    counts = torch.tensor(count, dtype=torch.int32)
    found = attend(Queries(inputs.q, 40, count=counts), *operands, inputs.gates, geometry=SMALL)
    expected = attend(Queries(inputs.q, 40, start=torch.zeros_like(counts), count=counts), *operands, inputs.gates, geometry=SMALL)
    assert torch.equal(found, expected)
    assert not any(found[index, rows:].any() for index, rows in enumerate(count))
    with pytest.raises(InputError, match="query_count=\\[99, 1\\]"):
        attend(Queries(inputs.q, 40, count=torch.tensor([99, 1], dtype=torch.int32)), *operands, inputs.gates, geometry=SMALL)
