"""Properties of every backend, as functions that a test calls with drawn shapes.

Each function takes a `Shape` and a `Where` (backend, device, dtype), and raises AssertionError if the property does not hold. The backend is
selected by name, so no other backend can run. Tokens are rows of q and of the keys; a compressed block has the position of its last token.
"""

from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from nsa_core import attention, blocks
from nsa_core.config import BlockGeometry
from nsa_core.reference import naive
from nsa_core.testing.inputs import Inputs, Shape, make_inputs, unpacked
from nsa_core.testing.tolerances import NEAR_TIE, Comparable, allowed_error, largest, max_error, near_tie_margin

TOKEN_TENSORS = (0, 3, 4, 5, 6, 7)
"""Indices in `Inputs` of tensors with one row per token; 1 and 2 have one row per compressed block."""


@frozen(kw_only=True)
class Where:
    """The backend under test, its device and dtype."""

    backend: str = "sdpa"
    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    has_shared_keys: bool = False
    """Give the selected and the sliding branch the same tensors, as a layer with `kv="shared"` does."""

    def inputs(self, shape: Shape) -> Inputs:
        """Return inputs of `shape` on this device, in this dtype."""
        return make_inputs(shape, self.dtype, self.device)

    def tensors(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Return the tensors that the branches read. A shared k or v takes its columns in turn from both branches', so that both have an effect."""
        q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = inputs.tensors
        if not self.has_shared_keys:
            return inputs.tensors
        k, v = (torch.where(torch.arange(x.shape[-1], device=x.device) % 2 == 0, x, y) for x, y in ((k_slc, k_win), (v_slc, v_win)))
        return q, k_cmp, v_cmp, k, v, k, v, gates

    def attend(self, inputs: Inputs, geometry: BlockGeometry, **options: Any) -> Tensor:
        """Return `nsa_attention` of `inputs` through the backend."""
        options.setdefault("cu_seqlens", inputs.cu_seqlens)
        return attention.nsa_attention(*self.tensors(inputs), geometry=geometry, backend=self.backend, **options)

    def select(self, inputs: Inputs, geometry: BlockGeometry) -> Tensor:
        """Return the blocks that the backend chooses."""
        options: dict[str, Any] = {"geometry": geometry, "cu_seqlens": inputs.cu_seqlens, "backend": self.backend}
        lse = attention.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, **options).lse
        return attention.select_blocks(inputs.q, inputs.k_cmp, lse, **options)


def block_rows(shape: Shape) -> Tensor:
    """Return int64 `(C,)`: the row of each compressed block's last token; surplus blocks come after every token."""
    geometry, start, rows = shape.geometry, 0, []
    for length in (shape.num_queries,) if shape.lengths is None else shape.lengths:
        count = blocks.num_compressed_blocks(length, geometry)
        rows += [start + i * geometry.compression_stride + geometry.compression_block_size - 1 for i in range(count)]
        start += length
    return torch.tensor(rows + [start] * shape.surplus_blocks, dtype=torch.int64)


def _later(shape: Shape, row: int) -> list[Tensor]:
    """Return for each tensor of `Inputs` a bool mask of its rows: True after `row`."""
    tokens = torch.arange(shape.total) > row
    ends = block_rows(shape) > row
    return [tokens if index in TOKEN_TENSORS else ends for index in range(8)]


def _perturbed(inputs: Inputs, shape: Shape, row: int, magnitude: float) -> Inputs:
    """Return `inputs` with everything after `row` replaced by other finite numbers of about `magnitude`."""
    other = make_inputs(evolve(shape, seed=shape.seed + 1), torch.float64, inputs.q.device)
    largest = torch.finfo(inputs.q.dtype).max
    changed = []
    for x, y, later in zip(inputs.tensors, other.tensors, _later(shape, row), strict=True):
        replacement = (magnitude * (3 * y.nan_to_num() + 1)).clamp(-largest, largest).to(x)
        changed.append(torch.where(later.to(x.device)[None, :, None, None], replacement, x.nan_to_num()))
    return Inputs.of(changed, inputs.cu_seqlens)


