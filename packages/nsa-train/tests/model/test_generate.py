"""Sampling: seeded, through the cache, equal to recomputing the whole text at every step."""

import pytest
import torch
from torch import Tensor

from nsa_train.data.tokenizer import PAD, SEPARATOR, ByteTokenizer
from nsa_train.model.decoder import Decoder, build_model
from nsa_train.model.generate import generate

attentions = pytest.mark.parametrize("attention", ["nsa", "dense"])
TOKENIZER = ByteTokenizer()


@pytest.fixture
def model(tiny_config, attention: str) -> Decoder:
    torch.manual_seed(0)
    model = build_model(tiny_config(f"model.attention={attention}"))
    with torch.no_grad():
        # sharper than fresh weights, so that greedy choices are not near ties
        model.embedding.weight.mul_(20)
    return model


def _prompt(text: str) -> Tensor:
    return TOKENIZER.encode(text.encode())


def _greedy_without_cache(model: Decoder, prompt: Tensor, num_tokens: int) -> list[int]:
    ids = prompt.long()
    for _ in range(num_tokens):
        logits = model(ids[None])[0, -1].clone()
        logits[PAD] = -torch.inf
        ids = torch.cat([ids, logits.argmax()[None]])
    return ids[len(prompt) :].tolist()


@attentions
def test_cached_decode_equals_the_full_forward(model: Decoder) -> None:
    for length in (1, 3, 4, 9, 20):
        prompt = _prompt("The quick brown fox jumps")[:length]
        [drawn] = generate(model, [prompt], tokenizer=TOKENIZER, num_tokens=24, temperature=0)
        expected = _greedy_without_cache(model, prompt, 24)
        assert drawn.ids.tolist() == expected[: expected.index(SEPARATOR) if SEPARATOR in expected else None]


@attentions
def test_a_batch_of_prompts_equals_each_alone(model: Decoder) -> None:
    prompts = [_prompt(text) for text in ("a", "The quick brown", "seven!!")]
    together = generate(model, prompts, tokenizer=TOKENIZER, num_tokens=16, temperature=0)
    alone = [generate(model, [prompt], tokenizer=TOKENIZER, num_tokens=16, temperature=0)[0] for prompt in prompts]
    assert [drawn.ids.tolist() for drawn in together] == [drawn.ids.tolist() for drawn in alone]


@attentions
def test_equal_seeds_give_equal_text(model: Decoder) -> None:
    texts = [generate(model, [_prompt("x")], tokenizer=TOKENIZER, num_tokens=20, seed=seed)[0].ids.tolist() for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


@attentions
def test_a_text_ends_before_the_separator_and_never_pads(model: Decoder) -> None:
    with torch.no_grad():
        # every state now points at the pad first, then at the separator
        model.norm.weight.zero_()
        model.embedding.weight.zero_()
    biased = model.forward

    def forward(*args: object, **kwargs: object) -> Tensor:
        logits = biased(*args, **kwargs)
        logits[..., PAD], logits[..., SEPARATOR] = 9.0, 5.0
        return logits

    model.forward = forward
    [drawn] = generate(model, [_prompt("x")], tokenizer=TOKENIZER, num_tokens=8, temperature=0)
    assert drawn.ids.tolist() == []


@attentions
def test_sampling_leaves_the_model_in_training(model: Decoder) -> None:
    model.train()
    generate(model, [_prompt("x")], tokenizer=TOKENIZER, num_tokens=2)
    assert model.training
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()


@attentions
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_text_ends_where_the_logits_are_not_finite(model: Decoder, temperature: float, bad: float) -> None:
    sound, calls = model.forward, 0

    def forward(*args: object, **kwargs: object) -> Tensor:
        nonlocal calls
        calls += 1
        logits = sound(*args, **kwargs)
        logits[..., SEPARATOR] = -1e4
        if calls == 3:
            logits[0, -1, 7] = bad
        return logits

    model.forward = forward
    broken, whole = generate(model, [_prompt("x"), _prompt("y")], tokenizer=TOKENIZER, num_tokens=8, temperature=temperature)
    assert (len(broken.ids), broken.is_cut) == (2, True)
    assert (len(whole.ids), whole.is_cut) == (8, False)
    assert calls == 8


@attentions
def test_logits_at_the_end_of_float32_can_be_drawn_from(model: Decoder) -> None:
    sound = model.forward

    def forward(*args: object, **kwargs: object) -> Tensor:
        logits = torch.full_like(sound(*args, **kwargs), -3e38)
        logits[..., 65] = 3e38
        return logits

    model.forward = forward
    [drawn] = generate(model, [_prompt("x")], tokenizer=TOKENIZER, num_tokens=3, temperature=0.5)
    assert drawn.ids.tolist() == [65] * 3
