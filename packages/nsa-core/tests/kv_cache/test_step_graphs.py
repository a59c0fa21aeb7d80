"""Captured steps on a CPU, where a stand-in of a CUDA graph runs the recorded step again: graphs equal eager steps and go where they must."""

import contextlib
import copy
import gc
import io
import weakref

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nsa_core import BlockGeometry, InputError, LayerTelemetry, NSAConfig
from nsa_core.kv_cache import step_graphs
from nsa_core.kv_cache.step_graphs import MOST_FORMS, MOST_ROWS, StepGraphs

CONFIG = NSAConfig(8, 4, 2, 6, 5, geometry=BlockGeometry(4, 2, 4, 3, 1, 1, 5), gate_hidden_size=8)
OPTIONS = {"plain": {}, "paged": {"page_size": 4}, "fp8": {"kv_dtype": torch.float8_e4m3fn}, "uncounted": {"count_reads": False}}


def state_of(cache):
    """Every tensor of the cache that a step reads or writes, by name; FP8 numbers by their bits."""
    stores = cache.stores
    found = {"lengths": cache.lengths, "reached": cache.bounds.reached, "last": cache._last_reads, "total": cache._total_reads}
    for kind in ("keys", "values", "key_scales", "value_scales"):
        for name, x in getattr(stores, kind).items():
            found[f"{kind} {name}"] = x.view(torch.uint8) if x.element_size() == 1 else x
    return found


class Rerun:
    """A captured step that runs again: like a graph, capturing changes no tensor, and every replay reads what was there at the capture."""

    def __init__(self, cache):
        self.cache = cache

    def capture(self, body, x):
        before = {name: held.clone() for name, held in state_of(self.cache).items()}
        self.body, self.out = body, torch.full_like(body(), torch.nan)
        for name, held in state_of(self.cache).items():
            held.copy_(before[name])
        return self.out

    def replay(self):
        found = self.body()
        # a graph writes into a tensor of inference mode wherever it is replayed
        with torch.inference_mode():
            self.out.copy_(found)


class Inert:
    """A captured step that does nothing."""

    def capture(self, body, x):
        return torch.zeros_like(x)

    def replay(self):
        pass


def with_graphs(cache):
    """Return the cache and the list of captures that its steps make."""
    made = []
    cache.graphs = StepGraphs(lambda: made.append(Rerun(cache)) or made[-1])
    return cache, made


@pytest.fixture
def steps(random_layer, random_input):
    """A layer, a cache with graphs, its captures, and a function that runs steps of one row and returns the last output."""
    layer = random_layer(CONFIG).eval()
    cache, made = with_graphs(layer.new_cache(2, 60, static=True))

    def run(count=1, **keywords):
        with torch.no_grad():
            for _ in range(count):
                out = layer(random_input(2, 1, 8), cache=cache, **keywords)
        return out

    return layer, cache, made, run


COUNTS = st.one_of(st.none(), st.lists(st.integers(0, 2), min_size=2, max_size=2))
ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 2), COUNTS),
    st.tuples(st.just("prompt"), st.just(MOST_ROWS + 1)),
    st.tuples(st.just("gradients"), st.just(1)),
    st.tuples(st.just("crop"), st.integers(0, 2)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
    st.tuples(st.just("reset"), st.integers(0, 1)),
    st.tuples(st.just("weights"), st.booleans()),
)


def act(layer, cache, action, x):
    """Run one action; return the output of a step."""
    kind, value, *rest = action
    if kind in ("step", "prompt"):
        count = rest[0] if rest else None
        with torch.no_grad():
            given_count = None if count is None else torch.tensor(count, dtype=torch.int32).clamp(max=value)
            return layer(x[:, :value].contiguous(), cache=cache, query_count=given_count)
    if kind == "gradients":
        with torch.enable_grad():
            return layer(x[:, :1].contiguous(), cache=cache)
    if kind == "crop":
        cache.crop(cache.lengths.clamp(max=value))
    elif kind == "reorder":
        cache.reorder(torch.tensor(value))
    elif kind == "reset":
        cache.reset(torch.tensor([value]))
    return None


