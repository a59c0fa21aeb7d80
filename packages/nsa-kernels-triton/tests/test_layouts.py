"""Keys in other layouts than rows from position 0 on: rings, a window's tail, pages, rows of several sequences over pages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_core.backends.base import FusedOutput, Keys, Operation, Queries
from nsa_core.blocks import num_compressed_blocks
from nsa_core.gating import gated_sum
from nsa_core.reference.sdpa import SDPABackend
from nsa_core.testing.inputs import SMALL
from nsa_kernels_triton import window
from nsa_kernels_triton.plugin import TritonBackend
from nsa_kernels_triton.routing import MOST_STEP_ROWS
from nsa_kernels_triton.window import rows_in_order

pytestmark = [pytest.mark.usefixtures("nan_buffers"), pytest.mark.filterwarnings("ignore:.*against policy.*")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, ROWS, HEADS, GROUPS, WIDTH = 96, 5, 4, 2, 8
STARTS, COUNTS = (0, 37, 91), (5, 3, 5)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def step() -> Queries:
    """Return the rows of three sequences of a cache."""
    return Queries(normal(3, ROWS, HEADS, WIDTH), ROWS, None, int32(*STARTS), int32(*COUNTS))


def store(rows: int) -> Keys:
    return Keys(normal(3, rows, GROUPS, WIDTH), normal(3, rows, GROUPS, WIDTH).flip(1), rows)


def ring_of(keys: Keys, length: int) -> Keys:
    """Return the ring that holds the last `length` tokens of each sequence of `step`, NaN where there is none."""
    found = []
    for x in (keys.k, keys.v):
        ring = torch.full_like(x[:, :length], torch.nan)
        for sequence, end in enumerate(map(sum, zip(STARTS, COUNTS, strict=True))):
            for position in range(max(0, end - length), end):
                ring[sequence, position % length] = x[sequence, position]
        found.append(ring)
    return Keys(found[0], found[1], keys.max_count, ring=True)


def tail_of(keys: Keys) -> Keys:
    """Return the tokens from the first that a query of `step` sees on."""
    firsts = [max(0, start - SMALL.window_size + 1) for start in STARTS]
    length = SMALL.window_size - 1 + ROWS
    cut = [torch.stack([torch.nn.functional.pad(x[b, first:], (0, 0, 0, 0, 0, length))[:length] for b, first in enumerate(firsts)])
           for x in (keys.k, keys.v)]  # fmt: skip
    return Keys(cut[0], cut[1], length, first=int32(*firsts))


def paged(keys: Keys, page_size: int) -> Keys:
    """Return the same rows in shuffled pages."""
    num_pages = -(-keys.k.shape[1] // page_size)
    order = torch.randperm(3 * num_pages, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    stores = []
    for x in (keys.k, keys.v):
        pages = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, num_pages * page_size - x.shape[1])).reshape(-1, page_size, *x.shape[2:])
        stores.append(torch.empty_like(pages).index_copy(0, order, pages))
    return Keys(stores[0], stores[1], keys.max_count, page_table=order.to(torch.int32).view(3, num_pages))


def ragged(x: Tensor) -> Tensor:
    return torch.cat([x[b, :count] for b, count in enumerate(COUNTS)]).unsqueeze(0)


def run(operation: Operation, *operands: Any, backend: Any = TritonBackend) -> Any:
    return backend(operation=operation)(*operands, geometry=SMALL, scale=0.3)


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [lambda keys: ring_of(keys, 16), lambda keys: ring_of(keys, 96), tail_of], ids=["ring", "whole", "tail"])
def test_a_window_over_a_ring_or_a_tail_equals_one_over_all_tokens(make: Callable[[Keys], Keys]) -> None:
    whole = store(TOKENS)
    found = run(Operation.WIN, step(), make(whole))
    expected = run(Operation.WIN, step(), whole, backend=SDPABackend)
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs)


def test_a_step_of_the_window_copies_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, copies = store(TOKENS), []
    monkeypatch.setattr(window, "rows_in_order", lambda keys, *others: (copies.append(keys), rows_in_order(keys, *others))[1])
    for make in (lambda keys: ring_of(keys, 16), lambda keys: ring_of(keys, 17)):
        found, expected = run(Operation.WIN, step(), make(whole)), run(Operation.WIN, step(), whole, backend=SDPABackend)
        for ours, theirs in zip(found, expected, strict=True):
            assert_near(ours, theirs)
    assert not copies
    # a backward pass, and rows that fill the tiles of a forward pass
    learns = step()._replace(q=step().q.requires_grad_())
    run(Operation.WIN, learns, ring_of(whole, 16)).out.sum().backward()
    assert len(copies) == 1
    many = Queries(normal(1, MOST_STEP_ROWS + 1, HEADS, WIDTH), MOST_STEP_ROWS + 1, None, int32(40))
    run(Operation.WIN, many, Keys(whole.k[:1], whole.v[:1], TOKENS, ring=True))
    assert len(copies) == 2


def test_the_copy_of_a_ring_ends_with_the_last_row_of_a_step() -> None:
    whole = store(TOKENS)
    found = rows_in_order(ring_of(whole, 16), step(), SMALL)
    assert not found.ring
    assert found.first is not None
    assert found.max_count == found.k.shape[1] == SMALL.window_size - 1 + ROWS
    for b, first in enumerate(found.first.tolist()):
        seen = STARTS[b] + COUNTS[b] - first
        assert torch.equal(found.k[b, :seen], whole.k[b, first : first + seen])


def fused(win: Keys | None = None) -> tuple[tuple[Keys, Keys, Keys], Tensor]:
    slc = store(TOKENS)
    return (store(num_compressed_blocks(TOKENS, SMALL)), slc, slc if win is None else win), normal(3, ROWS, HEADS, 3).sigmoid()


def branch_by_branch(queries: Queries, cmp: Keys, slc: Keys, win: Keys, gates: Tensor) -> FusedOutput:
    """Return Eq. 5 by the reference."""
    compressed = run(Operation.CMP, queries, cmp, backend=SDPABackend)
    chosen = run(Operation.SELECT, queries, cmp, compressed.lse, backend=SDPABackend)
    selected = run(Operation.SLC, queries, slc, chosen, backend=SDPABackend).out
    return FusedOutput(gated_sum(gates, compressed.out, selected, run(Operation.WIN, queries, win, backend=SDPABackend).out), chosen)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: ring_of(x, 16), tail_of], ids=["tokens", "ring", "tail"])
def test_the_fused_operation_serves_a_cache(make: Callable[[Keys], Keys]) -> None:
    (cmp, slc, win), gates = fused()
    found = run(Operation.NSA, step(), cmp, slc, make(win), gates)
    expected = branch_by_branch(step(), cmp, slc, win, gates)
    assert torch.equal(found.block_indices, expected.block_indices)
    assert_near(found.out, expected.out)


def test_rows_that_do_not_count_are_zero_whatever_their_gates() -> None:
    (cmp, slc, win), gates = fused()
    gates[1, COUNTS[1] :] = torch.nan
    out = run(Operation.NSA, step(), cmp, slc, win, gates).out
    assert bool((out[1, COUNTS[1] :] == 0).all())
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("is_ragged", [False, True], ids=["paged", "ragged"])
def test_the_fused_operation_serves_pages(is_ragged: bool) -> None:
    (cmp, slc, win), gates = fused()
    queries = step()
    expected = branch_by_branch(queries, cmp, slc, win, gates)
    operands = paged(cmp, 4), paged(slc, 16), paged(win, 16)
    if is_ragged:
        bounds = torch.nn.functional.pad(int32(*COUNTS).cumsum(0, dtype=torch.int32), (1, 0))
        queries = Queries(ragged(queries.q), max(COUNTS), bounds, queries.start)
        gates, expected = ragged(gates), FusedOutput(ragged(expected.out), ragged(expected.block_indices))
    found = run(Operation.NSA, queries, *operands, gates)
    assert torch.equal(found.block_indices, expected.block_indices)
    assert_near(found.out, expected.out)


def test_stores_of_fp8_are_multiplied_by_their_scales() -> None:
    (cmp, slc, win), gates = fused()

    def in_fp8(x: Keys) -> Keys:
        scales = [y.abs().amax(-1) / 100 + 1 for y in (x.k, x.v)]
        stores = [(y / scale.unsqueeze(-1)).to(torch.float8_e4m3fn) for y, scale in zip((x.k, x.v), scales, strict=True)]
        return x._replace(k=stores[0], v=stores[1], k_scale=scales[0], v_scale=scales[1])

    def in_float(x: Keys) -> Keys:
        assert x.k_scale is not None
        assert x.v_scale is not None
        return Keys(x.k.float() * x.k_scale.unsqueeze(-1), x.v.float() * x.v_scale.unsqueeze(-1), x.max_count)

    cmp, slc, win = in_fp8(cmp), in_fp8(slc), in_fp8(win)
    found = run(Operation.NSA, step(), cmp, slc, win, gates)
    expected = branch_by_branch(step(), in_float(cmp), in_float(slc), in_float(win), gates)
    assert torch.equal(found.block_indices, expected.block_indices)
    assert_near(found.out, expected.out)


def test_gradients_reach_the_rows_of_a_tail() -> None:
    whole, weights = store(TOKENS), normal(3, ROWS, HEADS, WIDTH)
    gradients = []
    for make, backend in ((tail_of, TritonBackend), (lambda x: x, SDPABackend)):
        leaves = [x.clone().requires_grad_() for x in (step().q, whole.k, whole.v)]
        out = run(Operation.WIN, step()._replace(q=leaves[0]), make(Keys(leaves[1], leaves[2], TOKENS)), backend=backend).out
        gradients.append(torch.autograd.grad((out * weights).sum(), leaves))
    for ours, theirs in zip(*gradients, strict=True):
        assert_near(ours, theirs)
