"""The kernel of CHOOSE on the host, lane by lane, against the reference: bit for bit, over scores of every kind."""

import ctypes
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa_core import BlockGeometry, InputError
from nsa_core.reference.choose import choose
from nsa_kernels_cuda import jit
from nsa_kernels_cuda.choice import op

BLOCK_SIZE = 16
GEOMETRY = BlockGeometry(16, 8, BLOCK_SIZE, num_selected_blocks=6)
SCORES = {
    "all different": lambda x: x,
    "many equal": lambda x: (4 * x).floor() / 4,
    "all equal": torch.ones_like,
    "zeros of both signs": lambda x: torch.where(x > 0.5, 0.0, -0.0),
    "steep": lambda x: x**40,
    "mostly zeros": lambda x: torch.where(x > 0.9, (8 * x).floor(), 0.0),
    "far apart": lambda x: torch.exp2(200 * (x - 0.5)),
    "negative": lambda x: x - 0.5,
    "NaN": lambda x: torch.where(x > 0.3, math.nan, x),
    "NaN among negative": lambda x: torch.where(x > 0.6, math.nan, x - 0.5),
    "infinite": lambda x: torch.where(x > 0.7, math.inf, torch.where(x < 0.3, -math.inf, x)),
    "ascending": lambda x: torch.arange(x.shape[-1]).expand(x.shape) / 64.0,
    "neighbours": lambda x: x[..., :1] + (torch.arange(x.shape[-1]) % 128 < 4).float(),
}


def run_on(
    library: ctypes.CDLL, scores: Tensor, factor: Tensor | None, positions: Tensor, num_kv_heads: int, geometry: BlockGeometry
) -> Tensor:
    """Return what the kernel chooses of CPU tensors; what it does not write is -7."""
    out = torch.full((len(scores), num_kv_heads, geometry.num_selected_blocks), -7, dtype=torch.int32)
    launch = op.launch_of(scores, factor, positions, out, geometry)
    assert launch.shared_bytes <= op.SHARED_BYTES
    arguments = [x if isinstance(x, int) else ctypes.c_void_p(None if x is None else x.data_ptr()) for x in launch.arguments]
    library[f"emulate_{op.kernel_of(scores.dtype)}"](*launch.grid, launch.num_threads, *arguments)
    return out


@pytest.fixture
def run(emulated_choose):
    """Give `run_on` of the emulated kernels."""
    return partial(run_on, emulated_choose)


def positions_of(num_blocks: int, geometry: BlockGeometry = GEOMETRY) -> Tensor:
    """Return positions at the edges of blocks, -1 among them."""
    owns = {0, 1, geometry.num_selected_blocks - 1, geometry.num_selected_blocks, num_blocks // 2, num_blocks - 1} & set(range(num_blocks))
    return torch.tensor([-1, *(own * geometry.selection_block_size + 5 for own in sorted(owns))], dtype=torch.int32)


def random_scores(kind: str, num_rows: int, heads: int, num_blocks: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_blocks)
    return SCORES[kind](torch.rand(num_rows, heads, num_blocks, generator=generator))


@pytest.mark.parametrize("num_blocks", [1, 5, 6, 7, 31, 33, 128, 130, 1025])
@pytest.mark.parametrize("kind", SCORES)
def test_the_choice_is_that_of_the_rule(run, kind, num_blocks):
    positions = positions_of(num_blocks)
    scores = random_scores(kind, len(positions), 2, num_blocks)
    assert torch.equal(run(scores, None, positions, 2, GEOMETRY), choose(scores, None, positions, 2, geometry=GEOMETRY))


@pytest.mark.parametrize(
    ("num_selected", "num_initial", "num_local"), [(1, 0, 1), (4, 2, 2), (16, 1, 2), (35, 1, 2), (40, 1, 2), (70, 5, 9)]
)
@pytest.mark.parametrize("kind", ["all different", "many equal", "NaN"])
def test_it_is_for_every_number_of_blocks(run, kind, num_selected, num_initial, num_local):
    geometry = BlockGeometry(16, 8, BLOCK_SIZE, num_selected, num_initial, num_local)
    for num_blocks in (num_selected, num_selected + 1, 2 * num_selected + 3, 300):
        positions = positions_of(num_blocks, geometry)
        scores = random_scores(kind, len(positions), 1, num_blocks)
        assert torch.equal(run(scores, None, positions, 1, geometry), choose(scores, None, positions, 1, geometry=geometry))


@pytest.mark.parametrize("dtype", op.KERNELS, ids=str)
@pytest.mark.parametrize(("heads", "num_kv_heads"), [(1, 1), (6, 2), (16, 1)])
@pytest.mark.parametrize("num_blocks", [7, 64, 130])
def test_scores_of_heads_are_multiplied_and_added(run, dtype, heads, num_kv_heads, num_blocks):
    positions = positions_of(num_blocks)
    # sums of such numbers are exact in any order
    scores = random_scores("many equal", len(positions), heads, num_blocks).to(dtype)
    factor = 2.0 ** -(torch.arange(heads) % 4).float().expand(len(positions), -1)
    found = run(scores, factor, positions, num_kv_heads, GEOMETRY)
    assert torch.equal(found, choose(scores, factor, positions, num_kv_heads, geometry=GEOMETRY))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_of_every_pattern_are_read_as_they_are(run, dtype):
    scores = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    scores = scores[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))].view(64, 1, 1024)
    positions = torch.full((64,), 1024 * BLOCK_SIZE - 1, dtype=torch.int32)
    assert torch.equal(run(scores, None, positions, 1, GEOMETRY), choose(scores.float(), None, positions, 1, geometry=GEOMETRY))