@pytest.mark.parametrize(
    ("kv", "options"),
    [
        pytest.param(kv, options, marks=pytest.mark.slow if (kv == "shared") != (name in ("paged", "uncounted")) else (), id=f"{kv}-{name}")
        for kv in ("separate", "shared")
        for name, options in OPTIONS.items()
    ],
)
@settings(max_examples=8)
@given(actions=st.lists(ACTIONS, min_size=4, max_size=14), seed=st.integers(0, 1000))
def test_steps_by_graphs_equal_eager_steps(random_layer, kv, options, actions, seed):
    layer = random_layer(attrs.evolve(CONFIG, kv=kv)).eval()
    eager = layer.new_cache(2, 400, static=True, keep_raw=True, **options)
    cache, _ = with_graphs(layer.new_cache(2, 400, static=True, keep_raw=True, **options))
    for paged in (eager, cache):
        for b in range(2 if "page_size" in options else 0):
            paged.reserve(b, 400, length=0)
    if "page_size" in options:
        actions = [action for action in actions if action[0] != "reorder"]
    generator = torch.Generator().manual_seed(seed)
    # the forms are captured before the actions
    for action in [("step", 1, None)] * 2 + [("step", 2, [1, 2])] * 2 + actions:
        x = torch.randn(2, MOST_ROWS + 1, 8, generator=generator, dtype=torch.float64)
        if action[0] == "weights":
            weight = layer.q_proj.weight
            with torch.no_grad():
                weight.mul_(1.5) if action[1] else setattr(layer.q_proj, "weight", nn.Parameter(weight * 0.5))
        expected, found = (act(layer, held, action, x) for held in (eager, cache))

        assert (expected is None) == (found is None)
        assert expected is None or torch.equal(found, expected), action
        for name, held in state_of(cache).items():
            assert torch.equal(held, state_of(eager)[name]), (name, action)


def test_a_form_is_captured_at_its_second_step_and_replayed_after(steps):
    _, cache, made, run = steps
    run()
    assert not made

    run(5)

    assert len(made) == 1
    assert cache.lengths.tolist() == [6, 6]


def test_an_output_stays_when_the_graph_is_replayed(steps):
    _, _, _, run = steps
    run(2)
    out = run()
    kept = out.clone()

    run()

    assert torch.equal(out, kept)


def test_rows_that_are_not_contiguous_come_to_the_eager_step_as_to_a_replay(steps, random_input):
    layer, cache, _, _ = steps
    x, seen = random_input(2, 3, 8)[:, :1], []
    assert not x.is_contiguous()

    with torch.no_grad():
        cache.graphs.run(layer, (cache,), x, None, lambda rows, _: seen.append(rows.is_contiguous()) or rows)

    assert seen == [True]


def replace_a_parameter(layer, cache):
    layer.v_proj["win"].weight = nn.Parameter(layer.v_proj["win"].weight + 1)


def move_a_parameter(layer, cache):
    layer.o_proj.weight.data = layer.o_proj.weight.data * 2


def replace_a_module(layer, cache):
    layer.gate.up = nn.Linear(8, 8, dtype=torch.float64).eval()


def replace_a_store(layer, cache):
    cache.stores.keys["slc"] = cache.stores.keys["slc"].clone()


def replace_the_lengths(layer, cache):
    cache.lengths = cache.bounds.lengths = cache.lengths.clone()


CHANGES = [replace_a_parameter, move_a_parameter, replace_a_module, replace_a_store, replace_the_lengths]


@pytest.mark.parametrize("change", CHANGES)
def test_graphs_are_dropped_where_what_they_read_is_replaced(steps, change):
    layer, cache, made, run = steps
    run(3)

    change(layer, cache)
    run()

    assert len(made) == 1
    assert list(cache.graphs.forms.values()) == [None]
    run()
    assert len(made) == 2


def test_graphs_of_another_layer_are_dropped(steps, random_layer, random_input):
    _, cache, made, run = steps
    run(3)

    with torch.no_grad():
        random_layer(CONFIG).eval()(random_input(2, 1, 8), cache=cache)

    assert len(made) == 1
    assert list(cache.graphs.forms.values()) == [None]


def train(layer):
    layer.train()


def train_a_part(layer):
    layer.gate.train()


def attach_telemetry(layer):
    layer.telemetry = LayerTelemetry()


def replace_a_forward(layer):
    layer.o_proj.forward = lambda x: nn.functional.linear(x, layer.o_proj.weight)


@pytest.mark.parametrize("prepare", [train, train_a_part, attach_telemetry, replace_a_forward])
def test_such_a_layer_is_not_captured(steps, prepare):
    layer, _, made, run = steps
    prepare(layer)

    run(4)

    assert not made


def test_hooks_are_called_at_every_step_and_graphs_come_back_after_them(steps):
    layer, _, made, run = steps
    run(3)
    calls = []

    hook = layer.o_proj.register_forward_hook(lambda *_: calls.append(0))
    run(3)
    hook.remove()
    run(2)

    assert len(calls) == 3
    assert len(made) == 2


def test_steps_with_gradients_under_autocast_or_in_a_capture_are_not_replaced(steps, random_input, monkeypatch):
    layer, cache, made, run = steps
    for _ in range(3):
        with torch.enable_grad():
            layer(random_input(2, 1, 8), cache=cache)
    with torch.autocast("cpu", torch.bfloat16):
        assert not step_graphs._may_replace(random_input(2, 1, 8), None)
    monkeypatch.setattr(step_graphs, "is_captured", lambda device: True)
    run(3)

    assert not made
    assert cache.lengths.tolist() == [6, 6]


def test_a_compiled_step_captures_nothing(steps, random_input):
    layer, cache, made, _ = steps
    step = torch.compile(layer, fullgraph=True, backend="eager")

    with torch.no_grad():
        for _ in range(3):
            step(random_input(2, 1, 8), cache=cache)

    assert not made
    assert cache.lengths.tolist() == [3, 3]


