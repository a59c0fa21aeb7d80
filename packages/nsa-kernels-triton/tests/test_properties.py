"""Properties of every backend, branch by branch and fused; in Triton's interpreter without a GPU, on it with one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_core import BlockGeometry
from nsa_core.testing import properties
from nsa_core.testing.inputs import SMALL, Shape
from nsa_core.testing.properties import Where
from nsa_core.testing.strategies import shapes

pytestmark = [pytest.mark.usefixtures("nan_buffers"), pytest.mark.filterwarnings("ignore:.*against policy.*")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ONE_BY_ONE: Any = dict.fromkeys(("cmp", "select", "slc", "win"), "triton")
FUSED = Where(backend="triton", device=DEVICE, dtype=torch.float32)
BRANCHES = evolve(FUSED, backend=ONE_BY_ONE)
# one K and V for all branches
SHARED, SHARED_BRANCHES = (evolve(where, has_shared_keys=True) for where in (FUSED, BRANCHES))

# n = 3 and l / d = 1, which no power of two hides; a window that ends inside a tile
ODD = BlockGeometry(4, 4, 12, 3, 0, 1, 17)
DENSE = Shape(num_queries=37, num_heads=6, num_kv_heads=2, head_dim_qk=8, head_dim_v=5)
WIDE = Shape(geometry=ODD, num_queries=41, num_heads=5, num_kv_heads=1, head_dim_qk=40, head_dim_v=24, seed=1)
PACKED = Shape(lengths=(19, 0, 1, 25), num_heads=4, num_kv_heads=2, head_dim_qk=6, surplus_blocks=2, seed=2)


def shape_id(shape: Shape) -> str:
    return "packed" if shape.lengths else "dense" if shape.geometry is SMALL else "odd geometry"


def each(*shapes: Shape, where: Where, shared: Where) -> pytest.MarkDecorator:
    """Return a mark for all shapes at both places; in CI the place with one K and V takes the last shape alone."""
    return pytest.mark.parametrize(
        ("shape", "where"),
        [pytest.param(shape, where, id=shape_id(shape)) for shape in shapes]
        + [
            pytest.param(shape, shared, id=f"{shape_id(shape)}, shared", marks=() if shape is shapes[-1] else pytest.mark.slow)
            for shape in shapes
        ],
    )


each_shape = each(WIDE, DENSE, PACKED, where=FUSED, shared=SHARED)
each_dense = each(WIDE, DENSE, where=FUSED, shared=SHARED)
each_place = pytest.mark.parametrize(
    "where", [pytest.param(FUSED, id="separate"), pytest.param(SHARED, id="shared", marks=pytest.mark.slow)]
)


@each_shape
def test_future_tokens_never_change_past_outputs_or_choices(shape: Shape, where: Where) -> None:
    properties.check_past_outputs_and_choices(shape, 21, where)


@pytest.mark.parametrize(("shape", "row"), [(DENSE, 32), (evolve(PACKED, lengths=(19, 0, 1, 29)), 44)], ids=["dense", "packed"])
def test_the_choice_at_the_first_token_of_a_block_ignores_keys_that_end_after_it(shape: Shape, row: int) -> None:
    # the last key of a free block ends in the own block of such a query, because there is no local block between the two
    geometry = evolve(SMALL, num_selected_blocks=3, num_local_blocks=1)
    for seed in range(3):
        properties.check_past_outputs_and_choices(evolve(shape, geometry=geometry, seed=seed), row, FUSED, magnitude=10.0)


@each_shape
def test_past_outputs_have_no_gradient_at_future_inputs(shape: Shape, where: Where) -> None:
    properties.check_past_outputs_ignore_future_inputs(shape, 20, where)


@each_shape
def test_future_tokens_never_change_past_gradients(shape: Shape, where: Where) -> None:
    properties.check_past_gradients(shape, 22, where)


@each_shape
def test_permuting_heads_of_a_group_permutes_outputs_and_keeps_the_choice(shape: Shape, where: Where) -> None:
    properties.check_heads_permute_within_groups(shape, where)


@each_place
def test_packed_sequences_equal_separate_ones(where: Where) -> None:
    properties.check_packed_equals_separate(PACKED, where)


@each_dense
def test_steps_over_stores_equal_one_pass(shape: Shape, where: Where) -> None:
    properties.check_steps_equal_whole(shape, (1, 7, 8, 30), where)


@each_dense
def test_sequences_of_a_step_may_stand_anywhere(shape: Shape, where: Where) -> None:
    properties.check_mixed_steps(evolve(shape, batch=3), where)


@each_place
def test_permuting_the_batch_permutes_outputs(where: Where) -> None:
    properties.check_batch_permutes(evolve(DENSE, num_queries=21), where)


@pytest.mark.parametrize("where", [BRANCHES, pytest.param(SHARED_BRANCHES, marks=pytest.mark.slow)], ids=["separate", "shared"])
def test_a_zero_gate_equals_an_absent_branch(where: Where) -> None:
    properties.check_zero_gate_is_an_absent_branch(DENSE, where)


@each_dense
def test_covering_branches_equal_dense_attention(shape: Shape, where: Where) -> None:
    properties.check_equals_dense(evolve(shape, num_queries=29), where)


@each(WIDE, DENSE, PACKED, where=BRANCHES, shared=SHARED_BRANCHES)
def test_outputs_and_all_gradients_equal_the_oracle_branch_by_branch(shape: Shape, where: Where) -> None:
    properties.check_agrees_with_oracle(shape, where)


@each_place
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (7, 1), (16, 1), (6, 3)], ids=str)
def test_outputs_and_all_gradients_equal_the_oracle_at_any_group(heads: tuple[int, int], where: Where) -> None:
    shape = Shape(num_queries=27, num_heads=heads[0], num_kv_heads=heads[1], head_dim_qk=16, head_dim_v=8, seed=5)
    properties.check_agrees_with_oracle(shape, where)


@each_place
@pytest.mark.parametrize("head_dims", [(1, 1), (40, 24), (80, 96), (192, 128), (256, 256)], ids=str)
def test_outputs_and_all_gradients_equal_the_oracle_at_any_head_dimension(head_dims: tuple[int, int], where: Where) -> None:
    shape = Shape(num_queries=19, num_heads=2, num_kv_heads=1, head_dim_qk=head_dims[0], head_dim_v=head_dims[1], seed=6)
    properties.check_agrees_with_oracle(shape, where)


@each_place
@pytest.mark.parametrize(
    "geometry",
    [BlockGeometry(1, 1, 4, 3, 0, 1, 4), BlockGeometry(6, 3, 6, 5, 2, 1, 1), BlockGeometry(8, 2, 16, 2, 1, 1, 40)],
    ids=["l = d = 1", "d = 3, w = 1", "l = 4 d, n l' < w"],
)
def test_outputs_and_all_gradients_equal_the_oracle_in_any_geometry(geometry: BlockGeometry, where: Where) -> None:
    properties.check_agrees_with_oracle(evolve(DENSE, geometry=geometry, num_queries=33, seed=7), where)


def test_gradients_of_scores_that_cancel_agree_with_the_oracle() -> None:
    # with w = 1 a query reads its own key alone, so dK of the window is exactly 0; in float32 dP - delta leaves a rounding error
    one_key = BlockGeometry(8, 4, 8, 1, 0, 1, 1)
    shape = Shape(geometry=one_key, lengths=(7,), num_heads=6, num_kv_heads=2, head_dim_qk=2, head_dim_v=5, seed=1)
    properties.check_agrees_with_oracle(shape, FUSED)


CHECKS: dict[str, Callable[..., None]] = {
    "heads permute": properties.check_heads_permute_within_groups,
    "agrees with the oracle": properties.check_agrees_with_oracle,
    "equals dense": properties.check_equals_dense,
    "mixed steps": properties.check_mixed_steps,
    "packed equals separate": properties.check_packed_equals_separate,
}
WITH_ROW: dict[str, Callable[..., None]] = {
    "past outputs and choices": properties.check_past_outputs_and_choices,
    "past outputs ignore future inputs": properties.check_past_outputs_ignore_future_inputs,
    "past gradients": properties.check_past_gradients,
}
PACKED_ONLY = {"equals dense": False, "mixed steps": False, "packed equals separate": True}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", [FUSED, BRANCHES, SHARED], ids=["fused", "branches", "fused, shared"])
@pytest.mark.parametrize("name", [*CHECKS, *WITH_ROW])
def test_the_properties_hold_of_drawn_shapes(name: str, where: Where) -> None:
    @settings(max_examples=500 if DEVICE == "cuda" else 25, deadline=None)
    @given(shape=shapes(packed=PACKED_ONLY.get(name), max_length=500 if DEVICE == "cuda" else 33), data=st.data())
    def check(shape: Shape, data: st.DataObject) -> None:
        if name in CHECKS:
            CHECKS[name](shape, where)
        else:
            WITH_ROW[name](shape, data.draw(st.integers(0, shape.total - 1)), where)

    check()
