"""Steps of a cache under torch.compile: the same numbers, and one compilation however long the sequences get."""

import pytest
import torch

from nsa_core import BlockGeometry, CacheOverflowError, NSAConfig
from nsa_core.kv_cache import cache as cache_module

GEOMETRY = BlockGeometry(4, 2, 4, 3, 1, 1, 5)
CONFIG = {kv: NSAConfig(8, 4, 2, 6, 5, geometry=GEOMETRY, gate_hidden_size=8, kv=kv) for kv in ("separate", "shared")}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    # imported late: it loads triton, which must not happen during collection
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def num_graphs():
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def decode(step, x, cache, start):
    """The outputs of tokens `start` onwards, one by one, and the number of graphs compiled after the first token."""
    outs = [step(x[:, start : start + 1], cache=cache)]
    compiled = num_graphs()
    outs += [step(x[:, t : t + 1], cache=cache) for t in range(start + 1, x.shape[1])]
    return torch.cat(outs, 1), num_graphs() - compiled


@pytest.mark.parametrize(
    ("kv", "static"),
    [
        ("separate", True),
        pytest.param("shared", True, marks=pytest.mark.slow),
        pytest.param("separate", False, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_a_cache_that_need_not_grow_is_one_graph_compiled_once_over_200_lengths(random_layer, random_input, kv, static):
    layer, x = random_layer(CONFIG[kv]), random_input(2, 205, 8)
    cache, whole = layer.new_cache(2, 220, static=static), layer(x)
    layer(x[:, :5], cache=cache)

    out, recompiled = decode(torch.compile(layer, fullgraph=True, backend="aot_eager"), x, cache, 5)

    assert (num_graphs(), recompiled) == (1, 0)
    torch.testing.assert_close(out, whole[:, 5:], rtol=1e-12, atol=1e-12)
    assert cache.lengths.tolist() == [205, 205]
    assert torch.equal(cache.total_reads.predicted.unsqueeze(1).expand(-1, 2), cache.total_reads.actual)
    cache.check()


def test_a_compiled_step_of_a_static_cache_notes_what_does_not_fit(random_layer, random_input):
    layer, x = random_layer(CONFIG["separate"]), random_input(2, 12, 8)
    cache = layer.new_cache(2, 10, static=True)

    out, recompiled = decode(torch.compile(layer, fullgraph=True, backend="aot_eager"), x, cache, 0)

    assert recompiled == 0
    torch.testing.assert_close(out[:, :10], layer(x[:, :10]), rtol=1e-12, atol=1e-12)
    assert not out[:, 10:].any()
    assert cache.lengths.tolist() == [10, 10]
    assert cache.bounds.overflowed.tolist() == [True, True]


def test_a_compiled_step_of_a_full_cache_raises_and_changes_nothing(random_layer, random_input):
    layer, x = random_layer(CONFIG["separate"]), random_input(2, 12, 8)
    cache, step = layer.new_cache(2, 10), torch.compile(layer, fullgraph=True, backend="aot_eager")
    for t in range(10):
        out = step(x[:, t : t + 1], cache=cache)
    torch.testing.assert_close(out, layer(x[:, :10])[:, 9:], rtol=1e-12, atol=1e-12)

    with pytest.raises(CacheOverflowError, match="sequence 0 would hold 11 tokens"):
        step(x[:, 10:11], cache=cache)

    assert cache.lengths.tolist() == [10, 10]
    cache.crop(3)
    torch.testing.assert_close(step(x[:, 7:8], cache=cache), layer(x[:, :8])[:, 7:], rtol=1e-12, atol=1e-12)


def test_compiled_steps_of_mixed_lengths_equal_each_sequence_alone(random_layer, random_input):
    layer, x = random_layer(CONFIG["separate"]), random_input(2, 24, 8)
    cache, whole = layer.new_cache(2, 24, static=True), layer(x)
    step, lengths = torch.compile(layer, fullgraph=True, backend="aot_eager"), [0, 0]

    for counts in ([3, 1], [1, 3], [0, 2], [3, 3], [2, 0], [3, 1]):
        rows = torch.stack([x[b, lengths[b] : lengths[b] + 3] for b in range(2)])
        out = step(rows, cache=cache, query_count=torch.tensor(counts, dtype=torch.int32))
        for b, count in enumerate(counts):
            torch.testing.assert_close(out[b, :count], whole[b, lengths[b] : lengths[b] + count], rtol=1e-12, atol=1e-12)
            assert not out[b, count:].any()
            lengths[b] += count

    assert num_graphs() == 1
    assert cache.lengths.tolist() == lengths


def test_a_step_of_a_cache_that_grows_is_not_compiled_again_as_lengths_grow(random_layer, random_input):
    layer, x = random_layer(CONFIG["separate"]), random_input(2, 205, 8)
    cache, whole = layer.new_cache(2), layer(x)
    layer(x[:, :5], cache=cache)

    # its bounds are counted on the host, between graphs
    out, recompiled = decode(torch.compile(layer, backend="aot_eager"), x, cache, 5)

    assert recompiled == 0
    torch.testing.assert_close(out, whole[:, 5:], rtol=1e-12, atol=1e-12)
    assert cache.lengths.tolist() == [205, 205]


def test_growth_costs_a_compilation_and_changes_no_number(random_layer, random_input, monkeypatch):
    monkeypatch.setattr(cache_module, "FIRST_CAPACITY", 16)
    layer, x = random_layer(CONFIG["separate"]), random_input(1, 30, 8)
    cache, whole = layer.new_cache(1), layer(x)

    out, recompiled = decode(torch.compile(layer, backend="aot_eager"), x, cache, 0)

    assert (cache.stores.capacity, recompiled) == (32, 1)
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)


def test_a_cache_is_made_in_a_compiled_call(random_layer, random_input):
    layer, x = random_layer(CONFIG["separate"]), random_input(2, 9, 8)

    @torch.compile(fullgraph=True, backend="eager")
    def prefill(x):
        return layer(x, cache=layer.new_cache(2, 12, static=True))

    with torch.no_grad():
        torch.testing.assert_close(prefill(x), layer(x))
