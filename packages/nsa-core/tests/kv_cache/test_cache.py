"""The cache: any split of a sequence gives what one pass gives, and stores, counts and rollbacks are right."""

import inspect

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_core import (
    BlockGeometry,
    CacheOptions,
    CacheOverflowError,
    InputError,
    NativeSparseAttention,
    NSACache,
    NSAConfig,
    NSAError,
    RopeScaling,
    attention,
    blocks,
    checks,
    module,
)
from nsa_core.backends.base import Keys, NewRows, Queries
from nsa_core.config import BRANCHES
from nsa_core.reference.append import join_rows, write_rows

SMALL = BlockGeometry(4, 2, 4, 3, 1, 1, 5)
CONFIG = NSAConfig(8, 4, 2, 6, 5, geometry=SMALL, gate_hidden_size=8)
SUBSETS = [("cmp",), ("slc",), ("win",), ("cmp", "slc"), ("cmp", "win"), ("slc", "win")]
SHARINGS = ["separate", "shared"]
GROWTHS = [False, True]
"""False for a cache that grows, True for a static one."""


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def ring_rows(ring, new):
    """New rows (B, m, 1, 1) of a ring that has only keys."""
    return NewRows(Keys(ring, ring, ring.shape[1], ring=True), new, None)


def draw_steps(data, length, label="steps"):
    """A random cut of `length` tokens into steps, empty ones among them."""
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=5), label=label))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]


def run_steps(layer, cache, x, steps):
    """The outputs of x (B, S, hidden) appended to the cache in steps, and the reads of every step checked on the way."""
    start, outs = int(cache.lengths[0]) if cache.batch_size else 0, []
    done = 0
    for count in steps:
        outs.append(layer(x[:, done : done + count], cache=cache))
        check_step(layer.config, cache, start + done, count)
        done += count
    return torch.cat(outs, 1)


def check_step(config, cache, start, count):
    geometry, batch = config.geometry, cache.batch_size
    assert cache.lengths.tolist() == [start + count] * batch
    assert cache.num_compressed.tolist() == [blocks.num_compressed_blocks(start + count, geometry)] * batch
    if len(config.branches) < 3:
        assert cache.last_reads is None
    elif count:
        expected = blocks.predicted_reads_of_step(start, count, geometry)
        assert cache.last_reads.predicted.tolist() == [expected] * batch
        assert cache.last_reads.actual.tolist() == [[expected] * config.num_kv_heads] * batch


def check_split(layer, x, steps, max_seqlen=None, **options):
    """Steps give one pass's outputs, compressed stores and read totals."""
    config, length = layer.config, x.shape[1]
    max_seqlen = max(length, 1) if max_seqlen is None else max_seqlen
    cache, whole = layer.new_cache(x.shape[0], max_seqlen, **options), layer.new_cache(x.shape[0], max_seqlen, **options)

    assert_close(run_steps(layer, cache, x, steps), layer(x))
    assert_close(layer(x, cache=whole), layer(x))

    count = blocks.num_compressed_blocks(length, config.geometry)
    for name in ("keys", "values"):
        stored, expected = (getattr(one, name).get("cmp") for one in (cache, whole))
        if stored is None:
            assert config.branches == ("win",) or (name == "values" and "cmp" not in config.branches)
            continue
        assert_close(stored[:, :count], expected[:, :count])
        assert not stored[:, count:].any()
    total = blocks.predicted_reads_of_step(0, length, config.geometry) if len(config.branches) == 3 else 0
    for one in (cache, whole):
        assert one.total_reads.predicted.tolist() == [total] * x.shape[0]
        assert one.total_reads.actual.tolist() == [[total] * config.num_kv_heads] * x.shape[0]


@given(data=st.data(), length=st.integers(0, 30))
def test_any_split_equals_one_pass_in_outputs_stores_and_reads(geometries, random_layer, random_input, data, length):
    choices = {"gate": data.draw(st.sampled_from(["sigmoid", "softmax"])), "kv": data.draw(st.sampled_from(SHARINGS))}
    layer = random_layer(attrs.evolve(CONFIG, geometry=data.draw(geometries()), **choices))

    check_split(layer, random_input(2, length, 8), draw_steps(data, length), static=data.draw(st.booleans()))


@pytest.mark.parametrize(
    "changes",
    [
        {"compressor": "mean"},
        {"compressor": "mean", "compressed_rope": "tokens"},
        {"compressor": "conv"},
        {"compressor": "conv", "gate": "softmax"},
        {"compressor": "mlp", "gate": "softmax", "gate_temperature": 0.5},
        {"compressor": "mean", "compressed_rope": "tokens", "gate": "softmax"},
        {"compressor": "mlp", "qk_norm": True},
        {"compressor": "mean", "compressed_rope": "tokens", "qk_norm": True},
        {"num_heads": 1, "num_kv_heads": 1, "head_dim_v": 6},
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_heads": 6, "num_kv_heads": 2, "head_dim_v": 3},
        {"num_heads": 4, "num_kv_heads": 1, "head_dim_v": 9},
        {"num_heads": 16, "num_kv_heads": 1},
        {"rope_scaling": RopeScaling(kind="linear", factor=4.0)},
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_position=64)},
        *({"branches": branches} for branches in SUBSETS),
        *({"branches": branches, "gate": "softmax"} for branches in SUBSETS if len(branches) > 1),
        *({"kv": "shared", "compressor": phi} for phi in ("mlp", "conv", "mean")),
        {"kv": "shared", "compressor": "mean", "compressed_rope": "tokens", "qk_norm": True},
        {"kv": "shared", "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_position=64)},
        *({"kv": "shared", "branches": branches} for branches in SUBSETS),
    ],
    ids=lambda changes: "-".join(f"{value}" for value in changes.values()),
)
@pytest.mark.parametrize("static", GROWTHS)
def test_prefill_and_steps_equal_one_pass_for_every_kind_of_layer(random_layer, random_input, changes, static):
    layer = random_layer(attrs.evolve(CONFIG, **changes))

    check_split(layer, random_input(2, 19, 8), [3, 1, 1, 7, 0, 1, 1, 1, 4], static=static)


