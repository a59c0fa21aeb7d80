"""loss-by-layer: a layer that reads every block computes dense attention, alone and over a cache, and each layer is measured alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa_train.evaluation.options import Figure, Mode
from nsa_train.evaluation.report import tables
from nsa_train.evaluation.subject import Subject
from nsa_train.evaluation.tasks import layer_figures
from nsa_train.model.decoder import build_model

pytestmark = pytest.mark.usefixtures("without_gradients")
# the selected branch alone, with one K and V: dense attention over the chosen blocks
SELECTED = ("nsa.kv=shared", 'nsa.branches=["slc"]', "nsa.num_selected_blocks=3", "nsa.num_local_blocks=1")


def with_gates_of_1(subject: Subject) -> Subject:
    """Return `subject` with all of its gates 1."""
    for layer in subject.choosing_layers.values():
        *_, last = (module for module in layer.gate.modules() if isinstance(module, torch.nn.Linear))
        last.weight.zero_()
        last.bias.fill_(40.0)
    return subject


def losses(subject: Subject) -> dict[tuple[str | None, int | None], Figure]:
    """Return the figures by mode and layer."""
    return {(one.mode, one.layer): one for one in layer_figures(subject)}


def loss_with(subject: Subject, layers: str, tiny_config: Callable[..., Any]) -> float:
    """Return the held-out loss of the model that has the weights of `subject`, with the override `layers`."""
    config = tiny_config(*SELECTED, layers)
    model = build_model(config).eval()
    missing, _ = model.load_state_dict(subject.opened.decoder.state_dict(), strict=False)
    assert not missing
    other = Subject(subject.opened._replace(decoder=model, config=config), subject.options, subject.device)
    total = count = 0.0
    for batch in other.held_out:
        labels = batch.labels[0]
        total += float(torch.nn.functional.cross_entropy(other.batch_logits(batch).double(), labels, reduction="sum"))
        count += int((labels >= 0).sum())
    return total / count


def test_a_layer_that_reads_every_block_is_dense(random_subject, tiny_config) -> None:
    subject = with_gates_of_1(random_subject(*SELECTED, modes=(Mode.TRAINED, Mode.DENSE), samples=10**6))
    found = {key: one.value for key, one in losses(subject).items()}
    assert [*found] == [("trained", None), ("dense", None), ("dense", 0), ("dense", 1)]
    assert len({round(value, 4) for value in found.values()}) == 4
    for key, layers in ((0, 'model.layers=["dense", "nsa"]'), (1, 'model.layers=["nsa", "dense"]'), (None, "model.attention=dense")):
        assert found["dense", key] == pytest.approx(loss_with(subject, layers, tiny_config), rel=1e-5), key


def test_other_branches_and_layers_stay_as_they_are(random_subject) -> None:
    subject = random_subject("nsa.num_selected_blocks=64", samples=10**6)
    found = losses(subject)
    assert [*found] == [("trained", None), *((mode, layer) for mode in ("closed", "shuffled", "dense") for layer in (None, 0, 1))]
    trained = found["trained", None].value
    assert trained > 0
    # every block is chosen already
    assert [found["dense", layer].value for layer in (None, 0, 1)] == pytest.approx([trained] * 3, rel=1e-5)
    assert len({round(found["closed", layer].value, 4) for layer in (None, 0, 1)} | {round(trained, 4)}) == 4


def test_steps_over_a_cache_read_every_block(random_subject) -> None:
    subject = with_gates_of_1(random_subject(*SELECTED))
    ids = torch.randint(256, (30,), generator=torch.Generator().manual_seed(0))
    with subject.in_mode(Mode.DENSE, "cache"):
        whole = subject.logits(ids, last=30)
        caches = subject.decoder.new_caches(1, 32)
        parts = [subject.logits(ids[:20], caches, last=20)]
        parts += [subject.logits(ids[t : t + 1], caches, last=1) for t in range(20, 30)]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-4)
    assert not torch.allclose(subject.logits(ids, last=30), whole, atol=1e-2)


def test_samples_bound_the_sequences(random_subject) -> None:
    counts = [losses(random_subject(samples=samples))["trained", None].samples for samples in (1, 10**6)]
    assert 0 < counts[0] < counts[1]


def test_the_table_has_the_change_of_each_layer() -> None:
    losses = {("trained", None): 1.0, ("closed", None): 3.0, ("closed", 1): 1.5, ("dense", None): 0.75, ("dense", 1): 0.875}
    figures = [Figure("loss-by-layer", mode, "loss", value, 5, layer=layer) for (mode, layer), value in losses.items()]
    other = Figure("mqar", "trained", "right", 0.5, 4)
    by_layer, others = tables([*figures, other])
    assert [column.header for column in by_layer.columns] == ["layer", "nats per token", "closed", "dense"]
    assert [[*column.cells] for column in by_layer.columns] == [
        ["all", "1"],
        ["1.0000", ""],
        ["+2.0000", "+0.5000"],
        ["-0.2500", "-0.1250"],
    ]
    assert [[*column.cells] for column in others.columns][:3] == [["mqar"], ["trained"], ["right"]]
    assert [len(table.columns) for table in tables([other])] == [len(others.columns)]
