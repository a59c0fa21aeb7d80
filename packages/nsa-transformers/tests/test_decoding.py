"""The loop that starts a step before it reads whether the text has ended, against the loop of Transformers; on a CPU it is asked for by name."""

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig

from nsa_transformers import NSAForCausalLM, NSAModelCache, modeling
from nsa_transformers.decoding import may_decode_ahead

COUNT = 12
PAD = 49
PADDED = torch.tensor([[0] * 7 + [1] * 13, [1] * 20])


class Streamed:
    """A streamer that keeps what comes."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.has_ended = True


class Penalty:
    """A processor of logits that counts its calls and changes the choice."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.scatter(1, input_ids[:, -4:], -torch.inf)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tensor]]:
    """A function that generates by the loop under test; the plain loop serves every other call."""
    runs: list[bool] = []

    def generate(model: NSAForCausalLM, ids: Tensor, **options: Any) -> Tensor:
        with monkeypatch.context() as patched:
            patched.setattr(modeling, "may_decode_ahead", lambda *_: True)
            patched.setattr(modeling, "decode_ahead", lambda *args, **kw: runs.append(True) or decode_ahead(*args, **kw))
            return model.generate(ids, **options)

    decode_ahead = modeling.decode_ahead
    yield generate
    assert runs, "the loop under test did not run"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_mask": PADDED},
        {"prefill_chunk_size": 7},
        {"max_new_tokens": 1},
        {"max_time": 1e-9},
        {"num_return_sequences": 3, "do_sample": True, "top_p": 0.9},
    ],
    ids=["greedy", "padded", "in chunks", "one token", "out of time", "sampled"],
)
@pytest.mark.parametrize("kind", ["nsa", "shared", "mixed"])
def test_tokens_and_random_numbers_are_those_of_the_plain_loop(
    tiny_model: Callable[..., NSAForCausalLM], prompt: Tensor, ahead: Callable[..., Tensor], kind: str, options: dict[str, Any]
) -> None:
    model = tiny_model(kind)
    found, states, processors = [], [], (Penalty(), Penalty())
    for generate, processor in zip((ahead, NSAForCausalLM.generate), processors, strict=True):
        torch.manual_seed(5)
        asked = {"do_sample": False, "max_new_tokens": COUNT, **options}
        found.append(generate(model, prompt, cache_implementation="static", logits_processor=[processor], **asked))
        states.append(torch.get_rng_state())

    assert torch.equal(*found)
    assert torch.equal(*states)
    assert processors[0].calls == processors[1].calls == found[0].shape[1] - 20


def test_embedded_prompts_give_the_tokens_of_the_plain_loop(
    tiny_model: Callable[..., NSAForCausalLM], prompt: Tensor, ahead: Callable[..., Tensor]
) -> None:
    model = tiny_model()
    asked = {"inputs_embeds": model.embedding(prompt).detach(), "do_sample": False, "max_new_tokens": COUNT}

    found = ahead(model, None, cache_implementation="static", **asked)

    assert torch.equal(found, model.generate(prompt, do_sample=False, max_new_tokens=COUNT)[:, 20:])


@pytest.mark.parametrize("first", [0, 1, 5], ids=["at once", "after two", "after six"])
def test_texts_that_end_leave_the_tokens_the_stream_and_the_cache_of_the_plain_loop(
    tiny_model: Callable[..., NSAForCausalLM], prompt: Tensor, ahead: Callable[..., Tensor], first: int
) -> None:
    model = tiny_model()
    whole = model.generate(prompt, do_sample=False, max_new_tokens=COUNT)[:, 20:]
    # the sequences end at different tokens, the first one `first + 1` tokens after the prompt
    stops = [int(whole[0, first]), int(whole[1, 7])]
    found = []
    for generate in (ahead, NSAForCausalLM.generate):
        cache, streamer = NSAModelCache(model.config, 20 + COUNT, static=True), Streamed()
        ids = prompt if first else prompt[:1]
        tokens = generate(
            model, ids, past_key_values=cache, do_sample=False, max_new_tokens=COUNT, eos_token_id=stops, pad_token_id=PAD,
            **({} if first else {"streamer": streamer}),
        )  # fmt: skip
        cache.check()
        with torch.no_grad():
            after = model(tokens[:, -1:], past_key_values=cache).logits
        found.append(SimpleNamespace(tokens=tokens, streamer=streamer, length=int(cache.get_seq_length()), after=after))
    new, plain = found

    assert new.tokens.shape[1] < 20 + COUNT
    assert torch.equal(new.tokens, plain.tokens)
    assert new.length == plain.length == new.tokens.shape[1]
    assert torch.equal(new.after, plain.after)
    assert new.streamer.pieces == plain.streamer.pieces
    assert new.streamer.has_ended == plain.streamer.has_ended == (not first)


