"""Table `data`: invalid pairs, wrong kinds of values, and a recipe that reads back equal."""

from pathlib import Path

import pytest

from nsa_train.errors import ConfigError
from nsa_train.settings.config import structure
from nsa_train.settings.data_table import DataTable
from nsa_train.settings.recipe import load_config, to_toml


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"source": "parquet", "path": ""},
            "data.path='' does not name a file (data.source='parquet' reads local files); use --set data.path=FILE",
        ),
        ({"source": "text", "path": []}, "data.path=[] does not name a file"),
        ({"source": "text", "path": ["a", 3]}, "data.path=['a', 3] does not name a file"),
        ({"source": "text", "path": 3}, "data.path=3 does not name a file"),
        ({"source": "fineweb_edu", "path": ""}, "data.path='' does not name a file"),
        ({"source": "stdlib", "path": "a"}, "data.path='a' would be ignored"),
        (
            {"source": "synthetic", "path": "a"},
            "data.path='a' would be ignored (data.source='synthetic' reads no path); use --set data.path= or --set data.source=text",
        ),
        ({"source": "mix"}, "data.mix={} is not a table of file or glob -> weight from 1 to 1000"),
        ({"source": "mix", "mix": {"a": 0}}, "data.mix={'a': 0} is not a table"),
        ({"source": "mix", "mix": {"a": 1.5}}, "data.mix={'a': 1.5} is not a table"),
        ({"source": "mix", "mix": ["a"]}, "data.mix=['a'] is not a table"),
        ({"source": "stdlib", "mix": {"a": 1}}, "data.mix={'a': 1} would be ignored"),
        ({"source": "stdlib", "subset": "x"}, "data.subset='x' would be ignored"),
        ({"source": "fineweb_edu", "path": "a", "subset": "x"}, "data.subset='x' would be ignored"),
        ({"source": "stdlib", "subset": 3}, "data.subset=3 is not a non-empty string; use 'sample-10BT'"),
        ({"source": "stdlib", "tokenizer_path": "a"}, "data.tokenizer_path='a' would be ignored (data.tokenizer='byte' reads no file)"),
        ({"source": "stdlib", "tokenizer": "gpt3"}, "data.tokenizer='gpt3' is not one of 'byte', 'gpt2'; use 'gpt2'"),
        ({"source": "stdlb"}, "data.source='stdlb' is not one of"),
        (
            {"source": "stdlib", "needle_pairs": 4},
            "data.needle_pairs=4 would be ignored (data.source='stdlib' hides no pairs); use --set data.source=needle",
        ),
        (
            {"source": "synthetic", "needle_copy": True},
            "data.needle_copy=True would be ignored (data.source='synthetic' hides no pairs); use --set data.source=needle",
        ),
        (
            {"source": "needle", "needle_pairs": 4},
            "data.needle_queries=8 is more than data.needle_pairs=4 (each asks for one); use 4",
        ),
        (
            {"source": "needle", "needle_pairs": 10, "needle_symbols": 3, "needle_tokens": 2},
            "data.needle_pairs=10 have no different keys (needle_symbols=3 to the power of needle_tokens=2 are too few); "
            "use --set data.needle_symbols=4",
        ),
        (
            {"source": "needle", "needle_symbols": 86},
            "data.needle_symbols=86 needs 258 ids (data.tokenizer='byte' has 256); use 85 or less",
        ),
        ({"source": "synthetic", "packing": False}, "data.packing=false does not work with data.source='synthetic'"),
        ({"source": "stdlib", "on_bad_record": "ignore"}, "data.on_bad_record='ignore' is not one of 'fail', 'skip'"),
        ({"source": "stdlib", "workers": -1}, "data.workers=-1 is not an integer from 0 to 256; use 2"),
        ({"source": "stdlib", "prefetch": 0}, "data.prefetch=0 is not an integer from 1 to 1,024; use 4"),
        ({"source": "stdlib", "timeout_s": 0}, "data.timeout_s=0 is not a number from 0.001 to 86,400; use 120"),
        (
            {"source": "stdlib", "in_memory_mib": float("inf")},
            "data.in_memory_mib=inf is not 0 or a number from 1e-06 to 16,777,216; use 64",
        ),
        ({"source": "stdlib", "in_memory_mib": -1}, "data.in_memory_mib=-1 is not 0 or a number from 1e-06 to 16,777,216; use 64"),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_a_mend(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DataTable(**keys)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "override", ['data.mix={"web/*.jsonl" = 3, "b \\"c\\".txt" = 1, plain = 2}', 'data.path=["a.txt", "é/*.txt"]', "data.path=x.txt"]
)
def test_a_recipe_reads_back_equal(tmp_path: Path, override: str) -> None:
    source = "mix" if "mix" in override else "text"
    config = load_config("demo", [f"data.source={source}", override])
    (tmp_path / "again.toml").write_text(to_toml(config), encoding="utf-8")
    assert load_config(str(tmp_path / "again.toml")) == config


@pytest.mark.parametrize("source", ["synthetic", "stdlib"])
def test_a_path_is_taken_away_where_the_source_reads_none(tiny_recipe: Path, tmp_path: Path, source: str) -> None:
    config = load_config(str(tiny_recipe), [f"data.source={source}", "data.path="])
    assert config.data.paths == ()
    (tmp_path / "again.toml").write_text(to_toml(config), encoding="utf-8")
    assert load_config(str(tmp_path / "again.toml")) == config


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"data\.worker is unknown .*; did you mean data\.workers\?"):
        structure({"data": {"source": "stdlib", "worker": 2}})
