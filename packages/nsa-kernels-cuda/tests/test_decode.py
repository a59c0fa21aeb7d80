"""A decode step in one launch: the kernel on the host, cluster by cluster, and on a GPU, against the reference branch by branch."""

import ctypes
import math
import re
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_core import (
    BlockGeometry,
    BranchRequest,
    Capability,
    InputError,
    NativeSparseAttention,
    NSAConfig,
    Operation,
    Reason,
    default_registry,
    explain_routing,
)
from nsa_core.backends.base import FusedOutput, Keys, Layout, Queries
from nsa_core.blocks import num_compressed_blocks, num_selection_blocks
from nsa_core.reference import naive
from nsa_core.selection import pool_importance
from nsa_core.testing.conformance import check_backend
from nsa_core.testing.inputs import EQUAL_BLOCKS, ONE_LOCAL, SMALL
from nsa_core.testing.steps import step_by_branches
from nsa_core.testing.strategies import HEADS, edge_lengths, geometries
from nsa_core.testing.tolerances import allowed_error, max_error, near_tie_margin
from nsa_kernels_cuda import cluster_launch, jit
from nsa_kernels_cuda.cluster_launch import SHARED_BYTES
from nsa_kernels_cuda.decode import backend as decode_backend
from nsa_kernels_cuda.decode import op
from nsa_kernels_cuda.decode import plan as plans
from nsa_kernels_cuda.decode.backend import CudaDecode

SCALE = 0.3
FP16 = torch.float16
FP8 = torch.float8_e4m3fn


class Case(NamedTuple):
    """A step of sequences that hold different numbers of tokens; the first row stands at `starts`."""

    starts: tuple[int, ...] = (0, 37, 90)
    counts: tuple[int, ...] = ()
    """Rows of each sequence; empty: one of each."""
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim_qk: int = 16
    head_dim_v: int = 16
    geometry: BlockGeometry = SMALL
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    scale: float = SCALE


class Step(NamedTuple):
    """The operands of a step."""

    queries: Queries
    cmp: Keys
    slc: Keys
    win: Keys
    gates: Tensor

    def of_sequence(self, b: int) -> "Step":
        """Return the step of one sequence alone."""

        def part(x: Any) -> Any:
            return x[b : b + 1] if isinstance(x, Tensor) else x

        return Step(*(type(x)(*map(part, x)) if isinstance(x, tuple) else part(x) for x in self))


def int32(*numbers: int, device: str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def make_step(case: Case, device: str = "cpu") -> Step:
    """Return a step over stores that are NaN after each sequence's last token and last whole block."""
    generator = torch.Generator(device).manual_seed(case.seed)
    counts = case.counts or (1,) * len(case.starts)
    batch, num_rows, longest = len(case.starts), max(counts), max(case.starts) + max(counts) + 9

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.dtype)

    def store(length: int, held: Callable[[int], int]) -> Keys:
        k, v = (normal(batch, length, case.num_kv_heads, width) for width in (case.head_dim_qk, case.head_dim_v))
        for b, (start, count) in enumerate(zip(case.starts, counts, strict=True)):
            k[b, held(start + count) :], v[b, held(start + count) :] = torch.nan, torch.nan
        return Keys(k, v, length)

    count = int32(*counts, device=device) if case.counts else None
    q = normal(batch, num_rows, case.num_heads, case.head_dim_qk)
    queries = Queries(q, num_rows, None, int32(*case.starts, device=device), count)
    cmp = store(num_compressed_blocks(longest, case.geometry), lambda tokens: num_compressed_blocks(tokens, case.geometry))
    gates = torch.rand(batch, num_rows, case.num_heads, 3, generator=generator, device=device)
    return Step(queries, cmp, store(longest, int), store(longest, int), gates)


def by_the_reference(step: Step, case: Case, chosen: Tensor | None = None) -> FusedOutput:
    return step_by_branches(*step, geometry=case.geometry, scale=case.scale, chosen=chosen)


def assert_same(found: FusedOutput, expected: FusedOutput) -> None:
    """Assert equal choices, and outputs within the rounding of q's dtype: weights are rounded as well."""
    assert torch.equal(found.block_indices, expected.block_indices)
    limit = allowed_error(expected.out, found.out.dtype, torch.finfo(found.out.dtype).eps / 2)
    error = max_error(found.out, expected.out)
    assert error <= limit, f"out is off by {error:.2e} (allowed: {limit:.2e})"


def scores_of(step: Step, case: Case, b: int, row: int = 0) -> list[list[float]]:
    """Return the scores of the selection blocks of a row of sequence b in float64, for each KV head (Eq. 8 to 10)."""
    tokens = int(step.queries.start[b]) + row + 1
    keys = step.cmp.k[b, : num_compressed_blocks(tokens, case.geometry)].double()
    queries = step.queries.q[b, row].double().unflatten(0, (keys.shape[1], -1))
    weights = (torch.einsum("ghd,cgd->ghc", queries, keys) * case.scale).softmax(-1).sum(1)
    found: list[list[float]] = pool_importance(weights, case.geometry, num_selection_blocks(tokens, case.geometry)).tolist()
    return found


def assert_choice_follows(chosen: list[int], scores: list[float], position: int, case: Case) -> bool:
    """Assert that a row chose the highest scores, or others that the near-tie rule allows; return True if it did the second."""
    expected = naive.choose_blocks(scores, position, case.geometry)
    found = [block for block in chosen if block >= 0]
    if found == expected:
        return False
    gap = naive.margin_of_choice(scores, position, case.geometry)
    margin = float(near_tie_margin(torch.tensor(max(scores), dtype=torch.float64), case.dtype))
    assert gap <= margin, f"blocks {found} in place of {expected}: the scores at the cut are {gap:.2e} apart (a near tie: {margin:.2e})"
    ranked, room = naive.rank_free_blocks(scores, position, case.geometry)
    assert len(found) == len(expected)
    assert found == sorted(set(found))
    # only blocks at the cut may be swapped; forced blocks never change
    exchanged = set(found) ^ set(expected)
    assert exchanged <= set(ranked), f"{exchanged - set(ranked)} are forced or not visible"
    distance = max(abs(scores[block] - scores[ranked[room - 1]]) for block in exchanged)
    assert distance <= margin, f"blocks {exchanged} stand {distance:.2e} from the cut (a near tie: {margin:.2e})"
    return True


def assert_same_above_ties(found: FusedOutput, step: Step, case: Case) -> None:
    """Assert the reference's choice except at near ties, and in every row its output over the blocks that were chosen."""
    near = 0
    counts = [1] * len(case.starts) if step.queries.count is None else step.queries.count.tolist()
    for b, start in enumerate(step.queries.start.tolist()):
        for row in range(counts[b]):
            for group, scores in enumerate(scores_of(step, case, b, row)):
                near += assert_choice_follows(found.block_indices[b, row, group].tolist(), scores, start + row, case)
    print(f"{near} of {found.block_indices[..., 0].numel()} choices differ from the reference's, all near ties")
    assert_same(found, by_the_reference(step, case, found.block_indices))


def as_it_is(step: Step, case: Case) -> Step:
    """Return the step."""
    return step


def in_a_ring(step: Step, case: Case) -> Step:
    """Return the step with the window's keys in a ring of w rows, and one more for each row of the step behind the first."""
    length = case.geometry.window_size - 1 + step.queries.max_count
    stores = []
    for x in (step.win.k, step.win.v):
        ring = torch.full_like(x[:, :1].expand(-1, length, -1, -1), torch.nan)
        for b, start in enumerate(case.starts):
            end = start + (case.counts[b] if case.counts else 1)
            for position in range(max(0, end - length), end):
                ring[b, position % length] = x[b, position]
        stores.append(ring)
    return step._replace(win=Keys(stores[0], stores[1], step.win.max_count, ring=True))


