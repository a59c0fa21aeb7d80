"""Fixtures of the data tests: a corpus in every format, and configurations that read it."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsa_train.preflight.data import check_data
from nsa_train.preflight.findings import Preflight
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import load_config

NUM_DOCUMENTS = 120


@pytest.fixture
def probe() -> Callable[[RunConfig], Preflight]:
    """Return a function that returns the findings of preflight on the data of a configuration."""

    def judge(config: RunConfig) -> Preflight:
        findings = Preflight()
        check_data(findings, config)
        return findings

    return judge


def _texts_of(seed: int, count: int = NUM_DOCUMENTS) -> list[str]:
    """Return distinct documents `<seed:number:...>` of 6 to about 300 bytes; no short piece of one occurs in another."""
    draw = random.Random(seed)
    return [f"<{seed}:{number}:{' '.join(f'é{word}.{number}.{seed}' for word in range(draw.randrange(0, 30)))}>" for number in range(count)]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a-0.jsonl, a-1.jsonl, b.parquet, c-*.parquet and d/*.txt."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(2):
        lines = [json.dumps({"text": text, "id": 7}) + "\n" for text in _texts_of(1)[shard::2]]
        (folder / f"a-{shard}.jsonl").write_text("".join(lines), encoding="utf-8")
    pq.write_table(pa.table({"text": _texts_of(2)}), folder / "b.parquet", row_group_size=9)
    for shard in range(3):
        pq.write_table(pa.table({"text": _texts_of(3)[shard::3]}), folder / f"c-{shard}.parquet", row_group_size=7)
    (folder / "d").mkdir()
    for number, text in enumerate(_texts_of(4)):
        (folder / "d" / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def data_config() -> Callable[..., RunConfig]:
    """A function from overrides such as `data.source=jsonl` to a configuration with rows of 48 tokens, 8 to a micro-batch."""

    def build(*overrides: str) -> RunConfig:
        return load_config("demo", ["train.seq_len=48", "train.batch_size=8", *overrides])

    return build


class Corpora(NamedTuple):
    """The corpora of these tests."""

    folder: Path
    walks: dict[str, list[str]]
    """By name of the walk: overrides of a recipe"""

    def texts_of(self, seed: int) -> list[str]:
        """Return the documents of part `seed`: 1 in a-*.jsonl, 2 in b.parquet, 3 in c-*.parquet, 4 in d/*.txt."""
        return _texts_of(seed)


@pytest.fixture(scope="session")
def corpora(shards: Path) -> Corpora:
    """The corpora, and every way in which they are walked."""
    return Corpora(shards, _walks(shards))


def _walks(shards: Path) -> dict[str, list[str]]:
    """Return every way in which a corpus is walked, by name: overrides of a recipe."""
    mix = f'data.mix={{"{shards}/a-*.jsonl" = 3, "{shards}/b.parquet" = 1, "{shards}/d/*.txt" = 2}}'
    return {
        "rows": ["data.source=jsonl", f"data.path={shards}/a-*.jsonl"],
        "rows of text": ["data.source=text", f"data.path={shards}/d/*.txt"],
        "rows of a mix": ["data.source=mix", mix],
        "buckets": ["data.source=parquet", f"data.path={shards}/b.parquet", "data.packing=false"],
        "blocks": ["data.source=jsonl", f"data.path={shards}/a-*.jsonl", "data.in_memory_mib=0"],
        "blocks of parquet": ["data.source=parquet", f"data.path={shards}/[bc]*.parquet", "data.in_memory_mib=0"],
        "blocks of a mix": ["data.source=mix", mix, "data.in_memory_mib=0"],
        "datasets, parquet": ["data.source=fineweb_edu", f"data.path={shards}/c-*.parquet"],
        "datasets, jsonl": ["data.source=fineweb_edu", f"data.path={shards}/a-*.jsonl"],
        "needle": ["data.source=needle", "data.needle_pairs=6", "data.needle_queries=4", "data.needle_symbols=16"],
        "synthetic": ["data.source=synthetic"],
    }
