"""Properties of every backend, for drawn shapes around every edge."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_core.reference import branches, padded, tiles
from nsa_core.testing import properties
from nsa_core.testing.inputs import Shape
from nsa_core.testing.properties import Where
from nsa_core.testing.strategies import shapes

PLACES = {
    "sdpa-float64": Where(dtype=torch.float64),
    "sdpa-float64-shared-keys": Where(dtype=torch.float64, has_shared_keys=True),
    "sdpa-float32": Where(dtype=torch.float32),
    # packed rows without padding, which small sizes would get
    "sdpa-float32-not-padded": Where(dtype=torch.float32),
    # the same loops in the smallest steps, with gathered blocks instead of the masks that small sizes would get
    "sdpa-float64-one-row-steps": Where(dtype=torch.float64),
}


@pytest.fixture(params=PLACES, scope="module")
def where(request: pytest.FixtureRequest) -> Iterator[Where]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param.endswith(("not-padded", "one-row-steps")):
            patch.setattr(padded, "MAX_PADDING", 0)
        if request.param.endswith("one-row-steps"):
            patch.setitem(tiles.SCRATCH_BYTES, "cpu", 1)
            patch.setattr(branches, "MASKED_RATIO", 0)
        yield PLACES[request.param]


@st.composite
def shapes_with_row(draw: st.DrawFn) -> tuple[Shape, int]:
    shape = draw(shapes())
    return shape, draw(st.integers(0, shape.total - 1))


@given(drawn=shapes_with_row())
def test_future_tokens_never_change_past_outputs_or_choices(drawn: tuple[Shape, int], where: Where) -> None:
    properties.check_past_outputs_and_choices(*drawn, where)


@given(drawn=shapes_with_row())
def test_past_outputs_have_no_gradient_at_future_inputs(drawn: tuple[Shape, int], where: Where) -> None:
    properties.check_past_outputs_ignore_future_inputs(*drawn, where)


@given(drawn=shapes_with_row())
def test_future_tokens_never_change_past_gradients(drawn: tuple[Shape, int], where: Where) -> None:
    properties.check_past_gradients(*drawn, where)


@given(shape=shapes())
def test_permuting_heads_of_a_group_permutes_outputs_and_keeps_the_choice(shape: Shape, where: Where) -> None:
    properties.check_heads_permute_within_groups(shape, where)


@given(shape=shapes(packed=True))
def test_packed_sequences_equal_separate_ones(shape: Shape, where: Where) -> None:
    properties.check_packed_equals_separate(shape, where)


@given(shape=shapes(packed=False), cuts=st.lists(st.integers(1, 60), max_size=4).map(tuple))
def test_steps_over_stores_equal_one_pass(shape: Shape, cuts: tuple[int, ...], where: Where) -> None:
    properties.check_steps_equal_whole(shape, cuts, where)


@given(shape=shapes(packed=False))
def test_sequences_of_a_step_may_stand_anywhere(shape: Shape, where: Where) -> None:
    properties.check_mixed_steps(shape, where)


@given(shape=shapes(packed=False))
def test_permuting_the_batch_permutes_outputs(shape: Shape, where: Where) -> None:
    properties.check_batch_permutes(shape, where)


@given(shape=shapes())
def test_a_zero_gate_equals_an_absent_branch(shape: Shape, where: Where) -> None:
    properties.check_zero_gate_is_an_absent_branch(shape, where)


@given(shape=shapes(packed=False))
def test_covering_branches_equal_dense_attention(shape: Shape, where: Where) -> None:
    properties.check_equals_dense(shape, where)


@given(shape=shapes())
def test_outputs_and_all_gradients_equal_the_oracle(shape: Shape, where: Where) -> None:
    properties.check_agrees_with_oracle(shape, where)
