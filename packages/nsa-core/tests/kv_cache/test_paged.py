"""A paged cache: the numbers of a contiguous one; pages are reserved, shared and freed by the caller."""

import random
from collections import Counter
from contextlib import suppress

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_core import BlockGeometry, CacheOverflowError, InputError, NSAConfig

SMALL = BlockGeometry(4, 2, 4, 3, 1, 1, 5)
CONFIG = NSAConfig(8, 4, 2, 6, 5, geometry=SMALL, gate_hidden_size=8)
SHARINGS = ["separate", "shared"]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def contents(cache):
    return [x.clone() for x in (*cache.keys.values(), *cache.values.values(), cache.lengths, cache.pages.table)]


@given(data=st.data(), kv=st.sampled_from(SHARINGS), static=st.booleans(), page_size=st.sampled_from([4, 8, 20]))
def test_paged_steps_of_mixed_lengths_equal_each_sequence_alone(random_layer, random_input, data, kv, static, page_size):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(3, 26, 8)
    cache = layer.new_cache(3, 26, static=static, page_size=page_size, max_rollback=data.draw(st.integers(0, 4)))
    whole, lengths = layer(x), [0, 0, 0]
    for _ in range(4):
        counts = [data.draw(st.integers(0, min(7, 26 - have))) for have in lengths]
        for b in data.draw(st.permutations(range(3))):
            cache.reserve(b, lengths[b] + counts[b], length=lengths[b])
        rows = torch.stack([torch.cat([x[b, lengths[b] :], x[b]])[: max(counts) + 1] for b in range(3)])
        out = layer(rows, cache=cache, query_count=int32(counts))
        for b, count in enumerate(counts):
            assert_close(out[b, :count], whole[b, lengths[b] : lengths[b] + count])
            lengths[b] += count
    cache.check()
    assert cache.lengths.tolist() == lengths
    assert cache.total_reads.actual[:, 0].tolist() == cache.total_reads.predicted.tolist()


@given(data=st.data(), kv=st.sampled_from(SHARINGS), static=st.booleans(), page_size=st.sampled_from([4, 8]), length=st.integers(1, 18))
def test_beams_share_a_prefix_and_write_pages_of_their_own(random_layer, random_input, data, kv, static, page_size, length):
    layer, prompt = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(1, length, 8)
    cache = layer.new_cache(3, 30, static=static, page_size=page_size)
    cache.reserve(0, length, length=0)
    layer(prompt.expand(3, -1, -1), cache=cache, query_count=int32([length, 0, 0]))
    beams = [prompt] * 3
    order = [0, 0, 0]
    for turn in range(3):
        cache.reorder(torch.tensor(order))
        beams = [beams[b] for b in order]
        have, tokens = length + 3 * turn, random_input(3, 3, 8, seed=turn + 5)
        for b in range(3):
            cache.reserve(b, have + 3, length=have)
        beams = [torch.cat([beam, tokens[b : b + 1]], 1) for b, beam in enumerate(beams)]
        out = layer(tokens, cache=cache)
        for b, beam in enumerate(beams):
            assert_close(out[b], layer(beam)[0, have:])
        order = data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))
    cache.check()


def test_a_long_shared_prefix_lies_in_memory_once(random_layer, random_input):
    layer = random_layer(CONFIG)
    cache = layer.new_cache(4, 48, page_size=4, num_pages=18)
    cache.reserve(0, 41, length=0)
    layer(random_input(4, 41, 8), cache=cache, query_count=int32([41, 0, 0, 0]))

    cache.reorder(torch.tensor([0, 0, 0, 0]))
    for b in range(4):
        cache.reserve(b, 44, length=41)

    # tokens 0 .. 37 have all their blocks: pages 0 .. 8 stay shared; of the other two every beam has its own
    assert len({cache.pages.pages_of(b)[:9] for b in range(4)}) == 1
    assert len({page for b in range(4) for page in cache.pages.pages_of(b)[9:]}) == 8
    assert cache.pages.num_free == 18 - 9 - 8


@pytest.mark.parametrize("static", [False, True])
def test_a_page_that_others_share_is_never_written(random_layer, random_input, static):
    layer, x = random_layer(CONFIG), random_input(2, 12, 8)
    cache = layer.new_cache(2, 20, page_size=4, static=static)
    cache.reserve(0, 12, length=0)
    layer(x, cache=cache, query_count=int32([10, 0]))
    cache.reorder(torch.tensor([0, 0]))
    before = [cache.keys[name][:-1].clone() for name in ("slc", "cmp")]

    if static:
        layer(x[:, :1], cache=cache)
        with pytest.raises(CacheOverflowError, match=r"sequences \[0, 1\] lost tokens"):
            cache.check()
    else:
        with pytest.raises(CacheOverflowError, match=r"sequence 0 would hold 11 tokens \(its pages have room for 0\); use reserve"):
            layer(x[:, :1], cache=cache)

    assert all(torch.equal(cache.keys[name][:-1], x) for name, x in zip(("slc", "cmp"), before, strict=True))
    assert cache.lengths.tolist() == [10, 10]


