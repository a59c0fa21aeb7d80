"""The three launches of a step over a cache, against the reference branch by branch."""

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch import Tensor

from nsa_core import BlockGeometry, NativeSparseAttention, NSAConfig, Operation
from nsa_core.backends.base import FusedOutput, Keys, Queries
from nsa_core.blocks import num_compressed_blocks
from nsa_core.config import BRANCHES
from nsa_core.testing.inputs import EQUAL_BLOCKS, ONE_LOCAL, SMALL
from nsa_core.testing.steps import step_by_branches
from nsa_core.testing.tolerances import allowed_error, max_error
from nsa_kernels_triton import launch, plugin
from nsa_kernels_triton.decode import kernels, op
from nsa_kernels_triton.plugin import TritonBackend
from nsa_kernels_triton.routing import MOST_STEP_ROWS

pytestmark = [pytest.mark.usefixtures("nan_buffers"), pytest.mark.filterwarnings("ignore:.*against policy.*")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.3
LAUNCHES = ("split_kernel", "choose_kernel", "attend_kernel")


class Case(NamedTuple):
    """A step of sequences that hold different numbers of tokens."""

    starts: tuple[int, ...] = (0, 37, 90)
    counts: tuple[int, ...] = (1, 1, 1)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim_qk: int = 16
    head_dim_v: int = 16
    geometry: BlockGeometry = SMALL
    dtype: torch.dtype = torch.float32
    multiprocessors: int = 40
    """The multiprocessors of the GPU that the splits are made for."""
    slices: int = 1
    """Parts of a tile of keys."""

    @property
    def capacity(self) -> int:
        """Return the tokens that a store holds of each sequence, more than any has."""
        return max(map(sum, zip(self.starts, self.counts, strict=True))) + 9


class Step(NamedTuple):
    """The operands of a step."""

    queries: Queries
    cmp: Keys
    slc: Keys
    win: Keys
    gates: Tensor


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def make_step(case: Case) -> Step:
    """Return a step over stores that are NaN after each sequence's last token and last whole block."""
    generator = torch.Generator().manual_seed(0)
    batch, rows, longest = len(case.starts), max(case.counts), case.capacity

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, case.dtype)

    def store(length: int, held: Callable[[int], int]) -> Keys:
        k, v = (normal(batch, length, case.num_kv_heads, width) for width in (case.head_dim_qk, case.head_dim_v))
        for b, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
            k[b, held(start + count) :], v[b, held(start + count) :] = torch.nan, torch.nan
        return Keys(k, v, length)

    queries = Queries(normal(batch, rows, case.num_heads, case.head_dim_qk), rows, None, int32(*case.starts), int32(*case.counts))
    cmp = store(num_compressed_blocks(longest, case.geometry), lambda tokens: num_compressed_blocks(tokens, case.geometry))
    gates = torch.rand(batch, rows, case.num_heads, 3, generator=generator).to(DEVICE)
    return Step(queries, cmp, store(longest, int), store(longest, int), gates)


def by_the_reference(step: Step, geometry: BlockGeometry) -> FusedOutput:
    return step_by_branches(*step, geometry=geometry, scale=SCALE)


def by_the_kernels(step: Step, geometry: BlockGeometry) -> FusedOutput:
    found = TritonBackend(operation=Operation.NSA)(*step, geometry=geometry, scale=SCALE)
    assert isinstance(found, FusedOutput)
    return found


