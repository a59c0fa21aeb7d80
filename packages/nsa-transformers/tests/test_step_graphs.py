"""Captured steps of a whole model on a CPU, where a stand-in of a CUDA graph runs the recorded step again."""

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


def test_a_changed_weight_and_asked_for_states_are_seen(
    tiny_model: Callable[..., NSAForCausalLM], graphed: Callable[..., Graphed], prompt: Tensor
) -> None:
    model = tiny_model()
    cache = graphed(model)
    token = prompt[:, :1]
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        for _ in range(3):
            model(token, past_key_values=cache)
        assert (cache.captures, cache.replays) == (1, 2)

        # the next step runs eagerly, since a graph may have read the old weight
        model.blocks[1].mlp.up.weight = torch.nn.Parameter(model.blocks[1].mlp.up.weight * 2)
        model(token, past_key_values=cache)
        assert (cache.captures, cache.replays) == (1, 2)
        model(token, past_key_values=cache)
        assert (cache.captures, cache.replays) == (2, 3)

        # from now on Transformers' hooks are on the layers
        states = model(token, past_key_values=cache, output_hidden_states=True).hidden_states
        assert len(states) == 3
        model(token, past_key_values=cache)
        assert (cache.captures, cache.replays) == (2, 3)
