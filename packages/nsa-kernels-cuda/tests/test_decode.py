"""A decode step in one launch: the kernel on the host, cluster by cluster, and on a GPU, against the reference branch by branch."""

import ctypes
import math
import re
import shutil
import statistics
from collections.abc import Callable, Iterator
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


class Case(NamedTuple):
    """A step of sequences that hold different numbers of tokens; the last row stands at `starts`."""

    starts: tuple[int, ...] = (0, 37, 90)
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
    batch, longest = len(case.starts), max(case.starts) + 10

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.dtype)

    def store(length: int, held: Callable[[int], int]) -> Keys:
        k, v = (normal(batch, length, case.num_kv_heads, width) for width in (case.head_dim_qk, case.head_dim_v))
        for b, start in enumerate(case.starts):
            k[b, held(start + 1) :], v[b, held(start + 1) :] = torch.nan, torch.nan
        return Keys(k, v, length)

    queries = Queries(normal(batch, 1, case.num_heads, case.head_dim_qk), 1, None, int32(*case.starts, device=device))
    cmp = store(num_compressed_blocks(longest, case.geometry), lambda tokens: num_compressed_blocks(tokens, case.geometry))
    gates = torch.rand(batch, 1, case.num_heads, 3, generator=generator, device=device)
    return Step(queries, cmp, store(longest, int), store(longest, int), gates)


def by_the_reference(step: Step, case: Case, chosen: Tensor | None = None) -> FusedOutput:
    return step_by_branches(*step, geometry=case.geometry, scale=case.scale, chosen=chosen)


def assert_same(found: FusedOutput, expected: FusedOutput) -> None:
    """Assert equal choices, and outputs within the rounding of q's dtype: weights are rounded as well."""
    assert torch.equal(found.block_indices, expected.block_indices)
    limit = allowed_error(expected.out, found.out.dtype, torch.finfo(found.out.dtype).eps / 2)
    error = max_error(found.out, expected.out)
    assert error <= limit, f"out is off by {error:.2e} (allowed: {limit:.2e})"


def scores_of(step: Step, case: Case, b: int) -> list[list[float]]:
    """Return the scores of the selection blocks of sequence b in float64, for each KV head (Eq. 8 to 10)."""
    tokens = int(step.queries.start[b]) + 1
    keys = step.cmp.k[b, : num_compressed_blocks(tokens, case.geometry)].double()
    queries = step.queries.q[b, 0].double().unflatten(0, (keys.shape[1], -1))
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
    for b, position in enumerate(step.queries.start.tolist()):
        for group, scores in enumerate(scores_of(step, case, b)):
            near += assert_choice_follows(found.block_indices[b, 0, group].tolist(), scores, position, case)
    print(f"{near} of {found.block_indices[..., 0].numel()} choices differ from the reference's, all near ties")
    assert_same(found, by_the_reference(step, case, found.block_indices))


def in_a_ring(step: Step, case: Case) -> Step:
    """Return the step with the window's keys in a ring of w rows."""
    length = case.geometry.window_size
    stores = []
    for x in (step.win.k, step.win.v):
        ring = torch.full_like(x[:, :1].expand(-1, length, -1, -1), torch.nan)
        for b, start in enumerate(case.starts):
            for position in range(max(0, start + 1 - length), start + 1):
                ring[b, position % length] = x[b, position]
        stores.append(ring)
    return step._replace(win=Keys(stores[0], stores[1], step.win.max_count, ring=True))


def as_a_tail(step: Step, case: Case) -> Step:
    """Return the step with only the window's last tokens, whose first is at `Keys.first`."""
    firsts = [max(0, start - case.geometry.window_size + 1) for start in case.starts]
    length = case.geometry.window_size
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, length), value=torch.nan) for x in (step.win.k, step.win.v)]
    k, v = (torch.stack([x[b, first : first + length] for b, first in enumerate(firsts)]) for x in padded)
    return step._replace(win=Keys(k, v, length, first=int32(*firsts, device=str(k.device))))


def with_shared_keys(step: Step, case: Case) -> Step:
    """Return the step with one store for the selected and the sliding branch."""
    return step._replace(win=step.slc)


LAYOUTS: dict[str, Callable[[Step, Case], Step]] = {"ring": in_a_ring, "tail": as_a_tail, "shared": with_shared_keys}


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
    library.emulate_decode(
        kernel.encode(), launch.num_clusters * launch.num_ranks, launch.shared_bytes, launch.num_ranks, int(backwards),
        (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int * len(numbers))(*numbers),
    )  # fmt: skip
    return FusedOutput(out, indices)


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


@pytest.mark.parametrize("case", [CASES["default geometry"], CASES["group of 40"]], ids=["default geometry", "group of 40"])
def test_no_result_depends_on_which_warp_runs_first(run, case):
    step = make_step(case)
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


def hazards_of(library: ctypes.CDLL, case: Case, *, backwards: bool = False) -> tuple[int, str]:
    """Return the number of hazards of a step, and the first of them."""
    text = ctypes.create_string_buffer(200)
    run_on(library, make_step(case), case, backwards=backwards)
    return library.take_hazards(text, len(text)), text.value.decode()


@pytest.mark.parametrize("backwards", [False, True], ids=["first warp first", "last warp first"])
@pytest.mark.parametrize("case", WATCHED.values(), ids=WATCHED)
def test_barriers_order_all_accesses_to_shared_memory(watched_decode, case, backwards):
    assert hazards_of(watched_decode, case, backwards=backwards) == (0, "")


