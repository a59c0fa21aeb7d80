"""Loss by position: tokens are counted where they stand in their document, and the mean is the cross-entropy."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nsa_train.data.packing import IGNORED, Row, collate
from nsa_train.errors import ConfigError
from nsa_train.evaluation import positions
from nsa_train.evaluation.options import Mode
from nsa_train.evaluation.subject import Subject
from nsa_train.evaluation.tasks import position_figures

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.hardware)])
def test_a_token_is_counted_by_its_position_in_its_document(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "CHUNK", 3)
    ids, labels = np.zeros(8, np.int32), np.zeros(8, np.int32)
    labels[[2, 7]] = IGNORED
    logits = torch.zeros(8, 2, device=device)
    logits[0, 0] = 50.0
    logits[1:, 1] = 50.0
    # documents of 3 and 5: positions 0 1 2 0 1 2 3 4, of which 2 of the first and 4 of the second have no label
    batch = collate([Row(ids, labels, [3, 5])])
    found = positions.loss_by_position(lambda _: logits, [batch], longest=8, device=torch.device(device))
    assert [(one.first, one.last, one.targets, one.right) for one in found] == [(0, 0, 2, 0.5), (1, 2, 3, 0.0), (3, 6, 1, 0.0)]
    assert [one.loss for one in found] == pytest.approx([25, 50, 50])


def test_the_loss_of_a_text_is_its_cross_entropy(random_subject: Callable[..., Subject], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Two boats wait for a tide.")
    subject = random_subject(texts=(text,), modes=(Mode.TRAINED,))
    ids = torch.tensor([*text.read_bytes()])
    logits = subject.opened.decoder(ids[None])[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    figures = [one for one in position_figures(subject) if one.measure == "loss"]
    assert [(one.first, one.samples) for one in figures] == [(0, 1), (1, 2), (3, 4), (7, 8), (15, 10)]
    for one in figures:
        assert one.value == pytest.approx(float(expected[one.first : one.last + 1].mean()), rel=1e-5)


def test_a_mode_holds_for_every_token(random_subject: Callable[..., Subject]) -> None:
    figures = [*position_figures(random_subject())]
    last = {one.mode: one.value for one in figures if one.measure == "loss" and one.first == 15}
    assert set(last) == {*Mode}
    assert len(set(last.values())) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "text.txt' has 0 of the 2 tokens that a loss needs; name a longer text$"),
        (b"a", "text.txt' has 1 of the 2 tokens that a loss needs; name a longer text$"),
        (b"x" * 33, r"text.txt' has 33 tokens \(the model has 32 positions\); cut it into files of that size"),
    ],
)
def test_a_text_that_does_not_fit_the_positions_is_refused(
    random_subject: Callable[..., Subject], tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        _ = random_subject(texts=(tmp_path / "text.txt",)).held_out
