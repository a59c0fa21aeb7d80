"""What preflight says of the data: whether it can be reached, how much there is, and whether the splits are apart."""

from attrs import frozen

from nsa_train.data.dataset import Dataset, open_dataset
from nsa_train.errors import DataError
from nsa_train.settings.config import RunConfig


@frozen
class DataFindings:
    """One line per rule, and the data as it was opened, so that a run need not open it again."""

    passed: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    dataset: Dataset | None = None
    """None where it could not be opened"""


def probe(config: RunConfig) -> DataFindings:
    """Open the data of `config` and judge it. Reads a small corpus whole, of a large one what is held out."""
    try:
        dataset = open_dataset(config)
    except DataError as error:
        return DataFindings(failed=tuple(str(error).splitlines()))
    failed = [_too_small(name, size, config.train.seq_len) for name, size in _sizes(dataset).items() if size < config.train.seq_len]
    if not failed and not _has_targets(dataset):
        failed.append("data: the held-out documents hold no token to predict, so there is no validation loss; use more or longer documents")
    failed += [
        f"data: {held_out} is held out for validation, and shares text with {trained}, which is for training; "
        "name each file in one part of data.mix alone, or remove the copy"
        for held_out, trained in dataset.shared
    ]
    return DataFindings(passed=() if failed else _described(dataset), warned=_warnings(dataset), failed=tuple(failed), dataset=dataset)


def _sizes(dataset: Dataset) -> dict[str, int]:
    sizes = {"val": dataset.held_out.num_tokens}
    if "train_tokens" in dataset.sizes:
        sizes["train"] = dataset.sizes["train_tokens"]
    return sizes


def _has_targets(dataset: Dataset) -> bool:
    train = dataset.config.train
    return any(batch.num_targets for batch in dataset.validation_batches(range(train.batch_size), most=train.eval_batches))


def _too_small(name: str, size: int, seq_len: int) -> str:
    return (
        f"train.seq_len={seq_len} is longer than the {name} split ({size} tokens; it must fill one row); "
        f"use {max(2, size)} or less, or more text"
    )


def _described(dataset: Dataset) -> tuple[str, ...]:
    sizes = dataset.sizes
    if "train_documents" in sizes:
        return tuple(
            f"data: {side} has {sizes[f'{side}_documents']} documents, {sizes[f'{side}_tokens']:,} tokens" for side in ("train", "val")
        )
    held_out = f"{dataset.held_out.num_tokens:,} tokens held out"
    return (f"data: {dataset.config.data.source}, {sizes['train_blocks']:,} blocks to read; {held_out}",)


def _warnings(dataset: Dataset) -> tuple[str, ...]:
    found = []
    if dataset.is_synthetic:
        found.append("data: synthetic ids; the loss stays at ln V, the figures are good for throughput alone")
    if dataset.bad_records:
        found.append(f"data: {dataset.bad_records} bad records are skipped; the first: {dataset.first_bad}")
    if dropped := dataset.reading.describe_dropped():
        found.append(f"data: {dropped}")
    return tuple(found)