@pytest.mark.parametrize(
    ("geometry", "length"),
    [
        pytest.param(BlockGeometry(4, 2, 4, 3, 1, 1, 3), 30, id="S far beyond w"),
        pytest.param(BlockGeometry(4, 2, 4, 3, 1, 1, 8), 16, id="S = 2w"),
        pytest.param(BlockGeometry(4, 2, 4, 3, 1, 1, 7), 15, id="S = 2w + 1"),
        pytest.param(BlockGeometry(4, 2, 4, 3, 1, 1, 100), 17, id="w > max_seqlen"),
        pytest.param(BlockGeometry(4, 2, 4, 3, 1, 1, 1), 17, id="w = 1"),
        pytest.param(BlockGeometry(4, 4, 4, 3, 1, 1, 5), 17, id="l = d"),
        pytest.param(BlockGeometry(1, 1, 4, 3, 1, 1, 5), 17, id="l = 1"),
        pytest.param(BlockGeometry(1, 1, 1, 2, 0, 1, 1), 9, id="everything 1"),
        pytest.param(BlockGeometry(6, 2, 6, 3, 1, 1, 5), 17, id="l = 3d"),
        pytest.param(BlockGeometry(16, 2, 16, 3, 1, 1, 5), 13, id="S < l"),
        pytest.param(BlockGeometry(4, 2, 4, 100, 1, 1, 5), 17, id="n l' > S"),
    ],
)
@pytest.mark.parametrize("steps", ["tokens", "one", "threes"])
@pytest.mark.parametrize(
    ("kv", "static", "max_rollback"),
    [
        ("separate", False, 0),
        pytest.param("separate", False, 1, marks=pytest.mark.slow),
        ("separate", False, 64),
        pytest.param("separate", True, 0, marks=pytest.mark.slow),
        ("separate", True, 1),
        pytest.param("separate", True, 64, marks=pytest.mark.slow),
        ("shared", True, 0),
        pytest.param("shared", True, 1, marks=pytest.mark.slow),
        ("shared", True, 64),
    ],
)
def test_edges_of_block_and_window_equal_one_pass(random_layer, random_input, geometry, length, steps, kv, static, max_rollback):
    layer = random_layer(attrs.evolve(CONFIG, geometry=geometry, kv=kv))
    cut = {"tokens": [1] * length, "one": [length], "threes": [3] * (length // 3) + [length % 3]}[steps]

    check_split(layer, random_input(1, length, 8), cut, max_rollback=max_rollback, static=static)


def test_a_larger_cache_changes_nothing(random_layer, random_input):
    check_split(random_layer(CONFIG), random_input(2, 19, 8), [5, 1, 13], max_seqlen=64)


@pytest.mark.parametrize("kv", SHARINGS)
def test_a_full_sequence_waits_while_others_go_on(random_layer, random_input, kv):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(2, 3, 8)
    cache = layer.new_cache(2, 3, max_rollback=0)
    layer(x, cache=cache, query_count=int32([3, 1]))

    out = layer(x[:, 1:], cache=cache, query_count=int32([0, 2]))

    assert_close(out[1:], layer(x[1:])[:, 1:])
    assert not out[0].any()


@given(data=st.data())
def test_mixed_steps_equal_each_sequence_alone(geometries, random_layer, random_input, data):
    layer = random_layer(attrs.evolve(CONFIG, geometry=data.draw(geometries()), kv=data.draw(st.sampled_from(SHARINGS))))
    cuts = [draw_steps(data, data.draw(st.integers(0, 20)), label=f"steps of sequence {b}") for b in range(3)]
    num_steps = max(len(cut) for cut in cuts)
    cuts = [cut + [0] * (num_steps - len(cut)) for cut in cuts]
    lengths = [sum(cut) for cut in cuts]
    sequences = [random_input(1, length, 8, seed=b) for b, length in enumerate(lengths)]
    cache = layer.new_cache(3, max(1, *lengths), max_rollback=data.draw(st.integers(0, 3)), static=data.draw(st.booleans()))

    outs, done, reads = [[] for _ in cuts], [0] * 3, [0] * 3
    for step in range(num_steps):
        counts = [cut[step] for cut in cuts]
        rows = max(counts) + 1
        # invalid rows hold arbitrary numbers
        x = torch.full((3, rows, 8), 1e3, dtype=torch.float64)
        for b, count in enumerate(counts):
            x[b, :count] = sequences[b][0, done[b] : done[b] + count]
        out = layer(x, cache=cache, query_count=int32(counts))
        expected = []
        for b, count in enumerate(counts):
            outs[b].append(out[b, :count])
            assert not out[b, count:].any()
            expected.append(blocks.predicted_reads_of_step(done[b], count, layer.config.geometry))
            done[b] += count
            reads[b] += expected[-1]
        assert cache.lengths.tolist() == done
        assert cache.num_compressed.tolist() == [blocks.num_compressed_blocks(have, layer.config.geometry) for have in done]
        assert cache.last_reads.predicted.tolist() == expected
        assert cache.last_reads.actual.tolist() == [[count] * 2 for count in expected]
    assert cache.total_reads.predicted.tolist() == reads
    assert cache.total_reads.actual.tolist() == [[count] * 2 for count in reads]
    for b, sequence in enumerate(sequences):
        assert_close(torch.cat(outs[b]).unsqueeze(0), layer(sequence))


@given(data=st.data(), length=st.integers(1, 24), max_rollback=st.integers(1, 8))
def test_after_a_crop_another_continuation_equals_a_fresh_run(geometries, random_layer, random_input, data, length, max_rollback):
    layer = random_layer(attrs.evolve(CONFIG, geometry=data.draw(geometries()), kv=data.draw(st.sampled_from(SHARINGS))))
    back = data.draw(st.integers(1, min(max_rollback, length)))
    x, other = random_input(2, length, 8, seed=3), random_input(2, 9, 8, seed=4)
    cache = layer.new_cache(2, length + 9, max_rollback=max_rollback, static=data.draw(st.booleans()))
    run_steps(layer, cache, x, draw_steps(data, length))

    cache.crop(back)

    assert cache.lengths.tolist() == [length - back] * 2
    continued = run_steps(layer, cache, other, draw_steps(data, 9))
    assert_close(continued, layer(torch.cat([x[:, : length - back], other], 1))[:, length - back :])


@pytest.mark.parametrize("counts", [[5, 0], torch.tensor([5, 0]), int32([5, 0])], ids=["list", "int64", "int32"])
@pytest.mark.parametrize("static", GROWTHS)
def test_sequences_may_be_cropped_by_different_counts(random_layer, random_input, counts, static):
    layer, x, other = random_layer(CONFIG), random_input(2, 17, 8, seed=3), random_input(2, 6, 8, seed=4)
    cache = layer.new_cache(2, 30, static=static)
    layer(x, cache=cache)

    cache.crop(counts)
    out = layer(other, cache=cache)

    assert_close(out[:1], layer(torch.cat([x[:1, :12], other[:1]], 1))[:, 12:])
    assert_close(out[1:], layer(torch.cat([x[1:], other[1:]], 1))[:, 17:])


@pytest.mark.parametrize("static", GROWTHS)
def test_after_a_crop_to_nothing_the_cache_is_as_new(random_layer, random_input, static):
    layer, x = random_layer(CONFIG), random_input(1, 9, 8)
    cache = layer.new_cache(1, 20, static=static)
    layer(x, cache=cache)

    cache.crop(9)

    assert cache.num_compressed.tolist() == [0]
    assert_close(run_steps(layer, cache, x, [4, 5]), layer(x))


@pytest.mark.parametrize(("kv", "static"), [("separate", False), ("shared", False), ("separate", True)])
def test_keep_raw_crops_from_any_length_to_0(random_layer, random_input, kv, static):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(1, 40, 8)
    cache = layer.new_cache(1, 40, keep_raw=True, max_rollback=0, static=static)
    layer(x, cache=cache)

    for left in (33, 18, 1, 0):
        cache.crop(int(cache.lengths) - left)
        assert_close(layer(x[:, left:], cache=cache), layer(x)[:, left:])
    cache.crop(40)
    assert cache.lengths.tolist() == [0]


@pytest.mark.parametrize("static", GROWTHS)
def test_a_crop_deeper_than_max_rollback_is_refused_and_changes_nothing(random_layer, random_input, static):
    layer, x = random_layer(CONFIG), random_input(1, 21, 8)
    cache = layer.new_cache(1, 30, max_rollback=3, static=static)
    layer(x[:, :20], cache=cache)

    with pytest.raises(CacheOverflowError) as caught:
        cache.crop(4)

    assert str(caught.value) == (
        "sequence 0 cannot go back by 4 from 20 tokens (raw tokens older than max_rollback=3 are gone); "
        "build the cache with keep_raw=True or a larger max_rollback"
    )
    assert cache.lengths.tolist() == [20]
    assert_close(layer(x[:, 20:], cache=cache), layer(x)[:, 20:])


@pytest.mark.parametrize("static", GROWTHS)
def test_rollbacks_add_up_until_the_sequence_has_grown_again(random_layer, random_input, static):
    layer, x = random_layer(CONFIG), random_input(1, 30, 8)
    cache = layer.new_cache(1, 30, max_rollback=5, static=static)
    layer(x[:, :20], cache=cache)
    cache.crop(3)
    layer(x[:, 17:18], cache=cache)

    # 20 was reached, so 15 is as far back as it goes: from 18 by 3
    with pytest.raises(CacheOverflowError, match="sequence 0 cannot go back by 4 from 18 tokens"):
        cache.crop(4)
    cache.crop(3)
    assert_close(layer(x[:, 15:], cache=cache), layer(x)[:, 15:])
    cache.crop(5)
    assert_close(layer(x[:, 25:], cache=cache), layer(x)[:, 25:])


@pytest.mark.parametrize("static", GROWTHS)
def test_one_sequence_too_deep_refuses_the_crop_of_all(random_layer, random_input, static):
    layer = random_layer(CONFIG)
    cache = layer.new_cache(2, 30, max_rollback=3, static=static)
    layer(random_input(2, 20, 8), cache=cache)

    with pytest.raises(CacheOverflowError, match="sequence 1 cannot go back by 4 from 20"):
        cache.crop([2, 4])

    assert cache.lengths.tolist() == [20, 20]


@pytest.mark.parametrize("static", GROWTHS)
def test_a_crop_below_0_is_refused(random_layer, random_input, static):
    layer = random_layer(CONFIG)
    cache = layer.new_cache(1, 30, static=static)
    layer(random_input(1, 3, 8), cache=cache)

    with pytest.raises(CacheOverflowError, match="sequence 0 cannot go back by 4 from 3 tokens"):
        cache.crop(4)


@pytest.mark.parametrize("counts", [-1, [1], [1, 1, 1], [0, -1], 1.5, None, "1", [0, None], True, 1j])
def test_a_crop_of_other_than_one_count_per_sequence_is_refused(random_layer, counts):
    cache = random_layer(CONFIG).new_cache(2, 30)

    with pytest.raises(InputError) as caught:
        cache.crop(counts)

    assert str(caught.value) == f"num_tokens={counts} (0 or more, one per sequence); give 2 counts"


def test_a_cache_on_another_device_is_refused(random_layer, random_input):
    cache = random_layer(CONFIG).to("meta").new_cache(2, 30)
    with pytest.raises(InputError, match="x is on cpu, the cache on meta"):
        random_layer(CONFIG)(random_input(2, 3, 8), cache=cache)


def test_a_cache_of_no_sequence_takes_no_counts(random_layer):
    cache = random_layer(CONFIG).new_cache(0, 30)
    cache.crop([])
    with pytest.raises(InputError, match="give 0 counts"):
        cache.crop([1])


@given(data=st.data(), chosen=st.lists(st.integers(0, 2), max_size=4))
def test_reordered_sequences_continue_as_those_they_came_from(random_layer, random_input, data, chosen):
    layer = random_layer(attrs.evolve(CONFIG, kv=data.draw(st.sampled_from(SHARINGS))))
    x = random_input(3, 13, 8, seed=3)
    lengths = data.draw(st.lists(st.integers(0, 13), min_size=3, max_size=3))
    cache = layer.new_cache(3, 20)
    layer(x, cache=cache, query_count=int32(lengths))
    total = cache.total_reads

    cache.reorder(torch.tensor(chosen, dtype=torch.int64))

    assert cache.batch_size == len(chosen)
    assert cache.lengths.tolist() == [lengths[b] for b in chosen]
    assert cache.total_reads.predicted.tolist() == [int(total.predicted[b]) for b in chosen]
    assert cache.last_reads is None
    other = random_input(len(chosen), 6, 8, seed=4)
    out = layer(other, cache=cache)
    for place, b in enumerate(chosen):
        together = torch.cat([x[b : b + 1, : lengths[b]], other[place : place + 1]], 1)
        assert_close(out[place : place + 1], layer(together)[:, lengths[b] :])


def test_reordered_sequences_keep_their_own_bounds(random_layer, random_input):
    layer = random_layer(CONFIG)
    cache = layer.new_cache(2, 20, max_rollback=4)
    layer(random_input(2, 18, 8), cache=cache, query_count=int32([18, 3]))

    cache.reorder(torch.tensor([1, 1, 0]))

    layer(random_input(3, 10, 8), cache=cache, query_count=int32([10, 4, 2]))
    with pytest.raises(CacheOverflowError, match="sequence 2 would hold 21 tokens"):
        layer(random_input(3, 1, 8), cache=cache)
    cache.crop([4, 4, 4])
    with pytest.raises(CacheOverflowError, match="sequence 1 cannot go back by 1 from 3"):
        cache.crop([0, 1, 0])


def test_reordered_by_indices_that_are_not_read_every_sequence_gets_the_largest_bound_and_depth():
    # the meta device stands for a GPU: nothing there can be read on the host
    cache = NSACache(CONFIG, 3, 20, CacheOptions(max_rollback=4), device="meta")
    cache.end_step(cache.begin_step(18, int32([3, 18, 7])))
    cache.crop([3, 0, 1])

    cache.reorder(torch.tensor([0, 2], device="meta"))

    assert cache.batch_size == 2
    cache.end_step(cache.begin_step(2, int32([0, 2])))
    with pytest.raises(CacheOverflowError, match="sequence 1 would hold 21 tokens"):
        cache.begin_step(1, None)
    # sequence 1 has regained 2 of the 3 tokens that the first crop used up
    with pytest.raises(CacheOverflowError, match="sequence 0 cannot go back by 2 from 18"):
        cache.crop([2, 3])
    with pytest.raises(CacheOverflowError, match="sequence 1 cannot go back by 4 from 20"):
        cache.crop([1, 4])
    cache.crop([1, 3])


@pytest.mark.parametrize("count", [0, 3])
def test_a_new_cache_reordered_by_indices_that_are_not_read_is_as_new(count):
    cache = NSACache(CONFIG, 2, 20, CacheOptions(max_rollback=4), device="meta")

    cache.reorder(torch.zeros(count, dtype=torch.int64, device="meta"))

    assert cache.bounds.held.tolist() == [0] * count
    cache.end_step(cache.begin_step(20, None))
    cache.crop(4)
    cache.reorder(torch.zeros(0, dtype=torch.int64, device="meta"))
    cache.reorder(torch.zeros(0, dtype=torch.int64, device="meta"))


def test_reordered_sequences_keep_the_rollback_that_they_used_up(random_layer, random_input):
    layer = random_layer(CONFIG)
    cache = layer.new_cache(2, 20, max_rollback=4)
    layer(random_input(2, 18, 8), cache=cache)
    cache.crop([4, 0])

    cache.reorder(torch.tensor([1, 0]))

    cache.crop([4, 0])
    with pytest.raises(CacheOverflowError, match="sequence 1 cannot go back by 1 from 14"):
        cache.crop([0, 1])


def test_a_crop_below_a_bound_that_was_not_read_stops_at_0():
    cache = NSACache(CONFIG, 1, 20)
    cache.end_step(cache.begin_step(3, None))
    # as after a reorder by indices on a GPU
    cache.bounds.held = torch.tensor([10])

    cache.crop(5)

    assert cache.lengths.tolist() == [0]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.tensor([0, 2]), "indices name sequence 2 (the cache holds 2); use 0 .. 1"),
        (torch.tensor([-1]), "indices name sequence -1 (the cache holds 2); use 0 .. 1"),
        (torch.tensor([0.0]), "indices are torch.float32 (they name sequences); use indices.to(torch.int64)"),
        (torch.tensor([[0]]), "indices has shape (1, 1) (the layout is (B',)); give it 1 dimensions"),
    ],
)
def test_indices_that_name_no_sequence_are_refused(random_layer, indices, message):
    cache = random_layer(CONFIG).new_cache(2, 20)

    with pytest.raises(InputError) as caught:
        cache.reorder(indices)

    assert str(caught.value) == message
    assert cache.batch_size == 2


