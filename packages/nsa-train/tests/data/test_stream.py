"""Order is seeded and exact: the same batches with any number of workers and ranks, and after a stop at any batch."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from nsa_train.data.blocks import SyntheticBlocks
from nsa_train.data.dataset import Dataset, open_dataset
from nsa_train.data.lanes import BlockLane, BlockSequence, Consumed, Entry
from nsa_train.data.packing import IGNORED, Batch, Row
from nsa_train.data.sources.split import rank_of
from nsa_train.data.stream import TrainingStream, lanes_of, merge_states, open_training_stream, open_validation
from nsa_train.data.tokenizer import ByteTokenizer
from nsa_train.errors import ConfigError, DataError
from nsa_train.settings.config import RunConfig

WALKS = (
    "rows",
    "rows of text",
    "rows of a mix",
    "buckets",
    "blocks",
    "blocks of parquet",
    "blocks of a mix",
    "datasets, parquet",
    "datasets, jsonl",
    "needle",
    "synthetic",
)
STOPS = range(1, 201)


def _stream(dataset: Dataset, *, rank: int = 0, world_size: int = 1, workers: int = 1) -> TrainingStream:
    config = attrs.evolve(dataset.config, data=attrs.evolve(dataset.config.data, workers=workers))
    return open_training_stream(config, rank=rank, world_size=world_size, dataset=attrs.evolve(dataset, config=config))


def _content(parts: list[Batch]) -> bytes:
    """Return ids and labels of the parts of a micro-batch."""
    return b"".join(part.input_ids.numpy().tobytes() for part in parts) + b"".join(part.labels.numpy().tobytes() for part in parts)


def _run(
    dataset: Dataset, state: dict[str, Any] | None, batches: int, *, world_size: int = 1, workers: int = 1
) -> tuple[list[bytes], dict[str, Any]]:
    """Return the rows of all ranks from `state` on, and the merged state after them."""
    streams = [_stream(dataset, rank=rank, world_size=world_size, workers=workers) for rank in range(world_size)]
    for stream in streams:
        if state is not None:
            stream.load_state_dict(state)
    found = [_content([next(stream) for stream in streams]) for _ in range(batches)]
    merged = merge_states([stream.state_dict() for stream in streams][::-1])
    for stream in streams:
        stream.close()
    return found, json.loads(json.dumps(merged))


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize(("workers", "world_size"), [(0, 1), (3, 1), (8, 1), (1, 2), (2, 4), (0, 8)])
def test_batches_are_the_same_with_any_number_of_workers_and_ranks(
    corpora: Any, data_config: Callable[..., RunConfig], walk: str, workers: int, world_size: int
) -> None:
    dataset = open_dataset(data_config(*corpora.walks[walk]))
    assert _run(dataset, None, 25, workers=workers, world_size=world_size) == _run(dataset, None, 25)


def _check_stops(dataset: Dataset, stops: range, pairs: list[tuple[int, int]]) -> None:
    """Stop after each of `stops` batches and go on with other workers and ranks: the next batches and their state are the same.

    Later batches depend only on the state, so an equal state after the next batch means that nothing is ever lost.
    """
    with _stream(dataset, workers=0) as straight:
        states, batches = [merge_states([straight.state_dict()])], []
        for _ in range(stops[-1] + 2):
            batches.append(_content([next(straight)]))
            states.append(json.loads(json.dumps(merge_states([straight.state_dict()]))))
    for number, stop in enumerate(stops):
        workers, world_size = pairs[number % len(pairs)]
        found, state = _run(dataset, states[stop], 2, workers=workers, world_size=world_size)
        assert (found, state) == (batches[stop : stop + 2], states[stop + 2]), stop


def test_nothing_is_lost_or_repeated_after_a_stop_at_any_batch(corpora: Any, data_config: Callable[..., RunConfig]) -> None:
    """Packed, shuffled, mixed, streamed; stopped with 2 workers ahead, resumed with other workers and ranks."""
    dataset = open_dataset(data_config(*corpora.walks["blocks of a mix"]))
    _check_stops(dataset, STOPS, [(0, 1), (0, 2), (0, 4), (0, 1), (0, 8), (0, 1), (0, 2), (2, 1), (0, 4), (0, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("walk", WALKS)
def test_nothing_is_lost_or_repeated_after_a_stop_at_any_batch_of_any_source(
    corpora: Any, data_config: Callable[..., RunConfig], walk: str
) -> None:
    _check_stops(open_dataset(data_config(*corpora.walks[walk])), STOPS, [(0, 1), (1, 2), (3, 1), (2, 4), (8, 1), (0, 8), (1, 1), (0, 2)])


@pytest.mark.parametrize("walk", ["rows", "blocks of a mix", "datasets, parquet"])
def test_what_was_read_ahead_does_not_count_as_given_out(corpora: Any, data_config: Callable[..., RunConfig], walk: str) -> None:
    dataset = open_dataset(data_config(*corpora.walks[walk]))
    straight, _ = _run(dataset, None, 30)
    state = None
    for stop in range(0, 30, 3):
        with _stream(dataset, workers=2) as stream:
            if state is not None:
                stream.load_state_dict(state)
            assert stream.ready(5)
            time.sleep(0.01)
            found = [next(stream) for _ in range(3)]
            state = merge_states([stream.state_dict()])
        assert [_content([batch]) for batch in found] == straight[stop : stop + 3]


@pytest.mark.parametrize(
    ("walk", "seeds"), [("blocks", [1]), ("blocks of parquet", [2, 3]), ("datasets, parquet", [3]), ("datasets, jsonl", [1])]
)
def test_an_epoch_holds_every_training_document_once_and_whole(
    corpora: Any, data_config: Callable[..., RunConfig], walk: str, seeds: list[int]
) -> None:
    # rows of two tokens: the one in which a lane's next epoch begins holds no document of it
    dataset = open_dataset(data_config(*corpora.walks[walk], "train.seq_len=2"))
    everything = [text for seed in seeds for text in corpora.texts_of(seed)]
    expected = [text for text in everything if rank_of(text.encode()) >= dataset.fingerprint["limit"]]
    assert 0.8 * len(everything) < len(expected) < len(everything)
    # every lane has a share of the first epoch, however few the files
    assert all(dataset.lane(number).state()["epoch"] == 0 for number in range(8))
    found = [document for number in range(8) for document in _first_epoch(dataset, number)]
    assert Counter(found) == Counter(expected)


def _first_epoch(dataset: Dataset, number: int) -> list[str]:
    lane = dataset.lane(number)
    ids: list[int] = []
    while lane.state()["epoch"] == 0:
        ids += lane.next_row().input_ids.tolist()
    texts = bytes(token if token < 256 else 0 for token in ids).split(b"\0")
    return [text.decode() for text in texts[:-1]]


def test_every_row_of_a_corpus_in_memory_comes_once_per_epoch(corpora: Any, data_config: Callable[..., RunConfig]) -> None:
    dataset = open_dataset(data_config(*corpora.walks["rows"]))
    lanes = [dataset.lane(number) for number in range(8)]
    rows = -(-dataset.sizes["train_tokens"] // 48)
    drawn = [lanes[number % 8].next_row().input_ids.tobytes() for number in range(2 * rows)]
    assert Counter(drawn[:rows]) == Counter(drawn[rows:])
    assert drawn[:rows] != drawn[rows:]
    assert len(set(drawn[:rows])) == rows


def test_a_mix_gives_each_part_its_weight(corpora: Any, data_config: Callable[..., RunConfig]) -> None:
    dataset = open_dataset(data_config(*corpora.walks["rows of a mix"]))
    with _stream(dataset) as stream:
        batches = [next(stream) for _ in range(30)]
    text = "".join(dataset.tokenizer.decode(batch.input_ids[0]) for batch in batches)
    counts = Counter(re.findall(r"<(\d):", text))
    assert counts["1"] / counts["2"] == pytest.approx(3, rel=0.4)
    assert counts["4"] / counts["2"] == pytest.approx(2, rel=0.4)


@pytest.mark.parametrize("walk", ["rows of a mix", "blocks", "blocks of a mix", "datasets, jsonl", "buckets"])
def test_no_held_out_document_is_trained_on(corpora: Any, data_config: Callable[..., RunConfig], walk: str) -> None:
    dataset = open_dataset(data_config(*corpora.walks[walk]))
    held_out = set(re.findall(r"<\d+:\d+:", dataset.tokenizer.decode(torch.from_numpy(dataset.held_out.stream))))
    assert held_out
    assert dataset.shared == ()
    with _stream(dataset) as stream:
        text = "".join(dataset.tokenizer.decode(next(stream).input_ids[0]) for _ in range(120))
    assert len(set(re.findall(r"<\d+:\d+:", text))) > 50
    assert not held_out & set(re.findall(r"<\d+:\d+:", text))


def test_a_lane_finds_the_only_document_among_its_blocks() -> None:
    """Where the turns of a mix repeat with the lanes, a lane keeps one part for ever."""

    class One:
        def __len__(self) -> int:
            return 64

        def entries(self, block: int, start: int, epoch: int) -> Iterator[Entry]:
            if block == start == 0:
                yield Entry(0, np.arange(4, dtype=np.int32))

    blocks = BlockSequence([One()], [1], 0)
    for number in range(64):
        lane = BlockLane(blocks, number=number, count=64, seq_len=4, policy="fail")
        assert [lane.next_row().input_ids.tolist() for _ in range(5)] == [[0, 1, 2, 3]] * 5


def test_labels_do_not_cross_documents_in_a_streamed_corpus(corpora: Any, data_config: Callable[..., RunConfig]) -> None:
    dataset = open_dataset(data_config(*corpora.walks["blocks"]))
    lane = dataset.lane(0)
    rows = [lane.next_row() for _ in range(40)]
    ids = [token for row in rows for token in row.input_ids.tolist()]
    labels = [label for row in rows for label in row.labels.tolist()]
    for here, following, label in zip(ids[:-1], ids[1:], labels[:-1], strict=True):
        assert label == (-100 if here == 256 else following)
    assert all(sum(row.lengths) == 48 for row in rows)
    for row in rows:
        pieces = torch.from_numpy(row.input_ids).split(row.lengths)
        assert all(256 not in piece[:-1].tolist() for piece in pieces)


def test_ranks_that_cannot_share_a_micro_batch_are_refused_with_a_mend(data_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match=r"train\.batch_size=8 does not divide among 3 processes .*; use --set train\.batch_size=6 or 9"):
        lanes_of(data_config(), 0, 3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seq_len=32", "seq_len was 48 and is 32"),
        ("train.batch_size=16", "batch_size was 8 and is 16"),
        ("data.shuffle_seed=1", "shuffle_seed was 0 and is 1"),
        ("data.in_memory_mib=0", "walk was 'rows' and is 'blocks'"),
    ],
)
def test_a_position_in_other_data_is_refused(corpora: Any, data_config: Callable[..., RunConfig], override: str, message: str) -> None:
    overrides = corpora.walks["rows"]
    _, state = _run(open_dataset(data_config(*overrides)), None, 2)
    with _stream(open_dataset(data_config(*overrides, override))) as stream, pytest.raises(DataError, match=message):
        stream.load_state_dict(state)


@pytest.mark.parametrize("walk", ["rows", "blocks", "datasets, jsonl"])
def test_files_may_stand_elsewhere_on_resume_and_speed_may_differ(
    corpora: Any, tmp_path: Path, data_config: Callable[..., RunConfig], walk: str
) -> None:
    overrides = corpora.walks[walk]
    straight, _ = _run(open_dataset(data_config(*overrides)), None, 4)
    _, state = _run(open_dataset(data_config(*overrides)), None, 2)
    for path in corpora.folder.glob("a-*.jsonl"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    free = ("train.accumulate=2", "data.workers=3", "data.prefetch=9", "data.on_bad_record=skip", f"data.path={tmp_path}/a-*.jsonl")
    assert _run(open_dataset(data_config(*overrides, *free)), state, 2)[0] == straight[2:]


def test_a_changed_file_is_seen_on_resume(tmp_path: Path, data_config: Callable[..., RunConfig]) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 9)
    overrides = ["data.source=text", f"data.path={tmp_path}/*.txt"]
    _, state = _run(open_dataset(data_config(*overrides)), None, 2)
    (tmp_path / "7.txt").write_text("another")
    with _stream(open_dataset(data_config(*overrides))) as stream, pytest.raises(DataError, match="content was"):
        stream.load_state_dict(state)


@pytest.mark.parametrize("kind", ["datasets", "blocks"])
def test_other_shards_of_a_streamed_corpus_are_seen_on_resume(tmp_path: Path, data_config: Callable[..., RunConfig], kind: str) -> None:
    """As many shards of the same sizes: only what is in them differs."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"text": f"document {number:03} of {name:5}"}) + "\n" for number in range(200)]
        for shard in range(2):
            (tmp_path / name / f"{shard}.jsonl").write_text("".join(lines[shard::2]))
    source = "fineweb_edu" if kind == "datasets" else "jsonl"
    one, other = (
        open_dataset(data_config(f"data.source={source}", f"data.path={tmp_path}/{name}/*.jsonl", "data.in_memory_mib=0"))
        for name in ("one", "other")
    )
    _, state = _run(one, None, 2)
    with _stream(other) as stream, pytest.raises(DataError, match="held_out was"):
        stream.load_state_dict(state)