def check_past_outputs_and_choices(shape: Shape, row: int, where: Where, *, magnitude: float = 1.0) -> None:
    """Check (a): outputs and chosen blocks up to `row` stay bit-identical if tokens after `row` change to numbers of any `magnitude`."""
    inputs = where.inputs(shape)
    changed = _perturbed(inputs, shape, row, magnitude)
    here = slice(0, row + 1)
    assert torch.equal(where.select(inputs, shape.geometry)[:, here], where.select(changed, shape.geometry)[:, here])
    assert torch.equal(where.attend(inputs, shape.geometry)[:, here], where.attend(changed, shape.geometry)[:, here])


def check_past_outputs_ignore_future_inputs(shape: Shape, row: int, where: Where, *, magnitude: float = 1.0) -> None:
    """Check (b): the gradient of outputs up to `row` with respect to anything after `row` is exactly 0, for numbers of any `magnitude`."""
    inputs = where.inputs(shape)
    if magnitude != 1.0:
        inputs = _perturbed(inputs, shape, row, magnitude)
    inputs = inputs.with_grad()
    where.attend(inputs, shape.geometry)[:, : row + 1].sum().backward()
    for x, later in zip(inputs.tensors, _later(shape, row), strict=True):
        assert x.grad is not None
        assert not x.grad[:, later.to(x.device)].any()