def test_more_tokens_than_the_cache_was_built_for_are_refused_before_anything_is_written(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(2, 12, 8)
    cache = layer.new_cache(2, 10)
    layer(x[:, :7], cache=cache)
    before = {name: store.clone() for name, store in cache.keys.items()}

    with pytest.raises(CacheOverflowError) as caught:
        layer(x[:, 7:11], cache=cache)

    assert str(caught.value) == (
        "sequence 0 would hold 11 tokens (the cache was built for max_seqlen=10); build it with new_cache(2, 11) or append at most 3"
    )
    assert all(torch.equal(store, before[name]) for name, store in cache.keys.items())
    assert_close(layer(x[:, 7:10], cache=cache), layer(x[:, :10])[:, 7:])


def test_the_overflow_counts_each_sequences_own_rows(random_layer, random_input):
    layer = random_layer(CONFIG)
    cache = layer.new_cache(2, 10)
    layer(random_input(2, 9, 8), cache=cache, query_count=int32([9, 2]))

    layer(random_input(2, 8, 8), cache=cache, query_count=int32([1, 8]))

    assert cache.lengths.tolist() == [10, 10]
    with pytest.raises(CacheOverflowError, match="sequence 1 would hold 11 tokens .* or append at most 0"):
        layer(random_input(2, 1, 8), cache=cache, query_count=int32([0, 1]))


def test_an_overflow_is_an_nsa_error_and_a_runtime_error():
    assert issubclass(CacheOverflowError, NSAError)
    assert issubclass(CacheOverflowError, RuntimeError)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (int32([1, 4]), "query_count=[1, 4] leaves 0 .. 3 (the rows that x has); clip it"),
        (int32([-1, 2]), "query_count=[-1, 2] leaves 0 .. 3 (the rows that x has); clip it"),
        (int32([1]), "query_count has shape (1,) (the layout is (B,)); give it (2,)"),
        (int32([[1, 1]]), "query_count has shape (1, 2) (the layout is (B,)); give it (2,)"),
        (torch.tensor([1, 1]), "query_count is torch.int64 (kernels read int32); use query_count.to(torch.int32)"),
        (torch.tensor([1.5, 1]), "query_count is torch.float32 (kernels read int32); use query_count.to(torch.int32)"),
    ],
)
def test_a_query_count_that_does_not_fit_is_refused(random_layer, random_input, count, message):
    layer = random_layer(CONFIG)
    cache = layer.new_cache(2, 20)

    with pytest.raises(InputError) as caught:
        layer(random_input(2, 3, 8), cache=cache, query_count=count)

    assert str(caught.value) == message
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("batch_size", "max_seqlen", "max_rollback"),
    [(-1, 8, 0), (1, 0, 0), (1, 8, -1), (True, 8, 0), (1, 8.0, 0), (1, torch.tensor(8), 0), (1, 8, None)],
)
def test_a_size_that_is_too_small_or_no_integer_is_refused(batch_size, max_seqlen, max_rollback):
    with pytest.raises(InputError) as caught:
        NSACache(CONFIG, batch_size, max_seqlen, CacheOptions(max_rollback=max_rollback))

    assert str(caught.value) == (
        f"batch_size={batch_size}, max_seqlen={max_seqlen}, max_rollback={max_rollback} (integers of at least 0, 1 and 0); use 1, 4096 and 64"
    )