def test_a_checkpoint_without_a_position_is_refused(corpora: Any, data_config: Callable[..., RunConfig]) -> None:
    with _stream(open_dataset(data_config(*corpora.walks["rows"]))) as stream, pytest.raises(DataError, match="version=None"):
        stream.load_state_dict({})


def test_parts_of_different_moments_do_not_merge(corpora: Any, data_config: Callable[..., RunConfig]) -> None:
    dataset = open_dataset(data_config(*corpora.walks["rows"]))
    with _stream(dataset, rank=0, world_size=2) as one, _stream(dataset, rank=1, world_size=2) as other:
        next(one)
        with pytest.raises(DataError, match="ranks disagree about batches"):
            merge_states([one.state_dict(), other.state_dict()])
        next(other)
        with pytest.raises(DataError, match="two ranks serve the same lanes"):
            merge_states([one.state_dict(), one.state_dict()])
        half = merge_states([one.state_dict()])
        with _stream(dataset) as whole, pytest.raises(DataError, match="positions of 4 of 8 rows"):
            whole.load_state_dict(half)


def test_the_hash_of_what_was_consumed_is_the_same_on_any_number_of_ranks(corpora: Any, data_config: Callable[..., RunConfig]) -> None:
    dataset = open_dataset(data_config(*corpora.walks["blocks"]))
    hashes = {_run(dataset, None, 5, world_size=ranks)[1]["consumed_hash"] for ranks in (1, 2, 4)}
    assert len(hashes) == 1
    with _stream(dataset) as stream:
        for _ in range(5):
            next(stream)
        figures = stream.figures()
        tokens = stream.first_tokens()
    assert figures["data_consumed_hash"] in hashes
    assert tokens == dataset.lane(0).next_row().input_ids.tolist()[:32]
    assert _run(dataset, None, 6)[1]["consumed_hash"] not in hashes


