"""Block recall: exact on a small case, 1 where nothing is left out, and taken of the right queries and keys."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from nsa_core import BlockGeometry
from nsa_core.selection_loss import block_mass
from nsa_train.checkpoint.models import OpenedModel
from nsa_train.data.tokenizer import ByteTokenizer
from nsa_train.errors import ConfigError
from nsa_train.evaluation.blocks import block_recall, recall_of, rows_to_compare
from nsa_train.evaluation.options import Mode, TaskName
from nsa_train.evaluation.subject import Subject
from nsa_train.evaluation.tasks import check
from nsa_train.model.decoder import build_model

GEOMETRY = BlockGeometry(4, 2, 4, 3, window_size=6)

pytestmark = pytest.mark.usefixtures("without_gradients")


class Selection(NamedTuple):
    """Random queries and keys of one sequence, with valid choices."""

    q: torch.Tensor
    k: torch.Tensor
    block_indices: torch.Tensor

    def recall(self) -> torch.Tensor:
        """Return the recall `(m, 2)` of the queries to compare."""
        # three blocks of 4 tokens: from the 13th query on
        rows = rows_to_compare(len(self.q), GEOMETRY, only_choosing=len(self.q) > 12)
        return recall_of(self.block_indices[rows], block_mass(self.q[None], self.k[None], rows, geometry=GEOMETRY))


def selection_of(num_tokens: int) -> Selection:
    """Return random operands; a query chooses the first block, its own, and one more."""
    draw = torch.Generator().manual_seed(num_tokens)
    q, k = torch.randn(num_tokens, 4, 8, generator=draw), torch.randn(num_tokens, 2, 8, generator=draw)
    indices = torch.full((num_tokens, 2, 3), -1, dtype=torch.int32)
    for t in range(num_tokens):
        own = t // 4
        for group in range(2):
            others = torch.randperm(max(own - 1, 0), generator=draw)[:1].add(1).tolist()
            chosen = sorted({0, own, *others})
            indices[t, group, : len(chosen)] = torch.tensor(chosen)
    return Selection(q, k, indices)


def looped_recall(selection: Selection) -> torch.Tensor:
    """Return the recall `(m, G)` of queries that had to choose, query by query in float64."""
    q, k = selection.q.double(), selection.k.double()
    rows = []
    for t in range(12, len(q)):
        found = []
        for group in range(2):
            chosen = set(selection.block_indices[t, group].tolist())
            mask = torch.tensor([key // 4 in chosen for key in range(t + 1)])
            weights = [(k[: t + 1, group] @ q[t, head] * 8**-0.5).softmax(0) for head in (2 * group, 2 * group + 1)]
            found.append(sum(float(one[mask].sum()) for one in weights) / 2)
        rows.append(found)
    return torch.tensor(rows)


@pytest.mark.parametrize("num_tokens", [13, 16, 17, 47])
def test_recall_is_that_of_a_loop_over_queries(num_tokens: int) -> None:
    selection = selection_of(num_tokens)
    assert torch.allclose(selection.recall(), looped_recall(selection), atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 4, 11, 12])
def test_recall_is_1_where_no_query_had_to_choose(num_tokens: int) -> None:
    assert torch.allclose(selection_of(num_tokens).recall(), torch.ones(num_tokens, 2))


def test_a_model_whose_blocks_hold_all_tokens_has_recall_1(random_subject: Callable[..., Subject]) -> None:
    figures = [*block_recall(random_subject("nsa.num_selected_blocks=8"), None)]
    assert {(one.mode, one.layer, one.group) for one in figures} == {
        (mode, layer, 0) for mode in ("trained", "shuffled") for layer in (0, 1)
    }
    assert [one.value for one in figures] == pytest.approx([1.0] * 4)


def dense_twin(subject: Subject, *overrides: str, tiny_config: Callable[..., object]) -> OpenedModel:
    """Return a dense model with the queries and keys of `subject`, whose branches share theirs."""
    torch.manual_seed(1)
    config = tiny_config("model.attention=dense", *overrides)
    model = build_model(config).eval()
    model.load_state_dict(subject.opened.decoder.state_dict(), strict=False)
    return subject.opened._replace(decoder=model, config=config)


def test_the_mass_of_a_twin_with_equal_queries_and_keys_is_the_models_own(random_subject, tiny_config) -> None:
    subject = random_subject("nsa.kv=shared")
    own, twins = [*block_recall(subject, None)], [*block_recall(subject, dense_twin(subject, tiny_config=tiny_config))]
    first = [[one.value for one in found if one.layer == 0] for found in (own, twins)]
    second = [[one.value for one in found if one.layer == 1] for found in (own, twins)]
    assert all(0.2 < value < 1 for value in first[0])
    assert first[0] == pytest.approx(first[1], rel=1e-4)
    # the second layer reads other attention's output
    assert second[0] != pytest.approx(second[1], rel=1e-4)


def test_the_mean_of_a_layer_is_over_queries_that_had_to_choose_in_any_document(random_subject, monkeypatch) -> None:
    blocks = 3, 5, 8
    layers = ", ".join(f"{{num_selected_blocks={count}}}" for count in blocks)
    subject = random_subject("model.n_layers=3", f"model.layers=[{layers}]")
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(256, (size,), generator=generator, dtype=torch.int32) for size in (30, 14, 6)]

    def recall_of_layers(taken: list[torch.Tensor]) -> dict[int, tuple[float, int]]:
        monkeypatch.setattr(Subject, "documents", taken)
        return {one.layer: (one.value, one.samples) for one in block_recall(subject, None) if one.mode == Mode.TRAINED}

    found = recall_of_layers(documents)
    # the third layer never has to choose: its mean is over all queries of the documents in which another layer has to
    assert [count for _value, count in found.values()] == [30 - 12 + 14 - 12, 30 - 20, 30 + 14]
    assert found[1] == recall_of_layers(documents[:1])[1]
    assert found[2][0] == pytest.approx(1)


def test_a_closed_branch_has_no_recall(random_subject) -> None:
    assert not [*block_recall(random_subject(modes=(Mode.CLOSED,)), None)]


def test_a_twin_whose_ids_mean_other_text_is_refused(random_subject, tiny_config) -> None:
    class Shifted(ByteTokenizer):
        def encode(self, text: bytes) -> torch.Tensor:
            return super().encode(text).flip(0)

    subject = random_subject(tasks=(TaskName.BLOCK_RECALL,))
    twin = dense_twin(subject, tiny_config=tiny_config)
    assert check(subject, twin, print) == (TaskName.BLOCK_RECALL,)
    with pytest.raises(ConfigError, match="it has another tokenizer"):
        check(subject, twin._replace(tokenizer=Shifted()), print)
    with_pairs = random_subject(tasks=(TaskName.BLOCK_RECALL, TaskName.COPY), symbols=8)
    with pytest.raises(ConfigError, match="it has another tokenizer"):
        check(with_pairs, twin._replace(tokenizer=Shifted()), print)
    with pytest.raises(ConfigError, match="it is meant for 4 tokens, the longest text has "):
        check(subject, twin._replace(max_position=4), print)