def test_a_cache_keeps_few_graphs_and_drops_the_one_not_used_for_longest(steps, random_input):
    layer, cache, made, run = steps
    run(2)
    with torch.no_grad():
        for rows in range(2, MOST_FORMS + 1):
            layer(random_input(2, rows, 8), cache=cache)
        run()
        layer(random_input(2, MOST_FORMS + 1, 8), cache=cache)

    assert len(made) == 1
    assert [key[0][1] for key in cache.graphs.forms] == [*range(3, MOST_FORMS + 1), 1, MOST_FORMS + 1]


def test_a_count_out_of_range_is_refused_before_the_replay(steps):
    _, cache, _, run = steps
    run(3, query_count=torch.tensor([1, 0], dtype=torch.int32))

    with pytest.raises(InputError, match="leaves 0 .. 1"):
        run(query_count=torch.tensor([2, 0], dtype=torch.int32))

    assert cache.lengths.tolist() == [3, 0]


@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inner", [torch.no_grad, torch.inference_mode])
def test_a_graph_of_inference_mode_serves_outside_of_it(steps, random_input, outer, inner):
    layer, cache, made, _ = steps
    for mode in (outer, outer, inner):
        with mode():
            layer(random_input(2, 1, 8), cache=cache)

    assert len(made) == 1
    assert cache.lengths.tolist() == [3, 3]


def test_a_dropped_cache_is_freed_at_once(random_layer, random_input):
    layer = random_layer(CONFIG).eval()
    cache = layer.new_cache(2, 60, static=True)
    cache.graphs, freed = StepGraphs(Inert), weakref.ref(cache)
    with torch.no_grad():
        for _ in range(3):
            layer(random_input(2, 1, 8), cache=cache)
    gc.disable()
    try:
        del cache
        assert freed() is None
    finally:
        gc.enable()


def saved_and_loaded(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_a_copy_of_a_cache_has_no_graph_and_equals_it(random_layer, random_input, copied):
    layer = random_layer(CONFIG).eval()
    cache = layer.new_cache(2, 60, static=True)
    cache.graphs = StepGraphs(Inert)
    with torch.no_grad():
        for _ in range(3):
            layer(random_input(2, 1, 8), cache=cache)
    assert cache.graphs.forms

    twin = copied(cache)

    assert not twin.graphs.forms
    assert twin.graphs._wiring is None
    for name, held in state_of(twin).items():
        assert torch.equal(held, state_of(cache)[name]), name


@pytest.mark.parametrize("options", [{"static": True}, {"static": False}])
def test_step_graphs_of_a_cache_that_no_graph_can_hold_are_refused(random_layer, options):
    with pytest.raises(InputError, match=r"step_graphs=True with static=.* on cpu"):
        random_layer(CONFIG).new_cache(2, 60, step_graphs=True, **options)


class Failing(Rerun):
    """A capture that fails at its end, so that what it changed on the host is changed."""

    def capture(self, body, x):
        super().capture(body, x)
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("may_fail", [True, False])
def test_after_a_capture_that_fails_steps_run_eagerly_unless_graphs_were_asked_for(may_fail, random_layer, random_input):
    layer, x = random_layer(CONFIG).eval(), random_input(2, 5, 8)
    cache, eager = (layer.new_cache(2, 60, static=True) for _ in range(2))
    cache.graphs = StepGraphs(lambda: Failing(cache), may_fail=may_fail)
    with torch.no_grad():
        for t in range(5):
            if t == 1 and not may_fail:
                with pytest.raises(RuntimeError, match="not permitted"):
                    layer(x[:, 1:2], cache=cache)
                return
            told = pytest.warns(UserWarning, match=r"could not be captured as a CUDA graph \(operation not permitted")
            with told if t == 1 else contextlib.nullcontext():
                out = layer(x[:, t : t + 1], cache=cache)
            assert torch.equal(out, layer(x[:, t : t + 1], cache=eager))
    assert all(torch.equal(held, state_of(eager)[name]) for name, held in state_of(cache).items())
    # a copy tries again
    assert not copy.deepcopy(cache).graphs.has_failed


class Scaled(nn.Linear):
    """A projection with a factor of its own, like an adapter's."""

    factor = 1.0

    def forward(self, x):
        return self.factor * super().forward(x)


def test_steps_of_a_layer_with_unknown_modules_run_eagerly(random_layer, random_input):
    layer, x = random_layer(CONFIG).eval(), random_input(2, 5, 8)
    scaled = Scaled(8, 24, bias=False).eval()
    scaled.weight = layer.q_proj.weight
    layer.q_proj = scaled
    (cache, made), eager = with_graphs(layer.new_cache(2, 60, static=True)), layer.new_cache(2, 60, static=True)
    with torch.no_grad():
        for t in range(5):
            scaled.factor = 1.0 + (t > 2)
            assert torch.equal(layer(x[:, t : t + 1], cache=cache), layer(x[:, t : t + 1], cache=eager))
    assert not made
