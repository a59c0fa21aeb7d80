"""Models to evaluate: one that continues what it has seen before, and a tiny one with random weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa_train.checkpoint.models import OpenedModel
from nsa_train.data.tokenizer import ByteTokenizer
from nsa_train.evaluation.options import EvalOptions
from nsa_train.evaluation.subject import Subject
from nsa_train.model.decoder import build_model
from nsa_train.settings.config import RunConfig

CPU = torch.device("cpu")


class Held:
    """The ids that a sequence has so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def crop(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` ids."""
        del self.ids[len(self.ids) - num_tokens :]


class Continuation(nn.Module):
    """Answers with the id that followed the longest earlier match of the last ids (the latest such match), else with id 0."""

    def __init__(self) -> None:
        super().__init__()
        size = ByteTokenizer.vocab_size
        self.embedding = nn.Embedding(size, size, _weight=torch.eye(size))
        self.blocks: list[Any] = []

    def new_caches(self, batch_size: int, max_seqlen: int, **_: Any) -> list[Held]:
        """Return the empty memory of one sequence."""
        assert batch_size == 1
        return [Held()]

    def hidden(self, x: Tensor, *_: Any, caches: list[Held] | None = None) -> Tensor:
        """Return one-hot answers after each of the one-hot ids `x` `(1, S, V)`."""
        [held] = caches or [Held()]
        answers = []
        for index in x[0].argmax(-1).tolist():
            held.ids.append(index)
            answers.append(self._next(held.ids))
        return self.embedding(torch.tensor(answers))[None]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits that put nearly all the weight on the answer."""
        return 50 * hidden

    @staticmethod
    def _next(ids: list[int]) -> int:
        def matched(end: int) -> int:
            size = 0
            while size < end and ids[end - 1 - size] == ids[-1 - size]:
                size += 1
            return size

        ends = [(matched(end), end) for end in range(1, len(ids))]
        longest, end = max(ends, default=(0, 0))
        return ids[end] if longest else 0


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """Compute as `evaluate` does."""
    with torch.no_grad():
        yield


@pytest.fixture
def continuing() -> Callable[..., Subject]:
    """A function from options to the subject whose model continues what it has seen before."""

    def build(config: RunConfig | None = None, **options: Any) -> Subject:
        model: Any = Continuation()
        return Subject(OpenedModel(model, ByteTokenizer(), 512, Path("model"), None, config), EvalOptions(**options), CPU)

    return build


@pytest.fixture
def random_subject(tiny_config: Callable[..., RunConfig]) -> Callable[..., Subject]:
    """A function from overrides of the tiny recipe, and options, to a subject with random weights far from the initial ones."""

    def build(*overrides: str, **options: Any) -> Subject:
        torch.manual_seed(0)
        config = tiny_config(*overrides)
        model = build_model(config).eval()
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
        longest = config.model.max_position or config.train.seq_len
        return Subject(OpenedModel(model, ByteTokenizer(), longest, Path("model"), None, config), EvalOptions(**options), CPU)

    return build


@pytest.fixture
def needle_config(tiny_config: Callable[..., RunConfig]) -> RunConfig:
    """A recipe of associative recall."""
    return tiny_config(
        "data.path=", "data.source=needle", "data.needle_symbols=16", "data.needle_pairs=4", "data.needle_queries=2",
        "data.needle_tokens=2", "train.seq_len=64",
    )  # fmt: skip
