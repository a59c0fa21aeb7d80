"""The choice among equal scores, zeros and steep scores, with arbitrary scores after the blocks that a query sees."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_core import BlockGeometry, Operation, compressed_attention, select_blocks
from nsa_core.reference.choose import choose
from nsa_core.testing.inputs import Shape, make_inputs
from nsa_kernels_triton.choice import kernels, op
from nsa_kernels_triton.launch import next_power_of_2
from nsa_kernels_triton.plugin import TritonBackend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 16
NAN = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
"""NaN as a GPU's arithmetic makes it."""
SCORES = {
    "all different": lambda x: x,
    "many equal": lambda x: (4 * x).floor() / 4,
    "zeros": torch.zeros_like,
    "steep": lambda x: x**40,
    "mostly zeros": lambda x: torch.where(x > 0.9, (8 * x).floor(), 0.0),
    "far apart": lambda x: torch.exp2(40 * (x - 0.5)),
    "no numbers": lambda x: torch.where(x > 0.3, NAN, 0.0),
    "negative no numbers": lambda x: torch.where(x > 0.3, -NAN, 0.0),
}


def sorted_choice(scores: Tensor, owns: Tensor, *numbers: int) -> list[list[int]]:
    """Return the choice of rows that see blocks up to `owns`; `numbers` are those of chosen, initial and local blocks."""
    return [first_highest(row[0].tolist(), int(own), *numbers) for row, own in zip(scores, owns, strict=True)]


def first_highest(scores: list[float], own: int, num_selected: int, num_initial: int, num_local: int) -> list[int]:
    """Return the choice by sorting (Eq. 11): the lower of equal blocks first, -1 after the last."""
    if own < num_selected:
        return [*range(own + 1), *[-1] * (num_selected - own - 1)]
    free = range(num_initial, own - num_local + 1)
    highest = sorted(free, key=lambda block: (-scores[block] if scores[block] == scores[block] else -math.inf, block))[
        : num_selected - num_initial - num_local
    ]
    return [*range(num_initial), *sorted(highest), *range(own - num_local + 1, own + 1)]


