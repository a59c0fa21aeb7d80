"""Recall: a model that continues what it has seen before answers all, one with random weights nothing, and modes change the asking alone."""

from collections.abc import Callable

import pytest
import torch

from nsa_train.data.tokenizer import ByteTokenizer
from nsa_train.evaluation.options import Mode
from nsa_train.evaluation.recall import copy, least_mqar, least_passkey, mqar, passkey, passkey_of
from nsa_train.evaluation.subject import Subject
from nsa_train.settings.config import RunConfig

pytestmark = pytest.mark.usefixtures("without_gradients")


def test_a_model_that_continues_finds_every_pass_key_in_text(continuing: Callable[..., Subject]) -> None:
    figures = [*passkey(continuing(lengths=(160, 250), depths=3, samples=2))]
    assert [(one.length, one.depth) for one in figures] == [(length, depth) for length in (160, 250) for depth in (0, 0.5, 1)]
    assert {one.value for one in figures} == {1.0}


def test_a_model_that_continues_finds_every_pair(continuing: Callable[..., Subject], needle_config: RunConfig) -> None:
    subject = continuing(needle_config, lengths=(80,), depths=2, samples=3)
    assert [one.value for one in passkey(subject)] == [1.0, 1.0]
    right, guessed = mqar(subject)
    assert (right.value, right.samples, guessed.measure) == (1.0, 12, "guessed")
    # by elimination: 1/4, 1/3, 1/2 and 1
    assert guessed.value == pytest.approx(25 / 48)


def test_one_pair_of_single_ids_is_asked_for(continuing: Callable[..., Subject]) -> None:
    """A row has one label."""
    right, guessed = mqar(continuing(lengths=(40,), samples=3, pairs=1))
    assert (right.value, right.samples, guessed.value) == (1.0, 3, 1.0)


def test_a_model_that_continues_copies_the_second_occurrence_alone(continuing: Callable[..., Subject]) -> None:
    found = {one.measure: one.value for one in copy(continuing(lengths=(200,), samples=2))}
    assert found["right"] > 0.95
    assert found["loss"] < 3 < found["first loss"]
    assert found["first right"] < 0.1


def test_random_weights_recall_nothing(random_subject: Callable[..., Subject]) -> None:
    subject = random_subject("model.max_position=512", lengths=(200,), depths=2, samples=3)
    assert sum(one.value for one in passkey(subject)) == 0
    found = {one.mode: one.value for one in mqar(subject) if one.mode}
    assert max(found.values()) < 0.3


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_a_sequence_has_its_length_and_holds_its_answer(
    continuing: Callable[..., Subject], needle_config: RunConfig, is_text: bool, depth: float
) -> None:
    subject = continuing(None if is_text else needle_config)
    for length in (least_passkey(subject), 200):
        asked = passkey_of(subject, length, depth, "any")
        assert sum(map(len, asked)) == length
        ids = asked.ids.tolist()
        # a key is two ids, and ends the question
        answer = asked.answer.tolist() if is_text else [*ids[-2:], *asked.answer.tolist()]
        # the sentence of the text names the pass key twice
        assert sum(ids[start : start + len(answer)] == answer for start in range(len(ids))) == (2 if is_text else 1)


def test_a_key_lies_deeper_where_its_depth_is_larger(continuing: Callable[..., Subject], needle_config: RunConfig) -> None:
    subject = continuing(needle_config)
    places = []
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        asked = passkey_of(subject, 84, depth, "any")
        ids = asked.ids.tolist()
        pair = [*ids[-2:], *asked.answer.tolist()]
        places.append(next(start for start in range(0, len(ids), 4) if ids[start : start + 4] == pair))
    assert places == [0, 20, 40, 56, 76]


def test_a_shuffled_choice_depends_on_seed_and_name_alone(random_subject: Callable[..., Subject]) -> None:
    ids = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(0))

    def logits(name: str, seed: int = 1) -> torch.Tensor:
        subject = random_subject("model.max_position=512", seed=seed)
        with subject.in_mode(Mode.SHUFFLED, name):
            return subject.logits(ids, last=20)

    assert torch.equal(logits("a"), logits("a"))
    assert not torch.equal(logits("a"), logits("b"))
    assert not torch.equal(logits("a"), logits("a", seed=2))


@pytest.mark.parametrize("task", [passkey, mqar, copy])
def test_every_mode_is_computed(
    random_subject: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch, task: Callable[..., object]
) -> None:
    seen = []
    own = Subject.in_mode

    def noted(subject: Subject, mode: Mode, name: str) -> object:
        seen.append(mode)
        return own(subject, mode, name)

    monkeypatch.setattr(Subject, "in_mode", noted)
    [*task(random_subject("model.max_position=512", lengths=(200,), depths=1, samples=1))]
    assert seen == [*Mode]


def test_the_least_length_of_mqar_holds_all_pairs_twice(continuing: Callable[..., Subject], needle_config: RunConfig) -> None:
    subject = continuing(needle_config)
    # four pairs of four ids, and twice as many slots for the questions
    assert least_mqar(subject) == 48
    assert next(one.value for one in mqar(continuing(needle_config, lengths=(48,), samples=1))) == 1.0


def test_a_run_of_pairs_is_asked_in_the_ids_of_its_training(
    continuing: Callable[..., Subject], needle_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as in a tokenizer.json whose first id is <|endoftext|>
    monkeypatch.setattr(ByteTokenizer, "separator", 0)
    asked = passkey_of(continuing(needle_config), 60, 0.5, "one")
    # 16 symbols: the last two ids are the key, and the answer is the value
    assert all(0 <= index < 16 for index in asked.ids[-2:].tolist())
    assert all(16 <= index < 32 for index in asked.answer.tolist())
