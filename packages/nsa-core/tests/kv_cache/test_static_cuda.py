"""The static cache on a GPU: a captured step replayed a thousand times, and nothing that waits."""

import pytest
import torch

from nsa_core import BlockGeometry, CacheOverflowError, InputError, NativeSparseAttention, NSAConfig

pytestmark = pytest.mark.hardware(capability=(8, 0))

GEOMETRY = BlockGeometry(32, 16, 64, num_selected_blocks=4, window_size=128)


def layer_of(kv, backends=None):
    torch.manual_seed(0)
    config = NSAConfig(256, 16, 4, 64, 64, geometry=GEOMETRY, kv=kv, backends={} if backends is None else backends)
    return NativeSparseAttention(config).to("cuda", torch.bfloat16)


def captured(layer, cache, token):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(token, cache=cache)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(token, cache=cache)
    cache.reset()
    return graph, out


@pytest.mark.parametrize("kv", ["separate", "shared"])
@pytest.mark.parametrize("options", [{}, {"page_size": 64}, {"kv_dtype": torch.float8_e4m3fn}], ids=["plain", "paged", "fp8"])
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_a_thousand_replays_equal_eager_steps(kv, options, backend):
    layer = layer_of(kv, {} if backend == "auto" else dict.fromkeys(("cmp", "select", "slc", "win"), backend))
    num_steps = 1000 if backend == "auto" else 100
    x = torch.randn(2, 100 + num_steps, 256, device="cuda", dtype=torch.bfloat16)
    static, eager = (layer.new_cache(2, 1200, static=True, **options) for _ in range(2))
    for cache in (static, eager):
        for b in range(2 if "page_size" in options else 0):
            cache.reserve(b, 1200, length=0)
    token = torch.zeros(2, 1, 256, device="cuda", dtype=torch.bfloat16)
    graph, out = captured(layer, static, token)
    for cache in (static, eager):
        layer(x[:, :100], cache=cache)

    for t in range(100, 100 + num_steps):
        token.copy_(x[:, t : t + 1])
        graph.replay()
        assert torch.equal(out, layer(token, cache=eager)), t

    assert static.lengths.tolist() == [100 + num_steps] * 2
    assert torch.equal(static.total_reads.actual, eager.total_reads.actual)
    static.check()


def test_replays_past_the_end_write_nothing_and_are_noted():
    layer = layer_of("separate")
    cache, token = layer.new_cache(1, 64, static=True), torch.randn(1, 1, 256, device="cuda", dtype=torch.bfloat16)
    graph, out = captured(layer, cache, token)
    for _ in range(64):
        graph.replay()
    cache.check()
    before = {name: store.clone() for name, store in cache.keys.items()}

    for _ in range(10):
        graph.replay()

    assert not out.any()
    assert all(torch.equal(store, before[name]) for name, store in cache.keys.items())
    with pytest.raises(CacheOverflowError, match=r"sequences \[0\] lost tokens"):
        cache.check()


def test_a_graph_of_a_cache_that_grows_is_refused():
    layer, token = layer_of("separate"), torch.randn(1, 1, 256, device="cuda", dtype=torch.bfloat16)
    cache = layer.new_cache(1, 64)
    layer(token, cache=cache)

    with pytest.raises(InputError, match="a CUDA graph captures a step of a cache that grows"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(token, cache=cache)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_steps_reorders_and_growth_never_wait_for_the_gpu():
    layer, x = layer_of("separate"), torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16)
    counts, order = torch.tensor([1, 0], dtype=torch.int32, device="cuda"), torch.tensor([1, 0], device="cuda")
    for cache in (layer.new_cache(2, 400, static=True), layer.new_cache(2)):
        layer(x, cache=cache)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x[:, :1], cache=cache)
            layer(x[:, :1], cache=cache, query_count=counts)
            cache.reorder(order)
            if not cache.is_static:
                layer(x.repeat(1, 4, 1), cache=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")