def test_the_hash_is_over_everything_that_was_consumed() -> None:
    def consumed(*rows: list[int]) -> str:
        found = Consumed()
        for row in rows:
            found.add(Row(np.array(row, np.int32), np.array(row, np.int32), [len(row)]))
        return found.digest

    assert len({consumed([1, 2], [3, 4]), consumed([5, 2], [3, 4]), consumed([3, 4]), consumed([3, 4], [1, 2])}) == 4


def test_synthetic_rows_are_seeded_whole_and_apart_from_those_held_out(data_config: Callable[..., RunConfig]) -> None:
    def rows(seed: int) -> list[tuple[int, ...]]:
        dataset = open_dataset(data_config("data.source=synthetic", f"data.shuffle_seed={seed}"))
        with _stream(dataset) as stream:
            found = [next(stream) for _ in range(3)]
        assert {tuple(batch.lengths.tolist()) for batch in found} == {(48,) * 8}
        held_out = [tuple(dataset.held_out[index].input_ids.tolist()) for index in range(len(dataset.held_out))]
        drawn = [tuple(row) for batch in found for row in batch.input_ids[0].view(8, 48).tolist()]
        assert not set(drawn) & set(held_out)
        return drawn

    assert rows(0) == rows(0)
    assert not set(rows(0)) & set(rows(1))
    block = SyntheticBlocks(ByteTokenizer(), num_ids=256, seq_len=48, seed=0)
    train = {tuple(entry.ids.tolist()) for number in range(40) for entry in block.entries(number, 0, 0) if entry.ids is not None}
    assert not train & {tuple(block.held_out(40)[index].input_ids.tolist()) for index in range(40)}