@pytest.mark.parametrize("reserved", [0, 13])
def test_a_step_beyond_max_seqlen_gets_the_error_of_a_contiguous_cache(random_layer, random_input, reserved):
    layer, x = random_layer(CONFIG), random_input(2, 14, 8)
    paged, contiguous = layer.new_cache(2, 13, page_size=8), layer.new_cache(2, 13)
    paged.reserve(0, reserved, length=0)
    # sequence 0 may lack pages, but only sequence 1 passes max_seqlen
    message = "sequence 1 would hold 14 tokens (the cache was built for max_seqlen=13); build it with new_cache(2, 14) or append at most 13"
    for cache in (paged, contiguous):
        with pytest.raises(CacheOverflowError) as caught:
            layer(x, cache=cache, query_count=int32([3, 14]))
        assert str(caught.value) == message


def test_freed_pages_serve_another_sequence(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(2, 16, 8)
    cache = layer.new_cache(2, 16, page_size=4, num_pages=4, static=True)
    cache.reserve(0, 16, length=0)
    layer(x, cache=cache, query_count=int32([16, 0]))

    cache.reset(torch.tensor([0]))
    cache.pages.free(0)
    cache.reserve(1, 16, length=0)

    assert_close(layer(x, cache=cache, query_count=int32([0, 16]))[1], layer(x)[1])
    cache.check()


@pytest.mark.parametrize("static", [False, True])
def test_selected_and_cropped_sequences_of_pages_go_on(random_layer, random_input, static):
    layer, x = random_layer(CONFIG), random_input(3, 18, 8)
    cache = layer.new_cache(3, 18, page_size=8, static=static)
    for b in range(3):
        cache.reserve(b, 12, length=0)
    layer(x[:, :12], cache=cache)

    cache.select(torch.tensor([2, 0]))
    cache.crop(torch.tensor([5, 0, 0])[: cache.batch_size])

    for b, length in enumerate((7, 12)):
        cache.reserve(b, length + 6, length=length)
    rows = torch.stack([x[2, 7:13], x[0, 12:18], *([x[1, :6]] if static else [])])
    out = layer(rows, cache=cache, query_count=int32([6, 6, 0][: cache.batch_size]))
    assert_close(out[0], layer(x)[2, 7:13])
    assert_close(out[1], layer(x)[0, 12:18])


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda cache: cache.pages.free(1), InputError, "sequence 1 has no pages (they are freed once); drop the second free"),
        (lambda cache: cache.pages.assign(1, [0, 4]), InputError, "page 4 is beyond the store (it has 4 pages); use 0 .. 3"),
        (lambda cache: cache.pages.assign(1, [-1]), InputError, "page -1 is beyond the store (it has 4 pages); use 0 .. 3"),
        (
            lambda cache: cache.pages.assign(1, [3, 3]),
            InputError,
            "pages=[3, 3] (each once, at most 5 of a sequence); drop what is too much",
        ),
        (
            lambda cache: cache.pages.assign(1, [0.5, 1.5]),
            InputError,
            "pages=[0.5, 1.5] is no list of integers (they number pages); use [0, 1]",
        ),
        (
            lambda cache: cache.pages.assign(1, [True, False]),
            InputError,
            "pages=[True, False] is no list of integers (they number pages); use [0, 1]",
        ),
        (
            lambda cache: cache.pages.assign(1, 3),
            InputError,
            "pages=3 is no list of integers (they number pages); use [0, 1]",
        ),
        (lambda cache: cache.pages.assign("1", [3]), InputError, "sequence '1' is none (the cache holds 2); use 0 .. 1"),
        (
            lambda cache: cache.reserve(0, 12, length=-5),
            InputError,
            "num_tokens=12, length=-5 (integers of at least 0); use what the sequence will hold, and holds",
        ),
        (
            lambda cache: cache.reserve(0, 12.0, length=10),
            InputError,
            "num_tokens=12.0, length=10 (integers of at least 0); use what the sequence will hold, and holds",
        ),
        (lambda cache: cache.pages.assign(0, [3]), InputError, "sequence 0 has 3 pages (each holds tokens); free it first"),
        (lambda cache: cache.pages.free(2), InputError, "sequence 2 is none (the cache holds 2); use 0 .. 1"),
        (
            lambda cache: cache.reserve(1, 8, length=0),
            CacheOverflowError,
            "sequence 1 needs 2 more pages for 8 tokens (1 of 4 are free); free a sequence, or build the cache with num_pages=5",
        ),
        (
            lambda cache: cache.reserve(0, 21, length=10),
            CacheOverflowError,
            "sequence 0 would hold 21 tokens (the cache was built for max_seqlen=20); reserve fewer",
        ),
    ],
)
def test_what_the_pages_cannot_do_is_refused_and_nothing_changes(random_layer, random_input, act, error, message):
    layer = random_layer(CONFIG)
    cache = layer.new_cache(2, 20, page_size=4, num_pages=4)
    cache.reserve(0, 12, length=0)
    layer(random_input(2, 10, 8), cache=cache, query_count=int32([10, 0]))
    before = contents(cache)

    with pytest.raises(error) as caught:
        act(cache)

    assert str(caught.value) == message
    assert all(torch.equal(x, y) for x, y in zip(before, contents(cache), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 6}, "page_size=6 is no multiple of selection_block_size=4; use 4"),
        ({"page_size": 0}, "page_size=0, num_pages=None (integers of at least 1); use 64 and None"),
        ({"page_size": 4, "num_pages": 0}, "page_size=4, num_pages=0 (integers of at least 1); use 64 and None"),
        ({"page_size": 4.0}, "page_size=4.0, num_pages=None (integers of at least 1); use 64 and None"),
        ({"page_size": 4, "max_seqlen": None}, "max_seqlen=None with page_size=4 (a table of pages is allocated once, whole)"),
    ],
)
def test_pages_of_a_size_that_fits_nothing_are_refused(random_layer, options, message):
    with pytest.raises(InputError) as caught:
        random_layer(CONFIG).new_cache(2, **{"max_seqlen": 20, **options})

    assert str(caught.value).startswith(message)