def test_blocks_after_the_querys_own_are_not_read_as_scores(run):
    positions = torch.tensor([20 * BLOCK_SIZE], dtype=torch.int32)
    scores = torch.rand(1, 1, 40, generator=torch.Generator().manual_seed(0))
    changed = scores.clone()
    changed[..., 21:] = math.inf
    assert torch.equal(run(scores, None, positions, 1, GEOMETRY), run(changed, None, positions, 1, GEOMETRY))


def test_a_position_beyond_the_scores_chooses_among_them(run):
    positions = torch.tensor([500 * BLOCK_SIZE], dtype=torch.int32)
    scores = torch.rand(1, 1, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(run(scores, None, positions, 1, GEOMETRY), choose(scores, None, positions, 1, geometry=GEOMETRY))


@pytest.mark.parametrize("num_blocks", [2048, op.MOST_BLOCKS])
def test_long_rows_fit_with_fewer_warps_to_a_block(run, num_blocks):
    positions = torch.tensor([num_blocks * BLOCK_SIZE - 1, num_blocks * BLOCK_SIZE // 2], dtype=torch.int32)
    scores = random_scores("all different", 2, 1, num_blocks)
    assert torch.equal(run(scores, None, positions, 1, GEOMETRY), choose(scores, None, positions, 1, geometry=GEOMETRY))


def test_rows_that_start_off_an_alignment_are_read_as_well(run):
    scores = torch.rand(1 + 3 * 64, generator=torch.Generator().manual_seed(0))[1:].view(3, 1, 64)
    positions = torch.tensor([63, 40, 20], dtype=torch.int32) * BLOCK_SIZE
    assert torch.equal(run(scores, None, positions, 1, GEOMETRY), choose(scores, None, positions, 1, geometry=GEOMETRY))


@given(
    scores=st.lists(st.sampled_from([0.0, -0.0, 0.25, 0.5, 1.0, 3e38, math.inf, -math.inf, math.nan, -1.0]), min_size=1, max_size=200),
    numbers=st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 40)),
    own=st.integers(-1, 220),
)
def test_any_row_is_chosen_as_the_rule_says(emulated_choose, scores, numbers, own):
    num_initial, num_local, num_free = numbers
    geometry = BlockGeometry(16, 8, BLOCK_SIZE, num_initial + num_local + num_free, num_initial, num_local)
    row, positions = torch.tensor(scores).view(1, 1, -1), torch.tensor([own * BLOCK_SIZE if own >= 0 else -1], dtype=torch.int32)
    found = run_on(emulated_choose, row, None, positions, 1, geometry)
    assert torch.equal(found, choose(row, None, positions, 1, geometry=geometry))


def test_the_source_and_the_launch_agree_on_a_warps_memory():
    assert f"constexpr int MOST_SURVIVORS = {op.MOST_SURVIVORS};" in (jit.CSRC / "choice.cuh").read_text()


def test_scores_of_another_dtype_are_refused():
    with pytest.raises(InputError, match=r"scores of torch.float64 \(the kernels read torch.float32"):
        op.kernel_of(torch.float64)