def test_synthetic_rows_are_drawn_when_they_are_asked_for(data_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a batch has, opening them costs nothing."""
    drawn: list[str] = []
    original = SyntheticBlocks.document
    monkeypatch.setattr(SyntheticBlocks, "document", lambda self, name: drawn.append(name) or original(self, name))
    dataset = open_dataset(data_config("data.source=synthetic", "train.batch_size=65536"))
    assert (len(dataset.held_out), dataset.held_out.num_tokens, drawn) == (65536, 65536 * 48, [])
    [batch] = dataset.validation_batches(range(3, 5), most=16)
    assert drawn == ["val 3", "val 4"]
    assert batch.labels[0, :47].tolist() == batch.input_ids[0, 1:48].tolist()
    assert batch.labels[0, [47, 95]].tolist() == [IGNORED, IGNORED]


def test_leaving_a_stream_ends_its_threads(corpora: Any, data_config: Callable[..., RunConfig]) -> None:
    dataset = open_dataset(data_config(*corpora.walks["blocks"]))
    before = threading.active_count()
    for taken in (0, 1, 5):
        with _stream(dataset, workers=3) as stream:
            for _ in range(taken):
                next(stream)
        assert threading.active_count() == before


def test_progress_is_announced_every_so_many_documents(corpora: Any, data_config: Callable[..., RunConfig]) -> None:
    lines: list[str] = []
    config = data_config(*corpora.walks["blocks"], "data.progress_every=25")
    with open_training_stream(config, announce=lines.append) as stream:
        while int(stream.figures()["data_documents"]) < 110:
            next(stream)
    assert len(lines) == 4
    assert re.fullmatch(r"data: \d+ documents, \d+ batches; reading .*\.jsonl line \d+", lines[0])


def _rows_of(batches: list[Batch]) -> Counter[bytes]:
    rows = [row for batch in batches for row in batch.input_ids[0].split(48)]
    return Counter(row.numpy().tobytes() for row in rows if bool((row != 257).any()))


@pytest.mark.parametrize("walk", ["rows", "blocks", "synthetic"])
def test_ranks_share_the_validation_rows_and_take_as_many_batches(corpora: Any, data_config: Callable[..., RunConfig], walk: str) -> None:
    config = data_config(*corpora.walks[walk])
    dataset = open_dataset(config)
    alone = open_validation(config, dataset=dataset)
    assert alone[0].input_ids.equal(open_validation(config)[0].input_ids)
    for ranks in (2, 4, 8):
        parts = [open_validation(config, rank=rank, world_size=ranks, dataset=dataset) for rank in range(ranks)]
        assert {len(part) for part in parts} == {len(alone)}
        assert _rows_of([batch for part in parts for batch in part]) == _rows_of(alone)
        assert sum(batch.num_targets for part in parts for batch in part) == sum(batch.num_targets for batch in alone)


@pytest.mark.parametrize("walk", ["rows", "blocks", "datasets, jsonl", "synthetic"])
def test_an_evaluation_takes_as_many_batches_as_asked(corpora: Any, data_config: Callable[..., RunConfig], walk: str) -> None:
    def batches(count: int) -> list[Batch]:
        return open_validation(data_config(*corpora.walks[walk], "train.seq_len=4", "train.batch_size=2", f"train.eval_batches={count}"))

    most = 1 if walk == "synthetic" else 40
    assert [len(batches(count)) for count in (1, 7, 40)] == [1, min(7, most), most]
    assert open_validation(data_config(*corpora.walks[walk]))[0].input_ids.equal(
        open_validation(data_config(*corpora.walks[walk], "train.eval_batches=16"))[0].input_ids
    )


@pytest.mark.parametrize("walk", ["rows", "blocks", "blocks of a mix", "datasets, parquet"])
@pytest.mark.parametrize("count", [1, 100])
def test_a_position_fits_whatever_is_evaluated(corpora: Any, data_config: Callable[..., RunConfig], walk: str, count: int) -> None:
    small = (*corpora.walks[walk], "train.seq_len=4", "train.batch_size=2")
    with open_training_stream(data_config(*small)) as stream:
        next(stream)
        state = merge_states([stream.state_dict()])
        following = next(stream)
    with open_training_stream(data_config(*small, f"train.eval_batches={count}")) as other:
        other.load_state_dict(state)
        assert next(other).input_ids.equal(following.input_ids)


def test_held_out_documents_are_fixed_by_their_content(corpora: Any, data_config: Callable[..., RunConfig]) -> None:
    dataset = open_dataset(data_config(*corpora.walks["blocks"]))
    limit = dataset.fingerprint["limit"]
    held_out = {text for text in corpora.texts_of(1) if rank_of(text.encode()) < limit}
    found = set(re.findall(r"<\d+:\d+:[^<>]*>", dataset.tokenizer.decode(torch.from_numpy(dataset.held_out.stream))))
    assert found == held_out


def test_synthetic_ids_cover_the_models_vocabulary(data_config: Callable[..., RunConfig]) -> None:
    """The loss on them stays at ln V only then; with the bytes alone it would fall to ln 256, and look like a leak."""
    config = data_config("data.source=synthetic", "model.vocab_size=50304", "train.seq_len=512")
    with open_training_stream(config, rank=0, world_size=1) as stream:
        ids = torch.cat([next(stream).input_ids.flatten() for _ in range(8)])
    assert int(ids.max()) > 49_000
    assert float((ids < 256).float().mean()) < 0.05