def chosen(scores: Tensor, reaching: Tensor | None, positions: Tensor, num_selected: int, num_initial: int, num_local: int) -> Tensor:
    """Return the kernel's choice from scores (rows, 1, blocks) for rows at `positions`; unwritten elements are -7."""
    num_rows = len(scores)
    out = scores.new_full((num_rows, 1, num_selected), -7, dtype=torch.int32)
    pieces = torch.stack([scores] if reaching is None else [scores, reaching])
    pieces = pad(pieces, (0, -scores.shape[2] % 16), value=math.nan)
    num_blocks = pieces.shape[3]
    kernels.choose_kernel[(num_rows, 1)](
        pieces, positions, out, 0, num_rows, num_blocks, pieces[0].numel(),
        G=1, SELECTION_SIZE=BLOCK_SIZE, NUM_SELECTED=num_selected, NUM_INITIAL=num_initial, NUM_LOCAL=num_local,
        REACHES=reaching is not None, SLOTS=next_power_of_2(num_selected), BLOCK_BLOCKS=next_power_of_2(num_blocks),
        num_warps=1 if num_blocks < 200 else 4,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(
    ("num_blocks", "num_selected", "num_initial", "num_local"),
    [(2, 1, 0, 1), (9, 4, 1, 2), (33, 16, 1, 2), (70, 6, 2, 4), (40, 4, 2, 2), (130, 70, 5, 9), (400, 19, 3, 1)],
)
@pytest.mark.parametrize("kind", SCORES)
def test_the_highest_scores_are_chosen_and_the_lower_of_equal_blocks(
    kind: str, num_blocks: int, num_selected: int, num_initial: int, num_local: int
) -> None:
    numbers = (num_selected, num_initial, num_local)
    generator = torch.Generator().manual_seed(num_blocks)
    owns = torch.tensor([0, num_selected - 1, num_selected, num_blocks // 2, num_blocks - 1]).clamp(max=num_blocks - 1)
    scores = SCORES[kind](torch.rand(len(owns), 1, num_blocks, generator=generator))
    expected = sorted_choice(scores, owns, *numbers)
    # nothing was written of blocks that a query does not see
    unseen = torch.arange(num_blocks) > owns[:, None, None]
    scores = scores.masked_fill(unseen, math.nan).to(DEVICE)
    positions = (owns * BLOCK_SIZE + 3).int().to(DEVICE)
    assert chosen(scores, None, positions, *numbers)[:, 0].tolist() == expected
    # in two pieces, of which nothing reaches over to block 0
    reaching = (scores / 4).index_fill(2, torch.tensor([0], device=DEVICE), math.nan)
    rest = (0.75 * scores).index_copy(2, torch.tensor([0], device=DEVICE), scores[:, :, :1])
    whole = torch.where(torch.arange(num_blocks, device=DEVICE) > 0, rest + reaching, rest)
    expected = sorted_choice(whole, owns, *numbers)
    assert chosen(rest, reaching, positions, *numbers)[:, 0].tolist() == expected


@pytest.mark.parametrize("has_factor", [False, True], ids=["groups", "heads and factors"])
@pytest.mark.parametrize("num_blocks", [3, 7, 33, 100])
@pytest.mark.parametrize("kind", SCORES)
def test_the_operation_chooses_as_the_reference_does(kind: str, num_blocks: int, has_factor: bool) -> None:
    geometry = BlockGeometry(16, 8, BLOCK_SIZE, num_selected_blocks=6, num_initial_blocks=1, num_local_blocks=2)
    generator = torch.Generator().manual_seed(num_blocks)
    own = torch.tensor([-1, 0, 2, 5, 6, num_blocks // 2, num_blocks - 1]).clamp(max=num_blocks - 1)
    positions = torch.where(own < 0, -1, own * BLOCK_SIZE + 5).to(DEVICE)
    scores = SCORES[kind](torch.rand(len(own), 4 if has_factor else 2, num_blocks, generator=generator)).to(DEVICE)
    # powers of two, so that sums of equal scores stay equal
    factor = torch.tensor([0.5, 1.0, 2.0, 0.25], device=DEVICE).expand(len(own), -1) if has_factor else None
    found = TritonBackend(operation=Operation.CHOOSE)(scores, factor, positions, 2, geometry=geometry)
    assert torch.equal(found, choose(scores, factor, positions, 2, geometry=geometry))


@pytest.mark.filterwarnings("ignore:.*against policy.*")
@pytest.mark.parametrize("lengths", [None, (50, 33, 60)], ids=["dense", "packed"])
def test_a_backend_that_routing_prefers_chooses_from_the_same_scores(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...] | None
) -> None:
    # l = d: as on 9.0, importance comes in one piece
    geometry = BlockGeometry(8, 8, BLOCK_SIZE, num_selected_blocks=2, num_initial_blocks=1, num_local_blocks=1)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim_qk": 8, "head_dim_v": 8}
    shape = Shape(geometry=geometry, num_queries=0 if lengths else 100, lengths=lengths, **sizes)
    inputs = make_inputs(shape, torch.float32, DEVICE)
    placement = {"geometry": geometry, "cu_seqlens": inputs.cu_seqlens, "max_seqlen": max(lengths) if lengths else None}
    lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, backend="sdpa", **placement).lse
    select = partial(select_blocks, inputs.q, inputs.k_cmp, lse, backend="triton", **placement)
    expected = select()
    calls = []

    def reference(*operands: Any, geometry: BlockGeometry) -> Tensor:
        calls.append(operands[0].shape)
        return choose(*operands, geometry=geometry)

    monkeypatch.setattr(op, "other_choice", lambda *_: reference)
    # ten rows at a time
    monkeypatch.setattr(op, "SCORE_BYTES", 10 * 4 * 2 * 16)
    assert torch.equal(select(), expected)
    assert set(calls) == {(10, 2, 16), *([(3, 2, 16)] if lengths else [])}


def test_without_a_gpu_no_other_backend_is_asked_for() -> None:
    assert op.other_choice(torch.empty(1, 8, 4, 8), 2, 16, BlockGeometry()) is None