def test_an_empty_batch_passes(random_layer, random_input):
    layer = random_layer(CONFIG)
    cache = layer.new_cache(0, 8)

    assert layer(random_input(0, 3, 8), cache=cache).shape == (0, 3, 8)
    assert cache.lengths.shape == (0,)


def test_a_step_of_no_tokens_changes_nothing_and_reads_nothing(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(2, 9, 8)
    cache = layer.new_cache(2, 20)
    layer(x[:, :5], cache=cache)
    total = cache.total_reads

    assert layer(x[:, :0], cache=cache).shape == (2, 0, 8)

    assert cache.lengths.tolist() == [5, 5]
    assert cache.last_reads is None
    assert torch.equal(cache.total_reads.actual, total.actual)
    assert_close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:])


def test_a_refused_step_keeps_the_reads_of_the_one_before(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(2, 9, 8)
    cache = layer.new_cache(2, 10)
    layer(x[:, :5], cache=cache)
    before = cache.last_reads
    with pytest.raises(CacheOverflowError):
        layer(x, cache=cache)
    assert torch.equal(cache.last_reads.actual, before.actual)


@pytest.mark.parametrize("static", GROWTHS)
def test_a_step_that_counts_nothing_adds_no_reads_of_another(random_layer, random_input, static):
    layer, x = random_layer(CONFIG), random_input(2, 9, 8)
    cache = layer.new_cache(2, 20, static=static)
    layer(x[:, :5], cache=cache)
    total = cache.total_reads
    # as for a backend of the whole operation that returns out alone
    cache.end_step(cache.begin_step(1, None))
    assert torch.equal(cache.total_reads.actual, total.actual)


@pytest.mark.parametrize("static", GROWTHS)
def test_counts_that_the_host_cannot_read_stay_within_the_rows(random_layer, random_input, static, monkeypatch):
    layer, x = random_layer(CONFIG), random_input(2, 9, 8)
    caches = [layer.new_cache(2, 20, static=static) for _ in range(2)]
    outs = [layer(x[:, :3], cache=caches[0], query_count=int32([3, 0]))]
    # as on a GPU
    monkeypatch.setattr(checks, "can_read", lambda tensor: False)
    outs.append(layer(x[:, :3], cache=caches[1], query_count=int32([9, -2])))
    assert [cache.lengths.tolist() for cache in caches] == [[3, 0]] * 2
    assert_close(outs[1], outs[0])


def test_sizes_of_numpy_are_sizes(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(2, 9, 8)
    cache = layer.new_cache(np.int64(2), np.int64(20))
    assert_close(layer(x, cache=cache), layer(x))


def test_bytes_per_token_do_not_depend_on_the_batch(random_layer):
    layer = random_layer(CONFIG)
    assert layer.new_cache(0, 20).bytes_per_token == layer.new_cache(3, 20).bytes_per_token > 0


def test_reads_can_be_left_uncounted(random_layer, random_input):
    layer = random_layer(CONFIG)
    cache = layer.new_cache(1, 20, count_reads=False)
    layer(random_input(1, 9, 8), cache=cache)

    assert cache.last_reads is None
    assert cache.total_reads.predicted.tolist() == [0]


def test_reads_are_none_where_no_block_is_selected(random_layer, random_input):
    layer = random_layer(attrs.evolve(CONFIG, branches=("cmp", "win")))
    cache = layer.new_cache(1, 20)
    layer(random_input(1, 9, 8), cache=cache)

    assert cache.last_reads is None


@pytest.mark.parametrize("static", GROWTHS)
def test_a_block_appears_with_its_last_token_and_not_before(random_layer, random_input, static):
    layer, x = random_layer(CONFIG), random_input(1, 9, 8)
    cache = layer.new_cache(1, 20, static=static)

    counts = []
    for t in range(9):
        layer(x[:, t : t + 1], cache=cache)
        counts.append(int(cache.num_compressed))
        stored = cache.keys["cmp"][0].abs().sum((-1, -2)) > 0
        assert int(stored.sum()) == counts[-1]

    # l = 4, d = 2: blocks end at tokens 3, 5, 7
    assert counts == [0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_a_window_of_the_paper_stores_no_more_than_it_needs(random_layer):
    cache = random_layer(CONFIG).new_cache(2, 1000, max_rollback=3)

    rows = {name: store.shape[1] for name, store in cache.keys.items()}
    assert rows == {"cmp": blocks.num_compressed_blocks(1000, SMALL), "raw": 4 - 1 + 3, "slc": 1000, "win": 5 - 1 + 3}
    assert cache.keys["slc"].shape == (2, 1000, 2, 6)
    assert cache.values["slc"].shape == (2, 1000, 2, 5)


def test_no_store_holds_more_than_the_longest_sequence(random_layer):
    cache = random_layer(CONFIG).new_cache(2, 20, max_rollback=64)

    assert {name: store.shape[1] for name, store in cache.keys.items()} == {"cmp": 9, "raw": 20, "slc": 20, "win": 20}


def test_a_window_far_wider_than_the_cache_costs_nothing(random_layer, random_input):
    geometry = attrs.evolve(SMALL, window_size=10**12)

    check_split(random_layer(attrs.evolve(CONFIG, geometry=geometry)), random_input(1, 9, 8), [4, 1, 4])


def test_a_step_keeps_the_lengths_it_started_from():
    cache = NSACache(CONFIG, 2, 20)

    step = cache.begin_step(3, None)
    cache.end_step(step)

    assert step.start.tolist() == [0, 0]
    assert cache.lengths.tolist() == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stores_have_the_layers_dtype_unless_told(random_layer, dtype):
    layer = random_layer(CONFIG, dtype=dtype)

    assert layer.new_cache(1, 8).keys["slc"].dtype == dtype
    assert layer.new_cache(1, 8, dtype=torch.float16).values["win"].dtype == torch.float16


def test_a_bfloat16_layer_decodes_close_to_its_float32_twin(random_layer, random_input):
    wide, narrow = random_layer(CONFIG, dtype=torch.float32), random_layer(CONFIG, dtype=torch.bfloat16)
    narrow.load_state_dict(wide.state_dict())
    x = random_input(1, 19, 8, dtype=torch.bfloat16)

    out = run_steps(narrow, narrow.new_cache(1, 19), x, [12, 1, 1, 5])

    assert out.dtype == torch.bfloat16
    assert (out - narrow(x)).abs().max() <= 2**-6 * narrow(x).abs().max()


@pytest.mark.parametrize("compressor", ["mlp", "conv", "mean"])
def test_under_autocast_a_wider_cache_gives_the_very_numbers_of_one_in_its_dtype(random_layer, random_input, compressor):
    layer = random_layer(attrs.evolve(CONFIG, compressor=compressor), dtype=torch.float32)
    x = random_input(2, 19, 8, dtype=torch.float32)

    def decode(**options):
        with torch.autocast("cpu", torch.bfloat16):
            cache = layer.new_cache(2, 19, **options)
            # the steps cut compressed blocks, so that phi reads remembered and new tokens
            pieces = [layer(x[:, start:stop], cache=cache) for start, stop in ((0, 11), (11, 14), (14, 19))]
            return cache.dtype, torch.cat(pieces, 1), layer(x)

    (wide, out, whole), (narrow, expected, _) = decode(dtype=torch.float32), decode()

    assert (wide, narrow, out.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert torch.equal(out, expected)
    assert (out - whole).abs().max() <= 2**-6 * whole.abs().max()


def test_under_autocast_a_cache_may_be_of_a_third_dtype(random_layer, random_input):
    layer, x = random_layer(CONFIG, dtype=torch.float32), random_input(1, 19, 8, dtype=torch.float32)
    cache = layer.new_cache(1, 19, dtype=torch.bfloat16)

    with torch.autocast("cpu", torch.float16):
        out = torch.cat([layer(x[:, :11], cache=cache), layer(x[:, 11:], cache=cache)], 1)
        whole = layer(x)

    assert (cache.dtype, out.dtype) == (torch.bfloat16, torch.float16)
    assert (out - whole).abs().max() <= 2**-6 * whole.abs().max()


def test_under_autocast_a_float64_layer_keeps_its_dtype_and_so_does_its_cache(random_layer, random_input):
    layer, x = random_layer(CONFIG, dtype=torch.float64), random_input(1, 19, 8, dtype=torch.float64)

    with torch.autocast("cpu", torch.bfloat16):
        cache = layer.new_cache(1, 19)
        out = torch.cat([layer(x[:, :11], cache=cache), layer(x[:, 11:], cache=cache)], 1)
        narrow, single = layer.new_cache(1, 19, dtype=torch.bfloat16), random_layer(CONFIG, dtype=torch.float32)
        with pytest.raises(InputError, match="^the cache holds torch.bfloat16, the layer computes in torch.float64; build it with"):
            layer(x, cache=narrow)
        with pytest.raises(InputError, match="^the cache holds torch.float64, the layer computes in torch.float32; build it with"):
            single(x.float(), cache=single.new_cache(1, 19, dtype=torch.float64))

    assert cache.dtype == torch.float64
    assert (out - layer(x)).abs().max() < 1e-12


def test_the_cache_keeps_no_graph(random_layer, random_input):
    layer = random_layer(CONFIG)
    cache = layer.new_cache(1, 20)

    with torch.enable_grad():
        layer(random_input(1, 9, 8).requires_grad_(), cache=cache)

    assert not any(store.requires_grad for store in (*cache.keys.values(), *cache.values.values()))


def test_a_cache_of_another_batch_size_or_config_is_refused(random_layer, random_input):
    layer = random_layer(CONFIG)

    with pytest.raises(InputError) as caught:
        layer(random_input(2, 3, 8), cache=layer.new_cache(3, 8))
    assert str(caught.value) == "the cache holds 3 sequences, x has 2; build it with new_cache(2, ...)"

    other = NSACache(attrs.evolve(CONFIG, gate="softmax"), 2, 8, dtype=torch.float64)
    with pytest.raises(InputError, match="the cache was built for another config"):
        layer(random_input(2, 3, 8), cache=other)


@given(
    size=st.integers(1, 5),
    writes=st.lists(st.tuples(st.integers(0, 7), st.lists(st.integers(0, 7), min_size=2, max_size=2)), max_size=5),
)
def test_a_ring_remembers_the_last_tokens_of_each_sequence(size, writes):
    ring, history, serial = torch.zeros(2, size, 1, 1), [[], []], 0

    for rows, wanted in writes:
        counts = [min(count, rows) for count in wanted]
        new = torch.arange(serial + 1.0, serial + 1 + 2 * rows).view(2, rows, 1, 1)
        serial += 2 * rows
        write_rows(ring_rows(ring, new), int32([len(past) for past in history]), int32(counts))
        for b in range(2):
            history[b] += new[b, : counts[b], 0, 0].tolist()

    for b, past in enumerate(history):
        first = max(0, len(past) - size)
        slots = torch.arange(first, len(past)) % size
        assert ring[b, slots, 0, 0].tolist() == past[first:]


class ScatteredSlots(TorchDispatchMode):
    """Keeps the indices of every scatter."""

    def __init__(self):
        super().__init__()
        self.indices = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scatter" in str(func):
            self.indices.append(args[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_a_ring_writes_a_slot_once_at_most(rows):
    # of two writes to one slot, a GPU keeps either
    ring = torch.zeros(2, 4, 1, 1)

    with ScatteredSlots() as scattered:
        write_rows(ring_rows(ring, torch.ones(2, rows, 1, 1)), int32([0, 3]), int32([rows, 1]))

    assert len(scattered.indices) == 1
    for slots in scattered.indices[0].flatten(1).tolist():
        assert len(set(slots)) == len(slots)


def test_a_ring_joins_what_it_remembers_with_what_is_new():
    ring = torch.zeros(2, 4, 1, 1)
    past = torch.arange(1.0, 13).view(2, 6, 1, 1)
    write_rows(ring_rows(ring, past), int32([0, 0]), int32([6, 5]))
    new = torch.tensor([[100.0, 101], [200, 201]])[..., None, None]

    (joined,) = join_rows(ring_rows(ring, new), int32([4, 4]), int32([2, 1]), 3)

    # sequence 0 holds 1..6 and joins its last two; sequence 1 holds 7..11 and joins its last one
    assert joined[0, :4, 0, 0].tolist() == [5, 6, 100, 101]
    assert joined[1, :3, 0, 0].tolist() == [11, 200, 201]
    assert joined.shape == (2, 5, 1, 1)


@pytest.mark.parametrize("branches", [BRANCHES, ("slc",)])
def test_a_failed_step_leaves_lengths_and_reads_as_they_were(random_layer, random_input, branches):
    layer, x = random_layer(attrs.evolve(CONFIG, branches=branches)), random_input(1, 20, 8)
    cache = layer.new_cache(1, 20)
    layer(x[:, :9], cache=cache)
    total = cache.total_reads

    layer.config = attrs.evolve(layer.config, backends={"slc": "absent"})
    cache.config = layer.config
    with pytest.raises(NSAError, match="no backend 'absent'"):
        layer(x[:, 9:12], cache=cache)

    assert cache.lengths.tolist() == [9]
    assert torch.equal(cache.total_reads.actual, total.actual)


@pytest.mark.parametrize(("kv", "static"), [("separate", False), ("shared", False), ("separate", True), ("shared", True)])
def test_after_a_failed_step_a_longer_one_equals_one_pass(random_layer, random_input, kv, static):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(1, 20, 8)
    expected, cache = layer(x), layer.new_cache(1, 20, static=static)
    layer(x[:, :9], cache=cache)
    whole = layer.config

    layer.config = cache.config = attrs.evolve(whole, backends={"win": "absent"})
    with pytest.raises(NSAError, match="no backend 'absent'"):
        layer(x[:, 9:10], cache=cache)
    layer.config = cache.config = whole

    assert_close(layer(x[:, 9:], cache=cache), expected[:, 9:])


def test_unread_counts_win_back_no_rollback(random_layer, random_input):
    """On a GPU counts are not read: a step that may have appended nothing must not pay for an earlier crop."""
    cache = random_layer(CONFIG).new_cache(1, 64, max_rollback=4)
    cache.bounds.held = torch.tensor([20])

    class Unread(torch.Tensor):
        device = torch.device("cuda")

        def to(self, **_):
            return int32([0])

    cache.crop(4)
    cache.end_step(cache.begin_step(4, int32([0]).as_subclass(Unread)))

    with pytest.raises(CacheOverflowError, match="max_rollback=4"):
        cache.crop(1)


@pytest.mark.parametrize(("kv", "static"), [("separate", False), ("shared", False), ("separate", True), ("shared", True)])
def test_a_step_that_fails_can_be_tried_again(random_layer, random_input, kv, static):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(1, 40, 8)
    whole = layer(x)
    cache = layer.new_cache(1, 40, max_rollback=0, static=static)
    layer(x[:, :20], cache=cache)
    project = layer.o_proj.forward
    layer.o_proj.forward = lambda _: (_ for _ in ()).throw(MemoryError)
    with pytest.raises(MemoryError):
        layer(x[:, 20:], cache=cache)
    layer.o_proj.forward = project

    assert_close(layer(x[:, 20:], cache=cache), whole[:, 20:])


@pytest.mark.parametrize(("kv", "static"), [("separate", False), ("shared", False), ("separate", True)])
def test_a_short_step_that_fails_can_be_tried_again_and_costs_rollback(random_layer, random_input, kv, static):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(1, 40, 8)
    whole, cache = layer(x), layer.new_cache(1, 40, max_rollback=6, static=static)
    layer(x[:, :20], cache=cache)
    project = layer.o_proj.forward
    layer.o_proj.forward = lambda _: (_ for _ in ()).throw(MemoryError)
    with pytest.raises(MemoryError):
        layer(x[:, 20:24], cache=cache)
    layer.o_proj.forward = project

    # the rings already hold the step's tokens, which replaced those that a rollback by more than 2 would read
    with pytest.raises(CacheOverflowError, match="sequence 0 cannot go back by 3"):
        cache.crop(3)
    assert_close(layer(x[:, 20:], cache=cache), whole[:, 20:])


def test_a_cached_pass_records_no_gradient(random_layer, random_input):
    layer = random_layer(CONFIG)

    with torch.enable_grad():
        assert layer(random_input(1, 9, 8)).requires_grad
        assert not layer(random_input(1, 9, 8), cache=layer.new_cache(1, 9)).requires_grad


def test_stores_exist_for_the_branches_in_use_alone(random_layer):
    cache = random_layer(attrs.evolve(CONFIG, branches=("win",))).new_cache(1, 9)

    assert set(cache.keys) == set(cache.values) == {"win"}


def test_shared_keys_and_values_are_stored_once_and_the_window_reads_the_selected_store(random_layer):
    shared = random_layer(attrs.evolve(CONFIG, kv="shared")).new_cache(2, 1000, max_rollback=3)
    rows = {"cmp": blocks.num_compressed_blocks(1000, SMALL), "raw": 4 - 1 + 3, "slc": 1000}

    assert {name: store.shape[1] for name, store in shared.keys.items()} == rows
    assert {name: store.shape[1] for name, store in shared.values.items()} == rows
    # G (D_k + D_v) numbers of 8 bytes for each row of the stores
    assert sum(store.nbytes for stores in (shared.keys, shared.values) for store in stores.values()) == 2 * sum(rows.values()) * 2 * 11 * 8

    without = NSACache(attrs.evolve(CONFIG, kv="shared", branches=("cmp", "win")), 2, 1000, CacheOptions(max_rollback=3))
    assert {name: store.shape[1] for name, store in without.keys.items()} == {
        **{name: rows[name] for name in ("cmp", "raw")},
        "win": 5 - 1 + 3,
    }


def test_a_window_that_shares_copies_nothing_however_long_the_step(random_layer):
    cache = NSACache(attrs.evolve(CONFIG, kv="shared"), 1, 100, CacheOptions(max_rollback=0))
    step, k, v = cache.begin_step(50, None), torch.zeros(1, 50, 2, 6), torch.zeros(1, 50, 2, 5)

    found = cache.window({name: cache.new_rows(name, k, v) for name in ("slc", "raw")}, step)

    assert found.k is cache.keys["slc"]
    assert found.v is cache.values["slc"]
    assert (found.ring, found.first) == (False, None)


def test_steps_that_fail_again_and_again_cost_the_rollback_of_one(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(1, 20, 8)
    expected, cache = layer(x), layer.new_cache(1, 20, max_rollback=2)
    layer(x[:, :9], cache=cache)
    whole = layer.config
    layer.config = cache.config = attrs.evolve(whole, backends={"win": "absent"})
    for _ in range(4):
        with pytest.raises(NSAError, match="no backend 'absent'"):
            layer(x[:, 9:10], cache=cache)
    layer.config = cache.config = whole

    cache.crop(0)
    cache.crop(1)
    with pytest.raises(CacheOverflowError, match="sequence 0 cannot go back by 1 from 8"):
        cache.crop(1)
    assert_close(layer(x[:, 8:], cache=cache), expected[:, 8:])


@pytest.mark.parametrize("static", GROWTHS)
def test_a_step_that_fails_longer_than_its_second_try_costs_what_the_rings_forgot(random_layer, random_input, static):
    layer, x = random_layer(CONFIG), random_input(1, 40, 8)
    whole, cache = layer(x), layer.new_cache(1, 40, max_rollback=6, static=static)
    layer(x[:, :20], cache=cache)
    project = layer.o_proj.forward
    layer.o_proj.forward = lambda _: (_ for _ in ()).throw(MemoryError)
    with pytest.raises(MemoryError):
        layer(x[:, 20:24], cache=cache)
    layer.o_proj.forward = project
    layer(x[:, 20:21], cache=cache)

    # the rings have had 24 tokens, so 18 is as far back as they remember
    with pytest.raises(CacheOverflowError, match="sequence 0 cannot go back by 4 from 21"):
        cache.crop(4)
    cache.crop(3)
    assert_close(layer(x[:, 18:], cache=cache), whole[:, 18:])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls of a layer, in order: "append", and `follows_append` of the queries of its attention."""
    append, attend = module.append_rows, module.attend_branches
    noted: list[object] = []

    def noted_append(*arguments):
        noted.append("append")
        append(*arguments)

    def noted_attend(queries, *arguments, **options):
        noted.append(queries.follows_append)
        return attend(queries, *arguments, **options)

    monkeypatch.setattr(module, "append_rows", noted_append)
    monkeypatch.setattr(module, "attend_branches", noted_attend)
    return noted


@pytest.mark.parametrize("kv", SHARINGS)
def test_a_step_says_that_append_ran_right_before_it(kv: str, calls: list[object]) -> None:
    layer = NativeSparseAttention(attrs.evolve(CONFIG, kv=kv))
    layer(torch.randn(2, 3, 8), cache=layer.new_cache(2, 20))
    assert calls[:2] == ["append", True]
    # without a cache nothing is written
    calls.clear()
    layer(torch.randn(2, 3, 8))
    assert calls == [False]


def test_a_traced_step_says_nothing_of_append(calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may reorder its operations."""
    layer = NativeSparseAttention(CONFIG)
    cache = layer.new_cache(2, 20, static=True)
    monkeypatch.setattr(module.torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad():
        layer(torch.randn(2, 1, 8), cache=cache)
    assert calls[:2] == ["append", False]


def test_operands_that_autocast_may_cast_say_nothing_of_append() -> None:
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 3, 1, 4)
    queries = Queries(q, 1, None, int32([2]), follows_append=True)
    keys = {"_slc": Keys(k, k, 3)}
    assert attention._autocast(queries, keys)[0].follows_append
    with torch.autocast("cpu", torch.bfloat16):
        assert not attention._autocast(queries, keys)[0].follows_append


def test_a_layer_takes_the_options_of_a_cache_with_its_defaults():
    keywords = inspect.signature(NativeSparseAttention.new_cache).parameters
    options = CacheOptions()._asdict()
    assert {name: keywords[name].default for name in options} == options
    assert set(keywords) - set(options) == {"self", "batch_size", "max_seqlen", "dtype", "device"}


@pytest.mark.parametrize("option", ["static", "keep_raw", "count_reads", "step_graphs"])
def test_an_option_that_is_no_boolean_is_refused(random_layer, option):
    with pytest.raises(InputError, match=f"^{option}='no' is a str .the rule: a bool.; use True or False$"):
        random_layer(CONFIG).new_cache(2, 64, **{option: "no"})


def test_pages_without_a_size_are_refused(random_layer):
    with pytest.raises(InputError, match="^num_pages=5 without page_size .* use page_size=64, or leave num_pages out$"):
        random_layer(CONFIG).new_cache(2, 64, num_pages=5)


@pytest.mark.parametrize("dtype", ["float32", torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_dtype_that_no_keys_are_computed_in_is_refused(random_layer, dtype):
    with pytest.raises(InputError, match=f"^dtype={dtype!r} is no dtype of keys and values .* use torch.float32$"):
        random_layer(CONFIG).new_cache(2, 64, dtype=dtype)
    with pytest.raises(InputError, match=f"^dtype={dtype!r} is no dtype of keys and values .* use torch.float32$"):
        NSACache(CONFIG, 2, 64, dtype=dtype)


def test_a_cache_needs_options_and_kv_heads():
    with pytest.raises(InputError, match="^options=True is a bool .the rule: CacheOptions.; use CacheOptions"):
        NSACache(CONFIG, 2, 64, True)
    for heads in (0, 1.5, "2"):
        with pytest.raises(InputError, match=f"^num_kv_heads={heads!r} .an integer of at least 1.; use 2$"):
            NSACache(CONFIG, 2, 64, num_kv_heads=heads)
