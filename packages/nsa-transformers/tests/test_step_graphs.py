"""Captured steps of a whole model on a CPU, where a stand-in of a CUDA graph runs the recorded step again."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_core.kv_cache.step_graphs import StepGraphs
from nsa_transformers import NSAForCausalLM, NSAModelCache
from nsa_transformers.cache import GRAPH_MODULES

COUNT = 9


def tensors_of(part: Any) -> Iterator[Tensor]:
    """Yield the tensors of a cache and of its stores."""
    for value in vars(part).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from (each for each in value.values() if isinstance(each, Tensor))
        elif hasattr(value, "__dict__") and type(value).__module__.startswith("nsa_core.kv_cache"):
            yield from tensors_of(value)


class Rerun:
    """A captured step that runs again: like a graph, capturing changes no tensor, and a replay reads what was there at the capture."""

    def __init__(self, cache: "Graphed") -> None:
        self.cache = cache

    def capture(self, body: Callable[[], Tensor], x: Tensor) -> Tensor:
        held = [tensor for layer in self.cache.layers for tensor in tensors_of(layer.store)]
        before = [tensor.clone() for tensor in held]
        self.body, self.out = body, torch.full_like(body(), torch.nan)
        for tensor, old in zip(held, before, strict=True):
            tensor.copy_(old)
        return self.out

    def replay(self) -> None:
        self.cache.replays += 1
        self.out.copy_(self.body())


class Graphed(NSAModelCache):
    """A static cache that captures on a CPU too."""

    captures = replays = 0

    def _start_layers(self, attentions: list[Any], x: Tensor) -> None:
        super()._start_layers(attentions, x)
        assert self.graphs is None
        self.graphs = StepGraphs(self._capture, known=GRAPH_MODULES)

    def _capture(self) -> Rerun:
        self.captures += 1
        return Rerun(self)


@pytest.fixture
def graphed() -> Callable[..., Graphed]:
    """A function from a model to a static cache for 40 tokens that captures its steps."""
    return lambda model: Graphed(model.config, 40, static=True)


@torch.no_grad()
def stepped(model: NSAForCausalLM, graphed: Callable[..., Graphed], prompt: Tensor) -> Graphed:
    """Return a cache that holds the prompt and three more tokens: an eager step, one that is captured, a replay."""
    cache = graphed(model)
    model(prompt, past_key_values=cache)
    for _ in range(3):
        model(prompt[:, :1], past_key_values=cache)
    return cache


@pytest.mark.parametrize("kind", ["nsa", "shared", "mixed", "dense"])
def test_captured_steps_give_the_tokens_from_scratch(
    tiny_model: Callable[..., NSAForCausalLM],
    graphed: Callable[..., Graphed],
    prompt: Tensor,
    from_scratch: Callable[..., Tensor],
    kind: str,
) -> None:
    model = tiny_model(kind)
    cache = graphed(model)

    found = model.generate(prompt, past_key_values=cache, max_new_tokens=COUNT, do_sample=False)

    assert torch.equal(found, from_scratch(model, prompt, COUNT))
    # the first step runs eagerly, the second is captured
    assert (cache.captures, cache.replays) == (1, COUNT - 2)
    assert int(cache.get_seq_length()) == 20 + COUNT - 1
    assert cache.layers[0].length is cache.layers[1].length


def test_drafts_that_are_taken_back_leave_no_trace_in_captured_steps(
    tiny_model: Callable[..., NSAForCausalLM], graphed: Callable[..., Graphed], from_scratch: Callable[..., Tensor]
) -> None:
    model = tiny_model()
    cache = graphed(model)
    # a prompt that repeats itself, so that drafts are found in it
    prompt = torch.arange(4).repeat(5)[None]

    found = model.generate(prompt, past_key_values=cache, max_new_tokens=COUNT, do_sample=False, prompt_lookup_num_tokens=2)

    assert torch.equal(found, from_scratch(model, prompt, COUNT))
    assert cache.replays > 0


def test_captured_steps_equal_those_of_a_cache_without_graphs(
    tiny_model: Callable[..., NSAForCausalLM], graphed: Callable[..., Graphed], prompt: Tensor
) -> None:
    model = tiny_model()
    cache, twin = graphed(model), NSAModelCache(model.config, 40, static=True)
    tokens = torch.randint(0, 40, (30, 2, 1), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :7] = 0

    def step(number: int) -> Tensor:
        found, expected = (model(tokens[number], past_key_values=each).logits for each in (cache, twin))
        assert torch.equal(found, expected), number
        assert int(cache.get_seq_length()) == int(twin.get_seq_length())
        return found

    with torch.no_grad():
        for each in (cache, twin):
            model(prompt, attention_mask=mask, past_key_values=each)
        for number in range(4):
            step(number)
        for each in (cache, twin):
            each.crop(-2)
        step(4)
        for each in (cache, twin):
            each.reorder_cache(torch.tensor([1, 1]))
        first, second = step(5)
        assert not torch.equal(first, second)
        for each in (cache, twin):
            each.reset()
            model(prompt[:, :9], past_key_values=each)
        step(6)
        assert (cache.captures, cache.replays) == (1, 6)


def test_a_copy_starts_without_graphs(tiny_model: Callable[..., NSAForCausalLM], graphed: Callable[..., Graphed], prompt: Tensor) -> None:
    model, token = tiny_model(), prompt[:, :1]
    cache = stepped(model, graphed, prompt)
    with torch.no_grad():
        copied = copy.deepcopy(cache)
        assert copied.graphs is not None
        assert not copied.graphs.forms
        assert copied.layers[0].length is copied.layers[1].length
        assert copied.layers[0].length is not cache.layers[0].length

        expected = model(token, past_key_values=cache).logits
        assert torch.equal(model(token, past_key_values=copied).logits, expected)


def test_a_replaced_weight_is_seen(tiny_model: Callable[..., NSAForCausalLM], graphed: Callable[..., Graphed], prompt: Tensor) -> None:
    model, token = tiny_model(), prompt[:, :1]
    cache = stepped(model, graphed, prompt)
    with torch.no_grad():
        assert (cache.captures, cache.replays) == (1, 2)

        model.blocks[1].mlp.up.weight = torch.nn.Parameter(model.blocks[1].mlp.up.weight * 2)
        # eager, then captured again
        for counts in ((1, 2), (2, 3)):
            model(token, past_key_values=cache)
            assert (cache.captures, cache.replays) == counts


def test_a_model_that_recorded_states_replays_no_step_from_then_on(
    tiny_model: Callable[..., NSAForCausalLM], graphed: Callable[..., Graphed], prompt: Tensor
) -> None:
    model, token = tiny_model(), prompt[:, :1]
    cache = stepped(model, graphed, prompt)
    with torch.no_grad():
        assert len(model(token, past_key_values=cache, output_hidden_states=True).hidden_states) == 3
        # Transformers leaves its hooks on the layers
        model(token, past_key_values=cache)
    assert (cache.captures, cache.replays) == (1, 2)


class Scaled(NSAForCausalLM):
    """A model with a factor that no graph would notice."""

    factor = 1.0

    def hidden(self, *inputs: Any, **options: Any) -> Tensor:
        return self.factor * super().hidden(*inputs, **options)


def test_a_subclass_with_layers_of_its_own_is_not_captured(
    tiny_model: Callable[..., NSAForCausalLM], graphed: Callable[..., Graphed], prompt: Tensor
) -> None:
    model = tiny_model()
    model.__class__ = Scaled
    cache = stepped(model, graphed, prompt)
    assert (cache.captures, cache.replays) == (0, 0)


@pytest.mark.hardware(capability=(8, 0))
@pytest.mark.parametrize("kind", ["nsa", "shared", "mixed"])
def test_a_models_graphs_give_the_tokens_of_eager_steps(tiny_model: Callable[..., NSAForCausalLM], prompt: Tensor, kind: str) -> None:
    model = tiny_model(kind, hidden_size=64).cuda()
    ids, mask = prompt.cuda(), torch.ones_like(prompt).cuda()
    mask[0, :7] = 0
    asked = {"max_new_tokens": COUNT, "do_sample": False, "return_dict_in_generate": True}
    cases: list[dict[str, Any]] = [{}, {"attention_mask": mask}, {"num_beams": 2}]
    for options in cases:
        caches = [NSAModelCache(model.config, 40, static=True, step_graphs=step_graphs) for step_graphs in (True, False)]
        if "num_beams" in options:
            # beams repeat the batch, and a static cache keeps its own
            found = [model.generate(ids, cache_implementation=name, **asked, **options).sequences for name in ("static", "dynamic")]
        else:
            found = [model.generate(ids, past_key_values=cache, **asked, **options).sequences for cache in caches]
            assert caches[0].graphs is not None
            assert any(graph is not None for graph in caches[0].graphs.forms.values())
            assert caches[1].graphs is None
        assert torch.equal(*found), options
    cache = caches[0]
    cache.reset()
    again = model.generate(ids, past_key_values=cache, **asked).sequences
    assert torch.equal(again, model.generate(ids, cache_implementation="dynamic", **asked).sequences)
