"""The static cache: no state on the host, everything in place, overflow noted on the device and read by `check`."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_core import (
    BackendRegistry,
    BlockGeometry,
    CacheOptions,
    CacheOverflowError,
    Capability,
    InputError,
    NativeSparseAttention,
    NSACache,
    NSAConfig,
    Operation,
    attention,
)
from nsa_core.backends.base import FusedOutput
from nsa_core.kv_cache import cache as cache_module

SMALL = BlockGeometry(4, 2, 4, 3, 1, 1, 5)
CONFIG = NSAConfig(8, 4, 2, 6, 5, geometry=SMALL, gate_hidden_size=8)
SHARINGS = ["separate", "shared"]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def tensors_of(cache):
    """Every tensor that a step of the cache reads or writes, by name."""
    reads = {"last reads": cache._last_reads, "total reads": cache._total_reads}
    stores = {f"{kind} {name}": x for kind, found in (("k", cache.keys), ("v", cache.values)) for name, x in found.items()}
    bounds = {"lengths": cache.lengths, "reached": cache.bounds.reached}
    return {**stores, **bounds, **reads}


class NoValueOnTheHost(TorchDispatchMode):
    """Refuses what reads a value on the host, or makes a tensor whose shape depends on one."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "lift_fresh", "equal.default")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in self.FORBIDDEN), f"{func} needs a value on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kv", SHARINGS)
@pytest.mark.parametrize("num_tokens", [1, 3, 9])
def test_the_cache_itself_reads_nothing_in_a_step_and_rebinds_nothing(random_layer, random_input, kv, num_tokens):
    layer = random_layer(attrs.evolve(CONFIG, kv=kv))
    cache = layer.new_cache(2, 40, static=True, max_rollback=4)
    layer(random_input(2, 13, 8), cache=cache)
    before = {name: x.data_ptr() for name, x in tensors_of(cache).items()}
    counts, indices = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([1, 0])

    with NoValueOnTheHost():
        # a count on a GPU is not read; on the meta device nothing can be
        step = cache.begin_step(num_tokens, None)
        k, v = torch.zeros(2, num_tokens, 2, 6, dtype=torch.float64), torch.zeros(2, num_tokens, 2, 5, dtype=torch.float64)
        cache.window({name: cache.new_rows(name, k, v) for name in cache.keys if name != "cmp"}, step)
        cache.end_step(step)
    layer(random_input(2, num_tokens, 8), cache=cache, query_count=counts[:, 0])
    cache.reorder(indices)
    cache.crop(torch.tensor([0, 1]))
    cache.select(indices[:1])
    cache.reset()

    assert {name: x.data_ptr() for name, x in tensors_of(cache).items()} == before


@pytest.mark.parametrize("kv", SHARINGS)
@pytest.mark.parametrize("compressor", ["mean", "conv", "mlp"])
def test_no_step_reads_a_value_on_the_host(kv, compressor):
    # a tensor on the meta device has none: reading one raises
    with torch.device("meta"):
        layer = NativeSparseAttention(attrs.evolve(CONFIG, kv=kv, compressor=compressor))
        x, counts = torch.zeros(2, 13, 8), torch.zeros(2, dtype=torch.int32)
    cache = layer.new_cache(2, 40, static=True, max_rollback=4)

    for count in (13, 4, 1, 0):
        layer(x[:, :count], cache=cache)
    layer(x, cache=cache, query_count=counts)
    cache.reorder(torch.zeros(2, dtype=torch.int64, device="meta"))
    layer(x[:, :1], cache=cache)


