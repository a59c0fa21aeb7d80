"""The needs of data beyond nsa-train: the corpus, the tokenizer's files, packages."""

import pytest

from nsa_train.preflight.data import needs_of, packages_of
from nsa_train.settings.data_table import DataTable

BPE = {"tokenizer": "gpt2"}


@pytest.mark.parametrize(
    ("table", "packages"),
    [
        ({"source": "stdlib"}, ()),
        ({"source": "synthetic", **BPE}, ()),
        ({"source": "text", "path": "a.txt"}, ()),
        ({"source": "text", "path": "a.txt", **BPE}, ("tiktoken",)),
        ({"source": "stdlib", "tokenizer_path": "t/tokenizer.json", **BPE}, ("tokenizers",)),
        ({"source": "stdlib", "tokenizer_path": "t/encoder.json", **BPE}, ("tiktoken",)),
        ({"source": "synthetic", "tokenizer_path": "tokenizer.json", **BPE}, ("tokenizers",)),
        ({"source": "parquet", "path": "a.parquet"}, ("pyarrow",)),
        ({"source": "mix", "mix": {"a/*.txt": 1, "b/*.parquet": 2}}, ("pyarrow",)),
        ({"source": "fineweb_edu"}, ("datasets", "huggingface_hub")),
        ({"source": "fineweb_edu", "path": "*.parquet"}, ("datasets",)),
    ],
    ids=lambda value: " ".join(f"{name}={item}" for name, item in value.items()) if isinstance(value, dict) else "",
)
def test_a_package_is_named_where_reading_loads_it(table: dict[str, object], packages: tuple[str, ...]) -> None:
    assert packages_of(DataTable(**table)) == packages  # type: ignore[arg-type]


def test_what_comes_with_nsa_train_is_no_need() -> None:
    assert needs_of(DataTable(source="stdlib")) == needs_of(DataTable(source="synthetic", tokenizer="gpt2")) == ()


def test_files_are_named() -> None:
    table = DataTable(source="jsonl", path=["a/*.jsonl", "b.jsonl"], tokenizer="gpt2", tokenizer_path="t/vocab.bpe")
    corpus, tokenizer, packages = needs_of(table)
    assert corpus == "data: jsonl, the files 'a/*.jsonl', 'b.jsonl'"
    assert tokenizer == "tokenizer: gpt2, the file 't/vocab.bpe'"
    assert packages.startswith("packages: tiktoken (")
    assert needs_of(DataTable(source="mix", mix={"a.txt": 1}))[0] == "data: mix, the files 'a.txt'"
    assert needs_of(DataTable(source="fineweb_edu", path="f/*.parquet"))[0] == "data: fineweb_edu, the files 'f/*.parquet'"


def test_a_corpus_on_the_hub_is_named_with_its_subset() -> None:
    [corpus, _] = needs_of(DataTable(source="fineweb_edu", subset="CC-MAIN-2024-10"))
    assert corpus.startswith("data: HuggingFaceFW/fineweb-edu, CC-MAIN-2024-10, streamed from https://huggingface.co")