def test_a_stream_brings_each_token_once(tiny_model: Callable[..., NSAForCausalLM], prompt: Tensor, ahead: Callable[..., Tensor]) -> None:
    streamer = Streamed()
    found = ahead(tiny_model(), prompt[:1], cache_implementation="static", do_sample=False, max_new_tokens=COUNT, streamer=streamer)

    assert streamer.has_ended
    assert streamer.pieces == [found[0, :20].tolist(), *([token] for token in found[0, 20:].tolist())]


def test_only_tokens_over_a_static_cache_on_a_gpu_are_decoded_ahead(tiny_model: Callable[..., NSAForCausalLM]) -> None:
    config, gpu = tiny_model().config, torch.device("cuda")
    static = {"past_key_values": NSAModelCache(config, 40, static=True)}
    plain = {"return_dict_in_generate": False, "is_assistant": False, "compile_config": None}

    def answer(kwargs: dict[str, Any], device: torch.device = gpu, **options: Any) -> bool:
        return may_decode_ahead(kwargs, SimpleNamespace(**{**plain, **options}), device)

    assert answer(static)
    assert not answer(static, torch.device("cpu"))
    assert not answer({"past_key_values": NSAModelCache(config)})
    assert not answer({})
    assert not answer({"past_key_values": NSAModelCache(config, 40, static=True, max_rollback=0)})
    assert not answer(static, return_dict_in_generate=True)
    assert not answer(static, is_assistant=True)
    assert not answer(static, compile_config=CompileConfig())


@pytest.mark.parametrize("name", modeling.STEP)
@pytest.mark.parametrize("on_class", [True, False], ids=["subclass", "instance"])
def test_a_step_that_others_change_runs_in_the_plain_loop(
    tiny_model: Callable[..., NSAForCausalLM], prompt: Tensor, monkeypatch: pytest.MonkeyPatch, name: str, on_class: bool
) -> None:
    model = tiny_model()
    calls, plain = [], getattr(model, name)
    expected = model.generate(prompt, do_sample=False, max_new_tokens=COUNT)

    def changed(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return plain(*args[on_class:], **kwargs)

    changed.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    if on_class:
        model.__class__ = type("Changed", (NSAForCausalLM,), {name: changed})
    else:
        setattr(model, name, changed)
    monkeypatch.setattr(modeling, "may_decode_ahead", lambda *_: True)

    found = model.generate(prompt, cache_implementation="static", do_sample=False, max_new_tokens=COUNT)

    assert torch.equal(found, expected)
    assert len(calls) >= COUNT - 1


@pytest.mark.hardware(capability=(8, 0))
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kind", ["nsa", "shared", "mixed"])
def test_no_step_on_a_gpu_waits_for_its_token(tiny_model: Callable[..., NSAForCausalLM], prompt: Tensor, kind: str) -> None:
    model = tiny_model(kind, hidden_size=64).cuda()
    ids = prompt.cuda()
    cache = NSAModelCache(model.config, 20 + COUNT, static=True)
    expected = model.generate(ids, cache_implementation="dynamic", do_sample=False, max_new_tokens=COUNT)
    steps = 0

    def forbid_waits(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        nonlocal steps
        steps += 1
        # the step has been captured by then
        if steps == 4:
            torch.cuda.set_sync_debug_mode("error")
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    try:
        found = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=COUNT, stopping_criteria=[forbid_waits])
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert steps == COUNT
    assert cache.graphs is not None
    assert any(graph is not None for graph in cache.graphs.forms.values())
    assert torch.equal(found, expected)
    assert int(cache.get_seq_length()) == 20 + COUNT - 1
