"""The position of a run in its data: a stream's own state is accepted, and an unusable one is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa_train.data.position import position_problems
from nsa_train.data.stream import merge_states, open_training_stream
from nsa_train.errors import DataError
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import load_config


@pytest.fixture
def build_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A function from overrides to a configuration over 60 short documents."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{number} bottles " * 9}) + "\n" for number in range(60)))
    return lambda *overrides: load_config("demo", ["train.seq_len=48", "train.batch_size=3", *overrides])


WALKS = {
    "rows": ["data.source=jsonl", "data.path={}/a.jsonl"],
    "buckets": ["data.source=jsonl", "data.path={}/a.jsonl", "data.packing=false"],
    "blocks": ["data.source=jsonl", "data.path={}/a.jsonl", "data.in_memory_mib=0"],
    "mix": ["data.source=mix", 'data.mix={{"{}/a.jsonl" = 3}}'],
    "needle": ["data.source=needle", "data.needle_pairs=2", "data.needle_queries=2"],
    "synthetic": ["data.source=synthetic"],
}


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("batches", [0, 5])
def test_the_position_of_every_walk_is_what_is_described(
    tmp_path: Path, build_config: Callable[..., RunConfig], walk: str, batches: int
) -> None:
    config = build_config(*(override.format(tmp_path) for override in WALKS[walk]))
    with open_training_stream(config) as stream:
        for _ in range(batches):
            next(stream)
        merged = json.loads(json.dumps(merge_states([stream.state_dict()])))
    assert position_problems(merged, "data", config) == []
    merged["lanes"]["1"]["epoch"] = -1
    assert position_problems(merged, "data", config) == ["data.lanes[1].epoch=-1 is not an integer from 0 to 65,536,000,000,000"]


def test_a_position_beyond_the_end_of_its_document_ends_the_run(tmp_path: Path, build_config: Callable[..., RunConfig]) -> None:
    config = build_config(*(override.format(tmp_path) for override in WALKS["blocks"]), "data.workers=0")
    with open_training_stream(config) as stream:
        next(stream)
        merged = merge_states([stream.state_dict()])
        merged["lanes"]["0"]["offset"] = 10**6
        stream.load_state_dict(merged)
        with pytest.raises(DataError, match=r"the position of row 0 is token 1000000 of record \d+ of block \d+, which has \d+ "):
            next(stream)
