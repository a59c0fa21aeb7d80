"""The conformance kit: it catches one wrong choice, and no near tie hides one."""

import re
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

from nsa_core import BlockGeometry, BranchOutput, Capability, FusedOutput, Operation
from nsa_core.backends.base import Keys
from nsa_core.gating import gated_sum
from nsa_core.reference import append, select
from nsa_core.reference.sdpa import SDPABackend
from nsa_core.rope import RotaryEmbedding, rotate_step
from nsa_core.testing import conformance, properties
from nsa_core.testing.cases import cases
from nsa_core.testing.conformance import ConformanceError, check_backend
from nsa_core.testing.inputs import EQUAL_BLOCKS, ONE_LOCAL, Shape
from nsa_core.testing.properties import Where
from nsa_core.testing.tolerances import Comparable

SELECT = SDPABackend(operation=Operation.SELECT)
APPEND, CHOOSE = SDPABackend(operation=Operation.APPEND), SDPABackend(operation=Operation.CHOOSE)


def few_cases(*names: str) -> Any:
    """Return a stand-in for `cases` that yields those of float64 whose names end in `names`."""
    return lambda geometry: (case for case in cases(geometry, (torch.float64,)) if case.name.endswith(names))


def test_one_geometry_leaves_every_free_block_to_scores_and_another_has_equal_block_sizes() -> None:
    assert (ONE_LOCAL.num_initial_blocks, ONE_LOCAL.num_local_blocks) == (0, 1)
    assert ONE_LOCAL.compression_block_size < ONE_LOCAL.selection_block_size
    assert EQUAL_BLOCKS.compression_block_size == EQUAL_BLOCKS.selection_block_size


@frozen
class WrongInOneRow:
    """The reference, but one row has the first block that was not chosen instead of its lowest free block."""

    name: str = "wrong"
    operation: Operation = Operation.SELECT
    capability: Capability = SELECT.capability

    def reasons_against(self, request: Any) -> tuple[Any, ...]:
        return ()

    def preference(self, request: Any) -> int:
        return 1

    def __call__(self, *operands: Any, **options: Any) -> Tensor:
        chosen: Tensor = SELECT(*operands, **options)
        rows = chosen.flatten(0, -2)
        row = rows[int(rows.amax(-1).argmax())]
        left_out = next(j for j in range(100) if j not in row.tolist())
        if left_out < int(row.max()):
            row[0] = left_out
            row[:] = row.sort().values
        return chosen


@pytest.mark.parametrize("case", ["S=53", "H/G=6/2", "packed l < l'", "packed l = l'", "cached", "ragged"])
def test_one_wrong_choice_is_caught(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases(case))
    assert check_backend(SELECT).passed
    with pytest.raises(ConformanceError, match="1 of .* rows choose other blocks"):
        check_backend(WrongInOneRow())


@pytest.mark.parametrize("case", ["holes", "packed l = l'", "cached", "ragged"])
def test_a_choice_that_reads_the_first_block_of_the_future_is_caught(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = select._inside
    monkeypatch.setattr(conformance, "cases", few_cases(case))
    monkeypatch.setattr(select, "_inside", lambda start, stop, first, end: inside(start, stop, first, end + 1))
    with pytest.raises(ConformanceError, match="rows choose other blocks"):
        check_backend(SELECT)


@frozen
class NextBlock(WrongInOneRow):
    """The reference, but one row has the block after its query's own instead of its lowest block."""

    def __call__(self, *operands: Any, **options: Any) -> Tensor:
        chosen: Tensor = SELECT(*operands, **options)
        row = chosen.flatten(0, -2)[-1]
        row[:] = torch.cat([row[1:], row[-1:] + 1])
        return chosen


def test_no_near_tie_hides_a_choice_after_the_querys_own_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases("S=53"))
    monkeypatch.setattr(conformance, "near_tie_margin", lambda maximum, dtype: torch.full_like(maximum, 0.1))
    with pytest.raises(ConformanceError, match="1 of 212 rows choose a block after their query's own"):
        check_backend(NextBlock())


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


