"""samples/before.txt and after.txt: how much is drawn, and what the file says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_train.data.tokenizer import ByteTokenizer
from nsa_train.model.generate import Continuation
from nsa_train.telemetry import recorder


@pytest.mark.parametrize("is_synthetic", [False, True])
def test_random_ids_are_continued_by_a_few(is_synthetic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "SAMPLE_TOKENS", 160)
    asked: list[int] = []

    def generate(model: Any, prompts: Any, *, num_tokens: int, **options: Any) -> list[Continuation]:
        asked.append(num_tokens)
        return [Continuation(torch.tensor(list(b"and so on"))) for _ in prompts]

    monkeypatch.setattr(recorder, "generate", generate)
    path = tmp_path / "samples" / "before.txt"
    recorder.write_samples(path, None, ByteTokenizer(), [torch.tensor(list(b"once"))], is_synthetic=is_synthetic)  # type: ignore[arg-type]
    assert asked == [recorder.SYNTHETIC_TOKENS if is_synthetic else 160]
    text = path.read_text()
    assert text.startswith(recorder.SYNTHETIC_NOTE) == is_synthetic
    assert "once" in text
    assert "and so on" in text


def test_a_text_that_broke_off_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Continuation(torch.tensor(list(b"and s")), is_cut=True), Continuation(torch.tensor(list(b"whole")))]
    monkeypatch.setattr(recorder, "generate", lambda *args, **options: found)
    path = tmp_path / "samples" / "after.txt"
    recorder.write_samples(path, None, ByteTokenizer(), [torch.tensor(list(b"once"))] * 2)  # type: ignore[arg-type]
    broken, whole = path.read_text().split("--- prompt ---")[1:]
    assert f"and s\n{recorder.CUT_NOTE}" in broken
    assert recorder.CUT_NOTE not in whole
