"""A run whose corpus changed since its checkpoint does not continue, and its records are unchanged."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_train.cli import run_command
from nsa_train.data.position import VERSION
from nsa_train.data.stream import check_state
from nsa_train.errors import DataError, PeerError
from nsa_train.loop.trainer import Trainer


@pytest.fixture
def run_on(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that trains the tiny recipe on a streamed corpus of 400 lines and returns the exit code."""
    monkeypatch.setattr("nsa_train.telemetry.recorder.write_report", lambda paths: None)
    lines = [json.dumps({"text": f"document {number} " * 5}) + "\n" for number in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    sets = ["data.source=jsonl", f"data.path={tmp_path}/a.jsonl", "data.in_memory_mib=0"]

    def run(*words: str) -> int:
        options = [word for override in sets for word in ("--set", override)]
        return run_command(["run", str(tiny_recipe), "--out", str(tmp_path / "run"), *options, *words])

    return run


def test_a_resume_on_a_file_with_an_edited_line_names_it_and_touches_nothing(
    run_on: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_on() == 0
    content = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(content.replace(b"document 3 ", b"DOCUMENT 3 ", 1))

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    before = files()
    capsys.readouterr()
    assert run_on("--resume", "--set", "train.steps=8") == 2
    message = capsys.readouterr().err
    assert f"data.path: {tmp_path}/a.jsonl lines 1 to 64 changed after the run of the checkpoint read it" in message
    assert "Traceback" not in message
    assert before == files()
    (tmp_path / "a.jsonl").write_bytes(content)
    assert run_on("--resume", "--set", "train.steps=8") == 0


def test_the_position_of_a_corpus_whose_content_changed_is_refused_with_both_ways_out() -> None:
    state = {"version": VERSION, "fingerprint": {"content": "a1"}, "lanes": {}}
    check_state(state, {"content": "a1"}, 0)
    with pytest.raises(DataError, match=r"content was 'a1' and is 'b2'.; .* its files as they were, or start a new run in another --out$"):
        check_state(state, {"content": "b2"}, 0)


class _Stream:
    """A stream whose state belongs to other data, if `refusal` is given."""

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._refusal:
            raise DataError(self._refusal)


@pytest.mark.parametrize(
    ("rank", "refused", "kind"),
    [
        (0, (False, False), None),
        (0, (True, False), DataError),
        (0, (False, True), PeerError),
        (1, (False, True), DataError),
        (1, (True, True), PeerError),
    ],
)
def test_a_rank_whose_data_changed_ends_all_of_them(rank: int, refused: tuple[bool, bool], kind: type[Exception] | None) -> None:
    """Rank 0 would cut the records back before it heard that another rank is gone."""

    def gather(item: bool) -> list[bool]:
        assert item == refused[rank]
        return [*refused]

    trainer = Trainer.__new__(Trainer)
    trainer.stream, trainer.world = _Stream("a.jsonl changed" if refused[rank] else ""), SimpleNamespace(rank=rank, gather=gather)
    checkpoint = SimpleNamespace(state={"data": {}})
    if kind is None:
        trainer._load_position(checkpoint)
        return
    with pytest.raises(kind) as caught:
        trainer._load_position(checkpoint)
    assert caught.value.exit_code == 2