def test_tokens_that_do_not_fit_are_dropped_and_noted_and_nothing_else_changes(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(2, 14, 8)
    cache, whole = layer.new_cache(2, 10, static=True), layer(x[:, :10])
    layer(x[:, :7], cache=cache, query_count=int32([7, 2]))
    cache.check()

    step = torch.stack([x[0, 7:12], x[1, 2:7]])
    out = layer(step, cache=cache)

    assert cache.lengths.tolist() == [10, 7]
    assert_close(out[0, :3], whole[0, 7:])
    assert_close(out[1], whole[1, 2:7])
    assert not out[0, 3:].any()
    with pytest.raises(CacheOverflowError) as caught:
        cache.check()
    assert str(caught.value) == (
        "sequences [0] lost tokens (they did not fit, and a static cache never grows); reset them, or build a larger cache"
    )
    # the other one goes on, and the stores hold what a prefix of 10 tokens leaves there
    assert_close(layer(x[:, 7:10], cache=cache, query_count=int32([0, 3]))[1], whole[1, 7:])
    fresh = layer.new_cache(2, 10, static=True)
    layer(x[:, :10], cache=fresh)
    for name, store in fresh.keys.items():
        assert_close(cache.keys[name], store)


@given(steps=st.lists(st.integers(0, 6), max_size=8), max_rollback=st.integers(0, 3), kv=st.sampled_from(SHARINGS))
def test_a_full_cache_stays_what_it_was_however_many_steps_follow(random_layer, random_input, steps, max_rollback, kv):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(1, 9, 8)
    cache = layer.new_cache(1, 9, static=True, max_rollback=max_rollback)
    layer(x, cache=cache)
    before = {name: tensor.clone() for name, tensor in tensors_of(cache).items()}

    for count in steps:
        assert not layer(x[:, :count], cache=cache).any()

    after = tensors_of(cache)
    assert bool(cache.bounds.overflowed) == any(steps)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name[0] in "kv" or name == "lengths")


@pytest.mark.parametrize("act", [lambda cache: cache.crop(1), lambda cache: cache.select(torch.tensor([1])), lambda cache: cache.check()])
def test_lost_tokens_are_reported_by_what_may_wait_and_nothing_changes(random_layer, random_input, act):
    layer, x = random_layer(CONFIG), random_input(2, 12, 8)
    cache = layer.new_cache(2, 10, static=True)
    layer(x, cache=cache, query_count=int32([12, 4]))
    before = {name: tensor.clone() for name, tensor in tensors_of(cache).items()}

    with pytest.raises(CacheOverflowError, match=r"sequences \[0\] lost tokens"):
        act(cache)

    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(cache).items())


@pytest.mark.parametrize("static", [False, True])
def test_a_reset_sequence_begins_anew_while_others_go_on(random_layer, random_input, static):
    layer, x, other = random_layer(CONFIG), random_input(2, 17, 8), random_input(1, 9, 8, seed=4)
    cache = layer.new_cache(2, 20, static=static)
    layer(x[:, :11], cache=cache)

    cache.reset(torch.tensor([0]))

    assert cache.lengths.tolist() == [0, 11]
    assert cache.total_reads.predicted[0] == 0
    step = torch.stack([other[0, :6], x[1, 11:17]])
    out = layer(step, cache=cache)
    assert_close(out[:1], layer(other[:, :6]))
    assert_close(out[1:], layer(x[1:])[:, 11:])
    cache.crop([4, 0])
    assert_close(layer(other[:, 2:].expand(2, -1, -1), cache=cache, query_count=int32([7, 0]))[0], layer(other)[0, 2:])
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    assert_close(layer(x, cache=cache), layer(x))


@pytest.mark.parametrize("static", [False, True])
def test_indices_of_32_bits_name_the_sequences_that_are_reset(random_layer, random_input, static):
    layer = random_layer(CONFIG)
    cache = layer.new_cache(2, 20, static=static)
    x = random_input(2, 9, 8)
    layer(x, cache=cache)
    cache.reset(torch.tensor([1], dtype=torch.int32))
    assert cache.lengths.tolist() == [9, 0]
    torch.testing.assert_close(layer(x, cache=cache)[1], layer(x)[1])


