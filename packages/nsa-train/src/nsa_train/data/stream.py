"""The data in the form that the trainer needs: a rank's batches, their position, and the rows that every evaluation reads."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

from nsa_train.data.dataset import Dataset, open_dataset
from nsa_train.data.opened import KEY, OpenedBlocks, merge_hashes
from nsa_train.data.packing import Batch
from nsa_train.data.pipeline import Batches, LaneGroup, ReadAhead
from nsa_train.data.position import VERSION, consumed_hash
from nsa_train.errors import ConfigError, DataError
from nsa_train.settings.config import RunConfig
from nsa_train.settings.rules import undivided_rows


def open_training_stream(
    config: RunConfig, *, rank: int = 0, world_size: int = 1, dataset: Dataset | None = None, announce: Callable[[str], None] | None = None
) -> "TrainingStream":
    """Return the endless training batches of `rank`; `dataset`: the result of `open_dataset`, if it is available.

    `announce` gets a line every `data.progress_every` documents.

    Raises:
        ConfigError: if the ranks cannot share the rows of a micro-batch.
        DataError: naming the file that cannot be read.
    """
    return TrainingStream(dataset or open_dataset(config), lanes_of(config, rank, world_size), announce)


def open_validation(config: RunConfig, *, rank: int = 0, world_size: int = 1, dataset: Dataset | None = None) -> list[Batch]:
    """Return this rank's part of the validation batches: the same at every call, and empty only for a tiny split.

    All ranks get the same number of batches; together they are at most `train.eval_batches` of `batch_size` rows.
    """
    lanes = lanes_of(config, rank, world_size)
    return (dataset or open_dataset(config)).validation_batches(lanes, most=config.train.eval_batches)


def lanes_of(config: RunConfig, rank: int, world_size: int) -> range:
    """Return the rows of a micro-batch that `rank` serves.

    Raises:
        ConfigError: if `world_size` does not divide `train.batch_size`.
    """
    rows = config.train.batch_size
    if problems := undivided_rows(rows, [world_size]):
        raise ConfigError.of(problems)
    share = rows // world_size
    return range(rank * share, (rank + 1) * share)


class TrainingStream:
    """Endless micro-batches of one rank: its rows of `batch_size`. A context manager; leaving it ends the threads."""

    def __init__(self, dataset: Dataset, lanes: range, announce: Callable[[str], None] | None = None) -> None:
        data = dataset.config.data
        self._dataset, self._announce = dataset, announce
        self._announced = 0
        workers = min(data.workers, len(lanes))
        count = max(1, workers)
        cuts = [lanes.start + len(lanes) * number // count for number in range(count + 1)]
        groups = [LaneGroup({number: dataset.lane(number) for number in range(*share)}) for share in pairwise(cuts)]
        self._groups: Sequence[LaneGroup] | Sequence[ReadAhead] = groups
        if workers:
            self._groups = [ReadAhead(g, ahead=data.prefetch, timeout_s=data.timeout_s, reading=dataset.reading) for g in groups]
        self._batches = Batches(self._groups)
        self._opened = OpenedBlocks(dataset.walk, lanes, dataset.reading, data.timeout_s) if dataset.walk else None
        self._taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch.

        Raises:
            DataError: at a bad record that is not to be skipped, and when nothing comes within `data.timeout_s`.
        """
        batch: Batch = next(self._batches)
        self._taken += 1
        if self._announce and (every := self._dataset.config.data.progress_every):
            documents = self._documents()
            if documents // every > self._announced // every:
                self._announce(f"data: {documents:,} documents, {self._taken:,} batches; reading {self._dataset.reading.shard}")
            self._announced = documents
        return batch

    def ready(self, seconds: float) -> bool:
        """Wait for the next batch for at most `seconds`; return whether it is available without a further wait.

        In a loop of short waits, the caller can still react to signals. The result is also True without workers, and if an error is pending,
        such as that of an overdue batch.
        """
        # starts the threads
        self._batches.state_dict()
        return all(group.wait(seconds) for group in self._groups if isinstance(group, ReadAhead))

    def close(self) -> None:
        """End the threads."""
        for group in self._groups:
            if isinstance(group, ReadAhead):
                group.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the position of the next batch; `merge_states` joins the parts of all ranks."""
        lanes = self._batches.state_dict()
        opened = {KEY: self._opened.at(lanes)} if self._opened else {}
        return state_of({**self._dataset.fingerprint, **opened}, self._taken, lanes)

    def load_state_dict(self, merged: dict[str, Any]) -> None:
        """Continue at a state that `merge_states` made, with any number of ranks and workers.

        Streamed local files are compared with the blocks that the run has read.

        Raises:
            DataError: if it is of other data, rows or order; the message names a file that changed.
        """
        check_state(merged, self._dataset.fingerprint, self._dataset.config.train.batch_size)
        if self._opened:
            self._opened.load(merged["fingerprint"].get(KEY), merged["lanes"])
        self._taken = merged["batches"]
        self._batches.reset(merged["lanes"])
        self._announced = self._documents()

    def figures(self) -> dict[str, float | int | str]:
        """Return the figures of the data that this rank's lanes consumed; `merge_states` has those of the run."""
        lanes = self._batches.state_dict()
        # every rank reads a corpus in memory whole: its bad records are counted with the first row
        in_memory = self._dataset.bad_records if "0" in lanes else 0
        return {
            "data_source": self._dataset.config.data.source,
            "data_synthetic": int(self._dataset.is_synthetic),
            "data_batches": self._taken,
            "data_documents": self._documents(),
            "data_epoch": min(state["epoch"] for state in lanes.values()),
            "data_bad_records": in_memory + sum(state["bad_records"] for state in lanes.values()),
            "data_consumed_hash": consumed_hash(lanes),
            "data_reading": self._dataset.reading.shard,
        }

    def first_tokens(self) -> list[int]:
        """Return the first tokens of the run, of this rank's first lane; empty before the first batch."""
        lanes = self._batches.state_dict()
        tokens: list[int] = lanes[min(lanes, key=int)]["first_tokens"]
        return tokens

    def _documents(self) -> int:
        return sum(state["documents"] for state in self._batches.state_dict().values())


