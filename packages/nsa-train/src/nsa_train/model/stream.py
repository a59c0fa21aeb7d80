"""Stream the continuation of one prompt: static caches, one step per token, a CUDA graph of the step on a GPU."""

import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core import NativeSparseAttention
from nsa_train.data.tokenizer import Tokenizer
from nsa_train.errors import ConfigError
from nsa_train.model.decoder import Decoder
from nsa_train.model.generate import BROKEN, draw

REPLACED = "\ufffd"
"""Ends a text whose last character is not complete yet."""
MOST_HELD = 16
"""Maximum number of tokens that wait for a complete character."""
WARM_UP = 2
"""Steps before a capture, in which kernels are compiled."""


class Sampling(NamedTuple):
    """How tokens are drawn, and when the continuation ends."""

    num_tokens: int = 200
    """Maximum number of tokens to add (>= 1)."""
    temperature: float = 1.0
    """Temperature; 0 takes the most likely token."""
    top_p: float = 1.0
    """Draw only among the most likely tokens whose probabilities add up to this (nucleus sampling)."""
    seed: int = 0
    stops: tuple[str, ...] = ()
    """Texts that end the continuation; they are not part of it."""


class TextStream:
    """Iterator over pieces of the continuation of a prompt `(P,)` of at least one token; iterate over it once.

    It ends before the separator, before a stop text, if the logits are not finite, or after `num_tokens`.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, prompt: Tensor, sampling: Sampling) -> None:
        """Use `model`, which is in evaluation mode, on its device."""
        self._model, self._tokenizer, self._prompt, self._sampling = model, tokenizer, prompt, sampling
        self.num_tokens = 0
        """Tokens of the continuation so far, the separator left out."""
        self.is_cut = False
        """True if the logits were not finite."""
        self.prompt_s, self.seconds = 0.0, 0.0
        """Seconds until the first token, and from then on."""

    @property
    def toks_per_s(self) -> float:
        """Return tokens per second, without the first token."""
        return (self.num_tokens - 1) / self.seconds if self.num_tokens > 1 and self.seconds > 0 else 0.0

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces."""
        held = ""
        for piece in self._characters():
            held += piece
            if (start := self._first_stop(held)) is not None:
                yield held[:start]
                return
            ready = len(held) - self._begun_stop(held)
            yield held[:ready]
            held = held[ready:]
        yield held

    def _characters(self) -> Iterator[str]:
        """Yield the text of the tokens, whole characters at a time."""
        held: list[int] = []
        for index in self._ids():
            held.append(index)
            text = self._tokenizer.decode(torch.tensor(held))
            if not text.endswith(REPLACED) or len(held) >= MOST_HELD:
                held = []
                yield text
        if held:
            yield self._tokenizer.decode(torch.tensor(held))

    @torch.no_grad()
    def _ids(self) -> Iterator[int]:
        if any(isinstance(module, NativeSparseAttention) for module in self._model.modules()):
            # the first call of a custom op imports it; that takes seconds, and is not the time of a prompt
            import_module("torch._dynamo")
        sampling, started = self._sampling, time.perf_counter()
        generator = torch.Generator().manual_seed(sampling.seed)
        steps = CachedSteps(self._model, len(self._prompt) + sampling.num_tokens)
        logits, first = steps.prefill(self._prompt), started
        for number in range(sampling.num_tokens):
            [index] = draw(logits, self._tokenizer, sampling.temperature, generator, sampling.top_p).tolist()
            now = time.perf_counter()
            if number == 0:
                self.prompt_s, first = now - started, now
            self.is_cut = index == BROKEN
            if self.is_cut or index == self._tokenizer.separator:
                return
            # only tokens of the text are timed
            self.num_tokens, self.seconds = self.num_tokens + 1, now - first
            yield index
            if number + 1 < sampling.num_tokens:
                logits = steps.step(index)

    def _first_stop(self, text: str) -> int | None:
        return min((start for stop in self._sampling.stops if (start := text.find(stop)) >= 0), default=None)

    def _begun_stop(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop."""
        lengths = (size for stop in self._sampling.stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(lengths, default=0)


def torch_device(name: str) -> torch.device:
    """Return the device "cpu" or "cuda".

    Raises:
        ConfigError: if it is "cuda" and there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device='cuda' finds no CUDA GPU here; use --device cpu")
    return torch.device(name)


class CachedSteps:
    """Computes the logits of one sequence, token after token, over static caches; on a GPU a step is a replayed CUDA graph."""

    def __init__(self, model: Decoder, max_seqlen: int) -> None:
        """Allocate for `max_seqlen` tokens."""
        self._model, self._device = model, model.embedding.weight.device
        self._caches = model.new_caches(1, max_seqlen, static=True, count_reads=False)
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._replay = self._captured() if self._device.type == "cuda" else None

    def prefill(self, prompt: Tensor) -> Tensor:
        """Return the logits `(1, V)` after `prompt` `(P,)`."""
        x = self._model.embedding(prompt.long().to(self._device)[None])
        return self._model.logits(self._model.hidden(x, caches=self._caches)[:, -1])

    def step(self, index: int) -> Tensor:
        """Return the logits `(1, V)` after the token `index`."""
        self._token.fill_(index)
        return self._run() if self._replay is None else self._replay()

    def _run(self) -> Tensor:
        logits: Tensor = self._model(self._token, caches=self._caches)
        return logits[:, -1]

    def _captured(self) -> Callable[[], Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        for cache in self._caches:
            cache.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._run()
        for cache in self._caches:
            cache.reset()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
