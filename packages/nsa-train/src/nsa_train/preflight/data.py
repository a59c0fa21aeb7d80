"""Rules about the data: its needs, whether it can be reached, whether it is enough, and whether the splits are disjoint."""

from importlib.util import find_spec

from nsa_train.data.dataset import Dataset, open_dataset
from nsa_train.data.sources.hub import DEFAULT_SUBSET, REPOSITORY
from nsa_train.errors import DataError
from nsa_train.preflight.findings import Preflight
from nsa_train.settings.config import RunConfig, listed
from nsa_train.settings.data_table import IDS, DataTable


def check_data(findings: Preflight, config: RunConfig) -> None:
    """Check the data of `config` by opening them. Reads a small corpus whole, and only the held-out part of a large one."""
    findings.needs += needs_of(config.data)
    try:
        dataset = open_dataset(config)
    except DataError as error:
        findings.failed += str(error).splitlines()
        return
    train, sizes = config.train, {"val": dataset.held_out.num_tokens}
    if "train_tokens" in dataset.sizes:
        sizes["train"] = dataset.sizes["train_tokens"]
    failed = [
        f"train.seq_len={train.seq_len} is longer than the {name} split ({size} tokens; it must fill one row); "
        f"use {max(2, size)} or less, or more text"
        for name, size in sizes.items()
        if size < train.seq_len
    ]
    lanes = range(train.batch_size)
    if not failed and not any(batch.num_targets for batch in dataset.validation_batches(lanes, most=train.eval_batches)):
        failed.append("data: the held-out documents hold no token to predict, so there is no validation loss; use more or longer documents")
    failed += [
        f"data: {held_out} is held out for validation, and shares text with {trained}, which is for training; "
        "name each file in one part of data.mix alone, or remove the copy"
        for held_out, trained in dataset.shared
    ]
    findings.failed += failed
    findings.passed += [] if failed else _described(dataset)
    findings.warned += _warnings(dataset)


def _described(dataset: Dataset) -> list[str]:
    sizes = dataset.sizes
    if "train_documents" in sizes:
        return [f"data: {side} has {sizes[f'{side}_documents']} documents, {sizes[f'{side}_tokens']:,} tokens" for side in ("train", "val")]
    held_out = f"{dataset.held_out.num_tokens:,} tokens held out"
    return [f"data: {dataset.config.data.source}, {sizes['train_blocks']:,} blocks to read; {held_out}"]


def _warnings(dataset: Dataset) -> list[str]:
    found = []
    if dataset.is_synthetic:
        found.append("data: synthetic ids; the loss stays at ln V; only throughput can be measured")
    if dataset.bad_records:
        found.append(f"data: {dataset.bad_records} bad records are skipped; the first: {dataset.first_bad}")
    if dropped := dataset.reading.describe_dropped():
        found.append(f"data: {dropped}")
    return found


def needs_of(data: DataTable) -> tuple[str, ...]:
    """Return a line for each thing that `data` needs and that does not come with nsa-train. Opens nothing."""
    packages = listed(f"{name} ({_state(name)})" for name in packages_of(data))
    lines = (_corpus(data), _tokenizer(data), f"packages: {packages}" if packages else None)
    return tuple(line for line in lines if line is not None)


def packages_of(data: DataTable) -> tuple[str, ...]:
    """Return the import names of the packages that reading `data` loads and that do not come with nsa-train."""
    found = []
    if _tokenizer(data) is not None:
        path = data.tokenizer_path or ""
        found.append("tokenizers" if path.endswith(".json") and not path.endswith("encoder.json") else "tiktoken")
    if data.source == "fineweb_edu":
        found.append("datasets")
    if data.source == "fineweb_edu" and data.path is None:
        found.append("huggingface_hub")
    if data.source == "parquet" or any(pattern.endswith(".parquet") for pattern in data.mix):
        found.append("pyarrow")
    return tuple(found)


def _corpus(data: DataTable) -> str | None:
    if files := [*data.paths, *data.mix]:
        return f"data: {data.source}, the files {listed(map(repr, files))}"
    if data.missing_path:
        return f"data: {data.source}, the files that data.path names"
    if data.source == "fineweb_edu":
        return (
            f"data: {REPOSITORY}, {data.subset or DEFAULT_SUBSET}, streamed from https://huggingface.co as long as the run reads "
            "(no copy stays here); or its shards as files, data.path"
        )
    return None


def _tokenizer(data: DataTable) -> str | None:
    if data.tokenizer_path is not None:
        return f"tokenizer: {data.tokenizer}, the file {data.tokenizer_path!r}"
    if data.tokenizer == "byte" or data.source in IDS:
        return None
    return f"tokenizer: {data.tokenizer}, from tiktoken's cache or download; or a file, data.tokenizer_path"


def _state(name: str) -> str:
    return "installed" if find_spec(name) else f"missing; pip install {name.replace('_', '-')}"