def test_a_reset_of_a_sequence_that_lost_tokens_says_so_and_leaves_it_empty(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(2, 12, 8)
    cache = layer.new_cache(2, 10, static=True)
    layer(x, cache=cache, query_count=int32([12, 4]))

    cache.reset(torch.tensor([1]))
    with pytest.raises(CacheOverflowError, match=r"sequences \[0\] lost tokens"):
        cache.reset(torch.tensor([0]))

    cache.check()
    assert cache.lengths.tolist() == [0, 0]
    assert_close(layer(x[:, :10], cache=cache), layer(x[:, :10]))


@given(chosen=st.lists(st.integers(0, 2), min_size=3, max_size=3), lengths=st.lists(st.integers(0, 13), min_size=3, max_size=3))
def test_sequences_reordered_in_place_continue_as_those_they_came_from(random_layer, random_input, chosen, lengths):
    layer, x, other = random_layer(CONFIG), random_input(3, 13, 8, seed=3), random_input(3, 6, 8, seed=4)
    cache = layer.new_cache(3, 20, static=True)
    layer(x, cache=cache, query_count=int32(lengths))
    total = cache.total_reads

    cache.reorder(torch.tensor(chosen))

    assert cache.lengths.tolist() == [lengths[b] for b in chosen]
    assert cache.total_reads.predicted.tolist() == [int(total.predicted[b]) for b in chosen]
    out = layer(other, cache=cache)
    for place, b in enumerate(chosen):
        together = torch.cat([x[b : b + 1, : lengths[b]], other[place : place + 1]], 1)
        assert_close(out[place : place + 1], layer(together)[:, lengths[b] :])


def test_reordered_sequences_keep_the_rollback_that_they_used_up(random_layer, random_input):
    cache = (layer := random_layer(CONFIG)).new_cache(2, 20, max_rollback=4, static=True)
    layer(random_input(2, 18, 8), cache=cache)
    cache.crop([4, 0])

    cache.reorder(torch.tensor([1, 0]))

    cache.crop([4, 0])
    with pytest.raises(CacheOverflowError, match="sequence 1 cannot go back by 1 from 14"):
        cache.crop([0, 1])


@pytest.mark.parametrize("static", [False, True])
def test_selected_sequences_stay_and_those_behind_them_are_empty(random_layer, random_input, static):
    layer, x = random_layer(CONFIG), random_input(3, 15, 8)
    cache = layer.new_cache(3, 20, static=static)
    layer(x, cache=cache, query_count=int32([9, 4, 13]))

    cache.select(torch.tensor([2, 0]))

    assert cache.lengths.tolist() == [13, 9, *([0] if static else [])]
    step = torch.stack([x[2, 13:15], x[0, 9:11], *([x[1, :2]] if static else [])])
    out = layer(step, cache=cache)
    assert_close(out[0], layer(x[2:])[0, 13:15])
    assert_close(out[1], layer(x[:1])[0, 9:11])
    if static:
        assert_close(out[2], layer(x[1:2])[0, :2])


@pytest.mark.parametrize("method", ["reorder", "select"])
def test_more_sequences_than_a_static_cache_has_are_refused(random_layer, method):
    cache = random_layer(CONFIG).new_cache(2, 20, static=True)

    with pytest.raises(InputError, match=r"indices name 3 sequences \(a static cache keeps its 2\)"):
        getattr(cache, method)(torch.tensor([0, 1, 1]))


def test_fewer_sequences_are_not_an_order(random_layer):
    cache = random_layer(CONFIG).new_cache(2, 20, static=True)

    with pytest.raises(InputError) as caught:
        cache.reorder(torch.tensor([1]))

    assert str(caught.value) == "indices name 1 sequences (a static cache keeps its 2); give 2, or use select(indices)"


def test_a_static_cache_needs_a_bound_and_is_allocated_whole(random_layer):
    with pytest.raises(InputError, match=r"max_seqlen=None with static=True \(a static cache is allocated once, whole\)"):
        NSACache(CONFIG, 1, options=CacheOptions(static=True))

    assert random_layer(CONFIG).new_cache(1, 5000, static=True).keys["slc"].shape[1] == 5000


def test_a_static_cache_of_another_batch_size_or_config_is_refused_and_nothing_is_written(random_layer, random_input):
    layer = random_layer(CONFIG)
    others = (
        layer.new_cache(3, 8, static=True),
        NSACache(attrs.evolve(CONFIG, gate="softmax"), 2, 8, CacheOptions(static=True), dtype=torch.float64),
    )

    for cache, message in zip(others, ("the cache holds 3 sequences, x has 2", "the cache was built for another config"), strict=True):
        with pytest.raises(InputError, match=message):
            layer(random_input(2, 3, 8), cache=cache)
        assert not any(x.any() for x in tensors_of(cache).values())


def test_a_cuda_graph_of_a_cache_that_grows_is_refused(random_layer, random_input, monkeypatch):
    layer, x = random_layer(CONFIG), random_input(1, 3, 8)
    growing, static = layer.new_cache(1, 16), layer.new_cache(1, 16, static=True)
    monkeypatch.setattr("nsa_core.kv_cache.growth.is_captured", lambda device: True)

    with pytest.raises(InputError) as caught:
        layer(x, cache=growing)

    assert str(caught.value) == (
        "a CUDA graph captures a step of a cache that grows (its bounds live on the host, so a replay would not advance them); "
        "use new_cache(1, 16, static=True)"
    )
    assert growing.lengths.tolist() == [0]
    layer(x, cache=static)
    assert static.lengths.tolist() == [3]


@pytest.mark.parametrize("kv", SHARINGS)
def test_the_bytes_of_a_cache_follow_the_formula(kv):
    """P at 64k, batch 16 in bfloat16, on the meta device: within 3 % of k, v, compressed and tail bytes."""
    geometry = BlockGeometry()
    config = NSAConfig(64, 64, 4, 192, 128, geometry=geometry, gate_hidden_size=8, kv=kv)
    cache = NSACache(config, 16, 65536, CacheOptions(static=True, max_rollback=0), dtype=torch.bfloat16, device="meta")

    rows = 65536 + (65536 - 32) // 16 + 1 + 31 + (511 if kv == "separate" else 0)
    assert cache.nbytes == 16 * rows * 4 * (192 + 128) * 2
    assert set(cache.keys) == {"cmp", "raw", "slc", *(["win"] if kv == "separate" else [])}


def test_a_cache_grows_by_doubling_and_no_further_than_its_bound(random_layer, random_input, monkeypatch):
    monkeypatch.setattr(cache_module, "FIRST_CAPACITY", 8)
    layer, x = random_layer(CONFIG), random_input(2, 60, 8)
    whole, cache, seen, done = layer(x), layer.new_cache(2, 60, max_rollback=3), [], 0

    for count in (5, 3, 1, 9, 1, 14, 7, 1, 19):
        assert_close(layer(x[:, done : done + count], cache=cache), whole[:, done : done + count])
        done += count
        seen.append(cache.keys["slc"].shape[1])

    assert seen == [8, 8, 16, 32, 32, 60, 60, 60, 60]
    with pytest.raises(CacheOverflowError, match="sequence 0 would hold 61 tokens"):
        layer(x[:, :1], cache=cache)


@given(data=st.data(), kv=st.sampled_from(SHARINGS))
def test_a_cache_without_a_bound_grows_under_crops_and_reorders(random_layer, random_input, data, kv):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(2, 40, 8)
    keep_raw = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "FIRST_CAPACITY", data.draw(st.integers(1, 12)))
        cache = layer.new_cache(2, max_rollback=data.draw(st.integers(2, 20)), keep_raw=keep_raw)
    length, whole = 0, layer(x)
    while length < 40:
        count = data.draw(st.integers(1, 40 - length))
        assert_close(layer(x[:, length : length + count], cache=cache), whole[:, length : length + count])
        length += count
        back = data.draw(st.integers(0, min(count, 2)))
        cache.crop(back if length < 40 else 0)
        length -= back if length < 40 else 0
    assert cache.lengths.tolist() == [40, 40]