def state_of(fingerprint: dict[str, Any], batches: int, lanes: dict[str, Any]) -> dict[str, Any]:
    """Return the state of one rank: the data that it reads, the number of micro-batches returned, and the position of each of its lanes."""
    return {"version": VERSION, "fingerprint": fingerprint, "batches": batches, "lanes": lanes, "consumed_hash": consumed_hash(lanes)}


def merge_states(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all ranks, from the `state_dict` of each, in any order.

    Raises:
        DataError: if the parts are not from the same moment of the same run.
    """
    lanes = {number: state for part in parts for number, state in part["lanes"].items()}
    # the hashes of opened blocks add up; everything else is the same on all ranks
    fingerprints = [{key: value for key, value in part["fingerprint"].items() if key != KEY} for part in parts]
    for key in ("version", "fingerprint", "batches"):
        values = fingerprints if key == "fingerprint" else [part[key] for part in parts]
        if any(value != values[0] for value in values):
            raise DataError(f"data: ranks disagree about {key} ({values}); save all of them at the same step")
    if len(lanes) != sum(len(part["lanes"]) for part in parts):
        raise DataError(f"data: two ranks serve the same lanes ({sorted(lanes, key=int)} in all); give every rank its own number")
    ordered = {number: lanes[number] for number in sorted(lanes, key=int)}
    hashes = [part["fingerprint"][KEY] for part in parts if KEY in part["fingerprint"]]
    fingerprint = {**fingerprints[0], KEY: merge_hashes(hashes)} if hashes else fingerprints[0]
    return state_of(fingerprint, parts[0]["batches"], ordered)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a text for each entry in which the fingerprint `now` differs from that of `before`."""
    return [f"{key} was {before.get(key)!r} and is {value!r}" for key, value in now.items() if before.get(key) != value]


def check_state(merged: dict[str, Any], fingerprint: dict[str, Any], lanes: int) -> None:
    """Check that a state belongs to this data.

    Raises:
        DataError: naming the difference.
    """
    if merged.get("version") != VERSION:
        raise DataError(f"data: the checkpoint's position has version={merged.get('version')} (this one reads {VERSION}); use that version")
    if differing := differences(merged["fingerprint"], fingerprint):
        raise DataError(
            f"data: the position of the checkpoint belongs to other data ({'; '.join(differing)}); "
            "give the recipe of that run, and its files as they were, or start a new run in another --out"
        )
    if sorted(merged["lanes"], key=int) != [str(number) for number in range(lanes)]:
        raise DataError(
            f"data: the checkpoint has the positions of {len(merged['lanes'])} of {lanes} rows (a part is missing); save with merge_states"
        )
