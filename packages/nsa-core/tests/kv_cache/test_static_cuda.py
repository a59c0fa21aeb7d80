"""The static cache on a GPU: a captured step replayed a thousand times, steps by graphs of the cache itself, and nothing that waits."""

import pytest
import torch

from nsa_core import BlockGeometry, CacheOverflowError, InputError, NativeSparseAttention, NSAConfig
from nsa_core.kv_cache import streams

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


class FirstDifferences:
    """Compares two caches and their outputs step by step, and keeps the first step at which each tensor differs, so that a failure says all."""

    def __init__(self, cache, reference):
        self.caches, self.found = (cache, reference), {}

    def tensors_of(self, cache):
        stores = cache.stores
        found = {"lengths": cache.lengths, "reached": cache.bounds.reached, "total reads": cache._total_reads}
        for kind in ("keys", "values", "key_scales", "value_scales"):
            found |= {f"{kind} {name}": x for name, x in getattr(stores, kind).items()}
        return found

    def compare(self, t, out, expected):
        """Note what differs after step t; stores are compared by their bits, at every 50th step."""
        pairs = {"out": (out, expected)}
        if t % 50 == 0 or not torch.equal(out, expected):
            mine, other = map(self.tensors_of, self.caches)
            pairs |= {name: (x, other[name]) for name, x in mine.items()}
        for name, (x, y) in pairs.items():
            bits = [each.view(torch.uint8) if each.element_size() == 1 else each for each in (x, y)]
            if name not in self.found and not torch.equal(*bits):
                where = (bits[0] != bits[1]).nonzero()
                self.found[name] = (
                    f"{name}: first at t={t}, {len(where)} of {x.numel()} elements, "
                    f"max abs diff {(x.double() - y.double()).abs().max():.3g}, first element {where[0].tolist()}"
                )

    def check(self):
        assert not self.found, "\n" + "\n".join(self.found.values())


def on_one_stream(monkeypatch):
    """Let captures fork nothing, to tell a race of side streams from a step that differs when it is replayed."""
    monkeypatch.setattr(streams, "fork", lambda device, number, body: body())
    monkeypatch.setattr(streams, "join", lambda device, count: None)


OPTIONS = {"plain": {}, "paged": {"page_size": 64}, "fp8": {"kv_dtype": torch.float8_e4m3fn}}


def two_caches(layer, options, **of_the_first):
    """Return a cache with the options of the first, and one whose steps run eagerly."""
    caches = [layer.new_cache(2, 1200, static=True, **options, **more) for more in (of_the_first, {"step_graphs": False})]
    for cache in caches:
        for b in range(2 if "page_size" in options else 0):
            cache.reserve(b, 1200, length=0)
    return caches