class CountedOperations(TorchDispatchMode):
    """Counts operations that launch a kernel on a GPU: views and allocations do not."""

    FREE = (
        *("view", "_unsafe_view", "expand", "transpose", "t", "slice", "select", "unsqueeze", "split"),
        *("squeeze", "detach", "alias", "empty", "new_empty", "promote_types"),
    )

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # "aten.mm.default"
        if str(func).split(".")[1] not in self.FREE:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class KernelsElsewhere:
    """Stands for backends of a step's three operations that take a fixed number of launches."""

    def __init__(self, operation):
        self.name, self.operation, self.capability = "elsewhere", operation, Capability()

    def reasons_against(self, request):
        return ()

    def preference(self, request):
        return 100

    def __call__(self, *operands, **keywords):
        if self.operation is Operation.APPEND:
            return None
        if self.operation is Operation.ROTATE:
            return operands[0]
        q = operands[0].q
        chosen = q.new_empty(*q.shape[:2], CONFIG.num_kv_heads, CONFIG.geometry.num_selected_blocks, dtype=torch.int32)
        return FusedOutput(q.new_empty(*q.shape[:3], CONFIG.head_dim_v), chosen)


@pytest.mark.parametrize(("kv", "count_reads", "expected"), [("separate", False, 20), ("shared", False, 16), ("separate", True, 40)])
def test_a_layers_step_takes_few_operations_beside_those_of_backends(kv, count_reads, expected):
    """On a GPU each is a launch, and launches dominate a step of one token."""
    registry = BackendRegistry(tuple(map(KernelsElsewhere, (Operation.NSA, Operation.APPEND, Operation.ROTATE))))
    with torch.device("meta"):
        layer = NativeSparseAttention(attrs.evolve(CONFIG, kv=kv), registry=registry).bfloat16().eval()
        x = torch.empty(2, 1, 8, dtype=torch.bfloat16)
    cache = layer.new_cache(2, 40, static=True, count_reads=count_reads)
    # frequencies of RoPE are computed once
    layer(x, cache=cache)
    with CountedOperations() as counted:
        layer(x, cache=cache)
    assert len(counted.names) == expected, counted.names


