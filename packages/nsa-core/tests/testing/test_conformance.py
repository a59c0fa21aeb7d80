"""The kit that judges backends: one wrong choice is caught, and no near tie hides one."""

from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

from nsa_core import Capability, Operation
from nsa_core.reference import select
from nsa_core.reference.sdpa import SDPABackend
from nsa_core.testing import conformance, properties
from nsa_core.testing.cases import cases
from nsa_core.testing.conformance import ConformanceError, check_backend
from nsa_core.testing.inputs import EQUAL_BLOCKS, ONE_LOCAL, Shape
from nsa_core.testing.properties import Where
from nsa_core.testing.tolerances import Comparable

SELECT = SDPABackend(operation=Operation.SELECT)


def few_cases(*names: str) -> Any:
    """Return a stand-in for `cases` that yields those of float64 whose names end in `names`."""
    return lambda geometry: (case for case in cases(geometry, (torch.float64,)) if case.name.endswith(names))


def test_one_geometry_leaves_every_free_block_to_scores_and_another_has_equal_block_sizes() -> None:
    assert (ONE_LOCAL.num_initial_blocks, ONE_LOCAL.num_local_blocks) == (0, 1)
    assert ONE_LOCAL.compression_block_size < ONE_LOCAL.selection_block_size
    assert EQUAL_BLOCKS.compression_block_size == EQUAL_BLOCKS.selection_block_size


@frozen
class WrongInOneRow:
    """The reference, but the lowest free block of one row gives way to the first one that was not chosen."""

    name: str = "wrong"
    operation: Operation = Operation.SELECT
    capability: Capability = SELECT.capability

    def reasons_against(self, request: Any) -> tuple[Any, ...]:
        return ()

    def preference(self, request: Any) -> int:
        return 1

    def __call__(self, *tensors: Tensor, **options: Any) -> Tensor:
        chosen: Tensor = SELECT(*tensors, **options)
        rows = chosen.flatten(0, -2)
        row = rows[int(rows.amax(-1).argmax())]
        left_out = next(j for j in range(100) if j not in row.tolist())
        if left_out < int(row.max()):
            row[0] = left_out
            row[:] = row.sort().values
        return chosen


@pytest.mark.parametrize("case", ["S=53", "H/G=6/2", "packed l < l'", "packed l = l'", "cached"])
def test_one_wrong_choice_is_caught(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases(case))
    assert check_backend(SELECT).passed
    with pytest.raises(ConformanceError, match="1 of .* rows choose other blocks"):
        check_backend(WrongInOneRow())


def test_a_run_in_which_most_choices_are_near_a_tie_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases("S=53"))
    monkeypatch.setattr(conformance, "near_tie_margin", lambda maximum, dtype: torch.full_like(maximum, 0.1))
    with pytest.raises(ConformanceError, match="too close to call"):
        check_backend(SELECT)


SHAPE = Shape(geometry=ONE_LOCAL, num_queries=40, num_heads=4, num_kv_heads=2)
CHECKS = [properties.check_agrees_with_oracle, properties.check_heads_permute_within_groups]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_property_of_choices_fails_where_most_are_near_a_tie(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(properties, "near_tie_margin", lambda maximum, dtype: torch.full_like(maximum, 0.1))
    with pytest.raises(AssertionError, match="too close to call"):
        check(SHAPE, Where())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_one_near_tie_hides_no_wrong_choice_of_other_rows(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # the margin that makes one row of this shape a near tie
    monkeypatch.setattr(properties, "near_tie_margin", lambda maximum, dtype: torch.full_like(maximum, 4e-3))
    near = properties._near_ties(Where().inputs(SHAPE), SHAPE)
    assert int(near.sum()) in (1, 2)
    check(SHAPE, Where())
    importance = select._importance

    def by_first_heads(q: Tensor, k_cmp: Tensor, lse: Tensor, *rest: Any) -> Tensor:
        """Let the first of each group's two heads choose alone."""
        return importance(q[:, :, ::2].repeat_interleave(2, 2), k_cmp, lse[:, :, ::2].repeat_interleave(2, 2), *rest)

    monkeypatch.setattr(select, "_importance", by_first_heads)
    with pytest.raises(AssertionError):
        check(SHAPE, Where())


@pytest.mark.parametrize(("decided", "near_ties", "are_enough"), [(0, 0, True), (3, 2, True), (3, 3, False), (50, 5, True), (50, 6, False)])
def test_a_tenth_of_the_choices_may_be_near_a_tie_or_two(decided: int, near_ties: int, are_enough: bool) -> None:
    assert Comparable(decided, near_ties).are_enough is are_enough
