"""Rows of `data.source = "needle"`: the hidden pairs, the questions, and the labels."""

from collections.abc import Callable

import numpy as np
import pytest

from nsa_train.data.dataset import open_dataset
from nsa_train.data.order import generator
from nsa_train.data.packing import IGNORED
from nsa_train.data.retrieval import Retrieval
from nsa_train.data.stream import open_training_stream
from nsa_train.errors import ConfigError
from nsa_train.settings.config import RunConfig

TASKS = {
    "one of one": Retrieval(length=12, pairs=1, queries=1, symbols=2, tokens=1),
    "all of them": Retrieval(length=200, pairs=8, queries=8, symbols=64, tokens=1),
    "distractors": Retrieval(length=301, pairs=20, queries=3, symbols=5, tokens=2),
    "no room to spare": Retrieval(length=60, pairs=6, queries=2, symbols=9, tokens=3),
    "more keys than are listed": Retrieval(length=490, pairs=50, queries=5, symbols=64, tokens=4),
    "more keys than int64 holds": Retrieval(length=400, pairs=6, queries=2, symbols=64, tokens=12),
}


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Retrieval:
    return TASKS[request.param]


def pairs_in(task: Retrieval, ids: np.ndarray) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return key -> value of every run of ids that is spelt like a pair."""
    kinds = ids // task.symbols
    found = {}
    for at in range(len(ids) - task.pair_ids + 1):
        if (kinds[at : at + task.pair_ids] == [0] * task.tokens + [1] * task.tokens).all():
            key, value = np.split(ids[at : at + task.pair_ids], 2)
            assert tuple(key) not in found, "a key stands twice"
            found[tuple(key.tolist())] = tuple(value.tolist())
    return found


def test_each_answer_stands_behind_its_key_in_the_haystack(task: Retrieval) -> None:
    for seed in range(20):
        row = task.draw(generator(seed, 0, "test"))
        assert row.input_ids.shape == row.labels.shape == (task.length,)
        assert row.lengths == [task.length]
        assert 0 <= row.input_ids.min() <= row.input_ids.max() < 3 * task.symbols
        haystack, asked = pairs_in(task, row.input_ids[: -task.tail]), pairs_in(task, row.input_ids[-task.tail :])
        assert (len(haystack), len(asked)) == (task.pairs, task.queries)
        assert asked.items() <= haystack.items()


def test_the_values_asked_for_have_labels_and_nothing_else_does(task: Retrieval) -> None:
    row = task.draw(generator(3, 0, "test"))
    [labelled] = np.nonzero(row.labels != IGNORED)
    assert len(labelled) == task.queries * task.tokens
    assert (row.labels[labelled] == row.input_ids[labelled + 1]).all()
    assert (row.labels[labelled] // task.symbols == 1).all()
    assert labelled.min() >= task.length - task.tail


def test_places_that_are_given_hold_the_pairs(task: Retrieval) -> None:
    slots = np.arange(task.pairs)[::-1]
    row = task.draw(generator(0, 0, "test"), slots)
    first = row.input_ids[: task.pairs * task.pair_ids].reshape(task.pairs, -1)
    assert (first[:, task.tokens :] // task.symbols == 1).all()
    asked = pairs_in(task, row.input_ids[-task.tail :])
    # the pairs that are asked for take the first of the places
    assert {tuple(pair[: task.tokens].tolist()) for pair in first[::-1][: task.queries]} == set(asked)


def test_a_span_is_repeated_and_its_second_occurrence_has_labels(task: Retrieval) -> None:
    spans = set()
    for seed in range(60):
        row = task.draw_copy(generator(seed, 0, "test"))
        [labelled] = np.nonzero(row.labels != IGNORED)
        span = len(labelled) + 1
        spans.add(span)
        assert labelled.tolist() == [*range(task.length - span, task.length - 1)]
        assert (row.labels[labelled] == row.input_ids[labelled + 1]).all()
        assert (row.input_ids[-span:] == row.input_ids[:span]).all()
        assert 0 <= row.input_ids.min() <= row.input_ids.max() < 3 * task.symbols
        assert row.lengths == [task.length]
    assert min(spans) >= 4
    assert max(spans) <= task.length // 2
    assert len(spans) > 2


def test_the_source_draws_copies_where_it_is_asked_to(data_config: Callable[..., RunConfig]) -> None:
    dataset = open_dataset(data_config("data.source=needle", "data.needle_copy=true", "train.eval_batches=2"))
    for batch in dataset.validation_batches(range(8), most=2):
        ids, labels = batch.input_ids.reshape(8, 48), batch.labels.reshape(8, 48)
        for row, own in zip(ids, labels, strict=True):
            span = int((own != IGNORED).sum()) + 1
            assert (row[-span:] == row[:span]).all()
            assert len(row[:span].unique()) > 2


def test_rows_are_drawn_anew_and_those_held_out_are_others(data_config: Callable[..., RunConfig]) -> None:
    config = data_config("data.source=needle", "data.needle_pairs=4", "data.needle_queries=2", "train.eval_batches=3")
    dataset = open_dataset(config)
    with open_training_stream(config, dataset=dataset) as stream:
        batches = [next(stream).input_ids.reshape(8, 48) for _ in range(3)]
    held_out = [batch.input_ids.reshape(8, 48) for batch in dataset.validation_batches(range(8), most=3)]
    rows = [tuple(row.tolist()) for batch in (*batches, *held_out) for row in batch]
    assert len(rows) == len(set(rows)) == 48
    other = data_config("data.source=needle", "data.needle_pairs=4", "data.needle_queries=2", "data.shuffle_seed=1")
    assert (open_dataset(other).held_out[0].input_ids != dataset.held_out[0].input_ids).any()


def test_rows_too_short_for_their_pairs_are_refused(data_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(
        ConfigError, match=r"train.seq_len=48 is too short for data.needle_pairs=20 and data.needle_queries=8 .* use 72 or more"
    ):
        data_config("data.source=needle", "data.needle_pairs=20")
    with pytest.raises(ConfigError, match=r"train.seq_len=6 is too short for data.needle_copy \(a span of 4 ids twice\); use 8 or more"):
        data_config("data.source=needle", "data.needle_copy=true", "train.seq_len=6")