@frozen
class Composed:
    """All of Eq. 5 by the reference's operations; `spoil` changes the result."""

    spoil: Any = staticmethod(lambda result, win: result)
    name: str = "composed"
    operation: Operation = Operation.NSA
    capability: Capability = SELECT.capability

    def reasons_against(self, request: Any) -> tuple[Any, ...]:
        return self.capability.reasons_against(request)

    def preference(self, request: Any) -> int:
        return -1

    def __call__(self, queries: Any, cmp: Any, slc: Any, win: Any, gates: Tensor, **options: Any) -> FusedOutput | Tensor:
        compressed = SDPABackend(operation=Operation.CMP)(queries, cmp, **options)
        chosen = SELECT(queries, cmp, compressed.lse, **options)
        selected = SDPABackend(operation=Operation.SLC)(queries, slc, chosen, **options)
        window = SDPABackend(operation=Operation.WIN)(queries, win, **options)
        out = gated_sum(gates, compressed.out, selected.out, window.out).to(queries.q.dtype)
        result: FusedOutput | Tensor = self.spoil(FusedOutput(out, chosen), win)
        return result


@frozen
class OutAlone:
    """The reference's window, whose lse carries no gradient."""

    lse_gradient: bool = False
    name: str = "out alone"
    operation: Operation = Operation.WIN

    @property
    def capability(self) -> Capability:
        return Capability(lse_gradient=self.lse_gradient)

    def reasons_against(self, request: Any) -> tuple[Any, ...]:
        return self.capability.reasons_against(request)

    def preference(self, request: Any) -> int:
        return -1

    def __call__(self, *operands: Any, **options: Any) -> BranchOutput:
        out, lse = SDPABackend(operation=Operation.WIN)(*operands, **options)
        return BranchOutput(out, lse.detach())


def test_a_gradient_of_lse_is_declined_where_a_backend_says_that_it_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases("S=53", "cached, tail"))
    report = check_backend(OutAlone())
    # over a window's last tokens no lse is returned
    assert report.passed == ("float64 S=53", "float64 cached, tail")
    assert report.declined == ("float64 S=53, gradient of lse: it differentiates out alone",)
    with pytest.raises(ConformanceError, match="gradient 0 with lse's is off by"):
        check_backend(OutAlone(lse_gradient=True))


LAYOUTS = ("packed", "cached", "paged", "ragged")
RINGS = ("float64 cached, ring", "float64 cached, tail")
SHARED = tuple(f"float64 {layout}, shared k and v" for layout in ("dense", "packed", "cached"))


def test_a_fused_backend_is_run_in_every_layout_and_over_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases("S=53", *(f"float64 {layout}" for layout in LAYOUTS), *RINGS, *SHARED))
    assert check_backend(Composed()).passed == ("float64 S=53", *(f"float64 {layout}" for layout in LAYOUTS), *RINGS, *SHARED)


@frozen
class OneBuffer(Composed):
    """A fused backend that loses a gradient where both branches read the same tensor."""

    def __call__(self, queries: Any, cmp: Any, slc: Any, win: Any, gates: Tensor, **options: Any) -> FusedOutput | Tensor:
        lost = win._replace(k=win.k.detach()) if slc.k is win.k else win
        return super().__call__(queries, cmp, slc, lost, gates, **options)


def test_a_fused_backend_that_assumes_keys_of_their_own_for_each_branch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases("float64 packed", *SHARED))
    with pytest.raises(
        ConformanceError, match=r"1 cases passed, 0 declined, 3 failed.*\n  float64 dense, shared k and v: gradient 3 is off by"
    ):
        check_backend(OneBuffer())


@pytest.mark.parametrize(("case", "is_met"), [("ring", lambda win: win.ring), ("tail", lambda win: win.first is not None)])
def test_a_fused_backend_that_is_wrong_over_one_kind_of_window_is_caught(case: str, is_met: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(result: FusedOutput, win: Any) -> FusedOutput:
        return result._replace(out=result.out * 1.01) if is_met(win) else result

    monkeypatch.setattr(conformance, "cases", few_cases("float64 cached", *RINGS))
    with pytest.raises(ConformanceError, match=rf"2 cases passed, 0 declined, \d+ failed.*\n  float64 cached, {case}: out is off by"):
        check_backend(Composed(spoil=spoil))


def test_a_fused_backend_that_reports_another_choice_than_it_made_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases("float64 cached"))
    with pytest.raises(ConformanceError, match="rows choose other blocks"):
        check_backend(Composed(spoil=lambda result, win: result._replace(block_indices=result.block_indices - 1)))


def test_a_fused_backend_may_return_its_sum_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases("float64 cached", "float64 ragged"))
    assert len(check_backend(Composed(spoil=lambda result, win: result.out)).passed) == 2


