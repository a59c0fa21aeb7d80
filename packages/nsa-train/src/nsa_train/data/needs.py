"""What the data of a run take that may be missing on a machine: the corpus, the tokenizer's files, packages."""

from importlib.util import find_spec

from nsa_train.data.sources.hub import DEFAULT_SUBSET, REPOSITORY
from nsa_train.settings.config import listed
from nsa_train.settings.data_table import IDS, DataTable


def needs_of(data: DataTable) -> tuple[str, ...]:
    """Return a line for each thing that `data` takes and that does not come with nsa-train. Opens nothing."""
    lines = (_corpus(data), _tokenizer(data), _packages(data))
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


def _packages(data: DataTable) -> str | None:
    names = packages_of(data)
    return f"packages: {listed(f'{name} ({_state(name)})' for name in names)}" if names else None


def _state(name: str) -> str:
    return "installed" if find_spec(name) else f"missing; pip install {name.replace('_', '-')}"