def test_pages_freed_twice_are_refused(random_layer):
    cache = random_layer(CONFIG).new_cache(2, 20, page_size=4, num_pages=4)
    cache.reserve(0, 12, length=0)
    cache.pages.free(0)

    with pytest.raises(InputError, match=r"sequence 0 has no pages \(they are freed once\)"):
        cache.pages.free(0)
    assert cache.pages.num_free == 4


def test_a_cache_without_pages_reserves_none(random_layer):
    with pytest.raises(InputError, match=r"the cache has no pages to reserve \(it was built without page_size\)"):
        random_layer(CONFIG).new_cache(1, 20).reserve(0, 4, length=0)


def test_a_sequence_that_adds_nothing_loses_nothing(random_layer, random_input):
    """Sequences with a shared page, or without pages, take no row; that is no loss if the step has none for them."""
    layer = random_layer(CONFIG)
    cache = layer.new_cache(3, 30, static=True, page_size=8)
    cache.reserve(0, 14, length=0)
    layer(random_input(3, 14, 8), cache=cache, query_count=int32([14, 0, 0]))
    cache.reorder(torch.tensor([0, 0, 0]))
    cache.reserve(0, 15, length=14)
    layer(random_input(3, 1, 8), cache=cache, query_count=int32([1, 0, 0]))
    assert cache.lengths.tolist() == [15, 14, 14]
    assert not cache.bounds.overflowed.any()
    cache.check()

    layer(random_input(3, 1, 8), cache=cache, query_count=int32([0, 1, 0]))
    assert cache.bounds.overflowed.tolist() == [False, True, False]


@pytest.mark.parametrize("static", [False, True])
def test_the_table_is_what_the_pages_of_the_sequences_are(random_layer, static):
    """After any calls the table, the free pages and the extents are those of a table that is written anew."""
    draws = random.Random(0)
    cache = random_layer(CONFIG).new_cache(4, 24, static=static, page_size=4, num_pages=20)
    pages = cache.pages
    for _ in range(200):
        b, act = draws.randrange(4), draws.choice(("reserve", "free", "reorder", "assign"))
        have = pages.pages_of(b)
        if act == "reserve":
            with suppress(CacheOverflowError):
                cache.reserve(b, draws.randrange(25), length=draws.randrange(4 * len(have) + 1))
        elif act == "free" and have:
            pages.free(b)
        elif act == "reorder":
            pages.reorder([draws.choice((0, 1, 2, 3, b, None)) for _ in range(4)])
        elif act == "assign" and not have:
            pages.assign(b, draws.sample(range(20), 3))
        held = [pages.pages_of(b) for b in range(4)]
        readers = Counter(page for each in held for page in each)
        assert pages.num_free == 20 - len(readers)
        assert pages.table.tolist() == [[*each, *[-1] * (6 - len(each))] for each in held]
        ends = [max([place + 1 for place, page in enumerate(each) if readers[page] > 1], default=0) for each in held]
        assert pages.extents.tolist() == [[4 * len(each) for each in held], [4 * end for end in ends]]


def test_pages_that_a_tensor_numbers_are_counted(random_layer):
    cache = random_layer(CONFIG).new_cache(2, 20, page_size=4, num_pages=6)
    cache.pages.assign(0, torch.tensor([0, 2]))
    cache.reserve(1, 8, length=0)
    assert cache.pages.pages_of(1) == (1, 3)


def test_the_lowest_free_page_is_taken_first(random_layer):
    cache = random_layer(CONFIG).new_cache(3, 20, page_size=4, num_pages=6)
    for b in range(3):
        cache.reserve(b, 8, length=0)
    cache.pages.free(1)
    cache.pages.free(0)
    cache.reserve(1, 12, length=0)
    assert cache.pages.pages_of(1) == (0, 1, 2)


def test_a_step_that_needs_no_page_writes_no_table(random_layer):
    cache = random_layer(CONFIG).new_cache(2, 20, page_size=4)
    cache.reserve(0, 6, length=0)
    before = cache.pages.table._version
    cache.reserve(0, 7, length=6)
    assert cache.pages.table._version == before
    cache.reserve(0, 9, length=8)
    assert cache.pages.table._version > before
