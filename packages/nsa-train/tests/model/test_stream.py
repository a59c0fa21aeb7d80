"""The text of a prompt as it comes: equal to the batch of samples, whole characters, stops, static caches."""

import pytest
import torch
from torch import Tensor

from nsa_train.data.tokenizer import ByteTokenizer
from nsa_train.model.decoder import Decoder, build_model
from nsa_train.model.generate import draw, generate
from nsa_train.model.stream import CachedSteps, Sampling, TextStream

TOKENIZER = ByteTokenizer()
attentions = pytest.mark.parametrize("attention", ["nsa", "dense"])


@pytest.fixture
def model(tiny_config, attention: str) -> Decoder:
    torch.manual_seed(0)
    model = build_model(tiny_config(f"model.attention={attention}")).eval()
    with torch.no_grad():
        # sharper than fresh weights, so that greedy choices are not near ties
        model.embedding.weight.mul_(20)
    return model


def _prompt(text: str) -> Tensor:
    return TOKENIZER.encode(text.encode())


@attentions
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_pieces_add_up_to_the_text_of_generate(model: Decoder, temperature: float) -> None:
    [drawn] = generate(model, [_prompt("The quick")], tokenizer=TOKENIZER, num_tokens=40, temperature=temperature, seed=3)
    stream = TextStream(model, TOKENIZER, _prompt("The quick"), Sampling(40, temperature, seed=3))
    pieces = list(stream)
    assert "".join(pieces) == TOKENIZER.decode(drawn.ids)
    assert len(pieces) > 5
    assert stream.num_tokens == len(drawn.ids)
    assert stream.toks_per_s > 0


class Written(CachedSteps):
    """Logits that ask for the bytes of a text, one after another."""

    text = b""

    def prefill(self, prompt: Tensor) -> Tensor:
        self._place = 0
        return self._logits()

    def step(self, index: int) -> Tensor:
        self._place += 1
        return self._logits()

    def _logits(self) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor([self.text[self._place]]), 258) * 9.0


def _pieces(monkeypatch: pytest.MonkeyPatch, model: Decoder, text: bytes, *stops: str) -> list[str]:
    monkeypatch.setattr(Written, "text", text)
    monkeypatch.setattr("nsa_train.model.stream.CachedSteps", Written)
    return [piece for piece in TextStream(model, TOKENIZER, _prompt("x"), Sampling(len(text), 0, stops=stops)) if piece]


@pytest.mark.parametrize("attention", ["dense"])
def test_a_character_comes_whole(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "aé東🙂b"
    assert _pieces(monkeypatch, model, text.encode()) == list(text)
    # bytes that are no text, in the middle and at the end
    broken = b"a\xe6b" + b"\x80" * 20 + b"\xf0\x9f"
    assert "".join(_pieces(monkeypatch, model, broken)) == broken.decode(errors="replace")


@pytest.mark.parametrize("attention", ["dense"])
@pytest.mark.parametrize(
    ("stops", "expected"), [(("three",), "one two "), (("wo", "two"), "one "), (("onx", "4"), "one two three"), (("e!",), "one two three")]
)
def test_a_stop_ends_the_text_and_is_left_out(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, stops: tuple[str, ...], expected: str
) -> None:
    assert "".join(_pieces(monkeypatch, model, b"one two three", *stops)) == expected


def test_the_likeliest_tokens_alone_are_drawn() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1] + [1e-9] * 254]))
    for top_p, most in ((0.3, 1), (0.5, 2), (0.75, 3), (1.0, 4)):
        generator = torch.Generator().manual_seed(0)
        found = {int(draw(logits.clone(), TOKENIZER, 1.0, generator, top_p)) for _ in range(200)}
        assert found == set(range(most))


@attentions
def test_steps_over_static_caches_give_the_logits_of_the_whole(model: Decoder) -> None:
    ids = _prompt("The quick brown fox").long()
    steps = CachedSteps(model, len(ids))
    with torch.no_grad():
        found = [steps.prefill(ids[:7]), *(steps.step(int(index)) for index in ids[7:])]
        torch.testing.assert_close(torch.cat(found), model(ids[None])[0, 6:], rtol=1e-4, atol=1e-4)


@pytest.mark.hardware(capability=(8, 0))
@attentions
def test_a_graph_on_a_gpu_gives_the_tokens_of_the_cpu(model: Decoder) -> None:
    texts = ["".join(TextStream(model.to(device), TOKENIZER, _prompt("The quick"), Sampling(24, 0))) for device in ("cpu", "cuda")]
    assert texts[0] == texts[1]