def as_a_tail(step: Step, case: Case) -> Step:
    """Return the step with only the window's last tokens, whose first is at `Keys.first`."""
    firsts = [max(0, start - case.geometry.window_size + 1) for start in case.starts]
    length = case.geometry.window_size - 1 + step.queries.max_count
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, length), value=torch.nan) for x in (step.win.k, step.win.v)]
    k, v = (torch.stack([x[b, first : first + length] for b, first in enumerate(firsts)]) for x in padded)
    return step._replace(win=Keys(k, v, length, first=int32(*firsts, device=str(k.device))))


def with_shared_keys(step: Step, case: Case) -> Step:
    """Return the step with one store for the selected and the sliding branch."""
    return step._replace(win=step.slc)


Form = Callable[[Step, Case], Step]
LAYOUTS: dict[str, Form] = {"ring": in_a_ring, "tail": as_a_tail, "shared": with_shared_keys}
PAGES = {"cmp": 1, "slc": 1, "win": 2}
"""Selection blocks of a page of each store."""


def in_pages(step: Step, case: Case, sizes: Mapping[str, int] = PAGES) -> Step:
    """Return the step with its stores in pages, each by a table of its own; rings and tails are left as they are.

    The first page is NaN and in no table; entries behind a sequence's last token name pages outside the store.
    """

    def paged(name: str, keys: Keys) -> Keys:
        stride = case.geometry.compression_stride if name == "cmp" else 1
        page_size = sizes[name] * case.geometry.selection_block_size // stride
        batch, num_pages = keys.k.shape[0], -(-keys.k.shape[1] // page_size)
        order = 1 + torch.randperm(batch * num_pages, generator=torch.Generator().manual_seed(1)).to(keys.k.device)
        stores = []
        for x in keys[:2]:
            fill = x.new_full((batch, num_pages * page_size - x.shape[1], *x.shape[2:]), torch.nan)
            pages = torch.cat([x, fill], 1).reshape(-1, page_size, *x.shape[2:])
            stores.append(x.new_full((1 + len(pages), *pages.shape[1:]), torch.nan).index_copy(0, order, pages))
        table = order.to(torch.int32).view(batch, num_pages)
        for b, start in enumerate(case.starts):
            num_held = -(-(start + (case.counts[b] if case.counts else 1)) // (page_size * stride))
            table[b, num_held::2], table[b, num_held + 1 :: 2] = -5, 10**6
        return Keys(*stores, keys.max_count, page_table=table)

    are_parts = step.win.ring or step.win.first is not None
    win = step.win if are_parts else paged("win", step.win)
    return step._replace(cmp=paged("cmp", step.cmp), slc=paged("slc", step.slc), win=win)


def as_fp8(step: Step) -> tuple[Step, Step]:
    """Return the step with the stores of two branches in FP8, and with these numbers times their scales in the dtype of q."""

    def converted(keys: Keys) -> tuple[Keys, Keys]:
        scales = [x.float().abs().amax(-1) / 448 for x in keys[:2]]
        k, v = ((x.float() / scale.unsqueeze(-1)).to(FP8) for x, scale in zip(keys[:2], scales, strict=True))
        back = [(x.float() * scale.unsqueeze(-1)).to(keys.k.dtype) for x, scale in zip((k, v), scales, strict=True)]
        return keys._replace(k=k, v=v, k_scale=scales[0], v_scale=scales[1]), keys._replace(k=back[0], v=back[1])

    (slc, slc_back), (win, win_back) = converted(step.slc), converted(step.win)
    return step._replace(slc=slc, win=win), step._replace(slc=slc_back, win=win_back)


def in_narrow_pages(step: Step, case: Case) -> Step:
    """Return the step with its stores in pages, of FP8 where they may be."""
    return as_fp8(in_pages(step, case))[0]


def packed(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the rows (B, S, ...) that count, one sequence after another."""
    return torch.cat([x[b, :count] for b, count in enumerate(counts)]).unsqueeze(0)


def ragged(step: Step, case: Case) -> Step:
    """Return the step with ragged rows, and three rows of NaN behind those of the last sequence."""
    counts = case.counts or (1,) * len(case.starts)
    bounds = torch.nn.functional.pad(int32(*counts, device=str(step.gates.device)).cumsum(0, dtype=torch.int32), (1, 0))
    q, gates = (torch.nn.functional.pad(packed(x, counts), (0, 0, 0, 0, 0, 3), value=torch.nan) for x in (step.queries.q, step.gates))
    return step._replace(queries=Queries(q, max(counts), bounds, step.queries.start), gates=gates)


def run_on(library: ctypes.CDLL, step: Step, case: Case, *, backwards: bool = False) -> FusedOutput:
    """Return the kernel's results for CPU tensors. Unwritten elements are NaN, or -7; `backwards`: the last warp runs first."""
    queries, *stores, gates = step
    out = torch.full((*queries.q.shape[:3], step.cmp.v.shape[3]), math.nan, dtype=case.dtype)
    indices = torch.full((*queries.q.shape[:2], step.cmp.k.shape[2], case.geometry.num_selected_blocks), -7, dtype=torch.int32)
    kernel, launch = op.launch_of(queries, stores, gates, out, indices, geometry=case.geometry, scale=case.scale)
    assert launch.shared_bytes <= SHARED_BYTES
    assert launch.num_threads == plans.NUM_WARPS * plans.WARP_SIZE
    pointers = [None if x is None else x.data_ptr() for x in launch.arguments if not isinstance(x, int)]
    numbers = [x for x in launch.arguments if isinstance(x, int)]
    assert kernel.endswith(plans.PLACED) is is_placed(step)
    library.emulate_decode(
        kernel.encode(), launch.num_clusters * launch.num_ranks, launch.shared_bytes, launch.num_ranks, int(backwards),
        (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int * len(numbers))(*numbers),
    )  # fmt: skip
    return FusedOutput(out, indices)


def is_placed(step: Step) -> bool:
    """Return True for a step that the kernels of decode_placed.cu take."""
    stores = step[1:4]
    has_rows = step.queries.q.shape[1] > 1 or step.queries.cu_seqlens is not None
    return has_rows or any(keys.page_table is not None or keys.k_scale is not None for keys in stores)


@pytest.fixture
def run(emulated_decode):
    """Give `run_on` of the emulated kernels."""
    return partial(run_on, emulated_decode)


def with_clusters_of(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "CLUSTERS", ((2**31, num_ranks),))


CASES = {
    "one row": Case(),
    "group of 1": Case(num_heads=2),
    "group of 3": Case(num_heads=6),
    "group of 16": Case(num_heads=16, num_kv_heads=1),
    "group of 40": Case(num_heads=40, num_kv_heads=1),
    "D_k above D_v": Case(head_dim_qk=192, head_dim_v=128, starts=(90, 61)),
    "D_v above D_k": Case(head_dim_qk=16, head_dim_v=256),
    "largest heads": Case(head_dim_qk=256, head_dim_v=256, starts=(77,), dtype=FP16),
    "D of 48 and 80": Case(head_dim_qk=48, head_dim_v=80, dtype=FP16),
    "one local block": Case(geometry=ONE_LOCAL, starts=(63, 150, 8)),
    "l = l'": Case(geometry=EQUAL_BLOCKS, starts=(63, 150, 8)),
    "default geometry": Case(starts=(1500, 20, 1150), geometry=BlockGeometry(), num_heads=8),
    "three strides to a block": Case(starts=(90, 211), geometry=BlockGeometry(4, 4, 12, 4, 1, 1, 20)),
    "five strides to a block": Case(starts=(90, 211), geometry=BlockGeometry(8, 4, 20, 4, 1, 1, 20)),
    "40 blocks of 8": Case(starts=(700,), geometry=BlockGeometry(4, 2, 8, 40, 2, 3, 20), scale=1.0),
    "blocks of 16 strides": Case(starts=(530, 70), geometry=BlockGeometry(8, 4, 64, 4, 0, 1, 20)),
    "blocks that a tile does not divide": Case(starts=(900,), geometry=BlockGeometry(8, 8, 72, 4, 1, 2, 100)),
    "longer than a cluster's first tiles": Case(starts=(5000,), num_heads=2, num_kv_heads=1, geometry=BlockGeometry(8, 4, 8, 8, 1, 2, 40)),
    "fp16": Case(dtype=FP16, starts=(5, 41, 63)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_equals_the_branches_one_by_one(run, case):
    step = make_step(case)
    assert_same(run(step, case), by_the_reference(step, case))


TIES = Case(starts=tuple(range(370, 498, 8)), num_heads=16)


def test_a_choice_that_differs_above_the_margin_is_found_in_a_single_row():
    step = make_step(TIES)
    found = by_the_reference(step, TIES)
    assert_same_above_ties(found._replace(out=found.out.to(TIES.dtype)), step, TIES)
    scores, position = scores_of(step, TIES, 5)[0], TIES.starts[5]
    ranked, room = naive.rank_free_blocks(scores, position, TIES.geometry)
    other = sorted({*naive.forced_blocks(position, TIES.geometry), *ranked[: room - 1], ranked[-1]})
    wrong = found.block_indices.clone()
    wrong[5, 0, 0] = int32(*other)
    # the output is that of the wrong choice: the choice alone is at fault
    out = by_the_reference(step, TIES, wrong).out.to(TIES.dtype)
    with pytest.raises(AssertionError, match="the scores at the cut are"):
        assert_same_above_ties(FusedOutput(out, wrong), step, TIES)


def test_at_a_near_tie_only_the_scores_at_the_cut_may_change_places():
    # 8 blocks: 0, 6 and 7 are forced and one of the others is chosen
    scores, position = [1.0, 0.2, 0.5, 0.5001, 0.2, 0.1, 0.1, 0.1], 63
    assert not assert_choice_follows([0, 3, 6, 7], scores, position, Case())
    assert assert_choice_follows([0, 2, 6, 7], scores, position, Case())
    for wrong, message in (([0, 1, 6, 7], "from the cut"), ([2, 3, 6, 7], "are forced"), ([0, 6, 7], None)):
        with pytest.raises(AssertionError, match=message):
            assert_choice_follows(wrong, scores, position, Case())
    with pytest.raises(AssertionError, match="at the cut are"):
        assert_choice_follows([0, 1, 6, 7], [1.0, 0.2, 0.5, 0.6, 0.2, 0.1, 0.1, 0.1], position, Case())


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("starts", [(0, 37, 90), (700,), (7, 15)], ids=str)
def test_clusters_of_every_size_agree(run, num_ranks, starts, monkeypatch):
    with_clusters_of(num_ranks, monkeypatch)
    case = Case(starts=starts, geometry=BlockGeometry(8, 4, 8, 6, 1, 2, 20))
    step = make_step(case)
    assert_same(run(step, case), by_the_reference(step, case))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_rings_of_every_depth_agree(run, num_stages, monkeypatch):
    monkeypatch.setattr(plans, "MOST_STAGES", num_stages)
    with_clusters_of(2, monkeypatch)
    case = Case(starts=(1500, 400), geometry=BlockGeometry(8, 4, 16, 12, 1, 2, 300), num_heads=40)
    step = make_step(case)
    assert_same(run(step, case), by_the_reference(step, case))


@pytest.mark.parametrize("form", [as_it_is, in_narrow_pages], ids=["rows", "FP8 in pages"])
@pytest.mark.parametrize("case", [CASES["default geometry"], CASES["group of 40"]], ids=["default geometry", "group of 40"])
def test_no_result_depends_on_which_warp_runs_first(run, case, form):
    step = form(make_step(case), case)
    found, other = run(step, case), run(step, case, backwards=True)
    assert torch.equal(found.out, other.out)
    assert torch.equal(found.block_indices, other.block_indices)


SANITIZED = Case(starts=(90, 37), num_heads=8, geometry=BlockGeometry(8, 4, 8, num_selected_blocks=6, window_size=20))
"""The step that test_cuda.py runs under compute-sanitizer."""
WATCHED = {
    "sanitized": SANITIZED,
    **{
        name: CASES[name] for name in ("group of 3", "group of 40", "D_k above D_v", "40 blocks of 8", "blocks that a tile does not divide")
    },
}


def hazards_of(library: ctypes.CDLL, case: Case, *, form: Form = as_it_is, backwards: bool = False) -> tuple[int, str]:
    """Return the number of hazards of a step, and the first of them."""
    text = ctypes.create_string_buffer(200)
    run_on(library, form(make_step(case), case), case, backwards=backwards)
    return library.take_hazards(text, len(text)), text.value.decode()


@pytest.mark.parametrize(
    ("backwards", "form"),
    [
        pytest.param(False, as_it_is, id="first warp first-rows"),
        pytest.param(False, in_narrow_pages, id="first warp first-FP8 in pages", marks=pytest.mark.slow),
        pytest.param(True, as_it_is, id="last warp first-rows", marks=pytest.mark.slow),
        pytest.param(True, in_narrow_pages, id="last warp first-FP8 in pages"),
    ],
)
@pytest.mark.parametrize("case", WATCHED.values(), ids=WATCHED)
def test_barriers_order_all_accesses_to_shared_memory(watched_decode, case, backwards, form):
    assert hazards_of(watched_decode, case, form=form, backwards=backwards) == (0, "")


BARRIER = re.compile(r"(?<=[ )])(__syncwarp\(\)|__syncthreads\(\)|cluster_barrier\(\)|partial_barrier\([^;]*\))(?=;)")
NUM_BARRIERS = {"attend.cuh": 2, "choice.cuh": 3, "decode.cuh": 11, "placement.cuh": 1}
# behind the last barrier nothing is accessed: the emulator overwrites the shared memory of a CTA that has ended, so that outputs are wrong
HAZARDS_WITHOUT = [(name, index) for name, count in NUM_BARRIERS.items() for index in range(count) if (name, index) != ("decode.cuh", 10)]


def test_every_barrier_is_in_the_table():
    assert {path.name: len(BARRIER.findall(path.read_text())) for path in jit.CSRC.iterdir() if path.name in NUM_BARRIERS} == NUM_BARRIERS


QUICKLY_REMOVED = {("attend.cuh", 0)}


@pytest.mark.parametrize(
    ("name", "index"), [pytest.param(*each, marks=() if each in QUICKLY_REMOVED else pytest.mark.slow) for each in HAZARDS_WITHOUT]
)
def test_a_missing_barrier_is_found(name, index, build_watched, tmp_path):
    csrc = tmp_path / "csrc"
    shutil.copytree(jit.CSRC, csrc)
    text = (csrc / name).read_text()
    barrier = list(BARRIER.finditer(text))[index]
    (csrc / name).write_text(text[: barrier.start()] + "(void)0" + text[barrier.end() :])
    library = build_watched(csrc=csrc)
    form = in_narrow_pages if name == "placement.cuh" else as_it_is
    assert any(hazards_of(library, case, form=form)[0] for case in WATCHED.values())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_windows_keys_may_lie_anywhere(run, layout):
    case = Case(starts=(0, 37, 90, 19))
    step = layout(make_step(case), case)
    whole = make_step(case)
    assert_same(run(step, case), by_the_reference(whole._replace(win=whole.slc) if step.win is step.slc else whole, case))


PLACED_CASES = {
    "one row": Case(),
    "group of 3": Case(num_heads=6),
    "group of 40": Case(num_heads=40, num_kv_heads=1),
    "largest heads": CASES["largest heads"],
    "D_v above D_k": CASES["D_v above D_k"],
    "D of 48 and 80": CASES["D of 48 and 80"],
    "three strides to a block": CASES["three strides to a block"],
    "40 blocks of 8": CASES["40 blocks of 8"],
    "blocks that a tile does not divide": CASES["blocks that a tile does not divide"],
    "default geometry": CASES["default geometry"],
}


def assert_equal(found: FusedOutput, expected: FusedOutput) -> None:
    """Assert that the numbers and choices are the same, bit for bit."""
    assert torch.equal(found.block_indices, expected.block_indices)
    assert torch.equal(found.out, expected.out)


@pytest.mark.parametrize("case", PLACED_CASES.values(), ids=PLACED_CASES)
def test_pages_give_what_contiguous_stores_do(run, case):
    step = make_step(case)
    assert_equal(run(in_pages(step, case), case), run(step, case))


@pytest.mark.parametrize("sizes", [(1, 3, 1), (8, 2, 3), (2, 16, 16)], ids=str)
@pytest.mark.parametrize("layout", [None, *LAYOUTS.values()], ids=["rows", *LAYOUTS])
def test_pages_may_have_any_size_and_the_window_none(run, layout, sizes):
    case = Case(starts=(0, 37, 90, 19))
    step = make_step(case) if layout is None else layout(make_step(case), case)
    paged = in_pages(step, case, dict(zip(("cmp", "slc", "win"), sizes, strict=True)))
    if step.win is step.slc:
        paged = paged._replace(win=paged.slc)
    assert_equal(run(paged, case), run(step, case))


@pytest.mark.parametrize("name", ["cmp", "slc", "win"])
def test_one_store_alone_may_have_pages(run, name):
    case = Case()
    step = make_step(case)
    assert_equal(run(step._replace(**{name: getattr(in_pages(step, case), name)}), case), run(step, case))


FP8_CASES = {name: PLACED_CASES[name] for name in ("group of 3", "largest heads", "D of 48 and 80", "default geometry")}


@pytest.mark.parametrize("has_pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("case", FP8_CASES.values(), ids=FP8_CASES)
def test_fp8_gives_what_its_numbers_times_their_scales_do(run, case, has_pages):
    step = make_step(case)
    narrow, back = as_fp8(in_pages(step, case) if has_pages else step)
    assert_equal(run(narrow, case), run(back, case))


def test_fp8_follows_its_two_rules(run):
    """Spec, Caches: (a) the tolerance rule over what the stores hold, here in float32; (b) a distance from the 16-bit cache."""
    case = Case(starts=(1500, 20, 1150), num_heads=32, head_dim_qk=64, head_dim_v=64, geometry=BlockGeometry(), scale=0.125)
    step = make_step(case)
    narrow, back = as_fp8(step)
    found = run(narrow, case)
    assert torch.equal(found.block_indices, run(step, case).block_indices)
    exact = by_the_reference(step._replace(slc=in_float32(narrow.slc), win=in_float32(narrow.win)), case)
    rounded = by_the_reference(back, case).out.to(case.dtype)
    assert max_error(found.out, exact.out) <= allowed_error(exact.out, case.dtype, max_error(rounded, exact.out))
    wide = by_the_reference(step, case).out
    difference = found.out.double() - wide
    assert float(difference.norm() / wide.norm()) <= 0.06
    assert float(difference.abs().max() / wide.abs().max()) <= 0.1


def in_float32(keys: Keys) -> Keys:
    """Return a store of FP8 as float32 without rounding."""
    assert keys.k_scale is not None
    assert keys.v_scale is not None
    k, v = (x.double() * scale.double().unsqueeze(-1) for x, scale in ((keys.k, keys.k_scale), (keys.v, keys.v_scale)))
    return keys._replace(k=k, v=v, k_scale=None, v_scale=None)


ROWS_OF_A_DRAFT = Case(starts=(0, 37, 90), counts=(5, 2, 7))
ROWS = {
    "a draft": ROWS_OF_A_DRAFT,
    "16 rows": Case(starts=(31, 3, 90), counts=(16, 1, 9)),
    "an empty sequence": Case(counts=(1, 0, 2)),
    "group of 16": Case(counts=(2, 3, 1), num_heads=16, num_kv_heads=1, dtype=FP16),
}
FORMS: dict[str, Form] = {
    "rows": as_it_is,
    "ring": in_a_ring,
    "tail": as_a_tail,
    "pages": in_pages,
    "a ring and pages": lambda step, case: in_pages(in_a_ring(step, case), case),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_several_rows_equal_the_branches_one_by_one(run, case, form):
    step = make_step(case)
    assert_same(run(form(step, case), case), by_the_reference(step, case))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_several_rows_equal_single_steps(run, form, monkeypatch):
    with_clusters_of(4, monkeypatch)
    case = ROWS_OF_A_DRAFT
    step = make_step(case)
    together = run(form(step, case), case)
    placed = form(step, case)
    for row in range(max(case.counts)):
        queries = step.queries._replace(
            q=step.queries.q[:, row : row + 1].contiguous(), max_count=1, start=step.queries.start + row,
            count=(step.queries.count - row).clamp(0, 1),
        )  # fmt: skip
        alone = run(placed._replace(queries=queries, gates=step.gates[:, row : row + 1].contiguous()), case)
        assert_equal(alone, FusedOutput(*(x[:, row : row + 1] for x in together)))


RAGGED = {**ROWS, "40 sequences": Case(starts=tuple(range(40)), counts=tuple(i % 3 for i in range(40)))}


@pytest.mark.parametrize("form", [FORMS["rows"], FORMS["pages"]], ids=["rows", "pages"])
@pytest.mark.parametrize("case", RAGGED.values(), ids=RAGGED)
def test_ragged_rows_equal_rows_of_a_batch(run, case, form, monkeypatch):
    with_clusters_of(2, monkeypatch)
    step = make_step(case)
    found, expected = run(ragged(form(step, case), case), case), run(step, case)
    end = sum(case.counts)
    assert bool((found.out[:, end:] == 0).all())
    assert bool((found.block_indices[:, end:] == -1).all())
    assert_equal(FusedOutput(*(x[:, :end] for x in found)), FusedOutput(*(packed(x, case.counts) for x in expected)))


def test_rows_of_unlike_sequences_equal_each_alone(run, monkeypatch):
    with_clusters_of(4, monkeypatch)
    case = Case(starts=(0, 1500, 20, 1150), counts=(3, 1, 0, 2), geometry=BlockGeometry())
    step = in_pages(make_step(case), case)
    together = run(step, case)
    for b in range(len(case.starts)):
        stores = [keys._replace(page_table=keys.page_table[b : b + 1]) for keys in step[1:4]]
        queries = Queries(*(x[b : b + 1] if isinstance(x, Tensor) else x for x in step.queries))
        alone = run(Step(queries, *stores, step.gates[b : b + 1]), case)
        assert_equal(alone, FusedOutput(*(x[b : b + 1] for x in together)))


def test_a_row_behind_the_end_of_its_pages_reads_nothing_outside_them(run):
    case = Case(starts=(90, 37, 90), counts=(2, 1, 2))
    step = in_pages(make_step(case), case)
    guarded = []
    for keys in step[1:4]:
        views = [torch.nn.functional.pad(x.flatten(), (64, 2**16), value=torch.nan)[64:][: x.numel()].view(x.shape) for x in keys[:2]]
        table = torch.full_like(keys.page_table, 10**6)
        guarded.append(keys._replace(k=views[0].nan_to_num_(0.5), v=views[1].nan_to_num_(0.5), page_table=table))
    queries = step.queries._replace(start=int32(5000, 37, 2**20))
    assert bool(run(Step(queries, *guarded, step.gates), case).out.isfinite().all())


def test_a_store_without_pages_is_a_store_without_keys(run):
    case = Case(starts=(3, 40))
    step = make_step(case)
    nothing = [x[:0].reshape(0, 8, *x.shape[2:]) for x in step.win[:2]]
    empty = Keys(*nothing, step.win.max_count, page_table=torch.zeros(2, 9, dtype=torch.int32))
    # a gate of 0 drops the window
    step.gates[..., 2] = 0
    assert_same(run(step._replace(win=empty), case), by_the_reference(step, case))


Run = Callable[[Step, Case], FusedOutput]


@st.composite
def drawn_cases(draw: st.DrawFn, most_rows: int = 1) -> Case:
    """Draw a step whose sequences end at and around the edges of a drawn geometry."""
    geometry = draw(geometries())
    heads, kv_heads = draw(st.sampled_from(HEADS))
    lengths = st.sampled_from(edge_lengths(geometry))
    starts = tuple(length - 1 for length in draw(st.lists(lengths, min_size=1, max_size=3)))
    counts = st.lists(st.integers(0, most_rows), min_size=len(starts), max_size=len(starts)).filter(any)
    return Case(
        starts=starts,
        counts=tuple(draw(counts)) if most_rows > 1 else (),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=draw(st.sampled_from((16, 48))),
        head_dim_v=draw(st.sampled_from((16, 32))),
        geometry=geometry,
        dtype=draw(st.sampled_from((torch.bfloat16, FP16))),
        seed=draw(st.integers(0, 2**16)),
    )


def check_future_tokens_change_nothing(run: Run, step: Step, case: Case) -> None:
    """Outputs and choices are bit-identical for any finite numbers after a sequence's last token and last whole block."""
    found = []
    for future in (1.0, -1000.0):
        stores = (keys._replace(k=keys.k.nan_to_num(future), v=keys.v.nan_to_num(-future)) for keys in step[1:4])
        found.append(run(Step(step.queries, *stores, step.gates), case))
    assert torch.equal(found[0].block_indices, found[1].block_indices)
    assert torch.equal(found[0].out, found[1].out)


def check_heads_permute_within_groups(run: Run, step: Step, case: Case) -> None:
    """Permuting the heads of a group permutes outputs and keeps the choice, above the margin."""
    groups = torch.arange(case.num_heads, device=step.gates.device).view(case.num_kv_heads, -1)
    order = groups[:, torch.randperm(groups.shape[1], generator=torch.Generator().manual_seed(case.seed))].flatten()
    queries = step.queries._replace(q=step.queries.q[:, :, order])
    permuted = run(step._replace(queries=queries, gates=step.gates[:, :, order]), case)
    # the choice of the heads in their first order is right for these too, and so is the output put back into it
    assert_same_above_ties(permuted._replace(out=permuted.out[:, :, order.argsort()]), step, case)


PROPERTIES = {"causality": check_future_tokens_change_nothing, "group consistency": check_heads_permute_within_groups}


@pytest.mark.parametrize("check", PROPERTIES.values(), ids=PROPERTIES)
def test_the_properties_hold_of_drawn_steps(run, check):
    @given(case=drawn_cases())
    def holds(case: Case) -> None:
        check(run, make_step(case), case)

    holds()


def over(run: Run, form: Form) -> Run:
    """Return a function that runs each step in another form; the check sees its stores as rows."""
    return lambda step, case: run(form(step, case), case)


PLACED_PROPERTIES = {
    "causality, rows": (check_future_tokens_change_nothing, as_it_is),
    "causality, FP8 in pages": (check_future_tokens_change_nothing, in_narrow_pages),
    "group consistency, a ring and pages": (check_heads_permute_within_groups, FORMS["a ring and pages"]),
}


@pytest.mark.parametrize(
    ("check", "form"),
    [
        pytest.param(*each, id=name, marks=() if name == "causality, FP8 in pages" else pytest.mark.slow)
        for name, each in PLACED_PROPERTIES.items()
    ],
)
def test_the_properties_hold_of_drawn_rows_wherever_keys_lie(run, check, form):
    @given(case=drawn_cases(most_rows=3))
    def holds(case: Case) -> None:
        check(over(run, form), make_step(case), case)

    holds()


@frozen(kw_only=True)
class EmulatedDecode:
    """The backend over the emulated kernels, with the limits of the one for GPUs."""

    library: ctypes.CDLL
    name: str = "cuda"
    operation: Operation = Operation.NSA
    capability: Capability = evolve(decode_backend.CAPABILITY, device_types=("cpu",), min_compute_capability=None)

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        return self.capability.reasons_against(request) + tuple(map(Reason.incapable, decode_backend._limits(request)))

    def preference(self, request: BranchRequest) -> int:
        return 50

    def __call__(self, *operands: Any, geometry: BlockGeometry, scale: float) -> FusedOutput:
        step = Step(*operands)
        return run_on(self.library, step, Case(geometry=geometry, scale=scale, dtype=step.queries.q.dtype))


NUM_CONFORMANCE_CASES = 14
"""In bf16 and fp16: one row over each form of the window, and several over stores, over stores of FP8, over pages, and ragged."""


def test_the_emulated_kernels_conform_to_the_oracle(emulated_decode):
    report = check_backend(EmulatedDecode(library=emulated_decode))
    assert len(report.passed) == NUM_CONFORMANCE_CASES


@pytest.mark.parametrize("form", [as_it_is, in_pages], ids=["contiguous", "pages"])
def test_compressed_keys_may_stand_in_for_values_behind_a_gate_of_0(run, form):
    """A layer without the compressed branch's output passes these operands."""
    case = Case(head_dim_qk=32, head_dim_v=32, starts=(90, 0, 61))
    step = make_step(case)
    gates = step.gates.clone()
    gates[..., 0] = 0
    without_values = step._replace(cmp=step.cmp._replace(v=step.cmp.k), gates=gates)
    # the values that the gate of 0 closes make no difference
    assert_same(run(form(without_values, case), case), by_the_reference(step._replace(gates=gates), case))


def test_gates_may_have_the_dtype_of_q_or_any_other(run):
    case = Case()
    step = make_step(case)
    for dtype in (torch.bfloat16, torch.float64, torch.float16):
        cast = step._replace(gates=step.gates.to(dtype))
        assert_same(run(cast, case), by_the_reference(cast, case))


def test_sequences_of_unlike_lengths_equal_each_alone(run, monkeypatch):
    with_clusters_of(4, monkeypatch)
    case = Case(starts=(0, 1500, 20, 1150), geometry=BlockGeometry())
    step = make_step(case)
    together = run(step, case)
    for b in range(len(case.starts)):
        alone = run(step.of_sequence(b), case)
        assert torch.equal(alone.out, together.out[b : b + 1])
        assert torch.equal(alone.block_indices, together.block_indices[b : b + 1])


def test_an_empty_row_is_zero_whatever_it_holds(run):
    case = Case()
    step = make_step(case)
    expected = run(step, case)
    step.queries.q[1], step.gates[1] = torch.nan, torch.nan
    found = run(step._replace(queries=step.queries._replace(count=int32(1, 0, 1))), case)
    assert bool((found.out[1] == 0).all())
    assert bool((found.block_indices[1] == -1).all())
    assert torch.equal(found.out[::2], expected.out[::2])


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("geometry", [SMALL, BlockGeometry(12, 4, 20, 12, 1, 2, 20)], ids=["l = 2 d", "l = 3 d"])
def test_equal_scores_go_to_the_lower_block(run, geometry, num_ranks, monkeypatch):
    with_clusters_of(num_ranks, monkeypatch)
    # 1 over the sum of weights is rounded otherwise at every length
    case = Case(starts=tuple(range(371, 499, 8)), geometry=geometry)
    step = make_step(case)
    step.cmp.k[~step.cmp.k.isnan()] = 0.5
    found = run(step, case)
    # block 0, which no earlier block overlaps, gets less than the others and is forced
    last_free = geometry.num_selected_blocks - geometry.num_local_blocks
    assert bool((found.block_indices[..., :last_free] == torch.arange(last_free)).all())
    assert_same(found, by_the_reference(step, case))


@pytest.mark.parametrize("factor", [50, 2**12])
def test_large_scores_stay_finite_and_choose_as_the_reference(run, factor):
    case = Case()
    step = make_step(case)
    step = step._replace(queries=step.queries._replace(q=step.queries.q * factor))
    assert_same(run(step, case), by_the_reference(step, case))


def test_a_row_behind_the_end_of_its_stores_reads_nothing_outside_them(run):
    """A captured step keeps counting when its cache is full; `cache.check()` says so later."""
    case = Case()
    for layout in (lambda step, case: step, in_a_ring, as_a_tail):
        step = layout(make_step(case), case)
        guarded = []
        for keys in step[1:4]:
            # the memory before and after a store is NaN
            views = [torch.nn.functional.pad(x.flatten(), (64, 2**16), value=torch.nan)[64:][: x.numel()].view(x.shape) for x in keys[:2]]
            guarded.append(keys._replace(k=views[0].nan_to_num_(0.5), v=views[1].nan_to_num_(0.5)))
        queries = step.queries._replace(start=int32(5000, 37, 2**20))
        found = run(Step(queries, *guarded, step.gates), case)
        assert bool(found.out.isfinite().all())


def test_a_step_of_64k_tokens_agrees_at_the_papers_sizes(run):
    case = Case(starts=(65_535,), num_heads=16, num_kv_heads=1, head_dim_qk=192, head_dim_v=128, geometry=BlockGeometry(), scale=192**-0.5)
    step = make_step(case)
    assert_same(run(step, case), by_the_reference(step, case))


def sizes_of(num_pairs: int, num_tokens: int, *, group_size: int = 16, head_dims: tuple[int, int] = (192, 128)) -> plans.Sizes:
    geometry = BlockGeometry()
    num_blocks = plans.num_blocks_of(num_compressed_blocks(num_tokens, geometry), geometry)
    return plans.Sizes(num_pairs, group_size, *head_dims, num_blocks, geometry)


def test_clusters_shrink_as_pairs_abound():
    found = [plans.Plan.of(sizes_of(pairs, 65_536)) for pairs in (4, 16, 32, 64, 256)]
    assert [plan and plan.num_ranks for plan in found] == [16, 8, 4, 2, 1]
    assert [plan and plan.num_win_warps for plan in found] == [3] * 5


@pytest.mark.parametrize("head_dims", [(128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("num_pairs", [1, 64, 512])
def test_every_step_of_128k_tokens_has_a_plan_that_fits(num_pairs, head_dims):
    plan = plans.Plan.of(sizes_of(num_pairs, 131_072, head_dims=head_dims))
    assert plan is not None
    assert plan.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("form", [as_it_is, in_pages], ids=["rows", "pages"])
def test_launches_do_not_depend_on_lengths(form):
    """One CUDA graph serves all of them."""
    case = Case()
    step = form(make_step(case), case)
    out, indices = torch.empty(3, 1, 4, 16, dtype=case.dtype), torch.empty(3, 1, 2, 6, dtype=torch.int32)
    launches = []
    for starts in ((0, 37, 90), (3, 5, 60)):
        queries = step.queries._replace(start=int32(*starts))
        kernel, launch = op.launch_of(queries, step[1:4], step.gates, out, indices, geometry=case.geometry, scale=case.scale)
        launches.append((kernel, launch[:4], [x for x in launch.arguments if isinstance(x, int)]))
    assert launches[0] == launches[1]


def test_the_op_has_shapes_without_numbers():
    case = Case(num_heads=6, head_dim_v=32)
    with FakeTensorMode():
        found = op.decode(*make_step(case), geometry=case.geometry, scale=case.scale)
    assert found.out.shape == (3, 1, 6, 32)
    assert found.block_indices.shape == (3, 1, 2, case.geometry.num_selected_blocks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": lambda x: x._replace(start=None)}, "without positions"),
        ({"slc": lambda x: x._replace(first=int32(0, 0, 0))}, "slc begins at `first`"),
        ({"cmp": lambda x: x._replace(k=x.k.to(FP8), v=x.v.to(FP8), k_scale=x.k[..., 0].float())}, "cmp is torch.float8_e4m3fn"),
        ({"win": lambda x: x._replace(k=x.k.float())}, "win is torch.float32, torch.bfloat16"),
        ({"slc": lambda x: x._replace(k=x.k.to(FP8), v=x.v.to(FP8))}, "slc is torch.float8_e4m3fn"),
        ({"slc": lambda x: x._replace(k=x.k[:1, :1].expand(2**16, 2**15, -1, -1), page_table=int32(0))}, "65536 pages of 32768 rows"),
    ],
)
def test_operands_that_the_kernel_would_misread_are_refused(change, message):
    step = make_step(Case())
    [(name, changed)] = change.items()
    with pytest.raises(InputError, match=message):
        op.decode(*step._replace(**{name: changed(getattr(step, name))}), geometry=SMALL, scale=SCALE)


REQUEST = BranchRequest(
    operation=Operation.NSA, device_type="cuda", compute_capability=(9, 0), dtype=torch.bfloat16, kv_dtype=torch.bfloat16, num_keys=65_536,
    num_heads=64, num_kv_heads=4, head_dim_qk=192, head_dim_v=128, layout=Layout.CACHED,
)  # fmt: skip


def messages(request: BranchRequest) -> list[str]:
    return [str(reason) for reason in CudaDecode().reasons_against(request)]


def test_it_is_eligible_for_a_decode_step(nvrtc):
    assert messages(REQUEST) == []
    assert messages(evolve(REQUEST, num_sequences=64, batch=64, dtype=FP16, kv_dtype=FP16, num_keys=131_072)) == []


def test_every_reason_is_given_at_once():
    request = evolve(
        REQUEST, compute_capability=(10, 0), layout=Layout.PACKED, kv_dtype=torch.float8_e5m2, num_queries=4, head_dim_v=320, head_dim_qk=40,
        needs_grad=True, is_aligned=False, geometry=BlockGeometry(4, 2, 64),
    )  # fmt: skip
    assert messages(request) == [
        "incapable: k, v of torch.float8_e5m2 (takes torch.bfloat16, torch.float16, torch.float8_e4m3fn)",
        "incapable: layout packed (takes cached, paged, ragged)",
        "incapable: gradients are needed (forward only)",
        "incapable: head dimension 320 (at most 256)",
        "incapable: compute capability 10.0 (its clusters are cut for 9.0)",
        "incapable: D_k=40 (takes multiples of 16)",
        "incapable: a tensor starts off a multiple of 16 bytes (keys are copied 16 bytes at a time)",
        "incapable: 32 compressed blocks begin in a selection block (takes 16); use smaller selection blocks",
    ]
    assert messages(evolve(REQUEST, compute_capability=(8, 0))) == ["incapable: compute capability 8.0 (needs 9.0 or newer)"]
    assert messages(evolve(REQUEST, kv_dtype=FP16)) == ["incapable: k, v of torch.float16 with q of torch.bfloat16 (takes one dtype)"]
    found = messages(evolve(REQUEST, num_keys=2**24, layout=Layout.PAGED))
    assert "above the shared memory of a cluster" in found[0]
    assert found[1:] == [UNMEASURED]


def test_a_step_that_it_does_not_take_compiles_nothing(monkeypatch):
    monkeypatch.setattr(jit, "why_unavailable", lambda *arguments: pytest.fail("it compiled"))
    assert messages(evolve(REQUEST, head_dim_v=40))


UNMEASURED = f"policy: {decode_backend.UNMEASURED}"
PLACED_REQUESTS = {
    "pages": evolve(REQUEST, layout=Layout.PAGED),
    "FP8": evolve(REQUEST, kv_dtype=FP8),
    "FP8 in pages": evolve(REQUEST, layout=Layout.PAGED, kv_dtype=FP8),
    "several rows": evolve(REQUEST, num_queries=4),
    "ragged rows": evolve(REQUEST, layout=Layout.RAGGED, num_queries=20, num_sequences=16),
}


@pytest.mark.parametrize("request_", PLACED_REQUESTS.values(), ids=PLACED_REQUESTS)
def test_what_was_not_measured_is_taken_by_name_alone(request_, monkeypatch):
    asked = []
    monkeypatch.setattr(jit, "why_unavailable", lambda *question: asked.append(question) or "")
    monkeypatch.setattr(jit, "note_on_cache", lambda *question: "")
    monkeypatch.setattr(decode_backend, "IS_PREFERRED", True)
    assert messages(request_) == [UNMEASURED]
    assert asked == [(op.PLACED_SOURCE, ("decode_bfloat16_128_placed",), (9, 0), None)]
    assert explain_routing(request_).chosen != "cuda"
    assert explain_routing(request_, "cuda").chosen == "cuda"


def test_long_steps_have_a_reason_of_their_own(monkeypatch):
    monkeypatch.setattr(jit, "why_unavailable", lambda *question: "")
    assert messages(evolve(REQUEST, num_queries=16, batch=3, num_sequences=3)) == [UNMEASURED]
    assert messages(evolve(REQUEST, num_queries=17, batch=3, num_sequences=3)) == [
        UNMEASURED,
        "policy: 17 rows of a sequence (above 16; each row reads all its keys by itself)",
    ]


def test_a_step_of_no_sequence_is_routed_as_any_other(monkeypatch):
    monkeypatch.setattr(jit, "why_unavailable", lambda *question: "")
    assert messages(evolve(REQUEST, batch=0, num_sequences=0)) == []
    assert messages(evolve(REQUEST, layout=Layout.RAGGED, num_queries=0, num_sequences=0)) == [UNMEASURED]


def test_each_row_of_a_step_has_a_cluster():
    found = [decode_backend._sizes_of(each).num_pairs for each in (REQUEST, *PLACED_REQUESTS.values())]
    assert found == [4, 4, 4, 4, 16, 80]


@pytest.mark.parametrize("num_clusters", [0, 3])
def test_the_next_backend_serves_a_gpu_without_room_for_a_cluster(num_clusters, nvrtc, monkeypatch):
    asked = []

    def why_no_cluster_fits(*question: Any) -> str:
        asked.append(question)
        return "" if num_clusters else "a cluster of 16 CTAs does not fit GPU 2"

    monkeypatch.setattr(cluster_launch, "why_no_cluster_fits", why_no_cluster_fits)
    monkeypatch.setattr(jit, "device_here", lambda capability, index: index)
    monkeypatch.setattr(jit, "why_unavailable", lambda *arguments: "")
    monkeypatch.setattr(decode_backend, "IS_PREFERRED", True)
    decision = explain_routing(evolve(REQUEST, device_index=2))
    assert (decision.chosen == "cuda") is bool(num_clusters)
    assert ("incapable: a cluster of 16 CTAs does not fit GPU 2" in str(decision)) is not bool(num_clusters)
    plan = plans.Plan.of(sizes_of(4, REQUEST.num_keys))
    assert plan is not None
    assert set(asked) == {(op.SOURCE, "decode_bfloat16_128", plan.num_ranks, 256, plan.shared_bytes, 2)}


def test_it_stands_below_triton_until_it_is_preferred(nvrtc, monkeypatch):
    preferences = {candidate.name: candidate.preference for candidate in explain_routing(REQUEST).candidates}
    assert preferences["cuda"] < preferences.get("triton", 100)
    monkeypatch.setattr(decode_backend, "IS_PREFERRED", True)
    assert explain_routing(REQUEST).chosen == "cuda"


BRANCHES = dict.fromkeys(("cmp", "select", "slc", "win"), "sdpa")
on_a_gpu = pytest.mark.hardware(capability=(9, 0))
P = Case(starts=(4095,), num_heads=64, num_kv_heads=4, head_dim_qk=192, head_dim_v=128, geometry=BlockGeometry(), scale=192**-0.5)
L = P._replace(num_heads=32, num_kv_heads=8, head_dim_qk=128)
GPU_CASES = {
    "P": P,
    "L": L,
    "P of 64k": P._replace(starts=(65_535,)),
    "L of 128k": L._replace(starts=(131_071,)),
    "mixed lengths": P._replace(starts=(0, 31, 4095, 700, 2049)),
    "17 pairs and more": L._replace(starts=tuple(range(100, 4000, 1300))),
    "64 sequences": P._replace(starts=tuple(range(64, 4160, 64))),
    "fp16": P._replace(dtype=FP16),
    "largest heads": P._replace(head_dim_qk=256, head_dim_v=256),
    **{name: case for name, case in CASES.items() if case.starts != (65_535,)},
}


def on_the_gpu(step: Step, case: Case, name: str = "cuda") -> FusedOutput:
    found = default_registry().named(Operation.NSA, name)(*step, geometry=case.geometry, scale=case.scale)
    assert isinstance(found, FusedOutput)
    return found


@on_a_gpu
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_a_gpu_computes_what_the_reference_does(case):
    step = make_step(case, "cuda")
    assert_same_above_ties(on_the_gpu(step, case), step, case)


DRAFT = P._replace(starts=(4090, 0, 700, 2049), counts=(5, 1, 0, 16))
PLACED_GPU_CASES = {
    "P": P,
    "P of 64k": P._replace(starts=(65_535,)),
    "a draft at P": DRAFT,
    "a draft at L": DRAFT._replace(num_heads=32, num_kv_heads=8, head_dim_qk=128),
    "a draft in fp16": DRAFT._replace(dtype=FP16),
    **PLACED_CASES,
    **ROWS,
}


@on_a_gpu
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("case", PLACED_GPU_CASES.values(), ids=PLACED_GPU_CASES)
def test_a_gpu_reads_rows_and_pages_as_the_reference_does(case, form):
    step = make_step(case, "cuda")
    assert_same_above_ties(on_the_gpu(form(step, case), case), step, case)


@on_a_gpu
@pytest.mark.parametrize("has_pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("case", PLACED_GPU_CASES.values(), ids=PLACED_GPU_CASES)
def test_a_gpu_reads_fp8_as_its_numbers_times_their_scales(case, has_pages):
    step = make_step(case, "cuda")
    narrow, back = as_fp8(step)
    found = on_the_gpu(in_narrow_pages(step, case) if has_pages else narrow, case)
    assert_same_above_ties(found, back, case)


@on_a_gpu
@pytest.mark.parametrize("form", [as_it_is, in_pages], ids=["rows", "pages"])
def test_ragged_rows_equal_rows_of_a_batch_on_a_gpu(form, monkeypatch):
    # clusters of one size, so that sums are added in one order
    with_clusters_of(2, monkeypatch)
    step = form(make_step(DRAFT, "cuda"), DRAFT)
    found, expected = on_the_gpu(ragged(step, DRAFT), DRAFT), on_the_gpu(step, DRAFT)
    end = sum(DRAFT.counts)
    assert bool((found.out[:, end:] == 0).all())
    assert bool((found.block_indices[:, end:] == -1).all())
    assert_equal(FusedOutput(*(x[:, :end] for x in found)), FusedOutput(*(packed(x, DRAFT.counts) for x in expected)))


@on_a_gpu
def test_one_graph_serves_lengths_and_pages_that_change():
    case = P._replace(starts=(2000, 3), counts=(3, 3))
    finite = make_step(case, "cuda")
    # nothing of these stores is NaN: lengths move over them
    stores = [keys._replace(k=keys.k.nan_to_num(0.5), v=keys.v.nan_to_num(0.5)) for keys in finite[1:4]]
    step = Step(finite.queries, *stores, finite.gates)
    paged = in_pages(step, case._replace(starts=(2000, 2000)))
    on_the_gpu(paged, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = on_the_gpu(paged, case)
    for starts in ((2000, 3), (31, 700), (0, 64)):
        step.queries.start.copy_(int32(*starts))
        # the pages of both sequences change places
        for keys, rows in zip(paged[1:4], step[1:4], strict=True):
            keys.page_table.copy_(keys.page_table.flip(0))
            rows.k.copy_(rows.k.flip(0))
            rows.v.copy_(rows.v.flip(0))
        captured.out.fill_(torch.nan)
        graph.replay()
        assert_same_above_ties(captured, step, case)


@on_a_gpu
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_gpu_reads_the_windows_keys_anywhere(layout):
    case = P._replace(starts=(0, 1500, 511, 512))
    whole = make_step(case, "cuda")
    step = layout(whole, case)
    assert_same_above_ties(on_the_gpu(step, case), whole._replace(win=whole.slc) if step.win is step.slc else whole, case)


@on_a_gpu
@pytest.mark.parametrize("case", [GPU_CASES["P of 64k"], GPU_CASES["mixed lengths"]], ids=["P of 64k", "mixed lengths"])
def test_it_and_triton_choose_by_one_rule(case):
    if not default_registry().has(Operation.NSA, "triton"):
        pytest.skip("nsa-kernels-triton is not installed, with which the step is compared")
    step = make_step(case, "cuda")
    for name in ("cuda", "triton"):
        assert_same_above_ties(on_the_gpu(step, case, name), step, case)


@on_a_gpu
def test_sequences_of_unlike_lengths_equal_each_alone_on_a_gpu(monkeypatch):
    # clusters of one size, so that sums are added in one order
    with_clusters_of(4, monkeypatch)
    case = P._replace(starts=(0, 1500, 20, 4095))
    step = make_step(case, "cuda")
    together = on_the_gpu(step, case)
    for b in range(len(case.starts)):
        assert torch.equal(on_the_gpu(step.of_sequence(b), case).out, together.out[b : b + 1])


@on_a_gpu
@pytest.mark.slow
@pytest.mark.parametrize("check", PROPERTIES.values(), ids=PROPERTIES)
def test_the_properties_hold_of_drawn_steps_on_a_gpu(check):
    @settings(max_examples=200, deadline=None)
    @given(case=drawn_cases())
    def holds(case: Case) -> None:
        # a backend that is named never falls back
        check(on_the_gpu, make_step(case, "cuda"), case)

    holds()


@on_a_gpu
@pytest.mark.slow
@pytest.mark.parametrize(("check", "form"), PLACED_PROPERTIES.values(), ids=PLACED_PROPERTIES)
def test_the_properties_hold_of_drawn_rows_on_a_gpu(check, form):
    @settings(max_examples=200, deadline=None)
    @given(case=drawn_cases(most_rows=3))
    def holds(case: Case) -> None:
        check(over(on_the_gpu, form), make_step(case, "cuda"), case)

    holds()


@on_a_gpu
def test_the_op_passes_opcheck():
    case = P._replace(starts=(700, 3))
    # opcheck compares operands before and after, and NaN equals nothing
    step = Step(*(x._replace(k=x.k.nan_to_num(), v=x.v.nan_to_num()) if isinstance(x, Keys) else x for x in make_step(case, "cuda")))
    flat = [x for operand in step for x in (operand if isinstance(operand, tuple) else (operand,))]
    arguments = (*flat, list(case.geometry.as_tuple()), case.scale, False)
    assert set(torch.library.opcheck(torch.ops.nsa_cuda.decode.default, arguments).values()) == {"SUCCESS"}


@on_a_gpu
def test_it_conforms_to_the_oracle():
    report = check_backend(CudaDecode(), device="cuda")
    print(report)
    assert len(report.passed) == NUM_CONFORMANCE_CASES


@on_a_gpu
def test_one_graph_serves_lengths_that_grow():
    case = P._replace(starts=(2000, 3))
    step = make_step(case, "cuda")
    # nothing of these stores is NaN: lengths move over them
    stores = (keys._replace(k=keys.k.nan_to_num(0.5), v=keys.v.nan_to_num(0.5)) for keys in step[1:4])
    step = Step(step.queries, *stores, step.gates)
    on_the_gpu(step, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = on_the_gpu(step, case)
    for starts in ((2000, 3), (31, 700), (1023, 2005), (0, 64), (2001, 4)):
        step.queries.start.copy_(int32(*starts))
        step.queries.q.normal_()
        captured.out.fill_(torch.nan)
        graph.replay()
        assert_same_above_ties(captured, step, case)


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let routing prefer the kernel, in a registry without cached routes."""
    monkeypatch.setattr(decode_backend, "IS_PREFERRED", True)
    default_registry()._routes.clear()
    yield
    default_registry()._routes.clear()


@on_a_gpu
@pytest.mark.parametrize("kv", ["separate", "shared"])
def test_a_layers_steps_over_a_static_cache_take_it(kv, preferred, monkeypatch):
    """The launch reads what `append` writes, and may start before `append` has ended."""
    calls = []
    counted = op.decode
    monkeypatch.setattr(op, "decode", lambda *operands, **keywords: calls.append(0) or counted(*operands, **keywords))
    # every block is chosen: scores of a new layer are near ties
    geometry = BlockGeometry(num_selected_blocks=24)
    config = NSAConfig(
        hidden_size=256, num_heads=32, num_kv_heads=2, head_dim_qk=64, head_dim_v=64, geometry=geometry, compressor="mean", kv=kv
    )
    torch.manual_seed(0)
    layers = [NativeSparseAttention(each).to("cuda", torch.bfloat16) for each in (config, evolve(config, backends=BRANCHES))]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 1300, 256, device="cuda", dtype=torch.bfloat16)
    outs = []
    with torch.no_grad():
        for layer in layers:
            cache = layer.new_cache(2, 1400, static=True)
            layer(x[:, :1200], cache=cache)
            outs.append(torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(1200, 1300)], 1))
    assert len(calls) == 100
    assert max_error(outs[0], outs[1]) <= 2**-5 * float(outs[1].abs().max())


@on_a_gpu
def test_a_gpu_has_room_for_the_clusters_of_a_step_and_none_for_twice_the_largest():
    def why(num_ranks: int) -> str:
        kernel, device = op.kernel_of(torch.bfloat16, 128), torch.cuda.current_device()
        return cluster_launch.why_no_cluster_fits(op.SOURCE, kernel, num_ranks, 256, SHARED_BYTES, device)

    assert [why(num_ranks) for num_ranks in (1, 2, 4, 8, 16)] == [""] * 5
    assert "a cluster of 32 CTAs" in why(32)


@pytest.mark.hardware(num_gpus=2, capability=(9, 0))
def test_another_gpu_than_the_current_one_takes_a_step():
    for function in (jit.load, jit.library_of, jit._why_unavailable, cluster_launch._load, cluster_launch.why_no_cluster_fits):
        function.cache_clear()
    case = P._replace(starts=(2000, 3))
    step = make_step(case, "cuda:1")
    assert torch.cuda.current_device() == 0
    assert messages(evolve(REQUEST, device_index=1, num_sequences=2, batch=2)) == []
    # routing loaded it on the GPU of the operands
    assert jit.load.cache_info().misses == 1
    assert_same_above_ties(on_the_gpu(step, case), step, case)
    assert jit.load.cache_info().misses == 1
    assert torch.cuda.current_device() == 0


@on_a_gpu
def test_ten_thousand_steps_give_the_same_numbers():
    case = P._replace(starts=(65_535,))
    step = make_step(case, "cuda")
    first = on_the_gpu(step, case)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        found = on_the_gpu(step, case)
        differing += (found.out != first.out).any() | (found.block_indices != first.block_indices).any()
    assert int(differing) == 0


TIMED_FORMS: dict[str, Form] = {
    "rows": as_it_is,
    "pages": in_pages,
    "FP8": lambda step, case: as_fp8(step)[0],
    "FP8 in pages": in_narrow_pages,
    "4 rows": lambda step, case: make_step(case._replace(counts=(4,) * len(case.starts)), "cuda"),
}


@on_a_gpu
@pytest.mark.slow
@pytest.mark.parametrize("form", TIMED_FORMS.values(), ids=TIMED_FORMS)
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("num_tokens", [8192, 32_768, 65_536, 131_072])
@pytest.mark.parametrize("shape", [P, L], ids=["P", "L"])
def test_what_a_step_takes(shape, num_tokens, batch, form, record_property):
    """Print microseconds by a CUDA graph, medians; what L2 held is overwritten before each replay."""
    case = shape._replace(starts=(num_tokens - 1,) * batch)
    step = form(make_step(case, "cuda"), case)
    found = {}
    for name in ("cuda", "triton"):
        if default_registry().has(Operation.NSA, name):
            found[name] = round(step_us(partial(on_the_gpu, step, case, name)), 1)
    record_property("us", found)
    print(f"\n{num_tokens} tokens, batch {batch}: {found} us")


def step_us(call: Callable[[], Any], *, num_calls: int = 50) -> float:
    """Return the median time of a replay by CUDA events, with a cold L2."""
    flushed = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(num_calls):
        flushed.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)