def check_past_gradients(shape: Shape, row: int, where: Where, *, magnitude: float = 1.0) -> None:
    """Check (c): with dO = 0 after `row`, gradients up to `row` do not depend on tokens after it, and gradients after it are exactly 0.

    The tokens after `row` change to numbers of any `magnitude`.
    """
    inputs = where.inputs(shape)
    weights = torch.randn(inputs.q.shape[:-1], generator=torch.Generator().manual_seed(5)).to(inputs.q)
    weights[:, row + 1 :] = 0
    gradients = []
    for given in (inputs, _perturbed(inputs, shape, row, magnitude)):
        leaves = given.with_grad()
        (where.attend(leaves, shape.geometry) * weights.unsqueeze(-1)).sum().backward()
        gradients.append([x.grad for x in leaves.tensors])
    for ours, theirs, later in zip(*gradients, _later(shape, row), strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
        assert not theirs[:, later.to(theirs.device)].any()


def check_heads_permute_within_groups(shape: Shape, where: Where) -> None:
    """Check that permuting the query heads of a group permutes the outputs, and does not change the chosen blocks, except at near ties."""
    inputs = where.inputs(shape)
    size = shape.num_heads // shape.num_kv_heads
    generator = torch.Generator().manual_seed(shape.seed)
    order = torch.cat([g * size + torch.randperm(size, generator=generator) for g in range(shape.num_kv_heads)]).to(inputs.q.device)
    permuted = inputs._replace(q=inputs.q[:, :, order], gates=inputs.gates[:, :, order])
    far = ~_near_ties(inputs, shape)
    rows = far.all(-1)
    assert torch.equal(where.select(inputs, shape.geometry)[far], where.select(permuted, shape.geometry)[far])
    ours, theirs = where.attend(permuted, shape.geometry), where.attend(inputs, shape.geometry)[:, :, order]
    _assert_close(ours[rows], theirs[rows], where)


def check_packed_equals_separate(shape: Shape, where: Where) -> None:
    """Check that packed sequences give the same outputs and gradients as each sequence alone."""
    packed = where.inputs(shape).with_grad()
    weights = torch.randn(packed.q.shape[:-1], generator=torch.Generator().manual_seed(5)).to(packed.q)
    out = where.attend(packed, shape.geometry)
    (out * weights.unsqueeze(-1)).sum().backward()
    token, block = 0, 0
    for alone in unpacked(shape):
        rows = (slice(token, token + alone.total), slice(block, block + alone.num_blocks))
        cuts = [rows[0] if index in TOKEN_TENSORS else rows[1] for index in range(8)]
        single = Inputs.of(x[:, cut] for x, cut in zip(packed.tensors, cuts, strict=True)).with_grad()
        own = where.attend(single, shape.geometry)
        (own * weights[:, rows[0], :, None]).sum().backward()
        _assert_close(out[:, rows[0]], own, where)
        for x, y, cut, product in zip(packed.tensors, single.tensors, cuts, _products(packed, weights), strict=True):
            assert x.grad is not None
            assert y.grad is not None
            _assert_close(x.grad[:, cut], y.grad, where, product)
        token, block = rows[0].stop, rows[1].stop
    for x in packed.tensors[1:3]:
        assert x.grad is not None
        assert not x.grad[:, block:].any(), "surplus blocks are never read, so their gradient is 0"


def check_steps_equal_whole(shape: Shape, cuts: tuple[int, ...], where: Where) -> None:
    """Check that steps over stores, which already hold the steps' tokens, give the same outputs as one pass.

    Rows of a store after the tokens are NaN.
    """
    inputs = where.inputs(shape)
    whole = where.attend(inputs, shape.geometry)
    bounds = sorted({0, shape.num_queries, *(cut for cut in cuts if cut < shape.num_queries)})
    pieces = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        later = [mask.to(inputs.q.device)[None, :, None, None] for mask in _later(shape, stop - 1)]
        stores = [x.masked_fill(mask, float("nan")) for x, mask in zip(inputs.tensors, later, strict=True)]
        step = Inputs.of([inputs.q[:, start:stop], *stores[1:7], inputs.gates[:, start:stop]])
        query_start = torch.full((shape.batch,), start, dtype=torch.int32, device=where.device)
        pieces.append(where.attend(step, shape.geometry, query_start=query_start))
    _assert_close(torch.cat(pieces, 1), whole, where)


def check_mixed_steps(shape: Shape, where: Where) -> None:
    """Check a step whose sequences have different positions and numbers of rows; invalid rows must give 0."""
    inputs = where.inputs(shape)
    whole = where.attend(inputs, shape.geometry)
    length, rows = shape.num_queries, max(1, shape.num_queries // 2)
    generator = torch.Generator().manual_seed(shape.seed)
    query_start = torch.randint(0, length - rows + 1, (shape.batch,), generator=generator, dtype=torch.int32)
    query_count = torch.randint(0, rows + 1, (shape.batch,), generator=generator, dtype=torch.int32)
    index = query_start.long().unsqueeze(1) + torch.arange(rows)
    batch = torch.arange(shape.batch).unsqueeze(1)
    step = inputs._replace(q=inputs.q[batch, index], gates=inputs.gates[batch, index])
    placed = {"query_start": query_start.to(where.device), "query_count": query_count.to(where.device)}
    out = where.attend(step, shape.geometry, **placed)
    for b in range(shape.batch):
        count, start = int(query_count[b]), int(query_start[b])
        _assert_close(out[b, :count], whole[b, start : start + count], where)
        assert not out[b, count:].any()


def check_batch_permutes(shape: Shape, where: Where) -> None:
    """Check that permuting the batch permutes the outputs."""
    inputs = where.inputs(evolve(shape, batch=3))
    order = torch.tensor([2, 0, 1], device=inputs.q.device)
    permuted = Inputs.of(x[order] for x in inputs.tensors)
    _assert_close(where.attend(permuted, shape.geometry), where.attend(inputs, shape.geometry)[order], where)


def check_zero_gate_is_an_absent_branch(shape: Shape, where: Where) -> None:
    """Check that a branch whose gate is 0 gives exactly the same sum as an absent branch."""
    inputs = where.inputs(shape)
    for column, absent in ((0, ("v_cmp",)), (1, ("k_slc", "v_slc")), (2, ("k_win", "v_win"))):
        gates = inputs.gates.clone()
        gates[..., column] = 0
        closed = where.attend(inputs._replace(gates=gates), shape.geometry)
        values: Any = {**dict(zip(Inputs._fields, where.tensors(inputs), strict=False)), **dict.fromkeys(absent)}
        without = attention.nsa_attention(**values, geometry=shape.geometry, cu_seqlens=inputs.cu_seqlens, backend=where.backend)
        assert torch.equal(closed, without)


def check_equals_dense(shape: Shape, where: Where) -> None:
    """Check that each branch equals dense causal attention: sliding with w >= S, selected with n * l' >= S, compressed with l = d = 1."""
    length = shape.num_queries
    covering = evolve(shape.geometry, window_size=max(length, 1), num_selected_blocks=-(-length // shape.geometry.selection_block_size) + 3)
    inputs = where.inputs(evolve(shape, geometry=covering))
    options: dict[str, Any] = {"geometry": covering, "backend": where.backend}
    window = attention.sliding_window_attention(inputs.q, inputs.k_win, inputs.v_win, **options)
    _assert_close(window, naive.dense_attention(inputs.q, inputs.k_win, inputs.v_win), where)
    block_indices = where.select(inputs, covering)
    selected = attention.selected_attention(inputs.q, inputs.k_slc, inputs.v_slc, block_indices, **options)
    _assert_close(selected, naive.dense_attention(inputs.q, inputs.k_slc, inputs.v_slc), where)
    unit = BlockGeometry(1, 1, 4, 3, 0, 1, 4)
    compressed = attention.compressed_attention(inputs.q, inputs.k_win, inputs.v_win, geometry=unit, backend=where.backend)
    _assert_close(compressed, naive.dense_attention(inputs.q, inputs.k_win, inputs.v_win), where)


def check_agrees_with_oracle(shape: Shape, where: Where) -> None:
    """Check that outputs and the gradients of q, every k and v, and the gates equal the float64 oracle's, except in rows that are near ties."""
    inputs = where.inputs(shape)
    rows = ~_near_ties(inputs, shape).any(-1)
    weights = torch.randn(inputs.q.shape[:-1], generator=torch.Generator().manual_seed(5)).to(inputs.q)
    weights[~rows] = 0
    ours, exact = inputs.with_grad(), inputs.to(torch.float64).with_grad()
    out = where.attend(ours, shape.geometry)
    expected = naive.nsa_attention(*where.tensors(exact), geometry=shape.geometry, cu_seqlens=exact.cu_seqlens)
    _assert_close(out[rows], expected[rows], where)
    (out * weights.unsqueeze(-1)).sum().backward()
    (expected * weights.double().unsqueeze(-1)).sum().backward()
    for x, y, product in zip(ours.tensors, exact.tensors, _products(exact, weights), strict=True):
        assert x.grad is not None
        assert y.grad is not None
        _assert_close(x.grad, y.grad, where, product)


def _products(inputs: Inputs, weights: Tensor) -> tuple[float, ...]:
    """Return for each tensor the largest product that its gradient is a sum of, if dO is `weights` in every column.

    The gradients of q and k are sums of products with dS = P (dP - delta). dP - delta is exactly 0 where a query reads one key, but its rounding
    error follows dP. So dS counts as the largest |dP|. The other gradients count as sums of products around 1.
    """
    q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = inputs.tensors
    of_scores = largest(weights) * largest(gates) * max(largest(v.sum(-1)) for v in (v_cmp, v_slc, v_win)) * q.shape[-1] ** -0.5
    of_q, of_k = of_scores * max(map(largest, (k_cmp, k_slc, k_win))), of_scores * largest(q)
    return of_q, of_k, 1.0, of_k, 1.0, of_k, 1.0, 1.0


def _near_ties(inputs: Inputs, shape: Shape) -> Tensor:
    """Return bool `(B, S, G)`: the near ties, in which outputs may differ.

    Raises:
        AssertionError: if so many rows are near ties that few would be compared.
    """
    exact = inputs.to(torch.float64)
    options: dict[str, Any] = {"geometry": shape.geometry, "cu_seqlens": exact.cu_seqlens}
    lse = naive.compressed_attention(exact.q, exact.k_cmp, exact.v_cmp, **options).lse
    margin = naive.selection_margin(exact.q, exact.k_cmp, lse, **options)
    # float64 and float32 have a fixed margin
    is_low = inputs.q.dtype not in NEAR_TIE
    highest = naive.importance(exact.q, exact.k_cmp, lse, **options).amax(-1) if is_low else margin
    # a margin of exactly 0, as between blocks of importance 0, is not a near tie: every backend chooses the lower block
    near = (margin <= near_tie_margin(highest, inputs.q.dtype)) & (margin > 0)
    rows = Comparable(int((margin < float("inf")).sum()), int(near.sum()))
    assert rows.are_enough, f"{rows.near_ties} of {rows.decided} choices are too close to call; draw another shape or seed"
    return near


def _assert_close(actual: Any, expected: Any, where: Where, product: float = 1.0) -> None:
    pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else ((actual, expected),)
    for ours, theirs in pairs:
        error, limit = max_error(ours, theirs), allowed_error(theirs, where.dtype, product=product)
        assert error <= limit, f"off by {error:.2e} (allowed: {limit:.2e})"