@frozen
class WindowOverRings(Composed):
    """The reference's window, wrong over a ring alone."""

    name: str = "rings"
    operation: Operation = Operation.WIN

    def __call__(self, queries: Any, win: Any, **options: Any) -> BranchOutput:  # type: ignore[override]
        result: BranchOutput = SDPABackend(operation=Operation.WIN)(queries, win, **options)
        return result._replace(out=result.out + 1) if win.ring else result


def test_a_window_backend_that_is_wrong_over_a_ring_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases("float64 cached", *RINGS))
    with pytest.raises(ConformanceError, match="2 cases passed, 0 declined, 1 failed.*\n  float64 cached, ring: out is off by"):
        check_backend(WindowOverRings())


@frozen
class Careless(Composed):
    """The reference's `operation`; `change` spoils its operands and its scale."""

    operation: Operation = Operation.WIN
    change: Any = None
    name: str = "careless"

    def __call__(self, queries: Any, *operands: Any, geometry: BlockGeometry, scale: float) -> Any:  # type: ignore[override]
        compute = Composed() if self.operation is Operation.NSA else SDPABackend(operation=self.operation)
        operands, scale = self.change(queries, operands, scale)
        return compute(queries, *operands, geometry=geometry, scale=scale)


def scale_ignored(queries: Any, operands: Any, scale: float) -> Any:
    return operands, queries.q.shape[-1] ** -0.5


def scales_swapped(queries: Any, operands: Any, scale: float) -> Any:
    return tuple(x._replace(k_scale=x.v_scale, v_scale=x.k_scale) if isinstance(x, Keys) else x for x in operands), scale


def values_scored(queries: Any, operands: Any, scale: float) -> Any:
    cmp, lse = operands
    return (cmp._replace(k=cmp.v), lse), scale


@pytest.mark.parametrize("operation", [Operation.CMP, Operation.SLC, Operation.WIN, Operation.SELECT, Operation.NSA])
@pytest.mark.parametrize("case", ["D=(8, 8)", "packed", "cached", "paged", "ragged"])
def test_a_backend_that_ignores_scale_is_caught(operation: Operation, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases(f"float64 {case}"))
    with pytest.raises(ConformanceError, match=rf"0 cases passed, 0 declined, \d+ failed.*\n  float64 {re.escape(case)}: "):
        check_backend(Careless(operation=operation, change=scale_ignored))


@pytest.mark.parametrize("operation", [Operation.SLC, Operation.WIN, Operation.NSA])
def test_a_backend_that_swaps_the_scales_of_fp8_stores_is_caught(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases("cached, FP8 stores"))
    with pytest.raises(ConformanceError, match="0 cases passed, 0 declined, 1 failed.*\n  float64 cached, FP8 stores: out is off by"):
        check_backend(Careless(operation=operation, change=scales_swapped))


def test_a_choice_that_scores_values_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "cases", few_cases("S=53", "float64 packed", "float64 paged"))
    with pytest.raises(ConformanceError, match="0 cases passed, 0 declined, 3 failed"):
        check_backend(Careless(operation=Operation.SELECT, change=values_scored))


@frozen
class Spoiled(Composed):
    """A backend of APPEND, ROTATE or CHOOSE with the given call."""

    call: Any = None
    name: str = "spoiled"

    def __call__(self, *operands: Any, **options: Any) -> Any:
        return self.call(*operands, **options)


def one_row_more(rows: Any, blocks: Any, start: Tensor, count: Tensor, **options: Any) -> None:
    """Write an invalid row."""
    APPEND(rows, blocks, start, count + (count < rows[0].k.shape[1]).to(count), **options)


def blocks_first_written(rows: Any, blocks: Any, start: Tensor, count: Tensor, **options: Any) -> None:
    """Write the step's tokens to the raw ring before blocks are emitted."""
    if blocks is not None:
        append.write_rows(blocks.raw._replace(v=None), start, count)
    APPEND(rows, blocks, start, count, **options)


def unrotated(rows: Any, blocks: Any, start: Tensor, count: Tensor, **options: Any) -> None:
    """Give blocks the position 0."""
    blocks = blocks and blocks._replace(rotate=lambda k, positions, rotate=blocks.rotate: rotate(k, 0 * positions))
    APPEND(rows, blocks, start, count, **options)


def raw_always_written(rows: Any, blocks: Any, start: Tensor, count: Tensor, **options: Any) -> None:
    """Write the ring of raw tokens even if it is not among the rows."""
    APPEND(rows, blocks, start, count, **options)
    if blocks is not None:
        append.write_rows(blocks.raw._replace(v=None), start, count)


