"""The feed of a step: a wait can be stopped, and ends by itself."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_train.data.dataset import open_dataset
from nsa_train.data.sources.base import Record
from nsa_train.data.sources.text import TextBlocks
from nsa_train.data.stream import open_training_stream
from nsa_train.errors import DataError
from nsa_train.loop.feed import Feed
from nsa_train.settings.recipe import load_config


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reading of any text waits until the event is set."""
    event, original = threading.Event(), TextBlocks.read

    def read(self: TextBlocks, block: int, start: int = 0) -> Iterator[Record]:
        event.wait(20)
        yield from original(self, block, start)

    monkeypatch.setattr(TextBlocks, "read", read)
    yield event
    event.set()


@pytest.fixture
def feed(tmp_path: Path, hanging: threading.Event) -> Iterator[Feed]:
    """A feed of two micro-batches a step from files whose reading begins to hang; it may take half a second."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 9)
    hanging.set()
    sets = ["data.source=text", f"data.path={tmp_path}/*.txt", "data.in_memory_mib=0", "data.timeout_s=0.5", "train.seq_len=32"]
    dataset = open_dataset(load_config("demo", sets))
    hanging.clear()
    with open_training_stream(dataset.config, dataset=dataset) as stream:
        yield Feed(stream, 2)


def test_a_wait_for_data_ends_with_the_shard_when_the_time_is_up(feed: Feed) -> None:
    started = time.monotonic()
    # ends a run that would hang; the test then fails below
    with pytest.raises(DataError, match=r"nothing came within 0\.5 s \(reading .*\.txt\)"):
        feed.fetch(lambda: time.monotonic() - started > 5)
    assert 0.4 < time.monotonic() - started < 3


def test_a_wait_for_data_ends_when_a_stop_is_asked_for_and_loses_nothing(feed: Feed, hanging: threading.Event) -> None:
    before = feed.position
    assert feed.fetch(lambda: True) is None
    assert feed.position == before
    hanging.set()
    fetched = feed.fetch(lambda: False)
    assert fetched is not None
    assert len(fetched.batches) == 2
    # of a step that is not under way
    assert feed.position == before
    feed.accept()
    assert feed.position["batches"] == 2
