"""`nsa-train loader-check`: run the data pipeline without a model, and report its delay, its speed and its first tokens."""

import statistics
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import attrs

from nsa_train.data.dataset import open_dataset
from nsa_train.data.sources.base import LateError, within
from nsa_train.data.stream import TrainingStream, lanes_of
from nsa_train.settings.config import RunConfig

MEASURED_BATCHES = 200
MEASURED_S = 5.0
"""Batches and seconds that are timed after the first batch; the limit that is reached first ends the check."""
SHOWN_TOKENS = 64


class LoaderFigures(NamedTuple):
    """The results of a check."""

    first_batch_s: float
    shape: tuple[int, ...]
    """Shape of the first batch's ids"""
    sequences: int
    """In the first batch"""
    tokens_per_s: float
    fetch_p50_ms: float
    fetch_p95_ms: float
    text: str
    """The first tokens, decoded"""
    stream: dict[str, float | int | str]
    """The figures of the stream"""
    dropped: str = ""
    """A sentence about the file names that were left out; empty if none was"""

    def lines(self) -> Iterator[str]:
        """Return the figures, one line each."""
        yield f"first batch   {self.first_batch_s:.2f} s"
        yield f"shape         {self.shape} in {self.sequences} sequences"
        yield f"tokens/s      {self.tokens_per_s:,.0f}"
        yield f"fetch         p50 {self.fetch_p50_ms:.2f} ms, p95 {self.fetch_p95_ms:.2f} ms"
        yield f"source        {self.stream['data_source']}{', SYNTHETIC IDS' if self.stream['data_synthetic'] else ''}"
        if self.dropped:
            yield f"files         {self.dropped}"
        yield f"bad records   {self.stream['data_bad_records']} skipped"
        yield f"consumed      {self.stream['data_documents']} documents, hash {self.stream['data_consumed_hash']}"
        yield f"first tokens  {self.text!r}"

    def content(self) -> dict[str, Any]:
        """Return the figures as `loader-check --json` prints them, including the figures of the stream."""
        own = {name: value for name, value in self._asdict().items() if name not in ("text", "stream")}
        return {**own, "first_tokens": self.text, **self.stream}


def check_loader(config: RunConfig, *, timeout_s: float) -> LoaderFigures:
    """Return the figures of the loader of `config` on this machine, as the only process.

    Raises:
        DataError: with the cause, or with the shard that was being read after `timeout_s`.
    """
    try:
        return _checked(config, timeout_s)
    except LateError as error:
        raise LateError(error.seconds, error.shard, option="--timeout") from None


def _checked(config: RunConfig, timeout_s: float) -> LoaderFigures:
    limited = attrs.evolve(config, data=attrs.evolve(config.data, timeout_s=timeout_s))
    started = time.perf_counter()
    dataset = open_dataset(limited)
    with TrainingStream(dataset, lanes_of(limited, 0, 1)) as stream:
        left = max(0.1, timeout_s - (time.perf_counter() - started))
        first = within(left, lambda: next(stream), dataset.reading)
        first_batch_s = time.perf_counter() - started
        fetches = _fetches(stream)
        figures = stream.figures()
    return LoaderFigures(
        first_batch_s=first_batch_s,
        shape=tuple(first.input_ids.shape),
        sequences=len(first.lengths),
        tokens_per_s=sum(tokens for tokens, _ in fetches) / sum(seconds for _, seconds in fetches),
        fetch_p50_ms=1e3 * statistics.median(seconds for _, seconds in fetches),
        fetch_p95_ms=1e3 * sorted(seconds for _, seconds in fetches)[int(0.95 * (len(fetches) - 1))],
        text=dataset.tokenizer.decode(first.input_ids[0, :SHOWN_TOKENS]),
        stream=figures,
        dropped=dataset.reading.describe_dropped(),
    )


def _fetches(stream: TrainingStream) -> list[tuple[int, float]]:
    """Return tokens and seconds of batches taken one right after another."""
    found: list[tuple[int, float]] = []
    begun = before = time.perf_counter()
    for batch in islice(stream, MEASURED_BATCHES):
        now = time.perf_counter()
        found.append((batch.input_ids.numel(), now - before))
        before = now
        if now - begun > MEASURED_S:
            break
    return found