def test_an_append_that_writes_a_ring_that_is_only_read_is_caught() -> None:
    with pytest.raises(
        ConformanceError, match="180 cases passed, 0 declined, 36 failed.*\n  float64 l=8 d=4 G=1 rings written last: raw k is off by"
    ):
        check_backend(Spoiled(operation=Operation.APPEND, call=raw_always_written))


@pytest.mark.parametrize(("call", "store"), [(one_row_more, "slc k"), (blocks_first_written, "cmp k"), (unrotated, "cmp k")])
def test_an_append_that_writes_wrong_rows_or_blocks_is_caught(call: Any, store: str) -> None:
    with pytest.raises(ConformanceError, match=f"float64 l=8 d=4 G=2 all stores: .*{store} is off by"):
        check_backend(Spoiled(operation=Operation.APPEND, call=call))


def upper_ties(scores: Tensor, factor: Tensor | None, positions: Tensor, num_kv_heads: int, **options: Any) -> Tensor:
    """Give equal scores to the upper block."""
    return CHOOSE(scores + torch.arange(scores.shape[-1]) * 1e-6, factor, positions, num_kv_heads, **options)  # type: ignore[no-any-return]


def nan_wins(scores: Tensor, factor: Tensor | None, positions: Tensor, num_kv_heads: int, **options: Any) -> Tensor:
    """Let NaN be the highest score."""
    return CHOOSE(scores.nan_to_num(nan=100.0), factor, positions, num_kv_heads, **options)  # type: ignore[no-any-return]


def rows_without_query(scores: Tensor, factor: Tensor | None, positions: Tensor, num_kv_heads: int, **options: Any) -> Tensor:
    """Choose for rows without a query as well."""
    return CHOOSE(scores, factor, positions.clamp(min=0), num_kv_heads, **options)  # type: ignore[no-any-return]


def factor_is_one(scores: Tensor, factor: Tensor | None, positions: Tensor, num_kv_heads: int, **options: Any) -> Tensor:
    """Ignore the factor."""
    ones = None if factor is None else torch.ones_like(factor)
    return CHOOSE(scores, ones, positions, num_kv_heads, **options)  # type: ignore[no-any-return]


def turned_back(heads: tuple[Tensor, ...], start: Tensor, rope: RotaryEmbedding) -> tuple[Tensor, ...]:
    """Rotate by the negated positions."""
    return rotate_step(heads, -start, rope)


def keys_as_they_are(heads: tuple[Tensor, ...], start: Tensor, rope: RotaryEmbedding) -> tuple[Tensor, ...]:
    """Rotate only q."""
    return *rotate_step(heads[:1], start, rope), *heads[1:]


def in_place(heads: tuple[Tensor, ...], start: Tensor, rope: RotaryEmbedding) -> tuple[Tensor, ...]:
    """Rotate the caller's tensors in place."""
    return tuple(x.copy_(turned) for x, turned in zip(heads, rotate_step(heads, start, rope), strict=True))


def without_factor(heads: tuple[Tensor, ...], start: Tensor, rope: RotaryEmbedding) -> tuple[Tensor, ...]:
    """Leave YaRN's factor out."""
    return tuple(x / rope.attention_factor() for x in rotate_step(heads, start, rope))


@pytest.mark.parametrize("call", [turned_back, keys_as_they_are, in_place, without_factor])
def test_a_rotation_that_breaks_one_rule_is_caught(call: Any) -> None:
    assert len(check_backend(SDPABackend(operation=Operation.ROTATE)).passed) == 32
    with pytest.raises(ConformanceError, match="heads . (are|were)"):
        check_backend(Spoiled(operation=Operation.ROTATE, call=call))


@pytest.mark.parametrize("call", [upper_ties, nan_wins, rows_without_query, factor_is_one])
def test_a_choice_that_breaks_one_rule_is_caught(call: Any) -> None:
    assert len(check_backend(CHOOSE).passed) == 108
    with pytest.raises(ConformanceError, match="rows choose other blocks"):
        check_backend(Spoiled(operation=Operation.CHOOSE, call=call))


def test_a_geometry_of_larger_blocks_completes_blocks_as_well() -> None:
    with pytest.raises(ConformanceError, match="cmp k is off by"):
        check_backend(Spoiled(operation=Operation.APPEND, call=unrotated), geometry=BlockGeometry())
    assert check_backend(APPEND, geometry=BlockGeometry()).passed