@pytest.mark.parametrize("kv", ["separate", "shared"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("backend", "forks"), [("auto", False), ("auto", True), ("sdpa", False)], ids=["auto", "auto-side-streams", "sdpa"]
)
def test_a_thousand_replays_equal_eager_steps(kv, options, backend, forks):
    layer = layer_of(kv, {} if backend == "auto" else dict.fromkeys(("cmp", "select", "slc", "win"), backend))
    num_steps = 1000 if backend == "auto" and not forks else 100
    x = torch.randn(2, 100 + num_steps, 256, device="cuda", dtype=torch.bfloat16)
    static, eager = two_caches(layer, options, step_graphs=forks)
    assert (static.graphs is not None) == forks
    token = torch.zeros(2, 1, 256, device="cuda", dtype=torch.bfloat16)
    graph, out = captured(layer, static, token)
    for cache in (static, eager):
        layer(x[:, :100], cache=cache)

    differences = FirstDifferences(static, eager)
    for t in range(100, 100 + num_steps):
        token.copy_(x[:, t : t + 1])
        graph.replay()
        differences.compare(t, out, layer(token, cache=eager))

    differences.check()
    assert static.lengths.tolist() == [100 + num_steps] * 2
    assert torch.equal(static.total_reads.actual, eager.total_reads.actual)
    static.check()


@pytest.mark.parametrize("kv", ["separate", "shared"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("forks", [True, False], ids=["side-streams", "one-stream"])
@torch.no_grad()
def test_steps_by_graphs_of_the_cache_equal_eager_steps(kv, options, forks, monkeypatch):
    if not forks:
        on_one_stream(monkeypatch)
    layer, num_steps = layer_of(kv).eval(), 200
    x = torch.randn(2, 100 + num_steps, 256, device="cuda", dtype=torch.bfloat16)
    graphs, eager = two_caches(layer, options)
    counts = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
    for cache in (graphs, eager):
        layer(x[:, :100], cache=cache)

    differences = FirstDifferences(graphs, eager)
    for t in range(100, 100 + num_steps):
        # two forms of step in turn; rows that are not contiguous are rounded otherwise by an eager product with a bias
        token, count = x[:, t : t + 1].contiguous(), counts if t % 5 == 0 else None
        out = layer(token, cache=graphs, query_count=count)
        differences.compare(t, out, layer(token, cache=eager, query_count=count))
        if t == 200:
            for cache in (graphs, eager):
                cache.crop(torch.tensor([3, 1]))

    differences.check()
    assert [graph is not None for graph in graphs.graphs.forms.values()] == [True, True]


@torch.no_grad()
def test_a_users_capture_holds_no_graph_of_the_cache():
    layer, token = layer_of("separate").eval(), torch.randn(2, 1, 256, device="cuda", dtype=torch.bfloat16)
    cache = layer.new_cache(2, 400, static=True, step_graphs=True)

    graph, _ = captured(layer, cache, token)

    # the warm-up steps made one
    assert len(cache.graphs.forms) == 1
    graph.replay()
    layer(token, cache=cache)
    graph.replay()
    assert cache.lengths.tolist() == [3, 3]


@torch.no_grad()
def test_two_caches_with_graphs_take_turns():
    layer = layer_of("separate").eval()
    (first, first_eager), (second, second_eager) = (two_caches(layer, {}, step_graphs=True) for _ in range(2))
    x = torch.randn(2, 60, 256, device="cuda", dtype=torch.bfloat16)

    for t in range(60):
        token = x[:, t : t + 1].contiguous()
        outs = [layer(token * factor, cache=cache) for factor, cache in ((1, first), (2, second))]
        expected = [layer(token * factor, cache=cache) for factor, cache in ((1, first_eager), (2, second_eager))]
        assert all(map(torch.equal, outs, expected)), t


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@torch.no_grad()
def test_replays_of_a_cache_never_wait_for_the_gpu():
    layer, token = layer_of("separate").eval(), torch.randn(2, 1, 256, device="cuda", dtype=torch.bfloat16)
    cache, order = layer.new_cache(2, 400, static=True, step_graphs=True), torch.tensor([1, 0], device="cuda")
    for _ in range(2):
        layer(token, cache=cache)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            layer(token, cache=cache)
        cache.reorder(order)
        layer(token, cache=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.lengths.tolist() == [8, 8]


def test_an_error_in_a_capture_with_forks_is_the_one_that_is_raised():
    layer, token = layer_of("separate"), torch.randn(2, 1, 256, device="cuda", dtype=torch.bfloat16)
    cache = layer.new_cache(2, 400, static=True, step_graphs=True)
    layer(token, cache=cache)

    def fail(*_):
        raise RuntimeError("a projection that fails")

    layer.v_proj["win"].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a projection that fails"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(token, cache=cache)


@torch.no_grad()
def test_a_capture_that_fails_leaves_the_stream_and_eager_steps(monkeypatch):
    layer, x = layer_of("separate").eval(), torch.randn(2, 4, 256, device="cuda", dtype=torch.bfloat16)
    cache, eager = two_caches(layer, {})
    kind = type(layer.gate)
    forward = kind.forward

    def waits(gate, x):
        x.sum().item()
        return forward(gate, x)

    monkeypatch.setattr(kind, "forward", waits)
    stream = torch.cuda.current_stream()
    for t in range(4):
        token = x[:, t : t + 1].contiguous()
        if t == 1:
            with pytest.warns(UserWarning, match="could not be captured as a CUDA graph"):
                out = layer(token, cache=cache)
        else:
            out = layer(token, cache=cache)
        assert torch.cuda.current_stream() == stream
        assert torch.equal(out, layer(token, cache=eager))
        # torch's generator is not left in the capture
        assert torch.rand(3, device="cuda").shape == (3,)


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