def test_stores_are_checked_against_each_form_of_step_once_and_anew_where_they_are_replaced(monkeypatch):
    checked = []
    monkeypatch.setattr(attention, "check_keys", lambda queries, keys, geometry: checked.append(queries.q.shape[:2]))
    monkeypatch.setattr(cache_module, "FIRST_CAPACITY", 8)
    # no value can be read there, as on a GPU
    with torch.device("meta"):
        layer, x = NativeSparseAttention(CONFIG), torch.zeros(2, 3, 8)
    static, growing = layer.new_cache(2, 40, static=True, max_rollback=2), layer.new_cache(2, 40)

    for count in (1, 1, 3, 1, 3):
        layer(x[:, :count], cache=static)
    assert checked == [(2, 1), (2, 3)]
    del checked[:]
    for _ in range(4):
        layer(x, cache=growing)
    growing.reorder(torch.zeros(3, dtype=torch.int64, device="meta"))
    for _ in range(2):
        layer(x[[0, 0, 0]], cache=growing)
    # it grows in the third step, and once more in the last
    assert checked == [(2, 3), (2, 3), (3, 3), (3, 3)]


def test_values_that_can_be_read_are_checked_at_every_step(random_layer, random_input):
    layer, x = random_layer(CONFIG), random_input(1, 1, 8)
    cache = layer.new_cache(1, 8, static=True)
    for _ in range(2):
        layer(x, cache=cache)
    cache.lengths.fill_(-3)
    with pytest.raises(InputError):
        layer(x, cache=cache)