def assert_same(found: FusedOutput, expected: FusedOutput) -> None:
    """Assert equal choices, and outputs within the rounding of the operands' dtype."""
    assert torch.equal(found.block_indices, expected.block_indices)
    dtype = found.out.dtype
    # in 16 bits weights are rounded too
    limit = allowed_error(expected.out, dtype, (4 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps)
    error = max_error(found.out, expected.out)
    assert error <= limit, f"out is off by {error:.2e} (allowed: {limit:.2e})"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """Return the list to which each launch adds its kernel, grid and constants."""
    seen: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []
    for name in LAUNCHES:
        kernel = getattr(kernels, name)
        launch = kernel._launch

        def record(grid: tuple[int, ...], *arguments: Any, name: str = name, launch: Any = launch, **constants: Any) -> None:
            seen.append((name, grid, constants))
            launch(grid, *arguments, **constants)

        monkeypatch.setattr(kernel, "_launch", record)
    return seen


def on_a_gpu_of(multiprocessors: int, monkeypatch: pytest.MonkeyPatch, slices: int = 1) -> None:
    """Cut steps as for such a GPU, into tiles so small that these short sequences have several."""
    monkeypatch.setattr(op, "num_multiprocessors", lambda x: multiprocessors)
    monkeypatch.setattr(op, "SLICES", slices)


WINDOW_IN = pytest.mark.parametrize("window_in", ["first", "third"], ids=lambda launch: f"window in the {launch} launch")


def read_windows_in(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every window in the first or in the third launch, whatever the number of rows."""
    monkeypatch.setattr(op, "LATE_ROWS", range(1, 10**6) if launch == "third" else range(0))
    # cuts that were made with other rows are not found
    monkeypatch.setattr(op, "cut_of", lru_cache(op.cut_of.__wrapped__))


CASES = {
    "one row": Case(),
    "one program": Case(multiprocessors=1),
    "rows of a draft": Case(counts=(5, 2, 7)),
    "16 rows": Case(counts=(16, 1, 9), multiprocessors=8),
    "an empty sequence": Case(counts=(1, 0, 1)),
    "group of 1": Case(num_heads=2),
    "group of 3": Case(num_heads=6, counts=(2, 1, 3)),
    "group of 16": Case(num_heads=16, num_kv_heads=1),
    "group of 40": Case(num_heads=40, num_kv_heads=1, counts=(1, 2, 2)),
    "group of 70": Case(num_heads=70, num_kv_heads=1, starts=(60,), counts=(2,)),
    "heads in two parts": Case(head_dim_qk=48, head_dim_v=24),
    "odd heads": Case(head_dim_qk=10, head_dim_v=6),
    "one local block": Case(geometry=ONE_LOCAL),
    "l = l'": Case(geometry=EQUAL_BLOCKS),
    "default geometry": Case(starts=(1500, 20, 1150), geometry=BlockGeometry(), multiprocessors=8, slices=4),
    "three strides to a block": Case(starts=(90,), counts=(2,), geometry=BlockGeometry(4, 4, 12, 4, 1, 1, 20)),
    "40 blocks of 8": Case(starts=(700,), counts=(1,), geometry=BlockGeometry(4, 2, 8, 40, 2, 3, 20), multiprocessors=2),
    "blocks of 32 strides": Case(starts=(130,), geometry=BlockGeometry(2, 2, 64, 2, 0, 1, 20), counts=(1,)),
    "large blocks": Case(starts=(900,), counts=(1,), geometry=BlockGeometry(8, 8, 96, 4, 1, 2, 100)),
    "two slices": Case(counts=(5, 2, 7), slices=2),
    "four slices": Case(starts=(3, 150, 233), head_dim_qk=48, num_heads=6, multiprocessors=12, slices=4),
    "bf16": Case(dtype=torch.bfloat16, starts=(5, 41, 63), counts=(3, 1, 1)),
    "fp16": Case(dtype=torch.float16, starts=(5, 41, 63), counts=(3, 1, 1)),
}


LATE = ("one row", "rows of a draft", "an empty sequence", "group of 40", "heads in two parts", "default geometry", "four slices", "bf16")
"""The cases that also run with the window in the third launch."""


@pytest.mark.parametrize(
    ("name", "window_in"),
    [
        pytest.param(name, launch, id=f"{name}, {launch}")
        for launch in ("first", "third")
        for name in (CASES if launch == "first" else LATE)
    ],
)
def test_a_step_equals_the_branches_one_by_one(
    name: str, window_in: str, monkeypatch: pytest.MonkeyPatch, launched: list[tuple[str, tuple[int, ...], dict[str, Any]]]
) -> None:
    case = CASES[name]
    on_a_gpu_of(case.multiprocessors, monkeypatch, case.slices)
    read_windows_in(window_in, monkeypatch)
    step = make_step(case)
    assert_same(by_the_kernels(step, case.geometry), by_the_reference(step, case.geometry))
    assert [name for name, _grid, _constants in launched] == list(LAUNCHES)
    (_split, _, split), _choose, (_attend, _, attend) = launched
    assert (split["WIN_SPLITS"] > 0) == (window_in == "first")
    assert (attend["WIN_SPLITS"] > 0) == (window_in == "third")


@pytest.mark.parametrize(
    "name",
    # two slices have the same rows of drafts
    [
        pytest.param("rows of a draft", marks=pytest.mark.slow),
        "an empty sequence",
        "group of 40",
        "default geometry",
        "40 blocks of 8",
        "two slices",
    ],
)
def test_several_programs_choose_what_one_does(
    name: str, monkeypatch: pytest.MonkeyPatch, launched: list[tuple[str, tuple[int, ...], dict[str, Any]]]
) -> None:
    case = CASES[name]
    on_a_gpu_of(case.multiprocessors, monkeypatch, case.slices)
    step = make_step(case)
    expected = by_the_kernels(step, case.geometry)
    monkeypatch.setattr(op, "CHOOSERS", 4)
    monkeypatch.setattr(op, "LEAST_CHOOSER_BLOCKS", 4)
    op.cut_of.cache_clear()
    found = by_the_kernels(step, case.geometry)
    op.cut_of.cache_clear()
    assert [constants["CHOOSERS"] for _name, _grid, constants in launched if "CHOOSERS" in constants] == [1, 4]
    assert torch.equal(found.block_indices, expected.block_indices)
    assert_same(found, by_the_reference(step, case.geometry))


def before_append(step: Step, case: Case) -> Step:
    """Return a copy of the step in which the rows and blocks that it writes itself are NaN."""

    def old(keys: Keys, held: Callable[[int], int]) -> Keys:
        k, v = keys.k.clone(), keys.v.clone()
        for b, start in enumerate(case.starts):
            k[b, held(start) :], v[b, held(start) :] = torch.nan, torch.nan
        return keys._replace(k=k, v=v)

    return step._replace(cmp=old(step.cmp, lambda tokens: num_compressed_blocks(tokens, case.geometry)), win=old(step.win, int))


def after_append(step: Step) -> Step:
    return step._replace(queries=step.queries._replace(follows_append=True))


def with_dependent_launch(monkeypatch: pytest.MonkeyPatch, most_early_pairs: int) -> None:
    for module in (op, launch):
        monkeypatch.setattr(module, "has_pdl", lambda x: True)
    monkeypatch.setattr(launch, "MOST_EARLY_PAIRS", most_early_pairs)


@pytest.mark.parametrize("starts_early", [False, True], ids=["behind append", "early"])
@pytest.mark.parametrize("place", ["rows", "ring", "pages"])
@pytest.mark.parametrize("case", [Case(counts=(5, 0, 3)), Case(multiprocessors=8, starts=(100, 37, 91))], ids=["drafts", "shared programs"])
@WINDOW_IN
def test_a_program_reads_new_rows_and_writes_only_behind_its_wait(
    case: Case,
    place: str,
    starts_early: bool,
    window_in: str,
    monkeypatch: pytest.MonkeyPatch,
    dependent_launch: Any,
    launched: list[tuple[str, tuple[int, ...], dict[str, Any]]],
) -> None:
    """The third launch starts after all programs of the first have waited for `append`, so it may read keys of this step at once."""
    on_a_gpu_of(case.multiprocessors, monkeypatch, case.slices)
    read_windows_in(window_in, monkeypatch)
    with_dependent_launch(monkeypatch, most_early_pairs=1000 if starts_early else 0)
    put = PLACES.get(place, lambda step, case: step)
    whole = make_step(case)
    after, before = put(whole, case), put(before_append(whole, case), case)
    step = after_append(after)._replace(
        **{name: keys._replace(k=keys.k.clone(), v=keys.v.clone()) for name, keys in zip(("cmp", "win"), before[1:4:2], strict=True)}
    )

    def hold(source: Step) -> None:
        for name in ("cmp", "win"):
            held, written = getattr(step, name), getattr(source, name)
            held.k.copy_(written.k)
            held.v.copy_(written.v)

    early_products: dict[str, int] = {}

    def reads_late() -> bool:
        return launched[-1][0] == "attend_kernel" and window_in == "third"

    def start() -> None:
        early_products.setdefault(launched[-1][0], dependent_launch.early_products)
        hold(after if reads_late() else before)

    dependent_launch.install(at_start=start, at_wait=lambda: hold(after), may_store_early=reads_late)
    found = by_the_kernels(step, case.geometry)
    dependent_launch.check()
    assert_same(found, by_the_reference(whole, case.geometry))
    before_the_third = early_products["attend_kernel"]
    assert (before_the_third > 0) == starts_early
    assert (dependent_launch.early_products > before_the_third) == (window_in == "third")


def test_a_step_over_copies_does_not_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written behind `append`."""
    with_dependent_launch(monkeypatch, most_early_pairs=1000)
    case = Case()
    step = after_append(make_step(case))
    tail = as_a_tail(step, case)
    strided = step._replace(cmp=step.cmp._replace(k=step.cmp.k.repeat(1, 1, 1, 2)[..., ::2]))
    turned = step._replace(queries=step.queries._replace(q=step.queries.q.mT.contiguous().mT))
    assert [op.StepSizes.of(*each[:4], SMALL).starts_early for each in (step, tail, strided, turned)] == [True, False, False, False]


@pytest.mark.parametrize(("most", "is_early"), [(11, False), (12, True)])
def test_a_step_of_many_rows_does_not_start_early(most: int, is_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with_dependent_launch(monkeypatch, most_early_pairs=most)
    # 3 sequences of 2 rows, 2 KV heads
    step = after_append(make_step(Case(starts=(9, 9, 9), counts=(2, 2, 2))))
    assert op.StepSizes.of(*step[:4], SMALL).starts_early == is_early


def test_only_a_step_behind_append_starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `append`, the launch right before may write q."""
    with_dependent_launch(monkeypatch, most_early_pairs=1000)
    step = make_step(Case())
    assert [op.StepSizes.of(*each[:4], SMALL).starts_early for each in (step, after_append(step))] == [False, True]


def in_a_ring(step: Step, case: Case, page_size: int = 1) -> Step:
    length = -(-(case.geometry.window_size - 1 + max(case.counts)) // page_size) * page_size
    stores = []
    for x in (step.win.k, step.win.v):
        ring = torch.full_like(x[:, :length], torch.nan)
        for b, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
            for position in range(max(0, start + count - length), start + count):
                ring[b, position % length] = x[b, position]
        stores.append(ring)
    return step._replace(win=Keys(stores[0], stores[1], step.win.max_count, ring=True))


def as_a_tail(step: Step, case: Case) -> Step:
    firsts = [max(0, start - case.geometry.window_size + 1) for start in case.starts]
    length = case.geometry.window_size - 1 + max(case.counts)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, length)) for x in (step.win.k, step.win.v)]
    k, v = (torch.stack([x[b, first : first + length] for b, first in enumerate(firsts)]) for x in padded)
    return step._replace(win=Keys(k, v, length, first=int32(*firsts)))


def paged(keys: Keys, page_size: int) -> Keys:
    batch, num_pages = keys.k.shape[0], -(-keys.k.shape[1] // page_size)
    order = torch.randperm(batch * num_pages, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    stores = []
    for x in (keys.k, keys.v):
        fill = x.new_full((batch, num_pages * page_size - x.shape[1], *x.shape[2:]), torch.nan)
        pages = torch.cat([x, fill], 1).reshape(-1, page_size, *x.shape[2:])
        stores.append(torch.empty_like(pages).index_copy(0, order, pages))
    table = order.to(torch.int32).view(batch, num_pages)
    return keys._replace(k=stores[0], v=stores[1], page_table=table)


def in_pages(step: Step, case: Case) -> Step:
    return step._replace(cmp=paged(step.cmp, 4), slc=paged(step.slc, 16), win=paged(step.win, 8))


def window_in_pages(step: Step) -> Step:
    return step._replace(win=paged(step.win, 8))


def ragged(step: Step, case: Case) -> Step:
    def packed(x: Tensor) -> Tensor:
        # two rows of padding after the last sequence
        rows = torch.cat([x[b, :count] for b, count in enumerate(case.counts)])
        return torch.cat([rows, rows.new_full((2, *rows.shape[1:]), torch.nan)]).unsqueeze(0)

    bounds = torch.nn.functional.pad(int32(*case.counts).cumsum(0, dtype=torch.int32), (1, 0))
    queries = Queries(packed(step.queries.q), max(case.counts), bounds, step.queries.start)
    return step._replace(queries=queries, gates=packed(step.gates))


PLACES: dict[str, Callable[[Step, Case], Step]] = {
    "ring": in_a_ring,
    "tail": as_a_tail,
    "pages": in_pages,
    "ring over pages": lambda step, case: window_in_pages(in_a_ring(step, case, page_size=8)),
    "tail over pages": lambda step, case: window_in_pages(as_a_tail(step, case)),
    "ragged": ragged,
    "ragged over pages": lambda step, case: ragged(in_pages(step, case), case),
}


@pytest.mark.parametrize("counts", [pytest.param((1, 1, 1), marks=pytest.mark.slow), (5, 0, 3)], ids=str)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@WINDOW_IN
def test_keys_may_lie_anywhere(
    place: Callable[[Step, Case], Step], counts: tuple[int, ...], window_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(counts=counts)
    on_a_gpu_of(case.multiprocessors, monkeypatch, case.slices)
    read_windows_in(window_in, monkeypatch)
    step = make_step(case)
    found, expected = by_the_kernels(place(step, case), SMALL), by_the_reference(step, SMALL)
    if place(step, case).queries.cu_seqlens is not None:
        end = sum(counts)
        assert bool((found.block_indices[:, end:] == -1).all())
        assert bool((found.out[:, end:] == 0).all())
        found = FusedOutput(*(x[:, :end] for x in found))
        expected = FusedOutput(*(torch.cat([x[b, :count] for b, count in enumerate(counts)]).unsqueeze(0) for x in expected))
    assert_same(found, expected)


@WINDOW_IN
def test_keys_before_the_first_row_of_a_tail_are_absent(window_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(starts=(14, 37, 90), counts=(2, 1, 3))
    on_a_gpu_of(case.multiprocessors, monkeypatch, case.slices)
    read_windows_in(window_in, monkeypatch)
    step = as_a_tail(make_step(case), case)
    win = step.win
    assert win.first is not None
    # two rows fewer than the window reaches back
    fewer = win._replace(k=win.k[:, 2:], v=win.v[:, 2:], max_count=win.max_count - 2, first=win.first + 2)
    step = step._replace(win=fewer)
    assert_same(by_the_kernels(step, SMALL), by_the_reference(step, SMALL))


@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "pages"])
@WINDOW_IN
def test_fp8_stores_are_multiplied_by_their_scales(is_paged: bool, window_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(counts=(3, 1, 2))
    on_a_gpu_of(case.multiprocessors, monkeypatch, case.slices)
    read_windows_in(window_in, monkeypatch)
    step = make_step(case)
    if is_paged:
        step = in_pages(step, case)

    def in_fp8(keys: Keys) -> tuple[Keys, Keys]:
        scales = [x.abs().amax(-1) / 448 for x in (keys.k, keys.v)]
        k, v = ((x / scale.unsqueeze(-1)).to(torch.float8_e4m3fn) for x, scale in zip((keys.k, keys.v), scales, strict=True))
        back = [x.float() * scale.unsqueeze(-1) for x, scale in zip((k, v), scales, strict=True)]
        return keys._replace(k=k, v=v, k_scale=scales[0], v_scale=scales[1]), keys._replace(k=back[0], v=back[1])

    (slc, plain_slc), (win, plain_win) = in_fp8(step.slc), in_fp8(step.win)
    expected = by_the_reference(step._replace(slc=plain_slc, win=plain_win), SMALL)
    assert_same(by_the_kernels(step._replace(slc=slc, win=win), SMALL), expected)


def test_launches_do_not_depend_on_lengths(
    launched: list[tuple[str, tuple[int, ...], dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One CUDA graph serves all of them."""
    on_a_gpu_of(40, monkeypatch)
    step = make_step(Case())
    for starts in ((0, 37, 90), (3, 5, 60)):
        by_the_kernels(step._replace(queries=step.queries._replace(start=int32(*starts))), SMALL)
    assert launched[:3] == launched[3:]
    (_split, split_grid, _), _choose, (_attend, attend_grid, _) = launched[:3]
    assert split_grid[1] > 1
    assert attend_grid[2] > 1


def test_the_programs_of_a_launch_run_at_once_whatever_the_batch() -> None:
    at_once = 132 * op.PROGRAMS_PER_MULTIPROCESSOR
    for rows in range(1, 4 * at_once):
        splits = op.Splits.of(132, rows, rows, BlockGeometry())
        assert min(splits.cmp, splits.slc, splits.win + splits.late_win) >= 1
        assert 0 in (splits.win, splits.late_win)
        assert splits.win_from in (0, splits.cmp)
        # programs of chosen blocks wait until windows are read
        for programs, most in (
            (max(splits.cmp, splits.win_from + splits.win), at_once),
            (splits.slc, at_once),
            (splits.late_win, at_once // 2),
        ):
            assert programs * rows <= max(most, rows)


@pytest.mark.parametrize("rows_of_tile", [2, 4, 8, 16])
def test_windows_of_many_rows_leave_the_compressed_keys_half_of_the_programs(rows_of_tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "LATE_ROWS", range(0))
    at_once = 132 * op.PROGRAMS_PER_MULTIPROCESSOR
    for tiles in range(1, at_once):
        splits = op.Splits.of(132, tiles, rows_of_tile * tiles, BlockGeometry())
        assert 2 * splits.cmp > min(at_once // tiles, op.MOST_SPLITS)


def test_sums_have_room_for_the_blocks_of_the_selected_store_and_no_more() -> None:
    # 4,095 compressed blocks leave room for 65,551 tokens
    num_tokens, geometry = 65_536, BlockGeometry()
    num_blocks = num_compressed_blocks(num_tokens, geometry)
    store = (torch.bfloat16, False)
    sizes = op.StepSizes(
        (9, 0), 132, True, False, 4, torch.bfloat16, (1, 1, 64, 192), 4, 128, 1, 1, False, num_blocks, num_tokens, store, store, store, True, geometry
    )  # fmt: skip
    assert op.cut_of(sizes).num_blocks == num_tokens // geometry.selection_block_size
    assert op.cut_of(sizes._replace(most_tokens=num_tokens + 1)).num_blocks > num_tokens // geometry.selection_block_size


def test_steps_of_one_size_are_cut_once_and_those_of_another_anew(
    launched: list[tuple[str, tuple[int, ...], dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[tuple[Any, ...]] = []
    of = op.Splits.of
    monkeypatch.setattr(op.Splits, "of", lambda *numbers: cut.append(numbers) or of(*numbers))
    op.cut_of.cache_clear()
    on_a_gpu_of(40, monkeypatch)
    step = make_step(Case())
    ring = step.win._replace(ring=True, max_count=step.win.k.shape[1])
    others = step._replace(win=ring), step._replace(queries=step.queries._replace(max_count=2))
    for each in (step, *others, step, *others):
        by_the_kernels(each, SMALL)
    on_a_gpu_of(12, monkeypatch)
    by_the_kernels(step, SMALL)
    assert len(cut) == 4
    assert launched[:9] == launched[9:18]
    assert launched[:3] not in (launched[3:6], launched[6:9], launched[18:])


def test_blocks_of_many_strides_take_the_kernels_of_training(launched: list[tuple[str, tuple[int, ...], dict[str, Any]]]) -> None:
    case = Case(starts=(150,), geometry=BlockGeometry(2, 2, 66, 3, 1, 1, 20), counts=(1,))
    step = make_step(case)
    assert_same(by_the_kernels(step, case.geometry), by_the_reference(step, case.geometry))
    assert launched == []


def test_longer_steps_and_gradients_take_the_kernels_of_training(launched: list[tuple[str, tuple[int, ...], dict[str, Any]]]) -> None:
    case = Case(starts=(20,), counts=(MOST_STEP_ROWS + 1,))
    step = make_step(case)
    assert_same(by_the_kernels(step, SMALL), by_the_reference(step, SMALL))
    step = make_step(Case())
    by_the_kernels(step._replace(queries=step.queries._replace(q=step.queries.q.requires_grad_())), SMALL)
    assert launched == []


def test_rows_that_do_not_count_are_zero_whatever_they_hold() -> None:
    case = Case(counts=(4, 1, 2))
    step = make_step(case)
    for b, count in enumerate(case.counts):
        step.queries.q[b, count:], step.gates[b, count:] = torch.nan, torch.nan
    found = by_the_kernels(step, SMALL)
    for b, count in enumerate(case.counts):
        assert bool((found.out[b, count:] == 0).all())
        assert bool((found.block_indices[b, count:] == -1).all())
    assert bool(found.out.isfinite().all())


def test_equal_scores_go_to_the_lower_block(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(starts=(90, 95, 71), slices=2)
    on_a_gpu_of(case.multiprocessors, monkeypatch, case.slices)
    step = make_step(case)
    step.cmp.k[~step.cmp.k.isnan()] = 0.5
    found = by_the_kernels(step, SMALL)
    assert_same(found, by_the_reference(step, SMALL))
    # block 0, which no earlier block overlaps, gets less than the others and is forced
    first_free = range(SMALL.num_initial_blocks, SMALL.num_selected_blocks - SMALL.num_local_blocks)
    assert found.block_indices[0, 0, 0].tolist()[SMALL.num_initial_blocks : -SMALL.num_local_blocks] == list(first_free)


def test_a_step_leaves_nothing_behind_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters of arrived programs start again, whatever their memory held."""
    on_a_gpu_of(40, monkeypatch)
    step = make_step(Case(counts=(3, 1, 2)))
    first, second = (by_the_kernels(step, SMALL) for _ in range(2))
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.block_indices, second.block_indices)


@pytest.mark.parametrize("factor", [50, 1e4])
def test_large_scores_choose_and_sum_as_small_ones(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu_of(40, monkeypatch)
    step = make_step(Case())
    step = step._replace(queries=step.queries._replace(q=step.queries.q * factor))
    found, expected = by_the_kernels(step, SMALL), by_the_reference(step, SMALL)
    assert max_error(found.out, expected.out) <= 1e-6 * factor
    assert bool(found.out.isfinite().all())


@pytest.mark.parametrize("place", [lambda step, case: step, *PLACES.values()], ids=["rows", *PLACES])
def test_rows_behind_the_end_of_a_store_read_nothing_outside_it(
    place: Callable[[Step, Case], Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step keeps counting when its cache is full; `cache.check()` says so later."""
    case = Case(counts=(2, 1, 3))
    on_a_gpu_of(case.multiprocessors, monkeypatch, case.slices)
    step = place(make_step(case), case)
    guarded = []
    for keys in step[1:4]:
        # the memory before and after a store is NaN
        views = [
            torch.nn.functional.pad(x.flatten(), (64, 64 * 1024), value=torch.nan)[64:][: x.numel()].view(x.shape) for x in (keys.k, keys.v)
        ]
        guarded.append(keys._replace(k=views[0].nan_to_num_(0.5), v=views[1].nan_to_num_(0.5)))
    queries = step.queries._replace(start=int32(5000, 37, 2**20))
    found = by_the_kernels(Step(queries, guarded[0], guarded[1], guarded[2], step.gates), SMALL)
    assert bool(found.out.isfinite().all())


CACHES: dict[str, dict[str, Any]] = {
    "grows": {},
    "static": {"static": True},
    "pages": {"static": True, "page_size": 16},
    "fp8": {"static": True, "kv_dtype": torch.float8_e4m3fn},
}


@pytest.mark.parametrize(
    ("options", "kv", "branches"),
    [
        # pages and FP8 lie in static caches
        *(
            pytest.param(
                options,
                kv,
                BRANCHES,
                marks=pytest.mark.slow if name == "static" or (kv == "shared") != (name == "pages") else (),
                id=f"{name}-{kv}",
            )
            for name, options in CACHES.items()
            for kv in ("separate", "shared")
        ),
        *(
            pytest.param(options, "shared", ("slc", "win"), marks=() if name == "grows" else pytest.mark.slow, id=f"{name}-without cmp")
            for name, options in CACHES.items()
        ),
    ],
)
def test_a_layers_steps_take_the_three_launches(
    options: dict[str, Any],
    kv: str,
    branches: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    launched: list[tuple[str, tuple[int, ...], dict[str, Any]]],
) -> None:
    on_a_gpu_of(40, monkeypatch)
    config = NSAConfig(
        hidden_size=16, num_heads=4, num_kv_heads=2, head_dim_qk=16, head_dim_v=16, geometry=SMALL, compressor="mean", kv=kv,
        branches=branches, backends={"nsa": "triton", "append": "triton"},
    )  # fmt: skip
    torch.manual_seed(0)
    layer = NativeSparseAttention(config).to(DEVICE)
    reference = NativeSparseAttention(attrs.evolve(config, backends=dict.fromkeys(("cmp", "select", "slc", "win"), "sdpa"))).to(DEVICE)
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(2, 90, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    caches = [module.new_cache(2, 96, **options) for module in (layer, reference)]
    for cache in caches:
        if cache.pages is not None:
            for sequence in range(2):
                cache.reserve(sequence, 96, length=0)
    done = 0
    for rows in (80, 1, 4, 1):
        found, expected = (module(x[:, done : done + rows], cache=cache) for module, cache in zip((layer, reference), caches, strict=True))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert [name for name, _grid, _constants in launched] == (list(LAUNCHES) if rows <= MOST_STEP_ROWS else [])
        launched.clear()
        done += rows


@pytest.mark.parametrize("scaled", ["slc", "win"])
def test_a_gpu_without_fp8_takes_no_step_over_such_stores(scaled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.zeros(1, 8, 1, 16)
    cmp, slc, win = (Keys(store, store, 8, k_scale=torch.ones(1, 8, 1) if name == scaled else None) for name in ("cmp", "slc", "win"))
    q = SimpleNamespace(is_cuda=True, requires_grad=False)
    operands = (SimpleNamespace(q=q, start=torch.zeros(1), max_count=1), cmp, slc, win, store)
    for capability, takes in (((8, 0), False), ((8, 9), True)):
        monkeypatch.setattr(plugin, "capability_of", lambda x, capability=capability: capability)
        assert plugin.is_step(operands, SMALL) is takes