BARRIER = re.compile(r"(?<=[ )])(__syncwarp\(\)|__syncthreads\(\)|cluster_barrier\(\)|partial_barrier\([^;]*\))(?=;)")
NUM_BARRIERS = {"attend.cuh": 2, "choice.cuh": 3, "decode.cu": 11}
# behind the last barrier nothing is accessed: the emulator overwrites the shared memory of a CTA that has ended, so that outputs are wrong
HAZARDS_WITHOUT = [(name, index) for name, count in NUM_BARRIERS.items() for index in range(count) if (name, index) != ("decode.cu", 10)]


def test_every_barrier_is_in_the_table():
    assert {path.name: len(BARRIER.findall(path.read_text())) for path in jit.CSRC.iterdir() if path.name in NUM_BARRIERS} == NUM_BARRIERS


@pytest.mark.parametrize(("name", "index"), [
    pytest.param(*each, marks=() if each in {("attend.cuh", 0), ("decode.cu", 6)} else pytest.mark.slow) for each in HAZARDS_WITHOUT
])  # fmt: skip
def test_a_missing_barrier_is_found(name, index, build_watched, tmp_path):
    csrc = tmp_path / "csrc"
    shutil.copytree(jit.CSRC, csrc)
    text = (csrc / name).read_text()
    barrier = list(BARRIER.finditer(text))[index]
    (csrc / name).write_text(text[: barrier.start()] + "(void)0" + text[barrier.end() :])
    library = build_watched(csrc=csrc)
    assert any(hazards_of(library, case)[0] for case in WATCHED.values())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_windows_keys_may_lie_anywhere(run, layout):
    case = Case(starts=(0, 37, 90, 19))
    step = layout(make_step(case), case)
    whole = make_step(case)
    assert_same(run(step, case), by_the_reference(whole._replace(win=whole.slc) if step.win is step.slc else whole, case))


Run = Callable[[Step, Case], FusedOutput]


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """Draw a step whose sequences end at and around the edges of a drawn geometry."""
    geometry = draw(geometries())
    heads, kv_heads = draw(st.sampled_from(HEADS))
    lengths = st.sampled_from(edge_lengths(geometry))
    return Case(
        starts=tuple(length - 1 for length in draw(st.lists(lengths, min_size=1, max_size=3))),
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


def test_the_emulated_kernels_conform_to_the_oracle(emulated_decode):
    report = check_backend(EmulatedDecode(library=emulated_decode))
    # in bf16 and fp16, over each form of the window
    assert len(report.passed) == 6


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


def test_launches_do_not_depend_on_lengths():
    """One CUDA graph serves all of them."""
    case = Case()
    step = make_step(case)
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
        ({"queries": lambda x: x._replace(start=None)}, "takes one row of each sequence over stores"),
        ({"queries": lambda x: x._replace(q=x.q.repeat(1, 2, 1, 1))}, "takes one row of each sequence over stores"),
        ({"slc": lambda x: x._replace(first=int32(0, 0, 0))}, "slc begins at `first`"),
        ({"cmp": lambda x: x._replace(page_table=int32(0))}, "cmp is paged or has another dtype"),
        ({"win": lambda x: x._replace(k=x.k.float())}, "win is paged or has another dtype"),
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
        REQUEST, compute_capability=(10, 0), layout=Layout.PAGED, kv_dtype=torch.float8_e4m3fn, num_queries=4, head_dim_v=320, head_dim_qk=40,
        needs_grad=True, is_aligned=False, geometry=BlockGeometry(4, 2, 64),
    )  # fmt: skip
    assert messages(request) == [
        "incapable: k, v of torch.float8_e4m3fn (takes torch.bfloat16, torch.float16)",
        "incapable: layout paged (takes cached)",
        "incapable: gradients are needed (forward only)",
        "incapable: head dimension 320 (at most 256)",
        "incapable: compute capability 10.0 (its clusters are cut for 9.0)",
        "incapable: 4 rows of a sequence (takes 1)",
        "incapable: D_k=40 (takes multiples of 16)",
        "incapable: a tensor starts off a multiple of 16 bytes (keys are copied 16 bytes at a time)",
        "incapable: 32 compressed blocks begin in a selection block (takes 16); use smaller selection blocks",
    ]
    assert messages(evolve(REQUEST, compute_capability=(8, 0))) == ["incapable: compute capability 8.0 (needs 9.0 or newer)"]
    assert messages(evolve(REQUEST, kv_dtype=FP16)) == ["incapable: k, v of torch.float16 with q of torch.bfloat16 (takes one dtype)"]
    assert "above the shared memory of a cluster" in messages(evolve(REQUEST, num_keys=2**24))[0]


def test_a_step_that_it_does_not_take_compiles_nothing(monkeypatch):
    monkeypatch.setattr(jit, "why_unavailable", lambda *arguments: pytest.fail("it compiled"))
    assert messages(evolve(REQUEST, num_queries=2))


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
    # in bf16 and fp16, over each form of the window
    assert len(report.passed) == 6


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


@on_a_gpu
@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("num_tokens", [8192, 32_768, 65_536, 131_072])
@pytest.mark.parametrize("shape", [P, L], ids=["P", "L"])
def test_what_a_step_takes(shape, num_tokens, batch, record_property):
    """Print median microseconds by a CUDA graph; L2 is flushed before each replay."""
    case = shape._replace(starts=(num_tokens - 1,) * batch)
    step = make_step(case, "cuda")
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
