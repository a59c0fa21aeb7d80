"""Answers by decode equal those of the whole forward pass, and a question leaves caches unchanged."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa_bench.needle.evaluate import Haystacks, Questions, draw_haystacks, has_block
from nsa_bench.needle.plan import NeedlePlan, load_plan
from nsa_bench.needle.table import chances
from nsa_core import BlockGeometry, NativeSparseAttention, NSAConfig
from nsa_core.reference import naive
from nsa_train.data.retrieval import retrieval_rows
from nsa_train.evaluation.modes import RandomChoice, limited_to
from nsa_train.evaluation.options import Mode
from nsa_train.model.choosing import registry_of
from nsa_train.model.decoder import Decoder, build_model

CPU = torch.device("cpu")


@pytest.fixture
def plan(plan_file: Path) -> NeedlePlan:
    return load_plan(str(plan_file), plan_file.parent / "out")[0]


def model_of(plan: NeedlePlan, arm: int) -> Decoder:
    torch.manual_seed(0)
    model = build_model(plan.arms[arm].config).eval()
    with torch.no_grad():
        # away from the initial weights, for which every answer would depend on the last token only
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model


@torch.no_grad()
def answers_of(model: Decoder, ids: Tensor, key: Tensor, tokens: int) -> Tensor:
    """Return the likeliest `tokens` tokens after each row of ids and key, by forward passes over whole rows."""
    found = torch.cat([ids, key], 1)
    for _ in range(tokens):
        found = torch.cat([found, model(found)[:, -1:].argmax(-1)], 1)
    return found[:, -tokens:]


def test_a_haystack_has_its_pairs_where_they_are_said_to_be(plan: NeedlePlan) -> None:
    stacks, task = draw_haystacks(plan, 80, range(3)), plan.task
    assert stacks.ids.shape == (3, 80 - task.pair_ids)
    assert stacks.positions == [slot * task.pair_ids for slot in plan.needle_slots(80)]
    for row, needles in zip(stacks.ids, stacks.needles, strict=True):
        for position, pair in zip(stacks.positions, needles, strict=True):
            assert row[position : position + task.pair_ids].tolist() == pair.tolist()
            assert pair[: task.tokens].max() < task.symbols <= pair[task.tokens :].min() <= pair[task.tokens :].max() < 2 * task.symbols
        # a key begins each pair, and no key comes twice
        starts = [at for at in range(0, len(row), task.pair_ids) if row[at] < task.symbols]
        assert len(starts) == plan.grid.depths + 2
        assert len({tuple(row[at : at + task.tokens].tolist()) for at in starts}) == len(starts)


def test_a_length_may_have_its_own_number_of_distractors(plan_file: Path) -> None:
    plan = load_plan(str(plan_file), plan_file.parent, ["grid.distractors=[1, 9]"])[0]
    for length, pairs in ((64, 4), (80, 12)):
        [row] = draw_haystacks(plan, length, range(1)).ids.tolist()
        assert sum(row[at] < plan.task.symbols for at in range(0, len(row), plan.task.pair_ids)) == pairs
    assert chances(plan)["chance_of_a_pair"] == 1 / 4


def test_haystacks_depend_on_seed_length_and_number_alone(plan: NeedlePlan, plan_file: Path) -> None:
    whole = draw_haystacks(plan, 80, range(3)).ids
    assert torch.equal(draw_haystacks(plan, 80, range(2, 3)).ids[0], whole[2])
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(draw_haystacks(plan, 64, range(1)).needles, draw_haystacks(plan, 80, range(1)).needles)
    other = load_plan(str(plan_file), plan_file.parent, ["grid.seed=6"])[0]
    assert not torch.equal(draw_haystacks(other, 80, range(1)).ids[0], whole[0])


def test_no_haystack_is_a_training_row_even_under_its_seed(plan: NeedlePlan) -> None:
    task = plan.haystack(80)
    rows = retrieval_rows(task, side="train", seed=plan.grid.seed, pad=0)
    seen = {rows.at(number).input_ids[:20].tobytes() for number in range(50)}
    assert not seen & {row[:20].astype(np.int32).tobytes() for row in draw_haystacks(plan, 80, range(50)).ids.numpy()}


@pytest.mark.parametrize("arm", [0, 1], ids=["nsa", "dense"])
def test_an_answer_is_that_of_the_whole_forward_pass_whatever_was_asked_before(plan: NeedlePlan, arm: int) -> None:
    model, drawn = model_of(plan, arm), draw_haystacks(plan, 80, range(4))
    tokens = plan.task.tokens
    expected = torch.stack(
        [answers_of(model, drawn.ids, drawn.needles[:, depth, :tokens], tokens) for depth in range(plan.grid.depths)], dim=1
    )
    # needles whose values the model answers, except for one token of one row
    needles = torch.cat([drawn.needles[..., :tokens], expected], -1)
    needles[3, 1, -1] += 1
    with torch.inference_mode():
        questions = Questions(model, Haystacks(drawn.ids, needles, drawn.positions), 17, CPU)
        for depth in (1, 0, 2, 1, 1):
            is_right, is_found = questions.ask(depth)
            assert is_right.tolist() == [True, True, True, depth != 1]
            assert is_found.dtype is torch.bool
            assert (arm == 0) or not is_found.any()


def test_a_block_counts_as_chosen_where_some_head_of_the_last_row_has_it() -> None:
    indices = torch.tensor([[[[0, 1]], [[0, 3]]], [[[0, 3]], [[0, 2]]]], dtype=torch.int32)
    assert has_block(indices, 3).tolist() == [True, False]
    assert has_block(indices, 2).tolist() == [False, True]
    assert has_block(indices, 1).tolist() == [False, False]


LAYER = NSAConfig(16, 4, 2, 8, 8, geometry=BlockGeometry(4, 2, 4, 4, window_size=6))


@pytest.fixture(params=["sigmoid", "softmax"])
def layer(request: pytest.FixtureRequest) -> NativeSparseAttention:
    from attrs import evolve

    torch.manual_seed(1)
    layer = NativeSparseAttention(evolve(LAYER, gate=request.param))
    torch.nn.init.normal_(layer.gate.down.weight)
    return layer.eval()


@torch.no_grad()
def test_a_closed_branch_adds_nothing_and_opens_again(layer: NativeSparseAttention) -> None:
    x = torch.randn(2, 40, 16)
    before = layer(x)
    with limited_to(Mode.CLOSED, [layer], {}):
        closed = layer(x)
        values = layer.v_proj["slc"].weight.clone()
        layer.v_proj["slc"].weight.mul_(-3)
        assert torch.equal(layer(x), closed)
        layer.v_proj["slc"].weight.copy_(values)
    assert not torch.allclose(closed, before, atol=1e-3)
    assert torch.equal(layer(x), before)


@torch.no_grad()
def test_a_shuffled_choice_changes_rows_that_had_to_choose_alone(layer: NativeSparseAttention) -> None:
    x, registries = torch.randn(2, 40, 16), {Mode.SHUFFLED: registry_of(RandomChoice(torch.Generator().manual_seed(0)))}
    before = layer(x)
    with limited_to(Mode.SHUFFLED, [layer], registries):
        shuffled = layer(x)
    # four blocks of four tokens are all that the first 16 rows have
    assert torch.allclose(shuffled[:, :16], before[:, :16], atol=1e-5)
    assert (shuffled[:, 20:] - before[:, 20:]).abs().amax(-1).gt(1e-4).float().mean() > 0.5
    assert layer.registry is None
    assert torch.equal(layer(x), before)


def test_random_choices_are_valid_and_even() -> None:
    from nsa_core import Keys, Queries

    geometry = BlockGeometry(4, 2, 4, 5, window_size=6)
    q, k_cmp = torch.zeros(200, 48, 2, 8), torch.zeros(200, 23, 1, 8)
    choose = RandomChoice(torch.Generator().manual_seed(0))
    chosen = choose(Queries(q, 48), Keys(k_cmp, k_cmp, 23), torch.zeros(200, 48, 2), geometry=geometry, scale=1.0)
    assert chosen.shape == (200, 48, 1, 5)
    for t in range(48):
        for row in chosen[:3, t, 0].tolist():
            blocks = [block for block in row if block >= 0]
            assert blocks == sorted(set(blocks)) and len(blocks) == min(5, t // 4 + 1) and max(blocks) <= t // 4
            assert naive.forced_blocks(t, geometry) <= set(blocks)
    # of the last row, 2 of the 9 that are not forced
    counts = chosen[:, -1].flatten().bincount(minlength=12)[1:10]
    assert counts.sum() == 400
    assert counts.min() > 25 and counts.max() < 65
